"""Rule 17: every operator that multiplies matrices takes the gate, whatever calls it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from watch import watching, without_onednn, wrong

from precision_scope import matmul_precision
from precision_scope._products import PRODUCTS, products

LEVELS = ("highest", "high", "medium")


@pytest.fixture(autouse=True)
def strict_at_rest() -> Iterator[None]:
    """Hold a scope in another thread, so that the flags at rest are not those of the products."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with matmul_precision("highest"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    try:
        yield
    finally:
        leave.set()
        thread.join()


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("Sparse CSR tensor support", "The PyTorch API of nested tensors", "`torch.jit.script`")
]

# What could multiply float32 matrices, by its name; and why these do not take the gate.
SUSPECT = re.compile(
    r"mm|matmul|mv|dot|linear|attention|attn|cdist|dist|gemm|einsum|addr|outer|ger|kron|chain|"
    r"trilinear|moe|grouped|sdp|transformer|multi_head|conv"
)
NO_PRODUCT = "no product of matrices"
CALLS_OTHERS = "multiplies through operators that take the gate"
LOW = "of integers, or of floats below float32"
VENDOR = "another vendor's, or a fixed way of computing that no level changes"
CONVOLUTION = "follows the setting of convolutions, or calls what does"
EXEMPT = {
    r"(_?foreach_|_fused_|_thnn_)?(addr|l?gamma|igamma|digamma|mvlgamma|polygamma|swiglu).*": NO_PRODUCT,
    r".*(comm|hamming|gamma|lerp|dropout|integer|upsample|nonlinear|cummax|cummin|dummy|merge).*": NO_PRODUCT,
    r"(dot|vdot)": "vectors, which no level changes",
    r"(.*embedding.*|.*_pdist.*|.*prelu.*|.*histogram.*|.*linear_combination|dist|_dirichlet.*)": NO_PRODUCT,
    r"(linalg_matrix_exp|_euclidean_dist|_native_multi_head_attention)": CALLS_OTHERS,
    r"(_transformer_encoder_layer_fwd|_triton_.*)": CALLS_OTHERS,
    r"_fused_sdp_choice": NO_PRODUCT,
    r"(_?convolution|conv_depthwise3d|_?(mkldnn|cudnn|mps|quantized)_?conv|conv_tbc|_convert).*": CONVOLUTION,
    r"_?(cudnn|mkldnn|miopen|xnnpack)_.*|.*reorder_conv.*|_nnpack_.*|.*depthwise.*": CONVOLUTION,
    r"_?(int_mm|scaled_(add)?mm_?.*|scaled_grouped_mm.*|weight_int.*|dyn_quant.*|mixed_dtypes_linear)": LOW,
    r"_convert_weight.*|_wrapped_.*|quantized_.*|.*_linear_prepack.*|_saturate_weight_to_fp16": LOW,
    r"_?(scaled_dot_product_)?(flash|cudnn)_attention.*": LOW,
    r"_scaled_dot_product_flash_attention|_scaled_dot_product_flash_attention_backward": LOW,
    r"(_cslt_.*|_sparse_semi_structured_.*|.*_mps|.*for_mps|miopen.*|mps.*|.*_mps_.*)": VENDOR,
}


def test_no_operator_is_forgotten() -> None:
    """Whatever looks like a product takes the gate or is known not to need it."""
    registered = {name.partition(".")[0] for name in products()}
    unknown = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base = rest.partition(".")[0]
        if namespace != "aten" or not SUSPECT.search(base) or f"aten::{base}" in registered:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        if not any(re.fullmatch(pattern, base) for pattern in EXEMPT):
            unknown.add(base)
    assert unknown == set()


def test_every_overload_is_registered() -> None:
    """Every overload of a product that has kernels of its own has ours in front of them."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.partition(".")[0] not in PRODUCTS:
            continue
        implicit = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        ours = torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")
        assert ours is not implicit, name


def matrix(*shape: int, **options: Any) -> torch.Tensor:
    """Return a random float32 tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **options)


A, B, C = matrix(8, 9), matrix(9, 7), matrix(8, 7)
V, W = matrix(9), matrix(8)
A3, B3, C3 = matrix(4, 8, 9), matrix(4, 9, 7), matrix(4, 8, 7)
Q = matrix(2, 3, 5, 8)

