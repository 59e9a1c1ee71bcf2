"""The kernels on a GPU: every code and every scale is the reference's, bit for bit."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kestrel_quant
from kestrel_quant._launch import kernels, partial_amax
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    RandomCase,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    by_reference,
    canary,
    compare_at_random,
    graph_replay,
    large_allocation,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

F8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Whole and partial packs of 4 and 8 elements; both sides of every dispatch threshold; rows that are read twice.
SIZES = (1, 2, 7, 8, 30, 64, 66, 127, 128, 256, 300, 1000, 1024, 1026, 1152, 2048, 2056, 4096, 4104, 8192, 8200)
LONG_SIZES = (16384, 16390, 32768, 32776, 50000, 131072, 131074)
QUANTISATIONS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp8 rows": kestrel_quant.fp8_quant,
    "fp8 rows with a bound": lambda x: kestrel_quant.fp8_quant(x, scale_ub=torch.full((1,), 2.5, device="cuda")),
    "fp8 tensor": lambda x: kestrel_quant.fp8_quant(x, granularity="tensor"),
    "fp8 groups of 128": lambda x: kestrel_quant.fp8_quant(x, granularity="group"),
    "fp8 groups of 48": lambda x: kestrel_quant.fp8_quant(x, granularity="group", group_size=48),
    "fp8 groups of 7": lambda x: kestrel_quant.fp8_quant(x, granularity="group", group_size=7),
    "fp8 long groups": lambda x: kestrel_quant.fp8_quant(x, granularity="group", group_size=3000),
    "fp8 columns of scales": lambda x: kestrel_quant.fp8_quant(x, granularity="group", column_major_scales=True),
    "fp8 one scale": lambda x: kestrel_quant.fp8_quant(x, torch.full((1,), 0.013, device="cuda")),
    "fp8 scale per row": lambda x: kestrel_quant.fp8_quant(
        x, torch.linspace(0.01, 0.02, x.shape[0], device="cuda")[:, None]
    ),
    "int8 rows": kestrel_quant.int8_quant,
    "int8 tensor": lambda x: kestrel_quant.int8_quant(x, granularity="tensor"),
}
PAIRS = {
    "int4 groups of 128": kestrel_quant.int4_quant,
    "int4 groups of 32": lambda x: kestrel_quant.int4_quant(x, group_size=32),
    "int4 groups of 7": lambda x: kestrel_quant.int4_quant(x, group_size=7),
    "int4 groups of 1": lambda x: kestrel_quant.int4_quant(x, group_size=1),
    "int4 long groups": lambda x: kestrel_quant.int4_quant(x, group_size=3001),
}
EVERY = {**QUANTISATIONS, **PAIRS}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3).to(dtype)


def odd_rows(t: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random rows of magnitudes 1e-3 to 1e3; every eighth row is special."""
    x = random(t, n, dtype=torch.float32, seed=seed) * torch.logspace(-3, 3, t, device="cuda")[:, None]
    x = x.to(dtype)
    x[1::8] = -0.0
    x[2::8] *= torch.finfo(dtype).smallest_normal
    x[3::8, n // 2] = torch.nan
    x[4::8, n - 1] = -torch.inf
    x[5::8, 0] = torch.finfo(dtype).max
    x[6::8] = 2.5
    x[7::8] = torch.finfo(dtype).smallest_subnormal if hasattr(torch.finfo(dtype), "smallest_subnormal") else 0
    return x


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.uint8)


