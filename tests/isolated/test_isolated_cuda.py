"""Rule 17 on a CUDA GPU: threads at several levels at once, told by the error of the products."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

from precision_scope import (
    disable_emulation,
    enable_emulation,
    get_float32_matmul_precision,
    matmul_precision,
)

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a CUDA GPU with TF32",
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # inductor's own use of it
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # a thread's first product
]

TF32 = {"highest": False, "high": True, "medium": True, None: False}


def random(*shape: int) -> torch.Tensor:
    """Return a random tensor on the GPU."""
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(len(shape)))


def is_tf32(product: torch.Tensor, exact: torch.Tensor) -> bool:
    """Tell from its error against float64 how a product was computed."""
    error = float((product.double() - exact).norm() / exact.norm())
    assert error < 2e-6 or 1e-4 < error < 1e-2, error
    return error > 1e-4


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b, _c: torch.mm(a[0], b[0]),
    "mm.out": lambda a, b, _c: torch.mm(a[0], b[0], out=torch.empty_like(a[0])),
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5),
    "addmm_": lambda a, b, c: c[0].clone().addmm_(a[0], b[0]),
    "bmm": lambda a, b, _c: torch.bmm(a, b),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, alpha=2),
    "addbmm": lambda a, b, c: torch.addbmm(c[0], a, b),
    "linear": lambda a, b, _c: functional.linear(a, b[0], b[0, 0]),
    "einsum": lambda a, b, _c: torch.einsum("bij,bjk->bik", a, b),
    "matmul": lambda a, b, _c: a @ b,
    "multi_dot": lambda a, b, c: torch.linalg.multi_dot([a[0], b[0], c[0]]),
    "vmap": lambda a, b, _c: torch.vmap(torch.mm)(a, b),
}


def in_threads(*bodies: Callable[[], object]) -> None:
    """Run functions in threads of their own, and raise what they raise."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        for future in [pool.submit(body) for body in bodies]:
            future.result(timeout=100)


def test_eight_threads_at_three_levels_and_none() -> None:
    """Every operator in every thread has the error of its thread's own level."""
    a, b, c = random(4, 192, 192), random(4, 192, 192), random(4, 192, 192)
    exact = {name: product(a.double(), b.double(), c.double()) for name, product in PRODUCTS.items()}
    count = 0

    def work(level: str | None) -> None:
        nonlocal count
        for _ in range(20):
            with matmul_precision(level):
                for name, product in PRODUCTS.items():
                    assert is_tf32(product(a, b, c), exact[name]) is TF32[level], (name, level)
                    count += 1

    in_threads(*(lambda level=level: work(level) for level in list(TF32) * 2))
    assert count > 1500


def test_streams() -> None:
    """Threads that launch on streams of their own get their own levels."""
    a, b = random(512, 512), random(512, 512)
    exact = a.double() @ b.double()
    torch.cuda.synchronize()

    def work(level: str | None) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), matmul_precision(level):
            products = [a @ b for _ in range(50)]
        stream.synchronize()
        for product in products:
            assert is_tf32(product, exact) is TF32[level]

    in_threads(*(lambda level=level: work(level) for level in TF32))


def test_backward_in_the_threads_of_the_device() -> None:
    """Each pass runs at the level of the thread that calls backward(), though another thread runs it."""
    a, b = random(256, 256), random(256, 256)
    exact = torch.ones_like(a).double() @ b.double().T
    levels: set[tuple[str | None, str, bool]] = set()

    def train(level: str | None) -> None:
        caller = threading.get_ident()
        for _ in range(25):
            x = a.clone().requires_grad_()
            out = x @ b
            out.register_hook(
                lambda _grad: levels.add(
                    (level, str(get_float32_matmul_precision()), threading.get_ident() != caller)
                )
            )
            with matmul_precision(level):
                out.sum().backward()
            assert x.grad is not None
            assert is_tf32(x.grad, exact) is TF32[level], level

    in_threads(*(lambda level=level: train(level) for level in list(TF32) * 2))
    assert levels == {(level, level or "highest", True) for level in TF32}


