"""What importing the package does not do: import torch, before one of its names is used."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import precision_scope
from precision_scope import matmul_precision


def run(code: str) -> str:
    """Run code in a process of its own, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_the_package_by_itself_does_not_import_torch() -> None:
    """Nor do the pytest plug-in and what starts programs, so that torch is theirs to import and configure."""
    imported = run(
        "import sys, precision_scope._imports, precision_scope._cli, precision_scope.pytest_plugin;"
        "dir(precision_scope), precision_scope.__version__;"
        "print('torch' in sys.modules, hasattr(precision_scope, 'missing'), 'torch' in sys.modules)"
    )
    assert imported == "False False False\n"


def test_a_scope_imports_nothing_that_it_does_not_need() -> None:
    """Beside torch there is only Python's own library, and of the package what scopes are made of."""
    new = run(
        "import sys, torch; before = {*sys.modules}; from precision_scope import matmul_precision;"
        "print(*{*sys.modules} - before); before = {*sys.modules}\n"
        "with matmul_precision('high'): print(*{*sys.modules} - before)\n"
    )
    at_import, at_first_use = ({*line.split()} for line in new.splitlines())
    assert all(name.partition(".")[0] == "precision_scope" for name in at_import)
    assert all(name.partition(".")[0] in sys.stdlib_module_names for name in at_first_use)
    assert at_import <= {
        "precision_scope",
        *(f"precision_scope.backends{name}" for name in ("", "._base", "._registry", "._torch", "._xla")),
        *(f"precision_scope._{name}" for name in NEEDED.split()),
    }


NEEDED = (
    "applied compilation conflicts decorators dynamo entries errors graphs imports ledger levels locks "
    "owners pickles process scopes setup torch_api warnings"
)


def test_a_process_that_only_unpickles_a_scope_sets_the_package_up() -> None:
    """What a pickle brings in is the scope that users import."""
    pickled = pickle.dumps(matmul_precision("high"))
    code = (
        f"import pickle; scope = pickle.loads({pickled!r})\n"
        "import precision_scope; print('matmul_precision' in vars(precision_scope), scope)"
    )
    assert run(code) == "True matmul_precision('high')\n"


def test_a_backend_can_be_the_first_thing_to_be_registered() -> None:
    """The package's own backends come first, whatever is imported first."""
    code = (
        "from precision_scope.backends import Backend, register_backend\n"
        "class Mine(Backend):\n"
        "    name = 'xla'\n"
        "    save = apply = restore = describe = None\n"
        "try: register_backend(Mine())\n"
        "except ValueError as error: print(error)"
    )
    assert "a backend named 'xla' is registered" in run(code)


def test_the_package_lists_its_names() -> None:
    """``dir`` and auto-completion have them, and what is not there is said as by any module."""
    assert {*precision_scope.__all__, "__version__"} <= {*dir(precision_scope)}
    with pytest.raises(AttributeError, match="module 'precision_scope' has no attribute 'matmul_precison'"):
        precision_scope.matmul_precison  # type: ignore[attr-defined]  # noqa: B018


def test_all_public_names_are_there() -> None:
    """The list of names, which is written twice, is the same in both places; star imports get them all."""
    assert precision_scope.__all__ == [*precision_scope._MODULES]
    names: dict[str, object] = {}
    exec("from precision_scope import *", names)  # noqa: S102
    assert {*precision_scope.__all__} <= {*names}


def test_a_scope_that_is_never_left_is_silent_when_python_ends() -> None:
    """Modules have lost their names by then."""
    code = (
        "import asyncio, sys, precision_scope\n"
        "async def enter():\n"
        "    asyncio.kept = precision_scope.matmul_precision('medium')\n"
        "    asyncio.kept.__enter__()\n"
        "asyncio.run(enter())"
    )
    assert run(code) == ""