DIRECT: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(A, B),
    "mm.out": lambda: torch.mm(A, B, out=torch.empty(8, 7)),
    "addmm": lambda: torch.addmm(C, A, B, beta=0.5, alpha=2),
    "addmm.out": lambda: torch.addmm(C, A, B, out=torch.empty(8, 7)),
    "addmm_": lambda: C.clone().addmm_(A, B, alpha=3),
    "bmm": lambda: torch.bmm(A3, B3),
    "bmm.out": lambda: torch.bmm(A3, B3, out=torch.empty(4, 8, 7)),
    "baddbmm": lambda: torch.baddbmm(C3, A3, B3),
    "baddbmm.out": lambda: torch.baddbmm(C3, A3, B3, out=torch.empty(4, 8, 7)),
    "baddbmm_": lambda: C3.clone().baddbmm_(A3, B3, beta=2),
    "addbmm": lambda: torch.addbmm(C, A3, B3),
    "addbmm.out": lambda: torch.addbmm(C, A3, B3, out=torch.empty(8, 7)),
    "addbmm_": lambda: C.clone().addbmm_(A3, B3),
    "mv": lambda: torch.mv(A, V),
    "mv.out": lambda: torch.mv(A, V, out=torch.empty(8)),
    "addmv": lambda: torch.addmv(W, A, V),
    "addmv.out": lambda: torch.addmv(W, A, V, out=torch.empty(8)),
    "addmv_": lambda: W.clone().addmv_(A, V),
    "_addmm_activation": lambda: torch._addmm_activation(matrix(7), A, B),
    "_slow_conv2d_forward": lambda: torch.ops.aten._slow_conv2d_forward(
        matrix(1, 4, 6, 6), matrix(8, 4, 3, 3), (3, 3), None, (1, 1), (0, 0)
    ),
}


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize("name", DIRECT)
def test_an_operator_runs_at_its_callers_level(name: str, level: str | None) -> None:
    """Functional, in-place and out variants read the level's flags all along."""
    with watching() as seen, matmul_precision(level):
        DIRECT[name]()
        assert f"aten::{name}" in {product.operator for product in seen}
        assert wrong(seen, level) == []


@pytest.mark.parametrize("name", [name for name in DIRECT if "conv" not in name])
def test_results_are_the_operators_own(name: str) -> None:
    """Operands, scalars and outputs pass through the kernels unchanged."""
    expected = {
        "mm": A.double() @ B.double(),
        "addmm": 0.5 * C.double() + 2 * (A.double() @ B.double()),
        "addmm.out": C.double() + A.double() @ B.double(),
        "addmm_": C.double() + 3 * (A.double() @ B.double()),
        "bmm": A3.double() @ B3.double(),
        "baddbmm": C3.double() + A3.double() @ B3.double(),
        "baddbmm_": 2 * C3.double() + A3.double() @ B3.double(),
        "addbmm": C.double() + (A3.double() @ B3.double()).sum(0),
        "mv": A.double() @ V.double(),
        "addmv": W.double() + A.double() @ V.double(),
        "_addmm_activation": (matrix(7).double() + A.double() @ B.double()).relu(),
    }
    base = name.removesuffix(".out").removesuffix("_") if name not in ("addmm_", "baddbmm_") else name
    wanted = expected[name if name in expected else base]
    torch.testing.assert_close(DIRECT[name]().double(), wanted, rtol=1e-4, atol=1e-4)


def grad_of(tensor: torch.Tensor) -> None:
    """Run a backward pass from the sum of a tensor."""
    tensor.sum().backward()


def lstm() -> Any:
    """Run an LSTM whose products are torch's own."""
    with without_onednn():
        return nn.LSTM(9, 4)(A3.transpose(0, 1))


def attention(backend: SDPBackend) -> Any:
    """Run attention, forward and backward, on one of its paths."""
    query = Q.clone().requires_grad_()
    with sdpa_kernel(backend):
        grad_of(functional.scaled_dot_product_attention(query, query, query))


def multihead(training: bool) -> Any:
    """Run multi-head attention, on its fast path or not."""
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    with torch.set_grad_enabled(training):
        return module(matrix(2, 5, 8), matrix(2, 5, 8), matrix(2, 5, 8))


def sparse_products() -> Any:
    """Multiply sparse matrices of both layouts."""
    coo, csr = A.to_sparse(), A.to_sparse_csr()
    return coo @ B, csr @ B, torch.sparse.mm(coo, B), torch.sparse.addmm(C, coo, B), coo @ V


def backward() -> Any:
    """Run a backward pass."""
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    grad_of(a @ b)


