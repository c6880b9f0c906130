"""The package's lock: hot code becomes its holder, all other code has what is below that."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from threading import get_ident
from types import FrameType
from typing import Any

import pytest
import torch

from precision_scope._locks import Lock


class Interrupted(BaseException):
    """Raised by a signal handler."""


@pytest.fixture
def lock() -> Lock:
    """Return a lock of the test's own."""
    return Lock()


@pytest.fixture
def hasty() -> Generator[None]:
    """Have threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hold(lock: Lock, work: Callable[[], object]) -> None:
    """Work as the holder, as hot code does."""
    me = get_ident()
    try:
        if lock.holder.setdefault(0, me) is not me:
            me = lock.wait(me)
        work()
    except BaseException:
        lock.let_go(me)
        raise
    if me:
        del lock.holder[0]


def take(lock: Lock, work: Callable[[], object]) -> None:
    """Work as a product does, which does not wait as the holder."""
    me = get_ident()
    try:
        taken = lock.take(me)
        if taken:
            work()
    except BaseException:
        lock.let_go(me)
        raise
    if taken:
        del lock.holder[0]
    else:
        have(lock, work)


def have(lock: Lock, work: Callable[[], object]) -> None:
    """Work with the lock below."""
    with lock:
        work()


FREE, TAKEN = [True, True], [False, False]


def others_get(lock: Lock) -> list[bool]:
    """Tell whether another thread can have the lock, in each of the ways."""
    answers = []

    def ask() -> None:
        answers.append(lock.acquire(blocking=False))
        if answers[0]:
            lock.release()
        me = get_ident()
        answers.append(lock.take(me))
        lock.let_go(me)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers


WAYS = [hold, take, have]


@pytest.mark.usefixtures("hasty")
def test_one_thread_at_a_time_has_it(lock: Lock) -> None:
    """Threads that have it in all ways, one inside the other, never meet."""
    inside: list[int] = []
    met: list[int] = []
    turns = 0

    def work() -> None:
        nonlocal turns
        inside.append(get_ident())
        turns += 1
        for _ in range(5):
            met.extend({*inside} - {get_ident()})
        inside.pop()

    def work_twice(inner: Callable[..., None]) -> None:
        work()
        inner(lock, work)

    def run(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(400):
            outer, inner = chance.choice(WAYS), chance.choice(WAYS)
            outer(lock, functools.partial(work_twice, inner))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert met == []
    assert turns == 6 * 400 * 2
    assert others_get(lock) == FREE


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS)
def test_it_is_re_entrant(
    lock: Lock, outer: Callable[[Lock, Callable[[], object]], None], inner: Callable[..., None]
) -> None:
    """Code that interrupts what has the lock has it as well, and leaves it to the other."""
    seen: list[Any] = []

    def work() -> None:
        inner(lock, lambda: None)
        seen.extend((others_get(lock), lock.is_had()))

    outer(lock, work)
    assert seen == [TAKEN, True]
    assert not lock.is_had()
    assert others_get(lock) == FREE


@pytest.mark.parametrize("way", WAYS)
def test_nobody_else_gets_it_without_waiting(lock: Lock, way: Callable[..., None]) -> None:
    """Who does not wait, or not for ever, is told that somebody has it."""
    answers = []

    def ask() -> None:
        answers.append(lock.acquire(blocking=False))
        began = time.monotonic()
        answers.append(lock.acquire(timeout=0.05))
        answers.append(0.04 < time.monotonic() - began < 5)
        answers.append(lock.take(get_ident()))
        answers.append(lock.is_had())

    def work() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    way(lock, work)
    assert answers == [False, False, True, False, False]
    assert others_get(lock) == FREE


def test_a_holder_that_is_interrupted_is_waited_for_without_the_lock_below(lock: Lock) -> None:
    """A signal handler in a holder can have the lock below while another thread wants it, too."""
    order = []
    other = threading.Thread(target=have, args=(lock, lambda: order.append("other")))

    def work() -> None:
        other.start()
        time.sleep(0.1)  # by now it waits
        have(lock, lambda: order.append("handler"))

    hold(lock, work)
    other.join(10)
    assert order == ["handler", "other"]
    assert others_get(lock) == FREE


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS)
def test_lending_it(lock: Lock, outer: Callable[..., None], inner: Callable[..., None]) -> None:
    """Whoever waits for something lets others have it, and has it again as it was."""
    seen = []

    def wait() -> None:
        had: list[int | tuple[int, int]] = []
        try:
            lock.lend(had)
            seen.append(others_get(lock))
        finally:
            lock.take_back(had)
        seen.append(others_get(lock))

    outer(lock, lambda: inner(lock, wait))
    assert seen == [FREE, TAKEN]
    assert others_get(lock) == FREE


def test_lending_what_is_not_had(lock: Lock) -> None:
    """There is nothing to note, and nothing to take back."""
    had: list[int | tuple[int, int]] = []
    lock.lend(had)
    lock.take_back(had)
    assert had == []
    assert others_get(lock) == FREE


@contextlib.contextmanager
def another_holder(lock: Lock) -> Generator[threading.Event]:
    """Have another thread be the holder until the event is set, and need the lock below then."""
    holding, done = threading.Event(), threading.Event()

    def work() -> None:
        holding.set()
        done.wait(30)
        have(lock, lambda: None)

    thread = threading.Thread(target=hold, args=(lock, work))
    thread.start()
    holding.wait()
    try:
        yield done
    finally:
        done.set()
        thread.join()


def set_soon(event: threading.Event) -> None:
    """Set an event while this thread waits for what depends on it."""
    threading.Timer(0.1, event.set).start()


def test_what_was_lent_is_waited_for(lock: Lock) -> None:
    """Who was let in meanwhile is done when the lock is had again."""
    had: list[int | tuple[int, int]] = []
    with lock:
        lock.lend(had)
        with another_holder(lock) as done:
            set_soon(done)
            lock.take_back(had)
            assert done.is_set()
        assert others_get(lock) == TAKEN
    assert others_get(lock) == FREE


def test_a_handler_waits_for_another_holder_though_this_thread_has_the_lock_below(lock: Lock) -> None:
    """What is interrupted on the way to having the lock does not have it yet."""
    with another_holder(lock) as done:
        lock._acquire_below()
        set_soon(done)
        hold(lock, lambda: None)
        assert done.is_set()
        lock.release()
    assert others_get(lock) == FREE


def test_being_interrupted_while_others_have_it(lock: Lock) -> None:
    """A handler that fails leaves what its thread had before, and no more."""

    def work() -> None:
        lock.let_go(get_ident())  # an interrupt in a handler, before it had the lock
        assert lock.is_had()

    hold(lock, work)
    with another_holder(lock), interrupted_soon():
        lock.acquire(timeout=10)
    assert others_get(lock) == FREE


def test_who_is_refused_has_kept_nobody_from_it(lock: Lock) -> None:
    """Of two that do not wait, one gets it, though the first is the holder when the other asks."""
    holding, done, gone = threading.Event(), threading.Event(), threading.Event()
    answers = []

    def work() -> None:
        holding.set()
        done.wait(10)

    def be_holder_and_ask() -> None:
        hold(lock, work)
        answers.append(lock.acquire(blocking=False))
        gone.set()

    release = lock._release_below

    def release_late() -> None:
        lock._release_below = release
        done.set()  # now the other thread runs for a while
        gone.wait(10)
        release()

    thread = threading.Thread(target=be_holder_and_ask)
    thread.start()
    holding.wait(10)
    lock._release_below = release_late
    answers.append(lock.acquire(blocking=False))
    thread.join()
    assert answers == [False, True]


def test_a_timeout_holds_whoever_has_it_in_turn(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the holder is waited for no longer than that, but also who comes after."""
    had, release = threading.Event(), threading.Event()

    def work() -> None:
        had.set()
        release.wait(10)

    sleep = time.sleep
    with another_holder(lock) as done:
        main, other = get_ident(), threading.Thread(target=have, args=(lock, work))

        def sleep_while_others_come(seconds: float) -> None:
            sleep(seconds)
            if get_ident() == main and not done.is_set():
                done.set()
                other.start()
                had.wait(10)

        monkeypatch.setattr("time.sleep", sleep_while_others_come)
        began = time.monotonic()
        assert not lock.acquire(timeout=0.05)
        assert time.monotonic() - began < 5
        release.set()
        other.join()
    assert others_get(lock) == FREE


