"""A numerically sensitive solve inside a fast model.

The model runs at "medium"; the solve it contains is decorated and stays at
"highest", whatever its callers ask for.
"""

import torch

from precision_scope import get_float32_matmul_precision, matmul_precision

seen: dict[str, str] = {}


@matmul_precision("highest")
def solve_by_normal_equations(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Square the condition number, and so need every bit of the products."""
    seen["solve"] = str(get_float32_matmul_precision())
    solution: torch.Tensor = torch.linalg.solve(a.T @ a, a.T @ b)
    return solution


def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mix features fast, then fit them."""
    seen["features"] = str(get_float32_matmul_precision())
    features = torch.tanh(a @ a.new_ones(a.shape[1], 8).tril())
    return solve_by_normal_equations(features, b)


torch.manual_seed(0)
a, b = torch.randn(256, 32), torch.randn(256, 1)
before = torch.get_float32_matmul_precision()
with matmul_precision("medium"):
    solution = model(a, b)

print(f"features ran at {seen['features']!r}, the solve at {seen['solve']!r}")
print(f"torch's setting before {before!r}, after {torch.get_float32_matmul_precision()!r}")
assert seen == {"features": "medium", "solve": "highest"}
