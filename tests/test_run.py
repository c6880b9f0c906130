"""``python -m precision_scope run``: somebody's program, at a level, and otherwise as Python runs it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from flags import HAS_CELLS
from test_command_line import error_of

import precision_scope
from precision_scope import matmul_precision

PARENT = Path(precision_scope.__file__).parent.parent

# What a program can see of how it was started.
LOOK = """
import sys
main = sys.modules["__main__"]
print(__name__, sys.argv, sys.path, sys.flags, sys.warnoptions, sys._xoptions)
print(main.__dict__.get("__file__"), main.__spec__ and main.__spec__.name, main.__package__)
print(sys.stdin.read(), "torch" in sys.modules, repr(sys.modules.get("usercustomize")))
"""


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=240, **options
    )


def run(
    *arguments: str, python_options: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program at "medium"."""
    return python(*python_options, "-m", "precision_scope", "run", "--level", "medium", *arguments, **options)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a program in each form that Python runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "module.py", "package/__main__.py", "package/inner.py", "folder/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(LOOK)
    (tmp_path / "package" / "__init__.py").touch()
    return tmp_path


# As Python runs it.


@pytest.mark.parametrize(
    "program",
    [
        ("script.py",),
        ("script.py", "--level", "high", "--force", "-m", "-c", "--", "-h"),
        ("folder",),
        ("-m", "module"),
        ("-m", "package", "-m", "other"),
        ("-mpackage", "--force", "--help"),
        ("-m", "package.inner", "--json"),
        ("-c", LOOK),
        ("-c", LOOK, "-c", "-", "--level=x"),
    ],
)
def test_the_program_sees_what_python_shows_it(programs: Path, program: tuple[str, ...]) -> None:
    """Its name, arguments, path, file, specification, flags and standard input are the same."""
    plain = python(*program, input="typed")
    result = run(*program, input="typed")
    assert (result.stdout, result.stderr, result.returncode) == (plain.stdout, "", 0)
    assert "typed False" in result.stdout


def test_the_commands_own_options_can_be_ended(programs: Path) -> None:
    """By two dashes, as everywhere."""
    assert run("--", "script.py", "-x", input="").stdout == python("script.py", "-x", input="").stdout


def test_the_program_can_come_from_standard_input() -> None:
    """As a dash says."""
    plain, result = python("-", "-x", input=LOOK), run("-", "-x", input=LOOK)
    assert (result.stdout, result.stderr, result.returncode) == (plain.stdout, "", 0)


