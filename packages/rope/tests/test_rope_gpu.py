"""The kernels on a GPU: against float64 and the reference, with canaries around what they write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kestrel_rope import build_cos_sin_cache, multimodal_rotary_embedding, reference, rotary_embedding
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    BadInput,
    assert_rejects,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
    ulp_distance,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FLOATS = (BF16, torch.float16, torch.float32)
POSITIONS = 128


@pytest.fixture(autouse=True)
def _kernels_only() -> object:
    with backend("kernel"):
        yield


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def some_positions(*shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Mostly in the table; some before it, some behind."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, POSITIONS + 3, shape, generator=generator, device="cuda").to(dtype)


def table_of(rotary_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return build_cos_sin_cache(rotary_dim, POSITIONS, dtype=dtype, device="cuda")


def exact(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool, offset: int = 0, inverse: bool = False
) -> torch.Tensor:
    """x [T, H, D] turned in float64."""
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


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor, before: torch.Tensor) -> None:
    """Half a unit in the last place, and what float32 may lose in x*c - y*s: 4 roundings of the pair's magnitude."""
    info = torch.finfo(got.dtype)
    largest = before.double().abs().amax(-1, keepdim=True)
    bound = 0.5 * info.eps * (want.abs() + info.smallest_normal) + 4 * 2**-24 * largest
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), f"largest excess {(error - bound).max():.3e}"


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within one unit in the last place, or where x*c - y*s cancels within float32's rounding of the terms."""
    near = (got.float() - want.float()).abs() <= 2e-6
    assert bool((near | (ulp_distance(got, want) <= 1)).all())


# T, H, Hk, D, R, offset: every shape of blocks, results past half of L2, broken packs, single pairs, one head, heads
# past a block, heads of 2048 dims.
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
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_shape_is_rounded_once_and_nothing_else_is_written(dtype, is_neox, narrow_table):
    for tokens, heads, kv_heads, size, rotary_dim, offset in SHAPES:
        positions = some_positions(tokens, seed=size)
        table = table_of(rotary_dim, dtype if narrow_table else torch.float32)
        for inverse in (False, True):
            written, checks, before = [], [], []
            for count in (heads, kv_heads):
                x, assert_intact = canary((tokens, count, size), dtype, "cuda")
                written.append(x.copy_(random(tokens, count, size, dtype=dtype, seed=count)))
                before.append(x.clone())
                checks.append(assert_intact)
            rotary_embedding(
                positions, *written, size, table, is_neox, rope_dim_offset=offset, inverse=inverse
            )  # fmt: skip
            for got, old, assert_intact in zip(written, before, checks, strict=True):
                if got.numel():
                    assert_rounded_once(got, exact(old, positions, table, is_neox, offset, inverse), old)
                for kept in (slice(0, offset), slice(offset + rotary_dim, None)):
                    assert torch.equal(got[..., kept], old[..., kept])
                outside = (positions < 0) | (positions >= POSITIONS)
                assert torch.equal(got[outside], old[outside])
                assert_intact()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_three_positions_turn_as_in_the_reference(dtype, is_neox, interleaved):
    for tokens, size, rotary_dim, sections in [
        (740, 128, 128, [24, 20, 20]),
        (17, 64, 64, [12, 10, 10]),
        (17, 80, 80, [20, 10, 10]),
        (9, 66, 22, [5, 3, 3]),
        (9, 16, 6, [1, 1, 1]),
        (9, 64, 64, [32, 0, 0]),
    ]:
        for table in (table_of(rotary_dim), table_of(rotary_dim, dtype)):
            for index in (torch.int32, torch.int64):
                positions = some_positions(3, tokens, seed=size, dtype=index)
                query, key = random(tokens, 4, size, dtype=dtype), random(tokens, 2 * size, dtype=dtype, seed=1)
                want = query.clone(), key.clone()
                rest = size, table, sections, is_neox
                reference.multimodal_rotary_embedding(positions, *want, *rest, interleaved=interleaved)
                multimodal_rotary_embedding(positions, query, key, *rest, interleaved=interleaved)
                assert_near(query, want[0])
                assert_near(key, want[1])


def test_the_sections_of_height_and_width_alone_with_positions_apart():
    positions = torch.stack([torch.arange(9, device="cuda") + shift for shift in (0, 20, 40)])
    for sections in ([0, 16, 16], [0, 0, 32], [0, 32, 0]):
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
@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_alignments_give_the_same_bits(layout, shift, index):
    """Against dense copies; the base starts `shift` elements into an aligned buffer."""
    for is_neox in (True, False):
        buffers = [random(24 * n * 64 + shift, seed=n) for n in (4, 2)]
        whole = [b[shift:].view(24, -1, 64) for b in buffers]
        before = [b.clone() for b in buffers]
        p, q, k = LAYOUTS[layout](some_positions(24, dtype=index), *whole)
        dense_q, dense_k = q.clone(), k.clone()
        dense_q, dense_k = (x.contiguous().view(p.numel(), -1) for x in (dense_q, dense_k))
        rotary_embedding(p.reshape(-1), dense_q, dense_k, 64, table_of(32), is_neox, rope_dim_offset=16)
        rotary_embedding(p, q, k, 64, table_of(32), is_neox, rope_dim_offset=16)
        assert torch.equal(q.reshape(dense_q.shape), dense_q)
        assert torch.equal(k.reshape(dense_k.shape), dense_k)
        q.zero_(), k.zero_()  # what is left has not been touched
        p, q, k = LAYOUTS[layout](some_positions(24), *(b[shift:].view(24, -1, 64) for b in before))
        q.zero_(), k.zero_()
        for got, want in zip(buffers, before, strict=True):
            assert torch.equal(got, want)


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


