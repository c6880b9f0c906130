"""The package's lock: re-entrant, and cheap to take where nobody has it.

What is hot takes it by putting the thread's identifier into its ``holder``: one
call of a C function, atomic with and without a GIL, which takes less time than
one of threading's locks::

    me = get_ident()
    try:
        if hold(0, me) is not me:  # lock.holder.setdefault
            me = lock.wait(me)
        ...
    except BaseException:
        lock.let_go(me)
        raise
    if me:
        del holder[0]

The very object says whose entry or exit has it: a signal handler runs in the
same thread, and a call that an interrupt keeps from returning may have taken
it. Products ``take`` it, or else go the gate's longer way. All other code has
the lock below, by a with-statement or ``acquire``.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if sys.platform == "win32":  # identifiers are small numbers there, and of these there is one object each

    def get_ident() -> int:
        """Return the thread's identifier, as an object of its own."""
        return threading.get_ident() + (1 << 40)

else:
    get_ident = threading.get_ident

if TYPE_CHECKING:
    from types import TracebackType

    class _RLock:  # typeshed's is final
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def release(self) -> None: ...
        def __exit__(
            self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
        ) -> None: ...
        def _is_owned(self) -> bool: ...
        def _release_save(self) -> tuple[int, int]: ...
        def _acquire_restore(self, state: tuple[int, int]) -> None: ...

else:
    _RLock = type(threading.RLock())

_CLOSED: Final = -1  # no thread's identifier


class Lock(_RLock):
    """A lock that a thread has by being its holder, or by a lock of threading's below that.

    Where it is the latter, CLOSED is in ``holder``, and stays there afterwards,
    so that no interrupt can prevent its removal. The next one to become the
    holder replaces it, if it can have the lock below.

    Attributes:
        holder: The identifier of the thread that is the holder, or CLOSED, for key 0.
    """

    def __init__(self) -> None:
        self.holder: dict[int, int] = {}
        self._acquire_below = super().acquire
        self._release_below = super().release
        self._owns_below = super()._is_owned
        self._save_below = super()._release_save
        self._restore_below = super()._acquire_restore

    # As the holder.

    def wait(self, me: int) -> int:
        """Become the holder.

        It does not queue: a thread that is handed the lock in a queue has yet
        to get the GIL, and by then the next one queues, so that from then on
        every scope costs a switch of threads.

        Args:
            me: The thread's identifier, an object of its own.

        Returns:
            The same, or 0 if this thread has the lock already, in code that a
            signal handler, a finaliser or a trace function has interrupted.
        """
        pause = 0.0
        while not self.take(me):
            holder = self.holder.get(0)
            if holder == me or (holder == _CLOSED and self._owns_below()):
                return 0
            pause = self._pause(pause)
        return me

    def take(self, me: int) -> bool:
        """Become the holder, unless somebody has the lock, be it this thread."""
        if self.holder.setdefault(0, me) == _CLOSED and not self._owns_below():
            locked = False
            try:
                locked = self._acquire_below(False)
                if locked and self.holder.get(0) == _CLOSED:
                    self.holder[0] = me
            except BaseException:
                if self._owns_below():
                    self._release_below()
                raise
            if locked:
                self._release_below()
        return self.holder.get(0) is me

    def let_go(self, me: int) -> None:
        """Be the holder no longer, unless an interrupt came before."""
        if self.holder.get(0) is me:
            del self.holder[0]

    # As a lock of threading's; __exit__ and release are those of the lock below.

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Have the lock below, and no other thread as the holder.

        What its result is assigned to by a "for" says exactly whether the lock
        was had: no signal is handled between a step of that and the assignment.
        """
        attempt: Callable[..., bool] = self._acquire_below
        if not blocking or timeout >= 0:
            attempt = functools.partial(attempt, blocking, timeout)
        me = get_ident()
        deadline = time.monotonic() + timeout if timeout >= 0 else float("inf") if blocking else 0.0
        pause = 0.0
        while True:
            locked = False
            try:
                for locked in iter(attempt, None):  # noqa: B007
                    break
                if not locked:
                    return False
                if self.holder.setdefault(0, _CLOSED) in (_CLOSED, me):
                    return True
            except BaseException:
                if locked:
                    self._release_below()
                raise
            self._release_below()
            # Having had it for a moment may have kept that holder from having it later.
            if time.monotonic() >= deadline and self.holder.get(0, _CLOSED) not in (_CLOSED, me):
                return False
            pause = self._pause(pause)
            if timeout >= 0:
                attempt = functools.partial(self._acquire_below, True, max(0.0, deadline - time.monotonic()))

    __enter__ = acquire  # one that called it could be interrupted when it has returned

    def _pause(self, pause: float) -> float:
        """Let another thread be done, which may need what this one has; return how long to do so next."""
        if self._owns_below():
            for below in iter(self._save_below, None):  # as in acquire
                try:
                    time.sleep(pause)
                finally:
                    self._restore_below(below)
                break
        else:
            time.sleep(pause)
        return min(pause + 1e-5, 1e-3)

    def is_had(self) -> bool:
        """Tell whether this thread has the lock, in one way or the other."""
        return self._owns_below() or self.holder.get(0) == get_ident()

    def lend(self, had: list[int | tuple[int, int]]) -> None:
        """Let others have it, if this thread has it; note in ``had`` how."""
        me = self.holder.get(0, _CLOSED)
        if me == get_ident():
            had.append(me)
            del self.holder[0]
        if self._owns_below():
            for below in iter(self._save_below, None):  # as in acquire
                had.append(below)
                break

    def take_back(self, had: list[int | tuple[int, int]]) -> None:
        """Have it again as it was; if that is interrupted, call it again."""
        pause = 0.0
        while had:
            how = had[-1]
            if isinstance(how, int):
                while not self.take(how):
                    if self._owns_below() and self.holder.get(0) == _CLOSED:
                        self.holder[0] = how
                    else:
                        pause = self._pause(pause)
            else:
                if not self._owns_below():
                    self._restore_below(how)
                while self.holder.setdefault(0, _CLOSED) not in (_CLOSED, get_ident()):
                    pause = self._pause(pause)
            had.pop()
