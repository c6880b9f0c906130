"""``python -m precision_scope``: what it prints, and what it measures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from precision_scope import (
    Float32MatmulPrecision,
    _cli,
    _measure,
    _report,
    _torch_api,
    matmul_precision,
    report,
)
from precision_scope._measure import Measurement, measure
from precision_scope.backends._torch import TORCH_FLAGS

if TYPE_CHECKING:
    from collections.abc import Generator

LEVELS = list(Float32MatmulPrecision)
SMALL = ("--size", "64")


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    # Buffered, as a program's output is in a pipe; CI may have it otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *arguments], check=False, text=True, timeout=120, env=environment, **options
    )


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return run_python("-m", "precision_scope", *arguments, **options)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line in this process, and return what it prints."""
    assert _cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line in this process to its failure, and return its one line."""
    with pytest.raises(SystemExit) as stopped:
        _cli.main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def block_of(output: str, title: str) -> list[list[str]]:
    """Return the words of the lines below a title, up to the next blank line."""
    lines = output.splitlines()
    below = lines[lines.index(title) + 1 :]
    return [line.split() for line in below[: below.index("")]]


def ignore_progress(_text: str) -> None:
    """Show nothing."""


# The report.


def test_the_report_says_what_is_wanted_applied_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The three levels stand at the top, each with its own value."""
    with matmul_precision("high"):
        wanted, applied, default, *_ = block_of(output_of(capsys), "float32 matmul precision")
    assert wanted[:2] == ["wanted", "high"]
    assert applied[:2] == ["applied", "high"]
    assert default[:2] == ["default", "highest"]


def test_the_report_shows_every_cell_of_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """Each backend has a block with one line for each of its cells."""
    with matmul_precision("medium"):
        output = output_of(capsys)
        cells = report().backends["torch"]
    assert block_of(output, "backend torch") == [[cell, value] for cell, value in cells.items()]


def test_the_report_says_which_backend_disagrees(capsys: pytest.CaptureFixture[str]) -> None:
    """Its title has the level that it is at."""
    with matmul_precision("high"):
        torch.set_float32_matmul_precision("medium")
        assert block_of(output_of(capsys), "backend torch (at medium, not at high)")


def test_the_report_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The values of a block stand below one another."""
    cells = report().backends["torch"]
    lines = [line for line in output_of(capsys).splitlines() if line.split()[:1] and line.split()[0] in cells]
    assert len(lines) == len(cells)
    assert len({len(line.rpartition(" ")[0]) for line in lines}) == 1


def test_the_report_lists_the_live_scopes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each live scope has a line with its level and thread."""
    with matmul_precision("medium"), matmul_precision("high"):
        output = output_of(capsys)
    assert [line[:2] for line in block_of(output, "live scopes")] == [
        ["medium", "thread"],
        ["high", "thread"],
    ]


def test_the_report_says_that_no_scope_is_live(capsys: pytest.CaptureFixture[str]) -> None:
    """A block without lines says so."""
    assert block_of(output_of(capsys), "live scopes") == [["none"]]


