"""The report says what is wanted and applied, and what it is like inside."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from flags import HAS_CELLS, state

from precision_scope import Float32MatmulPrecision, matmul_precision, report
from precision_scope._ledger import ledger
from precision_scope.backends import Backend, register_backend, unregister_backend
from precision_scope.backends._torch import TORCH_FLAGS, TorchFlags

if TYPE_CHECKING:
    from collections.abc import Generator

    from precision_scope._report import Report

LEVELS = list(Float32MatmulPrecision)
BACKENDS: list[Any] = [torch.backends.cuda, torch.backends.mkldnn]
OVERRIDES = [
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "HIPBLASLT_ALLOW_TF32",
    "XLA_USE_BF16",
]

needs_cells = pytest.mark.skipif(not HAS_CELLS, reason="this torch has only the legacy value")


class Plugin(Backend):
    """A backend with one cell."""

    def __init__(self, name: str = "plug-in", *, active: bool = True) -> None:
        """Make one that is in use or not."""
        self.name = name
        self.active = active
        self.level = "unset"

    def is_active(self) -> bool:
        """Tell whether it is in use."""
        return self.active

    def save(self) -> object:
        """Return the level."""
        return self.level

    def apply(self, level: Float32MatmulPrecision, /) -> None:
        """Set the level."""
        self.level = str(level)

    def restore(self, saved: object, /) -> None:
        """Set the level back."""
        self.level = str(saved)

    def describe(self) -> dict[str, str]:
        """Return the level."""
        return {"level": self.level}


@contextmanager
def registered(backend: Backend) -> Generator[None, None, None]:
    """Register a backend for the duration of a block."""
    register_backend(backend)
    try:
        yield
    finally:
        unregister_backend(backend.name)


@pytest.fixture
def restored_flags() -> Generator[None, None, None]:
    """Put torch's flags back as they were after a test that writes to them outside scopes."""
    saved = TORCH_FLAGS.save()
    yield
    TORCH_FLAGS.restore(saved)


def others_can_go_on() -> bool:
    """Tell whether another thread can get the ledger's lock now."""
    answers: list[bool] = []

    def try_it() -> None:
        answers.append(ledger.lock.acquire(blocking=False))
        if answers[0]:
            ledger.lock.release()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return answers[0]


@contextmanager
def scope_in_a_thread(level: Float32MatmulPrecision, name: str) -> Generator[None, None, None]:
    """Keep a scope live in another thread for the duration of a block."""
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with matmul_precision(level):
            entered.set()
            leave.wait(timeout=30)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        assert entered.wait(timeout=30)
        yield
    finally:
        leave.set()
        thread.join()


# Wanted, applied, default.


@pytest.mark.usefixtures("restored_flags")
@pytest.mark.parametrize("level", LEVELS)
def test_outside_scopes_everything_is_the_default(level: Float32MatmulPrecision) -> None:
    """Where no scope is live, wanted and applied are the process default."""
    torch.set_float32_matmul_precision(level)
    found = report()
    assert (found.wanted, found.applied, found.default) == (level, level, level)


def test_the_levels_are_members() -> None:
    """The levels of a record are members of the enum, not plain strings."""
    with matmul_precision("high"):
        found = report()
    levels = [found.wanted, found.applied, found.default, found.scopes[0].level]
    assert [type(level) for level in levels] == [Float32MatmulPrecision] * 4


@pytest.mark.usefixtures("restored_flags")
def test_inside_a_scope_the_default_stays_that_of_the_process() -> None:
    """The default is the level in force outside, the other two are the scope's."""
    torch.set_float32_matmul_precision("high")
    with matmul_precision("medium"):
        found = report()
    assert (found.wanted, found.applied, found.default) == ("medium", "medium", "high")


def test_what_another_thread_makes_applied_is_not_wanted_here() -> None:
    """A scope of another thread shows as applied, and leaves what is wanted alone."""
    with scope_in_a_thread(Float32MatmulPrecision.MEDIUM, "other"):
        found = report()
    assert (found.wanted, found.applied) == ("highest", "medium")


# Scopes.


