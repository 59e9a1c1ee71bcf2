"""The kernels on a GPU: against the reference and float64, over poisoned outputs with canaries around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kestrel_norm
from kestrel_norm import reference
from kestrel_runtime import backend
from kestrel_runtime.testing import BadInput, assert_close_to_f64, assert_rejects, canary, graph_replay, poison

pytestmark = pytest.mark.gpu

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Both sides of every border between kernels (packs of 8 or 4 elements), whole and broken packs, and a very long row.
SIZES = (1, 7, 8, 66, 127, 128, 256, 264, 513, 896, 1024, 1026, 1152, 1280, 1288, 1536, 2048, 2056, 3072, 4096, 4104)
LONG_SIZES = (5120, 8192, 8200, 16384, 16392, 50000, 131072)
OPS = ("layer_norm", "rms_norm", "fused_add_rms_norm")


@pytest.fixture(autouse=True)
def _kernels_only() -> object:
    with backend("kernel"):
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3 + 1).to(dtype)


def run(op: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The op's result as one new tensor; for the fused op, the norm and the new residual."""
    if op == "layer_norm":
        return kestrel_norm.layer_norm(x, weight, bias)
    if op == "rms_norm":
        return kestrel_norm.rms_norm(x, weight)
    y, residual = x.clone(), x.flip(-1).clone()
    kestrel_norm.fused_add_rms_norm(y, residual, weight)
    return torch.stack([y, residual])


