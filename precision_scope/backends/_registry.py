"""Adding and removing backends at run time, and finding those that are installed."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType, NoneType
from typing import TYPE_CHECKING

# The module, not the ledger itself: the ledger's module imports this package.
from precision_scope import _ledger
from precision_scope._errors import PrecisionScopeError
from precision_scope._imports import when_imported
from precision_scope._warnings import warn
from precision_scope.backends._base import Backend
from precision_scope.backends._xla import Xla

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "precision_scope.backends"
"""The group of the entry points of installed backends."""


def register_backend(backend: Backend) -> None:
    """Have a backend follow the float32 matmul precision from now on.

    Where scopes are live, in whatever thread, the backend gets the level in
    force at once, and what it held comes back when the last of them ends. If
    the process default has been set, it gets that. A backend whose ``module``
    nobody has imported yet gets both when that happens.

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
    if not isinstance(backend.module, (str, NoneType)):
        raise TypeError(f"module must be a module's name or None, got {type(backend.module).__name__}")
    importlib.import_module("precision_scope._setup")  # the package's own backends come first

    _ledger.ledger.add_backend(backend)
    if backend.module is None:
        return
    is_registering = True

    def activate(_module: ModuleType) -> None:
        try:
            _ledger.ledger.activate_backend(backend)
        except PrecisionScopeError as error:
            if is_registering:
                _ledger.ledger.remove_backend(backend.name)
                raise
            warn(str(error))  # or the user's import would fail; the next entry tries again

    when_imported(backend.module, activate)
    is_registering = False


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


@functools.cache  # once, also if the package is reloaded
def watch_for_backends() -> None:
    """Register XLA's backend, and look for installed ones when the package is first used."""
    register_backend(Xla())
    _ledger.ledger.call_at_first_use(_discover)


def _discover() -> None:
    """Have each installed backend registered as soon as the module it is for is imported.

    The name of its entry point is that module's. Called again, after an
    interrupt or a warning that is an error, it goes on where it was.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 -- slow, and not every torch needs it

    try:
        found = entry_points(group=ENTRY_POINTS)
    except Exception as error:
        warn(f"installed float32 matmul precision backends cannot be looked for: {error!r}")
        return
    for entry_point in found:
        if entry_point not in _discovered:
            try:
                when_imported(entry_point.name, functools.partial(_load, entry_point))
            except Exception:
                _discovered.append(entry_point)
                raise
            _discovered.append(entry_point)


_discovered: list[EntryPoint] = []


def _load(entry_point: EntryPoint, _module: ModuleType) -> None:
    """Register what an entry point stands for, a backend or what makes one."""
    try:
        backend = entry_point.load()
        register_backend(backend if isinstance(backend, Backend) else backend())
    except Exception as error:
        warn(
            f"the float32 matmul precision backend {entry_point.name} = {entry_point.value!r} could not be "
            f"loaded: {error!r}"
        )
