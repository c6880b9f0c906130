"""The ledger of live scopes: from what each wants to what the process applies.

As long as one thread or task enters scopes and leaves them innermost first,
the ledger is a *plain stack*: the contexts' own linked list of entries, and
``tip``, its innermost one, which says what to apply. Anything else turns it
into the *general* form until it is empty again. There, an entry that covers
another one of the same owner shadows it, and the backends follow the
strictest of what the uncovered entries ask for.

In both, leaving a scope never brings back what entering it found: it ends the
entry and applies what is wanted *now*, which is right in any order of leaving.

Why this holds under threads, interrupts and re-entry, with or without a GIL:

* Entries, ledger and backends are written under one re-entrant lock. Reading
  an entry's ``rank`` without it is safe: it is one reference.
* Statements marked "all or nothing" make no call and no jump backwards (for
  Python 3.10: no jump at all), so CPython handles no signal among them; what a trace function must not see
  half done stands on one line. ``end`` can be repeated: a second call
  finishes what an interrupt cut short.
* A signal handler, finaliser or trace function that enters a scope while its
  own thread holds the lock gets through: it finds the entries whole, and what
  it interrupted looks again at what is wanted after it has written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from sys import is_finalizing
from typing import TYPE_CHECKING, Final

from precision_scope._applied import Applied
from precision_scope._conflicts import warn_of_conflict
from precision_scope._entries import ASKS_NOTHING, ENDED, Entry, innermost, top
from precision_scope._errors import PrecisionConflictWarning, PrecisionScopeError
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._locks import Lock
from precision_scope._owners import Owner, current_owner, on_owner_gone
from precision_scope.backends._torch import TORCH_FLAGS

if TYPE_CHECKING:
    from precision_scope.backends._base import Backend


class ScopeKey:
    """Stands for a scope object in its entries, which must not keep it alive.

    Like an entry it is made on the hot path, and has no ``__init__``. Called,
    it ends its entries: the scope object is being collected.

    Attributes:
        entries: How many of its entries are live.
        owed: How many have ended by themselves, and may still be left.
        covers_backward: Whether the level holds for the backward pass, too, of
            what is computed inside.
    """

    __slots__ = ("covers_backward", "entries", "owed")

    entries: int
    owed: int
    covers_backward: bool
    python_ends = staticmethod(is_finalizing)  # here, since a module's globals may be None by then

    def __call__(self) -> None:
        if not self.python_ends():
            ledger.end_soon(self)


_NOTHING: Final = ScopeKey()  # of no scope


class _Orphan(Entry):
    """A live entry whose thread or task is gone.

    It counts for as long as some context sees it: test frameworks, say, enter
    a scope in one task and run the test in another, in the same context.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self.rank != ENDED and not self.key.python_ends():
            ledger.end_soon(self)


# The tip while the ledger is in its general form; no entry's parent.
GENERAL: Final = Entry()

# What an entry covers that covers nothing; counted where nobody looks.
_NOBODY: Final = Entry()
_NOBODY.rank, _NOBODY.covers = ENDED, 0


