"""rms_norm_linear by reference: against float64, views, and the registered op."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_rows import rows_of

import kestrel_norm

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("t", [0, 1, 3, 64, 257])
def test_products_of_exactly_known_norms_are_exact(t: int, dtype: torch.dtype) -> None:
    """Rows of +2 and -2 have the norm +1 and -1; products with small integers have no rounding in any order."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randint(0, 2, (t, 128), generator=generator) * 4.0 - 2
    norm_weight = torch.randint(-3, 4, (128,), generator=generator).float()
    weight = torch.randint(-3, 4, (48, 128), generator=generator).float()
    got = kestrel_norm.rms_norm_linear(x.to(dtype), norm_weight.to(dtype), weight.to(dtype), eps=0.0)
    exact = (x / 2 * norm_weight).double() @ weight.double().t()
    assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("t", [1, 64])
def test_the_product_takes_the_rounded_norm(t: int, dtype: torch.dtype) -> None:
    """Against float64 products of the rounded norm.

    A float32 sum of N products in any order is off by at most N * 2^-24 of the sum of their magnitudes, then the result
    is rounded to the dtype.
    """
    x, norm_weight, weight = rows_of(t, 128, dtype), rows_of(1, 128, dtype, 5)[0], rows_of(48, 128, dtype, 6)
    normed = kestrel_norm.rms_norm(x, norm_weight).double()
    exact, magnitudes = normed @ weight.double().t(), normed.abs() @ weight.double().abs().t()
    got = kestrel_norm.rms_norm_linear(x, norm_weight, weight)
    bound = 128 * 2.0**-24 * magnitudes + 0.5 * torch.finfo(dtype).eps * exact.abs()
    assert got.shape == (t, 48)
    assert bool(((got.double() - exact).abs() <= bound).all())


VIEWS = {
    "wider buffer": lambda: rows_of(6, 100, BF16)[:, 20:84],
    "every second row": lambda: rows_of(12, 64, BF16)[::2],
    "transposed": lambda: rows_of(12, 64, BF16).view(3, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_not_written(view: str) -> None:
    x, weight, matrix = VIEWS[view](), rows_of(1, 64, BF16)[0], rows_of(8, 64, BF16, 9)
    before, got = x.clone(), kestrel_norm.rms_norm_linear(x, weight, matrix)
    assert got.is_contiguous()
    assert torch.equal(got, kestrel_norm.rms_norm_linear(x.contiguous(), weight, matrix))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(6, 64), (0, 64), (2, 3, 64), (2, 1, 3, 64)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_and_linear_writes_out_and_nothing_around_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, matrix = rows_of(math.prod(shape[:-1]), 64, dtype).view(shape), rows_of(8, 64, dtype, 9)
    weight = rows_of(1, 64, dtype, 5)[0]
    buffer = torch.full((*shape[:-1], 20), float("nan"), dtype=dtype)
    out = buffer[..., 5:13]
    before = [value.clone() for value in (x, weight, matrix)]
    want = kestrel_norm.rms_norm_linear(x, weight, matrix)
    assert kestrel_norm.rms_norm_linear(x, weight, matrix, out=out) is out
    assert torch.equal(out, want)
    assert bool(buffer[..., :5].isnan().all() and buffer[..., 13:].isnan().all())
    assert all(torch.equal(a, b) for a, b in zip((x, weight, matrix), before, strict=True))


def test_compiled_without_a_graph_break() -> None:
    weight, matrix = rows_of(1, 64, BF16)[0], rows_of(8, 64, BF16, 9)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(6, 8, dtype=BF16)
        kestrel_norm.rms_norm_linear(x, weight, matrix, out=y)
        return kestrel_norm.rms_norm_linear(x, weight, matrix), y

    x = rows_of(6, 64, BF16)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    for a, b in zip(got, block(x), strict=True):
        assert torch.equal(a, b)


SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple)
DTYPES = st.sampled_from([*FLOATS, torch.float64, torch.int64])


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.none() | SHAPES, st.none() | SHAPES, DTYPES, st.none() | DTYPES, st.none() | st.floats())
def test_shapes_that_fit_give_their_product_and_others_are_named(
    shape: tuple[int, ...],
    matrix: tuple[int, ...] | None,
    weight: tuple[int, ...] | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    eps: float | None,
) -> None:
    """None is a shape, a dtype or an eps that fits."""
    matrix, weight = (3, *shape[-1:]) if matrix is None else matrix, shape[-1:] if weight is None else weight
    weight_dtype, eps = weight_dtype or dtype, 1e-6 if eps is None else eps
    x, m, w = torch.ones(shape, dtype=dtype), torch.ones(matrix, dtype=dtype), torch.ones(weight, dtype=weight_dtype)
    fits = 2 <= len(shape) <= 4 and len(matrix) == 2 and matrix[1:] == shape[-1:] == weight
    fits = fits and dtype in FLOATS and weight_dtype == dtype and eps >= 0
    refused = None
    try:
        got = kestrel_norm.rms_norm_linear(x, w, m, eps)
    except (ValueError, TypeError) as error:
        refused = str(error)
    assert (refused is None) == fits, refused
    if refused is not None:
        assert refused.startswith("rms_norm_linear: argument '")
    else:
        assert got.shape == (*shape[:-1], matrix[0])
