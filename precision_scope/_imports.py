"""Acting when somebody else imports a module, without importing it."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, Callable[[ModuleType], object]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but has the modules that are waited for announced."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callback = _waiting.pop(fullname, None)  # for now: another such finder may ask this one in turn
        if callback is None:
            return None
        try:
            for finder in sys.meta_path:  # this one as well, which answers None now
                find_spec: Any = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find_spec is None else find_spec(fullname, path, target)
                if spec is not None:
                    _announce(spec)
                    return spec
        finally:
            _waiting[fullname] = callback
        return None


def _announce(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        callback = _waiting.pop(module.__name__, None)
        if callback is not None:
            callback(module)

    loader.exec_module = exec_module  # the loader stays what it is: others look at its type


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call ``callback`` with a module as soon as it is imported, or now if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        if getattr(module.__spec__, "_initializing", False):
            importlib.import_module(name)  # another thread is importing it: wait for that
        callback(module)
        return
    _waiting[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
