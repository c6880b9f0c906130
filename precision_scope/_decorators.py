"""Wrapping each kind of callable so that its own code runs in a scope.

Coroutines, generators and async generators get a new scope for every step, so
that they hold the level while they run and nothing while they are suspended.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

_MakeScope: TypeAlias = Callable[[], AbstractContextManager[None]]


def decorate(function: Any, make_scope: _MakeScope) -> Any:
    """Return a wrapper of the same kind that runs ``function`` in scopes.

    Args:
        function: What to wrap.
        make_scope: Makes a scope; each call or step gets a new one.

    Raises:
        TypeError: If ``function`` is a class or cannot be called.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorate(function.__func__, make_scope))
    if isinstance(function, type):
        raise TypeError(
            f"cannot decorate the class {function.__name__}: decorate those of its methods that need the level"
        )
    if not callable(function):
        raise TypeError(f"expected a function to decorate, got {type(function).__name__}")
    # The state of a callable object is its own; the attributes of a function go along.
    updated = functools.WRAPPER_UPDATES if inspect.isroutine(function) else ()
    return functools.wraps(function, updated=updated)(_wrapper(function, make_scope))


def _wrapper(function: Callable[..., Any], make_scope: _MakeScope) -> Callable[..., Any]:
    if _is(inspect.iscoroutinefunction, function):
        return _coroutine_function(function, make_scope)
    if _is(inspect.isasyncgenfunction, function):
        return _async_generator_function(function, make_scope)
    if _is(inspect.isgeneratorfunction, function):
        steps = _generator_function(function, make_scope)
        code = getattr(function, "__code__", None)
        awaitable = code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE
        return types.coroutine(steps) if awaitable else steps

    def call(*args: Any, **kwargs: Any) -> Any:
        with make_scope():
            return function(*args, **kwargs)

    return call


def _is(predicate: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Ask about a function or, for an object that is called, about its ``__call__``."""
    return predicate(function) or (not inspect.isroutine(function) and predicate(type(function).__call__))


def _generator_function(
    function: Callable[..., Any], make_scope: _MakeScope
) -> Callable[..., Generator[Any, Any, Any]]:
    def steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with make_scope():
            generator = function(*args, **kwargs)
        resume, value = generator.send, None
        while True:
            try:
                with make_scope():
                    yielded = resume(value)
            except StopIteration as stop:
                return stop.value
            try:
                value = yield yielded
                resume = generator.send
            except BaseException as error:  # GeneratorExit too: close() throws it
                resume, value = generator.throw, error

    return steps


def _coroutine_function(
    function: Callable[..., Any], make_scope: _MakeScope
) -> Callable[..., Coroutine[Any, Any, Any]]:
    # A coroutine is stepped by send and throw as a generator is.
    steps = types.coroutine(_generator_function(function, make_scope))

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await steps(*args, **kwargs)

    return coroutine


def _async_generator_function(
    function: Callable[..., Any], make_scope: _MakeScope
) -> Callable[..., AsyncGenerator[Any, Any]]:
    step = _coroutine_function(_call, make_scope)

    async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with make_scope():
            generator = function(*args, **kwargs)
        resume, value = generator.asend, None
        while True:
            try:
                yielded = await step(resume, value)
            except StopAsyncIteration:
                return
            try:
                value = yield yielded
                resume = generator.asend
            except BaseException as error:  # GeneratorExit too: aclose() throws it
                resume, value = generator.athrow, error

    return async_generator


def _call(function: Callable[[Any], Any], value: Any) -> Any:
    return function(value)
