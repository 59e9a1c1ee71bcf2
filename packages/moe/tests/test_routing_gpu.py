"""The routing kernels on a GPU: against the reference on the CPU and float64, poisoned outputs, canaries, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kestrel_moe
from kestrel_moe import (
    moe_align,
    moe_align_block_size,
    moe_lora_align_block_size,
    moe_sum,
    reference_experts,
    route_and_align,
    topk_softmax,
)
from kestrel_moe.reference_experts import most_blocks
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    BadInput,
    assert_rejects,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
    large_allocation,
    poison,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (0, 1, 3, 16, 17, 64, 65, 257, 740, 4096)
EXPERTS = (
    (1, 1),
    (7, 7),
    (8, 2),
    (60, 4),
    (64, 8),
    (64, 9),
    (72, 6),
    (128, 16),
    (256, 8),
    (257, 3),
    (512, 10),
    (512, 32),
)
INF, NAN = float("inf"), float("nan")


# ---- routing ---------------------------------------------------------------------------------------------------------


def logits_of(tokens: int, experts: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens * 1000 + experts)
    return (scale * torch.randn(tokens, experts, generator=generator, device="cuda")).to(dtype)


def by_sorting(gating: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in float64 and ids; NaN as -inf, the largest logit as e^0."""
    x = torch.nan_to_num(gating.double(), nan=-INF, posinf=INF, neginf=-INF)
    largest = x.amax(1, keepdim=True)
    p = torch.where(x == largest, 0.0, x - largest).exp()
    p = p / p.sum(1, keepdim=True)
    ids = x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = p.gather(1, ids)
    return (weights / weights.sum(1, keepdim=True) if renormalize else weights), ids


def assert_routed(gating: torch.Tensor, k: int, renormalize: bool = False) -> None:
    weights, ids, counts = topk_softmax(gating, k, renormalize=renormalize)
    want_weights, want_ids = by_sorting(gating, k, renormalize)
    assert torch.equal(ids, want_ids.int())
    assert torch.equal(counts, torch.bincount(want_ids.flatten(), minlength=gating.shape[1]).int())
    torch.testing.assert_close(weights.double(), want_weights, rtol=6e-6, atol=1e-37)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("experts", "k"), EXPERTS)
def test_ids_are_those_of_a_sort_and_counts_add_up(experts: int, k: int, dtype: torch.dtype, tokens: int) -> None:
    assert_routed(logits_of(tokens, experts, dtype), k, renormalize=tokens % 2 == 1)


