"""Rules 13 and 14: the decorator, on every kind of callable, call by call and step by step."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import pickle
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pytest
import torch

from precision_scope import (
    Float32MatmulPrecision,
    PrecisionScopeError,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger
from precision_scope.backends import Backend, register_backend, unregister_backend

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator

Seen: TypeAlias = "tuple[str, str]"
T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")


def seen() -> Seen:
    """Return the level that the context gets and the one that torch is at."""
    return get_float32_matmul_precision(), torch.get_float32_matmul_precision()


OUTSIDE = ("highest", "highest")
INSIDE = ("medium", "medium")
HIGH = ("high", "high")

medium = matmul_precision("medium")  # one object decorates them all


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    """Fail the test that does not start and end at the default level."""
    assert seen() == OUTSIDE
    yield
    assert seen() == OUTSIDE


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave the freeing of objects to their reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop that must have no complaints, also while it shuts down."""
    complaints: list[dict[str, Any]] = []

    async def start() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        return await main

    result = asyncio.run(start())
    assert complaints == []
    return result


@types.coroutine
def pause(value: object = None) -> Generator[object, Any, Any]:
    """Suspend a coroutine that is stepped by hand; return what it is sent."""
    return (yield value)


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Step a coroutine that never suspends, or no more, to its end."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    result: T = stopped.value.value
    return result


# What is decorated: four kinds of function, each as a plain function, as a
# method and so on. The body of each reports what it sees.


def plain_body(*_: object) -> Seen:
    """Return what is seen."""
    return seen()


async def coroutine_body(*_: object) -> Seen:
    """Return what is seen after a suspension."""
    await asyncio.sleep(0)
    return seen()


def generator_body(*_: object) -> Generator[Seen, None, None]:
    """Yield what is seen."""
    yield seen()


async def async_generator_body(*_: object) -> AsyncGenerator[Seen, None]:
    """Yield what is seen after a suspension."""
    await asyncio.sleep(0)
    yield seen()


async def first(generator: AsyncGenerator[T, None]) -> T:
    """Return what an async generator yields first, and close it."""
    async with contextlib.aclosing(generator):
        return await anext(generator)