def test_pythons_own_options_are_handed_on(programs: Path) -> None:
    """Those before -m."""
    for options in (("-O", "-W", "error", "-X", "utf8", "-B"), ("-u", "-X", "own=1"), ("-Ou",)):
        result = run("script.py", python_options=options, input="")
        assert result.stdout == python(*options, "script.py", input="").stdout
    joined = python("-Oum", "precision_scope", "run", "--level=high", "script.py", input="")
    assert joined.stdout == python("-Ou", "script.py", input="").stdout


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('the reason')", 1),
        ("raise ValueError('the reason')", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_the_exit_status_is_the_programs(code: str, status: int) -> None:
    """With what it prints."""
    plain, result = python("-c", code), run("-c", code)
    assert (result.returncode, result.stderr) == (status, plain.stderr)


def test_the_machines_sitecustomize_runs(tmp_path: Path) -> None:
    """Another package may have put one on the path."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = __file__")
    result = run(
        "-c",
        "import sys, sitecustomize; print(customized, sitecustomize.__file__, sys.path[1])",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    file = str(tmp_path / "sitecustomize.py")
    assert (result.stdout.split(), result.stderr) == ([file, file, str(tmp_path)], "")


def test_the_package_need_not_be_on_the_programs_path(programs: Path) -> None:
    """A Python that has neither runs a script from elsewhere, started in the package's folder."""
    base = getattr(sys, "_base_executable", sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [base, "-m", "precision_scope", "run", "--level", "medium", str(programs / "script.py")]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=PARENT,
        env=environment,
        input="",
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert str(PARENT) not in result.stdout.splitlines()[0]


# At the level.

EVERYWHERE = """
import multiprocessing, subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset

def level(*_):
    return torch.get_float32_matmul_precision()

class Levels(Dataset):
    def __len__(self): return 2
    def __getitem__(self, _index): return level()

if __name__ == "__main__":
    from precision_scope import get_float32_matmul_precision, matmul_precision
    print("program", level(), get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)
    with matmul_precision("highest"):
        print("scope", level())
    child = [sys.executable, "-c", "import torch; print('child', torch.get_float32_matmul_precision())"]
    print(subprocess.run(child, capture_output=True, text=True).stdout, end="")
    for method in sys.argv[1:]:
        print(method, *next(iter(DataLoader(Levels(), 2, num_workers=1, multiprocessing_context=method))))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("pool", *pool.map(level, [0]))
"""


def test_the_level_is_everywhere(tmp_path: Path) -> None:
    """In the program, its scopes' outside, its children, its workers, however they are started."""
    (tmp_path / "program.py").write_text(EVERYWHERE)
    result = run(str(tmp_path / "program.py"), "fork", "spawn")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "program medium medium True",
        "scope highest",
        "child medium",
        "fork medium medium",
        "spawn medium medium",
        "pool medium",
    ]


@pytest.mark.parametrize(
    "first",
    [
        "from precision_scope import *",
        "from precision_scope.backends import register_backend",
        f"import pickle; pickle.loads({pickle.dumps(matmul_precision('high'))!r})",
    ],
)
def test_a_program_can_import_the_package_before_torch(first: str) -> None:
    """The level is there whichever comes first."""
    result = run("-c", f"{first}; import torch; print(torch.get_float32_matmul_precision())")
    assert (result.stdout, result.stderr) == ("medium\n", "")


def test_nothing_else_is_imported_before_the_program(tmp_path: Path) -> None:
    """Its own modules may have the names of Python's."""
    (tmp_path / "typing.py").write_text("mine = True")
    (tmp_path / "program.py").write_text("import sys; print(*sys.modules); import typing; typing.mine")
    plain, result = python("-I", "-c", "import sys; print(*sys.modules)"), run(str(tmp_path / "program.py"))
    assert (result.returncode, result.stderr) == (0, "")
    assert {*result.stdout.split()} - {*plain.stdout.split()} <= {
        *("__future__", "precision_scope", "precision_scope._imports", "sitecustomize"),
    }


def test_an_inner_run_has_a_level_of_its_own() -> None:
    """The innermost decides."""
    inner = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    code = (
        "import os, torch; print(torch.get_float32_matmul_precision(), os.environ['PYTHONPATH'].count('_st'))"
    )
    command = ("-m", "precision_scope", "run", "--level", "high", "-c", code)
    assert run("-c", inner, *command).stdout == "high 1\n"


OWN_LEVEL = """
import torch
from precision_scope import *

def levels():
    try:
        return f"{torch.get_float32_matmul_precision()} {torch.backends.cuda.matmul.allow_tf32}"
    except RuntimeError:  # torch's newer settings contradict the older one
        return f"mixed {torch.backends.cuda.matmul.allow_tf32}"

torch.set_float32_matmul_precision("high")
print("torch's setter:", levels())
torch.backends.cuda.matmul.allow_tf32 = False
print("allow_tf32:", levels())
set_float32_matmul_precision("high")
print("the package's setter:", levels())
with matmul_precision("highest"):
    print("a scope:", levels(), get_float32_matmul_precision())
    set_float32_matmul_precision("high")
    print("its new level:", levels())
@matmul_precision("highest")
def function():
    print("a decorated function:", levels())
function()
with matmul_precision(None):
    print("a scope of no level:", levels())
print("report:", report().wanted, report().applied, report().changed_by_others, list(report().environment))
"""


def test_a_program_that_sets_its_own_level_wins() -> None:
    """Whatever it sets it through."""
    result = run("-c", OWN_LEVEL)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "torch's setter: high True",
        f"allow_tf32: {'mixed' if HAS_CELLS else 'highest'} False",
        "the package's setter: high True",
        "a scope: highest False highest",
        "its new level: high True",
        "a decorated function: highest False",
        "a scope of no level: high True",
        "report: high high False []",
    ]


