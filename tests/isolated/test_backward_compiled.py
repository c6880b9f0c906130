"""Rules 21 and 22: covered backward passes and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled import BACKENDS, MARKS
from test_backward import Product, V, W, apply, covering, products_of_backward, two_products
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from watch import flags_at, watching, wrong

from precision_scope import get_float32_matmul_precision, matmul_precision

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "products": two_products,
    "a custom function": lambda a, b: apply(Product, a, b).relu(),
    "a checkpoint": lambda a, b: checkpoint(two_products, a, b, use_reentrant=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_called_inside(name: str, backend: str) -> None:
    """Its backward runs at the level of each call, compiled in one graph, once."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
    for level in ("medium", "high", "medium", "high"):
        with covering(level):
            result = compiled(W, V)
        seen = products_of_backward(result)
        assert len(seen) >= 2
        assert wrong(seen, level) == []
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_and_covering_scopes(backend: str) -> None:
    """What is compiled in one covers nothing in the other; torch compiles it once for each."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(two_products, backend=counter, fullgraph=True)
    for scope, level in ((covering(), "medium"), (matmul_precision("medium"), None)) * 3:
        with scope:
            result = compiled(W, V)
        seen = products_of_backward(result)
        assert len(seen) == 4
        assert wrong(seen, level) == []
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decorated_function_called_from_compiled_code(backend: str) -> None:
    """From the first call on, its nodes and no others have its level."""

    @matmul_precision("medium", backward=True)
    def inner(a: torch.Tensor) -> torch.Tensor:
        return a @ V

    @torch.compile(backend=backend)
    def outer(a: torch.Tensor) -> torch.Tensor:
        return (inner(a @ V) * 2) @ V

    with covering():
        pass
    for call in range(4):
        with watching() as seen, matmul_precision("high"):
            result = outer(W)
        if call:  # compiling multiplies, too
            assert [product.before for product in seen] == [
                flags_at(level) for level in ("high", "medium", "high")
            ]
        with watching() as seen, matmul_precision("high"):
            result.sum().backward()
        assert [product.before for product in seen] == [
            flags_at(level) for level in ["high"] * 2 + ["medium"] * 2 + ["high"] * 2
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decorated_compiled_function(backend: str) -> None:
    """The decorator outside of torch.compile."""

    @matmul_precision("medium", backward=True)
    @torch.compile(backend=backend, fullgraph=True)
    def function(a: torch.Tensor) -> torch.Tensor:
        return two_products(a, V)

    for _ in range(3):
        result = function(W)
        seen = products_of_backward(result)
        assert len(seen) == 4
        assert wrong(seen, "medium") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_with_dynamic_shapes(backend: str) -> None:
    """Recompilation and symbolic sizes change nothing."""
    model = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), backend=backend)
    for rows in (3, 5, 7, 9):
        with covering():
            result = model(torch.randn(rows, 6))
        with watching() as seen, matmul_precision("high"):
            result.sum().backward()
        assert len(seen) >= 3
        assert wrong(seen, "medium") == []


def test_a_hook_of_a_compiled_node_is_told_the_level() -> None:
    """A compiled region is one node."""
    told: list[str] = []
    with covering():
        result = torch.compile(two_products, backend="aot_eager")(W, V)
    result.register_hook(lambda _: told.append(get_float32_matmul_precision()))
    result.sum().backward()
    assert told == ["medium"]