def test_scopes_stand_in_the_order_of_entering() -> None:
    """Every live scope is listed with its level, the outermost first."""
    with matmul_precision("medium"), matmul_precision("highest"), matmul_precision("high"):
        found = report()
    assert [scope.level for scope in found.scopes] == ["medium", "highest", "high"]


def test_a_scope_that_has_ended_is_not_listed() -> None:
    """Only live scopes are listed."""
    with matmul_precision("high"):
        assert report().scopes != ()
    assert report().scopes == ()


def test_a_scope_names_its_thread() -> None:
    """A scope of another thread is listed with the name of that thread and no task."""
    with scope_in_a_thread(Float32MatmulPrecision.HIGH, "trainer"):
        (scope,) = report().scopes
    assert (scope.thread, scope.task) == ("trainer", None)


def test_a_scope_names_its_task() -> None:
    """A scope entered in an asyncio task is listed with the names of thread and task."""

    async def main() -> Report:
        with matmul_precision("high"):
            return report()

    async def named() -> Report:
        return await asyncio.create_task(main(), name="evaluator")

    (scope,) = asyncio.run(named()).scopes
    assert (scope.thread, scope.task) == (threading.current_thread().name, "evaluator")


# Backends.


def test_cells_are_what_torch_reads() -> None:
    """Cell by cell, torch's settings are shown as its getters read them."""
    with matmul_precision("medium"):
        cells = report().backends["torch"]
    assert cells["float32_matmul_precision"] == "medium"
    if HAS_CELLS:
        assert cells["cuda.matmul.fp32_precision"] == "tf32"
        assert cells["mkldnn.matmul.fp32_precision"] == "bf16"


def test_cells_of_convolutions_and_rnns_are_shown() -> None:
    """The settings that convolutions and RNNs follow are among torch's cells."""
    cells = report().backends["torch"]
    named = {cell: cells[cell] for cell in TORCH_FLAGS.convolution_and_rnn_cells}
    now = state()
    if HAS_CELLS:
        names = [f"{backend}.{operator}" for backend in ("cuda", "mkldnn") for operator in ("conv", "rnn")]
        assert named == {f"{name}.fp32_precision": now[name] for name in names}
    else:
        assert named == {"cudnn.allow_tf32": now["cudnn.allow_tf32"]}


def test_an_active_plug_in_shows_its_cells() -> None:
    """A registered backend that is in use is shown as it describes itself."""
    with registered(Plugin()), matmul_precision("high"):
        assert report().backends["plug-in"] == {"level": "high"}


def test_an_inactive_plug_in_is_not_shown() -> None:
    """A registered backend that is not in use is left out."""
    with registered(Plugin(active=False)):
        assert list(report().backends) == ["torch"]


def test_a_backend_that_fails_to_describe_itself_shows_its_error() -> None:
    """A failing describe() becomes the backend's only cell; the others are whole."""

    class Broken(Plugin):
        def describe(self) -> dict[str, str]:
            raise LookupError("no such register")

    with registered(Broken("broken")), registered(Plugin()):
        found = report().backends
    assert found["broken"] == {"error": "LookupError: no such register"}
    assert found["plug-in"] == {"level": "unset"}


def test_a_backend_that_fails_to_tell_whether_it_is_active_shows_its_error() -> None:
    """A failing is_active() becomes the backend's only cell."""

    class Broken(Plugin):
        def is_active(self) -> bool:
            raise OSError("driver is gone")

    with registered(Broken("broken")):
        assert report().backends["broken"] == {"error": "OSError: driver is gone"}


def test_a_backend_that_describes_itself_in_other_types_is_shown_in_strings() -> None:
    """Names and values that are no strings are shown as strings."""

    class Sloppy(Plugin):
        def describe(self) -> dict[str, str]:
            return {"tf32": True, 3: None}  # type: ignore[dict-item]  # on purpose

    with registered(Sloppy("sloppy")):
        assert report().backends["sloppy"] == {"tf32": "True", "3": "None"}


