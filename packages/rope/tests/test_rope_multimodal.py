"""multimodal_rotary_embedding against transformers' Qwen2-VL and Qwen3-VL, and a frequency at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rotation_bounds import assert_same_rotation

import kestrel_rope
from kestrel_runtime.testing import opcheck

TABLE = kestrel_rope.build_cos_sin_cache(128, 64)


def of_transformers(query, positions, sections, interleaved):
    """What Qwen2-VL or Qwen3-VL make of query [T, H, 128] by TABLE."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    if interleaved:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding as Embedding
    else:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding as Embedding
    cos, sin = (part[positions][:, None] for part in TABLE.chunk(2, dim=1))  # [3, 1, T, 64]
    recompose = Embedding.recomposition_frequencies
    cos, sin = (recompose(SimpleNamespace(mrope_section=sections), part.clone()) for part in (cos, sin))
    heads = query.transpose(0, 1)[None]
    return apply_rotary_pos_emb(heads, heads, cos, sin)[0][0].transpose(0, 1)


@pytest.mark.parametrize(
    ("interleaved", "sections"),
    [
        (False, [24, 20, 20]),
        (False, [16, 24, 24]),
        (False, [0, 0, 64]),
        (True, [24, 20, 20]),
        (True, [22, 21, 21]),
        (True, [64, 0, 0]),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 257, 740])
def test_it_is_what_qwen_vl_of_transformers_does(interleaved, sections, tokens):
    torch.manual_seed(tokens)
    positions = torch.randint(0, 64, (3, tokens))
    query, key = torch.randn(tokens, 4, 128), torch.randn(tokens, 2, 128)
    wanted = [of_transformers(x, positions, sections, interleaved) for x in (query, key)]
    kestrel_rope.multimodal_rotary_embedding(positions, query, key, 128, TABLE, sections, interleaved=interleaved)
    for got, want in zip((query, key), wanted, strict=True):
        assert_same_rotation(got, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_frequency_turns_by_its_axis(interleaved, is_neox, dtype):
    """Against rotary_embedding with the positions of one axis: bit for bit, as only the angle differs."""
    torch.manual_seed(0)
    sections = [4, 3, 3]
    axes = [0, 1, 2] * 3 + [0] if interleaved else [0] * 4 + [1] * 3 + [2] * 3
    table = kestrel_rope.build_cos_sin_cache(20, 64)
    positions = torch.randint(0, 64, (3, 9))
    query = torch.randn(9, 2, 32).to(dtype)
    by_axis = [query.clone() for _ in range(3)]
    for axis, x in enumerate(by_axis):
        kestrel_rope.rotary_embedding(positions[axis], x, None, 32, table, is_neox)
    before = query.clone()
    kestrel_rope.multimodal_rotary_embedding(
        positions, query, None, 32, table, sections, is_neox, interleaved=interleaved
    )
    for pair, axis in enumerate(axes):
        for dim in (pair, pair + 10) if is_neox else (2 * pair, 2 * pair + 1):
            assert torch.equal(query[..., dim], by_axis[axis][..., dim]), (pair, axis)
    assert torch.equal(query[..., 20:], before[..., 20:])


def test_equal_positions_are_plain_rotary_embedding():
    positions = torch.arange(7).expand(3, 7)
    query = torch.randn(7, 256)
    plain = query.clone()
    kestrel_rope.rotary_embedding(positions[0], plain, None, 128, TABLE)
    kestrel_rope.multimodal_rotary_embedding(positions, query, None, 128, TABLE, [24, 20, 20], interleaved=True)
    assert torch.equal(query, plain)


def test_one_position_outside_the_table_leaves_the_row_untouched():
    query = torch.full((5, 1, 128), float("nan"))
    query[2:] = torch.randn(3, 1, 128)
    before = query.clone()
    positions = torch.full((3, 5), 3)
    positions[0, 0], positions[1, 1], positions[2, 2] = -1, 64, 2**40
    kestrel_rope.multimodal_rotary_embedding(positions, query, None, 128, TABLE, [24, 20, 20])
    assert torch.equal(query[:3].view(torch.int32), before[:3].view(torch.int32))
    assert not torch.equal(query[3], before[3])
    assert not torch.equal(query[4], before[4])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extreme_rows_stay_alone(dtype, interleaved):
    """NaN, inf, 1e4, denormals and zeros each in a row: each as by rotary_embedding, the others as without it."""
    torch.manual_seed(0)
    positions, sections = torch.tensor([[3], [11], [40]]).expand(3, 6), [24, 20, 20]
    plain = torch.randn(6, 2, 128).to(dtype)
    mixed = plain.clone()
    mixed[0], mixed[1], mixed[2] = float("nan"), float("inf"), 1e4
    mixed[3], mixed[4] = torch.finfo(dtype).smallest_normal / 4, 0.0
    by_axis = [mixed.clone() for _ in sections]
    for axis, x in enumerate(by_axis):
        kestrel_rope.rotary_embedding(positions[axis], x, None, 128, TABLE)
    for x in (plain, mixed):
        kestrel_rope.multimodal_rotary_embedding(positions, x, None, 128, TABLE, sections, interleaved=interleaved)
    assert mixed[0].isnan().all()
    assert not mixed[1].isfinite().any()
    assert torch.equal(mixed[4], torch.zeros_like(mixed[4]))
    assert torch.equal(mixed[5], plain[5])
    for pair in range(64):
        owner = pair % 3 if interleaved and pair < 60 else (0 if interleaved or pair < 24 else 1 if pair < 44 else 2)
        for dim in (pair, pair + 64):
            assert torch.equal(mixed[2:5, :, dim], by_axis[owner][2:5, :, dim]), (pair, owner)


@pytest.mark.parametrize("rows", [0, 64])
def test_no_rows(rows):
    query = torch.randn(0 if rows else 2, 128)
    before = query.clone()
    positions = torch.zeros(3, len(query), dtype=torch.int32)
    kestrel_rope.multimodal_rotary_embedding(positions, query, None, 128, TABLE[:rows], [24, 20, 20])
    assert torch.equal(query, before)


def arguments(kind: str):
    torch.manual_seed(0)
    positions = torch.randint(0, 64, (5, 3)).t() if kind == "transposed" else torch.randint(0, 64, (3, 5))
    if kind == "sliced":
        packed = torch.randn(5, 6 * 128)
        return positions, packed[:, :512], packed[:, 512:640].clone(), 128, TABLE, [24, 20, 20]
    query = torch.randn(4, 5, 128).transpose(0, 1) if kind == "transposed" else torch.randn(5, 4, 128)
    return positions, query, None if kind == "no key" else torch.randn(5, 2, 128), 128, TABLE, [24, 20, 20]


KINDS = ("plain", "no key", "transposed", "sliced")


@pytest.mark.parametrize("kind", KINDS)
def test_the_registered_op_is_sound(kind):
    opcheck(kestrel_rope.multimodal_rotary_embedding, arguments(kind), {"interleaved": kind == "plain"})


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), ("plain", "inductor")])
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()
    eager, compiled = arguments(kind), arguments(kind)
    function = kestrel_rope.multimodal_rotary_embedding
    function(*eager, interleaved=True)
    torch.compile(function, fullgraph=True, backend=backend)(*compiled, interleaved=True)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
