"""Rule 31: products on a CPU as a GPU or a TPU computes them, at the level of each context."""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accuracy
import pytest
import torch
from accuracy import ERRORS, FLOAT32_ERROR, error, matrix
from flags import reset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from watch import watching, wrong

from precision_scope import (
    PrecisionScopeError,
    disable_emulation,
    enable_emulation,
    matmul_precision,
    report,
    set_float32_matmul_precision,
)
from precision_scope import _emulation as emulation
from precision_scope._emulation import ARITHMETICS
from precision_scope._hardware import HARDWARE
from precision_scope._rounding import round_to_bfloat16, round_to_tf32

pytestmark = [
    pytest.mark.usefixtures("plain_afterwards"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`"),  # torch.func's own use of it
]

ROUND = {"cuda": round_to_tf32, "tpu": round_to_bfloat16}


A, B = matrix(64, 64), matrix(64, 64, seed=1)
EXACT = A.double() @ B.double()
PLAIN = A @ B


def class_of(product: torch.Tensor, exact: torch.Tensor = EXACT) -> str:
    """Tell from its error how a product was computed."""
    return accuracy.class_of(product, exact)


# What is computed.


@pytest.mark.parametrize(("like", "level"), [*ERRORS, ("cuda", "highest"), ("tpu", "highest")])
def test_the_error_is_that_of_the_hardware(like: Any, level: str) -> None:
    """Within a factor of 1.5 of what is documented, for random matrices of 512 x 512."""
    enable_emulation(like)
    for seed in range(3):
        a, b = matrix(512, 512, seed=seed), matrix(512, 512, seed=seed + 10)
        with matmul_precision(level):
            found = error(a @ b, a.double() @ b.double())
        expected = ERRORS.get((like, level), FLOAT32_ERROR)
        assert expected / 1.5 < found < expected * 1.5


@pytest.mark.parametrize("like", ["cuda", "tpu"])
def test_highest_is_untouched(like: Any) -> None:
    """Bit for bit."""
    enable_emulation(like)
    with matmul_precision("highest"):
        assert torch.equal(A @ B, PLAIN)
    assert torch.equal(A @ B, PLAIN)


SHAPES = {
    "matrices": (A[:5], B[:, :7]),
    "transposed": (A.T, B.T),
    "strided": (A[::2, 1::3], B[::3, ::4][:21]),
    "batches": (matrix(3, 5, 8), matrix(3, 8, 4, seed=1)),
    "broadcast": (matrix(2, 1, 5, 8), matrix(3, 8, 4, seed=1)),
    "expanded": (A[:1].expand(6, 64), B[:, :1].expand(64, 3)),
    "batch by matrix": (matrix(3, 5, 64), B),
    "vectors": (A, B[0]),
    "vector by matrix": (A[0], B),
    "no rows": (matrix(0, 64), B),
    "nothing inside": (matrix(4, 0), matrix(0, 5)),
    "empty batch": (matrix(0, 4, 3), matrix(0, 3, 5)),
    "one number": (matrix(1, 1), matrix(1, 1, seed=1)),
}


@pytest.mark.parametrize("like", ["cuda", "tpu"])
@pytest.mark.parametrize("name", SHAPES)
def test_operands_of_any_shape(name: str, like: Any) -> None:
    """The result is that of factors which were rounded before, and lies in memory as it did."""
    left, right = SHAPES[name]
    expected = ROUND[like](left) @ ROUND[like](right)
    plain = left @ right
    enable_emulation(like)
    with matmul_precision("medium"):
        found = left @ right
    torch.testing.assert_close(found, expected)
    assert found.stride() == plain.stride()
    if like == "tpu":  # the three products that are documented
        high_left, high_right = (operand.bfloat16().float() for operand in (left, right))
        low_left, low_right = (left - high_left).bfloat16().float(), (right - high_right).bfloat16().float()
        pairs = (high_left, high_right), (high_left, low_right), (low_left, high_right)
        expected = torch.stack([one.double() @ other.double() for one, other in pairs]).sum(0).float()
    with matmul_precision("high"):
        found = left @ right
    torch.testing.assert_close(found, expected)
    assert found.stride() == plain.stride()


def test_nothing_inside_leaves_what_is_added() -> None:
    """As a float32 product of no columns by no rows does."""
    enable_emulation("tpu")
    for level in ("high", "medium"):
        with matmul_precision(level):
            found = torch.addmm(torch.ones(4, 5), matrix(4, 0), matrix(0, 5), beta=3)
            assert torch.equal(found, torch.full((4, 5), 3.0))


@pytest.mark.parametrize("like", ["cuda", "tpu"])
@pytest.mark.parametrize("level", ["high", "medium"])
def test_beta_of_zero_leaves_out_what_is_not_finite(like: Any, level: str) -> None:
    """What is not to be added can be anything."""
    enable_emulation(like)
    bad = torch.full((64, 64), math.nan)
    with matmul_precision(level):
        product = A @ B
        torch.testing.assert_close(torch.addmm(bad, A, B, beta=0), product)
        torch.testing.assert_close(bad.clone().addmm_(A, B, beta=0, alpha=2), 2 * product)
        assert torch._addmm_activation(bad, A, B, beta=0).isfinite().all()


@pytest.mark.parametrize("like", ["cuda", "tpu"])
@pytest.mark.parametrize("level", ["high", "medium"])
def test_results_may_be_written_to_an_operand(like: Any, level: str) -> None:
    """To what is added, as without emulation; and factors are copied before."""
    enable_emulation(like)
    with matmul_precision(level):
        sums = torch.addmm(A, A, B, beta=2)
        added, left, both = A.clone(), A.clone(), A.clone()
        assert torch.addmm(added, A, B, beta=2, out=added) is added
        torch.testing.assert_close(added, sums)
        torch.testing.assert_close(torch.mm(left, B, out=left), A @ B)
        torch.testing.assert_close(both.addmm_(both, B, beta=2), sums)


SPECIAL = [0.0, -0.0, 1.0, 1.5, -2.25, 1e-39, math.inf, -math.inf, math.nan, 1e38, 3.4028234663852886e38]


def kinds(product: torch.Tensor) -> list[str]:
    """Tell of each number whether it is finite and, if it is infinite, its sign."""
    return [str(number) if not math.isfinite(number) else "finite" for number in product.flatten().tolist()]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_what_is_not_finite_is_so_as_in_float32(data: st.DataObject) -> None:
    """Infinities, NaNs and sums that overflow, subnormal and the largest numbers."""
    numbers = st.lists(st.sampled_from(SPECIAL), min_size=6, max_size=6)
    left = torch.tensor(data.draw(numbers), dtype=torch.float32).reshape(2, 3)
    right = torch.tensor(data.draw(numbers), dtype=torch.float32).reshape(3, 2)
    expected = left @ right
    try:
        enable_emulation("tpu")
        with matmul_precision("high"):
            assert kinds(left @ right) == kinds(expected)
            added = torch._addmm_activation(torch.zeros(2), left, right)
            assert [kind for kind in kinds(added) if kind == "nan"] == [
                kind for kind in kinds(expected) if kind == "nan"
            ]
    finally:
        disable_emulation()
    passes: list[Any] = [("cuda", "high"), ("cuda", "medium"), ("tpu", "medium")]
    for like, level in passes:
        expected = ROUND[like](left) @ ROUND[like](right)
        try:
            enable_emulation(like)
            with matmul_precision(level):
                torch.testing.assert_close(left @ right, expected, equal_nan=True)
        finally:
            disable_emulation()


def test_zeros_keep_their_signs() -> None:
    """Where a float32 product has them: corrections of nothing are no positive zeros."""
    negative, ones = torch.full((2, 2), -0.0), torch.ones(2, 2)
    products: list[Callable[[], torch.Tensor]] = [
        lambda: torch.addmm(negative, negative, ones),
        lambda: torch.addmm(negative, torch.ones(2, 0), torch.ones(0, 2)),
        lambda: torch.nn.functional.linear(torch.zeros(1, 2), -ones, negative[0]),
        lambda: torch.bmm(negative[None], ones[None]),
    ]
    expected = [product().signbit() for product in products]
    likes: list[Any] = ["cuda", "tpu"]
    for like in likes:
        enable_emulation(like)
        for level in ("high", "medium"):
            with matmul_precision(level):
                assert [product().signbit().tolist() for product in products] == [
                    signs.tolist() for signs in expected
                ]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_results_have_their_own_pattern() -> None:
    """As many entries as without emulation, and errors where torch has errors."""
    a, b = (matrix(6, 8) * (matrix(6, 8, seed=1) > 0)).to_sparse(), matrix(8, 4)
    compressed = b.T.to_sparse_csr()
    products: list[Callable[[], torch.Tensor]] = [
        lambda: torch.hspmm(a, b),
        lambda: torch.sspaddmm(a @ b.to_sparse(), a, b),
        lambda: a @ b.to_sparse(),
        lambda: torch.addmm(
            compressed @ compressed.to_dense().T.to_sparse_csr(), compressed, b.to_sparse_csr()
        ),
    ]
    expected = [product()._nnz() for product in products]
    broken = torch.sparse.mm(a.to_dense().to_sparse_csc(), b.to_sparse_csc())
    likes: list[Any] = ["cuda", "tpu"]
    for like in likes:
        enable_emulation(like)
        with matmul_precision("high"):
            assert [product()._nnz() for product in products] == expected
            again = torch.sparse.mm(a.to_dense().to_sparse_csc(), b.to_sparse_csc())
            assert again._nnz() == broken._nnz()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_largest_of_products_is_no_sum_of_them() -> None:
    """Reductions that do not add are left alone."""
    reduce = torch.ops.aten._sparse_mm_reduce_impl
    sparse = (A * (B > 0)).to_sparse_csr()
    likes: list[Any] = ["cuda", "tpu"]
    for how, like in itertools.product(("amax", "amin"), likes):
        expected = reduce(sparse, B, how)
        enable_emulation(like)
        with matmul_precision("high"):
            found = reduce(sparse, B, how)
        disable_emulation()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_results_of_another_pattern() -> None:
    """What is added has entries of its own, or is where the result is written to."""
    a, b = (matrix(16, 8) * (matrix(16, 8, seed=1) > 1)).to_sparse(), matrix(8, 16)
    left, right = a.to_dense().to_sparse_csr(), (b * (b > 0)).to_sparse_csr()
    added = torch.eye(16).to_sparse_csr()
    exact = added.to_dense().double() + left.to_dense().double() @ right.to_dense().double()
    enable_emulation("tpu")
    with matmul_precision("high"):
        assert 1e-7 < error(torch.addmm(added, left, right).to_dense(), exact) < 1e-5
        product = torch.smm(a, b).to_dense()
    assert class_of(product, a.to_dense().double() @ b.double()) == "bfloat16_3x"


def test_what_a_mask_hides_and_what_it_adds() -> None:
    """NaNs and infinities of a mask show as without emulation, in causal attention, too."""
    query = matrix(1, 1, 3, 4)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(mask: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, ...]:
        results = attend(query, query, query, 0.0, causal, attn_mask=mask)
        if causal or value != -math.inf:  # how NaNs spread is a matter of the kernel's blocks
            return tuple(results)
        return (*results, *backward(query, query, query, query, *results, 0.0, causal, attn_mask=mask))

    for value in (math.nan, math.inf, -math.inf):
        masks = torch.zeros(2, 3, 3)
        masks[0, 0, 2] = masks[1, 1] = value
        for mask, causal in itertools.product(masks, (False, True)):
            expected = run(mask, causal=causal)
            enable_emulation("cuda")
            with matmul_precision("high"):
                found = run(mask, causal=causal)
            disable_emulation()
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.skipif(
    "enable_gqa" not in str(torch.nn.functional.scaled_dot_product_attention.__doc__),
    reason="comes with torch 2.5",
)
def test_heads_that_share_keys_and_values() -> None:
    """Grouped queries: the gradients of what is shared are sums."""
    leaves = [matrix(2, 6, 5, 8), matrix(2, 3, 7, 8, seed=1), matrix(2, 3, 7, 8, seed=2)]

    def run() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.requires_grad_()
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        output = attend(*leaves, enable_gqa=True)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    expected = run()
    enable_emulation("tpu")
    with matmul_precision("high"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert 1e-7 < error(one, other.detach().double()) < 1e-4


def test_another_default_dtype() -> None:
    """What is made inside is of float32 all the same."""
    enable_emulation("tpu")
    torch.set_default_dtype(torch.float64)
    try:
        with matmul_precision("high"):
            assert torch._addmm_activation(B[0], A, B).dtype == torch.float32
            run = torch.ops.mkldnn._linear_pointwise
            assert run(A, B.T.contiguous(), None, "relu", [], "").dtype == torch.float32
            query = torch.randn(1, 1, 4, 8, dtype=torch.float32)
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            assert attend(query, query, query, 0.0, True)[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


OTHERS = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64)


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_numbers_are_left_alone(dtype: torch.dtype) -> None:
    """Integers, complex numbers, and floats of other sizes."""
    a, b = (3 * A).to(dtype), (3 * B).to(dtype)
    expected = a @ b
    likes: list[Any] = ["cuda", "tpu"]
    for like in likes:
        enable_emulation(like)
        for level in ("high", "medium"):
            with matmul_precision(level):
                assert torch.equal(a @ b, expected)


def test_autocast_products_are_left_alone() -> None:
    """They are none of float32, whatever operator they come from."""
    query = matrix(2, 2, 6, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = A @ B, attend(query, query, query)
    enable_emulation("cuda")
    with matmul_precision("medium"), torch.autocast("cpu", dtype=torch.bfloat16):
        found = A @ B, attend(query, query, query)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_autocast_does_not_reach_inside() -> None:
    """A float32 product that autocast lets through is emulated, not cast."""
    options: Any = {"enabled": True, "dtype": torch.bfloat16}
    run = torch.ops.mkldnn._linear_pointwise
    query = matrix(2, 2, 6, 8)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    enable_emulation("tpu")
    with matmul_precision("high"), torch.autocast("cpu", **options):
        product = run(A, B.T.contiguous(), None, "none", [], "")
        attended = attend(query, query, query)[0]
    assert class_of(product) == "bfloat16_3x"
    exact = (query.double() @ query.double().mT / 8**0.5).softmax(-1) @ query.double()
    assert class_of(attended, exact) == "bfloat16_3x"


# Where and when.


def test_each_context_computes_at_its_level() -> None:
    """Threads, at the same time, and those without a scope at the process default."""
    enable_emulation("tpu")
    barrier = threading.Barrier(4, timeout=30)

    def run(level: str | None) -> set[str]:
        barrier.wait()
        with matmul_precision(level):
            return {class_of(A @ B) for _ in range(30)}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, ("highest", "high", "medium", None)))
    assert found == [{"float32"}, {"bfloat16_3x"}, {"bfloat16"}, {"float32"}]


def test_tasks_compute_at_their_levels() -> None:
    """Also where a scope is held while another task runs."""
    enable_emulation("cuda")

    async def run(level: str) -> list[str]:
        found = []
        with matmul_precision(level):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(class_of(A @ B))
        return found

    async def main() -> list[list[str]]:
        return [*await asyncio.gather(run("highest"), run("medium"))]

    assert asyncio.run(main()) == [["float32"] * 3, ["tf32"] * 3]


def allow_tf32() -> None:
    """Set what most programs set."""
    torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize("set_level", [lambda: set_float32_matmul_precision("medium"), allow_tf32])
def test_the_process_default_counts_where_no_scope_is(set_level: Callable[[], object]) -> None:
    """Set by this package or through torch's own settings."""
    enable_emulation("cuda")
    try:
        assert class_of(A @ B) == "float32"
        set_level()
        assert class_of(A @ B) == "tf32"
        with matmul_precision("highest"):
            assert class_of(A @ B) == "float32"
    finally:
        reset()


def test_a_backward_pass_is_emulated() -> None:
    """At the level of the context that calls it."""
    enable_emulation("cuda")
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    with matmul_precision("high"):
        product = a @ b
    product.backward(torch.ones(64, 64))
    exact = torch.ones(64, 64).double() @ B.double().T
    assert class_of(product) == "tf32"
    assert a.grad is not None
    assert class_of(a.grad, exact) == "float32"
    a.grad = None
    with matmul_precision("high"):
        (a @ b).backward(torch.ones(64, 64))
    assert a.grad is not None
    assert class_of(a.grad, exact) == "tf32"


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast")  # torch 2.4's own use of it
def test_a_covered_backward_pass_is_emulated() -> None:
    """At the level of the scope, outside of it; and so is one through a checkpoint, and a second one."""
    enable_emulation("tpu")
    exact = torch.ones(64, 64).double() @ B.double().T
    a = A.clone().requires_grad_()
    with matmul_precision("high", backward=True):
        product = a @ B
        again: Any = checkpoint(torch.matmul, a, B, use_reentrant=False)
    (gradient,) = torch.autograd.grad(product, a, torch.ones(64, 64), create_graph=True)
    assert class_of(gradient, exact) == "bfloat16_3x"
    (gradient,) = torch.autograd.grad(again, a, torch.ones(64, 64))
    assert class_of(gradient, exact) == "bfloat16_3x"
    assert class_of(product) == "bfloat16_3x"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_autograd(mode: Callable[[], Any]) -> None:
    """A product is a product."""
    enable_emulation("tpu")
    with matmul_precision("high"), mode():
        assert class_of(A @ B) == "bfloat16_3x"
        assert class_of(torch.addmm(torch.zeros(64, 64), A, B)) == "bfloat16_3x"


def test_function_transforms() -> None:
    """vmap, jvp, grad and their combinations."""
    enable_emulation("cuda")
    with matmul_precision("high"):
        assert class_of(torch.vmap(torch.mv, (None, 1), 1)(A, B)) == "tf32"
        primal, tangent, *_ = torch.func.jvp(lambda x: x @ B, (A,), (A,))
        assert {class_of(primal), class_of(tangent)} == {"tf32"}
        gradient = torch.func.grad(lambda x: (x @ B).sum())(A)
        assert class_of(gradient, torch.ones(64, 64).double() @ B.double().T) == "tf32"


@pytest.mark.parametrize("like", ["cuda", "tpu"])
def test_the_kernels_run_at_highest(like: Any) -> None:
    """So that a CPU with arithmetic of its own for a level does not add to the error."""
    query = matrix(2, 2, 6, 8)
    enable_emulation(like)
    with watching() as seen, matmul_precision("medium"):
        torch.mm(A, B)
        torch.mv(A, B[0])
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert len(seen) > 3
        assert wrong([product for product in seen if product.operator != "aten::mv"], "highest") == []


def test_emulated_products_run_side_by_side() -> None:
    """Of different levels, too: none waits for another."""
    enable_emulation("tpu")
    barrier = threading.Barrier(2, timeout=30)

    def meet(_operator: str) -> None:
        barrier.wait()

    def run(level: str) -> str:
        with matmul_precision(level):
            return class_of(A @ B)

    with watching(meet), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, ("medium", "medium"))) == ["bfloat16", "bfloat16"]
    with watching(meet), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, ("highest", "medium"))) == ["float32", "bfloat16"]


# What others see of it.


def subclass(calls: list[str]) -> type[torch.Tensor]:
    """Return a subclass that notes the names of the functions that it is given to."""

    class Seen(torch.Tensor):
        """Notes the functions that it is given to."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    return Seen


def test_subclasses_and_modes_see_the_operator_alone() -> None:
    """Nothing that is done inside goes by them."""
    calls: list[str] = []
    seen = subclass(calls)

    class Mode(TorchDispatchMode):
        """Notes the operators."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **kwargs or {})

    enable_emulation("tpu")
    with matmul_precision("high"):
        product = torch.mm(A.as_subclass(seen), B)
        assert calls == ["mm"]
        assert class_of(product.as_subclass(torch.Tensor)) == "bfloat16_3x"
        calls.clear()
        with Mode():  # type: ignore[no-untyped-call]
            product = torch.mm(A, B)
        assert calls == ["aten.mm.default"]
        assert class_of(product) == "bfloat16_3x"
        with torch.device("meta"):
            product = torch._addmm_activation(B[0], A, B)
        assert product.device.type == "cpu"


def test_a_backward_pass_does_not_show_subclasses_what_is_done_inside() -> None:
    """It meets them as they were saved, with nothing in between."""
    calls: list[str] = []
    seen = subclass(calls)

    query, value = matrix(1, 1, 6, 8).as_subclass(seen), matrix(1, 1, 6, 8, seed=1).requires_grad_()
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    enable_emulation("tpu")
    with matmul_precision("high"):
        output = attend(query, query, value)[0].as_subclass(torch.Tensor)
        calls.clear()
        output.backward(torch.ones(1, 1, 6, 8))
    assert calls == []
    assert value.grad is not None


def test_attention_of_an_empty_batch() -> None:
    """There is nothing to round."""
    query = torch.ones(0, 2, 5, 8)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    enable_emulation("tpu")
    with matmul_precision("high"):
        output, logarithms = attend(query, query, query)
        gradients = backward(query, query, query, query, output, logarithms, 0.0, False)
    assert {gradient.shape for gradient in gradients} == {query.shape} == {output.shape}


def test_tensors_without_numbers_pass_through() -> None:
    """Meta tensors, and fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 -- imports much

    enable_emulation("tpu")
    with matmul_precision("high"):
        assert torch.mm(A.to("meta"), B.to("meta")).shape == (64, 64)
        with FakeTensorMode() as mode:
            assert torch.mm(mode.from_tensor(A), mode.from_tensor(B)).shape == (64, 64)


def test_torchs_own_errors_are_raised() -> None:
    """And leave nothing behind."""
    enable_emulation("tpu")
    for level in ("high", "medium"):
        with matmul_precision(level):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(A, B[:3])
            with pytest.raises(RuntimeError, match="same dtype"):
                torch.mm(A, B.double())
            assert class_of(A @ B) in ("bfloat16", "bfloat16_3x")


def test_an_interrupt_leaves_nothing_behind() -> None:
    """The next product is emulated again."""
    enable_emulation("cuda")

    def interrupt(_operator: str) -> None:
        raise KeyboardInterrupt

    with matmul_precision("high"):
        with watching(interrupt), pytest.raises(KeyboardInterrupt):
            torch.mm(A, B)
        assert class_of(A @ B) == "tf32"


# The watch of these tests is other code inside of every product: these run without it.

HANDLER = """
import signal, torch
from precision_scope import enable_emulation, matmul_precision
found, small, large = [], torch.tensor([[1.0001]]), torch.randn(700, 700)
def handler(*_):
    with matmul_precision("high"):
        found.append((small @ small).item())
enable_emulation("cuda")
signal.signal(signal.SIGALRM, handler)
with matmul_precision("high"):
    for _ in range(2000):
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        large @ large
        if len(found) > 20:
            break
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(found) > 20 and set(found) == {1.0}, found
"""

LONG = """
import threading, time, torch
from precision_scope import _gate, enable_emulation, matmul_precision
from precision_scope._ledger import ledger
_gate._PATIENCE = 0.02
enable_emulation("cuda")
gate = ledger.applied.torch_flags
large, other, ended = torch.randn(5000, 5000), torch.ones(4, 4, dtype=torch.complex64), []
def work():
    with matmul_precision("high"):
        large @ large
    ended.append(time.monotonic())
thread = threading.Thread(target=work)
thread.start()
while thread.is_alive() and not gate.inside:
    time.sleep(0.001)
with matmul_precision("medium"):
    other @ other
after = time.monotonic()
thread.join()
assert after >= ended[0] - 0.2, (after, ended)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_a_signal_handler_computes_at_its_level() -> None:
    """Also one that comes while an emulated product runs."""
    run_apart(HANDLER)


def test_a_long_product_keeps_its_turn() -> None:
    """It is not taken for other code that runs inside a product, for which others would not wait."""
    run_apart(LONG)


def run_apart(program: str) -> None:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")


# Switching it on and off.


def test_it_can_be_changed_and_switched_off() -> None:
    """Each as often as one likes, and report() says which it is."""
    assert report().emulation is None
    disable_emulation()
    with matmul_precision("medium"):
        turns: list[Any] = [("cuda", "tf32"), ("tpu", "bfloat16"), ("tpu", "bfloat16"), ("cuda", "tf32")]
        for like, expected in turns:
            enable_emulation(like)
            assert class_of(A @ B) == expected
            assert report().emulation == report().to_dict()["emulation"] == like
        disable_emulation()
        disable_emulation()
        assert torch.equal(A @ B, PLAIN)
    assert report().emulation is None


@pytest.mark.parametrize(
    ("like", "error_type", "message"),
    [
        ("gpu", ValueError, "must be 'cuda' or 'tpu', got 'gpu'"),
        ("CUDA", ValueError, "got 'CUDA'"),
        ("", ValueError, "got ''"),
        ("x" * 5000, ValueError, "got 'x{40}…'"),
        (None, TypeError, "must be 'cuda' or 'tpu', not NoneType"),
        (True, TypeError, "not bool"),
    ],
)
def test_other_hardware_is_refused(like: Any, error_type: type[Exception], message: str) -> None:
    """Before anything changes."""
    enable_emulation("tpu")
    with pytest.raises(error_type, match=message) as raised:
        enable_emulation(like)
    assert len(str(raised.value)) < 200
    assert report().emulation == "tpu"


def test_without_isolation_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is raised, and nothing is emulated."""

    def refuse() -> None:
        raise PrecisionScopeError("isolation does not work on this torch")

    monkeypatch.setattr(emulation, "enable_isolation", refuse)
    with pytest.raises(PrecisionScopeError):
        enable_emulation("cuda")
    assert report().emulation is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_goes_on_emulating() -> None:
    """As it does with isolation."""
    enable_emulation("cuda")
    with matmul_precision("high"):
        child = os.fork()
        if child == 0:
            small, other = A[:4, :8], B[:8, :4]
            os._exit(0 if class_of(small @ other, small.double() @ other.double()) == "tf32" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_member_of_an_enum_is_taken_for_its_string() -> None:
    """report() has the plain one."""

    class Hardware(str, enum.Enum):
        """One that a user may have."""

        GPU = "cuda"

    enable_emulation(Hardware.GPU)  # type: ignore[arg-type]
    assert type(report().emulation) is str


def test_there_is_arithmetic_for_each_hardware() -> None:
    """By the names that are taken."""
    assert tuple(ARITHMETICS) == HARDWARE
