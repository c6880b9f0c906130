"""Graphs of torch that hold no scopes: of TorchScript, torch.jit.trace, torch.export and AOTAutograd.

torch.jit.script compiles the source of what is decorated; the others record
the operators that run, and would record them without their level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from precision_scope._dynamo import compiles_here
from precision_scope._errors import PrecisionScopeError
from precision_scope._torch_api import is_exported, is_symbolically_traced, is_traced

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_jit: Any = torch.jit

_NOTES = (
    *("_torchdynamo", "_is_torch_compile", "_isolate_recompiles", "aot_compile", "get_compiler_config"),
    *("_torchscript", "__script", "__original_fn", "__prepare_scriptable"),
)


def ignored_by_torchscript(what: _Callable) -> _Callable:
    """Mark a function or class that TorchScript is not to compile."""
    _jit.ignore(what)
    return what


def own_attributes(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's attributes without what torch's compilers have noted on it.

    On the function's wrapper they would lead these past the wrapper.
    """
    attributes: dict[str, Any] = getattr(function, "__dict__", {})
    return {name: value for name, value in attributes.items() if not name.startswith(_NOTES)}


def leave_to_python(function: _Callable) -> _Callable:
    """Have TorchScript call into Python for a function that it meets, and refuse to compile it."""
    function.__prepare_scriptable__ = _refuse_to_be_scripted  # type: ignore[attr-defined]
    return ignored_by_torchscript(function)


def _refuse_to_be_scripted() -> NoReturn:
    raise PrecisionScopeError(
        "torch.jit.script would compile the decorated function without its precision scope; "
        "decorate what it returns instead: matmul_precision(level)(torch.jit.script(function))"
    )


def refuse_to_be_recorded() -> None:
    """Raise an error for a scope that is entered in what this thread records, if it does."""
    if is_traced() or is_exported() or (compiles_here() and is_symbolically_traced()):
        raise PrecisionScopeError(
            "a precision scope was entered in a program that torch.jit.trace, torch.export or torch.compile "
            "records, which would run without it; put the scope around the calls of that program instead"
        )
