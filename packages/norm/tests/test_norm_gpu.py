"""The kernels on a GPU: against the reference and float64, over poisoned outputs with canaries around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kestrel_norm
from kestrel_norm import reference
from kestrel_runtime import Binary, backend
from kestrel_runtime.reference import quantise_rows
from kestrel_runtime.testing import (
    BadInput,
    assert_close_to_f64,
    assert_rejects,
    assert_waits_for_the_launch_before,
    canary,
    fp8_code_distance,
    graph_replay,
    poison,
)

pytestmark = pytest.mark.gpu

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Both sides of every border between kernels (packs of 8 or 4 elements), whole and broken packs, and a very long row.
SIZES = (1, 7, 8, 12, 66, 127, 128, 256, 264, 513, 896, 1024, 1026, 1152, 1156, 1280, 1288, 1536, 2048, 2056, 3072)
SIZES += (1001, 4096, 4100, 4101, 4104)
LONG_SIZES = (5120, 8191, 8192, 8200, 16384, 16392, 18944, 23999, 50000, 50001, 131072)
OPS = ("layer_norm", "fused_add_layer_norm", "rms_norm", "fused_add_rms_norm")
FP8_OPS = ("rms_norm_fp8", "fused_add_rms_norm_fp8")
ENTRY_POINTS = Binary("kestrel_norm")


@pytest.fixture(autouse=True)
def _kernels_only() -> object:
    with backend("kernel"):
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3 + 1).to(dtype)


def launch(
    op: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The op on these tensors, with those of its arguments that it has; everything it returns or writes."""
    function = getattr(kestrel_norm, op)
    rest = {"bias": bias} if "layer" in op else {"scale_ub": scale_ub} if "fp8" in op else {}
    if not op.startswith("fused"):
        got = function(x, weight, **rest)
        return got if isinstance(got, tuple) else (got,)
    got = function(x, residual, weight, **rest)
    return (x, residual) if got is None else (*got, residual)


