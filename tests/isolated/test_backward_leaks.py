"""Rule 21: covered backward passes leave nothing behind, and what is not covered as it was."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import random
import signal
import sys
import threading
import time
import timeit
import tracemalloc
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, cast

import pytest
import torch
from flags import state
from test_backward import V, W, apply, covering, products_of_backward
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from watch import flags, wrong

from precision_scope import _covering, _torch_autograd, matmul_precision
from precision_scope._entries import TAG
from precision_scope._ledger import ledger

KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")


def records() -> bool:
    """Tell whether this thread's operators come by the recorders."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(KEY))


def tag(tensor: torch.Tensor) -> int | None:
    """Return the tag of the node that a tensor comes from."""
    node: Any = tensor.grad_fn
    found: int | None = node.metadata.get(TAG)
    return found


def assert_it_still_covers() -> None:
    """Check that a new covering scope does what it should, and records no longer than it must."""
    with covering():
        product = W @ V
    seen = products_of_backward(product)
    assert len(seen) == 2
    assert wrong(seen, "medium") == []
    assert not records()


def training_step() -> None:
    """Go forward and backward through two layers and a custom function."""
    with covering("medium"):
        hidden = (W @ V).relu()
        with matmul_precision("highest"):
            loss = (hidden @ V).pow(2).mean()
    loss.backward()


# Errors and interrupts.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_raises(error: type[BaseException]) -> None:
    """Whatever a node raises, flags and later passes are as they should be."""

    def fail(_: torch.Tensor) -> None:
        raise error

    before = state()
    for _ in range(20):
        with covering():
            product = W @ V
            failing = product * 2
        failing.register_hook(fail)
        with pytest.raises(error):
            failing.sum().backward()
        assert state() == before
    seen = products_of_backward(product)
    assert wrong(seen, "medium") == []
    assert_it_still_covers()


def test_a_product_that_raises_in_the_pass() -> None:
    """An operator that fails between two levels leaves neither."""

    class Mismatch(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, a: torch.Tensor) -> torch.Tensor:
            return a @ V

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient @ torch.ones(5)

    before = flags()
    with covering():
        result: Any = apply(Mismatch, W)
    with pytest.raises(RuntimeError, match="size mismatch"):
        result.sum().backward()
    assert flags() == before
    assert_it_still_covers()


def test_an_operator_that_raises_inside() -> None:
    """It raises what it always does, and the next one is recorded again."""
    failing: list[Callable[[], Any]] = [
        lambda: W.view(5, 5),
        lambda: W[100],
        lambda: W + "text",  # type: ignore[operator]
        lambda: torch.linalg.cholesky(-torch.eye(3)),
        lambda: torch.empty(10**15),
    ]
    for fail in failing:
        with pytest.raises(Exception) as plain:  # noqa: PT011 -- whatever it is
            fail()
        with covering(), pytest.raises(plain.type) as covered:
            fail()
        assert plain.type is covered.type
        assert str(plain.value).partition("\n")[0] == str(covered.value).partition("\n")[0]
        with covering():
            with pytest.raises(plain.type):
                fail()
            assert tag(W * 2) == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.usefixtures("uninterrupted_collections")
def test_interrupts_at_any_moment() -> None:
    """Hundreds of exceptions thrown by signal handlers into training steps leave no trace."""

    class Interrupted(BaseException):
        pass

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    training_step()
    before, rng, hits = state(), random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for hit in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(50e-6, 1500e-6))
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:  # a finaliser of torch's may swallow one
                    training_step()
            except Interrupted:
                hits += 1
            assert ledger.live_scopes() == [], hit
            assert state() == before, hit
            if hit % 20 == 0:
                assert_it_still_covers()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits > 390
    assert_it_still_covers()


# Memory.


