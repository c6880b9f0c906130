"""Rule 23: Dynamo meets none of our functions, and is not imported; a future one is reported once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import typing

import pytest
from test_isolation import run

from precision_scope import matmul_precision


def test_importing_and_entering_scopes_imports_no_dynamo() -> None:
    """It takes a second, and most programs never need it."""
    run(
        """
        import sys
        from precision_scope import matmul_precision

        @matmul_precision("high")
        def function():
            pass

        with matmul_precision("medium"):
            function()
        assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
        """
    )


def test_every_function_of_the_package_is_hidden() -> None:
    """Whatever may run while a compiled function does, what is imported late included."""
    run(
        """
        import sys
        from types import FunctionType
        from precision_scope import enable_emulation, matmul_precision, report

        with matmul_precision("high", backward=True):
            pass
        found = set()
        for name, module in sys.modules.items():
            if name.startswith("precision_scope."):
                for value in vars(module).values():
                    for member in vars(value).values() if isinstance(value, type) else [value]:
                        function = getattr(member, "fget", getattr(member, "__func__", member))
                        code = function.__code__ if isinstance(function, FunctionType) else None
                        if code is not None and code.co_filename == module.__file__:
                            assert vars(function).get("_torchdynamo_disable"), function
                            found.add(function.__qualname__)
        assert found >= {
            "matmul_precision.__init__",
            "matmul_precision.__enter__",
            "get_float32_matmul_precision",
            "Ledger.settle",
            "TorchCells.save",
            "report",
            "begin_recording",
            "tag",
        }, found
        """
    )


def test_functions_of_others_are_not_hidden() -> None:
    """Those that the package's modules have imported, or have decorated."""
    assert "_torchdynamo_disable" not in vars(typing.cast)
    assert "_torchdynamo_disable" not in vars(contextlib.contextmanager)

    def function() -> None:
        pass

    assert vars(matmul_precision("high")(function))["_torchdynamo_disable"]
    assert "_torchdynamo_disable" not in vars(function)


UNKNOWN_DYNAMO = """
    import sys
    import warnings
    import torch

    frames = torch._C._dynamo.eval_frame
    names = ("set_code_exec_strategy", "skip_code")
    names = {name: getattr(frames, name) for name in names if hasattr(frames, name)}
    for name in names:
        delattr(frames, name)
    import precision_scope
    from precision_scope import get_float32_matmul_precision, matmul_precision
    for name, value in names.items():
        setattr(frames, name, value)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_float32_matmul_precision() == "highest"

    def function(x):
        with matmul_precision("medium"):
            return x @ x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch._dynamo.reset()
            torch.compile(function, backend="eager")(torch.eye(2))
    print([str(warning.message) for warning in caught if warning.category is RuntimeWarning])
"""


def test_an_unknown_dynamo_is_reported_once() -> None:
    """The package imports and works; a scope under compilation says that it may have no effect."""
    printed = run(UNKNOWN_DYNAMO)
    assert printed.count("scopes in compiled functions") == 1
    assert printed.count("precision_scope does not know the Dynamo of torch") == 1


LATE = """
    import sys
    import threading
    import torch
    from precision_scope import matmul_precision

    found = [finder for finder in sys.meta_path if type(finder).__module__ == "precision_scope._imports"]
    assert len(found) == 1
    go_on, begun = threading.Event(), threading.Event()

    def backend(graph, inputs):
        begun.set()
        go_on.wait(60)
        return graph

    def compile_first():
        torch.compile(lambda x: x @ x, backend=backend)(torch.eye(2))

    with matmul_precision("high"):
        thread = threading.Thread(target=compile_first)
        thread.start()
        begun.wait(60)
    go_on.set()
    thread.join()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32

    import inspect
    import torch._dynamo.convert_frame as convert_frame
    loader = convert_frame.__spec__.loader
    assert loader.exec_module.__func__ is type(loader).exec_module
    assert "def _compile(" in inspect.getsource(convert_frame)
"""


def test_dynamo_imported_inside_a_scope() -> None:
    """Its first compilation is watched, though the scope began before there was a Dynamo."""
    run(LATE)


def test_a_module_that_cannot_be_imported_stays_waited_for() -> None:
    """An import that fails is an import that fails, and may succeed later."""
    run(
        """
        import sys
        import tempfile
        from pathlib import Path
        from precision_scope._imports import when_imported

        folder = Path(tempfile.mkdtemp())
        sys.path.insert(0, str(folder))
        seen = []
        when_imported("late_module", seen.append)
        when_imported("json", seen.append)
        import json
        assert seen == [json]
        try:
            import late_module
        except ModuleNotFoundError:
            pass
        (folder / "late_module.py").write_text("1 / 0")
        try:
            import late_module
        except ZeroDivisionError:
            pass
        (folder / "late_module.py").write_text("value = 1  # longer than before")
        import late_module
        assert seen == [json, late_module] and late_module.value == 1
        """
    )


def test_other_finders_of_modules() -> None:
    """A second copy of the package, and a finder of the old kind, are no hindrance."""
    run(
        """
        import sys
        import torch

        class Old:
            def find_module(self, name, path=None):
                return None

        sys.meta_path.insert(0, Old())
        from precision_scope import report
        for name in [name for name in sys.modules if name.startswith("precision_scope")]:
            del sys.modules[name]
        from precision_scope import report
        assert torch.equal(torch.compile(lambda x: x @ x, backend="eager")(torch.eye(2)), torch.eye(2))
        convert_frame = sys.modules["torch._dynamo.convert_frame"]
        assert convert_frame._compile.__wrapped__.__wrapped__
        """
    )


UNKNOWN_FUNCTIONS = """
import sys
import types
import torch

found = types.ModuleType("convert_frame")
found.__dict__.update({names!r})
sys.modules["torch._dynamo.convert_frame"] = found
from precision_scope import get_float32_matmul_precision, matmul_precision

with matmul_precision("high"):
    print(get_float32_matmul_precision())
"""


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"_compile": 1, "preserve_global_state": 2, "GlobalStateGuard": 3, "trace_frame": 4},
        {"_compile": 1, "preserve_global_state": 2},
    ],
)
def test_a_dynamo_that_compiles_otherwise(names: dict[str, int]) -> None:
    """It is reported as well, when it is imported; all else works."""
    result = subprocess.run(
        [sys.executable, "-c", UNKNOWN_FUNCTIONS.format(names=names)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, "high\n")
    assert result.stderr.count("precision_scope does not know the Dynamo of torch") == 1


def test_flags_of_torch_compiler_by_other_names() -> None:
    """Scopes work on a torch that has renamed the one that says whether it exports."""
    run(
        """
        import torch
        for name in ("_is_exporting_flag", "_is_compiling_flag"):
            vars(torch.compiler).pop(name, None)
        from precision_scope import matmul_precision
        with matmul_precision("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
        """
    )
