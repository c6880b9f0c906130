"""The float32 matmul state at one moment, and bringing it back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

from precision_scope import PrecisionScopeError, matmul_precision, set_float32_matmul_precision
from precision_scope._applied import put_back
from precision_scope._emulation import emulated_hardware, set_emulation
from precision_scope._entries import ASKS_NOTHING, ENDED, Entry, innermost
from precision_scope._hardware import Hardware
from precision_scope._ledger import ledger
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._owners import Owner, this_thread
from precision_scope.backends._torch import TorchFlags

_Cells: TypeAlias = "dict[str, dict[str, str]]"


class State:
    """The float32 matmul state of the process at the moment when the object is made.

    Attributes:
        emulation: What is emulated, if anything is.
    """

    def __init__(self) -> None:
        ledger.see_to_the_rest()
        applied = ledger.applied
        with applied.torch_flags.at_rest(), ledger.lock:
            # Weakly: what nobody else refers to any more is to end by itself.
            self._live = weakref.WeakKeyDictionary({entry: entry.rank for entry in ledger.all_live()})
            self._at_rest = _at_rest()
            self._coming = applied.holding.default
            self._default_set = applied.default_set
            # While scopes are live, and torch's flags are theirs alone: as other code may have written them.
            self._written = applied.torch_flags.save() if self._live and not ledger.isolated else None
            self._cells, self._cells_in_scopes = self._look()
        self._threads = weakref.WeakSet(threading.enumerate())
        self.emulation: Hardware | None = emulated_hardware()

    def _look(self) -> tuple[_Cells, _Cells]:
        """Return the settings, by the backends' names, at rest and as live scopes apply them."""
        at_rest: _Cells = {}
        in_scopes: _Cells = {}
        for backend in ledger.backends():
            if backend.name not in self._at_rest:
                continue
            ignored: tuple[str, ...] = ()
            if isinstance(backend, TorchFlags):
                ignored = backend.convolution_and_rnn_cells
                saved = self._at_rest[backend.name]
                at_rest[backend.name] = backend.stored(
                    saved if self._coming is None else backend.at_level(saved, self._coming)
                )
                if not self._live:
                    continue
            with contextlib.suppress(Exception):  # a backend that fails says so elsewhere
                cells = {cell: value for cell, value in backend.describe().items() if cell not in ignored}
                (in_scopes if self._live else at_rest)[backend.name] = cells
        return at_rest, in_scopes

    def is_like(self, other: State) -> bool:
        """Tell whether another state is the same."""
        return (
            self._has_scopes_of(other) and not self._differences(other) and self.emulation == other.emulation
        )

    def _has_scopes_of(self, other: State) -> bool:
        return dict(self._live) == dict(other._live)

    def _differences(self, now: State) -> dict[str, list[str]]:
        """Say what differs, by the names of backends."""
        pairs = [(self._cells, now._cells)]
        if self._has_scopes_of(now):  # else other scopes, other levels
            pairs.append((self._cells_in_scopes, now._cells_in_scopes))
        found: dict[str, list[str]] = {}
        for before, after in pairs:
            for name in before.keys() & after.keys():
                for cell, value in before[name].items():
                    if value != after[name].get(cell):
                        found.setdefault(name, []).append(
                            f"{name} {cell}: {value} -> {after[name].get(cell)}"
                        )
        return found

    def bring_back(self, *, emulation: bool = True) -> tuple[list[str], list[str]]:
        """Undo what has changed since; say what that was, and what could not be undone.

        A scope that a thread has entered which was there before stays: it may
        be about to leave it. Until then the settings are its.

        Args:
            emulation: Whether that is to be undone, too.
        """
        if self._leaked():
            gc.collect()  # those that nothing refers to any more end by themselves
        failures: list[str] = []
        with ledger.applied.torch_flags.at_rest(), ledger.lock:
            leaked = self._leaked()
            changed = {entry: rank for entry, rank in self._live.items() if entry.rank not in (ENDED, rank)}
            differences = self._differences(State())
            changes = [
                *(f"{_scope(entry)} is still live" for entry in leaked),
                *(f"{_scope(entry)} asked for {_level(rank)} before" for entry, rank in changed.items()),
                *itertools.chain(*differences.values()),
            ]
            for entry in leaked:
                _do(failures, ledger.end_soon, entry)
            for entry, rank in changed.items():
                _do(failures, ledger.set_back, entry, rank)
            if differences or changed:
                self._bring_settings_back(differences.keys(), failures)
            ledger.applied.default_set = self._default_set
        if emulation:
            now = emulated_hardware()
            if now not in (self.emulation, None):  # to switch it off is to put back what is usual
                changes.append(f"emulation: {self.emulation or 'off'} -> {now}")
            set_emulation(self.emulation)
        return changes, failures

    def _leaked(self) -> list[Entry]:
        live = [entry for entry in ledger.all_live() if entry not in self._live]
        return [entry for entry in live if self._is_new(entry.owner.thread)]

    def _is_new(self, owner: Owner) -> bool:
        older = {thread.ident for thread in self._threads if thread.is_alive()}
        return owner.gone or owner is this_thread.owner or owner.thread_id not in older

    def _bring_settings_back(self, names: Iterable[str], failures: list[str]) -> None:
        applied = ledger.applied
        if applied.saved:
            applied.rest_at(self._at_rest, self._coming)
            if self._written is not None and {*ledger.all_live()} == {*self._live}:
                applied.torch_flags.restore(self._written)
            else:
                _do(failures, lambda: ledger.settle(activate=False))
            return
        for backend in ledger.backends():
            if backend.name in names:
                failed = put_back((backend,), self._coming, (self._at_rest[backend.name],))
                if failed is not None:
                    failures.append(str(failed))


def _do(failures: list[str], call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except PrecisionScopeError as error:
        failures.append(str(error))


def _at_rest() -> dict[str, object]:
    """Return what each backend holds or, while scopes are live, is to hold when the last of them ends."""
    found: dict[str, object] = dict(ledger.applied.held())
    for backend in ledger.backends():
        if backend.name not in found:
            with contextlib.suppress(Exception):  # a backend that fails says so elsewhere
                if backend.is_active():
                    found[backend.name] = backend.save()
    return found


def _scope(entry: Entry) -> str:
    return f"a scope at {_level(entry.rank)}, entered in {entry.owner},"


def _level(rank: int) -> str:
    return "no level" if rank == ASKS_NOTHING else repr(LEVELS[rank].value)


@contextlib.contextmanager
def at_level(level: Float32MatmulPrecision) -> Generator[None]:
    """Make a level the process default, for all threads and tasks, and bring the state back.

    Where the calling thread is in a scope, which hides the default, it is a scope
    in that. While other threads are in scopes, which may be less strict, it is both.
    """
    before = State()
    if innermost() is None:
        set_float32_matmul_precision(level)
    try:
        with contextlib.nullcontext() if ledger.level() is None else matmul_precision(level):
            yield
    finally:
        before.bring_back(emulation=False)
