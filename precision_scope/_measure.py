"""What each level does on this machine: its error and its speed, in numbers and in words."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from precision_scope import _torch_api as api
from precision_scope import matmul_precision
from precision_scope._emulation import ARITHMETICS
from precision_scope._hardware import Hardware
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._operators import without_emulation

if TYPE_CHECKING:
    from collections.abc import Callable

SMALLEST_SIZE = 64
LARGEST_SIZE = 32768

_CPU_SIZE = 1024
_ACCELERATOR_SIZE = 4096  # smaller products are too little work to show its speed

# The error is taken over this many rows of the product: plenty for a norm,
# where the whole float64 product of large matrices would take minutes.
_ROWS = 256

_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 20
_SECONDS_OF_ROUNDS = 1.5

FLOAT32_ERROR = 1e-5  # float32 stays below it at any size here; TF32 and bfloat16 do not
SAME_ACCURACY = 2.0  # up to this many times the error of "highest"
_SAME_SPEED = 1.2  # up to this many times as fast or as slow: on a busy machine, repeats differ as much

_HIGHEST = Float32MatmulPrecision.HIGHEST


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """What one level does on one device.

    Attributes:
        device: The device, as torch names it.
        level: The level.
        size: How many rows and columns the matrices had.
        error: The norm of the product's difference from the float64 product,
            relative to the norm of the latter.
        times_the_error: How many times the error of "highest" that is.
        same_bits: Whether the product is that of "highest", bit for bit.
        seconds: The shortest time that a product took.
        times_as_fast: How many times as fast as "highest" that is.
        emulated: The error that the level makes on hardware that is emulated,
            for each that it makes a difference to.
    """

    device: str
    level: Float32MatmulPrecision
    size: int
    error: float
    times_the_error: float
    same_bits: bool
    seconds: float
    times_as_fast: float
    emulated: dict[Hardware, float]

    @property
    def sentence(self) -> str:
        """Say what the level does."""
        return f'On {self.device}, "{self.level}" {self._accuracy()}{self._speed()}.'

    @property
    def emulated_sentences(self) -> list[str]:
        """Say what it does on hardware that is emulated."""
        highest = self.error / self.times_the_error
        return [
            f'On {like}, emulated, "{self.level}" makes {times(error / highest)} the error of "highest".'
            for like, error in self.emulated.items()
        ]

    def _accuracy(self) -> str:
        if self.level == _HIGHEST:
            if self.error > FLOAT32_ERROR:
                return f"is not true float32: its error is {self.error:.1e}, so something else overrides it"
            return f"is true float32, with an error of {self.error:.1e}"
        if self.same_bits:
            return 'gives the results of "highest" bit for bit'
        if self.times_the_error <= SAME_ACCURACY:
            return 'gives other bits than "highest" with the same accuracy'
        return f'makes {times(self.times_the_error)} the error of "highest"'

    def _speed(self) -> str:
        if self.level == _HIGHEST:
            return ""
        if 1 / _SAME_SPEED <= self.times_as_fast <= _SAME_SPEED:
            return ", and is about as fast"
        return f", and is {times(self.times_as_fast)} as fast"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        return {**dataclasses.asdict(self), "level": self.level.value, "sentence": self.sentence}


def emulated_errors(
    left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor
) -> dict[Float32MatmulPrecision, dict[Hardware, float]]:
    """Return the error of a product at each level, on each hardware on which that makes a difference."""
    errors: dict[Float32MatmulPrecision, dict[Hardware, float]] = {level: {} for level in LEVELS}
    for like, arithmetics in ARITHMETICS.items():
        for level, (split, passes) in arithmetics.items():
            lefts, rights = split(left), split(right)
            terms = [
                without_emulation(multiply, lefts[one], rights[other], _HIGHEST) for one, other in passes
            ]
            errors[level][like] = error_of(torch.stack(terms).sum(0), exact)
    return errors


def error_of(product: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of a product's difference from the float64 product, relative to that of the latter."""
    return float(torch.dist(product.cpu().double(), exact)) / (float(exact.square().sum().sqrt()) or 1)


def times(ratio: float) -> str:
    """Say how many times."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def measure(
    progress: Callable[[str], object], *, size: int | None = None, device: str | None = None
) -> list[Measurement]:
    """Multiply float32 matrices at each level on each device present.

    Args:
        progress: Called before each step, with a few words on it.
        size: How many rows and columns the matrices have; by default as many
            as it takes for the kind of device to show its speed.
        device: The device or kind of device to measure; by default all.

    Returns:
        The measurements, device by device, strictest level first.

    Raises:
        ValueError: If there is no such device.
    """
    return [
        measurement
        for name in chosen_devices(device)
        for measurement in _measure_device(name, size, progress)
    ]


def chosen_devices(device: str | None) -> list[str]:
    """Return the names of the devices that are meant by a device or a kind of device; by None all.

    Raises:
        ValueError: If there is none.
    """
    present = api.devices()
    chosen = [name for name in present if device in {None, name, name.partition(":")[0]}]
    if not chosen:
        raise ValueError(f"there is no device {device!r}, only {', '.join(present)}")
    return chosen


def multiply(left: torch.Tensor, right: torch.Tensor, level: Float32MatmulPrecision) -> torch.Tensor:
    """Return a product at a level, computed by the time this returns."""
    with matmul_precision(level):
        product = left @ right
        product[0, 0].item()  # waits for the device
    return product


def _measure_device(device: str, size: int | None, progress: Callable[[str], object]) -> list[Measurement]:
    size = size or (_CPU_SIZE if device == "cpu" else _ACCELERATOR_SIZE)
    progress(f"{device}: float64 product, {size} x {size}")
    random = torch.Generator().manual_seed(0)
    left = torch.randn(size, size, generator=random, dtype=torch.float32, device="cpu")
    right = torch.randn(size, size, generator=random, dtype=torch.float32, device="cpu")
    exact = left[:_ROWS].double() @ right.double()
    emulated = emulated_errors(left[:_ROWS], right, exact)
    left, right = left.to(device), right.to(device)

    # Errors first: these products also warm up what is timed.
    errors: dict[Float32MatmulPrecision, float] = {}
    same_bits: dict[Float32MatmulPrecision, bool] = {}
    reference = multiply(left, right, _HIGHEST)
    for level in LEVELS:
        progress(f"{device}: error at {level}")
        product = multiply(left, right, level)
        errors[level] = error_of(product[:_ROWS], exact)
        same_bits[level] = torch.equal(product, reference)
    seconds = _fastest(functools.partial(multiply, left, right), lambda step: progress(f"{device}: {step}"))
    return [
        Measurement(
            device=device,
            level=level,
            size=size,
            error=errors[level],
            times_the_error=errors[level] / errors[_HIGHEST],
            same_bits=same_bits[level],
            seconds=seconds[level],
            times_as_fast=seconds[_HIGHEST] / seconds[level],
            emulated=emulated[level],
        )
        for level in LEVELS
    ]


def _fastest(
    multiply: Callable[[Float32MatmulPrecision], object], progress: Callable[[str], object]
) -> dict[Float32MatmulPrecision, float]:
    """Return the shortest time that each level takes, in seconds."""
    fastest = dict.fromkeys(LEVELS, float("inf"))
    end = time.perf_counter() + _SECONDS_OF_ROUNDS
    # Round by round, so that whatever else the machine does slows all levels alike.
    for count in range(_MOST_ROUNDS):
        if count >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for level in LEVELS:
            progress(f"time at {level}, round {count + 1}")
            start = time.perf_counter()
            multiply(level)
            fastest[level] = min(fastest[level], time.perf_counter() - start)
    return fastest