def test_with_force_it_does_not() -> None:
    """Nothing that it sets has an effect, nor do its scopes; the report says so."""
    result = run("--force", "-c", OWN_LEVEL)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "torch's setter: medium True",
        "allow_tf32: medium True",
        "the package's setter: medium True",
        "a scope: medium True medium",
        "its new level: medium True",
        "a decorated function: medium True",
        "a scope of no level: medium True",
        "report: medium medium False ['PRECISION_SCOPE_RUN_FORCE']",
    ]


CELLS = """
import torch
if not hasattr(torch.backends, "fp32_precision"):
    raise SystemExit
def cells():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
with torch.backends.cudnn.flags(enabled=False):
    print("for a moment:", *cells())
with torch.backends.cudnn.flags(enabled=True, fp32_precision="ieee"):
    print("of CUDA for a moment:", *cells())
print("after it:", *cells())
torch.backends.cudnn.conv.fp32_precision = "ieee"
print("of convolutions:", *cells(), torch.backends.cudnn.conv.fp32_precision)
torch.backends.fp32_precision = "ieee"
print("of all:", *cells())
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
print("of products:", *cells())
torch.backends.mkldnn.matmul.fp32_precision = "none"
torch.backends.fp32_precision = "tf32"
torch.backends.fp32_precision = "none"
print("of none:", *cells())
"""


