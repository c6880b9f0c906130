"""Rules 7 and 15: a compilation in one thread undoes no scope of another, and leaves nothing behind.

Dynamo notes a flag when it begins and sets it back when it has traced, much later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import MARKS, Graphs, look, looking
from flags import reset, state
from watch import flags, flags_at

from precision_scope import (
    _compilation,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning"),
]

TIMEOUT = 60
GUARDS_CAN_BE_SEEN = hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")


def product(x: torch.Tensor) -> torch.Tensor:
    """Multiply, and look at the level."""
    return look(x @ x, "product")


class LongCompilation:
    """Another thread that compiles, at a level of its own, until it is told to go on."""

    def __init__(self, level: str | None = None, then: Callable[[], object] = lambda: None) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()
        self._ended, self._leave = threading.Event(), threading.Event()
        self._graphs = Graphs("eager")
        self._level = level
        self._then = then
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._compile)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self._begun.set()
        assert self._go_on.wait(TIMEOUT)
        self._then()
        return self._graphs(graph, inputs)

    def _compile(self) -> None:
        try:
            with matmul_precision(self._level):
                torch.compile(product, backend=self._backend)(torch.eye(2))
                self._ended.set()
                self._leave.wait(TIMEOUT)
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def begin(self) -> LongCompilation:
        """Start, and return when it compiles."""
        self._thread.start()
        assert self._begun.wait(TIMEOUT)
        return self

    def go_on(self) -> None:
        """Have the compilation go on."""
        self._go_on.set()

    def finish(self) -> None:
        """Have the compilation end; its thread stays in its scope."""
        self.go_on()
        assert self._ended.wait(TIMEOUT)

    def end(self) -> None:
        """End the thread, too."""
        self.finish()
        self._leave.set()
        self._thread.join(TIMEOUT)


def test_a_scope_that_ends_meanwhile() -> None:
    """It leaves nothing behind."""
    for level in ("high", "medium"):
        before = state()
        torch._dynamo.reset()
        with matmul_precision(level):
            compilation = LongCompilation().begin()
        compilation.end()
        assert compilation.error is None
        assert state() == before


def test_a_scope_that_begins_meanwhile() -> None:
    """It has its level afterwards, too: the strictest wins."""
    before = state()
    compilation = LongCompilation("high").begin()
    with matmul_precision("highest"):
        assert flags() == flags_at("highest")
        compilation.finish()
        assert compilation.error is None
        assert flags() == flags_at("highest")
    compilation.end()
    assert state() == before


def test_a_scope_that_begins_and_ends_meanwhile() -> None:
    """It is as if it had never been."""
    before = state()
    compilation = LongCompilation("medium").begin()
    with matmul_precision("highest"):
        pass
    compilation.finish()
    assert flags() == flags_at("medium")
    compilation.end()
    assert state() == before


def test_a_level_that_is_set_meanwhile() -> None:
    """It stays set, as the level of a scope and as the process default."""
    with matmul_precision("high"):
        compilation = LongCompilation().begin()
        set_float32_matmul_precision("medium")
        compilation.end()
        assert flags() == flags_at("medium")
    with matmul_precision("high"):
        compilation = LongCompilation().begin()
    try:
        set_float32_matmul_precision("medium")
        compilation.end()
        assert flags() == flags_at("medium")
        assert get_float32_matmul_precision() == "medium"
    finally:
        reset()


def test_a_compilation_that_fails() -> None:
    """What it did is put right as well."""

    def fail() -> None:
        raise ZeroDivisionError

    before = state()
    with matmul_precision("high"):
        compilation = LongCompilation(then=fail).begin()
    compilation.end()
    assert compilation.error is not None
    assert state() == before


def test_a_compilation_inside_of_a_compilation() -> None:
    """Each is seen to by itself, and none keeps the lock."""
    before = state()
    with matmul_precision("high"):
        compilation = LongCompilation(
            then=lambda: torch.compile(product, backend=Graphs("eager"))(torch.eye(3))
        ).begin()
    compilation.end()
    assert compilation.error is None
    assert state() == before
    assert not ledger.lock.is_had()
    entered = threading.Thread(target=matmul_precision("high").__enter__)
    entered.start()
    entered.join(TIMEOUT)
    assert not entered.is_alive()


def test_a_compilation_in_a_scope() -> None:
    """The first call has its level as every other one: older torch would turn medium into high."""
    compiled = torch.compile(product, backend="eager")
    for _ in range(3):
        with matmul_precision("medium"), looking() as seen:
            compiled(torch.eye(2))
            assert flags() == flags_at("medium")
        assert [one.flags for one in seen] == [flags_at("medium")]


@pytest.mark.skipif(not GUARDS_CAN_BE_SEEN, reason="this torch does not call for guards that it builds")
def test_no_scope_begins_between_dynamos_write_and_its_check() -> None:
    """The check would fail the compilation, and the scope would save what Dynamo wrote."""
    before = state()
    entered = threading.Event()

    def enter() -> None:
        with matmul_precision("high"):
            entered.set()

    thread = threading.Thread(target=enter)

    def while_guards_are_built(guards: list[Any]) -> list[bool]:
        thread.start()
        assert not entered.wait(0.3)
        return [True] * len(guards)

    compiled = torch.compile(
        product, backend=Graphs("eager"), options={"guard_filter_fn": while_guards_are_built}
    )
    with looking() as seen:
        compiled(torch.eye(2))
    thread.join(TIMEOUT)
    assert entered.is_set()
    assert len(seen) == 1
    assert state() == before


def test_the_lock_is_not_kept_while_a_graph_is_compiled() -> None:
    """Also not after a graph break, from which Dynamo traces anew."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = product(x)
        torch._dynamo.graph_break()
        return product(x)

    compiled_graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        thread = threading.Thread(target=matmul_precision("highest")(lambda: None))
        thread.start()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        compiled_graphs.append(graph)
        return graph

    with looking() as seen:
        torch.compile(function, backend=backend)(torch.eye(2))
    assert len(seen) == len(compiled_graphs) == 2


