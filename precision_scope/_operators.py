"""How each operator that multiplies on the CPU is computed in passes, of rounded factors each.

The operator's own kernel computes the first pass, with all that it does beside
multiplying; the other passes are corrections of its results. Operators that
only call others are not here: these are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from precision_scope import _torch_api as api
from precision_scope._attention import attention, attention_backward
from precision_scope._rounding import Arithmetic, parts_of

inside_kernel: ContextVar[bool] = ContextVar("precision_scope.inside_kernel", default=False)
"""Whether an operator's own kernel runs, on rounded factors: what it calls is not emulated again."""


def without_emulation(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function whose products run by their own kernels, at "highest"."""
    # A handler of a signal that comes meanwhile runs when C code has returned, and the
    # context has been left: it is not concerned.
    context = copy_context()
    context.run(inside_kernel.set, True)
    return context.run(function, *args, **options)


class Call(NamedTuple):
    """A call of an operator's own kernel.

    Attributes:
        name: The operator's.
        kernel: The kernel.
        keys: The dispatch keys that it takes.
        args: Its arguments.
        options: Those that are given by name.
    """

    name: str
    kernel: Callable[..., Any]
    keys: Any
    args: Sequence[Any]
    options: dict[str, Any]

    def run(self, args: Sequence[Any], *, plain: str | None = None, **options: Any) -> Any:
        """Run the kernel, or that of another operator, with other arguments."""
        kernel = self.kernel if plain is None else api.redispatcher(plain)
        return without_emulation(kernel, self.keys, *args, **options)


class Operator:
    """An operator whose results are products: of its first factor with each of the others.

    Args:
        factors: The positions of its factors.
        plain: The operator that returns the products alone; by default, that
            of the same name which has no suffix.
        more: What that one takes after the arguments of this one.
        scales: Whether this one adds something to the product, both scaled.
        bias: The position of what it adds otherwise.
        bias_gradient: Over which dimensions of the first factor its last
            result is the sum, if it is no product.
    """

    def __init__(
        self,
        *factors: int,
        plain: str | None = None,
        more: tuple[Any, ...] = (),
        scales: bool = False,
        bias: int | None = None,
        bias_gradient: tuple[int, ...] | None = None,
    ) -> None:
        self.factors = factors
        self._plain = plain
        self._more = more
        self._scales = scales
        self._bias = bias
        self._bias_gradient = bias_gradient

    def run(self, call: Call, arithmetic: Arithmetic) -> Any:
        """Do what a call asks for, in passes."""
        first, *others = self._passes(call.args, arithmetic)
        results = call.run(first, **call.options)
        outputs = _as_tuple(results)
        for args in others:
            for output, correction in zip(outputs, self._products(call, args), strict=True):
                if output is not None and output.dtype == torch.float32:
                    _correct(output, correction)
        if self._bias_gradient is not None and outputs[-1] is not None:
            outputs[-1].copy_(call.args[self.factors[0]].to_dense().sum(self._bias_gradient))
        return results

    def _passes(self, args: Sequence[Any], arithmetic: Arithmetic) -> list[list[Any]]:
        """Return the arguments of each pass."""
        first, *others = self.factors
        parts = {position: parts_of(args[position], arithmetic) for position in self.factors}
        passes: list[list[Any]] = []
        for part, other_part in arithmetic.passes:
            passes.append([*args])
            passes[-1][first] = parts[first][part]
            for position in others:
                passes[-1][position] = parts[position][other_part]
        return passes

    def _products(self, call: Call, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the products of factors, with nothing added."""
        plain = self._plain or call.name.partition(".")[0].removesuffix("_")
        options = {"beta": 0, "alpha": call.options.get("alpha", 1)} if self._scales else {}
        bare = [None if position == self._bias else arg for position, arg in enumerate(args)]
        return _as_tuple(call.run([*bare, *self._more], plain=plain, **options))


class Fused(Operator):
    """An operator that does more to the product of two matrices than to add something.

    Corrections come in as further columns of the first matrix, multiplied by the identity.

    Args:
        factors: The positions of the matrices.
        transposed: Whether the second one is.
    """

    def __init__(self, *factors: int, transposed: bool = False) -> None:
        super().__init__(*factors)
        self._transposed = transposed

    def run(self, call: Call, arithmetic: Arithmetic) -> Any:
        """Do what a call asks for, in passes."""
        # Packed for oneDNN or not, the kernel takes both.
        dense = [
            arg.to_dense() if position in self.factors else arg for position, arg in enumerate(call.args)
        ]
        first, *others = self._passes(dense, arithmetic)
        left, right = self.factors
        if others:
            products = [args[left] @ (args[right].mT if self._transposed else args[right]) for args in others]
            correction = _harmless(torch.stack(products).sum(0))
            identity = torch.eye(correction.shape[-1], dtype=correction.dtype, device=correction.device)
            first[left] = torch.cat([first[left], correction], -1)
            first[right] = torch.cat([first[right], identity], -1 if self._transposed else 0)
        return call.run(first, **call.options)


class Reduction(Operator):
    """An operator that may look for the largest or smallest product in place of adding them.

    Args:
        factors: The positions of the factors.
        reduce: The position of the name of what it does.
    """

    def __init__(self, *factors: int, reduce: int) -> None:
        super().__init__(*factors)
        self._reduce = reduce

    def run(self, call: Call, arithmetic: Arithmetic) -> Any:
        """Do what a call asks for, in passes, if it adds."""
        adds = call.args[self._reduce] in ("sum", "mean")
        return super().run(call, arithmetic) if adds else call.run(call.args, **call.options)


class Composition:
    """An operator that is rewritten as calls of others, which are emulated in turn.

    Args:
        factors: The positions of its factors.
        compute: Does what the operator does, given its own kernel, and its arguments.
    """

    def __init__(self, *factors: int, compute: Callable[..., Any]) -> None:
        self.factors = factors
        self._compute = compute

    def run(self, call: Call, _arithmetic: Arithmetic) -> Any:
        """Do what a call asks for."""
        return self._compute(functools.partial(call.kernel, call.keys), *call.args, **call.options)


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, torch.Tensor) else results


