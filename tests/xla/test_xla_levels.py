"""Rule 26: what is recorded at a level is compiled and run at it, whenever that happens."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from flags import reset
from lowering import SETTINGS, Xla

from precision_scope import (
    PrecisionScopeError,
    get_float32_matmul_precision,
    matmul_precision,
    pytest_plugin,
    report,
    set_float32_matmul_precision,
)
from precision_scope._ledger import ledger

_sizes = itertools.count(3)


def product(xla: Xla) -> torch.Tensor:
    """Record a product like no other."""
    size = next(_sizes)
    return xla.tensor(size, size) @ xla.tensor(size, size)


@pytest.mark.parametrize("level", SETTINGS)
def test_a_product_is_compiled_at_its_scopes_level(xla: Xla, level: str) -> None:
    """Though it is only asked for when the scope has ended."""
    with matmul_precision(level):
        assert xla.setting() == SETTINGS[level]
        result = product(xla)
    result.cpu()
    assert xla.compiled() == [SETTINGS[level]]


def test_what_was_recorded_before_the_scope_keeps_its_level(xla: Xla) -> None:
    """It is lowered when the scope is entered, and so are those of outer scopes."""
    before = product(xla)
    with matmul_precision("highest"):
        outer = product(xla)
        with matmul_precision("high"):
            inner = product(xla)
        last = product(xla)
    for result in (last, inner, outer, before):
        result.cpu()
    assert xla.compiled() == ["default", "highest", "high", "highest"]


def test_nothing_is_cut_where_the_level_does_not_change(xla: Xla) -> None:
    """Operations before, inside and after are compiled as one program."""
    before = product(xla)
    with matmul_precision("medium"):
        inside = product(xla)
    assert xla.is_recorded(before)
    assert xla.is_recorded(inside)
    (before.sum() + inside.sum()).cpu()


def test_an_exception_ends_the_scope_like_anything_else(xla: Xla) -> None:
    """What was recorded is at its level, what comes after is not."""
    results = []

    def fail() -> None:
        with matmul_precision("highest"):
            results.append(product(xla))
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    results.append(product(xla))
    for result in results:
        result.cpu()
    assert xla.compiled() == ["highest", "default"]


def test_decorated_functions_coroutines_and_generators(xla: Xla) -> None:
    """Each step is at its level, and what happens in between is not."""

    @matmul_precision("highest")
    def function() -> torch.Tensor:
        return product(xla)

    @matmul_precision("high")
    async def coroutine() -> list[torch.Tensor]:
        first = product(xla)
        await asyncio.sleep(0)
        return [first, product(xla)]

    async def undecorated() -> list[torch.Tensor]:
        return [product(xla)]

    @matmul_precision("highest")
    def generator() -> object:
        yield product(xla)
        yield product(xla)

    async def both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return await asyncio.gather(coroutine(), undecorated())

    results = [function(), *itertools.chain(*asyncio.run(both()))]
    for result in generator():  # type: ignore[attr-defined]
        results += [result, product(xla)]
    for result in results:
        result.cpu()
    assert xla.compiled() == [
        "highest",  # function
        *("high", "default", "high"),  # the two coroutines in turn
        *("highest", "default", "highest", "default"),  # generator and loop
    ]


def test_the_process_default_reaches_xla(xla: Xla) -> None:
    """It stays, and a scope brings it back."""
    before = product(xla)
    set_float32_matmul_precision("high")
    try:
        after = product(xla)
        with matmul_precision("highest"):
            inside = product(xla)
        assert xla.setting() == "high"
        for result in (before, after, inside):
            result.cpu()
        assert xla.compiled() == ["default", "high", "highest"]
    finally:
        set_float32_matmul_precision("medium")
        reset()


def test_a_new_default_does_not_run_what_was_compiled_at_the_old_one(xla: Xla) -> None:
    """Nor does a scope at the old one run what was compiled at the new one."""
    a = xla.tensor(71, 71)
    (a @ a).cpu()
    set_float32_matmul_precision("highest")
    try:
        (a @ a).cpu()
        with matmul_precision("medium"):
            (a @ a).cpu()
        with matmul_precision("high"):
            (a @ a).cpu()
        (a @ a).cpu()
        assert xla.compiled() == ["default", "highest", "high"]
    finally:
        set_float32_matmul_precision("medium")
        reset()


def test_a_backward_pass_before_the_scope_keeps_its_level(xla: Xla) -> None:
    """It is recorded by another thread, autograd's, for this one."""
    weight = xla.tensor(73, 73).requires_grad_()
    loss = (weight @ weight).sum()
    with matmul_precision("high"):
        pass  # what is recorded so far is lowered
    assert xla.compiled() == ["default"]
    loss.backward()
    assert weight.grad is not None
    with matmul_precision("highest"):
        weight.grad.cpu()
    assert set(xla.compiled()) == {"default"}


