"""Rules 24 and 25: installed backends, and when any backend may act."""

from __future__ import annotations

import builtins
import importlib
import importlib.metadata
import importlib.util
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from flags import reset

from precision_scope import (
    PrecisionScopeError,
    _imports,
    get_float32_matmul_precision,
    matmul_precision,
    report,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger
from precision_scope.backends import Backend, _registry, register_backend, unregister_backend
from precision_scope.backends._xla import Xla

# A simulator that somebody imports, and its maker's or another's backend for it.
SIMULATOR = """
level = "its own"
"""
PLUG_IN = """
import {simulator}
from precision_scope.backends import Backend

class Simulated(Backend):
    name = "{simulator}"

    def save(self):
        return {simulator}.level

    def apply(self, level):
        {simulator}.level = str(level)

    def restore(self, saved):
        {simulator}.level = saved

    def describe(self):
        return {{"level": {simulator}.level}}

backend = Simulated()
"""


class Installation:
    """A folder of modules and distributions, on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def module(self, name: str, text: str) -> None:
        """Install a module."""
        self.names.append(name)
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def entry_point(self, name: str, value: str) -> None:
        """Install a distribution with an entry point."""
        folder = self.folder / f"{name}_{value.replace(':', '_')}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[precision_scope.backends]\n{name} = {value}\n")

    def simulator(self, name: str, value: str = "Simulated") -> None:
        """Install a simulator and its plug-in."""
        self.module(name, SIMULATOR)
        self.module(f"{name}_backend", PLUG_IN.format(simulator=name))
        self.entry_point(name, f"{name}_backend:{value}")


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """Have the package look for backends when it is next used, as if for the first time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registry, "_discovered", [])
    ledger.see_to_the_rest()
    monkeypatch.setattr(_imports, "_waiting", dict(_imports._waiting))
    ledger.call_at_first_use(_registry._discover)
    made = Installation(tmp_path)
    before = [backend.name for backend in ledger.applied.backends]
    yield made
    ledger.at_first_use = None
    for backend in ledger.applied.backends:
        if backend.name not in before:
            unregister_backend(backend.name)
    for name in made.names:
        sys.modules.pop(name, None)


def level_of(name: str) -> str:
    """Return what a simulator is at, importing it."""
    return str(importlib.import_module(name).level)


@pytest.mark.parametrize("value", ["Simulated", "backend"])
def test_an_installed_backend_acts_when_its_module_has_been_imported(
    installation: Installation, value: str
) -> None:
    """At once, inside a scope, too; and the package imports neither."""
    installation.simulator("simulated_one", value)
    with matmul_precision("medium"):
        assert not any(name.startswith("simulated_one") for name in sys.modules)
        assert level_of("simulated_one") == "medium"
        with matmul_precision("high"):
            assert level_of("simulated_one") == "high"
    assert level_of("simulated_one") == "its own"


def test_its_module_has_been_imported_before(installation: Installation) -> None:
    """The first scope finds it."""
    installation.simulator("simulated_two")
    assert level_of("simulated_two") == "its own"
    with matmul_precision("medium"):
        assert level_of("simulated_two") == "medium"
    assert level_of("simulated_two") == "its own"


@pytest.mark.parametrize(
    "use",
    [report, lambda: set_float32_matmul_precision("highest")],
    ids=["report", "set"],
)
def test_any_first_use_finds_it(installation: Installation, use: Callable[[], object]) -> None:
    """Not only a scope."""
    installation.simulator("simulated_three")
    level_of("simulated_three")
    use()
    assert "simulated_three" in report().backends
    reset()


def test_one_that_is_broken_keeps_no_other_from_it(installation: Installation) -> None:
    """Each failure is one warning, which names the entry point and the error."""
    for name in ("broken_import", "broken_class", "broken_name", "broken_taken", "broken_missing"):
        installation.module(name, "")
    installation.module("plug_ins", "")
    installation.module("raising", "raise OSError('no driver')")
    installation.entry_point("broken_import", "raising:Simulated")
    installation.entry_point("broken_class", "plug_ins:__doc__")
    installation.entry_point("broken_name", "plug_ins:Nothing")
    installation.entry_point("broken_taken", "simulated_four_backend:Simulated")
    installation.entry_point("broken_missing", "nowhere.at_all:Simulated")
    installation.simulator("simulated_four")
    with warnings.catch_warnings(record=True) as caught, matmul_precision("medium"):
        warnings.simplefilter("always")
        assert level_of("simulated_four") == "medium"
        for name in ("broken_import", "broken_class", "broken_name", "broken_taken", "broken_missing"):
            importlib.import_module(name)
    messages = [str(warning.message) for warning in caught]
    assert [message.split(" = ")[0].rpartition(" ")[2] for message in messages] == [
        "broken_import",
        "broken_class",
        "broken_name",
        "broken_taken",
        "broken_missing",
    ]
    assert "OSError('no driver')" in messages[0]
    assert "'simulated_four' is registered" in messages[3]
    assert level_of("simulated_four") == "its own"


