"""Seeing inside compiled code: the level that each operator ran at, and what was compiled."""

# No "from __future__ import annotations": torch 2.4 reads the operator's signature as it stands.

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from watch import Flags, flags

from precision_scope import Float32MatmulPrecision, get_float32_matmul_precision

BACKENDS = ("eager", "aot_eager", "inductor")

TELLS_UNSET_FROM_HIGHEST = torch.__version__ >= "2.15"
"""Whether a setting that was never made is to torch another one than that for float32."""

MARKS = [
    pytest.mark.usefixtures("without_compiled_code"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
"""For tests that compile."""


class Look(NamedTuple):
    """What an operator saw when it ran."""

    name: str
    flags: Flags
    wanted: Float32MatmulPrecision


_seen: list[Look] = []


def _look(x: torch.Tensor, name: str) -> torch.Tensor:
    _seen.append(Look(name, flags(), get_float32_matmul_precision()))
    return x.clone()


def _remember_name(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.name = inputs[1]


def _look_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return look(gradient, f"{ctx.name}, backward"), None


_disable: Any = torch.compiler.disable  # torch 2.4 compiles what an operator runs
_operator: Any = torch.library.custom_op("precision_scope_tests::look", _disable(_look), mutates_args=())
_operator.register_fake(lambda x, _name: torch.empty_like(x))
_operator.register_autograd(_look_back, setup_context=_remember_name)

look: Callable[[torch.Tensor, str], torch.Tensor] = _operator
"""Return the tensor, and note the level under a name; the backward of it does so, too."""


@contextlib.contextmanager
def looking() -> Iterator[list[Look]]:
    """Collect what the operators see meanwhile."""
    _seen.clear()
    seen: list[Look] = []
    yield seen
    seen += _seen
    _seen.clear()


class Graphs:
    """A backend of torch.compile that keeps the graphs it is given."""

    # torch 2.8 reads backends that have been collected, and crashes.
    _kept: list["Graphs"] = []  # noqa: RUF012

    def __init__(self, backend: str) -> None:
        self._kept.append(self)
        self._backend: Any = torch._dynamo.lookup_backend(backend)
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.all.append(graph)
        compiled: Callable[..., Any] = self._backend(graph, inputs)
        return compiled

    def looks(self) -> list[list[str]]:
        """Return the names of the looks in each graph."""
        return [
            [
                str(node.args[1])
                for node in graph.graph.nodes
                if node.target is torch.ops.precision_scope_tests.look.default
            ]
            for graph in self.all
        ]
