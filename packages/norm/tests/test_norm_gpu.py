"""The kernels on a GPU: against the reference and float64, over poisoned outputs with canaries around them."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kestrel_norm
from kestrel_norm import reference
from kestrel_runtime import Binary, backend
from kestrel_runtime.reference import quantise_rows
from kestrel_runtime.testing import (
    RandomCase,
    assert_close_to_f64,
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canaries,
    canary,
    compare_at_random,
    fp8_code_distance,
    graph_replay,
    large_allocation,
    poison,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Both sides of every line of the tile tables (in packs of 8 and of 4 elements), whole and broken packs, very long rows.
SIZES = (1, 7, 8, 12, 66, 127, 128, 256, 264, 513, 896, 1024, 1026, 1152, 1156, 1280, 1288, 1536, 2048, 2056, 3072)
SIZES += (1001, 4096, 4100, 4101, 4104)
LONG_SIZES = (5120, 8191, 8192, 8200, 16384, 16388, 16392, 18944, 23999, 32768, 32776, 40004, 50000, 50001, 65536)
LONG_SIZES += (65540, 131072, 131080)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_size = pytest.mark.parametrize("n", SIZES + LONG_SIZES)
OPS = ("layer_norm", "fused_add_layer_norm", "rms_norm", "fused_add_rms_norm")
FP8_OPS = ("rms_norm_fp8", "fused_add_rms_norm_fp8")
ENTRY_POINTS = Binary("kestrel_norm")


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


def assert_equal(got: Any, want: Any, what: str = "result") -> None:
    """No bit differs, but that all NaNs are one."""
    assert_same_bits(got, want, what, any_nan=True)


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


@every_dtype
@every_size
@pytest.mark.parametrize("op", OPS)
def test_every_row_length_is_as_accurate_as_torch(op: str, n: int, dtype: torch.dtype) -> None:
    weight, bias = random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    for t in (1, 3, 257) if n in SIZES else (16,):
        assert_right(op, random(t, n, dtype=dtype), weight, bias)


@pytest.mark.parametrize("op", ["layer_norm", "fused_add_layer_norm"])
@pytest.mark.parametrize("n", [66, 1152, 2048, 4096, 20000])
def test_a_mean_far_above_the_deviation_is_as_accurate_as_torch(op: str, n: int) -> None:
    """float32 rows whose mean is a hundred times their deviation."""
    x, weight, bias = random(64, n, dtype=torch.float32) + 300, random(n, dtype=torch.float32, seed=1), torch.zeros(n)
    bias = bias.cuda()
    got, want = run(op, x, weight, bias)[0], exact(op, x, weight, bias)
    assert_close_to_f64(got, want, torch_itself(op, x, weight, bias))


@pytest.mark.parametrize("n", [1152, 2048])
@pytest.mark.parametrize("t", [740, 4096])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(op: str, t: int, n: int) -> None:
    assert_right(op, random(t, n), random(n, seed=1), random(n, seed=2))


@every_dtype
@pytest.mark.parametrize("n", [4096, 4104, 8192])
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_rows_of_a_call_beyond_l2_are_those_of_a_small_one(op: str, n: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(8193, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    whole = run(op, x, weight, bias)
    for rows in (slice(0, 3), slice(8190, 8193)):
        assert_equal(run(op, x[rows], weight, bias), tuple(part[rows] for part in whole), f"rows {rows}")


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_no_rows_and_no_columns(op: str, shape: tuple[int, ...]) -> None:
    assert run(op, random(*shape), random(shape[-1]), random(shape[-1]))[0].shape == shape


CANARY_SIZES = pytest.mark.parametrize("n", [7, 12, 66, 1001, 1152, 2048, 2052, 2056, 5000, 8192, 40000, 40003])


@CANARY_SIZES
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_nothing_is_written_around_the_result(op: str, n: int, offset: int) -> None:
    """With offset 1 no row is aligned to more than one element, with offset 4 to 8 bytes."""
    function, x, weight = getattr(kestrel_norm, op), random(5, n), random(n, seed=1)
    flat, assert_intact = canary((5 * n + offset,), x.dtype, "cuda")
    out = flat[offset:].view(5, n)
    assert function(x, weight, out=out) is out
    assert_equal(out, function(x, weight))
    assert_intact()


@CANARY_SIZES
@pytest.mark.parametrize("op", ["fused_add_layer_norm", "fused_add_rms_norm", "fused_add_rms_norm_fp8"])
def test_nothing_is_written_around_x_and_residual(op: str, n: int) -> None:
    (x, residual), assert_intact = canaries(((5, n), torch.bfloat16), ((5, n), torch.bfloat16), device="cuda")
    launch(op, x.copy_(random(5, n)), residual.copy_(random(5, n, seed=3)), random(n, seed=1))
    assert_intact()


@pytest.mark.parametrize(("low", "high"), [(8, 2056), (3, 2051), (8, 40008), (3, 40003)])
@pytest.mark.parametrize("op", OPS)
def test_columns_of_a_wider_buffer_in_place_leave_the_rest(op: str, low: int, high: int) -> None:
    wide = random(16, high + 4)
    before, x = wide.clone(), wide[:, low:high]
    weight = random(high - low, seed=1)
    if op.startswith("fused"):
        residual = random(16, high - low, seed=3)
        want, want_residual = launch(op, x.clone(), residual.clone(), weight)
        launch(op, x, residual, weight)
        assert torch.equal(residual, want_residual)
    else:
        want = getattr(kestrel_norm, op)(x, weight)
        getattr(kestrel_norm, op)(x, weight, out=x)
    assert torch.equal(x, want)
    assert torch.equal(wide[:, :low], before[:, :low])
    assert torch.equal(wide[:, high:], before[:, high:])


@every_dtype
@pytest.mark.parametrize("n", [64, 1001, 1152, 1156, 2048, 2052, 4096, 8188, 8192, 18944, 20000, 32768, 40001, 65536])
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_row_does_not_depend_on_batch_alignment_or_strides(op: str, n: int, dtype: torch.dtype) -> None:
    t = 700 if n < 10_000 else 140
    x, weight, bias = random(t, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    whole = run(op, x, weight, bias)
    for row in (0, 1, 133, t - 1):
        one = run(op, x[row : row + 1], weight, bias)
        assert_equal(one, tuple(part[row : row + 1] for part in whole), f"row {row} alone")
    for by in (1, 2, 4):  # elements
        moved, other = (torch.empty(t * n + by, dtype=dtype, device="cuda")[by:].view(t, n) for _ in range(2))
        got = launch(op, moved.copy_(x), other.copy_(x.flip(-1)), weight, bias)
        assert_equal(got, whole, f"moved by {by} elements")


@pytest.mark.parametrize("n", [2048, 65536])
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_runs_repeat(op: str, n: int) -> None:
    x, weight, bias = random(700, n), random(n, seed=1), random(n, seed=2)
    assert_runs_repeat(lambda x: run(op, x, weight, bias), x)


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
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_leading_strides_are_free(op: str, view: str) -> None:
    function, x = getattr(kestrel_norm, op), VIEWS[view]()
    flat = x.reshape(-1, x.shape[-1])
    got = function(x)
    assert got.is_contiguous()
    assert torch.equal(got.view(flat.shape), function(flat))
    out = poison(tuple(reversed(x.shape[:-1])) + x.shape[-1:], x.dtype, "cuda")
    out = out.permute(*reversed(range(x.ndim - 1)), x.ndim - 1)  # other strides than x
    assert torch.equal(function(x, out=out), got)


@pytest.mark.parametrize("view", VIEWS)
def test_leading_strides_are_free_for_fp8(view: str) -> None:
    x = VIEWS[view]()
    got = kestrel_norm.rms_norm_fp8(x)
    assert all(part.is_contiguous() for part in got)
    want = kestrel_norm.rms_norm_fp8(x.reshape(-1, x.shape[-1]))
    assert_equal(tuple(part.flatten(0, -2) for part in got), want)


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "one row repeated"])
@pytest.mark.parametrize("op", ["fused_add_rms_norm", "fused_add_layer_norm", "fused_add_rms_norm_fp8"])
def test_leading_strides_of_written_tensors_are_free(op: str, view: str) -> None:
    x = VIEWS[view]()
    flat = x.reshape(-1, x.shape[-1]).clone()
    got, want = launch(op, x, torch.ones_like(x)), launch(op, flat, torch.ones_like(flat))
    assert_equal(tuple(part.reshape(-1, part.shape[-1]) for part in got), want)


@large_allocation(gib=5)
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_row_stride_past_two_to_the_31(op: str) -> None:
    n, stride = 2048, 2**31 + 64
    buffer = torch.empty(stride + n, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((2, n), (stride, 1)).copy_(random(2, n))
    weight, residual = random(n, seed=1), random(2, n, seed=2)
    want = launch(op, x.contiguous(), residual.clone(), weight)
    assert_equal(launch(op, x, residual, weight), want)


@large_allocation(gib=5)
def test_more_than_two_to_the_31_elements() -> None:
    rows, n = 2**20 + 3, 2048
    x = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-2:] = random(2, n)
    kestrel_norm.rms_norm(x, out=x)
    assert torch.equal(x[-2:], kestrel_norm.rms_norm(random(2, n)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [66, 896, 2048, 8192, 20000, 40000, 40001])
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
    whole = weight.to(dtype)  # a float32 weight of the same values changes no bit
    assert torch.equal(kestrel_norm.rms_norm(x, whole.float()), kestrel_norm.rms_norm(x, whole))


@every_dtype
@pytest.mark.parametrize("n", [64, 1152, 2048, 30000, 65536])
@pytest.mark.parametrize("op", OPS)
def test_special_rows(op: str, n: int, dtype: torch.dtype) -> None:
    x = random(8, n, dtype=dtype)
    x[1] *= 1e3
    x[2] = torch.finfo(dtype).smallest_normal / 4
    x[3] = 0
    x[4] = 2.5
    x[5, n // 3] = float("nan")
    x[6, n - 1] = float("inf")
    x[7, 0] = 6e4  # an outlier in the pack whose mean is the pivot of the moments
    weight, bias = random(n, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    got, want = run(op, x, weight, bias)[0], exact(op, x, weight, bias)
    assert torch.equal(got.isnan(), want.to(dtype).isnan())
    clean, eps = [0, 1, 2, 3, 4, 7], torch.finfo(dtype).eps
    torch.testing.assert_close(got[clean], want.to(dtype)[clean], rtol=max(2 * eps, 3e-6), atol=8e-6)


@pytest.mark.parametrize("n", [1152, 2048, 30000, 65536])
@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_graph_replays_with_new_contents(op: str, n: int) -> None:
    bounds = torch.tensor([[2.0], [0.5]], device="cuda")
    old = (random(16, n), random(n, seed=1), random(n, seed=2), bounds[0])
    new = (random(16, n, seed=5), random(n, seed=6), random(n, seed=7), bounds[1])
    want = run(op, *new)
    assert_equal(graph_replay(lambda *args: run(op, *args), old, new), want)


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


@pytest.mark.parametrize("n", [1024, 40000])
@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(op: str, name: str, n: int) -> None:
    """A slow launch writes the input in its last rows, and the op follows at once."""
    t, contents = 2**21 // n, 7
    sources = [random(t, n, seed=seed) * (seed + 1) for seed in range(contents)]
    weight, bias, fixed = random(n, seed=20), random(n, seed=21), random(2, 4, n, seed=22)
    rows = torch.empty_like(sources[0])
    codes, scales = torch.empty_like(rows, dtype=torch.float8_e4m3fn), torch.empty(t, 1, device="cuda")
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
    assert_equal(got, run(op, *args))


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
    assert_equal(got, want)


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


@every_dtype
@every_size
@pytest.mark.parametrize("op", FP8_OPS)
def test_fp8_codes_and_scales_are_the_reference_s(op: str, n: int, dtype: torch.dtype) -> None:
    for t in (1, 3, 257) if n in SIZES else (16,):
        x, weight = random(t, n, dtype=dtype), random(n, dtype=dtype, seed=1)
        q, scale, *residual = run(op, x, weight)
        assert_nearest_codes(q, scale, total(op, x), weight)
        assert all(torch.equal(part, total(op, x)) for part in residual)


@every_size
@pytest.mark.parametrize("bound", [None, 0.25])
def test_fp8_is_the_float32_norm_quantised(n: int, bound: float | None) -> None:
    """A norm in float32 is not rounded on its way to codes: the two differ by the order of the row's sum at most."""
    x, weight = random(16, n, dtype=torch.float32), random(n, dtype=torch.float32, seed=1)
    scale_ub = None if bound is None else torch.tensor([bound], device="cuda")
    q, scale = kestrel_norm.rms_norm_fp8(x, weight, weight_bias=0.5, scale_ub=scale_ub)
    want_q, want_scale = quantise_rows(kestrel_norm.rms_norm(x, weight, weight_bias=0.5), scale_ub)
    torch.testing.assert_close(scale, want_scale, rtol=5e-7, atol=0)
    distance = fp8_code_distance(q, want_q)
    assert int(distance.max()) <= 1
    assert int((distance > 0).sum()) <= max(1, q.numel() // 10_000)


@every_dtype
@pytest.mark.parametrize("n", [7, 66, 1001, 1152, 2048, 2056, 5000, 8192, 18944, 40000, 40003])
@pytest.mark.parametrize("offset", [0, 1])
def test_codes_and_scales_are_written_and_nothing_around_them(n: int, dtype: torch.dtype, offset: int) -> None:
    """With offset 1, codes begin at an odd address."""
    x, weight = random(5, n, dtype=dtype), random(n, dtype=dtype, seed=1)
    want = kestrel_norm.rms_norm_fp8(x, weight)
    (flat, scale), assert_intact = canaries(
        ((5 * n + offset,), torch.float8_e4m3fn), ((5, 1), torch.float32), device="cuda"
    )
    q = flat[offset:].view(5, n)
    ENTRY_POINTS.rms_norm_fp8(q, scale, x, weight, 1e-6, 0.0, None)
    assert_equal((q, scale), want)
    assert_intact()


@every_dtype
@pytest.mark.parametrize("n", [64, 2048, 18944, 40000])
def test_special_rows_in_fp8(n: int, dtype: torch.dtype) -> None:
    x = random(8, n, dtype=dtype)
    alone = kestrel_norm.rms_norm_fp8(x[:1])
    x[1], x[2], x[3, n // 3], x[4, n - 1], x[5] = 0, 1e-7, float("nan"), float("inf"), float("-inf")
    q, scale = kestrel_norm.rms_norm_fp8(x)
    want_q, want_scale = reference.rms_norm_fp8(x)
    assert_equal((q[:1], scale[:1]), alone)
    assert bool(scale.isfinite().all())
    distance = fp8_code_distance(q, want_q)
    assert int(distance.max()) <= 1
    assert int((distance > 0).sum()) <= max(2, q.numel() // 5_000)
    torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
    assert not q[1].float().any()
    nan = torch.tensor([float("nan")], device="cuda")
    assert kestrel_norm.rms_norm_fp8(x, scale_ub=nan)[1].isnan().all()


@pytest.mark.parametrize("n", [2048, 18944, 32768, 65536, 65540])
def test_products_that_overflow_have_the_largest_code_and_leave_the_scale(n: int) -> None:
    """The scale is that of the largest finite magnitude; the infinite element lies in one part of the row."""
    x, weight = random(4, n, dtype=torch.float32), torch.ones(n, device="cuda")
    x[:, n // 2], weight[n // 2] = 30, torch.finfo(torch.float32).max
    q, scale = kestrel_norm.rms_norm_fp8(x, weight)
    want_q, want_scale = reference.rms_norm_fp8(x, weight)
    torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
    assert bool((scale < 1).all())
    assert bool((q[:, n // 2].float() == 448).all())
    assert int(fp8_code_distance(q, want_q).max()) <= 1


def draw_case(rng: random_numbers.Random) -> RandomCase:
    """A call of any op: shape, strides, alignment, dtypes, options and a distribution at random."""
    op = rng.choice(OPS + FP8_OPS)
    n = rng.choice([rng.randint(1, 300), 8 * rng.randint(1, 300), rng.randint(1, 40_000), rng.randint(32_769, 140_000)])
    leading = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    leading[0] = max(1, min(leading[0] * rng.choice([1, 40]), 2**21 // n))
    dtype = rng.choice(FLOATS)
    scale, mean = rng.choice([1e-3, 1.0, 30.0]), rng.choice([0.0, 1.0, 10.0])

    def rows() -> torch.Tensor:
        shift, wide = rng.choice([0, 1, 4, 8]), rng.choice([0, 3, 8])
        buffer = torch.randn(*leading, n + wide + shift, device="cuda") * scale + mean * scale
        view = buffer.to(dtype)[..., shift : shift + n]
        return view.transpose(0, 1) if len(leading) > 1 and transposed else view

    transposed = rng.random() < 0.3
    args: list[Any] = [rows()]
    if op.startswith("fused"):
        args.append(rows())
    vector_dtype = rng.choice([dtype, torch.float32]) if "rms" in op else dtype
    kwargs: dict[str, Any] = {"eps": rng.choice([1e-6, 1e-5, 0.1])}
    if rng.random() < 0.8:
        kwargs["weight"] = torch.randn(n, device="cuda").to(vector_dtype)
    if "layer" in op and rng.random() < 0.7:
        kwargs["bias"] = torch.randn(n, device="cuda").to(dtype)
    if "rms" in op:
        kwargs["weight_bias"] = rng.choice([0.0, 1.0])
    if "fp8" in op and rng.random() < 0.3:
        kwargs["scale_ub"] = torch.rand(1, device="cuda") * 3

    def compare(got: Any, want: Any, what: str) -> None:
        if isinstance(got, tuple):  # codes and scales
            distance = fp8_code_distance(got[0], want[0])
            assert int(distance.max()) <= 1, f"{what}: codes differ by {int(distance.max())}"
            torch.testing.assert_close(got[1], want[1], rtol=4e-6, atol=0)
        elif "layer" in op and dtype == torch.float32:  # the mean is float32: off by its rounding
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        else:
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=max(1.01 * eps, 4e-6), atol=2e-5)

    writes = () if not op.startswith("fused") else (1,) if "fp8" in op else (0, 1)
    return RandomCase(getattr(kestrel_norm, op), tuple(args), kwargs, compare, writes)


def test_random_calls_agree_with_the_reference() -> None:
    compare_at_random(draw_case, seconds=10, least=50)


@pytest.mark.parametrize("op", OPS + FP8_OPS)
def test_a_weight_on_the_host_is_refused(op: str) -> None:
    x, residual = random(2, 3, 8)
    with pytest.raises(ValueError, match=f"{op}: argument 'weight': expected device cuda:0 as x has, got cpu"):
        launch(op, x, residual, torch.ones(8, dtype=torch.bfloat16))
