"""Who is running: the thread or asyncio task that a scope belongs to.

Contexts are copied freely, so a context cannot tell who runs in it; a thread
or a task can. An :class:`Owner` stands for one of them without keeping it
alive, and says so when it is gone.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

# asyncio.get_running_loop() raises where no loop runs, which costs more than
# a whole scope; this is the call below it, there for framework authors.
running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop

_listeners: list[Callable[[Owner], None]] = []


class Owner:
    """A thread, or an asyncio task together with the thread it runs in.

    Attributes:
        thread: The owner for the thread; for a thread, itself.
        thread_id: The identifier of the thread.
        task: A weak reference to the task, or None for a thread.
        gone: Whether the thread has ended, for a thread.
    """

    __slots__ = ("gone", "task", "thread", "thread_id")

    def __init__(
        self, thread: Owner | None = None, task: weakref.ref[asyncio.Task[Any]] | None = None
    ) -> None:
        self.thread = thread or self
        self.thread_id = threading.get_ident()
        self.task = task
        self.gone = False

    def names(self) -> tuple[str, str | None]:
        """Return the names of the thread and of the task, as far as they still exist."""
        thread = str(self.thread_id)
        if not self.thread.gone:  # else another thread may have the identifier by now
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            thread = names.get(self.thread_id, thread)
        task = self.task() if self.task is not None else None
        return thread, task.get_name() if task is not None else None

    def __str__(self) -> str:
        thread, task = self.names()
        return f"thread {thread}" if task is None else f"task {task} in thread {thread}"

    def tell(self) -> None:
        """Call the listeners: what this owner stands for is gone."""
        for listener in _listeners or ():  # None when the interpreter is shutting down
            listener(self)

    def is_here(self) -> bool:
        """Tell whether this owner belongs to the calling thread."""
        return self.thread is this_thread.owner


class _Sentinel:
    """Dies with its thread, in whose local storage it lies."""

    __slots__ = ("owner",)

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __del__(self) -> None:
        self.owner.gone = True
        self.owner.tell()


class _ThreadOwner(threading.local):
    def __init__(self) -> None:
        self.owner = Owner()
        self.sentinel = _Sentinel(self.owner)


this_thread = _ThreadOwner()
# Keyed by id(task): an entry goes before its task's id can be used again.
_task_owners: dict[int, Owner] = {}


def current_owner() -> Owner:
    """Return the owner for the running asyncio task, else for the thread."""
    loop = running_loop()
    return this_thread.owner if loop is None else owner_in(loop)


def owner_in(loop: asyncio.AbstractEventLoop) -> Owner:
    task = asyncio.current_task(loop)
    if task is None:
        return this_thread.owner
    owner = _task_owners.get(id(task))
    if owner is None or owner.task is None or owner.task() is not task:
        owner = _adopt(task)
    return owner


def _adopt(task: asyncio.Task[Any]) -> Owner:
    key = id(task)

    def gone(reference: weakref.ref[asyncio.Task[Any]]) -> None:
        owner = _task_owners.get(key)
        if owner is not None and owner.task is reference:
            del _task_owners[key]
            owner.tell()

    owner = Owner(this_thread.owner, weakref.ref(task, gone))
    _task_owners[key] = owner
    return owner


def on_owner_gone(listener: Callable[[Owner], None]) -> None:
    """Have ``listener`` called with each owner that ceases to exist."""
    _listeners.append(listener)
