"""Rule 30: ranks of a distributed program that differ in their precision are named, on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flags import HAS_CELLS
from ranks import SIZES

from precision_scope import PrecisionScopeError
from precision_scope._report import OVERRIDES
from precision_scope.distributed import _compare, _name, verify_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what was said in groups of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("ranks.py"), folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name not in OVERRIDES},
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def one_message(said: list[str | None]) -> str:
    """Return what was said on every rank."""
    (message,) = set(said)
    assert message is not None
    return message


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", ["untouched", "same_scope", "convolutions"])
def test_ranks_that_agree_are_no_error(groups: dict[str, Any], check: str, size: int) -> None:
    """Not at the start, not in equal scopes, and not where the settings of convolutions alone differ."""
    assert groups[str(size)][check] == [None] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("check", "differences"),
    [
        ("other_scope", ["wanted is 'medium', not 'high'", "applied is 'medium', not 'high'"]),
        ("other_default", ["default is 'high', not 'highest'"]),
        ("written_flag", ["torch's float32_matmul_precision is "]),
        pytest.param(
            "written_cell",
            ["torch's mkldnn.matmul.fp32_precision is 'bf16', not 'ieee'"],
            marks=pytest.mark.skipif(not HAS_CELLS, reason="torch has cells from 2.9 on"),
        ),
        ("environment", ["NVIDIA_TF32_OVERRIDE is '0', not unset"]),
        ("plugin", ["plugin's cell is 'on', not unset"]),
        ("isolation", ["isolation is 'on', not 'off'"]),
        ("emulation", ["emulation is 'cuda', not 'off'"]),
    ],
)
def test_every_rank_is_told_which_differs_and_in_what(
    groups: dict[str, Any], check: str, differences: list[str], size: int
) -> None:
    """The rank that differs is named on all, itself included, with what the others have."""
    first, second = one_message(groups[str(size)][check]).splitlines()
    assert first == (
        "the float32 matmul precision is not the same on all ranks; these differ from "
        + {4: "ranks 0-2:", 2: "rank 0:"}[size]
    )
    name, _, said = second.partition(": ")
    assert name == f"  rank {size - 1}"
    for difference in differences:
        assert difference in said


def test_the_first_rank_is_named_if_it_is_the_one_that_differs(groups: dict[str, Any]) -> None:
    """The state that most ranks have counts, whoever has it."""
    first, second = one_message(groups["4"]["first_differs"]).splitlines()
    assert first.endswith("differ from ranks 1-3:")
    assert second.startswith("  rank 0: wanted is 'highest', not 'medium'")


def test_ranks_of_a_group_have_their_global_numbers(groups: dict[str, Any]) -> None:
    """A subgroup compares its own ranks; the process outside is not checked."""
    outside, *said = groups["4"]["all_but_first"]
    assert outside is None
    first, second = one_message(said).splitlines()
    assert first.endswith("differ from ranks 1-2:")
    assert second.startswith("  rank 3: wanted is 'medium', not 'high'")


@pytest.mark.parametrize("size", SIZES)
def test_ranks_outside_the_group_do_not_count(groups: dict[str, Any], size: int) -> None:
    """Nobody in the group differs from a process outside."""
    assert groups[str(size)]["all_but_first_alike"] == [None] * size


def test_importing_the_package_does_not_import_this_module(groups: dict[str, Any]) -> None:
    """Only those who verify ranks import it."""
    assert groups["imported"] is False


# In this process.


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    """It is another error than that of ranks that differ."""
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group\(\)") as raised:
        verify_ranks()
    assert not isinstance(raised.value, PrecisionScopeError)


def test_a_torch_without_distributed_gives_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a torch has nothing in torch.distributed to ask."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "is_initialized")
    with pytest.raises(RuntimeError, match="init_process_group"):
        verify_ranks()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Have this process be the only rank."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed replaces it for good
    dist.init_process_group("gloo", Path(tmp_path, "meet").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_outside_the_group_sends_nothing(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns at once."""
    monkeypatch.delattr(dist, "all_gather_object")
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    verify_ranks(outside)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("without_compiled_code")
def test_ranks_can_be_verified_in_a_compiled_function(one_rank: None) -> None:
    """Dynamo traces nothing of it."""

    @torch.compile(backend="eager")
    def add(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        verify_ranks()
        return x + 1

    assert add(torch.zeros(2)).tolist() == [2, 2]


# What is said, without processes.


def message_of(states: dict[int, dict[str, str]]) -> str:
    """Return the message of ranks that differ."""
    with pytest.raises(PrecisionScopeError) as raised:
        _compare(states)
    assert raised.value.backends == ()
    return str(raised.value)


def states_of(levels: str) -> dict[int, dict[str, str]]:
    """Return states that differ in one value, a letter for each rank."""
    return {rank: {"wanted": level} for rank, level in enumerate(levels)}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([5], "rank 5"),
        ([0, 1], "ranks 0-1"),
        ([3, 4, 5, 6, 7], "ranks 3-7"),
        ([0, 2, 3, 9, 10, 11, 20], "ranks 0, 2-3, 9-11, 20"),
        (range(0, 24, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22"),
        ([*range(0, 24, 2), 30, 31, 40], "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 3 more"),
    ],
)
def test_ranks_that_follow_one_another_are_named_as_one_run(ranks: list[int], name: str) -> None:
    """Of very many runs the first are named, and the others counted."""
    assert _name(list(ranks)) == name


@pytest.mark.parametrize(
    ("levels", "most", "differing"),
    [
        ("aaba", "ranks 0-1, 3", ["  rank 2: wanted is 'b', not 'a'"]),
        ("abbb", "ranks 1-3", ["  rank 0: wanted is 'a', not 'b'"]),
        ("ab", "rank 0", ["  rank 1: wanted is 'b', not 'a'"]),
        ("abba", "ranks 0, 3", ["  ranks 1-2: wanted is 'b', not 'a'"]),
        ("cabba", "ranks 1, 4", ["  ranks 2-3: wanted is 'b', not 'a'", "  rank 0: wanted is 'c', not 'a'"]),
    ],
)
def test_ranks_are_compared_with_the_state_that_most_have(
    levels: str, most: str, differing: list[str]
) -> None:
    """Where several are as frequent, with that of the lowest rank."""
    first, *others = message_of(states_of(levels)).splitlines()
    assert first.endswith(f"these differ from {most}:")
    assert others == differing


def test_the_lowest_rank_counts_in_whichever_order_a_group_has_them() -> None:
    """The ranks of a group need not ascend."""
    message = message_of({7: {"wanted": "b"}, 2: {"wanted": "a"}})
    assert message.endswith("differ from rank 2:\n  rank 7: wanted is 'b', not 'a'")


def test_only_what_differs_is_told() -> None:
    """A value that a rank has not is unset, on either side; the order of values is nothing."""
    states = {
        0: {"a": "1", "b": "1", "c": "1"},
        1: {"d": "2", "b": "2", "a": "1"},
        2: {"c": "1", "b": "1", "a": "1"},
    }
    assert message_of(states).splitlines()[1:] == [
        "  rank 1: b is '2', not '1'; c is unset, not '1'; d is '2', not unset"
    ]


@pytest.mark.parametrize(
    "levels",
    [
        "ab" * 500,
        "abcde" * 200,
        [str(rank) for rank in range(1000)],
        [str(rank % 77) for rank in range(1000)],
        "a" * 500 + "b" * 500,
    ],
    ids=["two", "five", "each its own", "many", "halves"],
)
def test_the_message_can_be_read_with_a_thousand_ranks(levels: str | list[str]) -> None:
    """It is a few lines of moderate length, however the ranks differ."""
    lines = message_of({rank: {"wanted": level} for rank, level in enumerate(levels)}).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 160


def test_states_beyond_the_first_are_named_together() -> None:
    """No rank that differs goes without mention."""
    lines = message_of({rank: {"wanted": str(rank)} for rank in range(1000)}).splitlines()
    assert lines[1] == "  rank 1: wanted is '1', not '0'"
    assert lines[-1] == "  ranks 9-999: in other ways"