@contextlib.contextmanager
def interrupted_soon() -> Generator[None]:
    """Expect an interrupt, which comes after a while."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is interrupted the first time, when all is done."""
    calls = []

    def run(*args: Any) -> Any:
        result = call(*args)
        calls.append(result)
        if len(calls) == 1:
            raise Interrupted
        return result

    return run


def test_an_interrupt_when_the_lock_below_was_had(lock: Lock) -> None:
    """On the way to becoming the holder it is not kept."""
    have(lock, lambda: None)
    lock._acquire_below = interrupted(lock._acquire_below)
    with pytest.raises(Interrupted):
        hold(lock, lambda: None)
    assert others_get(lock) == FREE


def test_an_interrupt_when_what_was_lent_was_had_again(lock: Lock) -> None:
    """It can be called again, and nothing is done twice."""
    had: list[int | tuple[int, int]] = []

    def work() -> None:
        with lock:
            lock.lend(had)
            lock._restore_below = interrupted(lock._restore_below)
            with pytest.raises(Interrupted):
                lock.take_back(had)
            lock.take_back(had)
            assert others_get(lock) == TAKEN
        assert others_get(lock) == TAKEN

    hold(lock, work)
    assert others_get(lock) == FREE


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls_go_by_c", [False, True])
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupts_leave_it_free(lock: Lock, way: Callable[..., None], calls_go_by_c: bool) -> None:
    """Wherever an interrupt comes, another thread can have the lock afterwards.

    While Dynamo looks at frames, signals are also handled after calls in Python.
    """
    stop = threading.Event()
    interrupts = 0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    def compete() -> None:
        while not stop.is_set():
            have(lock, lambda: None)
            hold(lock, lambda: None)

    thread = threading.Thread(target=compete)
    thread.start()
    previous = signal.signal(signal.SIGALRM, interrupt)
    look_at_frames = torch._C._dynamo.eval_frame.set_eval_frame
    callback = look_at_frames(False if calls_go_by_c else None)
    try:
        for turn in range(600):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 50 * 2e-6)
                while True:
                    way(lock, lambda: None)
            except Interrupted:
                interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not lock.is_had()
    finally:
        look_at_frames(callback)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        stop.set()
        thread.join()
    assert interrupts > 500
    assert others_get(lock) == FREE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_have_it(lock: Lock) -> None:
    """What is had over a fork is had in the child, and free after that."""
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        hold(lock, lambda: None)
        os._exit(0 if others_get(lock) == FREE else 1)
    lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert others_get(lock) == FREE
