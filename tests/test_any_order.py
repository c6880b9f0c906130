"""Rules 11 and 12: scopes end in any order and place; contexts inherit; the dead do not count."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flags import HAS_CELLS, State, reset, state

from precision_scope import get_float32_matmul_precision, matmul_precision, set_float32_matmul_precision
from precision_scope._entries import top
from precision_scope._ledger import ledger

pytestmark = pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning")


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Give another thread to run things in, one at a time."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def leave(scope: matmul_precision) -> None:
    """Leave a scope that was entered by hand."""
    scope.__exit__(None, None, None)


def in_a_thread(work: Callable[[], object]) -> None:
    """Run something in a thread that ends with it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_overlapping_threads_leave_nothing_behind(other: ThreadPoolExecutor) -> None:
    """A enters, B enters, A exits, B exits: the state is that from before A."""
    before = state()
    mine, theirs = matmul_precision("medium"), matmul_precision("high")
    mine.__enter__()
    other.submit(theirs.__enter__).result()
    leave(mine)
    assert torch.get_float32_matmul_precision() == "high"
    other.submit(leave, theirs).result()
    assert state() == before


def test_scopes_of_one_thread_may_end_in_any_order() -> None:
    """The innermost that is still live decides, whichever has ended."""
    first, second, third = map(matmul_precision, ["medium", "high", "highest"])
    for scope in (first, second, third):
        scope.__enter__()
    leave(second)
    assert get_float32_matmul_precision() == torch.get_float32_matmul_precision() == "highest"
    leave(third)
    assert get_float32_matmul_precision() == torch.get_float32_matmul_precision() == "medium"
    leave(first)


def test_a_scope_may_end_in_another_thread(other: ThreadPoolExecutor) -> None:
    """An exit stack that is closed elsewhere ends its scope for the thread that entered it."""
    before = state()
    stack = contextlib.ExitStack()
    stack.enter_context(matmul_precision("medium"))
    other.submit(stack.close).result()
    assert get_float32_matmul_precision() == "highest"
    assert state() == before


def test_a_scope_may_end_in_another_context() -> None:
    """A scope entered in a copied context can be left outside of it."""
    scope = matmul_precision("medium")
    context = contextvars.copy_context()
    context.run(scope.__enter__)
    assert torch.get_float32_matmul_precision() == "medium"
    leave(scope)
    assert context.run(get_float32_matmul_precision) == "highest"


def test_leaving_twice_is_no_error() -> None:
    """A second exit finds nothing to end and changes nothing."""
    scope = matmul_precision("medium")
    scope.__enter__()
    leave(scope)
    with matmul_precision("high"):
        leave(scope)
        assert torch.get_float32_matmul_precision() == "high"


def test_a_generator_may_outlive_the_scope_it_was_started_in() -> None:
    """A with-block inside a generator ends when the generator does, in any order."""

    def steps() -> Generator[str, None, None]:
        with matmul_precision("medium"):
            yield str(get_float32_matmul_precision())

    before = state()
    with matmul_precision("high"):
        generator = steps()
        assert next(generator) == "medium"
    assert torch.get_float32_matmul_precision() == "medium"
    generator.close()
    assert state() == before


def test_an_async_generator_may_be_finalised_by_another_task() -> None:
    """What one task started and left unfinished ends right when the loop closes it."""
    before = state()

    async def steps() -> AsyncIterator[str]:
        with matmul_precision("medium"):
            yield str(get_float32_matmul_precision())
            await asyncio.sleep(0)

    async def start() -> object:
        unfinished = steps()
        assert await unfinished.__anext__() == "medium"
        return unfinished

    async def main() -> None:
        unfinished = await asyncio.create_task(start())
        assert unfinished is not None
        del unfinished
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert state() == before


def test_a_task_sees_the_scopes_live_where_it_was_started() -> None:
    """Tasks inherit; a scope that has ended meanwhile counts for them no longer."""

    async def levels(seen: list[str], wait: asyncio.Event) -> None:
        seen.append(str(get_float32_matmul_precision()))
        await wait.wait()
        seen.append(str(get_float32_matmul_precision()))

    async def main() -> list[str]:
        seen: list[str] = []
        wait = asyncio.Event()
        with matmul_precision("medium"):
            task = asyncio.create_task(levels(seen, wait))
            await asyncio.sleep(0)
        wait.set()
        await task
        return seen

    assert asyncio.run(main()) == ["medium", "highest"]


def test_to_thread_and_copied_contexts_inherit() -> None:
    """asyncio.to_thread and copy_context().run see the caller's scopes; plain threads do not."""

    async def in_a_worker() -> str:
        return str(await asyncio.to_thread(get_float32_matmul_precision))

    with matmul_precision("medium"):
        assert contextvars.copy_context().run(get_float32_matmul_precision) == "medium"
        assert asyncio.run(in_a_worker()) == "medium"
        seen: list[str] = []
        in_a_thread(lambda: seen.append(get_float32_matmul_precision()))
        assert seen == ["highest"]


def test_a_default_set_elsewhere_waits_for_the_last_scope(other: ThreadPoolExecutor) -> None:
    """Set outside all scopes while others are inside, it takes effect when they have ended."""
    with matmul_precision("medium"):
        other.submit(set_float32_matmul_precision, "high").result()
        assert torch.get_float32_matmul_precision() == "medium"
        assert other.submit(get_float32_matmul_precision).result() == "high"
    assert torch.get_float32_matmul_precision() == get_float32_matmul_precision() == "high"
    reset()


