"""Backends: what follows the float32 matmul precision.

torch's own flags are one; libraries add their own with
:func:`register_backend`.
"""

import torch  # noqa: F401  # pyright: ignore[reportUnusedImport] -- first, as in the package itself

from precision_scope.backends._base import Backend
from precision_scope.backends._registry import register_backend, unregister_backend

__all__ = ["Backend", "register_backend", "unregister_backend"]
