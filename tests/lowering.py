"""What torch_xla lowers and compiles, for the tests with real torch_xla."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

SETTINGS = {"highest": "highest", "high": "high", "medium": "default"}
"""torch_xla's settings, by level."""

FOLDER = "PRECISION_SCOPE_TEST_DUMPS"


def prepare(folder: Path) -> dict[str, str]:
    """Return the environment in which torch_xla writes what it compiles to a folder."""
    return {
        FOLDER: str(folder),
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # its own warnings go to stderr
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
    }


class Xla:
    """The torch_xla that has been imported.

    Attributes:
        module: It.
        core: Its C++ module.
        device: Its device, as text.
    """

    def __init__(self) -> None:
        self.module: Any = sys.modules["torch_xla"]
        self.core: Any = self.module._XLAC
        self.device = "xla:0"
        self._folder = Path(os.environ[FOLDER])
        self._seen: set[Path] = set()

    def tensor(self, *shape: int) -> torch.Tensor:
        """Return numbers on the device, with nothing recorded."""
        return torch.randn(*shape).to(self.device)

    def setting(self) -> str:
        """Return the setting in force."""
        return str(self.core._xla_get_mat_mul_precision())

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is recorded only, and not lowered yet."""
        return bool(self.core._check_tensor_need_materialization([tensor])[0])

    def compiled(self) -> list[str]:
        """Return the settings of the products in what was compiled since the last call, in order."""
        new = sorted(set(self._folder.glob("*before_optimizations.txt")) - self._seen)
        self._seen.update(new)
        return [setting for path in new for setting in settings_in(path.read_text())]

    def marked(self) -> list[tuple[set[int], list[str]]]:
        """Return the ranks of the marks in each program compiled since the last call, and the settings."""
        new = set(self._folder.glob("*before_optimizations.txt")) - self._seen
        self._seen |= new
        found = []
        for path in new:
            text = path.read_text()
            ones = {len(match[1]) // 2 for match in re.finditer(r"f32\[[\d,]*?((?:,1)+)\]", text)}
            found.append(({number - 5 for number in ones if number >= 5}, settings_in(text)))
        return found

    def recorded(self, *tensors: torch.Tensor) -> list[str]:
        """Return the settings that products would have if they were lowered now."""
        return settings_in(self.core._get_xla_tensors_hlo(list(tensors)))


def settings_in(text: str) -> list[str]:
    """Return the setting of each product in a program's text."""
    return [
        match[1] if (match := re.search(r"operand_precision=\{(\w+),", line)) else "default"
        for line in text.splitlines()
        if re.search(r" (dot|convolution)\(", line)
    ]
