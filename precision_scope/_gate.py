"""The gate: matrix products of one level run side by side, those of another wait.

A *key* is the rank of a level, or DEFAULT for products of contexts that ask for
nothing. The gate is also torch's flags as the ledger sees them from then on: what
the ledger applies is what the flags are *at rest*, while no product runs. They
are written when a group of products of another key begins, and brought to rest
when the last of the group has ended. What is written while products run is one
thing alone: a new process default, for those that run at the default.

Who waits is let in in the order of coming, together with all that wait for the
same key, so no key starves. A product inside a product, of another key, lets go
of the outer one's hold while it runs: no thread waits at the gate while it holds.

All is written under the ledger's lock, so that a handler which comes while one
of the two is being changed cannot deadlock with another thread on the other.
As in the ledger, statements on one line are not torn apart by handlers or trace
functions, and what an interrupt cuts short is finished by the next call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Generator
from types import CodeType, FrameType
from typing import Any, Final

from precision_scope._entries import ASKS_NOTHING, RANKS
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._locks import Lock
from precision_scope.backends._torch import TorchCells, TorchFlags

DEFAULT: Final = ASKS_NOTHING
ALONE: Final = -1  # held by whoever needs the flags to itself for a moment, as they are
CLOSED: Final = -2  # nobody's key: no product joins those that are inside

_PATIENCE = 1.0  # seconds


class _Waiter:
    """A thread in the queue; releasing its lock wakes it."""

    __slots__ = ("granted", "key", "lock")

    def __init__(self, key: int) -> None:
        self.key = key
        self.granted = False
        self.lock = threading.Lock()
        self.lock.acquire()


def _is_of_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(f"{__package__}.")


class Mine:
    """What a thread holds, and what it waits for."""

    __slots__ = ("__weakref__", "key", "waiter")

    def __init__(self) -> None:
        self.key: int | None = None
        self.waiter: _Waiter | None = None


class _Here(threading.local):
    def __init__(self, threads: weakref.WeakValueDictionary[int, Mine]) -> None:
        self.mine = Mine()
        threads[threading.get_ident()] = self.mine


class _DisplacedError(Exception):
    """The default is not in force any more, and somebody else has saved it."""


class Gate(TorchFlags):
    """torch's flags, behind a gate for matrix products.

    Args:
        flags: The flags themselves.
        lock: The ledger's lock, held by whoever calls the methods of a backend.
        rest: The key that is in force at rest.
        default: The saved default, if that is not it.

    Attributes:
        lock: The ledger's lock.
        here: What the calling thread holds, as ``here.mine``.
        inside: How many threads hold a key.
        group: The key that they hold; or CLOSED.
        waiting: The queue.
        rest: The key whose flags are in force while no product runs.
        in_force: The key whose flags are in force now; None if that is uncertain.
        product_code: The code of the kernels around the products.
    """

    isolates = True

    def __init__(self, flags: TorchFlags, lock: Lock, rest: int, default: object) -> None:
        self._real = flags
        self._default = default  # means something while flags or rest are not DEFAULT
        self.lock = lock
        self._threads: weakref.WeakValueDictionary[int, Mine] = weakref.WeakValueDictionary()
        self.here = _Here(self._threads)
        self.inside = 0
        self.group = DEFAULT
        self.waiting: dict[_Waiter, None] = {}
        self.rest = rest
        self.in_force: object = rest
        self.product_code: CodeType | None = None

    # Products. The kernels have the usual case of these two in line.

    def become(self, key: int | None) -> None:
        """Have the calling thread hold a key, or None, and nothing else; may be repeated."""
        mine = self.here.mine
        while True:
            with self.lock:
                self._withdraw()
                if mine.key is not None and mine.key != key:
                    mine.key, self.inside = None, self.inside - 1
                admitted = self.inside == 0 or self.group == key != ALONE
                if admitted and mine.key is None and key is not None and not self.waiting:
                    mine.key, self.inside, self.group = key, self.inside + 1, key
                self._let_in()
                self.settle()
                if mine.key == key:
                    return
                if key is None:
                    continue  # a handler came between
                waiter = _Waiter(key)
                mine.waiter, self.waiting[waiter] = waiter, None
            self._wait(waiter)

    def settle(self) -> None:
        """Write the flags that are to be in force now, if they are not."""
        while True:
            key, before = self._key_to_settle_at(), self.in_force
            if key in (before, CLOSED):
                return
            if before == DEFAULT == self.rest:
                self.save()
                if (key, before) != (self._key_to_settle_at(), self.in_force):
                    continue  # it had to wait
            self.in_force = writing = object()
            if key != DEFAULT:
                self._real.apply(LEVELS[key])
            elif not self._is_superseded(before):
                self._real.restore(self._default)
            # A handler may have written others since, or just before.
            self.in_force = key if self.in_force is writing else None

    def _key_to_settle_at(self) -> int:
        return self.group if self.inside and self.group != ALONE else self.rest

    def _is_superseded(self, before: object) -> bool:
        """Tell whether other code has set a default, outside all scopes, while a product ran."""
        return isinstance(before, int) and self.rest == DEFAULT and not self._real.is_at(LEVELS[before])

    def _let_in(self) -> None:
        """Let in the first in the queue, and all that wait for the same key, if nobody is inside."""
        queue = list(self.waiting)
        if self.inside or not queue:
            return
        key = queue[0].key
        for waiter in queue:
            admitted = self.inside == 0 or self.group == key != ALONE
            if admitted and waiter.key == key and waiter in self.waiting:
                # All or nothing, from the line above on.
                del self.waiting[waiter]
                waiter.granted, self.inside, self.group = True, self.inside + 1, key
                waiter.lock.release()

    def _withdraw(self) -> None:
        """Leave the queue, with the key if it was granted."""
        mine = self.here.mine
        waiter = mine.waiter
        if waiter is None:
            return
        if waiter.granted:
            mine.key, mine.waiter = waiter.key, None
        else:
            mine.waiter = None
            self.waiting.pop(waiter, None)
            waiter.lock.release()

    def _wait(self, waiter: _Waiter) -> None:
        """Wait to be let in, holding no lock.

        This thread holds the ledger's lock if a handler multiplies matrices in
        the middle of an entry or exit, or a save has to wait for products. The
        ledger finds then what it finds after a handler.
        """
        had: list[int | tuple[int, int]] = []
        try:
            self.lock.lend(had)
            suspects: set[tuple[Mine, FrameType]] = set()
            while not waiter.lock.acquire(timeout=_PATIENCE):
                suspects = self._take_back(suspects)
        finally:
            try:
                self.lock.take_back(had)
            except BaseException:  # an interrupt
                self.lock.take_back(had)
                raise

    def _take_back(self, suspects: set[tuple[Mine, FrameType]]) -> set[tuple[Mine, FrameType]]:
        """Let go for threads that run other Python code where they hold a key.

        A signal handler that comes before or after a product, say, may wait for
        the very thread that waits here; the product takes its hold again if it
        is yet to run. The package's own code inside a product emulates it, and
        is no other code.

        Args:
            suspects: Those that did so the last time, with the product's frame.

        Returns:
            Those that do so now for the first time.
        """
        found: set[tuple[Mine, FrameType]] = set()
        with self.lock:  # nobody begins or ends a product
            for thread, top in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
                frame: FrameType | None = top
                is_product = True
                while frame is not None and frame.f_code is not self.product_code:
                    is_product = is_product and _is_of_package(frame)
                    frame = frame.f_back
                mine = self._threads.get(thread)
                if mine is None or mine.key is None or frame is None or is_product:
                    continue
                if (mine, frame) in suspects:
                    mine.key, self.inside = None, self.inside - 1
                else:
                    found.add((mine, frame))
            self._let_in()
            self.settle()
        return found

    @contextlib.contextmanager
    def at_rest(self) -> Generator[None]:
        outer = self.here.mine.key
        try:
            self.become(ALONE)  # without the lock for a while
            yield
        finally:
            self.become(outer)

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        """Have the flags to itself while they are written to for a moment."""
        if self.inside == (self.here.mine.key is not None):
            yield
            return
        with self.at_rest():
            if not self.in_force == DEFAULT == self.rest:
                raise _DisplacedError
            yield

    # Torch's flags, as the ledger sees them; it holds the lock.

    def save(self) -> object:
        if self.in_force == DEFAULT == self.rest:
            with contextlib.suppress(_DisplacedError):
                self._default = self._real.save()
        return self._default

    def apply(self, level: str) -> None:
        self._rest_at(RANKS[level])

    def restore_first(self, states: tuple[Any, ...]) -> None:
        self._default = states[0]
        self._rest_at(DEFAULT)

    def _rest_at(self, key: int) -> None:
        """Have other flags in force at rest, written anew: other code may have changed them."""
        self.rest = key
        if not self.inside:
            self.in_force = None
        elif self.in_force in (key, self.group) and not self._are_as_written():
            self.in_force, self.group = None, CLOSED  # when those inside have left
        self.settle()

    def _are_as_written(self) -> bool:
        return (
            isinstance(self.in_force, int)
            and self.in_force != DEFAULT
            and self._real.is_at(LEVELS[self.in_force])
        )

    def set_default(self, level: Float32MatmulPrecision) -> None:
        if not self.in_force == DEFAULT == self.rest:
            self._default = self._real.at_level(self._default, level)
        if self.in_force == DEFAULT:
            self._real.set_default(level)

    coming_default = set_default  # products outside scopes get it at once

    def coming_rest(self, saved: object) -> None:
        self._default = saved

    def describe(self) -> dict[str, str]:
        return self._real.describe()

    def is_at(self, level: Float32MatmulPrecision) -> bool:
        return self.inside > 0 or self._real.is_at(level)

    def current_level(self) -> Float32MatmulPrecision:
        if self.in_force == DEFAULT == self.rest:
            return self._real.current_level()
        return self._real.level_of(self._default)

    def level_of(self, saved: Any) -> Float32MatmulPrecision:
        return self._real.level_of(saved)

    def at_level(self, saved: Any, level: Float32MatmulPrecision) -> object:
        return self._real.at_level(saved, level)

    def stored(self, saved: Any) -> dict[str, str]:
        return self._real.stored(saved)

    def guard_saves(self) -> None:
        """Have saves that write to the flags for a moment wait until no product runs."""
        if isinstance(self._real, TorchCells):
            self._real.undisturbed = self._alone

    def forget_other_threads(self) -> None:
        """Go on in a forked child: no other thread is inside, and none waits."""
        with self.lock:
            self._withdraw()
            self.waiting.clear()
            self.inside = 0 if self.here.mine.key is None else 1
            self.settle()
