"""Rule 21: making a scope with backward=True, the first entry into one, and processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_isolation import run

from precision_scope import Float32MatmulPrecision, matmul_precision, report

KEY = "TESTING_ONLY_GenericMode"


@pytest.mark.parametrize("backward", [None, 0, 1, "yes", "medium", torch.tensor(True)])
def test_backward_is_true_or_false(backward: object) -> None:
    """Anything else is refused when the scope is made."""
    with pytest.raises(TypeError, match="backward must be True or False, got"):
        matmul_precision("high", backward=backward)  # type: ignore[arg-type]


def test_backward_is_given_by_name() -> None:
    """A second argument by position is refused."""
    with pytest.raises(TypeError):
        matmul_precision("high", True)  # type: ignore[call-arg]


@pytest.mark.parametrize("level", [True, "hihg", b"high", ["high"]])
def test_the_level_is_checked_as_ever(level: object) -> None:
    """The errors are those of a plain scope."""
    with pytest.raises((TypeError, ValueError)) as plain:
        matmul_precision(level)  # type: ignore[arg-type]
    with pytest.raises(plain.type) as covering:
        matmul_precision(level, backward=True)  # type: ignore[arg-type]
    assert str(covering.value) == str(plain.value)


def test_making_one_changes_nothing() -> None:
    """Only entering does (rule 4); nor does one that asks for nothing."""
    before = report()
    scope = matmul_precision("high", backward=True)
    scope(len)
    with matmul_precision(None, backward=True):
        pass
    assert report() == before
    assert not report().isolation
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", KEY)


def test_backward_false_is_a_plain_scope() -> None:
    """An optional choice can be passed straight through."""
    with matmul_precision("high", backward=False):
        assert not report().isolation


def test_it_prints_as_it_was_made() -> None:
    """The option shows, where it has an effect."""
    assert repr(matmul_precision("high", backward=True)) == "matmul_precision('high', backward=True)"
    assert repr(matmul_precision(Float32MatmulPrecision.HIGH, backward=False)) == "matmul_precision('high')"
    assert repr(matmul_precision(None, backward=True)) == "matmul_precision(None)"


@pytest.mark.parametrize("backward", [True, False])
def test_it_travels(backward: bool) -> None:
    """Copies and pickles cover what the scope covers."""
    scope = matmul_precision("high", backward=backward)
    for other in (copy.copy(scope), copy.deepcopy(scope), pickle.loads(pickle.dumps(scope))):
        assert type(other) is matmul_precision
        assert repr(other) == repr(scope)


PRELUDE = """
import torch
from precision_scope import get_float32_matmul_precision, matmul_precision, report

told = []
w = torch.randn(4, 4, requires_grad=True)


def product():
    result = w @ w
    result.register_hook(lambda _: told.append(str(get_float32_matmul_precision())))
    return result.sum()


"""


def test_the_first_entry_turns_isolation_on() -> None:
    """It is what the covered nodes' products find their level by."""
    printed = run(
        PRELUDE
        + """
with matmul_precision("medium", backward=True):
    print(report().isolation)
    loss = product()
loss.backward()
print(told, report().isolation)
"""
    )
    assert printed == "True\n['medium'] True\n"


def test_scopes_that_were_entered_before() -> None:
    """Scopes that are live at the first entry go on, and cover no backward pass."""
    printed = run(
        PRELUDE
        + """
with matmul_precision("high"):
    before = product()
    with matmul_precision("medium", backward=True):
        inside = product()
    after = product()
for loss in (before, inside, after):
    loss.backward()
print(told, torch.get_float32_matmul_precision())
"""
    )
    assert printed == "['highest', 'medium', 'highest'] highest\n"


def test_an_entry_that_fails_changes_nothing() -> None:
    """Where torch lacks what it is built on, the scope is not entered and flags are as before."""
    printed = run(
        "import torch\ndel torch._C._dispatch_tls_set_dispatch_key_included\n"
        + PRELUDE
        + """
from precision_scope import PrecisionScopeError
try:
    with matmul_precision("medium", backward=True):
        print("entered")
except PrecisionScopeError as error:
    print(str(error).partition(":")[0])
print(report().scopes, report().isolation, torch.get_float32_matmul_precision())
with matmul_precision("medium"):
    loss = product()
loss.backward()
print(told)
"""
    )
    assert printed == "backward=True does not work on this torch\n() False highest\n['highest']\n"


