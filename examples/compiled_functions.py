"""What torch.compile fixes when it compiles: the TF32 setting of inductor's Triton templates.

Products that compiled code calls in torch, as it does by default, run at the
level in force at run time; the templates keep the setting they were compiled with.
"""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from precision_scope import matmul_precision


def tf32() -> str:
    """Return the setting that is in force now."""
    return "on" if torch.backends.cuda.matmul.allow_tf32 else "off"


def noting(what: str) -> Callable[..., Any]:
    """Return a compiler that prints the setting when it compiles and when the result runs."""

    def compile_graph(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        fixed = tf32()
        print(f"  {what} is compiled with TF32 {fixed}")

        def run(*args: object) -> object:
            print(f"  {what} runs, compiled with TF32 {fixed}, called with TF32 {tf32()}")
            return graph(*args)

        return make_boxed_func(run)

    return compile_graph


backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"))
loss = torch.compile(lambda x, w: (x @ w).square().mean(), backend=backend, fullgraph=True)
x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)

for level in ("highest", "high", "medium"):
    print(f"forward and backward in a scope at {level}:")
    with matmul_precision(level):
        loss(x, weight).backward()

print("forward in a scope at high, backward outside:")
with matmul_precision("high"):
    result = loss(x, weight)
result.backward()
