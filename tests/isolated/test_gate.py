"""Rules 17 and 19: who is let in when, and what the flags are meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from flags import HAS_CELLS, reset, state
from torch.utils.checkpoint import checkpoint
from watch import flags, flags_at, watching, wrong

from precision_scope import (
    Float32MatmulPrecision,
    _gate,
    _torch_api,
    get_float32_matmul_precision,
    matmul_precision,
    report,
    set_float32_matmul_precision,
)
from precision_scope._gate import Gate
from precision_scope._ledger import ledger

LEVELS = ("highest", "high", "medium", None)
A = torch.randn(8, 8)


@pytest.fixture
def gate() -> Gate:
    """Return the gate."""
    found = ledger.applied.torch_flags
    assert isinstance(found, Gate)
    return found


@pytest.fixture(autouse=True)
def nothing_left_in_the_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test after which a thread is inside, or waits, or the flags are not at rest."""
    monkeypatch.setattr(_gate, "_PATIENCE", 60)  # the watch is Python code inside every product
    yield
    gate = ledger.applied.torch_flags
    assert isinstance(gate, Gate)
    assert (gate.inside, gate.waiting, gate.in_force, gate.rest) == (0, {}, gate.rest, gate.rest)
    assert (gate.here.mine.key, gate.here.mine.waiter) == (None, None)


def in_threads(*bodies: Callable[[], object]) -> None:
    """Run functions in threads of their own, and raise what they raise."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        for future in [pool.submit(body) for body in bodies]:
            future.result(timeout=60)


def multiply(level: str | None, times: int = 1) -> None:
    """Multiply, each time in a scope."""
    for _ in range(times):
        with matmul_precision(level):
            torch.mm(A, A)


def test_products_of_one_level_run_side_by_side() -> None:
    """Two threads are inside products of the same level at the same time."""
    barrier = threading.Barrier(2, timeout=20)
    with watching(lambda _operator: barrier.wait()) as seen:
        in_threads(lambda: multiply("high"), lambda: multiply("high"))
    assert len(seen) == 2
    assert wrong(seen, "high") == []


def test_all_that_wait_for_a_level_are_let_in_together(gate: Gate) -> None:
    """Two threads that wait for the same level are inside at the same time when their turn comes."""
    barrier = threading.Barrier(2, timeout=20)
    holding = threading.Event()

    def inside(_operator: str) -> None:
        if get_float32_matmul_precision() == "medium":
            barrier.wait()
            return
        holding.set()
        while len(gate.waiting) < 2:
            time.sleep(0.001)

    def wait_for_medium() -> None:
        holding.wait(20)
        multiply("medium")

    with watching(inside) as seen:
        in_threads(lambda: multiply("high"), wait_for_medium, wait_for_medium)
    assert len(wrong(seen, "medium")) == 1
    assert len(seen) == 3


@pytest.mark.parametrize("other", ["highest", "medium", None])
def test_another_level_waits(other: str | None) -> None:
    """Products of two levels are never inside at the same time."""
    inside = 0
    most = 0

    def count(_operator: str) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)
        inside -= 1

    with watching(count) as seen:
        in_threads(lambda: multiply("high", 30), lambda: multiply(other, 30))
    assert most == 1
    assert len(seen) == 60
    assert len(wrong(seen, "high")) == 30
    assert len(wrong(seen, other)) == 30


def test_eight_threads_at_three_levels_and_none() -> None:
    """Thousands of products each run at their own level throughout."""
    threads: dict[int, str | None] = {}

    def work(level: str | None) -> None:
        threads[threading.get_ident()] = level
        for _ in range(400):
            with matmul_precision(level):
                torch.mm(A, A)
                torch.addmm(A, A, A)

    before = state()
    with watching() as seen:
        in_threads(*(lambda level=level: work(level) for level in LEVELS * 2))
    assert len(seen) == 6400
    for thread, level in threads.items():
        assert wrong(seen, level, thread) == []
    assert state() == before


def test_results_are_those_of_the_levels_own_reference() -> None:
    """Eight threads at once get, bit for bit, what each level gives alone; where the machine shows it."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    reference = {}
    for level in LEVELS:
        with matmul_precision(level):
            reference[level] = torch.mm(a, b)

    def work(level: str | None) -> None:
        for _ in range(25):
            with matmul_precision(level):
                assert torch.equal(torch.mm(a, b), reference[level])

    in_threads(*(lambda level=level: work(level) for level in LEVELS * 2))