def run(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The op on copies of x; a residual is x from right to left."""
    if op.startswith("fused"):
        return launch(op, x.clone(), x.flip(-1).clone(), weight, bias, scale_ub)
    return launch(op, x, x, weight, bias, scale_ub)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Whether no element differs; a NaN is one NaN."""
    pairs = [(p.float(), q.float()) for p, q in zip(a, b, strict=True)]
    return all(bool(((p == q) | (p.isnan() & q.isnan())).all()) for p, q in pairs)


def total(op: str, x: torch.Tensor) -> torch.Tensor:
    """What `run` has the op normalise."""
    return (x.double() + x.flip(-1).double()).to(x.dtype) if op.startswith("fused") else x


def exact(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The norm in float64."""
    y, w = total(op, x).double(), weight.double()
    if "layer" in op:
        y = y - y.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + bias.double()
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w


def torch_itself(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if "layer" in op:
        return torch.nn.functional.layer_norm(total(op, x), x.shape[-1:], weight, bias)
    return torch.nn.functional.rms_norm(total(op, x), x.shape[-1:], weight, 1e-6)


def assert_right(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    got, *residual = run(op, x, weight, bias)
    want = exact(op, x, weight, bias)
    if residual:
        assert torch.equal(residual[0], total(op, x))
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_rows_of_a_call_beyond_l2_are_those_of_a_small_one(op: str, dtype: torch.dtype) -> None:
    for n in (4096, 4104, 8192):
        x, weight, bias = random(8193, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        whole = run(op, x, weight, bias)
        for rows in (slice(0, 3), slice(8190, 8193)):
            assert same_bits(run(op, x[rows], weight, bias), tuple(part[rows] for part in whole))


@pytest.mark.parametrize("op", OPS)
def test_no_rows_and_no_columns(op: str) -> None:
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        x = random(*shape)
        assert run(op, x, random(shape[-1]), random(shape[-1]))[0].shape == shape


@pytest.mark.parametrize("n", [7, 12, 66, 1001, 1152, 2048, 2052, 2056, 5000, 8192, 40000])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_nothing_is_written_around_the_result(n: int, offset: int) -> None:
    x, weight = random(5, n), random(n, seed=1)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        flat, assert_intact = canary((5 * n + offset,), x.dtype, "cuda")
        out = flat[offset:].view(5, n)  # with offset 1 no row is aligned to more than one element, with 4 to 8 bytes
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
        if op.startswith("fused"):
            residual = random(16, 2048, seed=3)
            want, want_residual = launch(op, x.clone(), residual.clone(), weight)
            launch(op, x, residual, weight)
            assert torch.equal(residual, want_residual)
        else:
            want = getattr(kestrel_norm, op)(x, weight)
            getattr(kestrel_norm, op)(x, weight, out=x)
        assert torch.equal(x, want)
        assert torch.equal(wide[:, :low], before[:, :low])
        assert torch.equal(wide[:, high:], before[:, high:])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_row_does_not_depend_on_batch_alignment_or_strides(op: str, dtype: torch.dtype) -> None:
    for n in (64, 1001, 1152, 1156, 2048, 2052, 4096, 8188, 8192, 20000):
        x, weight, bias = random(700, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        whole = run(op, x, weight, bias)
        for row in (0, 1, 333, 699):
            one = run(op, x[row : row + 1], weight, bias)
            assert same_bits(one, tuple(part[row : row + 1] for part in whole))
        for by in (1, 2, 4):  # elements
            moved, other = (torch.empty(700 * n + by, dtype=dtype, device="cuda")[by:].view(700, n) for _ in range(2))
            assert same_bits(launch(op, moved.copy_(x), other.copy_(x.flip(-1)), weight, bias), whole)
        assert same_bits(run(op, x, weight, bias), whole)  # and runs repeat


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
    got = kestrel_norm.rms_norm_fp8(x)
    assert all(part.is_contiguous() for part in got)
    assert same_bits(tuple(part.flatten(0, -2) for part in got), kestrel_norm.rms_norm_fp8(flat))
    if x.stride(0) == 0:
        return
    for op in ("fused_add_rms_norm", "fused_add_layer_norm", "fused_add_rms_norm_fp8"):
        flat = x.reshape(-1, x.shape[-1]).clone()
        got = launch(op, x, torch.ones_like(x))
        want = launch(op, flat, torch.ones_like(flat))
        assert same_bits(tuple(part.reshape(-1, part.shape[-1]) for part in got), want)


def test_a_row_stride_past_two_to_the_31() -> None:
    n, stride = 2048, 2**31 + 64
    buffer = torch.empty(stride + n, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((2, n), (stride, 1)).copy_(random(2, n))
    weight, residual = random(n, seed=1), random(2, n, seed=2)
    for op in (kestrel_norm.layer_norm, kestrel_norm.rms_norm):
        want = op(x.contiguous(), weight)
        assert torch.equal(op(x, weight), want)
    assert same_bits(kestrel_norm.rms_norm_fp8(x, weight), kestrel_norm.rms_norm_fp8(x.contiguous(), weight))
    for op in ("fused_add_rms_norm_fp8", "fused_add_rms_norm", "fused_add_layer_norm"):  # the first leaves x alone
        want = launch(op, x.contiguous(), residual.clone(), weight)
        assert same_bits(launch(op, x, residual, weight), want)


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
        assert_nearest_codes(*kestrel_norm.rms_norm_fp8(x, w, weight_bias=1.0), x, w, 1.0)
    assert torch.equal(kestrel_norm.rms_norm(x, weight_bias=1.0), kestrel_norm.rms_norm(x))
    whole = weight.to(dtype)  # a float32 weight that holds the same numbers changes no bit
    assert torch.equal(kestrel_norm.rms_norm(x, whole.float()), kestrel_norm.rms_norm(x, whole))


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
            got, want = run(op, x, weight, bias)[0], exact(op, x, weight, bias)
            assert torch.equal(got.isnan(), want.to(dtype).isnan())
            clean = [0, 1, 2, 3, 4, 7]
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(
                got[..., clean, :], want.to(dtype)[..., clean, :], rtol=max(2 * eps, 3e-6), atol=8e-6
            )


@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_graph_replays_with_new_contents(op: str) -> None:
    for n in (1152, 2048, 30000):
        bounds = torch.tensor([[2.0], [0.5]], device="cuda")
        old = (random(16, n), random(n, seed=1), random(n, seed=2), bounds[0])
        new = (random(16, n, seed=5), random(n, seed=6), random(n, seed=7), bounds[1])
        want = run(op, *new)
        assert same_bits(graph_replay(lambda *args: run(op, *args), old, new), want)


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


WRITTEN = [(op, name) for op in OPS + FP8_OPS for name in ("x", "residual", "scale_ub")]
WRITTEN = [(op, name) for op, name in WRITTEN if name == "x" or (name == "residual" and "fused" in op) or "fp8" in op]
WRITTEN.remove(("rms_norm_fp8", "residual"))


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(op: str, name: str) -> None:
    """A slow launch writes the input in its last rows, and the op follows at once."""
    n, contents = 1024, 7
    sources = [random(2048, n, seed=seed) * (seed + 1) for seed in range(contents)]
    weight, bias, fixed = random(n, seed=20), random(n, seed=21), random(2, 4, n, seed=22)
    rows = torch.empty_like(sources[0])
    codes, scales = torch.empty_like(rows, dtype=torch.float8_e4m3fn), torch.empty(2048, 1, device="cuda")
    x, residual = fixed.clone()
    arguments = {"x": x, "residual": residual, "scale_ub": None}
    arguments[name] = scales[-1] if name == "scale_ub" else rows[-4:]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        x.copy_(fixed[0])
        residual.copy_(fixed[1])
        if name == "scale_ub":
            ENTRY_POINTS.rms_norm_fp8(codes, scales, sources[i], sources[i][-1], 1e-6, 0.0, None)
        else:
            kestrel_norm.layer_norm(sources[i], sources[i][0], out=rows)
        between()
        return launch(op, arguments["x"], arguments["residual"], weight, bias, arguments["scale_ub"])

    assert_waits_for_the_launch_before(chain, contents)


@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_compiled_without_a_graph_break(op: str) -> None:
    args = random(16, 2048), random(2048, seed=1), random(2048, seed=2)
    with backend("auto"):
        got = torch.compile(lambda x, w, b: run(op, x, w, b), fullgraph=True)(*args)
    assert same_bits(got, run(op, *args))


@pytest.mark.parametrize("op", OPS + FP8_OPS)
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
    assert same_bits(got, want)


def assert_nearest_codes(
    q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, weight_bias: float = 0.0
) -> None:
    """Scales to float32. A code is the reference's, or its neighbour where float64 sees a tie between the two.

    Products of two short significands and their largest often do: one in 10 000 here, by the reference itself.
    """
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + weight_bias)
    quotient = y / (y.abs().amax(-1, keepdim=True) / 448)
    want_q, want_scale = reference.rms_norm_fp8(x, weight, weight_bias=weight_bias)
    torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
    assert int(fp8_code_distance(q, want_q).max()) <= 1
    farther = (q.double() - quotient).abs() - (want_q.double() - quotient).abs()
    assert bool((farther <= 4e-6 * quotient.abs()).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", FP8_OPS)
def test_fp8_codes_and_scales_are_the_reference_s(op: str, dtype: torch.dtype) -> None:
    for n in SIZES + LONG_SIZES:
        for t in (1, 3, 257) if n < 5000 else (16,):
            x, weight = random(t, n, dtype=dtype), random(n, dtype=dtype, seed=1)
            q, scale, *residual = run(op, x, weight)
            assert_nearest_codes(q, scale, total(op, x), weight)
            assert all(torch.equal(part, total(op, x)) for part in residual)


def test_fp8_is_the_float32_norm_quantised() -> None:
    """Where the norm itself leaves in float32 there is nothing in between but the order of the row's sum."""
    for n in SIZES + LONG_SIZES:
        x, weight = random(16, n, dtype=torch.float32), random(n, dtype=torch.float32, seed=1)
        for bound in (None, torch.tensor([0.25], device="cuda")):
            q, scale = kestrel_norm.rms_norm_fp8(x, weight, weight_bias=0.5, scale_ub=bound)
            want_q, want_scale = quantise_rows(kestrel_norm.rms_norm(x, weight, weight_bias=0.5), bound)
            torch.testing.assert_close(scale, want_scale, rtol=5e-7, atol=0)
            distance = fp8_code_distance(q, want_q)
            assert int(distance.max()) <= 1
            assert int((distance > 0).sum()) <= q.numel() / 10_000


@pytest.mark.parametrize("n", [7, 66, 1001, 1152, 2048, 2056, 5000, 8192, 40000])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_and_scales_are_written_and_nothing_around_them(n: int, dtype: torch.dtype) -> None:
    x, weight = random(5, n, dtype=dtype), random(n, dtype=dtype, seed=1)
    want = kestrel_norm.rms_norm_fp8(x, weight)
    for offset in (0, 1):  # with 1, codes start at an odd address
        flat, assert_q_intact = canary((5 * n + offset,), torch.float8_e4m3fn, "cuda")
        scale, assert_scale_intact = canary((5, 1), torch.float32, "cuda")
        q = flat[offset:].view(5, n)
        ENTRY_POINTS.rms_norm_fp8(q, scale, x, weight, 1e-6, 0.0, None)
        assert same_bits((q, scale), want)
        assert_q_intact()
        assert_scale_intact()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_rows_in_fp8(dtype: torch.dtype) -> None:
    for n in (64, 2048, 30000):
        x = random(8, n, dtype=dtype)
        alone = kestrel_norm.rms_norm_fp8(x[:1])
        x[1], x[2], x[3, n // 3], x[4, n - 1], x[5] = 0, 1e-7, float("nan"), float("inf"), float("-inf")
        q, scale = kestrel_norm.rms_norm_fp8(x)
        want_q, want_scale = reference.rms_norm_fp8(x)
        assert same_bits((q[:1], scale[:1]), alone)
        assert bool(scale.isfinite().all())
        assert int(fp8_code_distance(q, want_q).max()) <= 1
        torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
        assert not q[1].float().any()
        assert kestrel_norm.rms_norm_fp8(x, scale_ub=torch.tensor([float("nan")], device="cuda"))[1].isnan().all()


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
