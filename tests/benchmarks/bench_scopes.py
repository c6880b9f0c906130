"""What a scope costs, as ratios to ``with torch.no_grad(): pass`` in the same process.

Run it as a program; it prints each figure with its bar and its aim::

    python tests/benchmarks/bench_scopes.py [--json]

All cases take turns, and each counts with its fastest turn, so that a noisy
machine disturbs the ratios little. Nothing here fails: timings are for reading.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import tracemalloc
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from precision_scope import get_float32_matmul_precision, matmul_precision

ROUNDS, CALLS = 100, 300


class Figure(NamedTuple):
    """One row of the table."""

    what: str
    measured: float
    unit: str
    bar: float
    aim: float | None = None
    at_least: bool = False

    @property
    def met(self) -> str:
        """Say which of bar and aim the figure meets."""
        sign = -1 if self.at_least else 1
        if sign * self.measured > sign * self.bar:
            return "over the bar" if not self.at_least else "under the bar"
        return "aim met" if self.aim is not None and sign * self.measured <= sign * self.aim else "bar met"


def no_grad() -> None:
    """Enter and leave torch's own scope: the unit."""
    with torch.no_grad():
        pass


def outermost() -> None:
    """Enter and leave a scope that changes the level."""
    with matmul_precision("medium"):
        pass


def nested_change() -> None:
    """Do so inside another scope."""
    with matmul_precision("medium"):
        pass


def nested_same() -> None:
    """Enter and leave a scope of the level that is on."""
    with matmul_precision("high"):
        pass


@matmul_precision("medium")
def decorated() -> None:
    """Do nothing in a scope."""


def bare() -> None:
    """Do nothing."""


def fastest() -> dict[str, float]:
    """Return the fastest time of each case in seconds, taken in turns."""
    inside: dict[str, Callable[[], object]] = {
        "nested_change": nested_change,
        "nested_same": nested_same,
        "get": get_float32_matmul_precision,
    }
    outside: dict[str, Callable[[], object]] = {
        "no_grad": no_grad,
        "outermost": outermost,
        "decorated": decorated,
        "bare": bare,
    }
    best = dict.fromkeys([*outside, *inside], float("inf"))
    for _ in range(ROUNDS):
        for name, case in outside.items():
            best[name] = min(best[name], timeit.timeit(case, number=CALLS) / CALLS)
        with matmul_precision("high"):
            for name, case in inside.items():
                best[name] = min(best[name], timeit.timeit(case, number=CALLS) / CALLS)
    return best


def depth_ratio(depth: int = 1000) -> float:
    """Return the cost of a scope at a depth against that of a first nested one."""

    def at(levels: int) -> float:
        scopes = [matmul_precision("high") for _ in range(levels)]
        for scope in scopes:
            scope.__enter__()
        best = min(timeit.repeat(nested_change, number=CALLS, repeat=30))
        for scope in reversed(scopes):
            scope.__exit__(None, None, None)
        return best

    return at(depth) / at(1)


def thread_ratio(threads: int = 8, seconds: float = 1.0) -> float:
    """Return the rate of scopes that several threads enter against that of one."""
    levels = ["highest", "high", "medium"]

    def rate(count: int) -> float:
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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = max(rate(1) for _ in range(2))
        return max(rate(threads) for _ in range(2)) / alone


def import_milliseconds() -> float:
    """Return what importing the package takes, compiled, where torch has been imported."""
    program = """
import time, torch
began = time.perf_counter()
from precision_scope import matmul_precision
print((time.perf_counter() - began) * 1e3)
"""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        runs = [
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
            )
            for _ in range(4)
        ]
    return min(float(run.stdout) for run in runs)


def isolation_ratios() -> tuple[float, float, float, float, float]:
    """Return the time of 8x8 and 1024x1024 products with isolation over that without, and a scope's 8x8.

    Then that of 1024x1024 products with emulation over plain ones, and of 8x8
    ones after emulation over isolated ones before.

    A process cannot go back and forth, so each measures plain products first;
    several take turns, and each case counts with its fastest time of all.
    """
    program = """
import json, time, timeit, torch
from precision_scope import disable_emulation, enable_emulation, enable_isolation, matmul_precision
torch.set_num_threads(1)
small, large = torch.randn(8, 8), torch.randn(1024, 1024)
def fastest(matrix, calls, repeat):
    return min(timeit.repeat(lambda: torch.mm(matrix, matrix), number=calls, repeat=repeat)) / calls
found = [fastest(small, 1000, 60), fastest(large, 1, 60)]
enable_isolation()
found += [fastest(small, 1000, 60), fastest(large, 1, 60)]
with matmul_precision("high"):
    found.append(fastest(small, 1000, 60))
enable_emulation("cuda")
with matmul_precision("high"):
    found.append(fastest(large, 1, 60))
disable_emulation()
found.append(fastest(small, 1000, 60))
print(json.dumps(found))
"""
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(4)
    ]
    small, large, isolated_small, isolated_large, in_scope, emulated, afterwards = (
        min(times) for times in zip(*runs, strict=True)
    )
    return (
        isolated_small / small,
        isolated_large / large,
        in_scope / small,
        emulated / large,
        afterwards / isolated_small,
    )


