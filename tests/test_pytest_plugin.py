"""The pytest plug-in: levels for tests, and what is left behind by them."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest
import torch
from flags import HAS_CELLS, reset

from precision_scope import Float32MatmulPrecision, matmul_precision, pytest_plugin, report

LEVELS = list(Float32MatmulPrecision)
IMPORTS = """
import threading, unittest
import pytest, torch
from precision_scope import *
from precision_scope.backends import Backend, register_backend, unregister_backend

class Other(Backend):
    name = "other"
    value = "first"
    def save(self): return self.value
    def apply(self, level): self.value = level
    def restore(self, saved): self.value = saved
    def describe(self): return {"setting": self.value}
"""


def run(
    pytester: pytest.Pytester, tests: str, *options: str, ini: str = "filterwarnings = default"
) -> pytest.RunResult:
    """Run tests with the plug-in, in this process."""
    pytester.makepyfile(IMPORTS + dedent(tests))
    pytester.makeini(f"[pytest]\n{ini}")
    # hypothesis would be imported anew at the end of each run, which takes seconds.
    without = ("-p", "no:randomly", "-p", "no:hypothesispytest")
    return pytester.runpytest_inprocess(*without, *options, plugins=[pytest_plugin])


def function(body: str) -> str:
    """Return a test with a body, and one after it that wants the state as it was before."""
    return (
        f"def test_leaking():\n{indent(dedent(body), '    ')}\n"
        "def test_later():\n"
        "    assert torch.get_float32_matmul_precision() == 'highest' == get_float32_matmul_precision()\n"
        "    assert not torch.backends.cuda.matmul.allow_tf32\n"
        "    assert not report().scopes\n"
    )


# What is a leak.

LEGACY = "*torch float32_matmul_precision: highest -> high"
LEAKS = {
    "the legacy setter": ("torch.set_float32_matmul_precision('high')", LEGACY),
    "allow_tf32": ("torch.backends.cuda.matmul.allow_tf32 = True", LEGACY),
    "the package's setter": ("set_float32_matmul_precision('high')", LEGACY),
    "a scope": (
        "global scope\nscope = matmul_precision('medium')\nscope.__enter__()",
        "*a scope at 'medium', entered in thread MainThread, is still live",
    ),
    "a scope of no level": (
        "global scope\nscope = matmul_precision(None)\nscope.__enter__()",
        "*a scope at no level, entered in thread MainThread, is still live",
    ),
    "a scope in a thread": (
        """
        global go_on
        entered, go_on = threading.Event(), threading.Event()
        def work():
            with matmul_precision('high'):
                entered.set()
                go_on.wait(20)
        threading.Thread(target=work, name='forgotten').start()
        entered.wait(20)
        """,
        "*a scope at 'high', entered in thread forgotten, is still live",
    ),
}
CELLS = {
    "a cell": (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "*torch cuda.matmul.fp32_precision: none (inherited) -> tf32",
    ),
    "a cell of the CPU": (
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "*torch mkldnn.matmul.fp32_precision: none (inherited) -> bf16",
    ),
    "the root cell": (
        "torch.backends.fp32_precision = 'tf32'",
        "*torch fp32_precision: none (inherited) -> tf32",
    ),
    "a cell that is set to what it inherits": (
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        "*torch cuda.matmul.fp32_precision: none (inherited) -> ieee",
    ),
}


@pytest.mark.parametrize("how", [*LEAKS, *(CELLS if HAS_CELLS else ())])
def test_a_leak_fails_the_test_and_is_put_back(pytester: pytest.Pytester, how: str) -> None:
    """Whatever API it went through: the message names what has changed, and the next test is not affected."""
    body, line = {**LEAKS, **CELLS}[how]
    result = run(pytester, function(body) + "    globals().get('go_on') and go_on.set()\n")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaking*",
            "the test left the float32 matmul state changed:",
            line,
            "it has been put back; *",
        ]
    )


def test_a_backend_that_is_left_changed_is_a_leak(pytester: pytest.Pytester) -> None:
    """It is named, and what it held comes back."""
    result = run(
        pytester,
        """
        other = Other()

        @pytest.fixture(scope="module", autouse=True)
        def registered():
            register_backend(other)
            yield
            unregister_backend("other")

        def test_leaking():
            other.value = "second"

        def test_later():
            assert other.value == "first"
        """,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["  other setting: first -> second"])


def test_a_backend_that_cannot_be_put_back_is_named(pytester: pytest.Pytester) -> None:
    """The message says so, and torch's flags are put back all the same."""
    result = run(
        pytester,
        """
        class Failing(Other):
            def restore(self, saved): raise OSError("disconnected")

        @pytest.fixture(scope="module", autouse=True)
        def registered():
            register_backend(Failing())
            yield
            unregister_backend("other")

        def test_leaking():
            Failing.value = "second"
            torch.set_float32_matmul_precision("high")

        def test_later():
            assert torch.get_float32_matmul_precision() == "highest"
        """,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*backend 'other' could not be restored: OSError: disconnected"])


def test_a_default_that_was_left_set_is_forgotten(pytester: pytest.Pytester) -> None:
    """A backend that comes later does not get it."""
    result = run(
        pytester,
        """
        def test_leaking():
            set_float32_matmul_precision("highest")

        def test_later():
            other = Other()
            register_backend(other)
            unregister_backend("other")
            assert other.value == "first"
        """,
    )
    result.assert_outcomes(passed=2, errors=int(HAS_CELLS))  # else nothing has changed


def test_a_scope_that_is_dropped_by_a_dead_thread_ends(pytester: pytest.Pytester) -> None:
    """What is remembered of the state at some moment keeps nothing alive."""
    run(
        pytester,
        """
        @pytest.fixture(scope="session")
        def dead():
            def work():
                scope = matmul_precision("medium")
                scope.__enter__()
                threading.current_thread().scope = scope
            thread = threading.Thread(target=work)
            thread.start()
            yield thread

        @pytest.fixture(scope="session")
        def unrelated():
            pass

        def test_asking(dead, unrelated):
            dead.join()
            del dead.scope

        def test_later():
            import gc
            gc.collect()
            assert not report().scopes
            assert torch.get_float32_matmul_precision() == "highest"
        """,
    ).assert_outcomes(passed=2)


def test_a_backend_that_fails_while_a_scope_is_ended_is_named(pytester: pytest.Pytester) -> None:
    """The scope ends, and the rest is said and put back as well."""
    result = run(
        pytester,
        """
        class Failing(Other):
            def restore(self, saved): raise OSError("disconnected")

        def test_leaking():
            global scope
            torch.set_float32_matmul_precision("high")
            register_backend(Failing())
            scope = matmul_precision("medium")
            scope.__enter__()

        def test_later():
            unregister_backend("other")
            assert torch.get_float32_matmul_precision() == "highest"
            assert not report().scopes
        """,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "  torch float32_matmul_precision: highest -> high",
            "backend 'other' could not be restored: OSError: disconnected",
        ]
    )


