"""``measure --weights``: what it finds in checkpoints, what it measures, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_command_line import Products, error_of, ignore_progress, output_of
from torch import nn

from precision_scope import Float32MatmulPrecision, _measure, _weights
from precision_scope._emulation import ARITHMETICS
from precision_scope._weights import WeightsMeasurement, measure_weights

HIGHEST, HIGH, MEDIUM = Float32MatmulPrecision


def layers() -> dict[str, torch.Tensor]:
    """Return the weights of a small transformer, and what is no matrix of it."""
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = nn.TransformerEncoderLayer(64, 4, 128).state_dict()
    return {**state, "positions": torch.arange(8), "half": torch.ones(8, 8, dtype=torch.float16)}


MATRICES = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]


def save_old(state: object, path: Path) -> None:
    """Save in the format of torch before 1.6."""
    torch.save(state, path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "weights.pt": torch.save,
    "pytorch_model.bin": torch.save,
    "old.pth": save_old,
    "model.safetensors": safetensors.torch.save_file,
}


def measured(tmp_path: Path, state: object, name: str = "weights.pt") -> WeightsMeasurement:
    """Save what a checkpoint holds, and measure it."""
    FORMATS[name](state, tmp_path / name)
    return measure_weights(tmp_path / name, ignore_progress, device="cpu")


def refused(path: Path) -> str:
    """Return why a checkpoint is refused: one line, which names the file."""
    with pytest.raises(ValueError, match=r"\A.+\Z") as caught:
        measure_weights(path, ignore_progress)
    file, _, reason = str(caught.value).partition(": ")
    assert file == str(path)
    return reason


# What it finds.


@pytest.mark.parametrize("name", FORMATS)
def test_every_float32_matrix_is_measured(tmp_path: Path, name: str) -> None:
    """In all formats alike; what is no float32 matrix is counted."""
    found = measured(tmp_path, layers(), name)
    assert sorted(matrix.name for matrix in found.matrices) == sorted(MATRICES)
    assert {matrix.name: matrix.shape for matrix in found.matrices}["linear1.weight"] == (128, 64)
    assert found.left_out == {"float32 (1-D)": 8, "int64": 1, "float16": 1}
    assert found.sentences[-1].startswith("Left out are tensors that are no float32 matrices: ")


def test_all_formats_give_the_same_errors(tmp_path: Path) -> None:
    """It is the matrix that is measured."""
    first, *others = (measured(tmp_path, layers(), name).matrices for name in FORMATS)
    assert all(other == first for other in others)


def test_matrices_are_found_however_deep(tmp_path: Path) -> None:
    """In dicts, lists and tuples, under the name of their place; weights that layers share are one."""
    weight = torch.randn(4, 4)
    shared = nn.Linear(3, 3).weight
    state: dict[Any, Any] = {
        "model": {"a.weight": weight, "tied.weight": weight, "transposed.weight": weight.T},
        "optimizer": [{0: (torch.randn(2, 2), None)}, 3, "text"],
        "parameter": shared,
        "model.a": {"weight": torch.randn(5, 5)},
        "empty": torch.ones(0, 4),
        "sparse": torch.eye(3).to_sparse(),
    }
    state["itself"] = state
    found = measured(tmp_path, state)
    assert {matrix.name: matrix.shape for matrix in found.matrices} == {
        "model.a.weight": (4, 4),
        "model.transposed.weight": (4, 4),
        "optimizer.0.0.0": (2, 2),
        "parameter": (3, 3),
        "model.a.weight'": (5, 5),
    }
    assert found.left_out == {"float32 (empty)": 1, "nested, meta or sparse": 1}


def test_a_name_cannot_control_the_terminal(tmp_path: Path) -> None:
    """A hostile file's names are shown escaped."""
    (matrix,) = measured(tmp_path, {"\x1b[2J\nweight": torch.ones(2, 2)}).matrices
    assert matrix.name == r"'\x1b[2J\nweight'"


# What it measures.


def test_the_error_is_that_of_the_product(tmp_path: Path) -> None:
    """Relative to the float64 product with the same vectors, computed here once more."""
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    vectors = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    exact = matrix.double() @ vectors.double()
    (found,) = measured(tmp_path, [matrix]).matrices
    expected = torch.linalg.norm(exact - (matrix @ vectors).double()) / torch.linalg.norm(exact)
    assert found.errors[HIGHEST] == pytest.approx(float(expected), rel=0.2)
    assert 1e-8 < found.errors[HIGHEST] < 1e-6
    assert found.same_bits[HIGHEST]