@pytest.mark.parametrize(
    ("options", "of_cuda", "of_all", "of_products", "of_none"),
    [
        ((), "ieee none", "ieee ieee", "ieee bf16", "none none"),
        (("--force",), "tf32 bf16", "tf32 bf16", "tf32 bf16", "tf32 bf16"),
    ],
)
def test_settings_of_torchs_newer_api(
    options: tuple[str, ...], of_cuda: str, of_all: str, of_products: str, of_none: str
) -> None:
    """They win, also those of all operators, which the level would hide; with force they are ignored."""
    result = run(*options, "-c", CELLS)
    assert result.stderr == ""
    assert result.stdout.splitlines() in (
        [],  # before torch 2.9
        [
            "for a moment: tf32 bf16",
            f"of CUDA for a moment: {of_cuda}",
            "after it: tf32 bf16",
            "of convolutions: tf32 bf16 ieee",
            f"of all: {of_all}",
            f"of products: {of_products}",
            f"of none: {of_none}",
        ],
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_what_a_program_sets_is_what_it_would_be_without(allowed: bool) -> None:
    """The getter of torch does not raise where it would not."""
    write = f"torch.backends.cuda.matmul.allow_tf32 = {allowed}"
    code = f"import torch; {write}; print(torch.get_float32_matmul_precision())"
    assert run("-c", code).stdout == ("high\n" if allowed else "highest\n")


def test_what_dynamo_puts_back_is_nothing_that_the_program_sets() -> None:
    """The level is there after a compilation."""
    code = (
        "import torch\n"
        "torch.compile(lambda x: x @ x, backend='eager')(torch.ones(2, 2))\n"
        "print(torch.get_float32_matmul_precision())"
    )
    assert run("-c", code, python_options=("-W", "ignore")).stdout == "medium\n"


# Emulation.

EMULATED = """
import subprocess, sys, torch
from precision_scope import *
a = torch.tensor([[1.0001]])
print(report().emulation, torch.get_float32_matmul_precision(), (a @ a).item() == 1.0, end=" ")
with matmul_precision("high"):
    print((a @ a).item() == 1.0, flush=True)
if len(sys.argv) < 2:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--emulate", "cuda"), "cuda highest False True"),
        (("--emulate=tpu", "--level", "medium"), "tpu medium True False"),
        (("--level", "medium", "--force", "--emulate", "cuda"), "cuda medium True True"),
    ],
)
def test_a_program_runs_with_emulation(tmp_path: Path, options: tuple[str, ...], shown: str) -> None:
    """At its own levels, or at one that is given; and so do the processes that it starts."""
    (tmp_path / "program.py").write_text(EMULATED)
    result = python("-m", "precision_scope", "run", *options, str(tmp_path / "program.py"))
    assert (result.stdout, result.stderr) == (f"{shown}\n" * 2, "")


def test_what_is_emulated_does_not_show_in_the_columns_of_measure() -> None:
    """They are of TF32 and bfloat16, whatever a forced level makes of "highest"."""
    options = ("--emulate", "tpu", "--level", "medium", "--force")
    command = ("-m", "precision_scope", "measure", "--size", "128", "--json")
    found = json.loads(python("-m", "precision_scope", "run", *options, *command).stdout)
    assert [measured["error"] > 1e-3 for measured in found] == [True] * 3
    assert 1e-4 < found[1]["emulated"]["cuda"] < 1e-3


def test_an_inner_run_keeps_what_it_does_not_say(tmp_path: Path) -> None:
    """The level of the outer one, say."""
    (tmp_path / "program.py").write_text(EMULATED)
    inner = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = ("-m", "precision_scope", "run", "--emulate", "cuda", str(tmp_path / "program.py"), "x")
    assert run("-c", inner, *command).stdout == "cuda medium True True\n"


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("script.py",), "say at which --level to run, or what to --emulate"),
        (("--force", "--emulate", "cuda", "script.py"), "say at which --level to run"),
        (("--emulate", "gpu", "script.py"), "emulated hardware must be 'cuda' or 'tpu', got 'gpu'"),
        (("--emulate", "cuda"), "say what to run"),
        (("--level", "tf32", "script.py"), "what others call 'tf32' is 'high' here"),
        (("--level", "highest"), "say what to run: a script, -m MODULE, -c CODE or - for standard input"),
        (("--level", "highest", "-m"), "say what to run"),
        (("--level", "highest", ""), "say what to run"),
        (("--level", "highest", "-mno_such_module"), "there is no module 'no_such_module'"),
        (("-x", "--level", "highest", "script.py"), "unrecognized arguments: -x"),
        (("--level",), "argument --level: expected one argument"),
        (("--level", "highest", "-c"), "say what to run"),
        (("--level", "highest", "no_such_file.py", "x"), "there is no file 'no_such_file.py'"),
        (("--level", "highest", "-m", "no_such_module.inner"), "there is no module 'no_such_module.inner'"),
        (("--level", "highest", "--forc", "script.py"), "unrecognized arguments: --forc"),
    ],
)
def test_what_cannot_be_run_is_an_error_of_one_line(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2, before anything runs."""
    assert error in error_of(capsys, "run", *arguments)


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_options_that_would_lose_the_level_are_refused(option: str) -> None:
    """Python would ignore what hands it on."""
    code = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(PARENT)!r}]
        from precision_scope._cli import main
        main(["run", "--level", "medium", "-c", "print('it ran')"])
        """
    )
    result = python(option, "-c", code)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "keep what is asked for from the program" in result.stderr


def test_a_level_that_cannot_be_set_stops_the_program() -> None:
    """It does not run at another one; the environment may have been tampered with."""
    code = "import os; os.environ['PRECISION_SCOPE_RUN_LEVEL'] = 'low'; import torch"
    result = run("-c", code)
    assert result.returncode == 1
    assert "ValueError: float32 matmul precision must be one of" in result.stderr
