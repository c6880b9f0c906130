"""Rule 21: with backward=True, each node's backward runs at the level that it was recorded at."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import watch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from watch import flags, flags_at, watching, without_onednn, wrong

from precision_scope import (
    Float32MatmulPrecision,
    get_float32_matmul_precision,
    matmul_precision,
    report,
    set_float32_matmul_precision,
)
from precision_scope._covering import tag_soon, tag_unfinished, unfinished

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("`torch.jit.script`", "`torch.cpu.amp.autocast")
]

W = torch.randn(6, 6, requires_grad=True)
V = torch.randn(6, 6, requires_grad=True)
X = torch.randn(6, 6)


def covering(level: str = "medium") -> matmul_precision:
    """Make a scope that covers the backward pass."""
    return matmul_precision(level, backward=True)


def apply(function: Any, *args: torch.Tensor) -> torch.Tensor:
    """Call a custom autograd function."""
    result: torch.Tensor = function.apply(*args)
    return result


def products_of_backward(result: torch.Tensor) -> list[watch.Product]:
    """Run a backward pass, and return the products that ran in it."""
    with watching() as seen:
        result.sum().backward()
    return seen


class Product(torch.autograd.Function):
    """A custom autograd function."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply in the other direction."""
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class Told(Product):
    """One that notes the level that its backward is told."""

    level: list[Float32MatmulPrecision]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look, and multiply."""
        Told.level = [get_float32_matmul_precision(), report().wanted]
        return Product.backward(ctx, gradient)


class Twice(torch.autograd.Function):
    """A custom autograd function that differentiates by itself in its backward."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(a)
        return a @ a @ X

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Multiply once more, and go back through that."""
        (a,) = ctx.saved_tensors
        with torch.enable_grad():
            again = a.detach().requires_grad_()
            return torch.autograd.grad((again @ again @ X), again, gradient)[0]


def lstm() -> Any:
    """Run an LSTM whose products are torch's own."""
    with without_onednn():
        return nn.LSTM(6, 4)(X[None])[0]


def into_a_view() -> torch.Tensor:
    """Write a product into a part of a tensor."""
    result = torch.zeros(2, 6, 6)
    result[1].addmm_(W, V)
    return result


def hidden(kind: str) -> torch.Tensor:
    """Compute something that no return value leads to, inside of a function."""
    kept: Any = {}

    def compute() -> None:
        kept["product"] = [{"deep": (W @ V,)}]

    compute()
    if kind == "container":
        result: torch.Tensor = kept["product"][0]["deep"][0]
        return result

    class Holder:
        def __init__(self) -> None:
            self.product = W @ V

    return Holder().product