@pytest.mark.parametrize(("experts", "k"), [(64, 8), (256, 8), (512, 10)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_are_as_accurate_as_those_of_torch(experts: int, k: int, renormalize: bool) -> None:
    gating = logits_of(4096, experts)
    weights, ids, _ = topk_softmax(gating, k, renormalize=renormalize)
    exact, _ = by_sorting(gating, k, renormalize)
    baseline = gating.softmax(1).gather(1, ids.long())
    if renormalize:
        baseline = baseline / baseline.sum(1, keepdim=True)
    error, theirs = ((w.double() - exact) / exact for w in (weights, baseline))
    assert error.norm() <= 1.1 * theirs.norm()


@pytest.mark.parametrize(("experts", "k"), [(5, 5), (64, 8), (200, 8), (300, 20)])
def test_special_rows_stay_alone(experts: int, k: int) -> None:
    gating = logits_of(12, experts)
    alone = topk_softmax(gating, k)
    gating[1], gating[2], gating[3] = NAN, -INF, INF
    gating[4, ::2], gating[5, 1::2], gating[6, 3] = NAN, -INF, INF
    gating[7], gating[8], gating[9, ::2] = 0.0, 1e38, -0.0
    gating[9, 1::2] = 0.0
    gating[10] = torch.arange(experts, device="cuda") * 1e-45
    assert_routed(gating, k)
    assert_routed(gating, k, renormalize=True)
    weights, ids, _ = topk_softmax(gating, k)
    assert torch.equal(weights[[0, 11]], alone[0][[0, 11]])
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("experts", [60, 64, 256, 500])
def test_ties_go_to_the_lower_id(experts: int) -> None:
    gating = torch.randint(0, 3, (257, experts), device="cuda").float()
    assert_routed(gating, 8)


@pytest.mark.parametrize("experts", [60, 64, 128, 256, 500])
def test_logits_that_differ_in_their_last_bits_are_told_apart(experts: int) -> None:
    steps = torch.randint(0, 300, (257, experts), device="cuda")
    bits = torch.tensor([3.0], device="cuda").view(torch.int32) + steps.int()
    close = bits.view(torch.float32)
    assert_routed(close, 8)
    assert_routed(-close, 8, renormalize=True)
    mixed = logits_of(257, experts).bfloat16().float()
    mixed[:, 1::2] = mixed[:, 0:-1:2] * (1 + 2**-22)  # pairs that differ in the last bits, among equal values
    assert_routed(mixed, 8)
    assert_routed(mixed.half().float(), 8)
    largest = torch.full((3, experts), 1.0, device="cuda")
    largest[:, -1] = 1 + 2**-23  # the only one above, and the last
    assert topk_softmax(largest, 1)[1].tolist() == [[experts - 1]] * 3


@pytest.mark.parametrize("tokens", [1, 16, 740])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("experts", [24, 64, 256, 384])
def test_a_bias_moves_the_selection_and_not_the_weights(experts: int, dtype: torch.dtype, tokens: int) -> None:
    gating = logits_of(tokens, experts, dtype)
    bias = torch.randn(experts, device="cuda").to(dtype)  # far apart: no two sums tie within rounding
    bias[3] = NAN
    for renormalize in (False, True):
        weights, ids, counts = topk_softmax(gating, 8, bias=bias, renormalize=renormalize)
        want = [t.cuda() for t in kestrel_moe.reference.topk_softmax(gating.cpu(), 8, renormalize, bias.cpu())]
        assert torch.equal(ids, want[1])
        assert torch.equal(counts, want[2])
        torch.testing.assert_close(weights, want[0], rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("number", ["negative", "none", "one", "half", "all", "more"])
@pytest.mark.parametrize("experts", [64, 256])
@pytest.mark.parametrize("tokens", [16, 740])
def test_rows_past_num_tokens_are_padding(tokens: int, experts: int, number: str) -> None:
    gating = logits_of(tokens, experts)
    real = {"negative": -1, "none": 0, "one": 1, "half": tokens // 2, "all": tokens, "more": tokens + 9}[number]
    kept = min(max(real, 0), tokens)
    weights, ids, counts = topk_softmax(gating, 8, num_tokens=torch.tensor([real], dtype=torch.int32).cuda())
    assert_same_bits((weights[:kept], ids[:kept], counts), topk_softmax(gating[:kept], 8))
    assert bool((ids[kept:] == -1).all() and (weights[kept:] == 0).all())


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 8), (256, 8), (512, 10)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_does_not_depend_on_batch_alignment_or_strides_and_runs_repeat(
    dtype: torch.dtype, experts: int, k: int
) -> None:
    gating = logits_of(740, experts, dtype)
    whole = topk_softmax(gating, k, renormalize=True)
    for row in (0, 1, 333, 739):
        one = topk_softmax(gating[row : row + 1], k, renormalize=True)
        assert torch.equal(one[0][0], whole[0][row])
        assert torch.equal(one[1][0], whole[1][row])
    wide = torch.full((740, experts + 7), NAN, dtype=dtype, device="cuda")
    wide[:, 3 : 3 + experts] = gating
    for other in (wide[:, 3 : 3 + experts], gating):
        for _ in range(20):
            assert all(map(torch.equal, topk_softmax(other, k, renormalize=True), whole))
    assert all(map(torch.equal, topk_softmax(gating.flip(0), k)[2:], whole[2:]))


@large_allocation(gib=5)
def test_logits_with_a_row_stride_past_two_to_the_31() -> None:
    stride = 2**31 + 64
    buffer = torch.empty(stride + 64, dtype=torch.bfloat16, device="cuda")
    gating = buffer.as_strided((2, 64), (stride, 1)).copy_(logits_of(2, 64))
    want = topk_softmax(gating.contiguous(), 8)
    assert all(map(torch.equal, topk_softmax(gating, 8), want))


# ---- alignment -------------------------------------------------------------------------------------------------------


def random_ids(tokens: int, choices: int, experts: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens * 31 + experts + seed)
    return torch.rand(tokens, experts, generator=g).argsort(1)[:, :choices].int().contiguous()


def aligned_on_cpu(
    ids: torch.Tensor, experts: int, block: int, positions: int, blocks: int, table: Any
) -> list[torch.Tensor]:
    outputs = [torch.empty(n, dtype=torch.int32) for n in (positions, blocks, 1)]
    table = None if table is None else torch.tensor(table, dtype=torch.int32)
    reference_experts.moe_align_block_size(ids.cpu(), experts, block, *outputs, table)
    return outputs


def assert_aligned(ids: torch.Tensor, experts: int, block: int, table: list[int] | None = None, spare: int = 0) -> None:
    blocks = most_blocks(ids.numel(), experts, block) + spare
    made = [canary((n,), torch.int32, "cuda") for n in (blocks * block, blocks, 1)]
    outputs = [tensor for tensor, _ in made]
    given = None if table is None else torch.tensor(table, dtype=torch.int32).cuda()
    on_gpu = ids.cuda() if ids.device.type == "cpu" else ids
    moe_align_block_size(on_gpu, experts, block, *outputs, given)
    wanted = aligned_on_cpu(ids, experts, block, blocks * block, blocks, table)
    for got, want in zip(outputs, wanted, strict=True):
        assert torch.equal(got.cpu(), want)
        got.fill_(-7)
    made.append(canary((ids.numel() + 1,), torch.int32, "cuda"))
    positions = made[-1][0].fill_(-1)
    made.append(canary((3 + blocks,), torch.int32, "cuda"))
    numbers = made[-1][0].fill_(-7)
    moe_align._kernels.align_for_experts(on_gpu, experts, block, *outputs[:2], numbers, given, positions, experts)
    for got, want in zip([*outputs[:2], numbers[:1]], wanted, strict=True):
        assert torch.equal(got.cpu(), want)
    assert not numbers[1:].any()  # counters of work items and of each block
    assert torch.equal(positions.cpu(), positions_of(wanted[0], ids.numel()))
    for _, assert_intact in made:
        assert_intact()


def positions_of(order: torch.Tensor, pairs: int) -> torch.Tensor:
    """Of each pair in `order`, -1 for those that are not in it and for one past the last."""
    positions = torch.full((pairs + 1,), -1, dtype=torch.int32)
    positions[order.long()] = torch.arange(order.numel(), dtype=torch.int32)
    positions[pairs] = -1
    return positions


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 100, 257, 740, 1024])
@pytest.mark.parametrize("block", [1, 16, 64, 100])
@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (8, 2), (60, 4), (64, 8), (256, 8), (512, 10), (1500, 3)])
def test_pairs_are_grouped_by_expert_in_ascending_order(experts: int, choices: int, block: int, tokens: int) -> None:
    assert_aligned(random_ids(tokens, choices, experts), experts, block, spare=tokens % 3)


