"""What torch.compile fixes when it compiles: the TF32 setting of inductor's Triton templates.

Other products run at the level in force at run time.
"""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd

from precision_scope import matmul_precision


def noting(what: str) -> Callable[..., Any]:
    """Return a compiler that prints CUDA's setting when it compiles and when the result runs."""

    def compile_graph(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        fixed = torch.backends.cuda.matmul.allow_tf32

        def run(*args: object) -> object:
            print(f"  {what}: compiled with TF32 {fixed}, runs with {torch.backends.cuda.matmul.allow_tf32}")
            return graph(*args)

        return make_boxed_func(run)

    return compile_graph


backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"))
loss = torch.compile(lambda x, w: (x @ w).square().mean(), backend=backend, fullgraph=True)
for level in ("highest", "high", "medium"):
    print(f"in a scope at {level}:")
    with matmul_precision(level):
        result = loss(torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
        result.backward(retain_graph=True)
print("backward once more, outside:")
result.backward()