@pytest.mark.parametrize("outside", [None, "high", "highest"])
def test_covered_backward_in_the_threads_of_the_device(outside: str | None) -> None:
    """With backward=True each node runs at the level of its forward, also what a pass records itself."""
    a, b = random(256, 256), random(256, 256)
    exact = torch.ones_like(a).double() @ b.double().T

    def train(level: str) -> None:
        for _ in range(10):
            x, weight = a.clone().requires_grad_(), b.clone().requires_grad_()
            with matmul_precision(level, backward=True):
                out = x @ weight
            told: list[str] = []
            out.register_hook(lambda _grad, told=told: told.append(get_float32_matmul_precision()))
            with matmul_precision(outside):
                (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                (again,) = torch.autograd.grad(gradient, weight, a)
            assert told == [level]
            assert is_tf32(gradient, exact) is TF32[level], level
            twice = a.double().T @ torch.ones_like(a).double()
            assert is_tf32(again, twice) is TF32[level], level

    in_threads(*(lambda level=level: train(level) for level in ("highest", "high", "medium") * 2))


def test_graphs_are_captured_at_the_threads_level() -> None:
    """A graph that one thread captures keeps its level, while other threads run at others."""
    a, b = random(256, 256), random(256, 256)
    exact = a.double() @ b.double()
    for level in ("high", "highest"):
        other = "highest" if level == "high" else "high"
        stop = threading.Event()

        def load(other: str = other, stop: threading.Event = stop) -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), matmul_precision(other):
                x, y = a.clone(), b.clone()
                out = torch.empty_like(a)
                while not stop.is_set():
                    torch.mm(x, y, out=out)

        worker = threading.Thread(target=load)
        with matmul_precision(level):
            with torch.cuda.stream(torch.cuda.Stream()):
                a @ b  # warm-up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            worker.start()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    out = a @ b
            finally:
                stop.set()
                worker.join()
        with matmul_precision(other):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert is_tf32(out, exact) is TF32[level]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_products(backend: str) -> None:
    """Extern products of compiled code follow the level of each call."""
    a, b = random(256, 256), random(256, 256)
    exact = torch.relu(a.double() @ b.double())
    compiled = torch.compile(lambda x, y: torch.relu(x @ y), backend=backend)
    for level in ("highest", "high", "highest", "medium", "highest"):
        with matmul_precision(level):
            assert is_tf32(compiled(a, b), exact) is TF32[level]


EMULATED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "square": ((512, 512), (512, 512)),
    "long sums": ((128, 8192), (8192, 256)),
    "short sums": ((2048, 32), (32, 1024)),
    "odd": ((333, 517), (517, 129)),
    "batches": ((8, 256, 128), (8, 128, 192)),
    "broadcast": ((4, 1, 128, 256), (3, 256, 128)),
}


@pytest.mark.parametrize("level", ["high", "medium"])
@pytest.mark.parametrize("name", EMULATED)
def test_emulation_makes_the_errors_of_the_hardware(name: str, level: str) -> None:
    """On the CPU, within a factor of two of those of TF32 here, which it leaves alone."""
    left, right = (random(*shape) for shape in EMULATED[name])
    exact = left.double() @ right.double()

    def error(product: torch.Tensor) -> float:
        return float((product.double().to(exact) - exact).norm() / exact.norm())

    with matmul_precision(level):
        real = error(left @ right)
    try:
        enable_emulation("cuda")
        with matmul_precision(level):
            emulated = error(left.cpu() @ right.cpu())
            assert error(left @ right) == real
        enable_emulation("tpu")
        with matmul_precision(level):
            assert error(left @ right) == real
    finally:
        disable_emulation()
    assert real / 2 < emulated < real * 2
