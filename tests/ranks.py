"""Groups of processes of torch.distributed, in which ``test_ranks.py`` has the ranks verified.

``python ranks.py FOLDER`` writes to ``found.json`` there, for each size of the
group and each check, what verify_ranks() said on each rank; and whether
importing the package had imported precision_scope.distributed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from flags import HAS_CELLS, reset
from torch.multiprocessing.spawn import start_processes

from precision_scope import (
    PrecisionScopeError,
    disable_emulation,
    enable_emulation,
    enable_isolation,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope.backends import Backend, register_backend, unregister_backend

SIZES = (4, 2)


def said(group: dist.ProcessGroup | None = None) -> str | None:
    """Return what verify_ranks() raises; None for nothing."""
    from precision_scope.distributed import verify_ranks  # noqa: PLC0415 -- main() looks who imports it

    try:
        verify_ranks(group)
    except PrecisionScopeError as error:
        return str(error)
    return None


# The checks. Each is called on every rank, and knows whether its own is the last one.


def untouched(_last: bool) -> str | None:
    """Verify what the processes started with."""
    return said()


def same_scope(_last: bool) -> str | None:
    """Verify in the same scope everywhere."""
    with matmul_precision("medium"):
        return said()


def other_scope(last: bool) -> str | None:
    """Verify in another scope on the last rank."""
    with matmul_precision("medium" if last else "high"):
        return said()


def other_default(last: bool) -> str | None:
    """Verify with another default there."""
    set_float32_matmul_precision("high" if last else "highest")
    return said()


def written_flag(last: bool) -> str | None:
    """Verify in the same scope, inside which other code has written to a flag of torch's there."""
    with matmul_precision("high"):
        if last:
            torch.backends.cuda.matmul.allow_tf32 = False
        return said()


def written_cell(last: bool) -> str | None:
    """Do the same with a cell of the newer API."""
    with matmul_precision("highest"):
        if last and HAS_CELLS:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        return said()


def environment(last: bool) -> str | None:
    """Verify with an environment variable set there."""
    if last:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    try:
        return said()
    finally:
        os.environ.pop("NVIDIA_TF32_OVERRIDE", None)


class Plugin(Backend):
    """A backend with one cell."""

    name = "plugin"

    def is_active(self) -> bool:
        return True

    def save(self) -> object:
        return None

    def apply(self, level: str, /) -> None: ...

    def restore(self, saved: object, /) -> None: ...

    def describe(self) -> dict[str, str]:
        return {"cell": "on"}


def plugin(last: bool) -> str | None:
    """Verify with a backend there that the others have not."""
    if last:
        register_backend(Plugin())
    try:
        return said()
    finally:
        if last:
            unregister_backend("plugin")


def first_differs(_last: bool) -> str | None:
    """Verify in a scope everywhere but on the first rank."""
    with matmul_precision(None if dist.get_rank() == 0 else "medium"):
        return said()


def all_but_first(last: bool) -> str | None:
    """Verify all ranks but the first, the last in another scope."""
    with matmul_precision("medium" if last else "high"):
        return said(OTHERS[0])


def all_but_first_alike(_last: bool) -> str | None:
    """Verify all ranks but the first, which alone is in another scope."""
    with matmul_precision("medium" if dist.get_rank() == 0 else "high"):
        return said(OTHERS[0])


def convolutions(last: bool) -> str | None:
    """Verify with the flag of convolutions another one there."""
    torch.backends.cudnn.allow_tf32 = not last
    return said()


def isolation(last: bool) -> str | None:
    """Verify with isolation on there."""
    if last:
        enable_isolation()
    return said()


def emulation(last: bool) -> str | None:
    """Verify with emulation on there; isolation is on everywhere."""
    enable_isolation()
    if last:
        enable_emulation("cuda")
    try:
        return said()
    finally:
        disable_emulation()


CHECKS: tuple[Callable[[bool], str | None], ...] = (
    untouched,
    same_scope,
    other_scope,
    other_default,
    written_flag,
    written_cell,
    environment,
    plugin,
    first_differs,
    all_but_first,
    all_but_first_alike,
    convolutions,  # this and the next ones cannot be undone
    isolation,
    emulation,
)

OTHERS: list[dist.ProcessGroup] = []  # the group of all ranks but the first


def run(rank: int, size: int, folder: str) -> None:
    """Make all checks as one rank; the first writes down what each said on each rank."""
    torch.set_num_threads(1)
    meet = Path(folder, f"meet{size}").as_uri()
    dist.init_process_group("gloo", meet, timedelta(seconds=60), rank=rank, world_size=size)
    OTHERS.append(dist.new_group(list(range(1, size))))
    found: dict[str, list[str | None]] = {}
    for check in CHECKS:
        reset()
        everywhere: list[str | None] = [None] * size
        dist.all_gather_object(everywhere, check(rank == size - 1))
        found[check.__name__] = everywhere
    if rank == 0:
        Path(folder, f"{size}.json").write_text(json.dumps(found), encoding="utf-8")
    # The process ends with its group: on torch 2.4, destroy_process_group() sometimes hangs.


def main(folder: str) -> None:
    """Run a group of each size, and put together what their first ranks wrote down."""
    found: dict[str, object] = {"imported": "precision_scope.distributed" in sys.modules}
    method = "fork" if sys.platform == "linux" else "spawn"  # forked, they need not import torch again
    for size in SIZES:
        start_processes(run, (size, folder), size, start_method=method)
        found[str(size)] = json.loads(Path(folder, f"{size}.json").read_text(encoding="utf-8"))
    Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