def test_a_compilation_does_not_wait_for_the_lock_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it may wait for the compilation: a handler that compiles in the middle of an entry."""
    monkeypatch.setattr(_compilation, "_PATIENCE", 0.2)
    compilation = LongCompilation().begin()
    with pytest.warns(RuntimeWarning, match="no longer waits for a thread"), ledger.lock:
        compilation.go_on()
        assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)), torch.ones(2))
    compilation.end()
    assert compilation.error is None


def test_what_torchs_own_setter_sets_meanwhile_stays() -> None:
    """Outside of scopes, and inside of one."""
    with matmul_precision("high"):
        compilation = LongCompilation().begin()
    try:
        torch.set_float32_matmul_precision("medium")
        compilation.end()
        assert flags() == flags_at("medium")
    finally:
        reset()


@pytest.mark.skipif(not GUARDS_CAN_BE_SEEN, reason="this torch does not call for guards that it builds")
def test_scopes_that_the_compiling_thread_itself_ends_meanwhile() -> None:
    """In a handler or finaliser, say: their end counts, and so does that of a thread that is gone."""

    def compile_and(meanwhile: Callable[[], object]) -> None:
        torch._dynamo.reset()

        def while_guards_are_built(guards: list[Any]) -> list[bool]:
            meanwhile()
            return [True] * len(guards)

        options: dict[str, Any] = {"guard_filter_fn": while_guards_are_built}
        with looking():
            torch.compile(product, backend=Graphs("eager"), options=options)(torch.eye(2))

    def enter_in_a_thread_that_ends() -> None:
        thread = threading.Thread(target=matmul_precision("medium").__enter__)
        thread.start()
        while thread.is_alive():  # it waits for the lock, and for its end nobody does
            ledger.lock.release()
            thread.join(0.01)
            ledger.lock.acquire()

    reset("high")  # for CUDA the same as medium: another setting is an error of the compiling thread's own
    before = state()
    scope = matmul_precision("medium")
    scope.__enter__()
    compile_and(lambda: scope.__exit__(None, None, None))
    assert state() == before
    compile_and(scope.__enter__)
    assert flags() == flags_at("medium")
    scope.__exit__(None, None, None)
    assert state() == before
    with matmul_precision("high"):
        compile_and(lambda: set_float32_matmul_precision("medium"))
        assert flags() == flags_at("medium")
    assert state() == before
    compile_and(enter_in_a_thread_that_ends)
    assert flags() == flags_at("high")
    assert state() == before
    reset()


def test_compiling_ahead_of_time_inside_of_a_compilation() -> None:
    """The inner one traces alone: the flags are let go when that has ended."""
    owned: list[bool] = []

    def compile_ahead_of_time() -> None:
        compiled: Any = torch.compile(product, backend="eager", fullgraph=True)
        if not hasattr(compiled, "aot_compile"):
            pytest.skip("this torch does not compile ahead of time")
        compiled.aot_compile(((torch.eye(2),), {}))
        owned.append(ledger.lock.is_had())

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compile_ahead_of_time()
        return graph

    compile_ahead_of_time()
    with looking():
        torch.compile(product, backend=backend)(torch.eye(2))
    assert owned == [False, False]


def test_an_export_in_a_scope() -> None:
    """Exporting traces as compiling does."""
    before = state()
    with matmul_precision("medium"):
        torch.export.export(torch.nn.Linear(2, 2), (torch.eye(2),), strict=True)
        assert flags() == flags_at("medium")
    assert state() == before