def test_a_less_precise_level_shows_and_the_worst_come_first(tmp_path: Path) -> None:
    """Matrices that bfloat16 represents exactly suffer less than others."""
    torch.manual_seed(0)
    state = {
        "exact": torch.randn(64, 64).bfloat16().float(),
        "random": torch.randn(64, 64),
        "identity": torch.eye(64),
    }
    with Products():
        found = measured(tmp_path, state)
    assert found.matrices[0].name == "random"
    assert found.matrices == sorted(found.matrices, key=lambda matrix: -matrix.errors[MEDIUM])
    worst = found.matrices[0]
    assert 1e-3 < worst.errors[MEDIUM] < 4e-3
    assert worst.same_bits == {HIGHEST: True, HIGH: True, MEDIUM: False}
    highest, high, medium, *_ = found.sentences
    assert highest.startswith('On cpu, "highest" is true float32, with errors up to ')
    assert high == 'On cpu, "high" gives the results of "highest" bit for bit, with 3 matrices.'
    assert medium.startswith(
        f"On cpu, \"medium\" makes errors up to {worst.errors[MEDIUM]:.1e}, with 'random': "
    )


def test_the_errors_of_emulated_hardware_stand_beside_the_measured_ones(tmp_path: Path) -> None:
    """TF32 and bfloat16 show where the hardware at hand makes no difference, and decide the order."""
    state = {
        "coarse": torch.randn(64, 64).bfloat16().float(),
        "fine": torch.randn(64, 64),
    }
    found = measured(tmp_path, state)
    assert [matrix.name for matrix in found.matrices] == ["fine", "coarse"]
    fine = found.matrices[0]
    assert not fine.shows_levels
    assert fine.worst_emulated_error == fine.emulated[MEDIUM]["tpu"]
    assert fine.emulated[HIGHEST] == {}
    cases: list[Any] = [("cuda", HIGH, 3e-4), ("cuda", MEDIUM, 3e-4), ("tpu", HIGH, 4e-6)]
    for like, level, error in cases:
        assert error / 1.5 < fine.emulated[level][like] < error * 1.5
    assert 1.5e-3 < fine.emulated[MEDIUM]["tpu"] < 3e-3
    said = [sentence for sentence in found.sentences if ", emulated, " in sentence]
    assert [sentence.partition(" makes errors up to ")[0] for sentence in said] == [
        f'On {like}, emulated, "{level}"' for like in ("cuda", "tpu") for level in (HIGH, MEDIUM)
    ]
    assert f"up to {fine.emulated[HIGH]['cuda']:.1e}, with 'fine': up to " in said[0]


