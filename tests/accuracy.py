"""Random operands, how far off their products are, and so how they were computed."""

from __future__ import annotations

import math

import torch

ERRORS = {
    ("cuda", "high"): 3e-4,
    ("cuda", "medium"): 3e-4,
    ("tpu", "high"): 4e-6,
    ("tpu", "medium"): 2e-3,
}
"""The errors of emulated hardware, by the level, as the documentation has them."""

FLOAT32_ERROR = 3e-7

_CLASSES = {
    "float32": FLOAT32_ERROR,
    "bfloat16_3x": ERRORS["tpu", "high"],
    "tf32": ERRORS["cuda", "high"],
    "bfloat16": ERRORS["tpu", "medium"],
}


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a random float32 tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(product: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of what is exact."""
    return float((product.detach().double() - exact).norm() / exact.norm())


def class_of(product: torch.Tensor, exact: torch.Tensor) -> str:
    """Tell from its error how a product of random matrices was computed."""
    logarithm = math.log(max(error(product, exact), 1e-12))
    return min(_CLASSES, key=lambda name: abs(logarithm - math.log(_CLASSES[name])))