BODIES: dict[str, Callable[..., Any]] = {
    "function": plain_body,
    "coroutine function": coroutine_body,
    "generator function": generator_body,
    "async generator function": async_generator_body,
}
FIRST_RESULT: dict[str, Callable[[Any], Seen]] = {
    "function": lambda result: result,
    "coroutine function": run,
    "generator function": next,
    "async generator function": lambda result: run(first(result)),
}
# What inspect says of each kind; of a plain function, none of it.
PREDICATES: dict[str, Callable[[object], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "generator function": inspect.isgeneratorfunction,
    "async generator function": inspect.isasyncgenfunction,
}


def class_with(attribute: object) -> Any:
    """Return a class with an attribute ``run``."""
    return type("Owner", (), {"run": attribute, "__call__": attribute})


SHAPES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": medium,
    "method": lambda body: class_with(medium(body))().run,
    "bound method": lambda body: medium(class_with(body)().run),
    "static method, outside": lambda body: class_with(staticmethod(medium(body))).run,
    "static method, inside": lambda body: class_with(medium(staticmethod(body))).run,
    "class method, outside": lambda body: class_with(classmethod(medium(body))).run,
    "class method, inside": lambda body: class_with(medium(classmethod(body))).run,
    "partial": lambda body: medium(functools.partial(body, 1)),
    "partial of a bound method": lambda body: medium(functools.partial(class_with(body)().run)),
    "callable object": lambda body: medium(class_with(body)()),
    "partial of a callable object": lambda body: medium(functools.partial(class_with(body)())),
    "decorated twice": lambda body: medium(matmul_precision("high")(medium(body))),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", BODIES)
def test_every_kind_in_every_shape_runs_at_the_level(kind: str, shape: str) -> None:
    """Functions, coroutines, generators and async generators, as functions, methods and objects."""
    decorated = SHAPES[shape](BODIES[kind])
    assert FIRST_RESULT[kind](decorated()) == INSIDE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", BODIES)
def test_inspect_says_the_kind_of_what_is_decorated(kind: str, shape: str) -> None:
    """Frameworks that ask inspect how to call something get the right answer."""
    decorated = SHAPES[shape](BODIES[kind])
    assert [name for name, predicate in PREDICATES.items() if predicate(decorated)] == [
        name for name in PREDICATES if name == kind
    ]


@pytest.mark.parametrize(
    "decorated",
    [medium(lambda: seen()), medium(lambda: (yield seen()))],  # noqa: PLW0108
    ids=["plain", "generator"],
)
def test_lambdas_run_at_the_level(decorated: Callable[[], Any]) -> None:
    """A lambda is a function, or a generator function, like any other."""
    result = decorated()
    assert (next(result) if inspect.isgenerator(result) else result) == INSIDE


def test_functions_written_in_c_run_at_the_level() -> None:
    """A built-in function can be decorated, and calls back at the level."""
    nothing: list[Seen] = []
    assert medium(functools.reduce)(lambda found, _: [*found, seen()], [1, 2], nothing) == [INSIDE] * 2


class Model:
    """Tells what its decorated methods are called with."""

    @medium
    def method(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Return what it is called with."""
        return self, args, kwargs

    @staticmethod
    @medium
    def static_outside(*args: object, **kwargs: object) -> tuple[object, ...]:
        """Return what it is called with."""
        return args, kwargs

    @medium
    @staticmethod
    def static_inside(*args: object, **kwargs: object) -> tuple[object, ...]:
        """Return what it is called with."""
        return args, kwargs

    @classmethod
    @medium
    def class_outside(cls, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Return what it is called with."""
        return cls, args, kwargs

    @medium
    @classmethod
    def class_inside(cls, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Return what it is called with."""
        return cls, args, kwargs


def test_a_method_gets_its_object_and_its_arguments() -> None:
    """A decorated method binds."""
    model = Model()
    assert model.method(1, two=2) == (model, (1,), {"two": 2})


@pytest.mark.parametrize("name", ["static_outside", "static_inside"])
def test_a_static_method_gets_its_arguments_alone(name: str) -> None:
    """A decorated static method does not bind, on the class or on an object."""
    assert getattr(Model, name)(1, two=2) == ((1,), {"two": 2})
    assert getattr(Model(), name)(1, two=2) == ((1,), {"two": 2})


@pytest.mark.parametrize("name", ["class_outside", "class_inside"])
def test_a_class_method_gets_the_class_and_its_arguments(name: str) -> None:
    """A decorated class method binds to the class, also to a subclass."""
    subclass = type("Subclass", (Model,), {})
    assert getattr(Model, name)(1, two=2) == (Model, (1,), {"two": 2})
    assert getattr(subclass(), name)(1, two=2) == (subclass, (1,), {"two": 2})


@pytest.mark.parametrize(("name", "kind"), [("static_inside", staticmethod), ("class_inside", classmethod)])
def test_a_decorated_method_object_keeps_its_type(name: str, kind: type) -> None:
    """What the decorator makes of a staticmethod or classmethod is one."""
    assert type(vars(Model)[name]) is kind


# What a function keeps.


def tag(function: F) -> F:
    """Give a function an attribute, as decorators of frameworks do."""
    function.__dict__["tag"] = "tagged"
    return function


@medium
@tag
def described(
    first: int, /, second: str = "2", *rest: bytes, third: bool = True, **others: float
) -> list[int]:
    """Have a description."""
    raise NotImplementedError


@medium
@tag
async def described_coroutine(
    first: int, /, second: str = "2", *rest: bytes, third: bool = True, **others: float
) -> list[int]:
    """Have a description."""
    raise NotImplementedError


@medium
@tag
def described_generator(
    first: int,
    /,
    second: str = "2",
    *rest: bytes,
    third: bool = True,
    **others: float,
) -> Generator[int, str, bytes]:
    """Have a description."""
    raise NotImplementedError
    yield


@medium
@tag
async def described_async_generator(
    first: int,
    /,
    second: str = "2",
    *rest: bytes,
    third: bool = True,
    **others: float,
) -> AsyncGenerator[int, str]:
    """Have a description."""
    raise NotImplementedError
    yield


PARAMETERS = ("first", "second", "rest", "third", "others")
DESCRIBED: dict[str, Any] = {
    "described": described,
    "described_coroutine": described_coroutine,
    "described_generator": described_generator,
    "described_async_generator": described_async_generator,
}


@pytest.mark.parametrize("name", DESCRIBED)
class TestWhatAFunctionKeeps:
    """Each kind of function looks, from outside, as if it were not decorated."""

    def test_it_keeps_its_names(self, name: str) -> None:
        """The name, the qualified name and the module are the function's own."""
        function = DESCRIBED[name]
        assert (function.__name__, function.__qualname__, function.__module__) == (name, name, __name__)

    def test_it_keeps_its_documentation(self, name: str) -> None:
        """The docstring is the function's own."""
        assert DESCRIBED[name].__doc__ == "Have a description."

    def test_it_keeps_its_signature(self, name: str) -> None:
        """Inspect shows the parameters and the return type of the function itself."""
        signature = inspect.signature(DESCRIBED[name])
        assert str(signature.replace(return_annotation=inspect.Signature.empty)) == (
            "(first: 'int', /, second: 'str' = '2', *rest: 'bytes', third: 'bool' = True, **others: 'float')"
        )
        assert signature.return_annotation == DESCRIBED[name].__wrapped__.__annotations__["return"]

    def test_it_keeps_its_annotations(self, name: str) -> None:
        """The annotations are the function's own."""
        assert DESCRIBED[name].__annotations__ == DESCRIBED[name].__wrapped__.__annotations__
        assert set(DESCRIBED[name].__annotations__) == {*PARAMETERS, "return"}

    def test_it_keeps_its_attributes(self, name: str) -> None:
        """What other decorators left on the function is on the decorated one."""
        assert DESCRIBED[name].tag == "tagged"

    def test_it_shows_what_it_wraps(self, name: str) -> None:
        """The undecorated function is there for whoever needs it."""
        wrapped = DESCRIBED[name].__wrapped__
        assert wrapped.__code__.co_name == name
        assert inspect.unwrap(DESCRIBED[name]) is wrapped

    def test_it_can_be_pickled_by_name(self, name: str) -> None:
        """Process pools can send it."""
        assert pickle.loads(pickle.dumps(DESCRIBED[name])) is DESCRIBED[name]


def test_a_bound_decorated_method_can_be_pickled() -> None:
    """A method goes to another process together with its object."""
    method = pickle.loads(pickle.dumps(Model().method))
    assert isinstance(method()[0], Model)


def test_a_partial_shows_its_signature() -> None:
    """The signature of a decorated partial lacks what is given already."""
    decorated = medium(functools.partial(described, 1, third=False))
    assert list(inspect.signature(decorated).parameters) == ["second", "rest", "third", "others"]


def test_a_callable_object_shows_the_signature_of_its_call() -> None:
    """What stands for the object is called as the object is."""

    class Called:
        def __call__(self, first: int) -> None: ...

    assert list(inspect.signature(medium(Called())).parameters) == ["first"]


def test_the_state_of_a_callable_object_stays_its_own() -> None:
    """Attributes of an object are not copied: the copies would go stale."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self) -> int:
            self.count += 1
            return self.count

    counter = Counter()
    decorated: Any = medium(counter)
    assert decorated() == 1
    assert not hasattr(decorated, "count")
    assert decorated.__wrapped__ is counter


def test_an_abstract_method_stays_abstract() -> None:
    """Decorating an abstract method does not make a class of it that can be used."""

    class Abstract(abc.ABC):
        @medium
        @abc.abstractmethod
        def method(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]


# What is refused.


def test_a_class_is_refused_with_advice() -> None:
    """A class is named, and so is what to decorate instead."""
    with pytest.raises(TypeError, match=r"cannot decorate the class Whole\b.* decorate those of its methods"):

        @medium
        class Whole: ...


@pytest.mark.parametrize(
    "value", [None, 3, "highest", [seen], property()], ids=lambda value: type(value).__name__
)
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    """The error says what was given in the place of a function."""
    with pytest.raises(TypeError, match=f"^expected a function to decorate, got {type(value).__name__}$"):
        medium(value)


# Calls.


def test_decorating_changes_nothing() -> None:
    """The level waits for the call."""
    medium(seen)
    assert seen() == OUTSIDE


def test_each_call_brings_the_level_anew() -> None:
    """A second call sees the level as the first did, and nothing is left in between."""
    decorated = medium(seen)
    assert [decorated(), seen(), decorated(), seen()] == [INSIDE, OUTSIDE, INSIDE, OUTSIDE]


def test_the_level_of_the_decorator_wins_over_the_one_around_the_call() -> None:
    """A call is the innermost scope wherever it happens, and what was around comes back."""
    with matmul_precision("high"):
        assert medium(seen)() == INSIDE
        assert seen() == HIGH


def test_what_is_set_inside_a_call_ends_with_it() -> None:
    """The setter speaks to the running call: not to what is around, and not to the next call."""

    @medium
    def call() -> tuple[Seen, Seen]:
        before = seen()
        set_float32_matmul_precision("high")
        return before, seen()

    assert call() == (INSIDE, HIGH)
    assert seen() == OUTSIDE
    assert call() == (INSIDE, HIGH)


def test_an_error_in_a_call_ends_the_level() -> None:
    """The error is the function's own, and the level is put back."""
    error = ZeroDivisionError()

    @medium
    def fail() -> None:
        raise error

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert caught.value is error
    assert seen() == OUTSIDE


def test_a_function_that_calls_itself_is_at_its_level_at_every_depth() -> None:
    """Recursion: a call that ends leaves the outer ones at the level."""

    @medium
    def recurse(depth: int) -> list[Seen]:
        return [seen(), *(recurse(depth - 1) if depth else []), seen()]

    assert recurse(5) == [INSIDE] * 12


def test_functions_of_different_levels_that_call_each_other_take_turns() -> None:
    """Mutual recursion: each call has its function's level, before and after it calls the other."""

    @medium
    def lax(depth: int) -> list[Seen]:
        return [seen(), *strict(depth), seen()]

    @matmul_precision("high")
    def strict(depth: int) -> list[Seen]:
        return [seen(), *(lax(depth - 1) if depth else []), seen()]

    assert lax(2) == [*[INSIDE, HIGH] * 3, *[HIGH, INSIDE] * 3]


def test_one_function_can_run_in_many_threads_at_once() -> None:
    """Concurrent calls of one decorated function do not end one another's level."""
    together = threading.Barrier(8)

    @medium
    def call() -> list[Seen]:
        together.wait()
        return [seen() for _ in range(100)]

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call) for _ in range(8)]
    assert [set(future.result()) for future in calls] == [{INSIDE}] * 8
    assert seen() == OUTSIDE


def test_calls_end_in_any_order() -> None:
    """The level stays for the call that runs longest, and ends with it."""
    go_on = [threading.Event(), threading.Event()]

    @medium
    def call(number: int) -> Seen:
        go_on[number].wait()
        return seen()

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, number) for number in (0, 1)]
        go_on[0].set()
        calls[0].result()
        go_on[1].set()
    assert calls[1].result() == INSIDE
    assert seen() == OUTSIDE


@pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning")
def test_functions_of_different_levels_in_threads_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread gets its function's level, while torch runs at the strictest of them."""
    monkeypatch.setattr(ledger, "_warned", True)
    together = threading.Barrier(2)

    def call() -> Seen:
        together.wait()
        answer = seen()
        together.wait()
        return answer

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(matmul_precision(level)(call)) for level in ("high", "medium")]
    assert [future.result() for future in calls] == [("high", "high"), ("medium", "high")]


# Steps: generators.


def test_a_generator_holds_the_level_only_while_its_code_runs() -> None:
    """The consumer never sees the level, and the generator always does."""

    @medium
    def generate() -> Iterator[Seen]:
        for _ in range(3):
            yield seen()

    assert [(inside, seen()) for inside in generate()] == [(INSIDE, OUTSIDE)] * 3


def test_a_generator_that_has_not_started_has_no_level() -> None:
    """Making the generator runs nothing, and dropping it neither."""
    ran = []

    @medium
    def generate() -> Iterator[None]:
        ran.append(seen())
        yield

    generator = generate()
    assert seen() == OUTSIDE
    del generator
    assert ran == []


def test_the_consumers_own_scope_is_as_it_was_between_the_steps() -> None:
    """A generator that is consumed in a scope does not disturb it."""

    @medium
    def generate() -> Iterator[Seen]:
        yield seen()
        yield seen()

    with matmul_precision("high"):
        assert [(inside, seen()) for inside in generate()] == [(INSIDE, HIGH)] * 2


def test_generators_of_different_levels_can_be_consumed_together() -> None:
    """Interleaved generators have their own level at each step."""

    def generate() -> Iterator[Seen]:
        yield seen()
        yield seen()

    both = zip(medium(generate)(), matmul_precision("high")(generate)(), strict=True)
    assert list(both) == [(INSIDE, HIGH)] * 2


@medium
def echo() -> Generator[tuple[object, Seen], object, str]:
    """Yield what it was sent, or what was thrown at it; return at "stop"."""
    value: object = "started"
    while value != "stop":
        try:
            value = yield value, seen()
        except LookupError as error:
            value = error
    return "stopped"


def test_a_generator_gets_what_it_is_sent() -> None:
    """Sent values arrive, at the level."""
    generator = echo()
    assert next(generator) == ("started", INSIDE)
    assert generator.send("one") == ("one", INSIDE)
    assert generator.send(None) == (None, INSIDE)
    assert seen() == OUTSIDE


def test_a_generator_that_has_not_started_takes_only_none() -> None:
    """As of any generator, the first value that is sent must be None."""
    with pytest.raises(TypeError, match="can't send non-None value"):
        echo().send("early")


def test_a_generator_returns_its_value() -> None:
    """The return value ends the iteration, with StopIteration as always."""
    generator = echo()
    next(generator)
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")
    assert stopped.value.value == "stopped"
    with pytest.raises(StopIteration):
        next(generator)


def test_a_generator_returns_its_value_to_yield_from() -> None:
    """Delegation goes through the decorator, in both directions."""

    def delegate() -> Generator[Any, Any, tuple[str]]:
        return ((yield from echo()),)

    generator = delegate()
    assert next(generator) == ("started", INSIDE)
    assert generator.send(1) == (1, INSIDE)
    error = KeyError()
    assert generator.throw(error) == (error, INSIDE)
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")
    assert stopped.value.value == ("stopped",)


def test_a_generator_can_handle_what_is_thrown_at_it() -> None:
    """The handler gets the very exception, at the level, and the generator goes on."""
    generator = echo()
    next(generator)
    error = KeyError()
    assert generator.throw(error) == (error, INSIDE)
    assert generator.send("on") == ("on", INSIDE)


def test_what_a_generator_does_not_handle_comes_back() -> None:
    """The exception that was thrown reaches the thrower, and the generator has ended."""
    generator = echo()
    next(generator)
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught:
        generator.throw(error)
    assert caught.value is error
    assert caught.value.__context__ is None
    with pytest.raises(StopIteration):
        next(generator)


def test_what_is_thrown_at_a_generator_that_has_not_started_comes_back() -> None:
    """Nothing of the generator runs."""
    with pytest.raises(KeyError):
        echo().throw(KeyError())


def test_a_generator_cleans_up_at_the_level_when_something_is_thrown() -> None:
    """Its finally clause is its own code."""
    cleaned = []

    @medium
    def generate() -> Generator[None, None, None]:
        try:
            yield
        finally:
            cleaned.append(seen())

    generator = generate()
    next(generator)
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError())
    assert cleaned == [INSIDE]
    assert seen() == OUTSIDE


def test_an_error_in_a_generator_ends_the_level() -> None:
    """The error is the generator's own, without another as its context."""

    @medium
    def generate() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    generator = generate()
    next(generator)
    with pytest.raises(ZeroDivisionError) as caught:
        next(generator)
    assert caught.value.__context__ is None
    assert seen() == OUTSIDE


def test_a_generator_that_raises_stop_iteration_has_not_returned() -> None:
    """It is a RuntimeError, as in any generator."""

    @medium
    def generate() -> Iterator[None]:
        yield
        raise StopIteration  # noqa: PLR1708 -- on purpose

    generator = generate()
    next(generator)
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        next(generator)


