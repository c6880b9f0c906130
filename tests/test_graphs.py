"""Rule 23: how TorchScript, torch.jit.trace, torch.export and make_fx take to scopes."""

# No "from __future__ import annotations": TorchScript reads types as they stand.

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import MARKS, look, looking
from flags import state
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from watch import flags_at

from precision_scope import PrecisionScopeError, matmul_precision

pytestmark = MARKS

X = torch.eye(3)


@matmul_precision("medium")
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Multiply at a level."""
    return look(x @ x, "decorated")


def with_block(x: torch.Tensor) -> torch.Tensor:
    """Multiply at a level."""
    with matmul_precision("medium"):
        return x @ x


def no_level(x: torch.Tensor) -> torch.Tensor:
    """Multiply in a scope that asks for nothing."""
    with matmul_precision(None):
        return x @ x


def plain(x: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return x @ x


def caller(x: torch.Tensor) -> torch.Tensor:
    """Call a decorated function."""
    return decorated(x) + 1


class Layer(nn.Module):
    """A module whose forward is decorated."""

    @matmul_precision("medium")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply at a level."""
        return look(x @ x, "forward")


class Model(nn.Module):
    """A module that calls one, and a decorated method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call both."""
        return self.method(self.layer(x))

    @matmul_precision("high")
    def method(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply at a level."""
        return look(x @ x, "method")


class Block(nn.Module):
    """A module with a with-block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply at a level."""
        with matmul_precision("medium"):
            return x @ x


class Plain(nn.Module):
    """A module without scopes, or with one that asks for nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return no_level(x)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever is refused leaves the flags as they were."""
    before = state()
    yield
    assert state() == before


def test_scripted_code_calls_decorated_functions_in_python() -> None:
    """They run in their scopes."""
    scripted = torch.jit.script(caller)
    for _ in range(5):
        with looking() as seen:
            assert torch.equal(scripted(X), caller(X))
        assert {one.flags for one in seen} == {flags_at("medium")}


def test_scripted_modules_call_decorated_methods_in_python() -> None:
    """Also forward itself."""
    for module, levels in ((Layer(), ["medium"]), (Model(), ["medium", "high"])):
        scripted = torch.jit.script(module)
        for _ in range(5):
            with looking() as seen:
                scripted(X)
            assert [one.wanted for one in seen] == levels
    with pytest.raises(RuntimeError, match="Could not export Python function call"):
        torch.jit.save(scripted, io.BytesIO())


def test_a_decorated_function_is_not_scripted_without_its_scope() -> None:
    """torch.jit.script compiles the source that it finds, which is the function's own."""
    with pytest.raises(PrecisionScopeError, match=r"matmul_precision\(level\)\(torch\.jit\.script"):
        torch.jit.script(decorated)


def test_a_decorated_scripted_function() -> None:
    """What that error advises works."""
    scripted = matmul_precision("medium")(torch.jit.script(plain))
    assert torch.equal(scripted(X), X)


def test_a_with_block_is_not_scripted() -> None:
    """TorchScript's error points at it."""
    for function in (with_block, Block()):
        with pytest.raises(
            Exception, match="Cannot instantiate class 'matmul_precision' in a script function"
        ):
            torch.jit.script(function)


@pytest.mark.parametrize("function", [decorated, with_block, caller, Layer(), Model(), Block()])
def test_a_scope_is_not_traced(function: Any) -> None:
    """The recorded operators would run without it."""
    with pytest.raises(PrecisionScopeError, match=r"entered in a program that torch\.jit\.trace"):
        torch.jit.trace(function, X)
    with looking():
        function(X)  # works as before


def test_traces_without_a_level() -> None:
    """A scope around the trace, or one that asks for nothing, is no part of it."""
    for function in (plain, no_level):
        with matmul_precision("medium"):
            traced = torch.jit.trace(function, X)
            assert torch.equal(traced(X), X)
        assert torch.equal(matmul_precision("high")(traced)(X), X)


@pytest.mark.parametrize("module", [Layer(), Model(), Block()])
@pytest.mark.parametrize("strict", [True, False])
def test_a_scope_is_not_exported(module: nn.Module, strict: bool) -> None:
    """torch.export says so, in either of its ways to record a program."""
    with pytest.raises((PrecisionScopeError, torch._dynamo.exc.Unsupported)) as raised:
        torch.export.export(module, (X,), strict=strict)
    if not strict:
        assert isinstance(raised.value, PrecisionScopeError)
    with looking():
        module(X)


def test_scopes_of_other_threads_while_a_program_is_exported() -> None:
    """They are nobody's business: the exported program alone is recorded."""
    levels: list[str] = []

    def work() -> None:
        with matmul_precision("medium"):
            levels.append(torch.get_float32_matmul_precision())

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
            return x @ x

    torch.export.export(Module(), (X,), strict=False)
    assert levels
    assert set(levels) == {"medium"}


def test_make_fx_while_another_thread_compiles() -> None:
    """It is documented to record no scopes, whatever other threads do."""
    begun, go_on = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        begun.set()
        assert go_on.wait(60)
        return graph

    thread = threading.Thread(target=torch.compile(plain, backend=backend), args=(X,))
    thread.start()
    assert begun.wait(60)
    try:
        assert torch.equal(make_fx(with_block)(X)(X), X)
    finally:
        go_on.set()
        thread.join(60)


@pytest.mark.parametrize("strict", [True, False])
def test_exports_without_a_level(strict: bool) -> None:
    """A scope around the export, or around the call of the program, is no part of it."""
    module = Plain() if not strict else nn.Linear(3, 3)
    with matmul_precision("medium"):
        program = torch.export.export(module, (X,), strict=strict).module()
    assert torch.equal(matmul_precision("high")(program)(X), module(X))
