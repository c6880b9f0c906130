"""What a scope costs, mostly as ratios to ``with torch.no_grad(): pass`` in the same process.

Run it as a program; it prints each figure with its bar and its aim::

    python tests/benchmarks/bench_scopes.py [--json]

It takes two minutes. Each measurement is made in several processes, one after
the other, since one can be unlucky in where its memory lies, and the median
counts. Nothing here fails: timings are for reading.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent

PROCESSES = {
    "scopes": 5,
    "parts": 3,
    "alternatives": 3,
    "depths": 3,
    "tasks": 3,
    "threads": 3,
    "products": 3,
    "recording": 3,
    "memory": 1,
}
"""In how many processes each measurement is made."""


PARTS = {
    "statement": "  of it: the with-statement, of a class in Python",
    "read_and_write": "  of it: torch's flags, read, set and put back",
    "write": "  of a nested one: setting them twice",
    "take_lock": "  of each: the lock, twice",
    "use_context": "  of each: the context variable, twice",
    "ask_who_and_what": "  of each: which thread, task and tracing it is",
    "make_objects": "  of each: the objects of an entry and a scope",
    "other": "  of the outermost: all else",
    "other, nested": "  of a nested one: all else",
}
"""Where the time of a scope goes; what is measured by itself takes less than in its place."""


class Figure(NamedTuple):
    """One row of the table."""

    what: str
    measured: float
    unit: str
    bar: float | None = None
    aim: float | None = None
    at_least: bool = False

    @property
    def met(self) -> str:
        """Say which of bar and aim the figure meets."""
        sign = -1 if self.at_least else 1
        if self.bar is None:
            return ""
        if sign * self.measured > sign * self.bar:
            return "over the bar" if not self.at_least else "under the bar"
        return "aim met" if self.aim is not None and sign * self.measured <= sign * self.aim else "bar met"


def measured(measurement: str) -> dict[str, float]:
    """Return the medians of the figures of a measurement."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, HERE / "measurements.py", measurement], stdout=subprocess.PIPE, check=True
            ).stdout
        )
        for _ in range(PROCESSES[measurement])
    ]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


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
            for _ in range(6)
        ]
    return min(float(run.stdout) for run in runs)


def figures() -> list[Figure]:
    """Measure every row."""
    scopes, parts, others, depths, tasks, threads, products, recording, memory = (
        measured(name) for name in PROCESSES
    )
    block = scopes["outermost"]
    parts["other"] = block - sum(parts.values()) + parts["write"]
    parts["other, nested"] = scopes["nested, change"] - sum(
        share for name, share in parts.items() if name not in ("read_and_write", "other")
    )
    rows = [
        Figure("outermost scope, level changes", block, "x no_grad", 2.0, 1.0),
        Figure("the same, where flags were set before", others.pop("matmul_precision"), "x no_grad"),
        Figure("nested scope, level changes", scopes["nested, change"], "x no_grad", 1.5, 0.8),
        Figure("nested scope, same level", scopes["nested, same"], "x no_grad", 1.2, 0.6),
        Figure("decorated call minus bare call", scopes["decorated"], "x no_grad", block + 0.3, block),
        Figure("get_float32_matmul_precision() in a scope", scopes["get"], "x no_grad", 0.2),
        Figure("1,000th nested scope against the first", depths["1000"], "x", 1.2, 1.0),
        Figure("10,000th nested scope against the first", depths["10000"], "x"),
        Figure("scope beside 1,000 tasks with one, against one", tasks["1000"], "x"),
        Figure("8 threads at different levels, rate against one", threads["8"], "x", 0.5, at_least=True),
        Figure("64 threads at different levels, rate against one", threads["64"], "x"),
        Figure("isolation on, 8x8 product outside scopes", products["small"], "x plain", 4.0, 2.5),
        Figure("isolation on, 8x8 product in a scope", products["small in a scope"], "x plain", 4.0, 2.5),
        Figure("isolation on, 1024x1024 product", products["large"], "x plain", 1.03, 1.0),
        Figure("TF32 emulated, 1024x1024 product", products["emulated"], "x plain", 1.5),
        Figure("emulation off again, 8x8 product", products["after emulation"], "x isolated", 1.03, 1.0),
        Figure("backward=True, for each forward operator", recording["operator"], "us", 3.0),
        Figure("import beyond torch's own", import_milliseconds(), "ms", 30, 10),
        Figure("memory per live scope", memory["live"], "bytes", 500),
        Figure("memory kept after exit, per scope", memory["kept"], "bytes", 1),
        Figure("torch.no_grad()", scopes["no_grad in us"], "us"),
    ]
    rows += [Figure(PARTS[name], share, "x no_grad") for name, share in parts.items()]
    return rows + [Figure(name, ratio, "x no_grad") for name, ratio in others.items()]


def machine() -> dict[str, str]:
    """Return what the figures hold for."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("numpy", "jax", "threadpoolctl")
        if importlib.util.find_spec(name) is not None
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = figures()
    if arguments.json:
        table = [{**row._asdict(), "met": row.met} for row in rows]
        print(json.dumps({**machine(), "figures": table}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'what':48} {'measured':>9} {'bar':>7} {'aim':>7}")
    for row in rows:
        bar, aim = ("" if limit is None else f"{limit:.2f}" for limit in (row.bar, row.aim))
        print(f"{row.what:48} {row.measured:9.2f} {bar:>7} {aim:>7}  {row.unit}{row.met and ', '}{row.met}")


if __name__ == "__main__":
    main()
