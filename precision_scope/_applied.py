"""What is applied: the backends, and what each held before the first scope.

Everything here runs under the ledger's lock, but a signal handler can come
between any two calls; see the ledger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from precision_scope._errors import PrecisionScopeError
from precision_scope._levels import Float32MatmulPrecision
from precision_scope.backends._base import Backend
from precision_scope.backends._torch import TorchFlags

_Saved: TypeAlias = tuple[Backend, object]
"""A backend and its setting from before the first scope."""


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


def _failed(failures: list[_Failure]) -> PrecisionScopeError:
    """Return the error that reports the failures, naming each backend."""
    message = "; ".join(
        f"backend {backend.name!r} could not {what}: {type(error).__name__}: {error}"
        for backend, what, error in failures
    )
    failed = PrecisionScopeError(message, tuple(failure.backend.name for failure in failures))
    failed.__cause__ = failures[0].error
    return failed


def _put_back(saved: tuple[_Saved, ...], default: Float32MatmulPrecision | None) -> BaseException | None:
    """Restore backends, and set them to a new default; each twice if it fails.

    An exception can be a signal handler's, and the second time succeeds.

    Returns:
        The error that reports what failed the first time, or an interrupt.
    """
    failures: list[_Failure] = []
    interrupt: BaseException | None = None
    for backend, state in saved:
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
        backend.apply(default)


class Holding:
    """Which backends are held at one time; never changed, only replaced.

    Attributes:
        backends: Those that follow the live scopes, torch's flags first.
        idle: The other registered ones, which may have become active.
        apply: Applies a level to all that are held, whichever fail.
    """

    __slots__ = ("apply", "backends", "idle")

    def __init__(self, held: Iterable[Backend], registered: tuple[Backend, ...]) -> None:
        self.backends = tuple(held)
        self.idle = tuple(
            backend for backend in registered if not any(backend is held for held in self.backends)
        )
        # torch's flags alone are the usual case, and their setter cannot fail.
        self.apply: Callable[[Float32MatmulPrecision], object] = (
            self.backends[0].apply
            if len(self.backends) == 1
            else functools.partial(_apply_to_each, self.backends)
        )


class Applied:
    """The registered backends; torch's flags are the first of them.

    Attributes:
        backends: The registered backends.
        holding: Which of them follow the live scopes.
        next_default: The process default to come when the last scope ends, if
            it was set while scopes were live.
    """

    def __init__(self, torch_flags: TorchFlags) -> None:
        self._torch_flags = torch_flags
        self._saved: tuple[_Saved, ...] = ()  # of the held backends, in their order
        self.next_default: Float32MatmulPrecision | None = None
        self._register((torch_flags,), ())

    def _register(self, backends: tuple[Backend, ...], saved: tuple[_Saved, ...]) -> None:
        self.backends = backends
        self._nothing_held = Holding((), backends)
        self._torch_held = Holding((self._torch_flags,), backends)
        holding = Holding((backend for backend, _ in saved), backends)
        # All or nothing.
        self._saved = saved
        self.holding = holding

    def hold_active(self) -> Holding:
        """Save and hold the backends that have become active.

        Raises:
            PrecisionScopeError: For the first that fails.
        """
        if not self._saved:
            saved = ((self._torch_flags, self._torch_flags.save()),)
            if not self._saved:  # else a handler came between
                # All or nothing.
                self._saved = saved
                self.holding = holding = self._torch_held
                if not holding.idle:
                    return holding
        for backend in self.holding.idle:
            try:
                if not backend.is_active():
                    continue
                state = backend.save()
            except Exception as error:
                raise _failed([_Failure(backend, "be saved", error)]) from error
            holding = Holding((*self.holding.backends, backend), self.backends)
            if not any(backend is held for held in self.holding.backends):  # as above
                # All or nothing.
                self._saved = (*self._saved, (backend, state))
                self.holding = holding
        return self.holding

    def restore(self) -> BaseException | None:
        """Put every held backend back as it was, or at the new default, whichever fail.

        Returns:
            What is to be raised when everything is done. An interrupt between
            the backends is raised at once: then call it again.
        """
        if self.holding is self._torch_held and self.next_default is None:
            # torch's flags alone: the hot path, and they cannot fail.
            self._torch_flags.restore(self._saved[0][1])
            if self.next_default is None:
                return None
        default, error = self.next_default, _put_back(self._saved, self.next_default)
        while default is not self.next_default:  # it was set meanwhile
            default, error = self.next_default, _put_back(self._saved, self.next_default)
        return error

    def is_holding(self) -> bool:
        """Tell whether any backend is held."""
        return bool(self._saved)

    def let_go(self) -> None:
        """Hold nothing; what was held has been put back."""
        # All or nothing.
        self.holding = self._nothing_held
        self._saved = ()
        self.next_default = None

    def set_default(self, level: Float32MatmulPrecision) -> None:
        """Apply a level for good to every active backend, or to none."""
        changed: list[_Saved] = []
        try:
            for backend in self.backends:
                try:
                    if backend.is_active():
                        changed.append((backend, backend.save()))
                        backend.apply(level)
                except Exception as error:
                    raise _failed([_Failure(backend, f"be set to {level.value!r}", error)]) from error
        except BaseException:
            _put_back(tuple(changed), None)
            raise

    def default(self) -> Float32MatmulPrecision:
        """Return the level in force where no scope is live."""
        if self.next_default is not None:
            return self.next_default
        if self._saved:
            return self._torch_flags.level_of(self._saved[0][1])
        return self._torch_flags.current_level()

    def add(self, backend: Backend, level: Float32MatmulPrecision | None) -> None:
        """Register a backend, and give it the level that live scopes have in force."""
        if any(other.name == backend.name for other in self.backends):
            raise ValueError(f"a backend named {backend.name!r} is registered; unregister that one first")
        before = self._saved
        self._register((*self.backends, backend), before)
        try:
            if level is not None:
                self.hold_active().apply(level)
        except BaseException:
            added = self._saved[len(before) :]
            self._register(self.backends[:-1], before)
            _put_back(added, None)
            raise

    def remove(self, name: str) -> None:
        """Restore a backend and drop it."""
        backend = next((backend for backend in self.backends[1:] if backend.name == name), None)
        if backend is None:
            names = ", ".join(repr(backend.name) for backend in self.backends[1:]) or "none"
            raise ValueError(f"cannot unregister a backend named {name!r}; those registered: {names}")
        held = tuple(pair for pair in self._saved if pair[0] is backend)
        self._register(
            tuple(other for other in self.backends if other is not backend),
            tuple(pair for pair in self._saved if pair[0] is not backend),
        )
        error = _put_back(held, None)
        if error is not None:
            raise error
