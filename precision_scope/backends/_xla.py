"""XLA, through torch_xla, which is lazy.

torch_xla records operations, and reads its one setting when it lowers them. It
looks compiled code up by what is recorded, whatever the setting. So

* each product carries a *mark* of the level that it asks for, or of the setting
  where that is less strict. It is never lowered at a less strict one than its
  mark, and so neither is anything that is looked up by the mark;
* where the setting changes, what this thread has recorded at another one is
  lowered first: it is *cut off*. What another thread has recorded is only if
  it would be lowered at less than its mark, since torch_xla fails where one
  thread lowers what another one uses. What a scope has recorded is also cut
  off when it ends while another one keeps the setting as strict.

Nothing here imports torch_xla, or starts its runtime.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch

from precision_scope import _ledger
from precision_scope import _torch_api as api
from precision_scope._dynamo import hide
from precision_scope._entries import ASKS_NOTHING, top, wanted_rank
from precision_scope._imports import when_imported
from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._warnings import warn
from precision_scope.backends._base import Backend

_SETTINGS: Final = ("highest", "high", "default")  # by the level's rank

_PRODUCTS: Final = (
    "aten::_linalg_svd",
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution_backward_overrideable",
    "aten::convolution_overrideable",
    "aten::dot",
    "aten::mm",
    "aten::mv",
)
"""The operators that torch_xla lowers at the setting; its others come to these, or do not follow it."""

_CORE: Final = (
    "_get_allow_execution",
    "_xla_get_devices",
    "_xla_get_mat_mul_precision",
    "_xla_get_num_cached_compilation_graph",
    "_xla_runtime_is_initialized",
    "_xla_set_mat_mul_precision",
    "_xla_sync_live_tensors",
)
"""What is needed of torch_xla's C++ module."""

# A mark is a change of shape, by this many dimensions of size one, and back: nobody else makes it.
_MARKS: Final = (5, 6, 7)  # by the level's rank

_Compiled: TypeAlias = "Callable[..., Any]"