def two_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply twice."""
    return (a @ b).relu() @ b


COMPUTATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "@": lambda: W @ V,
    "linear": lambda: functional.linear(X, W, torch.zeros(6, requires_grad=True)).relu_(),
    "batched": lambda: torch.einsum("bij,bjk->bik", X.expand(3, 6, 6), W.expand(3, 6, 6)),
    "in place": lambda: torch.zeros(6, 6).addmm_(W, V).mul_(2),
    "into a view": into_a_view,
    "views": lambda: (W @ V)[2:].t().reshape(-1)[3:],
    "in place on a view": lambda: (W @ V)[2:].mul_(2),
    "several outputs": lambda: (W @ V).split(2)[1],
    "unbind and stack": lambda: torch.stack((W @ V).unbind()),
    "lists of operands": lambda: torch.cat([W @ V, V @ W]),
    "foreach": lambda: torch._foreach_mul([W @ V, V @ W], 2.0)[1],
    "solve": lambda: torch.linalg.solve(W, V),
    "QR": lambda: torch.linalg.qr(W).R,
    "several outputs of a decomposition": lambda: torch.linalg.eigh(W + W.t()).eigenvectors,
    "cdist": lambda: torch.cdist(W, V),
    "complex": lambda: torch.view_as_real(W.to(torch.complex64) @ V.to(torch.complex64)),
    "LSTM": lstm,
    "attention": lambda: functional.scaled_dot_product_attention(W[None], V[None], X[None]),
    "multi-head attention": lambda: nn.MultiheadAttention(6, 2)(X[None], X[None], X[None])[0],
    "beside a convolution": lambda: nn.Conv2d(1, 6, 3)(X[None, None]).flatten(2) @ torch.ones(16, 2) @ W[:2],
    "custom function": lambda: apply(Product, W, V),
    "custom function that differentiates": lambda: apply(Twice, W),
    "checkpoint": lambda: checkpoint(two_products, W, V, use_reentrant=False),
    "re-entrant checkpoint": lambda: checkpoint(two_products, W, V, use_reentrant=True),
    "checkpoint, twice differentiated": lambda: torch.autograd.grad(
        checkpoint(two_products, W, V, use_reentrant=False).pow(2).sum(), W, create_graph=True
    )[0],
    "dropout": lambda: torch.native_dropout(W @ V, 0.5, True)[0],
    "nested checkpoints": lambda: checkpoint(
        lambda a: checkpoint(two_products, a @ V, V, use_reentrant=False) @ V, W, use_reentrant=False
    ),
    "in a container": lambda: hidden("container"),
    "in an object": lambda: hidden("object"),
    "vmap": lambda: torch.vmap(torch.mv, (None, 0))(W, V),
    "sparse": lambda: torch.sparse.mm(X.to_sparse(), W),
    "saved tensors elsewhere": lambda: saved_on_cpu(lambda: W @ V),
    "subclass": lambda: (W.as_subclass(Subclass) @ V).as_subclass(torch.Tensor),
    "default device": lambda: on_default_device(lambda: W @ torch.ones(6, 6)),
}


class Subclass(torch.Tensor):
    """A subclass that dispatches in Python."""


def saved_on_cpu(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Compute with hooks on the saved tensors."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
        return compute()


def on_default_device(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Compute with torch's own mode for functions on."""
    torch.set_default_device("cpu")
    try:
        return compute()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_its_backward_runs_at_the_level_of_its_forward(name: str) -> None:
    """Later, outside all scopes, every product of the backward pass has the scope's level."""
    for level in ("medium", "highest", "high"):
        with covering(level):
            result = COMPUTATIONS[name]()
        seen = products_of_backward(result)
        assert seen
        assert wrong(seen, level) == []


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_the_backward_of_a_plain_scope_does_not(name: str) -> None:
    """Without backward=True it runs at the level in force then (rule 20)."""
    with matmul_precision("medium"):
        result = COMPUTATIONS[name]()
    with watching() as seen, matmul_precision("high"):
        result.sum().backward()
    assert seen
    assert wrong(seen, "high") == []


