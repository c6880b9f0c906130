"""Rule 31 in compiled code: the products that it leaves to torch's operators are emulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import BACKENDS, MARKS, Graphs
from torch import nn
from watch import watching

from precision_scope import enable_emulation, matmul_precision

pytestmark = [*MARKS, pytest.mark.usefixtures("plain_afterwards")]

A, B = torch.randn(48, 48), torch.randn(48, 48)
LEVELS = ("high", "highest", "medium", "high")


def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, with something before and after."""
    return torch.relu(a + 1) @ b - 1


def at(level: str, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function computes in a scope, and its gradients there."""
    leaves = [arg.clone().requires_grad_() for arg in args]
    with matmul_precision(level):
        result = function(*leaves)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
    return [result.detach(), *gradients]


@pytest.mark.parametrize("like", ["cuda", "tpu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_products_are_emulated(backend: str, like: Any) -> None:
    """Forward and backward, at each level, without being compiled again for it."""
    plain = at("highest", model, A, B)
    graphs = Graphs(backend)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for level in LEVELS:
        at(level, compiled, A, B)
    count = len(graphs.all)
    enable_emulation(like)
    for level in LEVELS:
        found, expected = at(level, compiled, A, B), at(level, model, A, B)
        for one, other, exact in zip(found, expected, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert bool((one - exact).norm() > 1e-6 * exact.norm()) is (level != "highest")
    assert len(graphs.all) == count


def test_scopes_inside_compiled_code() -> None:
    """A decorated call runs at its own level there."""
    repaired = matmul_precision("highest")(model)

    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(a, b), repaired(a, b)

    enable_emulation("cuda")
    expected = model(A, B)
    compiled = torch.compile(both, backend="aot_eager")
    for _ in range(3):
        with matmul_precision("high"):
            rough, exact = compiled(A, B)
        torch.testing.assert_close(exact, expected)
        assert (rough - expected).norm() > 1e-5 * expected.norm()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize(("like", "level"), [("cuda", "high"), ("tpu", "high"), ("tpu", "medium")])
def test_weights_that_a_compiler_has_packed(like: Any, level: str) -> None:
    """Frozen layers, whose weights MKL or oneDNN have packed, multiply by what is rounded."""
    linear, activation = nn.Linear(48, 32), nn.GELU()
    layer = nn.Sequential(linear, activation).eval()
    with torch.no_grad(), matmul_precision(level):
        plain = layer(A)
        with torch._inductor.config.patch(freezing=True):
            compiled = torch.compile(layer)
            compiled(A)
        with watching() as seen:
            compiled(A)
            operators = {product.operator for product in seen}
            assert operators in ({"mkl::_mkl_linear"}, {"mkldnn::_linear_pointwise"})
        enable_emulation(like)
        found, expected = compiled(A), layer(A)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - plain).norm() > 1e-6 * plain.norm()
