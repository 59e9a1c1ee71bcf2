"""tau_tail against the composition it replaces, in float64."""

from __future__ import annotations

import pytest
import torch

from kestrel_attention import tau_tail
from kestrel_runtime.testing import canary, opcheck

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(tokens, heads, kv_heads, size, dtype=torch.float32, table_dtype=torch.float32, shared=False):
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    tok = torch.randn(tokens, heads + kv_heads).to(dtype)
    table = torch.rand(32, heads if shared else heads + kv_heads).to(table_dtype)
    return qkv, tok, table, torch.randint(0, 32, (tokens,))


def scaled_in_float64(qkv, tok, table, positions, heads, size):
    """Row by row, head by head."""
    exact = qkv.double().clone()
    kv_heads = tok.shape[1] - heads
    for t, position in enumerate(positions.tolist()):
        if not 0 <= position < len(table):
            continue
        for column in range(heads + kv_heads):
            shared = column % heads if table.shape[1] == heads else column
            scale = torch.tanh(tok[t, column].double()) + table[position, shared].double()
            head = column if column < heads else column + kv_heads
            exact[t, head * size : (head + 1) * size] *= scale
    return exact


def assert_scaled(got, exact, before):
    """Half a unit in the last place (of a subnormal: of the smallest normal), and float32: tanh and two operations, 4
    roundings of at most 2 times the input."""
    info = torch.finfo(got.dtype)
    bound = 0.5 * info.eps * (exact.abs() + info.smallest_normal) + 8 * 2**-24 * before.double().abs()
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"largest excess {(error - bound).max():.3e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 4, 64), (1, 32, 64), (3, 2, 80), (16, 4, 64), (257, 2, 8)])
def test_queries_and_values_are_scaled_and_keys_are_not(dtype, shared, tokens, heads, size):
    qkv, tok, table, positions = inputs(tokens, heads, heads, size, dtype, shared=shared)
    before = qkv.clone()
    assert tau_tail(qkv, tok, table, positions, heads, size) is None
    assert_scaled(qkv, scaled_in_float64(before, tok, table, positions, heads, size), before)
    keys = slice(heads * size, 2 * heads * size)
    assert torch.equal(qkv[:, keys], before[:, keys])


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fewer_or_more_kv_heads_than_query_heads(kv_heads):
    qkv, tok, table, positions = inputs(9, 4, kv_heads, 16)
    before = qkv.clone()
    tau_tail(qkv, tok, table, positions.int(), 4, 16)
    assert_scaled(qkv, scaled_in_float64(before, tok, table, positions, 4, 16), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_table_may_have_the_dtype_of_qkv(dtype):
    qkv, tok, table, positions = inputs(9, 4, 4, 64, dtype, dtype)
    before = qkv.clone()
    tau_tail(qkv, tok, table, positions, 4, 64)
    assert_scaled(qkv, scaled_in_float64(before, tok, table, positions, 4, 64), before)


def test_positions_outside_the_table_leave_their_rows_untouched():
    qkv, tok, table, positions = inputs(5, 2, 2, 8)
    positions[:3] = torch.tensor([-1, 32, 2**40])
    qkv[0, 3] = float("nan")
    before = qkv.clone()
    tau_tail(qkv, tok, table, positions, 2, 8)
    assert torch.equal(qkv[:3].view(torch.int32), before[:3].view(torch.int32))
    assert not torch.equal(qkv[3], before[3])


def test_a_table_without_rows_touches_nothing():
    qkv, tok, table, positions = inputs(5, 2, 2, 8)
    before = qkv.clone()
    tau_tail(qkv, tok, table[:0], positions, 2, 8)
    assert torch.equal(qkv, before)


def test_rows_in_a_wider_buffer_and_strange_values_stay_alone():
    qkv, tok, table, positions = inputs(4, 2, 2, 8)
    wide, assert_intact = canary((4, 100), torch.float32)
    view = wide[:, 10:58]
    view.copy_(qkv)
    view[0], view[1], tok[2] = float("nan"), float("inf"), float("nan")
    outside = wide.view(torch.int32).clone()
    tau_tail(view, tok, table, positions, 2, 8)
    assert_intact()
    same = wide.view(torch.int32) == outside
    assert bool(same[:, :10].all())
    assert bool(same[:, 58:].all())
    assert view[0, :16].isnan().all()
    assert not view[1, :16].isfinite().any()
    assert view[2, :16].isnan().all()
    tau_tail(qkv, tok, table, positions, 2, 8)
    assert torch.equal(view[3], qkv[3])


@pytest.mark.parametrize("shared", [False, True])
def test_the_registered_op_is_sound(shared):
    layout = "contiguous" if shared else "sliced"
    opcheck(tau_tail, (*inputs(4, 2, 2, 8, shared=shared), 2, 8), layout=layout, views=(0, 1, 2))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_breaks(backend):
    torch._dynamo.reset()  # the number of variants of one function is limited
    eager, compiled = inputs(4, 2, 2, 8), inputs(4, 2, 2, 8)
    tau_tail(*eager, 2, 8)
    torch.compile(tau_tail, fullgraph=True, backend=backend)(*compiled, 2, 8)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
