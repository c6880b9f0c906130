"""What the command line prints for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from precision_scope._emulation import ARITHMETICS
from precision_scope._levels import LEVELS
from precision_scope._report import OVERRIDES, Report
from precision_scope.backends._torch import TORCH_FLAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from precision_scope._hardware import Hardware
    from precision_scope._levels import Float32MatmulPrecision
    from precision_scope._measure import Measurement
    from precision_scope._weights import WeightsMeasurement


_MARK = "* emulated on the CPU"


def text_of_report(found: Report) -> str:
    """Return a report as paragraphs."""
    isolation = (
        ("on", "a level for each thread and task") if found.isolation else ("off", "one level for all")
    )
    emulation = (
        ("off", "the hardware at hand")
        if found.emulation is None
        else (found.emulation, "as products on the CPU are computed")
    )
    changed = ("yes", "not as the live scopes set them") if found.changed_by_others else ("no", "")
    blocks: dict[str, list[tuple[str, ...]]] = {
        "float32 matmul precision": [
            ("wanted", found.wanted, "by this thread or task"),
            ("applied", found.applied, "in this process"),
            ("default", found.default, "where no scope is live"),
            ("isolation", *isolation),
            ("emulation", *emulation),
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


def text_of_measurements(found: Sequence[Measurement]) -> str:
    """Return measurements as a table, and what each means."""
    table = _aligned(
        [
            (
                "device",
                "level",
                "size",
                "error",
                "time",
                "speed",
                *(f"error on {like}*" for like in ARITHMETICS),
            ),
            *(
                (
                    measurement.device,
                    measurement.level,
                    str(measurement.size),
                    f"{measurement.error:.1e}",
                    f"{measurement.seconds * 1e3:.3f} ms",
                    f"{measurement.times_as_fast:.2f} x",
                    *(_error(measurement.emulated.get(like)) for like in ARITHMETICS),
                )
                for measurement in found
            ),
        ]
    )
    emulated = [sentence for measurement in found for sentence in measurement.emulated_sentences]
    return "\n".join([table, _MARK, "", *(measurement.sentence for measurement in found), *emulated])


def text_of_weights(found: WeightsMeasurement, top: int) -> str:
    """Return what was measured of a checkpoint as a table of the worst matrices, and what each level does."""
    shown = found.matrices[:top]
    cases: list[tuple[Hardware, Float32MatmulPrecision]] = [
        (like, level) for like, arithmetics in ARITHMETICS.items() for level in arithmetics
    ]
    table = _aligned(
        [
            (
                "error at",
                *LEVELS,
                *(f"{like} {level}*" for like, level in cases),
                "device",
                "shape",
                "matrix",
            ),
            *(
                (
                    "",
                    *map(_error, matrix.errors.values()),
                    *(_error(matrix.emulated[level][like]) for like, level in cases),
                    matrix.device,
                    "x".join(map(str, matrix.shape)),
                    matrix.name,
                )
                for matrix in shown
            ),
        ]
    )
    more = len(found.matrices) - len(shown)
    hidden = [f"and {more} more, with smaller errors (--top {len(found.matrices)} shows all)"] if more else []
    return "\n".join([table, *hidden, _MARK, "", *found.sentences])


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
