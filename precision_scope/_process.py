"""Setting and reading the level outside of a with-block."""

from __future__ import annotations

from precision_scope._entries import RANKS, wanted
from precision_scope._ledger import ledger
from precision_scope._levels import LEVELS, Float32MatmulPrecision, parse_level


def set_float32_matmul_precision(level: str) -> None:
    """Set the float32 matmul precision for every device type.

    Outside all scopes this sets the process default, on torch's flags and on
    every active backend. If scopes are live in other threads or tasks, it
    takes effect when the last of them ends; with isolation on, products outside
    scopes get it at once. Inside a scope it changes that
    scope's level until the scope ends.

    Args:
        level: ``"highest"``, ``"high"`` or ``"medium"``, as a string or a
            :class:`Float32MatmulPrecision`.

    Raises:
        TypeError: If ``level`` is not a string; None is not one either.
        ValueError: If ``level`` is not the name of a level.
        PrecisionScopeError: If a backend fails; the others are put back.

    Example:
        >>> from precision_scope import get_float32_matmul_precision, set_float32_matmul_precision
        >>> set_float32_matmul_precision("high")
        >>> print(get_float32_matmul_precision())
        high
        >>> set_float32_matmul_precision("highest")

    It can be called from any thread or task. A scope that a task inherited
    from the task that started it is shared by both, and so is its new level.
    """
    ledger.set(LEVELS[RANKS[parse_level(level)]])
    ledger.see_to_the_rest()


def get_float32_matmul_precision() -> Float32MatmulPrecision:
    """Return the float32 matmul precision that the calling context asks for.

    That is the level of the innermost live scope of the calling thread or
    task, else the process default. It never raises: where the process default
    was set through torch's per-backend settings to something that no level
    expresses, the answer is the level that acts like it on CUDA.

    Returns:
        The level, a member that is also a string.

    Example:
        >>> from precision_scope import get_float32_matmul_precision, matmul_precision
        >>> with matmul_precision("high"):
        ...     get_float32_matmul_precision() == "high"
        True

    It answers for the context that calls it; other threads and tasks may get
    other answers at the same time.
    """
    return wanted() or ledger.default()
