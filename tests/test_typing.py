"""Type checkers see through the package: what they make of it is in ``typing_checks.py``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")


def mypy(file: Path, cache: Path) -> str:
    """Return what mypy says of a file that uses the package.

    It does not follow the imports into torch, which takes it a minute and has
    no part in the types that users see.
    """
    options = ["--strict", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, "--no-color-output", f"--cache-dir={cache}", str(file)]
    found = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    return found.stdout + found.stderr


def test_mypy_agrees_with_every_claim_about_the_types(tmp_path: Path) -> None:
    """Decorated callables keep their types, and what is wrong at run time is wrong to mypy."""
    assert mypy(TESTS / "typing_checks.py", tmp_path) == "Success: no issues found in 1 source file\n"


def test_mypy_objects_to_a_wrong_claim(tmp_path: Path) -> None:
    """The package is typed to its users: a result is not just anything."""
    claim = tmp_path / "claim.py"
    claim.write_text(
        "from precision_scope import get_float32_matmul_precision, matmul_precision\n"
        "level: int = get_float32_matmul_precision()\n"
        "@matmul_precision('high')\n"
        "def answer() -> str: return ''\n"
        "number: int = answer()\n"
    )
    assert mypy(claim, tmp_path).count("[assignment]") == 2
