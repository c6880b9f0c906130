"""Rule 31: every operator that multiplies on the CPU is emulated, forward and backward, in each overload."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import ERRORS, FLOAT32_ERROR, error, matrix
from torch import ops
from torch.nn import functional
from watch import watching

from precision_scope import _torch_api as api
from precision_scope import disable_emulation, enable_emulation, matmul_precision
from precision_scope._operators import OPERATORS, operator_of
from precision_scope._products import products

aten: Any = ops.aten
onednn: Any = ops.mkldnn
pytestmark = [
    pytest.mark.usefixtures("plain_afterwards"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors"),
]


def runs_on_the_cpu(name: str) -> bool:
    """Tell whether an operator has a kernel that may run there."""
    keys = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "NestedTensorCPU")
    known = name in products()
    return known and (
        api.has_kernel_for_cpu(name)
        or any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
    )


# Calls of operators, of tensors that each case converts: to float64, for what is
# exact, or not at all.

Convert = Callable[[torch.Tensor], torch.Tensor]
N, K, M = 24, 40, 16
A, B, V = matrix(N, K), matrix(K, M, seed=1), matrix(K, seed=3)
A3, B3 = matrix(3, N, K), matrix(3, K, M, seed=1)
SPARSE = A * (matrix(N, K, seed=5) > 0.5)
Q, KEY, VALUE = matrix(2, 3, 7, 16), matrix(2, 3, 9, 16, seed=1), matrix(2, 3, 9, 16, seed=2)
MASK = matrix(7, 9, seed=6)
IMAGE, FILTER, IMAGE_GRAD = matrix(2, 4, 6, 6), matrix(5, 4, 3, 3, seed=1), matrix(2, 5, 4, 4, seed=2)
VOLUME, FILTER3 = matrix(2, 4, 5, 5, 5), matrix(5, 4, 3, 3, 3, seed=1)
UP, UP3 = matrix(4, 5, 3, 3, seed=1), matrix(4, 5, 3, 3, 3, seed=1)
# What is added is of bfloat16's numbers, which no rounding changes.
C, C3, W = (matrix(*shape, seed=2).bfloat16().float() for shape in ((N, M), (3, N, M), (N,)))
ROW, BIAS = (matrix(size, seed=3).bfloat16().float() for size in (M, 5))
PATTERN = C * (matrix(N, M, seed=5) > 0.5)


OPERANDS = {name: value for name, value in globals().items() if isinstance(value, torch.Tensor)}


def empty(to: Convert, *shape: int) -> torch.Tensor:
    """Return a tensor to write results to."""
    return to(torch.empty(shape))


def coo(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one of coordinates."""
    return tensor.to_sparse()


