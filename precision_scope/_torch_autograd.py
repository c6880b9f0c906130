"""The private names of torch by which autograd's nodes are met when they are recorded.

Seen to work on torch 2.4 to 2.15. They are more, and less likely to last, than
what the rest of the package needs: this module is imported when the first scope
with backward=True is entered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.utils.checkpoint  # torch 2.4 does not import it itself

from precision_scope._torch_api import library_of, only_calls_others, overload

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

# A key that nothing uses but torch's own tests. Included in a thread's keys, it has
# that thread's operators come by the kernels for it before all others: autograd's,
# autocast's, and those of tensors that dispatch in Python.
_RECORDING: Final = "TESTING_ONLY_GenericMode"
_KEY: Any = _C._dispatch_key_parse(_RECORDING)

record_operators: Callable[[bool], None] = functools.partial(_C._dispatch_tls_set_dispatch_key_included, _KEY)
"""Have this thread's operators come by the recorders, or not; backward passes do as their callers."""

is_recording: Callable[[], bool] = functools.partial(_C._dispatch_tls_is_dispatch_key_included, _KEY)
"""Tell whether they do, or would if they were not inside one that does."""

pass_recorders_by: Callable[[bool], None] = functools.partial(
    _C._dispatch_tls_set_dispatch_key_excluded, _KEY
)
"""Have this thread's operators not come by them all the same, or no longer so."""

next_node_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""Return the number that this thread's next autograd node gets."""


_CONTAINERS: Final = (tuple, list, dict)

# Tensors are wrapped in subclasses and parameters through these two, which must
# give back what no Python object stands for yet.
_NOT_RECORDED: Final = ("aten::alias", "aten::detach")


class Recorders:
    """The kernels that operators come by in threads that record.

    There is one for each operator: torch has fallbacks in Python from 2.5 on, but
    not for tensors that dispatch in Python.

    Args:
        recorder: Makes an operator's kernel, given its name.
    """

    def __init__(self, recorder: Callable[[str], Callable[..., Any]]) -> None:
        self._recorder = recorder
        self._libraries: dict[str, Any] = {}
        self._seen = (0, 0)

    def are_complete(self) -> bool:
        """Tell whether nothing has been imported since that may have operators."""
        return self._seen == self._imported()

    def complete(self) -> None:
        """Register kernels for the operators that have none; what is cut short can be repeated."""
        seen = self._imported()
        if not _C._dispatch_has_backend_fallback(_KEY):
            library_of("_", self._libraries).m.fallback_fallthrough(_RECORDING)
        # Operators that take functions record nodes as custom functions do. They
        # look for the keys by themselves, those to come in this list.
        ops: Any = torch._ops  # pyright: ignore[reportPrivateUsage]
        if _KEY not in ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS:
            ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
        for operator in ops._higher_order_ops.values():
            operator.fallthrough(_KEY)
        for name in _C._dispatch_get_all_op_names():
            namespace, operator = name.split("::")
            if not (
                name in _NOT_RECORDED
                or operator.partition(".")[2].endswith("out")  # these are not differentiable
                or only_calls_others(name)
                or _C._dispatch_has_kernel_for_dispatch_key(name, _RECORDING)
            ):
                library = library_of(namespace, self._libraries)
                library.impl(operator, self._recorder(name), _RECORDING)
        self._seen = seen

    def _imported(self) -> tuple[int, int]:
        ops: Any = torch.ops
        return len(sys.modules), len(ops.loaded_libraries)


def caller(name: str) -> Callable[..., Any]:
    """Return what calls an operator."""
    return overload(name)._op  # type: ignore[no-any-return]


NUMBERS: Final[dict[Any, torch.dtype]] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def tensors_not_numbers(name: str) -> tuple[int, ...]:
    """Return which positional arguments of an operator must not be numbers in place of tensors."""
    if _C._should_allow_numbers_as_tensors(name.partition("::")[2].partition(".")[0]):
        return ()
    arguments = overload(name)._schema.arguments
    return tuple(
        position
        for position, argument in enumerate(arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    )


def undo_numbers(args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, ...]:
    """Make tensors of numbers again, among the arguments with which a kernel was called.

    C++ code may hand a number to an operator as a tensor. Kernels in Python get it
    as a number, which few operators take from Python.
    """
    return tuple(
        torch.scalar_tensor(cast("float", value), dtype=NUMBERS[value.__class__])
        if position in positions and value.__class__ in NUMBERS
        else value
        for position, value in enumerate(args)
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what an operator or a TorchScript function takes or returns."""
    kind: Any = value.__class__
    if issubclass(kind, torch.Tensor):
        return [value]
    items: Any = value.values() if issubclass(kind, dict) else value
    return [tensor for item in items for tensor in tensors_in(item)] if issubclass(kind, _CONTAINERS) else []


def nodes_of(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the nodes that tensors come from, on each level of torch.func's transforms."""
    nodes: list[Any] = []
    with _C.DisableTorchFunction():  # subclasses and modes need not know
        while tensors:
            nodes += [node for tensor in tensors if (node := tensor.grad_fn) is not None]
            tensors = [
                _C._functorch.get_unwrapped(tensor)
                for tensor in tensors
                if _C._functorch.is_functorch_wrapped_tensor(tensor)
            ]
    return nodes


def writes_to_view(node: Any) -> bool:
    """Tell whether a node stands for an operator that wrote to a part of a tensor."""
    return bool(node.name() == "torch::autograd::CopySlices")


def is_custom(node: Any) -> bool:
    """Tell whether a node belongs to a custom autograd function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def announce_custom_nodes(made: Callable[[Any], None]) -> None:
    """Have ``made`` called with each node of a custom autograd function, just before it is recorded."""

    def __init__(node: Any) -> None:  # noqa: N807
        made(node)

    base: Any = torch.autograd.function.BackwardCFunction
    base.__init__ = __init__


def around_scripts(around: Callable[..., Any]) -> None:
    """Have TorchScript's functions, which record nodes without an operator, called by ``around``.

    Args:
        around: Called with what calls the function, and its arguments.
    """
    for scripted in (_C.ScriptFunction, _C.ScriptMethod):
        _replace(scripted, "__call__", functools.partial(_as_method, around))


def _as_method(around: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def call_around(function: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(call, function), *args, **kwargs)

    return call_around


def around_checkpoints(around: Callable[..., Any]) -> None:
    """Have checkpointing that is not re-entrant prepared by ``around``.

    Args:
        around: Called with what prepares it, the function that is run again in
            the backward pass, and more arguments.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(torch.utils.checkpoint, f"{name}_impl"):  # torch 2.14 and newer
        name = f"{name}_impl"
    for module in ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation"):
        if module in sys.modules:  # else it will import what is replaced here
            _replace(sys.modules[module], name, lambda prepare: functools.partial(around, prepare))


def around_backward_passes(around: Callable[[Callable[[], Any], bool], Any]) -> None:
    """Have backward passes run by ``around``, told whether they record nodes themselves."""

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_around(
            outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any
        ) -> Any:
            return around(
                functools.partial(run, outputs, gradients, retain_graph, create_graph, *args, **kwargs),
                create_graph,
            )

        return run_around

    _replace(torch.autograd, "_engine_run_backward", make)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of torch's, unless that has been done."""
    found = getattr(owner, name)
    if not hasattr(found, "replaced_by_precision_scope"):
        replacement = make(found)
        replacement.replaced_by_precision_scope = True
        setattr(owner, name, replacement)
