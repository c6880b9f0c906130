"""A training step whose loss is computed at "highest", forward and backward, in a "medium" model.

What is computed in a scope with ``backward=True`` keeps its level for the gradients.
"""

import warnings

import torch
from torch import nn

from precision_scope import matmul_precision

levels: list[str] = []


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, in place of torch's own kernel, and note the setting that this product runs at."""
    levels.append(torch.get_float32_matmul_precision())
    return (a.unsqueeze(2) * b).sum(1)


library = torch.library.Library("aten", "IMPL")
warnings.simplefilter("ignore", UserWarning)  # it says that the kernel is replaced
library.impl("mm", mm, "CPU")


@matmul_precision("highest", backward=True)
def contrastive_loss(features: torch.Tensor) -> torch.Tensor:
    """Compare all pairs of a batch: large sums of products, small differences."""
    return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
with matmul_precision("medium"):
    loss = contrastive_loss(model(torch.randn(8, 32)))
    print("forward: ", *levels)
    levels.clear()
    loss.backward()
    print("backward:", *levels)
