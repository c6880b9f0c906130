"""What type checkers make of the package: checked by mypy and pyright, never run.

The comments that ignore an error are checks, too: both complain of those for
which there is no error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import functools
import sys
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, Literal, TypeVar

import precision_scope
from precision_scope import (
    FLOAT32_MATMUL_PRECISION,
    Float32MatmulPrecision,
    disable_emulation,
    enable_emulation,
    get_float32_matmul_precision,
    matmul_precision,
    report,
    set_float32_matmul_precision,
)
from precision_scope.backends import Backend, register_backend, unregister_backend
from precision_scope.distributed import verify_ranks

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

T = TypeVar("T")


# What takes a level.

matmul_precision("highest")
matmul_precision("high")
matmul_precision("medium")
matmul_precision(Float32MatmulPrecision.HIGH)
matmul_precision(get_float32_matmul_precision())
matmul_precision(None)
matmul_precision(True)  # type: ignore[arg-type]
matmul_precision(b"high")  # type: ignore[arg-type]
matmul_precision()  # type: ignore[call-arg]
matmul_precision("highest", backward=True)
matmul_precision(None, backward=False)
matmul_precision("highest", backward=1)  # type: ignore[arg-type]
matmul_precision("highest", True)  # type: ignore[call-arg]

set_float32_matmul_precision("highest")
set_float32_matmul_precision(Float32MatmulPrecision.MEDIUM)
set_float32_matmul_precision(get_float32_matmul_precision())
set_float32_matmul_precision(None)  # type: ignore[arg-type]


def passed_through(setting: Literal["highest", "high", "medium"] | Float32MatmulPrecision | None) -> None:
    """Pass an optional setting on, in all the ways a caller may spell it."""
    matmul_precision(setting)


# What comes back.

assert_type(get_float32_matmul_precision(), Float32MatmulPrecision)
assert_type(Float32MatmulPrecision("high"), Float32MatmulPrecision)
assert_type(FLOAT32_MATMUL_PRECISION.HIGH, Literal[Float32MatmulPrecision.HIGH])
assert_type(precision_scope.__version__, str)
as_a_string: str = get_float32_matmul_precision()
setter: Callable[[Float32MatmulPrecision], None] = set_float32_matmul_precision
assert_type(report().wanted, Float32MatmulPrecision)
assert_type(report().backends, dict[str, dict[str, str]])
assert_type([scope.task for scope in report().scopes], list[str | None])
assert_type(report().to_dict(), dict[str, Any])
assert_type(report().emulation, Literal["cuda", "tpu"] | None)
enable_emulation("cuda")
enable_emulation(like="tpu")
enable_emulation("gpu")  # type: ignore[arg-type]
enable_emulation()  # type: ignore[call-arg]
disable_emulation()
missing = precision_scope.matmul_precison  # type: ignore[attr-defined]
register_backend(object())  # type: ignore[arg-type]
Backend()  # type: ignore[abstract]
verify_ranks()
verify_ranks(None)
finishes: Callable[[str], None] = unregister_backend


# The with-block.

with matmul_precision("high", backward=True) as entered:
    assert_type(entered, None)


def returns_from_a_block() -> int:
    """Need no return after the block: a scope swallows no errors."""
    with matmul_precision("high"):
        return 1


# The decorator, on every kind of callable.


@matmul_precision("high")
def function(first: int, /, second: str = "", *rest: bytes, third: bool, **others: float) -> list[int]:
    """Have parameters of every kind."""
    return [first, len(second), len(rest), third, len(others)]


assert_type(function(1, "2", b"3", third=True, fourth=4.0), list[int])
function("1", third=True)  # type: ignore[arg-type]
function(1)  # type: ignore[call-arg]
function(first=1, third=True)  # type: ignore[call-arg]


@matmul_precision("high")
def generic(value: T, others: list[T]) -> dict[str, T]:
    """Have type variables."""
    return {str(len(others)): value}


assert_type(generic(1, [2]), dict[str, int])
assert_type(generic("1", ["2"]), dict[str, str])


@matmul_precision(None)
async def coroutine_function(value: int) -> str:
    """Be a coroutine function."""
    return str(value)


returns_a_coroutine: Callable[[int], Coroutine[Any, Any, str]] = coroutine_function


async def awaits() -> None:
    """Await decorated coroutines."""
    assert_type(await coroutine_function(1), str)
    await coroutine_function("1")  # type: ignore[arg-type]
    assert_type(await Model().coroutine_method(1), str)


@matmul_precision("high")
def generator_function(value: int) -> Generator[int, str, bytes]:
    """Be a generator function."""
    return (yield value).encode()


assert_type(generator_function(1), Generator[int, str, bytes])
assert_type(generator_function(1).send("1"), int)
generator_function(1).send(1)  # type: ignore[arg-type]


@matmul_precision("high")
def iterator_function(value: int) -> Iterator[int]:
    """Be a generator function that says less of itself."""
    yield value


assert_type([value for value in iterator_function(1)], list[int])  # noqa: C416


@matmul_precision("high")
async def async_generator_function(value: int) -> AsyncGenerator[int, str]:
    """Be an async generator function."""
    assert_type((yield value), str)


async def consumes() -> None:
    """Consume a decorated async generator."""
    generator = async_generator_function(1)
    assert_type(generator, AsyncGenerator[int, str])
    assert_type(await generator.asend("1"), int)
    await generator.asend(1)  # type: ignore[arg-type]
    assert_type([value async for value in generator], list[int])


@matmul_precision("high")
async def async_iterator_function(value: int) -> AsyncIterator[int]:
    """Be an async generator function that says less of itself."""
    yield value


assert_type(async_iterator_function(1), AsyncIterator[int])


@matmul_precision("high")
@types.coroutine
def awaitable_generator(value: int) -> Generator[str, bytes, int]:
    """Be a generator that can be awaited."""
    yield str(value)
    return value


async def awaits_a_generator() -> None:
    """Await a decorated generator."""
    assert_type(await awaitable_generator(1), int)


class Model:
    """Has decorated methods."""

    @matmul_precision("high")
    def method(self, value: int) -> str:
        """Be a method."""
        return str(value)

    @matmul_precision("high")
    async def coroutine_method(self, value: int) -> str:
        """Be a coroutine method."""
        return str(value)

    @staticmethod
    @matmul_precision("high")
    def static_outside(value: int) -> str:
        """Be a static method."""
        return str(value)

    @matmul_precision("high")
    @staticmethod
    def static_inside(value: int) -> str:
        """Be a static method."""
        return str(value)

    @classmethod
    @matmul_precision("high")
    def class_outside(cls, value: int) -> str:
        """Be a class method."""
        return f"{cls}{value}"

    @matmul_precision("high")
    @classmethod
    def class_inside(cls, value: int) -> str:
        """Be a class method."""
        return f"{cls}{value}"

    @property
    @matmul_precision("high")
    def attribute(self) -> int:
        """Be a property."""
        return 1

    def __call__(self, value: int) -> str:
        """Be called."""
        return str(value)


model = Model()
assert_type(model.method(1), str)
assert_type(Model.method(model, 1), str)
model.method("1")  # type: ignore[arg-type]
assert_type(model.static_outside(1), str)
assert_type(Model.static_outside(1), str)
Model.static_outside("1")  # type: ignore[arg-type]
assert_type(model.static_inside(1), str)
assert_type(Model.static_inside(1), str)
Model.static_inside("1")  # type: ignore[arg-type]
assert_type(model.class_outside(1), str)
assert_type(Model.class_outside(1), str)
Model.class_outside("1")  # type: ignore[arg-type]
assert_type(model.class_inside(1), str)
assert_type(Model.class_inside(1), str)
Model.class_inside("1")  # type: ignore[arg-type]
assert_type(model.attribute, int)


# The decorator, applied by hand.

scope = matmul_precision("medium")

assert_type(scope(model.method)(1), str)
scope(model.method)("1")  # type: ignore[arg-type]
assert_type(scope(model)(1), str)
assert_type(scope(functools.partial(function, 1, third=True)), functools.partial[list[int]])
assert_type(scope(functools.partial(function, 1, third=True))(), list[int])
assert_type(scope(len)([]), int)
as_a_lambda: Callable[[int], str] = scope(lambda value: str(value + 1))
assert_type(scope(scope(function))(1, third=True), list[int])
scope(1)  # type: ignore[call-overload]
scope("function")  # type: ignore[call-overload]
