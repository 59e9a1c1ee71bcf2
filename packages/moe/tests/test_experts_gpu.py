"""The kernels of routed experts against float64, over routings, sizes, dtypes, forms of scales and layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kestrel_moe import (
    fused_experts,
    invoke_cute_moe_down,
    invoke_cute_moe_down_fp8,
    invoke_cute_moe_up,
    invoke_cute_moe_up_fp8,
    moe_align_block_size,
    reference_experts,
)
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import ALIGNED, CLUSTERED, FUSED, IN_KERNEL, Variant
from kestrel_quant import fp8_quant
from kestrel_runtime import UnsupportedError, backend
from kestrel_runtime.testing import assert_close_to_f64, assert_runs_repeat, assert_same_bits, canary, graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALF = [torch.bfloat16, torch.float16]
MANY = [Variant(ALIGNED, 64), Variant(ALIGNED, 128), Variant(ALIGNED, 160), Variant(CLUSTERED, 128)]
MANY_FP8 = [Variant(ALIGNED, 32), Variant(ALIGNED, 64), Variant(ALIGNED, 128), Variant(CLUSTERED, 128)]
ACTIVATIONS = ["gelu_residual", "silu_and_mul", "gelu_and_mul"]
Ids = Callable[[int, int, int], torch.Tensor]


def random_ids(tokens: int, experts: int, choices: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(choices).indices


def layer(
    tokens: int,
    experts: int,
    choices: int,
    width: int,
    inner: int,
    dtype: torch.dtype = torch.bfloat16,
    ids: Ids = random_ids,
) -> tuple[torch.Tensor, ...]:
    """hidden, w1, w2, topk_weights, topk_ids."""
    torch.manual_seed(tokens + experts + width)
    hidden = torch.randn(tokens, width, device="cuda").to(dtype)
    w1 = (torch.randn(experts, 2 * inner, width, device="cuda") / width**0.5).to(dtype)
    w2 = (torch.randn(experts, width, inner, device="cuda") / inner**0.5).to(dtype)
    weights = torch.rand(tokens, choices, device="cuda").softmax(-1)
    return hidden, w1, w2, weights, ids(tokens, experts, choices).to("cuda", torch.int32)


def gated(up: torch.Tensor, activation: str) -> torch.Tensor:
    h, g = up.chunk(2, dim=-1)
    if activation == "silu_and_mul":
        return F.silu(h) * g
    return F.gelu(h) * (g + 1 if activation == "gelu_residual" else g)


def composed(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The layer by a loop over experts in this dtype; the sum over choices in float64."""
    total = torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
    for expert in range(w1.shape[0]):
        token, choice = (local == expert).nonzero(as_tuple=True)
        if token.numel():
            inner = gated(hidden[token].to(dtype) @ w1[expert].to(dtype).T, activation)
            rows = (inner @ w2[expert].to(dtype).T) * weights[token, choice, None].to(dtype)
            total.index_add_(0, token, rows.double())
    return total


def assert_layer_is_right(
    args: tuple[torch.Tensor, ...], activation: str = "gelu_residual", expert_map: torch.Tensor | None = None
) -> None:
    hidden, w1, w2, weights, ids = args
    local = reference_experts.local_experts(ids, w1.shape[0], expert_map)
    exact = composed(hidden, w1, w2, weights, local, activation, torch.float64)
    baseline = composed(hidden, w1, w2, weights, local, activation, hidden.dtype).to(hidden.dtype)
    got = fused_experts(*args, activation=activation, expert_map=expert_map)
    assert_close_to_f64(got, exact, baseline)


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


ODD_ROUTINGS: dict[str, Ids] = {
    "one expert": lambda t, e, k: torch.full((t, k), 5),
    "none": lambda t, e, k: torch.full((t, k), -1),
    "outside": lambda t, e, k: torch.randint(-2, e + 3, (t, k)),
    "first and last": lambda t, e, k: torch.randint(0, 2, (t, k)) * (e - 1),
}


@pytest.mark.parametrize("routing", ODD_ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 100, 500])
def test_routings_with_duplicates_and_ids_that_name_no_expert(tokens: int, routing: str) -> None:
    assert_layer_is_right(layer(tokens, 8, 4, 256, 128, ids=ODD_ROUTINGS[routing]))


