"""Seeing on a CPU what a level does on a GPU or a TPU.

While emulation is on, the kernels of isolation ask here what is to run in place
of an operator's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from precision_scope import _torch_api as api
from precision_scope._dynamo import hide_package
from precision_scope._entries import ASKS_NOTHING
from precision_scope._hardware import Hardware, parse_hardware
from precision_scope._isolation import enable_isolation
from precision_scope._ledger import ledger
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._operators import Call, Composition, Operator, inside_kernel, operator_of
from precision_scope._products import emulating, products
from precision_scope._rounding import BFLOAT16, BFLOAT16_3X, TF32, Arithmetic

_HIGH, _MEDIUM = Float32MatmulPrecision.HIGH, Float32MatmulPrecision.MEDIUM

ARITHMETICS: Final[dict[Hardware, dict[Float32MatmulPrecision, Arithmetic]]] = {
    "cuda": {_HIGH: TF32, _MEDIUM: TF32},
    "tpu": {_HIGH: BFLOAT16_3X, _MEDIUM: BFLOAT16},
}
"""How hardware computes products, at the levels that make a difference."""


def enable_emulation(like: Hardware) -> None:
    """Compute float32 products on the CPU as a GPU or a TPU does, to see there what a level does.

    From this call on, a product of float32 matrices ``a`` and ``b`` on the CPU
    is what that hardware makes of it at the level of the context that calls it.
    Backward passes run at the level that they have without emulation.

    ========  ===========  =================================================  =====
    like      level        product                                            error
    ========  ===========  =================================================  =====
    ``cuda``  high         ``tf32(a) @ tf32(b)``                              3e-4
    ``cuda``  medium       the same                                           3e-4
    ``tpu``   high         ``hi(a) @ hi(b) + hi(a) @ lo(b) + lo(a) @ hi(b)``  4e-6
    ``tpu``   medium       ``bf16(a) @ bf16(b)``                              2e-3
    both      highest      ``a @ b``                                          3e-7
    ========  ===========  =================================================  =====

    ``tf32`` and ``bf16`` round to nearest, ties to even, and keep 10 and 7 of
    the 23 mantissa bits; what rounds to more than the largest number of the
    format becomes infinite, as on the hardware. ``hi`` is ``bf16``, but keeps
    finite numbers finite, and ``lo(a)`` is ``bf16(a - hi(a))``; the products
    with ``lo`` are left out where they are not finite. Sums are those of a
    float32 product. The error is the norm of the difference from the float64
    product relative to the norm of that, for random matrices of 512 by 512.

    All operators that isolation covers are emulated, also where the hardware's
    libraries may compute in float32: products of sparse matrices, products with
    vectors, and fused attention, which is emulated as if it were not fused.
    Convolutions are emulated only where torch computes them as matrix products
    (``slow_conv2d`` and its like), oneDNN's LSTM layers are not, and nor are
    products that a compiler writes itself; inductor, on the CPU, does so with
    many that have a vector. Integers, complex numbers and other floats are left
    alone, and so is what lies on other devices than the CPU. The operands are
    copied, never changed.

    This turns isolation on, for good; see :func:`enable_isolation`. A second
    call can change ``like``. It holds for all threads and tasks, and for
    processes forked from this one, until :func:`disable_emulation` is called; a
    spawned process calls it itself. Call it when the program starts: a product
    that runs in another thread at that moment may be emulated or not. While an
    emulated product runs, torch's own setting is ``"highest"``, whatever its
    level.

    Args:
        like: The hardware, ``"cuda"`` for an NVIDIA GPU with TF32 (Ampere or
            newer) or ``"tpu"``. Where a program sets no level, its products are
            float32 here, but bfloat16 on a TPU: set ``"medium"`` to see that.

    Raises:
        TypeError: If ``like`` is not a string.
        ValueError: If it is another one.
        PrecisionScopeError: If isolation does not work on this torch. In all
            three cases nothing has changed.

    Example:
        >>> import torch
        >>> from precision_scope import disable_emulation, enable_emulation, matmul_precision
        >>> a = torch.tensor([[1.0001]])
        >>> enable_emulation("cuda")
        >>> with matmul_precision("high"):
        ...     print((a @ a).item())
        1.0
        >>> disable_emulation()
    """
    hardware = parse_hardware(like)
    enable_isolation()
    set_emulation(hardware)


def disable_emulation() -> None:
    """Compute products as torch does again; without emulation this does nothing.

    Isolation stays on. It can be called from any thread, also inside scopes; a
    product that runs in another thread at that moment may be emulated or not.

    Example:
        >>> from precision_scope import disable_emulation, enable_emulation, report
        >>> enable_emulation("tpu")
        >>> report().emulation
        'tpu'
        >>> disable_emulation()
        >>> print(report().emulation)
        None
    """
    set_emulation(None)


def set_emulation(like: Hardware | None) -> None:
    """Emulate some hardware, if any, in a process that has isolation for that."""
    emulating[:] = [] if like is None else [Emulation(like)]


def emulated_hardware() -> Hardware | None:
    """Return what is emulated, if anything is."""
    return next((emulation.like for emulation in emulating), None)


@functools.cache  # isolation has looked for products once
def _operators() -> dict[str, Operator | Composition | None]:
    return {name: operator_of(name) for name in products()}


class Emulation:
    """Finds what is to run in place of an operator's own kernel.

    Args:
        like: What is emulated.
    """

    def __init__(self, like: Hardware) -> None:
        self.like: Hardware = like
        self._arithmetics = [ARITHMETICS[like].get(level) for level in LEVELS]
        self._operators = _operators()

    def find(
        self, name: str, rank: int, kernel: Callable[..., Any], args: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Return what is to run, at "highest"; None if the kernel is, at the level.

        Args:
            name: The operator's name.
            rank: That of the level which the context asks for.
            kernel: The operator's own kernel.
            args: Its arguments, without those that are given by name.
        """
        if inside_kernel.get():
            return kernel
        arithmetic = self._arithmetics[rank if rank != ASKS_NOTHING else ledger.default().rank]
        operator = self._operators[name]
        if arithmetic is None or operator is None:
            return None
        with api.without_torch_function():
            if not all(_has_numbers_to_round(args[position]) for position in operator.factors):
                return None
        return functools.partial(_run, operator, arithmetic, name, kernel)


def _has_numbers_to_round(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 0
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and not value.is_nested
    )


def _run(
    operator: Operator | Composition,
    arithmetic: Arithmetic,
    name: str,
    kernel: Callable[..., Any],
    keys: Any,
    *args: Any,
    **options: Any,
) -> Any:
    with api.without_torch_function(), api.without_autocast():
        return operator.run(Call(name, kernel, keys, args, options), arithmetic)


hide_package()
