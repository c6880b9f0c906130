"""Which level a backward pass runs at.

A scope covers what runs inside it. A backward pass that is called after the
scope has ended runs at the level in force then: call it inside to cover it, or
make the scope with ``backward=True``.
"""

from typing import Any

import torch

from precision_scope import get_float32_matmul_precision, matmul_precision


class Product(torch.autograd.Function):
    """A matrix product that tells at which level each pass runs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        print("  forward at", get_float32_matmul_precision())
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("  backward at", get_float32_matmul_precision())
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


product: Any = Product.apply
a = torch.randn(8, 8, requires_grad=True)
b = torch.randn(8, 8, requires_grad=True)

print("backward() after the scope:")
with matmul_precision("medium"):
    loss = product(a, b).sum()
loss.backward()

print("backward() after a scope with backward=True:")
with matmul_precision("medium", backward=True):
    loss = product(a, b).sum()
loss.backward()

print("backward() inside the scope:")
with matmul_precision("medium"):
    product(a, b).sum().backward()