def test_what_others_set_inside_is_undone(xla: Xla) -> None:
    """And what they recorded runs at what they set."""
    with matmul_precision("high"):
        first = product(xla)
        xla.module.sync()
        xla.core._xla_set_mat_mul_precision("highest")
        assert report().disagreeing == {"xla": "highest"}
        second = product(xla)
    assert xla.setting() == "default"
    first.cpu(), second.cpu()
    assert xla.compiled() == ["high", "highest"]


READINGS: dict[str, Callable[[Xla, torch.Tensor], object]] = {
    "cpu": lambda _xla, a: (a @ a).cpu(),
    "item": lambda _xla, a: (a @ a).sum().item(),
    "sync": lambda xla, a: (a @ a, xla.module.sync()),
    "compile": lambda xla, a: xla.module.compile(lambda: a @ a)(),
    "full graph": lambda xla, a: xla.module.compile(lambda: a @ a, full_graph=True)(),
    "mark step": lambda xla, a: (a @ a, xla.core._xla_step_marker("xla:0", [], wait=True)),
    "scope's end": lambda _xla, a: a @ a,
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("reading", READINGS)
def test_code_that_was_compiled_at_another_level_is_not_used(xla: Xla, reading: str, eager: bool) -> None:
    """Each level has its own, which is compiled once, whatever asks for the result."""
    size = next(_sizes)
    read = READINGS[reading]
    xla.module.experimental.eager_mode(eager)
    try:
        for again in (False, True):
            for level, setting in SETTINGS.items():
                with matmul_precision(level):
                    kept = read(xla, xla.tensor(size, size))
                xla.module.sync()
                assert xla.compiled() == ([] if again else [setting])
                del kept
    finally:
        xla.module.experimental.eager_mode(False)


def test_code_runs_at_the_level_it_was_compiled_for(xla: Xla) -> None:
    """What is looked up differs by level, and by nothing else."""
    a = xla.tensor(5, 5)
    hashes = {}
    for level in SETTINGS:
        with matmul_precision(level):
            hashes[level] = xla.core._get_graph_hash([a @ a])
    assert len(set(hashes.values())) == 3
    for level in SETTINGS:
        with matmul_precision(level):
            assert xla.core._get_graph_hash([a @ a]) == hashes[level]
    assert xla.core._get_graph_hash([a @ a]) == hashes["medium"]


CHANGES_OF_SHAPE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda a: a.view(a.shape),
    lambda a: a.reshape(-1).reshape(a.shape),
    lambda a: a.view(a.shape).view(a.shape),
    lambda a: a.view(a.shape).view(a.shape).view(a.shape),
    lambda a: a.unsqueeze(-1).squeeze(-1),
    lambda a: a[..., None, None].view(a.shape),
    lambda a: a.expand_as(a),
]


def test_code_that_changes_shapes_is_not_taken_for_another_level(xla: Xla) -> None:
    """At no level is it what another one has recorded."""
    a = xla.tensor(79, 79)
    seen: dict[object, str] = {}
    for level, setting in SETTINGS.items():
        with matmul_precision(level):
            for change in (lambda a: a, *CHANGES_OF_SHAPE):
                assert seen.setdefault(xla.core._get_graph_hash([change(a @ a)]), setting) == setting


def test_a_mistake_with_devices_has_no_effect_on_scopes(xla: Xla) -> None:
    """torch_xla's error is all there is."""
    a = xla.tensor(5, 5)
    with pytest.raises(RuntimeError, match="XLA"):
        torch.mm(torch.ones(5, 5), a)
    with matmul_precision("highest"):
        with pytest.raises(RuntimeError, match="XLA"):
            torch.nn.functional.linear(torch.ones(5, 5), a)
        result = product(xla)
    result.cpu()
    assert xla.compiled() == ["highest"]


def test_eager_mode_is_eager(xla: Xla) -> None:
    """A product is launched at once at every level."""
    a = xla.tensor(4, 4)
    xla.module.experimental.eager_mode(True)
    try:
        for level in SETTINGS:
            with matmul_precision(level):
                assert not xla.is_recorded(a @ a)
    finally:
        xla.module.experimental.eager_mode(False)


