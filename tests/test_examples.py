"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

OUTPUT = {
    "asyncio_service.py": """\
330 products wanted high, ran at high
330 products wanted highest, ran at highest
330 products wanted medium, ran at medium
""",
    "backward_level.py": """\
backward() after the scope:
  forward at medium
  backward at highest
backward() after a scope with backward=True:
  forward at medium
  backward at medium
backward() inside the scope:
  forward at medium
  backward at medium
""",
    "compiled_functions.py": """\
in a scope at highest:
  forward: compiled with TF32 False, runs with False
  backward: compiled with TF32 False, runs with False
in a scope at high:
  forward: compiled with TF32 True, runs with True
  backward: compiled with TF32 True, runs with True
in a scope at medium:
  forward: compiled with TF32 True, runs with True
  backward: compiled with TF32 True, runs with True
backward once more, outside:
  backward: compiled with TF32 True, runs with False
""",
    "emulated_gaussian_process.py": """\
in float32: right
in TF32:    the covariance is not positive-definite
repaired:   right
""",
    "jax_backend.py": """\
highest precision = [HIGHEST, HIGHEST]
high precision = [HIGH, HIGH]
medium precision = [DEFAULT, DEFAULT]
""",
    "library_in_a_program.py": """\
the caller's choice:
  the library computes at high
asked for more:
  the library computes at highest
afterwards: high
""",
    "precise_loss.py": """\
forward:  medium medium highest
backward: highest highest medium medium medium
""",
    "sensitive_solve.py": """\
features ran at 'medium', the solve at 'highest'
torch's setting before 'highest', after 'highest'
""",
    "threads_at_their_own_levels.py": """\
by hand: {many} of 2000 products at another thread's level
isolated: 0 of 2000 products at another thread's level
""",
}


def test_every_example_is_run_here() -> None:
    """No example can be added without its output being checked; each is short enough to be copied."""
    assert sorted(OUTPUT) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for path in EXAMPLES.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 40, path


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_prints_its_proof(name: str) -> None:
    """Each example runs in a process of its own, without a warning."""
    if name == "jax_backend.py" and importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(re.escape(OUTPUT[name]).replace(r"\{many\}", r"\d{3,}"), result.stdout)


def test_the_example_of_a_test_suite_passes() -> None:
    """It has a configuration of its own, which switches the plug-in on."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", EXAMPLES / "pytest_suite"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 passed" in result.stdout