@pytest.mark.parametrize(("experts", "choices"), [(64, 8), (256, 8), (1024, 2)])
@pytest.mark.parametrize("tokens", [4096, 8192, 20001])
def test_prompts_are_grouped_too(tokens: int, experts: int, choices: int) -> None:
    ids = torch.randint(0, experts, (tokens, choices), dtype=torch.int32)
    assert_aligned(ids, experts, 64)
    assert_aligned(ids.long(), experts, 16)


@pytest.mark.parametrize("experts", [2048, 4000])
def test_thousands_of_experts_fall_to_one_block_of_fewer_warps(experts: int) -> None:
    assert_aligned(torch.randint(-2, experts + 2, (500, 4), dtype=torch.int32), experts, 16)


@pytest.mark.parametrize("tokens", [50, 740, 8192])
def test_all_pairs_to_one_expert(tokens: int) -> None:
    assert_aligned(torch.full((tokens, 2), 7, dtype=torch.int32), 8, 32)
    assert_aligned(torch.full((tokens, 1), 0, dtype=torch.int32), 64, 16)
    assert_aligned(torch.full((tokens, 2), -1, dtype=torch.int32), 64, 16)  # and none to any


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [40, 4096])
def test_ids_out_of_range_are_dropped(tokens: int, dtype: torch.dtype) -> None:
    ids = torch.randint(0, 8, (tokens, 3), dtype=dtype)
    info = torch.iinfo(dtype)
    ids[::3, 1], ids[1::4, 0], ids[5] = -1, 8, torch.tensor([info.min, info.max, 2], dtype=dtype)
    assert_aligned(ids, 8, 16)


