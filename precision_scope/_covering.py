"""Which threads record for backward passes, at which level, and the tags they leave.

The context says what a covering scope covers; but it is in a thread that autograd
records operators. A thread begins to tag them when it enters such a scope or, in
a context that was copied from another thread, with its first product. It stops
when none of the entries is live any more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from precision_scope import _torch_autograd as autograd
from precision_scope._entries import (
    ASKS_NOTHING,
    ENDED,
    TAG,
    Entry,
    asked,
    covering,
    tag_of_running_node,
    top,
    wanted_rank,
)
from precision_scope._torch_api import context_of_backward


class _Here(threading.local):
    """The covering entries that this thread records for."""

    def __init__(self) -> None:
        self.entries: list[weakref.ref[Entry]] = []


_here = _Here()

# What is tagged when the next operator runs, here or elsewhere, or a backward pass:
# nodes of custom functions, and tensors whose nodes are not there yet; with the
# tags, and the threads they were made in.
unfinished: dict[int, tuple[weakref.ref[Any], int, int]] = {}
_numbers = itertools.count()


def begin(entry: Entry) -> None:
    """Have this thread record for as long as a covering entry is live."""
    is_needed()  # lets go of those that have ended
    _here.entries.append(weakref.ref(entry))
    autograd.record_operators(True)


def end() -> None:
    """Have this thread record no more, unless it has to."""
    if not is_needed():
        autograd.record_operators(False)


def begin_with_product() -> bool:
    """Have this thread record if it does not, though what it computes is covered; tell whether it begins."""
    if freed:
        free()
    if autograd.is_recording() or not torch.is_grad_enabled():
        return False
    entry = covering(top.get())
    if entry is not None:
        begin(entry)
    elif tag_of_running_node() is not None:
        autograd.record_operators(True)  # until autograd is done with the node
    else:
        return False
    return True


def is_needed() -> bool:
    """Tell whether this thread is to record on."""
    entries = _here.entries
    while entries and ((entry := entries[-1]()) is None or entry.rank == ENDED):
        entries.pop()
    return bool(entries) or tag_of_running_node() is not None


def rank_to_record() -> int:
    """Return what nodes recorded here and now are tagged with; ASKS_NOTHING for no tag."""
    if tag_of_running_node() is not None:
        return wanted_rank()
    entry = top.get()
    if covering(entry) is None:
        context = context_of_backward()
        entry = None if context is None else context.get(top)
        if covering(entry) is None:
            return ASKS_NOTHING
    return asked(entry)


def tag(node: Any, rank: int) -> bool:
    """Tag a node, unless it has a tag; tell whether that could be done."""
    try:
        node.metadata.setdefault(TAG, rank)
    except RuntimeError:  # a custom function's, which is not there yet or any more
        return False
    if chance() < BREAKS:
        break_chain(node)
    if autograd.is_custom(node):
        node.register_prehook(_record_in_backward)
    return True


def _record_in_backward(_gradients: Any) -> None:
    """Tag what a custom node's own code records; autograd undoes this after the node."""
    autograd.record_operators(True)


# From torch 2.13 on, nodes that Python has seen are freed one inside the other, and
# tens of thousands in a row overflow the stack. Here and there in a graph, those
# before a node are kept until all after it are gone.
BREAKS: Final = 1 / 512
chance: Final = random.Random(0).random  # noqa: S311 -- no secret
freed: list[list[Any]] = []


class _Break:
    """Its finaliser is not Python code, which would swallow interrupts."""

    __slots__ = ("__del__",)

    __del__: Callable[[], object]


def break_chain(node: Any) -> None:
    """Have the nodes before a node freed by :func:`free` when it goes."""
    node.metadata["precision_scope.break"] = chain_break = _Break()
    chain_break.__del__ = functools.partial(freed.append, [earlier for earlier, _ in node.next_functions])


def free() -> None:
    """Free what is due, and what that makes due."""
    with contextlib.suppress(IndexError):  # another thread may do the same
        while True:
            freed.pop()


def tag_soon(made: Any, rank: int) -> None:
    """Tag a node, or that of a tensor, once it is there."""
    unfinished[next(_numbers)] = (weakref.ref(made), rank, threading.get_ident())


def tag_first(product: Any) -> Any:
    """Return the product that the thread began with, whose node autograd attaches when it returns."""
    rank = rank_to_record()
    for tensor in autograd.tensors_in(product):
        tag_soon(tensor, rank)
    return product


def tag_unfinished() -> None:
    """Tag what is there by now."""
    for number, (reference, rank, thread) in list(unfinished.items()):
        made = reference()
        nodes = autograd.nodes_of([made]) if isinstance(made, torch.Tensor) else [made]
        tagged = [node is not None and tag(node, rank) for node in nodes]
        if any(tagged) or made is None or thread == threading.get_ident():
            unfinished.pop(number, None)
