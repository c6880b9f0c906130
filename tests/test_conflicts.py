"""Rules 15 and 16: strictest wins across threads and tasks, and one warning says so."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flags import state

from precision_scope import (
    PrecisionConflictWarning,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger


@pytest.fixture(autouse=True)
def fresh_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see the warning that a process gives once."""
    monkeypatch.setattr(ledger, "_warned", False)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Give another thread to run things in, one at a time."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_the_strictest_level_of_two_threads_applies(other: ThreadPoolExecutor) -> None:
    """A thread that wants less does not take precision from one that wants more."""
    theirs = matmul_precision("medium")
    with matmul_precision("high"):
        with pytest.warns(PrecisionConflictWarning):
            other.submit(theirs.__enter__).result()
        assert torch.get_float32_matmul_precision() == "high"
        assert other.submit(get_float32_matmul_precision).result() == "medium"
        assert get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "medium"
    other.submit(theirs.__exit__, None, None, None).result()


def test_a_stricter_thread_raises_the_level_at_once(other: ThreadPoolExecutor) -> None:
    """A thread that wants more gets it, though others are in laxer scopes."""
    theirs = matmul_precision("highest")
    with matmul_precision("medium"):
        with pytest.warns(PrecisionConflictWarning):
            other.submit(theirs.__enter__).result()
        assert torch.get_float32_matmul_precision() == "highest"
        other.submit(theirs.__exit__, None, None, None).result()
        assert torch.get_float32_matmul_precision() == "medium"


def test_within_one_thread_the_innermost_decides_also_when_less_strict() -> None:
    """Nesting a laxer scope is no conflict: it has its way, without a warning."""
    with matmul_precision("highest"), matmul_precision("medium"):
        assert torch.get_float32_matmul_precision() == "medium"


def test_a_shadowed_scope_of_another_thread_does_not_count(other: ThreadPoolExecutor) -> None:
    """What a thread wants is its innermost scope, not the strictest of its own."""
    outer, inner = matmul_precision("highest"), matmul_precision("medium")
    other.submit(outer.__enter__).result()
    other.submit(inner.__enter__).result()
    with matmul_precision("medium"):
        assert torch.get_float32_matmul_precision() == "medium"
    other.submit(inner.__exit__, None, None, None).result()
    other.submit(outer.__exit__, None, None, None).result()


def test_threads_that_agree_give_no_warning(other: ThreadPoolExecutor) -> None:
    """Equal levels in several threads are no conflict."""
    theirs = matmul_precision("high")
    with matmul_precision("high"):
        other.submit(theirs.__enter__).result()
        assert torch.get_float32_matmul_precision() == "high"
    other.submit(theirs.__exit__, None, None, None).result()


def test_the_warning_comes_once_and_names_levels_owners_and_remedy(other: ThreadPoolExecutor) -> None:
    """One warning says which levels met, in which threads, and what to do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with matmul_precision("high"):
                theirs = matmul_precision("medium")
                other.submit(theirs.__enter__).result()
                other.submit(theirs.__exit__, None, None, None).result()
    assert [warning.category for warning in caught] == [PrecisionConflictWarning]
    message = str(caught[0].message)
    for part in ("'high' (thread MainThread)", "'medium' (thread ThreadPoolExecutor", "enable_isolation()"):
        assert part in message


def test_the_warning_points_at_the_program(other: ThreadPoolExecutor) -> None:
    """The warning names the line that entered the scope, for blocks and for decorated calls."""

    @matmul_precision("medium")
    def decorated() -> None:
        """Enter a scope."""

    def block() -> None:
        with matmul_precision("medium"):
            pass

    for enter in (block, decorated):
        ledger._warned = False
        with matmul_precision("high"), pytest.warns(PrecisionConflictWarning) as caught:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        assert caught[0].filename in (__file__, threading.__file__)


def test_the_warning_as_an_error_fails_entry_cleanly(other: ThreadPoolExecutor) -> None:
    """With the warning an error, the scope is not entered and nothing has changed, each time."""
    before = state()
    with matmul_precision("high"):
        inside = state()
        for _ in range(2):
            theirs = matmul_precision("highest")
            with pytest.raises(PrecisionConflictWarning):
                other.submit(theirs.__enter__).result()
            assert state() == inside
            assert (
                other.submit(get_float32_matmul_precision).result()
                == "highest"
                == before["get_float32_matmul_precision"]
            )
            assert [str(level) for level, _ in ledger.live_scopes()] == ["high"]
    assert state() == before


def test_the_warning_as_an_error_fails_set_cleanly(other: ThreadPoolExecutor) -> None:
    """Setting another level inside a scope is refused likewise, and the scope keeps its level."""
    theirs = matmul_precision("high")
    with matmul_precision("high"):
        other.submit(theirs.__enter__).result()
        with pytest.raises(PrecisionConflictWarning):
            set_float32_matmul_precision("medium")
        assert get_float32_matmul_precision() == torch.get_float32_matmul_precision() == "high"
    other.submit(theirs.__exit__, None, None, None).result()


def test_set_inside_a_scope_keeps_to_strictest_wins(other: ThreadPoolExecutor) -> None:
    """A scope whose level is changed competes at its new level."""
    theirs = matmul_precision("medium")
    other.submit(theirs.__enter__).result()
    with matmul_precision("medium"):
        with pytest.warns(PrecisionConflictWarning):
            set_float32_matmul_precision("highest")
        assert torch.get_float32_matmul_precision() == "highest"
        set_float32_matmul_precision("medium")
        assert torch.get_float32_matmul_precision() == "medium"
    other.submit(theirs.__exit__, None, None, None).result()


def test_tasks_that_hold_blocks_across_await_compete() -> None:
    """Tasks are owners of their own: the strictest applies while both are inside."""
    seen = []

    async def hold(level: str, entered: asyncio.Event, leave: asyncio.Event) -> None:
        with matmul_precision(level):
            entered.set()
            await leave.wait()
            seen.append((level, str(get_float32_matmul_precision()), torch.get_float32_matmul_precision()))

    async def main() -> None:
        entered = [asyncio.Event(), asyncio.Event()]
        leave = [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.create_task(hold("highest", entered[0], leave[0]))]
        await entered[0].wait()
        tasks.append(asyncio.create_task(hold("medium", entered[1], leave[1])))
        with pytest.warns(PrecisionConflictWarning, match="task Task-"):
            await entered[1].wait()
        assert torch.get_float32_matmul_precision() == "highest"
        leave[0].set()
        await tasks[0]
        assert torch.get_float32_matmul_precision() == "medium"
        leave[1].set()
        await tasks[1]

    asyncio.run(main())
    assert seen == [("highest", "highest", "highest"), ("medium", "medium", "medium")]


def test_contexts_of_one_thread_that_do_not_nest_run_at_the_strictest() -> None:
    """Frameworks that switch contexts in one thread get no less than asked, and no warning."""
    first, second = contextvars.copy_context(), contextvars.copy_context()
    strict, lax = matmul_precision("highest"), matmul_precision("medium")
    first.run(strict.__enter__)
    second.run(lax.__enter__)
    assert torch.get_float32_matmul_precision() == "highest"
    assert second.run(get_float32_matmul_precision) == "medium"
    first.run(strict.__exit__, None, None, None)
    assert torch.get_float32_matmul_precision() == "medium"
    second.run(lax.__exit__, None, None, None)
