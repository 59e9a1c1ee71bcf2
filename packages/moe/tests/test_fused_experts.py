"""fused_experts against a loop over tokens and choices in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kestrel_moe import fused_experts, reference_experts, topk_softmax

F8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


U = 2.0**-24  # unit roundoff of float32


def activated(up: torch.Tensor, activation: str) -> torch.Tensor:
    h, g = up.chunk(2)
    if activation == "silu_and_mul":
        return h / (1 + torch.exp(-h)) * g
    gelu = h * 0.5 * torch.special.erfc(-h / math.sqrt(2))
    return gelu * (g + 1) if activation == "gelu_residual" else gelu * g


def activated_error(up: torch.Tensor, error: torch.Tensor, activation: str) -> torch.Tensor:
    """How far the activation of ``up`` may be off when its input is off by ``error``.

    GELU and SiLU have slopes of at most 1.13 and magnitudes of at most |h|; their float32 arithmetic adds 2^-20 of |h|.
    """
    h, g = up.abs().chunk(2)
    error_h, error_g = error.chunk(2)
    gate = g + (1 if activation == "gelu_residual" else 0) + error_g
    return (1.13 * error_h + 2.0**-20 * h) * gate + h * (error_g + 2 * U * gate)


@dataclass
class Layer:
    hidden: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    def run(self, **options: object) -> torch.Tensor:
        return fused_experts(self.hidden, self.w1, self.w2, self.weights, self.ids, **options)  # type: ignore[arg-type]

    def by_hand(
        self, activation: str = "gelu_residual", expert_map: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in float64, and how far a float32 evaluation in any order of summation may be off it.

        A float32 sum of n products is off by at most n U times the sum of their magnitudes. The hidden layer is rounded
        to the dtype of the input here as there; float32 and float64 may round to two neighbours, one eps apart.
        """
        result = torch.zeros(self.hidden.shape, dtype=torch.float64)
        bound = torch.zeros(self.hidden.shape, dtype=torch.float64)
        eps, tiny = torch.finfo(self.hidden.dtype).eps, torch.finfo(self.hidden.dtype).tiny
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist(), strict=True)):
            x, magnitude = self.hidden[t].double(), torch.zeros(self.hidden.shape[1], dtype=torch.float64)
            for e, weight in zip(ids, weights, strict=True):
                if expert_map is not None:
                    e = expert_map[e] if 0 <= e < len(expert_map) else -1
                if 0 <= e < len(self.w1):
                    w1, w2 = self.w1[e].double(), self.w2[e].double()
                    up = w1 @ x
                    inner = activated(up, activation).to(self.hidden.dtype).double()
                    error = activated_error(up, x.shape[0] * U * (w1.abs() @ x.abs()), activation)
                    error = error + eps * inner.abs() + tiny
                    down = w2.abs() @ inner.abs()
                    result[t] += weight * (w2 @ inner)
                    bound[t] += abs(weight) * (w2.abs() @ error + (inner.shape[0] + 1) * U * down)
                    magnitude += abs(weight) * down
            bound[t] += len(ids) * U * magnitude
        return result, 1.01 * bound + 0.5 * eps * (result.abs() + bound) + tiny


def layer(
    tokens: int, experts: int, choices: int, dtype: torch.dtype = torch.float32, width: int = 40, inner: int = 24
) -> Layer:
    g = torch.Generator().manual_seed(1000 * tokens + experts)
    weights, ids, _ = topk_softmax(torch.randn(tokens, experts, generator=g), choices, renormalize=True)
    return Layer(
        torch.randn(tokens, width, generator=g).to(dtype),
        (torch.randn(experts, 2 * inner, width, generator=g) / width**0.5).to(dtype),
        (torch.randn(experts, width, inner, generator=g) / inner**0.5).to(dtype),
        weights,
        ids,
    )


def assert_right(got: torch.Tensor, by_hand: tuple[torch.Tensor, torch.Tensor]) -> None:
    exact, allowed = by_hand
    worst = ((got.double() - exact).abs() / allowed).max()
    assert worst <= 1, f"{worst:.2f} of the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_residual", "silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 100])
def test_matches_a_loop_over_tokens(tokens: int, activation: str, dtype: torch.dtype) -> None:
    case = layer(tokens, 8, 2, dtype)
    got = case.run(activation=activation)
    assert got.dtype == dtype
    assert_right(got, case.by_hand(activation))


@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (60, 4), (64, 8), (256, 8), (512, 10), (5, 5)])
@pytest.mark.parametrize("tokens", [2, 33])
def test_any_number_of_experts_and_choices(tokens: int, experts: int, choices: int) -> None:
    case = layer(tokens, experts, choices, width=17, inner=6)
    assert_right(case.run(), case.by_hand())