def test_what_other_code_has_written_in_a_scope_of_a_fixture_stays(pytester: pytest.Pytester) -> None:
    """Neither a marked test nor one that leaks brings back more than the test has changed."""
    if report().isolation:
        pytest.skip("with isolation on it is undone before the next product")
    result = run(
        pytester,
        """
        @pytest.fixture(scope="module", autouse=True)
        def outer():
            with matmul_precision("medium"):
                torch.set_float32_matmul_precision("high")
                yield

        @pytest.mark.matmul_precision("highest")
        def test_marked():
            assert torch.get_float32_matmul_precision() == "highest"

        def test_after_it():
            assert torch.get_float32_matmul_precision() == "high"

        def test_leaking():
            set_float32_matmul_precision("highest")

        def test_after_that():
            assert torch.get_float32_matmul_precision() == "high"
        """,
    )
    result.assert_outcomes(passed=4, errors=1)
    assert "high ->" not in result.stdout.str()


def test_a_failing_test_leaks_too(pytester: pytest.Pytester) -> None:
    """Its own failure is shown, and the leak as well."""
    result = run(pytester, function("torch.set_float32_matmul_precision('high')\nassert False"))
    result.assert_outcomes(failed=1, passed=1, errors=1)


def test_what_a_test_puts_back_is_no_leak(pytester: pytest.Pytester) -> None:
    """By itself, by a scope, or by a fixture that is torn down after it."""
    run(
        pytester,
        """
        def test_by_itself():
            torch.set_float32_matmul_precision("high")
            torch.set_float32_matmul_precision("highest")
            if hasattr(torch.backends, "fp32_precision"):
                torch.backends.cuda.matmul.fp32_precision = "none"
                torch.backends.mkldnn.matmul.fp32_precision = "none"

        def test_by_a_scope():
            with matmul_precision("high"):
                torch.set_float32_matmul_precision("medium")

        @pytest.fixture
        def at_medium():
            torch.set_float32_matmul_precision("medium")
            yield
            test_by_itself()

        def test_by_a_fixture(at_medium):
            assert torch.get_float32_matmul_precision() == "medium"

        def test_by_nobody_who_could_not_be_collected():
            def suspended():
                with matmul_precision("high"):
                    yield
            cycle = [suspended()]
            next(cycle[0])
            cycle.append(cycle)
        """,
    ).assert_outcomes(passed=4)