@pytest.mark.parametrize("tokens", [40, 2000])
def test_an_expert_map_drops_and_renames(tokens: int) -> None:
    ids = torch.randint(0, 8, (tokens, 3), dtype=torch.int32)
    assert_aligned(ids, 8, 16, [-1, 3, -1, 0, 2, -1, -1, 1])
    assert_aligned(ids, 8, 16, [-1] * 8)


@pytest.mark.parametrize("tokens", [40, 4001])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_view_of_the_ids_counts_its_own_pairs(dtype: torch.dtype, tokens: int) -> None:
    assert_aligned(torch.randint(0, 8, (tokens, 6)).to(dtype).cuda()[1::2, 2:5], 8, 16)


@large_allocation(gib=9)
def test_ids_with_a_row_stride_past_two_to_the_31() -> None:
    stride = 2**31 + 64
    ids = torch.empty(stride + 8, dtype=torch.int32, device="cuda").as_strided((2, 8), (stride, 1))
    assert_aligned(ids.copy_(random_ids(2, 8, 64)), 64, 16)


@pytest.mark.parametrize(("tokens", "experts"), [(16, 64), (1024, 64), (8192, 256)])
def test_alignment_repeats_bit_for_bit(tokens: int, experts: int) -> None:
    ids = torch.randint(0, experts, (tokens, 8), dtype=torch.int32, device="cuda")
    results = []
    for _ in range(20):
        blocks = most_blocks(tokens * 8, experts, 64)
        outputs = [poison((n,), torch.int32, "cuda") for n in (blocks * 64, blocks, 1)]
        moe_align_block_size(ids, experts, 64, *outputs)
        results.append(torch.cat(outputs))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("drops", ["none", "some", "all"])
@pytest.mark.parametrize("experts", [1, 8, 300, 1500])
@pytest.mark.parametrize("tokens", [1, 3, 100, 740, 20_001])
def test_rows_of_groups_have_tokens_positions_and_ends(tokens: int, experts: int, drops: str) -> None:
    """Ids in a wider buffer; of many experts most have no row."""
    low, high = {"none": (0, experts), "some": (-2, experts + 3), "all": (-1, 0)}[drops]
    choices, buffer = 3, torch.randint(low, high, (tokens, 8), dtype=torch.int32)
    ids, on_gpu = buffer[:, 2:5], buffer.cuda()[:, 2:5]
    order, rows, length = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (3 * tokens, 3 * tokens, 1))
    moe_align_block_size(on_gpu, experts, 1, order, rows, length)
    made = [canary((n,), torch.int32, "cuda") for n in (3 * tokens, 3 * tokens, experts)]
    moe_align._kernels.group_rows(on_gpu, order, rows, *(tensor.fill_(-7) for tensor, _ in made))
    got_tokens, got_positions, got_ends = (tensor.cpu().long() for tensor, _ in made)
    flat = ids.flatten().long()
    kept = (flat >= 0) & (flat < experts)
    pairs = flat.masked_fill(~kept, experts).argsort(stable=True)[: int(kept.sum())]
    assert torch.equal(got_tokens[: len(pairs)], pairs // choices)
    assert bool(((got_tokens >= 0) & (got_tokens < tokens)).all())
    positions = torch.full((3 * tokens,), -1).index_put((pairs,), torch.arange(len(pairs)))
    assert torch.equal(got_positions, positions)
    assert torch.equal(got_ends, flat[kept].bincount(minlength=experts).cumsum(0))
    for _, assert_intact in made:
        assert_intact()


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "choices", "table"), [(6, 2, [1, -1, 0, 2, -1, 3]), (64, 8, None), (256, 8, None)])
@pytest.mark.parametrize("flags", [torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("tokens", [0, 5, 257, 4096])
def test_each_adapter_gets_its_own_alignment_and_disabled_ones_stay_untouched(
    tokens: int, flags: torch.dtype, experts: int, choices: int, table: Any
) -> None:
    ids = torch.randint(-1, experts + 1, (tokens, choices), dtype=torch.int32)
    mapping = torch.randint(-1, 5, (tokens,), dtype=torch.int32)
    enabled = torch.tensor([1, 0, 1, 1]).to(flags)
    blocks = most_blocks(ids.numel(), experts, 16) + 1
    given = None if table is None else torch.tensor(table, dtype=torch.int32)
    shapes = ((4, blocks * 16 + 3), (4, blocks), (4,))
    want = [torch.full(shape, -7, dtype=torch.int32) for shape in shapes]
    reference_experts.moe_lora_align_block_size(ids, mapping, experts, 16, 4, *want, enabled, given)
    made = [canary(shape, torch.int32, "cuda") for shape in shapes]
    got = [tensor.fill_(-7) for tensor, _ in made]
    given = None if given is None else given.cuda()
    moe_lora_align_block_size(ids.cuda(), mapping.cuda(), experts, 16, 4, *got, enabled.cuda(), given)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), other)
    for _, assert_intact in made:
        assert_intact()


