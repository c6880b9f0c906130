"""What every test gets: it must leave torch's flags and the ledger as they were.

With ``--isolated`` isolation is on for the whole run, which cannot be undone:
the tests in ``isolated/`` need it, and most others must pass with it as well.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import watch
from flags import state

from precision_scope import enable_isolation
from precision_scope._ledger import ledger

# Isolation changes what these test (conflicts), or nothing in it, or they take long.
NOT_ISOLATED = (
    "test_command_line.py",
    "test_compile_inside.py",
    "test_conflicts.py",
    "test_covering_scopes.py",
    "test_documentation.py",
    "test_dynamo.py",
    "test_examples.py",
    "test_isolation.py",
    "test_processes.py",
    "test_typing.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--isolated", action="store_true", help="run with isolation on")


def pytest_configure(config: pytest.Config) -> None:
    """Turn isolation on, with every product under watch."""
    if config.getoption("--isolated"):
        watch.install()
        enable_isolation()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what does not go with the option."""
    if config.getoption("--isolated"):
        return True if collection_path.name in NOT_ISOLATED else None
    return True if collection_path.name == "isolated" else None


@pytest.fixture
def uninterrupted_collections() -> Iterator[None]:
    """Set callbacks of the garbage collector aside: hypothesis has one, which would swallow interrupts."""
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture
def without_compiled_code() -> Iterator[None]:
    """Begin and end without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Fail the test that leaves a scope live or the float32 matmul state changed."""
    before = state()
    yield
    if ledger.live_scopes():
        gc.collect()
    assert ledger.live_scopes() == []
    assert state() == before
