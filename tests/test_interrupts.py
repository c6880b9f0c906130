"""Rules 8 and 19: exceptions out of signal handlers, and code that cuts in, leave no trace."""

from __future__ import annotations

import contextvars
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from flags import HAS_CELLS, reset, state

from precision_scope import (
    _torch_api,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope._entries import innermost
from precision_scope._ledger import ledger
from precision_scope._locks import Lock

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers"),
    pytest.mark.usefixtures("uninterrupted_collections"),
]


needs_cells = pytest.mark.skipif(not HAS_CELLS, reason="torch has no cells")


class Interrupted(BaseException):
    """What the signal handler raises."""


class TimedOut(Exception):  # noqa: N818
    """What a handler of the usual kind raises: an ordinary exception."""


def nested_blocks() -> None:
    """Enter and leave scopes of changing and of equal levels."""
    with matmul_precision("medium"):
        with matmul_precision("high"), matmul_precision("high"):
            pass
        with matmul_precision("highest"):
            pass


@matmul_precision("high")
def inner_call() -> None:
    """Do nothing, at a level."""


@matmul_precision("medium")
def decorated_calls() -> None:
    """Call a decorated function from a decorated one."""
    inner_call()


def sets_inside() -> None:
    """Set levels inside scopes, also in one that asks for nothing."""
    with matmul_precision(None):
        set_float32_matmul_precision("high")
        with matmul_precision("medium"):
            set_float32_matmul_precision("highest")


def overlapping() -> None:
    """Leave scopes in another order than they were entered in."""
    first, second = matmul_precision("medium"), matmul_precision("high")
    with first:
        second.__enter__()
    second.__exit__(None, None, None)


BODIES = [nested_blocks, decorated_calls, sets_inside]


def pinned() -> None:
    """Put torch into a state that an exact save must write to in order to read."""
    reset()
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32")


@pytest.mark.parametrize("error", [Interrupted, TimedOut])
@pytest.mark.parametrize("timer", ["ITIMER_REAL", "ITIMER_VIRTUAL"])
@pytest.mark.parametrize("prepare", [reset, pytest.param(pinned, marks=needs_cells)])
@pytest.mark.parametrize("body", BODIES)
def test_an_interrupt_at_any_moment_leaves_no_trace(
    body: Callable[[], None], prepare: Callable[[], None], timer: str, error: type[BaseException]
) -> None:
    """Thousands of exceptions thrown by signal handlers into tight loops of scopes all pass through."""
    which = getattr(signal, timer)
    number = signal.SIGALRM if timer == "ITIMER_REAL" else signal.SIGVTALRM
    # A virtual timer ticks with the kernel's clock, a real one as asked.
    hits = 1000 if timer == "ITIMER_REAL" else 50

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise error

    prepare()
    before = state()
    rng = random.Random(0)
    previous = signal.signal(number, interrupt)
    try:
        for hit in range(hits):
            # The traceback of an interrupt on the first instruction of __exit__
            # holds the scope object; it goes at the end of the except clause.
            try:
                signal.setitimer(which, rng.uniform(20e-6, 300e-6))
                while True:
                    body()
            except error:
                pass
            assert ledger.live_scopes() == [], hit
            assert ledger.tip is None
            assert state() == before, hit
    finally:
        signal.setitimer(which, 0)
        signal.signal(number, previous)
        reset()