def in_a_dict(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Multiply twice."""
    return {"product": (a @ b).relu() @ b}


@pytest.mark.parametrize("function", [two_products, in_a_dict])
def test_scripts(function: Callable[..., Any]) -> None:
    """The graphs that TorchScript differentiates itself run backward at the level, too."""
    compute: Any = torch.jit.script(function)
    for _ in range(4):  # from the second run on, the graph has a node of its own
        with covering():
            result = compute(W, V)
        if function is in_a_dict:
            result = result["product"]
        result.sum().backward(retain_graph=True)
    seen = products_of_backward(result)
    assert len(seen) == 4
    assert wrong(seen, "medium") == []


def test_the_gradients_are_those_of_the_level() -> None:
    """Bit for bit, they are what products at the level give."""
    a, b, gradient = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512), torch.randn(512, 512)
    with covering("medium"):
        medium = a @ b
    with covering("highest"):
        highest = a @ b
    with matmul_precision("medium"):
        expected = gradient @ b.t()
        (found,) = torch.autograd.grad(highest, a, gradient)
    assert torch.equal(found, gradient @ b.t())
    (found,) = torch.autograd.grad(medium, a, gradient)
    assert torch.equal(found, expected)


# Ways to run the pass.


def twice(loss: torch.Tensor) -> None:
    """Go through the same graph twice."""
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def double(loss: torch.Tensor) -> None:
    """Differentiate twice."""
    torch.autograd.grad(torch.autograd.grad(loss, W, create_graph=True)[0].pow(2).sum(), V)


def in_another_thread(run: Callable[[], Any]) -> None:
    """Run something in a new thread."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


PASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "backward": torch.autograd.backward,
    "grad": lambda loss: torch.autograd.grad(loss, [W, V]),
    "with a gradient": lambda loss: torch.autograd.backward(loss, torch.ones(())),
    "twice": twice,
    "in another thread": lambda loss: in_another_thread(functools.partial(torch.autograd.backward, loss)),
    "at another level": matmul_precision("high")(torch.autograd.backward),
    "at another level that covers": matmul_precision("highest", backward=True)(torch.autograd.backward),
    "double": double,
    "double, at another level": matmul_precision("high")(double),
    "triple": lambda loss: torch.autograd.grad(
        torch.autograd.grad(torch.autograd.grad(loss, W, create_graph=True)[0].sum(), V, create_graph=True)[0]
        .pow(2)
        .sum(),
        W,
    ),
    "batched": lambda loss: torch.autograd.grad(loss.expand(3), W, torch.eye(3), is_grads_batched=True),
}


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_however_the_pass_is_run(name: str, custom: bool) -> None:
    """Whenever, from wherever and with whatever options, the level is that of the forward."""
    multiply: Callable[..., torch.Tensor] = functools.partial(apply, Told) if custom else torch.matmul
    with covering():
        loss = multiply(multiply(W, V).pow(2), V).pow(2).sum()
    with watching() as seen:
        PASSES[name](loss)
    assert len(seen) >= 2
    assert wrong(seen, "medium") == []
    if custom:
        assert Told.level == ["medium", "medium"]


def cubic(a: torch.Tensor) -> torch.Tensor:
    """Return a number whose derivatives multiply."""
    return (a @ V @ a @ a).sum()


def test_torch_func() -> None:
    """What vjp returns keeps the level for later; grad and its like are covered as a whole."""
    with covering():
        pull_backs: list[Any] = [
            torch.func.vjp(functools.partial(torch.matmul, V), W)[1],
            torch.func.vjp(torch.func.grad(cubic), X)[1],
        ]
    with watching() as seen:
        for pull_back in pull_backs:
            pull_back(torch.ones(6, 6))
    assert len(seen) >= 3
    assert wrong(seen, "medium") == []


def test_torch_func_inside() -> None:
    """Transforms that differentiate by themselves do so at the level, and their results keep it."""
    with covering(), watching() as seen:
        result = torch.vmap(torch.func.grad(lambda row: (row @ V).sin().sum()))(W)
    assert len(seen) >= 2
    assert wrong(seen, "medium") == []
    seen = products_of_backward(result)
    assert seen
    assert wrong(seen, "medium") == []


# Levels inside.


def test_nodes_of_nested_plain_scopes_keep_their_own_level() -> None:
    """Each node has the level that was in force when it was recorded."""
    with covering("medium"):
        first = W @ V
        with matmul_precision("highest"):
            second = W @ V
        with matmul_precision(None):
            third = W @ V
        set_float32_matmul_precision("high")
        fourth = W @ V
    for product, level in ((first, "medium"), (second, "highest"), (third, "medium"), (fourth, "high")):
        seen = products_of_backward(product)
        assert len(seen) == 2
        assert wrong(seen, level) == []


def test_the_innermost_of_two_covering_scopes() -> None:
    """It decides, as long as it is live."""
    with covering("medium"):
        with covering("highest"):
            first = W @ V
        second = W @ V
    for product, level in ((first, "highest"), (second, "medium")):
        seen = products_of_backward(product)
        assert wrong(seen, level) == []


