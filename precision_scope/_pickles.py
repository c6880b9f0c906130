"""What a pickled scope says to be made anew by: it can be the first that a process imports of the package."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from precision_scope import matmul_precision


def make_scope(level: str | None, covers_backward: bool) -> matmul_precision:
    """Return a scope."""
    from precision_scope import matmul_precision  # noqa: PLC0415

    return matmul_precision(level, backward=covers_backward)
