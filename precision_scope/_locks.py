"""Taking the package's lock by hand, where "with" would take longer than all that it guards."""

from __future__ import annotations

import threading
import time


def wait_for(lock: threading.RLock) -> None:
    """Take the lock without queueing for it.

    A thread that is handed the lock in a queue has yet to get the GIL, and by
    then the next one queues: from then on every scope costs a switch of threads.
    """
    pause = 0.0
    while not lock.acquire(blocking=False):
        time.sleep(pause)
        pause = min(pause + 1e-5, 1e-3)


def release_if_owned(lock: threading.RLock) -> None:
    """Release the lock, unless an interrupt came before it was had."""
    if lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