def test_an_interrupt_leaves_eager_mode_on(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after it has been turned off for a moment."""
    a = xla.tensor(4, 4)
    turn = xla.core._set_use_eager_mode

    def turn_and_interrupt(on: bool) -> None:
        turn(on)
        if not on:
            raise InterruptedError

    turn(True)
    monkeypatch.setattr(xla.core, "_set_use_eager_mode", turn_and_interrupt)
    with pytest.raises(InterruptedError), matmul_precision("highest"):
        torch.mm(a, a)
    monkeypatch.undo()
    assert xla.module.experimental.is_eager_mode()
    turn(False)


def _gradients(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    operands = tuple(operand.requires_grad_() for operand in operands)
    result = function(*operands)
    return (result.detach(), *torch.autograd.grad(result.sum(), operands))


F = torch.nn.functional

OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(4, 5), (5, 3)]),
    "bmm": (torch.bmm, [(2, 4, 5), (2, 5, 3)]),
    "addmm": (torch.addmm, [(3,), (4, 5), (5, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 3), (2, 4, 5), (2, 5, 3)]),
    "mv": (torch.mv, [(4, 5), (5,)]),
    "dot": (torch.dot, [(5,), (5,)]),
    "linear": (F.linear, [(4, 5), (3, 5), (3,)]),
    "matmul": (torch.matmul, [(2, 4, 5), (5, 3)]),
    "tensordot": (torch.tensordot, [(4, 4, 5), (4, 5, 3)]),
    "attention": (F.scaled_dot_product_attention, [(1, 2, 4, 4)] * 3),
    "svd": (torch.linalg.svdvals, [(4, 4)]),
    "conv2d": (F.conv2d, [(1, 2, 8, 8), (2, 2, 3, 3), (2,)]),
    "conv2d without bias": (F.conv2d, [(1, 2, 8, 8), (2, 2, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(1, 2, 8, 8), (2, 2, 3, 3)]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients(xla: Xla, name: str) -> None:
    """Each is looked up by level wherever a level shows in it, and computes what it did."""
    function, shapes = OPERATORS[name]
    operands = [torch.randn(shape) for shape in shapes]
    on_device = [operand.to(xla.device) for operand in operands]
    if name == "tensordot":
        tensordot = function
        function = lambda a, b: tensordot(a, b, 2)  # noqa: E731
    expected = _gradients(function, *operands)
    seen: dict[tuple[int, object], set[str]] = {}
    for level, setting in SETTINGS.items():
        with matmul_precision(level):
            results = _gradients(function, *on_device)
            shown = xla.recorded(*results)
            if not name.startswith("conv"):
                assert set(shown) == {setting}
            for index, result in enumerate(results):
                key = (index, xla.core._get_graph_hash([result]))
                seen.setdefault(key, set()).add(str(xla.recorded(result)))
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result.cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert all(len(texts) == 1 for texts in seen.values())


def test_in_place_operators(xla: Xla) -> None:
    """And those with out= are recorded as what they are made of."""
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    with matmul_precision("highest"):
        x, y = a.to(xla.device), b.to(xla.device)
        torch.mm(x, x, out=y)
        y.addmm_(x, x.T)
        torch.testing.assert_close(y.cpu(), a @ a + a @ a.T)
    assert xla.compiled() == ["highest"] * 2


def test_a_level_cannot_change_inside_a_full_graph(xla: Xla) -> None:
    """It is refused before anything changes, and nothing recorded is lost."""
    a = torch.randn(4, 4)
    kept: list[torch.Tensor] = []

    def compute(x: torch.Tensor) -> torch.Tensor:
        kept.append(x @ x)
        with matmul_precision("medium"):  # as it is
            kept.append(x + x)
        with pytest.raises(PrecisionScopeError, match="enter the scope around the call"):
            matmul_precision("highest").__enter__()
        assert ledger.live_scopes() == []
        return kept[0] + kept[1]

    result = xla.module.compile(compute, full_graph=True)(a.to(xla.device))
    torch.testing.assert_close(result.cpu(), a @ a + a + a)


def test_a_scope_that_ends_inside_a_full_graph_says_so(xla: Xla) -> None:
    """The setting is back, and the error is raised."""
    scope = matmul_precision("highest")
    scope.__enter__()

    def leave(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        with pytest.raises(PrecisionScopeError, match="'xla' could not be restored"):
            scope.__exit__(None, None, None)
        assert xla.setting() == "default"
        return y

    xla.module.compile(leave, full_graph=True)(xla.tensor(2, 2))


def test_a_function_compiled_by_torch_xla_may_change_the_level(xla: Xla) -> None:
    """It is compiled in parts then."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        with matmul_precision("highest"):
            y = x @ x
        return y @ x

    xla.module.compile(compute)(xla.tensor(61, 61)).cpu()
    assert xla.compiled() == ["highest", "default"]


def test_torch_xla_fails_when_the_scope_is_entered(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, and what is recorded keeps its level: the next scope cuts it off."""
    before = product(xla)

    def fail(*_arguments: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(xla.core, "_xla_sync_live_tensors", fail)
    with pytest.raises(PrecisionScopeError, match=r"'xla' could not be set to 'highest': .*out of memory"):
        matmul_precision("highest").__enter__()
    assert xla.setting() == "default"
    with matmul_precision("highest"):
        before.cpu()
    assert xla.compiled() == ["default"]


def test_every_device_is_lowered(xla: Xla) -> None:
    """What waits on another device is at its level, too."""
    a = torch.randn(67, 67).to("xla:1")
    before = a @ a
    with matmul_precision("highest"):
        inside = a @ a @ a
    assert not xla.is_recorded(before)
    assert not xla.is_recorded(inside)
    before.cpu(), inside.cpu()
    assert xla.compiled() == ["default", "highest", "highest"]


def test_random_numbers_are_not_disturbed(xla: Xla) -> None:
    """A scope is no step: it moves no generator."""

    def numbers() -> torch.Tensor:
        xla.module.manual_seed(0)
        first = torch.rand(4, device=xla.device)
        with matmul_precision("highest") if inside else matmul_precision(None):
            second = torch.rand(4, device=xla.device)
        return torch.stack([first, second, torch.rand(4, device=xla.device)]).cpu()

    inside = False
    expected = numbers()
    inside = True
    torch.testing.assert_close(numbers(), expected)


def test_its_setter_writes_nothing(xla: Xla, caplog: pytest.LogCaptureFixture) -> None:
    """torch_xla's own function logs a warning at each call."""
    with caplog.at_level(logging.DEBUG), matmul_precision("high"):
        pass
    assert not caplog.records


def test_threads_with_a_device_each(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets at least the level that it asks for, while the other enters and leaves scopes.

    That is how torch_xla uses threads; it fails where they share a device.
    """
    stop = threading.Event()
    failures: list[object] = []
    size = next(_sizes)

    def work(device: str) -> None:
        try:
            a = torch.randn(size, size).to(device)
            for level in itertools.cycle(("highest", None, "medium", "highest", "high")):
                if stop.is_set():
                    return
                with matmul_precision(level):
                    (a @ a).cpu()
                    pending = a @ a @ a
                pending.cpu()
        except Exception as error:
            failures.append(error)

    monkeypatch.setattr(ledger, "_warned", True)
    threads = [threading.Thread(target=work, args=[f"xla:{index}"]) for index in range(2)]
    for thread in threads:
        thread.start()
    stop.wait(3)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    for marks, settings in xla.marked():
        for rank, setting in enumerate(SETTINGS.values()):
            if rank in marks:
                assert set(settings) <= set(list(SETTINGS.values())[: rank + 1]), setting


def test_the_getter_and_the_report(xla: Xla) -> None:
    """They say what XLA is at, and where it is not at what is applied."""
    assert report().backends["xla"] == {"mat_mul_precision": "default"}
    assert report().disagreeing == {"xla": "medium"}  # its own default is not torch's
    with matmul_precision("high"):
        assert get_float32_matmul_precision() == "high"
        assert report().backends["xla"] == {"mat_mul_precision": "high"}
        assert report().disagreeing == {}


def test_the_pytest_plug_in_finds_the_test_that_leaves_the_setting_changed(
    xla: Xla, pytester: pytest.Pytester
) -> None:
    """Through torch_xla's own function; it is named, and put back."""
    pytester.makepyfile(
        """
        import torch_xla.backends

        def test_leaking():
            torch_xla.backends.set_mat_mul_precision("highest")

        def test_later():
            assert torch_xla._XLAC._xla_get_mat_mul_precision() == "default"
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", plugins=[pytest_plugin])
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["  xla *: default -> highest"])
