"""The three levels, and the one place where input becomes a level."""

from __future__ import annotations

import difflib
import enum


class Float32MatmulPrecision(str, enum.Enum):
    """How much precision float32 matrix products must keep.

    Members are strings: they compare equal to, hash as, and print as the
    names that :func:`torch.set_float32_matmul_precision` takes.

    Attributes:
        HIGHEST: True float32 arithmetic.
        HIGH: TF32-class: TF32 on NVIDIA GPUs, three bfloat16 passes on TPUs.
        MEDIUM: bfloat16-class: TF32 on NVIDIA GPUs, one bfloat16 pass on TPUs,
            oneDNN's bfloat16 on CPUs that have it.

    Example:
        >>> Float32MatmulPrecision.HIGH == "high"
        True
        >>> print(Float32MatmulPrecision("medium"))
        medium

    Members are immutable and can be shared by threads and tasks freely.
    """

    HIGHEST = "highest"
    HIGH = "high"
    MEDIUM = "medium"

    rank: int  # 0 is the strictest

    def __init__(self, _value: str) -> None:
        self.rank = len(self.__class__.__members__)

    # On some Python versions an Enum prints as "Class.NAME"; a member must be
    # interchangeable with its string.
    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


FLOAT32_MATMUL_PRECISION = Float32MatmulPrecision
"""The RFC's name for it."""

LEVELS: tuple[Float32MatmulPrecision, ...] = tuple(Float32MatmulPrecision)
"""The levels, strictest first, so that ``LEVELS[level.rank] is level``."""

_BY_NAME: dict[str, Float32MatmulPrecision] = {level.value: level for level in LEVELS}

# What JAX, XLA and torch's own cells call it; named in the error message, never accepted.
_OTHER_SPELLINGS = {
    "float32": Float32MatmulPrecision.HIGHEST,
    "ieee": Float32MatmulPrecision.HIGHEST,
    "tf32": Float32MatmulPrecision.HIGH,
    "tensorfloat32": Float32MatmulPrecision.HIGH,
    "bfloat16_3x": Float32MatmulPrecision.HIGH,
    "bfloat16": Float32MatmulPrecision.MEDIUM,
    "bf16": Float32MatmulPrecision.MEDIUM,
    "default": Float32MatmulPrecision.MEDIUM,
}

_CHOICES = "'highest', 'high', 'medium'"


def parse_level(value: object) -> Float32MatmulPrecision:
    """Return the level that ``value`` names; refuse everything else.

    Raises:
        TypeError: If ``value`` is not a string.
        ValueError: If ``value`` is a string but not the name of a level.
    """
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    raise level_error(value)


def level_error(value: object) -> Exception:
    """Return the error that tells what is wrong with ``value`` as a level."""
    return ValueError(_wrong_name(value)) if isinstance(value, str) else TypeError(_wrong_type(value))


def _wrong_type(value: object) -> str:
    message = (
        f"float32 matmul precision must be one of {_CHOICES}, "
        f"as a string or a Float32MatmulPrecision, not {type(value).__name__}"
    )
    if callable(value):
        message += '; to decorate a function, write @matmul_precision("highest") with a level'
    return message


def _wrong_name(value: str) -> str:
    message = f"float32 matmul precision must be one of {_CHOICES}, got {quoted(value)}"
    spelling = value[:40].strip().lower()
    if spelling in _OTHER_SPELLINGS:
        return f"{message}; what others call {spelling!r} is {_OTHER_SPELLINGS[spelling].value!r} here"
    nearest = difflib.get_close_matches(spelling, _BY_NAME, n=1, cutoff=0.0)
    return f"{message}; the nearest is {nearest[0]!r}"


def quoted(value: str) -> str:
    """Return a string as messages show it, the beginning of a long one."""
    return repr(value if len(value) <= 40 else value[:40] + "…")
