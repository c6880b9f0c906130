"""The float32 matrices of a checkpoint, one after another."""

from __future__ import annotations

import collections
import contextlib
import importlib
import math
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

_LONGEST_NAME = 200


class Checkpoint(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        matrices: By name, what loads each float32 matrix.
        left_out: How many other tensors there are, by what they are.
    """

    matrices: dict[str, Callable[[], torch.Tensor]]
    left_out: dict[str, int]


def read_checkpoint(path: Path) -> Checkpoint:
    """Find the float32 matrices of a checkpoint, without loading them.

    Args:
        path: A file of torch.save, of which only tensors and plain containers
            are loaded, or one of safetensors, where that package is installed.
            One of torch before 1.6 is loaded whole.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no checkpoint, or one that cannot be loaded safely.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: it is no regular file")
    with path.open("rb") as file:
        start = file.read(9)
    is_zip = start[:4] == b"PK\x03\x04"  # torch 1.6 and newer; before, it was a pickle
    found = _Contents()
    try:
        if start[8:] == b"{":  # behind the length of the header
            _read_safetensors(path, found)
        elif is_zip or start[:1] == b"\x80":
            _read_torch(path, found, is_zip=is_zip)
        else:
            raise ValueError(f"{path}: it is no checkpoint of torch.save or safetensors")
    except _NoCheckpointError as error:
        raise ValueError(f"{path}: {error}") from error.__cause__
    if found.matrices:
        return Checkpoint(found.matrices, {**found.left_out})
    held = ", ".join(f"{count} {kind}" for kind, count in found.left_out.items())
    raise ValueError(f"{path}: it has no float32 matrix{' among its tensors: ' + held if held else ''}")


class _NoCheckpointError(Exception):
    """A file is not what it should be; the message says why."""


@contextlib.contextmanager
def _reading() -> Generator[None]:
    """Say in a line why a file cannot be read: wrong and hostile ones can raise anything."""
    try:
        yield
    except Exception as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is not None:
            raise _NoCheckpointError(
                f"it needs {refused[1][:_LONGEST_NAME]}, and loading that could run code; "
                "save a state_dict, which holds tensors and plain values alone"
            ) from error
        # What torch says before that is advice to load it unsafely.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise _NoCheckpointError(
            f"it is no checkpoint, or not all of it: {type(error).__name__}: {reason[:_LONGEST_NAME]}"
        ) from error


class _Contents:
    """What is found in a checkpoint."""

    def __init__(self) -> None:
        self.matrices: dict[str, Callable[[], torch.Tensor]] = {}
        self.left_out: collections.Counter[str] = collections.Counter()

    def add(self, name: str, dtype: str, shape: Sequence[int], load: Callable[[], torch.Tensor]) -> None:
        """Add a tensor."""
        if dtype != "float32":
            self.left_out[dtype] += 1
        elif len(shape) != 2:
            self.left_out[f"float32 ({len(shape)}-D)"] += 1
        elif 0 in shape:
            self.left_out["float32 (empty)"] += 1
        else:
            name = name if name.isprintable() else ascii(name)  # a terminal would obey it
            while name in self.matrices:
                name += "'"
            self.matrices[name] = load


# torch.save.


def _read_torch(path: Path, found: _Contents, *, is_zip: bool) -> None:
    if not is_zip and path.stat().st_size > _memory():
        raise _NoCheckpointError(
            "it is larger than the memory, which takes in files of its old format whole; torch.save it anew"
        )
    with _reading():
        names = zipfile.ZipFile(path).namelist() if is_zip else []
    if any(name.endswith("/constants.pkl") for name in names):
        raise _NoCheckpointError("it is a TorchScript archive; save its state_dict")
    with warnings.catch_warnings(), _reading():
        warnings.simplefilter("ignore")  # of old formats
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    seen: set[object] = set()
    for name, tensor in _tensors(loaded):
        if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
            found.left_out["nested, meta or sparse"] += 1
            continue
        # Weights that layers share are one matrix.
        identity = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()
        if identity not in seen:
            seen.add(identity)
            found.add(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.detach)


def _memory() -> float:
    """Return how many bytes of memory the machine has, as far as it says so."""
    if hasattr(os, "sysconf"):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def _tensors(loaded: object) -> Generator[tuple[str, torch.Tensor]]:
    """Return the tensors in dicts, lists and tuples, however nested, with their places as names."""
    waiting = [("", loaded)]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield name or "tensor", value
        elif id(value) not in seen:
            seen.add(id(value))
            inner = [(f"{name}.{key}" if name else key, item) for key, item in _items(value)]
            waiting.extend((longer[-_LONGEST_NAME:], item) for longer, item in reversed(inner))


def _items(container: Any) -> Iterable[tuple[str, object]]:
    items: Iterable[tuple[object, object]] = ()
    if isinstance(container, dict):
        items = cast("dict[object, object]", container).items()
    elif isinstance(container, (list, tuple)):
        items = enumerate(cast("Sequence[object]", container))
    for key, item in items:
        # The text of other keys can be without end.
        yield str(key)[:_LONGEST_NAME] if isinstance(key, (str, int)) else type(key).__name__, item


# safetensors.

_DTYPES = {
    "F32": "float32",
    "F64": "float64",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}


def _read_safetensors(path: Path, found: _Contents) -> None:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError:
        raise _NoCheckpointError(
            "it takes the package safetensors: python -m pip install safetensors"
        ) from None

    def open_file() -> AbstractContextManager[Any]:
        file: AbstractContextManager[Any] = safetensors.safe_open(path, framework="pt", device="cpu")
        return file

    def loader(name: str) -> Callable[[], torch.Tensor]:
        def load() -> torch.Tensor:
            with open_file() as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor

        return load

    with _reading(), open_file() as file:
        for name in file.keys():  # noqa: SIM118 -- it is no dict
            view = file.get_slice(name)
            dtype = str(view.get_dtype())
            found.add(name[:_LONGEST_NAME], _DTYPES.get(dtype, dtype), view.get_shape(), loader(name))
