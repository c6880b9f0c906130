"""Levels on a CUDA GPU, told by the error of the products: TF32's is a thousand times that of float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from precision_scope import matmul_precision, set_float32_matmul_precision

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a CUDA GPU with TF32",
)

TF32 = {"highest": False, "high": True, "medium": True}


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two random matrices on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(256, 256, device="cuda", generator=generator) for _ in range(2))
    return a, b


def is_tf32(product: torch.Tensor, exact: torch.Tensor) -> bool:
    """Tell from its error against float64 how a product was computed."""
    error = float((product.double() - exact).norm() / exact.norm())
    assert error < 1e-6 or 1e-4 < error < 1e-2, error
    return error > 1e-4


def product_is_tf32() -> bool:
    """Multiply, and tell how."""
    a, b = operands()
    return is_tf32(a @ b, a.double() @ b.double())


@pytest.mark.parametrize("level", TF32)
def test_a_level_takes_effect(level: str) -> None:
    """As a with-block, as a decorator and as the default; and ends with the scope."""
    assert not product_is_tf32()
    with matmul_precision(level):
        assert product_is_tf32() is TF32[level]
        with matmul_precision("highest"):
            assert not product_is_tf32()
        assert product_is_tf32() is TF32[level]
    assert matmul_precision(level)(product_is_tf32)() is TF32[level]
    assert not product_is_tf32()
    set_float32_matmul_precision(level)
    try:
        assert product_is_tf32() is TF32[level]
    finally:
        set_float32_matmul_precision("highest")
        for backend in ("cuda", "mkldnn"):
            if hasattr(torch._C, "_set_fp32_precision_setter"):
                torch._C._set_fp32_precision_setter(backend, "matmul", "none")


def test_a_backward_pass_runs_at_the_level_in_force() -> None:
    """Autograd's own thread for the GPU follows the scope that backward() is called in."""
    a, b = operands()
    exact = torch.ones_like(a).double() @ b.double().T
    for forward, backward in [("highest", "high"), ("high", "highest")]:
        x = a.clone().requires_grad_()
        with matmul_precision(forward):
            loss = (x @ b).sum()
        with matmul_precision(backward):
            loss.backward()
        assert x.grad is not None
        assert is_tf32(x.grad, exact) is TF32[backward]


def test_a_graph_keeps_the_level_it_was_captured_at() -> None:
    """Capture reads the flags; replay does not."""
    a, b = operands()
    exact = a.double() @ b.double()
    for level in ("high", "highest"):
        with matmul_precision(level):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                a @ b  # warm-up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = a @ b
        with matmul_precision("highest" if level == "high" else "high"):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert is_tf32(out, exact) is TF32[level]


def test_convolutions_are_left_alone() -> None:
    """They follow their own setting, which no scope touches."""
    image = torch.randn(1, 8, 32, 32, device="cuda")
    layer = nn.Conv2d(8, 8, 3).cuda()
    expected = layer(image)
    for level in TF32:
        with matmul_precision(level):
            torch.testing.assert_close(layer(image), expected, rtol=0, atol=0)
