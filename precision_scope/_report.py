"""What is on right now: the record that :func:`report` returns."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precision_scope._dynamo import hide_package
from precision_scope._emulation import emulated_hardware
from precision_scope._hardware import Hardware
from precision_scope._ledger import ledger
from precision_scope._levels import parse_level
from precision_scope._process import get_float32_matmul_precision
from precision_scope._run import FORCE
from precision_scope.backends._torch import TORCH_FLAGS, TorchFlags

if TYPE_CHECKING:
    from precision_scope._levels import Float32MatmulPrecision
    from precision_scope.backends._base import Backend

OVERRIDES: dict[str, str] = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": 'torch starts at "high" if it is "1"',
    "NVIDIA_TF32_OVERRIDE": 'NVIDIA\'s libraries never use TF32 if it is "0", whatever the flags say',
    "ONEDNN_DEFAULT_FPMATH_MODE": 'oneDNN may compute on the CPU in this precision, even at "highest"',
    "HIPBLASLT_ALLOW_TF32": 'torch 2.7 to 2.9 uses TF32 on AMD GPUs only if it is "1"',
    "XLA_USE_BF16": 'older torch_xla computes float32 in bfloat16 if it is "1", whatever the level',
    FORCE: 'the level of "python -m precision_scope run --force" stays if it is "1", whatever is asked for',
}
"""The environment variables that override the flags, and what each does."""


@dataclass(frozen=True, slots=True)
class ScopeReport:
    """One live scope.

    Attributes:
        level: The level that it asks for.
        thread: The name of the thread that entered it or, if that thread has
            ended, its identifier.
        task: The name of the asyncio task that entered it; None outside tasks.
    """

    level: Float32MatmulPrecision
    thread: str
    task: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What the float32 matmul precision is, and where it comes from.

    What a context *wants* and what the process *applies* can differ: torch's
    flags are one per process, so where live scopes of several threads or tasks
    disagree, the strictest level is applied.

    Attributes:
        wanted: The level that the calling thread or task asks for.
        default: The level in force where no scope is live.
        applied: The level that the process runs at; with isolation on, while
            no product runs.
        backends: The settings of each active backend, cell by cell. Among
            torch's are those of convolutions and RNNs, which follow their own
            settings and no level. A backend that fails has its error as its
            only cell.
        disagreeing: Those of them whose setting amounts to another level than
            ``applied``, with that level. A backend may not say what its setting
            amounts to.
        scopes: The live scopes of all threads and tasks, in the order of entering.
        isolation: Whether each product runs at the level of its own context.
        emulation: The hardware whose products are emulated, "cuda" or "tpu";
            None for none.
        environment: Those environment variables that are set and override what
            the backends' settings say.
        changed_by_others: Whether a scope is live and torch's flags are not as
            it set them: some other code has written to them since.

    A record is of the moment when it was made. It is immutable, and can be
    passed between threads and tasks freely.

    Example:
        >>> from precision_scope import matmul_precision, report
        >>> with matmul_precision("medium"):
        ...     found = report()
        >>> print(found.wanted, found.applied, [str(scope.level) for scope in found.scopes])
        medium medium ['medium']
    """

    wanted: Float32MatmulPrecision
    default: Float32MatmulPrecision
    applied: Float32MatmulPrecision
    backends: dict[str, dict[str, str]]
    disagreeing: dict[str, Float32MatmulPrecision]
    scopes: tuple[ScopeReport, ...]
    isolation: bool
    emulation: Hardware | None
    environment: dict[str, str]
    changed_by_others: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain dicts, lists, strings and bools, for JSON.

        Example:
            >>> import json
            >>> from precision_scope import report
            >>> json.dumps(report().to_dict()["scopes"])
            '[]'
        """
        return {
            "wanted": self.wanted.value,
            "default": self.default.value,
            "applied": self.applied.value,
            "backends": {name: dict(cells) for name, cells in self.backends.items()},
            "disagreeing": {name: level.value for name, level in self.disagreeing.items()},
            "scopes": [
                {"level": scope.level.value, "thread": scope.thread, "task": scope.task}
                for scope in self.scopes
            ],
            "isolation": self.isolation,
            "emulation": self.emulation,
            "environment": dict(self.environment),
            "changed_by_others": self.changed_by_others,
        }


def report() -> Report:
    """Tell which float32 matmul precision is wanted and applied, and by whom.

    It changes nothing and never raises: a backend that fails is shown with
    its error.

    Returns:
        A record for people to read and, by its ``to_dict()``, for JSON.

    Example:
        >>> from precision_scope import matmul_precision, report
        >>> with matmul_precision("high"):
        ...     found = report()
        >>> print(found.wanted, found.changed_by_others)
        high False

    It can be called from any thread or task. ``wanted`` is for the one that
    calls; all the rest is the same for the whole process.
    """
    # A signal handler can call in the middle of an entry, before the flags follow.
    settled = not ledger.lock.is_had()
    with contextlib.suppress(Warning):  # that an installed backend is broken, made an error
        ledger.see_to_the_rest()
    # One moment of the ledger; and backends are called one at a time.
    with ledger.lock:
        wanted = get_float32_matmul_precision()
        default = ledger.default()
        in_force = ledger.level()
        live = ledger.live_scopes()
        applied = in_force or default
        changed_by_others = (
            settled and in_force is not None and not ledger.applied.torch_flags.is_at(in_force)
        )
        backends: dict[str, dict[str, str]] = {}
        levels: dict[str, Float32MatmulPrecision | None] = {}
        for backend in ledger.backends():
            cells, level = _look_at(backend)
            if cells is not None:
                backends[backend.name], levels[backend.name] = cells, level
        if changed_by_others:
            levels[TORCH_FLAGS.name] = TORCH_FLAGS.current_level()
    ledger.see_to_the_rest()
    # Outside: names need locks of threading's, which a finaliser may hold that waits for the ledger's.
    scopes = tuple(ScopeReport(level, *owner.names()) for level, owner in live)
    return Report(
        wanted=wanted,
        default=default,
        applied=applied,
        backends=backends,
        disagreeing={name: level for name, level in levels.items() if level not in (None, applied)},
        scopes=scopes,
        isolation=ledger.isolated,
        emulation=emulated_hardware(),
        environment={name: value for name in OVERRIDES if (value := os.environ.get(name)) is not None},
        changed_by_others=changed_by_others,
    )


def _look_at(backend: Backend) -> tuple[dict[str, str] | None, Float32MatmulPrecision | None]:
    """Return a backend's setting, or its failure, and its level; None if it is not in use."""
    try:
        if not backend.is_active():
            return None, None
        # What torch's flags are at counts only if others have changed them.
        level = None if isinstance(backend, TorchFlags) else backend.current_level()
        if level is not None:
            level = parse_level(level)
        return {str(cell): str(value) for cell, value in backend.describe().items()}, level
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, None


hide_package()