def recording_microseconds() -> float:
    """Return what backward=True adds to a training step, for each operator that the forward records."""
    program = """
import timeit, torch
from precision_scope import enable_isolation, matmul_precision
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.Tanh()) * 5)
batch = torch.randn(4, 8)
def step(backward):
    with matmul_precision("high", backward=backward):
        loss = model(batch).sum()
        loss.backward()
    return loss
nodes, seen = [step(True).grad_fn], set()
while nodes:
    node = nodes.pop()
    if node is not None and node.name() != "torch::autograd::AccumulateGrad":
        seen.add(node)
        nodes += [earlier for earlier, _ in node.next_functions]
times = {False: float("inf"), True: float("inf")}
for _ in range(60):
    for backward in times:
        times[backward] = min(times[backward], timeit.timeit(lambda: step(backward), number=30) / 30)
print((times[True] - times[False]) / len(seen) * 1e6)
"""
    return min(
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(3)
    )


def bytes_per_scope(count: int = 1000) -> tuple[float, float]:
    """Return the bytes of a live scope, and what is kept of it after exit."""
    scopes: list[matmul_precision] = [matmul_precision("high")] * count
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for index in range(count):
        scopes[index] = matmul_precision("medium")
        scopes[index].__enter__()
    inside = tracemalloc.get_traced_memory()[0]
    while scopes:
        scopes.pop().__exit__(None, None, None)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (inside - before) / count, max(0, after - before) / count


def figures() -> list[Figure]:
    """Measure every row."""
    best = fastest()
    unit = best["no_grad"]
    live, kept = bytes_per_scope()
    with_block = best["outermost"] / unit
    isolated, isolated_large, isolated_in_scope, emulated, afterwards = isolation_ratios()
    return [
        Figure("outermost scope, level changes", with_block, "x no_grad", 2.0, 1.0),
        Figure("nested scope, level changes", best["nested_change"] / unit, "x no_grad", 1.5, 0.8),
        Figure("nested scope, same level", best["nested_same"] / unit, "x no_grad", 1.2, 0.6),
        Figure(
            "decorated call minus bare call",
            (best["decorated"] - best["bare"]) / unit,
            "x no_grad",
            with_block + 0.3,
            with_block,
        ),
        Figure("get_float32_matmul_precision() in a scope", best["get"] / unit, "x no_grad", 0.2),
        Figure("1,000th nested scope against the first", depth_ratio(), "x", 1.2),
        Figure("8 threads at different levels, rate against one", thread_ratio(), "x", 0.5, at_least=True),
        Figure("isolation on, 8x8 product outside scopes", isolated, "x plain", 4.0, 2.5),
        Figure("isolation on, 8x8 product in a scope", isolated_in_scope, "x plain", 4.0, 2.5),
        Figure("isolation on, 1024x1024 product", isolated_large, "x plain", 1.03, 1.0),
        Figure("TF32 emulated, 1024x1024 product", emulated, "x plain", 1.5),
        Figure("emulation off again, 8x8 product", afterwards, "x isolated", 1.03, 1.0),
        Figure("backward=True, for each forward operator", recording_microseconds(), "us", 3.0),
        Figure("import beyond torch's own", import_milliseconds(), "ms", 30, 10),
        Figure("memory per live scope", live, "bytes", 500),
        Figure("memory kept after exit, per scope", kept, "bytes", 1),
    ]


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = figures()
    if arguments.json:
        print(json.dumps([{**row._asdict(), "met": row.met} for row in rows], indent=2))
        return
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    print(f"{'what':48} {'measured':>9} {'bar':>7} {'aim':>7}")
    for row in rows:
        aim = "" if row.aim is None else f"{row.aim:.2f}"
        print(f"{row.what:48} {row.measured:9.2f} {row.bar:7.2f} {aim:>7}  {row.unit}, {row.met}")


if __name__ == "__main__":
    main()
