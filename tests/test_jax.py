"""The example's backend with real JAX. Where it is not installed, these tests are skipped."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precision_scope import matmul_precision, report
from precision_scope.backends import register_backend, unregister_backend

EXAMPLE = Path(__file__).parent.parent / "examples" / "jax_backend.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@pytest.fixture
def jax() -> Iterator[Any]:
    """Register the backend; fail the test that leaves JAX's setting changed."""
    specification = importlib.util.spec_from_file_location("jax_backend", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    example: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    register_backend(example.JaxBackend())
    yield example.jax
    unregister_backend("jax")
    assert example.jax.config.jax_default_matmul_precision is None


def precision(jax: Any) -> str:
    """Return the precision that a product is lowered at."""
    a = jax.numpy.ones((2, 2))
    text = jax.jit(lambda a: a @ a).lower(a).as_text()
    return str(text.split("precision = [")[1].split(",")[0])


def test_products_are_lowered_at_the_scopes_level(jax: Any) -> None:
    """Nested, decorated, in another thread, and outside again."""
    assert precision(jax) == "DEFAULT"
    seen = []
    with matmul_precision("highest"):
        seen.append(precision(jax))
        with matmul_precision("medium"):
            seen.append(precision(jax))
        seen.append(matmul_precision("high")(precision)(jax))
        thread = threading.Thread(target=lambda: seen.append(precision(jax)))
        thread.start()
        thread.join()
    assert seen == ["HIGHEST", "DEFAULT", "HIGH", "HIGHEST"]
    assert precision(jax) == "DEFAULT"


def test_a_compiled_function_runs_at_the_level_of_each_call(jax: Any) -> None:
    """JAX compiles it once for each."""
    traced = []

    def product(a: Any) -> Any:
        traced.append(jax.config.jax_default_matmul_precision)
        return a @ a

    compiled = jax.jit(product)
    for _ in range(2):
        for level in ("highest", "high", "medium"):
            with matmul_precision(level):
                compiled(jax.numpy.ones((2, 2)))
    assert traced == ["highest", "high", "default"]


@pytest.mark.parametrize("own", ["tensorfloat32", "bfloat16", "BF16_BF16_F32_X3"])
def test_its_own_spelling_comes_back(jax: Any, own: str) -> None:
    """Whatever JAX understands."""
    jax.config.update("jax_default_matmul_precision", own)
    try:
        with matmul_precision("highest"):
            assert jax.config.jax_default_matmul_precision == "highest"
        assert jax.config.jax_default_matmul_precision == own
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def test_a_scope_of_jaxs_own_around_ours_leaks_nothing(jax: Any) -> None:
    """It decides in its own thread; what is saved and restored is that of the process."""
    with jax.default_matmul_precision("float32"):
        with matmul_precision("medium"):
            assert jax.config.jax_default_matmul_precision == "float32"
            assert report().backends["jax"] == {"jax_default_matmul_precision": "default"}
        assert jax.config.jax_default_matmul_precision == "float32"
    assert jax.config.jax_default_matmul_precision is None
