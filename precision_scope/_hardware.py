"""The hardware that can be emulated, by name."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from precision_scope._levels import quoted

Hardware: TypeAlias = Literal["cuda", "tpu"]

HARDWARE: Final[tuple[Hardware, ...]] = ("cuda", "tpu")


def parse_hardware(value: object) -> Hardware:
    """Return what ``value`` names; refuse everything else.

    Raises:
        TypeError: If ``value`` is not a string.
        ValueError: If ``value`` is a string but no such name.
    """
    choices = " or ".join(map(repr, HARDWARE))
    if not isinstance(value, str):
        raise TypeError(f"emulated hardware must be {choices}, not {type(value).__name__}")
    if value not in HARDWARE:
        raise ValueError(f"emulated hardware must be {choices}, got {quoted(value)}")
    return next(name for name in HARDWARE if name == value)  # and not a member of an enum, say
