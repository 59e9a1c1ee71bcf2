"""rotary_embedding against complex multiplication in float64 and against transformers."""

from __future__ import annotations

import pytest
import torch
from rotation_bounds import assert_rounded_once, assert_same_rotation

import kestrel_rope
from kestrel_runtime.testing import assert_registered, canary, opcheck

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def table_of(rotary_dim: int, rows: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return kestrel_rope.build_cos_sin_cache(rotary_dim, rows, dtype=dtype)


def turned_in_float64(x, positions, table, is_neox=True, offset=0, inverse=False):
    """x [..., heads, D] in float64: pairs as complex numbers, multiplied by the row's unit numbers."""
    exact = x.double().clone()
    half = table.shape[1] // 2
    for row in torch.cartesian_prod(*(torch.arange(n) for n in positions.shape)).reshape(-1, positions.ndim):
        at = tuple(row.tolist())
        position = int(positions[at])
        if not 0 <= position < table.shape[0]:
            continue
        unit = torch.complex(table[position, :half].double(), table[position, half:].double())
        unit = unit.conj() if inverse else unit
        for pair in range(half):
            i, j = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
            old = x[at][..., (offset + i, offset + j)].double()
            new = torch.complex(old[..., 0], old[..., 1]) * unit[pair]
            exact[at][..., offset + i], exact[at][..., offset + j] = new.real, new.imag
    return exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "rotary_dim", "offset"),
    [
        (1, 32, 32, 64, 32, 0),
        (3, 8, 2, 80, 80, 0),
        (16, 4, 1, 96, 40, 16),
        (257, 2, 2, 64, 64, 0),
        (0, 4, 4, 64, 32, 0),
    ],
)
def test_pairs_turn_by_the_angle_of_their_position(dtype, is_neox, tokens, heads, kv_heads, size, rotary_dim, offset):
    torch.manual_seed(tokens)
    table = table_of(rotary_dim)
    positions = torch.randint(0, 64, (tokens,))
    query, key = torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, kv_heads, size).to(dtype)
    before = query.clone(), key.clone()
    result = kestrel_rope.rotary_embedding(positions, query, key, size, table, is_neox, rope_dim_offset=offset)
    assert result is None
    for got, old in zip((query, key), before, strict=True):
        exact = turned_in_float64(old, positions, table, is_neox, offset)
        assert_rounded_once(got, exact, old)
        assert torch.equal(got[..., :offset], old[..., :offset])
        assert torch.equal(got[..., offset + rotary_dim :], old[..., offset + rotary_dim :])


@pytest.mark.parametrize("tokens", [740, 4096])
def test_neox_is_what_llama_of_transformers_does(tokens):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    table, positions = table_of(128, 4096), torch.randperm(4096)[:tokens]
    query, key = torch.randn(tokens, 4, 128), torch.randn(tokens, 2, 128)
    cos, sin = (part.repeat(1, 2)[positions][None] for part in table.chunk(2, dim=1))
    wanted = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    kestrel_rope.rotary_embedding(positions, query, key, 128, table)
    for got, want in zip((query, key), wanted, strict=True):
        assert_same_rotation(got.transpose(0, 1)[None], want)


def test_gptj_order_is_what_gptj_of_transformers_does():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    torch.manual_seed(0)
    table, positions = table_of(64, 32), torch.arange(31)
    query = torch.randn(1, 31, 3, 64)
    cos, sin = (part[positions][None] for part in table.chunk(2, dim=1))
    wanted = apply_rotary_pos_emb(query, sin, cos)
    kestrel_rope.rotary_embedding(positions[None], query, None, 64, table, False)
    assert_same_rotation(query, wanted)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_flat_rows_and_batched_positions_are_the_same_rows(index_dtype):
    torch.manual_seed(0)
    table, positions = table_of(32), torch.randint(0, 64, (2, 5), dtype=index_dtype)
    heads = torch.randn(2, 5, 3, 64)
    flat, rows = heads.clone().flatten(2), heads.clone().flatten(0, 1)
    kestrel_rope.rotary_embedding(positions, heads, None, 64, table)
    kestrel_rope.rotary_embedding(positions, flat, None, 64, table)
    kestrel_rope.rotary_embedding(positions.flatten(), rows, None, 64, table)
    assert torch.equal(flat, heads.flatten(2))
    assert torch.equal(rows, heads.flatten(0, 1))


def test_slices_of_a_packed_projection_are_written_in_place_and_nothing_else():
    torch.manual_seed(0)
    table, positions = table_of(32), torch.arange(7)
    packed, assert_intact = canary((7, 4 * 64), torch.float32)
    packed.copy_(torch.randn(7, 4 * 64))
    before = packed.clone()
    query, key, value = packed.split((128, 64, 64), dim=1)
    alone = query.clone(), key.clone()
    kestrel_rope.rotary_embedding(positions, *alone, 64, table)
    kestrel_rope.rotary_embedding(positions, query, key, 64, table)
    assert torch.equal(query, alone[0])
    assert torch.equal(key, alone[1])
    assert torch.equal(value, before[:, 192:])
    assert_intact()


def test_heads_may_be_the_outer_dimension():
    torch.manual_seed(0)
    table, positions = table_of(64), torch.arange(6)
    outer = torch.randn(3, 6, 64)
    inner = outer.transpose(0, 1).contiguous()
    kestrel_rope.rotary_embedding(positions, outer.transpose(0, 1), None, 64, table)
    kestrel_rope.rotary_embedding(positions, inner, None, 64, table)
    assert torch.equal(outer.transpose(0, 1), inner)