def test_a_covering_scope_in_a_plain_one_covers_itself_alone() -> None:
    """What the plain one runs before and after is not covered."""
    with matmul_precision("highest"):
        before = W @ V
        with covering("medium"):
            inside = W @ V
        after = W @ V
    with watching() as seen, matmul_precision("high"):
        before.sum().backward()
        after.sum().backward()
    assert len(seen) == 4
    assert wrong(seen, "high") == []
    seen = products_of_backward(inside)
    assert wrong(seen, "medium") == []


def test_what_goes_in_is_not_covered() -> None:
    """The backward of what was recorded outside, before and after, runs at the level of the call."""
    before = W @ V
    with covering("medium"):
        inside = before @ V
    after = inside @ V
    with watching() as seen, matmul_precision("high"):
        after.sum().backward()
    assert [product.before for product in seen] == [
        flags_at(level) for level in ["high"] * 2 + ["medium"] * 2 + ["high"] * 2
    ]


def in_place(operand: torch.Tensor) -> torch.Tensor:
    """Write to a tensor with an operator that returns nothing."""
    torch._foreach_mul_([operand], 2.0)
    return operand


@pytest.mark.parametrize("later", [0, 1, 5])
@pytest.mark.parametrize(
    "compute",
    [lambda a: a.split(6)[0], in_place, lambda a: a[1:].mul_(2), lambda a: torch._foreach_mul([a], 2.0)[0]],
)
def test_nodes_that_another_thread_recorded_outside_are_not_covered(
    compute: Callable[[torch.Tensor], torch.Tensor], later: int
) -> None:
    """Though autograd numbers the nodes of each thread from nought."""
    found: list[torch.Tensor] = []

    def outside() -> None:
        for _ in range(later):
            W * 2  # later nodes have higher numbers
        found.append(torch.eye(6, requires_grad=True) @ V)

    def inside() -> None:
        with covering():
            found.append(compute(found[0]))

    for run in (outside, inside):
        in_another_thread(run)
    with watching() as seen, matmul_precision("high"):
        found[1].sum().backward()
    assert seen
    assert wrong(seen, "high") == []


def test_none_asks_for_nothing_in_the_backward_pass_either() -> None:
    """An optional level can be passed straight through with backward=True."""
    with matmul_precision("medium"), matmul_precision(None, backward=True):
        product = W @ V
    with watching() as seen, matmul_precision("high"):
        product.sum().backward()
    assert wrong(seen, "high") == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_is_done_at_the_levels_of_the_forward(reentrant: bool) -> None:
    """A checkpoint runs again at the level that it was called at, with its inner scopes at theirs."""

    def compute(a: torch.Tensor) -> torch.Tensor:
        seen_by.append(get_float32_matmul_precision())
        first = a @ V
        with matmul_precision("highest"):
            seen_by.append(get_float32_matmul_precision())
            second = first.relu() @ V
        seen_by.append(get_float32_matmul_precision())
        third = second @ V
        with matmul_precision("highest"):  # the node that asks for the results
            return third @ V

    seen_by: list[str] = []
    with covering("medium"):
        result = checkpoint(compute, W, use_reentrant=reentrant)
    forward, seen_by = seen_by, []
    with watching() as seen, matmul_precision("high"):
        result.sum().backward()
    assert forward == seen_by == ["medium", "highest", "medium"]
    levels = [product.before for product in seen]
    assert levels.count(flags_at("medium")) == 6
    assert levels.count(flags_at("highest")) == len(levels) - 6 >= 5  # the last product need not run again


# Code that runs in the pass.


def test_hooks_are_told_the_level() -> None:
    """Hooks of tensors and nodes, before and after."""
    told: list[str] = []

    def hook(*_: Any) -> None:
        told.append(get_float32_matmul_precision())

    with covering():
        product = W @ V
    assert product.grad_fn is not None
    product.register_hook(hook)
    product.grad_fn.register_prehook(hook)
    product.grad_fn.register_hook(hook)
    with matmul_precision("high"):
        (product * 2).sum().backward()
    assert told == ["medium"] * 3