def test_the_order_is_that_of_measured_errors_where_a_level_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that of emulated ones elsewhere, whatever float32 loses."""
    state = {"long": torch.randn(64, 4096).bfloat16().float(), "fine": torch.randn(64, 8)}
    found = measured(tmp_path, state)
    assert [matrix.name for matrix in found.matrices] == ["fine", "long"]
    assert found.matrices[0].worst_error < found.matrices[1].worst_error
    real: Callable[..., torch.Tensor] = _measure.multiply

    def multiply(left: torch.Tensor, right: torch.Tensor, level: Float32MatmulPrecision) -> torch.Tensor:
        return real(left, right, level) * (1.001 if level == MEDIUM and left.shape[1] == 4096 else 1)

    monkeypatch.setattr(_weights, "multiply", multiply)
    assert [matrix.name for matrix in measured(tmp_path, state).matrices] == ["long", "fine"]


def test_other_bits_of_the_same_accuracy_are_said_to_be_that() -> None:
    """They are no loss."""
    found = WeightsMeasurement([_matrix(errors=(2e-7, 2e-7, 3e-7), same_bits=(True, True, False))], {})
    assert found.sentences[2] == 'On cpu, "medium" has the accuracy of "highest".'


def test_what_is_not_float32_at_highest_is_said_to_be_overridden() -> None:
    """An environment variable, say, can do that."""
    found = WeightsMeasurement([_matrix(errors=(3e-4, 3e-4, 3e-4), same_bits=(True, True, True))], {})
    assert "is not true float32" in found.sentences[0]


def _matrix(*, errors: tuple[float, ...], same_bits: tuple[bool, ...]) -> Any:
    from precision_scope._weights import MatrixMeasurement  # noqa: PLC0415

    levels = list(Float32MatmulPrecision)
    return MatrixMeasurement(
        "m",
        (2, 2),
        "cpu",
        dict(zip(levels, errors, strict=True)),
        dict(zip(levels, same_bits, strict=True)),
        {level: {like: 3e-4 for like in ARITHMETICS if level in ARITHMETICS[like]} for level in levels},
    )


def test_matrices_that_are_not_finite_come_first_and_are_counted(tmp_path: Path) -> None:
    """There is no error to tell, and JSON has no number for it; the others are judged all the same."""
    state = {"fine": torch.randn(4, 4), "nan": torch.full((4, 4), math.nan), "inf": torch.eye(4) * math.inf}
    found = measured(tmp_path, state)
    assert {matrix.name for matrix in found.matrices[:2]} == {"nan", "inf"}
    assert all(all(matrix.same_bits.values()) for matrix in found.matrices)
    assert found.sentences[1] == 'On cpu, "high" gives the results of "highest" bit for bit, with 1 matrix.'
    assert "Of 2 matrices not all entries are finite." in found.sentences
    json.loads(json.dumps(found.to_dict(), allow_nan=False))
    only = measured(tmp_path, [state["nan"]])
    assert only.sentences[0] == 'On cpu, "highest" cannot be judged by these matrices.'


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 3e38])
def test_very_small_and_very_large_matrices_are_judged_as_others(tmp_path: Path, scale: float) -> None:
    """Their products overflow or lose bits at all levels alike, which says nothing of a level."""
    (matrix,) = measured(tmp_path, [(torch.rand(64, 64) * scale)]).matrices
    assert 1e-8 < matrix.errors[HIGHEST] < 1e-6


@pytest.mark.parametrize("shape", [(1, 2**22), (4, 2**20), (2**20, 1), (2**18, 16)])
def test_wide_and_tall_matrices_are_judged_as_others(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Long sums lose bits in float32, which says nothing of a level either; nor does it take much memory."""
    found = measured(tmp_path, [torch.rand(shape)])
    assert found.matrices[0].shape == shape
    assert "is true float32" in found.sentences[0]


def test_a_matrix_that_loses_nothing_at_highest_counts(tmp_path: Path) -> None:
    """Its error at another level is no less for that."""
    identity = torch.eye(64)
    with Products():
        found = measured(tmp_path, {"identity": identity})
    found.matrices[0].errors[MEDIUM] = 2e-4
    assert "makes errors up to 2.0e-04, with 'identity': up to 3,355 times" in found.sentences[2]


def test_a_matrix_of_zeros_is_the_same_everywhere(tmp_path: Path) -> None:
    """Emulated, too: nothing is said of other bits."""
    found = measured(tmp_path, [torch.zeros(8, 8)])
    assert found.sentences[-1] == 'On tpu, emulated, "medium" has the accuracy of "highest".'


def test_a_matrix_of_zeros_has_no_error(tmp_path: Path) -> None:
    """Nothing is divided by its norm."""
    (matrix,) = measured(tmp_path, [torch.zeros(4, 4)]).matrices
    assert set(matrix.errors.values()) == {0.0}


def test_of_a_very_large_matrix_some_rows_are_measured(tmp_path: Path) -> None:
    """A checkpoint of some bytes can hold one of terabytes."""
    found = measured(tmp_path, [torch.randn(1, 1000).expand(10**9, 1000)])
    assert found.matrices[0].shape == (10**9, 1000)
    assert found.matrices[0].errors[HIGHEST] < 1e-6


# What it refuses.


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """Empty files, and others."""
    for name in ("empty.pt", "empty.safetensors"):
        (tmp_path / name).write_bytes(b"")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("These are no weights, but a sentence of some length.")
    for path in sorted(tmp_path.iterdir()):
        assert refused(path) == "it is no checkpoint of torch.save or safetensors", path


def test_a_part_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """A download that was broken off, say; the reason is no advice to load it unsafely."""
    for name, save in FORMATS.items():
        save({"weight": torch.randn(64, 64)}, tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-5000])
        reason = refused(tmp_path / name)
        assert reason.startswith("it is no checkpoint, or not all of it: "), name
        assert "weights_only" not in reason
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps([1, 2])[:-1])
    assert "weights_only" not in refused(tmp_path / "pickle.pt")