class Ledger:
    """The process's live entries, and the backends that follow them.

    Attributes:
        applied: The backends.
        lock: Held for every change.
        tip: The innermost entry of a plain stack; GENERAL in the general form.
        over_and_done: What finalisers have found to be over. They must not
            wait for the lock: whoever holds it sees to these after releasing it.
        at_first_use: What is to be called when the package is next used.
    """

    __slots__ = (
        "_counts",
        "_live",
        "_orphans",
        "_warned",
        "applied",
        "at_first_use",
        "lock",
        "over_and_done",
        "tip",
    )

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.lock = Lock()
        self.tip: Entry | None = None
        # The general form: the live entries in the order of entering, those
        # whose owner is gone, and how many uncovered ones there are by rank.
        self._live: dict[Entry, None] = {}
        self._orphans: weakref.WeakSet[Entry] = weakref.WeakSet()
        self._counts = [0] * (ENDED + 1)
        self._warned = False
        self.over_and_done: deque[Owner | ScopeKey | Entry] = deque()
        self.at_first_use: Callable[[], object] | None = None

    # Entering and leaving, where the ledger is no plain stack or ceases to be.

    def enter(self, entry: Entry, rank: int) -> None:
        """Make an entry live, and apply what is wanted then; the caller has the lock."""
        parent = entry.parent
        while parent is not None and parent.rank == ENDED:
            parent = parent.parent
        if parent is not None:
            # Chains of tasks that start one another would grow without end.
            while parent.parent is not None and parent.parent.rank == ENDED:
                parent.parent = parent.parent.parent
        entry.parent = over = parent
        while over is not None and (over.owner is not entry.owner or over.rank >= ASKS_NOTHING):
            over = over.parent
        while self.tip is not GENERAL and self.tip is not None:
            self._generalise()
        entry.over = over = _NOBODY if over is None or rank == ASKS_NOTHING else over
        counts = self._counts
        # All or nothing, and without a jump.
        entry.covers = 0
        entry.rank = rank
        entry.key.entries += 1
        self._live[entry], self.tip = None, GENERAL
        counts[rank] += 1
        over.covers += 1
        counts[over.rank] -= over.covers == 1
        if rank != ASKS_NOTHING:
            self.settle(activate=True)

    def end(self, entry: Entry) -> None:
        """End an entry, in whatever order, and apply what is wanted now; the caller has the lock.

        A second call settles once more, to finish what an interrupt cut short.
        """
        try:
            try:
                while self.tip is not GENERAL and entry.rank != ENDED:
                    self._generalise()
                while entry.rank != ENDED and entry.over is not _NOBODY and entry.over.rank == ENDED:
                    entry.over = entry.over.over
                rank = entry.rank
                if rank != ENDED:
                    over, counts = entry.over, self._counts
                    # All or nothing, and without a jump. What covered the
                    # entry covers the next one from now on.
                    entry.key.entries -= 1
                    counts[rank] -= entry.covers == 0
                    over.covers += entry.covers - 1
                    counts[over.rank] += over.covers == 0
                    entry.rank = ENDED
                self._live.pop(entry, None)  # an orphan is not there
                if rank != ASKS_NOTHING:
                    self.settle(activate=False)
            finally:
                if isinstance(entry, _Orphan):
                    self._orphans.discard(entry)
                if self.tip is GENERAL and not self._live and not self._orphans:
                    self.tip = None
        finally:
            if top.get() is entry:
                top.set(innermost())

    def _generalise(self) -> None:
        """Turn a plain stack into the general form, unless a handler comes between.

        An empty ledger (no tip) is both: in it, the general form is empty.
        """
        tip = self.tip
        if tip is GENERAL:  # a handler has come already
            return
        live: dict[Entry, None] = {}
        counts = [0] * (ENDED + 1)
        over = _NOBODY
        for entry in _stack(tip):
            if self.tip is not tip:
                return
            # All or nothing.
            entry.over = over
            entry.covers = 0 if entry is tip else 1
            live[entry] = None
            over = entry
        if tip is not None:
            counts[tip.rank] = 1
        # All or nothing.
        if self.tip is tip:
            self._live = live
            self._counts = counts
            self.tip = GENERAL

    # What is wanted and what is applied.

    def _wanted(self) -> int | None:
        """Return the rank that the process must run at; None without scopes."""
        tip = self.tip
        if tip is not GENERAL:
            return None if tip is None else tip.rank
        counts = self._counts
        return 0 if counts[0] else 1 if counts[1] else 2 if counts[2] else None

    def settle(self, *, activate: bool) -> None:
        """Bring the backends to what is wanted now.

        Args:
            activate: Also take in backends that have become active.
        """
        applied = self.applied
        failure: BaseException | None = None
        while True:
            rank = self._wanted()
            holding = applied.holding
            try:
                if rank is None:
                    failure = applied.holding.restore(applied.saved)
                elif activate:
                    applied.hold_active().apply(LEVELS[rank])
                else:
                    applied.holding.apply(LEVELS[rank])
            except PrecisionScopeError as error:
                failure = error
            # Else a handler came between: it changed what is wanted, or the default.
            if rank == self._wanted() and (rank is not None or applied.holding is holding):
                break
        if rank is None:
            applied.holding, applied.saved = applied.nothing_held, ()
        if failure is not None:
            raise failure

    def set(self, level: Float32MatmulPrecision) -> None:
        """Change the innermost scope's level or, outside scopes, the default."""
        with self.lock:
            entry = innermost()
            if entry is None:
                self.applied.set_default(level)
                return
            old = entry.rank
            if old != ASKS_NOTHING:
                try:
                    self._change(entry, level.rank)
                except BaseException:
                    self._change(entry, old)
                    raise
            else:
                self._enter_again(entry, level.rank)
        try:
            self.check_conflict()
        except BaseException:
            self.set_back(entry, old)
            raise

    def set_back(self, entry: Entry, rank: int) -> None:
        """Have an entry ask again for what it asked before, unless it has ended."""
        with self.lock:
            if entry.rank != ENDED:
                if ASKS_NOTHING in (entry.rank, rank):
                    self._enter_again(entry, rank)
                else:
                    self._change(entry, rank)

    def _enter_again(self, entry: Entry, rank: int) -> None:
        """Have a live entry begin, or cease, to ask for a level."""
        outer = top.get()
        try:
            self.end(entry)
            self.enter(entry, rank)
        except BaseException:
            self.end(entry)
            self.enter(entry, ASKS_NOTHING)
            raise
        finally:
            top.set(outer)
            if isinstance(entry, _Orphan):
                self._orphans.add(entry)
                self._live.pop(entry, None)

    def _change(self, entry: Entry, rank: int) -> None:
        # All or nothing.
        if self.tip is GENERAL and entry.covers == 0:
            self._counts[rank] += 1
            self._counts[entry.rank] -= 1
        entry.rank = rank
        self.settle(activate=True)

    def default(self) -> Float32MatmulPrecision:
        """Return the level in force where no scope is live."""
        with self.lock:
            default = self.applied.default()
        self._end_what_is_over()
        return default

    @property
    def isolated(self) -> bool:
        """Whether each context's products run at its own level, so that no scopes are in conflict."""
        return self.applied.torch_flags.isolates

    def check_conflict(self) -> None:
        """Warn the first time that live scopes of several owners disagree."""
        if (
            self._warned
            or self.isolated
            or self.tip is not GENERAL
            or self._counts[: len(LEVELS)].count(0) >= len(LEVELS) - 1
        ):
            return
        with self.lock:
            asking = [entry for entry in self.all_live() if entry.rank < ASKS_NOTHING and entry.covers == 0]
            wanted = {LEVELS[entry.rank]: entry.owner for entry in asking}
            if self._warned or len(wanted) < 2 or len({entry.owner for entry in asking}) < 2:
                return
            self._warned = True
        try:
            warn_of_conflict(wanted)
        except PrecisionConflictWarning:
            self._warned = False
            raise

    # Finding entries.

    def all_live(self) -> list[Entry]:
        """Return the live entries, in the order of entering."""
        with self.lock:
            tip = self.tip
            return _stack(tip) if tip is not GENERAL else [*self._live, *self._orphans]

    def find(self, key: ScopeKey) -> Entry | None:
        """Return the entry that leaving the scope, here and now, means."""
        entry = innermost()
        while entry is not None:
            if entry.key is key and entry.rank != ENDED:
                return entry
            entry = entry.parent
        # It was entered in another context: the newest, by choice of this owner
        # or of one that is gone; never somebody else's if ours has ended by itself.
        owner = current_owner()
        found = [entry for entry in reversed(self.all_live()) if entry.key is key]
        for entry in found:
            if entry.owner is owner or isinstance(entry, _Orphan):
                return entry
        if found and key.owed:
            key.owed -= 1
            return None
        return found[0] if found else None

    def level(self) -> Float32MatmulPrecision | None:
        """Return the level that live scopes have in force; None without any."""
        with self.lock:
            rank = self._wanted()
            return None if rank is None else LEVELS[rank]

    def live_scopes(self) -> list[tuple[Float32MatmulPrecision, Owner]]:
        """Return level and owner of each live scope, in the order of entering."""
        with self.lock:
            live = [
                (LEVELS[entry.rank], entry.owner) for entry in self.all_live() if entry.rank < ASKS_NOTHING
            ]
        self._end_what_is_over()
        return live

    # Backends.

    def add_backend(self, backend: Backend) -> None:
        """Register a backend; live scopes give it the level in force."""
        with self.lock:
            self.applied.add(backend, self.level())
        self.see_to_the_rest()

    def activate_backend(self, backend: Backend) -> None:
        """Take in a backend whose module has been imported."""
        with self.lock:
            self.applied.activate(backend, self.level())
        self.see_to_the_rest()

    def remove_backend(self, name: str) -> None:
        """Restore a backend and drop it."""
        with self.lock:
            self.applied.remove(name)
        self.see_to_the_rest()

    def backends(self) -> tuple[Backend, ...]:
        """Return the backends, torch's flags first, but those whose module nobody has imported yet."""
        return self.applied.ready

    # What threads, tasks, finalisers and processes leave behind.

    def end_soon(self, what: Owner | ScopeKey | Entry) -> None:
        """End what is over, without waiting: now, or when the lock is released."""
        self.over_and_done.append(what)
        self._end_what_is_over()

    def call_at_first_use(self, call: Callable[[], object]) -> None:
        """Have a function called, without the lock, when the package is next used; again if it fails."""
        self.at_first_use = call
        self.over_and_done.append(_NOTHING)  # where entering a scope looks

    def see_to_the_rest(self) -> None:
        """End what finalisers have found to be over, unless the lock is taken.

        The first time, also do what is to be done when the package is first used.
        """
        self._end_what_is_over()
        if self.at_first_use is not None and not self.lock.is_had():
            call = None
            try:
                with self.lock:
                    call, self.at_first_use = self.at_first_use, None
                if call is not None:
                    call()
            except BaseException:
                if call is not None:
                    self.call_at_first_use(call)
                raise

    def _end_what_is_over(self) -> None:
        while self.over_and_done:
            locked = False
            try:
                # By "for", as in Lock.acquire: no call of a helper could say so exactly.
                for locked in iter(functools.partial(self.lock.acquire, False), None):  # noqa: B007
                    break
                if locked and self.over_and_done:
                    self._end_over(self.over_and_done.popleft())
            except BaseException:
                if locked:
                    self.lock.release()
                raise
            if not locked:
                return
            self.lock.release()
        if self.at_first_use is not None:
            self.over_and_done.append(_NOTHING)

    def _end_over(self, what: Owner | ScopeKey | Entry) -> None:
        try:
            if isinstance(what, Owner):
                self._forget(what)
            elif isinstance(what, ScopeKey):
                for entry in self.all_live():
                    if entry.key is what:
                        self.end(entry)
            else:
                what.key.owed += 1
                self.end(what)
        except PrecisionScopeError:  # it has ended all the same
            raise
        except BaseException:  # an interrupt
            self.over_and_done.appendleft(what)
            raise

    def _forget(self, owner: Owner) -> None:
        """Let go of the entries that an ended thread or task left live."""
        left = [entry for entry in self.all_live() if entry.owner is owner]
        while left and self.tip is not GENERAL:
            self._generalise()
        for entry in left:
            self._orphans.add(entry)
            self._live.pop(entry, None)
            entry.__class__ = _Orphan  # contexts alone keep it from now on

    def before_fork(self) -> None:
        """Keep other threads out, so that the child gets a whole ledger."""
        self.lock.acquire()

    def after_fork_in_child(self) -> None:
        """End the scopes of threads that do not exist in this process."""
        try:
            for entry in self.all_live():
                if entry.owner.is_here():
                    entry.owner = entry.owner.thread  # the loop runs no task here
                else:
                    with contextlib.suppress(PrecisionScopeError):
                        self.end(entry)
        finally:
            self.lock.release()

    def after_fork_in_parent(self) -> None:
        """Let other threads in again."""
        self.lock.release()


def _stack(tip: Entry | None) -> list[Entry]:
    """Return the entries of a plain stack in the order of entering."""
    stack: list[Entry] = []
    entry = tip
    while entry is not None:
        stack.append(entry)
        entry = entry.parent
    return stack[::-1]


ledger: Final = Ledger(Applied(TORCH_FLAGS))
on_owner_gone(ledger.end_soon)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=ledger.before_fork,
        after_in_child=ledger.after_fork_in_child,
        after_in_parent=ledger.after_fork_in_parent,
    )
