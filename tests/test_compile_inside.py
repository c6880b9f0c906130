"""Rule 23: scopes inside compiled functions have their effect on every call, and are left again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from compiled import BACKENDS, MARKS, Graphs, look, looking
from flags import state
from torch import nn
from torch.utils.checkpoint import checkpoint
from watch import flags_at

from precision_scope import (
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)

OUTER = "high"  # the scope around each compiled call
INNER = "medium"  # the one inside

scoped = matmul_precision(INNER)
W = torch.eye(4)

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


# What each of these looks at begins with the level of its place: inside or outside.


def callee(x: torch.Tensor) -> torch.Tensor:
    """Is called inside the scopes, and is to be compiled."""
    return look(x @ W, "inside, callee")


@matmul_precision(INNER)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return look(callee(x), "inside") + 1


def with_block(x: torch.Tensor) -> torch.Tensor:
    x = look(x, "outside")
    with matmul_precision(INNER):
        x = look(callee(x), "inside")
    return look(x, "outside, after")


def decorated_call(x: torch.Tensor) -> torch.Tensor:
    return look(decorated(look(x, "outside")), "outside")


def decorated_lambda(x: torch.Tensor) -> torch.Tensor:
    return look(matmul_precision(INNER)(lambda: callee(x))(), "outside")


def shared_scope(x: torch.Tensor) -> torch.Tensor:
    with scoped:
        x = look(callee(x), "inside")
    return look(x, "outside")


def scope_before_a_graph_break(x: torch.Tensor) -> torch.Tensor:
    scope = matmul_precision(INNER)
    x = look(x + 1, "outside")
    torch._dynamo.graph_break()
    x = look(x, "outside")
    with scope:
        x = look(callee(x), "inside")
    return look(x, "outside")


def graph_break_inside(x: torch.Tensor) -> torch.Tensor:
    with matmul_precision(INNER):
        x = look(callee(x), "inside")
        torch._dynamo.graph_break()
        x = look(callee(x), "inside")
    return look(x, "outside")


def nested_scopes(x: torch.Tensor) -> torch.Tensor:
    with matmul_precision("highest"):
        with matmul_precision(INNER):
            x = look(callee(x), "inside")
        with matmul_precision(None):
            x = look(x, "highest")
    return look(x, "outside")


def nested_function(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        with matmul_precision(INNER):
            return look(callee(y), "inside")

    return look(inner(look(x, "outside")), "outside")


def decorated_on_the_spot(x: torch.Tensor) -> torch.Tensor:
    @matmul_precision(INNER)
    def inner(y: torch.Tensor) -> torch.Tensor:
        return look(callee(y), "inside")

    return look(inner(look(x, "outside")), "outside")


def loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        with matmul_precision(INNER):
            x = look(callee(x), "inside")
        x = look(decorated(x), "outside")
    return x


def comprehension(x: torch.Tensor) -> torch.Tensor:
    return look(sum([decorated(x * factor) for factor in range(3)], x), "outside")


def try_finally(x: torch.Tensor) -> torch.Tensor:
    try:
        with matmul_precision(INNER):
            x = look(callee(x), "inside")
    finally:
        x = look(decorated(x), "outside")
    return x


def exception_inside(x: torch.Tensor) -> torch.Tensor:
    try:
        with matmul_precision(INNER):
            x = look(callee(x), "inside")
            raise ValueError("seen")
    except ValueError as error:
        x = look(x, f"outside, {error}")
    return x


@matmul_precision(INNER)
def failing(x: torch.Tensor) -> torch.Tensor:
    look(x, "inside")
    raise ValueError("seen")


def exception_in_a_decorated_call(x: torch.Tensor) -> torch.Tensor:
    try:
        failing(x)
    except ValueError:
        x = look(decorated(x), "outside")
    return x


def early_return(x: torch.Tensor) -> torch.Tensor:
    with matmul_precision(INNER):
        x = look(callee(x), "inside")
        if x.shape[0] > 1:
            return look(x, "inside")
    return look(x, "outside")


def branch_on_data(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        with matmul_precision(INNER):
            return look(callee(x), "inside")
    return look(x, "outside")


def break_and_continue(x: torch.Tensor) -> torch.Tensor:
    for step in range(4):
        with matmul_precision(INNER):
            x = look(callee(x), "inside")
            if step == 0:
                continue
            if step == 2:
                break
        x = look(x, "outside")
    return look(x, "outside")


def several_scopes_in_one_statement(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), matmul_precision(INNER), torch.enable_grad():
        x = look(callee(x), "inside")
    return look(x, "outside")


def exit_stack(x: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(matmul_precision(INNER))
        x = look(callee(x), "inside")
    return look(x, "outside")


@contextlib.contextmanager
def own_context_manager() -> Iterator[None]:
    with matmul_precision(INNER):
        yield


def scope_in_a_context_manager(x: torch.Tensor) -> torch.Tensor:
    with own_context_manager():
        x = look(callee(x), "inside")
    return look(x, "outside")


@matmul_precision(INNER)
def decorated_steps(x: torch.Tensor) -> Generator[torch.Tensor]:
    for _ in range(2):
        x = look(callee(x), "inside")
        yield x


def decorated_generator(x: torch.Tensor) -> torch.Tensor:
    for y in decorated_steps(x):
        x = x + look(y, "outside")
    return x


def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
    with matmul_precision(INNER):
        x = look(callee(x), "inside")
    yield x
    yield look(decorated(x), "outside")


def generator_with_a_block(x: torch.Tensor) -> torch.Tensor:
    for y in steps(x):
        x = x + look(y, "outside")
    return x


def recursion(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    with matmul_precision(INNER):
        if depth:
            return recursion(look(callee(x), "inside"), depth - 1)
        return look(x, "inside")


def partial(x: torch.Tensor) -> torch.Tensor:
    return look(functools.partial(decorated, x)(), "outside")


def suspended_generator(x: torch.Tensor) -> torch.Tensor:
    generator = decorated_steps(x)
    x = look(x + next(generator), "outside")
    with matmul_precision("highest"):
        x = look(x + next(generator), "highest")
    generator.close()
    return look(x, "outside")


def setting(x: torch.Tensor) -> torch.Tensor:
    with matmul_precision("highest"):
        x = look(x, "highest")
        set_float32_matmul_precision(INNER)
        x = look(callee(x), "inside")
    return look(x, "outside")


def reading(x: torch.Tensor) -> torch.Tensor:
    before = get_float32_matmul_precision()
    with matmul_precision(INNER):
        x = look(callee(x), "inside")
        inside = get_float32_matmul_precision()
    assert (before, inside, get_float32_matmul_precision()) == (OUTER, INNER, OUTER)
    return x


def reading_without_a_scope(x: torch.Tensor) -> torch.Tensor:
    x = decorated(x)
    return look(x, "outside") if get_float32_matmul_precision() == OUTER else x


def no_level(x: torch.Tensor) -> torch.Tensor:
    with matmul_precision(None):
        x = look(x, "outside")
    return decorated(x)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    recomputed: torch.Tensor = checkpoint(decorated, look(x, "outside"), use_reentrant=False)
    return look(recomputed, "outside")


class Scoped(torch.autograd.Function):
    @staticmethod
    @matmul_precision(INNER)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return look(callee(x), "inside")

    @staticmethod
    @matmul_precision(INNER)
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return look(gradient @ W, "decorated, backward")


def custom_function(x: torch.Tensor) -> torch.Tensor:
    apply: Any = Scoped.apply
    applied: torch.Tensor = apply(look(x, "outside"))
    return look(applied, "outside")


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with matmul_precision(INNER):
            return look(callee(x), "inside")


class DecoratedLayer(nn.Module):
    @matmul_precision(INNER)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return look(callee(x), "inside")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), DecoratedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = look(layer(x), "outside")
        return x

    @staticmethod
    @matmul_precision(INNER)
    def helper(x: torch.Tensor) -> torch.Tensor:
        return look(callee(x), "inside")

    @classmethod
    @matmul_precision(INNER)
    def method(cls, x: torch.Tensor) -> torch.Tensor:
        return look(callee(x), "inside")

    @matmul_precision(INNER)
    def bound(self, x: torch.Tensor) -> torch.Tensor:
        return look(callee(x), "inside")


def methods(x: torch.Tensor) -> torch.Tensor:
    return look(MODEL.bound(Model.method(look(Model.helper(x), "outside"))), "outside")


MODEL = Model()

compiled_layer = torch.compile(DecoratedLayer(), backend=Graphs("eager"))
compiled_function = torch.compile(decorated, backend=Graphs("eager"))


def compiled_inside(x: torch.Tensor) -> torch.Tensor:
    return look(decorated(compiled_function(compiled_layer(x))), "outside")


FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    with_block,
    decorated_call,
    decorated_lambda,
    shared_scope,
    scope_before_a_graph_break,
    graph_break_inside,
    nested_scopes,
    nested_function,
    decorated_on_the_spot,
    loop,
    comprehension,
    try_finally,
    exception_inside,
    exception_in_a_decorated_call,
    early_return,
    branch_on_data,
    break_and_continue,
    several_scopes_in_one_statement,
    exit_stack,
    scope_in_a_context_manager,
    decorated_generator,
    generator_with_a_block,
    suspended_generator,
    recursion,
    partial,
    methods,
    setting,
    reading,
    reading_without_a_scope,
    no_level,
    checkpointed,
    custom_function,
    Layer(),
    DecoratedLayer(),
    MODEL,
    compiled_inside,
]


def level_of(name: str) -> str:
    """Return the level that the name of a look promises."""
    return {"outside": OUTER, "inside": INNER, "highest": "highest"}[name.split(",", maxsplit=1)[0]]


@pytest.mark.parametrize("backend", ["eager", "inductor"])  # which does what aot_eager does, and more
@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=lambda function: getattr(function, "__name__", type(function).__name__)
)
def test_a_scope_inside(function: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """Every operator runs at the level of its place, on every call, and nothing is left.

    Calls 4 and 5 bring another shape, so that torch compiles again. What forgets
    compiled code is the same for each backend, and tried with one.
    """
    graphs = Graphs(backend)
    compiled = torch.compile(function, backend=graphs)
    before = state()
    for _ in range(2 if backend == "eager" else 1):
        for call in range(1, 6):
            x = torch.rand(3 if call < 4 else 5, 4)
            with looking() as expected, matmul_precision(OUTER):
                result = function(x)
            with looking() as seen, matmul_precision(OUTER):
                assert torch.equal(compiled(x), result)
            assert [one.name for one in seen] == [one.name for one in expected]
            for one in seen:
                assert (one.flags, one.wanted) == (flags_at(level_of(one.name)), level_of(one.name))
            assert state() == before
        if function is not checkpointed:  # what is called is compiled; torch runs checkpoints as they stand
            assert any("inside, callee" in looks for looks in graphs.looks())
        torch._dynamo.reset()
        graphs.all.clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [with_block, decorated_call, loop, MODEL, checkpointed, custom_function])
def test_the_backward_of_a_scope_inside(
    function: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    """A backward pass runs at the level in force where it is called, compiled or not."""
    compiled = torch.compile(function, backend=Graphs(backend))
    before = state()
    for call in range(1, 6):
        gradients = []
        for run in (function, compiled):
            x = torch.ones(3 if call < 4 else 5, 4, requires_grad=True)
            with matmul_precision(OUTER):
                result = run(x)
            with looking() as seen, matmul_precision("highest"):
                (gradient,) = torch.autograd.grad(result.sum(), x)
            backward = [one for one in seen if one.name.endswith("backward")]
            assert len(backward) >= 2
            for one in backward:
                level = INNER if one.name == "decorated, backward" else "highest"
                assert (one.flags, one.wanted) == (flags_at(level), level)
            gradients.append(gradient.tolist())
        assert gradients[0] == gradients[1]
        assert state() == before


def test_an_error_of_compiled_code_ends_the_scope() -> None:
    """It comes out of the compiled function, which works afterwards."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with matmul_precision(INNER):
            x = callee(x)
            if x.shape[0] == 2:
                raise KeyError("two")
            return x

    compiled = torch.compile(function, backend="eager")
    before = state()
    for _ in range(3):
        with pytest.raises(KeyError, match="two"):
            compiled(torch.rand(2, 4))
        assert state() == before
        with looking() as seen:
            compiled(torch.rand(3, 4))
        assert [one.flags for one in seen] == [flags_at(INNER)]
        assert state() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_that_change_between_calls(backend: str) -> None:
    """The level may be an argument, and differ from call to call."""

    def function(x: torch.Tensor, level: str | None) -> torch.Tensor:
        with matmul_precision(level):
            return callee(x)

    compiled = torch.compile(function, backend=Graphs(backend))
    for level in ("medium", "highest", "high", None, "medium", None, "highest"):
        with looking() as seen:
            compiled(torch.rand(3, 4), level)
        assert [one.flags for one in seen] == [flags_at(level)]