def _correct(output: torch.Tensor, correction: torch.Tensor) -> None:
    """Add a correction, of the same layout."""
    if output.layout == torch.strided:
        output.add_(_harmless(correction))
    elif output.is_mkldnn:
        output.add_(_harmless(correction.to_dense()).to_mkldnn())
    else:
        numbers = api.values_of(correction)
        numbers.copy_(_harmless(numbers))
        if _have_same_pattern(output, correction):
            api.values_of(output).add_(numbers)
        else:
            output.add_(correction)


def _harmless(corrections: torch.Tensor) -> torch.Tensor:
    """Return corrections that leave alone what the first pass has as it has to be.

    That is what is not finite, of factors or products that are not, and the sign
    of a zero, which only a negative one leaves.
    """
    return corrections.masked_fill(~corrections.isfinite() | (corrections == 0), -0.0)


def _have_same_pattern(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = zip(api.indices_of(one), api.indices_of(other), strict=True)
    return all(torch.equal(indices, others) for indices, others in pairs)


def _linear(_own: Callable[..., Any], *args: Any) -> torch.Tensor:
    features, _packed, weight, bias, _batch = args
    return functional.linear(features, weight, bias)


_CONVOLUTION = Operator(0, 1, bias=3)

OPERATORS: Final[dict[str, Operator | Composition]] = {
    "aten::_addmm_activation": Fused(1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Composition(0, 1, 2, compute=attention),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Composition(
        0, 1, 2, 3, compute=attention_backward
    ),
    "aten::_slow_conv2d_backward.grad_input": Operator(
        0, 1, 2, plain="aten::_slow_conv2d_backward.output_mask", more=([True] * 3,), bias_gradient=(0, 2, 3)
    ),
    "aten::_slow_conv2d_backward.output_mask": Operator(
        0, 1, 2, plain="aten::_slow_conv2d_backward.output_mask", bias_gradient=(0, 2, 3)
    ),
    "aten::_slow_conv2d_forward": _CONVOLUTION,
    "aten::_sparse_mm_reduce_impl": Reduction(0, 1, reduce=2),
    "aten::_sparse_mm_reduce_impl_backward": Reduction(1, 0, 2, reduce=3),
    "aten::_sparse_sparse_matmul": Operator(0, 1),
    "aten::addmm": Operator(1, 2, scales=True),
    "aten::addmm_": Operator(1, 2, scales=True),
    "aten::addmv": Operator(1, 2, scales=True),
    "aten::addmv_": Operator(1, 2, scales=True),
    "aten::baddbmm": Operator(1, 2, scales=True),
    "aten::baddbmm_": Operator(1, 2, scales=True),
    "aten::bmm": Operator(0, 1),
    "aten::hspmm": Operator(0, 1),
    "aten::mkldnn_linear": Operator(0, 1, bias=2),
    "aten::mkldnn_linear_backward_input": Operator(1, 2),
    "aten::mkldnn_linear_backward_weights": Operator(0, 1, bias_gradient=(0,)),
    "aten::mm": Operator(0, 1),
    "aten::slow_conv3d_forward": _CONVOLUTION,
    "aten::slow_conv_dilated2d": _CONVOLUTION,
    "aten::slow_conv_dilated3d": _CONVOLUTION,
    "aten::slow_conv_transpose2d": _CONVOLUTION,
    "aten::slow_conv_transpose3d": _CONVOLUTION,
    "aten::sparse_sampled_addmm": Operator(1, 2, scales=True),
    "aten::sspaddmm": Operator(1, 2, scales=True),
    "mkl::_mkl_linear": Composition(0, 2, compute=_linear),
    "mkldnn::_linear_pointwise": Fused(0, 1, transposed=True),
    "mkldnn::_linear_pointwise.binary": Fused(0, 2, transposed=True),
}
"""How operators multiply, by their names, with or without that of an overload."""


def operator_of(name: str) -> Operator | Composition | None:
    """Return how an operator multiplies; None if that is left to operators that it calls."""
    if not api.has_kernel_for_cpu(name):
        return None
    return OPERATORS.get(name) or OPERATORS.get(name.partition(".")[0])
