"""What is applied: the backends, and what each held before the first scope.

Everything here runs under the ledger's lock, but a signal handler can come
between any two calls; see the ledger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
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


def _failed(failures: list[_Failure]) -> PrecisionScopeError:
    """Return the error that reports the failures, naming each backend."""
    message = "; ".join(
        f"backend {backend.name!r} could not {what}: {type(error).__name__}: {error}"
        for backend, what, error in failures
    )
    failed = PrecisionScopeError(message, tuple(failure.backend.name for failure in failures))
    failed.__cause__ = failures[0].error
    return failed


def _put_back(
    backends: tuple[Backend, ...], default: Float32MatmulPrecision | None, *states: object
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
        idle: The other registered ones, which may have become active.
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
        registered: tuple[Backend, ...],
        default: Float32MatmulPrecision | None = None,
    ) -> None:
        self.backends = held
        self.idle = tuple(backend for backend in registered if not any(backend is other for other in held))
        self.default = default
        self.apply: Callable[[Float32MatmulPrecision], object]
        self.restore: Callable[..., BaseException | None]
        if len(held) == 1 and default is None:
            # torch's flags alone: the usual case and the hot path, and they cannot fail.
            self.apply, self.restore = held[0].apply, held[0].restore
        else:
            self.apply = functools.partial(_apply_to_each, held)
            self.restore = functools.partial(_put_back, held, default)


class Applied:
    """The registered backends; torch's flags are the first of them.

    Attributes:
        backends: The registered backends.
        holding: Which of them follow the live scopes.
        nothing_held: What ``holding`` is where no scope is live.
        torch_held: What it is where torch's flags alone are held, the usual case.
        torch_flags: torch's own flags.
        saved: What each of the held ones had saved, in their order.
    """

    def __init__(self, torch_flags: TorchFlags) -> None:
        self.torch_flags = torch_flags
        self.holding: Holding = Holding((), (torch_flags,))
        self._register((torch_flags,), (), ())

    def _register(
        self, backends: tuple[Backend, ...], held: tuple[Backend, ...], saved: tuple[object, ...]
    ) -> None:
        self.backends = backends
        self.nothing_held = Holding((), backends)
        self.torch_held = Holding((self.torch_flags,), backends)
        holding = Holding(held, backends, self.holding.default) if held else self.nothing_held
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
                state = backend.save()
            except Exception as error:
                raise _failed([_Failure(backend, "be saved", error)]) from error
            while any(backend is idle for idle in self.holding.idle):
                before = self.holding
                holding = Holding((*before.backends, backend), self.backends, before.default)
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
            self.holding = Holding(self.holding.backends, self.backends, level)
            return
        changed: list[Backend] = []
        saved: list[object] = []
        try:
            for backend in self.backends:
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
            _put_back(tuple(changed), None, *saved[: len(changed)])
            raise

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
        """Register a backend, and give it the level that live scopes have in force."""
        if any(other.name == backend.name for other in self.backends):
            raise ValueError(f"a backend named {backend.name!r} is registered; unregister that one first")
        held, saved = self.holding.backends, self.saved
        self._register((*self.backends, backend), held, saved)
        try:
            if level is not None:
                self.hold_active().apply(level)
        except BaseException:
            added = self.holding.backends[len(held) :], self.saved[len(saved) :]
            self._register(self.backends[:-1], held, saved)
            _put_back(added[0], None, *added[1])
            raise

    def remove(self, name: str) -> None:
        """Restore a backend and drop it."""
        backend = next((backend for backend in self.backends[1:] if backend.name == name), None)
        if backend is None:
            names = ", ".join(repr(backend.name) for backend in self.backends[1:]) or "none"
            raise ValueError(f"cannot unregister a backend named {name!r}; those registered: {names}")
        pairs = list(zip(self.holding.backends, self.saved, strict=True))
        kept = [pair for pair in pairs if pair[0] is not backend]
        self._register(
            tuple(other for other in self.backends if other is not backend),
            tuple(held for held, _ in kept),
            tuple(state for _, state in kept),
        )
        error = next((_put_back((held,), None, state) for held, state in pairs if held is backend), None)
        if error is not None:
            raise error