@pytest.mark.parametrize("tokens", [257, 4096])
def test_many_tokens(tokens: int) -> None:
    case = layer(tokens, 8, 2, width=12, inner=5)
    sample = torch.arange(0, tokens, 41)
    few = Layer(case.hidden[sample], case.w1, case.w2, case.weights[sample], case.ids[sample])
    assert_right(case.run()[sample], few.by_hand())


@pytest.mark.parametrize("tokens", [4, 50])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    case = layer(tokens, 8, 1)
    case.ids.fill_(5)
    assert_right(case.run(), case.by_hand())


@pytest.mark.parametrize("tokens", [1, 20])  # every pair a block of its own, and several pairs a block
def test_the_choices_are_added_in_ascending_order(tokens: int) -> None:
    # Expert e gives the e-th number: (2^24 + 1) - 2^24 = 0 in float32, but (2^24 - 2^24) + 1 = 1.
    values = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    w1 = torch.tensor([[[40.0], [0.0]]]).expand(3, 2, 1).contiguous()  # silu(40) * g: 40 in float32; g = 1
    w1[:, 1] = 1.0
    w2 = (values / 40).view(3, 1, 1)
    hidden, weights = torch.ones(tokens, 1), torch.ones(tokens, 3)
    ids = torch.arange(3, dtype=torch.int32).expand(tokens, 3).contiguous()
    products = [float(torch.tensor(40.0) * w2[e, 0, 0]) for e in range(3)]
    assert products == values.tolist()
    got = fused_experts(hidden, w1, w2, weights, ids, activation="silu_and_mul")
    assert got.flatten().tolist() == [0.0] * tokens
    turned = fused_experts(hidden, w1, w2, weights, ids[:, [0, 2, 1]].contiguous(), activation="silu_and_mul")
    assert turned.flatten().tolist() == [1.0] * tokens


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_choices_are_added_in_float32(tokens: int) -> None:
    w1 = torch.tensor([[[16.0], [1.0]]]).bfloat16().expand(3, 2, 1).contiguous()  # GELU(16) * 1 = 16
    w2 = torch.tensor([16.0, 2.0**-4, 2.0**-4]).bfloat16().view(3, 1, 1)  # 256, 1 and 1; 257 is no number of bf16
    ids = torch.arange(3, dtype=torch.int32).expand(tokens, 3).contiguous()
    hidden = torch.ones(tokens, 1).bfloat16()
    got = fused_experts(hidden, w1, w2, torch.ones(tokens, 3), ids, activation="gelu_and_mul")
    assert got.flatten().tolist() == [258.0] * tokens


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_hidden_layer_is_rounded_and_what_is_activated_is_not(tokens: int) -> None:
    """GELU keeps 16 and 16 + 1/16, of which bf16 makes 16; and -2 - 2^-7, which has no number of bf16."""
    ids, weights = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
    hidden = torch.ones(tokens, 2).bfloat16()
    w1 = torch.tensor([[[16.0, 0.0], [16.0, 2.0**-4], [1.0, 0.0], [1.0, 0.0]]]).bfloat16()
    w2 = torch.tensor([[[1.0, -1.0], [1.0, 0.0]]]).bfloat16()
    got = fused_experts(hidden, w1, w2, weights, ids, activation="gelu_and_mul")
    assert got.tolist() == [[0.0, 16.0]] * tokens
    w1[:, :2] = torch.tensor([-2.0, -(2.0**-7)])
    w2[:, 0, 1] = 0.0
    got = fused_experts(hidden, w1, w2, weights, ids, activation="gelu_and_mul")
    exact = -2.0078125 * 0.5 * math.erfc(2.0078125 / math.sqrt(2))
    assert got.tolist() == [[torch.tensor(exact).bfloat16().item()] * 2] * tokens


@pytest.mark.parametrize("tokens", [4, 50])
def test_negative_ids_and_ids_past_the_end_are_skipped(tokens: int) -> None:
    case = layer(tokens, 8, 3)
    case.ids[::2, 1] = -1
    case.ids[1::3, 0] = 8
    case.ids[2::5, 2] = 2**31 - 1
    case.ids[3] = torch.tensor([-5, 100, -(2**31)])
    case.weights[3] = torch.tensor([math.nan, math.inf, 1.0])
    got = case.run()
    case.weights[3] = 0.0
    assert_right(got, case.by_hand())
    assert bool((got[3] == 0).all())


@pytest.mark.parametrize("tokens", [4, 50])
def test_an_expert_map_selects_and_permutes_the_local_experts(tokens: int) -> None:
    case = layer(tokens, 12, 3)
    expert_map = [-1, 3, -1, 0, 2, -1, -1, 1, -1, -1, -1, 77]
    case.w1, case.w2 = case.w1[:4], case.w2[:4]
    case.ids[0, 0] = 12  # past the end of the map
    case.ids[1, 1] = -6  # counted from the end, the place of expert 1
    got = case.run(expert_map=torch.tensor(expert_map, dtype=torch.int32))
    assert_right(got, case.by_hand(expert_map=expert_map))


