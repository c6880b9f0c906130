"""The benchmark's measurements, each in a process of its own, which prints its figures as JSON.

Run it as ``python tests/benchmarks/measurements.py scopes``, say. What is
compared takes turns, and each counts with its fastest turn, so that a noisy
machine disturbs the ratios little.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import json
import sys
import threading
import time
import timeit
import tracemalloc
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from precision_scope import (
    Float32MatmulPrecision,
    disable_emulation,
    enable_emulation,
    enable_isolation,
    get_float32_matmul_precision,
    matmul_precision,
)
from precision_scope._entries import Entry
from precision_scope._ledger import ScopeKey
from precision_scope._locks import Lock, get_ident
from precision_scope._owners import running_loop, this_thread
from precision_scope._torch_api import HAS_CELLS, is_traced
from precision_scope.backends._torch import TorchCells, TorchFlags

Case: TypeAlias = "tuple[Callable[[], object], Callable[[], AbstractContextManager[object]]]"


def fastest(cases: dict[str, Case], rounds: int = 120, calls: int = 300) -> dict[str, float]:
    """Return the fastest time of each case, a function and the scope to call it in, in seconds."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, (function, scope) in cases.items():
            with scope():
                best[name] = min(best[name], timeit.timeit(function, number=calls) / calls)
    return best


def no_grad() -> None:
    """Enter and leave torch's own scope: the unit."""
    with torch.no_grad():
        pass


def medium() -> None:
    """Enter and leave a scope; which level is on before it makes the difference."""
    with matmul_precision("medium"):
        pass


@matmul_precision("medium")
def decorated() -> None:
    """Do nothing in a scope."""


def bare() -> None:
    """Do nothing."""


OUTSIDE = contextlib.nullcontext


def inside(level: str) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes a scope to measure in."""
    return lambda: matmul_precision(level)


def scopes() -> dict[str, float]:
    """Return what scopes cost, as ratios to no_grad, where nobody has written to torch's flags."""
    cases: dict[str, Case] = {
        "no_grad": (no_grad, OUTSIDE),
        "outermost": (medium, OUTSIDE),
        "decorated": (decorated, OUTSIDE),
        "bare": (bare, OUTSIDE),
        "nested, change": (medium, inside("high")),
        "nested, same": (medium, inside("medium")),
        "get": (get_float32_matmul_precision, inside("high")),
    }
    times = fastest(cases)
    times["decorated"] -= times.pop("bare")
    unit = times.pop("no_grad")
    return {"no_grad in us": unit * 1e6, **{name: seconds / unit for name, seconds in times.items()}}


class Empty:
    """A with-block that does nothing, but for keeping its argument."""

    __slots__ = ("level",)

    def __init__(self, level: str, *, backward: bool = False) -> None:  # noqa: ARG002 -- as a scope's
        self.level = level

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def parts() -> dict[str, float]:
    """Return what the parts of an outermost scope take by themselves, as ratios to no_grad."""
    flags, lock, variable = (
        TorchCells() if HAS_CELLS else TorchFlags(),
        Lock(),
        contextvars.ContextVar[object](""),
    )
    saved, level = (flags.save(),), Float32MatmulPrecision.MEDIUM

    def statement() -> None:
        with Empty("medium"):
            pass

    def read_and_write() -> None:
        flags.save()
        flags.apply(level)
        flags.restore_first(saved)

    def write() -> None:
        flags.apply(level)
        flags.apply(level)

    def take_lock(hold: Callable[[int, int], int] = lock.holder.setdefault) -> None:
        for _ in (1, 2):
            me = get_ident()
            if hold(0, me) is me:
                del lock.holder[0]

    def use_context() -> None:
        for _ in (1, 2):
            variable.get(None)
            variable.set("")

    def ask_who_and_what() -> None:
        running_loop()
        this_thread.owner  # noqa: B018
        is_traced()

    def make_objects() -> None:
        Entry()
        ScopeKey()

    cases = (statement, read_and_write, write, take_lock, use_context, ask_who_and_what, make_objects)
    times = fastest({case.__name__: (case, OUTSIDE) for case in (no_grad, bare, *cases)})
    unit, call = times.pop("no_grad"), times.pop("bare")
    return {name: (seconds - call) / unit for name, seconds in times.items()}


def alternatives() -> dict[str, float]:
    """Return what other scopes cost, and one of ours where torch's flags have been written to before."""
    from alternatives import ALTERNATIVES  # noqa: PLC0415 -- it imports other libraries

    torch.set_float32_matmul_precision("high")
    cases = {"no_grad": no_grad, "matmul_precision": medium, **ALTERNATIVES}
    times = fastest({name: (case, OUTSIDE) for name, case in cases.items()}, 60)
    unit = times.pop("no_grad")
    return {name: seconds / unit for name, seconds in times.items()}


