"""Reading torch's flags inside every matrix product, below the gate of isolation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from flags import HAS_CELLS

from precision_scope import _torch_api
from precision_scope._dynamo import hide


class Flags(NamedTuple):
    """What a product can read: the legacy value, None if it raises, and its two cells."""

    legacy: str | None
    cuda: str | None = None
    cpu: str | None = None


class Product(NamedTuple):
    """One product that ran."""

    operator: str
    thread: int
    before: Flags
    after: Flags


CELLS_AT = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}

_seen: list[Product] | None = None
_inside: Callable[[str], object] | None = None


def flags() -> Flags:
    """Read the flags as they are now."""
    try:
        legacy: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = None
    if not HAS_CELLS:
        return Flags(legacy)
    read = torch._C._get_fp32_precision_getter
    return Flags(legacy, read("cuda", "matmul"), read("mkldnn", "matmul"))


def flags_at(level: str | None) -> Flags:
    """Return the flags of a level; for None, those of a fresh process."""
    if level is None:
        return Flags("highest", "none", "none") if HAS_CELLS else Flags("highest")
    return Flags(level, *CELLS_AT[level]) if HAS_CELLS else Flags(level)


def install() -> None:
    """Put the watch below the gate, before isolation is enabled."""
    real = _torch_api.redispatcher

    def redispatcher(name: str) -> Callable[..., Any]:
        redispatch = real(name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if _seen is None:
                return redispatch(*args, **kwargs)
            before = flags()
            if _inside is not None:
                _inside(name)
            result = redispatch(*args, **kwargs)
            _seen.append(Product(name, threading.get_ident(), before, flags()))
            return result

        return hide(watched)

    _torch_api.redispatcher = redispatcher


@contextlib.contextmanager
def watching(inside: Callable[[str], object] | None = None) -> Iterator[list[Product]]:
    """Collect the products that run meanwhile.

    Args:
        inside: Called inside each product, with the operator's name.
    """
    global _seen, _inside  # noqa: PLW0603 -- the kernels are there once for the process
    _seen, _inside = [], inside
    try:
        yield _seen
    finally:
        _seen = _inside = None


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Run LSTMs without oneDNN's fused layer, which has a setting of its own."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def wrong(products: list[Product], level: str | None, thread: int | None = None) -> list[Product]:
    """Return the products, of one thread or of all, that did not run at a level throughout."""
    expected = flags_at(level)
    return [
        product
        for product in products
        if (thread is None or product.thread == thread) and not product.before == product.after == expected
    ]
