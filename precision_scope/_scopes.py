"""The scope object: a with-block and a decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

from precision_scope._decorators import decorate
from precision_scope._dynamo import compiling, hide, hide_entry
from precision_scope._entries import ASKS_NOTHING, ENDED, RANKS, Entry, covering, tagging, top
from precision_scope._errors import PrecisionScopeError
from precision_scope._graphs import ignored_by_torchscript, refuse_to_be_recorded
from precision_scope._ledger import GENERAL, ScopeKey, ledger
from precision_scope._levels import LEVELS, level_error
from precision_scope._locks import get_ident
from precision_scope._owners import owner_in, running_loop, this_thread
from precision_scope._pickles import make_scope
from precision_scope._torch_api import EXPORTING, compiler_flags, is_traced, running_pass

if TYPE_CHECKING:
    from types import TracebackType

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ClassMethod = TypeVar("_ClassMethod", bound="classmethod[Any, Any, Any]")


_get_top = top.get
_set_top = top.set
_lock = ledger.lock
_holder = _lock.holder
_hold = _holder.setdefault
_applied = ledger.applied
_over_and_done = ledger.over_and_done
_nothing_to_end: Callable[[], object] = bool  # does nothing, and not in Python


@final
@ignored_by_torchscript
class matmul_precision:  # noqa: N801 -- named as torch names its scopes: no_grad, autocast
    """Run a block, or a function, at a float32 matmul precision.

    As a with-block it sets the level for the code inside and puts torch's
    float32 matmul state back exactly when the block ends, however it ends.
    As a decorator it does so around every call; a decorated coroutine,
    generator or async generator holds the level only while its own code runs,
    never while it is suspended.

    Scopes nest: the innermost one decides. The level covers what runs inside
    the scope; a ``backward()`` that is called later runs at the level in force
    then, unless ``backward`` is true. Around code compiled by torch.compile a
    scope adds no graph break; inside of it, it is one.

    Args:
        level: ``"highest"``, ``"high"`` or ``"medium"``, as a string or a
            :class:`Float32MatmulPrecision`. None asks for nothing, so that an
            optional setting can be passed straight through.
        backward: Whether what is recorded inside the scope, also in plain
            scopes nested in it, keeps its level for the backward pass, whenever
            and in whatever thread that runs. The first entry into such a scope
            calls :func:`enable_isolation`.

    Raises:
        TypeError: If ``level`` is not a string, or ``backward`` not a bool, when
            the scope is made.
        ValueError: If ``level`` is not the name of a level, likewise.
        PrecisionScopeError: If a backend fails, at entry or at exit; if
            ``backward`` is true and this torch lacks what that is built on; or
            at entry in a program that torch.export or torch.jit.trace records,
            which would run without the scope.

    Example:
        >>> import torch
        >>> from precision_scope import get_float32_matmul_precision, matmul_precision
        >>> with matmul_precision("medium"):
        ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
        ...     print(get_float32_matmul_precision())
        medium
        >>> @matmul_precision("highest")
        ... def solve(a, b):
        ...     return torch.linalg.solve(a, b)
        >>> @matmul_precision("highest", backward=True)
        ... def loss(a, b):
        ...     return (a @ b).square().mean()

    One object can be used again, entered while already entered, and shared by
    threads and tasks. Each thread and task has its own scopes; tasks inherit
    those that were live where they were started. Where scopes of different
    threads or tasks disagree, the process runs at the strictest level, unless
    :func:`enable_isolation` has given each its own.
    """

    __slots__ = ("__del__", "__weakref__", "_key", "_rank")

    # An interrupt on the first instruction of __exit__ leaves one chance: the
    # with-statement drops the object, and its finaliser ends the scope. The
    # finaliser is a slot, so that it is Python code only while there is
    # something to end: one that ran each time would swallow interrupts.
    __del__: Callable[[], object]

    def __init__(self, level: str | None, *, backward: bool = False) -> None:
        self.__del__ = _nothing_to_end
        self._key = key = ScopeKey()
        key.entries = key.owed = 0
        key.covers_backward = backward is not False and _covers_backward(level, backward)
        try:
            self._rank = RANKS[level]
        except (KeyError, TypeError):
            raise level_error(level) from None
        if type(level) is not str and not isinstance(level, (str, NoneType)):
            raise level_error(level)  # it only compares equal to a level

    # Entering and leaving are the hot path: straight-line code for a plain
    # stack of scopes, see the ledger, and no call in Python that can be spared.
    # The lock is taken by hand, since "with" takes longer than all that it
    # would guard; no signal is handled between the inner try and the release.

    @hide_entry
    def __enter__(self) -> None:
        if (is_traced() or compiling or compiler_flags[EXPORTING]) and self._rank != ASKS_NOTHING:
            refuse_to_be_recorded()
        me = get_ident()
        entry = Entry()
        entry.parent = parent = _get_top()
        loop = running_loop()
        entry.owner = owner = this_thread.owner if loop is None else owner_in(loop)
        entry.key = key = self._key
        rank = self._rank
        if tagging:
            entry.backward_pass, entry.covered_by = running_pass(), covering(parent)
        try:
            try:
                if _hold(0, me) is not me:
                    me = _lock.wait(me)
                self.__del__ = key
                if (
                    parent is ledger.tip
                    and rank != ASKS_NOTHING
                    and (parent is None or parent.owner is owner)
                ):
                    # All or nothing.
                    entry.rank, ledger.tip = rank, entry
                    key.entries += 1
                    holding = _applied.holding
                    if holding is _applied.nothing_held:  # as hold_active() begins
                        saved = (_applied.torch_flags.save(),)
                        if not _applied.saved:
                            # All or nothing.
                            _applied.holding, _applied.saved = _applied.torch_held, saved
                        holding = _applied.holding
                    if holding.idle:
                        holding = _applied.hold_active()
                    apply = holding.apply  # calling a slot's value as a method takes longer
                    apply(LEVELS[rank])
                    if ledger.tip is not entry:  # a handler came between, or a save had to wait
                        ledger.settle(activate=True)
                else:
                    ledger.enter(entry, rank)
            except BaseException:
                _lock.let_go(me)
                raise
            if me:
                del _holder[0]
            _set_top(entry)
            if key.covers_backward:
                _begin_recording(entry)
            if _over_and_done:
                ledger.see_to_the_rest()
            if ledger.tip is GENERAL:
                ledger.check_conflict()
        except BaseException:
            if getattr(entry, "rank", ENDED) != ENDED:  # else the interrupt came before anything
                with _lock:
                    ledger.end(entry)
            raise

    @hide
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        key = self._key
        error = None
        entry = _get_top()
        me = get_ident()
        try:
            try:
                if _hold(0, me) is not me:
                    me = _lock.wait(me)
                if entry is not None and entry is ledger.tip and entry.key is key:
                    parent = entry.parent
                    # All or nothing.
                    entry.rank, ledger.tip = ENDED, parent
                    key.entries -= 1
                    if parent is not None:
                        apply = _applied.holding.apply
                        apply(LEVELS[parent.rank])
                    else:
                        error = (holding := _applied.holding).restore(_applied.saved)
                        if ledger.tip is None and _applied.holding is holding:  # no handler came between
                            _applied.holding, _applied.saved = _applied.nothing_held, ()
                        else:
                            ledger.settle(activate=True)
                    _set_top(parent)
                else:
                    entry = ledger.find(key)
                    if entry is not None:
                        ledger.end(entry)
                if key.entries == 0:
                    self.__del__ = _nothing_to_end
            except BaseException:
                _lock.let_go(me)
                raise
            if me:
                del _holder[0]
            if key.covers_backward:
                tagging[0].end()
            if _over_and_done:
                ledger.see_to_the_rest()
        except BaseException:  # finish what was cut short
            if entry is None or entry.key is not key:
                entry = ledger.find(key)
            if entry is not None:
                with _lock:
                    ledger.end(entry)
            raise
        if error is not None:
            raise error

    @overload
    def __call__(self, function: _Function, /) -> _Function: ...
    @overload
    def __call__(self, function: _ClassMethod, /) -> _ClassMethod: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate a function, so that each of its calls runs in a scope.

        Args:
            function: A function, method, ``staticmethod``, ``classmethod``,
                coroutine function, generator function, async generator
                function or other callable.

        Returns:
            A callable of the same kind and signature.

        Raises:
            TypeError: For a class, or what cannot be called.
        """
        return decorate(function, self._make())

    @property
    def _level(self) -> str | None:
        return None if self._rank == ASKS_NOTHING else LEVELS[self._rank].value

    def _make(self) -> Callable[[], matmul_precision]:
        """Return what makes scopes like this one."""
        if self._key.covers_backward:
            return functools.partial(matmul_precision, self._level, backward=True)
        return functools.partial(matmul_precision, self._level)

    def __reduce__(self) -> tuple[Callable[..., matmul_precision], tuple[object, ...]]:
        return make_scope, (self._level, self._key.covers_backward)

    def __repr__(self) -> str:
        backward = ", backward=True" if self._key.covers_backward else ""
        return f"matmul_precision({self._level!r}{backward})"


def _begin_recording(entry: Entry) -> None:
    # Only now: it needs more of torch than all the rest.
    try:
        from precision_scope._recording import begin_recording  # noqa: PLC0415

        begin_recording(entry)
    except PrecisionScopeError:
        raise
    except (AttributeError, RuntimeError) as error:
        raise PrecisionScopeError(
            f"backward=True does not work on this torch: {type(error).__name__}: {error}"
        ) from error


def _covers_backward(level: object, backward: object) -> bool:
    if backward is not True:
        raise TypeError(f"backward must be True or False, got {type(backward).__name__}")
    return level is not None
