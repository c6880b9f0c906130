"""Adding and removing backends at run time."""

from __future__ import annotations

# The module, not the ledger itself: the ledger's module imports this package.
from precision_scope import _ledger
from precision_scope.backends._base import Backend


def register_backend(backend: Backend) -> None:
    """Have a backend follow the float32 matmul precision from now on.

    Where scopes are live, in whatever thread, the backend gets the level in
    force at once, and what it held comes back when the last of them ends.

    Args:
        backend: The backend; its ``name`` must not be taken.

    Raises:
        TypeError: If it is not a :class:`Backend` with a name.
        ValueError: If a backend of that name is registered.
        PrecisionScopeError: If it fails to take on the level in force; it is
            put back and not registered.

    Example:
        >>> from precision_scope.backends import Backend, register_backend, unregister_backend
        >>> class Notebook(Backend):
        ...     name = "notebook"
        ...     level = "unset"
        ...
        ...     def is_active(self):
        ...         return True
        ...
        ...     def save(self):
        ...         return self.level
        ...
        ...     def apply(self, level):
        ...         self.level = str(level)
        ...
        ...     def restore(self, saved):
        ...         self.level = saved
        ...
        ...     def describe(self):
        ...         return {"level": self.level}
        >>> notebook = Notebook()
        >>> register_backend(notebook)
        >>> from precision_scope import matmul_precision
        >>> with matmul_precision("medium"):
        ...     notebook.level
        'medium'
        >>> notebook.level
        'unset'
        >>> unregister_backend("notebook")

    It can be called from any thread or task.
    """
    if not isinstance(backend, Backend) or not isinstance(getattr(backend, "name", None), str):
        raise TypeError(
            f"expected an instance of a Backend subclass with a name, got {type(backend).__name__}"
        )
    _ledger.ledger.add_backend(backend)


def unregister_backend(name: str) -> None:
    """Restore what a backend held before the live scopes, and drop it.

    Args:
        name: The backend's name. torch's own flags cannot be dropped.

    Raises:
        ValueError: If no backend of that name can be unregistered.
        PrecisionScopeError: If it fails to restore; it is dropped all the same.

    It can be called from any thread or task, also inside live scopes; see
    :func:`register_backend` for an example.
    """
    _ledger.ledger.remove_backend(name)
