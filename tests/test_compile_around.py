"""Rule 22: a scope around compiled code costs no graph break, and no compilation but one per CUDA setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import BACKENDS, MARKS, TELLS_UNSET_FROM_HIGHEST, Graphs, look, looking
from flags import reset, state
from torch._dynamo.utils import counters
from watch import flags_at

from precision_scope import get_float32_matmul_precision, matmul_precision, set_float32_matmul_precision

pytestmark = MARKS

LEVELS = ("highest", "high", "medium", "high", "highest", "medium", "highest")
W = torch.eye(4)
scoped = matmul_precision("medium")


@pytest.fixture(autouse=True)
def no_graph_breaks() -> None:
    """Begin without counted graph breaks."""
    counters.clear()


def product(x: torch.Tensor) -> torch.Tensor:
    """Multiply, and look at the level."""
    return look(x @ W, "product")


@matmul_precision("medium")
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Multiply at a level of its own."""
    return look(x @ W, "decorated")


def levels_seen(function: Callable[[torch.Tensor], Any]) -> list[str]:
    """Call a function; return the levels that its operators ran at."""
    with looking() as seen:
        function(torch.rand(3, 4))
    for one in seen:
        assert one.flags in (flags_at(one.wanted), flags_at(None))
        assert one.flags.legacy == one.wanted
    return [one.wanted.value for one in seen]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scope_around_a_compiled_function(backend: str) -> None:
    """One graph, compiled once for each CUDA setting: TF32 on or off."""
    graphs = Graphs(backend)
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    before = state()
    for level in LEVELS:
        with matmul_precision(level):
            assert levels_seen(compiled) == [level]
        assert state() == before
    assert graphs.looks() == [["product"]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decorated_first", [True, False])
def test_a_decorated_compiled_function(decorated_first: bool, backend: str) -> None:
    """Decorators in either order: the function is compiled in one graph."""
    graphs = Graphs(backend)
    if decorated_first:
        function = torch.compile(matmul_precision("medium")(product), backend=graphs, fullgraph=True)
    else:
        function = matmul_precision("medium")(torch.compile(product, backend=graphs, fullgraph=True))
    before = state()
    for _ in range(5):
        assert levels_seen(function) == ["medium"]
        assert state() == before
    assert graphs.looks() == [["product"]]
    assert counters["graph_break"] == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_that_calls_a_decorated_one(backend: str) -> None:
    """One graph break, three graphs: what is before, inside and after it."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        return product(decorated(product(x)))

    graphs = Graphs(backend)
    compiled = torch.compile(outer, backend=graphs)
    for _ in range(5):
        with matmul_precision("high"):
            assert levels_seen(compiled) == ["high", "medium", "high"]
    assert graphs.looks() == [["product"], ["decorated"], ["product"]]
    assert sum(counters["graph_break"].values()) == 1


def test_a_compiled_function_inside_of_scopes_in_a_compiled_function() -> None:
    """It has its graph to itself, which the inner scopes do not break."""
    graphs = Graphs("aot_eager")
    compiled = torch.compile(product, backend=graphs, fullgraph=True)

    def outer(x: torch.Tensor) -> torch.Tensor:
        with matmul_precision("medium"):
            x = compiled(x)
        return decorated(x)

    outer_graphs = Graphs("eager")
    function = torch.compile(outer, backend=outer_graphs)
    for _ in range(5):
        assert levels_seen(function) == ["medium", "medium"]
    assert graphs.looks() + outer_graphs.looks() == [["product"], ["decorated"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_counts_as_a_setting(backend: str) -> None:
    """Compiled under the process default, a function is compiled again under TF32.

    torch 2.15 also tells a setting that was never made from one for float32.
    """
    graphs = Graphs(backend)
    compiled = torch.compile(product, backend=graphs, fullgraph=True)
    assert levels_seen(compiled) == ["highest"]
    for level in LEVELS:
        with matmul_precision(level):
            assert levels_seen(compiled) == [level]
    set_float32_matmul_precision("medium")
    try:
        assert levels_seen(compiled) == ["medium"]
    finally:
        reset()
    assert len(graphs.all) == 2 + TELLS_UNSET_FROM_HIGHEST


def test_inductor_where_torchs_own_getter_raises() -> None:
    """Inside a scope it does not, and inductor calls it."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no cells")
    torch.backends.fp32_precision = "tf32"
    try:
        before = state()
        with pytest.raises(RuntimeError, match="mix of"):
            torch.get_float32_matmul_precision()
        with matmul_precision("medium"):
            assert levels_seen(torch.compile(product, backend="inductor")) == ["medium"]
        assert state() == before
    finally:
        torch.backends.fp32_precision = "none"


