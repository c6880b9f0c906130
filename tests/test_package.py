"""What is installed: the package's files and its metadata."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

import precision_scope

try:
    DISTRIBUTION = importlib.metadata.distribution("precision-scope")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the package is not installed, only on the path", allow_module_level=True)


def test_what_is_not_python_is_there() -> None:
    """Type checkers look for a marker, and Python for a module in a folder that is no package."""
    folder = Path(precision_scope.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "_startup" / "sitecustomize.py").exists()


def test_the_metadata_is_complete() -> None:
    """It has the version of the package, torch as the only dependency, and no address that does not exist."""
    metadata = DISTRIBUTION.metadata
    assert metadata["Version"] == precision_scope.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    required = [requirement for requirement in DISTRIBUTION.requires or () if "extra ==" not in requirement]
    assert required == ["torch>=2.4"]
    assert {"Typing :: Typed", "Framework :: Pytest"} <= {*metadata.get_all("Classifier", [])}
    assert metadata.get_all("Project-URL") is None
