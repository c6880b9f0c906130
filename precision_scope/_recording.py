"""Backward passes at the forward's level: nodes recorded in a covering scope are tagged.

While a scope with ``backward=True`` is live, each operator of its thread comes by
the recorder here, which has autograd record it and tags the nodes it leaves behind
with the level in force. The kernels of isolation read the tag of the node that
runs. It is a number in the node's own ``metadata``: it is there for as long as
the node is, in whatever thread that runs, and nothing here keeps a graph alive.

What autograd records without an operator is met where it is made: custom
autograd functions, and the passes that record themselves (``create_graph=True``,
re-entrant checkpointing). Nodes recorded inside a tagged node are tagged in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precision_scope import _covering
from precision_scope import _torch_autograd as autograd
from precision_scope._covering import (
    BREAKS,
    break_chain,
    chance,
    free,
    freed,
    is_needed,
    rank_to_record,
    tag,
    tag_soon,
    tag_unfinished,
    unfinished,
)
from precision_scope._dynamo import hide, hide_package
from precision_scope._entries import (
    ASKS_NOTHING,
    TAG,
    Entry,
    tag_of_running_node,
    tagging,
    top,
    wanted_rank,
)
from precision_scope._isolation import enable_isolation
from precision_scope._ledger import ledger
from precision_scope._levels import LEVELS
from precision_scope._scopes import matmul_precision
from precision_scope._torch_api import running_node

_next_node_number = autograd.next_node_number
_pass_recorders_by = autograd.pass_recorders_by
_record_operators = autograd.record_operators


def begin_recording(entry: Entry) -> None:
    """Tag what this thread records from now on, as long as the entry is live and covers it.

    Args:
        entry: Of a covering scope, just entered.
    """
    if not tagging or not _recorders.are_complete():
        _switch_on()
    free()
    _covering.begin(entry)


def _switch_on() -> None:
    """Register and replace what recording needs. It can be repeated, also where it was cut short."""
    with ledger.lock:
        _recorders.complete()
        if not tagging:
            enable_isolation()
            autograd.announce_custom_nodes(_tag_custom_node)
            autograd.around_scripts(_call_and_tag)
            autograd.around_checkpoints(_recompute_at_level)
            autograd.around_backward_passes(_run_pass_at_level)
            tagging.append(_covering)


def _recorder(name: str) -> Callable[..., Any]:
    """Return a kernel that runs an operator of a thread that records, and tags its nodes."""
    run: Any = None
    no_numbers: tuple[int, ...] = ()
    get_top, numbers = top.get, autograd.NUMBERS

    def record(*args: Any, **kwargs: Any) -> Any:
        nonlocal run, no_numbers
        entry = get_top()
        if (
            entry is None
            or not entry.key.covers_backward
            or running_node() is not None
            or (rank := entry.rank) >= ASKS_NOTHING
        ):  # else, in the usual case, there is nothing to search for
            rank = rank_to_record()
        if unfinished:
            tag_unfinished()
        if freed:
            free()
        try:
            _pass_recorders_by(True)
            if run is None:
                no_numbers = autograd.tensors_not_numbers(name)
                run = autograd.caller(name)  # after the other: threads look at this one
            if no_numbers:
                for operand in args:
                    if operand.__class__ in numbers:
                        args = autograd.undo_numbers(args, no_numbers)
                        break
            first = _next_node_number()
            outputs: Any = run(*args, **kwargs)
            recorded = _next_node_number() - first
            if recorded and rank != ASKS_NOTHING:
                if (
                    recorded == 1
                    and outputs.__class__ is torch.Tensor
                    and (node := outputs.grad_fn) is not None
                    and node._sequence_nr() == first
                ):
                    node.metadata.setdefault(TAG, rank)  # type: ignore[attr-defined]
                    if chance() < BREAKS:
                        break_chain(node)
                else:
                    _tag_recorded(outputs, args, first, rank)
            return outputs
        finally:
            _pass_recorders_by(False)
            if rank == ASKS_NOTHING and not is_needed():
                _record_operators(False)

    return hide(record)


def _tag_recorded(outputs: Any, inputs: Any, first: int, rank: int) -> None:
    """Tag the nodes that an operator has recorded, unless what it called has done so.

    Args:
        outputs: What it has returned.
        inputs: What it was given, and may have written to.
        first: The number of the first of the nodes.
        rank: The tag.
    """
    nodes = autograd.nodes_of(autograd.tensors_in(outputs) or autograd.tensors_in(inputs))
    # Numbers are each thread's own. Another thread's node that has one of these comes
    # after the node that it belongs to, which is nearer to the outputs; but for a
    # node that writes to a view, which hides another one inside of it.
    numbers = set(range(first, _next_node_number()))
    for node in nodes:  # and those that are added on the way
        if node is not None and (number := node._sequence_nr()) in numbers:
            numbers.remove(number)
            tag(node, rank)
            if numbers and not autograd.writes_to_view(node):
                nodes += [earlier for earlier, _ in node.next_functions]


def _tag_custom_node(node: Any) -> None:
    """Have the node of a custom function tagged."""
    rank = rank_to_record()
    if rank != ASKS_NOTHING:
        tag_soon(node, rank)


def _call_and_tag(script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what has nodes of its own, and tag them."""
    rank = rank_to_record()
    first = _next_node_number()
    outputs = script(*args, **kwargs)
    if rank != ASKS_NOTHING:
        _tag_recorded(outputs, args, first, rank)
    return outputs


def _recompute_at_level(prepare: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the function run again at the level of the call, whatever node needs its results."""
    rank = rank_to_record()
    return prepare(function if rank == ASKS_NOTHING else _in_scope(rank, function), *args, **kwargs)


def _run_pass_at_level(run: Callable[[], Any], records: bool) -> Any:
    """Run a backward pass, called inside a tagged node at the level of that node."""
    tag_unfinished()
    if tag_of_running_node() is not None:
        run = _in_scope(wanted_rank(), run)
    try:
        _record_operators(records)
        return run()
    finally:
        _record_operators(is_needed())


def _in_scope(rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(LEVELS[rank]):
            return function(*args, **kwargs)

    return run


_recorders = autograd.Recorders(_recorder)


hide_package()  # this module and others are imported late