class Closed:
    """Notes how the generators that it makes are closed."""

    def __init__(self) -> None:
        """Have seen nothing yet."""
        self.cleaned: list[Seen] = []
        self.errors: list[BaseException] = []

    @medium
    def generate(self) -> Generator[int, None, str]:
        """Yield until it is closed, and return a value then."""
        try:
            yield 1
            yield 2
        except GeneratorExit as error:
            self.errors.append(error)
            return "closed"
        finally:
            self.cleaned.append(seen())
        return "ended"


def test_closing_a_generator_closes_it_at_the_level() -> None:
    """The generator gets GeneratorExit where it is suspended, and cleans up at the level."""
    closed = Closed()
    generator = closed.generate()
    next(generator)
    generator.close()
    assert [type(error) for error in closed.errors] == [GeneratorExit]
    assert closed.cleaned == [INSIDE]
    assert seen() == OUTSIDE


@pytest.mark.skipif(sys.version_info < (3, 13), reason="close() returns None before 3.13")
def test_closing_a_generator_returns_what_it_returns() -> None:
    """From Python 3.13 on, close() has a value."""
    generator = Closed().generate()
    next(generator)
    value: object = generator.close()  # type: ignore[func-returns-value, unused-ignore]
    assert value == "closed"


def test_closing_a_generator_twice_closes_it_once() -> None:
    """A closed generator stays closed."""
    closed = Closed()
    generator = closed.generate()
    next(generator)
    generator.close()
    generator.close()
    assert closed.cleaned == [INSIDE]


def test_a_generator_that_will_not_close_is_an_error() -> None:
    """A generator that yields instead of closing is told so, as any is."""

    @medium
    def generate() -> Generator[int, None, None]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    generator = generate()
    next(generator)
    with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
        generator.close()
    assert seen() == OUTSIDE


def test_a_generator_abandoned_half_way_is_closed_at_the_level() -> None:
    """When its last reference goes, it cleans up as if it were closed."""
    closed = Closed()
    for _ in closed.generate():
        break
    assert closed.cleaned == [INSIDE]
    assert seen() == OUTSIDE


def test_a_generator_in_a_cycle_is_closed_when_it_is_collected() -> None:
    """The garbage collector, which closes in any order what it finds, leaves no level."""
    closed = Closed()

    def abandon() -> None:
        cycle: list[Any] = [closed.generate()]
        next(cycle[0])
        cycle.append(cycle)

    abandon()
    assert seen() == OUTSIDE
    gc.collect()
    assert len(closed.cleaned) == 1
    assert seen() == OUTSIDE


def test_a_generator_can_go_from_thread_to_thread() -> None:
    """Each step has the level in the thread that takes it."""
    generator = echo()
    next(generator)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(generator.send, "there").result() == ("there", INSIDE)
        assert pool.submit(seen).result() == OUTSIDE
    assert generator.send("back") == ("back", INSIDE)


def test_a_generator_that_delegates_to_itself_is_at_its_level_at_every_depth() -> None:
    """Recursion, with the consumer at its own level in between."""

    @medium
    def descend(depth: int) -> Iterator[Seen]:
        yield seen()
        if depth:
            yield from descend(depth - 1)
        yield seen()

    assert [(inside, seen()) for inside in descend(3)] == [(INSIDE, OUTSIDE)] * 8


def test_what_is_set_inside_a_step_ends_with_it() -> None:
    """The setter speaks to the running step, not to the consumer or to the next step."""

    @medium
    def generate() -> Iterator[tuple[Seen, Seen]]:
        for _ in range(2):
            before = seen()
            set_float32_matmul_precision("high")
            yield before, seen()

    assert [(inside, seen()) for inside in generate()] == [((INSIDE, HIGH), OUTSIDE)] * 2


@pytest.mark.usefixtures("no_collector")
def test_an_argument_that_a_generator_lets_go_of_is_freed() -> None:
    """The wrapper keeps no reference to what may be a large tensor."""

    @medium
    def consume(batch: torch.Tensor) -> Iterator[None]:
        del batch
        yield

    batch = torch.ones(1)
    alive = weakref.ref(batch)
    generator = consume(batch)
    del batch
    next(generator)
    assert alive() is None


@pytest.mark.usefixtures("no_collector")
def test_a_value_that_the_consumer_lets_go_of_is_freed_before_the_next_step() -> None:
    """While a batch is made, the wrapper does not keep the one before."""
    alive: list[weakref.ref[torch.Tensor]] = []

    @medium
    def generate() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        assert alive[0]() is None
        yield torch.ones(2)

    generator = generate()
    alive.append(weakref.ref(next(generator)))
    assert next(generator).numel() == 2


# Steps: coroutines.


@medium
async def listen() -> tuple[list[tuple[object, Seen]], Seen]:
    """Collect what it is sent, or what is thrown at it, until "stop"."""
    heard: list[tuple[object, Seen]] = []
    value: object = None
    while value != "stop":
        try:
            value = await pause()
        except LookupError as error:
            value = error
        heard.append((value, seen()))
    return heard, seen()


def test_a_coroutine_holds_the_level_only_while_its_code_runs() -> None:
    """Whoever steps it never sees the level; what it is sent arrives at the level."""
    coroutine = listen()
    assert seen() == OUTSIDE
    for value in (None, 1, 2):
        coroutine.send(value)
        assert seen() == OUTSIDE
    with pytest.raises(StopIteration) as stopped:
        coroutine.send("stop")
    assert stopped.value.value == ([(1, INSIDE), (2, INSIDE), ("stop", INSIDE)], INSIDE)
    assert seen() == OUTSIDE


def test_a_coroutine_can_handle_what_is_thrown_at_it() -> None:
    """The handler gets the very exception, at the level, and the coroutine goes on."""
    coroutine = listen()
    coroutine.send(None)
    error = KeyError()
    coroutine.throw(error)
    assert seen() == OUTSIDE
    with pytest.raises(StopIteration) as stopped:
        coroutine.send("stop")
    assert stopped.value.value[0] == [(error, INSIDE), ("stop", INSIDE)]


def test_what_a_coroutine_does_not_handle_comes_back() -> None:
    """The exception that was thrown reaches the thrower, without another as its context."""
    coroutine = listen()
    coroutine.send(None)
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught:
        coroutine.throw(error)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert seen() == OUTSIDE


def test_closing_a_coroutine_closes_it_at_the_level() -> None:
    """It cleans up at the level."""
    cleaned = []

    @medium
    async def wait() -> None:
        try:
            await pause()
        except GeneratorExit:
            cleaned.append(seen())
            raise

    coroutine = wait()
    coroutine.send(None)
    coroutine.close()
    assert cleaned == [INSIDE]
    assert seen() == OUTSIDE


