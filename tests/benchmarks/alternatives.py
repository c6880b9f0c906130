"""What a user would otherwise write, and the scopes of other libraries, to compare with."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Generator

import torch


@contextlib.contextmanager
def ten_lines(level: str) -> Generator[None]:
    """Set torch's float32 matmul precision and set it back: for one thread, and not exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def own_lines() -> None:
    """Enter and leave the scope above."""
    with ten_lines("medium"):
        pass


def mkldnn_flags() -> None:
    """Enter and leave torch's own scope of oneDNN's flags."""
    with torch.backends.mkldnn.flags(enabled=True):
        pass


def cudnn_flags() -> None:
    """Enter and leave torch's own scope of cuDNN's flags."""
    with torch.backends.cudnn.flags(enabled=True):
        pass


def autocast() -> None:
    """Enter and leave torch's scope of mixed precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass


ALTERNATIVES: dict[str, Callable[[], None]] = {
    "ten lines around torch's getter and setter": own_lines,
    "torch.backends.mkldnn.flags": mkldnn_flags,
    "torch.backends.cudnn.flags": cudnn_flags,
    "torch.autocast": autocast,
}

if importlib.util.find_spec("numpy") is not None:
    import numpy as np

    def errstate() -> None:
        """Enter and leave NumPy's scope of error handling, one for each thread and task."""
        with np.errstate(all="ignore"):
            pass

    ALTERNATIVES["numpy.errstate"] = errstate

if importlib.util.find_spec("jax") is not None:
    import jax

    def default_matmul_precision() -> None:
        """Enter and leave JAX's scope of the same name, one for each thread."""
        with jax.default_matmul_precision("highest"):
            pass

    ALTERNATIVES["jax.default_matmul_precision"] = default_matmul_precision

if importlib.util.find_spec("threadpoolctl") is not None:
    import threadpoolctl

    controller = threadpoolctl.ThreadpoolController()  # the libraries are looked for once

    def limit() -> None:
        """Enter and leave threadpoolctl's scope of the number of threads, one for the process."""
        with controller.limit(limits=1):
            pass

    ALTERNATIVES["threadpoolctl's limit"] = limit
