"""The decode kernels over caches of INT8, INT4 and e5m2 codes against float64, and what every kernel guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bounds import ROUNDING
from decode_oracle import KERNEL, LENGTHS, Call, check, exact, excess, made, wanted
from decode_oracle import same_bits as same

from kestrel_attention import decode, merge_attention_states
from kestrel_attention.arguments import Cached, Codes, Scores
from kestrel_attention.plan import plan_decode
from kestrel_runtime import KestrelFallbackWarning, UnsupportedError, backend
from kestrel_runtime.testing import assert_waits_for_the_launch_before, graph_replay, large_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

KINDS = ("int8", "int4", "e5m2")

PAGES = [("int8", page) for page in (1, 8, 16, 24, 64, 256)] + [("int4", 64)] + [("e5m2", page) for page in (1, 24)]
HEADS = [(4, 4, 64), (32, 32, 64), (8, 2, 128), (20, 1, 128)]


@pytest.mark.parametrize(("kind", "page"), PAGES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_decoding_over_pages(heads, kv_heads, size, kind, page):
    check(made(kind, heads, kv_heads, size, page))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128)])
def test_fp16_queries(heads, kv_heads, size, kind):
    check(made(kind, heads, kv_heads, size, 16, queries=2, dtype=torch.float16), causal=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_int8_heads_of_256(queries):
    check(made("int8", 16, 2, 256, 16, (0, 1, 54, 300, 2000), queries), causal=True)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("kind", "size"), [("int8", 80), ("int8", 112), ("int8", 192), ("e5m2", 96), ("e5m2", 192), ("e5m2", 256)]
)
def test_a_case_outside_the_table_is_compiled_on_first_use(kind, size, queries):
    call = made(kind, 16, 2, size, 16, (0, 1, 54, 300, 2000), queries)
    caches = dict(call.caches)
    k_cache, v_cache = caches.pop("k_cache"), caches.pop("v_cache")
    codes = Codes(**(dict.fromkeys(Codes._fields) | caches))
    given = Cached(call.lengths, call.table, codes, Scores(None, True, -1, -1, 0.0, 0, None), 0)
    plan = plan_decode(decode.problem_of(call.q, k_cache, v_cache, given))
    try:
        decode._binary.kernel(plan.variant, call.q.device)
    except UnsupportedError as error:
        if "[jit]" in str(error):
            pytest.skip(str(error))
        raise
    check(call, causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_an_unfinished_page_is_read_from_its_tail(size, dtype):
    lengths = (5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 62, 63, 64, 65, 79, 80, 81, 96, 97, 127, 128, 129, 190)
    check(made("int4", 8, 2, size, 64, lengths, 2, dtype), causal=True)


@pytest.mark.parametrize("splits", [0, 3])
def test_windows_that_start_anywhere_in_a_page(splits):
    lengths = (63, 64, 65, 127, 191, 192, 193, 1023, 1024, 1025, 1087)
    check(made("int4", 8, 2, 64, 64, lengths, 2), window_size=(100, 0), num_splits=splits)


def test_int4_keys_as_large_as_the_format_holds():
    call = made("int4", 8, 2, 64, 64, (64, 200))
    call.caches["k_scale"][:, :, 3], call.caches["k_zero"][:, :, 3] = 65504.0, 7.5
    call.q *= 1e-4
    check(call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("length", [1000, 5000])
def test_every_key_of_an_int4_cache_counts(length, size, dtype):
    """The bounds that the result meets are exceeded as soon as one row is another: they catch one wrong key."""
    call = made("int4", 8, 2, size, 64, (length,), dtype=dtype)
    check(call)
    call.q *= 0.25  # weights near 1 / length
    check(call)
    (out, lse), held = call.run(), call.decoded(0, rounded=True)
    for j in range(0, length - 1, length // 10):
        for name in ("keys", "values"):
            rows = getattr(held, name).clone()
            rows[j] = rows[j + 1]
            want = exact(call.q[0], replace(held, **{name: rows}), {}, 0)
            assert max(excess((out[0], lse[0]), want, {})) > 1, f"{name} of position {j}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"window_size": (0, 0)},
        {"window_size": (7, 2)},
        {"window_size": (100, -1), "causal": True},
        {"window_size": (-1, 3)},
        {"window_size": (900, 70)},
        {"causal": True, "softcap": 2.0},
        {"softmax_scale": -0.2, "softcap": 30.0},
        {"softmax_scale": 0.2, "softcap": 1e6},
        {"softcap": 1e-39},
        {"causal": True, "prefix_len": 20},
        {"window_size": (5, 0), "prefix_len": 33},
    ],
)
def test_what_shapes_the_scores(how, queries, kind):
    check(made(kind, 8, 2, 64, 8, queries=queries), **how)


@pytest.mark.parametrize("splits", [2, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [-1, 1999])
def test_any_number_of_splits(splits, kind, window):
    check(made(kind, 8, 2, 64, 16, (0, 1, 54, 300, -1, 5000, 17)), num_splits=splits, window_size=(window, 0))


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in KINDS for size in (64, 128)] + [("int8", 256)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("splits", [0, 64])
def test_lengths_at_the_boundaries_of_splits(splits, queries, kind, size):
    """Of plan.split_rule, and of its numbers of splits. Most of 64 splits of the shorter sequences have no key."""
    lengths = (16, 64, 65, 192, 193, 272, 273, 512, 513, 768, 769, 1024, 1025, 2048, 2049)
    check(made(kind, 8, 2, size, 16, lengths, queries), causal=True, num_splits=splits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [0, 1])
def test_long_sequences(splits, kind):
    check(made(kind, 32, 4, 128, 16, (20000, 3, 9001)), num_splits=splits)


LONG = [("int8", 8, 64), ("int8", 16, 64), ("int8", 8, 128), ("int8", 16, 128), ("int8", 16, 256)]
LONG += [("int4", 8, 64), ("int4", 16, 64), ("int4", 8, 128), ("int4", 16, 128)]


@pytest.mark.parametrize("mean", ["zero", "positive", "negative"])
@pytest.mark.parametrize(("kind", "heads", "size"), LONG)
def test_a_split_of_32768_keys_of_equal_weight_keeps_the_small_mean_of_its_values(kind, heads, size, mean):
    """Offsets of codes, added to sums over values, would outweigh the mean: 128 in units of codes, which is near 0.4.

    The first keys have scales of values half as large again, so that weights are no powers of two.
    """
    length = 32768
    call = made(kind, heads, 2, size, 64, (length,), dtype=torch.float16)
    _, block, slot = call.places(0)
    of_scales = torch.full((length, 2), 0.0171, device="cuda")
    of_scales[:256] *= 1.5
    call.caches["v_scale"][block, slot] = of_scales.to(call.caches["v_scale"].dtype)
    if kind == "int8":
        low, high = {"zero": (-127, 128), "positive": (64, 128), "negative": (-127, -63)}[mean]
        call.caches["v_cache"].random_(low, high)
    else:
        call.caches["v_zero"][block, slot] = {"zero": 7.5, "positive": -24.0, "negative": 40.0}[mean]
    call.q.zero_()
    want = call.decoded(0, rounded=True).values.mean(0).repeat_interleave(heads // 2, dim=0)
    out, _ = call.run(num_splits=1)
    error = float((out[0, 0].double() - want).square().mean().sqrt() / want.square().mean().sqrt())
    assert error < 2.0**-10, f"{error:.1e} of the output; its rounding to f16 is 2^-11 at most"


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("value_size", [2.0**-14, 2.0**-6, 2.0**10])
def test_scales_of_values_of_any_size(kind, value_size):
    check(made(kind, 8, 2, 64, 16, (0, 1, 54, 700), value_size=value_size))


@pytest.mark.parametrize("value_size", [1e-25, 1e25])
def test_int8_scales_far_from_one(value_size):
    check(made("int8", 8, 2, 64, 16, (0, 1, 54, 700), value_size=value_size), shift=math.log2(value_size))


@pytest.mark.parametrize("value_size", [0.0, 1e-42, 1e-36, 1e-33, 1e-29])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_int8_scales_of_values_below_2_to_the_minus_100_cost_2_to_the_minus_117_for_each_key(size, value_size):
    """A weight times its scale times 2^100 is the sum of two f16, 2^-25 from it at most; codes + 128 are up to 255."""
    call = made("int8", 8, 2, size, 16, (0, 1, 54, 700), value_size=value_size)
    call.caches["v_scale"][::2] *= -1
    out, lse = call.run()
    with backend("reference"):
        want, want_lse = call.run()
    error = call.lengths.view(-1, 1, 1, 1) * 2.0**-117 + ROUNDING[out.dtype] * want.float().abs()
    assert bool(((out.float() - want.float()).abs() <= error).all())
    # Each score has an error of KERNEL.score of its terms, up to 64, and the logarithm of a scale, up to 100, is added.
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2 * KERNEL.score * 64 + 100 * KERNEL.score)
    assert value_size > 0 or not out.any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(2, 2, 1), (6, 2, 1), (8, 2, 1), (4, 2, 2), (2, 2, 4)])
@pytest.mark.parametrize("size", [64, 128])
def test_up_to_four_rows_of_a_kv_head(size, heads, kv_heads, queries, dtype, kind):
    check(made(kind, heads, kv_heads, size, 16, (0, 1, 54, 300, 2000), queries, dtype), causal=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rise", [7, 9])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("kind", "step"), [("int8", 128), ("int4", 256), ("e5m2", 128)])
def test_scores_that_rise_along_the_sequence(kind, step, queries, rise, masked):
    """By less and by more per step than the weights may grow before the sums are rescaled.

    masked: the first steps of all warps but one see no key.
    """
    call = made(kind, 8, 2, 64, 16, (6 * step, 3 * step), queries)
    call.q[..., :32] = 0.25  # a score is about the mean of so many dims
    call.q[..., 32:] /= 64
    for b in range(len(call.lengths)):
        _, block, slot = call.places(b)
        position = torch.arange(len(block), device="cuda")
        ramp = position * (rise * math.log(2) / step)
        if kind == "e5m2":
            k = call.decoded(b, rounded=False).keys
            k[..., :32] += (ramp - ramp.mean())[:, None, None]
            call.caches["k_cache"].view(torch.uint8)[block, slot] = k.float().to(torch.float8_e5m2).view(torch.uint8)
        elif kind == "int8":
            call.caches["k_cache"][block, slot, :, :32] = 100
            call.caches["k_scale"][block, slot] = (1 + ramp)[:, None] / 100
        else:  # zeros fall from page to page
            zeros = 7.5 - 4 * (ramp - ramp.mean())[::64]
            call.caches["k_scale"][block[::64], :, :32] = 0.25
            call.caches["k_zero"][block[::64], :, :32] = zeros.half()[:, None, None]
    check(call, num_splits=1, **({"window_size": (300, 0), "prefix_len": 1} if masked else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_any_magnitude(kind):
    call = made(kind, 8, 8, 64, 1)
    call.q *= 10.0 ** torch.arange(-8, 8, 2, device="cuda")[:, None]
    check(call, softmax_scale=1e-7)


def assert_as_accurate_as_attention_over_dequantised_keys(call: Call) -> None:
    """Root mean square errors against float64, PyTorch's in the same dtype; here the queries are exact."""
    dtype, (out, _) = call.q.dtype, call.run()
    mine, its = 0.0, 0.0
    for b in range(len(call.lengths)):
        held = call.decoded(b, rounded=False)
        want = wanted(call, b, {}, rounded=False)[0]
        rows = (x.to(dtype).transpose(0, 1)[None] for x in (call.q[b], held.keys, held.values))
        composed = torch.nn.functional.scaled_dot_product_attention(*rows, enable_gqa=True)[0].transpose(0, 1)
        mine += float((out[b].double() - want).square().sum())
        its += float((composed.double() - want).square().sum())
    assert mine <= 1.21 * its, f"{(mine / its) ** 0.5:.2f} times PyTorch's error in {dtype}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_is_as_accurate_as_attention_over_dequantised_keys(dtype):
    assert_as_accurate_as_attention_over_dequantised_keys(made("int4", 32, 8, 128, 64, (2000, 3000), dtype=dtype))