def test_a_coroutine_that_is_never_awaited_warns_under_its_own_name() -> None:
    """The usual warning names the function, and there is no second one for what is wrapped."""

    @medium
    async def forgotten() -> None: ...

    def forget() -> None:
        _ = forgotten()

    with pytest.warns(RuntimeWarning) as caught:
        forget()
    assert [str(warning.message).split("'")[1].rpartition(".")[2] for warning in caught] == ["forgotten"]


def test_a_coroutine_returns_its_value() -> None:
    """What is awaited is what the function returns."""

    @medium
    async def answer() -> int:
        return 42

    assert finish(answer()) == 42


def test_an_error_in_a_coroutine_ends_the_level() -> None:
    """The error is the coroutine's own, without another as its context."""

    @medium
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            await fail()
        assert caught.value.__context__ is None
        assert seen() == OUTSIDE

    run(main())


def test_a_coroutine_that_raises_stop_iteration_has_not_returned() -> None:
    """It is a RuntimeError, as in any coroutine."""

    @medium
    async def stop() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
        stop().send(None)


def test_other_tasks_run_at_their_own_level_while_a_coroutine_is_suspended() -> None:
    """Neither another task nor torch sees the level of a coroutine that waits."""

    async def main() -> None:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        @medium
        async def wait() -> Seen:
            waiting.set()
            await go_on.wait()
            return seen()

        task = asyncio.create_task(wait())
        await waiting.wait()
        assert seen() == OUTSIDE
        go_on.set()
        assert await task == INSIDE

    run(main())


def test_tasks_of_different_levels_interleave_at_their_own() -> None:
    """Each task finds its function's level, and torch at it, after every await."""

    async def observe() -> set[Seen]:
        found = set()
        for _ in range(10):
            found.add(seen())
            await asyncio.sleep(0)
        return found

    async def main() -> list[set[Seen]]:
        levels = ["highest", "high", "medium"] * 3
        return await asyncio.gather(*(matmul_precision(level)(observe)() for level in levels))

    assert run(main()) == [{OUTSIDE}, {HIGH}, {INSIDE}] * 3


def test_a_coroutine_that_awaits_itself_is_at_its_level_at_every_depth() -> None:
    """Recursion, with a suspension before and after each inner call."""

    @medium
    async def descend(depth: int) -> list[Seen]:
        await asyncio.sleep(0)
        inner = await descend(depth - 1) if depth else []
        await asyncio.sleep(0)
        return [*inner, seen()]

    assert run(descend(3)) == [INSIDE] * 4


def test_coroutines_of_different_levels_that_await_one_another_get_their_own() -> None:
    """After every await, the innermost coroutine's level is back."""

    @matmul_precision("high")
    async def inner() -> list[Seen]:
        before = seen()
        await asyncio.sleep(0)
        return [before, seen()]

    @medium
    async def outer() -> list[Seen]:
        before = seen()
        found = await inner()
        return [before, *found, seen()]

    assert run(outer()) == [INSIDE, HIGH, HIGH, INSIDE]


def test_a_task_started_in_a_coroutine_does_not_inherit_its_level() -> None:
    """The level is for the function's own code: a task that it starts has none of it."""

    async def main() -> None:
        found: list[Seen] = []

        async def child() -> None:
            for _ in range(3):
                found.append(seen())
                await asyncio.sleep(0)

        @medium
        async def parent() -> None:
            task = asyncio.create_task(child())
            for _ in range(2):
                await asyncio.sleep(0)
                assert seen() == INSIDE
            await task

        await parent()
        assert found == [OUTSIDE] * 3

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks start eagerly from 3.12 on")
def test_a_task_that_starts_eagerly_in_a_coroutine_does_not_keep_its_level() -> None:
    """A task whose first step is a call from the coroutine has its own level from the second on."""

    async def main() -> Seen:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]

        async def child() -> Seen:
            await asyncio.sleep(0)
            return seen()

        @medium
        async def parent() -> Seen:
            return await asyncio.create_task(child())

        return await parent()

    assert run(main()) == OUTSIDE


def test_a_generator_that_left_its_own_block_inside_the_consumers_leaves_nothing() -> None:
    """Suspended in its own block and resumed in its consumer's, it ends with the step all the same."""

    @medium
    def generator() -> Generator[int, None, None]:
        with matmul_precision("high"):
            yield 1
        yield 2

    steps = generator()
    next(steps)
    with matmul_precision("highest"):
        next(steps)
        assert seen()[0] == "highest"
    assert seen() == OUTSIDE
    steps.close()


def test_a_callback_scheduled_in_a_coroutine_does_not_inherit_its_level() -> None:
    """What the event loop calls later, it calls at its own level."""

    async def main() -> None:
        called: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()

        @medium
        async def schedule() -> Seen:
            asyncio.get_running_loop().call_soon(lambda: called.set_result(seen()))
            return await called

        assert await schedule() == OUTSIDE

    run(main())


def test_a_task_started_in_a_block_inside_a_coroutine_inherits_the_blocks_level() -> None:
    """A with-block is the way to hand a level to tasks, in decorated functions, too."""

    async def child() -> Seen:
        await asyncio.sleep(0)
        return seen()

    @medium
    async def parent() -> Seen:
        with matmul_precision("high"):
            return await asyncio.create_task(child())

    assert run(parent()) == HIGH


def test_a_cancelled_coroutine_cleans_up_at_the_level() -> None:
    """Also after an await in its finally clause, and the task counts as cancelled."""

    async def main() -> None:
        cleaned = []

        @medium
        async def wait() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(seen())
                await asyncio.sleep(0)
                cleaned.append(seen())

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        assert seen() == OUTSIDE
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert cleaned == [INSIDE, INSIDE]

    run(main())


def test_a_coroutine_may_survive_its_cancellation() -> None:
    """A coroutine that handles the cancellation goes on at the level."""

    async def main() -> None:
        @medium
        async def survive() -> Seen:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            return seen()

        task = asyncio.create_task(survive())
        await asyncio.sleep(0)
        task.cancel()
        assert await task == INSIDE

    run(main())


@pytest.mark.usefixtures("no_collector")
def test_an_argument_that_a_coroutine_lets_go_of_is_freed() -> None:
    """The wrapper keeps no reference to what may be a large tensor."""

    @medium
    async def consume(batch: torch.Tensor) -> None:
        del batch
        await pause()

    batch = torch.ones(1)
    alive = weakref.ref(batch)
    coroutine = consume(batch)
    del batch
    coroutine.send(None)
    assert alive() is None
    finish(coroutine)


# Generators that can be awaited.


@types.coroutine
def old_style() -> Generator[Seen, None, Seen]:
    """Be a coroutine as they were before async def."""
    yield seen()
    return seen()


