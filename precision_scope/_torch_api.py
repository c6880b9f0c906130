"""Every private name of torch that the package uses, behind a name of ours.

Seen to work on torch 2.4 to 2.15. From 2.9 on torch keeps, beside the legacy
value of ``torch.set_float32_matmul_precision``, a table of cells keyed by
(backend, operator); before, the legacy value is all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

HAS_CELLS: bool = hasattr(_C, "_get_fp32_precision_getter")
"""Whether torch has the per-backend cells (2.9 and newer)."""

# torch.get_/set_float32_matmul_precision are these two calls. The setter only
# warns about a bad name and can crash on a long one: hand it levels alone.
get_legacy_value: Callable[[], str] = _C._get_float32_matmul_precision
set_legacy_value: Callable[[str], None] = _C._set_float32_matmul_precision

get_allow_tf32: Callable[[], bool] = _C._get_cublas_allow_tf32
get_cudnn_allow_tf32: Callable[[], bool] = _C._get_cudnn_allow_tf32

if HAS_CELLS:
    # A reading is the stored value or, where that is "none", the parent's.
    get_cell: Callable[[str, str], str] = _C._get_fp32_precision_getter
    set_cell: Callable[[str, str, str], object] = _C._set_fp32_precision_setter


def devices() -> list[str]:
    """Return the names of the devices present, the CPU first."""
    if hasattr(torch, "accelerator"):
        count = torch.accelerator.device_count()
        others = [f"{torch.accelerator.current_accelerator()}:{index}" for index in range(count)]
    else:  # torch 2.4 and 2.5
        others = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *others]
