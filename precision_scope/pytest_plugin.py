"""Tests at a level of one's choice, and tests that leave the float32 matmul state as it was.

Switched on with ``-p precision_scope.pytest_plugin``, in the command or in
``addopts``, or with ``pytest_plugins = ["precision_scope.pytest_plugin"]`` in the
top-level ``conftest.py``, it gives a test suite

* a marker, ``@pytest.mark.matmul_precision("highest")``, for a test, a class or a
  module: the test runs at that level, and so do its function-scoped fixtures;
* a fixture, ``float32_matmul_precision``: the test runs once at each level, and
  the fixture's value is that level;
* an option, ``--matmul-precision LEVEL``: the whole run begins at that level;
* an option, ``--emulate-matmul-precision cuda`` or ``tpu``: the whole run computes
  as that hardware does, at each level, so that a CPU shows what a level does;
* a leak check: a test that leaves the float32 matmul state changed, through
  whatever API, fails at its teardown with a message that says what has changed.
  The state is put back for later tests. The same goes for fixtures that live
  longer than a test. The ini option ``matmul_precision_leak`` says what to do
  about a leak: ``fail``, the default, ``warn`` or ``off``. Emulation that a test
  has enabled is a leak; what it has disabled is enabled again.

Levels are process defaults here, so that they hold in the threads and tasks of
a test, too; inside a scope that a fixture holds they are scopes. Nothing here
imports torch before a test suite does, but for a test with the marker or the
fixture.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import pytest

from precision_scope._hardware import Hardware, parse_hardware
from precision_scope._imports import when_imported
from precision_scope._levels import LEVELS, Float32MatmulPrecision, parse_level

if TYPE_CHECKING:
    from precision_scope._leaks import State

_T = TypeVar("_T")

_PUT_BACK = "it has been put back; a scope, with matmul_precision(...), does that for levels by itself"

_MARKER = "matmul_precision"
_FIXTURE = "float32_matmul_precision"

_LEAK = ("fail", "warn", "off")


class _Run:
    """One run of a test suite.

    Attributes:
        level: The level that it begins at; None for the one that torch has.
        emulation: The hardware that is emulated, if any.
        on_leak: What is to be done about a leak.
        at_import: The state to begin with, once torch has been imported, if anybody wants to know.
        before: The state that the running test has to leave.
    """

    def __init__(
        self, level: Float32MatmulPrecision | None, emulation: Hardware | None, on_leak: str
    ) -> None:
        self.level = level
        self.emulation: Hardware | None = emulation
        self.on_leak = on_leak
        self.at_import: State | None = None
        self.before: State | None = None
        self._stack = contextlib.ExitStack()
        self._has_ended = False

    def begin(self, _torch: ModuleType) -> None:
        """Take on the level, and emulation: torch has been imported."""
        if self._has_ended:
            return
        from precision_scope._leaks import State, at_level  # noqa: PLC0415

        if self.emulation is not None:
            from precision_scope import enable_emulation  # noqa: PLC0415
            from precision_scope._emulation import emulated_hardware, set_emulation  # noqa: PLC0415

            self._stack.callback(set_emulation, emulated_hardware())
            enable_emulation(self.emulation)
        if self.level is not None:
            self._stack.enter_context(at_level(self.level))
        self.at_import = State() if self.on_leak != "off" else None

    def end(self) -> None:
        """Let go of them."""
        self._has_ended = True
        self._stack.close()

    def state(self) -> State | None:
        """Return the present state; None if torch has not been imported, or nobody wants to know."""
        if self.at_import is None:
            return None
        from precision_scope._leaks import State  # noqa: PLC0415

        return State()

    @contextlib.contextmanager
    def watch(self, level: Float32MatmulPrecision | None) -> Generator[None]:
        """Have a test run at a level, if any, and leave no leak."""
        with contextlib.ExitStack() as stack:
            if level is not None:
                # The run's own level comes first.
                import torch  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]

                from precision_scope._leaks import at_level  # noqa: PLC0415

                stack.enter_context(at_level(level))
            self.before = self.state()
            yield
            before, self.before = self.before or self.at_import, None
            message = self.look_for_leak("the test", before)
        self.report(message)

    def look_for_leak(self, what: str, before: State | None) -> str | None:
        """Bring back a state, and return what is to be said of what has changed."""
        if before is None:
            return None
        changes, failures = before.bring_back()
        if not changes:
            return None
        leak = "\n  ".join([f"{what} left the float32 matmul state changed:", *changes])
        return f"{leak}\n{'; '.join(failures) or _PUT_BACK}"

    def report(self, message: str | None) -> None:
        """Fail, or warn, if there is something to be said."""
        if message is None:
            return
        if self.on_leak == "fail":
            pytest.fail(message, pytrace=False)
        warnings.warn(pytest.PytestWarning(message), stacklevel=2)


class _FixtureWatch:
    """Looks for the leak of a fixture that lives longer than a test.

    Others may be set up and torn down while it lives, and change the state.
    """

    def __init__(self, run: _Run, fixture: str) -> None:
        self._run = run
        self._fixture = fixture
        self._before_setup = run.state()
        self._after_setup: State | None = None
        self._before_teardown: State | None = None

    def after_setup(self) -> None:
        """Note what it has set up, which a test that asked for it is not to be blamed for."""
        self._before_setup = self._before_setup or self._run.at_import
        self._after_setup = self._run.state()
        if _are_alike(self._run.before, self._before_setup):
            self._run.before = self._after_setup

    def before_teardown(self) -> None:
        """Note what the state is before it puts its own back."""
        self._before_teardown = self._run.state()

    def after_teardown(self) -> None:
        """Look for a leak, unless it cannot be known whose a change is."""
        if _are_alike(self._before_teardown, self._after_setup):
            expected = self._before_setup
        elif _are_alike(self._after_setup, self._before_setup):
            expected = self._before_teardown
        else:
            return
        self._run.report(self._run.look_for_leak(self._fixture, expected))


def _are_alike(one: State | None, other: State | None) -> bool:
    return one is not None and other is not None and one.is_like(other)


_run = pytest.StashKey[_Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, and the ini option."""
    group = parser.getgroup("precision_scope", "float32 matmul precision")
    group.addoption(
        "--matmul-precision",
        metavar="LEVEL",
        help="run all tests at this float32 matmul precision: highest, high or medium",
    )
    group.addoption(
        "--emulate-matmul-precision",
        metavar="HARDWARE",
        help="compute float32 matrix products on the CPU as that hardware does: cuda or tpu",
    )
    parser.addini(
        "matmul_precision_leak",
        "what to do about a test that leaves the float32 matmul state changed: fail, warn or off",
        default="fail",
    )


