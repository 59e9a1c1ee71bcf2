"""The kernels on a GPU: against float64 and the reference, with canaries around what they write."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotation_bounds import assert_rounded_once

from kestrel_rope import build_cos_sin_cache, multimodal_rotary_embedding, reference, rotary_embedding
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    RandomCase,
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canaries,
    compare_at_random,
    graph_replay,
    large_allocation,
    ulp_distance,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

BF16 = torch.bfloat16
FLOATS = (BF16, torch.float16, torch.float32)
POSITIONS = 128
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def some_positions(*shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Mostly in the table; some before it, some past it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, POSITIONS + 3, shape, generator=generator, device="cuda").to(dtype)


def table_of(rotary_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return build_cos_sin_cache(rotary_dim, POSITIONS, dtype=dtype, device="cuda")


def exact(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool, offset: int = 0, inverse: bool = False
) -> torch.Tensor:
    """x [T, H, D], rotated in float64."""
    result, rotary_dim = x.double(), table.shape[1]
    inside = (positions >= 0) & (positions < len(table))
    cos, sin = table.double()[positions.long().clamp(0, len(table) - 1)].chunk(2, 1)
    first, second = (
        (slice(0, rotary_dim // 2), slice(rotary_dim // 2, None))
        if is_neox
        else (
            slice(0, None, 2),
            slice(1, None, 2),
        )
    )
    part = result[inside][..., offset : offset + rotary_dim]
    unit = torch.complex(cos, -sin if inverse else sin)[inside][:, None]
    turned = torch.complex(part[..., first].contiguous(), part[..., second].contiguous()) * unit
    moved = torch.empty_like(part)
    moved[..., first], moved[..., second] = turned.real, turned.imag
    result[inside, :, offset : offset + rotary_dim] = moved
    return result


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within one unit in the last place, or, where x*c - y*s cancels, within float32's rounding of the row's terms."""
    near = (got.float() - want.float()).abs() <= 7 * 2**-24 * want.float().abs().amax(-1, keepdim=True).clamp(min=1)
    assert bool((near | (ulp_distance(got, want) <= 1)).all())


# T, H, Hk, D, R, offset: every tile, results larger than half of L2, broken packs, single pairs, one head, more heads
# than a thread block has, heads of 2048 dims.
SHAPES = [
    (1, 32, 32, 64, 64, 0),
    (16, 32, 32, 64, 32, 0),
    (740, 32, 8, 64, 64, 0),
    (740, 32, 8, 128, 128, 0),
    (512, 32, 32, 128, 128, 0),
    (4100, 32, 32, 64, 64, 0),
    (257, 32, 4, 128, 128, 0),
    (33, 5, 2, 80, 80, 0),
    (33, 71, 1, 96, 40, 16),
    (9, 3, 3, 66, 22, 5),
    (9, 3, 1, 7, 2, 3),
    (5, 1, 1, 256, 256, 0),
    (5, 2, 1, 512, 64, 448),
    (3, 1, 2, 2048, 2048, 0),
    (3, 2, 1, 3002, 3002, 0),
    (2000, 1, 1, 16, 16, 0),
    (3, 700, 1, 24, 16, 8),
    (4, 2, 0, 64, 64, 0),
]


