"""What every test gets: it must leave torch's flags and the ledger as they were."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from flags import state

from precision_scope._ledger import ledger


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Fail the test that leaves a scope live or the float32 matmul state changed."""
    before = state()
    yield
    if ledger.live_scopes():
        gc.collect()
    assert ledger.live_scopes() == []
    assert state() == before
