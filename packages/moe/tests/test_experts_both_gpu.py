"""One launch for both projections of a layer of routed experts, whose tiles wait for one another.

Tiles of the second projection wait for signals of the first. Tickets hand out the tiles of the first to CTAs that run,
so a launch ends however few of its CTAs run at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from expert_cases import ODD_ROUTINGS, random_ids
from held_sms import count_sms, held_sms, until

from kestrel_moe import variants
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import ALIGNED, CLUSTERED, Variant
from kestrel_runtime import UnsupportedError
from kestrel_runtime.testing import assert_same_bits, graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

ONE_LAUNCH = [(form, 128) for form in ("bf16", "fp16", "expert", "channel", "block", "mixed")]
ONE_LAUNCH += [(form, tile) for form in ("bf16", "fp16") for tile in (64, 160)]
ONE_LAUNCH += [(form, tile) for form in ("expert", "channel", "block", "mixed") for tile in (32, 64)]
TWO_LAUNCHES = Variant(CLUSTERED, 128)
SIZES = (16, 3, 528, 400)  # experts, choices, Hd, I: four slices of the first projection, three of the second


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("one launch for both projections is for an H100 or H200")


def scales_of(form: str, experts: int, rows: int, columns: int) -> torch.Tensor:
    shapes = {"expert": (experts,), "channel": (experts, rows), "block": (experts, -(-rows // 128), -(-columns // 128))}
    return (torch.rand(shapes[form], device="cuda") + 0.5) / (20 * columns**0.5)


class Layer:
    """Any weights and codes do, as results are compared with those of the same layer. "mixed": block scales of w2."""

    def __init__(self, form: str, experts: int, choices: int, width: int, inner: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.dtype = torch.float16 if form == "fp16" else torch.bfloat16
        self.experts, self.choices, self.width = experts, choices, width
        w1 = torch.randn(experts, 2 * inner, width, device="cuda", dtype=self.dtype)
        w2 = torch.randn(experts, width, inner, device="cuda", dtype=self.dtype)
        self.scales = {}
        if form in ("bf16", "fp16"):
            self.weights = [w1 / width**0.5, w2 / inner**0.5]
            return
        self.weights = [(w * 20).to(torch.float8_e4m3fn) for w in (w1, w2)]
        forms = ("channel", "block") if form == "mixed" else (form, form)
        for name, of, w in zip(("w1_scale", "w2_scale"), forms, self.weights, strict=True):
            self.scales[name] = scales_of(of, *w.shape)

    def batch(self, tokens: int, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """hidden, topk_weights, topk_ids."""
        hidden = torch.randn(tokens, self.width, device="cuda", dtype=self.dtype)
        given = random_ids(tokens, self.experts, self.choices) if ids is None else ids
        return hidden, torch.rand(tokens, self.choices, device="cuda"), given.to("cuda", torch.int32)

    def run(self, variant: Variant, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return by_variant(variant, hidden, *self.weights, weights, ids, **self.scales)


def ids_of_counts(counts: list[int]) -> torch.Tensor:
    """One choice for each token: so many tokens for each expert, in no order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids))][:, None]


@pytest.mark.parametrize("routing", [*ODD_ROUTINGS, "random"])
@pytest.mark.parametrize("tokens", [1, 50, 700])
@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_one_launch_gives_the_bits_of_two_with_experts_without_tokens(
    form: str, tile: int, tokens: int, routing: str
) -> None:
    made = Layer(form, *SIZES)
    batch = made.batch(tokens, ODD_ROUTINGS.get(routing, random_ids)(tokens, *SIZES[:2]))
    got = [made.run(Variant(ALIGNED, tile), *batch) for _ in range(3)]
    want = made.run(TWO_LAUNCHES, *batch)
    for each in got:
        assert_same_bits(each, want, "one launch")
    if routing == "none":
        assert not bool(want.any())


@pytest.mark.parametrize(
    ("width", "inner"), [(16, 16), (4096, 16), (16, 2048), (272, 144)], ids=["one", "wide", "deep", "both"]
)
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_one_launch_gives_the_bits_of_two_around_whole_waves(
    form: str, tile: int, more: int, width: int, inner: int
) -> None:
    """As many tiles as SMs, one fewer and one more. "wide", "deep": one slice in the first or the second projection."""
    experts = count_sms() + more
    made = Layer(form, experts, 1, width, inner)
    batch = made.batch(experts, ids_of_counts([1] * experts))
    assert_same_bits(made.run(Variant(ALIGNED, tile), *batch), made.run(TWO_LAUNCHES, *batch), "one launch")


@pytest.mark.parametrize("counts", [[1], [0, 0, 0, 1], [161, 0, 0], [1000, 0, 1, 0, 159, 128]], ids=str)
@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_one_launch_gives_the_bits_of_two_with_fewer_items_than_ctas(form: str, tile: int, counts: list[int]) -> None:
    made = Layer(form, len(counts), 1, 528, 272)
    batch = made.batch(sum(counts), ids_of_counts(counts))
    assert_same_bits(made.run(Variant(ALIGNED, tile), *batch), made.run(TWO_LAUNCHES, *batch), "one launch")