def dirty_memory(count: int) -> None:
    """Fills the memory that the next allocations of this size get: neither zeros nor an earlier result."""
    for size in (count, 4 * count):
        torch.full((max(size, 1),), 0x5A, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_every_row_length_gives_the_codes_of_the_reference(name: str, dtype: torch.dtype) -> None:
    op = EVERY[name]
    for n in SIZES + LONG_SIZES:
        if name in PAIRS and n % 2:
            continue
        for t in (1, 3, 257) if n <= 8200 else (9,):
            x = odd_rows(t, n, dtype)
            want = by_reference(op, x)
            dirty_memory(x.numel())
            assert_same_bits(op(x), want, f"{t}x{n}")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("t", [740, 4096])
def test_many_rows(name: str, t: int) -> None:
    for n in (64, 1024, 1025, 1152, 2048, 4096):
        if name in PAIRS and n % 2:
            continue
        x = odd_rows(t, n, torch.bfloat16)
        assert_same_bits(EVERY[name](x), by_reference(EVERY[name], x), f"{t}x{n}")


@pytest.mark.parametrize("first", [0, 1], ids=["whole packs", "one by one"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_quotient_is_the_true_one(dtype: torch.dtype, first: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    exponents = torch.randint(-140, 120, (512, 1), generator=generator, device="cuda")
    scale = (torch.rand(512, 1, generator=generator, device="cuda") + 1).ldexp(exponents)
    scale[:4, 0] = torch.tensor([torch.inf, torch.nan, 0.0, -1.0])
    scale[4:40, 0] = (2 - 2**-23) * torch.arange(-18, 18).exp2()  # the significand of all ones is the hardest
    if dtype == torch.float32:
        # Next to the values where a code changes: ties of FP8, times the scale, and their neighbours.
        code = torch.arange(0, 126, dtype=torch.uint8, device="cuda").view(F8).float()
        ties = torch.cat([(code[1:] + code[:-1]) / 2, code])
        x = (ties * scale).view(torch.int32)[:, :, None] + torch.arange(-8, 8, device="cuda", dtype=torch.int32)
        x = x.flatten(1).view(torch.float32).contiguous()
    else:
        x = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).repeat(512, 1)
    x = x[:, first:]
    got, _ = kestrel_quant.fp8_quant(x, scale)
    want, _ = by_reference(kestrel_quant.fp8_quant, x, scale)
    got_nan, want_nan = got.float().isnan(), want.float().isnan()
    assert torch.equal(got_nan, want_nan)
    assert torch.equal(bits(got)[~got_nan], bits(want)[~want_nan])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantised_values_are_those_of_the_reference(dtype: torch.dtype) -> None:
    for n in (1, 2, 7, 8, 66, 128, 300, 1024, 1152, 2048, 8200):
        for t in (1, 3, 257, 4096) if n == 2048 else (1, 3, 257):
            x = random(t, n, dtype=torch.float32) * torch.logspace(-3, 3, t, device="cuda")[:, None]
            for options in ({}, {"granularity": "tensor"}, {"granularity": "group", "group_size": 48}):
                options = {**options, "column_major_scales": True} if "group_size" in options else options
                q, scale = kestrel_quant.fp8_quant(x, **options)
                assert_dequantised(kestrel_quant.fp8_dequant, q, scale, dtype, group_size=48)
            for granularity in ("row", "tensor"):
                q, scale = kestrel_quant.int8_quant(x, granularity=granularity)
                assert_dequantised(kestrel_quant.int8_dequant, q, scale, dtype)
            for group in (1, 7, 32, 128, 3000) if n % 2 == 0 else ():
                q, scale = kestrel_quant.int4_quant(x, group_size=group)
                assert_dequantised(kestrel_quant.int4_dequant, q, scale, dtype, group_size=group)


def assert_dequantised(
    op: Callable[..., torch.Tensor], q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, **options: int
) -> None:
    want = by_reference(op, q, scale, dtype=dtype, **options)
    what = f"{tuple(q.shape)}, scale {tuple(scale.shape)} {options}"
    dirty_memory(want.numel())
    assert_same_bits(op(q, scale, dtype=dtype, **options), want, what)
    flat, assert_intact = canary((want.numel() + 3,), dtype, "cuda")
    out = flat[3:].view(want.shape)  # not aligned to a pack
    assert op(q, scale, dtype=dtype, out=out, **options) is out
    assert_same_bits(out, want, what)
    assert bool(flat[:3].isnan().all()), what
    assert_intact()


def test_every_code_dequantises_to_its_value() -> None:
    q = torch.arange(256, device="cuda", dtype=torch.uint8).repeat(3, 2)
    for scale in (torch.tensor([0.37]), torch.tensor([[1e-30], [3.0], [1e30]])):
        scale = scale.cuda()
        for code, op in ((F8, kestrel_quant.fp8_dequant), (torch.int8, kestrel_quant.int8_dequant)):
            for part in (q, q[:, 1:500]):
                got = op(part.view(code), scale, dtype=torch.float32)
                want = by_reference(op, part.view(code), scale, dtype=torch.float32)
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    scale = random(3, 8, dtype=torch.float32)
    want = by_reference(kestrel_quant.int4_dequant, q, scale, group_size=128, dtype=torch.float32)
    assert torch.equal(kestrel_quant.int4_dequant(q, scale, group_size=128, dtype=torch.float32), want)


@pytest.mark.parametrize("name", EVERY)
def test_no_rows(name: str) -> None:
    for n in (2, 1024):
        x = random(0, n)
        assert_same_bits(EVERY[name](x), by_reference(EVERY[name], x), f"0x{n}")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda wide: wide[::2, 8:1160],
    "columns of a wider buffer": lambda wide: wide[:, 16:2032],
    "columns that start off a pack": lambda wide: wide[:, 3:1031],
    "one row for all": lambda wide: wide[:1, :1024].expand(33, 1024),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", EVERY)
def test_row_strides_and_alignment_are_free(name: str, view: str) -> None:
    for dtype in FLOATS:
        wide = odd_rows(40, 2060, dtype)
        before, x = wide.clone(), VIEWS[view](wide)
        assert_same_bits(EVERY[name](x), EVERY[name](x.contiguous()), str(dtype))
        assert torch.equal(bits(wide.view(torch.uint8)), bits(before.view(torch.uint8)))


def test_codes_with_free_row_strides_dequantise_alike() -> None:
    wide = torch.randint(0, 120, (40, 2060), device="cuda", dtype=torch.uint8)
    for low, high in ((16, 1040), (3, 1027)):
        part, scale = wide[::2, low:high], torch.rand(40, 1, device="cuda")[::2]
        for code, op in ((F8, kestrel_quant.fp8_dequant), (torch.int8, kestrel_quant.int8_dequant)):
            assert torch.equal(op(part.view(code), scale), op(part.contiguous().view(code), scale.clone()))
        scale = torch.rand(16, 40, device="cuda").t()[::2]
        assert torch.equal(
            kestrel_quant.int4_dequant(part, scale), kestrel_quant.int4_dequant(part.contiguous(), scale.contiguous())
        )


def test_nothing_is_written_around_codes_and_scales() -> None:
    for t, n in ((5, 7), (5, 66), (33, 1024), (9, 2048), (3, 40000), (2, 131074)):
        x = odd_rows(t, n, torch.bfloat16)
        groups = -(-n // 128)
        cases = [
            ("row", (t, 1), False, kestrel_quant.fp8_quant(x)),
            ("tensor", (1,), False, kestrel_quant.fp8_quant(x, granularity="tensor")),
            ("group", (t, groups), False, kestrel_quant.fp8_quant(x, granularity="group")),
            ("group", (groups, -(-t // 4) * 4), True, kestrel_quant.fp8_quant(x, granularity="group")),
        ]
        for granularity, shape, column_major, (want, want_scale) in cases:
            q, q_intact = canary((t, n), F8, "cuda")
            scale, scale_intact = canary(shape, torch.float32, "cuda")
            maxima, maxima_intact = canary((64,), torch.float32, "cuda")
            kernels.fp8_quant(q, scale, maxima, x, granularity, 128, None, column_major)
            assert torch.equal(bits(q), bits(want))
            if column_major:
                assert not scale[:, t:].any()
                scale = scale[:, :t].t()
            assert torch.equal(scale, want_scale)
            for intact in (q_intact, scale_intact, maxima_intact):
                intact()
        if n % 2 == 0:
            q, q_intact = canary((t, n // 2), torch.uint8, "cuda")
            scale, scale_intact = canary((t, groups), torch.float32, "cuda")
            kernels.int4_quant(q, scale, x, 128)
            assert_same_bits((q, scale), kestrel_quant.int4_quant(x))
            q_intact()
            scale_intact()


def test_scratch_memory_of_a_tensor_may_hold_anything() -> None:
    x = random(300, 4096)
    want, want_scale = kestrel_quant.fp8_quant(x, granularity="tensor")
    for garbage in (0.0, torch.nan, torch.inf, 1e30):
        q, scale = torch.empty_like(want), torch.empty_like(want_scale)
        kernels.fp8_quant(q, scale, partial_amax(x).fill_(garbage), x, "tensor", 128, None, False)
        assert_same_bits((q, scale), (want, want_scale))


@pytest.mark.parametrize("name", [name for name in EVERY if "tensor" not in name and "scale per row" not in name])
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    for n in (64, 1024, 2048, 8192):
        x = odd_rows(3000, n, torch.bfloat16)
        q, scale = EVERY[name](x)
        again, again_scale = EVERY[name](x)
        assert_same_bits((again, again_scale), (q, scale), f"second run, {n} columns")
        for row in (0, 3, 4, 1501, 2999):
            one, one_scale = EVERY[name](x[row : row + 1])
            assert torch.equal(bits(one)[0], bits(q)[row]), f"row {row} of {n} columns"
            assert torch.equal(one_scale.view(-1), scale[row] if scale.ndim == 2 else scale)


@large_allocation(gib=11)
def test_a_row_stride_past_two_to_the_31() -> None:
    n, stride = 2048, 2**31 + 64
    buffer = torch.empty(stride + n, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((2, n), (stride, 1)).copy_(random(2, n))
    for name, op in EVERY.items():
        assert_same_bits(op(x), op(x.contiguous()), name)
    codes = torch.empty(stride + n, dtype=torch.uint8, device="cuda").as_strided((2, n), (stride, 1))
    q, scale = kestrel_quant.fp8_quant(x)
    codes.copy_(bits(q))
    out = torch.empty(stride + n, dtype=torch.bfloat16, device="cuda").as_strided((2, n), (stride, 1))
    assert torch.equal(kestrel_quant.fp8_dequant(codes.view(F8), scale, out=out), kestrel_quant.fp8_dequant(q, scale))


@large_allocation(gib=9)
@pytest.mark.parametrize("n", [2048, 2050])
def test_more_than_two_to_the_31_elements(n: int) -> None:
    rows = 2**20 + 8
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-2:] = random(2, n)
    x[:2] = random(2, n, seed=1)
    for name in ("fp8 rows", "fp8 tensor", "fp8 groups of 128", "fp8 one scale", "int4 groups of 128"):
        q, scale = EVERY[name](x)
        if name == "fp8 tensor":
            want, want_scale = EVERY[name](torch.cat((x[:2], x[-2:])))
            assert torch.equal(scale, want_scale)
            want = want[2:]
        else:
            want, want_scale = EVERY[name](x[-2:])
            assert torch.equal(scale[-2:] if scale.ndim == 2 else scale, want_scale)
        assert torch.equal(bits(q)[-2:], bits(want))
        assert not bits(q)[1000:-2].any()
        del q, scale
    del x
    codes = torch.zeros(rows, n, dtype=torch.int8, device="cuda")
    codes[-2:] = 3
    back = kestrel_quant.int8_dequant(codes, torch.ones(1, device="cuda"))
    assert bool((back[-2:] == 3).all())
    assert not back[-1000:-2].any()


@pytest.mark.parametrize("name", EVERY)
def test_a_graph_replays_with_new_contents(name: str) -> None:
    for n in (1024, 4096):
        want = EVERY[name](random(300, n, seed=5))
        assert_same_bits(graph_replay(EVERY[name], [random(300, n)], [random(300, n, seed=5)]), want)


@pytest.mark.parametrize("name", EVERY)
def test_runs_on_the_current_stream(name: str) -> None:
    x = random(740, 2048)
    want, stream = EVERY[name](x), torch.cuda.Stream()
    scratch = torch.zeros(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        got = EVERY[name](torch.zeros_like(x).copy_(x))
    stream.synchronize()
    assert_same_bits(got, want)


@pytest.mark.parametrize("priorities", [(0, 0, 0, 0), (0, -5, -1, -3), (-2, 0, -5, 0)])
def test_tensors_on_several_streams_and_in_graphs_do_not_interfere(priorities: tuple[int, ...]) -> None:
    """Grids with a barrier, enough to fill the GPU several times, beside each other and another kernel. Each needs all
    of its blocks resident, and streams of a higher priority start in between."""
    inputs = [random(t, 2048, seed=i) for i, t in enumerate((64, 1500, 4096, 9000))]
    wants = [kestrel_quant.fp8_quant(x, granularity="tensor") for x in inputs]
    streams = [torch.cuda.Stream(priority=priority) for priority in priorities]
    graphs, results = [], []
    torch.cuda.synchronize()
    for x, stream in zip(inputs, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append([kestrel_quant.fp8_quant(x, granularity="tensor") for _ in range(8)])
        graphs.append(graph)
    busy, other = torch.cuda.Stream(), torch.zeros(1 << 26, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(busy):
            other.add_(1)
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = []
        for x, stream in zip(reversed(inputs), streams, strict=True):
            with torch.cuda.stream(stream):
                eager.append(kestrel_quant.fp8_quant(x, granularity="tensor"))
        torch.cuda.synchronize()
        for want, got, once in zip(wants, results, reversed(eager), strict=True):
            assert_same_bits(once, want)
            for each in got:
                assert_same_bits(each, want)


def test_a_context_with_a_part_of_the_gpu_gets_a_smaller_grid() -> None:
    """No device attribute says that a green context owns fewer SMs; a cooperative grid for the whole GPU fails."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not green_contexts.SUPPORTED:
        pytest.skip("this torch makes no green contexts")
    inputs = [random(t, 2048, seed=t) for t in (300, 9000, 30001)]
    wants = [kestrel_quant.fp8_quant(x, granularity="tensor") for x in inputs]
    torch.cuda.synchronize()
    context = green_contexts.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    context.set_context()
    try:
        with backend("kernel"):
            got = [kestrel_quant.fp8_quant(x, granularity="tensor") for x in inputs]
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    for each, want in zip(got, wants, strict=True):
        assert_same_bits(each, want)


@pytest.mark.parametrize(
    ("t", "n", "options"),
    [
        (4, 1024, {}),
        (64, 2048, {}),
        (64, 2048, {"granularity": "group"}),
        (4, 1024, {"granularity": "tensor"}),
        (200, 2048, {"granularity": "tensor"}),
        (7, 130, {}),
    ],
)
def test_values_and_codes_written_by_the_launch_just_before_are_read(t: int, n: int, options: dict[str, Any]) -> None:
    """Quantising and dequantising, each launch right after the one that writes its input."""
    codes = torch.randint(0, 127, (5, t, n), device="cuda", dtype=torch.uint8)
    scale, x = torch.ones(1, device="cuda"), torch.empty(t, n, dtype=torch.bfloat16, device="cuda")
    back_to = torch.empty_like(x)

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        kestrel_quant.fp8_dequant(codes[i].view(F8), scale, out=x)
        between()
        fp8 = kestrel_quant.fp8_quant(x, **options)
        between()
        kestrel_quant.fp8_dequant(*fp8, out=back_to)
        between()
        int8 = kestrel_quant.int8_quant(back_to)
        between()
        back = kestrel_quant.int8_dequant(*int8)
        between()
        int4 = kestrel_quant.int4_quant(back)
        between()
        return (*fp8, *int8, *int4, kestrel_quant.int4_dequant(*int4))

    assert_waits_for_the_launch_before(chain, contents=5)


def test_scales_and_bounds_written_by_the_launch_just_before_are_read() -> None:
    levels = random(5, 8, 64, seed=3).abs() * torch.logspace(-2, 2, 5, device="cuda")[:, None, None]
    levels, x = levels.bfloat16(), random(32, 2048)
    small = torch.randint(0, 120, (8, 64), device="cuda", dtype=torch.uint8).view(F8)

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        _, scale = kestrel_quant.fp8_quant(levels[i], granularity="tensor")
        between()
        fixed, _ = kestrel_quant.fp8_quant(x, scale)
        _, scale = kestrel_quant.fp8_quant(levels[i], granularity="tensor")
        between()
        bounded = kestrel_quant.fp8_quant(x, scale_ub=scale)
        _, scale = kestrel_quant.fp8_quant(levels[i], granularity="tensor")
        between()
        return (fixed, *bounded, kestrel_quant.fp8_dequant(small, scale, dtype=torch.float32))

    assert_waits_for_the_launch_before(chain, contents=5)


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 tensor", "fp8 columns of scales", "int8 rows", "int4 groups of 32"])
def test_compiled_without_a_graph_break(name: str) -> None:
    x = random(16, 2048)
    with backend("auto"):
        got = torch.compile(EVERY[name], fullgraph=True)(x)
    assert_same_bits(got, EVERY[name](x))


def random_case(rng: random_numbers.Random) -> RandomCase:
    """Any op, with any shape, strides, dtype and option, of values of any magnitude."""
    dtype, t = rng.choice(FLOATS), rng.choice((1, 2, 3, 17, 64, 129, 300))
    n = rng.choice((rng.randint(1, 40), rng.randint(1, 600), 8 * rng.randint(1, 600)))
    wide, start = n + rng.choice((0, 0, 8, rng.randint(1, 9))), 0
    if wide > n:
        start = rng.choice((0, wide - n))
    x = torch.randn(t * rng.choice((1, 2)), wide, device="cuda") * 10.0 ** rng.randint(-6, 4)
    x = (x * torch.logspace(-rng.randint(0, 3), 1, x.shape[0], device="cuda")[:, None]).to(dtype)
    if rng.random() < 0.3:
        x[rng.randrange(x.shape[0]), rng.randrange(wide)] = rng.choice((torch.nan, torch.inf, -torch.inf, 0.0))
    x = x[:: x.shape[0] // t, start : start + n]
    group = rng.choice((1, 2, 7, 32, 48, 128, 512, rng.randint(1, n), 10**6))
    op = rng.choice(("fp8_quant", "int8_quant", "int4_quant", "fp8_dequant", "int8_dequant", "int4_dequant"))
    if op.startswith("int4") and n % 2:
        x = x[:, 1:] if n > 1 else torch.cat((x, x), 1)
    granularity = rng.choice(("row", "tensor", "group") if op.startswith("fp8") else ("row", "tensor"))
    if op == "fp8_quant":
        if rng.random() < 0.25:
            scale = torch.rand((1,) if rng.random() < 0.5 else (t, 1), device="cuda") + 1e-3
            return RandomCase(kestrel_quant.fp8_quant, (x, scale))
        bound = torch.rand(1, device="cuda") if rng.random() < 0.3 else None
        kwargs = {"granularity": granularity, "group_size": group, "scale_ub": bound}
        kwargs["column_major_scales"] = granularity == "group" and rng.random() < 0.5
        return RandomCase(kestrel_quant.fp8_quant, (x,), kwargs)
    if op == "int8_quant":
        return RandomCase(kestrel_quant.int8_quant, (x,), {"granularity": granularity})
    if op == "int4_quant":
        return RandomCase(kestrel_quant.int4_quant, (x,), {"group_size": group})
    out = rng.choice(FLOATS)
    if op == "fp8_dequant":
        q, scale = by_reference(kestrel_quant.fp8_quant, x, granularity=granularity, group_size=group)
        q = torch.where(q.float().isnan(), torch.zeros_like(q, dtype=torch.float32), q.float()).to(F8)
        return RandomCase(kestrel_quant.fp8_dequant, (q, scale), {"group_size": group, "dtype": out})
    if op == "int8_dequant":
        q, scale = by_reference(kestrel_quant.int8_quant, x, granularity=granularity)
        return RandomCase(kestrel_quant.int8_dequant, (q, scale), {"dtype": out})
    q, scale = by_reference(kestrel_quant.int4_quant, x, group_size=group)
    return RandomCase(kestrel_quant.int4_dequant, (q, scale), {"group_size": group, "dtype": out})


def same_up_to_nan_payload(got: Any, want: Any, what: str) -> None:
    assert_same_bits(got, want, what, any_nan=True)


def test_random_calls_equal_the_reference() -> None:
    def draw(rng: random_numbers.Random) -> RandomCase:
        case = random_case(rng)
        case.compare = same_up_to_nan_payload
        return case

    compare_at_random(draw, seconds=10, least=200)
