"""Running somebody's program at a level, or with emulation, without editing it.

The program gets a Python of its own, and so all that Python does for it. The
environment hands both to that Python and to those that it starts in turn,
where a folder on PYTHONPATH has them set it. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from precision_scope._hardware import Hardware
from precision_scope._levels import Float32MatmulPrecision

LEVEL = "PRECISION_SCOPE_RUN_LEVEL"
FORCE = "PRECISION_SCOPE_RUN_FORCE"
EMULATE = "PRECISION_SCOPE_RUN_EMULATE"
"""The environment variables that hand the options on."""

_STARTUP = str(Path(__file__).parent / "_startup")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is said to the command, and what Python is to be told of the program."""
    for number, argument in enumerate(arguments):
        if argument == "--":
            return [*arguments[:number]], [*arguments[number + 1 :]]
        is_option = argument.startswith("-") and argument != "-" and argument[:2] not in ("-m", "-c")
        if not is_option and arguments[number - 1 : number] not in (["--level"], ["--emulate"]):
            return [*arguments[:number]], [*arguments[number:]]
    return [*arguments], []


def check(program: Sequence[str]) -> None:
    """Refuse what cannot be run, as far as that can be told without running it.

    Raises:
        ValueError: If there is no such program.
    """
    first, second = [*program, "", ""][:2]
    flag = first[:2] if first[:2] in ("-m", "-c") else ""
    target = first[2:] or second if flag else first
    if not target:
        raise ValueError("say what to run: a script, -m MODULE, -c CODE or - for standard input")
    if flag == "-m" and importlib.util.find_spec(target.partition(".")[0]) is None:
        raise ValueError(f"there is no module {target!r}")
    if not flag and target != "-" and not Path(target).exists():
        raise ValueError(f"there is no file {target!r}")


def run(
    program: list[str], *, level: Float32MatmulPrecision | None, force: bool, emulate: Hardware | None
) -> int:
    """Have this process become Python running a program, at a level or with emulation.

    Args:
        program: The arguments that Python takes for it.
        level: The process default that it begins with, if that is not torch's.
        force: Whether what the program sets itself is to have no effect.
        emulate: The hardware to emulate, if any.

    Returns:
        The program's exit status, on Windows; elsewhere it does not return.

    Raises:
        RuntimeError: If this Python ignores the environment, as the other one would.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise RuntimeError(
            "Python's options -E, -I and -S keep what is asked for from the program; leave them out"
        )
    path = os.environ.get("PYTHONPATH", "")
    if path.split(os.pathsep)[0] != _STARTUP:
        path = os.pathsep.join([_STARTUP, path] if path else [_STARTUP])
    environment = {**os.environ, "PYTHONPATH": path}
    if level is not None:
        environment[LEVEL] = level.value
        environment.pop(FORCE, None)
    if force:
        environment[FORCE] = "1"
    if emulate is not None:
        environment[EMULATE] = emulate
    command = [sys.executable, *_options(), *program]
    if os.name != "nt":
        os.execve(sys.executable, command, environment)
    # On Windows no process can become another one; this one leaves interrupts to that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return subprocess.call(command, env=environment)


def _options() -> list[str]:
    """Return the options of Python's own that this process was started with."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    # They end with "-m", maybe behind other letters, and the package's name, maybe joined.
    if options and options[-1] == __package__:
        options[-2:] = ["".join(options[-2:])]
    letters = options.pop().removesuffix(f"m{__package__}")
    return options if letters == "-" else [*options, letters]
