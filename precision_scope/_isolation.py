"""Two threads, two precisions, at the same time."""

from __future__ import annotations

import os
from typing import Any

from precision_scope._dynamo import hide_package
from precision_scope._entries import top
from precision_scope._errors import PrecisionScopeError
from precision_scope._gate import DEFAULT, Gate
from precision_scope._ledger import ledger
from precision_scope._products import register
from precision_scope._torch_api import pass_context_to_backward

_kernels: list[Any] = []  # kept for as long as the process lives


def enable_isolation() -> None:
    """Give each thread and asyncio task the level that it asks for, also where they disagree.

    torch's flags are one for the whole process. From this call on, products of
    float32 matrices take turns by level: those of one level run side by side,
    and those of another wait until the flags can be switched. Every product
    runs at the level of the context that calls it, in a backward pass that of
    the context that called ``backward()``; threads and tasks without a scope
    get the process default. There is no :class:`PrecisionConflictWarning` any
    more. Each product costs a few microseconds more.

    It holds for the rest of the process, and for processes forked from it; a
    second call does nothing. Call it when the program starts: products that
    run in other threads at that moment do not take part. It can be called from
    any thread, also inside scopes. The environment variable
    ``PRECISION_SCOPE_ISOLATION=1`` has the same effect when a name is first
    taken from the package, also in spawned processes; ``0`` and the empty string
    are no, and with anything else that raises :class:`ValueError`.

    Raises:
        PrecisionScopeError: If this torch does not have what isolation is
            built on; nothing has changed then.

    Example:
        >>> import threading
        >>> import torch
        >>> from precision_scope import enable_isolation, matmul_precision
        >>> enable_isolation()
        >>> a = torch.randn(8, 8)
        >>> def fast():
        ...     with matmul_precision("medium"):
        ...         return a @ a
        >>> thread = threading.Thread(target=fast)
        >>> thread.start()
        >>> with matmul_precision("highest"):  # at the same time
        ...     product = a @ a
        >>> thread.join()
    """
    with ledger.lock:
        if ledger.isolated:
            return
        applied = ledger.applied
        level = ledger.level()
        gate = Gate(
            applied.torch_flags,
            ledger.lock,
            rest=DEFAULT if level is None else level.rank,
            default=applied.saved[0] if applied.saved else None,
        )
        try:
            kernels = register(gate)
        except (AttributeError, RuntimeError) as error:
            raise PrecisionScopeError(
                f"isolation does not work on this torch: {type(error).__name__}: {error}"
            ) from error
        try:
            _switch_on(gate, kernels)
        except BaseException:  # an interrupt: half of it would be worse
            _switch_on(gate, kernels)
            raise


def _switch_on(gate: Gate, kernels: list[Any]) -> None:
    _kernels[:] = kernels
    gate.guard_saves()
    pass_context_to_backward(top.get)
    ledger.applied.replace_torch_flags(gate)


def _forget_other_threads() -> None:
    gate = ledger.applied.torch_flags
    if isinstance(gate, Gate):
        gate.forget_other_threads()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_other_threads)  # after the ledger's own


hide_package()