@pytest.mark.parametrize("tokens", [4, 50])
def test_no_local_expert_gives_zeros(tokens: int) -> None:
    case = layer(tokens, 8, 2)
    case.w1[0], case.w2[0] = math.nan, math.nan
    for known in (8, 1, 0):  # a map of so many experts; ids past it are skipped too
        got = case.run(expert_map=torch.full((known,), -1, dtype=torch.int32))
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("tokens", [4, 50])
def test_an_expert_that_no_token_chose_has_no_effect(tokens: int) -> None:
    case = layer(tokens, 8, 2)
    case.ids[case.ids == 0] = 1
    expected = case.run()
    case.w1[0], case.w2[0] = math.nan, math.inf
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("tokens", [4, 50])
def test_a_nan_token_stays_alone(tokens: int) -> None:
    case = layer(tokens, 8, 2)
    expected = case.run()
    case.hidden[2] = math.nan
    got = case.run()
    assert bool(got[2].isnan().all())
    others = torch.arange(tokens) != 2
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_up_to_16_tokens_a_row_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    case = layer(16, 8, 2, dtype, width=256, inner=128)
    full = case.run()
    for first, last in ((0, 1), (3, 5), (8, 16)):
        part = Layer(case.hidden[first:last], case.w1, case.w2, case.weights[first:last], case.ids[first:last])
        assert torch.equal(part.run(), full[first:last])


@pytest.mark.parametrize(
    ("experts", "choices", "sizes"),  # T * K / E of the sizes: within one power of two, below 1, or from 64 on
    [
        (64, 2, (17, 24, 31)),
        (64, 2, (32, 50, 63)),
        (64, 2, (64, 127)),
        (8, 2, (17, 31)),
        (5, 3, (27, 40, 53)),
        (8, 2, (64, 100, 127)),
        (8, 2, (128, 255)),
        (8, 2, (256, 300, 513, 900)),
    ],
)
@pytest.mark.parametrize("how", [None, "row", "tile"])
def test_within_a_power_of_two_of_choices_per_expert_a_row_is_the_same_bit_for_bit(
    experts: int, choices: int, sizes: tuple[int, ...], how: str | None
) -> None:
    case = layer(sizes[-1], experts, choices, width=144, inner=80)
    options: dict[str, torch.Tensor] = {}
    if how is not None:
        case.w1, options["w1_scale"], _ = quantised(case.w1, how)
        case.w2, options["w2_scale"], _ = quantised(case.w2, how)
    full = case.run(**options)
    g = torch.Generator().manual_seed(0)
    for size in sizes:  # rows in any order: none stands where it stood, in the batch or in its block
        rows = torch.randperm(sizes[-1], generator=g)[:size]
        part = Layer(case.hidden[rows], case.w1, case.w2, case.weights[rows], case.ids[rows])
        assert torch.equal(part.run(**options), full[rows])


def test_runs_repeat_bit_for_bit() -> None:
    case = layer(200, 8, 4, torch.bfloat16)
    assert torch.equal(case.run(), case.run())


def test_views_out_and_untouched_inputs() -> None:
    case = layer(20, 6, 2, torch.bfloat16)
    expected = case.run()
    wide = torch.randn(40, 64).bfloat16()
    wide[::2, 10:50] = case.hidden
    w1_wide = torch.randn(6, 50, 60).bfloat16()
    w1_wide[:, 1:49, 7:47] = case.w1
    w2_turned = case.w2.transpose(0, 1).contiguous().transpose(0, 1)
    ids_wide = torch.zeros(20, 5, dtype=torch.int32)
    ids_wide[:, 2:4] = case.ids
    inputs = [wide, w1_wide, w2_turned, ids_wide, case.weights]
    before = [t.clone() for t in inputs]
    buffer = torch.full((20, 48), math.nan).bfloat16()
    viewed = Layer(wide[::2, 10:50], w1_wide[:, 1:49, 7:47], w2_turned, case.weights, ids_wide[:, 2:4])
    viewed.run(out=buffer[:, 4:44])
    assert torch.equal(buffer[:, 4:44], expected)
    assert bool(buffer[:, :4].isnan().all() and buffer[:, 44:].isnan().all())
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_no_tokens_and_no_choices() -> None:
    case = layer(3, 6, 2)
    empty = Layer(case.hidden[:0], case.w1, case.w2, case.weights[:0], case.ids[:0])
    assert empty.run().shape == (0, 40)
    none = Layer(case.hidden, case.w1, case.w2, case.weights[:, :0], case.ids[:, :0])
    assert torch.equal(none.run(), torch.zeros(3, 40))


# ---- FP8 -----------------------------------------------------------------------------------------------------------