def test_a_backend_is_asked_while_no_other_thread_can_change_anything() -> None:
    """Backends are called one at a time, so no scope is entered elsewhere meanwhile."""
    seen: list[bool] = []

    class Watching(Plugin):
        def describe(self) -> dict[str, str]:
            seen.append(others_can_go_on())
            return {}

    with registered(Watching()):
        report()
    assert seen == [False]


def test_names_are_looked_up_while_other_threads_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of threading's are taken outside the ledger's, whose holder may wait for them."""
    seen: list[bool] = []
    enumerate_threads = threading.enumerate

    def watching() -> list[threading.Thread]:
        seen.append(others_can_go_on())
        return enumerate_threads()

    monkeypatch.setattr(threading, "enumerate", watching)
    with matmul_precision("high"):
        report()
    assert seen == [True]


# The environment.


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_is_set_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable that overrides the flags is shown with its value."""
    for other in OVERRIDES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "0")
    assert report().environment == {name: "0"}


# Other code's writes.


def test_flags_as_the_scope_set_them_are_not_changed_by_others() -> None:
    """At no level are a scope's own writes taken for somebody else's."""
    seen = []
    for level in LEVELS:
        with matmul_precision(level):
            seen.append(report().changed_by_others)
    assert seen == [False, False, False]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("other", LEVELS)
def test_another_level_set_inside_a_scope_is_noticed(
    level: Float32MatmulPrecision, other: Float32MatmulPrecision
) -> None:
    """Setting torch's legacy value to another level inside a scope shows, to the same one does not."""
    with matmul_precision(level):
        torch.set_float32_matmul_precision(other)
        assert report().changed_by_others == (other != level)


def test_allow_tf32_inside_a_scope_is_noticed() -> None:
    """The oldest of torch's settings shows as well."""
    with matmul_precision("highest"):
        torch.backends.cuda.matmul.allow_tf32 = True
        assert report().changed_by_others


@needs_cells
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_cell_written_inside_a_scope_is_noticed(level: Float32MatmulPrecision, backend: Any) -> None:
    """A write through torch's newer settings shows, also where its legacy getter does not see it."""
    with matmul_precision(level):
        backend.matmul.fp32_precision = "tf32" if level == "highest" else "ieee"
        assert report().changed_by_others


@needs_cells
@pytest.mark.parametrize("level", LEVELS)
def test_a_legacy_value_written_inside_a_scope_is_noticed(level: Float32MatmulPrecision) -> None:
    """A write to the legacy value shows, also where the cells have been put back."""
    cells = [backend.matmul for backend in BACKENDS]
    with matmul_precision(level):
        values = [cell.fp32_precision for cell in cells]
        torch.set_float32_matmul_precision("high" if level == "highest" else "highest")
        for cell, value in zip(cells, values, strict=True):
            cell.fp32_precision = value
        assert report().changed_by_others


def test_a_legacy_value_alone_is_compared_with_the_level() -> None:
    """On a torch without cells, the legacy value tells whether somebody wrote."""
    with matmul_precision("high"):
        answers = [TorchFlags().is_at(level) for level in LEVELS]
    assert answers == [False, True, False]


def test_a_scope_that_is_just_being_entered_is_not_somebody_else() -> None:
    """What runs in the middle of an entry, a signal handler for one, sees no write by others."""
    seen: list[bool] = []

    class Asking(Plugin):
        def save(self) -> object:
            seen.append(report().changed_by_others)
            return super().save()

    with registered(Asking()), matmul_precision("high"):
        pass
    assert seen == [False]


@pytest.mark.usefixtures("restored_flags")
def test_flags_set_outside_scopes_are_nobody_elses() -> None:
    """Without a live scope nothing counts as changed by others."""
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not report().changed_by_others


# Changing nothing, raising nothing.


@needs_cells
@pytest.mark.usefixtures("restored_flags")
def test_a_state_that_torch_itself_refuses_to_read_is_reported() -> None:
    """Where torch's legacy getter raises, the report names the level by what CUDA does."""
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]  # torch makes it at run time
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    found = report()
    assert found.wanted == "high"
    assert found.backends["torch"]["float32_matmul_precision"].startswith("unreadable")


