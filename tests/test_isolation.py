"""Turning isolation on: once, early or late, with whatever else goes on in the process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from precision_scope import report


def run(program: str, **environment: str) -> str:
    """Run a program in a process of its own, warnings being errors, and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")  # TorchScript wants to see the source
        path.write_text(textwrap.dedent(program))
        result = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", path],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env={**os.environ, **environment},
        )
    # Some versions of torch say so when inductor is imported.
    complaints = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (result.returncode, complaints) == (0, [])
    return result.stdout


def test_it_is_off_and_then_products_are_torchs_own() -> None:
    """Without it no kernel is registered, so that no product costs more."""
    assert report().isolation is False
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


def test_twice_is_once() -> None:
    """A second call does nothing."""
    run(
        """
        from precision_scope import _isolation, enable_isolation, report
        enable_isolation()
        kernels = list(_isolation._kernels)
        enable_isolation()
        assert _isolation._kernels == kernels
        assert report().isolation and report().to_dict()["isolation"]
        """
    )


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_variable(value: str, on: bool) -> None:
    """It turns isolation on when the package is first used."""
    printed = run(
        "import precision_scope; print(precision_scope.report().isolation)", PRECISION_SCOPE_ISOLATION=value
    )
    assert printed.strip() == str(on)


def test_another_value_of_the_environment_variable_is_refused() -> None:
    """A value that could mean either is not guessed at."""
    result = subprocess.run(
        [sys.executable, "-c", "from precision_scope import report"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PRECISION_SCOPE_ISOLATION": "yes"},
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ValueError: the environment variable PRECISION_SCOPE_ISOLATION must be 1 or 0, got 'yes'"
    )


def test_on_a_torch_that_lacks_something_nothing_changes() -> None:
    """The error says why, no kernel stays registered, and scopes work as before."""
    run(
        """
        import torch, pytest
        import precision_scope
        from precision_scope import _products, _torch_api, matmul_precision, report
        real = _torch_api.redispatcher
        def lacking(name):
            if name == "aten::mm":
                raise AttributeError("no redispatch_boxed")
            return real(name)
        _torch_api.redispatcher = lacking
        with pytest.raises(precision_scope.PrecisionScopeError, match="does not work.*no redispatch"):
            precision_scope.enable_isolation()
        assert not report().isolation
        for name in _products.products():
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect"), name
        with matmul_precision("medium"):
            torch.ones(2, 2) @ torch.ones(2, 2)
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_float32_matmul_precision() == "highest"
        _torch_api.redispatcher = real
        precision_scope.enable_isolation()
        assert report().isolation
        """
    )


def test_a_kernel_that_cannot_be_registered_takes_the_others_back() -> None:
    """A failure in the middle of registering leaves no kernel behind."""
    run(
        """
        import torch, pytest
        import precision_scope
        from precision_scope import _products, report
        real = torch.library.Library.impl
        calls = 0
        def failing(self, *args, **kwargs):
            global calls
            calls += 1
            if calls == 20:
                raise RuntimeError("no")
            return real(self, *args, **kwargs)
        torch.library.Library.impl = failing
        with pytest.raises(precision_scope.PrecisionScopeError, match="does not work on this torch") as kept:
            precision_scope.enable_isolation()
        assert kept
        torch.library.Library.impl = real
        assert not report().isolation
        for name in _products.products():
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect"), name
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).sum() == 8
        """
    )


def test_an_interrupt_does_not_leave_it_half_on() -> None:
    """Once its kernels are there, isolation is on, and a second call does nothing."""
    run(
        """
        import pytest, torch
        from precision_scope import _isolation, enable_isolation, matmul_precision, report
        from precision_scope._applied import Applied
        from precision_scope._ledger import ledger
        real = Applied._register
        def interrupted(self, *args):
            Applied._register = real
            raise KeyboardInterrupt
        Applied._register = interrupted
        with matmul_precision("medium"):
            with pytest.raises(KeyboardInterrupt):
                enable_isolation()
            assert report().isolation
            assert ledger.applied.holding.backends == (ledger.applied.torch_flags,)
            kernels = list(_isolation._kernels)
            enable_isolation()
            assert _isolation._kernels == kernels != []
        assert torch.get_float32_matmul_precision() == "highest"
        """
    )


def test_inside_live_scopes() -> None:
    """Scopes that are live go on, are restored exactly, and are in nobody's way any more."""
    run(
        """
        import threading, torch
        from precision_scope import enable_isolation, get_float32_matmul_precision, matmul_precision
        torch.backends.cuda.matmul.allow_tf32 = True
        with matmul_precision("medium"):
            with matmul_precision("high"):
                enable_isolation()
                torch.ones(2, 2) @ torch.ones(2, 2)
                assert torch.get_float32_matmul_precision() == "high"
            assert torch.get_float32_matmul_precision() == "medium"
            def other():
                with matmul_precision("highest"):
                    torch.ones(2, 2) @ torch.ones(2, 2)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch._C._get_float32_matmul_precision() == "high"
        """
    )


def test_while_other_threads_multiply() -> None:
    """It can be turned on while products run in other threads: none fails, and all are products."""
    run(
        """
        import threading, time, torch
        from precision_scope import enable_isolation, matmul_precision
        stop = threading.Event()
        failures = []
        a, b = torch.randn(8, 8), torch.randn(3, 8, 8)
        expected = a @ a, b @ b, torch.addmm(a, a, a), a @ a[0]
        def work(level):
            try:
                while not stop.is_set():
                    with matmul_precision(level):
                        found = a @ a, b @ b, torch.addmm(a, a, a), a @ a[0]
                    for one, other in zip(found, expected):
                        torch.testing.assert_close(one, other)
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=(level,)) for level in (None, "highest") * 2]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        enable_isolation()
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        """
    )


def test_a_long_product_is_not_taken_for_one_that_waits() -> None:
    """What computes keeps its hold, however long others wait."""
    run(
        """
        import torch
        from concurrent.futures import ThreadPoolExecutor
        from precision_scope import _gate, enable_isolation, matmul_precision
        from precision_scope._ledger import ledger
        enable_isolation()
        _gate._PATIENCE = 0.05
        gate = ledger.applied.torch_flags
        take_back = gate._take_back
        looked = taken = 0
        def look(suspects):
            global looked, taken
            with gate.lock:
                holding = [mine for mine in gate._threads.values() if mine.key is not None]
                found = take_back(suspects)
                looked += len(holding)
                taken += sum(mine.key is None for mine in holding)
            return found
        gate._take_back = look
        large = torch.randn(2000, 2000)
        def work(level):
            for _ in range(4):
                with matmul_precision(level):
                    torch.mm(large, large)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, ["high", "highest"]))
        assert looked > 0
        assert taken == 0
        """
    )


def test_reloading_the_package() -> None:
    """A reload, as notebooks do it, keeps isolation as it is."""
    run(
        """
        import importlib, torch
        import precision_scope
        precision_scope.enable_isolation()
        importlib.reload(precision_scope)
        assert precision_scope.report().isolation
        precision_scope.enable_isolation()
        with precision_scope.matmul_precision("medium"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        """
    )


COMPILED = """
import sys, warnings
sys.path.insert(0, {tests!r})
import torch
import watch
warnings.simplefilter("ignore", DeprecationWarning)
warnings.simplefilter("ignore", FutureWarning)
watch.install()
from precision_scope import enable_isolation, matmul_precision
a, b = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
def function(a, b):
    return torch.relu(a @ b) @ b
"""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_products_take_the_gate(backend: str, when: str) -> None:
    """Compiled functions, from before or after, run their products at each call's level, backward too."""
    run(
        COMPILED.format(tests=str(Path(__file__).parent))
        + textwrap.dedent(
            f"""
            compiled = torch.compile(function, backend={backend!r})
            if {when == "after"}:
                enable_isolation()
            else:
                compiled(a, b)
                enable_isolation()
            for level in ("medium", "highest", "high", "medium"):
                with watch.watching() as seen, matmul_precision(level):
                    result = compiled(a, b)
                    forward = len(seen)
                    assert forward >= 2, seen
                    result.sum().backward()
                    assert len(seen) >= forward + 2, seen
                    assert watch.wrong(seen, level) == []
                torch.testing.assert_close(result, function(a, b))
            """
        )
    )


def test_scripted_and_traced_products_take_the_gate() -> None:
    """So do functions compiled by TorchScript."""
    run(
        COMPILED.format(tests=str(Path(__file__).parent))
        + textwrap.dedent(
            """
            scripted, traced = torch.jit.script(function), torch.jit.trace(function, (a, b))
            enable_isolation()
            for function in (scripted, traced, torch.jit.script(function)):
                for level in ("medium", "highest"):
                    with watch.watching() as seen, matmul_precision(level):
                        function(a, b)
                        assert len(seen) == 2
                        assert watch.wrong(seen, level) == []
            """
        )
    )
