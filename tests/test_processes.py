"""Rules 10 and 18: fork keeps the forking thread's scopes, spawn starts clean, objects travel."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from flags import state
from torch.utils.data import DataLoader, Dataset

from precision_scope import PrecisionScopeError, get_float32_matmul_precision, matmul_precision
from precision_scope._ledger import ledger
from precision_scope.backends import Backend, register_backend, unregister_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def in_a_fork(work: Callable[[], object], timeout: float = 20) -> object:
    """Return what ``work`` returns in a forked child; fail if the child hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover -- measured in this process only
        try:
            answer = work()
        except BaseException as error:
            answer = repr(error)
        os.write(writing, pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + timeout
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the forked child hangs")
        time.sleep(0.001)
    with os.fdopen(reading, "rb") as stream:
        return pickle.loads(stream.read())


def run_program(program: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own, without its warnings."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def look() -> tuple[str, str, list[str]]:
    """Return what is wanted, what is applied, and which scopes are live."""
    return (
        str(get_float32_matmul_precision()),
        torch.get_float32_matmul_precision(),
        [str(level) for level, _ in ledger.live_scopes()],
    )


def look_inside_another() -> tuple[str, str, list[str]]:
    """Do the same inside a further scope."""
    with matmul_precision("high"):
        return look()


@needs_fork
def test_a_child_keeps_the_scopes_of_the_forking_thread() -> None:
    """The child goes on where the forking thread was."""
    with matmul_precision("medium"):
        assert in_a_fork(look) == ("medium", "medium", ["medium"])
        assert in_a_fork(look_inside_another) == ("high", "high", ["medium", "high"])
    assert in_a_fork(look) == ("highest", "highest", [])


@needs_fork
def test_a_child_can_leave_the_scopes_it_was_forked_in() -> None:
    """Leaving them restores the child's state exactly."""
    before = state()
    scope = matmul_precision("medium")
    scope.__enter__()

    def leave() -> object:
        scope.__exit__(None, None, None)
        return state()

    assert in_a_fork(leave) == before
    scope.__exit__(None, None, None)


@needs_fork
def test_forks_while_other_threads_are_inside_scopes_and_inside_the_critical_section() -> None:
    """Hundreds of children work at once, and know the forking thread's scopes alone."""
    stop = threading.Event()

    def busy(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with matmul_precision(rng.choice(["high", "highest"])), matmul_precision("medium"):
                pass

    threads = [threading.Thread(target=busy, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(35):
            assert in_a_fork(look) == ("highest", "highest", [])
            with matmul_precision("medium"):
                assert in_a_fork(look) == ("medium", "medium", ["medium"])
                assert in_a_fork(look_inside_another) == ("high", "high", ["medium", "high"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@needs_fork
def test_a_fork_inside_the_critical_section_leaves_both_processes_working() -> None:
    """A signal handler may fork while its own thread is inside."""
    with ledger.lock:
        assert in_a_fork(look_inside_another) == ("high", "high", ["high"])
    assert look_inside_another() == ("high", "high", ["high"])


class Levels(Dataset[str]):
    """A data set whose items are the level that the loading worker gets."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        with matmul_precision("high"):
            assert torch.get_float32_matmul_precision() == "high"
        return str(get_float32_matmul_precision())


@needs_fork
def test_data_loader_workers_that_are_forked_inherit() -> None:
    """A worker forked inside a scope works inside it."""
    with matmul_precision("medium"):
        loader = DataLoader(Levels(), num_workers=1, multiprocessing_context="fork")
        assert [batch[0] for batch in loader] == ["medium", "medium"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_start_clean(method: str) -> None:
    """Processes that are not forked from this one have its scopes not."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    context = multiprocessing.get_context(method)
    with matmul_precision("medium"), ProcessPoolExecutor(1, mp_context=context) as executor:
        assert executor.submit(look).result() == ("highest", "highest", [])


def test_data_loader_workers_that_are_spawned_start_clean() -> None:
    """A spawned worker gets the default, and scopes of its own work."""
    with matmul_precision("medium"):
        loader = DataLoader(Levels(), num_workers=1, multiprocessing_context="spawn")
        assert [batch[0] for batch in loader] == ["highest", "highest"]


@matmul_precision("medium")
def decorated() -> tuple[str, str, list[str]]:
    """Look around in a scope."""
    return look()


def test_decorated_functions_travel_by_name() -> None:
    """A decorated function runs in a pool's process as anywhere."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert executor.submit(decorated).result() == ("medium", "medium", ["medium"])


@pytest.mark.parametrize("level", ["highest", "high", "medium", None])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda scope: pickle.loads(pickle.dumps(scope))])
def test_scopes_can_be_copied_and_pickled_also_while_entered(
    how: Callable[[matmul_precision], matmul_precision], level: str | None
) -> None:
    """The copy asks for the same level, and is not entered because the original is."""
    original = matmul_precision(level)
    with original:
        twin = how(original)
        assert repr(twin) == repr(original) == f"matmul_precision({level!r})"
        twin.__exit__(None, None, None)
        assert level is None or get_float32_matmul_precision() == level
    with twin:
        assert level is None or get_float32_matmul_precision() == level


def test_a_process_whose_daemon_threads_are_busy_with_scopes_ends() -> None:
    """Threads that are frozen inside the critical section at exit hold nobody up."""
    program = """
import threading, time
from precision_scope import matmul_precision
def work():
    while True:
        with matmul_precision("high"):
            pass
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    result = run_program(program, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@needs_fork
def test_a_child_works_though_a_backend_fails_in_it() -> None:
    """No failure of a backend keeps the child from ending other threads' scopes and from the lock."""

    class Failing(Backend):
        """A backend that works in its own process alone."""

        name = "failing"
        process = os.getpid()

        def is_active(self) -> bool:
            return True

        def save(self) -> object:
            return None

        def apply(self, level: str, /) -> None:
            if os.getpid() != self.process:
                raise RuntimeError(level)

        def restore(self, saved: object, /) -> None:
            self.apply(str(saved))

        def describe(self) -> dict[str, str]:
            return {}

    def without_it() -> object:
        with contextlib.suppress(PrecisionScopeError):
            unregister_backend("failing")
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(look_inside_another()))
        thread.start()
        thread.join(10)
        return seen[0], look()

    register_backend(Failing())
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with matmul_precision("high"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        assert in_a_fork(without_it) == (("high", "high", ["high"]), ("highest", "highest", []))
    finally:
        leave.set()
        thread.join()
        unregister_backend("failing")


@needs_fork
def test_a_child_forked_by_a_task_goes_on_as_its_thread() -> None:
    """In the child no task runs: what the task had entered is the thread's, and nests as before."""

    async def main() -> object:
        with matmul_precision("highest"):
            return in_a_fork(lambda: decorated()[:2])

    assert asyncio.run(main()) == ("medium", "medium")


def test_a_process_that_ends_inside_a_scope_ends_quietly() -> None:
    """Threads, tasks and the interpreter may end inside scopes without a word."""
    program = """
import threading, asyncio
from precision_scope import matmul_precision
keep = matmul_precision("medium")
keep.__enter__()
threading.Thread(target=matmul_precision("high").__enter__).start()
async def main():
    matmul_precision("medium").__enter__()
asyncio.run(main())
"""
    result = run_program(program, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
