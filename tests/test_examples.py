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
forward and backward in a scope at highest:
  forward is compiled with TF32 off
  forward runs, compiled with TF32 off, called with TF32 off
  backward is compiled with TF32 off
  backward runs, compiled with TF32 off, called with TF32 off
forward and backward in a scope at high:
  forward is compiled with TF32 on
  forward runs, compiled with TF32 on, called with TF32 on
  backward is compiled with TF32 on
  backward runs, compiled with TF32 on, called with TF32 on
forward and backward in a scope at medium:
  forward runs, compiled with TF32 on, called with TF32 on
  backward runs, compiled with TF32 on, called with TF32 on
forward in a scope at high, backward outside:
  forward runs, compiled with TF32 on, called with TF32 on
  backward runs, compiled with TF32 on, called with TF32 off
""",
    "jax_backend.py": """\
highest precision = [HIGHEST, HIGHEST]
high precision = [HIGH, HIGH]
medium precision = [DEFAULT, DEFAULT]
""",
    "optional_setting.py": """\
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
by_hand: {many} of 2000 products at another thread's level
in_a_scope: 0 of 2000 products at another thread's level
""",
}


def test_every_example_is_run_here() -> None:
    """No example can be added without its output being checked."""
    assert sorted(OUTPUT) == sorted(path.name for path in EXAMPLES.glob("*.py"))


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
