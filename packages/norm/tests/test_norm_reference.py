"""The references against torch.nn.functional in float64, with a bound in ulps that holds on every CPU.

The bound. Let u = 2^-24, the rounding error of one float32 operation. The references sum in float64, which is exact
here: N * 2^-53 is far below u. Then they round as follows, to first order in u.

RMSNorm, y = x / sqrt(S / N + eps) * (w + b): S is rounded to float32 (1 u), divided (1 u), eps is added (1 u), and the
root halves these and adds its own (2.5 u). The quotient has 3.5 u, w + b one more, the product one more: 5.5 u of |y|.

LayerNorm, y = c / sqrt(S / N + eps) * w + b: c = x - mean is rounded (1 u), and S inherits twice that, so the root has
3.5 u and the quotient 5.5 u. The product has 6.5 u of |c / sqrt(..) * w|, the last sum 1 u of |y|.

Where the result is narrower than float32, half a unit in its last place comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from norm_rows import rows_of

import kestrel_norm
from kestrel_runtime.testing import assert_same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (0, 1, 3, 16, 257)
SIZES = (1, 7, 8, 66, 896, 1152, 2048)
U = 2.0**-24
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}
NORMS = tuple(EPS)
FUSED = ("fused_add_layer_norm", "fused_add_rms_norm")
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def vector_of(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(got: torch.Tensor, exact: torch.Tensor, float32_error: torch.Tensor) -> None:
    """|got - exact| is at most the error of float32 and, in a narrower dtype, half a unit in the last place."""
    info = torch.finfo(got.dtype)
    half_ulp = 0.0 if got.dtype == torch.float32 else 0.5 * info.eps * exact.abs()
    smallest_subnormal = info.smallest_normal * info.eps
    error, bound = (got.double() - exact).abs(), float32_error + half_ulp + smallest_subnormal
    excess = (error - bound).amax() if error.numel() else -1.0
    assert excess <= 0, f"{int((error > bound).sum())} of {error.numel()} elements, the worst by {excess:.3e}"


def assert_normed(
    op: str,
    got: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    weight_bias: float = 0.0,
) -> None:
    """``got`` is layer_norm or rms_norm of x, within the bound of the module's docstring."""
    eps = EPS[op] if eps is None else eps
    shape = x.shape[-1:]
    scale = torch.ones(shape, dtype=torch.float64) if weight is None else weight.double() + weight_bias
    if op == "rms_norm":
        exact = torch.nn.functional.rms_norm(x.double(), shape, scale, eps)
        assert_within(got, exact, 6 * U * exact.abs())
    else:
        scaled = torch.nn.functional.layer_norm(x.double(), shape, scale, None, eps)
        exact = scaled if bias is None else scaled + bias.double()
        assert_within(got, exact, 7 * U * scaled.abs() + U * exact.abs())