def csr(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one of compressed rows."""
    return tensor.to_sparse_csr()


def scaled(call: Callable[..., Any], *args: torch.Tensor, **options: Any) -> Any:
    """Add a half of the first of the arguments to twice the product."""
    return call(*args, beta=0.5, alpha=2, **options)


def attention(to: Convert, **options: Any) -> Any:
    """Run fused attention, forward and backward."""
    query, key, value = to(Q), to(KEY), to(VALUE)
    if query.dtype == torch.float64:  # in single steps
        leaves = [tensor.requires_grad_() for tensor in (query.clone(), key.clone(), value.clone())]
        scores = leaves[0] @ leaves[1].mT * options.get("scale", 0.25)
        if "attn_mask" in options:
            scores = scores + to(options["attn_mask"])
        if options.get("is_causal"):
            scores = scores.masked_fill(torch.ones(7, 9, dtype=torch.bool).triu(1), -torch.inf)
        output = scores.softmax(-1) @ leaves[2]
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
        return output.detach(), scores.logsumexp(-1).detach(), *gradients
    run = aten._scaled_dot_product_flash_attention_for_cpu
    causal = options.pop("is_causal", False)
    output, logarithms = run(query, key, value, 0.0, causal, **options)
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = run(torch.ones_like(output), query, key, value, output, logarithms, 0.0, causal, **options)
    return output, logarithms, *gradients


def pointwise(to: Convert, activation: str, scalars: list[float], algorithm: str) -> Any:
    """Run a linear layer with its activation, as compiled code does."""
    left, weight, bias = to(A), to(B.T.contiguous()), to(ROW)
    if left.dtype == torch.float64:
        exact: Any = {
            "none": lambda x: x,
            "relu": torch.relu,
            "gelu": lambda x: functional.gelu(x, approximate=algorithm),
            "leaky_relu": lambda x: functional.leaky_relu(x, scalars[0]),
        }[activation]
        return exact(functional.linear(left, weight, bias))
    packed = onednn._reorder_linear_weight(weight, N)
    return onednn._linear_pointwise(left, packed, bias, activation, scalars, algorithm)


def binary(to: Convert, what: str) -> Any:
    """Run a linear layer with something done to its result, as compiled code does."""
    left, weight, bias, other = to(A), to(B.T.contiguous()), to(ROW), to(C)
    if left.dtype == torch.float64:
        exact: Any = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[what]
        return exact(functional.linear(left, weight, bias), other)
    return onednn._linear_pointwise.binary(left, other, onednn._reorder_linear_weight(weight, N), bias, what)


def mkl_linear(to: Convert) -> Any:
    """Run a linear layer whose weight MKL has packed."""
    left, weight, bias = to(A), to(B.T.contiguous()), to(ROW)
    if left.dtype == torch.float64:
        return functional.linear(left, weight, bias)
    return ops.mkl._mkl_linear(left, ops.mkl._mkl_reorder_linear_weight(weight, N), weight, bias, N)


def of_onednn(to: Convert, what: str) -> Any:
    """Run a linear layer of oneDNN's tensors, or its backward."""
    left, weight, gradient, bias = to(A), to(B.T.contiguous()), to(C), to(ROW)
    if left.dtype == torch.float64:
        exact: Any = {
            "forward": lambda: functional.linear(left, weight, bias),
            "input": lambda: gradient @ weight,
            "weights": lambda: (gradient.T @ left, gradient.sum(0)),
            "both": lambda: (gradient @ weight, gradient.T @ left, gradient.sum(0)),
        }
        return exact[what]()
    left, gradient = left.to_mkldnn(), gradient.to_mkldnn()
    own: Any = {
        "forward": lambda: aten.mkldnn_linear(left, weight.to_mkldnn(), bias.to_mkldnn()),
        "input": lambda: aten.mkldnn_linear_backward_input((N, K), gradient, weight),
        "weights": lambda: aten.mkldnn_linear_backward_weights(gradient, left, weight, True),
        "both": lambda: aten.mkldnn_linear_backward(left, gradient, weight, (True, True, True)),
    }
    return own[what]()


def convolution_backward(to: Convert, *, out: bool = False, mask: tuple[bool, ...] = (True,) * 3) -> Any:
    """Run the backward pass of a convolution that torch computes as matrix products."""
    args = (to(IMAGE_GRAD), to(IMAGE), to(FILTER), (3, 3), (1, 1), (0, 0))
    if not out:
        return aten._slow_conv2d_backward.output_mask(*args, mask)
    return aten._slow_conv2d_backward.grad_input(
        *args,
        grad_input=empty(to, *IMAGE.shape),
        grad_weight=empty(to, *FILTER.shape),
        grad_bias=empty(to, 5),
    )


def reduced(to: Convert, reduce: str) -> Any:
    """Multiply, and reduce the products of each entry in some way."""
    return aten._sparse_mm_reduce_impl(csr(to(SPARSE)), to(B), reduce)[0]


def reduced_backward(to: Convert, reduce: str) -> Any:
    """Run the backward pass of that."""
    arguments = aten._sparse_mm_reduce_impl(csr(to(SPARSE)), to(B), reduce)[1]
    return aten._sparse_mm_reduce_impl_backward(
        csr(to(SPARSE)), to(C), to(B), reduce, arguments, (True, True)
    )


def nested(to: Convert, *tensors: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor."""
    return torch.nested.nested_tensor([to(tensor) for tensor in tensors], layout=torch.strided)


CASES: dict[str, Callable[[Convert], Any]] = {
    "mm": lambda to: aten.mm(to(A), to(B)),
    "mm.out": lambda to: aten.mm(to(A), to(B), out=empty(to, N, M)),
    "mm, coordinates": lambda to: aten.mm(coo(to(SPARSE)), to(B)),
    "mm, rows": lambda to: aten.mm(csr(to(SPARSE)), to(B)),
    "mm, of sparse": lambda to: aten.mm(coo(to(SPARSE)), coo(to(B))),
    "addmm": lambda to: scaled(aten.addmm, to(C), to(A), to(B)),
    "addmm, of a row": lambda to: scaled(aten.addmm, to(ROW), to(A), to(B)),
    "addmm.out": lambda to: scaled(aten.addmm, to(C), to(A), to(B), out=empty(to, N, M)),
    "addmm_": lambda to: scaled(aten.addmm_, to(C).clone(), to(A), to(B)),
    "addmm, coordinates": lambda to: scaled(aten.addmm, to(C), coo(to(SPARSE)), to(B)),
    "addmm_, coordinates": lambda to: scaled(aten.addmm_, to(C).clone(), coo(to(SPARSE)), to(B)),
    "addmm, rows": lambda to: scaled(aten.addmm, to(C), csr(to(SPARSE)), to(B)),
    "addmv": lambda to: scaled(aten.addmv, to(W), to(A), to(V)),
    "addmv.out": lambda to: scaled(aten.addmv, to(W), to(A), to(V), out=empty(to, N)),
    "addmv_": lambda to: scaled(aten.addmv_, to(W).clone(), to(A), to(V)),
    "addmv, rows": lambda to: scaled(aten.addmv, to(W), csr(to(SPARSE)), to(V)),
    "mv": lambda to: aten.mv(to(A), to(V)),
    "mv.out": lambda to: aten.mv(to(A), to(V), out=empty(to, N)),
    "mv, coordinates": lambda to: aten.mv(coo(to(SPARSE)), to(V)),
    "bmm": lambda to: aten.bmm(to(A3), to(B3)),
    "bmm, nested": lambda to: aten.bmm(nested(to, A, A[:5]), nested(to, B, B)),
    "bmm.out": lambda to: aten.bmm(to(A3), to(B3), out=empty(to, 3, N, M)),
    "bmm, coordinates": lambda to: aten.bmm(coo(to(A3)), to(B3)),
    "baddbmm": lambda to: scaled(aten.baddbmm, to(C3), to(A3), to(B3)),
    "baddbmm.out": lambda to: scaled(aten.baddbmm, to(C3), to(A3), to(B3), out=empty(to, 3, N, M)),
    "baddbmm_": lambda to: scaled(aten.baddbmm_, to(C3).clone(), to(A3), to(B3)),
    "addbmm": lambda to: scaled(aten.addbmm, to(C), to(A3), to(B3)),
    "addbmm.out": lambda to: scaled(aten.addbmm, to(C), to(A3), to(B3), out=empty(to, N, M)),
    "addbmm_": lambda to: scaled(aten.addbmm_, to(C).clone(), to(A3), to(B3)),
    "_addmm_activation": lambda to: scaled(aten._addmm_activation, to(ROW), to(A), to(B)),
    "_addmm_activation.out": lambda to: scaled(
        aten._addmm_activation, to(C), to(A), to(B), use_gelu=True, out=empty(to, N, M)
    ),
    "_sparse_addmm": lambda to: aten._sparse_addmm(to(C), coo(to(SPARSE)), to(B)),
    "linear_backward": lambda to: aten.linear_backward(
        nested(to, A, A[:5]), nested(to, C, C[:5]), to(B.T.contiguous()), (True, True, False)
    ),
    "matmul_backward": lambda to: aten.matmul_backward(
        nested(to, C, C[:5]), nested(to, A, A[:5]), nested(to, B, B), (True, True)
    ),
    "linear.out": lambda to: aten.linear(to(A), to(B.T), to(ROW), out=empty(to, N, M)),
    "hspmm.out": lambda to: aten.hspmm(coo(to(SPARSE)), to(B), out=coo(empty(to, N, M))),
    "hspmm": lambda to: aten.hspmm(coo(to(SPARSE)), to(B)),
    "sspaddmm.out": lambda to: scaled(aten.sspaddmm, coo(to(PATTERN)), coo(to(SPARSE)), to(B)),
    "sparse_sampled_addmm": lambda to: scaled(aten.sparse_sampled_addmm, csr(to(PATTERN)), to(A), to(B)),
    "sparse_sampled_addmm.out": lambda to: scaled(
        aten.sparse_sampled_addmm, csr(to(PATTERN)), to(A), to(B), out=csr(to(PATTERN))
    ),
    "_sparse_sparse_matmul": lambda to: aten._sparse_sparse_matmul(coo(to(SPARSE)), coo(to(B))),
    "_sparse_mm_reduce_impl": lambda to: reduced(to, "sum"),
    "_sparse_mm_reduce_impl, mean": lambda to: reduced(to, "mean"),
    "_sparse_mm_reduce_impl_backward": lambda to: reduced_backward(to, "sum"),
    "_trilinear": lambda to: functional.bilinear(to(A), to(A), to(matrix(3, K, K))),
    "_cdist_forward": lambda to: aten._cdist_forward(to(A), to(B.T), 2.0, 1),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": functools.partial(attention, scale=0.5),
    "_scaled_dot_product_flash_attention_for_cpu, masked": functools.partial(attention, attn_mask=MASK),
    "_scaled_dot_product_flash_attention_for_cpu, causal": functools.partial(attention, is_causal=True),
    "_slow_conv2d_forward": lambda to: aten._slow_conv2d_forward(
        to(IMAGE), to(FILTER), (3, 3), to(BIAS), (1, 1), (0, 0)
    ),
    "_slow_conv2d_forward.output": lambda to: aten._slow_conv2d_forward(
        to(IMAGE), to(FILTER), (3, 3), to(BIAS), (1, 1), (0, 0), output=empty(to, 2, 5, 4, 4)
    ),
    "_slow_conv2d_backward.output_mask": convolution_backward,
    "_slow_conv2d_backward.output_mask, of weights": functools.partial(
        convolution_backward, mask=(False, True, False)
    ),
    "_slow_conv2d_backward.grad_input": functools.partial(convolution_backward, out=True),
    "slow_conv3d_forward": lambda to: aten.slow_conv3d_forward(
        to(VOLUME), to(FILTER3), (3, 3, 3), to(BIAS), (1, 1, 1), (0, 0, 0)
    ),
    "slow_conv3d_forward.output": lambda to: aten.slow_conv3d_forward(
        to(VOLUME), to(FILTER3), (3, 3, 3), to(BIAS), (1, 1, 1), (0, 0, 0), output=empty(to, 2, 5, 3, 3, 3)
    ),
    "slow_conv_dilated2d": lambda to: aten.slow_conv_dilated2d(
        to(IMAGE), to(FILTER), (3, 3), to(BIAS), (1, 1), (0, 0), (2, 2)
    ),
    "slow_conv_dilated3d": lambda to: aten.slow_conv_dilated3d(
        to(VOLUME), to(FILTER3), (3, 3, 3), to(BIAS), (1, 1, 1), (0, 0, 0), (2, 2, 2)
    ),
    "slow_conv_transpose2d": lambda to: aten.slow_conv_transpose2d(to(IMAGE), to(UP), (3, 3), to(BIAS)),
    "slow_conv_transpose2d.out": lambda to: aten.slow_conv_transpose2d(
        to(IMAGE), to(UP), (3, 3), to(BIAS), out=empty(to, 2, 5, 8, 8)
    ),
    "slow_conv_transpose3d": lambda to: aten.slow_conv_transpose3d(to(VOLUME), to(UP3), (3, 3, 3), to(BIAS)),
    "slow_conv_transpose3d.out": lambda to: aten.slow_conv_transpose3d(
        to(VOLUME), to(UP3), (3, 3, 3), to(BIAS), out=empty(to, 2, 5, 7, 7, 7)
    ),
    "mkldnn_linear": functools.partial(of_onednn, what="forward"),
    "mkldnn_linear_backward_input": functools.partial(of_onednn, what="input"),
    "mkldnn_linear_backward": functools.partial(of_onednn, what="both"),
    "mkldnn_linear_backward_weights": functools.partial(of_onednn, what="weights"),
    "_linear_pointwise": lambda to: pointwise(to, "none", [], ""),
    "_linear_pointwise, relu": lambda to: pointwise(to, "relu", [], ""),
    "_linear_pointwise, gelu": lambda to: pointwise(to, "gelu", [], "tanh"),
    "_linear_pointwise, leaky_relu": lambda to: pointwise(to, "leaky_relu", [0.1], ""),
    "_linear_pointwise.binary": lambda to: binary(to, "add"),
    "_linear_pointwise.binary, mul": lambda to: binary(to, "mul"),
}
if torch.backends.mkl.is_available():
    CASES["_mkl_linear"] = mkl_linear
if runs_on_the_cpu("aten::_grouped_mm"):  # torch 2.9
    CASES["_grouped_mm"] = lambda to: (aten._grouped_mm if to(A3).dtype == torch.float32 else torch.bmm)(
        to(A3), to(B3)
    )
if hasattr(torch, "_foreach_mm"):  # torch 2.13
    CASES["_foreach_mm"] = lambda to: aten._foreach_mm([to(A), to(A)], [to(B), to(B)])

BIAS_GRADIENTS = {
    "_slow_conv2d_backward.output_mask",
    "_slow_conv2d_backward.grad_input",
    "mkldnn_linear_backward",
    "mkldnn_linear_backward_weights",
}
"""Those whose last result is a sum, which no hardware rounds."""


def numbers(results: Any) -> list[torch.Tensor]:
    """Return the results of an operator as dense tensors of float64."""
    if isinstance(results, torch.Tensor):
        results = [results]
    parts = [result.unbind() if result.is_nested else [result] for result in results if result is not None]
    return [part.to_dense().double() for part in itertools.chain(*parts)]


def errors(found: Any, exact: Any) -> list[float]:
    """Return the errors of all results."""
    return [error(one, other) for one, other in zip(numbers(found), numbers(exact), strict=True)]


def tf32(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers with 10 of their bits after the first one, in double arithmetic."""
    fractions, exponents = numbers.double().frexp()
    return ((fractions * 2**11).round() / 2**11).ldexp(exponents).float()


def bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers with 7 of them, as torch converts them."""
    return numbers.bfloat16().float()


CALLS_OTHERS = {
    "_cdist_forward",
    "_foreach_mm",
    "_grouped_mm",
    "_sparse_addmm",
    "_trilinear",
    "addbmm",
    "addbmm_",
    "linear_backward",
    "matmul_backward",
    "mkldnn_linear_backward",
    "mv",
}
"""Those whose kernels multiply by calling operators that are emulated."""

NO_PRODUCT = {
    "_cdist_backward",
    "_scaled_dot_product_fused_attention_overrideable",  # for other vendors: raises
    "_scaled_dot_product_fused_attention_overrideable_backward",
}


def test_no_operator_is_forgotten() -> None:
    """What runs on the CPU is emulated, or calls what is, and there is a case for each."""
    cases = {name.partition(",")[0] for name in CASES}
    for name in products():
        base = name.partition("::")[2].partition(".")[0]
        own = operator_of(name) is not None
        calls_own = name.endswith("out") and not api.has_kernel_for_cpu(name)  # made for the functional one
        if not runs_on_the_cpu(name) or base in NO_PRODUCT or calls_own:
            assert not own, name
        else:
            assert own is (base not in CALLS_OTHERS), name
            assert (name.partition("::")[2] if own else base) in cases, name
    known = {name.partition(".")[0] for name in products()}
    assert {name.partition(".")[0] for name in OPERATORS} <= known


@pytest.mark.parametrize(("like", "level"), ERRORS)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_emulated(name: str, like: Any, level: str) -> None:
    """It makes the error of its hardware and level, and is exact again afterwards, and at "highest"."""
    case, expected = CASES[name], ERRORS[like, level]
    exact = case(torch.Tensor.double)
    operands = {key: (value._version, value.clone()) for key, value in OPERANDS.items()}
    with watching() as seen:
        before = errors(case(torch.Tensor.float), exact)
    assert name.partition(",")[0] in {product.operator.partition("::")[2] for product in seen}
    enable_emulation(like)
    with matmul_precision(level):
        found = errors(case(torch.Tensor.float), exact)
    if name in BIAS_GRADIENTS:
        assert found.pop() < FLOAT32_ERROR
    assert all(expected / 8 < one < expected * 3 for one in found), (found, expected)
    with matmul_precision("highest"):
        assert errors(case(torch.Tensor.float), exact) == before
    disable_emulation()
    with matmul_precision(level):
        assert max(errors(case(torch.Tensor.float), exact)) < 1e-6
    for key, (version, numbers_before) in operands.items():
        assert OPERANDS[key]._version == version
        assert torch.equal(OPERANDS[key], numbers_before)


@pytest.mark.parametrize(("like", "rounded"), [("cuda", tf32), ("tpu", bfloat16)])
@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.startswith(("_scaled", "_cdist", "_tri"))]
)
def test_one_pass_is_the_product_of_rounded_factors(name: str, like: Any, rounded: Convert) -> None:
    """What the operator adds, and does to the product, is as it was."""
    exact = numbers(CASES[name](rounded))
    enable_emulation(like)
    with matmul_precision("medium"):
        found = numbers(CASES[name](torch.Tensor.float))
    if name in BIAS_GRADIENTS:  # of the gradient as it is
        disable_emulation()
        exact[-1] = numbers(CASES[name](torch.Tensor.float))[-1]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