def test_that_warning_as_an_error(installation: Installation) -> None:
    """Entry fails cleanly, and the next one goes on to the others."""
    installation.module("a_broken_one", "")
    installation.entry_point("a_broken_one", "nowhere.at_all:Simulated")
    importlib.import_module("a_broken_one")
    installation.simulator("simulated_five")
    level_of("simulated_five")
    with pytest.raises(RuntimeWarning, match=r"nowhere\.at_all"):
        matmul_precision("medium").__enter__()
    assert ledger.live_scopes() == []
    with matmul_precision("medium"):
        assert level_of("simulated_five") == "medium"


def test_the_getter_and_the_report_never_raise(installation: Installation) -> None:
    """Whatever is installed, and though warnings are errors."""
    installation.module("a_broken_two", "")
    installation.entry_point("a_broken_two", "nowhere.at_all:Simulated")
    importlib.import_module("a_broken_two")
    assert get_float32_matmul_precision() == "highest"
    assert report().wanted == "highest"


def test_what_cannot_be_read_is_a_warning(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and scopes go on."""

    def fail(**_selection: object) -> None:
        raise TypeError("of somebody else's")

    monkeypatch.setattr(importlib.metadata, "entry_points", fail)
    with pytest.warns(RuntimeWarning, match="cannot be looked for: TypeError"), matmul_precision("high"):
        pass
    with matmul_precision("high"):
        pass


def test_a_broken_one_keeps_no_other_of_its_module_from_it(installation: Installation) -> None:
    """Also where its warning is an error."""
    installation.simulator("simulated_seven")
    installation.entry_point("simulated_seven", "nowhere.at_all:Simulated")
    with matmul_precision("medium"):
        with pytest.raises(RuntimeWarning, match=r"nowhere\.at_all"):
            importlib.import_module("simulated_seven")
        assert report().backends["simulated_seven"] == {"level": "medium"}


def test_an_interrupt_loses_none(installation: Installation) -> None:
    """What was being loaded is loaded when the package is next used."""
    installation.module("slow", "import builtins\nif not hasattr(builtins, 'again'): raise KeyboardInterrupt")
    installation.module("simulated_six_backend", "import slow\n" + PLUG_IN.format(simulator="simulated_six"))
    installation.module("simulated_six", SIMULATOR)
    installation.entry_point("simulated_six", "simulated_six_backend:Simulated")
    level_of("simulated_six")
    with pytest.raises(KeyboardInterrupt):
        matmul_precision("medium").__enter__()
    builtins.again = True  # type: ignore[attr-defined]
    try:
        assert ledger.live_scopes() == []
        with matmul_precision("medium"):
            assert level_of("simulated_six") == "medium"
    finally:
        del builtins.again  # type: ignore[attr-defined]


class Follower(Backend):
    """A backend for a module, which must not be asked anything before that is there."""

    def __init__(self, module: str | None, name: str = "follower") -> None:
        self.name = name
        self.module = module
        self.level = "its own"
        self.failing = False

    def _check(self) -> None:
        assert self.module is None or self.module in sys.modules

    def save(self) -> object:
        self._check()
        return self.level

    def apply(self, level: str, /) -> None:
        self._check()
        if self.failing:
            raise OSError("no driver")
        self.level = str(level)

    def restore(self, saved: object, /) -> None:
        self._check()
        self.level = str(saved)

    def describe(self) -> dict[str, str]:
        self._check()
        return {"level": self.level}


@pytest.fixture
def follower(installation: Installation) -> Iterator[Follower]:
    """Register one for a module that is not imported."""
    installation.module("followed", "")
    backend = Follower("followed")
    register_backend(backend)
    yield backend
    if "follower" in [backend.name for backend in ledger.applied.backends]:
        unregister_backend("follower")


def test_a_backend_awaits_its_module(follower: Follower) -> None:
    """Nobody asks it anything, and entering a scope is not held up by it."""
    with matmul_precision("medium"):
        assert "follower" not in report().backends
        assert ledger.applied.holding is ledger.applied.torch_held
        assert not any(backend is follower for backend in ledger.applied.holding.idle)
    set_float32_matmul_precision("highest")
    assert follower.level == "its own"
    reset()


def test_the_module_is_imported_inside_scopes(follower: Follower) -> None:
    """The backend gets the level in force, here in another thread, until the last one ends."""
    with matmul_precision("high"):
        thread = threading.Thread(target=importlib.import_module, args=["followed"])
        thread.start()
        thread.join()
        assert follower.level == "high"
        assert "follower" in report().backends
    assert follower.level == "its own"
    with matmul_precision("medium"):
        assert follower.level == "medium"


def test_the_module_is_imported_when_the_default_has_been_set(follower: Follower) -> None:
    """The backend gets that: alone, or below the scopes that are live."""
    set_float32_matmul_precision("highest")
    with matmul_precision("high"):
        importlib.import_module("followed")
        assert follower.level == "high"
    assert follower.level == "highest"
    reset()


def test_the_default_is_set_inside_scopes_and_the_module_imported_later(follower: Follower) -> None:
    """It counts from the end of the last scope, for a backend that was not there, too."""
    done = threading.Event()

    def set_default() -> None:
        set_float32_matmul_precision("highest")
        done.set()

    with matmul_precision("high"):
        threading.Thread(target=set_default).start()
        assert done.wait(10)
    importlib.import_module("followed")
    assert follower.level == "highest"
    reset()


@pytest.mark.parametrize("level", ["highest", None])
def test_a_backend_registered_late_gets_the_default(level: str | None) -> None:
    """If it was set, and other code has not changed torch's since."""
    if level is not None:
        set_float32_matmul_precision(level)
    late = Follower(None, "late")
    register_backend(late)
    assert late.level == (level or "its own")
    unregister_backend("late")
    reset()


def test_a_backend_that_becomes_active_gets_the_default() -> None:
    """Before it is saved, at the next entry."""

    class Sleeping(Follower):
        awake = False

        def is_active(self) -> bool:
            return self.awake

    late = Sleeping(None, "late")
    register_backend(late)
    set_float32_matmul_precision("highest")
    assert late.level == "its own"
    late.awake = True
    with matmul_precision("high"):
        assert late.level == "high"
    assert late.level == "highest"
    unregister_backend("late")
    reset()


def test_a_failure_at_the_import_is_a_warning(follower: Follower) -> None:
    """The import goes on; the next entry says so again."""
    follower.failing = True
    with matmul_precision("high"):
        with pytest.warns(RuntimeWarning, match="'follower' could not be set to 'high': OSError: no driver"):
            importlib.import_module("followed")
        with pytest.raises(PrecisionScopeError, match="'follower'"):
            matmul_precision("medium").__enter__()
        follower.failing = False
        with matmul_precision("medium"):
            assert follower.level == "medium"
    assert follower.level == "its own"


def test_a_backend_that_was_unregistered_before_the_import(follower: Follower) -> None:
    """It hears nothing of it, and its name is free."""
    unregister_backend("follower")
    other = Follower("followed")
    with matmul_precision("high"):
        importlib.import_module("followed")
        assert follower.level == "its own"
        register_backend(other)
        assert other.level == "high"
    unregister_backend("follower")


def test_an_interrupt_at_the_import_is_not_the_end(follower: Follower) -> None:
    """The import fails, and when it is tried again all are told."""
    second = Follower("followed", "second")
    register_backend(second)
    save = follower.save

    def interrupt() -> object:
        follower.save = save  # type: ignore[method-assign]
        raise KeyboardInterrupt

    follower.save = interrupt  # type: ignore[method-assign]
    with matmul_precision("high"):
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("followed")
        importlib.import_module("followed")
        assert (follower.level, second.level) == ("high", "high")
    unregister_backend("second")


def test_registering_while_another_thread_looks_for_the_module(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the import, and is not too late for it."""
    installation.module("sought", "")
    looking, go_on = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name: str, *_rest: object) -> None:
            if name == "sought":
                looking.set()
                go_on.wait(0.3)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:1], Slow(), *sys.meta_path[1:]])
    thread = threading.Thread(target=importlib.import_module, args=["sought"])
    thread.start()
    assert looking.wait(10)
    backend = Follower("sought", "sought")
    register_backend(backend)
    thread.join()
    with matmul_precision("high"):
        assert backend.level == "high"
    assert backend.level == "its own"


def test_a_default_that_a_backend_cannot_take_changes_nothing() -> None:
    """It is put back and not registered, and the error says what failed."""

    class Half(Follower):
        def apply(self, level: str, /) -> None:
            self.level = str(level)
            raise OSError("no driver")

    set_float32_matmul_precision("highest")
    for scope in (matmul_precision(None), matmul_precision("high")):
        late = Half(None, "late")
        with scope, pytest.raises(PrecisionScopeError, match="'late' could not be set to 'highest'"):
            register_backend(late)
        assert late.level == "its own"
    assert "late" not in [backend.name for backend in ledger.applied.backends]
    reset()


def test_two_backends_await_one_module(follower: Follower) -> None:
    """Each is told."""
    second = Follower("followed", "second")
    register_backend(second)
    follower.failing = True
    with matmul_precision("high"):
        with pytest.raises(RuntimeWarning, match="'follower'"):  # an error in this run
            importlib.import_module("followed")
        importlib.import_module("followed")
        assert second.level == "high"
    unregister_backend("second")


def test_one_that_fails_to_follow_a_module_that_is_there_is_not_registered(follower: Follower) -> None:
    """The error is raised, the backend is put back, and its name is free."""
    importlib.import_module("followed")
    late = Follower("followed", "late")
    late.failing = True
    with matmul_precision("high"):
        with pytest.raises(PrecisionScopeError, match="'late' could not be set to 'high'"):
            register_backend(late)
        late.failing = False
        register_backend(late)
        assert late.level == "high"
        unregister_backend("late")
        assert late.level == "its own"


def test_a_module_that_registers_its_own_backend(installation: Installation) -> None:
    """While it is being imported: it has the level in force from then on."""
    installation.module(
        "registering",
        """
        from test_discovery import Follower
        from precision_scope.backends import register_backend
        backend = Follower(__name__, "registering")
        register_backend(backend)
        level_then = backend.level
        """,
    )
    with matmul_precision("high"):
        module = importlib.import_module("registering")
        assert module.level_then == module.backend.level == "high"
    assert module.backend.level == "its own"


@pytest.mark.skipif("torch_xla" in sys.modules, reason="the real one is there")
def test_what_is_only_called_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub, or a version unlike those that are known: it is left alone, with a warning."""
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    unregister_backend("xla")
    register_backend(Xla())
    with pytest.warns(RuntimeWarning, match="leave torch_xla"), matmul_precision("high"):
        assert "cannot be read" in report().backends["xla"]["mat_mul_precision"]
    monkeypatch.undo()
    unregister_backend("xla")
    register_backend(Xla())


@pytest.mark.parametrize("wrong", [7, b"jax"])
def test_a_wrong_module_is_refused(wrong: object) -> None:
    """Before anything is registered."""
    backend = Follower(None, "wrong")
    backend.module = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError, match="module must be"):
        register_backend(backend)
    assert "wrong" not in [backend.name for backend in ledger.applied.backends]


def test_registering_in_threads_while_scopes_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes when, all are at the level in force, and get back what they held."""
    backends = [Follower(None, f"number {number}") for number in range(8)]
    stop = threading.Event()
    failures: list[BaseException] = []

    def enter_and_leave() -> None:
        while not stop.is_set():
            with matmul_precision("high"), matmul_precision("medium"):
                pass

    def come_and_go(backend: Follower) -> None:
        try:
            for _ in range(100):
                register_backend(backend)
                assert backend.level != "its own"  # the main thread's scope is live
                unregister_backend(backend.name)
                assert backend.level == "its own"
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(ledger, "_warned", True)
    with matmul_precision("high"):
        busy = threading.Thread(target=enter_and_leave)
        busy.start()
        threads = [threading.Thread(target=come_and_go, args=[backend]) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        busy.join()
    assert failures == []