def arguments(op: str, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The constants of an op: weight, and bias where it has one."""
    return tuple(vector_of(n, dtype, seed) for seed in ((1, 2) if "layer" in op else (1,)))


@every_dtype
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("t", ROWS)
@pytest.mark.parametrize("op", NORMS)
def test_norm_is_exact_but_for_the_roundings_of_float32(op: str, t: int, n: int, dtype: torch.dtype) -> None:
    x, constants = rows_of(t, n, dtype), arguments(op, n, dtype)
    assert_normed(op, getattr(kestrel_norm, op)(x, *constants), x, *constants)


@every_dtype
@pytest.mark.parametrize("op", NORMS)
def test_weight_and_bias_may_be_left_out(op: str, dtype: torch.dtype) -> None:
    x = rows_of(16, 1152, dtype)
    assert_normed(op, getattr(kestrel_norm, op)(x), x)


@pytest.mark.parametrize("mean", [100.0, 1e4])
@pytest.mark.parametrize("n", [66, 1152])
@pytest.mark.parametrize("op", ["layer_norm", "fused_add_layer_norm"])
def test_a_mean_far_above_the_deviation_costs_no_accuracy(op: str, n: int, mean: float) -> None:
    """The rounding of the mean to float32 alone would be off by ``mean`` * U, many times the bound."""
    x = rows_of(64, n, torch.float32, mean=3 * mean)
    if op == "layer_norm":
        got, total = kestrel_norm.layer_norm(x), x
    else:
        got, total = x.clone(), rows_of(64, n, torch.float32, seed=9)
        kestrel_norm.fused_add_layer_norm(got, total)
    assert_normed("layer_norm", got, total)


@every_dtype
def test_weight_bias_without_a_weight_changes_nothing(dtype: torch.dtype) -> None:
    x = rows_of(16, 1152, dtype)
    assert torch.equal(kestrel_norm.rms_norm(x, weight_bias=1.0), kestrel_norm.rms_norm(x))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weight_bias_is_added_in_float32(weight_dtype: torch.dtype) -> None:
    x, weight = rows_of(16, 2048, torch.bfloat16), (vector_of(2048, torch.float32, 1) * 1e-3).to(weight_dtype)
    assert_normed("rms_norm", kestrel_norm.rms_norm(x, weight, weight_bias=1.0), x, weight, weight_bias=1.0)


@every_dtype
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("t", ROWS)
@pytest.mark.parametrize("op", FUSED)
def test_fused_add_norms_the_rounded_sum(op: str, t: int, n: int, dtype: torch.dtype) -> None:
    x, residual, constants = rows_of(t, n, dtype), rows_of(t, n, dtype, seed=9), arguments(op, n, dtype)
    total = (x.double() + residual.double()).to(dtype)
    assert getattr(kestrel_norm, op)(x, residual, *constants) is None
    assert torch.equal(residual, total)
    assert_normed(op.removeprefix("fused_add_"), x, total, *constants)


@pytest.mark.parametrize("op", FUSED)
def test_every_option_of_a_fused_op_reaches_its_norm(op: str) -> None:
    x, residual = rows_of(4, 96, torch.float32), rows_of(4, 96, torch.float32, seed=9)
    constants, total = arguments(op, 96, torch.float32), x + residual
    options = {"eps": 0.5} if "layer" in op else {"eps": 0.5, "weight_bias": 1.0}
    getattr(kestrel_norm, op)(x, residual, *constants, **options)
    assert_normed(op.removeprefix("fused_add_"), x, total, *constants, **options)


@pytest.mark.parametrize("value", [1e4, 1e-7, 0.0], ids=["large", "denormal in fp16", "zero"])
@every_dtype
@pytest.mark.parametrize("op", NORMS)
def test_large_and_tiny_rows(op: str, dtype: torch.dtype, value: float) -> None:
    x = (rows_of(2, 64, torch.float32) * value).clamp(-6e4, 6e4).to(dtype)
    assert_normed(op, getattr(kestrel_norm, op)(x), x)


@pytest.mark.parametrize("value", [1e4, 1e-7, 2.5, 0.0])
@pytest.mark.parametrize("n", [1, 7, 64, 1153])
@every_dtype
def test_layer_norm_of_equal_elements_is_exactly_zero(dtype: torch.dtype, n: int, value: float) -> None:
    assert not kestrel_norm.layer_norm(torch.full((2, n), value).to(dtype), eps=1e-12).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", NORMS)
def test_nan_and_inf_stay_in_their_row(op: str, bad: float) -> None:
    function, x = getattr(kestrel_norm, op), rows_of(3, 64, torch.bfloat16)
    x[1, 5] = bad
    got = function(x)
    assert torch.equal(got[0], function(x[:1])[0])
    assert torch.equal(got[2], function(x[2:])[0])
    assert got[1].isnan().any()


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "columns of a wider buffer": lambda: torch.randn(6, 100)[:, 11:75],
    "every second row": lambda: torch.randn(12, 64)[::2],
    "transposed leading dimensions": lambda: torch.randn(4, 5, 64).transpose(0, 1),
    "heads of a packed projection": lambda: torch.randn(2, 3, 5, 192)[..., 64:128].transpose(1, 2),
    "one row repeated": lambda: torch.randn(1, 64).expand(7, 64),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", NORMS)
def test_only_the_last_dimension_needs_to_be_contiguous(op: str, view: str) -> None:
    function, x = getattr(kestrel_norm, op), VIEWS[view]()
    got = function(x)
    assert got.is_contiguous()
    assert torch.equal(got, function(x.contiguous()))


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "one row repeated"])
@pytest.mark.parametrize("op", FUSED)
def test_fused_ops_write_views_in_place(op: str, view: str) -> None:
    function, x, residual = getattr(kestrel_norm, op), VIEWS[view](), VIEWS[view]()
    dense = x.contiguous().clone(), residual.contiguous().clone()
    function(x, residual)
    function(*dense)
    assert torch.equal(x, dense[0])
    assert torch.equal(residual, dense[1])


@pytest.mark.parametrize("op", NORMS)
def test_out_is_returned_and_nothing_around_it_is_written(op: str) -> None:
    function, x = getattr(kestrel_norm, op), rows_of(16, 64, torch.bfloat16)
    wide = torch.zeros(16, 100, dtype=torch.bfloat16)
    out = wide[:, 7:71]
    assert function(x, out=out) is out
    assert torch.equal(out, function(x))
    assert not wide[:, :7].any()
    assert not wide[:, 71:].any()


@pytest.mark.parametrize("op", NORMS)
def test_out_may_be_the_input(op: str) -> None:
    function, x = getattr(kestrel_norm, op), rows_of(16, 64, torch.bfloat16)
    want = function(x)
    assert function(x, out=x) is x
    assert torch.equal(x, want)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def on_copies(op: str, x: torch.Tensor, constants: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What the op returns and writes; a residual is a function of x."""
    function = getattr(kestrel_norm, op)
    if op in NORMS:
        return (function(x, *constants),)
    y, residual = x.clone(), x / 3
    function(y, residual, *constants)
    return y, residual


@pytest.mark.usefixtures("two_threads")  # torch splits a sum to a single number across threads from 32768 terms on
@every_dtype
@pytest.mark.parametrize("n", [7, 1152, 40000])
@pytest.mark.parametrize("op", NORMS + FUSED)
def test_a_row_does_not_depend_on_its_batch(op: str, n: int, dtype: torch.dtype) -> None:
    x, constants = rows_of(7, n, dtype), arguments(op, n, dtype)
    whole = on_copies(op, x, constants)
    for row in (0, 5, 6):
        wanted = tuple(part[row : row + 1] for part in whole)
        assert_same_bits(on_copies(op, x[row : row + 1], constants), wanted, f"row {row}")
        alone = on_copies(op, x[row].view(1, 1, n), constants)
        assert_same_bits(tuple(part[0] for part in alone), wanted, f"row {row} of a 3-D call")
