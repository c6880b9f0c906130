"""Every private name of torch that the package uses, behind a name of ours; Dynamo's are in _dynamo.

Seen to work on torch 2.4 to 2.15. From 2.9 on torch keeps, beside the legacy
value of ``torch.set_float32_matmul_precision``, a table of cells keyed by
(backend, operator); before, the legacy value is all there is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any, Final

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

HAS_CELLS: bool = hasattr(_C, "_get_fp32_precision_getter")
"""Whether torch has the per-backend cells (2.9 and newer)."""

# torch.get_/set_float32_matmul_precision are these two calls. The setter only
# warns about a bad name and can crash on a long one: hand it levels alone.
get_legacy_value: Callable[[], str] = _C._get_float32_matmul_precision
set_legacy_value: Callable[[str], None] = _C._set_float32_matmul_precision

get_allow_tf32: Callable[[], bool] = _C._get_cublas_allow_tf32
get_cudnn_allow_tf32: Callable[[], bool] = _C._get_cudnn_allow_tf32

if HAS_CELLS:
    # A reading is the stored value or, where that is "none", the parent's.
    get_cell: Callable[[str, str], str] = _C._get_fp32_precision_getter
    set_cell: Callable[[str, str, str], object] = _C._set_fp32_precision_setter


def _compare_with_highest() -> bool:
    return get_legacy_value() != "highest"


is_not_highest: Callable[[], bool] = get_allow_tf32 if torch.version.hip is None else _compare_with_highest
"""Tell whether the legacy value is not "highest", or raise RuntimeError, where (cuda, matmul) reads "none".

It takes half the time of reading the value. The two disagree, which raises, if
the value is another one; but on ROCm this may be False without looking.
"""


def intercept_writes(intercept: Callable[..., None]) -> None:
    """Have ``intercept`` called for other code's writes to the float32 matmul state, for good.

    It gets what writes, and the arguments: a legacy value, or a cell and its value.
    """
    for name in ("_set_float32_matmul_precision", "_set_cublas_allow_tf32", "_set_fp32_precision_setter"):
        if hasattr(_C, name):
            setattr(_C, name, functools.partial(intercept, getattr(_C, name)))


def devices() -> list[str]:
    """Return the names of the devices present, the CPU first."""
    if hasattr(torch, "accelerator"):
        count = torch.accelerator.device_count()
        others = [f"{torch.accelerator.current_accelerator()}:{index}" for index in range(count)]
    else:  # torch 2.4 and 2.5
        others = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *others]


is_traced: Callable[[], bool] = _C._is_tracing
"""Tell whether torch.jit.trace records what this thread runs."""


def is_exported() -> bool:
    """Tell whether torch.export does so."""
    return bool(_C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch))


def is_symbolically_traced() -> bool:
    """Tell whether make_fx does so, which AOTAutograd uses."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


# The latter on torch 2.4 to 2.6.
EXPORTING: Final = (
    "_is_exporting_flag" if hasattr(torch.compiler, "_is_exporting_flag") else "_is_compiling_flag"
)

compiler_flags: Mapping[str, Any] = (
    vars(torch.compiler) if hasattr(torch.compiler, EXPORTING) else {EXPORTING: False}
)
"""The flag EXPORTING among these says whether torch.export records a program in some thread."""


def operators(namespace: str) -> list[str]:
    """Return the names, as "aten::mm.out", of the operators that have kernels of their own.

    Those that only call other operators, whatever the device, are left out.
    """
    return [
        name
        for name in _C._dispatch_get_all_op_names()
        if name.startswith(f"{namespace}::") and not only_calls_others(name)
    ]


def only_calls_others(name: str) -> bool:
    """Tell whether an operator has no kernel of its own, whatever the device."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def redispatcher(name: str) -> Callable[..., Any]:
    """Return what calls an operator at the dispatch keys given first."""
    return overload(name)._handle.redispatch_boxed  # type: ignore[no-any-return]


def overload(name: str) -> Any:
    """Return the operator of a name like "aten::mm.out"."""
    namespace, operator = name.split("::")
    packet, _, overload = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def has_kernel_for_cpu(name: str) -> bool:
    """Tell whether an operator has a kernel for the CPU, of any layout; others have one for all devices."""
    return any(
        _C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in ("CPU", "SparseCPU", "SparseCsrCPU", "MkldnnCPU")
    )


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a sparse tensor, to write to; of one of coordinates, each entry's own."""
    of_coordinates = sparse.layout == torch.sparse_coo
    return sparse._values() if of_coordinates else sparse.values()


