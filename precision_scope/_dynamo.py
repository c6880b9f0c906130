"""Keeping our own functions out of Dynamo, without importing it.

Dynamo would trace what runs inside a scope's entry and exit, or inside a
product, and drop what these write from the second call on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from precision_scope._torch_api import skip_in_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def hide(function: _Function) -> _Function:
    """Have Dynamo neither inline a function nor compile its frames or those below it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip_in_dynamo(function.__code__)
    return function