def test_convolutions_and_rnns_are_not_looked_at(pytester: pytest.Pytester) -> None:
    """Their flags are no matter of the level, and stay what the test made them."""
    before = torch.backends.cudnn.allow_tf32
    run(pytester, function("torch.backends.cudnn.allow_tf32 = True")).assert_outcomes(passed=2)
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("scope", ["class", "module", "package", "session"])
def test_what_a_fixture_of_a_wider_scope_sets_is_no_leak_of_the_test(
    pytester: pytest.Pytester, scope: str
) -> None:
    """It is the state that the tests begin with, and the fixture's own leak where it is not taken back."""
    result = run(
        pytester,
        f"""
        @pytest.fixture(scope="{scope}", params=["high", "medium"])
        def tidy(request):
            with matmul_precision(request.param):
                yield request.param

        def test_tidy(tidy):
            assert torch.get_float32_matmul_precision() == tidy

        @pytest.fixture(scope="{scope}")
        def untidy():
            torch.set_float32_matmul_precision("high")

        class TestUntidy:
            def test_one(self, untidy):
                assert torch.get_float32_matmul_precision() == "high"
            def test_two(self, untidy):
                assert torch.get_float32_matmul_precision() == "high"
        """,
    )
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(
        [
            f"the {scope}'s fixture 'untidy' left the float32 matmul state changed:",
            "  torch float32_matmul_precision: * -> high",
        ]
    )


def test_set_up_of_classes_and_modules_is_watched_as_well(pytester: pytest.Pytester) -> None:
    """By pytest's and by unittest's names: what is taken back is none, and the rest is."""
    result = run(
        pytester,
        """
        def setup_module():
            torch.set_float32_matmul_precision("medium")

        class TestTidy(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.scope = matmul_precision("high")
                cls.scope.__enter__()

            @classmethod
            def tearDownClass(cls):
                cls.scope.__exit__(None, None, None)

            def test_one(self):
                assert torch.get_float32_matmul_precision() == "high"

        class TestUntidy(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                torch.set_float32_matmul_precision("highest")

            def test_one(self):
                assert torch.get_float32_matmul_precision() == "highest"

        def test_after_them():
            assert torch.get_float32_matmul_precision() == "medium"
        """,
    )
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "the class's fixture '*TestUntidy' left the float32 matmul state changed:",
            "  torch float32_matmul_precision: medium -> highest",
            "the module's fixture '*test_set_up*' left the float32 matmul state changed:",
            "  torch float32_matmul_precision: highest -> medium",
        ]
    )


def test_fixtures_that_outlive_one_another_in_no_order(pytester: pytest.Pytester) -> None:
    """One of the session that begins within a module, or within a test, goes on after it."""
    run(
        pytester,
        """
        @pytest.fixture(scope="module", autouse=True)
        def of_the_module():
            yield

        @pytest.fixture(scope="session")
        def of_the_session():
            with matmul_precision("medium"):
                yield

        @pytest.fixture(scope="session")
        def settings():
            torch.set_float32_matmul_precision("high")
            yield
            torch.set_float32_matmul_precision("medium")

        def test_before():
            assert torch.get_float32_matmul_precision() == "highest"

        def test_asking_late(request):
            request.getfixturevalue("of_the_session")
            assert torch.get_float32_matmul_precision() == "medium"

        def test_after_it():
            assert torch.get_float32_matmul_precision() == "medium"

        def test_asking(settings):
            assert torch.get_float32_matmul_precision() == "high"

        def test_after_both():
            assert torch.get_float32_matmul_precision() == "high"
        """,
    ).assert_outcomes(passed=5)


