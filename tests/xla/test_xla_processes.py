"""What depends on who imports torch_xla when, and on its version: in processes of their own."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import prepare
from test_isolation import run

try:
    VERSION = tuple(map(int, importlib.metadata.version("torch_xla").split(".")[:2]))
except importlib.metadata.PackageNotFoundError:
    VERSION = (0, 0)

pytestmark = pytest.mark.skipif(VERSION == (0, 0), reason="torch_xla is not installed")
reads_setting = pytest.mark.skipif(VERSION < (2, 8), reason="torch_xla does not tell its setting")
marks_products = pytest.mark.skipif(
    VERSION < (2, 8) or not hasattr(torch.library, "get_kernel"), reason="torch does not hand out kernels"
)

# Each size makes a program of its own.
PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import warnings
import torch

def load():
    global xla
    import torch_xla
    from lowering import Xla
    xla = Xla()

def product(size):
    a = torch.ones(size, size).to("xla:0")
    return a @ a
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return what runs a program that may load torch_xla."""
    return lambda text: run(PRELUDE + textwrap.dedent(text), **prepare(tmp_path))


def test_neither_the_package_nor_a_scope_imports_it(program: Callable[[str], str]) -> None:
    """That takes seconds, and changes environment variables."""
    program("""
    from precision_scope import matmul_precision, report, set_float32_matmul_precision
    with matmul_precision("medium"):
        assert list(report().backends) == ["torch"]
    set_float32_matmul_precision("high")
    assert "torch_xla" not in sys.modules
    """)


@marks_products
@pytest.mark.parametrize("inner", [None, "high", "medium"])
def test_it_is_imported_inside_a_scope(program: Callable[[str], str], inner: str | None) -> None:
    """It gets the level in force at once, and its own back with the others."""
    program(f"""
    from precision_scope import matmul_precision
    with matmul_precision("highest"):
        with matmul_precision({inner!r}):
            load()
            assert xla.setting() == { ({"high": "high", "medium": "default"}.get(str(inner), "highest"))!r}
        assert xla.setting() == "highest"
        assert not xla.core._xla_runtime_is_initialized()
        result = product(4)
    assert xla.setting() == "default"
    result.cpu()
    assert xla.compiled() == ["highest"]
    """)


@reads_setting
def test_it_is_imported_when_the_default_has_been_set(program: Callable[[str], str]) -> None:
    """It gets that, also when a scope was live; torch's own function does not reach it."""
    program("""
    from precision_scope import matmul_precision, set_float32_matmul_precision
    set_float32_matmul_precision("high")
    load()
    assert xla.setting() == "high"
    with matmul_precision("highest"):
        assert xla.setting() == "highest"
    assert xla.setting() == "high"
    """)
    program("""
    from precision_scope import set_float32_matmul_precision
    set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
    load()
    assert xla.setting() == "default"
    """)


@marks_products
def test_it_was_imported_before(program: Callable[[str], str]) -> None:
    """And has a setting and operations recorded at it: a scope changes neither."""
    program("""
    load()
    xla.core._xla_set_mat_mul_precision("high")
    before = product(4)
    from precision_scope import matmul_precision
    with matmul_precision("highest"):
        inside = product(5)
        with matmul_precision("high"):
            as_before = product(6)
    assert xla.setting() == "high"
    before.cpu(), inside.cpu(), as_before.cpu()
    assert xla.compiled() == ["high", "highest", "high"], xla.compiled()
    """)


@marks_products
def test_code_that_was_compiled_before_at_a_setting_of_the_users(program: Callable[[str], str]) -> None:
    """It is not used at any other level."""
    program("""
    load()
    xla.core._xla_set_mat_mul_precision("highest")
    product(4).cpu()
    assert xla.compiled() == ["highest"]
    from precision_scope import matmul_precision
    for _ in range(2):
        for level in ("medium", "high", "highest"):
            with matmul_precision(level):
                product(4).cpu()
    assert xla.compiled() == ["default", "high", "highest"], xla.compiled()
    """)


