"""Rule 31: rounding to the numbers of TF32 and bfloat16, against arithmetic with fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision_scope._rounding import (
    BFLOAT16_3X,
    TF32,
    Arithmetic,
    parts_of,
    round_to_bfloat16,
    round_to_tf32,
)

FORMATS = {"tf32": (round_to_tf32, 10), "bfloat16": (round_to_bfloat16, 7)}
INFINITY, SMALLEST_EXPONENT = 0x7F800000, -126


def fraction_of(bits: int) -> Fraction:
    """Return the positive number that some bits of float32 stand for."""
    exponent, fraction = bits >> 23, Fraction(bits & (1 << 23) - 1, 1 << 23)
    if exponent == 0:
        return fraction * Fraction(2) ** SMALLEST_EXPONENT
    return (1 + fraction) * Fraction(2) ** (exponent - 127)


def bits_of(numbers: torch.Tensor) -> list[int]:
    """Return the bits of float32 numbers."""
    return [bits & 0xFFFFFFFF for bits in numbers.view(torch.int32).tolist()]


def of_bits(bits: list[int]) -> torch.Tensor:
    """Return the float32 numbers that some bits stand for."""
    signed = [one - (1 << 32) if one >> 31 else one for one in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def rounded(bits: int, kept: int) -> int:
    """Return the bits of a number rounded to nearest, ties to even, with fractions."""
    sign, magnitude = bits & 1 << 31, bits & ~(1 << 31)
    if magnitude >= INFINITY:
        return bits
    exponent = max(magnitude >> 23, 1) - 127
    unit = Fraction(2) ** (exponent - kept)
    nearest = round(fraction_of(magnitude) / unit) * unit  # Python's takes the even one of two
    if nearest >= Fraction(2) ** 128:
        return sign | INFINITY
    # Up to the next power of two, the bits go on counting in the same units.
    step = Fraction(2) ** (exponent - 23)
    above = nearest / step - (1 << 23 if magnitude >> 23 else 0)
    return sign | (magnitude >> 23 << 23) + int(above)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_nearest_even_at_every_exponent(name: str) -> None:
    """Just below, at and above ties of both kinds, at both ends, subnormals, infinities and NaNs included."""
    round_, kept = FORMATS[name]
    dropped = 23 - kept
    half = 1 << dropped - 1
    fractions = {0, 1, half - 1, half, half + 1, (1 << 23) - 1, (1 << 23) - half, (1 << 23) - half - 1}
    fractions |= {(1 << dropped) + part for part in (-1, 0, 1, half - 1, half, half + 1)}
    bits = [
        sign << 31 | exponent << 23 | fraction
        for sign, exponent, fraction in itertools.product((0, 1), range(256), sorted(fractions))
    ]
    assert bits_of(round_(of_bits(bits))) == [rounded(one, kept) for one in bits]
    finite = [one for one in bits if one & INFINITY != INFINITY]
    assert bits_of(round_(of_bits(finite))) == [rounded(one, kept) for one in finite]


@pytest.mark.parametrize("name", FORMATS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=20))
def test_any_bits_are_rounded_so(name: str, bits: list[int]) -> None:
    """Whatever else is rounded with them."""
    round_, kept = FORMATS[name]
    assert bits_of(round_(of_bits(bits))) == [rounded(one, kept) for one in bits]


def test_rounding_to_bfloat16_is_torchs_own() -> None:
    """Torch converts to bfloat16 in the same way."""
    numbers = torch.randn(1000) * 10.0 ** torch.randint(-40, 38, (1000,))
    assert torch.equal(round_to_bfloat16(numbers), numbers.bfloat16().float())


@pytest.mark.parametrize("name", FORMATS)
def test_nan_keep_their_payloads(name: str) -> None:
    """Those whose highest bits are not set would become infinite, those whose all are, zero."""
    round_, _ = FORMATS[name]
    bits = [0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F801234, 0x7FBFFFFF]
    assert bits_of(round_(of_bits(bits))) == bits


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (4, 5)])
def test_rounding_keeps_the_shape_and_does_not_change_what_it_is_given(
    name: str, shape: tuple[int, ...]
) -> None:
    """A copy is rounded, of empty tensors and of single numbers, too."""
    round_, _ = FORMATS[name]
    numbers = torch.rand(shape) + math.pi
    before = numbers.clone()
    assert round_(numbers).shape == numbers.shape
    assert torch.equal(numbers, before)


def test_strided_numbers_are_rounded_where_they_are() -> None:
    """Transposed, cut out and expanded tensors are as their copies."""
    numbers = torch.randn(6, 8)
    for view in (numbers.T, numbers[::2, 1::3], numbers[:, :1].expand(6, 5), numbers[1, 2:], numbers.flip(0)):
        assert torch.equal(round_to_tf32(view), round_to_tf32(view.clone()))
    assert round_to_tf32(numbers.T).stride() == numbers.T.stride()


def check_parts(numbers: torch.Tensor) -> None:
    """Check that two bfloat16 numbers stand for each, as well as two can."""
    high, low = BFLOAT16_3X.split(numbers)
    for part in (high, low):
        assert torch.equal(part, part.bfloat16().float())
        assert part.isfinite().all()
    assert (high + low).isfinite().all()
    rest = (numbers.double() - high.double() - low.double()).abs()
    # Some versions of torch take subnormal numbers for zeros.
    assert (rest <= numbers.double().abs() * 2**-16 + 2**-126).all()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.lists(
        st.integers(0, 0xFFFFFFFF).filter(lambda bits: bits & INFINITY != INFINITY), min_size=1, max_size=20
    )
)
def test_the_parts_of_any_finite_number_are_finite_and_stand_for_it(bits: list[int]) -> None:
    """The largest ones, too, which would round to infinity, and subnormal ones."""
    check_parts(of_bits(bits))


def test_the_parts_of_the_largest_numbers() -> None:
    """They are as good as those of others."""
    largest = torch.finfo(torch.float32).max
    check_parts(torch.tensor([largest, -largest, 0.0, 1.0, 2.0**-149]))
    both = torch.tensor([largest, math.inf, -math.inf, math.nan])
    high, _ = BFLOAT16_3X.split(both)
    assert high[0] < largest
    assert high[1:].tolist()[:2] == [math.inf, -math.inf]
    assert high[3].isnan()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda tensor: tensor,
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda tensor: tensor.to_sparse_bsr((2, 2)),
    "mkldnn": torch.Tensor.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("arithmetic", [TF32, BFLOAT16_3X])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_every_layout_are_split_in_copies(layout: str, arithmetic: Arithmetic) -> None:
    """The layout stays, and so does the tensor."""
    dense = torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)
    tensor = LAYOUTS[layout](dense)
    parts = parts_of(tensor, arithmetic)
    for part, expected in zip(parts, arithmetic.split(dense), strict=True):
        assert part.layout == tensor.layout
        assert torch.equal(part.to_dense(), expected)
    assert torch.equal(tensor.to_dense(), dense)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_entries_of_coordinates_are_summed_up_before() -> None:
    """An entry that is given in several numbers is rounded as one."""
    twice = torch.sparse_coo_tensor(torch.zeros(2, 2), torch.tensor([1.0001, -1.0]), (1, 1))
    (part,) = parts_of(twice, TF32)
    assert part.to_dense().item() == round_to_tf32(torch.tensor(1.0001) - 1).item()
    assert twice._nnz() == 2


def test_what_is_expanded_is_rounded_once() -> None:
    """And takes no more memory than before."""
    numbers = torch.randn(3, 1, 4)
    (part,) = parts_of(numbers.expand(3, 1000, 4), TF32)
    assert part.shape == (3, 1000, 4)
    assert part.untyped_storage().nbytes() == numbers.untyped_storage().nbytes()
    assert torch.equal(part, round_to_tf32(numbers).expand(3, 1000, 4))