@pytest.mark.skipif(not HAS_CELLS, reason="torch has no cells")
def test_a_default_set_elsewhere_does_not_keep_what_others_wrote(other: ThreadPoolExecutor) -> None:
    """Writes to the parent cells inside the scope are undone, whatever the default is by then."""
    with matmul_precision("medium"):
        other.submit(set_float32_matmul_precision, "high").result()
        torch._C._set_fp32_precision_setter("generic", "all", "ieee")
    assert state()["generic.all"] == "none"
    assert torch.get_float32_matmul_precision() == "high"
    reset()


def test_a_thread_that_died_inside_a_scope_does_not_count() -> None:
    """A scope that was entered and never left ends with its thread."""
    before = state()
    scope = matmul_precision("medium")
    in_a_thread(scope.__enter__)
    assert ledger.live_scopes() == []
    assert state() == before
    leave(scope)


def test_a_thread_that_died_inside_a_scope_leaves_others_theirs() -> None:
    """The survivors' levels apply once the thread with the strictest one is gone."""
    with matmul_precision("medium"):
        in_a_thread(matmul_precision("highest").__enter__)
        assert torch.get_float32_matmul_precision() == "medium"


def test_a_task_that_was_destroyed_inside_a_scope_does_not_count() -> None:
    """A scope that was entered and never left ends with the last trace of its task."""
    scope = matmul_precision("medium")

    async def enter() -> None:
        scope.__enter__()

    async def main() -> None:
        await asyncio.create_task(enter())
        await asyncio.sleep(0)  # the loop still holds what it has just run
        gc.collect()
        assert ledger.live_scopes() == []
        assert torch.get_float32_matmul_precision() == "highest"

    asyncio.run(main())


def test_a_pending_task_that_is_destroyed_leaves_its_scopes() -> None:
    """A task dropped while it waits inside a block gives the level back."""
    before = state()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        with matmul_precision("medium"):
            await loop.create_future()

    task = loop.create_task(wait())
    loop.set_exception_handler(lambda _loop, _context: None)
    loop.run_until_complete(asyncio.sleep(0.01))
    assert torch.get_float32_matmul_precision() == "medium"
    del task
    gc.collect()
    assert state() == before
    loop.close()


def test_a_scope_outlives_the_task_that_entered_it_where_its_context_goes_on() -> None:
    """Test frameworks enter scopes in one task and run the test in another, in one context."""
    context = contextvars.copy_context()
    loop = asyncio.new_event_loop()

    def run(function: Callable[[], object]) -> object:
        async def call() -> object:
            return function()

        task = context.run(loop.create_task, call())
        result = loop.run_until_complete(task)
        del task
        gc.collect()
        return result

    # A task copies its context, so a shared one is given to the calls by hand.
    def shared(function: Callable[[], object]) -> object:
        return run(lambda: context_of_the_test.run(function))

    context_of_the_test = contextvars.copy_context()
    before: State = state()
    scope = matmul_precision("medium")
    shared(scope.__enter__)
    assert shared(get_float32_matmul_precision) == "medium"
    assert torch.get_float32_matmul_precision() == "medium"
    shared(lambda: leave(scope))
    assert state() == before
    loop.close()


def test_one_object_serves_threads_tasks_and_nested_blocks_at_once(other: ThreadPoolExecutor) -> None:
    """Each entering of a shared object is a scope of its own."""
    shared = matmul_precision("medium")
    started, go_on = threading.Event(), threading.Event()

    def use() -> list[str]:
        with shared:
            started.set()
            go_on.wait()
            with shared, matmul_precision("high"):
                inside = str(get_float32_matmul_precision())
            return [inside, str(get_float32_matmul_precision())]

    with shared:
        with shared:
            pass
        future = other.submit(use)
        started.wait()
        assert get_float32_matmul_precision() == "medium"
    assert get_float32_matmul_precision() == "highest"
    go_on.set()
    assert future.result() == ["high", "medium"]


def test_leaving_a_shared_object_late_ends_nobody_elses_scope(other: ThreadPoolExecutor) -> None:
    """A generator whose thread is gone finds its scope ended, and leaves other threads theirs."""
    shared = matmul_precision("highest")

    def steps() -> Generator[None, None, None]:
        with shared:
            yield

    generator = steps()
    in_a_thread(lambda: next(generator))
    lax = matmul_precision("medium")
    other.submit(lax.__enter__).result()
    other.submit(shared.__enter__).result()
    generator.close()
    assert other.submit(get_float32_matmul_precision).result() == "highest"
    assert torch.get_float32_matmul_precision() == "highest"
    other.submit(leave, shared).result()
    other.submit(leave, lax).result()


def test_tasks_that_start_one_another_keep_no_chain() -> None:
    """A thousand tasks, each started inside the last one's scope, remember none that has ended."""

    async def step(number: int, lengths: list[int]) -> None:
        with matmul_precision("high"):
            await asyncio.sleep(0)
            if number:
                following = asyncio.create_task(step(number - 1, lengths))
            await asyncio.sleep(0)
            entry, length = top.get(), 0
            while entry is not None:
                entry, length = entry.parent, length + 1
            lengths.append(length)
        if number:
            await following

    lengths: list[int] = []
    asyncio.run(step(200, lengths))
    assert max(lengths) <= 5