def test_the_teardown_of_a_fixture_that_has_set_nothing_itself(pytester: pytest.Pytester) -> None:
    """It is to leave what others have set meanwhile."""
    result = run(
        pytester,
        """
        @pytest.fixture(scope="class")
        def careless():
            yield
            torch.set_float32_matmul_precision("high")

        @pytest.fixture(scope="session")
        def settings():
            with matmul_precision("medium"):
                yield

        class TestBoth:
            def test_one(self, careless):
                assert torch.get_float32_matmul_precision() == "highest"
            def test_two(self, settings):
                assert torch.get_float32_matmul_precision() == "medium"

        def test_after_them():
            assert torch.get_float32_matmul_precision() == "medium"
        """,
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["the class's fixture 'careless' left*", "*: medium -> high"])


def test_the_teardown_of_a_fixture_can_leak_too(pytester: pytest.Pytester) -> None:
    """It restores what it has never set, or not all that it has set."""
    result = run(
        pytester,
        """
        @pytest.fixture(scope="module")
        def late():
            yield
            torch.set_float32_matmul_precision("high")

        @pytest.fixture(scope="class")
        def half():
            torch.set_float32_matmul_precision("medium")
            yield
            torch.set_float32_matmul_precision("high")

        class TestHalf:
            def test(self, half):
                assert torch.get_float32_matmul_precision() == "medium"

        def test_late(late):
            assert torch.get_float32_matmul_precision() == "highest"
        """,
    )
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(
        ["the class's fixture 'half' left*", LEGACY, "the module's fixture 'late' left*", LEGACY]
    )


def test_a_leak_inside_a_scope_of_a_wider_fixture(pytester: pytest.Pytester) -> None:
    """The flags, and the scope's own level, are put back to what the fixture made them."""
    result = run(
        pytester,
        """
        @pytest.fixture(scope="module", autouse=True)
        def outer():
            with matmul_precision("medium"):
                yield

        def test_by_torch():
            torch.set_float32_matmul_precision("high")

        def test_by_the_package():
            assert torch.get_float32_matmul_precision() == "medium"
            set_float32_matmul_precision("highest")

        def test_later():
            assert torch.get_float32_matmul_precision() == "medium" == get_float32_matmul_precision()
        """,
    )
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(
        [
            "  torch float32_matmul_precision: medium -> high",
            "  a scope at 'highest', entered in thread MainThread, asked for 'medium' before",
        ]
    )


def test_scopes_of_a_thread_that_was_there_before_are_let_be(pytester: pytest.Pytester) -> None:
    """A server of the session, say, enters and leaves them while tests begin and end."""
    run(
        pytester,
        """
        @pytest.fixture(scope="module")
        def server():
            asked, done, end = threading.Event(), threading.Event(), threading.Event()
            def serve():
                asked.wait(20)
                with matmul_precision("high"):
                    done.set()
                    end.wait(20)
            thread = threading.Thread(target=serve)
            thread.start()
            yield asked, done
            end.set()
            thread.join()

        def test_asking(server):
            asked, done = server
            asked.set()
            done.wait(20)
            set_float32_matmul_precision("medium")
        def test_later():
            assert report().applied == "high"
            assert report().default == "highest"
        """,
    ).assert_outcomes(passed=2, errors=1)


@pytest.mark.parametrize("ini", pytest_plugin._LEAK)
def test_what_is_done_about_a_leak(pytester: pytest.Pytester, ini: str) -> None:
    """The ini option says; only "off" leaves the state changed."""
    later = "\n    assert torch.get_float32_matmul_precision() == 'high'" if ini == "off" else ""
    tests = function("torch.set_float32_matmul_precision('high')")
    if ini == "off":
        tests = tests.partition("def test_later")[0] + f"def test_later():{later}\n"
    result = run(pytester, tests, ini=f"filterwarnings = default\nmatmul_precision_leak = {ini}")
    result.assert_outcomes(passed=2, errors=int(ini == "fail"), warnings=int(ini == "warn"))
    if ini == "warn":
        result.stdout.fnmatch_lines(["*PytestWarning: the test left the float32 matmul state changed:"])
    reset()


def test_another_value_of_the_ini_option_is_refused(pytester: pytest.Pytester) -> None:
    """Before any test runs."""
    result = run(pytester, function("pass"), ini="matmul_precision_leak = maybe")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: matmul_precision_leak must be one of fail, warn, off, got 'maybe'"])


# The marker.

