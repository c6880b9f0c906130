"""Which level a backward pass runs at.

A scope covers what runs inside it. A backward pass that is called after the
scope has ended runs at the level in force then; call it inside to cover it.
"""

import torch

from precision_scope import get_float32_matmul_precision, matmul_precision


class Product(torch.autograd.Function):
    """A matrix product that tells at which level each pass runs."""

    @staticmethod
    def forward(ctx, a, b):  # type: ignore[no-untyped-def]
        print("  forward at", get_float32_matmul_precision())
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        print("  backward at", get_float32_matmul_precision())
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


a = torch.randn(8, 8, requires_grad=True)
b = torch.randn(8, 8, requires_grad=True)

print("backward() after the scope:")
with matmul_precision("medium"):
    loss = Product.apply(a, b).sum()
loss.backward()

print("backward() inside the scope:")
with matmul_precision("medium"):
    Product.apply(a, b).sum().backward()
