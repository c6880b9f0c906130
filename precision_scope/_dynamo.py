"""What is known of Dynamo, which compiles frames for ``torch.compile``; it is never imported.

Seen to work on torch 2.4.1, 2.8.0, 2.9.1, 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol, TypeVar

import torch

from precision_scope._imports import when_imported
from precision_scope._warnings import warn

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FUNCTIONS = (FunctionType, type(functools.cache(bool)))  # the second as it wraps the first

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

_ADVICE = (
    "a graph cannot hold a precision_scope scope: put the scope around the call of what is compiled or "
    "exported, or compile without fullgraph=True"
)


def _skipper() -> Callable[[CodeType, bool], object] | None:
    """Return what has Dynamo run code as it stands, and if asked all that this calls, too."""
    frames = _C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.8 and newer
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        skip_all, skip_this = frames._FrameExecStrategy(skip, skip), frames._FrameExecStrategy(skip, default)

        def skip_code(code: CodeType, callees: bool) -> None:
            frames.set_code_exec_strategy(code, skip_all if callees else skip_this)

        return skip_code
    skip_this_code = frames.skip_code
    return lambda code, _callees: skip_this_code(code)


try:
    _skip_code = _skipper()
except AttributeError:
    _skip_code = None


def hide(function: _Function, *, callees: bool = True) -> _Function:
    """Have Dynamo neither trace a function nor compile its frames.

    Traced, what a scope's entry and exit write would be lost from the second call on.

    Args:
        function: The function.
        callees: Whether to leave all that it calls alone, too; before torch 2.8 it cannot.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _ADVICE  # type: ignore[attr-defined]
    if _skip_code is not None:
        _skip_code(function.__code__, callees)
    return function


def hide_package() -> None:
    """Hide the functions of the package's modules that are imported by now."""
    prefix = f"{__package__}."
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix):
            for function in _functions_of(module):
                if "_torchdynamo_disable" not in function.__dict__:
                    hide(function)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        is_own_class = isinstance(value, type) and value.__module__ == module.__name__
        members: list[Any] = list(vars(value).values()) if is_own_class else [value]
        for member in members:
            function: Any = member
            if type(member) is property:
                function = member.fget
            elif type(member) in (staticmethod, classmethod):
                function = member.__func__
            if type(function) in _FUNCTIONS:
                function = inspect.unwrap(function)
                if type(function) is FunctionType and function.__module__ == module.__name__:
                    yield function


def hide_entry(function: _Function) -> _Function:
    """Hide the entry of scopes; where this torch does not allow it, have the entry say so once."""
    if _skip_code is not None:
        return hide(function)

    @functools.wraps(function)
    def enter(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_so_once()
        return function(*args)

    return enter  # type: ignore[return-value]


_said: list[str] = []


def _say_so_once() -> None:
    if not _said:
        _said.append(
            f"precision_scope does not know the Dynamo of torch {torch.__version__}: "
            "scopes in compiled functions, and while other threads compile, may have no effect"
        )
        warn(_said[0])


def _count_as_compiled() -> None:
    """Have a call with fullgraph=True that runs no compiled code be no error, as it is from torch 2.13 on."""
    set_count = getattr(_C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if set_count is not None:
        count = set_count(-1)  # which is also what it is where nobody counts
        set_count(count + 1 if count >= 0 else count)


class Compilation(Protocol):
    """What is told of a compilation, in the thread that it runs in."""

    # Dynamo has not yet noted how CUDA multiplies, for its guards; "note" has it do so.
    # Returns whether to compile at all, instead of running this call as it stands.
    def begin(self, is_compiled: Callable[[], bool], note: Callable[[], object]) -> bool: ...

    def hold(self) -> None:
        """Dynamo is about to read, or to write, how CUDA multiplies."""

    def written(self) -> None:
        """It has written; it will build guards and check them."""

    def let_go(self) -> None:
        """It does nothing with it for now, or any more; may be repeated."""


class _Running(threading.local):
    """The compilations under way in a thread, the innermost last, and the one that traces now."""

    def __init__(self) -> None:
        self.stack: list[Compilation] = []
        self.tracing: Compilation | None = None


_running = _Running()
compiling: list[object] = []
"""Holds something while a compilation is under way in any thread."""


def compiles_here() -> bool:
    """Tell whether this thread compiles."""
    return bool(_running.stack)


def announce_compilations(make: Callable[[], Compilation]) -> None:
    """Have compilations announced, each to an object of its own, from when Dynamo is imported on."""
    when_imported("torch._dynamo.convert_frame", functools.partial(_watch, make))


@contextlib.contextmanager
def _announced(make: Callable[[], Compilation]) -> Generator[Compilation]:
    compilation = make()
    try:
        _running.stack.append(compilation)
        compiling.append(compilation)
        yield compilation
    finally:
        try:
            compilation.let_go()
        finally:
            for each in (compiling, _running.stack):
                if compilation in each:
                    each.remove(compilation)


def _watch(make: Callable[[], Compilation], convert_frame: Any) -> None:
    try:
        compile_frame, preserve = convert_frame._compile, convert_frame.preserve_global_state
        # From torch 2.9 on the function that traces is preserved already.
        trace_frame = convert_frame.trace_frame.__wrapped__ if hasattr(convert_frame, "trace_frame") else None
        note_guards = convert_frame.GlobalStateGuard
        entries_of = _C._dynamo.eval_frame._debug_get_cache_entry_list
        parameters = inspect.signature(compile_frame)
    except (AttributeError, TypeError):
        _say_so_once()
        return

    @functools.wraps(compile_frame)
    def compile_announced(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        backend = given["compiler_fn"]
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend

        def is_compiled() -> bool:
            return any(
                # Before torch 2.13 it is unknown for which backend something is compiled.
                getattr(entry, "backend", None) == backend and entry.guard_manager.check(given["locals"])
                for entry in entries_of(given["code"])
            )

        def note() -> None:
            convert_frame.initial_global_state = note_guards()

        with _announced(make) as compilation:
            if not compilation.begin(is_compiled, note):
                _count_as_compiled()
                skip = _C._dynamo.eval_frame._FrameAction.SKIP
                strategy = _C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
                return convert_frame.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)
            return compile_frame(*args, **kwargs)

    def preserve_global_state(trace: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(trace)
        def trace_only(*args: Any, **kwargs: Any) -> Any:
            compilation = _running.stack[-1]
            outer, _running.tracing = _running.tracing, compilation
            compilation.let_go()
            try:
                return trace(*args, **kwargs)
            finally:
                _running.tracing = outer
                compilation.hold()

        read_trace_write = preserve(trace_only)

        @functools.wraps(read_trace_write)
        def trace_announced(*args: Any, **kwargs: Any) -> Any:
            if not _running.stack or _running.stack[-1] is _running.tracing:
                with _announced(make):  # no _compile around it: torch.export, or ahead of time
                    return trace_announced(*args, **kwargs)
            compilation = _running.stack[-1]
            compilation.hold()
            try:
                return read_trace_write(*args, **kwargs)
            finally:
                compilation.written()

        return trace_announced

    convert_frame._compile = compile_announced
    convert_frame.preserve_global_state = preserve_global_state
    if trace_frame is not None:
        convert_frame.trace_frame = preserve_global_state(trace_frame)
