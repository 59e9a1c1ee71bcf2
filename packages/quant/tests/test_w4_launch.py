"""Which kernels a call of w4a16_linear runs, with what, and with how much scratch memory."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, reference
from kestrel_quant._w4_plan import Plan, plan
from kestrel_quant.w4a16 import from_codes
from kestrel_runtime import UnsupportedError

module = importlib.import_module("kestrel_quant.w4a16")
Tensor = torch.Tensor
K, N, GROUP = 128, 24, 32
MOST = 128  # tokens of the kernel
SMS = 132  # of GPU 3


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on GPU 3."""

    is_cuda = True

    def get_device(self) -> int:
        return 3


class Kernels:
    """In place of the binary: entry points that note what they are given, and compute by reference."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.options: list[tuple[int, int, int]] = []
        self.adds_residuals = True

    def w4_dequant(self, out: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> None:
        self.calls.append(("dequant", (out, codes, scales, zeros, group)))
        out.copy_(reference.w4_dequant(codes, scales, zeros, group, out.dtype))

    def w4a16_linear(
        self,
        out: Tensor,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        zeros: Any,
        group: int,
        bias: Any,
        residual: Any,
        partial: Any,
        tile: int,
        splits: int,
        ctas: int,
    ) -> bool:
        assert x.ndim == out.ndim == 2
        if x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8):
            raise UnsupportedError("rows of x that are not aligned to 16 bytes")
        if residual is not None and not self.adds_residuals:
            return False
        self.calls.append(("linear", (codes, scales, zeros, group, bias, tile, partial)))
        self.options.append((tile, splits, ctas))
        weight = reference.w4_dequant(codes, scales, zeros, group, x.dtype)
        product = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        out.copy_(product if residual is None else product + residual.double())
        return True

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(module, "kernels", made)
    monkeypatch.setattr(module, "_wgmma_sms", lambda device: {3: SMS}[device])

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        made.calls.append(("mm", (out_dtype,)))
        product = (a.double() @ b.double()).to(out_dtype or a.dtype)
        return product if out is None else out.copy_(product)

    def addmm(added: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        made.calls.append(("addmm", ()))
        return out.copy_(a.double() @ b.double() + added.double())

    monkeypatch.setattr(torch, "mm", mm)  # on a CPU it has no out_dtype
    monkeypatch.setattr(torch, "addmm", addmm)
    return made


def packed(zeros: bool = True, permuted: bool = False) -> W4Weight:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (N, K), generator=g)
    scales = 2.0 ** torch.randint(-2, 3, (N, K // GROUP), generator=g)
    points = torch.randint(0, 16, (N, K // GROUP), generator=g) if zeros else None
    order = torch.randperm(K, generator=g) if permuted else None
    return from_codes(codes, scales.bfloat16(), GROUP, points, order)


def launch(
    x: Tensor, w: W4Weight, bias: Tensor | None = None, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    parts = (w.codes, w.scales, w.zeros, w.permutation, w.group_size)
    return module._w4a16_linear.kernel_op.launch(x, *parts, bias, residual, out=out)


def activations(*sizes: int) -> Tensor:
    return torch.randint(-2, 3, sizes).bfloat16()


def expected(x: Tensor, w: W4Weight, bias: Tensor | None) -> Tensor:
    """Exact: whole numbers and powers of two."""
    return F.linear(x.double(), w.dequantize().double(), None if bias is None else bias.double()).bfloat16()


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("leading", [(5,), (), (2, 3), (MOST,), (2, MOST // 2), (MOST + 1,), (2, MOST)])
def test_every_path_computes_the_layer(
    kernels: Kernels, leading: tuple[int, ...], permuted: bool, with_bias: bool, zeros: bool
) -> None:
    w, x, bias = packed(zeros, permuted), activations(*leading, K), activations(N) if with_bias else None
    got = launch(x, w, bias)
    assert torch.equal(got, expected(x, w, bias))
    assert got.shape == (*leading, N)
    assert kernels.names == (["linear"] if x.numel() <= MOST * K else ["dequant", "mm"])
    if with_bias and kernels.names[-1] == "mm":
        assert kernels.calls[-1][1] == (torch.float32,)  # the vendor's epilogue may round before it adds the bias


def test_the_kernel_is_given_the_parts_of_the_weight(kernels: Kernels) -> None:
    w, bias = packed(), activations(N)
    launch(activations(5, K), w, bias)
    ((_, given),) = kernels.calls
    assert given[:3] == (w.codes, w.scales, w.zeros)
    assert given[3:] == (GROUP, bias, -1, None)
    launch(activations(MOST + 1, K), w)
    scratch, *parts = kernels.calls[1][1]
    assert (scratch.shape, scratch.dtype) == ((N, K), torch.bfloat16)
    assert parts == [w.codes, w.scales, w.zeros, GROUP]


@pytest.mark.parametrize("leading", [(3, 2), (MOST // 2 + 1, 2)])
@pytest.mark.parametrize("permuted", [True, False])
def test_a_result_that_cannot_be_flattened_is_written_where_it_is(
    kernels: Kernels, permuted: bool, leading: tuple[int, int]
) -> None:
    w, x, bias = packed(permuted=permuted), activations(*leading, K), activations(N)
    buffer = torch.full((leading[1], leading[0], N + 8), float("nan")).bfloat16()
    out = buffer.transpose(0, 1)[..., 3 : 3 + N]
    assert launch(x, w, bias, out) is out
    assert torch.equal(out, expected(x, w, bias))
    assert bool(buffer[..., :3].isnan().all() and buffer[..., 3 + N :].isnan().all())


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("leading", [(5,), (), (2, 3), (MOST + 1,), (2, MOST)])
def test_every_path_adds_a_residual_of_any_layout(
    kernels: Kernels, leading: tuple[int, ...], permuted: bool, with_bias: bool
) -> None:
    w, x, bias = packed(permuted=permuted), activations(*leading, K), activations(N) if with_bias else None
    values = activations(*leading, N)
    product = F.linear(x.double(), w.dequantize().double(), None if bias is None else bias.double())
    want = (product + values.double()).bfloat16()  # exact but for this rounding
    wide = torch.full((*leading, N + 8), float("nan")).bfloat16()
    wide[..., 3 : 3 + N] = values
    swapped = values.transpose(0, -2).contiguous().transpose(0, -2) if len(leading) > 1 else values.clone()
    for residual in (values, wide[..., 3 : 3 + N], swapped):
        before = residual.clone()
        assert torch.equal(launch(x, w, bias, residual=residual), want)
        assert torch.equal(residual, before)
        assert launch(x, w, bias, residual, residual) is residual
        assert torch.equal(residual, want)
        residual.copy_(before)
        alias = residual.view(residual.shape)  # the same memory by another object
        launch(x, w, bias, residual, alias)
        assert torch.equal(residual, want)
    by_vendor = ["dequant", "mm" if with_bias else "addmm"]
    assert kernels.names == (["linear"] if x.numel() <= MOST * K else by_vendor) * 9


@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_a_residual_that_no_kernel_adds_is_added_to_the_product(
    kernels: Kernels, leading: tuple[int, ...], permuted: bool
) -> None:
    kernels.adds_residuals = False
    w, x, residual = packed(permuted=permuted), activations(*leading, K), activations(*leading, N)
    want = expected(x, w, None) + residual
    assert torch.equal(launch(x, w, residual=residual), want)
    assert launch(x, w, None, residual, residual) is residual
    assert torch.equal(residual, want)
    assert kernels.names == ["linear", "linear"]


def test_a_residual_that_two_dimensions_hide_is_refused_before_a_launch(kernels: Kernels) -> None:
    x, w, memory = activations(2, 3, K), packed(), torch.zeros(8 * N).bfloat16()
    for shape in ((1, 6, N), (6, N), (3, 2, N), (2, 3, N // 2, 2)):
        with pytest.raises(ValueError, match=r"w4a16_linear: argument 'residual': expected shape \(2, 3, 24\)"):
            launch(x, w, residual=torch.zeros(shape).bfloat16())
    with pytest.raises(ValueError, match=r"w4a16_linear: argument 'residual': expected shape \(5, 24\)"):
        launch(activations(5, K), packed(permuted=True), residual=torch.zeros(N, 5).bfloat16())
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': .* shares no memory with 'residual'"):
        launch(x.transpose(0, 1), w, None, memory[N : 7 * N].view(3, 2, N), memory[: 6 * N].view(3, 2, N))
    assert kernels.calls == []


def wgmma_from_33(monkeypatch: pytest.MonkeyPatch, scratch: int = 0) -> None:
    """On sm_90, weights of any size run the wgmma kernel from 33 rows of x on."""

    def chosen(tokens: int, rows: int, columns: int, sms: int) -> Plan:
        return Plan("wgmma", 0, 2, scratch=scratch) if sms and tokens > 32 else plan(tokens, rows, columns, sms)

    monkeypatch.setattr(module, "plan", chosen)


@pytest.mark.parametrize("sms", [0, SMS])
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, MOST, 200, 256])
@pytest.mark.parametrize("of_plan", [0, 1000])
def test_slices_of_k_have_memory_for_their_sums(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tokens: int, sms: int, of_plan: int
) -> None:
    """Without it the entry point adds the slices up within a cluster."""
    monkeypatch.setattr(module, "_wgmma_sms", lambda device: {3: sms}[device])
    wgmma_from_33(monkeypatch, of_plan)
    launch(activations(tokens, K).as_subclass(OnGpu), packed())
    if tokens > MOST and not sms:
        assert kernels.names == ["dequant", "mm"]
        return
    ((_, (*_, tile, scratch)),) = kernels.calls
    wgmma = bool(sms) and tokens > 32
    assert tile == (0 if wgmma else -1)
    floats = of_plan if wgmma else 8 * tokens * N
    if floats == 0 or (sms and tokens <= 16):
        assert scratch is None
    else:
        assert (scratch.numel(), scratch.dtype) == (floats, torch.float32)


@pytest.mark.parametrize(("offset", "pad"), [(0, 1), (1, 7), (1, 0)])
def test_many_rows_of_any_alignment_take_the_vendors_gemm(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, offset: int, pad: int
) -> None:
    wgmma_from_33(monkeypatch)
    x, w = activations(200 * (K + pad) + offset)[offset:].as_strided((200, K), (K + pad, 1)), packed()
    out = launch(x.as_subclass(OnGpu), w)
    assert kernels.names == ["dequant", "mm"]
    assert torch.equal(out, expected(x, w, None))


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_no_other_kernel_hides_a_plan_that_is_refused(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    wgmma_from_33(monkeypatch)

    def refuse(*_: Any) -> None:
        raise UnsupportedError("too little scratch memory")

    monkeypatch.setattr(kernels, "w4a16_linear", refuse)
    with pytest.raises(UnsupportedError, match="too little"):
        launch(activations(tokens, K).as_subclass(OnGpu), packed())
    assert kernels.calls == []


def test_the_kernel_is_given_the_options_of_its_plan(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan", lambda *_: Plan("stream", 4, 2, 96))
    launch(activations(200, K).as_subclass(OnGpu), packed())
    assert kernels.options == [(4, 2, 96)]


def test_the_memory_for_sums_is_bounded() -> None:
    assert plan(64, 1 << 20, 64, 0).scratch == 1 << 23


@pytest.mark.parametrize("leading", [(MOST + 1,), (2, MOST)])
@pytest.mark.parametrize("permuted", [True, False])
def test_a_bad_argument_is_named_before_a_launch(kernels: Kernels, leading: tuple[int, ...], permuted: bool) -> None:
    w = packed(permuted=permuted)
    for wrong in ({"x": activations(*leading, K - 8)}, {"bias": activations(N + 1)}):
        with pytest.raises(ValueError, match="w4a16_linear: argument"):
            launch(**{"x": activations(*leading, K), "w": w} | wrong)
    memory = torch.zeros(400 * K).bfloat16()
    x = memory[: activations(*leading, K).numel()].view(*leading, K)
    out = memory[: x.numel() // K * N].view(*leading, N)
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': expected a tensor to write"):
        launch(x, w, out=out)
    assert kernels.calls == []


@pytest.mark.parametrize("shape", [(1, 6, N), (6, N), (3, 2, N)])
def test_a_shape_that_two_dimensions_hide_is_refused_before_a_launch(kernels: Kernels, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"w4a16_linear: argument 'out': expected shape \(2, 3, {N}\)"):
        launch(activations(2, 3, K), packed(), out=torch.empty(shape).bfloat16())
    assert kernels.calls == []


@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_an_order_of_columns_is_not_checked_in_python_at_every_call(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, leading: tuple[int, ...]
) -> None:
    w, x = packed(permuted=True), activations(*leading, K)
    monkeypatch.setattr(module, "_check_arguments", lambda *_: pytest.fail("the entry point would have seen it"))
    assert torch.equal(launch(x, w), expected(x, w, None))


def test_what_a_copy_of_columns_hides_is_refused_before_a_launch(kernels: Kernels) -> None:
    w, x = packed(permuted=True), activations(5, K)
    wrong = [
        (activations(5, K + 8), w, r"'x': expected a last dimension of 128"),
        (activations(K, 5).t(), w, r"'x': expected a contiguous last dimension"),
        (x, replace(w, permutation=w.permutation[:-8]), r"'w': expected shape \(128,\)"),
        (x, replace(w, permutation=w.permutation.int()), r"'w': expected dtype int64"),
    ]
    for given, weight, message in wrong:
        with pytest.raises((ValueError, TypeError), match=f"w4a16_linear: argument {message}"):
            launch(given, weight)
    memory = torch.zeros(5 * K).bfloat16()
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': expected a tensor to write"):
        launch(memory.view(5, K), w, out=memory[: 5 * N].view(5, N))
    assert kernels.calls == []


@pytest.mark.parametrize("strided", ["x", "out"])
def test_memory_that_a_copy_hides_is_checked_before_a_launch(kernels: Kernels, strided: str) -> None:
    memory = torch.zeros(1000 * K).bfloat16()
    x = memory[: 6 * K].view(2, 3, K) if strided == "out" else memory[: 12 * K].view(2, 6, K)[:, :3]
    out = memory[: 6 * N].view(2, 3, N) if strided == "x" else memory[: 12 * N].view(2, 6, N)[:, :3]
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': expected a tensor to write"):
        launch(x, packed(), out=out)
    assert kernels.calls == []
