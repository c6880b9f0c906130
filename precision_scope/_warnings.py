"""Warnings that point at the program that uses the package."""

from __future__ import annotations

import inspect
import warnings


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, at the innermost line that is not the package's own."""
    frame = inspect.currentframe()
    stacklevel = 0
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(f"{__package__}."):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, category, stacklevel=stacklevel + 1)