def test_positions_outside_the_table_leave_their_rows_untouched():
    query = torch.full((5, 1, 64), float("nan"))
    query[2:] = torch.randn(3, 1, 64)
    before = query.clone()
    positions = torch.tensor([-1, 64, 2**40, 5, -(2**40)])
    kestrel_rope.rotary_embedding(positions, query, None, 64, table_of(64))
    untouched = [0, 1, 2, 4]
    assert torch.equal(query[untouched].view(torch.int32), before[untouched].view(torch.int32))
    assert not torch.equal(query[3], before[3])


def test_a_table_without_rows_touches_nothing():
    query = torch.randn(2, 64)
    before = query.clone()
    kestrel_rope.rotary_embedding(torch.tensor([0, 1]), query, None, 64, table_of(64, 0))
    assert torch.equal(query, before)


@pytest.mark.parametrize("is_neox", [True, False])
def test_inverse_turns_back(is_neox):
    torch.manual_seed(0)
    table, positions = table_of(48), torch.arange(9)
    query = torch.randn(9, 2, 64)
    before = query.clone()
    kestrel_rope.rotary_embedding(positions, query, None, 64, table, is_neox, rope_dim_offset=8, inverse=True)
    exact = turned_in_float64(before, positions, table, is_neox, 8, inverse=True)
    assert_rounded_once(query, exact, before)
    kestrel_rope.rotary_embedding(positions, query, None, 64, table, is_neox, rope_dim_offset=8)
    # Two rotations of 3.5 units of 2^-24 each, and cosines and sines whose squares sum to 1 but for 2 units.
    torch.testing.assert_close(query, before, rtol=0, atol=9 * 2**-24 * float(before.abs().max()) * 2**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_table_may_have_the_dtype_of_the_query(dtype):
    torch.manual_seed(0)
    table, positions = table_of(64, 64, dtype), torch.arange(9)
    query = torch.randn(9, 2, 64).to(dtype)
    before = query.clone()
    kestrel_rope.rotary_embedding(positions, query, None, 64, table)
    assert_rounded_once(query, turned_in_float64(before, positions, table), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows_stay_alone(dtype):
    """NaN, inf, 1e4, denormals and zeros each in a row: the other rows come out as without them."""
    torch.manual_seed(0)
    table, positions = table_of(64), torch.full((6,), 3)
    plain = torch.randn(6, 2, 64).to(dtype)
    mixed = plain.clone()
    mixed[0], mixed[1], mixed[2] = float("nan"), float("inf"), 1e4
    mixed[3], mixed[4] = torch.finfo(dtype).smallest_normal / 4, 0.0
    before = mixed.clone()
    kestrel_rope.rotary_embedding(positions, plain, None, 64, table)
    kestrel_rope.rotary_embedding(positions, mixed, None, 64, table)
    assert mixed[0].isnan().all()
    assert not mixed[1].isfinite().any()
    assert torch.equal(mixed[4], torch.zeros_like(mixed[4]))
    assert torch.equal(mixed[5], plain[5])
    finite = [2, 3, 4, 5]
    exact = turned_in_float64(before[finite], positions[finite], table)
    assert_rounded_once(mixed[finite], exact, before[finite])


def arguments(kind: str):
    torch.manual_seed(0)
    table = table_of(32)
    if kind == "heads":
        return torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 2, 64), 64, table
    if kind == "no key":
        return torch.arange(5), torch.randn(5, 256), None, 64, table
    if kind == "batched":
        return torch.arange(6).reshape(2, 3), torch.randn(2, 3, 64), torch.randn(2, 3, 64), 64, table
    if kind == "transposed":
        return (
            torch.arange(5),
            torch.randn(4, 5, 64).transpose(0, 1),
            torch.randn(5, 2, 64),
            64,
            table.bfloat16().float(),
        )
    packed = torch.randn(5, 8 * 64)
    return torch.arange(5), packed[:, :256], packed[:, 256:384].clone(), 64, table


KINDS = ("heads", "no key", "batched", "transposed", "sliced")


def test_every_op_is_registered_documented_and_checked():
    assert_registered(kestrel_rope)


@pytest.mark.parametrize("kind", KINDS)
def test_the_registered_op_is_sound(kind):
    opcheck(kestrel_rope.rotary_embedding, arguments(kind), {"rope_dim_offset": 8})


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), ("sliced", "inductor")])
def test_compiles_without_graph_breaks(kind, backend):
    torch._dynamo.reset()  # the number of variants of one function is limited
    eager, compiled = arguments(kind), arguments(kind)
    kestrel_rope.rotary_embedding(*eager, inverse=True)
    torch.compile(kestrel_rope.rotary_embedding, fullgraph=True, backend=backend)(*compiled, inverse=True)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_numbers_may_change_between_calls_of_a_compiled_function():
    torch._dynamo.reset()
    positions, query, table = torch.arange(5), torch.randn(5, 4 * 64), table_of(16)

    def call(query, head_size, offset):
        kestrel_rope.rotary_embedding(positions, query, None, head_size, table, rope_dim_offset=offset)
        return query

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for head_size, offset in ((64, 0), (64, 8), (32, 16), (128, 3)):
        want = call(query.clone(), head_size, offset)
        assert torch.equal(compiled(query.clone(), head_size, offset), want), (head_size, offset)
