"""``torch.compile(backend="openxla")``: a program for each level, forward and backward."""

from __future__ import annotations

import threading

import pytest
import torch
from lowering import SETTINGS, Xla

from precision_scope import matmul_precision
from precision_scope._ledger import ledger

pytestmark = pytest.mark.usefixtures("without_compiled_code")


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("order", [list(SETTINGS), list(SETTINGS)[::-1]])
def test_forward_and_backward_are_compiled_for_each_level(
    xla: Xla, order: list[str], fullgraph: bool
) -> None:
    """Once each; what is written in place is written once each time."""
    size = 17 + 2 * order.index("highest") + fullgraph

    def compute(x: torch.Tensor, weight: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return (x @ weight).relu()

    compiled = torch.compile(compute, backend="openxla", fullgraph=fullgraph)
    x, weight = torch.randn(4, size), torch.randn(size, 3)
    on_device = x.to(xla.device), weight.to(xla.device).requires_grad_()
    count = torch.zeros(1, device=xla.device)
    (expected,) = torch.autograd.grad(compute(x, weight.requires_grad_(), torch.zeros(1)).sum(), weight)
    for calls, level in enumerate(order * 2, 1):
        with matmul_precision(level):
            (gradient,) = torch.autograd.grad(compiled(*on_device, count).sum(), on_device[1])
            torch.testing.assert_close(gradient.cpu(), expected)
        assert count.item() == calls
        assert xla.compiled() == ([SETTINGS[level]] * 2 if calls <= 3 else [])


def test_outside_scopes_it_is_at_the_default(xla: Xla) -> None:
    """Also when it was compiled inside of one first."""
    compiled = torch.compile(lambda a: a @ a, backend="openxla")
    a = xla.tensor(23, 23)
    with matmul_precision("highest"):
        compiled(a).cpu()
    compiled(a).cpu()
    assert xla.compiled() == ["highest", "default"]


def test_a_scope_inside_of_compiled_code(xla: Xla) -> None:
    """It has its effect on every call."""

    def compute(a: torch.Tensor) -> torch.Tensor:
        b = a + 1
        with matmul_precision("highest"):
            c = b @ a
        return c @ a

    compiled = torch.compile(compute, backend="openxla")
    for call in range(3):
        compiled(xla.tensor(29, 29)).cpu()
        assert xla.compiled() == (["highest", "default"] if call == 0 else [])


def test_threads_that_disagree(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one compiles for less than the process runs at is not used for the other."""
    compiled = torch.compile(lambda a: a @ a, backend="openxla")
    a = xla.tensor(31, 31)
    with matmul_precision("medium"):
        compiled(a).cpu()
    entered, left = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with matmul_precision("highest"):
            entered.set()
            left.wait(60)

    monkeypatch.setattr(ledger, "_warned", True)
    thread = threading.Thread(target=stay_inside)
    thread.start()
    entered.wait(60)
    with matmul_precision("medium"):
        assert xla.setting() == "highest"
        compiled(a).cpu()
    xla.compiled()
    with matmul_precision("highest"):
        compiled(a).cpu()
    left.set()
    thread.join()
    assert xla.compiled() == ["highest"]
