"""Float32 numbers rounded to those of TF32 and bfloat16, which have fewer mantissa bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from precision_scope import _torch_api as api


def round_to_tf32(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to 10 of their 23 mantissa bits."""
    return _round(numbers, 13)


def round_to_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to 7 of them."""
    return _round(numbers, 16)


def _round(numbers: torch.Tensor, dropped: int) -> torch.Tensor:
    """Round to nearest, ties to even.

    NaNs stay as they are. As IEEE 754 says, what would round to more than the
    largest number that is left becomes infinite.
    """
    bits = numbers.view(torch.int32)
    rounded = bits >> dropped
    rounded &= 1
    rounded += (1 << dropped - 1) - 1
    rounded += bits
    rounded &= -1 << dropped
    floats = rounded.view(torch.float32)
    # A NaN whose lowest bits are all that it has would become infinite, others would overflow.
    return floats if _are_finite(numbers) else torch.where(numbers.isnan(), numbers, floats)


def _are_finite(numbers: torch.Tensor) -> bool:
    """Tell whether it is certain, after one pass over them, that no number is infinite or NaN."""
    return math.isfinite(numbers.sum().item())


# The largest number of bfloat16, and the one before what is left of a float32
# number beside it: a rest that is rounded up would have the sum overflow.
_LARGEST: Final = torch.finfo(torch.bfloat16).max
_LARGEST_REST: Final = 2.0**120 - 2.0**112


def _two_parts(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two bfloat16 numbers for each float32 one, finite where it is, of which it is about the sum."""
    high = round_to_bfloat16(numbers)
    if _are_finite(high):
        return high, round_to_bfloat16(numbers - high)
    high = torch.where(numbers.isfinite(), high.clamp(-_LARGEST, _LARGEST), numbers)
    return high, round_to_bfloat16(numbers - high).clamp(-_LARGEST_REST, _LARGEST_REST)


def _tf32_part(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (round_to_tf32(numbers),)


def _bfloat16_part(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (round_to_bfloat16(numbers),)


class Arithmetic(NamedTuple):
    """How products are computed.

    Attributes:
        split: Returns the parts of a factor's numbers that are multiplied.
        passes: Which part of the first factor is multiplied by which of the other:
            the product is the sum. Passes after the first one are corrections.
    """

    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    passes: tuple[tuple[int, int], ...]


TF32: Final = Arithmetic(_tf32_part, ((0, 0),))
BFLOAT16: Final = Arithmetic(_bfloat16_part, ((0, 0),))
BFLOAT16_3X: Final = Arithmetic(_two_parts, ((0, 0), (0, 1), (1, 0)))


def parts_of(factor: torch.Tensor, arithmetic: Arithmetic) -> list[torch.Tensor]:
    """Return the parts of a factor of any layout, each a tensor like it."""
    if factor.layout == torch.strided:
        if 0 not in factor.stride():
            return [*arithmetic.split(factor)]
        once = factor[tuple(slice(1) if stride == 0 else slice(None) for stride in factor.stride())]
        return [part.expand(factor.shape) for part in arithmetic.split(once)]
    if factor.is_mkldnn:
        return [part.to_mkldnn() for part in arithmetic.split(factor.to_dense())]
    if factor.layout == torch.sparse_coo:
        factor = factor.coalesce()  # an entry's numbers are one
    parts: list[torch.Tensor] = []
    for numbers in arithmetic.split(api.values_of(factor)):
        parts.append(factor.clone())
        api.values_of(parts[-1]).copy_(numbers)
    return parts
