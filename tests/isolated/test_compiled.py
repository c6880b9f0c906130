"""Rules 17 and 23: with isolation on, compiled code of each thread runs products at the thread's level."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compiled import BACKENDS, MARKS, TELLS_UNSET_FROM_HIGHEST, Graphs
from flags import state
from watch import flags, flags_at, watching, wrong

from precision_scope import matmul_precision
from precision_scope._compilation import _Compilation
from precision_scope._gate import Gate
from precision_scope._ledger import ledger

# Before 2.13 torch compiles again where it meets the flags of another thread's product,
# and that not in two threads at a time.
KNOWS_BACKENDS = torch.__version__ >= "2.13"
LEVELS = ("medium", "highest", "high", None) if KNOWS_BACKENDS else ("medium", "high")

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

A = torch.randn(16, 16)


def product(a: torch.Tensor) -> torch.Tensor:
    """Multiply twice."""
    return torch.relu(a @ a) @ a


def with_block(a: torch.Tensor, level: str | None) -> torch.Tensor:
    """Do so in a scope inside."""
    with matmul_precision(level):
        return product(a)


def decorated(a: torch.Tensor, level: str | None) -> torch.Tensor:
    """Do so in a decorated function."""
    return matmul_precision(level)(product)(a)


def around(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what calls a function in a scope."""

    def call(a: torch.Tensor, level: str | None) -> torch.Tensor:
        with matmul_precision(level):
            return function(a)

    return call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["around", "with-block", "decorated"])
def test_threads_at_their_own_levels(where: str, backend: str) -> None:
    """Around and inside of code that was compiled before: torch compiles in one thread alone."""
    graphs = Graphs(backend)
    compiled = {
        "around": around(torch.compile(product, backend=graphs, fullgraph=True)),
        "with-block": torch.compile(with_block, backend=graphs),
        "decorated": torch.compile(decorated, backend=graphs),
    }[where]
    before = state()
    for level in LEVELS:
        compiled(A, level)
    count = len(graphs.all)
    start = threading.Barrier(len(LEVELS))
    found: dict[int, str | None] = {}

    def work(level: str | None) -> None:
        found[threading.get_ident()] = level
        start.wait(60)
        for _ in range(50):
            compiled(A, level)

    with watching() as seen, ThreadPoolExecutor(len(LEVELS)) as pool:
        list(pool.map(work, LEVELS))
    assert len(found) == len(LEVELS)
    assert len(seen) >= 2 * 50 * len(LEVELS)
    assert len(graphs.all) == count
    for thread, level in found.items():
        assert wrong(seen, level, thread) == []
    assert state() == before


def test_a_call_that_is_not_compiled_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is to be one graph."""
    graphs = Graphs("eager")
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    with monkeypatch.context() as patched:
        patched.setattr(_Compilation, "_choose", lambda *_: False)
        torch.testing.assert_close(compiled(A), product(A))
    assert graphs.all == []
    compiled(A)
    assert len(graphs.all) == 1


@pytest.mark.skipif(not KNOWS_BACKENDS, reason="this torch does not say for which backend it has compiled")
def test_a_product_of_another_thread_while_guards_are_checked() -> None:
    """What does not fit the flags of such a product is compiled for them, once, and not again as it was."""
    gate = ledger.applied.torch_flags
    assert isinstance(gate, Gate)
    main = threading.get_ident()
    inside = threading.Event()

    def until_somebody_waits(_: str) -> None:
        if threading.get_ident() != main:
            inside.set()
            deadline = time.monotonic() + 60
            while not gate.waiting and time.monotonic() < deadline:
                time.sleep(0.001)

    graphs = Graphs("eager")
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    compiled(A)
    for _ in range(3):
        inside.clear()
        thread = threading.Thread(target=matmul_precision("high")(lambda: A @ A))
        with watching(until_somebody_waits) as seen:
            thread.start()
            assert inside.wait(60)
            compiled(A)
            thread.join(60)
        assert wrong(seen, None, main) == []
    assert len(graphs.all) == 2 + TELLS_UNSET_FROM_HIGHEST
    other = Graphs("eager")
    for level in ("highest", "high"):
        with matmul_precision(level):
            torch.compile(product, backend=other, fullgraph=True)(
                A
            )  # what another backend has counts for nothing
    assert len(other.all) == 2


def test_products_of_others_while_a_function_is_compiled() -> None:
    """They run at their own levels before, while and after Dynamo writes to the flags."""
    stop = threading.Event()
    levels: dict[int, str] = {}

    def multiply(level: str) -> None:
        levels[threading.get_ident()] = level
        while not stop.is_set():
            with matmul_precision(level):
                A @ A

    before = state()
    with watching() as seen, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(multiply, level) for level in ("high", "highest")]
        try:
            for size in range(2, 12):
                torch._dynamo.reset()
                with matmul_precision("medium"):
                    torch.compile(product, backend="eager")(torch.eye(size))
        finally:
            stop.set()
        for each in running:
            each.result(60)
    levels[threading.get_ident()] = "medium"
    for thread, level in levels.items():
        assert wrong(seen, level, thread) == []
    assert state() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_covering_scope_inside(backend: str) -> None:
    """The backward pass of what is computed in a with-block inside compiled code keeps its level."""

    def function(a: torch.Tensor) -> torch.Tensor:
        a = a @ A
        with matmul_precision("medium", backward=True):
            a = product(a)
        return a @ A

    compiled = torch.compile(function, backend=backend)
    for call in range(4):
        with watching() as seen, matmul_precision("high"):
            result = compiled(A.clone().requires_grad_())
        if call:  # compiling multiplies, too
            assert [one.before for one in seen] == [
                flags_at(level) for level in ("high", "medium", "medium", "high")
            ]
        with watching() as seen, matmul_precision("highest"):
            result.sum().backward()
        assert [one.before for one in seen] == [
            flags_at(level) for level in ["highest"] + ["medium"] * 4 + ["highest"]
        ]
    assert flags() == flags_at(None)