def mixed() -> None:
    """Put torch into a state whose legacy value cannot be read without writing."""
    reset("high")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    "prepare",
    [
        reset,
        *(
            pytest.param(each, marks=pytest.mark.skipif(not HAS_CELLS, reason="no cells"))
            for each in (pinned, mixed)
        ),
    ],
)
def test_an_interrupt_after_any_call_of_torch_leaves_no_trace(
    prepare: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right after each single call that reads or writes torch's flags does no harm."""
    calls, fatal = 0, 0

    def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            nonlocal calls
            result = function(*args)
            calls += 1
            if calls == fatal:
                raise Interrupted
            return result

        return call

    prepare()
    before = state()
    for name in ("get_legacy_value", "set_legacy_value", "get_cell", "set_cell"):
        if hasattr(_torch_api, name):
            monkeypatch.setattr(_torch_api, name, interrupting(getattr(_torch_api, name)))
    completed = False
    while not completed:
        calls, fatal = 0, fatal + 1
        try:
            nested_blocks()
            completed = True
        except Interrupted:
            pass
        calls = fatal  # no more of them
        assert ledger.live_scopes() == [], fatal
        assert state() == before, fatal
    monkeypatch.undo()
    assert fatal > (5 if HAS_CELLS else 1)
    reset()


def test_a_keyboard_interrupt_passes_through_the_block() -> None:
    """Ctrl-C in a block reaches the caller, and the level is put back."""
    before = state()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none
    try:
        with pytest.raises(KeyboardInterrupt), matmul_precision("medium"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert state() == before


def test_an_interrupt_on_the_first_instruction_of_exit_ends_the_scope() -> None:
    """Where __exit__ never starts, dropping the scope object ends its scope."""
    before = state()

    def enter_and_lose_it() -> None:
        matmul_precision("medium").__enter__()

    enter_and_lose_it()
    assert state() == before
    assert get_float32_matmul_precision() == "highest"


def in_the_critical_section(cut_in: Callable[[], None]) -> None:
    """Run something as a signal handler would, while this thread holds the lock."""
    with ledger.lock:
        cut_in()


@pytest.mark.parametrize("outer", [None, "highest", "high", "medium"])
def test_a_handler_may_enter_scopes_inside_the_critical_section(outer: Any) -> None:
    """A nested use of the package by the same thread neither deadlocks nor corrupts."""
    seen = []

    def handler() -> None:
        with matmul_precision("medium"):
            seen.append(torch.get_float32_matmul_precision())

    before = state()
    with matmul_precision(outer):
        in_the_critical_section(handler)
        assert outer is None or torch.get_float32_matmul_precision() == outer
    assert seen == ["medium"]
    assert state() == before


def test_signal_handlers_that_enter_scopes_meet_the_loop_anywhere() -> None:
    """Handlers that use scopes themselves, at random moments, disturb nothing."""
    calls: list[tuple[str, str]] = []
    before = state()

    def handler(_number: int, _frame: FrameType | None) -> None:
        with matmul_precision("highest"):
            outer = torch.get_float32_matmul_precision()
            with matmul_precision("medium"):
                calls.append((outer, torch.get_float32_matmul_precision()))

    rng = random.Random(1)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        while len(calls) < 2000:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 200e-6))
            with matmul_precision("high"):
                nested_blocks()
                assert torch.get_float32_matmul_precision() == "high"
                assert get_float32_matmul_precision() == "high"
            sets_inside()
            assert state() == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert {outer for outer, _ in calls} == {"highest"}
    # What was interrupted may still count: then the inner scope gets more than it asks for.
    assert {inner for _, inner in calls} <= {"highest", "high", "medium"}


def enters_nothing() -> None:
    """Enter a scope that asks for nothing."""
    with matmul_precision(None):
        pass


def enters_the_strictest() -> None:
    """Enter a scope that nobody may take precision from."""
    with matmul_precision("highest"):
        assert torch.get_float32_matmul_precision() == "highest"


def sets_the_level() -> None:
    """Set the level of whatever scope was interrupted."""
    if innermost() is not None:
        set_float32_matmul_precision("medium")


def blocks_and_none() -> None:
    """Nest scopes with one that asks for nothing inside."""
    with matmul_precision("high"), matmul_precision("medium"), matmul_precision(None):
        pass


def inherits_what_has_ended() -> None:
    """Enter a scope where the context remembers several that have ended."""
    scopes = [matmul_precision("high") for _ in range(4)]
    for scope in scopes:
        scope.__enter__()
    context = contextvars.copy_context()
    for scope in reversed(scopes):
        scope.__exit__(None, None, None)

    def inside() -> None:
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == get_float32_matmul_precision()

    context.run(inside)


@pytest.mark.parametrize(
    ("handle", "body", "prepare"),
    [
        (enters_nothing, blocks_and_none, reset),
        (enters_the_strictest, inherits_what_has_ended, reset),
        (sets_the_level, blocks_and_none, reset),
        pytest.param(enters_the_strictest, nested_blocks, pinned, marks=needs_cells),
        pytest.param(enters_the_strictest, nested_blocks, mixed, marks=needs_cells),
    ],
)
def test_handlers_that_use_the_package_find_it_whole_at_any_moment(
    handle: Callable[[], None], body: Callable[[], None], prepare: Callable[[], None]
) -> None:
    """What a handler does at a random moment neither fails nor leaves anything wrong behind."""
    failures: list[BaseException] = []
    calls = 0

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal calls
        calls += 1
        try:
            handle()
        except BaseException as error:
            failures.append(error)

    prepare()
    before = state()
    rng = random.Random(2)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        while calls < 1000:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 300e-6))
            for _ in range(20):
                body()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert failures == []
            assert state() == before
            assert ledger.tip is None
            assert not ledger.applied.saved
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        reset()


