"""What each level does to the matrices of a checkpoint: its error, matrix by matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from precision_scope._checkpoints import read_checkpoint
from precision_scope._emulation import ARITHMETICS
from precision_scope._hardware import Hardware
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._measure import (
    FLOAT32_ERROR,
    SAME_ACCURACY,
    chosen_devices,
    emulated_errors,
    error_of,
    multiply,
    times,
)

# Of larger matrices evenly spaced rows are measured, and of very wide ones columns:
# plenty for a norm. Sums of float32 over more columns lose more than they tell of a level.
_MOST_ENTRIES = 2**22
_MOST_COLUMNS = 2**16
_MOST_VECTORS = 64

_UNIT = 2**-24  # the largest error of a float32 number itself

_HIGHEST = Float32MatmulPrecision.HIGHEST


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixMeasurement:
    """What the levels do to one matrix on one device.

    Attributes:
        name: The matrix's name in the checkpoint.
        shape: Its rows and columns.
        device: The device, as torch names it.
        errors: For each level, the norm of the difference from the float64
            product, relative to the norm of that; not finite where entries are not.
        same_bits: For each level, whether the product is that of "highest", bit for bit.
        emulated: For each level, the error that it makes on hardware that is
            emulated, for each that it makes a difference to.
    """

    name: str
    shape: tuple[int, int]
    device: str
    errors: dict[Float32MatmulPrecision, float]
    same_bits: dict[Float32MatmulPrecision, bool]
    emulated: dict[Float32MatmulPrecision, dict[Hardware, float]]

    @property
    def is_finite(self) -> bool:
        """Whether there are errors to tell."""
        return all(map(math.isfinite, self.errors.values()))

    @property
    def worst_error(self) -> float:
        """The largest of the errors; infinity where there is none to tell."""
        return max(self.errors.values()) if self.is_finite else math.inf

    @property
    def worst_emulated_error(self) -> float:
        """The largest of the emulated ones."""
        emulated = [error for errors in self.emulated.values() for error in errors.values()]
        return max(emulated) if self.is_finite else math.inf

    @property
    def shows_levels(self) -> bool:
        """Whether a level makes larger errors than "highest" here."""
        return self.is_finite and self.worst_error > SAME_ACCURACY * max(self.errors[_HIGHEST], _UNIT)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "device": self.device,
            "levels": {
                level.value: {
                    "error": _finite(error),
                    "same_bits": self.same_bits[level],
                    "emulated": {like: _finite(error) for like, error in self.emulated[level].items()},
                }
                for level, error in self.errors.items()
            },
        }


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsMeasurement:
    """What the levels do to the matrices of a checkpoint.

    Attributes:
        matrices: The matrices, those with the largest errors first; by the
            emulated errors where no level shows on the hardware at hand.
        left_out: How many tensors are no float32 matrices, by what they are.
    """

    matrices: list[MatrixMeasurement]
    left_out: dict[str, int]

    @property
    def sentences(self) -> list[str]:
        """What each level does, and what was left out."""
        devices = list(dict.fromkeys(matrix.device for matrix in self.matrices))
        said = [self._sentence(device, level) for device in devices for level in LEVELS]
        for like, arithmetics in ARITHMETICS.items():
            said += [self._emulated_sentence(like, level) for level in arithmetics]
        unknown = {matrix.name for matrix in self.matrices if not matrix.is_finite}
        if unknown:
            said.append(f"Of {_count(unknown)} not all entries are finite.")
        if self.left_out:
            held = ", ".join(f"{count} {kind}" for kind, count in self.left_out.items())
            said.append(f"Left out are tensors that are no float32 matrices: {held}.")
        return said

    def _sentence(self, device: str, level: Float32MatmulPrecision) -> str:
        known = [matrix for matrix in self.matrices if matrix.device == device and matrix.is_finite]
        if level != _HIGHEST and known and all(matrix.same_bits[level] for matrix in known):
            what = f'gives the results of "highest" bit for bit, with {_count(known)}'
        else:
            what = _what_it_does(level, known, [matrix.errors[level] for matrix in known])
        return f'On {device}, "{level}" {what}.'

    def _emulated_sentence(self, like: Hardware, level: Float32MatmulPrecision) -> str:
        known = [matrix for matrix in self.matrices if matrix.is_finite]
        what = _what_it_does(level, known, [matrix.emulated[level][like] for matrix in known])
        return f'On {like}, emulated, "{level}" {what}.'

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return the record as plain values, for JSON, with the worst of the matrices or all."""
        return {
            "matrices": [matrix.to_dict() for matrix in self.matrices[:top]],
            "left_out": self.left_out,
            "sentences": self.sentences,
        }


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _what_it_does(
    level: Float32MatmulPrecision, matrices: list[MatrixMeasurement], errors: list[float]
) -> str:
    if not matrices:
        return "cannot be judged by these matrices"
    largest = max(errors)
    said = f"up to {largest:.1e}, with {matrices[errors.index(largest)].name!r}"
    if level == _HIGHEST:
        if largest > FLOAT32_ERROR:
            return f"is not true float32: errors are {said}, so something else overrides it"
        return f"is true float32, with errors {said}"
    ratio = max(
        error / max(matrix.errors[_HIGHEST], _UNIT) for matrix, error in zip(matrices, errors, strict=True)
    )
    if ratio <= SAME_ACCURACY:
        return 'has the accuracy of "highest"'
    return f"makes errors {said}: up to {times(ratio)} those of float32"


