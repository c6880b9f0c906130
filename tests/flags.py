"""Reading and resetting torch's whole float32 matmul state, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

HAS_CELLS = hasattr(torch._C, "_get_fp32_precision_getter")

State: TypeAlias = "dict[str, str]"


def reset(level: str = "highest") -> None:
    """Bring the float32 matmul state to that of a fresh process, or to a level set in one."""
    torch.set_float32_matmul_precision(level)
    if HAS_CELLS:
        for backend in ("generic", "cuda", "mkldnn"):
            torch._C._set_fp32_precision_setter(backend, "all", "none")
        if level == "highest":
            for backend in ("cuda", "mkldnn"):
                torch._C._set_fp32_precision_setter(backend, "matmul", "none")


def _answer(getter: Callable[[], object]) -> str:
    try:
        return str(getter())
    except RuntimeError as error:
        return f"RuntimeError: {error}"


def state() -> State:
    """Return what every getter of torch says: its value or its error."""
    found = {
        "get_float32_matmul_precision": _answer(torch.get_float32_matmul_precision),
        "cuda.matmul.allow_tf32": _answer(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn.allow_tf32": _answer(lambda: torch.backends.cudnn.allow_tf32),
    }
    if HAS_CELLS:
        for backend, operator in [
            ("generic", "all"),
            *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
        ]:
            found[f"{backend}.{operator}"] = torch._C._get_fp32_precision_getter(backend, operator)
    return found