def to_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(F8)


def quantised(weight: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales as the op takes them, scales per element)."""
    experts, rows, columns = weight.shape
    tile_rows, tile_columns = {"expert": (rows, columns), "row": (1, columns), "tile": (128, 128)}[how]
    spread = torch.empty_like(weight)
    scales = torch.empty(experts, -(-rows // tile_rows), -(-columns // tile_columns))
    for i in range(scales.shape[1]):
        for j in range(scales.shape[2]):
            part = (
                slice(None),
                slice(i * tile_rows, (i + 1) * tile_rows),
                slice(j * tile_columns, (j + 1) * tile_columns),
            )
            scales[:, i, j] = weight[part].abs().amax((1, 2)) / 448
            spread[part] = scales[:, i, j, None, None]
    shape = {"expert": (experts,), "row": (experts, rows), "tile": scales.shape}[how]
    return to_codes(weight, spread), scales.view(shape), spread


def requantised(row: torch.Tensor, how: str) -> torch.Tensor:
    """The values in float64 that a row of activations has in FP8, with one scale or one per 128 columns."""
    values = []
    for part in row.split(128 if how == "tile" else row.numel()):
        scale = part.abs().max() / 448
        values.append(to_codes(part, scale).double() * scale.double())
    return torch.cat(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["expert", "row", "tile"])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_fp8_matches_a_loop_over_tokens(tokens: int, how: str, dtype: torch.dtype) -> None:
    case = layer(tokens, 6, 2, dtype, width=144, inner=144)
    codes1, scale1, spread1 = quantised(case.w1.float(), how)
    codes2, scale2, spread2 = quantised(case.w2.float(), how)
    got = fused_experts(case.hidden, codes1, codes2, case.weights, case.ids, w1_scale=scale1, w2_scale=scale2)

    exact = torch.zeros(case.hidden.shape, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(case.ids.tolist(), case.weights.tolist(), strict=True)):
        x = requantised(case.hidden[t].float(), how)
        for e, weight in zip(ids, weights, strict=True):
            inner = activated((codes1[e].double() * spread1[e].double()) @ x, "gelu_residual").float()
            inner = requantised(inner, "tile")
            exact[t] += weight * ((codes2[e].double() * spread2[e].double()) @ inner)
    error = (got.double() - exact).abs()
    rounding = 0.5 * torch.finfo(dtype).eps * exact.abs() + 1e-5
    # An inner code may fall to its neighbour where float32 and float64 lie on two sides of a tie: that moves one token
    # by one code of one addend. It is rare.
    assert bool((error <= rounding).all(1).float().mean() >= 0.9)
    assert bool((error <= rounding + 0.02).all())


@pytest.mark.parametrize("how", ["expert", "row", "tile"])
def test_scales_of_any_magnitude_scale_the_result(how: str) -> None:
    case = layer(5, 6, 2, width=144, inner=80)
    codes1, scale1, _ = quantised(case.w1, how)
    codes2, scale2, _ = quantised(case.w2, how)
    arguments = (case.hidden, codes1, codes2, case.weights, case.ids)
    got = fused_experts(*arguments, w1_scale=scale1, w2_scale=scale2)
    larger = fused_experts(*arguments, w1_scale=scale1, w2_scale=scale2 * 2.0**40)
    assert torch.equal(larger, got * 2.0**40)


def test_fp8_comes_near_the_unquantised_layer() -> None:
    case = layer(40, 6, 2, torch.bfloat16, width=256, inner=128)
    codes1, scale1, _ = quantised(case.w1.float(), "row")
    codes2, scale2, _ = quantised(case.w2.float(), "row")
    got = fused_experts(case.hidden, codes1, codes2, case.weights, case.ids, w1_scale=scale1, w2_scale=scale2)
    exact, _ = case.by_hand()
    # Four operands with 3 mantissa bits: a relative error of 2^-4 / sqrt(3) each, independent
    assert (got.double() - exact).norm() / exact.norm() < 2 * 2.0**-4 / math.sqrt(3)


@pytest.mark.parametrize("tokens", [4, 50])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_reference_reads_nothing_on_the_host(tokens: int, fp8: bool) -> None:
    with FakeTensorMode():  # a read of a value would raise here
        dtype = F8 if fp8 else torch.bfloat16
        result = reference_experts.fused_experts(
            torch.empty(tokens, 40, dtype=torch.bfloat16),
            torch.empty(8, 48, 40, dtype=dtype),
            torch.empty(8, 40, 24, dtype=dtype),
            torch.empty(tokens, 2),
            torch.empty(tokens, 2, dtype=torch.int32),
            w1_scale=torch.empty(8) if fp8 else None,
            w2_scale=torch.empty(8, 40) if fp8 else None,
            expert_map=torch.empty(16, dtype=torch.int32),
        )
    assert result.shape == (tokens, 40)