# ---- routing and alignment in one launch -----------------------------------------------------------------------------


@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 33, 100, 257, 512, 513, 740])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (64, 8), (256, 8), (512, 10)])
def test_routing_and_aligning_is_the_two_ops_in_turn(
    experts: int, k: int, dtype: torch.dtype, tokens: int, with_options: bool
) -> None:
    routing: dict[str, Any] = {}
    table = None
    if with_options:
        table = torch.arange(experts, dtype=torch.int32, device="cuda").flip(0) - experts // 4
        routing = {"renormalize": True, "bias": torch.randn(experts, device="cuda")}
    logits = logits_of(tokens, experts, dtype)
    weights, ids, _ = topk_softmax(logits, k, **routing)
    blocks = most_blocks(tokens * k, experts, 16)
    want = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * 16, blocks, 1)]
    moe_align_block_size(ids, experts, 16, *want, table)
    assert_same_bits(route_and_align(logits, k, 16, **routing, expert_map=table), (weights, ids, *want))


# ---- streams, graphs, dependent launches, compilation ----------------------------------------------------------------


def route(logits: torch.Tensor, bias: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
    return list(topk_softmax(logits, 4, bias=bias, num_tokens=real))


def align(ids: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    blocks = most_blocks(ids.numel(), 64, 16)
    outputs = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (blocks * 16, blocks, 1)]
    moe_align_block_size(ids, 64, 16, *outputs, table)
    return outputs


def lora_outputs(ids: torch.Tensor) -> list[torch.Tensor]:
    """Zeros: what belongs to a disabled adapter stays as it is."""
    blocks = most_blocks(ids.numel(), 64, 16)
    return [torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((2, blocks * 16), (2, blocks), (2,))]


def lora_align(
    ids: torch.Tensor,
    mapping: torch.Tensor,
    enabled: torch.Tensor,
    table: torch.Tensor,
    outputs: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    outputs = outputs or lora_outputs(ids)
    moe_lora_align_block_size(ids, mapping, 64, 16, 2, *outputs, enabled, table)
    return outputs


def both(logits: torch.Tensor, bias: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    return list(route_and_align(logits, 4, 16, bias=bias, expert_map=table))


def arguments(op: Callable[..., Any], tokens: int, seed: int) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        """Below 0 the smallest there are, whose bits are those of a float that is no NaN."""
        x = torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.int32)
        return torch.where(x < 0, -(2**31) - x, x)

    logits, bias = (torch.randn(shape, generator=g, device="cuda") for shape in ((tokens, 64), (64,)))
    ids, table = integers(0, 64, tokens, 4), integers(-3, 64, 64)
    if op is route:
        return [logits, bias, torch.full((1,), tokens - seed, device="cuda", dtype=torch.int32)]
    if op is align:
        return [ids, table]
    if op is lora_align:
        enabled = torch.tensor([seed % 2, 1], device="cuda", dtype=torch.int32)
        return [ids, integers(-1, 2, tokens), enabled, table]
    return [logits, bias, table]


OPS = (route, align, lora_align, both)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [4, 257, 2000])
def test_a_graph_replays_with_new_contents(op: Callable[..., Any], tokens: int) -> None:
    old, new = arguments(op, tokens, 1), arguments(op, tokens, 2)
    want = op(*new)
    assert all(map(torch.equal, graph_replay(op, old, new), want))


def test_replays_of_one_graph_count_afresh_each_time() -> None:
    logits = logits_of(4096, 64)
    topk_softmax(logits, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [topk_softmax(logits, 8) for _ in range(3)]
    for seed in range(50):
        logits.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        want = topk_softmax(logits, 8)
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, want, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [16, 1030])
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(op: Callable[..., Any], tokens: int) -> None:
    """Each input in turn is the last of 513 rows that moe_sum, which lets the next kernel start early, writes as
    floats."""
    given, others = arguments(op, tokens, 3), arguments(op, tokens, 4)
    for position, contents in enumerate(zip(given, others, strict=True)):
        words = contents[0].numel()
        rows, sources = torch.zeros(513, words, device="cuda"), torch.zeros(2, 513, 1, words, device="cuda")
        for source, x in zip(sources, contents, strict=True):
            source[512] = x.view(-1).view(torch.float32)
        args = given.copy()
        args[position] = rows[512].view(contents[0].dtype).view(contents[0].shape)

        def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
            outputs = [lora_outputs(given[0])] if op is lora_align else []
            moe_sum(sources[i], rows)  # noqa: B023 (the chain is used up before the loop goes on)
            between()
            return op(*args, *outputs)  # noqa: B023

        assert_waits_for_the_launch_before(chain)


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op: Callable[..., Any]) -> None:
    args = arguments(op, 740, 5)
    want, stream = op(*args), torch.cuda.Stream()
    scratch = torch.zeros(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        late = [torch.zeros_like(value).copy_(value) for value in args]
        got = op(*late)
    stream.synchronize()
    assert all(map(torch.equal, got, want))


def test_two_streams_route_at_the_same_time() -> None:
    inputs = [logits_of(4096, 64) + shift for shift in range(2)]
    want = [topk_softmax(logits, 8) for logits in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(100):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(topk_softmax(inputs[which], 8))
    torch.cuda.synchronize()
    for which in range(2):
        assert all(all(map(torch.equal, result, want[which])) for result in results[which])


@pytest.mark.parametrize("op", OPS)
def test_compiled_without_a_graph_break(op: Callable[..., Any]) -> None:
    args = arguments(op, 16, 6)
    with backend("auto"):
        got = torch.compile(op, fullgraph=True)(*args)
    assert all(map(torch.equal, got, op(*args)))


def test_what_no_kernel_covers_runs_by_reference() -> None:
    with backend("auto"), pytest.warns(Warning, match="512 experts"):
        weights, ids, _ = topk_softmax(logits_of(3, 600), 4)
    want_weights, want_ids = by_sorting(logits_of(3, 600), 4, False)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights.double(), want_weights, rtol=6e-6, atol=0)


def test_a_bias_on_the_cpu_is_refused() -> None:
    case = BadInput("bias elsewhere", "bias", lambda: ((logits_of(3, 8), 2), {"bias": torch.ones(8)}), fragment="cpu")
    assert_rejects(topk_softmax, case)


def test_an_output_on_the_cpu_is_refused() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
    outputs = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (96, 6, 1)]
    case = BadInput("elsewhere", "expert_ids", lambda: ((ids, 8, 16, outputs[0], outputs[1].cpu(), outputs[2]), {}))
    assert_rejects(moe_align_block_size, case)
