"""The kernels of routed experts against float64, over routings, sizes, dtypes, forms of scales and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import (
    FORMS,
    ODD_ROUTINGS,
    Ids,
    assert_layer_is_right,
    composed,
    dequantised_rows,
    gated,
    layer,
    quantised,
    random_ids,
)

from kestrel_moe import fused_experts, variants
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import ALIGNED, CLUSTERED, FUSED, GROUPED_MM, IN_KERNEL, Variant
from kestrel_runtime import UnsupportedError, backend
from kestrel_runtime.testing import (
    assert_close_to_f64,
    assert_runs_repeat,
    assert_same_bits,
    canary,
    graph_replay,
    large_allocation,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALF = [torch.bfloat16, torch.float16]
MANY = [Variant(ALIGNED, 64), Variant(ALIGNED, 128), Variant(ALIGNED, 160), Variant(CLUSTERED, 128)]
MANY_FP8 = [Variant(ALIGNED, 32), Variant(ALIGNED, 64), Variant(ALIGNED, 128), Variant(CLUSTERED, 128)]
ACTIVATIONS = ["gelu_residual", "silu_and_mul", "gelu_and_mul"]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 33, 257, 740, 1300, 2000])
def test_a_layer_is_as_accurate_as_pytorch(tokens: int, dtype: torch.dtype) -> None:
    assert_layer_is_right(layer(tokens, 64, 8, 512, 256, dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [2, 20, 50, 400, 900])
def test_every_activation(tokens: int, activation: str) -> None:
    assert_layer_is_right(layer(tokens, 8, 2, 256, 128), activation)


@pytest.mark.parametrize("tokens", [3, 100, 700])
@pytest.mark.parametrize(
    ("experts", "choices", "width", "inner"),
    [(8, 2, 16, 16), (8, 2, 48, 80), (60, 4, 2880, 2880), (128, 8, 2048, 768), (256, 8, 7168, 256), (5, 5, 144, 16)],
)
def test_sizes_that_are_multiples_of_16(tokens: int, experts: int, choices: int, width: int, inner: int) -> None:
    assert_layer_is_right(layer(tokens, experts, choices, width, inner))


@pytest.mark.parametrize("routing", ODD_ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 100, 500])
def test_routings_with_duplicates_and_ids_that_name_no_expert(tokens: int, routing: str) -> None:
    assert_layer_is_right(layer(tokens, 8, 4, 256, 128, ids=ODD_ROUTINGS[routing]))


@pytest.mark.parametrize("tokens", [2, 8, 300])
def test_an_expert_map_skips_experts_of_other_devices(tokens: int) -> None:
    expert_map = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    expert_map[3:11] = torch.arange(8, dtype=torch.int32, device="cuda").flip(0)
    expert_map[20:23] = torch.tensor([8, 2**31 - 1, -(2**31)], dtype=torch.int32)  # of no local expert either
    args = layer(tokens, 8, 4, 256, 128, ids=lambda t, e, k: torch.randint(-2, 40, (t, k)))
    assert_layer_is_right(args, expert_map=expert_map)
    assert_layer_is_right(args, expert_map=torch.full_like(expert_map, -1))


@pytest.mark.parametrize("tokens", [5, 64, 500])
def test_ids_may_be_int64(tokens: int) -> None:
    hidden, w1, w2, weights, ids = layer(tokens, 8, 2, 256, 128)
    want = fused_experts(hidden, w1, w2, weights, ids)
    wide = ids.long()
    wide[0, 0], ids[0, 0] = 2**32 + 1, -1
    assert_same_bits(fused_experts(hidden, w1, w2, weights, wide)[1:], want[1:], "int64")
    assert_same_bits(fused_experts(hidden, w1, w2, weights, wide), fused_experts(hidden, w1, w2, weights, ids), "2^32")


@pytest.mark.parametrize("tokens", [2, 20, 100])
def test_an_empty_expert_map_gives_zeros(tokens: int) -> None:
    expert_map = torch.empty(0, dtype=torch.int32, device="cuda")
    assert not bool(fused_experts(*layer(tokens, 8, 2, 256, 128), expert_map=expert_map).any())


@pytest.mark.parametrize("tokens", [16, 64, 500])
def test_results_of_two_experts_may_cancel_beyond_the_range_of_fp16(tokens: int) -> None:
    hidden, w1, w2, weights, _ = layer(tokens, 2, 2, 256, 128, torch.float16)
    w1[1], w2[0] = w1[0], w2[0] * 2**15
    w2[1] = -w2[0]
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda").expand(tokens, 2).contiguous()
    single = fused_experts(hidden[:1], w1, w2, torch.ones_like(weights[:1]), torch.zeros_like(ids[:1]))
    assert bool(single.isinf().any()), "a result alone leaves the range"
    assert not bool(fused_experts(hidden, w1, w2, torch.ones_like(weights), ids).any())


def layer_through_grouped_mm() -> tuple[torch.Tensor, ...]:
    hidden, w1, w2, weights, ids = layer(4200, 2, 1, 4096, 4096)  # 2100 pairs for each expert
    chosen = variants.for_call(hidden.get_device(), 4200, 1, w2.shape, w2.dtype, None, True)
    assert chosen.path == GROUPED_MM
    return hidden, w1, w2, weights, ids


def test_the_path_through_grouped_mm_refuses_what_the_others_refuse() -> None:
    hidden, w1, w2, weights, ids = layer_through_grouped_mm()
    with pytest.raises(ValueError, match="w1_scale"):
        fused_experts(hidden, w1, w2, weights, ids, w1_scale=torch.ones(2, device="cuda"))
    with pytest.raises(ValueError, match="w2_scale"):
        fused_experts(hidden, w1, w2, weights, ids, w2_scale=torch.ones(2, device="cuda"))
    with pytest.raises(ValueError, match="out"):
        fused_experts(hidden, w1, w2, weights, ids, out=hidden)
    with pytest.raises(ValueError, match="activation"):
        fused_experts(hidden, w1, w2, weights, ids, activation="relu")


def test_the_path_through_grouped_mm_is_as_accurate_as_pytorch() -> None:
    assert_layer_is_right(layer_through_grouped_mm())


@pytest.mark.parametrize("routing", ODD_ROUTINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_path_through_grouped_mm_takes_any_routing(activation: str, routing: str) -> None:
    args = layer(300, 8, 4, 256, 128, ids=ODD_ROUTINGS[routing])
    assert_layer_is_right(args, activation, variant=Variant(GROUPED_MM))


def test_grouped_mm_takes_no_weights_that_it_would_refuse() -> None:
    hidden, w1, w2, weights, ids = layer_through_grouped_mm()
    flat = torch.empty(w1.numel() + 1, dtype=w1.dtype, device="cuda")
    unaligned = flat[1:].view(w1.shape).copy_(w1)
    with pytest.raises(UnsupportedError, match="aligned"):  # the reference's turn; kernels alone are allowed here
        fused_experts(hidden, unaligned, w2, weights, ids)


@pytest.mark.parametrize("in_range", [(1, 2, 3, 8), (9, 20, 36), (60, 200, 600)], ids=str)
def test_a_token_does_not_depend_on_the_others(in_range: tuple[int, ...]) -> None:
    hidden, w1, w2, weights, ids = layer(in_range[-1], 16, 4, 512, 256)  # T / 4 pairs for each expert
    whole = fused_experts(hidden, w1, w2, weights, ids)
    for tokens in in_range[:-1]:
        part = fused_experts(hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        assert_same_bits(part, whole[:tokens], f"{tokens} tokens")


SIZES_OF_FEW_TOKENS = [(16, 4, 512, 256), (5, 5, 144, 16), (8, 2, 2880, 1792)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("sizes", SIZES_OF_FEW_TOKENS, ids=str)
def test_one_kernel_for_both_projections_gives_the_bits_of_two_in_fp8(
    sizes: tuple[int, ...], tokens: int, form: str
) -> None:
    hidden, w1, w2, weights, ids = layer(tokens, *sizes)
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    got, want = (
        by_variant(each, hidden, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale)
        for each in (Variant(FUSED, 8 if tokens <= 8 else 16), Variant(ALIGNED, 8))
    )
    assert_same_bits(got, want, "FP8")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (3, 8), (8, 8), (3, 16), (13, 16), (16, 16)])
@pytest.mark.parametrize("sizes", SIZES_OF_FEW_TOKENS, ids=str)
def test_one_kernel_for_both_projections_is_as_accurate_as_pytorch(
    sizes: tuple[int, ...], tokens: int, tile: int, activation: str, dtype: torch.dtype
) -> None:
    assert_layer_is_right(layer(tokens, *sizes, dtype), activation, variant=Variant(FUSED, tile))


@pytest.mark.parametrize("tokens", [1, 4, 30, 100, 600, 1000])
def test_nan_and_inf_stay_in_their_rows(tokens: int) -> None:
    """Here inf gives NaN. test_experts_edges_gpu.py tells the two apart."""
    hidden, w1, w2, weights, ids = layer(tokens, 8, 2, 256, 128)
    clean = fused_experts(hidden, w1, w2, weights, ids)
    hidden[0, 3], hidden[-1, 5] = float("nan"), float("inf")
    got = fused_experts(hidden, w1, w2, weights, ids)
    assert bool(got[0].isnan().all())
    assert bool(got[-1].isnan().all()), "the gate of -inf is -0, times -inf"
    assert_same_bits(got[1:-1], clean[1:-1], "rows between")


def in_form(args: tuple[torch.Tensor, ...], form: str) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """A layer with weights of bf16 or of FP8 with these scales: positional and keyword arguments of fused_experts."""
    if form == "bf16":
        return args, {}
    hidden, w1, w2, weights, ids = args
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    return (hidden, w1, w2, weights, ids), {"w1_scale": w1_scale, "w2_scale": w2_scale}


@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
@pytest.mark.parametrize("tokens", [1, 6, 20, 64, 500, 900])
def test_runs_repeat_and_a_replayed_graph_sees_other_tokens_and_routing(tokens: int, form: str) -> None:
    first, second = (
        in_form(layer(tokens, 16, 4, 256, 128, ids=ids), form) for ids in (random_ids, ODD_ROUTINGS["outside"])
    )
    assert_runs_repeat(fused_experts, *first[0], **first[1])

    def run(hidden, w1, w2, weights, ids, *scales):  # type: ignore[no-untyped-def]
        return fused_experts(hidden, w1, w2, weights, ids, **dict(zip(first[1], scales, strict=True)))

    want = fused_experts(*second[0], **second[1])
    got = graph_replay(run, (*first[0], *first[1].values()), (*second[0], *second[1].values()))
    assert_same_bits(got, want, "a replay")


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_only_the_result_is_written(tokens: int) -> None:
    args = layer(tokens, 8, 2, 272, 144)
    out, assert_intact = canary((tokens, 272), torch.bfloat16, "cuda")
    wide = torch.full((tokens, 300), 7.0, dtype=torch.bfloat16, device="cuda")
    before = [x.clone() for x in args]
    want = fused_experts(*args)
    assert_same_bits(fused_experts(*args, out=out), want, "out=")
    assert_same_bits(fused_experts(*args, out=wide[:, :272]), want, "out= with a wider row")
    assert_intact()
    assert bool((wide[:, 272:] == 7).all())
    assert_same_bits(list(args), before, "inputs")


def test_rows_of_a_wider_buffer_and_strided_routing() -> None:
    hidden, w1, w2, weights, ids = layer(20, 8, 2, 256, 128)
    want = fused_experts(hidden, w1, w2, weights, ids)
    wide = torch.randn(20, 320, device="cuda").bfloat16()
    wide[:, 16:272] = hidden
    w1_wide = torch.zeros(8, 256, 264, dtype=torch.bfloat16, device="cuda")
    w1_wide[:, :, :256] = w1
    weights_wide, ids_wide = torch.zeros(20, 5, device="cuda"), torch.zeros(20, 6, dtype=torch.int32, device="cuda")
    weights_wide[:, :2], ids_wide[:, :2] = weights, ids
    views = (wide[:, 16:272], w1_wide[:, :, :256], w2, weights_wide[:, :2], ids_wide[:, :2])
    assert_same_bits(fused_experts(*views), want, "views")


@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
@pytest.mark.parametrize("tokens", [(2, 40), (300, 2000)], ids=str)
def test_two_streams_at_once_have_their_own_memory(tokens: tuple[int, int], form: str) -> None:
    calls = [in_form(layer(count, 16, 4, 512, 256), form) for count in tokens]
    want = [fused_experts(*args, **scales) for args, scales in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(fused_experts(*calls[i][0], **calls[i][1]))
    torch.cuda.synchronize()
    for i, results in enumerate(got):
        for result in results:
            assert_same_bits(result, want[i], f"stream {i}")


# The variants of a layer whose tensors are larger than 2^31 elements, by its tokens.
LARGE = [(3, Variant(FUSED, 8)), (3, Variant(IN_KERNEL, 8)), (3, Variant(ALIGNED, 16)), *((300, v) for v in MANY_FP8)]


@large_allocation(gib=9)
@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
@pytest.mark.parametrize(("tokens", "variant"), LARGE, ids=str)
def test_rows_may_lie_2_to_the_31_elements_apart(tokens: int, variant: Variant, form: str) -> None:
    if form == "bf16" and variant == Variant(ALIGNED, 32):
        variant = Variant(ALIGNED, 8)
    (hidden, *rest), scales = in_form(layer(tokens, 8, 2, 272, 144), form)
    want = by_variant(variant, hidden, *rest, **scales)
    stride = (2**31 + 2**20) // (tokens - 1) // 8 * 8  # the last row begins past 2^31 elements
    wide = torch.empty((tokens - 1) * stride + 272, dtype=torch.bfloat16, device="cuda")
    apart, out = (torch.as_strided(wide, (tokens, 272), (stride, 1)), torch.empty_like(wide))
    apart.copy_(hidden)
    got = by_variant(variant, apart, *rest, **scales, out=torch.as_strided(out, (tokens, 272), (stride, 1)))
    assert_same_bits(got, want, "rows apart")


def far_expert(args: tuple[torch.Tensor, ...], scales: dict[str, torch.Tensor], experts: int) -> dict[str, Any]:
    """A layer of one expert as the last one of so many, of which no other is read: both weights end past 2^31."""
    hidden, w1, w2, weights, ids = args
    far = {"hidden": hidden, "topk_weights": weights, "topk_ids": torch.full_like(ids, experts - 1)}
    for name, w in (("w1", w1), ("w2", w2)):
        far[name] = torch.empty(experts, *w.shape[1:], dtype=w.dtype, device="cuda")
        assert far[name][:-1].numel() > 2**31
        far[name][-1].view(torch.uint8).copy_(w[0].view(torch.uint8))
    return far | {name: scale.expand(experts, *scale.shape[1:]).contiguous() for name, scale in scales.items()}


EVERY_TILE = [("bf16", variant) for variant in (Variant(ALIGNED, 8), Variant(ALIGNED, 16), *MANY)]
EVERY_TILE += [(form, variant) for form in ("channel", "block") for variant in (Variant(ALIGNED, 16), *MANY_FP8)]


@large_allocation(gib=14)
@pytest.mark.parametrize(("form", "variant"), EVERY_TILE, ids=str)
def test_experts_beyond_2_to_the_31_elements_of_every_tile(form: str, variant: Variant) -> None:
    args, scales = in_form(layer(150, 1, 1, 1024, 1040), form)
    want = by_variant(variant, *args, **scales)
    assert_same_bits(by_variant(variant, **far_expert(args, scales, 2100)), want, "the last expert")


@large_allocation(gib=14)
@pytest.mark.parametrize("form", ["bf16", "channel"])
def test_results_of_pairs_beyond_2_to_the_31_elements(form: str) -> None:
    """264,000 pairs of 8192 results; the last tokens against a batch of their own, in the same range of T."""
    tokens, width = 33_000, 8192
    args, scales = in_form(layer(1, 8, 8, width, 16), form)
    weights = args[3].expand(tokens, 8).contiguous()
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    ids = torch.rand(tokens, 8, device="cuda").argsort(1).int()
    got = fused_experts(hidden, *args[1:3], weights, ids, **scales)
    few = fused_experts(hidden[-200:], *args[1:3], weights[-200:], ids[-200:], **scales)
    assert_same_bits(got[-200:], few, "the last tokens")


@large_allocation(gib=14)
@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
def test_experts_beyond_2_to_the_31_elements_of_few_tokens(form: str) -> None:
    args, scales = in_form(layer(3, 1, 1, 1024, 1040), form)
    want = by_variant(Variant(IN_KERNEL, 8), *args, **scales)  # that of more than 1024 experts
    assert_same_bits(fused_experts(**far_expert(args, scales, 2100)), want, "the last expert")


@pytest.mark.parametrize(
    ("width", "inner", "dtype"),
    [(40, 16, torch.bfloat16), (16, 40, torch.bfloat16), (64, 32, torch.float32)],
    ids=str,
)
def test_what_no_kernel_covers_is_named(width: int, inner: int, dtype: torch.dtype) -> None:
    args = layer(3, 4, 2, width, inner, dtype)
    with pytest.raises(UnsupportedError, match="fused_experts"):
        fused_experts(*args)


@pytest.mark.parametrize("form", ["bf16", *FORMS])
def test_no_tokens_give_an_empty_result(form: str) -> None:
    args, scales = in_form(layer(0, 4, 2, 64, 32), form)
    assert fused_experts(*args, **scales).shape == (0, 64)
    for variant in (Variant(FUSED, 8), Variant(IN_KERNEL, 8), Variant(ALIGNED, 16), *MANY_FP8[1:]):
        assert by_variant(variant, *args, **scales).shape == (0, 64), str(variant)


# -- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 100, 700])
@pytest.mark.parametrize(
    ("width", "inner", "dtype"),
    [(512, 256, torch.bfloat16), (2880, 144, torch.float16), (3216, 3200, torch.bfloat16)],
    ids=str,
)
def test_fp8_layers_equal_a_model_of_the_same_quantisation(
    tokens: int, form: str, width: int, inner: int, dtype: torch.dtype
) -> None:
    hidden, w1, w2, weights, ids = layer(tokens, 16, 4, width, inner, dtype)
    (w1_codes, w1_scale, w1_exact), (w2_codes, w2_scale, w2_exact) = (quantised(w, form) for w in (w1, w2))
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    got = fused_experts(hidden, w1_codes, w2_codes, weights, ids, **scales)
    x = dequantised_rows(hidden, form)
    exact = torch.zeros(tokens, width, dtype=torch.float64, device="cuda")
    for expert in range(16):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        inner_rows = dequantised_rows(gated(x[token] @ w1_exact[expert].T, "gelu_residual"), "block")
        exact.index_add_(0, token, inner_rows @ w2_exact[expert].T * weights[token, choice, None].double())
    # An error of the sums moves a value of the hidden layer across a rounding boundary of FP8: in float32 in some 1e-4
    # of cases, with wgmma, which keeps 14 bits of a sum, in some 2^-13 / 2^-4. A code then differs by 2^-3 of its
    # value, so the result by 2^-3 * sqrt(cases) of its norm; the result's own rounding is 2^-9 at most.
    cases = 2**-9 if torch.cuda.get_device_capability() == (9, 0) else 1e-4
    error = (got.double() - exact).norm() / exact.norm()
    assert error < 2**-9 + 2**-3 * cases**0.5, f"error {error:.2e}"
    assert_runs_repeat(fused_experts, hidden, w1_codes, w2_codes, weights, ids, **scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "inner"), [(512, 256), (272, 400), (3216, 144)])
@pytest.mark.parametrize("in_range", [(1, 2, 3, 8), (9, 16, 17, 36, 88, 89, 300)], ids=str)
def test_a_token_of_an_fp8_layer_does_not_depend_on_the_others(
    in_range: tuple[int, ...], width: int, inner: int, form: str
) -> None:
    """Tiles that grow with the number of tokens."""
    tokens = in_range[-1]
    hidden, w1, w2, weights, ids = layer(tokens, 16, 4, width, inner)  # T / 4 pairs for each expert
    hidden[2, ::3] = 0
    hidden[5, 7] = float("nan")
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    whole = fused_experts(hidden, w1, w2, weights, ids, **scales)
    assert bool(whole[5].isnan().all())
    assert bool(whole[torch.arange(tokens) != 5].isfinite().all())
    for tokens in in_range[:-1]:
        part = fused_experts(hidden[:tokens], w1, w2, weights[:tokens], ids[:tokens], **scales)
        assert_same_bits(part, whole[:tokens], f"{tokens} tokens")


@pytest.mark.parametrize("form", ["bf16", *FORMS])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_variants_for_few_tokens_give_the_same_bits(tokens: int, form: str) -> None:
    args, scales = in_form(layer(tokens, 16, 4, 512, 272), form)
    want = by_variant(Variant(IN_KERNEL, 8), *args, **scales)
    for tile in (8, 16):
        got = by_variant(Variant(ALIGNED, tile), *args, **scales)
        assert_same_bits(got, want, f"tiles of {tile}")


# -- tiles of many tokens ----------------------------------------------------------------------------------------------


def ids_of_sizes(*sizes: int) -> Ids:
    """So many pairs for each expert."""

    def ids(tokens: int, experts: int, choices: int) -> torch.Tensor:
        flat = torch.cat([torch.full((size,), expert) for expert, size in enumerate(sizes)])
        assert flat.numel() == tokens * choices
        return flat[torch.randperm(flat.numel())].view(tokens, choices)

    return ids


SIZES_OF_EXPERTS = [
    (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 215),
    (0, 31, 32, 33, 95, 96, 97, 159, 160, 161, 319, 320, 57),
    (1560,),
    (0, 0, 1559, 1),
]


@pytest.mark.parametrize("form", ["bf16", "fp16", *FORMS])
@pytest.mark.parametrize("sizes", SIZES_OF_EXPERTS, ids=["around tiles", "around columns", "one", "last"])
@pytest.mark.parametrize(("width", "inner"), [(272, 144), (528, 80), (16, 400)])
def test_tiles_of_many_tokens_give_the_same_bits_for_each_count(
    width: int, inner: int, sizes: tuple[int, ...], form: str
) -> None:
    """Experts with a token more or less than a tile, and K, Hd and I that end within a tile."""
    dtype = torch.float16 if form == "fp16" else torch.bfloat16
    args = layer(520, len(sizes), 3, width, inner, dtype, ids_of_sizes(*sizes))
    first = None
    if form in FORMS:
        args, scales = in_form(args, form)
        with backend("reference"):
            want = fused_experts(*args, **scales)
        for variant in MANY_FP8:
            got = by_variant(variant, *args, **scales)
            # As in test_fp8_layers_equal_a_model_of_the_same_quantisation.
            limit = 2**-8 + 2**-3 * 2**-4.5
            assert (got.double() - want.double()).norm() < limit * want.double().norm(), str(variant)
            first = got if first is None else first
            assert_same_bits(got, first, str(variant))
        return
    exact, baseline = (composed(*args[:4], args[4].long(), "gelu_residual", each) for each in (torch.float64, dtype))
    for variant in MANY:
        got = by_variant(variant, *args)
        assert_close_to_f64(got, exact, baseline.to(dtype))
        first = got if first is None else first
        assert_same_bits(got, first, str(variant))


@pytest.mark.parametrize(
    ("variant", "form"), [*((v, "bf16") for v in MANY), *((v, "channel") for v in MANY_FP8)], ids=str
)
def test_no_tile_reads_beyond_the_rows_of_an_expert(variant: Variant, form: str) -> None:
    """NaN around the weights of each expert and around the rows of x, and experts of other sizes in the batch."""
    width, inner, experts = 272, 144, 3
    hidden, w1, w2, weights, ids = layer(400, experts, 2, width, inner)
    scales = {}
    if form != "bf16":
        (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
        scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}

    def surrounded(t: torch.Tensor) -> torch.Tensor:
        shape = (*(n + 2 for n in t.shape[:-1]), t.shape[-1] + 32)
        wide = torch.full(shape, float("nan"), device="cuda").to(t.dtype)
        inside = tuple(slice(1, n + 1) for n in t.shape[:-1])
        view = wide[inside][..., 16:-16]
        return view.copy_(t)

    want = by_variant(variant, hidden, w1, w2, weights, ids, **scales)
    got = by_variant(variant, surrounded(hidden), surrounded(w1), surrounded(w2), weights, ids, **scales)
    assert_same_bits(got, want, "among NaN")
    assert bool(got.isfinite().all())


@pytest.mark.parametrize(("first", "second"), [("block", "channel"), ("channel", "block"), ("block", "expert")])
def test_the_weights_may_have_scales_of_different_forms(first: str, second: str) -> None:
    """Both projections in one launch, of which one has block scales."""
    hidden, w1, w2, weights, ids = layer(700, 8, 3, 528, 400)
    (w1, w1_scale, _), (w2, w2_scale, _) = quantised(w1, first), quantised(w2, second)
    args, scales = (hidden, w1, w2, weights, ids), {"w1_scale": w1_scale, "w2_scale": w2_scale}
    with backend("reference"):
        want = fused_experts(*args, **scales)
    got = [by_variant(variant, *args, **scales) for variant in MANY_FP8 for _ in range(3)]
    assert (got[0].double() - want.double()).norm() < (2**-8 + 2**-3 * 2**-4.5) * want.double().norm()
    for each in got:
        assert_same_bits(each, got[0], f"{first}, {second}")


@pytest.mark.parametrize("variant", MANY, ids=str)
def test_experts_may_share_one_weight(variant: Variant) -> None:
    hidden, w1, w2, weights, ids = layer(300, 4, 2, 256, 128)
    w1, w2 = w1[:1].expand(4, -1, -1), w2[:1].expand(4, -1, -1)
    got = by_variant(variant, hidden, w1, w2, weights, ids)
    want = by_variant(variant, hidden, w1.contiguous(), w2.contiguous(), weights, ids)
    assert_same_bits(got, want, "expanded weights")


@pytest.mark.parametrize("routing", ODD_ROUTINGS)
@pytest.mark.parametrize("variant", MANY, ids=str)
def test_every_variant_for_many_tokens_takes_any_routing(variant: Variant, routing: str) -> None:
    """Blocks of no expert, a cluster with one tile, and experts of other devices."""
    args = layer(300, 8, 4, 256, 128, ids=ODD_ROUTINGS[routing])
    expert_map = torch.tensor([3, -1, 1, 7, 8, 0, 2, 6], dtype=torch.int32, device="cuda")
    for mapped in (None, expert_map):
        assert_layer_is_right(args, expert_map=mapped, variant=variant)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("routing", ODD_ROUTINGS)
def test_tiles_of_fp8_take_any_routing_and_stay_within_their_rows(routing: str, form: str, activation: str) -> None:
    """More choices than lanes of a warp, rows that end within 128 columns, and NaN in one token."""
    tokens, choices = 90, 35
    hidden, w1, w2, weights, ids = layer(tokens, 40, choices, 272, 144, ids=ODD_ROUTINGS[routing])
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale, "activation": activation}
    expert_map = torch.arange(40, dtype=torch.int32, device="cuda").roll(7)
    expert_map[::3], expert_map[1] = -1, 40
    for mapped in (None, expert_map):
        with backend("reference"):
            want = fused_experts(hidden, w1, w2, weights, ids, **scales, expert_map=mapped)
        for variant in MANY_FP8:
            got = by_variant(variant, hidden, w1, w2, weights, ids, **scales, expert_map=mapped)
            # As in test_tiles_of_many_tokens_give_the_same_bits_for_each_count.
            assert (got.double() - want.double()).norm() <= (2**-8 + 2**-3 * 2**-4.5) * want.double().norm()
            spoiled = hidden.clone()
            spoiled[4, 7] = float("nan")
            among = by_variant(variant, spoiled, w1, w2, weights, ids, **scales, expert_map=mapped)
            others = torch.arange(tokens) != 4
            assert_same_bits(among[others], got[others], str(variant))