def with_block(x: torch.Tensor) -> torch.Tensor:
    """Enter a scope that is made on the spot."""
    with matmul_precision("medium"):
        return x @ W


def with_block_without_dynamo(x: torch.Tensor) -> torch.Tensor:
    """Enter a scope and look at the level."""
    with matmul_precision("medium"):
        return look(x @ x.T, "inside")


def shared_scope(x: torch.Tensor) -> torch.Tensor:
    """Enter a scope that exists already."""
    with scoped:
        return x @ W


def getter(x: torch.Tensor) -> torch.Tensor:
    """Ask for the level."""
    return x if get_float32_matmul_precision() == "medium" else -x


def setter(x: torch.Tensor) -> torch.Tensor:
    """Set the level."""
    set_float32_matmul_precision("medium")
    return x


@pytest.mark.parametrize("function", [with_block, shared_scope, lambda x: decorated(x) + 1, getter, setter])
def test_a_full_graph_with_a_scope_inside(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Dynamo's own error says what to do instead; nothing has run."""
    before = state()
    with looking() as seen, pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(function, backend="eager", fullgraph=True)(torch.rand(3, 4))
    said = str(raised.value)
    if re.search("Explanation", said) and "enter a `matmul_precision` context manager" not in said:
        assert "put the scope around the call of what is compiled" in said
    else:  # older versions of torch name what they do not trace, and no reason
        assert re.search("matmul_precision|decorated|float32", said)
    assert seen == []
    assert state() == before


def test_a_decorated_compiled_function_inside_of_compiled_code() -> None:
    """What Dynamo has noted on the compiled function must not lead it past the decorator."""
    for backend in BACKENDS[:2]:
        torch._dynamo.reset()
        inner: Any = matmul_precision("medium")(torch.compile(product, backend=Graphs(backend)))
        outer = torch.compile(lambda x: product(inner(x)), backend=Graphs(backend))  # noqa: B023
        again = torch.compile(inner, backend=Graphs(backend))
        for _ in range(3):
            with matmul_precision("high"):
                assert levels_seen(outer) == ["medium", "high"]
                assert levels_seen(again) == ["medium"]
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)(torch.rand(3, 4))  # noqa: B023
    inner = torch.compile(product, backend="eager")
    inner.tag = 1
    inner = matmul_precision("medium")(inner)
    assert inner.tag == 1  # an attribute of the user's own goes along
    assert inner.__name__ == "product"


def test_a_decorated_disabled_function() -> None:
    """Likewise of functions that Dynamo is told to leave alone."""
    disable: Any = torch.compiler.disable
    inner = matmul_precision("medium")(disable(product))
    outer: Any = disable(matmul_precision("medium")(torch.compile(product, backend=Graphs("eager"))))
    for function in (
        inner,
        outer,
        torch.compile(inner, backend="eager"),
        torch.compile(outer, backend="eager"),
    ):
        for _ in range(3):
            assert levels_seen(function) == ["medium"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_recorded_without_being_traced(backend: str) -> None:
    """AOTAutograd runs it to record its operators, which would run without the scope: an error."""
    function: Any = torch._dynamo.allow_in_graph(with_block_without_dynamo)
    before = state()
    with pytest.raises(Exception, match="a precision scope was entered in a program that") as raised:
        torch.compile(lambda x: function(x) + 1, backend=backend, fullgraph=True)(torch.rand(3, 4))
    assert "torch.compile" in str(raised.value)
    assert state() == before
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x) + 1, backend="eager", fullgraph=True)  # runs it each time
    for _ in range(3):
        assert levels_seen(compiled) == ["medium"]
