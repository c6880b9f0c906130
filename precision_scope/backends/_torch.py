"""torch's own flags: the legacy value and, from torch 2.9 on, the cells.

What each torch call writes and reads is subtle; the tests in
``tests/test_exact_restore.py`` compare every getter by brute force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

from precision_scope import _torch_api as api
from precision_scope._levels import Float32MatmulPrecision, parse_level
from precision_scope.backends._base import Backend

_NONE = "none"
_MIXED = "unreadable: torch's older and newer settings disagree"


class TorchFlags(Backend):
    """The flags of a torch that has only the legacy value (before 2.9)."""

    name = "torch"

    isolates: ClassVar[bool] = False
    """Whether products run at their own contexts' levels, whatever is applied."""

    convolution_and_rnn_cells: ClassVar[tuple[str, ...]] = ("cudnn.allow_tf32",)
    """The cells that matrix products do not follow, and no level changes."""

    def save(self) -> object:
        return api.get_legacy_value()

    # The bare C function: this is the hottest call of the package.
    apply = staticmethod(api.set_legacy_value)  # pyright: ignore[reportAssignmentType]

    def restore(self, saved: Any, /) -> None:
        self.restore_first((saved,))

    def restore_first(self, states: tuple[Any, ...]) -> None:
        """Restore the first of what several backends have saved; here it is torch's, and this is hot."""
        api.set_legacy_value(states[0])

    def set_default(self, level: Float32MatmulPrecision) -> None:
        """Apply a level for good: it is the default from now on."""
        api.set_legacy_value(level)

    def coming_default(self, level: Float32MatmulPrecision) -> None:
        """Hear of the default that is to be set when the last scope has ended."""

    def coming_rest(self, saved: object) -> None:
        """Hear of what is to be restored when the last scope has ended."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Wait until no product has the flags otherwise than the ledger does, and keep it so."""
        return contextlib.nullcontext()

    def cuda_settings(self) -> tuple[str, ...]:
        """Return all that CUDA can be set to, what it is set to now first."""
        return api.get_legacy_value(), "highest", "high"

    def set_cuda(self, setting: str) -> None:
        """Set how CUDA multiplies, and maybe more."""
        api.set_legacy_value(setting)

    def restore_cuda(self, saved: Any) -> None:
        """Undo that."""
        api.set_legacy_value(saved)

    def describe(self) -> dict[str, str]:
        return {
            "float32_matmul_precision": _reading(api.get_legacy_value),
            "cuda.matmul.allow_tf32": _reading(api.get_allow_tf32),
            "cudnn.allow_tf32": _reading(api.get_cudnn_allow_tf32),
        }

    def is_at(self, level: Float32MatmulPrecision) -> bool:
        """Tell whether the flags read as applying ``level`` left them.

        It only reads, and never raises.
        """
        return _reading(api.get_legacy_value) == level

    def current_level(self) -> Float32MatmulPrecision:
        """Return the level that the flags amount to now; never raises."""
        return parse_level(api.get_legacy_value())

    def level_of(self, saved: Any) -> Float32MatmulPrecision:
        """Return the level that saved flags amount to."""
        return parse_level(saved)

    def at_level(self, saved: Any, level: Float32MatmulPrecision) -> object:  # noqa: ARG002
        """Return saved flags as they would be after a level was applied to them."""
        return level.value

    def stored(self, saved: Any) -> dict[str, str]:
        """Return saved flags by name, as they are stored: what they inherit does not show."""
        return {"float32_matmul_precision": saved}


# (legacy, stored cuda.matmul, stored mkldnn.matmul,
#  reading of cuda.matmul, reading of mkldnn.matmul, stored parents)
# Parents are (generic.all, cuda.all, mkldnn.all), or None for all "none".
_Parents: TypeAlias = "tuple[str, str, str]"
_Cells: TypeAlias = "list[tuple[str, str, str]]"
_Saved: TypeAlias = "tuple[str, str, str, str, str, _Parents | None]"

_INITIAL: _Saved = "highest", _NONE, _NONE, _NONE, _NONE, None

