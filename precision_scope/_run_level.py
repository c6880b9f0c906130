"""What ``python -m precision_scope run`` gives a program, and the levels that the program sets itself."""

from __future__ import annotations

import os
from collections.abc import Callable

from precision_scope import _torch_api as api
from precision_scope import enable_emulation, set_float32_matmul_precision
from precision_scope._entries import force_level
from precision_scope._hardware import parse_hardware
from precision_scope._ledger import ledger
from precision_scope._levels import Float32MatmulPrecision, parse_level
from precision_scope._run import EMULATE, FORCE, LEVEL
from precision_scope.backends._torch import TorchFlags


def begin() -> None:
    """Set the level and the emulation that the environment names: torch has just been imported."""
    if LEVEL in os.environ:
        _set_level(parse_level(os.environ[LEVEL]))
    if EMULATE in os.environ:
        enable_emulation(parse_hardware(os.environ[EMULATE]))


def _set_level(level: Float32MatmulPrecision) -> None:
    flags = ledger.applied.torch_flags
    before = flags.save()
    set_float32_matmul_precision(level)
    if os.environ.get(FORCE) == "1":
        force_level(level)
        api.intercept_writes(_ignore)
    else:
        api.intercept_writes(_ProgramWins(flags, before, level).write)


def _ignore(write: Callable[..., object], *arguments: str) -> None:
    """Write only what is not for products."""
    if arguments[1:] and arguments[1] != "matmul":
        write(*arguments)


class _ProgramWins:
    """Has what the program sets take effect as if the level had never been set.

    A setting of all of a device's operators may be for a while only: when it is
    taken back, the level is set again.
    """

    def __init__(self, flags: TorchFlags, before: object, level: Float32MatmulPrecision) -> None:
        self._flags = flags
        self._before = before
        self._level = level
        self._is_over = False

    def write(self, write: Callable[..., object], *arguments: str) -> None:
        """Write what the program sets."""
        if self._is_over or ledger.applied.saved or not self._is_for_products(arguments):
            write(*arguments)
            return
        if self._flags.is_at(self._level):
            self._flags.restore(self._before)
        write(*arguments)
        if arguments[1:2] != ("all",):
            self._is_over = True
        elif self._flags.save() == self._before:
            set_float32_matmul_precision(self._level)

    def _is_for_products(self, arguments: tuple[object, ...]) -> bool:
        """Tell whether a write changes what products run at; others set only back what they found."""
        match arguments:
            case (bool(allowed),):
                # Before torch 2.9 Dynamo writes what it has read.
                return api.HAS_CELLS or allowed != api.get_allow_tf32()
            case (str(backend), str("all" | "matmul" as operator), str(value)):
                return value != api.get_cell(backend, operator)
            case (str(backend), str(), str()):
                return False
            case _:
                return True
