"""Rules 9 and 24: each call of a backend failing, at entry and at exit, alone and with a body error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from flags import reset, state

from precision_scope import (
    Float32MatmulPrecision,
    PrecisionScopeError,
    _torch_api,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger
from precision_scope.backends import Backend, register_backend, unregister_backend


class Fragile(Backend):
    """A backend that remembers its calls and fails in those it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.level = "its own"
        self.active = True
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.failing.get(name):
            self.failing[name] -= 1
            raise LookupError(f"{name} failed")

    def is_active(self) -> bool:
        self._call("is_active")
        return self.active

    def save(self) -> object:
        self._call("save")
        return self.level

    def apply(self, level: Float32MatmulPrecision, /) -> None:
        self._call("apply")
        self.level = str(level)

    def restore(self, saved: object, /) -> None:
        self._call("restore")
        self.level = str(saved)

    def describe(self) -> dict[str, str]:
        return {"level": self.level}


@pytest.fixture
def backends() -> Iterator[list[Fragile]]:
    """Register three backends; the one in the middle is the one to fail."""
    made = [Fragile("first"), Fragile("middle"), Fragile("last")]
    for backend in made:
        register_backend(backend)
    yield made
    for backend in made:
        backend.failing = {}
        unregister_backend(backend.name)


def levels(backends: list[Fragile]) -> list[str]:
    """Return what each backend is at."""
    return [backend.level for backend in backends]


def test_backends_follow_scopes_and_get_back_what_they_held(backends: list[Fragile]) -> None:
    """Every backend has the level in force, and afterwards its own setting."""
    with matmul_precision("medium"):
        assert levels(backends) == ["medium"] * 3
        with matmul_precision("high"):
            assert levels(backends) == ["high"] * 3
        assert levels(backends) == ["medium"] * 3
    assert levels(backends) == ["its own"] * 3


@pytest.mark.parametrize("call", ["is_active", "save", "apply"])
def test_a_failure_at_the_outermost_entry_puts_everything_back(backends: list[Fragile], call: str) -> None:
    """The error names the backend, the scope is not live, all others are as before."""
    before = state()
    backends[1].failing[call] = 1
    with pytest.raises(PrecisionScopeError, match=r"'middle' could not .*LookupError") as caught:
        matmul_precision("medium").__enter__()
    assert caught.value.backends == ("middle",)
    assert isinstance(caught.value.__cause__, LookupError)
    assert levels(backends) == ["its own"] * 3
    assert state() == before
    assert ledger.live_scopes() == []


def test_a_failure_at_a_nested_entry_keeps_the_outer_level(backends: list[Fragile]) -> None:
    """The outer scope stays as it was, on every backend."""
    with matmul_precision("medium"):
        backends[1].failing["apply"] = 1
        with pytest.raises(PrecisionScopeError, match="middle"):
            matmul_precision("high").__enter__()
        assert levels(backends) == ["medium"] * 3
        assert get_float32_matmul_precision() == torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("body", [None, ValueError("the body's")])
@pytest.mark.parametrize("times", [1, 9])
def test_a_failing_restore_keeps_no_other_from_it(
    backends: list[Fragile], times: int, body: Exception | None
) -> None:
    """All others are restored, and neither the body's error nor the restore error is lost."""
    before = state()

    def run() -> None:
        with matmul_precision("medium"):
            backends[1].failing["restore"] = times
            if body is not None:
                raise body

    with pytest.raises(PrecisionScopeError, match="'middle' could not be restored") as caught:
        run()
    assert (backends[0].level, backends[2].level) == ("its own", "its own")
    assert state() == before
    assert ledger.live_scopes() == []
    contexts = []
    error: BaseException | None = caught.value
    while error is not None:
        contexts.append(error)
        error = error.__context__
    assert body is None or body in contexts