def test_no_level_starves() -> None:
    """Products of one level that overlap without end let another level have its turns."""
    stop = threading.Event()
    between: list[int] = []

    def load(late: float) -> None:
        time.sleep(late)
        for _ in range(400):
            if stop.is_set():
                return
            multiply("medium")

    def other() -> None:
        try:
            time.sleep(0.1)
            for _ in range(20):
                before = len(seen)
                multiply("highest")
                between.append(len(seen) - before)
        finally:
            stop.set()

    with watching(lambda _operator: time.sleep(0.01)) as seen:
        in_threads(*(lambda late=late: load(late) for late in (0, 0.003, 0.006, 0.009)), other)
    assert max(between) < 20, "the others' products that one had to wait for"


def test_the_flags_at_rest_are_those_of_the_strictest_scope(gate: Gate) -> None:
    """Outside products everybody reads rule 15's level, whatever products are run meanwhile."""
    stop, loading = threading.Event(), threading.Event()
    seen = set()

    def load() -> None:
        with matmul_precision("high"):
            loading.set()
            while not stop.is_set():
                torch.mm(A, A)
                time.sleep(0.0002)

    def read() -> None:
        try:
            loading.wait(20)
            with matmul_precision("medium"):
                torch.mm(A, A)
                for _ in range(1000):
                    torch.mm(A, A)
                    with ledger.lock:
                        if not gate.inside:
                            seen.add(flags())
        finally:
            stop.set()

    in_threads(load, read)
    assert seen == {flags_at("high")}


def test_a_product_in_a_product_of_the_same_level() -> None:
    """The inner one goes through at once."""
    depth = 0

    def again(_operator: str) -> None:
        nonlocal depth
        depth += 1
        if depth < 4:
            torch.mm(A, A)

    with watching(again) as seen, matmul_precision("medium"):
        torch.mm(A, A)
        assert len(seen) == 4
        assert wrong(seen, "medium") == []


def test_a_product_in_a_product_of_another_level() -> None:
    """Each part runs at its own level, also while other threads keep both levels busy."""
    stop = threading.Event()
    mine = threading.get_ident()
    readings: list[tuple[str, object]] = []
    nested = False

    def again(_operator: str) -> None:
        nonlocal nested
        if threading.get_ident() != mine or nested:
            return
        nested = True
        readings.append(("medium", flags()))
        with matmul_precision("highest"):
            torch.mm(A, A)
        readings.append(("medium", flags()))
        nested = False

    def load(level: str) -> None:
        while not stop.is_set():
            multiply(level)

    with watching(again) as seen, ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(load, level) for level in ("high", "medium", "highest")]
        try:
            for _ in range(50):
                multiply("medium")
        finally:
            stop.set()
        for future in futures:
            future.result(timeout=60)
    assert len(readings) == 100
    assert {reading for _, reading in readings} == {flags_at("medium")}
    read = [product.before for product in seen if product.thread == mine]
    assert (read.count(flags_at("medium")), read.count(flags_at("highest"))) == (50, 50)


def test_an_error_in_a_product_lets_go() -> None:
    """A product that raises leaves nothing behind, from shapes to exceptions from inside."""
    for _ in range(3):
        with matmul_precision("medium"), pytest.raises(RuntimeError, match="shapes"):
            torch.mm(A, torch.randn(3, 3))

    def fail(_operator: str) -> None:
        raise KeyboardInterrupt

    with watching(fail), matmul_precision("medium"), pytest.raises(KeyboardInterrupt):
        torch.mm(A, A)
    in_threads(lambda: multiply("high"))


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp")  # checkpoint's own use of it in torch 2.4
def test_backward_runs_at_the_level_of_its_caller() -> None:
    """Also when another thread runs another level at the same time."""
    threads: dict[int, str | None] = {}

    def train(level: str | None) -> None:
        threads[threading.get_ident()] = level
        weight = A.clone().requires_grad_()
        for _ in range(50):
            with matmul_precision(level):
                checkpoint(lambda x: (x @ A) @ A, weight @ A, use_reentrant=False).sum().backward()

    with watching() as seen:
        in_threads(*(lambda level=level: train(level) for level in LEVELS))
    assert len(seen) > 1000
    for thread, level in threads.items():
        assert wrong(seen, level, thread) == []


