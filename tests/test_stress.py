"""Many threads, many tasks, many rounds: exact afterwards, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from flags import state

from precision_scope import get_float32_matmul_precision, matmul_precision
from precision_scope._ledger import ledger

pytestmark = pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning")

LEVELS = ["highest", "high", "medium"]


def random_nest(rng: random.Random, depth: int = 0) -> None:
    """Enter scopes of random levels, nested, with exceptions."""
    level = rng.choice(LEVELS)
    try:
        with matmul_precision(level):
            assert get_float32_matmul_precision() == level
            # Strictest wins: the process is never laxer than this thread asks.
            assert LEVELS.index(torch.get_float32_matmul_precision()) <= LEVELS.index(level)
            if depth < 4 and rng.random() < 0.7:
                random_nest(rng, depth + 1)
                assert get_float32_matmul_precision() == level
            if rng.random() < 0.2:
                raise LookupError
    except LookupError:
        pass


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` in threads; raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_sixty_four_threads_for_some_seconds_leave_the_state_exact() -> None:
    """Random nests of random levels with exceptions, in 64 threads that switch all the time."""
    before = state()
    end = time.monotonic() + 3
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            random_nest(rng)

    try:
        run_threads(64, work)
    finally:
        sys.setswitchinterval(interval)
    assert state() == before
    assert ledger.live_scopes() == []
    assert ledger.tip is None


def test_threads_and_tasks_together_leave_the_state_exact() -> None:
    """Event loops with tasks that hold blocks across await, beside plain threads."""
    before = state()

    async def hold(rng: random.Random) -> None:
        for _ in range(20):
            level = rng.choice(LEVELS)
            with matmul_precision(level):
                await asyncio.sleep(0)
                assert get_float32_matmul_precision() == level
                await asyncio.to_thread(random_nest, random.Random(rng.random()))
                assert LEVELS.index(torch.get_float32_matmul_precision()) <= LEVELS.index(level)

    async def main(seed: int) -> None:
        await asyncio.gather(*(hold(random.Random(f"{seed} {number}")) for number in range(5)))

    run_threads(4, lambda number: asyncio.run(main(number)))
    assert state() == before
    assert ledger.live_scopes() == []


def allocated(work: Callable[[], None]) -> int:
    """Return how many bytes more are allocated after ``work`` than before it."""
    gc.collect()
    tracemalloc.start()
    try:
        work()  # what is made once and kept: caches, this frame
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_a_hundred_rounds_of_short_lived_threads_and_tasks_keep_nothing() -> None:
    """Neither objects nor memory grow with threads and tasks that come and go."""

    async def task() -> None:
        with matmul_precision("high"):
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(task() for _ in range(5)))

    def rounds() -> None:
        for _ in range(100):
            run_threads(4, lambda number: random_nest(random.Random(number)))
            asyncio.run(main())

    assert allocated(rounds) < 20_000


def test_a_live_scope_takes_less_than_500_bytes_and_an_ended_one_nothing() -> None:
    """Memory per live scope is bounded, and comes back."""
    scopes: list[matmul_precision] = []

    def enter() -> None:
        for _ in range(1000):
            scope = matmul_precision("medium")
            scope.__enter__()
            scopes.append(scope)

    def leave() -> None:
        while scopes:
            scopes.pop().__exit__(None, None, None)

    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    enter()
    inside = tracemalloc.get_traced_memory()[0]
    leave()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (inside - before) / 1000 < 500
    assert after - before < 2_000


def test_ten_thousand_nested_scopes_unwind() -> None:
    """Depth is no limit, and the level is right all the way back."""
    scopes = [matmul_precision(level) for level in ["medium", "high"] * 5000]
    for scope in scopes:
        scope.__enter__()
    assert get_float32_matmul_precision() == "high"
    for scope in reversed(scopes):
        assert torch.get_float32_matmul_precision() == repr(scope).split("'")[1]
        scope.__exit__(None, None, None)


def test_ten_thousand_scopes_may_be_dropped_at_once() -> None:
    """A long chain of entries that nobody leaves is freed without recursion."""

    def enter_many() -> None:
        for _ in range(10_000):
            keep.append(matmul_precision("medium"))
            keep[-1].__enter__()

    keep: list[matmul_precision] = []
    thread = threading.Thread(target=enter_many)
    thread.start()
    thread.join()
    assert ledger.live_scopes() == []


def test_a_thousand_tasks_hold_scopes_at_once() -> None:
    """Each task has its own level, and the last one to end restores the state."""
    before = state()

    async def hold(number: int, everybody: asyncio.Event) -> None:
        level = LEVELS[number % 3]
        with matmul_precision(level):
            await everybody.wait()
            assert get_float32_matmul_precision() == level

    async def main() -> None:
        everybody = asyncio.Event()
        tasks = [asyncio.create_task(hold(number, everybody)) for number in range(1000)]
        await asyncio.sleep(0)
        assert len(ledger.live_scopes()) == 1000
        everybody.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert state() == before


def test_a_million_scopes_keep_nothing() -> None:
    """However many scopes have ended, there are as many objects as before."""

    def enter_and_leave(times: int) -> None:
        for _ in range(times):
            with matmul_precision("medium"):
                pass

    enter_and_leave(1000)
    gc.collect()
    before = sys.getallocatedblocks()
    enter_and_leave(1_000_000)
    assert sys.getallocatedblocks() - before < 100