def test_a_graph_goes_when_its_last_reference_goes() -> None:
    """Nothing of the package keeps tensors or nodes, not even for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with covering():
            product = W @ V
            loss = product.relu().sum()
        references = [weakref.ref(tensor) for tensor in (product, loss)]
        del product, loss
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_memory_is_flat_over_thousands_of_scopes() -> None:
    """Passes that run, and graphs that are dropped, leave nothing behind."""

    def work(times: int) -> None:
        for number in range(times):
            with covering("medium" if number % 2 else "high"):
                loss = (W @ V).relu().sum()
            if number % 3:
                loss.backward()

    work(200)
    gc.collect()
    tracemalloc.start()
    try:
        work(200)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        work(2000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert len(_covering._here.entries) <= 1
    assert not _covering.unfinished


# What is not covered.


def test_nothing_runs_twice() -> None:
    """An operator that fails below, with a number among its operands, has run once."""

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            function(*args, **(kwargs or {}))
            raise RuntimeError("after")

    tensor, failing = torch.ones(2), cast("Any", Failing)
    with covering(), failing(), pytest.raises(RuntimeError, match="after"):
        tensor.mul_(2)
    assert tensor.tolist() == [2, 2]


def test_operators_outside_come_by_nothing() -> None:
    """Once the scope has ended, its thread records no more; others never did."""
    found: list[bool] = []
    with covering():
        assert records()
        thread = threading.Thread(target=lambda: found.append(records()))
        thread.start()
        thread.join()
    assert not records()
    assert found == [False]
    with covering():
        product = W @ V
    product.sum().backward()
    assert not records()


def test_a_pass_does_not_record_what_it_need_not() -> None:
    """The backward operators of a covered forward come by nothing either."""
    found: list[bool] = []
    with covering():
        product = W @ V
    product.register_hook(lambda _: found.append(records()))
    product.sum().backward()
    assert found == [False]


def test_a_scope_that_is_left_behind_ends() -> None:
    """A task that enters one by hand and goes away takes it along, as with a plain scope."""
    scope = covering()

    async def task() -> None:
        scope.__enter__()
        assert tag(W * 2) == 2

    asyncio.run(task())
    gc.collect()
    assert ledger.live_scopes() == []
    W * 2
    assert not records()


def test_many_nested_scopes_cost_no_more_each() -> None:
    """What is looked up for each operator is not searched for."""

    def operators_at(depth: int) -> float:
        with contextlib.ExitStack() as stack:
            stack.enter_context(covering())
            for _ in range(depth):
                stack.enter_context(matmul_precision("medium"))
            return min(timeit.repeat(lambda: W * V, number=20, repeat=20))

    assert operators_at(3000) < 3 * operators_at(1)


def test_nodes_outside_have_no_tag() -> None:
    """Also those recorded in the same thread, before and after."""
    outside = [W @ V]
    with covering():
        inside = W @ V
    outside += [W @ V, inside * 2]
    assert tag(inside) == 2
    assert [tag(tensor) for tensor in outside] == [None] * 3


# What runs inside is what ran before.


def shapes(function: Callable[[torch.Tensor], Any]) -> Any:
    """Trace a function, with sizes that depend on its input."""
    traced = torch.jit.trace(function, torch.randn(4, 4))
    return traced(torch.randn(6, 4)).shape


class Log(TorchFunctionMode):
    """Logs the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def logged() -> list[str]:
    """Return the names of the functions that a mode sees."""
    with Log() as log:
        (W @ V).relu().sum()
    return list(log.names)


def flops() -> int:
    """Count operations with a mode that dispatches in Python."""
    with FlopCounterMode(display=False) as counter:
        nn.Linear(6, 6)(W)
    return int(counter.get_total_flops())


def copies() -> list[Any]:
    """Copy and wrap tensors in the ways that go through aliases."""
    parameter = nn.Parameter(W.detach())
    model = copy.deepcopy(nn.Linear(6, 6))
    return [
        type(nn.Parameter(parameter)),
        type(copy.deepcopy(parameter)),
        type(model.weight),
        parameter.is_leaf,
        parameter.data_ptr() == W.data_ptr(),
        W.detach().requires_grad,
    ]