def test_a_thread_that_serves_a_backward_pass() -> None:
    """A thread without scopes, as autograd has one for each GPU, runs at the level of who called it."""

    def serve(context: contextvars.Context) -> str:
        if hasattr(torch._C, "_remove_obj_from_tls"):  # torch 2.13 and newer does this by itself
            torch._C._stash_obj_in_tls("context", context)
        else:
            _torch_api._callers[torch._C._current_graph_task_id()] = context
        try:
            torch.mm(A, A)
            return str(get_float32_matmul_precision())
        finally:
            if hasattr(torch._C, "_remove_obj_from_tls"):
                torch._C._remove_obj_from_tls("context")
            else:
                _torch_api._callers.clear()

    with ThreadPoolExecutor(1) as pool, watching() as seen, matmul_precision("highest"):
        with matmul_precision("high"):
            context = contextvars.copy_context()
            assert pool.submit(serve, context).result(20) == "high"
        assert pool.submit(serve, context).result(20) == "highest"
        multiply(None)
    assert [product.before for product in seen] == [
        flags_at(level) for level in ("high", "highest", "highest")
    ]


def test_tasks_that_hold_blocks_across_await() -> None:
    """Each asyncio task multiplies at the level of its own block, in whatever order they run."""
    readings: list[tuple[str | None, object]] = []

    async def work(level: str | None, rng: random.Random) -> None:
        for _ in range(50):
            with matmul_precision(level):
                for _ in range(3):
                    await asyncio.sleep(rng.random() * 1e-4)
                    with watching() as seen:
                        torch.mm(A, A)
                        readings.extend((level, product.before) for product in seen)

    async def main() -> None:
        await asyncio.gather(*(work(level, random.Random(i)) for i, level in enumerate(LEVELS * 2)))

    outside = flags()
    asyncio.run(main())
    assert len(readings) == 8 * 150
    for level, reading in readings:
        assert reading == (outside if level is None else flags_at(level))


def test_pools_with_copied_contexts() -> None:
    """A function run in a copied context multiplies at that context's level, in any thread."""

    def work(_index: int) -> tuple[int, str]:
        torch.mm(A, A)
        return threading.get_ident(), str(get_float32_matmul_precision())

    before = flags()
    with ThreadPoolExecutor(4) as pool, watching() as seen, matmul_precision("high"):
        inside = [pool.submit(contextvars.copy_context().run, work, i) for i in range(100)]
        outside = [pool.submit(work, i) for i in range(100)]
        assert {future.result()[1] for future in inside} == {"high"}
        assert {future.result()[1] for future in outside} == {"highest"}
    read = [product.before for product in seen]
    assert (read.count(flags_at("high")), read.count(before)) == (100, 100)


def test_the_default_set_meanwhile() -> None:
    """A new process default reaches threads without scopes, and never the products of scopes."""
    stop = threading.Event()

    def load(level: str) -> None:
        while not stop.is_set():
            multiply(level)

    with watching() as seen:
        workers = [threading.Thread(target=load, args=(level,)) for level in ("medium", "highest")]
        for worker in workers:
            worker.start()
        try:
            for level in ("high", "medium", "highest", "high") * 10:
                set_float32_matmul_precision(level)
                assert get_float32_matmul_precision() == level
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    for worker, level in zip(workers, ("medium", "highest"), strict=True):
        assert worker.ident is not None
        assert wrong(seen, level, worker.ident) == []
    assert flags() == flags_at("high")
    with watching() as seen:
        multiply(None)
        assert wrong(seen, "high") == []
    reset()