@pytest.mark.parametrize(
    "decorated",
    [
        medium(old_style),
        medium(functools.partial(old_style)),
        medium(class_with(staticmethod(old_style)).run),
    ],
    ids=["plain", "partial", "static method"],
)
def test_a_generator_that_can_be_awaited_still_can(decorated: Callable[[], Any]) -> None:
    """What types.coroutine made awaitable stays so, and runs at the level."""

    async def wait() -> Any:
        return await decorated()

    coroutine = wait()
    assert coroutine.send(None) == INSIDE
    assert seen() == OUTSIDE
    assert finish(coroutine) == INSIDE


def test_a_generator_that_cannot_be_awaited_still_cannot() -> None:
    """A plain generator does not become awaitable."""
    assert not inspect.isawaitable(echo())


# Steps: async generators.


@medium
async def async_echo() -> AsyncGenerator[tuple[object, Seen], object]:
    """Yield what it was sent, or what was thrown at it, after a suspension; end at "stop"."""
    value: object = "started"
    while value != "stop":
        try:
            await asyncio.sleep(0)
            value = yield value, seen()
        except LookupError as error:
            value = error


def test_an_async_generator_holds_the_level_only_while_its_code_runs() -> None:
    """The consumer never sees the level, and the generator does after each of its awaits."""

    @medium
    async def generate() -> AsyncGenerator[list[Seen], None]:
        for _ in range(3):
            before = seen()
            await asyncio.sleep(0)
            yield [before, seen()]

    async def main() -> None:
        assert [(inside, seen()) async for inside in generate()] == [([INSIDE, INSIDE], OUTSIDE)] * 3

    run(main())


def test_other_tasks_run_at_their_own_level_while_an_async_generator_awaits() -> None:
    """Neither another task nor torch sees the level of an async generator that waits."""

    async def main() -> None:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        @medium
        async def generate() -> AsyncGenerator[Seen, None]:
            waiting.set()
            await go_on.wait()
            yield seen()

        task = asyncio.create_task(first(generate()))
        await waiting.wait()
        assert seen() == OUTSIDE
        go_on.set()
        assert await task == INSIDE

    run(main())


def test_the_consumers_own_scope_is_as_it_was_between_the_async_steps() -> None:
    """An async generator that is consumed in a scope does not disturb it."""

    async def main() -> None:
        with matmul_precision("high"):
            async with contextlib.aclosing(async_echo()) as generator:
                assert await anext(generator) == ("started", INSIDE)
                assert seen() == HIGH

    run(main())


def test_an_async_generator_gets_what_it_is_sent() -> None:
    """Sent values arrive, at the level."""

    async def main() -> None:
        generator = async_echo()
        assert await anext(generator) == ("started", INSIDE)
        assert await generator.asend("one") == ("one", INSIDE)
        assert await generator.asend(None) == (None, INSIDE)
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")
        assert seen() == OUTSIDE

    run(main())


def test_an_async_generator_can_handle_what_is_thrown_at_it() -> None:
    """The handler gets the very exception, at the level, and the generator goes on."""

    async def main() -> None:
        generator = async_echo()
        await anext(generator)
        error = KeyError()
        assert await generator.athrow(error) == (error, INSIDE)
        assert await generator.asend("on") == ("on", INSIDE)
        await generator.aclose()

    run(main())


def test_what_an_async_generator_does_not_handle_comes_back() -> None:
    """The exception that was thrown reaches the thrower, and the generator has ended."""

    async def main() -> None:
        generator = async_echo()
        await anext(generator)
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            await generator.athrow(error)
        assert caught.value is error
        assert caught.value.__context__ is None
        with pytest.raises(StopAsyncIteration):
            await anext(generator)
        assert seen() == OUTSIDE

    run(main())


def test_an_error_in_an_async_generator_ends_the_level() -> None:
    """The error is the generator's own, without another as its context."""

    @medium
    async def generate() -> AsyncGenerator[None, None]:
        yield
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def main() -> None:
        generator = generate()
        await anext(generator)
        with pytest.raises(ZeroDivisionError) as caught:
            await anext(generator)
        assert caught.value.__context__ is None
        assert seen() == OUTSIDE

    run(main())


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_an_async_generator_that_raises_stop_iteration_has_not_ended(error: type[Exception]) -> None:
    """It is a RuntimeError, as in any async generator."""

    @medium
    async def generate() -> AsyncGenerator[None, None]:
        yield
        raise error

    async def main() -> None:
        generator = generate()
        await anext(generator)
        with pytest.raises(RuntimeError, match=f"async generator raised {error.__name__}"):
            await anext(generator)

    run(main())


def test_an_async_generator_cannot_be_stepped_twice_at_once() -> None:
    """The second step is refused, as of any async generator, and the first goes on."""

    async def main() -> None:
        generator = async_echo()
        task = asyncio.ensure_future(anext(generator))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="asynchronous generator is already running"):
            await anext(generator)
        assert await task == ("started", INSIDE)
        await generator.aclose()

    run(main())


