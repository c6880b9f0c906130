"""Acting when somebody else imports a module, without importing it.

Python can be made to import this one before all others, so it needs no module
that Python itself does not need to start.
"""

from __future__ import annotations

import sys
from _thread import _local  # pyright: ignore[reportPrivateUsage]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_bootstrap: Any = sys.modules["_frozen_importlib"]

_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}


class _Looking(_local):
    def __init__(self) -> None:
        self.names: set[str] = set()


_looking = _Looking()


class _Finder:
    """Finds nothing itself, but has the modules that are waited for announced."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in _looking.names:
            return None
        _looking.names.add(fullname)  # another such finder may ask this one in turn
        try:
            for finder in sys.meta_path:  # this one as well, which answers None now
                find_spec: Any = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find_spec is None else find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:  # else it is a namespace package, without code
                        _announce(spec)
                    return spec
        finally:
            _looking.names.discard(fullname)
        return None


def _announce(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        _call(_waiting.pop(module.__name__, []), module)

    loader.exec_module = exec_module  # the loader stays what it is: others look at its type


def _call(callbacks: list[Callable[[ModuleType], object]], module: ModuleType) -> None:
    """Call each, whichever fail; an interrupt, which makes the import fail, leaves the rest for the next."""
    errors: list[Exception] = []
    while callbacks:
        try:
            callbacks[0](module)
        except Exception as error:
            errors.append(error)
        except BaseException:
            _waiting.setdefault(module.__name__, []).extend(callbacks)
            raise
        del callbacks[0]
    if errors:
        raise errors[0]


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call ``callback`` with a module as soon as it is imported.

    That is now if it has been, or if the caller is what is being imported. An
    import in another thread is waited for.

    Args:
        name: The name of a module that has code of its own, no namespace package.
        callback: What to call.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    try:
        # A thread that imports it holds this lock from before it looks for it.
        with _bootstrap._ModuleLockManager(name):
            module = _imported_or_waited_for(name, callback)
    except _bootstrap._DeadlockError:  # it waits for this one
        module = _imported_or_waited_for(name, callback)
    if module is not None:
        callback(module)


def _imported_or_waited_for(name: str, callback: Callable[[ModuleType], object]) -> ModuleType | None:
    module = sys.modules.get(name)
    if module is None:
        _waiting.setdefault(name, []).append(callback)
    return module
