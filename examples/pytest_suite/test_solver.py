"""Tests of numerical code with the pytest plug-in: run them with ``pytest -v examples/pytest_suite``."""

import pytest
import torch

from precision_scope import Float32MatmulPrecision, get_float32_matmul_precision, matmul_precision


@matmul_precision("highest")
def fit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Solve by normal equations, which need every bit."""
    assert torch.get_float32_matmul_precision() == "highest"
    solution: torch.Tensor = torch.linalg.solve(a.T @ a, a.T @ b)
    return solution


def test_fit_is_exact_at_every_level(float32_matmul_precision: Float32MatmulPrecision) -> None:
    """The decorator holds, whatever level the caller runs at: one test for each."""
    torch.manual_seed(0)
    a, x = torch.randn(64, 8), torch.randn(8, 1)
    assert torch.allclose(fit(a, a @ x), x, atol=1e-4)
    assert get_float32_matmul_precision() == float32_matmul_precision


@pytest.mark.matmul_precision("medium")
def test_the_marker_sets_the_level() -> None:
    """For this test alone."""
    assert torch.get_float32_matmul_precision() == "medium"


def test_nothing_is_left_behind() -> None:
    """A test that left torch's setting changed would fail, and the next one would not notice."""
    assert torch.get_float32_matmul_precision() == "highest"
