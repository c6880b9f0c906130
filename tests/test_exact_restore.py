"""Rule 7: when the last scope ends, torch's float32 matmul state is what it was.

By brute force: random states, written through both of torch's APIs; random
nests of scopes with other people's writes and exceptions inside; then every
getter, and every getter again after each of some later writes to the parent
cells. A twin process does the same without any scope and must see the same.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest
import torch
from flags import HAS_CELLS, State, reset, state

from precision_scope import _torch_api, matmul_precision
from precision_scope.backends._torch import TorchCells

Write: TypeAlias = "tuple[str, str]"

LEVELS = ["highest", "high", "medium"]

# Each name is a way to write that torch documents; the value goes with it.
SETTERS: dict[str, Callable[[str], object]] = {
    "legacy": torch.set_float32_matmul_precision,
    "allow_tf32": lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value == "True"),
}
CELL_SETTERS: dict[str, Callable[[str], object]] = {
    "generic": lambda value: setattr(torch.backends, "fp32_precision", value),
    "cuda.matmul": lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
    "mkldnn.matmul": lambda value: setattr(
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        "fp32_precision",
        value,
    ),
    "cuda.all": lambda value: setattr(torch.backends.cudnn, "fp32_precision", value),
    "mkldnn.all": lambda value: torch._C._set_fp32_precision_setter("mkldnn", "all", value),
}
VALUES = {"legacy": LEVELS, "allow_tf32": ["True", "False"]}
if HAS_CELLS:
    SETTERS |= CELL_SETTERS
    VALUES |= {name: ["none", "ieee", "tf32", "bf16"] for name in CELL_SETTERS}
    VALUES["cuda.matmul"] = VALUES["cuda.all"] = ["none", "ieee", "tf32"]
PARENTS = [name for name in SETTERS if name in ("generic", "cuda.all", "mkldnn.all")]
CONVOLUTIONS = (
    {"cuda.conv": ["ieee", "tf32"], "mkldnn.conv": ["none", "ieee", "tf32", "bf16"]} if HAS_CELLS else {}
)


def write(name: str, value: str) -> None:
    """Write through one of torch's APIs."""
    if name in SETTERS:
        SETTERS[name](value)
    else:
        backend, operator = name.split(".")
        torch._C._set_fp32_precision_setter(backend, operator, value)


def random_writes(rng: random.Random, most: int, names: list[str]) -> list[Write]:
    """Return up to ``most`` random writes."""
    chosen = rng.choices(names, k=rng.randrange(most + 1)) if names else []
    return [(name, rng.choice((VALUES | CONVOLUTIONS)[name])) for name in chosen]


class Program:
    """A random program: writes before, scopes with writes inside, writes after."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.before = random_writes(self.rng, 5, [*SETTERS, *CONVOLUTIONS])
        self.after = random_writes(self.rng, 4, PARENTS)

    def run(self, *, scopes: bool) -> list[State]:
        """Return what every getter says, at the end and after each later write."""
        for name, value in self.before:
            write(name, value)
        if scopes:
            for _ in range(self.rng.randrange(1, 3)):
                self._enter(depth=0)
        seen = [state()]
        for name, value in self.after:
            write(name, value)
            seen.append(state())
        return seen

    def _enter(self, depth: int) -> None:
        level = self.rng.choice(LEVELS)
        fails = self.rng.random() < 0.3
        try:
            with matmul_precision(level):
                assert torch.get_float32_matmul_precision() == level
                for _ in range(self.rng.randrange(3)):
                    for name, value in random_writes(self.rng, 2, list(SETTERS)):
                        write(name, value)
                    if depth < 3:
                        self._enter(depth + 1)
                        assert torch.get_float32_matmul_precision() == level
                if fails:
                    raise LookupError
        except LookupError:
            assert fails


def in_a_child(work: Callable[[], list[State]]) -> list[State]:
    """Return what ``work`` returns in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover -- measured in this process only
        try:
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps([{"error": repr(error)}])
        with os.fdopen(writing, "w") as stream:
            stream.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return list(json.loads(answer))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the twin processes are forked")
@pytest.mark.parametrize("block", range(10))
def test_a_twin_process_that_saw_no_scope_has_the_same_state(block: int) -> None:
    """Hundreds of random programs leave what their twins without scopes have."""
    for seed in range(block * 40, block * 40 + 40):
        seen = in_a_child(partial(Program(seed).run, scopes=True))
        expected = in_a_child(partial(Program(seed).run, scopes=False))
        assert seen == expected, f"program {seed}: {Program(seed).before} then {Program(seed).after}"


@pytest.mark.skipif(not HAS_CELLS, reason="torch has cells from 2.9 on")
@pytest.mark.parametrize("level", ["highest", "high", "medium"])
@pytest.mark.parametrize("asks", [_torch_api.is_not_highest, _torch_api._compare_with_highest])
def test_cells_that_inherit_are_saved_without_writing_to_them(
    level: str, asks: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the legacy value is, and where asking for allow_tf32 does not tell."""
    torch.set_float32_matmul_precision(level)
    write("cuda.matmul", "none")
    write("mkldnn.matmul", "none")
    monkeypatch.setattr(_torch_api, "is_not_highest", asks)
    with monkeypatch.context() as patch:
        patch.setattr(TorchCells, "_save_by_borrowing", None)
        saved = TorchCells().save()
    reset()
    assert saved == (level, "none", "none", "none", "none", None)
