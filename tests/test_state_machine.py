"""Random programs of scopes, sets, foreign writes, exceptions and exits in any order.

The oracle below knows what must be true and nothing of how the package does it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from flags import HAS_CELLS, State, reset, state
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from precision_scope import (
    Float32MatmulPrecision,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)

NAMES = ["highest", "high", "medium"]
LEVELS = st.sampled_from([*NAMES, *Float32MatmulPrecision])
WRITES = st.sampled_from(
    [
        *(("legacy", name) for name in NAMES),
        ("allow_tf32", "True"),
        ("allow_tf32", "False"),
        *(
            (cell, value)
            for cell in ("generic.all", "cuda.all", "mkldnn.all", "cuda.matmul", "mkldnn.matmul")
            for value in ("none", "ieee", "tf32")
            if HAS_CELLS
        ),
    ]
)


def write(name: str, value: str) -> None:
    """Change torch's flags behind the package's back."""
    if name == "legacy":
        torch.set_float32_matmul_precision(value)
    elif name == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = value == "True"
    else:
        backend, operator = name.split(".")
        torch._C._set_fp32_precision_setter(backend, operator, value)


class Scope:
    """The oracle's idea of an entered scope."""

    def __init__(self, level: str | None) -> None:
        self.real = matmul_precision(level)
        self.level = level


class Scopes(RuleBasedStateMachine):
    """One thread that enters and leaves scopes in any order."""

    def __init__(self) -> None:
        super().__init__()
        reset()
        self.entered: list[Scope] = []
        self.before: State | None = None  # what must come back
        self.default: str | None = None  # the next one, if it was set meanwhile
        self.undisturbed = True

    def wanted(self) -> str | None:
        """Return the level of the innermost scope that asks for one."""
        return next((scope.level for scope in reversed(self.entered) if scope.level), None)

    def asked(self, was: str | None) -> None:
        """Follow what entering, leaving or setting does to the flags."""
        if self.wanted() is None and was is not None:
            assert state() == self.before
        if self.wanted() is None:
            self.before = None
        self.undisturbed = True

    @rule(level=LEVELS | st.none())
    def enter(self, level: str | None) -> None:
        was = self.wanted()
        if level is not None and was is None:
            self.before = state()
        scope = Scope(level)
        scope.real.__enter__()
        self.entered.append(scope)
        if level is not None:
            self.asked(was)

    @rule(level=LEVELS)
    def block(self, level: str) -> None:
        was = self.wanted()
        before = state()
        with matmul_precision(level):
            assert torch.get_float32_matmul_precision() == level
        if was is None:
            assert state() == before
        self.undisturbed = True

    @precondition(lambda self: self.entered)
    @rule(data=st.data(), error=st.sampled_from([None, ValueError("body"), KeyboardInterrupt()]))
    def leave(self, data: st.DataObject, error: BaseException | None) -> None:
        was = self.wanted()
        scope = data.draw(st.sampled_from(self.entered))
        self.entered.remove(scope)
        scope.real.__exit__(None if error is None else type(error), error, None)
        if scope.level is not None:
            self.asked(was)

    @rule(level=LEVELS)
    def set(self, level: str) -> None:
        if self.entered:
            was = self.wanted()
            if was is None:
                self.before = state()
            self.entered[-1].level = level
            set_float32_matmul_precision(level)
            self.asked(was)
        else:
            set_float32_matmul_precision(level)
            assert torch.get_float32_matmul_precision() == level

    @rule(write_=WRITES)
    def somebody_writes(self, write_: tuple[str, str]) -> None:
        write(*write_)
        self.undisturbed = False

    @rule()
    def compile_like_reader(self) -> None:
        """Do what Dynamo does: pin a cell to its reading."""
        if HAS_CELLS:
            write("cuda.matmul", torch._C._get_fp32_precision_getter("cuda", "matmul"))
            self.undisturbed = False

    @invariant()
    def the_innermost_scope_decides(self) -> None:
        wanted = self.wanted()
        level = get_float32_matmul_precision()
        assert isinstance(level, Float32MatmulPrecision)
        if wanted is not None:
            assert level == wanted
            if self.undisturbed:
                assert torch.get_float32_matmul_precision() == wanted

    def teardown(self) -> None:
        for scope in reversed(self.entered):
            scope.real.__exit__(None, None, None)
        if self.before is not None:
            assert state() == self.before
        reset()


TestScopes = Scopes.TestCase
TestScopes.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


# (level, fails, writes inside, programs inside)
Program: TypeAlias = "list[tuple[str, bool, list[tuple[str, str]], Any]]"
PROGRAMS: st.SearchStrategy[Program] = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(LEVELS, st.booleans(), st.lists(WRITES, max_size=2), inner), max_size=3),
    max_leaves=8,
)


def run(program: Program) -> list[str]:
    """Run nested scopes with writes and exceptions inside; return the levels seen."""
    seen = []
    for level, fails, writes, inner in program:
        try:
            with matmul_precision(level):
                seen.append(torch.get_float32_matmul_precision())
                for name, value in writes:
                    write(name, value)
                seen += run(inner)
                if fails:
                    raise LookupError
        except LookupError:
            assert fails
    return seen


@settings(max_examples=200, deadline=None)
@given(before=st.lists(WRITES, max_size=4), program=PROGRAMS)
def test_the_state_is_always_restored(before: list[tuple[str, str]], program: Program) -> None:
    """Whatever was set before and happens inside, the state afterwards is that from before."""
    reset()
    for name, value in before:
        write(name, value)
    was = state()
    run(program)
    assert state() == was
    reset()


@settings(max_examples=100, deadline=None)
@given(levels=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5))
def test_strings_and_enum_values_are_equivalent(levels: list[str]) -> None:
    """A nest of scopes does the same, whether strings or members name the levels."""

    def nest(names: list[str]) -> list[tuple[str, State]]:
        if not names:
            return []
        with matmul_precision(names[0]):
            return [(get_float32_matmul_precision(), state()), *nest(names[1:])]

    assert nest(levels) == nest([Float32MatmulPrecision(name) for name in levels])