@reads_setting
@pytest.mark.parametrize("lacking", ["torch.library.get_kernel", "functionalization"])
def test_where_products_cannot_be_marked(program: Callable[[str], str], lacking: str) -> None:
    """All else is right, and a warning says that compiled code is used again: once, at the user's line."""
    program(f"""
    import os
    if {lacking!r} == "functionalization":
        os.environ["XLA_DISABLE_FUNCTIONALIZATION"] = "1"
    elif hasattr(torch.library, "get_kernel"):
        del torch.library.get_kernel
    load()
    from precision_scope import matmul_precision
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with matmul_precision("highest"):
            pass
        assert not caught  # nothing was compiled before
        before = product(4)
        with matmul_precision("highest"):
            inside = product(5)
        assert not xla.is_recorded(before) and not xla.is_recorded(inside)
        with matmul_precision("high"):
            pass
        assert xla.setting() == "default"
    before.cpu(), inside.cpu()
    assert xla.compiled() == ["default", "highest"], xla.compiled()
    [warning] = caught
    assert "keep the one that they were compiled at" in str(warning.message)
    assert warning.filename == __file__
    """)


@marks_products
def test_where_other_code_has_replaced_a_kernel(program: Callable[[str], str]) -> None:
    """It stays, and the warning is the same."""
    program("""
    load()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mm", lambda a, b: torch.bmm(a[None], b[None])[0], "XLA")
    from precision_scope import matmul_precision
    product(4).cpu()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with matmul_precision("highest"):
            product(5).cpu()
    assert len(caught) == 1
    assert xla.compiled() == ["default", "highest"]
    """)


def test_where_the_setting_cannot_be_read(program: Callable[[str], str]) -> None:
    """Scopes leave torch_xla alone, and say so once; the report does, too."""
    program("""
    load()
    if hasattr(xla.core, "_xla_get_mat_mul_precision"):
        del xla.core._xla_get_mat_mul_precision
    from precision_scope import matmul_precision, report, set_float32_matmul_precision
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for level in ("highest", "high"):
            with matmul_precision(level):
                product(4).cpu()
        set_float32_matmul_precision("high")
    [warning] = caught
    assert "leave torch_xla" in str(warning.message)
    assert warning.filename == __file__
    assert xla.compiled() == ["default"]
    assert "cannot be read" in report().backends["xla"]["mat_mul_precision"]
    assert report().disagreeing == {}
    """)


def test_that_warning_as_an_error(program: Callable[[str], str]) -> None:
    """Entry fails cleanly."""
    program("""
    load()
    if hasattr(xla.core, "_xla_get_mat_mul_precision"):
        del xla.core._xla_get_mat_mul_precision
    from precision_scope import PrecisionScopeError, matmul_precision, report
    warnings.simplefilter("error")
    try:
        matmul_precision("highest").__enter__()
    except PrecisionScopeError as error:
        assert error.backends == ("xla",)
        assert isinstance(error.__cause__, RuntimeWarning)
    else:
        raise AssertionError
    assert report().scopes == ()
    """)


@reads_setting
def test_it_is_unregistered(program: Callable[[str], str]) -> None:
    """Then scopes leave it alone, whether it was imported before or after."""
    for first, second in (("load()", ""), ("", "load()")):
        program(f"""
        {first}
        from precision_scope import matmul_precision
        from precision_scope.backends import unregister_backend
        unregister_backend("xla")
        {second}
        with matmul_precision("highest"):
            assert xla.setting() == "default"
        """)


@marks_products
def test_a_sharded_program(program: Callable[[str], str]) -> None:
    """What runs on several devices as one is cut off and told apart like anything else."""
    program("""
    load()
    import numpy
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime
    from precision_scope import matmul_precision
    torch_xla.runtime.use_spmd()
    mesh = spmd.Mesh(numpy.arange(2), (2,), ("rows",))
    a = torch.ones(4, 4).to("xla")
    spmd.mark_sharding(a, mesh, ("rows", None))
    xla.module.sync()
    xla.compiled()
    results = []
    for _ in range(2):
        for level in ("medium", "high", "highest"):
            with matmul_precision(level):
                results.append(a @ a)
            assert results[-1].cpu().eq(4).all()
    assert xla.compiled() == ["default", "high", "highest"], xla.compiled()
    """)
