"""The code in the README and in the docstrings runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from flags import HAS_CELLS, reset

import precision_scope
from precision_scope.backends._registry import ENTRY_POINTS

README = Path(__file__).parent.parent / "README.md"

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(precision_scope.__path__, "precision_scope.")
    if not module.name.endswith("__main__")
)


# What these examples do cannot be undone in this process.
FOR_GOOD = ("precision_scope._emulation", "precision_scope._isolation")


@pytest.mark.parametrize("name", FOR_GOOD)
def test_docstring_examples_run_in_a_process_of_their_own(name: str) -> None:
    """The same where an example changes the process for good."""
    path = Path(importlib.import_module(name).__file__ or "")
    result = subprocess.run(
        [sys.executable, "-m", "doctest", path], capture_output=True, text=True, check=False, timeout=300
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert ">>> " in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["precision_scope", *(name for name in MODULES if name not in FOR_GOOD)])
def test_docstring_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every docstring example of a module gives the output it shows."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed replaces it for good
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in finder.find(module, extraglobs=dict(vars(precision_scope))):
        runner.run(test)
        reset()  # a default that an example sets and sets back is no longer inherited
    assert runner.summarize().failed == 0


def readme_blocks() -> list[tuple[str, str]]:
    """Return each Python block of the README with the output block that follows it."""
    pattern = r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?"
    return re.findall(pattern, README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(i, id=f"jax{i}" if "import jax" in code else str(i))
        for i, (code, _) in enumerate(readme_blocks())
    ],
)
def test_readme_code_prints_what_the_readme_shows(block: int) -> None:
    """A Python block of the README runs by itself and prints the block below it."""
    code, output = readme_blocks()[block]
    if "import jax" in code and importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert (result.stdout, result.stderr) == (output, "")


def shell_blocks() -> dict[str, str]:
    """Return each command of the README, but those that CI runs, with the output block that follows it."""
    pattern = r"```sh\n(.*?)\n```(?:\n+```text\n(.*?)```)?"
    found = re.findall(pattern, README.read_text(encoding="utf-8"), re.DOTALL)
    return {command: output for command, output in found if "pip install" not in command}


# How many lines of the output are the same on every machine; of the others all are.
LINES = {"python -m precision_scope": 7} if not HAS_CELLS else {}
LINES["python -m precision_scope measure"] = 1
LINES["python -m precision_scope measure --weights model.safetensors --top 5"] = 1


@pytest.mark.parametrize("command", shell_blocks())
def test_readme_commands_print_what_the_readme_shows(command: str, tmp_path: Path) -> None:
    """Line by line, as far as the machine has no part in it."""
    weights = torch.nn.TransformerEncoderLayer(64, 4, 128).state_dict()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tests,) = [code for code, _ in readme_blocks() if "def test_" in code]
    (tmp_path / "test_model.py").write_text(tests, encoding="utf-8")
    words = [sys.executable, *shlex.split(command)[1:]]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, encoding="utf-8"
    )
    shown = shell_blocks()[command].splitlines()[: LINES.get(command)]
    assert shown
    printed = result.stdout.splitlines()
    if "pytest" in command:
        assert {line.strip("_ ") for line in shown} <= {line.strip("_ ") for line in printed}
    else:
        printed = printed[: LINES.get(command)]
        assert [line.split() for line in printed] == [line.split() for line in shown]
        assert result.stderr == ""


def test_the_readme_shows_how_a_backend_is_installed() -> None:
    """The block of TOML is one, with the group's own name."""
    tomllib: Any = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    (block,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert tomllib.loads(block)["project"]["entry-points"].keys() == {ENTRY_POINTS}


def test_the_readme_shows_the_plug_in_that_is_an_example() -> None:
    """Word for word, so that what is tested is what people copy."""
    example = (README.parent / "examples" / "jax_backend.py").read_text(encoding="utf-8")
    _, _, code = example.split('"""', 2)
    assert code.strip() in README.read_text(encoding="utf-8")


def test_public_names_have_documentation() -> None:
    """Every public name says what it is, with an example for what can be called."""
    for name in precision_scope.__all__:
        documentation = getattr(precision_scope, name).__doc__
        assert documentation, name
        if callable(getattr(precision_scope, name)) and name.islower():
            assert ">>>" in documentation, name
