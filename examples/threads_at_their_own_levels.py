"""Eight threads at three levels at once: by switching torch's setting by hand, and with isolation."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from precision_scope import enable_isolation, matmul_precision

thread = threading.local()
wrong: list[str] = []
a = torch.randn(48, 48)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply, in place of torch's own kernel, and look at the setting when the product is done."""
    product = (a.unsqueeze(2) * b).sum(1)
    if torch.get_float32_matmul_precision() != thread.level:
        wrong.append(thread.level)
    return product


def work(level: str, enter: Callable[[str], None]) -> None:
    """Run products, each after entering a level, in one of the threads."""
    thread.level = level
    for _ in range(250):
        enter(level)


def by_hand(level: str) -> None:
    """Switch torch's setting, and multiply."""
    torch.set_float32_matmul_precision(level)
    torch.mm(a, a)


def in_a_scope(level: str) -> None:
    """Multiply in a scope."""
    with matmul_precision(level):
        torch.mm(a, a)


library = torch.library.Library("aten", "IMPL")
warnings.simplefilter("ignore", UserWarning)  # it says that the kernel is replaced
library.impl("mm", mm, "CPU")
for way in (by_hand, in_a_scope):
    if way is in_a_scope:
        enable_isolation()
    wrong.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, ["highest", "high", "medium", "high"] * 2, [way] * 8))
    print(f"{way.__name__}: {len(wrong)} of 2000 products at another thread's level")