def test_an_interrupted_first_entry() -> None:
    """Wherever it is cut short, and though the exception is kept, the next entry is like the first."""
    printed = run(
        PRELUDE
        + """
import signal
from precision_scope import _torch_autograd

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
kept = []
for number in range(1, 40):
    signal.setitimer(signal.ITIMER_REAL, number * 2e-3)
    try:
        while True:
            with matmul_precision("medium", backward=True):
                pass
    except KeyboardInterrupt as error:
        kept.append(error)
interrupts = len(kept)
kept.clear()  # one on the first instruction of an exit holds the scope
for _ in range(2):
    with matmul_precision("medium", backward=True):
        loss = product()
    loss.backward()
missing = [
    name
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::mm") and "out" not in name
    and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "TESTING_ONLY_GenericMode")
]
print(interrupts, told, report().scopes, missing)
"""
    )
    assert printed == "39 ['medium', 'medium'] () []\n"


def test_first_entries_in_several_threads() -> None:
    """All are covered, whoever comes first."""
    printed = run(
        PRELUDE
        + """
import threading
barrier = threading.Barrier(8)

def work():
    barrier.wait()
    with matmul_precision("medium", backward=True):
        losses.append(product())

losses = []
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for loss in losses:
    loss.backward()
print(told)
"""
    )
    assert printed == f"{['medium'] * 8}\n"


def test_long_graphs_are_freed() -> None:
    """Tens of thousands of nodes in a row do not overflow the stack, and go when they should."""
    printed = run(
        """
        import threading
        import weakref
        import torch
        from precision_scope import matmul_precision

        def work():
            w = x = torch.ones(1, requires_grad=True)
            with matmul_precision("medium", backward=True):
                for _ in range(60_000):
                    x = x * 1.0
                    if len(kept) < 100:
                        kept.append(weakref.ref(x))
            x.backward()
            del x
            w.detach()[None] @ torch.ones(1, 1)
            print(w.grad, sum(reference() is not None for reference in kept))

        kept = []
        threading.stack_size(4 * 2**20)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    )
    assert printed == "tensor([1.]) 0\n"


def test_forked_and_spawned_processes() -> None:
    """A forked child keeps what is covered, a spawned one begins anew."""
    printed = run(
        """
        import multiprocessing
        import torch
        from precision_scope import get_float32_matmul_precision, matmul_precision, report

        torch.set_num_threads(1)
        w = torch.randn(4, 4, requires_grad=True)

        def work():
            told = []
            product = w @ w
            product.register_hook(lambda _: told.append(str(get_float32_matmul_precision())))
            with matmul_precision("high"):
                product.sum().backward()
            print(told, report().isolation, flush=True)

        if __name__ == "__main__":
            with matmul_precision("medium", backward=True):
                for method in ("fork", "spawn"):
                    child = multiprocessing.get_context(method).Process(target=work)
                    child.start()
                    child.join()
        """
    )
    assert printed == "['medium'] True\n['high'] False\n"


def test_distributed_data_parallel() -> None:
    """Two processes train a replica each, over gloo; gradients are those of the covered level."""
    printed = run(
        """
        import os
        import socket
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as multiprocessing
        from precision_scope import get_float32_matmul_precision, matmul_precision

        def train(rank, port, results):
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            torch.manual_seed(0)
            told = []
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
            model[0].register_full_backward_hook(lambda *_: told.append(str(get_float32_matmul_precision())))
            replica = torch.nn.parallel.DistributedDataParallel(model)
            for _ in range(3):
                with matmul_precision("medium", backward=True):
                    loss = replica(torch.full((4, 8), rank + 1.0, requires_grad=True)).mean()
                with matmul_precision("high"):
                    loss.backward()
            results.put((rank, told, [parameter.grad.sum().item() for parameter in model.parameters()]))
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            results = multiprocessing.get_context("spawn").SimpleQueue()
            multiprocessing.spawn(train, (port, results), nprocs=2)
            first, second = sorted(results.get() for _ in range(2))
            print(first[1], second[1], first[2] == second[2])
        """
    )
    # Some versions of torch print how the ranks are connected, too.
    assert printed.splitlines()[-1] == f"{['medium'] * 3} {['medium'] * 3} True"