def exact(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in float64, with one rounding where the op rounds the sum."""
    x64, w, b = x.double(), weight.double(), bias.double()
    if op == "layer_norm":
        centred = x64 - x64.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b
    residual = (x64 + x64.flip(-1)).to(x.dtype).double() if op == "fused_add_rms_norm" else x64
    y = residual / (residual.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
    return torch.stack([y, residual]) if op == "fused_add_rms_norm" else y


def torch_itself(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1:]
    if op == "layer_norm":
        return torch.nn.functional.layer_norm(x, n, weight, bias)
    residual = x + x.flip(-1) if op == "fused_add_rms_norm" else x
    y = torch.nn.functional.rms_norm(residual, n, weight, 1e-6)
    return torch.stack([y, residual]) if op == "fused_add_rms_norm" else y


def assert_right(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    got, want = run(op, x, weight, bias), exact(op, x, weight, bias)
    if x.dtype == torch.float32:
        torch.testing.assert_close(got, want.float(), rtol=3e-6, atol=3e-6)
    else:
        assert_close_to_f64(got, want, torch_itself(op, x, weight, bias))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_row_length_is_as_accurate_as_torch(op: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        for t in (1, 3, 257):
            assert_right(op, random(t, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2))
    for n in LONG_SIZES:
        assert_right(op, random(16, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [740, 4096])
def test_many_rows(op: str, t: int) -> None:
    for n in (1152, 2048):
        assert_right(op, random(t, n), random(n, seed=1), random(n, seed=2))


@pytest.mark.parametrize("op", OPS)
def test_no_rows_and_no_columns(op: str) -> None:
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        x = random(*shape)
        run(op, x, random(shape[-1]), random(shape[-1]))
    assert kestrel_norm.layer_norm(random(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("n", [7, 66, 1152, 2048, 2056, 5000, 8192, 40000])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_around_the_result(n: int, offset: int) -> None:
    x, weight = random(5, n), random(n, seed=1)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        flat, assert_intact = canary((5 * n + offset,), x.dtype, "cuda")
        out = flat[offset:].view(5, n)  # with offset 1 no row is aligned to more than one element
        assert op(x, weight, out=out) is out
        assert torch.equal(out, op(x, weight))
        assert_intact()
    flat, assert_intact = canary((5 * n,), x.dtype, "cuda")
    residual = flat.view(5, n).copy_(x)
    kestrel_norm.fused_add_rms_norm(x.clone(), residual, weight)
    assert_intact()


@pytest.mark.parametrize("op", OPS)
def test_columns_of_a_wider_buffer_in_place_leave_the_rest(op: str) -> None:
    for low, high in ((8, 2056), (3, 2051)):
        wide = random(16, 2060)
        before, x = wide.clone(), wide[:, low:high]
        weight = random(2048, seed=1)
        if op == "fused_add_rms_norm":
            residual = random(16, 2048, seed=3)
            want, want_residual = x.clone(), residual.clone()
            kestrel_norm.fused_add_rms_norm(want, want_residual, weight)
            kestrel_norm.fused_add_rms_norm(x, residual, weight)
            assert torch.equal(residual, want_residual)
        else:
            want = getattr(kestrel_norm, op)(x, weight)
            getattr(kestrel_norm, op)(x, weight, out=x)
        assert torch.equal(x, want)
        assert torch.equal(wide[:, :low], before[:, :low])
        assert torch.equal(wide[:, high:], before[:, high:])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_batch_alignment_or_strides(op: str, dtype: torch.dtype) -> None:
    for n in (64, 1152, 2048, 4096, 8192, 20000):
        x, weight, bias = random(700, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        whole = run(op, x, weight, bias)
        for row in (0, 1, 333, 699):
            one = run(op, x[row : row + 1], weight, bias)
            assert torch.equal(one[..., 0, :], whole[..., row, :])
        unaligned = torch.empty(700 * n + 1, dtype=dtype, device="cuda")[1:].view(700, n).copy_(x)
        if op != "fused_add_rms_norm":
            assert torch.equal(run(op, unaligned, weight, bias), whole)
        assert torch.equal(run(op, x, weight, bias), whole)  # and runs repeat


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "every second row": lambda: random(24, 2048)[::2],
    "transposed leading dimensions": lambda: random(4, 5, 896).transpose(0, 1),
    "heads of a packed projection": lambda: random(3, 7, 5, 192)[..., 64:128].transpose(1, 2),
    "four dimensions that merge": lambda: random(3, 4, 5, 64),
    "three strides": lambda: random(6, 5, 4, 128)[::2].permute(2, 0, 1, 3),
    "one row repeated": lambda: random(1, 1152).expand(7, 1152),
    "reversed strides, odd base": lambda: random(5, 9, 130)[..., 1:].transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_leading_strides_are_free(view: str) -> None:
    x = VIEWS[view]()
    flat = x.reshape(-1, x.shape[-1])
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        got = op(x)
        assert got.is_contiguous()
        assert torch.equal(got.view(flat.shape), op(flat))
        out = poison(tuple(reversed(x.shape[:-1])) + x.shape[-1:], x.dtype, "cuda")
        out = out.permute(*reversed(range(x.ndim - 1)), x.ndim - 1)  # other strides than x
        assert torch.equal(op(x, out=out), got)
    if x.stride(0) != 0:
        residual, flat_residual = torch.ones_like(x), torch.ones_like(flat)
        flat = flat.clone()
        kestrel_norm.fused_add_rms_norm(x, residual)
        kestrel_norm.fused_add_rms_norm(flat, flat_residual)
        assert torch.equal(x.reshape(flat.shape), flat)
        assert torch.equal(residual.reshape(flat.shape), flat_residual)


def test_a_row_stride_past_two_to_the_31() -> None:
    n, stride = 2048, 2**31 + 64
    buffer = torch.empty(stride + n, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((2, n), (stride, 1)).copy_(random(2, n))
    weight, residual = random(n, seed=1), random(2, n, seed=2)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        want = op(x.contiguous(), weight)
        assert torch.equal(op(x, weight), want)
    want, want_residual = x.contiguous(), residual.clone()
    kestrel_norm.fused_add_rms_norm(want, want_residual, weight)
    kestrel_norm.fused_add_rms_norm(x, residual, weight)
    assert torch.equal(x, want)
    assert torch.equal(residual, want_residual)


def test_more_than_two_to_the_31_elements() -> None:
    rows, n = 2**20 + 3, 2048
    x = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-2:] = random(2, n)
    kestrel_norm.rms_norm(x, out=x)
    assert torch.equal(x[-2:], kestrel_norm.rms_norm(random(2, n)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [66, 896, 2048, 8192, 20000])
def test_float32_weight_and_weight_bias(dtype: torch.dtype, n: int) -> None:
    x, weight = random(33, n, dtype=dtype), random(n, dtype=torch.float32, seed=1) * 1e-3
    for w in (weight, weight.to(dtype)):
        want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (w.double() + 1)
        got = kestrel_norm.rms_norm(x, w, weight_bias=1.0)
        assert_close_to_f64(got, want, want.to(dtype))
        y, residual = x.clone(), torch.zeros_like(x)
        kestrel_norm.fused_add_rms_norm(y, residual, w, weight_bias=1.0)
        assert torch.equal(y, got)
    assert torch.equal(kestrel_norm.rms_norm(x, weight_bias=1.0), kestrel_norm.rms_norm(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_rows(dtype: torch.dtype) -> None:
    for n in (64, 1152, 2048, 30000):
        x = random(8, n, dtype=dtype)
        x[1] *= 1e3
        x[2] = torch.finfo(dtype).smallest_normal / 4
        x[3] = 0
        x[4] = 2.5
        x[5, n // 3] = float("nan")
        x[6, n - 1] = float("inf")
        x[7, 0] = 6e4  # an outlier where the pivot of the moments is taken
        weight, bias = random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        for op in OPS:
            got, want = run(op, x, weight, bias), exact(op, x, weight, bias)
            assert torch.equal(got.isnan(), want.to(dtype).isnan())
            clean = [0, 1, 2, 3, 4, 7]
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(
                got[..., clean, :], want.to(dtype)[..., clean, :], rtol=max(2 * eps, 3e-6), atol=8e-6
            )


@pytest.mark.parametrize("op", OPS)
def test_a_graph_replays_with_new_contents(op: str) -> None:
    for n in (1152, 2048, 30000):
        old = (random(16, n), random(n, seed=1), random(n, seed=2))
        new = (random(16, n, seed=5), random(n, seed=6), random(n, seed=7))
        want = run(op, *new)
        got = graph_replay(lambda x, w, b: run(op, x, w, b), old, new)
        assert torch.equal(got, want)


def test_dependent_launches_see_what_the_launch_before_wrote() -> None:
    x, weight = random(740, 2048), random(2048, seed=1)
    want, y = x.clone(), x.clone()
    for _ in range(20):
        want = kestrel_norm.rms_norm(want, weight)
        torch.cuda.synchronize()
    for _ in range(20):
        kestrel_norm.rms_norm(y, weight, out=y)
    assert torch.equal(y, want)


def test_a_constant_may_be_written_two_launches_before() -> None:
    many, x, other = (torch.randn(t, 2048, device="cuda", dtype=torch.bfloat16) for t in (8192, 4, 4))
    out = torch.empty_like(many)
    for shift in range(100):
        moved = many.roll(shift, 1)
        want = kestrel_norm.layer_norm(x, kestrel_norm.rms_norm(moved[-1:])[0].clone())
        out.zero_()
        torch.cuda.synchronize()
        kestrel_norm.rms_norm(moved, out=out)  # writes the weight in its last row
        kestrel_norm.rms_norm(other)
        assert torch.equal(kestrel_norm.layer_norm(x, out[-1]), want)


@pytest.mark.parametrize("op", OPS)
def test_compiled_without_a_graph_break(op: str) -> None:
    args = random(16, 2048), random(2048, seed=1), random(2048, seed=2)
    with backend("auto"):
        got = torch.compile(lambda x, w, b: run(op, x, w, b), fullgraph=True)(*args)
    assert torch.equal(got, run(op, *args))


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op: str) -> None:
    args = random(740, 2048), random(2048, seed=1), random(2048, seed=2)
    want, stream = run(op, *args), torch.cuda.Stream()
    scratch = torch.zeros(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        x = torch.zeros_like(args[0]).copy_(args[0])
        got = run(op, x, *args[1:])
    stream.synchronize()
    assert torch.equal(got, want)


def test_kernel_and_reference_agree() -> None:
    x, weight = random(257, 2048), random(2048, seed=1)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        want = getattr(reference, op.__name__)(x, weight)
        torch.testing.assert_close(op(x, weight), want, rtol=2**-7, atol=1e-6)


def test_kernel_refuses_bad_input() -> None:
    cases = [
        BadInput("float64", "x", lambda: ((random(3, 8).double(),), {}), TypeError, "float64"),
        BadInput("transposed", "x", lambda: ((random(8, 3).T,), {}), ValueError, "stride 3"),
        BadInput("long weight", "weight", lambda: ((random(3, 8), random(9)), {}), ValueError, "shape (8,), got (9,)"),
        BadInput("weight on the host", "weight", lambda: ((random(3, 8), random(8).cpu()), {}), ValueError, "cpu"),
        BadInput("eps is nan", "eps", lambda: ((random(3, 8),), {"eps": float("nan")}), ValueError, "nan"),
    ]
    for case in cases:
        assert_rejects(kestrel_norm.rms_norm, case)
        assert_rejects(kestrel_norm.layer_norm, case)
