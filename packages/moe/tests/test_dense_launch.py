"""Which layers of fused_linear_residual and fused_mlp run a kernel and which the vendor's product, and with what."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import _dense, fused_linear_residual, fused_mlp, linear
from kestrel_moe._dense_plan import Kernel, Plan
from kestrel_runtime import UnsupportedError

Tensor = torch.Tensor


def activated(h: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return h
    return F.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def assert_near(
    got: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> None:
    """Two layers in float32, the first product exact; GELU adds 2^-20 of its argument, a sum 2^-24 for each term."""
    h, w2 = F.linear(x, w1, b1).double(), w2.double()
    hidden = activated(h, activation)
    more = [t.double() for t in (b2, residual) if t is not None]
    exact = sum(more, F.linear(hidden, w2))
    terms = sum((t.abs() for t in more), F.linear(hidden.abs(), w2.abs()))
    allowed = 2.0**-20 * F.linear(h.abs(), w2.abs()) + (w2.shape[1] + 2) * 2.0**-24 * terms
    assert bool(((got.double() - exact).abs() <= 1.01 * allowed).all())


class Kernels:
    """In place of the binary: entry points that note their numbers and compute their layers, or refuse."""

    def __init__(self, layers: int | UnsupportedError) -> None:
        self.layers, self.calls = layers, []

    def _covered(self, name: str, plans: tuple[Any, ...]) -> int:
        self.calls.append((name, plans))
        if isinstance(self.layers, UnsupportedError):
            raise self.layers
        return self.layers

    def fused_linear_residual(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, act: str, *plan: Any
    ) -> bool:
        covered = self._covered("fused_linear_residual", plan)
        if covered:
            out.copy_(activated(F.linear(x, weight, bias), act) + residual)
        return bool(covered)

    def fused_mlp(
        self,
        out: Tensor,
        hidden: Tensor,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        residual: Tensor | None,
        act: str,
        *plans: Any,
    ) -> int:
        covered = self._covered("fused_mlp", plans)
        if covered > 0:
            hidden.copy_(activated(F.linear(x, w1, b1), act))
        if covered > 1:
            out.copy_(F.linear(hidden, w2, b2) + (0 if residual is None else residual))
        return covered


REFUSED = UnsupportedError("rows that are not aligned")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | UnsupportedError], Kernels]:
    def put(layers: int | UnsupportedError) -> Kernels:
        made = Kernels(layers)
        monkeypatch.setattr(linear, "_kernels", made)
        monkeypatch.setattr(_dense, "kernels", made)
        monkeypatch.setattr(importlib.import_module("kestrel_moe.fused_mlp"), "kernels", made)
        return made

    return put


def whole(*sizes: int) -> Tensor:
    """Small whole numbers, of which sums are exact."""
    return torch.randint(-3, 4, sizes).float()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("covered", [1, 0, REFUSED], ids=["kernel", "vendor", "refused"])
@pytest.mark.parametrize("leading", [(7,), (2, 3), ()])
def test_a_layer_is_the_kernel_s_or_the_vendor_s_product_with_an_epilogue(
    kernels: Callable[[Any], Kernels], leading: tuple[int, ...], covered: Any, with_bias: bool
) -> None:
    made = kernels(covered)
    x, weight, bias = whole(*leading, 12), whole(20, 12), whole(20) if with_bias else None
    residual = whole(*leading, 20)
    got = fused_linear_residual.kernel_op.launch(x, weight, bias, residual)
    assert torch.equal(got, F.linear(x, weight, bias) + residual)
    assert got.shape == (*leading, 20)
    assert [name for name, _ in made.calls] == ["fused_linear_residual"]
    tokens = x.shape[:-1].numel()
    assert made.calls[0][1] == _dense.choose(x.view(tokens, 12), 20, 12)


@pytest.mark.parametrize("covered", [1, 0])
def test_a_result_that_cannot_be_flattened_is_written_where_it_is(
    kernels: Callable[[Any], Kernels], covered: int
) -> None:
    kernels(covered)
    x, weight, residual = whole(2, 3, 12).transpose(0, 1), whole(20, 12), whole(3, 2, 20)
    out = torch.full((2, 3, 20), float("nan")).transpose(0, 1)
    assert fused_linear_residual.kernel_op.launch(x, weight, None, residual, out=out) is out
    assert torch.equal(out, F.linear(x, weight) + residual)


def test_a_residual_of_other_leading_dimensions_is_refused_before_a_launch(
    kernels: Callable[[Any], Kernels],
) -> None:
    made = kernels(1)
    with pytest.raises(ValueError, match="residual"):
        fused_linear_residual.kernel_op.launch(whole(2, 3, 12), whole(20, 12), None, whole(3, 2, 20))
    assert made.calls == []


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(("bias", "more"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("covered", [2, 1, 0, REFUSED], ids=["both", "the first", "none", "refused"])
def test_layers_of_an_mlp_without_a_kernel_are_the_vendor_s_products(
    kernels: Callable[[Any], Kernels], covered: Any, bias: bool, more: bool, activation: str
) -> None:
    made = kernels(covered)
    x, w1, w2 = whole(2, 3, 12), whole(20, 12) / 8, whole(16, 20)
    b1, b2, residual = whole(20) if bias else None, whole(16) if bias else None, whole(2, 3, 16) if more else None
    got = fused_mlp.kernel_op.launch(x, w1, b1, w2, b2, residual, activation=activation)
    assert_near(got, x, w1, b1, w2, b2, residual, activation)
    plans = _dense.choose(x.view(6, 12), 20, 12), _dense.choose(torch.empty(6, 20), 16, 20)
    assert made.calls[0] == ("fused_mlp", (*plans[0], *plans[1]))


def test_each_layer_is_launched_by_the_plan_of_its_own_sizes(
    kernels: Callable[[Any], Kernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {
        (6, 12, 20, 12): Plan(Kernel.COOPERATIVE, 128, 2, 1, 2),
        (6, 12, 16, 20): Plan(Kernel.STREAM, splits=5),
    }
    made = kernels(2)

    def choose(x: Tensor, outputs: int, width: int, activation: str = "none") -> Plan:
        assert activation == ("gelu_tanh" if outputs == 20 and made.calls == [] else "none")
        return plans[(*x.shape, outputs, width)]

    for module in (linear, importlib.import_module("kestrel_moe.fused_mlp")):
        monkeypatch.setattr(module, "choose", choose)
    fused_mlp.kernel_op.launch(whole(2, 3, 12), whole(20, 12), None, whole(16, 20), None)
    fused_linear_residual.kernel_op.launch(whole(6, 12), whole(20, 12), None, whole(6, 20))
    assert made.calls == [
        ("fused_mlp", (3, 128, 2, 1, 2, 2, 0, 1, 1, 5)),
        ("fused_linear_residual", (3, 128, 2, 1, 2)),
    ]


def test_an_mlp_of_one_dimension_is_refused_before_a_launch(kernels: Callable[[Any], Kernels]) -> None:
    made = kernels(2)
    with pytest.raises(ValueError, match="fused_mlp: argument 'x': expected at least 2 dimensions"):
        fused_mlp.kernel_op.launch(whole(12), whole(20, 12), None, whole(16, 20), None)
    assert made.calls == []


def test_an_mlp_writes_over_its_residual(kernels: Callable[[Any], Kernels]) -> None:
    for covered in (2, 1, 0):
        kernels(covered)
        x, w1, w2, residual = whole(5, 8), whole(12, 8) / 8, whole(16, 12), whole(5, 16)
        args = (x, w1, None, w2, None, residual.clone())
        assert fused_mlp.kernel_op.launch(*args[:5], residual, out=residual) is residual
        assert_near(residual, *args, "gelu_tanh")


# -- gemv and router_gemm ---------------------------------------------------------------------------------------------


class Products:
    """In place of the binary: the entry points of gemv and router_gemm."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def gemv(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.calls.append("gemv")
        assert x.ndim == out.ndim == 2
        out.copy_(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))

    def router_gemm(self, out: Tensor, x: Tensor, weight: Tensor, cluster: int) -> None:
        self.calls.append("router_gemm")
        assert cluster == 1, "of 40 columns"
        assert x.ndim == out.ndim == 2
        out.copy_(F.linear(x.double(), weight.double()))

    def mm(self, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """torch.mm, which has no out_dtype on a CPU."""
        self.calls.append("mm" if out_dtype is None else f"mm in {out_dtype}")
        product = (a.double() @ b.double()).to(out_dtype or a.dtype)
        return product if out is None else out.copy_(product)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    made = Products()
    monkeypatch.setattr(linear, "_kernels", made)
    monkeypatch.setattr(torch, "mm", made.mm)
    return made


@pytest.mark.parametrize("leading", [(), (4,), (1, 1), (2, 2), (5,), (2, 3)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gemv_takes_any_leading_dimensions_and_is_rounded_once(
    products: Products, dtype: torch.dtype, with_bias: bool, leading: tuple[int, ...]
) -> None:
    x, weight, bias = whole(*leading, 40).to(dtype), whole(24, 40).to(dtype), whole(24).to(dtype) if with_bias else None
    buffer = torch.full((*leading, 30), float("nan"), dtype=dtype)
    out = buffer[..., 3:27]
    assert linear.gemv.kernel_op.launch(x, weight, bias, out=out) is out
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert torch.equal(out, exact.to(dtype))
    assert bool(buffer[..., :3].isnan().all() and buffer[..., 27:].isnan().all())
    assert torch.equal(linear.gemv.kernel_op.launch(x, weight, bias), exact.to(dtype))
    in_bf16 = "mm in torch.float32" if with_bias else "mm"  # the vendor's epilogue may round before it adds the bias
    vendor = {torch.bfloat16: [in_bf16], torch.float32: [] if with_bias else ["mm"]}[dtype]
    assert products.calls == 2 * (["gemv"] if x.shape[:-1].numel() <= 4 else vendor)


@pytest.mark.parametrize(("tokens", "outputs", "kernel"), [(2, 4096, True), (2, 4097, False), (1, 4097, True)])
def test_gemv_of_several_tokens_leaves_large_weights_to_the_vendor(
    products: Products, tokens: int, outputs: int, kernel: bool
) -> None:
    linear.gemv.kernel_op.launch(torch.zeros(tokens, 4096), torch.zeros(1, 4096).expand(outputs, 4096))
    assert products.calls == ["gemv" if kernel else "mm"]


@pytest.mark.parametrize("leading", [(), (64,), (65,), (2, 32), (5, 13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_logits_are_float32_for_any_leading_dimensions(
    products: Products, dtype: torch.dtype, leading: tuple[int, ...]
) -> None:
    x, weight = whole(*leading, 40).to(dtype), whole(1025, 40).to(dtype)
    got = linear.router_gemm.kernel_op.launch(x, weight)
    assert got.dtype == torch.float32
    assert torch.equal(got, F.linear(x.float(), weight.float()))
    tokens = x.shape[:-1].numel()
    if tokens <= (64 if dtype == torch.float32 else 1):
        assert products.calls == ["router_gemm"]
    else:
        assert products.calls == ["mm" if dtype == torch.float32 else "mm in torch.float32"]


# -- the plan ---------------------------------------------------------------------------------------------------------


def on_gpu(tokens: int, bytes_of_element: int = 2) -> Any:
    return SimpleNamespace(shape=(tokens, 0), is_cuda=True, get_device=lambda: 0, element_size=lambda: bytes_of_element)


FEW, STREAM, TILE, VENDOR = Kernel.FEW_TOKENS, Kernel.STREAM, Kernel.COOPERATIVE, Kernel.VENDOR
CASES = [
    # tokens, outputs, width, bytes of an element, the kernel on Hopper, and elsewhere
    (0, 64, 64, 2, FEW, FEW),
    (1, 10**6, 8192, 2, FEW, FEW),
    (1, 7, 8, 2, FEW, FEW),
    (1, 64, 7, 2, VENDOR, VENDOR),  # rows of 14 bytes
    (1, 64, 4, 2, VENDOR, VENDOR),
    (1, 64, 4, 4, FEW, FEW),
    (2, 4096, 4096, 2, STREAM, FEW),  # two waves of CTAs
    (2, 4096, 1024, 2, FEW, FEW),  # of a small weight
    (4, 1056, 4304, 2, FEW, FEW),
    (4, 1064, 4304, 2, STREAM, FEW),
    (4, 1068, 4304, 2, FEW, FEW),  # rows of the result that are not aligned
    (4, 2048, 8192, 2, FEW, FEW),
    (4, 2112, 2048, 2, FEW, FEW),
    (4, 2120, 2048, 2, STREAM, FEW),
    (4, 4096, 4096, 4, FEW, FEW),
    (4, 4104, 64, 2, STREAM, VENDOR),
    (4, 4096, 4104, 2, STREAM, VENDOR),
    (5, 64, 64, 2, STREAM, VENDOR),
    (5, 64, 64, 4, VENDOR, VENDOR),
    (5, 68, 64, 2, VENDOR, VENDOR),
    (5, 64, 68, 2, VENDOR, VENDOR),
    (5, 64, 0, 2, VENDOR, VENDOR),
    (32, 64, 64, 2, STREAM, VENDOR),
    (128, 1152, 1152, 2, TILE, VENDOR),
    (262141, 8, 8, 2, VENDOR, VENDOR),
]


@pytest.mark.parametrize(("tokens", "outputs", "width", "element", "hopper", "elsewhere"), CASES)
def test_which_kernel_a_layer_takes(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    outputs: int,
    width: int,
    element: int,
    hopper: Kernel,
    elsewhere: Kernel,
) -> None:
    for is_hopper, expected in ((True, hopper), (False, elsewhere)):
        monkeypatch.setattr(_dense, "_is_hopper", lambda device, is_hopper=is_hopper: is_hopper)
        assert _dense.choose(on_gpu(tokens, element), outputs, width).kernel == expected


def test_a_plan_without_a_tile_has_one_cta() -> None:
    """The entry point takes these numbers as they are."""
    assert tuple(_dense.choose(on_gpu(1), 8, 8)) == (1, 0, 1, 1, 1)
    assert tuple(_dense.choose(on_gpu(5, 4), 8, 8)) == (0, 0, 1, 1, 1)
    assert tuple(Plan(Kernel.STREAM, splits=3)) == (2, 0, 1, 1, 3)
    assert [int(kernel) for kernel in (Kernel.COOPERATIVE, Kernel.PING_PONG)] == [3, 4]