@pytest.mark.parametrize("narrow_table", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_shape_is_rounded_once_and_nothing_else_is_written(shape, dtype, is_neox, narrow_table):
    tokens, heads, kv_heads, size, rotary_dim, offset = shape
    positions = some_positions(tokens, seed=size)
    outside = (positions < 0) | (positions >= POSITIONS)
    table = table_of(rotary_dim, dtype if narrow_table else torch.float32)
    for inverse in (False, True):
        before = [random(tokens, count, size, dtype=dtype, seed=count) for count in (heads, kv_heads)]
        written, assert_intact = canaries(*((x.shape, dtype) for x in before), device="cuda")
        for x, value in zip(written, before, strict=True):
            x.copy_(value)
        rotary_embedding(positions, *written, size, table, is_neox, rope_dim_offset=offset, inverse=inverse)
        assert_intact()
        for got, old in zip(written, before, strict=True):
            if got.numel():
                assert_rounded_once(got, exact(old, positions, table, is_neox, offset, inverse), old)
            for kept in (slice(0, offset), slice(offset + rotary_dim, None)):
                assert torch.equal(got[..., kept], old[..., kept])
            assert torch.equal(got[outside], old[outside])


SECTIONS = [
    (740, 128, 128, [24, 20, 20]),
    (17, 64, 64, [12, 10, 10]),
    (17, 80, 80, [20, 10, 10]),
    (9, 66, 22, [5, 3, 3]),
    (9, 16, 6, [1, 1, 1]),
    (9, 64, 64, [32, 0, 0]),
]


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("narrow_table", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@every_dtype
@pytest.mark.parametrize("case", SECTIONS, ids=str)
def test_three_positions_rotate_as_in_the_reference(case, dtype, is_neox, interleaved, narrow_table, index):
    tokens, size, rotary_dim, sections = case
    table = table_of(rotary_dim, dtype if narrow_table else torch.float32)
    positions = some_positions(3, tokens, seed=size, dtype=index)
    query, key = random(tokens, 4, size, dtype=dtype), random(tokens, 2 * size, dtype=dtype, seed=1)
    want = query.clone(), key.clone()
    rest = size, table, sections, is_neox
    reference.multimodal_rotary_embedding(positions, *want, *rest, interleaved=interleaved)
    multimodal_rotary_embedding(positions, query, key, *rest, interleaved=interleaved)
    assert_near(query, want[0])
    assert_near(key, want[1])


@pytest.mark.parametrize("sections", [[0, 16, 16], [0, 0, 32], [0, 32, 0]], ids=str)
def test_sections_of_height_and_width_alone(sections):
    positions = torch.stack([torch.arange(9, device="cuda") + shift for shift in (0, 20, 40)])
    query = random(9, 256)
    want = query.clone()
    reference.multimodal_rotary_embedding(positions, want, None, 64, table_of(64), sections)
    multimodal_rotary_embedding(positions, query, None, 64, table_of(64), sections)
    assert_near(query, want)


# What a call may look like: (positions, query, key) of some of 24 rows with 4 and 2 heads of 64.
LAYOUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "flat": lambda p, q, k: (p, q.flatten(1), k.flatten(1)),
    "flat and heads": lambda p, q, k: (p, q.flatten(1), k),
    "batched": lambda p, q, k: (p.view(4, 6), q.view(4, 6, 4, 64), k.view(4, 6, 128)),
    "every second row": lambda p, q, k: (p[::2], q[::2], k[1::2]),
    "batches apart": lambda p, q, k: (
        p.view(4, 6)[::2, 1:5],
        q.view(4, 6, 256)[::2, 1:5],
        k.view(4, 6, 2, 64)[1::2, :4],
    ),
    "batch transposed": lambda p, q, k: (
        p.view(4, 6).t(),
        q.view(4, 6, 4, 64).transpose(0, 1),
        k.view(6, 4, 2, 64),
    ),
    "batches of one row": lambda p, q, k: (p.view(24, 1), q.view(24, 1, 256), k.view(24, 1, 2, 64)),
    "one batch": lambda p, q, k: (p.view(1, 24), q.view(1, 24, 256), k.view(1, 24, 2, 64)),
    "one position for all": lambda p, q, k: (p[5:6].expand(24), q, k),
    "heads outside": lambda p, q, k: (p[:4], q.view(-1, 24, 64)[:4].transpose(0, 1)[:4], k[:4]),
    "one head": lambda p, q, k: (p, q[:, 1:2], k[:, 1:]),
}  # fmt: skip


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_alignments_give_the_same_bits(layout, shift, is_neox, index):
    """Against dense copies; the base is `shift` elements into an aligned buffer."""
    buffers = [random(24 * n * 64 + shift, seed=n) for n in (4, 2)]
    whole = [b[shift:].view(24, -1, 64) for b in buffers]
    before = [b.clone() for b in buffers]
    p, q, k = LAYOUTS[layout](some_positions(24, dtype=index), *whole)
    dense_q, dense_k = (x.clone().contiguous().view(p.numel(), -1) for x in (q, k))
    rotary_embedding(p.reshape(-1), dense_q, dense_k, 64, table_of(32), is_neox, rope_dim_offset=16)
    rotary_embedding(p, q, k, 64, table_of(32), is_neox, rope_dim_offset=16)
    assert torch.equal(q.reshape(dense_q.shape), dense_q)
    assert torch.equal(k.reshape(dense_k.shape), dense_k)
    q.zero_(), k.zero_()  # the rest of the buffers is untouched
    p, q, k = LAYOUTS[layout](some_positions(24), *(b[shift:].view(24, -1, 64) for b in before))
    q.zero_(), k.zero_()
    assert_same_bits(buffers, before)


def test_slices_of_a_packed_projection_leave_the_values():
    packed = random(33, 3 * 8 * 64)
    before = packed.clone()
    query, key, value = packed.chunk(3, 1)
    alone = query.clone(), key.clone()
    positions, table = some_positions(33), table_of(64)
    rotary_embedding(positions, *alone, 64, table)
    rotary_embedding(positions, query, key, 64, table)
    assert torch.equal(query, alone[0])
    assert torch.equal(key, alone[1])
    assert torch.equal(value, before[:, 2 * 8 * 64 :])


@pytest.mark.parametrize(("width", "low"), [(64, 0), (72, 8), (67, 3)])
def test_rows_of_the_table_have_any_stride_and_alignment(width, low):
    wide = torch.zeros(2 * POSITIONS, width, device="cuda")
    table = wide[::2, low : low + 64].copy_(table_of(64))
    query = random(33, 256)
    want = query.clone()
    rotary_embedding(some_positions(33), want, None, 64, table_of(64))
    rotary_embedding(some_positions(33), query, None, 64, table)
    assert torch.equal(query, want)


@pytest.mark.parametrize("is_neox", [True, False])
@every_dtype
def test_a_row_does_not_depend_on_its_batch(dtype, is_neox):
    positions, table = some_positions(700), table_of(64)
    fresh = random(700, 8 * 64, dtype=dtype)
    whole = fresh.clone()
    rotary_embedding(positions, whole, None, 64, table, is_neox)
    for low, high in ((0, 1), (1, 2), (333, 340), (699, 700)):
        part = fresh[low:high].clone()
        rotary_embedding(positions[low:high], part[:, :256], part[:, 256:], 64, table, is_neox)
        assert torch.equal(part, whole[low:high])


@pytest.mark.parametrize("is_neox", [True, False])
def test_runs_repeat(is_neox):
    assert_runs_repeat(
        rotary_embedding, some_positions(700), random(700, 512), random(700, 128), 64, table_of(64), is_neox
    )


@every_dtype
def test_extreme_rows_stay_alone_and_positions_outside_touch_nothing(dtype):
    table = table_of(64)
    plain = random(9, 2, 64, dtype=dtype)
    mixed = plain.clone()
    mixed[0], mixed[1], mixed[2] = float("nan"), float("inf"), 1e4
    mixed[3], mixed[4] = torch.finfo(dtype).smallest_normal / 4, 0.0
    mixed[6:] = float("nan")
    bits = mixed[6:].clone().view(torch.uint8)
    before = mixed.clone()
    positions = torch.full((9,), 3, device="cuda")
    positions[6:] = torch.tensor([-1, POSITIONS, 2**40], device="cuda")
    for x in (plain, mixed):
        rotary_embedding(positions, x, None, 64, table)
    assert mixed[0].isnan().all()
    assert not mixed[1].isfinite().any()
    assert torch.equal(mixed[4], torch.zeros_like(mixed[4]))
    assert torch.equal(mixed[5], plain[5])
    assert torch.equal(mixed[6:].view(torch.uint8), bits)
    assert_rounded_once(mixed[2:6], exact(before[2:6], positions[2:6], table, True), before[2:6])
    three = torch.full((3, 9), 3, device="cuda")
    three[0, 0], three[1, 1], three[2, 2], three[1, 3], three[2, 4] = -1, POSITIONS, 2**40, -(2**40), POSITIONS
    query = before.clone()
    multimodal_rotary_embedding(three, query, None, 64, table, [12, 10, 10])
    assert torch.equal(query[:5].view(torch.uint8), before[:5].view(torch.uint8))
    assert not torch.equal(query[5], before[5])


@pytest.mark.parametrize(("tokens", "heads", "rows"), [(0, 4, 128), (3, 0, 128), (3, 4, 0)])
def test_no_rows_no_heads_and_no_table(tokens, heads, rows):
    query, table = random(tokens, heads * 64), table_of(64)
    before = query.clone()
    positions = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    rotary_embedding(positions, query, query.clone(), 64, table[:rows])
    assert torch.equal(query, before)


def test_no_batches():
    rotary_embedding(torch.zeros(0, 5, dtype=torch.int32, device="cuda"), random(0, 5, 256), None, 64, table_of(64))


@large_allocation(gib=5)
def test_strides_past_two_to_the_31():
    table, positions = table_of(64), torch.tensor([3, 5], device="cuda")
    near = random(2, 4, 64)
    want = near.clone()
    rotary_embedding(positions, want, None, 64, table)
    buffer = torch.empty(2**31 + 4096, dtype=BF16, device="cuda")
    rows = buffer.as_strided((2, 4, 64), (2**31 + 8, 64, 1)).copy_(near)
    rotary_embedding(positions, rows, None, 64, table)
    assert torch.equal(rows, want)
    heads = buffer.as_strided((2, 2, 64), (64, 2**31 + 8, 1)).copy_(near[:, :2])
    rotary_embedding(positions, heads, heads.clone(), 64, table)
    assert torch.equal(heads, want[:, :2])
    batches = buffer.as_strided((2, 1, 256), (2**31 + 8, 256, 1)).copy_(near.view(2, 1, 256))
    rotary_embedding(positions.view(2, 1), batches, None, 64, table)
    assert torch.equal(batches.view(2, 4, 64), want)
    far_table = buffer.as_strided((2, 64), (2**31 + 8, 1)).copy_(table[[3, 5]])
    narrow = near.clone()
    rotary_embedding(positions, narrow, None, 64, table.bfloat16())
    rotary_embedding(torch.tensor([0, 1], device="cuda"), near, None, 64, far_table)
    assert torch.equal(near, narrow)


@large_allocation(gib=5)
def test_more_than_two_to_the_31_elements():
    rows = 2**20 + 3
    query = torch.empty(rows, 2048, dtype=BF16, device="cuda")
    positions = torch.full((rows,), -1, device="cuda")
    positions[-2:] = 7
    query[-2:] = random(2, 2048)
    want = random(2, 2048)
    rotary_embedding(positions[-2:], want, None, 64, table_of(64))
    rotary_embedding(positions, query, None, 64, table_of(64))
    assert torch.equal(query[-2:], want)


# -- streams, graphs, the compiler ------------------------------------------------------------------------------------


def plain(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    rotary_embedding(positions[0], query, key, 64, TABLES["cuda"])


def multimodal(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    multimodal_rotary_embedding(positions, query, key, 64, TABLES["cuda"], [12, 10, 10], interleaved=True)


OPS = [plain, multimodal]
TABLES: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True, scope="module")
def _table() -> None:
    TABLES["cuda"] = table_of(64)


def arguments(tokens: int = 16, seed: int = 0) -> list[torch.Tensor]:
    return [some_positions(3, tokens, seed=seed), *(random(tokens, 512, seed=seed + n) for n in (1, 2))]


def rotated(op: Callable[..., None], args: list[torch.Tensor]) -> list[torch.Tensor]:
    args = [x.clone() for x in args]
    op(*args)
    return args[1:]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_sees_new_rows_and_positions(op):
    args, fresh = arguments(seed=1), arguments(seed=5)
    want = rotated(op, fresh)
    graph_replay(op, args, fresh)
    assert_same(args[1:], want)


@pytest.mark.parametrize("op", OPS)
def test_compiled_without_a_graph_break(op):
    args = arguments()
    want = rotated(op, args)
    with backend("auto"):
        torch.compile(op, fullgraph=True)(*args)
    assert_same(args[1:], want)


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op):
    args = arguments(740)
    want, stream = rotated(op, args), torch.cuda.Stream()
    scratch, late = torch.zeros(1 << 28, device="cuda"), [torch.zeros_like(x) for x in args]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        for x, value in zip(late, args, strict=True):
            x.copy_(value)
        op(*late)
    stream.synchronize()
    assert_same(late[1:], want)


@pytest.mark.parametrize("op", OPS)
def test_heads_written_by_the_launch_just_before_are_read_after_the_wait(op):
    """Each launch rotates the result of the one before."""
    positions, *heads = arguments(740)
    positions.clamp_(0, POSITIONS - 1)
    contents = [arguments(740, seed)[1:] for seed in (1, 3)]

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        for x, value in zip(heads, contents[i], strict=True):
            x.copy_(value)
        op(positions, *heads)
        for _ in range(3):
            between()
            op(positions, *heads)
        return heads

    assert_waits_for_the_launch_before(chain)


@pytest.mark.parametrize("op", OPS)
def test_positions_written_by_the_launch_just_before_are_read_after_the_wait(op):
    """A quarter turn (x, y) -> (-y, x) of float32 moves bits: that launch writes the positions of the next."""
    quarter = torch.cat((torch.zeros(1, 64), torch.ones(1, 64)), 1).cuda()
    zeros = torch.zeros(4096, dtype=torch.int32, device="cuda")
    # big enough that the next launch would overtake its last rows
    blank = torch.zeros(2, 4096, 128, device="cuda")
    positions = torch.randint(0, POSITIONS, (2, 3, 64), dtype=torch.int32, device="cuda")
    blank[:, -3:, :64] = positions.view(torch.float32)
    carrier, before = torch.empty_like(blank[0]), random(64, 256)
    query = before.clone()

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        query.copy_(before)
        carrier.copy_(blank[i])
        rotary_embedding(zeros, carrier, None, 128, quarter)
        between()
        op(carrier[-3:, 64:].view(torch.int32), query, None)
        return [query]

    assert_waits_for_the_launch_before(chain)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["key", "cos_sin_cache"])