def test_a_cancelled_step_of_an_async_generator_cleans_up_at_the_level() -> None:
    """The cancellation arrives where the generator awaits."""

    async def main() -> None:
        cleaned = []

        @medium
        async def generate() -> AsyncGenerator[None, None]:
            try:
                await asyncio.sleep(60)
                yield
            finally:
                cleaned.append(seen())
                await asyncio.sleep(0)
                cleaned.append(seen())

        task = asyncio.ensure_future(anext(generate()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == [INSIDE, INSIDE]
        assert seen() == OUTSIDE

    run(main())


class AsyncClosed:
    """Notes how the async generators that it makes are closed."""

    def __init__(self, awaits: int) -> None:
        """Await so many times in the finally clause."""
        self.awaits = awaits
        self.cleaned: list[list[Seen]] = []

    @medium
    async def generate(self) -> AsyncGenerator[int, None]:
        """Yield until it is closed."""
        try:
            yield 1
            yield 2
        finally:
            found = [seen()]
            for _ in range(self.awaits):
                await asyncio.sleep(0)
                found.append(seen())
            self.cleaned.append(found)

    def expect(self, count: int) -> None:
        """Check that so many generators were closed, each once and wholly at the level."""
        assert self.cleaned == [[INSIDE] * (self.awaits + 1)] * count


@pytest.mark.parametrize("awaits", [0, 1, 3])
class TestClosingAsyncGenerators:
    """Whoever closes an async generator, it cleans up once, at the level, without complaints."""

    def test_by_hand(self, awaits: int) -> None:
        """Closing it runs its finally clause to the end, and a second time nothing."""
        closed = AsyncClosed(awaits)

        async def main() -> None:
            generator = closed.generate()
            await anext(generator)
            await generator.aclose()
            closed.expect(1)
            await generator.aclose()
            assert seen() == OUTSIDE

        run(main())
        closed.expect(1)

    def test_by_another_task(self, awaits: int) -> None:
        """The task that closes it need not be the one that consumed it."""
        closed = AsyncClosed(awaits)

        async def main() -> None:
            generator = closed.generate()
            await asyncio.ensure_future(anext(generator))
            await asyncio.create_task(generator.aclose())

        run(main())
        closed.expect(1)

    def test_by_the_end_of_the_event_loop(self, awaits: int) -> None:
        """Generators that are left unfinished are closed when asyncio.run ends."""
        closed = AsyncClosed(awaits)
        unfinished: list[AsyncGenerator[int, None]] = []

        async def main() -> None:
            for _ in range(20):  # asyncio closes them in an order that varies
                generator = closed.generate()
                unfinished.append(generator)
                await anext(generator)

        run(main())
        closed.expect(20)

    def test_by_abandoning_it(self, awaits: int) -> None:
        """A generator whose last reference goes is closed by the event loop."""
        closed = AsyncClosed(awaits)

        async def main() -> None:
            async for _ in closed.generate():
                break
            assert seen() == OUTSIDE
            for _ in range(awaits + 5):
                await asyncio.sleep(0)
            closed.expect(1)

        run(main())

    def test_by_collecting_it(self, awaits: int) -> None:
        """A generator in a cycle is closed by the event loop once the cycle is found."""
        closed = AsyncClosed(awaits)

        async def main() -> None:
            cycle: list[Any] = [closed.generate()]
            await anext(cycle[0])
            cycle.append(cycle)
            del cycle
            gc.collect()
            for _ in range(awaits + 5):
                await asyncio.sleep(0)
            closed.expect(1)

        run(main())


def test_an_async_generator_that_has_not_started_runs_nothing() -> None:
    """Closing or dropping it has nothing to clean up."""
    closed = AsyncClosed(0)

    async def main() -> None:
        await closed.generate().aclose()
        closed.generate()

    run(main())
    assert closed.cleaned == []


def test_an_async_generator_that_will_not_close_is_an_error() -> None:
    """A generator that yields instead of closing is told so, as any is."""

    @medium
    async def generate() -> AsyncGenerator[int, None]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    async def main() -> None:
        generator = generate()
        await anext(generator)
        with pytest.raises(RuntimeError, match="async generator ignored GeneratorExit"):
            await generator.aclose()
        assert seen() == OUTSIDE

    run(main())


def test_an_event_loop_knows_the_decorated_async_generator_alone() -> None:
    """Its hooks are told of one generator, which is the one that the consumer has."""
    known: list[object] = []

    async def main() -> None:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=known.append)
        generator = async_echo()
        await anext(generator)
        await generator.asend("on")
        await generator.aclose()
        assert known == [generator]
        sys.set_asyncgen_hooks(*hooks)

    run(main())


def test_an_event_loop_is_not_asked_to_close_what_has_ended() -> None:
    """Neither what is decorated nor the decorated generator comes to its finaliser after the end."""
    asked: list[object] = []

    async def main() -> None:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=asked.append)
        async with contextlib.aclosing(async_echo()) as generator:
            await anext(generator)
        gc.collect()
        assert asked == []
        sys.set_asyncgen_hooks(*hooks)

    run(main())


def test_the_hooks_of_the_event_loop_stay_in_place() -> None:
    """They are there for the code of the generator, and after its first step."""

    async def main() -> None:
        hooks = sys.get_asyncgen_hooks()

        @medium
        async def generate() -> AsyncGenerator[object, None]:
            yield sys.get_asyncgen_hooks()

        assert await first(generate()) == hooks
        assert sys.get_asyncgen_hooks() == hooks

    run(main())


@pytest.mark.usefixtures("no_collector")
def test_an_argument_that_an_async_generator_lets_go_of_is_freed() -> None:
    """The wrapper keeps no reference to what may be a large tensor."""

    @medium
    async def consume(batch: torch.Tensor) -> AsyncGenerator[None, None]:
        del batch
        yield

    async def main() -> None:
        batch = torch.ones(1)
        alive = weakref.ref(batch)
        generator = consume(batch)
        del batch
        await anext(generator)
        assert alive() is None
        await generator.aclose()

    finish(main())


# Errors are freed.


class Payload:
    """What an error carries."""


def throw_into_generator(payload: Payload) -> None:
    """Throw at a generator that does not handle it."""
    generator = echo()
    next(generator)
    generator.throw(ZeroDivisionError(payload))


def throw_into_coroutine(payload: Payload) -> None:
    """Throw at a coroutine that does not handle it."""
    coroutine = listen()
    coroutine.send(None)
    coroutine.throw(ZeroDivisionError(payload))


def throw_into_async_generator(payload: Payload) -> None:
    """Throw at an async generator that does not handle it."""

    @medium
    async def generate() -> AsyncGenerator[None, None]:
        yield

    async def main() -> None:
        generator = generate()
        await anext(generator)
        await generator.athrow(ZeroDivisionError(payload))

    main().send(None)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("throw", [throw_into_generator, throw_into_coroutine, throw_into_async_generator])
def test_an_error_that_came_back_is_freed_with_its_last_reference(throw: Callable[[Payload], None]) -> None:
    """The frames in its traceback, and the tensors in them, do not wait for the garbage collector."""
    payload = Payload()
    alive = weakref.ref(payload)
    try:
        throw(payload)
    except ZeroDivisionError:
        del payload
    assert alive() is None


@pytest.mark.usefixtures("no_collector")
def test_an_error_that_was_handled_is_freed_when_the_step_ends() -> None:
    """While the generator is suspended again, the wrapper does not keep what was thrown at it."""

    @medium
    def generate() -> Generator[None, None, None]:
        with contextlib.suppress(ZeroDivisionError):
            yield
        yield

    generator = generate()
    next(generator)
    payload = Payload()
    alive = weakref.ref(payload)
    generator.throw(ZeroDivisionError(payload))
    del payload
    assert alive() is None


# Blocks of the function's own.


def test_a_block_around_a_yield_decides_until_it_ends() -> None:
    """The decorator's level does not come back inside a block that the generator is still in."""

    @medium
    def generate() -> Iterator[Seen]:
        with matmul_precision("high"):
            yield seen()
            yield seen()
        yield seen()
        yield seen()

    assert list(generate()) == [HIGH, HIGH, INSIDE, INSIDE]
    assert seen() == OUTSIDE


def test_a_block_around_an_await_decides_until_it_ends() -> None:
    """The decorator's level does not come back inside a block that the coroutine is still in."""

    @medium
    async def wait() -> list[Seen]:
        found = [seen()]
        with matmul_precision("highest"):
            for _ in range(2):
                await asyncio.sleep(0)
                found.append(seen())
        found.append(seen())
        await asyncio.sleep(0)
        return [*found, seen()]

    assert run(wait()) == [INSIDE, OUTSIDE, OUTSIDE, INSIDE, INSIDE]
    assert seen() == OUTSIDE