@needs_cells
@pytest.mark.usefixtures("restored_flags")
def test_reporting_changes_nothing() -> None:
    """What every getter of torch says, errors included, is the same after a report."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    before = state()
    report()
    assert state() == before


def test_a_report_is_of_one_moment() -> None:
    """Scopes that another thread enters and leaves meanwhile are not taken for anybody's writes."""
    done = threading.Event()

    def enter_and_leave() -> None:
        while not done.is_set():
            with matmul_precision("high"), matmul_precision("medium"):
                pass

    class Slow(Plugin):
        def describe(self) -> dict[str, str]:
            time.sleep(0.001)
            return super().describe()

    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    try:
        with registered(Slow()):
            found = [report() for _ in range(20)]
    finally:
        done.set()
        thread.join()
    assert not any(record.changed_by_others for record in found)


# Backends that are at another level.


class Telling(Plugin):
    """One that says what its setting amounts to."""

    def current_level(self) -> Float32MatmulPrecision | None:
        """Return its level, if its setting is one."""
        return Float32MatmulPrecision(self.level) if self.level != "unset" else None


def test_a_backend_that_is_at_another_level_disagrees() -> None:
    """Because it came with that, or other code has changed it; one that does not say cannot."""
    telling, silent = Telling("telling"), Plugin("silent")
    with registered(telling), registered(silent):
        assert report().disagreeing == {}
        telling.level = silent.level = "medium"
        assert report().disagreeing == {"telling": "medium"}
        with matmul_precision("high"):
            assert report().disagreeing == {}
            telling.level = silent.level = "highest"
            assert report().disagreeing == {"telling": "highest"}
            assert report().to_dict()["disagreeing"] == {"telling": "highest"}
        assert report().disagreeing == {"telling": "medium"}


def test_torch_at_another_level_disagrees() -> None:
    """Inside a scope, where other code has set it."""
    with matmul_precision("high"):
        torch.set_float32_matmul_precision("medium")
        assert report().disagreeing == {"torch": "medium"}
        torch.set_float32_matmul_precision("high")
        assert report().disagreeing == {}


def test_a_backend_that_fails_to_tell_its_level_shows_its_error() -> None:
    """As if it had failed to describe itself; and so does one that tells no level."""

    class Broken(Plugin):
        def current_level(self) -> Float32MatmulPrecision | None:
            raise OSError("driver is gone")

    class Strange(Plugin):
        def current_level(self) -> Float32MatmulPrecision | None:
            return "fast"  # type: ignore[return-value]  # on purpose

    with registered(Broken("broken")), registered(Strange("strange")):
        found = report()
    assert found.backends["broken"] == {"error": "OSError: driver is gone"}
    assert "got 'fast'" in found.backends["strange"]["error"]
    assert found.disagreeing == {}


# The record.


def test_a_record_cannot_be_changed() -> None:
    """A record is of one moment."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().wanted = Float32MatmulPrecision.HIGH  # type: ignore[misc]  # on purpose


def test_a_record_as_json_has_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """to_dict() has all fields, as what JSON gives back."""
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with matmul_precision("high"):
        found = report()
    assert list(found.to_dict()) == [field.name for field in dataclasses.fields(found)]
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found.to_dict()["scopes"] == [
        {"level": "high", "thread": threading.current_thread().name, "task": None}
    ]
    assert found.to_dict()["environment"]["XLA_USE_BF16"] == "1"


def test_a_record_as_a_dict_has_plain_strings() -> None:
    """Levels in to_dict() are plain strings, which every serialiser takes."""
    with matmul_precision("high"):
        found = report().to_dict()
    levels = [found["wanted"], found["applied"], found["default"], found["scopes"][0]["level"]]
    assert [type(level) for level in levels] == [str] * 4


def test_a_changed_dict_leaves_the_record_alone() -> None:
    """to_dict() gives copies."""
    found = report()
    found.to_dict()["backends"]["torch"].clear()
    assert found.backends["torch"]


def test_isolation_is_shown(pytestconfig: pytest.Config) -> None:
    """Whether threads and tasks share one level."""
    assert report().isolation is pytestconfig.getoption("--isolated")