def indices_of(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what says where the numbers of a sparse tensor are."""
    if sparse.layout == torch.sparse_coo:
        return (sparse._indices(),)
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices()
    return sparse.ccol_indices(), sparse.row_indices()


without_torch_function: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction
"""Keep subclasses of tensors, and modes, from taking over torch's functions."""

without_autocast: Callable[[], AbstractContextManager[None]] = functools.partial(
    _C._ExcludeDispatchKeyGuard, _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
)
"""Keep autocast from operators on the CPU; no Python code runs when that ends, which may be interrupted."""


_BELOW_AUTOGRAD: Any = _C._dispatch_keyset_full_after(_C.DispatchKey.BackendSelect)

bits_of_keys: Callable[[Any], object] = getattr(_C.DispatchKeySet, "raw_repr", str)
"""Return what identifies a set of dispatch keys; as text on torch 2.4, which is slower."""


def keys_below_autograd(keys: Any) -> Any:
    """Return those dispatch keys that come after where kernels for every device are registered."""
    return keys & _BELOW_AUTOGRAD


def library_of(namespace: str, libraries: dict[str, Any]) -> Any:
    """Return what registers kernels for a namespace's operators, from those made before or anew."""
    if namespace not in libraries:
        libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return libraries[namespace]


def register_for_every_device(kernels: dict[str, Callable[..., Any]]) -> list[Any]:
    """Register kernels that run below autograd, in place of and around each device's own.

    Args:
        kernels: By the operator's name. Each is called with the dispatch keys
            and the operator's arguments, and is to redispatch at the keys below autograd.

    Returns:
        What keeps them registered.
    """
    return _register("BackendSelect", kernels)


def _register(key: str, kernels: dict[str, Callable[..., Any]]) -> list[Any]:
    libraries: dict[str, Any] = {}
    try:
        for name, kernel in kernels.items():
            namespace, operator = name.split("::")
            library_of(namespace, libraries).impl(operator, kernel, key, with_keyset=True)
    except BaseException:
        for library in libraries.values():
            library._destroy()
        raise
    return list(libraries.values())


def replace_kernels(
    device: str, around: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
) -> bool:
    """Replace a device's kernels of some operators, for as long as the process lives.

    Args:
        device: The name of its dispatch key.
        around: By the operator's name, what makes its new kernel, given the
            present one. Both are called with the dispatch keys and the
            operator's arguments.

    Returns:
        Whether it has. Torch does not hand out its kernels before 2.9, and lets
        each be replaced once.
    """
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        return False
    kernels = {name: make(get_kernel(name, device).call_boxed) for name, make in around.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        try:
            _kept.extend(_register(device, kernels))
        except RuntimeError:  # other code has replaced one
            return False
    return True


_kept: list[Any] = []  # libraries, which would take their kernels back


running_node: Callable[[], Any] = _C._current_autograd_node
"""Return the autograd node that this thread runs the backward of, if any."""

running_pass: Callable[[], int] = _C._current_graph_task_id
"""Return the number of the backward pass that this thread runs; -1 for none."""


# The threads of autograd's engine for devices have no context of their own.
# From torch 2.13 on it keeps there, while a pass runs, the one that called it.
_PASSES_CONTEXT_ON: bool = hasattr(_C, "_remove_obj_from_tls")
_callers: dict[int, Context] = {}  # before: the contexts, by the passes' numbers


serves_backward: Callable[[], object] = (
    functools.partial(_C._is_key_in_tls, "context") if _PASSES_CONTEXT_ON else _callers.__len__
)
"""Tell whether this thread may be running a backward pass that another context called."""


def context_of_backward() -> Context | None:
    """Return the context that called the backward pass which this thread runs, if any."""
    if not _PASSES_CONTEXT_ON:
        return _callers.get(_C._current_graph_task_id())
    context: Context | None = _C._get_obj_in_tls("context") if _C._is_key_in_tls("context") else None
    return context


def pass_context_to_backward(own_scopes: Callable[[], object]) -> None:
    """Have :func:`context_of_backward` know the contexts that call backward passes.

    Args:
        own_scopes: Tells whether the calling thread has scopes of its own;
            None for no.
    """
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward
    if hasattr(run_backward, "__wrapped__"):
        return
    run = run_backward if _PASSES_CONTEXT_ON else functools.partial(_remember_context, run_backward)

    @functools.wraps(run_backward)
    def run_in_context(*args: Any, **kwargs: Any) -> Any:
        outer = context_of_backward()
        if outer is None or own_scopes() is not None:
            return run(*args, **kwargs)
        # A node calls a further pass, in a thread that has no context of its own.
        try:
            return outer.copy().run(run, *args, **kwargs)
        finally:
            if _PASSES_CONTEXT_ON:
                _C._stash_obj_in_tls("context", outer)

    autograd._engine_run_backward = run_in_context


def _remember_context(run_backward: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, whose nodes find this context by the number of the pass."""
    context = copy_context()
    passes: list[int] = []

    def remember(_gradients: Any) -> None:
        passes.append(_C._current_graph_task_id())
        _callers[passes[-1]] = context

    # Every node of the pass runs after one of those that it begins with.
    nodes = [getattr(output, "node", None) or getattr(output, "grad_fn", None) for output in outputs]
    hooks = [node.register_prehook(remember) for node in nodes if node is not None]
    try:
        return run_backward(outputs, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for number in passes:
            _callers.pop(number, None)