@pytest.mark.parametrize("power", [4, 8, 12, 16])
@pytest.mark.parametrize("size", [64, 128])
def test_int4_is_as_accurate_with_small_channel_scales(power, size):
    """Scales of 2^-20 to 2^-5.7, from 2^-14 down subnormal; larger queries give the usual scores."""
    call = made("int4", 32, 8, size, 64, (1984, 3008))  # whole pages
    call.caches["k_scale"] *= 2.0**-power
    call.q *= 2.0**power
    assert_as_accurate_as_attention_over_dequantised_keys(call)
    check(call)


@pytest.mark.parametrize("size", [64, 128])
def test_int4_pages_of_small_and_large_scales_and_tails_mix(size):
    call = made("int4", 8, 2, size, 64, (1, 54, 300, 1000, 64, 17, 640))
    call.caches["k_scale"][::2] *= 2.0**-10
    call.caches["k_scale"][1::4, 1] *= 2.0**-10  # of one head
    call.q *= 2.0**3
    call.caches["k_tail"] *= 2.0**-4
    check(call)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_in_a_scale_stays_with_its_sequence_and_head(kind, name):
    call = made(kind, 8, 2, 64, 16)
    want = call.run()
    at = (call.table[3, 0], 0, 1) if call.caches[name].shape[1:] != (2, 64) else (call.table[3, 0], 1, 5)
    call.caches[name][at] = math.nan
    got = call.run()
    touched = torch.zeros(len(LENGTHS), 1, 8, dtype=torch.bool, device="cuda")
    touched[3, 0, 4:] = True
    assert bool(got[0][touched].isnan().all())
    assert torch.equal(got[0][~touched], want[0][~touched])


