"""Eight threads at three levels at once: by switching torch's setting by hand, and with isolation."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from precision_scope import enable_isolation, matmul_precision

thread = threading.local()
wrong: list[str] = []
library = torch.library.Library("aten", "IMPL")


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = (a.unsqueeze(2) * b).sum(1)
    wrong.extend({thread.level} - {torch.get_float32_matmul_precision()})
    return product


def work(level: str, by_hand: bool) -> None:
    thread.level = level
    for _ in range(250):
        if by_hand:
            torch.set_float32_matmul_precision(level)
        with matmul_precision(None if by_hand else level):
            torch.mm(*torch.ones(2, 48, 48))


warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel is replaced
library.impl("mm", mm, "CPU")  # in place of its own
with ThreadPoolExecutor(8) as pool:
    list(pool.map(work, ["highest", "high", "medium", "high"] * 2, [True] * 8))
    print("by hand:", len(wrong), "of 2000 products at another thread's level")
    wrong.clear()
    enable_isolation()
    list(pool.map(work, ["highest", "high", "medium", "high"] * 2, [False] * 8))
    print("isolated:", len(wrong), "of 2000 products at another thread's level")
