"""On a GPU the cache holds what it holds on a CPU, in a captured graph too."""

from __future__ import annotations

import pytest
import torch

from kestrel_kvcache import gather_cache, int4_cache_write, int8_cache_write, reshape_and_cache, rotary_and_cache
from kestrel_runtime.testing import graph_replay

pytestmark = pytest.mark.gpu

HEADS, SIZE, BLOCKS = 4, 64, 16
ANGLE = torch.arange(128.0)[:, None] * 10.0 ** -torch.arange(16)
TABLE = torch.cat((ANGLE.cos(), ANGLE.sin()), dim=1)


def rows(tokens: int, seed: int) -> list[torch.Tensor]:
    """Keys, values and distinct slots, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(BLOCKS * 64, generator=generator)[:tokens]
    slots[2::5] = -1
    return [*torch.randn(2, tokens, HEADS, SIZE, generator=generator).bfloat16(), slots]


def caches(kind: str) -> list[torch.Tensor]:
    shape = (BLOCKS, 64, HEADS, SIZE)
    if kind == "int8":
        codes, scales = torch.zeros(2, *shape, dtype=torch.int8), torch.zeros(2, *shape[:3])
        return [*codes, *scales]
    if kind == "int4":
        codes = torch.zeros(2, *shape[:3], SIZE // 2, dtype=torch.uint8)
        per_channel, per_token = torch.zeros(2, BLOCKS, HEADS, SIZE).half(), torch.zeros(2, *shape[:3]).half()
        return [*codes, *per_channel, *per_token, torch.zeros(2, 64, HEADS, SIZE).bfloat16()]
    return list(torch.zeros(2, *shape, dtype=torch.uint8 if kind == "fp8" else torch.bfloat16))


def write(kind: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, *cache: torch.Tensor) -> None:
    if kind == "int8":
        int8_cache_write(key, value, *cache, slots)
    elif kind == "int4":
        int4_cache_write(key, value, *cache, slots, slots // (BLOCKS * 32))
    else:
        reshape_and_cache(key, value, *cache, slots, kind)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


KINDS = ("auto", "fp8", "int8", "int4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
def test_caches_are_those_of_a_cpu(kind, tokens):
    key, value, slots = rows(tokens, 0)
    if kind == "int4":
        slots = torch.arange(tokens)  # pages fill from row 0 on
    on_cpu, on_gpu = caches(kind), [x.cuda() for x in caches(kind)]
    write(kind, key, value, slots, *on_cpu)
    write(kind, key.cuda(), value.cuda(), slots.cuda(), *on_gpu)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_graph_sees_new_rows_and_slots(kind):
    args, fresh = ([x.cuda() for x in (*rows(16, seed), *caches(kind))] for seed in (1, 2))
    graph_replay(lambda *given: write(kind, *given), args, fresh)
    want = [x.cpu() for x in fresh]
    write(kind, *want)
    for a, b in zip(args, want, strict=True):
        assert same_bits(a, b)


def test_rotated_keys_in_a_replayed_graph():
    table = TABLE.cuda()

    def launch(positions, query, key, value, slots, *cache):
        rotary_and_cache(positions, query, key, value, SIZE, table.to(key.device), *cache, slots)

    def given(seed):
        key, value, slots = rows(16, seed)
        return [slots % 128, key.flip(0), key, value, slots, *caches("auto")]

    args, fresh = ([x.cuda() for x in given(seed)] for seed in (1, 2))
    graph_replay(launch, args, fresh)
    want = [x.cpu() for x in fresh]
    rotary_and_cache(*want[:4], SIZE, TABLE, *want[5:], want[4])
    for a, b in zip(args, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=torch.finfo(torch.bfloat16).eps, atol=2e-6)


def test_gathered_sequences_are_those_of_a_cpu():
    key, value, _ = rows(200, 0)
    cache = caches("int4")
    write("int4", key, value, torch.arange(200), *cache)
    names = ("k_scale", "k_zero", "v_scale", "v_zero", "k_tail")
    scales = dict(zip(names, cache[2:], strict=True)) | {"seq_ids": torch.zeros(1, dtype=torch.int32)}
    table = torch.arange(BLOCKS, dtype=torch.int32)
    want = gather_cache(*cache[:2], table, 200, **scales)
    got = gather_cache(
        *(x.cuda() for x in cache[:2]), table.cuda(), 200, **{name: x.cuda() for name, x in scales.items()}
    )
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


def test_a_block_stride_past_two_to_the_31():
    shape, strides = (2, 1, HEADS, SIZE), (2**31, HEADS * SIZE, SIZE, 1)
    far = torch.zeros(2**31 + HEADS * SIZE, dtype=torch.uint8, device="cuda").as_strided(shape, strides)
    near = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    key, value, _ = (x.cuda() for x in rows(2, 0))
    for cache in (far, near):
        reshape_and_cache(key, value, cache, torch.empty_like(near), torch.tensor([0, 1]).cuda(), "fp8")
    assert torch.equal(far, near)
    assert bool(near[1].any())
    table = torch.tensor([1, 0], dtype=torch.int32).cuda()
    for a, b in zip(gather_cache(far, far, table, 2), gather_cache(near, near, table, 2), strict=True):
        assert same_bits(a, b)