def _count(matrices: Collection[object]) -> str:
    return f"{len(matrices)} {'matrix' if len(matrices) == 1 else 'matrices'}"


def measure_weights(
    path: Path, progress: Callable[[str], object], *, device: str | None = None
) -> WeightsMeasurement:
    """Multiply each float32 matrix of a checkpoint by random vectors, at each level on each device.

    Args:
        path: The checkpoint; see :func:`read_checkpoint`.
        progress: Called before each step, with a few words on it.
        device: The device or kind of device to measure; by default all.

    Returns:
        The measurements, worst matrices first.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it cannot be loaded, or has no float32 matrix; or if there is no such device.
    """
    devices = chosen_devices(device)
    progress(f"reading {path.name}")
    matrices, left_out = read_checkpoint(path)
    found: list[MatrixMeasurement] = []
    for number, (name, load) in enumerate(matrices.items(), 1):
        progress(f"{number} of {len(matrices)}: {name}")
        try:
            found += _measure_matrix(name, load(), devices)
        except (MemoryError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path}: {name} cannot be multiplied: {reason}") from error
    if any(matrix.shows_levels for matrix in found):
        found.sort(key=lambda matrix: -matrix.worst_error)
    else:
        found.sort(key=lambda matrix: -matrix.worst_emulated_error)
    return WeightsMeasurement(found, left_out)


def _measure_matrix(name: str, matrix: torch.Tensor, devices: list[str]) -> list[MatrixMeasurement]:
    rows, columns = matrix.shape
    part = matrix[:, :: -(-columns // _MOST_COLUMNS)]
    part = part[:: -(-rows * max(part.shape[1], _MOST_VECTORS) // _MOST_ENTRIES)].double()
    # Numbers near one are neither subnormal nor do their products overflow.
    part = part * 0.5 ** int(part.abs().max().log2().nan_to_num(0, 0, 0))
    random = torch.Generator().manual_seed(0)
    vectors = min(_MOST_VECTORS, _MOST_ENTRIES // part.shape[1])
    other = torch.randn(part.shape[1], vectors, generator=random, dtype=torch.float32, device="cpu")
    exact = part @ other.double()
    part = part.float()
    emulated = emulated_errors(part, other, exact)
    found: list[MatrixMeasurement] = []
    for device in devices:
        left, right = part.to(device), other.to(device)
        products = {level: multiply(left, right, level).cpu() for level in LEVELS}
        bits = {level: product.view(torch.int32) for level, product in products.items()}
        found.append(
            MatrixMeasurement(
                name=name,
                shape=(rows, columns),
                device=device,
                errors={level: error_of(product, exact) for level, product in products.items()},
                same_bits={level: torch.equal(bits[level], bits[_HIGHEST]) for level in LEVELS},
                emulated=emulated,
            )
        )
    return found