MARKED = """
@pytest.fixture
def of_the_test():
    yield get_float32_matmul_precision()
    assert get_float32_matmul_precision() == "medium"

@pytest.fixture(scope="module")
def of_the_module():
    return get_float32_matmul_precision()

@pytest.mark.matmul_precision("medium")
def test_marked(of_the_test, of_the_module):
    assert torch.get_float32_matmul_precision() == "medium" == get_float32_matmul_precision()
    assert of_the_test == "medium"
    assert of_the_module == "highest"

@pytest.mark.matmul_precision("medium")
def test_threads_and_tasks_are_at_the_level():
    import asyncio, contextvars
    found = []
    def look():
        found.append(get_float32_matmul_precision())
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    contextvars.Context().run(look)
    async def work():
        look()
        with matmul_precision("high"):
            look()
    contextvars.Context().run(asyncio.run, work())
    assert found == ["medium", "medium", "medium", "high"]

def test_not_marked():
    assert torch.get_float32_matmul_precision() == "highest"

@pytest.mark.matmul_precision("high")
class TestMarked:
    def test_of_the_class(self):
        assert torch.get_float32_matmul_precision() == "high"

    @pytest.mark.matmul_precision("highest")
    def test_of_its_own(self):
        assert torch.get_float32_matmul_precision() == "highest"

@pytest.mark.matmul_precision("high")
class TestUnittest(unittest.TestCase):
    def setUp(self):
        self.level = torch.get_float32_matmul_precision()

    def test_of_the_class(self):
        assert torch.get_float32_matmul_precision() == "high" == self.level

    @pytest.mark.matmul_precision("medium")
    def test_of_its_own(self):
        assert torch.get_float32_matmul_precision() == "medium" == self.level
"""


def test_marked_tests_run_at_their_level(pytester: pytest.Pytester) -> None:
    """So do their own fixtures, and their threads and tasks, in classes of unittest as well."""
    run(pytester, MARKED, "-W", "error").assert_outcomes(passed=7)


def test_a_marked_test_inside_a_scope_of_a_fixture(pytester: pytest.Pytester) -> None:
    """The innermost decides: the marker."""
    run(
        pytester,
        """
        @pytest.fixture(scope="module", autouse=True)
        def outer():
            with matmul_precision("highest"):
                yield

        @pytest.mark.matmul_precision("medium")
        def test_marked():
            assert torch.get_float32_matmul_precision() == "medium" == get_float32_matmul_precision()

        def test_not_marked():
            assert torch.get_float32_matmul_precision() == "highest"
        """,
    ).assert_outcomes(passed=2)


def test_the_marker_of_a_parameter_is_closer_than_that_of_the_test(pytester: pytest.Pytester) -> None:
    """It says more."""
    run(
        pytester,
        """
        medium = pytest.param("medium", marks=pytest.mark.matmul_precision("medium"))

        @pytest.mark.matmul_precision("high")
        @pytest.mark.parametrize("level", ["high", medium])
        def test_marked(level):
            assert torch.get_float32_matmul_precision() == level
        """,
    ).assert_outcomes(passed=2)


OLDER_THREAD = """
import contextlib

@pytest.fixture(scope="module")
def worker():
    with contextlib.ExitStack() as stack:
        asked, answered = threading.Event(), threading.Event()
        def work():
            for step in (lambda: stack.enter_context(matmul_precision("medium")), stack.close, lambda: None):
                asked.wait(20)
                asked.clear()
                step()
                answered.set()
        thread = threading.Thread(target=work)
        thread.start()
        def step():
            asked.set()
            answered.wait(20)
            answered.clear()
        yield step
        while thread.is_alive():
            step()

def at_rest():
    return torch.get_float32_matmul_precision() == "highest" == get_float32_matmul_precision()
"""


def test_marked_tests_while_an_older_thread_is_in_a_scope(pytester: pytest.Pytester) -> None:
    """They get their level or a stricter one, and leave nothing, whenever the thread enters and leaves."""
    run(
        pytester,
        OLDER_THREAD
        + dedent(
            """
            @pytest.mark.matmul_precision("high")
            def test_entering(worker):
                worker()
                assert get_float32_matmul_precision() == "high"

            def test_inside(worker):
                assert report().applied == "medium"
                assert report().default == "highest"

            @pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning")
            @pytest.mark.matmul_precision("highest")
            def test_getting_no_less(worker):
                assert torch.get_float32_matmul_precision() == "highest"

            @pytest.mark.matmul_precision("high")
            def test_leaving(worker):
                worker()

            def test_later():
                assert at_rest()
            """
        ),
    ).assert_outcomes(passed=5)