@pytest.mark.parametrize("tokens", [2, 8, 300])
def test_an_expert_map_skips_experts_of_other_devices(tokens: int) -> None:
    expert_map = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    expert_map[3:11] = torch.arange(8, dtype=torch.int32, device="cuda").flip(0)
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


def test_the_path_through_grouped_mm_refuses_what_the_others_refuse() -> None:
    hidden, w1, w2, weights, ids = layer(900, 8, 2, 256, 128)  # 225 pairs for each expert
    with pytest.raises(ValueError, match="w1_scale"):
        fused_experts(hidden, w1, w2, weights, ids, w1_scale=torch.ones(8, device="cuda"))
    with pytest.raises(ValueError, match="w2_scale"):
        fused_experts(hidden, w1, w2, weights, ids, w2_scale=torch.ones(8, device="cuda"))
    with pytest.raises(ValueError, match="out"):
        fused_experts(hidden, w1, w2, weights, ids, out=hidden)
    with pytest.raises(ValueError, match="activation"):
        fused_experts(hidden, w1, w2, weights, ids, activation="relu")


def test_grouped_mm_takes_no_weights_that_it_would_refuse() -> None:
    hidden, w1, w2, weights, ids = layer(900, 8, 2, 256, 128)
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


@pytest.mark.parametrize("form", ["none", "expert", "channel", "block"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("sizes", [(16, 4, 512, 256), (5, 5, 144, 16), (8, 2, 2880, 1792)], ids=str)
def test_one_kernel_for_both_projections_agrees_with_two(sizes: tuple[int, ...], tokens: int, form: str) -> None:
    hidden, w1, w2, weights, ids = layer(tokens, *sizes)
    scales = {}
    if form != "none":
        (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
        scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    fused, aligned = Variant(FUSED, 8 if tokens <= 8 else 16), Variant(ALIGNED, 8)
    got, want = (by_variant(each, hidden, w1, w2, weights, ids, **scales) for each in (fused, aligned))
    if form == "none":
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
    else:
        assert_same_bits(got, want, "FP8")


@pytest.mark.parametrize("tokens", [1, 4, 30, 100, 600, 1000])
def test_nan_and_inf_stay_in_their_rows(tokens: int) -> None:
    hidden, w1, w2, weights, ids = layer(tokens, 8, 2, 256, 128)
    clean = fused_experts(hidden, w1, w2, weights, ids)
    hidden[0, 3], hidden[-1, 5] = float("nan"), float("inf")
    got = fused_experts(hidden, w1, w2, weights, ids)
    assert bool(got[0].isnan().all())
    assert_same_bits(got[1:-1], clean[1:-1], "rows between")


@pytest.mark.parametrize("tokens", [1, 6, 64, 500, 900])
def test_runs_repeat_and_a_replayed_graph_sees_other_tokens_and_routing(tokens: int) -> None:
    first, second = (layer(tokens, 16, 4, 256, 128, ids=ids) for ids in (random_ids, ODD_ROUTINGS["outside"]))
    assert_runs_repeat(fused_experts, *first)
    got = graph_replay(fused_experts, first, second)
    assert_same_bits(got, fused_experts(*second), "a replay")


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


def test_two_streams_at_once_have_their_own_memory() -> None:
    args = [layer(tokens, 16, 4, 512, 256) for tokens in (2, 40)]
    want = [fused_experts(*a) for a in args]
    streams = [torch.cuda.Stream() for _ in args]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(fused_experts(*args[i]))
    torch.cuda.synchronize()
    for i, results in enumerate(got):
        for result in results:
            assert_same_bits(result, want[i], f"stream {i}")


def test_experts_beyond_2_to_the_31_elements() -> None:
    experts, width, inner = 1100, 1024, 1024
    hidden = torch.randn(3, width, device="cuda").bfloat16()
    w1 = torch.zeros(experts, 2 * inner, width, dtype=torch.bfloat16, device="cuda")
    w2 = torch.zeros(experts, width, inner, dtype=torch.bfloat16, device="cuda")
    w1[-1], w2[-1] = torch.randn(2 * inner, width).cuda() / 32, torch.randn(width, inner).cuda() / 32
    weights = torch.ones(3, 1, device="cuda")
    ids = torch.full((3, 1), experts - 1, dtype=torch.int32, device="cuda")
    few = Variant(IN_KERNEL, 8)  # that of more than 1024 experts
    want = by_variant(few, hidden, w1[-1:].clone(), w2[-1:].clone(), weights, torch.zeros_like(ids))
    assert_same_bits(fused_experts(hidden, w1, w2, weights, ids), want, "the last expert")


@pytest.mark.parametrize(
    ("width", "inner", "dtype"),
    [(40, 16, torch.bfloat16), (16, 40, torch.bfloat16), (64, 32, torch.float32)],
    ids=str,
)
def test_what_no_kernel_covers_is_named(width: int, inner: int, dtype: torch.dtype) -> None:
    args = layer(3, 4, 2, width, inner, dtype)
    with pytest.raises(UnsupportedError, match="fused_experts"):
        fused_experts(*args)


def test_no_tokens_give_an_empty_result() -> None:
    assert fused_experts(*layer(0, 4, 2, 64, 32)).shape == (0, 64)


# -- FP8 --------------------------------------------------------------------------------------------------------------


def quantised(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of this form, and the weight they stand for in float64."""
    experts, rows, columns = weight.shape
    if form == "expert":
        scale = weight.abs().amax((1, 2)).float() / 448
        full = scale[:, None, None]
    elif form == "channel":
        scale = weight.abs().amax(2).float() / 448
        full = scale[:, :, None]
    else:
        tall, wide = -(-rows // 128), -(-columns // 128)
        padded = F.pad(weight.float(), (0, wide * 128 - columns, 0, tall * 128 - rows))
        scale = padded.view(experts, tall, 128, wide, 128).abs().amax((2, 4)) / 448
        full = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :columns]
    codes = (weight.float() / full).to(torch.float8_e4m3fn)
    return codes, scale, codes.double() * full.double()


def dequantised_rows(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "block":
        codes, scale = fp8_quant(x.float(), granularity="group", group_size=128)
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    else:
        codes, scale = fp8_quant(x.float())
    return codes.double() * scale.double()


FORMS = ["expert", "channel", "block"]


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
    hidden, w1, w2, weights, ids = layer(tokens, 16, 4, 512, 272)
    scales = {}
    if form != "bf16":
        (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
        scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    want = by_variant(Variant(IN_KERNEL, 8), hidden, w1, w2, weights, ids, **scales)
    for tile in (8, 16):
        got = by_variant(Variant(ALIGNED, tile), hidden, w1, w2, weights, ids, **scales)
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
    if form in FORMS:
        hidden, w1, w2, weights, ids = args
        (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
        args, scales = (hidden, w1, w2, weights, ids), {"w1_scale": w1_scale, "w2_scale": w2_scale}
        with backend("reference"):
            want = fused_experts(*args, **scales)
        # As in test_fp8_layers_equal_a_model_of_the_same_quantisation.
        limit = 2**-8 + 2**-3 * 2**-4.5
    else:
        scales = {}
        want = composed(*args[:4], args[4].long(), "gelu_residual", torch.float64)
        limit = 2**-7 if form == "bf16" else 2**-10
    first = None
    for variant in MANY_FP8 if form in FORMS else MANY:
        got = by_variant(variant, *args, **scales)
        assert (got.double() - want.double()).norm() < limit * want.double().norm(), str(variant)
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
    expert_map = torch.tensor([3, -1, 1, 7, -1, 0, 2, 6], dtype=torch.int32, device="cuda")
    for mapped in (None, expert_map):
        local = reference_experts.local_experts(args[4], 8, mapped)
        exact = composed(*args[:4], local, "gelu_residual", torch.float64)
        got = by_variant(variant, *args, expert_map=mapped)
        assert (got.double() - exact).norm() <= 2**-7 * exact.norm()


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
    expert_map[::3] = -1
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


# -- the two products of their own ------------------------------------------------------------------------------------


def aligned(ids: torch.Tensor, experts: int, block_size: int) -> list[torch.Tensor]:
    blocks = reference_experts.most_blocks(ids.numel(), experts, block_size)
    buffers = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * block_size, blocks, 1)]
    moe_align_block_size(ids, experts, block_size, *buffers)
    return buffers


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("two", [True, False], ids=["two weights", "one weight"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_products_equal_the_reference_and_skipped_pairs_are_zero(
    block_size: int, two: bool, dtype: torch.dtype
) -> None:
    hidden, w1, w3, weights, ids = layer(50, 8, 2, 256, 144, dtype)
    ids[0, 0], ids[7, 1] = -1, 99
    blocks = aligned(ids, 8, block_size)
    parts = (w1[:, :144], w1[:, 144:]) if two else (w1, None)
    inner = torch.randn(100, 144, device="cuda").to(dtype)
    up = invoke_cute_moe_up(hidden, *parts, None, ids, *blocks, block_size=block_size)
    down = invoke_cute_moe_down(inner, w3, weights, ids, *blocks, block_size=block_size)
    pair_weights = weights.flatten()
    for t, j in ((t, j) for t in range(50) for j in range(2)):
        pair, expert = 2 * t + j, int(ids[t, j])
        if not 0 <= expert < 8:
            assert not bool(up[pair].any() | down[t, j].any()), f"pair {pair}"
            continue
        want_up = hidden[t].double() @ w1[expert].double().T
        want_down = inner[pair].double() @ w3[expert].double().T * pair_weights[pair].double()
        # One rounding of a sum in float32, whose own error is far below.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(up[pair].double(), want_up, rtol=0.51 * eps, atol=1e-5)
        torch.testing.assert_close(down[t, j].double(), want_down, rtol=0.51 * eps, atol=1e-5)


@pytest.mark.parametrize("hole", [0, 5, 64])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_pair_may_be_missing_anywhere_in_a_block(block_size: int, hole: int) -> None:
    hidden, w1, _, _, ids = layer(150, 4, 1, 256, 128, ids=lambda t, e, k: torch.zeros(t, k))
    sorted_pairs, *blocks = aligned(ids, 4, block_size)
    want = invoke_cute_moe_up(hidden, w1, None, None, ids, sorted_pairs, *blocks, block_size=block_size)
    want[int(sorted_pairs[hole])] = 0
    sorted_pairs[hole] = -1
    got = invoke_cute_moe_up(hidden, w1, None, None, ids, sorted_pairs, *blocks, block_size=block_size)
    assert_same_bits(got, want, f"without the pair at {hole}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("two", [True, False], ids=["two weights", "one weight"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_fp8_products_equal_the_reference(block_size: int, two: bool, form: str) -> None:
    hidden, w1, w3, weights, ids = layer(50, 8, 2, 384, 256)
    ids[3, 0] = -1
    blocks = aligned(ids, 8, block_size)
    if two:
        (a, a_scale, _), (b, b_scale, _) = (quantised(w, form) for w in (w1[:, :256], w1[:, 256:]))
        parts = (a, a_scale, b, b_scale)
    else:
        codes, scale, _ = quantised(w1, form)
        parts = (codes, scale, None, None)
    w3_codes, w3_scale, _ = quantised(w3, form)
    x, x_scale = fp8_quant(hidden)
    inner, inner_scale = fp8_quant(torch.randn(100, 256, device="cuda").bfloat16())

    def products() -> list[torch.Tensor]:
        up = invoke_cute_moe_up_fp8(x, x_scale, *parts, None, ids, *blocks, block_size=block_size)
        down = (inner, inner_scale, w3_codes, w3_scale, weights, ids, *blocks)
        return [up, invoke_cute_moe_down_fp8(*down, block_size=block_size)]

    got = products()
    with backend("reference"):
        want = products()
    # Both round their sums once, to bf16. wgmma keeps 14 bits of the sum at each of K / 32 additions: sums of some 4
    # here, so 12 * 2^-13 * 4 at most.
    atol = 6e-3 if torch.cuda.get_device_capability() == (9, 0) else 1e-4
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=atol)