@contextlib.contextmanager
def depth(count: int) -> Generator[None]:
    """Be inside many scopes, one in the other."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(matmul_precision("high"))
        yield


def depths() -> dict[str, float]:
    """Return the cost of the 1,000th and 10,000th nested scope as ratios to the first."""
    counts = (1, 1000, 10_000)
    times = fastest({str(count): (medium, functools.partial(depth, count)) for count in counts}, 20)
    return {name: seconds / times["1"] for name, seconds in times.items()}


def tasks() -> dict[str, float]:
    """Return the cost of a scope while a thousand tasks have one, as a ratio to that beside a single one."""
    levels = ("highest", "high", "medium")

    async def hold(level: str, done: asyncio.Event) -> None:
        with matmul_precision(level):
            await done.wait()

    async def beside(count: int) -> float:
        done = asyncio.Event()
        holding = [asyncio.create_task(hold(levels[number % 3], done)) for number in range(count)]
        await asyncio.sleep(0)
        seconds = min(timeit.repeat(medium, number=100, repeat=10)) / 100
        done.set()
        await asyncio.gather(*holding)
        return seconds

    async def compare() -> dict[str, float]:
        best = {1: float("inf"), 1000: float("inf")}
        for _ in range(15):
            for count, seconds in best.items():
                best[count] = min(seconds, await beside(count))
        return {"1000": best[1000] / best[1]}

    return asyncio.run(compare())


def threads() -> dict[str, float]:
    """Return the rate at which 8 and 64 threads enter scopes, as ratios to that of one."""
    levels = ("highest", "high", "medium")

    def rate(count: int, seconds: float = 0.5) -> float:
        done = [0] * count
        start = threading.Barrier(count + 1)
        stop = threading.Event()

        def work(number: int) -> None:
            level = levels[number % 3]
            start.wait()
            while not stop.is_set():
                for _ in range(100):
                    with matmul_precision(level):
                        pass
                done[number] += 100

        workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for worker in workers:
            worker.start()
        start.wait()
        began = time.perf_counter()
        time.sleep(seconds)
        stop.set()
        for worker in workers:
            worker.join()
        return sum(done) / (time.perf_counter() - began)

    best = {1: 0.0, 8: 0.0, 64: 0.0}
    for _ in range(3):
        for count, highest in best.items():
            best[count] = max(highest, rate(count))
    return {str(count): highest / best[1] for count, highest in best.items()}


def products() -> dict[str, float]:
    """Return what isolation and emulation cost a product, as ratios to a plain one.

    A process cannot go back: each is measured beside no_grad, which is the same all along.
    """
    torch.set_num_threads(1)
    small, large = torch.randn(8, 8), torch.randn(1024, 1024)

    def units() -> None:
        for _ in range(300):
            no_grad()

    def measured(scope: Callable[[], AbstractContextManager[object]] = OUTSIDE) -> dict[str, float]:
        few = fastest({"small": (lambda: torch.mm(small, small), scope), "unit": (no_grad, OUTSIDE)})
        many = fastest({"large": (lambda: torch.mm(large, large), scope), "units": (units, OUTSIDE)}, 60, 1)
        return {"small": few["small"] / few["unit"], "large": many["large"] / many["units"]}

    plain = measured()
    enable_isolation()
    isolated, in_scope = measured(), measured(inside("high"))
    enable_emulation("cuda")
    emulated = measured(inside("high"))
    disable_emulation()
    afterwards = measured()
    return {
        "small": isolated["small"] / plain["small"],
        "small in a scope": in_scope["small"] / plain["small"],
        "large": isolated["large"] / plain["large"],
        "emulated": emulated["large"] / plain["large"],
        "after emulation": afterwards["small"] / isolated["small"],
    }


def recording() -> dict[str, float]:
    """Return what backward=True adds to a training step, in us for each operator that the forward records."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.Tanh()) * 5)
    batch = torch.randn(4, 8)
    enable_isolation()  # in both cases, as the first such scope does

    def step(backward: bool) -> torch.Tensor:
        with matmul_precision("high", backward=backward):
            loss: torch.Tensor = model(batch).sum()
            loss.backward()
        return loss

    nodes, seen = [step(True).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            nodes += [earlier for earlier, _ in node.next_functions]
    cases: dict[str, Case] = {
        "plain": (functools.partial(step, False), OUTSIDE),
        "covering": (functools.partial(step, True), OUTSIDE),
    }
    times = fastest(cases, 80, 30)
    return {"operator": (times["covering"] - times["plain"]) / len(seen) * 1e6}


def memory() -> dict[str, float]:
    """Return the bytes of a live scope, and what is kept of it after exit."""
    count = 1000
    medium()  # the first one sees to more
    live: list[matmul_precision] = [matmul_precision("high")] * count
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for index in range(count):
        live[index] = matmul_precision("medium")
        live[index].__enter__()
    within = tracemalloc.get_traced_memory()[0]
    while live:
        live.pop().__exit__(None, None, None)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"live": (within - before) / count, "kept": max(0, after - before) / count}


MEASUREMENTS = (scopes, parts, alternatives, depths, tasks, threads, products, recording, memory)

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of scopes in conflict
    found = {measurement.__name__: measurement for measurement in MEASUREMENTS}
    print(json.dumps(found[sys.argv[1]]()))