def test_an_argument_on_the_host_is_refused(argument):
    values = {"key": random(3, 256), "cos_sin_cache": table_of(64)}
    values[argument] = values[argument].cpu()
    with pytest.raises(ValueError, match=f"argument '{argument}': expected device cuda:0 .*, got cpu"):
        rotary_embedding(some_positions(3), random(3, 256), head_size=64, **values)


# -- random calls -----------------------------------------------------------------------------------------------------


def draw_case(rng: random_numbers.Random) -> RandomCase:
    """A call of either op: shape, strides, alignment, dtypes, order of pairs and positions at random."""
    dtype, is_neox, plain = rng.choice(FLOATS), rng.random() < 0.5, rng.random() < 0.6
    rotary_dim = 2 * rng.choice([rng.randint(1, 70), 8 * rng.randint(1, 16)])
    offset = rng.choice([0, rng.randint(1, 24)]) if plain else 0
    size = rotary_dim + offset + rng.choice([0, rng.randint(1, 40)])
    rows = (rng.choice([rng.randint(1, 9), rng.randint(1, 800)]),)
    if plain and rng.random() < 0.3:
        rows = (rng.randint(1, 5), rng.randint(1, 60))

    def heads(count: int) -> torch.Tensor:
        flat, wide, shift = rng.random() < 0.5, rng.choice([0, 3, 8]), rng.choice([0, 1, 4, 8])
        x = torch.randn(*rows, count * size + wide + shift, device="cuda").to(dtype)[..., shift : shift + count * size]
        return x if flat else x.unflatten(-1, (count, size))

    index = rng.choice([torch.int32, torch.int64])
    positions = torch.randint(-2, POSITIONS + 2, rows if plain else (3, *rows), device="cuda").to(index)
    query, key = heads(rng.randint(1, 40)), heads(rng.randint(1, 9)) if rng.random() < 0.8 else None
    table = table_of(rotary_dim, rng.choice([dtype, torch.float32]))

    def compare(got: Any, want: Any, what: str) -> None:
        assert_near(got, want)

    if plain:
        options = {"rope_dim_offset": offset, "inverse": rng.random() < 0.3}
        args = (positions, query, key, size, table, is_neox)
        return RandomCase(rotary_embedding, args, options, compare, writes=(1, 2))
    half, interleaved = rotary_dim // 2, rng.random() < 0.5
    height = rng.randint(0, (half + 1) // 3 if interleaved else half)
    width = rng.randint(0, min(half // 3, half - height) if interleaved else half - height)
    args = (positions, query, key, size, table, [half - height - width, height, width], is_neox)
    return RandomCase(multimodal_rotary_embedding, args, {"interleaved": interleaved}, compare, writes=(1, 2))


def test_random_calls_agree_with_the_reference():
    compare_at_random(draw_case, seconds=10, least=50)