def test_products_of_other_threads_are_no_leak(pytester: pytest.Pytester) -> None:
    """With isolation they switch torch's flags to and fro while tests begin and end."""
    run(
        pytester,
        """
        @pytest.fixture(scope="module", autouse=True)
        def around():
            end = threading.Event()
            def work():
                with matmul_precision("medium"):
                    while not end.is_set():
                        torch.ones(64, 64) @ torch.ones(64, 64)
            thread = threading.Thread(target=work)
            with matmul_precision("highest"):
                thread.start()
                yield
                end.set()
                thread.join()

        @pytest.mark.parametrize("number", range(200))
        def test(number):
            pass
        """,
        ini="filterwarnings = ignore::precision_scope.PrecisionConflictWarning",
    ).assert_outcomes(passed=200)


@pytest.mark.parametrize("steps", [(0, 1, 1), (1, 1, 0)], ids=["enters", "leaves"])
def test_a_leak_while_an_older_thread_enters_or_leaves_a_scope(
    pytester: pytest.Pytester, steps: tuple[int, int, int]
) -> None:
    """It is reported once, and put back when the thread has left."""
    tests = f"""
def test_first(worker):
    [worker() for _ in range({steps[0]})]

def test_leaking(worker):
    set_float32_matmul_precision("high")
    [worker() for _ in range({steps[1]})]

def test_last(worker):
    [worker() for _ in range({steps[2]})]
    assert at_rest()
"""
    run(pytester, OLDER_THREAD + tests).assert_outcomes(passed=3, errors=1)