def test_the_format_is_told_by_the_contents(tmp_path: Path) -> None:
    """The name may be any, as in caches of downloads."""
    for name, save in FORMATS.items():
        save({"weight": torch.ones(2, 2)}, tmp_path / name)
        (tmp_path / name).rename(tmp_path / "blob")
        assert measure_weights(tmp_path / "blob", ignore_progress).matrices[0].name == "weight"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Instead of waiting for somebody to write to it."""
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "it is no regular file"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_numbers_of_their_own_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not keep the others from being measured."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    state = {"m": torch.empty(4, 4, device="meta"), "n": nested, "w": torch.ones(3, 3)}
    monkeypatch.setattr(torch, "load", lambda *_, **__: state)  # not every torch loads nested tensors safely
    found = measured(tmp_path, {})
    assert [matrix.name for matrix in found.matrices] == ["w"]
    assert found.left_out == {"nested, meta or sparse": 2}


def test_names_are_of_moderate_length(tmp_path: Path) -> None:
    """However long and deep those of the file are; a tensor by itself has one, too."""
    state: Any = torch.ones(2, 2)
    for depth in range(150):
        state = {"k" * 5000: state, depth: depth}
    (matrix,) = measured(tmp_path, {"deep": state}).matrices
    assert matrix.name == "k" * 200
    (matrix,) = measured(tmp_path, torch.ones(2, 2)).matrices
    assert matrix.name == "tensor"


@pytest.mark.parametrize("save", [save_old, torch.save])
def test_a_hostile_pickle_is_refused(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    """Without running what it asks for, which is named."""

    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "hostile.pt"
    save({"weight": torch.ones(2, 2), "hostile": Hostile()}, path)
    assert refused(path).startswith(f"it needs {os.mkdir.__module__}.mkdir, and loading that could run code")
    path.write_bytes(pickle.dumps(Hostile()))
    refused(path)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_objects_is_refused_with_advice(tmp_path: Path) -> None:
    """The usual case: a training script's options saved with the weights."""
    torch.save({"weight": torch.ones(2, 2), "options": argparse.Namespace(rate=1)}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt") == (
        "it needs argparse.Namespace, and loading that could run code; "
        "save a state_dict, which holds tensors and plain values alone"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_torchscript_archive_is_refused_with_advice(tmp_path: Path) -> None:
    """It has the same suffix, and is no checkpoint."""
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt") == "it is a TorchScript archive; save its state_dict"


def test_a_checkpoint_without_a_float32_matrix_is_refused(tmp_path: Path) -> None:
    """It says what there is instead."""
    torch.save([torch.ones(2, 2).bfloat16(), torch.ones(3), torch.ones(2, 2).bfloat16()], tmp_path / "w.pt")
    reason = refused(tmp_path / "w.pt")
    assert reason == "it has no float32 matrix among its tensors: 2 bfloat16, 1 float32 (1-D)"
    torch.save({"epoch": 3}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt") == "it has no float32 matrix"


def test_safetensors_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no dependency; the message says how to get it."""
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert refused(tmp_path / "w.safetensors").endswith("python -m pip install safetensors")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    """One that is no checkpoint at once; one of the old format if memory cannot hold it."""
    for name, start in (
        ("zip.pt", b"PK\x03\x04"),
        ("old.pt", b"\x80\x02"),
        ("huge.safetensors", b"\xff" * 7),
    ):
        with (tmp_path / name).open("wb") as file:
            file.write(start)
            file.truncate(2**42)  # takes no space
    assert refused(tmp_path / "zip.pt").startswith("it is no checkpoint")
    assert refused(tmp_path / "huge.safetensors").startswith("it is no checkpoint")
    assert "larger than the memory" in refused(tmp_path / "old.pt")


def test_a_matrix_that_cannot_be_multiplied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory on the device, say."""

    def multiply(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(_weights, "multiply", multiply)
    torch.save({"vast": torch.ones(1, 1)}, tmp_path / "w.pt")
    assert refused(tmp_path / "w.pt") == "vast cannot be multiplied: out of memory"


# The command.


def test_the_command_shows_the_worst_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as asked for, with the number of those that are not shown."""
    torch.save(layers(), tmp_path / "w.pt")
    arguments = ("measure", "--weights", str(tmp_path / "w.pt"), "--device", "cpu")
    everything = output_of(capsys, *arguments).splitlines()
    emulated = ["cuda", "high*", "cuda", "medium*", "tpu", "high*", "tpu", "medium*"]
    assert everything[0].split() == [
        *("error", "at", "highest", "high", "medium", *emulated, "device", "shape", "matrix")
    ]
    assert everything[5] == "* emulated on the CPU"
    assert [len(line.split()) for line in everything[1:5]] == [10] * 4
    assert sorted(line.split()[-1] for line in everything[1:5]) == sorted(MATRICES)
    shown = output_of(capsys, *arguments, "--top", "1").splitlines()
    assert shown[2] == "and 3 more, with smaller errors (--top 4 shows all)"
    assert shown[3:] == everything[5:]


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All matrices, or the worst."""
    torch.save(layers(), tmp_path / "w.pt")
    arguments = ("measure", "--weights", str(tmp_path / "w.pt"), "--json")
    found = json.loads(output_of(capsys, *arguments))
    assert len(found["matrices"]) == 4
    levels = found["matrices"][0]["levels"]
    assert levels["highest"]["same_bits"] is True
    assert {level: [*measured["emulated"]] for level, measured in levels.items()} == {
        "highest": [],
        "high": ["cuda", "tpu"],
        "medium": ["cuda", "tpu"],
    }
    assert 1e-4 < levels["high"]["emulated"]["cuda"] < 1e-3
    assert found["left_out"] == {"float32 (1-D)": 8, "int64": 1, "float16": 1}
    assert json.loads(output_of(capsys, *arguments, "--top", "2"))["matrices"] == found["matrices"][:2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--weights", "missing.pt"), "No such file or directory: 'missing.pt'"),
        (("--weights", "."), ".: it is no regular file"),
        (("--weights", "w.pt", "--size", "64"), "--size does not go with --weights"),
        (("--weights", "w.pt", "--top", "0"), "must be a whole number above zero, not '0'"),
        (("--top", "3"), "--top goes with --weights"),
        (("--weights", "w.pt", "--device", "tpu"), "there is no device 'tpu'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured."""
    assert error in error_of(capsys, "measure", *arguments)


def test_progress_names_the_matrices(tmp_path: Path) -> None:
    """One after the other, out of how many."""
    torch.save(layers(), tmp_path / "w.pt")
    steps: list[str] = []
    measure_weights(tmp_path / "w.pt", steps.append, device="cpu")
    assert steps[0] == "reading w.pt"
    assert [step.partition(": ")[0] for step in steps[1:]] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert {step.partition(": ")[2] for step in steps[1:]} == {*MATRICES}


def test_what_a_file_says_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor can its name."""
    path = tmp_path / "\x1b[31m.pt"
    path.write_bytes(b"\x80\x02c\x1b[2J\x07\nx\n.")
    error = error_of(capsys, "measure", "--weights", str(path))
    assert r"\x1b[31m.pt: it needs \x1b[2J\x07.x, and" in error


def test_names_that_standard_output_cannot_show_are_written_out(tmp_path: Path) -> None:
    """The table comes all the same."""
    torch.save({"größe": torch.ones(2, 2)}, tmp_path / "w.pt")
    result = subprocess.run(
        [sys.executable, "-m", "precision_scope", "measure", "--weights", str(tmp_path / "w.pt")],
        capture_output=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe" in result.stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["weights.pt", "model.safetensors"])
def test_memory_stays_near_the_largest_tensor(tmp_path: Path, name: str) -> None:
    """Whatever the size of the file: pages of the file itself do not count, which the system takes back."""
    FORMATS[name]({f"weight{i}": torch.randn(1024, 8192) for i in range(12)}, tmp_path / name)
    code = f"""
        import re, threading, torch
        from pathlib import Path
        from precision_scope._weights import measure_weights

        def used():
            return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

        before, most = used(), 0
        def watch(step):
            global most
            most = max(most, used())
        measure_weights(Path({str(tmp_path / name)!r}), watch, device="cpu")
        print(most - before)
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.stderr == ""
    assert float(result.stdout) < 200  # MiB; the file has 384, a tensor 32
