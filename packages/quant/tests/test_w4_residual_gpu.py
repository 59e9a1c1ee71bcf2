"""w4a16_linear with a residual on a GPU, by every kernel: exact sums, so that one rounding shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_w4_gpu import FORCED, FORMS, force, ranges_of_same_bits, tile_of, tokens_of
from w4_cases import exact_weight, random, weight

from kestrel_quant import W4Weight, w4a16_linear
from kestrel_quant._w4_plan import Plan
from kestrel_quant.w4a16 import from_codes
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

EACH_FORM = pytest.mark.parametrize("of", FORCED.values(), ids=FORCED)
WEIGHTS = pytest.mark.parametrize(
    ("dtype", "symmetric"), [(dtype, s) for dtype in (torch.bfloat16, torch.float16) for s in (True, False)], ids=str
)
# N, K, G: partial tiles of rows and of K; several groups, one group; the least N; groups without kernels that add, also
# as whole rows.
SHAPES = [
    *((264, 1024, 128), (1000, 1088, 1088), (136, 992, 992), (8, 640, 640)),
    *((264, 512, 64), (264, 512, 32), (264, 64, 64), (136, 32, 32)),
]


def exact_case(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> W4Weight:
    """A weight of powers of two times small whole numbers, whose products with such numbers have exact sums."""
    g = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=g, device="cuda")
    scales = 2.0 ** torch.randint(-9, 0, (n, k // group), generator=g, device="cuda")
    zeros = None if symmetric else torch.randint(0, 16, (n, k // group), generator=g, device="cuda")
    return from_codes(codes, scales.to(dtype), group, zeros)


def whole(*shape: int, dtype: torch.dtype, seed: int = 0, most: int = 2) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g, device="cuda").to(dtype)


def placed(values: torch.Tensor, kind: str) -> torch.Tensor:
    """The values in other memory, among NaN."""
    tokens, n = values.shape
    left, pad = {"rows": (0, 0), "padded": (8, 16), "unaligned": (3, 5)}[kind]
    memory = torch.full((tokens + 2, left + n + pad), torch.nan, dtype=values.dtype, device="cuda")
    view = memory[1:-1, left : left + n]
    view.copy_(values)
    return view


def adds_residuals(of: Plan) -> bool:
    """Whether the kernel adds a residual before it rounds."""
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return of.kernel == "mma" or (of.kernel != "stream" and tile_of(of).tokens <= 64)


@pytest.mark.parametrize("of", FORMS.values(), ids=FORMS)
@WEIGHTS
def test_a_residual_is_added_before_the_only_rounding(
    monkeypatch: pytest.MonkeyPatch, of: Plan, dtype: torch.dtype, symmetric: bool
) -> None:
    force(of, monkeypatch)
    for number, (n, k, group) in enumerate(SHAPES):
        with_bias = number % 2 == symmetric
        w, most = exact_case(n, k, group, dtype, symmetric), max(tokens_of(of))
        x, bias = whole(most, k, dtype=dtype), whole(n, dtype=dtype, seed=1, most=9) / 16 if with_bias else None
        residual = whole(most, n, dtype=dtype, seed=2, most=255) / 8
        product = F.linear(x.double(), exact_weight(w), None if bias is None else bias.double())
        want = (product + residual.double()).to(dtype)
        twice = product.to(dtype) + residual
        if group < k:  # with one scale for a row a product may have as few bits as its result
            assert not torch.equal(want, twice), "a second rounding would not be seen"
        if group < 128 or not adds_residuals(of):
            want = twice
        for t in tokens_of(of):
            if of.kernel == "mma" and t > 128:
                continue  # the vendor's GEMM
            for kind in ("rows", "padded", "unaligned"):
                out, assert_intact = canary((t, n), dtype, "cuda")
                w4a16_linear(x[:t], w, bias, residual=placed(residual[:t], kind), out=out)
                assert_same_bits(out, want[:t], f"{t}x{n}x{k} {kind}")
                assert_intact()
                inside = placed(residual[:t], kind)
                assert w4a16_linear(x[:t], w, bias, residual=inside, out=inside) is inside
                assert_same_bits(inside.contiguous(), want[:t], f"{t}x{n}x{k} {kind}, in place")
                around = inside._base
                assert around is not None
                assert int(around.isnan().sum()) == around.numel() - t * n, f"{t}x{n}x{k} {kind}: written around"
            out = placed(residual[:t], "unaligned").fill_(torch.nan)
            w4a16_linear(x[:t], w, bias, residual=residual[:t], out=out)
            assert_same_bits(out.contiguous(), want[:t], f"{t}x{n}x{k}, unaligned result")


@WEIGHTS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [129, 300, 4100])
def test_the_vendors_gemm_may_round_before_the_sum(
    monkeypatch: pytest.MonkeyPatch, tokens: int, dtype: torch.dtype, symmetric: bool, with_bias: bool
) -> None:
    force(FORMS["mma"], monkeypatch)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    for n, k, group in SHAPES:
        w, x = exact_case(n, k, group, dtype, symmetric), whole(tokens, k, dtype=dtype)
        bias = whole(n, dtype=dtype, seed=1, most=9) / 16 if with_bias else None
        residual = whole(tokens, n, dtype=dtype, seed=2, most=255) / 8
        product = F.linear(x.double(), exact_weight(w), None if bias is None else bias.double())
        once, twice = (product + residual.double()).to(dtype), product.to(dtype) + residual
        for kind in ("rows", "padded", "unaligned"):
            inside = placed(residual, kind)
            got = w4a16_linear(x, w, bias, residual=inside)
            assert w4a16_linear(x, w, bias, residual=inside, out=inside) is inside
            for result in (got, inside):
                right = result == once if with_bias else (result == once) | (result == twice)
                assert bool(right.all()), f"{n}x{k} {kind}"
            around = inside._base
            assert around is not None
            assert int(around.isnan().sum()) == around.numel() - tokens * n


@EACH_FORM
def test_every_token_may_have_the_same_row_as_its_residual(monkeypatch: pytest.MonkeyPatch, of: Plan) -> None:
    force(of, monkeypatch)
    w, x, row = weight(264, 1024, 128, torch.bfloat16), random(70, 1024), random(264, seed=1)
    want = w4a16_linear(x, w, residual=row.repeat(70, 1))
    assert_same_bits(w4a16_linear(x, w, residual=row.expand(70, 264)), want)


@EACH_FORM
def test_a_residual_of_zeros_changes_nothing(monkeypatch: pytest.MonkeyPatch, of: Plan) -> None:
    force(of, monkeypatch)
    w, x = weight(1024, 2048, 128, torch.bfloat16), random(130, 2048)
    for t in (1, 16, 40, 128):
        zeros = torch.zeros(t, 1024, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(w4a16_linear(x[:t], w, residual=zeros), w4a16_linear(x[:t], w))


@EACH_FORM
def test_within_a_range_of_tokens_a_row_with_a_residual_is_the_same(monkeypatch: pytest.MonkeyPatch, of: Plan) -> None:
    force(of, monkeypatch)
    w, x, residual = weight(1024, 2048, 128, torch.bfloat16), random(768, 2048), random(768, 1024, seed=1)
    for tokens in ranges_of_same_bits(of):
        want = w4a16_linear(x[: tokens[-1]], w, residual=residual[: tokens[-1]])
        for t in (tokens[0], tokens[len(tokens) // 2]):
            assert_same_bits(w4a16_linear(x[:t], w, residual=residual[:t]), want[:t], f"{t} tokens")


@pytest.mark.parametrize("tokens", [1, 64, 200])
@EACH_FORM
def test_a_residual_is_read_after_the_launch_before(monkeypatch: pytest.MonkeyPatch, of: Plan, tokens: int) -> None:
    force(of, monkeypatch)
    w = weight(1024, 2048, 128, torch.bfloat16)
    other, inputs = random(tokens, 2048, seed=9), [random(tokens, 2048, seed=seed) for seed in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = w4a16_linear(inputs[i], w)
        between()
        second = w4a16_linear(other, w, residual=first)
        between()
        third = w4a16_linear(other, w, residual=second, out=second)  # what is read is about to be written
        between()
        return first, third, w4a16_linear(inputs[i], w, residual=third)

    assert_waits_for_the_launch_before(chain, repetitions=200)


@pytest.mark.parametrize("tokens", [4, 64, 300])
@EACH_FORM
def test_a_replayed_graph_sees_a_new_residual(monkeypatch: pytest.MonkeyPatch, of: Plan, tokens: int) -> None:
    force(of, monkeypatch)
    w = weight(1024, 2048, 128, torch.bfloat16)
    x, residual = random(tokens, 2048), random(tokens, 1024, seed=1)
    new = [random(tokens, 2048, seed=2), random(tokens, 1024, seed=3)]
    got = graph_replay(lambda x, r: w4a16_linear(x, w, residual=r), [x, residual], new)
    assert_same_bits(got, w4a16_linear(new[0], w, residual=new[1]))


@pytest.mark.parametrize("tokens", [1, 6, 40, 300])
def test_leading_dimensions_and_an_activation_order(tokens: int) -> None:
    w, order = weight(264, 1024, 128, torch.bfloat16), torch.randperm(1024, device="cuda")
    permuted = W4Weight(w.codes, w.scales, w.shape, w.group_size, w.zeros, order)
    x, residual = random(2, tokens, 1024), random(2, tokens, 264, seed=1)
    want = w4a16_linear(x.view(-1, 1024), w, residual=residual.view(-1, 264)).view(2, tokens, 264)
    assert_same_bits(w4a16_linear(x, w, residual=residual), want)
    ordered = torch.empty_like(x)
    ordered[..., order] = x
    assert_same_bits(w4a16_linear(ordered, permuted, residual=residual), want)
    swapped = residual.transpose(0, 1).contiguous().transpose(0, 1)  # does not flatten
    assert_same_bits(w4a16_linear(x, w, residual=swapped), want)
    assert w4a16_linear(x, w, residual=swapped, out=swapped) is swapped
    assert_same_bits(swapped.contiguous(), want)


@pytest.mark.parametrize("tokens", [1, 40, 300, 4100])
def test_a_residual_elsewhere_or_partly_under_the_result_is_refused(tokens: int) -> None:
    w, x, memory = weight(64, 1024, 128, torch.bfloat16), random(tokens, 1024), random(tokens * 64 + 8)
    before, out = memory.clone(), memory[: tokens * 64].view(tokens, 64)
    with pytest.raises(ValueError, match="w4a16_linear: argument 'residual': expected device cuda"):
        w4a16_linear(x, w, residual=torch.ones(tokens, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': .* shares no memory with 'residual'"):
        w4a16_linear(x, w, residual=memory[8:].view(tokens, 64), out=out)
    with pytest.raises(ValueError, match=rf"w4a16_linear: argument 'residual': expected shape \({tokens}, 64\)"):
        w4a16_linear(x, w, residual=random(tokens, 65))
    assert_same_bits(memory, before)


@pytest.mark.parametrize("tokens", [1, 40, 100, 300, 4100])
def test_compiled_without_a_graph_break(tokens: int) -> None:
    torch.compiler.reset()
    w, x, residual = weight(1024, 2048, 128, torch.bfloat16), random(tokens, 2048), random(tokens, 1024, seed=1)
    with backend("auto"):
        got = torch.compile(lambda x, r: w4a16_linear(x, w, residual=r), fullgraph=True)(x, residual)
    assert_same_bits(got, w4a16_linear(x, w, residual=residual))