# What the legacy setter writes to cuda.matmul and mkldnn.matmul.
_CELLS_AT = {
    Float32MatmulPrecision.HIGHEST: ("ieee", "ieee"),
    Float32MatmulPrecision.HIGH: ("tf32", "tf32"),
    Float32MatmulPrecision.MEDIUM: ("tf32", "bf16"),
}


class TorchCells(TorchFlags):
    """The flags of a torch that has cells as well (2.9 and newer).

    A cell's reading does not tell "none" from a value equal to its parent's,
    and the legacy getter raises where cells and legacy value disagree, so an
    exact save sometimes has to write for a moment.
    """

    convolution_and_rnn_cells: ClassVar[tuple[str, ...]] = (
        "cuda.conv.fp32_precision",
        "cuda.rnn.fp32_precision",
        "mkldnn.conv.fp32_precision",
        "mkldnn.rnn.fp32_precision",
    )

    def __init__(self) -> None:
        # The cells that a save under way has written to for a moment, as they were.
        self._borrowed: _Cells = []
        # Entered around such a save, so that nobody reads them meanwhile.
        self.undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def save(self) -> _Saved:
        cuda = api.get_cell("cuda", "matmul")
        cpu = api.get_cell("mkldnn", "matmul")
        if cuda == _NONE == cpu and not self._borrowed:
            # Both read through to the root, so every parent is "none" too.
            try:
                if not api.is_not_highest():
                    return _INITIAL
            except RuntimeError:
                pass  # it is not
        try:
            legacy = api.get_legacy_value()
        except RuntimeError:
            return self._save_by_borrowing()
        if cuda == _NONE == cpu and not self._borrowed:
            return legacy, _NONE, _NONE, _NONE, _NONE, None
        parents = api.get_cell("generic", "all"), api.get_cell("cuda", "all"), api.get_cell("mkldnn", "all")
        if parents[0] == _NONE and cuda != parents[1] and cpu != parents[2] and not self._borrowed:
            return legacy, cuda, cpu, cuda, cpu, parents
        return self._save_by_borrowing()  # a reading does not tell "none" from its parent's value

    def _save_by_borrowing(self) -> _Saved:
        """Save where readings are not enough: write to cells for a moment, to read others exactly.

        No call in Python stands between such a write and its being put back: an
        interrupt could prevent it. A signal handler that enters a scope in
        between puts the cells back for its own save, and this one starts again.
        """
        with self.undisturbed():
            return self._save_all()

    def _save_all(self) -> _Saved:
        while True:
            for cell in self._borrowed:
                api.set_cell(*cell)
            cuda, cpu = api.get_cell("cuda", "matmul"), api.get_cell("mkldnn", "matmul")
            generic = api.get_cell("generic", "all")  # the root: its reading is exact
            borrowed: _Cells = [("generic", "all", generic)]
            try:
                self._borrowed = borrowed
                api.set_cell("generic", "all", _NONE)
                all_cuda, all_cpu = api.get_cell("cuda", "all"), api.get_cell("mkldnn", "all")
                if self._borrowed is not borrowed:
                    continue
                borrowed += [("cuda", "all", all_cuda), ("mkldnn", "all", all_cpu)]
                api.set_cell("cuda", "all", _NONE)
                if self._borrowed is not borrowed:
                    continue
                api.set_cell("mkldnn", "all", _NONE)
                stored_cuda, stored_cpu = api.get_cell("cuda", "matmul"), api.get_cell("mkldnn", "matmul")
                if self._borrowed is not borrowed:
                    continue
                # The legacy getter cannot raise with both cells at "ieee".
                borrowed += [("cuda", "matmul", stored_cuda), ("mkldnn", "matmul", stored_cpu)]
                api.set_cell("cuda", "matmul", "ieee")
                if self._borrowed is not borrowed:
                    continue
                api.set_cell("mkldnn", "matmul", "ieee")
                legacy = api.get_legacy_value()
                if self._borrowed is not borrowed:
                    continue
            finally:
                if self._borrowed is borrowed:
                    try:
                        for cell in borrowed:
                            api.set_cell(*cell)
                    except BaseException:
                        for cell in borrowed:
                            api.set_cell(*cell)
                        raise
                    finally:
                        self._borrowed = []
            return legacy, stored_cuda, stored_cpu, cuda, cpu, (generic, all_cuda, all_cpu)

    def restore_first(self, states: tuple[Any, ...]) -> None:
        legacy, stored_cuda, stored_cpu, cuda, cpu, parents = states[0]
        api.set_legacy_value(legacy)
        api.set_cell("cuda", "matmul", stored_cuda)
        api.set_cell("mkldnn", "matmul", stored_cpu)
        if parents is not None:
            _set_parents(parents)
        elif api.get_cell("cuda", "matmul") != cuda or api.get_cell("mkldnn", "matmul") != cpu:
            _set_parents((_NONE, _NONE, _NONE))  # somebody wrote to one inside the scope

    def cuda_settings(self) -> tuple[str, ...]:
        return api.get_cell("cuda", "matmul"), "ieee", "tf32", _NONE

    def set_cuda(self, setting: str) -> None:
        api.set_cell("cuda", "matmul", setting)

    def restore_cuda(self, saved: Any) -> None:
        api.set_cell("cuda", "matmul", saved[1])

    def describe(self) -> dict[str, str]:
        cells = {"float32_matmul_precision": _reading(api.get_legacy_value)}
        cells["fp32_precision"] = api.get_cell("generic", "all")
        for backend in ("cuda", "mkldnn"):
            for operator in ("all", "matmul", "conv", "rnn"):
                name = backend if operator == "all" else f"{backend}.{operator}"
                cells[f"{name}.fp32_precision"] = api.get_cell(backend, operator)
        return cells

    def is_at(self, level: Float32MatmulPrecision) -> bool:
        cells = api.get_cell("cuda", "matmul"), api.get_cell("mkldnn", "matmul")
        return cells == _CELLS_AT[level] and super().is_at(level)

    def current_level(self) -> Float32MatmulPrecision:
        return _level_of_readings(api.get_cell("cuda", "matmul"), api.get_cell("mkldnn", "matmul"))

    def level_of(self, saved: Any) -> Float32MatmulPrecision:
        _, _, _, cuda, cpu, _ = saved
        return _level_of_readings(cuda, cpu)

    def at_level(self, saved: Any, level: Float32MatmulPrecision) -> _Saved:
        return level.value, *_CELLS_AT[level], *_CELLS_AT[level], saved[-1]

    def stored(self, saved: Any) -> dict[str, str]:
        legacy, cuda, cpu, _, _, parents = saved
        generic, all_cuda, all_cpu = parents or (_NONE, _NONE, _NONE)
        cells = {
            "cuda.matmul.fp32_precision": cuda,
            "mkldnn.matmul.fp32_precision": cpu,
            "fp32_precision": generic,
            "cuda.fp32_precision": all_cuda,
            "mkldnn.fp32_precision": all_cpu,
        }
        inherited = {name: value if value != _NONE else "none (inherited)" for name, value in cells.items()}
        return {"float32_matmul_precision": legacy, **inherited}


def _reading(getter: Callable[[], object]) -> str:
    try:
        return str(getter())
    except RuntimeError:
        return _MIXED


def _level_of_readings(cuda: str, cpu: str) -> Float32MatmulPrecision:
    """Return the level that acts like this on CUDA; the CPU breaks the tie."""
    if cuda != "tf32":
        return Float32MatmulPrecision.HIGHEST
    return Float32MatmulPrecision.MEDIUM if cpu == "bf16" else Float32MatmulPrecision.HIGH


def _set_parents(parents: _Parents) -> None:
    generic, cuda, cpu = parents
    api.set_cell("generic", "all", generic)
    api.set_cell("cuda", "all", cuda)
    api.set_cell("mkldnn", "all", cpu)


TORCH_FLAGS: TorchFlags = TorchCells() if api.HAS_CELLS else TorchFlags()
"""The flags of the torch that is installed."""