def test_a_leak_of_a_marked_test(pytester: pytest.Pytester) -> None:
    """It is told from the marker's level, and put back to the level before."""
    result = run(
        pytester,
        '@pytest.mark.matmul_precision("medium")\n'
        + function("torch.backends.cuda.matmul.allow_tf32 = False"),
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["  torch float32_matmul_precision: medium -> highest"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("'hihgest'", "*got 'hihgest'; the nearest is 'highest'"),
        ("True", "*not bool"),
        ("", "*it takes one level*"),
        ("'high', 'medium'", "*it takes one level*"),
        ("level='high'", "*it takes one level*"),
    ],
)
def test_a_wrong_marker_fails_its_test_alone(pytester: pytest.Pytester, arguments: str, error: str) -> None:
    """With a message that says what is wrong, before the test runs."""
    result = run(
        pytester,
        f"""
        @pytest.mark.matmul_precision({arguments})
        def test_marked():
            raise AssertionError("it ran")

        def test_other():
            pass
        """,
        "--strict-markers",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.matmul_precision: {error}"])
    result.stdout.no_fnmatch_line("*During handling*")


# The fixture.


def test_the_fixture_runs_a_test_once_at_each_level(pytester: pytest.Pytester) -> None:
    """The tests are named for the levels."""
    result = run(
        pytester,
        """
        @pytest.mark.matmul_precision("high")
        def test_each(float32_matmul_precision):
            assert torch.get_float32_matmul_precision() == float32_matmul_precision
            assert get_float32_matmul_precision() is float32_matmul_precision
        """,
        "-v",
    )
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines([f"*test_each?{level}? PASSED*" for level in LEVELS])


def test_the_fixture_is_for_the_other_fixtures_of_the_test_as_well(pytester: pytest.Pytester) -> None:
    """In whatever order they are asked for; the levels can be chosen, too."""
    result = run(
        pytester,
        """
        @pytest.fixture
        def model():
            return get_float32_matmul_precision()

        def test_each(model, float32_matmul_precision):
            assert model == float32_matmul_precision

        @pytest.mark.parametrize("float32_matmul_precision", ["high"], indirect=True)
        def test_indirect(model, float32_matmul_precision):
            assert model is float32_matmul_precision is Float32MatmulPrecision.HIGH

        @pytest.mark.parametrize("float32_matmul_precision", ["medium"])
        def test_direct(model, float32_matmul_precision):
            assert model == float32_matmul_precision == "medium"

        @pytest.mark.parametrize("float32_matmul_precision", ["tf32"])
        def test_wrong(model, float32_matmul_precision):
            raise AssertionError("it ran")
        """,
    )
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(
        ["the parameter float32_matmul_precision: *what others call 'tf32' is 'high' here"]
    )


# The run-wide option.


@pytest.mark.parametrize("level", LEVELS)
def test_the_option_is_for_the_whole_run(pytester: pytest.Pytester, level: str) -> None:
    """Tests, their modules and their fixtures are at the level, which ends with the run."""
    result = run(
        pytester,
        f"""
        at_collection = torch.get_float32_matmul_precision()

        @pytest.fixture(scope="session")
        def of_the_session():
            return torch.get_float32_matmul_precision()

        def test_at_the_level(of_the_session):
            assert torch.get_float32_matmul_precision() == "{level}" == at_collection == of_the_session

        @pytest.mark.matmul_precision("high")
        def test_marked():
            assert torch.get_float32_matmul_precision() == "high"

        def test_leaking():
            torch.set_float32_matmul_precision("{"high" if level == "highest" else "highest"}")

        def test_later():
            assert torch.get_float32_matmul_precision() == "{level}"
        """,
        "--matmul-precision",
        level,
    )
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines([f"float32 matmul precision: {level}"])
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_wrong_level_is_refused(pytester: pytest.Pytester) -> None:
    """Before any test runs, in one line."""
    result = run(pytester, function("pass"), "--matmul-precision", "tf32")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --matmul-precision: *what others call 'tf32' is 'high' here"])


# Emulation, which needs isolation for good: in processes of their own.

IS_TF32 = """
def is_tf32():
    a = torch.tensor([[1.0001]])
    return (a @ a).item() == 1.0
"""


def run_apart(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    """Run tests with the plug-in, in another process."""
    pytester.makepyfile(IMPORTS + IS_TF32 + dedent(tests))
    pytester.makeini("[pytest]")
    return pytester.runpytest_subprocess("-p", "precision_scope.pytest_plugin", "-p", "no:randomly", *options)


EMULATED = """
at_collection = is_tf32()

def test_at_the_level_of_the_run():
    assert is_tf32() and at_collection

@pytest.mark.matmul_precision("highest")
def test_marked():
    assert not is_tf32()

def test_in_a_scope():
    with matmul_precision("highest"):
        assert not is_tf32()

class TestOfUnittest(unittest.TestCase):
    def test_in_a_thread(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(is_tf32()))
        thread.start()
        thread.join()
        assert found == [True]
"""


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_a_whole_run_can_be_emulated(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """Each test at its level, under xdist, too; the header says so."""
    options = ("--emulate-matmul-precision", "cuda", "--matmul-precision=medium", *workers)
    result = run_apart(pytester, EMULATED, *options)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["float32 matmul precision: medium, emulated as on cuda"])


def test_emulation_alone_leaves_the_levels_to_the_tests(pytester: pytest.Pytester) -> None:
    """The default is torch's own, and it ends with the run; torch is not imported for it."""
    pytester.makepyfile(
        test_emulated=f"""
        def test_without():
            import sys
            assert "torch" not in sys.modules
        def test_with():
            import torch
            from precision_scope import matmul_precision
            {indent(dedent(IS_TF32), "            ").strip()}
            assert not is_tf32()
            with matmul_precision("high"):
                assert is_tf32()
        """,
        main="""
        import pytest
        options = ["-p", "precision_scope.pytest_plugin", "-p", "no:randomly", "test_emulated.py"]
        status = pytest.main([*options, "--emulate-matmul-precision=cuda"])
        from precision_scope import report
        assert (status, report().emulation, report().isolation) == (0, None, True)
        """,
    )
    pytester.makeini("[pytest]")
    result = pytester.runpython(pytester.path / "main.py")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["float32 matmul precision: emulated as on cuda"])


@pytest.mark.parametrize(
    ("options", "change", "later", "message"),
    [
        ((), 'enable_emulation("tpu")', None, "off -> tpu"),
        (("--emulate-matmul-precision=cuda",), 'enable_emulation("tpu")', "cuda", "cuda -> tpu"),
    ],
)
def test_a_test_that_changes_emulation_leaks(
    pytester: pytest.Pytester, options: tuple[str, ...], change: str, later: str | None, message: str
) -> None:
    """It is put back; so is what a fixture of a module changes, which is named."""
    result = run_apart(
        pytester,
        f"""
        def test_leaking():
            {change}

        def test_later():
            assert report().emulation == {later!r}

        @pytest.fixture(scope="module")
        def of_the_module():
            {change}

        def test_with_it(of_the_module):
            pass

        @pytest.mark.matmul_precision("high")
        def test_changed_and_put_back():
            before = report().emulation
            {change}
            enable_emulation(before) if before else disable_emulation()
        """,
        *options,
    )
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(
        [
            "the test left the float32 matmul state changed:",
            f"  emulation: {message}",
            "it has been put back; *",
            "the module's fixture 'of_the_module' left the float32 matmul state changed:",
            f"  emulation: {message}",
        ]
    )


def test_what_the_option_has_on_a_test_may_switch_off(pytester: pytest.Pytester) -> None:
    """It cannot know how to put that back; the plug-in does."""
    result = run_apart(
        pytester,
        """
        def test_both():
            enable_emulation("tpu")
            disable_emulation()

        def test_later():
            assert report().emulation == "cuda"
        """,
        "--emulate-matmul-precision=cuda",
    )
    result.assert_outcomes(passed=2)


def test_what_a_wider_fixture_emulates_stays(pytester: pytest.Pytester) -> None:
    """Also where the first test that asks for it has a level of its own."""
    result = run_apart(
        pytester,
        """
        @pytest.fixture(scope="session")
        def emulated():
            enable_emulation("cuda")
            yield
            disable_emulation()

        @pytest.mark.matmul_precision("high")
        def test_first(request):
            request.getfixturevalue("emulated")
            assert is_tf32()

        def test_later(emulated):
            assert report().emulation == "cuda"
        """,
    )
    result.assert_outcomes(passed=2)


def test_other_hardware_is_refused(pytester: pytest.Pytester) -> None:
    """Before any test runs, in one line."""
    result = run(pytester, function("pass"), "--emulate-matmul-precision", "gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --emulate-matmul-precision: emulated hardware must be 'cuda' or 'tpu', got 'gpu'"]
    )