def test_a_scope_that_a_handler_leaves_live_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is entered while another scope is being entered is looked at when that one is applied."""
    before = state()
    strict = matmul_precision("highest")
    torch_flags = ledger.applied.torch_flags

    def save() -> object:
        monkeypatch.undo()
        saved = torch_flags.save()
        strict.__enter__()  # as a handler would
        return saved

    monkeypatch.setattr(torch_flags, "save", save)
    with matmul_precision("medium"):
        assert torch.get_float32_matmul_precision() == "highest"
        strict.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "medium"
    assert state() == before


def test_trace_functions_that_enter_scopes_meet_every_line() -> None:
    """A trace function that uses scopes at every line of the package disturbs nothing."""
    lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if "precision_scope" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            return trace
        if event == "line":
            lines += 1
            sys.settrace(None)
            with matmul_precision("medium"), matmul_precision("high"):
                pass
            sys.settrace(trace)
        return trace

    before = state()
    previous = sys.gettrace()
    for body in BODIES:
        sys.settrace(trace)
        try:
            body()
        finally:
            sys.settrace(previous)
        assert ledger.live_scopes() == []
        assert state() == before
    assert lines > 100


def enter_a_scope() -> None:
    """Do what a trace function may do."""
    with matmul_precision("medium"):
        pass


@pytest.mark.parametrize("default", ["highest", "high"])
def test_trace_functions_that_enter_scopes_meet_one_line(default: str) -> None:
    """At whichever line it comes, the scope ends as it should, and a new default is there afterwards."""
    before = state()
    previous = sys.gettrace()
    line = lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_name not in ("__enter__", "__exit__", "restore_first", "save"):
            return trace if frame.f_code.co_filename == __file__ else None
        if event == "line":
            lines += 1
            if lines == line:
                sys.settrace(None)
                enter_a_scope()
                if default != "highest" and ledger.tip is not None:
                    set_float32_matmul_precision_outside(default)
        return trace

    while lines >= line:
        line, lines = line + 1, 0
        sys.settrace(trace)
        try:
            with matmul_precision("high"):
                pass
        finally:
            sys.settrace(previous)
        assert ledger.live_scopes() == []
        if state() != before:
            assert get_float32_matmul_precision() == default
            set_float32_matmul_precision("highest")
            reset()
    assert line > 40


def set_float32_matmul_precision_outside(level: str) -> None:
    """Set the default where scopes of others are live."""
    contextvars.Context().run(set_float32_matmul_precision, level)


def test_what_is_over_is_ended_without_taking_the_lock_from_others() -> None:
    """An interrupt on the way to the lock leaves it to code of this thread that has it already."""

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        if frame.f_code is Lock.acquire.__code__:
            sys.settrace(None)
            raise Interrupted

    previous, key = sys.gettrace(), matmul_precision("high")._key
    with ledger.lock:
        sys.settrace(trace)
        try:
            with pytest.raises(Interrupted):
                ledger.end_soon(key)
        finally:
            sys.settrace(previous)
        assert ledger.lock.is_had()
    assert not ledger.lock.is_had()
    nested_blocks()


def test_finalisers_that_enter_scopes_meet_every_collection() -> None:
    """Garbage collection, at every allocation, of objects that use scopes disturbs nothing."""
    collected = 0

    class Finalised:
        """A cycle whose collection enters scopes."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            nonlocal collected
            collected += 1
            with matmul_precision("medium"), matmul_precision("highest"):
                pass

    before = state()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Finalised()
            with matmul_precision("high"):
                Finalised()
                nested_blocks()
                assert get_float32_matmul_precision() == "high"
            sets_inside()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert collected >= 600
    assert state() == before


def test_a_finaliser_does_not_wait_for_the_lock() -> None:
    """What is collected while another thread is in the critical section ends when it leaves it."""
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger.lock:
            holding.set()
            done.wait()
        with matmul_precision("high"):  # whoever uses the lock next sees to the rest
            pass

    before = state()
    lost = matmul_precision("medium")
    lost.__enter__()
    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    del lost
    assert torch.get_float32_matmul_precision() == "medium"
    done.set()
    thread.join()
    assert state() == before


def test_an_interrupted_wait_for_the_lock_leaves_it_free() -> None:
    """An interrupt while another thread is in the critical section harms neither."""
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger.lock:
            holding.set()
            done.wait()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            matmul_precision("medium").__enter__()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        done.set()
        thread.join()
    nested_blocks()
    assert ledger.live_scopes() == []
