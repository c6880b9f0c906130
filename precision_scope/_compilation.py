"""What a compilation by Dynamo does with torch's flags, and keeping other threads' scopes out of it.

Dynamo notes how CUDA multiplies when it begins, once for the compiled code's
guards and once to put it back when it has traced, maybe minutes later. What
scopes of other threads have changed since would be lost, and if guards that it
has just built do not hold, it fails. Before torch 2.9 it turns MEDIUM into HIGH
as well, whoever else there is. So the flags are held while it reads or writes
them, and what it has written is undone before they are let go.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator

from precision_scope._dynamo import announce_compilations
from precision_scope._ledger import ledger
from precision_scope._levels import Float32MatmulPrecision
from precision_scope._warnings import warn
from precision_scope.backends._torch import TORCH_FLAGS

_PATIENCE = 10.0  # seconds


@contextlib.contextmanager
def _flags_held() -> Generator[bool]:
    """Keep other threads from changing or needing the flags, and put right what CUDA is set to.

    Yields whether it does: it gives up if the ledger's lock is not to be had.
    Whoever holds it may be waiting for this compilation, in a signal handler, say.
    """
    lock = ledger.lock
    locked = False
    try:
        # By "for", as in Lock.acquire: no call of a helper could say so exactly.
        for locked in iter(functools.partial(lock.acquire, timeout=_PATIENCE), None):  # noqa: B007
            break
        if not locked:
            warn(
                "a compilation by torch.compile no longer waits for a thread that enters or leaves a "
                "precision scope; scopes of other threads may lose their effect"
            )
            yield False
            return
        with ledger.applied.torch_flags.at_rest():
            held, level = ledger.applied.saved, ledger.level()
            flags = TORCH_FLAGS.save()
            try:
                yield True
            finally:
                _put_right(flags, held, level)
    finally:
        if locked:
            lock.release()
        ledger.see_to_the_rest()


def _put_right(flags: object, held: tuple[object, ...], level: Float32MatmulPrecision | None) -> None:
    """Set CUDA back, or what scopes want that this very thread has entered or left meanwhile.

    Args:
        flags: The flags as they were.
        held: What the ledger had saved then.
        level: The level that scopes had in force then.
    """
    now = ledger.level()
    changed = ledger.applied.saved is not held or now is not level
    if changed and now is not None:
        ledger.applied.torch_flags.apply(now)
    elif changed and held:
        ledger.applied.torch_flags.restore(held[0])
    else:
        TORCH_FLAGS.restore_cuda(flags)


class _Compilation:
    """One compilation, in the thread that it runs in."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._setting: str | None = None  # that Dynamo has noted

    def begin(self, is_compiled: Callable[[], bool], note: Callable[[], object]) -> bool:
        """Have Dynamo note how CUDA multiplies.

        With isolation on, products of other threads may have been running when
        nothing was found to fit. What fits the flags at rest is not compiled
        again then, but for another setting, or not at all if it is for each.

        Args:
            is_compiled: Tells whether compiled code fits the flags as they are.
            note: Has Dynamo note them.

        Returns:
            Whether to compile.
        """
        compiles = True
        with _flags_held() as held:
            if held:
                compiles = self._choose(is_compiled)
                note()
        return compiles

    def _choose(self, is_compiled: Callable[[], bool]) -> bool:
        """Set CUDA to what is to be compiled for; tell whether there is such a setting."""
        for setting in TORCH_FLAGS.cuda_settings():  # the first is the one in force
            self._setting = setting
            TORCH_FLAGS.set_cuda(setting)
            if not (ledger.isolated and is_compiled()):
                return True
        return False

    def hold(self) -> None:
        """Hold the flags: Dynamo is about to read or to write them."""
        if not self._held.enter_context(_flags_held()):
            self._setting = None

    def written(self) -> None:
        """Let Dynamo's check find what it has noted: it has written, and goes on to build guards."""
        if self._setting is not None:
            TORCH_FLAGS.set_cuda(self._setting)

    def let_go(self) -> None:
        """Put the flags right, and let others have them."""
        self._held.close()


def watch_compilations() -> None:
    """Keep other threads' scopes out of compilations from now on."""
    announce_compilations(_Compilation)