class Xla(Backend):
    """torch_xla's setting, ``torch_xla.backends.set_mat_mul_precision``."""

    name = "xla"
    module = "torch_xla"

    def __init__(self) -> None:
        self._is_known = False
        self._marks_products = False
        self._marks = _MARKS
        self._lock = threading.RLock()
        # The rank that code outside all scopes asks for while there are any.
        self._outside = 0
        # What may not be lowered yet, by device: the strictest rank, or ASKS_NOTHING, and the thread.
        self._recorded: dict[int, tuple[int, int]] = {}
        self._has_warned = False
        when_imported("torch_xla", self._prepare)
        when_imported("torch_xla._dynamo.dynamo_bridge", self._compile_for_each_rank)

    def save(self) -> object:
        setting = self._setting()
        if setting is None:
            version = getattr(sys.modules["torch_xla"], "__version__", "")
            self._warn_once(
                f"precision scopes leave torch_xla {version} alone: its float32 matmul precision cannot be "
                "read, and so could not be restored; that of torch_xla 2.8 and 2.9 can"
            )
        else:
            self._outside = _SETTINGS.index(setting)
        return setting

    def apply(self, level: Float32MatmulPrecision, /) -> None:
        setting = self._setting()
        if setting is not None:
            if setting != _SETTINGS[level.rank] and not _xla()._get_allow_execution():
                raise RuntimeError(
                    "the level cannot change inside of torch_xla.compile(full_graph=True), which compiles "
                    "one graph; enter the scope around the call"
                )
            self._cut_off(level.rank)
            self._set(_SETTINGS[level.rank])

    def restore(self, saved: Any, /) -> None:
        if saved is not None:
            try:
                self._cut_off(_SETTINGS.index(saved))
            finally:
                self._set(saved)

    def describe(self) -> dict[str, str]:
        unreadable = "cannot be read; scopes leave it alone"
        return {"mat_mul_precision": self._setting() or unreadable}

    def current_level(self) -> Float32MatmulPrecision | None:
        setting = self._setting()
        return None if setting is None else LEVELS[_SETTINGS.index(setting)]

    def _prepare(self, _module: ModuleType) -> None:
        setting = self._setting()
        if setting is None:
            return
        functional = os.environ.get("XLA_DISABLE_FUNCTIONALIZATION", "0") in ("", "0", "false")
        self._marks_products = functional and api.replace_kernels(
            "XLA", dict.fromkeys(_PRODUCTS, self._marking)
        )
        if setting == "default":  # as it always was: what was compiled before, without a mark, is right
            self._marks = (*_MARKS[:2], 0)
        if self._marks_products:
            api.pass_context_to_backward(top.get)
            if _runs():
                for index in range(len(_xla()._xla_get_devices())):
                    self._recorded[index] = _SETTINGS.index(setting), threading.get_ident()

    def _cut_off(self, rank: int) -> None:
        """Have lowered and started, at the setting in force, what must not be at another one.

        Args:
            rank: That of the setting that comes next.

        Raises:
            RuntimeError: If torch_xla fails.
        """
        xla = _xla()
        if not self._marks_products:
            if self._setting() != _SETTINGS[rank] and _runs():
                for index in range(len(xla._xla_get_devices())):
                    xla._xla_sync_live_tensors(f"xla:{index}", [], False)
            return
        thread, wanted = threading.get_ident(), self._wanted()
        for index, (recorded, recorder) in list(self._recorded.items()):
            if recorded == ASKS_NOTHING:
                continue
            if recorded < rank or (recorder == thread and (recorded > rank or recorded < wanted)):
                if not xla._get_allow_execution():  # torch_xla would lose what is recorded
                    raise RuntimeError("it is inside of torch_xla.compile(full_graph=True)")
                self._recorded[index] = (
                    ASKS_NOTHING,
                    recorder,
                )  # before, or what comes meanwhile would be lost
                try:
                    xla._xla_sync_live_tensors(f"xla:{index}", [], False)
                except BaseException:
                    self._recorded[index] = recorded, recorder
                    raise

    def _wanted(self) -> int:
        """Return the rank that the calling context asks for; the strictest if it leaves that open."""
        rank = wanted_rank()
        if rank != ASKS_NOTHING:
            return rank
        return self._outside if _ledger.ledger.applied.saved else 0

    def _rank(self) -> int:
        """Return the rank that marks what the calling context records."""
        return max(self._wanted(), _SETTINGS.index(_xla()._xla_get_mat_mul_precision()))

    def _set(self, setting: str) -> None:
        if setting == self._setting():
            return
        xla = _xla()
        xla._xla_set_mat_mul_precision(setting)
        if not self._marks_products and _runs() and xla._xla_get_num_cached_compilation_graph() > 0:
            self._warn_once(
                f"torch_xla's float32 matmul precision is now {setting!r}, and graphs that it compiled "
                "before keep the one that they were compiled at: it does not tell them apart. Enter scopes "
                "before anything is compiled, or use torch 2.9, torch_xla 2.9 and functionalization"
            )

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(message)

    def _setting(self) -> str | None:
        """Return torch_xla's setting; None if it does not say."""
        if not self._is_known:
            core = getattr(sys.modules["torch_xla"], "_XLAC", None)
            self._is_known = all(hasattr(core, name) for name in _CORE)
        setting = _xla()._xla_get_mat_mul_precision() if self._is_known else None
        return setting if setting in _SETTINGS else None

    def _marking(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that calls another, and marks what that has recorded."""
        xla = _xla()
        view = torch.ops.aten.view_copy.default

        def marked(ones: int, tensor: Any) -> Any:
            if tensor is None or not ones:
                return tensor
            return view(view(tensor, (*tensor.shape, *(1,) * ones)), tensor.shape)

        def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
            rank = self._rank()
            ones = self._marks[rank]
            eager = False
            with self._lock:  # eager mode is the whole process's
                try:
                    if ones and xla._get_use_eager_mode():  # it would be looked up before it is marked
                        eager = True
                        xla._set_use_eager_mode(False)
                    result = kernel(keys, *args, **kwargs)
                    several = result.__class__ is tuple
                    results = [marked(ones, one) for one in (result if several else (result,))]
                finally:
                    if eager:
                        xla._set_use_eager_mode(True)
            present = [one for one in results if one is not None]
            if eager:
                xla._xla_sync_multi(present, [], False, True)
            self._note(present[0].get_device(), rank)
            return tuple(results) if several else results[0]

        return hide(product)

    def _note(self, device: int, rank: int) -> None:
        """Note that a product has been recorded."""
        thread = threading.get_ident()
        before, recorder = self._recorded.get(device, (rank, thread))
        # A thread of autograd's records for the one that it serves.
        self._recorded[device] = min(rank, before), thread if api.running_pass() == -1 else recorder

    def _compile_for_each_rank(self, bridge: ModuleType) -> None:
        """Have ``torch.compile(backend="openxla")`` compile a graph for each rank that it is called at."""
        if self._setting() is None:
            return
        extract = bridge.extract_compiled_graph

        @functools.wraps(extract)
        def extract_compiled_graph(graph: torch.fx.GraphModule, _inputs: Any) -> _Compiled:
            compiled: dict[int, _Compiled] = {}

            def run(*inputs: Any) -> Any:
                rank = self._rank()
                if rank not in compiled:
                    fresh = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # extracting changes it
                    compiled[rank] = extract(fresh, inputs)
                return compiled[rank](*inputs)

            return run

        for module in (bridge, sys.modules.get("torch_xla.core.dynamo_bridge")):  # which has the same names
            if module is not None:
                module.extract_compiled_graph = extract_compiled_graph  # type: ignore[attr-defined]


def _xla() -> Any:
    return sys.modules["torch_xla"]._XLAC


def _runs() -> bool:
    """Tell whether torch_xla's runtime has been started."""
    return bool(_xla()._xla_runtime_is_initialized())
