"""Real threads and real asyncio tasks, stepped through random programs against an oracle.

Ten thousand steps in CI; PRECISION_SCOPE_LONG=1 runs twenty times as many.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
import torch
from flags import State, reset, state
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from precision_scope import get_float32_matmul_precision, matmul_precision, set_float32_matmul_precision
from precision_scope._ledger import ledger

pytestmark = pytest.mark.filterwarnings("ignore::precision_scope.PrecisionConflictWarning")

T = TypeVar("T")
LEVELS = ["highest", "high", "medium"]  # strictest first


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, function: Callable[[], T], context: contextvars.Context | None = None) -> T:
        """Run a function in the loop, in no task."""
        answer: Future[T] = Future()

        def run() -> None:
            answer.set_result(function())

        self.loop.call_soon_threadsafe(run, context=context or contextvars.Context())
        return answer.result(20)

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Actor:
    """A thread or a task that does what it is told, step by step."""

    def __init__(self, context: contextvars.Context | None, loop: Loop | None) -> None:
        self.loop = loop
        self.commands: Any = queue.SimpleQueue() if loop is None else asyncio.Queue()
        if loop is None:
            run = self._serve if context is None else lambda: context.run(self._serve)
            self.thread = threading.Thread(target=run)
            self.thread.start()
        else:
            loop.call(lambda: loop.loop.create_task(self._serve_in_task()) and None, context)

    def _serve(self) -> None:
        while True:
            function, answer = self.commands.get()
            if function is None:
                return
            _answer(function, answer)

    async def _serve_in_task(self) -> None:
        while True:
            function, answer = await self.commands.get()
            if function is None:
                return
            _answer(function, answer)
            del function, answer

    def _send(self, command: tuple[Callable[[], Any] | None, Future[Any]]) -> None:
        if self.loop is None:
            self.commands.put(command)
        else:
            self.loop.loop.call_soon_threadsafe(
                self.commands.put_nowait, command, context=contextvars.Context()
            )

    def call(self, function: Callable[[], T]) -> T:
        """Run a function as this actor."""
        answer: Future[T] = Future()
        self._send((function, answer))
        return answer.result(20)

    def finish(self) -> None:
        """Let the thread or the task come to its end."""
        self._send((None, Future()))
        if self.loop is None:
            self.thread.join()
        else:
            for _ in range(3):
                self.loop.call(lambda: None)
        gc.collect()


def _answer(function: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


class Entered:
    """The oracle's idea of an entered scope."""

    def __init__(self, level: str, owner: int, inside: list[Entered]) -> None:
        self.scope = matmul_precision(level)
        self.level = level
        self.owner = owner
        self.inside = inside  # what was live around it
        self.live = True


class Concurrency(RuleBasedStateMachine):
    """Threads and tasks that enter, leave, set, copy contexts, start and end."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # collections need not look through all of torch each time
        reset()
        self.loop = Loop()
        self.actors: dict[int, Actor] = {}
        self.contexts: dict[int, list[Entered]] = {}  # what each actor's context has seen
        self.entered: list[Entered] = []
        self.made = 0
        self.before: State = state()
        self.default = "highest"

    @initialize()
    def start(self) -> None:
        for in_loop in (False, True):
            self._add(None, [], in_loop)

    def _add(self, context: contextvars.Context | None, seen: list[Entered], in_loop: bool) -> None:
        self.actors[self.made] = Actor(context, self.loop if in_loop else None)
        self.contexts[self.made] = list(seen)
        self.made += 1

    def _pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.actors)), label="actor")

    # The oracle.

    def _live(self) -> list[Entered]:
        return [entered for entered in self.entered if entered.live]

    def _innermost(self, actor: int) -> Entered | None:
        return next((entered for entered in reversed(self.contexts[actor]) if entered.live), None)

    def _applied(self) -> str | None:
        live = self._live()
        wanted = [
            one.level
            for one in live
            if not any(one.owner == other.owner and one in other.inside for other in live)
        ]
        return min(wanted, key=LEVELS.index, default=None)

    # Steps.

    @precondition(lambda self: len(self.actors) < 6)
    @rule(data=st.data(), in_loop=st.booleans(), inherit=st.booleans())
    def spawn(self, data: st.DataObject, in_loop: bool, inherit: bool) -> None:
        if inherit:
            parent = self._pick(data)
            self._add(self.actors[parent].call(contextvars.copy_context), self.contexts[parent], in_loop)
        else:
            self._add(None, [], in_loop)

    @rule(data=st.data(), level=st.sampled_from(LEVELS))
    def enter(self, data: st.DataObject, level: str) -> None:
        actor = self._pick(data)
        entered = Entered(level, actor, [one for one in self.contexts[actor] if one.live])
        self.actors[actor].call(entered.scope.__enter__)
        self.contexts[actor].append(entered)
        self.entered.append(entered)

    @precondition(lambda self: self._live())
    @rule(data=st.data(), own=st.booleans(), error=st.sampled_from([None, ValueError()]))
    def leave(self, data: st.DataObject, own: bool, error: Exception | None) -> None:
        entered = data.draw(st.sampled_from(self._live()), label="scope")
        actor = entered.owner if own and entered.owner in self.actors else self._pick(data)
        leave = entered.scope.__exit__
        self.actors[actor].call(lambda: leave(None if error is None else type(error), error, None))
        entered.live = False

    @rule(data=st.data(), level=st.sampled_from(LEVELS))
    def set(self, data: st.DataObject, level: str) -> None:
        actor = self._pick(data)
        innermost = self._innermost(actor)
        self.actors[actor].call(lambda: set_float32_matmul_precision(level))
        if innermost is not None:
            innermost.level = level
        else:
            self.default = level
            self.before = {}  # the state that comes back is the default's

    @precondition(lambda self: len(self.actors) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        actor = self._pick(data)
        self.actors.pop(actor).finish()
        del self.contexts[actor]
        for entered in self.entered:
            # What a dead owner left live lasts as long as some context sees it.
            if entered.owner not in self.actors and not any(
                entered in seen for seen in self.contexts.values()
            ):
                entered.live = False

    # What must be true after every step.

    @invariant()
    def every_actor_gets_its_innermost_level(self) -> None:
        for actor, real in self.actors.items():
            innermost = self._innermost(actor)
            expected = self.default if innermost is None else innermost.level
            assert real.call(get_float32_matmul_precision) == expected

    @invariant()
    def the_process_runs_at_the_strictest_level(self) -> None:
        applied = self._applied()
        assert torch.get_float32_matmul_precision() == (applied or self.default)
        assert len(ledger.live_scopes()) == len(self._live())
        if applied is None:
            if not self.before:
                self.before = state()
            assert state() == self.before

    def teardown(self) -> None:
        for entered in self._live():
            entered.scope.__exit__(None, None, None)
        for actor in self.actors.values():
            actor.finish()
        self.loop.close()
        assert ledger.live_scopes() == []
        assert not self.before or state() == self.before
        gc.unfreeze()
        reset()


LONG = 20 if os.environ.get("PRECISION_SCOPE_LONG") else 1

TestConcurrency = Concurrency.TestCase
TestConcurrency.settings = settings(
    max_examples=120 * LONG,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