def test_operators_that_return_nothing() -> None:
    """What they have written to is recorded as well."""
    told: list[str] = []
    with covering():
        products = [W @ V, V @ W]
        torch._foreach_mul_(products, 2.0)
    products[1].register_hook(lambda _: told.append(get_float32_matmul_precision()))
    products[1].sum().backward()
    assert told == ["medium"]


def test_hooks_of_others_are_not() -> None:
    """A node that was recorded outside, and a leaf, are at the level of the call."""
    told: list[str] = []
    leaf = torch.randn(6, 6, requires_grad=True)
    leaf.register_hook(lambda _: told.append(get_float32_matmul_precision()))
    with covering():
        product = leaf @ V
    doubled = product * 2
    doubled.register_hook(lambda _: told.append(get_float32_matmul_precision()))
    with matmul_precision("high"):
        doubled.sum().backward()
    assert told == ["high", "high"]


def test_a_scope_entered_in_the_pass_decides_there() -> None:
    """The node's level holds around it, not against it."""
    told: list[str] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with matmul_precision("highest"), matmul_precision(None):
            told.append(get_float32_matmul_precision())
            gradient = gradient @ X
        told.append(get_float32_matmul_precision())
        return gradient @ X

    with covering():
        product = W @ V
    product.register_hook(hook)
    with watching() as seen, matmul_precision("high"):
        product.sum().backward()
    assert told == ["highest", "medium"]
    assert [product.before for product in seen] == [flags_at("highest")] + [flags_at("medium")] * 3


def test_a_pass_inside_a_pass() -> None:
    """It runs at the level of the node that calls it, where its own nodes have none."""
    outside = (W @ V).sum()
    with covering("highest"):
        covered = (W @ V).sum()

    def hook(_: torch.Tensor) -> None:
        with watching() as seen:
            torch.autograd.grad(outside, W, retain_graph=True)
        inner.append(seen)
        with watching() as seen:
            torch.autograd.grad(covered, W, retain_graph=True)
        inner.append(seen)

    inner: list[Any] = []
    with covering("medium"):
        product = W @ V
    product.register_hook(hook)
    product.sum().backward()
    assert wrong(inner[0], "medium") == wrong(inner[1], "highest") == []
    assert len(inner[0]) == len(inner[1]) == 1


@pytest.mark.parametrize("multiply", [torch.matmul, lambda a, b: apply(Product, a, b)])
def test_what_a_hook_records_is_covered(multiply: Callable[..., torch.Tensor]) -> None:
    """Nodes that are recorded inside a covered node keep its level in turn."""
    kept: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            kept.append(multiply(multiply(W, gradient), V))

    with covering():
        product = W @ V
    product.register_hook(hook)
    product.sum().backward()
    seen = products_of_backward(kept[0])
    assert seen
    assert wrong(seen, "medium") == []


# Threads, tasks, decorated functions.


def test_decorated_functions_of_every_kind() -> None:
    """They cover what they run, step by step."""

    @matmul_precision("medium", backward=True)
    def function() -> torch.Tensor:
        return W @ V

    @matmul_precision("medium", backward=True)
    def generator() -> Iterator[torch.Tensor]:
        yield W @ V
        yield W @ V

    @matmul_precision("medium", backward=True)
    async def coroutine() -> torch.Tensor:
        await asyncio.sleep(0)
        return W @ V

    class Model(nn.Module):
        @matmul_precision("medium", backward=True)
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a @ V

    @matmul_precision("medium", backward=True)
    async def async_generator() -> AsyncIterator[torch.Tensor]:
        yield W @ V

    async def only() -> torch.Tensor:
        async for product in async_generator():
            result = product
        return result

    steps = generator()
    products = [function(), next(steps), asyncio.run(only())]
    between = W @ V
    products += [next(steps), asyncio.run(coroutine()), Model()(W), copy.deepcopy(Model())(W)]
    for product in products:
        seen = products_of_backward(product)
        assert len(seen) >= 1
        assert wrong(seen, "medium") == []
    seen = products_of_backward(between)
    assert wrong(seen, None) == []


