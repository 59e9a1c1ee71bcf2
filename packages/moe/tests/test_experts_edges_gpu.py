"""Every variant of routed experts: what it writes, inf and NaN at the edges of its tiles, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from expert_cases import FORMS, layer, quantised

from kestrel_moe import fused_experts, topk_softmax
from kestrel_moe.fused_experts import by_variant
from kestrel_moe.variants import ALIGNED, CLUSTERED, FUSED, GROUPED_MM, IN_KERNEL, VARIANTS, Layer, Variant, is_valid
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_same_bits, assert_waits_for_the_launch_before, canary

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS, CHOICES, WIDTH, INNER = 8, 2, 272, 144
Case = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def made(form: str, tokens: int, width: int = WIDTH, inner: int = INNER) -> Case:
    """Positional and keyword arguments of fused_experts."""
    args = layer(tokens, EXPERTS, CHOICES, width, inner, DTYPES.get(form, torch.bfloat16))
    if form in DTYPES:
        return args, {}
    hidden, w1, w2, weights, ids = args
    (w1, w1_scale, _), (w2, w2_scale, _) = (quantised(w, form) for w in (w1, w2))
    return (hidden, w1, w2, weights, ids), {"w1_scale": w1_scale, "w2_scale": w2_scale}


def tokens_of(variant: Variant) -> tuple[int, ...]:
    """Few, as many as a tile holds, and several tiles with one that is not full."""
    if variant.path == FUSED:
        return (1, variant.tile - 1, variant.tile)
    return (1, 9, 32) if variant.path == IN_KERNEL else (1, 9, 4 * max(variant.tile, 32) + 5)


def covers(variant: Variant, form: str, *, hopper: bool = True) -> bool:
    dtype = form if form in DTYPES else "fp8"
    return is_valid(variant, Layer(1, EXPERTS, CHOICES, WIDTH, INNER, dtype, hopper))


def cases() -> Iterator[tuple[Variant, str]]:
    for variant in VARIANTS:
        for form in (*DTYPES, *FORMS):
            if covers(variant, form):
                yield variant, form


EVERY = pytest.mark.parametrize(("variant", "form"), list(cases()), ids=str)


@pytest.fixture(autouse=True)
def _only_valid_ones(request: pytest.FixtureRequest) -> None:
    given = getattr(request.node, "callspec", None)
    variant = given.params.get("variant") if given else None
    hopper = torch.cuda.get_device_capability() == (9, 0)
    form = given.params.get("form", "bf16") if given else "bf16"
    if variant is not None and not covers(variant, form, hopper=hopper):
        pytest.skip("a variant for an H100 or H200")


@EVERY
def test_only_the_result_is_written(variant: Variant, form: str) -> None:
    for tokens in tokens_of(variant):
        args, scales = made(form, tokens)
        given = [*args, *scales.values()]
        before = [x.clone() for x in given]
        want = by_variant(variant, *args, **scales)
        out, assert_intact = canary(want.shape, want.dtype, "cuda")
        by_variant(variant, *args, **scales, out=out)
        assert_intact()
        assert_same_bits(out, want, f"out= of {tokens} tokens")
        wide = torch.full((tokens, WIDTH + 28), 7.0, dtype=want.dtype, device="cuda")
        by_variant(variant, *args, **scales, out=wide[:, :WIDTH])
        assert_same_bits(wide[:, :WIDTH], want, f"wider rows of {tokens} tokens")
        assert bool((wide[:, WIDTH:] == 7).all())
        assert_same_bits(given, before, "inputs")


@pytest.mark.parametrize(("variant", "form"), [case for case in cases() if case[1] in DTYPES], ids=str)
@pytest.mark.parametrize("inner", [16, 80, 144])  # the last 128 bytes of a row of the hidden layer are not full
def test_inf_times_positive_weights_is_inf(inner: int, variant: Variant, form: str) -> None:
    tokens = 9 if variant.path == IN_KERNEL else variant.tile or 64
    (hidden, w1, w2, weights, ids), _ = made(form, tokens, 48, inner)
    hidden, w1, w2 = hidden.abs(), w1.abs(), w2.abs()
    hidden[0, 5] = float("inf")
    got = by_variant(variant, hidden, w1, w2, weights, ids, "silu_and_mul")
    assert bool((got[0] == float("inf")).all())
    assert bool(got[1:].isfinite().all())


@pytest.mark.parametrize("activation", ["gelu_residual", "silu_and_mul"])
@pytest.mark.parametrize(("variant", "form"), [case for case in cases() if case[1] in FORMS], ids=str)
def test_an_fp8_row_with_inf_is_that_of_the_reference_and_changes_no_other(
    variant: Variant, form: str, activation: str
) -> None:
    """inf in x, and elements whose hidden layer leaves float32."""
    tokens = tokens_of(variant)[-1]
    (hidden, w1, w2, weights, ids), scales = made(form, tokens)
    clean = by_variant(variant, hidden, w1, w2, weights, ids, activation, **scales)
    rows = {2: (3, float("inf")), 4: (200, float("-inf")), 6: (0, 1e30)}
    for row, (column, value) in rows.items():
        if row < tokens:
            hidden[row, column] = value
    got = by_variant(variant, hidden, w1, w2, weights, ids, activation, **scales)
    with backend("reference"):
        want = fused_experts(hidden, w1, w2, weights, ids, activation=activation, **scales)
    others = torch.tensor([row not in rows for row in range(tokens)], device="cuda")
    assert_same_bits(got[others], clean[others], "other rows")
    for row in filter(lambda row: row < tokens, rows):
        mine, theirs = got[row].double(), want[row].double()
        assert torch.equal(mine.isnan(), theirs.isnan()), f"NaN in row {row}"
        assert torch.equal(mine.isinf(), theirs.isinf()), f"inf in row {row}"
        finite = theirs.isfinite()
        # Codes of the hidden layer that differ by rounding change by 2^-3 of their value. They are allowed 2^-4 of a
        # row's squared norm.
        limit = 2**-8 + 2**-3 * 2**-2
        assert (mine[finite] - theirs[finite]).norm() <= limit * theirs[finite].norm(), f"row {row}"


@pytest.mark.parametrize(("variant", "form"), [case for case in cases() if case[1] in ("bf16", "block")], ids=str)
@pytest.mark.parametrize("last", ["tokens", "routing"])
def test_every_launch_of_a_layer_waits_for_tokens_and_routing(last: str, variant: Variant, form: str) -> None:
    """The launch just before the layer, which triggers it early, writes the tokens, or their experts and weights."""
    tokens = min(tokens_of(variant)[-1], 150)
    (hidden, w1, w2, _, _), scales = made(form, tokens)
    contents = [(torch.randn_like(hidden), torch.randn(tokens, EXPERTS, device="cuda")) for _ in range(2)]
    one, first = torch.ones(tokens, 1, device="cuda"), torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    before = [
        (torch.randn(1, *shape, device="cuda") / WIDTH**0.5).to(hidden.dtype)
        for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
    ]

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        def write_tokens() -> torch.Tensor:
            return by_variant(Variant(ALIGNED, 8), contents[i][0], *before, one, first)

        def write_routing() -> tuple[torch.Tensor, ...]:
            return topk_softmax(contents[i][1], CHOICES)

        if last == "tokens":
            weights, ids, _ = write_routing()
            between()
            rows = write_tokens()
        else:
            rows = write_tokens()
            between()
            weights, ids, _ = write_routing()
        between()
        return [by_variant(variant, rows, w1, w2, weights, ids, **scales)]

    assert_waits_for_the_launch_before(chain, repetitions=200)


def test_the_cases_cover_every_path() -> None:
    assert {variant.path for variant, _ in cases()} == {FUSED, IN_KERNEL, ALIGNED, CLUSTERED, GROUPED_MM}
