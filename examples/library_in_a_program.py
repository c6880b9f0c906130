"""A library that nests scopes in its caller's program and leaves no trace.

``precision=None`` asks for nothing: the caller's own level stays in force.
"""

import torch

from precision_scope import Float32MatmulPrecision, get_float32_matmul_precision, matmul_precision


def gram_matrix(x: torch.Tensor, *, precision: Float32MatmulPrecision | None = None) -> torch.Tensor:
    """Return ``x.T @ x``, by default at whatever precision the caller runs at."""
    with matmul_precision(precision):
        print(f"  the library computes at {get_float32_matmul_precision()!s}")
        return x.T @ x


x = torch.randn(64, 64)
torch.set_float32_matmul_precision("high")  # the caller's own choice
print("the caller's choice:")
gram_matrix(x)
print("asked for more:")
gram_matrix(x, precision=Float32MatmulPrecision.HIGHEST)
print("afterwards:", torch.get_float32_matmul_precision())
