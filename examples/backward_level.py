"""Which level a backward pass runs at.

A scope covers what runs inside it. A backward pass that is called after the
scope has ended runs at the level in force then: call it inside to cover it, or
make the scope with ``backward=True``.
"""

import torch

from precision_scope import get_float32_matmul_precision, matmul_precision


def product(a: torch.Tensor) -> torch.Tensor:
    """Multiply, and tell at which level each pass runs."""
    print("  forward at", get_float32_matmul_precision())
    result = a @ a
    result.register_hook(lambda _grad: print("  backward at", get_float32_matmul_precision()))
    return result.sum()


a = torch.randn(8, 8, requires_grad=True)

print("backward() after the scope:")
with matmul_precision("medium"):
    loss = product(a)
loss.backward()

print("backward() after a scope with backward=True:")
with matmul_precision("medium", backward=True):
    loss = product(a)
loss.backward()

print("backward() inside the scope:")
with matmul_precision("medium"):
    product(a).backward()
