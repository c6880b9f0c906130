"""Whether all ranks of a distributed program run at the same float32 matmul precision."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from precision_scope import PrecisionScopeError, report
from precision_scope._dynamo import hide
from precision_scope._ledger import ledger
from precision_scope.backends._torch import TORCH_FLAGS

__all__ = ["verify_ranks"]

# What one message shows at most, so that it can be read with a thousand ranks too.
_MOST_STATES = 8
_MOST_RUNS = 12


@hide
def verify_ranks(group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks want and have the same float32 matmul precision.

    Ranks that do not compute their products alike drift apart without an
    error. This is a collective call: every rank of the group makes it, at the
    same point of the program, and all get the same answer. What is compared is
    what :func:`~precision_scope.report` shows: the levels wanted, applied and in
    force by default, whether isolation is on, what is emulated, the backends'
    settings except torch's for convolutions and RNNs, and the environment variables
    that override them. Settings are compared as they read, so a rank whose torch
    was never set differs from one that was set to the default.

    Args:
        group: The ranks to compare; by default all. A process that is not one
            of them returns at once.

    Raises:
        PrecisionScopeError: On every rank, with the same message, if some
            differ. It names these by their global numbers, and says how each
            differs from the state that most have or, where several states are
            as frequent, from that of the lowest rank.
        RuntimeError: If there is no process group yet. Nothing has been sent.

    Example:
        >>> import torch.distributed as dist
        >>> from precision_scope.distributed import verify_ranks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> verify_ranks()
        >>> dist.destroy_process_group()

    The level wanted is that of the calling thread or task, and the one applied
    is the whole process's, so call it where no other thread enters or leaves
    scopes. It blocks its thread until all ranks have called; with NCCL, each
    has its own CUDA device current.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there are no ranks to compare yet: call torch.distributed.init_process_group() "
            "before verify_ranks()"
        )
    if dist.get_rank(group) < 0:
        return
    group = dist.group.WORLD if group is None else group
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, _state(), group)  # pyright: ignore[reportUnknownMemberType]
    _compare(dict(zip(dist.get_process_group_ranks(group), states, strict=True)))


def _state() -> dict[str, str]:
    """Return what is compared, as text."""
    with ledger.applied.torch_flags.at_rest():  # not as a product of another thread has them
        found = report()
    state = {
        "wanted": str(found.wanted),
        "applied": str(found.applied),
        "default": str(found.default),
        "isolation": "on" if found.isolation else "off",
        "emulation": found.emulation or "off",
    }
    for backend, cells in found.backends.items():
        for cell, value in cells.items():
            if backend != TORCH_FLAGS.name or cell not in TORCH_FLAGS.convolution_and_rnn_cells:
                state[f"{backend}'s {cell}"] = value
    return state | found.environment


def _compare(states: dict[int, dict[str, str]]) -> None:
    """Raise an error that says how states differ, which are given by their ranks."""
    alike: dict[frozenset[tuple[str, str]], list[int]] = {}
    for rank in sorted(states):
        alike.setdefault(frozenset(states[rank].items()), []).append(rank)
    most, *others = sorted(alike.values(), key=len, reverse=True)  # stable: the lowest rank's first
    if not others:
        return
    lines = [f"the float32 matmul precision is not the same on all ranks; these differ from {_name(most)}:"]
    lines += [
        f"  {_name(ranks)}: {_describe_difference(states[ranks[0]], states[most[0]])}"
        for ranks in others[:_MOST_STATES]
    ]
    rest = sorted(rank for ranks in others[_MOST_STATES:] for rank in ranks)
    if rest:
        lines.append(f"  {_name(rest)}: in other ways")
    raise PrecisionScopeError("\n".join(lines))


def _describe_difference(state: dict[str, str], usual: dict[str, str]) -> str:
    def value(of: dict[str, str], name: str) -> str:
        return repr(of[name]) if name in of else "unset"

    return "; ".join(
        f"{name} is {value(state, name)}, not {value(usual, name)}"
        for name in usual | state
        if state.get(name) != usual.get(name)
    )


def _name(ranks: list[int]) -> str:
    """Name ranks, which ascend, with a run of them as "3-7"."""
    runs: list[range] = []
    for rank in ranks:
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_MOST_RUNS]]
    more = sum(map(len, runs[_MOST_RUNS:]))
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(names)}{f' and {more} more' if more else ''}"
