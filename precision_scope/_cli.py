"""The command line: what is on, and what each level does on this machine.

A command is a function that takes the parsed arguments, prints its result, and
raises whatever goes wrong. None of this imports torch before it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from precision_scope._hardware import parse_hardware
from precision_scope._levels import parse_level
from precision_scope._run import check, run, split

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


_T = TypeVar("_T")

_TOP = 20  # matrices of a checkpoint that fit on a screen


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_harmless(' '.join(message.split()))}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.

    Raises:
        SystemExit: With status 2 after an error, with 0 after ``--help``.
    """
    parser = _parser()
    try:
        own = [*(sys.argv[1:] if argv is None else argv)]
        program: list[str] = []
        if own[:1] == ["run"]:
            own[1:], program = split(own[1:])
        arguments = parser.parse_args(own)
        arguments.program = program
        return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        return 130  # as shells report a death by SIGINT
    except BrokenPipeError:
        return 141  # and by SIGPIPE
    except Exception as error:
        parser.error(str(error) or type(error).__name__)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m precision_scope",
        description="Show which float32 matmul precision is on, and what overrides it.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_show_report)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    command = commands.add_parser(
        "measure",
        help="measure what each level does on this machine",
        description="Multiply float32 matrices at each level; show the error against float64 and the speed, "
        "and, emulated on the CPU, the error on a GPU and a TPU.",
    )
    command.add_argument(
        "--size", type=_size, metavar="N", help="rows and columns of the matrices (default: by device)"
    )
    command.add_argument("--device", metavar="NAME", help="the device to measure (default: all)")
    command.add_argument(
        "--weights", type=Path, metavar="FILE", help="multiply the float32 matrices of a checkpoint instead"
    )
    command.add_argument(
        "--top", type=_count, metavar="N", help=f"of these, show the N worst (default: {_TOP}; all in JSON)"
    )
    # No default of its own, which would undo a --json before the command.
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    command.set_defaults(command=_show_measurements)

    command = commands.add_parser(
        "run",
        help="run a program at a level, or with emulation",
        usage="%(prog)s [-h] [--level LEVEL [--force]] [--emulate HARDWARE] "
        "(SCRIPT | -m MODULE | -c CODE | -) [ARGUMENT ...]",
        description="Run a script, a module, code, or (-) standard input, and what it starts, at a level, "
        "with emulated hardware, or both.",
        allow_abbrev=False,
    )
    command.add_argument(
        "--level", type=_argument(parse_level), metavar="LEVEL", help="highest, high or medium"
    )
    command.add_argument(
        "--force", action="store_true", help="keep the level, whatever the program sets or scopes"
    )
    command.add_argument(
        "--emulate",
        type=_argument(parse_hardware),
        metavar="HARDWARE",
        help="compute float32 products on the CPU as that hardware does at each level: cuda or tpu",
    )
    command.set_defaults(command=_run)
    return parser


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return what has the parser say what ``parse`` says of a wrong argument."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")


def _size(text: str) -> int:
    from precision_scope._measure import LARGEST_SIZE, SMALLEST_SIZE  # noqa: PLC0415

    with contextlib.suppress(ValueError):
        if SMALLEST_SIZE <= int(text) <= LARGEST_SIZE:
            return int(text)
    raise argparse.ArgumentTypeError(
        f"must be a whole number from {SMALLEST_SIZE} to {LARGEST_SIZE}, not {text!r}"
    )


# Commands. What they need of torch is imported by each, not by all.


def _show_report(arguments: argparse.Namespace) -> None:
    from precision_scope import report  # noqa: PLC0415
    from precision_scope._text import text_of_report  # noqa: PLC0415

    found = report()
    _print(json.dumps(found.to_dict(), indent=2) if arguments.json else text_of_report(found))


def _show_measurements(arguments: argparse.Namespace) -> None:
    if arguments.weights is not None:
        _show_weights(arguments)
        return
    if arguments.top is not None:
        raise ValueError("--top goes with --weights")
    from precision_scope._measure import measure  # noqa: PLC0415
    from precision_scope._text import text_of_measurements  # noqa: PLC0415

    with _progress_line() as show:
        found = measure(show, size=arguments.size, device=arguments.device)
    if arguments.json:
        _print(json.dumps([measurement.to_dict() for measurement in found], indent=2))
    else:
        _print(text_of_measurements(found))


def _show_weights(arguments: argparse.Namespace) -> None:
    if arguments.size is not None:
        raise ValueError("--size does not go with --weights: the matrices have their own")
    from precision_scope._text import text_of_weights  # noqa: PLC0415
    from precision_scope._weights import measure_weights  # noqa: PLC0415

    with _progress_line() as show:
        found = measure_weights(arguments.weights, show, device=arguments.device)
    if arguments.json:
        _print(json.dumps(found.to_dict(arguments.top), indent=2))
    else:
        _print(text_of_weights(found, arguments.top or _TOP))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.level is None and (arguments.force or arguments.emulate is None):
        raise ValueError(
            "say at which --level to run" + ("" if arguments.force else ", or what to --emulate")
        )
    check(arguments.program)
    return run(arguments.program, level=arguments.level, force=arguments.force, emulate=arguments.emulate)


# How they print.


def _harmless(text: str) -> str:
    """Return a text with what a terminal would obey, from the names in a file, written out."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        # What is left in the buffer would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextlib.contextmanager
def _progress_line() -> Generator[Callable[[str], None], None, None]:
    """Yield what shows a text in place of the last one; on a terminal only."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: it is closed
        yield lambda _text: None
        return

    def show(text: str) -> None:
        line = _harmless(text)[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