def test_replicas_in_threads() -> None:
    """As data parallelism does it: each replica's thread enters the scope, one pass goes back."""
    model = nn.Linear(6, 6)
    outputs: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(3, timeout=20)

    def replica(number: int, level: str) -> None:
        barrier.wait()
        with covering(level):
            outputs[number] = model(X + number)

    threads = [
        threading.Thread(target=replica, args=(number, level))
        for number, level in enumerate(("medium", "high", "highest"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, level in enumerate(("medium", "high", "highest")):
        with watching() as seen:
            outputs[number].sum().backward(retain_graph=True)
        assert seen
        assert wrong(seen, level) == []
    with watching() as seen:
        sum(output.sum() for output in outputs.values()).backward()  # type: ignore[union-attr]
    assert {product.before for product in seen} == set(map(flags_at, ("medium", "high", "highest")))


def test_tasks_of_one_thread() -> None:
    """A covering scope held across await covers its own task alone."""

    async def task(level: str | None) -> torch.Tensor:
        scope = contextlib.nullcontext() if level is None else covering(level)
        with scope:
            await asyncio.sleep(0)
            product = W @ V
            await asyncio.sleep(0)
            return product * 1

    async def main() -> list[torch.Tensor]:
        return list(await asyncio.gather(task("medium"), task(None), task("highest")))

    for product, level in zip(asyncio.run(main()), ("medium", None, "highest"), strict=True):
        seen = products_of_backward(product)
        assert seen
        assert wrong(seen, level) == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda: W @ V,
        lambda: ((W * 2) @ V) @ W,
        lambda: apply(Product, W, V),
        lambda: torch._foreach_mul([W @ V], 2.0)[0],
        lambda: torch.vmap(torch.mv, (None, 0))(W, V) @ V,
        lambda: torch.func.grad(cubic)(X) @ W @ V,
        lambda: torch.no_grad()(torch.matmul)(W, V) @ W,
    ],
)
def test_a_context_that_was_copied_to_another_thread(compute: Callable[[], torch.Tensor]) -> None:
    """What runs in it is covered, from the thread's first product on."""

    async def main() -> list[torch.Tensor]:
        with covering():
            return [await asyncio.to_thread(compute), *await asyncio.gather(task(), task())]

    async def task() -> torch.Tensor:
        return await asyncio.to_thread(compute)

    for result in asyncio.run(main()):
        seen = products_of_backward(result)
        assert seen
        assert wrong(seen, "medium") == []


def test_a_node_that_another_thread_has_yet_to_attach() -> None:
    """What a thread began with is looked for until it is there."""
    result = torch.zeros(6, 6)
    in_another_thread(lambda: tag_soon(result, Float32MatmulPrecision.MEDIUM.rank))
    tag_unfinished()
    result.addmm_(W, V)
    tag_unfinished()
    seen = products_of_backward(result)
    assert wrong(seen, "medium") == []
    assert not unfinished


def test_a_scope_that_another_thread_has_left() -> None:
    """Once it has ended nothing is covered any more, wherever it was entered."""
    scope = covering()
    scope.__enter__()
    inside = W @ V
    context = contextvars.copy_context()
    in_another_thread(lambda: context.run(scope.__exit__, None, None, None))
    after = W @ V
    for product, level in ((inside, "medium"), (after, None)):
        seen = products_of_backward(product)
        assert wrong(seen, level) == []


def test_the_flags_are_as_before_after_a_pass() -> None:
    """Products switch them for themselves alone."""
    with covering():
        product = W @ V
    before = flags()
    product.sum().backward()
    assert flags() == before
