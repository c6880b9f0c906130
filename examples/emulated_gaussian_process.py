"""A step of a Gaussian process that fails on a GPU with TF32: seen on a CPU, and repaired by a decorator.

torch.cdist multiplies matrices to compute distances. Where these are small
differences of large numbers, what TF32 loses makes the covariance indefinite.
"""

from collections.abc import Callable

import torch

from precision_scope import enable_emulation, matmul_precision


def outcome(step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    points, between = torch.linspace(0, 9, 60)[:, None], torch.linspace(1, 8, 40)[:, None]
    try:
        error = (step(points, points.sin(), between) - between.sin()).abs().max()
    except RuntimeError:  # torch.linalg.LinAlgError
        return "the covariance is not positive-definite"
    return "right" if error < 0.01 else f"off by {error:.2f}"


def predict(points: torch.Tensor, values: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    noise = 1e-3 * torch.eye(len(points))
    factor = torch.linalg.cholesky((-torch.cdist(points, points).square() / 2).exp() + noise)
    weights = torch.cholesky_solve(values, factor)
    return (-torch.cdist(between, points).square() / 2).exp() @ weights


repaired = matmul_precision("highest")(predict)

enable_emulation(like="cuda")
print("in float32:", outcome(predict))
with matmul_precision("high"):
    print("in TF32:   ", outcome(predict))
    print("repaired:  ", outcome(repaired))