def test_a_block_in_an_async_generator_decides_until_it_ends() -> None:
    """The decorator's level does not come back inside a block around awaits and yields."""

    @medium
    async def generate() -> AsyncGenerator[Seen, None]:
        with matmul_precision("high"):
            await asyncio.sleep(0)
            yield seen()
            await asyncio.sleep(0)
            yield seen()
        yield seen()
        await asyncio.sleep(0)
        yield seen()

    async def main() -> list[Seen]:
        return [inside async for inside in generate()]

    assert run(main()) == [HIGH, HIGH, INSIDE, INSIDE]
    assert seen() == OUTSIDE


def test_blocks_around_an_await_nest() -> None:
    """Each of several blocks gives way to the one around it, and the last to the decorator."""

    @medium
    async def wait() -> list[Seen]:
        found = []
        with matmul_precision("high"):
            with matmul_precision("highest"):
                await asyncio.sleep(0)
                found.append(seen())
            found.append(seen())
            await asyncio.sleep(0)
            found.append(seen())
        return [*found, seen()]

    assert run(wait()) == [OUTSIDE, HIGH, HIGH, INSIDE]


def test_decorated_coroutines_may_be_suspended_in_blocks_of_several() -> None:
    """A block in a coroutine, a coroutine awaited in it, and a block in that one all keep their order."""

    @matmul_precision("high")
    async def inner() -> list[Seen]:
        with matmul_precision("medium"):
            await asyncio.sleep(0)
            found = [seen()]
        await asyncio.sleep(0)
        return [*found, seen()]

    @medium
    async def outer() -> list[Seen]:
        with matmul_precision("highest"):
            found = await inner()
            found.append(seen())
            await asyncio.sleep(0)
            found.append(seen())
        return [*found, seen()]

    assert run(outer()) == [INSIDE, HIGH, OUTSIDE, OUTSIDE, INSIDE]
    assert seen() == OUTSIDE


def test_a_block_of_none_around_an_await_holds_no_level_either() -> None:
    """While the coroutine is suspended in a block that asks for nothing, nobody sees its level."""

    @medium
    async def wait() -> list[Seen]:
        with matmul_precision(None):
            await pause()
            found = [seen()]
        return [*found, seen()]

    coroutine = wait()
    coroutine.send(None)
    assert seen() == OUTSIDE
    assert finish(coroutine) == [INSIDE, INSIDE]


def test_a_generator_closed_in_a_block_leaves_nothing() -> None:
    """The block ends, and so does the level below it."""

    @medium
    def generate() -> Iterator[Seen]:
        with matmul_precision("high"):
            yield seen()

    for found in generate():
        assert found == HIGH
        break
    assert seen() == OUTSIDE


def test_a_generator_in_a_block_can_go_to_another_thread() -> None:
    """A block is bound to its thread; the level is not, and everything ends."""

    @matmul_precision("high")
    def generate() -> Iterator[Seen]:
        with matmul_precision("high"):
            yield seen()
            yield seen()
        yield seen()

    generator = generate()
    assert next(generator) == HIGH
    with ThreadPoolExecutor(1) as pool:
        assert list(pool.submit(list, generator).result()) == [HIGH, HIGH]
    assert seen() == OUTSIDE


def test_a_generator_in_a_block_can_go_to_another_context() -> None:
    """Where the block is not, the function's level decides over whatever is there."""

    @matmul_precision("high")
    def generate() -> Iterator[Seen]:
        with matmul_precision("medium"):
            yield seen()
            yield seen()

    elsewhere = contextvars.copy_context()
    generator = generate()
    assert next(generator) == INSIDE

    def resume() -> Seen:
        with matmul_precision("medium"):
            return next(generator)

    assert elsewhere.run(resume) == HIGH
    assert list(generator) == []


def test_the_level_ends_with_a_generator_that_leaves_a_block_open() -> None:
    """What the function forgot to leave stays; the decorator's own scope does not."""
    left = matmul_precision("high")

    @medium
    def generate() -> Iterator[Seen]:
        left.__enter__()
        yield seen()

    assert list(generate()) == [HIGH]
    assert ledger.live_scopes()[-1][0] == "high"
    assert len(ledger.live_scopes()) == 1
    left.__exit__(None, None, None)
    assert seen() == OUTSIDE


# Steps that cannot have their level.


class Failing(Backend):
    """A backend that fails as soon as it is told to."""

    name = "failing"
    fails = False

    def is_active(self) -> bool:
        """Be active."""
        return True

    def save(self) -> object:
        """Have nothing to save."""
        return None

    def apply(self, _level: Float32MatmulPrecision, /) -> None:
        """Fail, or do nothing."""
        if self.fails:
            raise OSError

    def restore(self, _saved: object, /) -> None:
        """Have nothing to restore."""

    def describe(self) -> dict[str, str]:
        """Have no cells."""
        return {}


@pytest.fixture
def failing() -> Iterator[Failing]:
    """Return a registered backend that can be told to fail."""
    backend = Failing()
    register_backend(backend)
    yield backend
    unregister_backend("failing")


def test_a_generator_whose_scope_fails_ends_with_that_error(failing: Failing) -> None:
    """The consumer is told, the generator is closed, and no level is left."""
    closed = Closed()
    generator = closed.generate()
    next(generator)
    failing.fails = True
    with pytest.raises(PrecisionScopeError, match="'failing'"):
        next(generator)
    assert [type(error) for error in closed.errors] == [GeneratorExit]
    assert list(generator) == []
    assert seen() == OUTSIDE


def test_a_coroutine_whose_scope_fails_at_once_is_not_left_waiting(failing: Failing) -> None:
    """Nothing of the function has run, and no warning says that something was not awaited."""

    @medium
    async def wait() -> None:
        raise NotImplementedError

    failing.fails = True
    with pytest.raises(PrecisionScopeError, match="'failing'"):
        wait().send(None)
    gc.collect()


@pytest.mark.parametrize("awaits", [0, 1, 3])
def test_an_async_generator_whose_scope_fails_is_closed_by_the_event_loop(
    failing: Failing, awaits: int
) -> None:
    """The consumer is told, and the finally clause runs to its end, if not at the level."""
    closed = AsyncClosed(awaits)

    async def main() -> None:
        generator = closed.generate()
        await anext(generator)
        failing.fails = True
        with pytest.raises(PrecisionScopeError, match="'failing'"):
            await anext(generator)
        for _ in range(awaits + 5):
            await asyncio.sleep(0)
        assert closed.cleaned == [[OUTSIDE] * (awaits + 1)]

    run(main())


def test_an_async_generator_whose_scope_fails_needs_no_event_loop(failing: Failing) -> None:
    """Where nobody finalises async generators, the error is the same."""

    @medium
    async def generate() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    generator = generate()
    with pytest.raises(StopIteration):
        generator.asend(None).send(None)
    failing.fails = True
    with pytest.raises(PrecisionScopeError, match="'failing'"):
        generator.asend(None).send(None)
