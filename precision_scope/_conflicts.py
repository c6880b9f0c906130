"""The warning that live scopes of several threads or tasks disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precision_scope._errors import PrecisionConflictWarning
from precision_scope._warnings import warn

if TYPE_CHECKING:
    from precision_scope._levels import Float32MatmulPrecision
    from precision_scope._owners import Owner


def warn_of_conflict(wanted: dict[Float32MatmulPrecision, Owner]) -> None:
    """Warn, naming the levels.

    Args:
        wanted: An owner that asks for each of the levels.

    Raises:
        PrecisionConflictWarning: Where the user has made it an error.
    """
    levels = sorted(wanted, key=lambda level: level.rank)
    asked = " and ".join(f"{level.value!r} ({wanted[level]})" for level in levels)
    warn(
        f"scopes that are live at the same time ask for {asked}. PyTorch has one float32 matmul "
        f"precision for the whole process; it now is the strictest of these, {levels[0].value!r}. "
        "Call precision_scope.enable_isolation() at start-up to give each thread and task its own.",
        PrecisionConflictWarning,
    )
