"""What is applied: the backends, and what each held before the first scope.

Everything here runs under the ledger's lock, but a signal handler can come
between any two calls; see the ledger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from precision_scope._errors import PrecisionScopeError
from precision_scope._levels import Float32MatmulPrecision
from precision_scope.backends._base import Backend
from precision_scope.backends._torch import TorchFlags


class _Failure(NamedTuple):
    backend: Backend
    what: str
    error: Exception


def _apply_to_each(backends: tuple[Backend, ...], level: Float32MatmulPrecision) -> None:
    failures: list[_Failure] = []
    for backend in backends:
        try:
            backend.apply(level)
        except Exception as error:
            if isinstance(backend, TorchFlags):  # never fails: a signal handler raised
                raise
            failures.append(_Failure(backend, f"be set to {level.value!r}", error))
    if failures:
        raise _failed(failures)


def _is_among(backends: tuple[Backend, ...], backend: Backend) -> bool:
    return any(backend is other for other in backends)  # never by their own idea of equality


def _without(excluded: tuple[Backend, ...], backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
    return tuple(backend for backend in backends if not _is_among(excluded, backend))


def _failed(failures: list[_Failure]) -> PrecisionScopeError:
    """Return the error that reports the failures, naming each backend."""
    message = "; ".join(
        f"backend {backend.name!r} could not {what}: {type(error).__name__}: {error}"
        for backend, what, error in failures
    )
    failed = PrecisionScopeError(message, tuple(failure.backend.name for failure in failures))
    failed.__cause__ = failures[0].error
    return failed


def put_back(
    backends: tuple[Backend, ...], default: Float32MatmulPrecision | None, states: Sequence[object]
) -> BaseException | None:
    """Restore backends, and set them to a new default; each twice if it fails.

    An exception can be a signal handler's, and the second time succeeds.

    Returns:
        The error that reports what failed the first time, or an interrupt.
    """
    failures: list[_Failure] = []
    interrupt: BaseException | None = None
    for backend, state in zip(backends, states, strict=True):
        try:
            _put_one_back(backend, state, default)
        except BaseException as error:
            if isinstance(backend, TorchFlags) or not isinstance(error, Exception):
                interrupt = error
            else:
                failures.append(_Failure(backend, "be restored", error))
            with contextlib.suppress(BaseException):  # the first one is raised
                _put_one_back(backend, state, default)
    return interrupt or (_failed(failures) if failures else None)


def _put_one_back(backend: Backend, state: object, default: Float32MatmulPrecision | None) -> None:
    backend.restore(state)
    if default is not None:
        _set_default(backend, default)


def _set_default(backend: Backend, level: Float32MatmulPrecision) -> None:
    if isinstance(backend, TorchFlags):
        backend.set_default(level)
    else:
        backend.apply(level)


class Holding:
    """Which backends are held at one time; never changed, only replaced.

    Attributes:
        backends: Those that follow the live scopes, torch's flags first.
        idle: The others that may have become active.
        default: The process default to come when the last scope ends, if it
            was set while scopes were live.
        apply: Applies a level to all that are held, whichever fail.
        restore: Puts all that are held back as they were, given what each had
            saved, or at the new default, whichever fail. It returns what is to
            be raised when everything is done; an interrupt between the
            backends is raised at once: then call it again.
    """

    __slots__ = ("apply", "backends", "default", "idle", "restore")

    def __init__(
        self,
        held: tuple[Backend, ...],
        ready: tuple[Backend, ...],
        default: Float32MatmulPrecision | None = None,
    ) -> None:
        self.backends = held
        self.idle = _without(held, ready)
        self.default = default
        self.apply: Callable[[Float32MatmulPrecision], object]
        self.restore: Callable[[tuple[object, ...]], BaseException | None]
        if len(held) == 1 and isinstance(held[0], TorchFlags) and default is None:
            # torch's flags alone: the usual case and the hot path, and they cannot fail.
            self.apply, self.restore = held[0].apply, held[0].restore_first
        else:
            self.apply = functools.partial(_apply_to_each, held)
            self.restore = functools.partial(put_back, held, default)


class Applied:
    """The registered backends; torch's flags are the first of them.

    Attributes:
        backends: The registered backends.
        awaiting: Those whose module nobody has imported yet.
        ready: The others.
        holding: Which of them follow the live scopes.
        nothing_held: What ``holding`` is where no scope is live.
        torch_held: What it is where torch's flags alone are held, the usual case.
        torch_flags: torch's own flags.
        default_set: The process default, if it has been set.
        saved: What each of the held ones had saved, in their order.
    """

    def __init__(self, torch_flags: TorchFlags) -> None:
        self.torch_flags = torch_flags
        self.awaiting: tuple[Backend, ...] = ()
        # Who was not there to get the default that has been set.
        self.default_set: Float32MatmulPrecision | None = None
        self._missed_default: tuple[Backend, ...] = ()
        self.holding: Holding = Holding((), (torch_flags,))
        self._register((torch_flags,), (), ())

    def _register(
        self, backends: tuple[Backend, ...], held: tuple[Backend, ...], saved: tuple[object, ...]
    ) -> None:
        self.backends = backends
        self.ready = ready = _without(self.awaiting, backends)
        self.nothing_held = Holding((), ready)
        self.torch_held = Holding((self.torch_flags,), ready)
        holding = Holding(held, ready, self.holding.default) if held else self.nothing_held
        # All or nothing.
        self.saved = saved
        self.holding = holding

    def hold_active(self) -> Holding:
        """Save and hold the backends that have become active.

        Raises:
            PrecisionScopeError: For the first that fails.
        """
        if not self.saved:
            saved = (self.torch_flags.save(),)
            if not self.saved:  # else a handler came between
                # All or nothing.
                self.holding, self.saved = self.torch_held, saved
        for backend in self.holding.idle:
            try:
                if not backend.is_active():
                    continue
            except Exception as error:
                raise _failed([_Failure(backend, "be saved", error)]) from error
            self._give_default(backend)
            try:
                state = backend.save()
            except Exception as error:
                raise _failed([_Failure(backend, "be saved", error)]) from error
            while _is_among(self.holding.idle, backend):
                before = self.holding
                holding = Holding((*before.backends, backend), self.ready, before.default)
                if self.holding is before:  # as above
                    # All or nothing.
                    self.saved = (*self.saved, state)
                    self.holding = holding
        return self.holding

    def set_default(self, level: Float32MatmulPrecision) -> None:
        """Set the process default on every active backend, or on none.

        While scopes are live it takes effect when the last of them ends.
        """
        if self.saved:
            self.torch_flags.coming_default(level)
            self.holding = Holding(self.holding.backends, self.ready, level)
            self.default_set, self._missed_default = level, _without(self.holding.backends, self.backends)
            return
        changed: list[Backend] = []
        saved: list[object] = []
        try:
            for backend in self.ready:
                try:
                    if backend.is_active():
                        saved.append(backend.save())
                        if self.saved:  # a scope was entered while the save had to wait
                            self.set_default(level)
                            return
                        changed.append(backend)
                        _set_default(backend, level)
                except Exception as error:
                    raise _failed([_Failure(backend, f"be set to {level.value!r}", error)]) from error
        except BaseException:
            put_back(tuple(changed), None, saved[: len(changed)])
            raise
        self.default_set, self._missed_default = level, _without(tuple(changed), self.backends)

    def held(self) -> list[tuple[str, object]]:
        """Return the name of each backend that follows the live scopes, and what it had saved."""
        return [
            (backend.name, saved) for backend, saved in zip(self.holding.backends, self.saved, strict=True)
        ]

    def rest_at(self, saved: Mapping[str, object], default: Float32MatmulPrecision | None) -> None:
        """Have other settings brought back when the last scope ends.

        Args:
            saved: What backends had saved, by their names.
            default: The process default that is to be set then, if any.
        """
        self.saved = tuple(saved.get(name, present) for name, present in self.held())
        self.torch_flags.coming_rest(self.saved[0])
        if default is not None:
            self.torch_flags.coming_default(default)
        self.holding = Holding(self.holding.backends, self.ready, default)

    def _give_default(self, backend: Backend) -> None:
        """Have a backend that has become active take on the default that was set before, or fail unchanged.

        Unless other code has changed that since, on torch's flags alone.
        """
        if not _is_among(self._missed_default, backend):
            return
        default = self.default()
        if default == self.default_set:
            saved: tuple[object, ...] = ()
            try:
                saved = (backend.save(),)
                backend.apply(default)
            except BaseException as error:
                put_back((backend,) if saved else (), None, saved)
                if not isinstance(error, Exception):
                    raise
                raise _failed([_Failure(backend, f"be set to {default.value!r}", error)]) from error
        self._missed_default = _without((backend,), self._missed_default)

    def default(self) -> Float32MatmulPrecision:
        """Return the level in force where no scope is live."""
        if self.holding.default is not None:
            return self.holding.default
        if self.saved:
            return self.torch_flags.level_of(self.saved[0])
        return self.torch_flags.current_level()

    def replace_torch_flags(self, torch_flags: TorchFlags) -> None:
        """Have other code stand for torch's flags, which are as they were."""
        self.torch_flags = torch_flags
        if self.holding.default is not None:
            torch_flags.coming_default(self.holding.default)
        self._register(
            (torch_flags, *self.backends[1:]),
            tuple(torch_flags if isinstance(held, TorchFlags) else held for held in self.holding.backends),
            self.saved,
        )

    def add(self, backend: Backend, level: Float32MatmulPrecision | None) -> None:
        """Register a backend.

        It gets the level that live scopes have in force, or the default: now, or
        when its module has been imported.
        """
        if any(other.name == backend.name for other in self.backends):
            raise ValueError(f"a backend named {backend.name!r} is registered; unregister that one first")
        if backend.module is not None:
            self.awaiting = (*self.awaiting, backend)
        self._missed_default = (*self._missed_default, backend)
        held, saved = self.holding.backends, self.saved
        self._register((*self.backends, backend), held, saved)
        if backend.module is not None:
            return
        try:
            self._take_in(backend, level)
        except BaseException:
            added = self.holding.backends[len(held) :], self.saved[len(saved) :]
            self._forget(backend)
            self._register(self.backends[:-1], held, saved)
            put_back(added[0], None, added[1])
            raise

    def activate(self, backend: Backend, level: Float32MatmulPrecision | None) -> None:
        """Take in a backend whose module has been imported."""
        self.awaiting = _without((backend,), self.awaiting)
        self._register(self.backends, self.holding.backends, self.saved)
        self._take_in(backend, level)

    def _take_in(self, backend: Backend, level: Float32MatmulPrecision | None) -> None:
        if level is not None:
            self.hold_active().apply(level)
        elif self.default_set is not None and _is_among(self.ready, backend):
            try:
                active = backend.is_active()
            except Exception as error:
                raise _failed([_Failure(backend, "be asked whether it is active", error)]) from error
            if active:
                self._give_default(backend)

    def _forget(self, backend: Backend) -> None:
        self.awaiting = _without((backend,), self.awaiting)
        self._missed_default = _without((backend,), self._missed_default)

    def remove(self, name: str) -> None:
        """Restore a backend and drop it."""
        backend = next((backend for backend in self.backends[1:] if backend.name == name), None)
        if backend is None:
            names = ", ".join(repr(backend.name) for backend in self.backends[1:]) or "none"
            raise ValueError(f"cannot unregister a backend named {name!r}; those registered: {names}")
        self._forget(backend)
        pairs = list(zip(self.holding.backends, self.saved, strict=True))
        kept = [pair for pair in pairs if pair[0] is not backend]
        self._register(
            tuple(other for other in self.backends if other is not backend),
            tuple(held for held, _ in kept),
            tuple(state for _, state in kept),
        )
        error = next((put_back((held,), None, (state,)) for held, state in pairs if held is backend), None)
        if error is not None:
            raise error
