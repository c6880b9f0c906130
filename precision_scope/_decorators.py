"""Wrapping each kind of callable so that its own code runs in a scope.

Coroutines, generators and async generators run in scopes step by step, so that
they hold the level while they run and nothing while they are suspended.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any, TypeAlias

from precision_scope._dynamo import hide
from precision_scope._entries import ASKS_NOTHING, Entry, top
from precision_scope._graphs import leave_to_python, own_attributes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    from precision_scope._scopes import matmul_precision

_MakeScope: TypeAlias = "Callable[[], matmul_precision]"

_METHOD_KINDS: tuple[type[Any], ...] = (staticmethod, classmethod)


def decorate(function: Any, make_scope: _MakeScope) -> Any:
    """Return a wrapper of the same kind that runs ``function`` in scopes.

    Args:
        function: What to wrap.
        make_scope: Makes a scope; each call or step gets a new one.

    Raises:
        TypeError: If ``function`` is a class or cannot be called.
    """
    if isinstance(function, _METHOD_KINDS):
        return type(function)(decorate(function.__func__, make_scope))
    if isinstance(function, type):
        raise TypeError(
            f"cannot decorate the class {function.__name__}; "
            "decorate those of its methods that need the level"
        )
    if not callable(function):
        raise TypeError(f"expected a function to decorate, got {type(function).__name__}")
    # The state of a callable object is its own; the attributes of a function go along.
    wrapper = _wrapper(function, make_scope)
    if inspect.isroutine(function):
        vars(wrapper).update(own_attributes(function))
    functools.update_wrapper(wrapper, function, updated=())
    return leave_to_python(hide(wrapper, callees=False))


def _wrapper(function: Callable[..., Any], make_scope: _MakeScope) -> Callable[..., Any]:
    if _is(inspect.iscoroutinefunction, function):
        return _coroutine_function(function, make_scope)
    if _is(inspect.isasyncgenfunction, function):
        return _async_generator_function(function, make_scope)
    if _is(inspect.isgeneratorfunction, function):
        steps = _generator_function(function, functools.partial(_StepScope, make_scope))
        return types.coroutine(steps) if _is(_makes_awaitable_generators, function) else steps

    def call(*args: Any, **kwargs: Any) -> Any:
        with make_scope():
            return function(*args, **kwargs)

    return call


def _is(predicate: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Ask about ``function`` and about what a call of it comes down to."""
    return predicate(function) or predicate(_called(function))


def _called(function: Any) -> Any:
    """Return the function behind partials and objects with a ``__call__``."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def _makes_awaitable_generators(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_ITERABLE_COROUTINE)


class _StepScope:
    """The scope around each step of one generator, coroutine or async generator.

    It ends with the step, unless the function suspends inside a with-block of
    its own: then it stays, below that one, and is below it in the next step
    too. Entered anew, it would be the innermost one there.
    """

    __slots__ = ("_make_scope", "_own", "_scope", "_top")

    def __init__(self, make_scope: _MakeScope) -> None:
        self._make_scope = make_scope
        self._scope: matmul_precision | None = None
        self._top: Entry | None = None  # the context's, when the step began
        self._own: list[Entry] = []  # of the blocks that the function is suspended in

    def __enter__(self) -> None:
        if not self._is_inside_own_block():
            self._end()
            self._scope = scope = self._make_scope()
            scope.__enter__()
        self._top = top.get()

    def __exit__(self, *_: object) -> None:
        entry = top.get()
        while entry is not None and entry is not self._top:
            self._own.append(entry)
            entry = entry.parent
        if not self._is_inside_own_block():
            self._end()

    def _is_inside_own_block(self) -> bool:
        """Tell whether the function is in a block of its own that this context, too, is in."""
        self._own = [entry for entry in self._own if entry.rank < ASKS_NOTHING]
        entry = top.get() if self._own else None
        while entry is not None and entry not in self._own:
            entry = entry.parent
        return entry is not None

    def _end(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)


def _generator_function(
    function: Callable[..., Any], step_scope: Callable[[], _StepScope]
) -> Callable[..., Generator[Any, Any, Any]]:
    def steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        scope: Any = step_scope()
        generator: Any = None
        resume: Any = None
        value: Any = None
        try:
            while True:
                try:
                    with scope:
                        if generator is None:
                            generator = function(*args, **kwargs)
                            args, kwargs = (), {}  # whether to keep them is up to the function
                            resume = generator.send
                        value = resume(value)
                except StopIteration as stop:
                    return stop.value
                try:
                    value = yield value
                    resume = generator.send
                except BaseException as error:  # GeneratorExit too: close() throws it
                    resume, value = generator.throw, error
        finally:
            # An error's traceback leads to this frame, which must not lead back.
            scope = generator = resume = value = None

    return steps


def _coroutine_function(
    function: Callable[..., Any], make_scope: _MakeScope
) -> Callable[..., Coroutine[Any, Any, Any]]:
    # A coroutine is stepped by send and throw as a generator is.
    steps = types.coroutine(_generator_function(function, functools.partial(_StepScope, make_scope)))

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        running = steps(*args, **kwargs)
        del args, kwargs
        return await running

    return coroutine


def _async_generator_function(
    function: Callable[..., Any], make_scope: _MakeScope
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        scope: Any = _StepScope(make_scope)
        with scope:
            generator: Any = function(*args, **kwargs)
        del args, kwargs
        # What asend returns suspends wherever the function awaits: it is stepped in turn.
        step = types.coroutine(_generator_function(_call, lambda: scope))
        finalise = sys.get_asyncgen_hooks().finalizer
        resume: Any = functools.partial(_first_asend, generator)
        value: Any = None
        try:
            while True:
                try:
                    value = await step(resume, value)
                except StopAsyncIteration:
                    return
                try:
                    value = yield value
                    resume = generator.asend
                except BaseException as error:  # GeneratorExit too: aclose() throws it
                    resume, value = generator.athrow, error
        finally:
            if generator.ag_frame is not None and finalise is not None:
                finalise(generator)  # a scope has failed: it has not come to its end
            scope = generator = resume = value = None  # as above

    return async_generator


def _call(function: Callable[[Any], Any], value: Any) -> Any:
    return function(value)


def _first_asend(generator: AsyncGenerator[Any, Any], value: Any) -> Any:
    """Make the first step, at which a generator takes on the event loop's hooks, without them.

    The loop closes the wrapper, which closes what it wraps. A loop that closed
    both would do so at the same time.
    """
    hooks = sys.get_asyncgen_hooks()
    try:
        sys.set_asyncgen_hooks(None, _leave_alone)
        return generator.asend(value)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _leave_alone(_generator: AsyncGenerator[Any, Any]) -> None:
    """Keep the garbage collector, too, from closing what is wrapped."""
