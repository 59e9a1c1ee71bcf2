"""What the kernels of a layer of routed experts are given, by each variant, and which variant a call takes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kestrel_moe
from kestrel_moe import invoke_moe, invoke_moe_fp8, moe_align, tuned, variants
from kestrel_moe.reference_experts import most_blocks
from kestrel_moe.variants import Variant

module = importlib.import_module("kestrel_moe.fused_experts")
EXPERTS, WIDTH, INNER = 5, 32, 16
Tensor = torch.Tensor


class Kernels:
    """In place of the binary: activations by reference; the layer notes its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def fused_experts_scratch(self, *sizes: Any) -> int:
        self.calls.append(("scratch", sizes))
        return 123

    def fused_experts(self, out: Tensor, *given: Any) -> None:
        self.calls.append(("fused_experts", (out, *given)))
        out.fill_(7)

    def moe_align_block_size(
        self, ids: Tensor, experts: int, block: int, order: Tensor, expert_ids: Tensor, length: Tensor, table: Any
    ) -> None:
        self.calls.append(("align", (experts, block, table)))
        kestrel_moe.moe_align_block_size(ids, experts, block, order, expert_ids, length, table)

    def group_rows(
        self, ids: Tensor, order: Tensor, rows: Tensor, tokens: Tensor, positions: Tensor, ends: Tensor
    ) -> None:
        self.calls.append(("group", ()))
        kept = int((rows >= 0).sum())
        tokens.copy_(order.clamp(max=ids.numel() - 1) // ids.shape[1])
        positions.fill_(-1)
        positions[order[:kept].long()] = torch.arange(kept, dtype=torch.int32)
        ends.copy_(torch.stack([(rows == expert).sum() for expert in range(EXPERTS)]).cumsum(0))

    def gated(self, out: Tensor, x: Tensor, silu: bool, approximate: str, shift: float) -> None:
        self.calls.append(("gated", (silu, approximate, shift)))
        h, g = x.float().chunk(2, dim=-1)
        out.copy_((F.silu(h) if silu else F.gelu(h, approximate=approximate)) * (g + shift))

    def experts_gather_sum(self, out: Tensor, y: Tensor, positions: Tensor, weights: Tensor, *inputs: Tensor) -> None:
        self.calls.append(("gather", inputs))
        assert positions.shape == (weights.numel(),)
        rows = torch.where((positions >= 0)[:, None], y[positions.clamp(min=0).long()].float(), 0.0)
        out.copy_((rows.view(*weights.shape, -1) * weights[..., None]).sum(1))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(module, "_kernels", made)
    module._scratch_bytes.cache_clear()
    yield made
    module._scratch_bytes.cache_clear()


def layer(tokens: int = 9, choices: int = 3, ids: Tensor | None = None) -> dict[str, Any]:
    g = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=g).bfloat16()
    w1 = (torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=g) / 6).bfloat16()
    w2 = (torch.randn(EXPERTS, WIDTH, INNER, generator=g) / 4).bfloat16()
    weights = torch.rand(tokens, choices, generator=g)
    if ids is None:
        ids = torch.rand(tokens, EXPERTS, generator=g).topk(choices).indices.int()
    return {"hidden": hidden, "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids}


# -- by variant -------------------------------------------------------------------------------------------------------


def test_kernels_that_group_the_pairs_themselves_are_given_no_blocks(kernels: Kernels) -> None:
    given = layer(4, 2)
    out = module.by_variant(Variant("in_kernel", 8), **given, activation="gelu_and_mul")
    (_, sizes), (_, (into, scratch, *rest)) = kernels.calls
    assert kernels.names == ["scratch", "fused_experts"]
    assert sizes == (4, 8, INNER, WIDTH, False, 0, 0, False, -1)
    assert into is out
    assert (scratch.dtype, scratch.numel()) == (torch.uint8, 123)
    assert rest[:5] == list(given.values())
    assert rest[5:] == [None, None, None, None, None, None, None, 8, 1, "gelu_and_mul"]
    assert (out.shape, out.dtype) == ((4, WIDTH), torch.bfloat16)


def test_one_kernel_for_both_projections_is_given_a_tile_without_blocks(kernels: Kernels) -> None:
    module.by_variant(Variant("fused", 8), **layer(4, 2))
    (_, sizes), (_, (_, _, *rest)) = kernels.calls
    assert sizes == (4, 8, INNER, WIDTH, False, 8, 0, False, -1)
    assert rest[5:-1] == [None, None, None, None, None, None, None, 8, 2]


@pytest.mark.parametrize("tile", [8, 16, 32, 64, 128, 160])
@pytest.mark.parametrize("tokens", [1, 9, 100])
def test_blocks_have_room_for_any_routing(kernels: Kernels, tokens: int, tile: int) -> None:
    given = layer(tokens)
    module.by_variant(Variant("aligned", tile), **given)
    (_, sizes), (_, (*_, order, expert_ids, length, positions, last_tile, cluster, _)) = kernels.calls
    blocks = most_blocks(tokens * 3, EXPERTS, tile)
    assert sizes == (tokens, tokens * 3, INNER, WIDTH, False, tile, blocks, False, -1)
    assert (order.numel(), expert_ids.numel(), length.numel(), last_tile) == (blocks * tile, blocks, 3 + blocks, tile)
    assert (positions, cluster) == (None, 1)
    assert order.dtype == expert_ids.dtype == length.dtype == torch.int32


def test_two_ctas_share_weights_with_blocks_of_128(kernels: Kernels) -> None:
    module.by_variant(Variant("clustered", 128), **layer())
    *_, block_size, cluster, _ = kernels.calls[1][1]
    assert (block_size, cluster) == (128, 2)


@pytest.mark.parametrize("path", ["aligned", "clustered"])
def test_fp8_tiles_of_128_are_given_memory_for_the_positions_of_their_pairs(kernels: Kernels, path: str) -> None:
    scales = {"w1_scale": torch.ones(EXPERTS), "w2_scale": torch.ones(EXPERTS, WIDTH)}
    module.by_variant(Variant(path, 128), **layer(), **scales)
    *_, positions, tile, cluster, _ = kernels.calls[-1][1]
    assert (positions.shape, positions.dtype) == ((27,), torch.int32)
    assert (tile, cluster) == (128, 2 if path == "clustered" else 1)


def test_blocks_have_room_for_the_experts_of_a_map(kernels: Kernels) -> None:
    table = torch.tensor([0, -1, 1, 2, -1, 3, 4], dtype=torch.int32)
    module.by_variant(Variant("aligned", 16), **layer(), expert_map=table)
    assert kernels.calls[1][1][9] is table
    assert kernels.calls[1][1][11].numel() == most_blocks(27, 7, 16)


@pytest.mark.parametrize("path", ["in_kernel", "aligned"])
def test_scales_of_fp8_weights_are_given_in_order(kernels: Kernels, path: str) -> None:
    scales = {"w1_scale": torch.ones(EXPERTS), "w2_scale": torch.ones(EXPERTS, WIDTH)}
    module.by_variant(Variant(path, 8), **layer(2), **scales)
    assert kernels.calls[-2][1][:5] == (2, 6, INNER, WIDTH, True)
    _, given = kernels.calls[-1]
    assert (given[7], given[8]) == tuple(scales.values())
    assert given[13] is None  # positions, which tiles of 128 take


def test_an_empty_map_gives_zeros(kernels: Kernels) -> None:
    out = torch.full((9, WIDTH), float("nan")).bfloat16()
    table = torch.zeros(0, dtype=torch.int32)
    assert module.by_variant(Variant("aligned", 16), **layer(), expert_map=table, out=out) is out
    assert not out.any()
    with pytest.raises(ValueError, match="fused_experts: argument 'out'"):
        module.by_variant(Variant("aligned", 16), **layer(), expert_map=table, out=out[:, :-1])


def test_ids_of_64_bits_keep_what_is_no_expert(kernels: Kernels) -> None:
    ids = torch.tensor([[0, 2**31, 2**40], [-1, -(2**40), 4]])
    module.by_variant(Variant("in_kernel", 8), **layer(2, ids=ids))
    given = kernels.calls[-1][1][6]
    assert given.dtype == torch.int32
    assert given.tolist() == [[0, 2**31 - 1, 2**31 - 1], [-1, -1, 4]]


def products_of_each_pair(
    hidden: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The layer in float64, and how far it may be off if each of its four steps is rounded to bf16 once.

    Sums in float32 are off by far less than a rounding. GELU and SiLU have slopes of at most 1.13.
    """
    exact, allowed = torch.zeros(2, *hidden.shape, dtype=torch.float64)
    rounding = 1.01 * 2.0**-8
    for t, j in ((topk_ids >= 0) & (topk_ids < EXPERTS)).nonzero().tolist():
        e = int(topk_ids[t, j])
        h, g = (w1[e].double() @ hidden[t].double()).chunk(2)
        gate = g + 1 if activation == "gelu_residual" else g
        act = F.silu(h) if activation == "silu_and_mul" else F.gelu(h)
        error = rounding * (1.13 * h.abs() * (gate.abs() + rounding * g.abs()) + act.abs() * g.abs())
        error = error + rounding * ((act * gate).abs() + error)
        y, off = w2[e].double() @ (act * gate), w2[e].double().abs() @ error
        exact[t] += topk_weights[t, j] * y
        allowed[t] += topk_weights[t, j] * (off + rounding * (y.abs() + off))
    return exact, allowed + rounding * (exact.abs() + allowed)


@pytest.mark.parametrize("activation", module.ACTIVATIONS)
@pytest.mark.parametrize("dropped", ["none", "some", "all"])
def test_grouped_products_are_those_of_each_pair(kernels: Kernels, activation: str, dropped: str) -> None:
    given = layer(40, 2)
    if dropped == "some":
        given["topk_ids"][::3, 0] = -1
        given["topk_ids"][5] = EXPERTS
    elif dropped == "all":
        given["topk_ids"].fill_(-1)
    got = module.by_variant(Variant("grouped_mm"), **given, activation=activation)
    exact, allowed = products_of_each_pair(**given, activation=activation)
    assert kernels.names == ["align", "group", "gated", "gather"]
    assert kernels.calls[0][1] == (EXPERTS, 1, None)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    inputs = tuple(given[name] for name in ("hidden", "w1", "w2", "topk_ids"))
    assert all(one is other for one, other in zip(kernels.calls[-1][1], inputs, strict=True))
    if dropped == "some":
        assert not got[5].any()


@pytest.mark.parametrize(("tokens", "choices"), [(0, 3), (9, 0)])
def test_grouped_products_of_no_pairs_are_zeros_without_a_launch(kernels: Kernels, tokens: int, choices: int) -> None:
    given = layer(9, 3)
    for name in ("hidden", "topk_weights", "topk_ids"):
        given[name] = given[name][:tokens]
    for name in ("topk_weights", "topk_ids"):
        given[name] = given[name][:, :choices]
    out = torch.full((tokens, WIDTH), float("nan")).bfloat16()
    assert module.by_variant(Variant("grouped_mm"), **given, out=out) is out
    assert not out.any()
    assert not kernels.calls


def test_grouped_products_check_their_arguments_first(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="fused_experts: argument 'topk_ids'"):
        module.by_variant(Variant("grouped_mm"), **layer() | {"topk_weights": torch.ones(9, 2)})
    assert not kernels.calls


@pytest.mark.parametrize("name", ["hidden", "w1", "w2"])
def test_grouped_products_get_no_out_that_overlaps(kernels: Kernels, name: str) -> None:
    given = layer()
    out = given[name].view(-1)[: 9 * WIDTH].view(9, WIDTH)
    with pytest.raises(ValueError, match=f"fused_experts: argument 'out': .* shares no memory with '{name}'"):
        module.by_variant(Variant("grouped_mm"), **given, out=out)
    assert not kernels.calls


# -- the choice of a call ---------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, str]]:
    """A GPU with these tuned layers."""
    entries: dict[str, dict[int, str]] = {}
    monkeypatch.setattr(variants, "_is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(tuned, "of_gpu", lambda gpu: entries)
    variants.for_call.cache_clear()
    yield entries
    variants.for_call.cache_clear()


def chosen(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Variant:
    ran: list[Any] = []
    monkeypatch.setattr(module, "by_variant", lambda variant, *rest: ran.append((variant, rest)) or given["hidden"])
    kestrel_moe.fused_experts.kernel_op.launch(**given)
    ((variant, rest),) = ran
    names = (
        "hidden",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "w1_scale",
        "w2_scale",
        "expert_map",
        "out",
    )
    usual = {"activation": "gelu_residual"}
    assert all(x is given.get(name) or x == usual.get(name) for name, x in zip(names, rest, strict=True))
    return variant


def test_a_call_takes_the_tuned_variant_of_its_layer(
    hopper: dict[str, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper["E5 k3 h32 i16 bf16"] = {9: "aligned 32"}
    assert chosen(monkeypatch, **layer()) == Variant("aligned", 32)
    assert chosen(monkeypatch, **layer(8, 2)) == Variant("in_kernel", 8)
    assert chosen(monkeypatch, **layer(5, 2)) == Variant("fused", 8)


def test_weights_that_grouped_mm_does_not_take_go_through_the_kernels(
    hopper: dict[str, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper["E5 k3 h32 i16 bf16"] = {9: "grouped_mm"}
    given = layer()
    assert chosen(monkeypatch, **given) == Variant("grouped_mm")
    for name in ("w1", "w2"):
        wide = torch.zeros(*given[name].shape[:-1], given[name].shape[-1] + 8).bfloat16()[..., :-8]
        moved = torch.zeros(given[name].numel() + 4).bfloat16()[4:].view(given[name].shape)  # by 8 bytes
        assert wide.shape == moved.shape == given[name].shape
        for other in (wide, moved):
            assert chosen(monkeypatch, **given | {name: other}) == Variant("clustered", 128)
    table = torch.arange(5, dtype=torch.int32)
    assert chosen(monkeypatch, **given, expert_map=table).path != "grouped_mm"


# -- the two products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_the_products_are_given_their_arguments_in_order(
    monkeypatch: pytest.MonkeyPatch, halves: bool, fp8: bool
) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    class Entries:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append((name, given))

    for each in (invoke_moe, invoke_moe_fp8):
        monkeypatch.setattr(each, "_kernels", Entries())
    kind = torch.float8_e4m3fn if fp8 else torch.float16
    x, inner = torch.zeros(3, 8).to(kind), torch.zeros(6, 4).to(kind)
    w1, w2, w3 = torch.zeros(5, 4, 8).to(kind), torch.zeros(5, 4, 8).to(kind) if halves else None, torch.zeros(5, 8, 4)
    scales = [torch.ones(n) if fp8 else None for n in range(1, 6)]  # of x, w1, w2, the inner layer, w3
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    blocks = (*(torch.zeros(n, dtype=torch.int32) for n in (16, 1, 1)), 16)
    of_up, of_down = (w1, w2), (w3,)
    ops = invoke_moe._invoke_cute_moe_up, invoke_moe._invoke_cute_moe_down
    if fp8:
        of_up, of_down = (scales[0], w1, scales[1], w2, scales[2]), (scales[3], w3, scales[4])
        ops = invoke_moe_fp8._invoke_cute_moe_up_fp8, invoke_moe_fp8._invoke_cute_moe_down_fp8
    up = ops[0].kernel_op.launch(x, *of_up, ids, *blocks)
    down = ops[1].kernel_op.launch(inner, *of_down, weights, ids, *blocks)
    wanted = [
        ("invoke_moe_up", (up, x, scales[0], w1, scales[1], w2, scales[2], ids, *blocks)),
        ("invoke_moe_down", (down, inner, scales[3], w3, scales[4], weights, ids, *blocks)),
    ]
    for (name, given), (entry, arguments) in zip(calls, wanted, strict=True):
        assert name == entry
        assert all(a is b for a, b in zip(given, arguments, strict=True))
    dtype = torch.bfloat16 if fp8 else torch.float16
    assert (up.shape, up.dtype) == ((6, 8 if halves else 4), dtype)
    assert (down.shape, down.dtype) == ((3, 2, 8), dtype)


# -- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "words"), [(0, 0), (8, 0), (9, 8)])
def test_counts_of_more_than_8_tokens_have_scratch_memory_behind_them(
    monkeypatch: pytest.MonkeyPatch, tokens: int, words: int
) -> None:
    given: list[Any] = []

    class Entries:
        def topk_softmax(self, *arguments: Any) -> None:
            given.extend(arguments)

    monkeypatch.setattr(importlib.import_module("kestrel_moe.topk_softmax"), "_kernels", Entries())
    gating, bias, number = torch.zeros(tokens, 64), torch.ones(64), torch.ones(1, dtype=torch.int32)
    options = {"renormalize": True, "bias": bias, "num_tokens": number}
    weights, ids, counts = kestrel_moe.topk_softmax.kernel_op.launch(gating, 6, **options)
    assert given[0] is weights
    assert given[1] is ids
    assert given[2].shape == (64 + words,)
    assert given[2].data_ptr() == counts.data_ptr()
    assert given[3:] == [gating, 6, True, bias, number]
    assert (weights.shape, ids.shape, counts.shape) == ((tokens, 6), (tokens, 6), (64,))
    assert (weights.dtype, ids.dtype, counts.dtype) == (torch.float32, torch.int32, torch.int32)


# -- gated activations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "options", "formula"),
    [
        (kestrel_moe.gelu_residual, {"approximate": "tanh"}, (False, "tanh", 1.0)),
        (kestrel_moe.gelu_and_mul, {"approximate": "tanh"}, (False, "tanh", 0.0)),
        (kestrel_moe.silu_and_mul, {}, (True, "none", 0.0)),
    ],
)
def test_activations_of_rows_of_any_strides_are_written_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, op: Any, options: dict[str, str], formula: tuple[Any, ...]
) -> None:
    class Entries:
        def gated(self, out: Tensor, x: Tensor, *rest: Any) -> None:
            assert rest == formula
            assert (x.shape, out.shape) == ((6, 8), (6, 4))
            out.copy_(x[:, :4] + 1)

        def gated_fp8(self, q: Tensor, scale: Tensor, x: Tensor, *rest: Any) -> None:
            assert rest == formula
            assert (q.dtype, *q.shape) == (torch.float8_e4m3fn, 6, 4)
            assert (scale.dtype, *scale.shape) == (torch.float32, 6, 1)

    monkeypatch.setattr(importlib.import_module("kestrel_moe._gated"), "_kernels", Entries())
    rows = torch.arange(48.0).view(6, 8)
    turned = torch.arange(48.0).view(3, 2, 8).transpose(0, 1)
    for x in (rows, rows.view(2, 3, 8), turned):
        assert torch.equal(op.kernel_op.launch(x, **options), x[..., :4] + 1)
    out = torch.zeros(3, 2, 4).transpose(0, 1)
    assert op.kernel_op.launch(turned, **options, out=out) is out
    assert torch.equal(out, turned[..., :4] + 1)
    getattr(kestrel_moe, f"{op.__name__}_fp8").kernel_op.launch(rows, **options)


# -- route_and_align --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "launches"),
    [
        (1, 64, ["route"]),
        (16, 128, ["route"]),
        (17, 64, ["topk", "align"]),
        (16, 129, ["topk", "align"]),
        (1, 2048, ["route"]),
        (1, 2049, ["topk", "align"]),
    ],
)
def test_up_to_16_tokens_and_2048_logits_are_one_launch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, launches: list[str]
) -> None:
    done: list[str] = []

    class Entries:
        def route_and_align(self, weights: Tensor, ids: Tensor, *rest: Any) -> None:
            order, expert_ids, length, _, k, block, renormalize, bias, table = rest
            done.append("route")
            blocks = most_blocks(tokens * 2, experts, 8)
            assert (weights.shape, ids.shape) == ((tokens, 2), (tokens, 2))
            assert (order.numel(), expert_ids.numel(), length.numel()) == (8 * blocks, blocks, 1)
            assert (k, block, renormalize, bias, table) == (2, 8, True, None, None)

        def moe_align_block_size(self, ids: Tensor, count: int, block: int, order: Tensor, *rest: Any) -> None:
            done.append("align")
            assert (ids.dtype, count, block) == (torch.int32, experts, 8)

    def topk(logits: Tensor, k: int, renormalize: bool, bias: Any) -> tuple[Tensor, Tensor, None]:
        done.append("topk")
        assert (k, renormalize, bias) == (2, True, None)
        return torch.zeros(tokens, k), torch.zeros(tokens, k, dtype=torch.int32), None

    monkeypatch.setattr(moe_align, "_kernels", Entries())
    monkeypatch.setattr(moe_align, "launch_topk", topk)
    kestrel_moe.route_and_align.kernel_op.launch(torch.zeros(tokens, experts), 2, 8, renormalize=True)
    assert done == launches