def test_a_sequence_without_a_tail_is_padding():
    call = made("int4", 8, 2, 64, 64, (70, 70, 130))
    want = call.run()
    call.caches["seq_ids"][:2] = torch.tensor([-1, 5], dtype=torch.int32)
    out, lse = call.run()
    assert not bool(out[:2].any())
    assert bool((lse[:2] == -math.inf).all())
    assert same((out[2:], lse[2:]), (want[0][2:], want[1][2:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_without_a_table(kind):
    call = made(kind, 8, 2, 64, 64, (64, 20, 0))
    paged = call.run()
    first = call.table[:, 0].clamp(0, call.caches["k_cache"].shape[0] - 1).long()
    of_sequences = ("k_tail", "seq_ids")
    for name, x in call.caches.items():
        if name not in of_sequences:
            call.caches[name] = x.view(torch.uint8)[first].view(x.dtype)
    call.table = None
    assert same(call.run(), paged)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (8, 2, 128)])
@pytest.mark.parametrize("splits", [0, 1])
def test_a_sequence_does_not_depend_on_its_batch(splits, heads, kv_heads, size, kind):
    call = made(kind, heads, kv_heads, size, 16, (5000, 1, 700, 2100, 0, 64))
    out, lse = call.run(num_splits=splits)
    for b in range(len(call.lengths)):
        assert same(call.alone(b).run(num_splits=splits), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "size"), [(1, 64), (5, 64), (16, 128), (3, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_appending_writes_what_the_reference_writes(kind, queries, size, dtype):
    call = made(kind, 8, 2, size, 16, (0, 54, 62, -1, 300), queries, dtype, extra_keys=queries)
    k, v = (torch.randn(5, queries, 2, size, device="cuda").to(dtype) for _ in range(2))
    with backend("reference"):
        other = call.clone()
        other.run(k, v, causal=True)
    got = call.run(k, v, causal=True)
    assert same(tuple(call.caches.values()), tuple(other.caches.values()))
    call.lengths = torch.where(call.lengths >= 0, call.lengths + queries, call.lengths)
    assert same(call.run(causal=True), got)
    check(call, causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_keys_and_values_of_any_bits_are_coded_as_the_reference_codes_them(kind, dtype):
    """Zeros, infinities, NaN, the largest and the smallest numbers, and all magnitudes between."""
    lengths = (0, 50, 63, 64, 1000, 33, 48, 5)
    call = made(kind, 8, 2, 64, 64, lengths, 14, dtype, extra_keys=14)
    k, v = (torch.randint(-(2**15), 2**15, (8, 14, 2, 64), device="cuda").short().view(dtype) for _ in range(2))
    generator = torch.Generator("cuda").manual_seed(1)
    for x in (k, v):
        magnitude = 10.0 ** torch.randint(-30, 5, (8, 14, 2, 1), generator=generator, device="cuda")
        usual = (torch.randn(x.shape, generator=generator, device="cuda") * magnitude).to(dtype)
        x.copy_(torch.where(torch.rand((8, 14, 2, 1), generator=generator, device="cuda") < 0.8, usual, x))
        x[0, 1], x[1, 2, 0, 5], x[2, 3, 1, 7] = 0.0, math.inf, math.nan
        x[3, 4, 0], x[3, 5, 0, :2] = -math.inf, torch.tensor([math.inf, math.nan], device="cuda")
        x[4, 6], x[4, 7] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    given = {}
    if kind == "e5m2":
        given = {"k_scale": torch.tensor([0.37], device="cuda"), "v_scale": torch.tensor([1e-3, 3.0], device="cuda")}
    with backend("reference"):
        other = call.clone()
        other.run(k, v, **given)
    call.run(k, v, **given)
    for name, mine in call.caches.items():
        its = other.caches[name]
        if name in ("k_cache", "v_cache") and kind != "e5m2":
            assert torch.equal(mine, its), name
        else:  # one NaN is as good as another
            mine, its = mine.float(), its.float()
            torch.testing.assert_close(
                mine, its, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_a_page_are_not_written(kind):
    """Nor positions past the block table, of a length near 2^31. The keys that exist count."""
    call = made(kind, 8, 2, 64, 64, (60, 62, 127, 100), 4)
    for name, x in call.caches.items():
        if x.is_floating_point():
            call.caches[name] = torch.where(x.float().isnan(), 2.0**-6, x.float()).to(x.dtype)
    call.lengths[3] = 2**31 - 3
    call.table[1, 1:], call.table[2, 1:] = -1, 10**6
    k, v = (torch.randn(4, 4, 2, 64, device="cuda").bfloat16() for _ in range(2))
    with backend("reference"):
        other = call.clone()
        other.run(k, v)
    got = call.run(k, v)
    assert same(tuple(call.caches.values()), tuple(other.caches.values()))
    call.lengths += 4
    call.lengths[3] = 2**31 - 1
    assert same(call.run(), got)
    call.lengths[3] = call.table.shape[1] * 64  # as many keys as the table has pages for
    assert same(call.run(), got)
    check(call)


def test_a_cache_that_kernels_refuse_is_appended_to_once():
    call = made("int4", 8, 2, 64, 64, (63, 10), 2, extra_keys=2)
    shape = call.caches["k_scale"].shape
    shifted = torch.empty(call.caches["k_scale"].numel() + 1, dtype=torch.float16, device="cuda")[1:].view(shape)
    call.caches["k_scale"] = shifted.copy_(call.caches["k_scale"])
    k, v = (torch.randn(2, 2, 2, 64, device="cuda").bfloat16() for _ in range(2))
    other = call.clone()
    with backend("reference"):
        other.run(k, v)
    with backend("auto"), pytest.warns(KestrelFallbackWarning):
        call.run(k, v)
    assert same(tuple(call.caches.values()), tuple(other.caches.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [0, 4])
def test_a_replayed_graph_sees_new_contents(splits, kind):
    names = list(made(kind, 8, 2, 64, 16).caches)

    def given(seed: int) -> list[torch.Tensor]:
        call = made(kind, 8, 2, 64, 16, LENGTHS if seed == 1 else tuple(reversed(LENGTHS)), seed=seed)
        return [call.q, call.table, call.lengths, *call.caches.values()]

    def decode(q, table, lengths, *caches):
        return Call(kind, q, dict(zip(names, caches, strict=True)), table, lengths).run(num_splits=splits)

    fresh = given(2)
    assert same(graph_replay(decode, given(1), fresh), decode(*fresh))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_without_a_graph_break(kind):
    call = made(kind, 8, 2, 64, 16)
    with backend("auto"):
        got = torch.compile(lambda: call.run(causal=True), fullgraph=True)()
    assert same(got, call.run(causal=True))


@large_allocation(gib=6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_far_past_two_to_the_31_elements(kind):
    call = made(kind, 8, 2, 64, 64, (150, 64))
    want = call.run()
    for name in ("k_cache", "v_cache"):
        near = call.caches[name].view(torch.uint8)
        stride = 2**31 // (len(near) - 2) // 16 * 16 + 2**24
        base = torch.zeros(stride * (len(near) - 1) + near[0].numel(), dtype=torch.uint8, device="cuda")
        far = base.as_strided(near.shape, (stride, *near.stride()[1:]))
        far.copy_(near)
        call.caches[name] = far.view(call.caches[name].dtype)
    assert (len(near) - 1) * stride > 2**31
    assert same(call.run(), want)


def copied(x: torch.Tensor) -> torch.Tensor:
    """By a launch that lets the next one start early: merging with an empty part keeps the LSE's bits."""
    numbers = x.contiguous().view(-1).view(torch.float32)[None]
    rows = torch.zeros(numbers.shape[1], 1, 8, dtype=torch.bfloat16, device="cuda")
    merged = merge_attention_states(rows, numbers, rows, torch.full_like(numbers, -math.inf))[1]
    return merged.view(x.dtype).view(x.shape)


WRITTEN = [("int8", "k_scale"), ("int8", "v_scale")]
WRITTEN += [("int4", name) for name in ("k_scale", "k_zero", "v_scale", "v_zero", "k_tail", "seq_ids")]


@pytest.mark.parametrize(("kind", "name"), WRITTEN)
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(kind, name):
    calls = [made(kind, 8, 2, 64, 16, (40, 333, 70, 90), seed=seed) for seed in range(5)]
    for call in calls:  # what one seed leaves NaN another reads
        for which, x in call.caches.items():
            if x.is_floating_point():
                call.caches[which] = torch.where(x.isnan(), torch.rand_like(x), x)
    if name == "seq_ids":
        for i, call in enumerate(calls):
            call.caches[name] = (calls[0].caches[name] + i) % 6
    sources = [call.caches[name] for call in calls]
    assert all(same((copied(x),), (x,)) for x in sources)

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        source = copied(sources[i])
        between()
        return replace(calls[0], caches=calls[0].caches | {name: source}).run()

    assert_waits_for_the_launch_before(chain, len(sources))


APPENDED = [(kind, name) for kind in KINDS for name in ("k", "v", "cache_seqlens", "block_table")]


@pytest.mark.parametrize(("kind", "name"), [*APPENDED, ("int4", "k_tail"), ("int4", "seq_ids")])
def test_what_an_append_reads_may_be_written_by_the_launch_just_before(kind, name):
    """Lengths that end with their page or before: an append that is repeated writes the same again."""
    lengths = ((60, 12, 124, 0), (12, 60, 0, 124))
    call = made(kind, 8, 2, 64, 64, lengths[0], 4, extra_keys=200)
    for which, x in call.caches.items():
        if x.is_floating_point():
            call.caches[which] = torch.where(x.float().isnan(), torch.ones_like(x.float()), x.float()).to(x.dtype)
    call.table = torch.randperm(len(call.caches["k_cache"]), device="cuda")[:16].view(4, 4).int()
    new = torch.randn(2, 2, 4, 4, 2, 64, device="cuda").bfloat16()
    inputs = {
        "k": list(new[0]),
        "v": list(new[1]),
        "cache_seqlens": [torch.tensor(x, device="cuda").int() for x in lengths],
        "block_table": [call.table, call.table.flip(0).contiguous()],
    }
    if kind == "int4":
        inputs["k_tail"] = [call.caches["k_tail"], torch.randn_like(call.caches["k_tail"])]
        inputs["seq_ids"] = [call.caches["seq_ids"], call.caches["seq_ids"].flip(0).contiguous()]
    blank = {which: x.clone() for which, x in call.caches.items()}

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        for which, x in blank.items():
            call.caches[which].copy_(x)
        now = {which: x[0] for which, x in inputs.items()}
        now[name] = copied(inputs[name][i])
        between()
        caches = call.caches | {which: now[which] for which in ("k_tail", "seq_ids") if which in now}
        here = replace(call, caches=caches, table=now["block_table"], lengths=now["cache_seqlens"])
        return *here.run(now["k"], now["v"]), *(x.clone() for x in caches.values())

    assert_waits_for_the_launch_before(chain)