@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_a_replayed_graph_sees_other_tokens_and_another_routing(form: str, tile: int) -> None:
    """More tiles than in the captured call, fewer, and none: the counters of tickets and signals start anew."""
    made, variant = Layer(form, *SIZES), Variant(ALIGNED, tile)
    for first, second in (("random", "first and last"), ("first and last", "random"), ("random", "none")):
        captured, other = (
            made.batch(700, ODD_ROUTINGS.get(routing, random_ids)(700, *SIZES[:2])) for routing in (first, second)
        )
        want = made.run(TWO_LAUNCHES, *other)
        got = graph_replay(lambda *batch: made.run(variant, *batch), captured, other)
        assert_same_bits(got, want, f"{first}, then {second}")


@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_two_streams_at_once_have_their_own_counters(form: str, tile: int) -> None:
    made, variant = Layer(form, *SIZES), Variant(ALIGNED, tile)
    batches = [made.batch(tokens) for tokens in (2000, 1300)]
    want = [made.run(TWO_LAUNCHES, *batch) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, batch, results in zip(streams, batches, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(made.run(variant, *batch))
    torch.cuda.synchronize()
    for results, each in zip(got, want, strict=True):
        for result in results:
            assert_same_bits(result, each, "a stream")


@pytest.mark.parametrize("variant", [Variant(ALIGNED, 128), Variant(CLUSTERED, 128)], ids=str)
def test_fp8_tiles_of_128_without_the_positions_of_their_pairs_are_refused(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would read x beyond its codes, which then have one row for each token."""
    monkeypatch.setattr(variants, "FP8_WGMMA_TILE", None)  # no tile is given positions
    made = Layer("channel", *SIZES)
    with pytest.raises(UnsupportedError, match="without the positions of their pairs"):
        made.run(variant, *made.batch(50))


# -- few CTAs run at a time -------------------------------------------------------------------------------------------


def started(stream: torch.cuda.Stream, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        result, done = run(), torch.cuda.Event()
        done.record()
    return result, done


def end_of_waves(sms: int) -> int:
    """Tokens whose first projection has more work items than so many SMs: 16 experts, 3 choices, 4 slices."""
    return 128 * 16 // 3 * (sms // 64 + 1)


@pytest.mark.parametrize("free", ["1", "5", "half"])
@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_a_layer_ends_while_other_work_holds_sms(form: str, tile: int, free: str) -> None:
    sms = count_sms()
    made, variant, stream = Layer(form, *SIZES), Variant(ALIGNED, tile), torch.cuda.Stream()
    batch = made.batch(end_of_waves(sms))
    run, want = partial(made.run, variant, *batch), made.run(TWO_LAUNCHES, *batch)
    torch.cuda.synchronize()
    started(stream, run)  # loads kernels, allocates
    for _ in range(3):
        with held_sms(sms - (sms // 2 if free == "half" else int(free))):
            result, done = started(stream, run)
            until(done.query, "the layer")
        assert_same_bits(result, want, f"with {free} SMs")


@pytest.mark.parametrize("release", ["while both wait", "at the end"])
@pytest.mark.parametrize(("form", "tile"), ONE_LAUNCH)
def test_layers_of_different_priority_end_together(form: str, tile: int, release: str) -> None:
    """A third kernel holds half of the SMs, the layer of low priority has the rest, and the other one what is freed."""
    sms, variant = count_sms(), Variant(ALIGNED, tile)
    made = Layer(form, 8, 4, 2048, 2048)
    batches = [made.batch(1900), made.batch(2000)]
    want = [made.run(TWO_LAUNCHES, *batch) for batch in batches]
    streams = [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)]
    torch.cuda.synchronize()
    runs = [partial(made.run, variant, *batch) for batch in batches]
    for stream, run in zip(streams, runs, strict=True):
        started(stream, run)  # loads kernels, allocates
    for _ in range(5):
        with held_sms(sms // 2) as free_them:
            calls = [started(stream, run) for stream, run in zip(streams, runs, strict=True)]
            if release == "while both wait":
                free_them()
            for name, (_, done) in zip(("low", "high"), calls, strict=True):
                until(done.query, f"the layer of {name} priority")
        for (result, _), each in zip(calls, want, strict=True):
            assert_same_bits(result, each, "two priorities")


@pytest.mark.parametrize(("form", "tile"), [("bf16", 128), ("bf16", 160), ("block", 128)])
def test_a_layer_ends_in_a_partition_of_few_sms(form: str, tile: int) -> None:
    green = pytest.importorskip("torch.cuda.green_contexts")
    made, variant = Layer(form, *SIZES), Variant(ALIGNED, tile)
    batch = made.batch(end_of_waves(count_sms()))
    want = made.run(TWO_LAUNCHES, *batch)
    torch.cuda.synchronize()
    try:
        partition = green.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    except RuntimeError as error:
        pytest.skip(f"no partition of SMs: {error}")
    partition.set_context()
    try:
        result, done = started(torch.cuda.current_stream(), partial(made.run, variant, *batch))
        until(done.query, "the layer in 16 SMs")
    finally:
        partition.pop_context()
    assert_same_bits(result, want, "16 SMs")