def test_a_default_that_no_level_expresses_is_exact() -> None:
    """Products without a scope run at the stored state, not at a level near it, beside scopes."""
    torch.backends.cuda.matmul.allow_tf32 = True  # leaves the CPU's cell as it is
    before = flags()
    try:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with matmul_precision("medium"):
                entered.set()
                leave.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(20)
        with watching() as seen:
            multiply(None, 3)
            multiply("highest", 3)
            multiply(None, 3)
        read = [product.before for product in seen]
        assert read == [before] * 3 + [flags_at("highest")] * 3 + [before] * 3
        leave.set()
        thread.join()
        assert flags() == before
    finally:
        reset()


def test_writes_inside_a_scope_are_undone() -> None:
    """What other code writes inside a scope is gone when the last scope ends, products or not."""
    before = state()
    with matmul_precision("medium"):
        torch.mm(A, A)
        torch.backends.cuda.matmul.allow_tf32 = False
        multiply("high")
        torch.mm(A, A)
    assert state() == before


def test_no_warning_of_conflicts() -> None:
    """Scopes of two threads disagree in peace."""
    with matmul_precision("medium"):
        in_threads(lambda: multiply("highest"))
    assert report().isolation


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forks_while_other_threads_are_inside_and_wait() -> None:
    """The child multiplies at once, at its own level."""
    stop = threading.Event()

    def load(level: str | None) -> None:
        while not stop.is_set():
            multiply(level)

    workers = [threading.Thread(target=load, args=(level,)) for level in LEVELS]
    for worker in workers:
        worker.start()
    try:
        for _ in range(30):
            with matmul_precision("high"):
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        signal.alarm(20)
                        with watching() as seen:
                            torch.mm(A, A)
                            multiply("medium")
                        read = [product.before for product in seen]
                        status = int(read != [flags_at("high"), flags_at("medium")])
                    finally:
                        os._exit(status)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join()


class Interrupted(BaseException):
    """What the signal handler raises."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.usefixtures("uninterrupted_collections")
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside other levels"])
def test_interrupts_leave_nothing(busy: bool) -> None:
    """An exception out of a handler, anywhere in a product or while it waits, lets go."""
    gate = ledger.applied.torch_flags
    assert isinstance(gate, Gate)
    stop = threading.Event()

    def load(level: str) -> None:
        while not stop.is_set():
            multiply(level)
            time.sleep(0)

    def handler(_signal: int, _frame: FrameType | None) -> None:
        raise Interrupted

    workers = [threading.Thread(target=load, args=(level,)) for level in ("high", "highest") if busy]
    previous = signal.signal(signal.SIGALRM, handler)
    before = state()
    rng = random.Random(3)
    hits = 0
    for worker in workers:
        worker.start()
    try:
        deadline = time.monotonic() + 8
        while hits < 400 and time.monotonic() < deadline:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 400e-6))
                while True:
                    with matmul_precision("medium"):
                        torch.mm(A, A)
            except Interrupted:
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (gate.here.mine.key, gate.here.mine.waiter) == (None, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        stop.set()
        for worker in workers:
            worker.join()
    gc.collect()
    assert hits > 50
    assert ledger.live_scopes() == []
    assert state() == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.usefixtures("uninterrupted_collections")
def test_handlers_that_multiply() -> None:
    """A handler multiplies at a level of its own, anywhere in a product, scope or wait."""
    stop = threading.Event()
    calls = 0
    failures: list[BaseException] = []

    def load(level: str) -> None:
        while not stop.is_set():
            multiply(level)
            time.sleep(0)

    def handler(_signal: int, _frame: FrameType | None) -> None:
        nonlocal calls
        calls += 1
        try:
            with matmul_precision("high"):
                torch.mm(A, A)
            torch.mm(A, A)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=load, args=(level,)) for level in ("high", "highest")]
    previous = signal.signal(signal.SIGALRM, handler)
    before = state()
    rng = random.Random(4)
    for worker in workers:
        worker.start()
    try:
        deadline = time.monotonic() + 8
        while calls < 400 and time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 400e-6))
            for _ in range(10):
                with matmul_precision("medium"):
                    torch.mm(A, A)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        stop.set()
        for worker in workers:
            worker.join()
    assert failures == []
    assert calls > 50
    assert state() == before


def test_trace_functions_that_multiply_at_every_line() -> None:
    """A trace function multiplies at every line of the package, beside a busy thread."""
    stop = threading.Event()
    lines = 0

    def load() -> None:
        while not stop.is_set():
            multiply("highest")
            time.sleep(0)

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if Path(frame.f_code.co_filename).parent != Path(_gate.__file__).parent:
            return trace
        if event == "line":
            lines += 1
            sys.settrace(None)
            with matmul_precision("high"):
                torch.mm(A, A)
            torch.mm(A, A)
            sys.settrace(trace)
        return trace

    before = state()
    previous = sys.gettrace()
    worker = threading.Thread(target=load)
    worker.start()
    try:
        for level in LEVELS:
            sys.settrace(trace)
            try:
                multiply(level)
            finally:
                sys.settrace(previous)
    finally:
        stop.set()
        worker.join()
    assert lines > 100
    assert state() == before


def test_finalisers_that_multiply() -> None:
    """Garbage collection, at every allocation, of objects that multiply disturbs nothing."""
    collected = 0

    class Finalised:
        """A cycle whose collection multiplies."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            nonlocal collected
            collected += 1
            with matmul_precision("high"):
                torch.mm(A, A)

    before = state()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Finalised()
            multiply("medium")
            multiply(None)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert collected >= 200
    assert state() == before