def test_rows_of_the_table_may_stand_anywhere():
    for width, low in ((64, 0), (72, 8), (67, 3)):
        wide = torch.zeros(2 * POSITIONS, width, device="cuda")
        table = wide[::2, low : low + 64].copy_(table_of(64)) if width > 64 else wide[::2].copy_(table_of(64))
        query = random(33, 256)
        want = query.clone()
        rotary_embedding(some_positions(33), want, None, 64, table_of(64))
        rotary_embedding(some_positions(33), query, None, 64, table)
        assert torch.equal(query, want)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_does_not_depend_on_its_batch_and_runs_repeat(dtype, is_neox):
    positions, table = some_positions(700), table_of(64)
    fresh = random(700, 8 * 64, dtype=dtype)
    whole, again = fresh.clone(), fresh.clone()
    rotary_embedding(positions, whole, None, 64, table, is_neox)
    rotary_embedding(positions, again, None, 64, table, is_neox)
    assert torch.equal(again, whole)
    for low, high in ((0, 1), (1, 2), (333, 340), (699, 700)):
        part = fresh[low:high].clone()
        rotary_embedding(positions[low:high], part[:, :256], part[:, 256:], 64, table, is_neox)
        assert torch.equal(part, whole[low:high])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
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


def test_nothing_to_turn():
    table = table_of(64)
    for tokens, heads, rows in ((0, 4, 128), (3, 0, 128), (3, 4, 0)):
        query = random(tokens, heads * 64)
        before = query.clone()
        rotary_embedding(torch.zeros(tokens, dtype=torch.int32, device="cuda"), query, query.clone(), 64, table[:rows])
        assert torch.equal(query, before)
    empty = random(0, 5, 256)
    rotary_embedding(torch.zeros(0, 5, dtype=torch.int32, device="cuda"), empty, None, 64, table)


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


def turned(op: Callable[..., None], args: list[torch.Tensor]) -> list[torch.Tensor]:
    args = [x.clone() for x in args]
    op(*args)
    return args[1:]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_sees_new_rows_and_positions(op):
    args, fresh = arguments(seed=1), arguments(seed=5)
    want = turned(op, fresh)
    graph_replay(op, args, fresh)
    assert_same(args[1:], want)


@pytest.mark.parametrize("op", OPS)
def test_compiled_without_a_graph_break(op):
    args = arguments()
    want = turned(op, args)
    with backend("auto"):
        torch.compile(op, fullgraph=True)(*args)
    assert_same(args[1:], want)


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op):
    args = arguments(740)
    want, stream = turned(op, args), torch.cuda.Stream()
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
    """Each launch turns what the one before has turned."""
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
    messenger, before = torch.empty_like(blank[0]), random(64, 256)
    query = before.clone()

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        query.copy_(before)
        messenger.copy_(blank[i])
        rotary_embedding(zeros, messenger, None, 128, quarter)
        between()
        op(messenger[-3:, 64:].view(torch.int32), query, None)
        return [query]

    assert_waits_for_the_launch_before(chain)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_kernel_refuses_bad_input():
    positions, query, table = some_positions(3), random(3, 256), table_of(64)

    def call(*args: object, **kwargs: object) -> Callable[[], tuple[tuple, dict]]:
        return lambda: (args, kwargs)

    cases = [
        BadInput("no query", "query", call(positions, None, None, 64, table), TypeError, "NoneType"),
        BadInput("float64", "query", call(positions, query.double(), None, 64, table), TypeError, "float64"),
        BadInput("one row for all", "query", call(positions, query[:1].expand(3, 256), None, 64, table), ValueError),
        BadInput("one key", "key", call(positions, query, query[:1].expand(3, 256), 64, table), ValueError, "(0, 1)"),
        BadInput("key on the host", "key", call(positions, query, query.cpu(), 64, table), ValueError, "cpu"),
        BadInput("table on the host", "cos_sin_cache", call(positions, query, None, 64, table.cpu()), ValueError),
        BadInput("head size by name", "head_size", call(positions, query, None, "64", table), TypeError, "'64'"),
        BadInput("a flag as a number", "is_neox", call(positions, query, None, 64, table, 1), TypeError, "int"),
        BadInput(
            "offset as a bool", "rope_dim_offset", call(positions, query, None, 64, table[:, :2], rope_dim_offset=True),
            TypeError, "bool",
        ),
    ]  # fmt: skip
    for case in cases:
        assert_rejects(rotary_embedding, case)
    three = positions.expand(3, 3)
    for name, sections in (
        ("two", [16, 16]),
        ("a sum", [16, 8, 9]),
        ("a bool", [16, 16, False]),
        ("negative", [40, -8, 0]),
    ):
        kind = TypeError if name == "a bool" else ValueError
        case = BadInput(name, "mrope_section", call(three, query, None, 64, table, sections), kind)
        assert_rejects(multimodal_rotary_embedding, case)


def test_kernel_and_reference_agree():
    for is_neox in (True, False):
        got, want = random(257, 1024), random(257, 1024)
        reference.rotary_embedding(some_positions(257), want, None, 64, table_of(64), is_neox)
        rotary_embedding(some_positions(257), got, None, 64, table_of(64), is_neox)
        assert_near(got, want)
