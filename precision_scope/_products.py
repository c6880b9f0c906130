"""Kernels around every float32 matrix product, so that each takes the gate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from precision_scope import _torch_api as api
from precision_scope._dynamo import hide
from precision_scope._entries import ASKS_NOTHING, tagging, top, wanted_rank
from precision_scope._gate import DEFAULT, Gate
from precision_scope._ledger import ledger
from precision_scope._levels import Float32MatmulPrecision
from precision_scope._locks import get_ident

if TYPE_CHECKING:
    from precision_scope._emulation import Emulation

PRODUCTS: Final = frozenset(
    (
        "aten::_addmm_activation",
        "aten::_cdist_backward",
        "aten::_cdist_forward",
        "aten::_efficient_attention_backward",
        "aten::_efficient_attention_forward",
        "aten::_foreach_mm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_fused_attention_overrideable_backward",
        "aten::_slow_conv2d_backward",
        "aten::_slow_conv2d_forward",
        "aten::_sparse_addmm",
        "aten::_sparse_mm_reduce_impl",
        "aten::_sparse_mm_reduce_impl_backward",
        "aten::_sparse_sparse_matmul",
        "aten::_trilinear",
        "aten::addbmm",
        "aten::addbmm_",
        "aten::addmm",
        "aten::addmm_",
        "aten::addmv",
        "aten::addmv_",
        "aten::baddbmm",
        "aten::baddbmm_",
        "aten::bmm",
        "aten::hspmm",
        "aten::linear",
        "aten::linear_backward",
        "aten::matmul_backward",
        "aten::mkldnn_linear",
        "aten::mkldnn_linear_backward",
        "aten::mkldnn_linear_backward_input",
        "aten::mkldnn_linear_backward_weights",
        "aten::mm",
        "aten::mv",
        "aten::slow_conv3d_forward",
        "aten::slow_conv_dilated2d",
        "aten::slow_conv_dilated3d",
        "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose3d",
        "aten::sparse_sampled_addmm",
        "aten::sspaddmm",
        "mkl::_mkl_linear",
        "mkldnn::_linear_pointwise",
    )
)
"""The operators that multiply float32 matrices in kernels of their own; all their overloads."""


emulating: list[Emulation] = []
"""Holds the emulation that is on, if any; it finds what runs, at "highest", in place of a product."""

_HIGHEST: Final = Float32MatmulPrecision.HIGHEST.rank


def products() -> list[str]:
    """Return the overloads of PRODUCTS that this torch has kernels for."""
    return [
        name
        for namespace in ("aten", "mkl", "mkldnn")
        for name in api.operators(namespace)
        if name.partition(".")[0] in PRODUCTS
    ]


def register(gate: Gate) -> list[Any]:
    """Have every product take the gate, for as long as what is returned is kept."""
    return api.register_for_every_device({name: _through(gate, name) for name in products()})


def _through(gate: Gate, name: str) -> Callable[..., Any]:  # noqa: PLR0915 -- hot
    """Return a kernel that takes the gate at the level of its caller's context."""
    redispatch = api.redispatcher(name)
    here, get_top = gate.here, top.get
    lock = gate.lock
    bits_of_keys, serves_backward = api.bits_of_keys, api.serves_backward
    lower_keys: dict[object, Any] = {}  # combining sets of keys takes longer than looking them up
    holder, hold, take = lock.holder, lock.holder.setdefault, lock.take
    over_and_done = ledger.over_and_done
    plain = frozenset((torch.Tensor, torch.nn.Parameter))
    single, complex_single = torch.float32, torch.complex64

    # Straight-line code for the usual case, as in a scope's entry and exit; the
    # gate's own methods do the same, and finish what an interrupt cuts short.
    def product(keys: Any, operand: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: PLR0915
        bits = bits_of_keys(keys)
        lower = lower_keys.get(bits)
        if lower is None:
            lower = lower_keys[bits] = api.keys_below_autograd(keys)
        if operand.__class__ in plain:  # looking at another class's attributes may run its code
            dtype = operand.dtype
            if dtype is not single and dtype is not complex_single:  # no level changes it
                return redispatch(lower, operand, *args, **kwargs)
        entry = get_top()
        run = redispatch
        if tagging or emulating:
            if tagging and tagging[0].begin_with_product():
                return tagging[0].tag_first(product(keys, operand, *args, **kwargs))
            key = wanted_rank()
            for emulation in emulating:  # one at most
                emulated = emulation.find(name, key, redispatch, (operand, *args))
                if emulated is not None:
                    run, key = emulated, _HIGHEST
        elif entry is None and not serves_backward():
            key = DEFAULT
        elif entry is None or (key := entry.rank) >= ASKS_NOTHING:
            key = wanted_rank()
        mine = here.mine
        outer = mine.key
        me = get_ident()
        try:
            try:
                locked = outer is None and (hold(0, me) is me or take(me))
                if locked and not gate.waiting and (gate.inside == 0 or gate.group == key):
                    # All or nothing.
                    mine.key, gate.inside, gate.group = key, gate.inside + 1, key
                    if gate.in_force != key:
                        gate.settle()
            except BaseException:
                lock.let_go(me)
                raise
            if locked:
                del holder[0]
            while mine.key != key:  # also when a handler has taken so long that it was taken back
                gate.become(key)
            if kwargs:
                return run(lower, operand, *args, **kwargs)
            return run(lower, operand, *args)
        finally:
            try:
                try:
                    locked = outer is None and (hold(0, me) is me or take(me))
                    if locked and mine.key is not None and (gate.inside > 1 or not gate.waiting):
                        # All or nothing.
                        mine.key, gate.inside = None, gate.inside - 1
                        if gate.inside == 0 and gate.in_force != gate.rest:
                            gate.settle()
                except BaseException:
                    lock.let_go(me)
                    raise
                if locked:
                    del holder[0]
                if mine.key != outer or mine.waiter is not None:
                    gate.become(outer)
            except BaseException:
                _finish(gate, outer)
                raise
            if over_and_done:
                ledger.see_to_the_rest()

    gate.product_code = product.__code__  # the same for all
    return hide(product)


def _finish(gate: Gate, key: int | None) -> None:
    """Have the thread hold what it held before the product, though interrupts may go on."""
    for _ in range(1000):
        with contextlib.suppress(BaseException):  # the first one is raised
            gate.become(key)
            return
