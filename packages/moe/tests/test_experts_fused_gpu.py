"""The kernel of routed experts for both projections, in both its tiles, against the kernels of one projection."""

from __future__ import annotations

import pytest
import torch
from expert_cases import assert_layer_is_right, layer, quantised

from kestrel_moe import reference_experts
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import ALIGNED, FUSED, IN_KERNEL, Layer, Variant, is_valid
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import assert_same_bits, assert_waits_for_the_launch_before, large_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

EXPERTS, CHOICES, WIDTH, INNER = 9, 4, 272, 400
FORMS = ["expert", "channel", "block"]
ROUTINGS = ["random", "one expert", "none", "outside", "duplicates"]


def routing(name: str, tokens: int) -> torch.Tensor:
    if name == "random":
        return torch.rand(tokens, EXPERTS).topk(CHOICES).indices.int().cuda()
    low, high = {"one expert": (5, 6), "none": (-1, 0), "outside": (-2, EXPERTS + 3), "duplicates": (0, 2)}[name]
    return torch.randint(low, high, (tokens, CHOICES), dtype=torch.int32, device="cuda")


def fp8_layer(form: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """w1, w2 and their scales: any codes do, as both sides have the same."""
    parts = []
    for rows, columns in ((2 * INNER, WIDTH), (WIDTH, INNER)):
        codes = (torch.randn(EXPERTS, rows, columns, device="cuda") * 20).to(torch.float8_e4m3fn)
        shape = {
            "expert": (EXPERTS,),
            "channel": (EXPERTS, rows),
            "block": (EXPERTS, -(-rows // 128), -(-columns // 128)),
        }
        parts.append((codes, (torch.rand(shape[form], device="cuda") + 0.5) / (20 * columns**0.5)))
    return parts[0][0], parts[1][0], parts[0][1], parts[1][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("tokens", "tile"), [(3, 8), (8, 8), (3, 16), (13, 16), (16, 16)])
def test_fp8_layers_of_any_routing_have_the_bits_of_aligned_pairs(
    tokens: int, tile: int, name: str, form: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    w1, w2, w1_scale, w2_scale = fp8_layer(form)
    hidden, weights = torch.randn(tokens, WIDTH, device="cuda").to(dtype), torch.rand(tokens, CHOICES, device="cuda")
    given = (hidden, w1, w2, weights, routing(name, tokens))
    got, want = (
        by_variant(each, *given, w1_scale=w1_scale, w2_scale=w2_scale)
        for each in (Variant(FUSED, tile), Variant(ALIGNED, 8))
    )
    assert_same_bits(got, want, "the result")


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_both_tiles_give_the_same_bits(tokens: int, name: str) -> None:
    torch.manual_seed(tokens)
    w1 = torch.randn(EXPERTS, 2 * INNER, WIDTH, device="cuda").bfloat16() / WIDTH**0.5
    w2 = torch.randn(EXPERTS, WIDTH, INNER, device="cuda").bfloat16() / INNER**0.5
    hidden, weights = torch.randn(tokens, WIDTH, device="cuda").bfloat16(), torch.rand(tokens, CHOICES, device="cuda")
    given = (hidden, w1, w2, weights, routing(name, tokens))
    assert_same_bits(by_variant(Variant(FUSED, 16), *given), by_variant(Variant(FUSED, 8), *given), "16")


@pytest.mark.parametrize("tokens", [4, 16])
def test_maps_and_nan_rows(tokens: int) -> None:
    torch.manual_seed(tokens)
    fused, aligned = Variant(FUSED, 8 if tokens <= 8 else 16), Variant(ALIGNED, 8)
    w1, w2, w1_scale, w2_scale = fp8_layer("channel")
    scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    table = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    table[3 : 3 + EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32, device="cuda").flip(0)
    table[20] = EXPERTS + 5  # an index past the local weights
    hidden, weights = torch.randn(tokens, WIDTH, device="cuda").bfloat16(), torch.rand(tokens, CHOICES, device="cuda")
    ids = torch.randint(-2, 40, (tokens, CHOICES), dtype=torch.int32, device="cuda")
    given = (hidden, w1, w2, weights, ids)
    clean = by_variant(fused, *given, expert_map=table, **scales)
    assert_same_bits(clean, by_variant(aligned, *given, expert_map=table, **scales), "a map")
    hidden[1, 7] = float("nan")
    got = by_variant(fused, *given, expert_map=table, **scales)
    others = [token for token in range(tokens) if token != 1]
    assert_same_bits(got[others], clean[others], "rows beside one with NaN")
    some = bool((reference_experts.local_experts(ids, EXPERTS, table)[1] >= 0).any())
    assert bool(got[1].isnan().all()) == some


@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
@pytest.mark.parametrize(("tile", "width"), [(8, 8192), (16, 4096)])
def test_the_largest_layer_that_is_valid(tile: int, width: int, form: str) -> None:
    experts, choices, inner, fp8 = 1024, 8, 16, form != "bf16"
    assert is_valid(Variant(FUSED, tile), Layer(tile, experts, choices, width, inner, "fp8" if fp8 else "bf16", True))
    args = layer(tile, experts, choices, width, inner)
    if not fp8:
        return assert_layer_is_right(args, variant=Variant(FUSED, tile))
    hidden, w1, w2, weights, ids = args
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    got, want = (
        by_variant(each, hidden, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale)
        for each in (Variant(FUSED, tile), Variant(ALIGNED, 8))
    )
    assert_same_bits(got, want, "the largest layer")


@pytest.mark.parametrize(
    ("variant", "tokens", "experts", "choices", "width", "why"),
    [
        (Variant(FUSED, 8), 9, 16, 8, 256, "one kernel for both projections"),
        (Variant(FUSED, 8), 8, 1025, 8, 256, "one kernel for both projections"),
        (Variant(FUSED, 8), 8, 16, 9, 256, "one kernel for both projections"),
        (Variant(FUSED, 8), 8, 16, 8, 8208, "one kernel for both projections"),
        (Variant(IN_KERNEL, 8), 13, 16, 5, 256, "more than 64 pairs"),
    ],
    ids=str,
)
def test_what_is_not_valid_is_refused(
    variant: Variant, tokens: int, experts: int, choices: int, width: int, why: str
) -> None:
    assert not is_valid(variant, Layer(tokens, experts, choices, width, 16, "bf16", hopper=True))
    with pytest.raises(UnsupportedError, match=why):
        by_variant(variant, *layer(tokens, experts, choices, width, 16))


@large_allocation(gib=14)
@pytest.mark.parametrize("form", ["bf16", "channel", "block"])
def test_weights_beyond_2_to_the_31_elements(form: str) -> None:
    experts, width, inner = 1024, 2048, 1040
    hidden, weights = torch.randn(3, width, device="cuda").bfloat16(), torch.ones(3, 1, device="cuda")
    ids = torch.full((3, 1), experts - 1, dtype=torch.int32, device="cuda")
    near, far, scales, far_scales = [], [], {}, {}
    for name, rows, columns in (("w1_scale", 2 * inner, width), ("w2_scale", width, inner)):
        weight = (torch.randn(1, rows, columns, device="cuda") / columns**0.5).bfloat16()
        if form != "bf16":
            weight, scales[name], _ = quantised(weight, form)
            far_scales[name] = scales[name].expand(experts, *scales[name].shape[1:]).contiguous()
        near.append(weight)
        far.append(torch.empty(experts, rows, columns, dtype=weight.dtype, device="cuda"))
        assert far[-1][:-1].numel() > 2**31
        far[-1][-1].view(torch.uint8).copy_(weight[0].view(torch.uint8))
    want = by_variant(Variant(FUSED, 8), hidden, *near, weights, torch.zeros_like(ids), **scales)
    assert_same_bits(by_variant(Variant(FUSED, 8), hidden, *far, weights, ids, **far_scales), want, "the last expert")


def test_the_kernel_and_its_sum_wait_for_tokens_and_routing() -> None:
    w1 = torch.randn(EXPERTS, 2 * INNER, WIDTH, device="cuda").bfloat16() / WIDTH**0.5
    w2 = torch.randn(EXPERTS, WIDTH, INNER, device="cuda").bfloat16() / INNER**0.5
    first, second = (torch.randn(2, WIDTH, device="cuda").bfloat16() for _ in range(2))
    weights, ids = torch.rand(2, CHOICES, device="cuda"), routing("random", 2)

    def chain(i, between):  # type: ignore[no-untyped-def]
        x = by_variant(Variant(IN_KERNEL, 8), (first, second)[i], w1, w2, weights, ids)
        between()
        return [by_variant(Variant(FUSED, 8), x, w1, w2, weights, ids)]

    assert_waits_for_the_launch_before(chain)
