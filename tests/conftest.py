"""What every test gets: it must leave torch's flags and the ledger as they were.

With ``--isolated`` isolation is on for the whole run, which cannot be undone:
the tests in ``isolated/`` need it, and most others must pass with it as well.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import watch
from flags import state
from lowering import Xla, prepare

from precision_scope import disable_emulation, enable_isolation
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
    "test_imports.py",
    "test_isolation.py",
    "test_package.py",
    "test_processes.py",
    "test_ranks.py",
    "test_run.py",
    "test_typing.py",
    "test_weights.py",
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


@pytest.fixture
def plain_afterwards() -> Iterator[None]:
    """Leave no emulation on."""
    yield
    disable_emulation()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Fail the test that leaves a scope live or the float32 matmul state changed."""
    ledger.see_to_the_rest()  # the package's first use is not the test's
    before = state()
    yield
    ledger.applied.default_set = None  # later tests register backends, which would get it
    if ledger.live_scopes():
        gc.collect()
    assert ledger.live_scopes() == []
    assert state() == before


@pytest.fixture(scope="session")
def _torch_xla(tmp_path_factory: pytest.TempPathFactory) -> Xla:
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("before torch 2.9 products cannot be marked")
    os.environ.update(prepare(tmp_path_factory.mktemp("hlo")))
    import torch_xla  # noqa: F401, PLC0415 -- late, for the tests that need it

    return Xla()


@pytest.fixture
def xla(_torch_xla: Xla) -> Iterator[Xla]:
    """Begin with nothing recorded; fail the test that leaves torch_xla's setting changed."""
    _torch_xla.module.sync()
    _torch_xla.compiled()
    before = _torch_xla.setting()
    yield _torch_xla
    assert _torch_xla.setting() == before