COMPOSITE: dict[str, Callable[[], Any]] = {
    "@": lambda: A @ B,
    "linear": lambda: functional.linear(A, B.t(), matrix(7)),
    "linear of a batch": lambda: functional.linear(A3, B.t()),
    "einsum": lambda: torch.einsum("bij,bjk->bik", A3, B3),
    "tensordot": lambda: torch.tensordot(A3, B3, dims=([0, 2], [0, 1])),
    "inner": lambda: torch.inner(A, B.t()),
    "LSTM": lstm,
    "MultiheadAttention": lambda: multihead(training=True),
    "MultiheadAttention, fast path": lambda: multihead(training=False),
    "attention, math": lambda: attention(SDPBackend.MATH),
    "attention, flash": lambda: attention(SDPBackend.FLASH_ATTENTION),
    "multi_dot": lambda: torch.linalg.multi_dot([A, B, B.t()]),
    "matrix_power": lambda: torch.linalg.matrix_power(matrix(5, 5), 3),
    "matrix_exp": lambda: torch.linalg.matrix_exp(matrix(5, 5)),
    "pinv": lambda: torch.linalg.pinv(A),
    "cdist": lambda: torch.cdist(matrix(40, 5), matrix(50, 5)),
    "bilinear": lambda: functional.bilinear(A, A, matrix(3, 9, 9)),
    "sparse": sparse_products,
    "vmap": lambda: torch.vmap(torch.mv)(A3, matrix(4, 9)),
    "jvp": lambda: torch.func.jvp(lambda x: x @ B, (A,), (A,)),
    "grad": lambda: torch.func.grad(lambda x: (x @ B).sum())(A),
    "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda x: (x @ B).sum()))(A3),
    "cov": lambda: torch.cov(A),
    "backward": backward,
    "complex": lambda: A.to(torch.complex64) @ B.to(torch.complex64),
    "conjugate": lambda: A.to(torch.complex64).conj() @ B.to(torch.complex64),
}
if hasattr(torch, "_foreach_mm"):  # torch 2.13
    COMPOSITE["_foreach_mm"] = lambda: torch._foreach_mm([A, A], [B, B])


@pytest.mark.parametrize("name", COMPOSITE)
def test_what_multiplies_inside_runs_at_its_callers_level(name: str) -> None:
    """Composite functions and modules run their products at the level, forward and backward."""
    for level in LEVELS:
        with watching() as seen, matmul_precision(level):
            COMPOSITE[name]()
            assert seen
            assert wrong(seen, level) == []


def test_inference_mode_and_no_grad() -> None:
    """Below them a product is a product."""
    for mode in (torch.inference_mode, torch.no_grad):
        with watching() as seen, matmul_precision("medium"), mode():
            torch.mm(A, B)
            assert len(seen) == 1
            assert wrong(seen, "medium") == []


def test_autocast_products_are_left_alone() -> None:
    """A product of other floats, which no level changes, does not wait for anybody."""
    with watching() as seen, matmul_precision("medium"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.mm(A, B).dtype == torch.bfloat16
        torch.mm(A.double(), B.double())
        torch.mm(A.to(torch.int64), B.to(torch.int64))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            torch.mm(A, B)
        assert {product.before for product in seen} == {product.after for product in seen}
    barrier = threading.Barrier(2, timeout=20)

    def holds(_operator: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            barrier.wait()
            barrier.wait()

    def other() -> None:
        with matmul_precision("high"):
            torch.mm(A, B)

    with watching(holds):
        thread = threading.Thread(target=other)
        thread.start()
        barrier.wait()
        with matmul_precision("medium"):
            torch.mm(A.double(), B.double())  # does not wait
        barrier.wait()
        thread.join()


def test_meta_and_fake_tensors() -> None:
    """Products without numbers pass through."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 -- imports much

    with matmul_precision("medium"):
        assert torch.mm(A.to("meta"), B.to("meta")).shape == (8, 7)
        with FakeTensorMode() as mode:
            assert torch.mm(mode.from_tensor(A), mode.from_tensor(B)).shape == (8, 7)


def test_export_keeps_the_operators() -> None:
    """What is exported calls the operators themselves, and runs at its caller's level."""

    class Model(nn.Module):
        """One product."""

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Multiply."""
            return a @ b

    exported = torch.export.export(Model(), (A, B))
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.matmul.default in calls or torch.ops.aten.mm.default in calls
    with watching() as seen, matmul_precision("medium"):
        torch.testing.assert_close(exported.module()(A, B), A @ B)
        assert len(seen) == 2
        assert wrong(seen, "medium") == []


def test_tensor_subclasses() -> None:
    """A subclass that handles operators itself reaches the gate with what it unwraps."""

    class Wrapped(torch.Tensor):
        """Wraps a tensor, and sees every operator."""

        inside: torch.Tensor
        calls: ClassVar[list[str]] = []

        @staticmethod
        def __new__(cls: Any, inner: torch.Tensor) -> Any:
            """Take the shape of the tensor inside."""
            make: Any = torch.Tensor._make_wrapper_subclass
            made = make(cls, inner.size(), dtype=inner.dtype)
            made.inside = inner
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.calls.append(str(function))
            unwrapped = [arg.inside if isinstance(arg, cls) else arg for arg in args]
            return function(*unwrapped, **(kwargs or {}))

    with watching() as seen, matmul_precision("high"):
        torch.mm(Wrapped(A), B)
        assert [product.operator for product in seen] == ["aten::mm"]
        assert wrong(seen, "high") == []
    assert Wrapped.calls == ["aten.mm.default"]


def test_nested_tensors_pass_through() -> None:
    """A layout with kernels of its own keeps them."""
    nested = torch.nested.nested_tensor([matrix(3, 9), matrix(5, 9)], layout=torch.strided)
    other = torch.nested.nested_tensor([B, B], layout=torch.strided)
    with matmul_precision("medium"):
        out = torch.matmul(nested, other)
    assert [part.shape for part in out.unbind()] == [(3, 7), (5, 7)]
