"""The command line: what is on, and what each level does on this machine.

A command is a function that takes the parsed arguments, prints its result, and
raises whatever goes wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn

from precision_scope._measure import LARGEST_SIZE, SMALLEST_SIZE, Measurement, measure
from precision_scope._report import OVERRIDES, Report, report
from precision_scope.backends._torch import TORCH_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


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
        arguments = parser.parse_args(argv)
        arguments.command(arguments)
    except KeyboardInterrupt:
        return 130  # as shells report a death by SIGINT
    except BrokenPipeError:
        return 141  # and by SIGPIPE
    except Exception as error:
        parser.error(str(error) or type(error).__name__)
    return 0


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
        description="Multiply float32 matrices at each level; show the error against float64 and the speed.",
    )
    command.add_argument(
        "--size", type=_size, metavar="N", help="rows and columns of the matrices (default: by device)"
    )
    command.add_argument("--device", metavar="NAME", help="the device to measure (default: all)")
    # No default of its own, which would undo a --json before the command.
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    command.set_defaults(command=_show_measurements)
    return parser


def _size(text: str) -> int:
    with contextlib.suppress(ValueError):
        if SMALLEST_SIZE <= int(text) <= LARGEST_SIZE:
            return int(text)
    raise argparse.ArgumentTypeError(
        f"must be a whole number from {SMALLEST_SIZE} to {LARGEST_SIZE}, not {text!r}"
    )


# Commands.


def _show_report(arguments: argparse.Namespace) -> None:
    found = report()
    _print(json.dumps(found.to_dict(), indent=2) if arguments.json else _report_for_people(found))


def _show_measurements(arguments: argparse.Namespace) -> None:
    with _progress_line() as show:
        found = measure(show, size=arguments.size, device=arguments.device)
    if arguments.json:
        _print(json.dumps([measurement.to_dict() for measurement in found], indent=2))
    else:
        _print(_measurements_for_people(found))


# What they print.


def _report_for_people(found: Report) -> str:
    isolation = (
        ("on", "a level for each thread and task") if found.isolation else ("off", "one level for all")
    )
    changed = ("yes", "not as the live scopes set them") if found.changed_by_others else ("no", "")
    blocks: dict[str, list[tuple[str, ...]]] = {
        "float32 matmul precision": [
            ("wanted", found.wanted, "by this thread or task"),
            ("applied", found.applied, "in this process"),
            ("default", found.default, "where no scope is live"),
            ("isolation", *isolation),
            ("flags changed by others", *changed),
        ],
        "live scopes": [
            (scope.level, f"thread {scope.thread}", "" if scope.task is None else f"task {scope.task}")
            for scope in found.scopes
        ],
        **{_title(name, found): list(cells.items()) for name, cells in found.backends.items()},
        "environment overrides": [
            (f"{name}={value}", OVERRIDES[name]) for name, value in found.environment.items()
        ],
    }
    paragraphs = [
        f"{title}\n{textwrap.indent(_aligned(rows) or 'none', '  ')}" for title, rows in blocks.items()
    ]
    cells = found.backends[TORCH_FLAGS.name]
    own_flags = ", ".join(f"{cell}={cells[cell]}" for cell in TORCH_FLAGS.convolution_and_rnn_cells)
    note = f"Convolutions and RNNs follow their own flags, whatever the level: {own_flags}."
    return "\n\n".join([*paragraphs, textwrap.fill(note, 88)])


def _title(backend: str, found: Report) -> str:
    level = found.disagreeing.get(backend)
    return f"backend {backend}" + (f" (at {level.value}, not at {found.applied.value})" if level else "")


def _measurements_for_people(found: Sequence[Measurement]) -> str:
    table = _aligned(
        [
            ("device", "level", "size", "error", "time", "speed"),
            *(
                (
                    measurement.device,
                    measurement.level,
                    str(measurement.size),
                    f"{measurement.error:.1e}",
                    f"{measurement.seconds * 1e3:.3f} ms",
                    f"{measurement.times_as_fast:.2f} x",
                )
                for measurement in found
            ),
        ]
    )
    return "\n".join([table, "", *(measurement.sentence for measurement in found)])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


# How they print.


def _print(text: str) -> None:
    try:
        print(text, flush=True)
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
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
