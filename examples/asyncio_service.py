"""An asyncio service whose requests want different levels, also across ``await``."""

import asyncio
import warnings

import torch

from precision_scope import enable_isolation, get_float32_matmul_precision, matmul_precision

products: list[str] = []


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, in place of torch's own kernel, and note what is wanted and what is on."""
    products.append(f"{get_float32_matmul_precision()}, ran at {torch.get_float32_matmul_precision()}")
    return (a.unsqueeze(2) * b).sum(1)


library = torch.library.Library("aten", "IMPL")
warnings.simplefilter("ignore", UserWarning)  # it says that the kernel is replaced
library.impl("mm", mm, "CPU")


async def answer(level: str) -> None:
    """Serve one request; others run whenever this one waits."""
    with matmul_precision(level):
        for _ in range(10):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            await asyncio.sleep(0)


async def serve() -> None:
    """Serve many requests at once."""
    await asyncio.gather(*map(answer, ["highest", "high", "medium"] * 33))


enable_isolation()
asyncio.run(serve())
print(*[f"{products.count(what)} products wanted {what}" for what in sorted({*products})], sep="\n")
