"""moe_align_block_size, moe_lora_align_block_size and route_and_align against lists built in Python."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_moe import (
    moe_align_block_size,
    moe_lora_align_block_size,
    reference_experts,
    route_and_align,
    topk_softmax,
)
from kestrel_runtime.testing import canary


def by_hand(
    ids: torch.Tensor, experts: int, block: int, positions: int, blocks: int, expert_map: list[int] | None = None
) -> tuple[list[int], list[int], int]:
    flat = ids.flatten().tolist()
    sorted_ids: list[int] = []
    block_experts: list[int] = []
    for e in range(experts):
        place = e if expert_map is None else expert_map[e]
        group = [i for i, chosen in enumerate(flat) if chosen == e and place >= 0]
        group += [len(flat)] * (-len(group) % block)
        sorted_ids += group
        block_experts += [place] * (len(group) // block)
    length = len(sorted_ids)
    return sorted_ids + [len(flat)] * (positions - length), block_experts + [-1] * (blocks - len(block_experts)), length


def buffers(positions: int, blocks: int) -> tuple[torch.Tensor, ...]:
    return tuple(canary((n,), torch.int32)[0] for n in (positions, blocks, 1))


def assert_aligned(
    ids: torch.Tensor, experts: int, block: int, expert_map: list[int] | None = None, spare: int = 0
) -> None:
    pairs = ids.numel()
    blocks = (pairs + min(pairs, experts) * (block - 1)) // block + spare
    positions = blocks * block + spare
    made = [canary((n,), torch.int32) for n in (positions, blocks, 1)]
    outputs = [tensor for tensor, _ in made]
    before = ids.clone()
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    moe_align_block_size(ids, experts, block, *outputs, table)
    expected = by_hand(ids, experts, block, positions, blocks, expert_map)
    assert outputs[0].tolist() == expected[0]
    assert outputs[1].tolist() == expected[1]
    assert outputs[2].item() == expected[2]
    assert torch.equal(ids, before)
    for _, assert_intact in made:
        assert_intact()


def random_ids(tokens: int, choices: int, experts: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens * 31 + experts)
    return torch.rand(tokens, experts, generator=g).argsort(1)[:, :choices].int()


@pytest.mark.parametrize("block", [1, 16, 64, 128])
@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (8, 2), (60, 4), (64, 8), (512, 10), (1500, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 257])
def test_pairs_are_grouped_by_expert_in_ascending_order(tokens: int, experts: int, choices: int, block: int) -> None:
    assert_aligned(random_ids(tokens, choices, experts), experts, block)


def test_a_prompt_of_740_tokens_is_grouped_too() -> None:
    assert_aligned(random_ids(740, 8, 64), 64, 64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_many_tokens_and_larger_buffers(dtype: torch.dtype) -> None:
    assert_aligned(random_ids(4096, 8, 64).to(dtype), 64, 128, spare=5)


@pytest.mark.parametrize("block", [4, 32])
def test_all_pairs_to_one_expert_fill_the_last_block(block: int) -> None:
    assert_aligned(torch.full((50, 2), 7, dtype=torch.int32), 8, block)
    assert_aligned(torch.full((32, 1), 0, dtype=torch.int32), 8, block)


def test_every_pair_to_its_own_expert_needs_the_smallest_allowed_buffer() -> None:
    assert_aligned(torch.arange(6, dtype=torch.int32).view(3, 2), 6, 16)


def test_ids_out_of_range_are_dropped() -> None:
    ids = random_ids(40, 3, 8)
    ids[::3, 1], ids[1::4, 0], ids[5] = -1, 8, torch.tensor([-(2**31), 2**31 - 1, 2])
    assert_aligned(ids, 8, 16)
    assert_aligned(torch.full((4, 2), -1, dtype=torch.int32), 8, 16)


def test_an_expert_map_drops_and_renames() -> None:
    expert_map = [-1, 3, -1, 0, 2, -1, -1, 1]
    assert_aligned(random_ids(40, 3, 8), 8, 16, expert_map)
    assert_aligned(random_ids(40, 3, 8), 8, 16, [-1] * 8)
    ids = random_ids(40, 3, 8)
    ids[::3, 1], ids[1::4, 0], ids[5] = -1, 8, torch.tensor([-(2**31), 2**31 - 1, 2])  # none of them is in the map
    assert_aligned(ids, 8, 16, expert_map)


def test_a_view_of_the_ids_counts_its_own_pairs() -> None:
    ids = random_ids(40, 6, 8)
    assert_aligned(ids[1::2, 2:5], 8, 16)


def test_the_number_of_experts_costs_no_memory() -> None:
    ids, experts = torch.tensor([[5, 2**31 - 2], [2**31 - 1, 5]]), 2**31 - 1  # one id is past the end
    outputs = buffers(16, 4)
    moe_align_block_size(ids, experts, 4, *outputs)
    assert outputs[0].tolist() == [0, 3, 4, 4, 1, *[4] * 11]
    assert outputs[1].tolist() == [5, 2**31 - 2, -1, -1]
    assert outputs[2].item() == 8


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [torch.bool, torch.int32])
@pytest.mark.parametrize("expert_map", [None, [1, -1, 0, 2, -1, 3]])
def test_each_adapter_gets_the_alignment_of_its_own_tokens(flags: torch.dtype, expert_map: list[int] | None) -> None:
    ids = random_ids(30, 2, 6)
    mapping = torch.randint(
        -1, 5, (30,), generator=torch.Generator().manual_seed(0)
    ).int()  # 4 is past the last adapter
    enabled = torch.tensor([1, 0, 2, -1]).to(flags)  # any number but 0
    blocks = (60 + 6 * 7) // 8
    outputs = [torch.full(shape, -7, dtype=torch.int32) for shape in ((4, blocks * 8 + 3), (4, blocks), (4,))]
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    moe_lora_align_block_size(ids, mapping, 6, 8, 4, *outputs, enabled, table)
    for adapter in (0, 2, 3):
        own = torch.where(mapping[:, None] == adapter, ids, -1)
        expected = by_hand(own, 6, 8, blocks * 8 + 3, blocks, expert_map)
        got = [output[adapter].tolist() for output in outputs]
        assert got == list(expected), f"adapter {adapter}"
    assert all(bool((output[1] == -7).all()) for output in outputs)  # the disabled one


@pytest.mark.parametrize("tokens", [0, 257])
@pytest.mark.parametrize(("experts", "choices"), [(64, 8), (512, 10)])
def test_adapters_with_the_expert_counts_of_models(experts: int, choices: int, tokens: int) -> None:
    block = 64
    ids, mapping = random_ids(tokens, choices, experts), (torch.arange(tokens) % 4 - 1).int()
    pairs = ids.numel()
    blocks = (pairs + min(pairs, experts) * (block - 1)) // block + 1
    outputs = [torch.full(shape, -7, dtype=torch.int32) for shape in ((3, blocks * block), (3, blocks), (3,))]
    enabled = torch.ones(3, dtype=torch.bool)
    moe_lora_align_block_size(ids, mapping, experts, block, 3, *outputs, enabled)
    for adapter in range(3):
        own = torch.where(mapping[:, None] == adapter, ids, -1)
        expected = by_hand(own, experts, block, blocks * block, blocks)
        got = [output[adapter].tolist() for output in outputs]
        assert got == list(expected), f"adapter {adapter}"


# ---- routing and alignment in one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 100])
@pytest.mark.parametrize(
    "options", [{}, {"renormalize": True, "bias": True}, {"expert_map": [2, -1, 0, 1, -1, 3, 4, -1]}]
)
def test_routing_and_aligning_is_the_two_ops_in_turn(tokens: int, options: dict) -> None:
    logits = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))
    expert_map = options.get("expert_map")
    routing = {
        "renormalize": "renormalize" in options,
        "bias": torch.linspace(0, 0.3, 8) if "bias" in options else None,
    }
    table = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    weights, ids, sorted_ids, block_experts, length = route_and_align(logits, 2, 16, **routing, expert_map=table)
    expected_weights, expected_ids, _ = topk_softmax(logits, 2, **routing)
    assert torch.equal(weights, expected_weights)
    assert torch.equal(ids, expected_ids)
    pairs = 2 * tokens
    blocks = (pairs + min(pairs, 8) * 15) // 16
    expected = by_hand(expected_ids, 8, 16, blocks * 16, blocks, expert_map)
    assert [sorted_ids.tolist(), block_experts.tolist(), length.item()] == list(expected)
    assert {t.dtype for t in (ids, sorted_ids, block_experts, length)} == {torch.int32}


@pytest.mark.parametrize("tokens", [3, 257])
@pytest.mark.parametrize(("experts", "choices"), [(60, 4), (256, 8), (512, 10)])
def test_routing_and_aligning_with_the_expert_counts_of_models(experts: int, choices: int, tokens: int) -> None:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    weights, ids, sorted_ids, block_experts, length = route_and_align(logits, choices, 64)
    expected_weights, expected_ids, _ = topk_softmax(logits, choices)
    assert torch.equal(weights, expected_weights)
    assert torch.equal(ids, expected_ids)
    pairs = choices * tokens
    blocks = (pairs + min(pairs, experts) * 63) // 64
    expected = by_hand(expected_ids, experts, 64, blocks * 64, blocks)
    assert [sorted_ids.tolist(), block_experts.tolist(), length.item()] == list(expected)


def test_the_references_read_nothing_on_the_host() -> None:
    with FakeTensorMode():  # a read of a value would raise here
        ids, table = torch.empty(5, 2, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        outputs = [torch.empty(n, dtype=torch.int32) for n in (160, 10, 1)]
        reference_experts.moe_align_block_size(ids, 8, 16, *outputs, table)
        stacked = [torch.empty(s, dtype=torch.int32) for s in ((3, 160), (3, 10), (3,))]
        mapping, enabled = torch.empty(5, dtype=torch.int32), torch.empty(3, dtype=torch.bool)
        reference_experts.moe_lora_align_block_size(ids, mapping, 8, 16, 3, *stacked, enabled, table)
        result = reference_experts.route_and_align(torch.empty(5, 8), 2, 16, expert_map=table)
    assert [t.shape for t in result] == [(5, 2), (5, 2), (128,), (8,), (1,)]