def test_the_report_explains_an_override(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment variable that is set is shown with its value and what it means."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    (line,) = [line for line in output_of(capsys).splitlines() if "NVIDIA_TF32_OVERRIDE=0" in line]
    assert "never use TF32" in line


def test_the_report_says_that_convolutions_and_rnns_follow_their_own_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last paragraph says so, with the flags."""
    paragraph = " ".join(output_of(capsys).rpartition("\n\n")[2].split())
    assert paragraph.startswith("Convolutions and RNNs follow their own flags")
    cells = report().backends["torch"]
    for cell in TORCH_FLAGS.convolution_and_rnn_cells:
        assert f"{cell}={cells[cell]}" in paragraph


@pytest.mark.parametrize(("written", "shown"), [("high", "no"), ("medium", "yes")])
def test_the_report_says_whether_others_changed_the_flags(
    written: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write by other code inside a live scope shows."""
    with matmul_precision("high"):
        torch.set_float32_matmul_precision(written)
        lines = block_of(output_of(capsys), "float32 matmul precision")
    assert ["flags", "changed", "by", "others", shown] in [line[:5] for line in lines]


def test_the_report_says_that_isolation_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether threads and tasks have levels of their own is shown."""
    lines = block_of(output_of(capsys), "float32 matmul precision")
    assert ["isolation", "off"] in [line[:2] for line in lines]


def test_the_report_says_that_isolation_is_on() -> None:
    """The command line sees the environment variable."""
    result = subprocess.run(
        [sys.executable, "-m", "precision_scope"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PRECISION_SCOPE_ISOLATION": "1"},
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = block_of(result.stdout, "float32 matmul precision")
    assert ["isolation", "on"] in [line[:2] for line in lines]


@pytest.mark.parametrize("like", [None, "tpu"])
def test_the_report_says_what_is_emulated(
    like: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that nothing is."""
    monkeypatch.setattr(_report, "emulated_hardware", lambda: like)
    lines = block_of(output_of(capsys), "float32 matmul precision")
    assert ["emulation", like or "off"] in [line[:2] for line in lines]
    assert json.loads(output_of(capsys, "--json"))["emulation"] == like


def test_json_is_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints what report().to_dict() returns."""
    with matmul_precision("high"):
        assert json.loads(output_of(capsys, "--json")) == report().to_dict()


# Measuring.


class Products(TorchFunctionMode):
    """Watches float32 products, and computes those at "medium" from bfloat16 operands."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.levels: list[str] = []

    def __torch_function__(
        self, function: Any, _types: Any, operands: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        """Do what is described above."""
        if function is torch.Tensor.matmul and operands[0].dtype == torch.float32:
            self.levels.append(torch.get_float32_matmul_precision())
            if self.levels[-1] == "medium":
                operands = tuple(operand.bfloat16().float() for operand in operands)
        return function(*operands, **(keywords or {}))


def test_measuring_gives_each_level_on_the_cpu() -> None:
    """The CPU, which is everywhere, is measured at every level in order."""
    found = measure(ignore_progress, size=64, device="cpu")
    assert [(record.device, record.level, record.size) for record in found] == [
        ("cpu", level, 64) for level in LEVELS
    ]


def test_measuring_runs_products_at_each_level() -> None:
    """While products run torch's flags are at each level in turn; then they are as before."""
    with Products() as products:
        measure(ignore_progress, size=64, device="cpu")
    assert set(products.levels) == set(LEVELS)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_error_is_that_of_float32() -> None:
    """The error against float64 is of the size of float32's rounding."""
    highest, *_ = measure(ignore_progress, size=64, device="cpu")
    assert 2**-26 < highest.error < 2**-20
    assert highest.times_the_error == 1


def test_the_errors_of_emulated_hardware_are_measured_beside() -> None:
    """Those of TF32 and bfloat16, whatever the hardware at hand does."""
    highest, high, medium = measure(ignore_progress, size=512, device="cpu")
    assert highest.emulated == {}
    expected: list[tuple[Measurement, Any, float]] = [
        (high, "cuda", 3e-4),
        (medium, "cuda", 3e-4),
        (high, "tpu", 4e-6),
        (medium, "tpu", 2e-3),
    ]
    for measured, like, error in expected:
        assert error / 1.5 < measured.emulated[like] < error * 1.5
    assert medium.to_dict()["emulated"] == medium.emulated


def test_a_less_precise_level_shows_in_its_error_and_bits() -> None:
    """A level that rounds to bfloat16 has some thousand times the error, and other bits."""
    with Products():
        _, high, medium = measure(ignore_progress, size=64, device="cpu")
    assert high.same_bits
    assert not medium.same_bits
    assert 2**-10 < medium.error < 2**-7
    assert medium.times_the_error == medium.error / (high.error / high.times_the_error)
    assert medium.times_the_error > 1000


class Clock:
    """A clock that products move on, by times given in advance."""

    def __init__(self, times: dict[Float32MatmulPrecision, list[float]]) -> None:
        """Take the times of the products of each level; the last one repeats."""
        self.times = times
        self.now = 0.0
        self.products: list[Float32MatmulPrecision] = []

    def multiply(self, level: Float32MatmulPrecision) -> None:
        """Let the time of one product pass."""
        self.products.append(level)
        times = self.times[level]
        self.now += times.pop(0) if len(times) > 1 else times[0]

    def perf_counter(self) -> float:
        """Tell the time."""
        return self.now


def test_the_time_is_the_shortest_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow repeat, at the start or later, does not count."""
    clock = Clock({LEVELS[0]: [4, 2, 8], LEVELS[1]: [1, 8], LEVELS[2]: [8, 4]})
    monkeypatch.setattr(_measure, "time", clock)
    assert _measure._fastest(clock.multiply, ignore_progress) == {
        LEVELS[0]: 2,
        LEVELS[1]: 1,
        LEVELS[2]: 4,
    }


def test_levels_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slows the machine for a while slows all levels."""
    clock = Clock({level: [1] for level in LEVELS})
    monkeypatch.setattr(_measure, "time", clock)
    _measure._fastest(clock.multiply, ignore_progress)
    assert clock.products[:6] == LEVELS * 2


@pytest.mark.parametrize(("seconds", "rounds"), [(10, 3), (0.001, 20), (0.1, 5)])
def test_slow_products_are_repeated_less(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeats end after a while, but not before there are several."""
    clock = Clock({level: [seconds] for level in LEVELS})
    monkeypatch.setattr(_measure, "time", clock)
    _measure._fastest(clock.multiply, ignore_progress)
    assert len(clock.products) == rounds * len(LEVELS)


def test_speed_is_relative_to_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time is twice as fast."""
    times = dict(zip(LEVELS, (0.4, 0.2, 0.8), strict=True))
    monkeypatch.setattr(_measure, "_fastest", lambda _multiply, _progress: times)
    found = measure(ignore_progress, size=64, device="cpu")
    assert [record.seconds for record in found] == [0.4, 0.2, 0.8]
    assert [record.times_as_fast for record in found] == [1, 2, 0.5]


def test_the_size_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a size, the CPU gets the one meant for it."""
    monkeypatch.setattr(_measure, "_CPU_SIZE", 96)
    assert {record.size for record in measure(ignore_progress, device="cpu")} == {96}


@pytest.mark.parametrize(
    ("asked", "measured"),
    [(None, ["cpu", "cuda:0", "cuda:1"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"])],
)
def test_a_device_is_chosen_by_name_or_kind(
    asked: str | None, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default all devices present are measured, else those that the name fits."""
    monkeypatch.setattr(_torch_api, "devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(_measure, "_measure_device", lambda name, *_: [measurement("high", device=name)])
    assert [record.device for record in measure(ignore_progress, device=asked)] == measured


def test_the_cpu_is_a_device() -> None:
    """The devices present are named, the CPU first."""
    assert _torch_api.devices()[0] == "cpu"


def test_progress_names_the_device_and_each_level() -> None:
    """The callback is told what is being done."""
    texts: list[str] = []
    measure(texts.append, size=64, device="cpu")
    assert all(text.startswith("cpu: ") for text in texts)
    for level in LEVELS:
        assert f"cpu: error at {level}" in texts
        assert f"cpu: time at {level}, round 3" in texts


# What a measurement says in words.


def measurement(level: str, **fields: Any) -> Measurement:
    """Return a record of a level that does the same as "highest", but for some fields."""
    same: dict[str, Any] = {
        "device": "cuda:0",
        "level": Float32MatmulPrecision(level),
        "size": 64,
        "error": 2e-7,
        "times_the_error": 1.0,
        "same_bits": True,
        "seconds": 1e-3,
        "times_as_fast": 1.0,
        "emulated": {},
    }
    return Measurement(**{**same, **fields})


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (measurement("highest"), '"highest" is true float32, with an error of 2.0e-07.'),
        (
            measurement("highest", error=3e-4),
            '"highest" is not true float32: its error is 3.0e-04, so something else overrides it.',
        ),
        (measurement("high"), '"high" gives the results of "highest" bit for bit, and is about as fast.'),
        (
            measurement("high", times_as_fast=1.5),
            '"high" gives the results of "highest" bit for bit, and is 1.5 times as fast.',
        ),
        (
            measurement("high", same_bits=False, times_the_error=1.2, times_as_fast=0.5),
            '"high" gives other bits than "highest" with the same accuracy, and is 0.5 times as fast.',
        ),
        (
            measurement("medium", same_bits=False, times_the_error=4.25),
            '"medium" makes 4.2 times the error of "highest", and is about as fast.',
        ),
        (
            measurement("medium", same_bits=False, times_the_error=1234.5, times_as_fast=11.9),
            '"medium" makes 1,234 times the error of "highest", and is 12 times as fast.',
        ),
    ],
)
def test_a_measurement_says_what_the_level_does(record: Measurement, sentence: str) -> None:
    """One sentence tells the accuracy and the speed, relative to "highest"."""
    assert record.sentence == f"On cuda:0, {sentence}"


# The measure command.


def test_measure_prints_a_row_and_a_sentence_for_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    """A table comes first, then the sentences."""
    lines = output_of(capsys, "measure", *SMALL, "--device", "cpu").splitlines()
    table, mark, sentences = lines[:4], lines[4], lines[6:]
    assert table[0].split() == [
        *("device", "level", "size", "error", "time", "speed", "error", "on", "cuda*", "error", "on", "tpu*")
    ]
    assert [row.split()[:3] for row in table[1:]] == [["cpu", level, "64"] for level in LEVELS]
    assert [len(row.split()) for row in table[1:]] == [8, 10, 10]
    assert mark == "* emulated on the CPU"
    assert [sentence.partition('" ')[0] for sentence in sentences] == [
        *(f'On cpu, "{level}' for level in LEVELS),
        *(f'On {like}, emulated, "{level}' for level in ("high", "medium") for like in ("cuda", "tpu")),
    ]
    assert re.search(r"makes [12],\d{3} times", sentences[3])


@pytest.mark.parametrize("arguments", [("measure", "--json"), ("--json", "measure")])
def test_measure_prints_json(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """--json, before or after the command, prints the records with their sentences."""
    found = json.loads(output_of(capsys, *arguments, *SMALL, "--device", "cpu"))
    assert [record["level"] for record in found] == LEVELS
    fields = {field: record for record in found for field in record}
    assert set(fields) == {*Measurement.__slots__, "sentence"}


# Errors.


@pytest.mark.parametrize("size", ["63", "32769", "0", "-64", "1e3", "many", "", "9" * 5000])
def test_a_size_out_of_range_is_refused(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that is no number, or too small or large to measure, is an error that says so."""
    monkeypatch.setattr(_measure, "measure", lambda *_, **_keywords: [])
    error = error_of(capsys, "measure", f"--size={size}")
    assert "argument --size: must be a whole number from 64 to 32768" in error


@pytest.mark.parametrize("size", [64, 32768])
def test_the_smallest_and_largest_size_are_taken(size: int) -> None:
    """Both ends of the range that the error names are in it."""
    assert _cli._parser().parse_args(["measure", "--size", str(size)]).size == size


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the device and those present."""
    error = error_of(capsys, "measure", "--device", "abacus")
    assert "there is no device 'abacus', only cpu" in error


@pytest.mark.parametrize(
    "arguments", [("no-such-command",), ("--no-such-option",), ("measure", "two\nlines")]
)
def test_arguments_that_make_no_sense_are_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error quotes what was wrong and dumps no usage."""
    error = error_of(capsys, *arguments)
    assert error.startswith("python -m precision_scope")
    assert arguments[-1].split()[0] in error
    assert "usage" not in error


@pytest.mark.parametrize(
    ("failure", "shown"),
    [(RuntimeError("out of\n  memory"), "out of memory"), (MemoryError(), "MemoryError")],
)
def test_a_failure_is_one_line(
    failure: Exception, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong inside is an error too, without a traceback."""

    def fail(*_arguments: Any, **_keywords: Any) -> None:
        raise failure

    monkeypatch.setattr(_measure, "measure", fail)
    assert error_of(capsys, "measure") == f"python -m precision_scope: error: {shown}"


# The process.


def test_importing_the_package_imports_nothing_of_the_command_line() -> None:
    """Neither the command line nor argparse costs those who import the package."""
    code = (
        "import sys, torch; before = {*sys.modules}; from precision_scope import report; "
        "print(*{*sys.modules} - before)"
    )
    imported = run_python("-c", code, stdout=subprocess.PIPE).stdout.split()
    assert "precision_scope._report" in imported
    assert not {"argparse", "precision_scope._cli", "precision_scope._measure"} & {*imported}


def test_the_module_runs() -> None:
    """Python -m precision_scope prints the report, and nothing on standard error."""
    result = run(capture_output=True)
    assert result.returncode == 0
    assert result.stdout.startswith("float32 matmul precision\n")
    assert result.stderr == ""


def test_the_module_exits_with_the_status() -> None:
    """A wrong argument makes the exit status 2, with one line on standard error."""
    result = run("measure", "--size", "7", capture_output=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_went_away_is_no_error() -> None:
    """A closed pipe ends the output without a word, as for any filter."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = run("--json", stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    """Output that cannot be written is an error like any other."""
    with Path("/dev/full").open("w") as full:
        result = run(stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2
    assert result.stderr == "python -m precision_scope: error: [Errno 28] No space left on device\n"


class Terminal:
    """A pseudo-terminal for the standard error of a process."""

    def __init__(self) -> None:
        """Open one."""
        self.ours, self.theirs = os.openpty()
        self.seen = ""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Python with the terminal for its standard error."""
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=self.theirs, text=True
        )
        os.close(self.theirs)
        return process

    def read_until(self, text: str | None) -> str:
        """Read until a text has been seen, or to the end."""
        while text is None or text not in self.seen:
            try:
                read = os.read(self.ours, 4096)
            except OSError:  # what Linux says at the end
                read = b""
            if not read:
                break
            self.seen += read.decode()
        return self.seen

    def close(self) -> None:
        """Close our end."""
        os.close(self.ours)


@pytest.fixture
def terminal() -> Generator[Terminal, None, None]:
    """Open a pseudo-terminal for the test."""
    if not hasattr(os, "openpty"):
        pytest.skip("no pseudo-terminals here")
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_progress_is_one_line_on_a_terminal(terminal: Terminal) -> None:
    """Each step is written over the last one, and the line is empty in the end."""
    with terminal.start("-m", "precision_scope", "measure", *SMALL) as process:
        seen = terminal.read_until(None)
        assert process.stdout is not None
        assert process.stdout.read().startswith("device")
    steps = seen.split("\r\x1b[K")
    assert "cpu: time at medium, round 3" in steps
    assert "\n" not in seen
    assert steps[-1] == ""


def test_an_interrupt_ends_it_quietly(terminal: Terminal) -> None:
    """Ctrl-C wipes the progress line and makes the exit status 130."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from precision_scope import _cli; sys.exit(_cli.main(['measure', '--size', '2048']))"
    )
    with terminal.start("-c", code) as process:
        terminal.read_until("round 1")
        process.send_signal(signal.SIGINT)
        seen = terminal.read_until(None)
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert seen.endswith("\r\x1b[K")
    assert "Traceback" not in seen