# Around it.


def test_under_xdist(pytester: pytest.Pytester) -> None:
    """Workers have the plug-in, the option and the leak check."""
    leaking = function("torch.set_float32_matmul_precision('medium')").replace("'highest'", "'high'")
    marked = MARKED.replace('"highest"', '"high"').replace("def test_not", "def test_also_not")
    pytester.makepyfile(IMPORTS + leaking.partition("    assert not torch.backends")[0] + marked)
    result = pytester.runpytest_subprocess(
        "-p", "precision_scope.pytest_plugin", "--matmul-precision", "high", "-n2"
    )
    result.assert_outcomes(passed=9, errors=1)
    result.stdout.fnmatch_lines(["  torch float32_matmul_precision: high -> medium"])


def test_torch_is_not_imported_before_a_test_does_so(pytester: pytest.Pytester) -> None:
    """A suite without torch runs without; one that imports it late gets the level, and is checked."""
    pytester.makeini("[pytest]")
    pytester.makeconftest('pytest_plugins = ["precision_scope.pytest_plugin"]')
    pytester.makepyfile(
        test_first="""
        import sys
        def test_without():
            assert "torch" not in sys.modules
        """,
        test_second="""
        def test_with():
            from precision_scope import get_float32_matmul_precision  # before torch
            import torch
            assert get_float32_matmul_precision() == "medium"
            assert torch.get_float32_matmul_precision() == "medium"
            torch.set_float32_matmul_precision("high")
        def test_later():
            import torch
            assert torch.get_float32_matmul_precision() == "medium"
        """,
    )
    result = pytester.runpytest_subprocess("--matmul-precision=medium", "-p", "no:randomly")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["  torch float32_matmul_precision: medium -> high"])


@pytest.mark.parametrize("options", [(), ("--matmul-precision=medium", "--emulate-matmul-precision=cuda")])
def test_a_suite_that_leaves_the_import_of_torch_to_the_plug_in(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """A test with the marker, or the fixture, is the first to need it."""
    pytester.makeini("[pytest]")
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.matmul_precision("high")
        def test_marked():
            import torch
            assert torch.get_float32_matmul_precision() == "high"
        def test_each(float32_matmul_precision):
            import torch
            assert torch.get_float32_matmul_precision() == float32_matmul_precision
        """
    )
    for test in ((), ("-k", "test_each")):
        result = pytester.runpytest_subprocess(
            "-p", "precision_scope.pytest_plugin", "-p", "no:randomly", *options, *test
        )
        assert result.ret == 0


def test_scopes_that_are_live_around_the_run_stay(pytester: pytest.Pytester) -> None:
    """A program can call pytest while it is in a scope."""
    with matmul_precision("medium"):
        run(
            pytester, "def test():\n    assert torch.get_float32_matmul_precision() == 'medium'"
        ).assert_outcomes(passed=1)
        assert [scope.level for scope in report().scopes] == ["medium"]