def test_many_threads_for_some_seconds() -> None:
    """64 threads with random levels, nests and errors leave nothing."""
    before = state()
    deadline = time.monotonic() + 3

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            with matmul_precision(rng.choice(LEVELS)):
                torch.mm(A, A)
                if rng.random() < 0.3:
                    with matmul_precision(rng.choice(LEVELS)), pytest.raises(RuntimeError):
                        torch.mm(A, A[:3])

    in_threads(*(lambda seed=seed: work(seed) for seed in range(64)))
    assert state() == before


def test_whoever_waits_inside_a_product_does_not_block_those_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler that joins a thread, or a kernel that uses a pool, gets its thread through the gate."""
    monkeypatch.setattr(_gate, "_PATIENCE", 0.05)

    def join(_operator: str) -> None:
        if get_float32_matmul_precision() == "medium":
            in_threads(lambda: multiply("high"), lambda: multiply(None))

    with watching(join) as seen:
        multiply("medium")
        assert len(seen) == 3
        assert len(wrong(seen, "high")) == len(wrong(seen, None)) == 2


@pytest.mark.parametrize("write", ["mixed", "inherited"])
@pytest.mark.skipif(not HAS_CELLS, reason="torch has no cells")
def test_a_running_product_sees_no_change(write: str) -> None:
    """Scopes that begin and end meanwhile write nothing until the product has ended."""
    if write == "mixed":
        torch.set_float32_matmul_precision("medium")
        torch._C._set_fp32_precision_setter("mkldnn", "matmul", "ieee")
    else:
        torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    try:
        before = state()
        expected = flags()
        read = set()
        stop = threading.Event()

        def scopes() -> None:
            while not stop.is_set():
                with matmul_precision("high"), matmul_precision("highest"):
                    time.sleep(0)

        def spin(_operator: str) -> None:
            for _ in range(500):
                read.add(flags())
                time.sleep(0)
            stop.set()

        worker = threading.Thread(target=scopes)
        with watching(spin):
            worker.start()
            multiply(None)
        worker.join()
        assert read == {expected}
        assert state() == before
    finally:
        reset()


@pytest.mark.parametrize("levels", [("medium", "highest"), ("highest", "medium"), ("medium", "set")])
@pytest.mark.skipif(not HAS_CELLS, reason="torch has no cells")
def test_saves_that_wait_for_a_product_find_what_has_changed_meanwhile(
    levels: tuple[str, ...], gate: Gate
) -> None:
    """Scopes entered at once, or a default set, where saving has to write: all is as if one after another."""
    torch._C._set_fp32_precision_setter("generic", "all", "tf32")
    before, default = state(), flags()
    inside, end_product, leave = threading.Event(), threading.Event(), threading.Event()
    done = threading.Barrier(len(levels) + 1, timeout=20)

    def hold(_operator: str) -> None:
        inside.set()
        end_product.wait(20)

    def enter(level: str) -> None:
        if level == "set":
            set_float32_matmul_precision("high")
            done.wait()
            return
        with matmul_precision(level):
            done.wait()
            leave.wait(20)

    try:
        with ThreadPoolExecutor(3) as pool, watching(hold):
            running = pool.submit(multiply, None)
            inside.wait(20)
            entering = []
            for level in levels:
                entering.append(pool.submit(enter, level))
                while len(gate.waiting) < len(entering):
                    time.sleep(0.001)
            end_product.set()
            running.result(20)
            done.wait()
            if "set" in levels:
                assert get_float32_matmul_precision() == "high"
            else:
                assert flags() == flags_at("highest")
                assert not report().changed_by_others
                with watching() as seen:
                    multiply(None)
                    multiply("medium")
                assert [product.before for product in seen] == [default, flags_at("medium")]
            leave.set()
            for future in entering:
                future.result(20)
        if "set" in levels:
            assert flags() == flags_at("high")
        else:
            assert state() == before
    finally:
        leave.set()
        end_product.set()
        reset()


def test_scopes_that_are_dropped_while_products_run_end() -> None:
    """A finaliser that finds the lock taken leaves the rest to the next product."""
    scope = matmul_precision("high")
    scope.__enter__()
    taken, release = threading.Event(), threading.Event()

    def take() -> None:
        with ledger.lock:
            taken.set()
            release.wait(20)

    thread = threading.Thread(target=take)
    thread.start()
    taken.wait(20)
    del scope
    gc.collect()
    release.set()
    thread.join()
    assert len(ledger.over_and_done) == 1
    torch.mm(A, A)
    assert not ledger.over_and_done
    assert ledger.live_scopes() == []


def test_a_default_to_come_is_there_for_products_at_once() -> None:
    """Products outside scopes run at what get_float32_matmul_precision() says, also beside a scope."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with matmul_precision("medium"):
            entered.set()
            leave.wait(20)
            with watching() as seen:
                torch.mm(A, A)
                assert wrong(seen, "medium") == []

    thread = ThreadPoolExecutor(1)
    held = thread.submit(hold)
    entered.wait(20)
    try:
        set_float32_matmul_precision("high")
        assert get_float32_matmul_precision() == "high"
        with watching() as seen:
            torch.mm(A, A)
            assert wrong(seen, "high") == []
    finally:
        leave.set()
        held.result(20)
        thread.shutdown()
    assert flags() == flags_at("high")
    reset()