def promotions() -> list[torch.dtype]:
    """Mix tensors with numbers."""
    numbers: list[Any] = [True, 2, 2.5]
    tensors = [torch.ones(2, dtype=dtype) for dtype in (torch.int32, torch.float16, torch.bfloat16)]
    return [(tensor * number).dtype for tensor in tensors for number in numbers]


def anomaly() -> bool:
    """Tell whether anomaly mode, which uses the same place, keeps its traceback there."""
    with torch.autograd.detect_anomaly(check_nan=False):
        node: Any = (W @ V).grad_fn
    return any("in anomaly" in line for line in node.metadata["traceback_"])


def graphs() -> list[str]:
    """Trace into graphs."""

    def function(a: torch.Tensor) -> torch.Tensor:
        return (a @ a).relu().sum()

    return [
        str(make_fx(function, tracing_mode=mode, pre_dispatch=early)(torch.ones(4, 4)).code)
        for mode in ("real", "symbolic")
        for early in (False, True)
    ]


def exported() -> str:
    """Export a model."""
    return str(torch.export.export(nn.Linear(6, 6), (torch.ones(2, 6),)).graph)


SAME: dict[str, Callable[[], Any]] = {
    "jit.trace": lambda: shapes(lambda a: a.view(a.size(0) * 2, -1) @ torch.ones(a.size(1) // 2, 3)),
    "function modes": logged,
    "dispatch modes": flops,
    "copies and parameters": copies,
    "numbers": promotions,
    "make_fx": graphs,
    "export": exported,
    "cond": lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (W.detach(),)).sum() < 10,
    "item": lambda: [torch.ones(()).item(), bool(torch.ones(())), torch.ones(2).tolist()],
    "numpy": lambda: torch.ones(2, 2).numpy().sum(),
    "inference mode": lambda: torch.inference_mode()(torch.mm)(W, V).grad_fn,
    "nested tensors": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).unbind()[1].shape,
    "meta": lambda: torch.ones(2, 2, device="meta").mm(torch.ones(2, 2, device="meta")).shape,
    "anomaly mode": anomaly,
}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace",
    "ignore:Anomaly",
    "ignore:The PyTorch API of nested",
    "ignore:.*jit.*:DeprecationWarning",
)
@pytest.mark.parametrize("name", SAME)
def test_what_runs_inside_does_what_it_always_does(name: str) -> None:
    """Recording changes no result, type or graph."""
    outside = SAME[name]()
    with covering():
        assert SAME[name]() == outside


def test_operators_that_take_functions_and_are_defined_later() -> None:
    """Those that look for dispatch keys by themselves pass the recorders' by."""
    with covering():
        pass

    base: Any = torch._ops.HigherOrderOperator

    class Twice(base):  # type: ignore[misc]
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

    twice: Any = Twice("precision_scope_tests_twice")
    key: Any = torch._C.DispatchKey

    def run(function: Callable[[torch.Tensor], torch.Tensor], operand: torch.Tensor) -> torch.Tensor:
        return function(function(operand))

    for name in ("Autograd", "CompositeExplicitAutograd"):
        twice.py_impl(getattr(key, name))(run)

    with covering():
        assert tag(twice(lambda a: a @ V, W)) == 2


def test_operators_that_are_defined_later_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an extension that is imported after the first covering scope, say."""
    with covering():
        pass
    library = torch.library.Library("precision_scope_tests", "DEF")
    library.define("later(Tensor a) -> Tensor")
    name = "precision_scope_tests::later"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "TESTING_ONLY_GenericMode")
    monkeypatch.setitem(sys.modules, "precision_scope_tests", ModuleType("precision_scope_tests"))
    with covering():
        pass
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "TESTING_ONLY_GenericMode")


def test_looking_for_new_operators_is_not_done_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take milliseconds for each scope."""
    with covering():
        pass
    monkeypatch.setattr(_torch_autograd, "_C", None)
    with covering():
        pass