def test_a_failure_when_a_nested_scope_ends_leaves_the_others_right(backends: list[Fragile]) -> None:
    """The outer level is back on all that can take it, and the error is raised."""

    def nested() -> None:
        with matmul_precision("high"):
            backends[1].failing["apply"] = 9

    with matmul_precision("medium"):
        with pytest.raises(PrecisionScopeError, match="middle"):
            nested()
        assert (backends[0].level, backends[2].level) == ("medium", "medium")
        assert get_float32_matmul_precision() == torch.get_float32_matmul_precision() == "medium"
        backends[1].failing = {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_backend_is_no_failure_of_it(
    backends: list[Fragile], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no Exception passes through as it is, and everything is put back."""
    before = state()

    def interrupted(_level: Float32MatmulPrecision) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(backends[1], "apply", interrupted)
    with pytest.raises(error):
        matmul_precision("medium").__enter__()
    assert levels(backends) == ["its own"] * 3
    assert state() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("times", [1, 9])
def test_an_interrupt_in_a_restore_keeps_no_other_from_it(
    backends: list[Fragile], error: type[BaseException], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are restored, the interrupt passes through, and nothing stays held."""
    before = state()
    left = [times]

    def interrupted(saved: object) -> None:
        if left[0]:
            left[0] -= 1
            raise error
        backends[1].level = str(saved)

    with pytest.raises(error), matmul_precision("medium"):
        monkeypatch.setattr(backends[1], "restore", interrupted)
    assert (backends[0].level, backends[2].level) == ("its own", "its own")
    assert times > 1 or backends[1].level == "its own"
    assert state() == before
    assert not ledger.applied.saved


class TimedOut(Exception):  # noqa: N818
    """What a signal handler of the usual kind raises."""


def test_what_a_handler_raises_while_torch_is_restored_passes_through(
    backends: list[Fragile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own flags cannot fail: an exception there is somebody else's, and keeps its type."""
    before = state()

    def interrupted(_level: str) -> None:
        monkeypatch.undo()
        raise TimedOut

    with pytest.raises(TimedOut), matmul_precision("medium"):
        monkeypatch.setattr(_torch_api, "set_legacy_value", interrupted)
    assert levels(backends) == ["its own"] * 3
    assert state() == before


def test_a_default_set_while_backends_are_restored_reaches_all(
    backends: list[Fragile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not half lost to the restoring that it came into."""
    restore = backends[1].restore

    def set_in_between(saved: object) -> None:
        monkeypatch.undo()
        restore(saved)
        set_float32_matmul_precision("high")

    with matmul_precision("medium"):
        monkeypatch.setattr(backends[1], "restore", set_in_between)
    assert levels(backends) == ["high"] * 3
    assert torch.get_float32_matmul_precision() == "high"
    reset()


@pytest.mark.parametrize("call", ["is_active", "save", "apply"])
def test_a_failure_when_the_default_is_set_changes_nothing(backends: list[Fragile], call: str) -> None:
    """Either every backend takes the new default or none does."""
    before = state()
    backends[1].failing[call] = 1
    with pytest.raises(PrecisionScopeError, match="middle"):
        set_float32_matmul_precision("medium")
    assert levels(backends) == ["its own"] * 3
    assert state() == before


def test_a_failure_when_a_scope_is_set_keeps_its_level(backends: list[Fragile]) -> None:
    """The scope goes on at the level it had."""
    with matmul_precision("medium"):
        backends[1].failing["apply"] = 1
        with pytest.raises(PrecisionScopeError, match="middle"):
            set_float32_matmul_precision("high")
        assert levels(backends) == ["medium"] * 3
        assert get_float32_matmul_precision() == "medium"


def test_the_default_reaches_every_backend(backends: list[Fragile]) -> None:
    """Set outside all scopes, a level is everybody's; inside it waits for nobody."""
    set_float32_matmul_precision("medium")
    assert levels(backends) == ["medium"] * 3
    with matmul_precision("high"):
        assert levels(backends) == ["high"] * 3
    assert levels(backends) == ["medium"] * 3
    reset()


def test_a_backend_registered_inside_a_scope_gets_the_level_in_force() -> None:
    """It follows at once, and is put back with the others."""
    late = Fragile("late")
    with matmul_precision("medium"):
        register_backend(late)
        assert late.level == "medium"
    assert late.level == "its own"
    unregister_backend("late")


def test_a_backend_that_fails_to_register_inside_a_scope_is_not_registered() -> None:
    """It is put back, the error names it, and the name stays free."""
    late = Fragile("late")
    late.failing["apply"] = 1
    with matmul_precision("medium"):
        with pytest.raises(PrecisionScopeError, match="'late'"):
            register_backend(late)
        assert late.level == "its own"
        register_backend(late)
    unregister_backend("late")


def test_a_backend_unregistered_inside_a_scope_is_restored() -> None:
    """It gets back what it held, and no further calls."""
    backend = Fragile("leaving")
    register_backend(backend)
    with matmul_precision("medium"):
        unregister_backend("leaving")
        assert backend.level == "its own"
        backend.calls.clear()
    assert backend.calls == []


def test_a_backend_that_becomes_active_inside_a_scope_follows_from_the_next_entry(
    backends: list[Fragile],
) -> None:
    """It is asked at every entry, and restored at the end with the others."""
    backends[1].active = False
    with matmul_precision("medium"):
        assert backends[1].level == "its own"
        backends[1].active = True
        with matmul_precision("high"):
            assert backends[1].level == "high"
        assert backends[1].level == "medium"
    assert levels(backends) == ["its own"] * 3


def test_a_name_is_taken_once(backends: list[Fragile]) -> None:
    """Registering a second backend of one name is refused, torch's included."""
    for name in ("middle", "torch"):
        with pytest.raises(ValueError, match=f"'{name}' is registered"):
            register_backend(Fragile(name))


def test_unknown_names_and_torch_cannot_be_unregistered(backends: list[Fragile]) -> None:
    """The message names those that can."""
    for name in ("nobody", "torch"):
        with pytest.raises(ValueError, match="'first', 'middle', 'last'"):
            unregister_backend(name)


@pytest.mark.parametrize("wrong", [Fragile, None, object()])
def test_only_backends_can_be_registered(wrong: object) -> None:
    """A class or a stranger is refused with a clear error."""
    register: Callable[[object], None] = register_backend  # type: ignore[assignment]
    with pytest.raises(TypeError, match="instance of a Backend"):
        register(wrong)