@contextmanager
def product_that_outlives_its_scope() -> Iterator[None]:
    """Have a product at "medium" run in another thread, though its scope has ended."""
    inside, leave = threading.Event(), threading.Event()

    def wait(_operator: str) -> None:
        inside.set()
        leave.wait(20)

    with ThreadPoolExecutor(1) as pool, watching(wait):
        with matmul_precision("medium"):
            context = contextvars.copy_context()
            running = pool.submit(context.run, torch.mm, A, A)
            inside.wait(20)
        try:
            yield
        finally:
            leave.set()
            running.result(20)


def test_scopes_beside_a_product_that_outlives_its_scope_restore_the_default() -> None:
    """What is saved is the default, not what the product has in force."""
    before = state()
    with product_that_outlives_its_scope():
        assert get_float32_matmul_precision() == "highest"
        with matmul_precision("high"):
            pass
        assert report().default == "highest"
    assert state() == before


def test_a_product_that_begins_when_its_scope_has_just_ended(gate: Gate) -> None:
    """The default that it displaces is that of now, not one that was saved before."""
    with matmul_precision("medium"):
        pass
    torch.backends.cuda.matmul.allow_tf32 = True
    before = state()
    gate.become(Float32MatmulPrecision.HIGHEST.rank)
    try:
        assert flags() == flags_at("highest")
    finally:
        gate.become(None)
    assert state() == before
    reset()


def test_a_default_set_by_other_code_beside_such_a_product_stays() -> None:
    """No scope is live, so it is not undone."""
    with product_that_outlives_its_scope():
        torch.set_float32_matmul_precision("high")
    assert flags() == flags_at("high")
    reset()
