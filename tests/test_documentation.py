"""The code in the README and in the docstrings runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flags import reset

import precision_scope

README = Path(__file__).parent.parent / "README.md"

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(precision_scope.__path__, "precision_scope.")
    if not module.name.endswith("__main__")
)


# What these examples do cannot be undone in this process.
FOR_GOOD = ("precision_scope._isolation",)


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
def test_docstring_examples_run(name: str) -> None:
    """Every docstring example of a module gives the output it shows."""
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