def _parsed(option: str, value: object, parse: Callable[[object], _T]) -> _T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise pytest.UsageError(f"{option}: {error}") from None


def pytest_configure(config: pytest.Config) -> None:
    """Look at the options, and begin with torch's import."""
    config.addinivalue_line(
        "markers", "matmul_precision(level): run the test at this float32 matmul precision"
    )
    level, on_leak = config.getoption("--matmul-precision"), config.getini("matmul_precision_leak")
    if on_leak not in _LEAK:
        raise pytest.UsageError(f"matmul_precision_leak must be one of {', '.join(_LEAK)}, got {on_leak!r}")
    emulation = config.getoption("--emulate-matmul-precision")
    run = config.stash[_run] = _Run(
        _parsed("--matmul-precision", level, parse_level),
        _parsed("--emulate-matmul-precision", emulation, parse_hardware),
        on_leak,
    )
    when_imported("torch", run.begin)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let go of the level."""
    if _run in config.stash:
        config.stash[_run].end()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Show the level of the whole run, and what it emulates."""
    run = config.stash[_run]
    emulated = None if run.emulation is None else f"emulated as on {run.emulation}"
    shown = [value for value in (run.level, emulated) if value is not None]
    return f"float32 matmul precision: {', '.join(shown)}" if shown else None


def _level_of(test: pytest.Item) -> Float32MatmulPrecision | None:
    """Return the level that a test is to run at, if any.

    The fixture decides, then the marker that is closest: a parameter's, the
    test's own, its class's, its module's.
    """
    parameters = getattr(test, "callspec", None)
    markers = [] if parameters is None else [mark for mark in parameters.marks if mark.name == _MARKER]
    marker = markers[0] if markers else test.get_closest_marker(_MARKER)
    if parameters is not None and _FIXTURE in parameters.params:
        what, levels = f"the parameter {_FIXTURE}", [parameters.params[_FIXTURE]]
    elif marker is not None:
        what, levels = f"@pytest.mark.{_MARKER}", [] if marker.kwargs else [*marker.args]
    else:
        return None
    wrong = f'it takes one level, as in @pytest.mark.{_MARKER}("highest")'
    if len(levels) == 1:
        try:
            return parse_level(levels[0])
        except (TypeError, ValueError) as error:
            wrong = str(error)
    pytest.fail(f"{what}: {wrong}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Watch the fixtures that live longer than a test."""
    run = request.config.stash[_run]
    if fixturedef.scope == "function" or run.on_leak == "off":
        return (yield)
    watch = _FixtureWatch(run, f"the {fixturedef.scope}'s fixture {fixturedef.argname!r}")
    fixturedef.addfinalizer(watch.after_teardown)  # the first one to be added runs last
    try:
        return (yield)
    finally:
        watch.after_setup()
        fixturedef.addfinalizer(watch.before_teardown)


@pytest.fixture(autouse=True)
def _matmul_precision_of_test(request: pytest.FixtureRequest) -> Generator[None]:
    with request.config.stash[_run].watch(_level_of(request.node)):
        yield


@pytest.fixture(params=LEVELS, ids=str)
def float32_matmul_precision(request: pytest.FixtureRequest) -> Float32MatmulPrecision:
    """Run the test once at each float32 matmul precision, and return that."""
    return parse_level(request.param)
