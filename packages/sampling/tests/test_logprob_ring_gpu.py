"""Rows that come through a ring of bulk copies have the bits of rows that do not, and odd ones those of the reference.

Bulk copies need rows of a multiple of 16 bytes; csrc/logprob_ring.h says which rows they bring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_gpu_cases import FLOATS, assert_close_logprobs, normal

from kestrel_runtime import Binary
from kestrel_runtime.testing import (
    assert_same_bits,
    assert_waits_for_the_launch_before,
    by_reference,
    graph_replay,
)
from kestrel_sampling import process_and_sample, process_logits, sample_with_logprobs, token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

INF, NAN = math.inf, math.nan
WIDTHS = [8, 1016, 1024, 2048, 9344, 33000, 151936, 262144 + 1136]
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tokens": lambda x, ids: token_logprobs(x, ids, 7),
    "tokens of top-k": lambda x, ids: token_logprobs(x, ids, 7, 0.7, 5, 0.9),
    "tokens of 300": lambda x, ids: token_logprobs(x, ids, 7, top_k=300, min_p=1e-3),
    "tokens of a joint top-p": lambda x, ids: token_logprobs(x, ids, 3, 1.0, 6, 0.5, filter_apply_order="joint"),
    "draw": lambda x, ids: sample_with_logprobs(x, 0.8, 6, 0.9, top_n=7, seed=3, offset=ids),
    "processed draw": lambda x, ids: sample_with_logprobs(x, 0.8, 6, 0.9, 0.01, processed=True, seed=ids, offset=1),
    "joint draw": lambda x, ids: sample_with_logprobs(x, 0.8, 6, 0.5, filter_apply_order="joint", seed=3, offset=ids),
    "step": lambda x, ids: process_and_sample(copy_of(x), 0.8, 6, 0.9, top_n=7, seed=3, offset=ids),
    "masked step": lambda x, ids: process_and_sample(
        copy_of(x), 0.8, 6, 0.9, top_n=7, bitmask=mask_of(x), seed=3, offset=ids
    ),
    "joint masked step of 300": lambda x, ids: process_and_sample(
        copy_of(x), 0.8, 300, 0.5, bitmask=mask_of(x), filter_apply_order="joint", seed=ids, offset=2
    ),
}


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def mask_of(x: torch.Tensor) -> torch.Tensor:
    """Some tokens, all, or in the last row few; the same in wider rows and larger batches. Aligned to 16 bytes."""
    generator = torch.Generator("cuda").manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (200, 9000), device="cuda", generator=generator).int()
    words[::3] = -1
    words[-1, 1:] = 0
    return words[-x.shape[0] :, : (x.shape[1] + 31) // 32]


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """The last token, one outside the vocabulary, the first, and others."""
    return (torch.arange(x.shape[0], device="cuda") * 977 + x.shape[1] - 1) % (x.shape[1] + 1)


def odd_rows(rows: int, width: int) -> torch.Tensor:
    x = normal(rows, width, width)
    for row, (place, value) in enumerate(
        [(0, NAN), (width - 1, NAN), (width // 2, INF), (width - 1, 60.0), (0, 60.0), (width // 3, -INF)]
    ):
        x[row % rows, place] = value
    x[6 % rows] = -INF
    x[7 % rows], x[7 % rows, -1] = -INF, -2.0
    x[8 % rows] = 1.5
    x[9 % rows] = x[9 % rows].round()
    return x


def with_a_column(x: torch.Tensor) -> torch.Tensor:
    """One more column, of -inf: rows that are no multiple of 16 bytes, at aligned addresses."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), -INF, dtype=x.dtype, device="cuda")
    wide[:, :-16] = x
    return wide[:, :-15]


def has_ring(name: str, x: torch.Tensor) -> bool:
    """Whether a ring brings the rows of this call, on sm_90 with 132 SMs."""
    mask = mask_of(x) if "masked" in name else None
    of_mask = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0) * mask.element_size())
    _blocks, _threads, ring = Binary("kestrel_sampling").logprob_split(
        *x.shape, x.element_size(), x.data_ptr(), x.stride(0) * x.element_size(), *of_mask, 300 if "300" in name else 7,
        132, 90, 232448,
    )  # fmt: skip
    return bool(ring)


def should_have_a_ring(name: str, rows: int, width: int, dtype: torch.dtype) -> bool:
    if "masked" in name and width == 8:  # one word
        return False
    if name == "joint masked step of 300" and width > 262144:  # no room in shared memory
        return False
    return rows < 66 or dtype != torch.float32 or width < 163840


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 12, 33, 66])
@pytest.mark.parametrize("name", CALLS)
def test_rows_have_the_bits_of_rows_that_no_bulk_copy_reads(
    name: str, rows: int, width: int, dtype: torch.dtype
) -> None:
    gpu = torch.cuda.get_device_properties("cuda")
    if (gpu.major, gpu.minor) != (9, 0) or gpu.multi_processor_count != 132:
        pytest.skip("needs an sm_90 GPU of 132 SMs")
    x = odd_rows(rows, width).to(dtype)
    ids, other = tokens_of(x) % width, with_a_column(x)
    assert has_ring(name, x) == should_have_a_ring(name, rows, width, dtype)
    assert not has_ring(name, other)
    assert_same_bits(tuple(CALLS[name](x, ids)), tuple(CALLS[name](other, ids)), name, any_nan=True)


@pytest.mark.parametrize("width", [1016, 33000, 128256])
@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_its_bits_in_batches_of_any_size(name: str, width: int) -> None:
    x = odd_rows(200, width)
    ids = tokens_of(x)
    of_all = CALLS[name](x, ids)
    for rows in (1, 2, 9, 17, 33, 34, 66, 67, 132, 133):
        some = CALLS[name](x[-rows:], ids[-rows:])
        assert_same_bits(tuple(some), tuple(y[-rows:] for y in of_all), f"{rows} rows", any_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", CALLS)
def test_odd_rows_and_tokens_are_those_of_the_reference(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    x = odd_rows(rows, width).to(dtype)
    got, want = CALLS[name](x, tokens_of(x)), by_reference(CALLS[name], x, tokens_of(x))
    assert_close_logprobs(got, want, name)
    if "tokens" not in name:
        assert_same_bits(tuple(got[:2]), tuple(want[:2]))


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_of_any_alignment_are_those_of_the_reference(offset: int, extra: int, dtype: torch.dtype) -> None:
    """Rows at any address, a multiple of 16 bytes or not apart."""
    wide = normal(9, 9344 + 8 + extra, 3).to(dtype)
    view = wide[::2, offset : offset + 9344]
    ids = tokens_of(view)
    for name, call in CALLS.items():
        assert_close_logprobs(call(view, ids), by_reference(call, view, ids), name)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", ["tokens", "tokens of top-k", "draw", "masked step"])
def test_a_replayed_graph_reads_new_rows_tokens_and_bitmasks(name: str, rows: int) -> None:
    x = odd_rows(rows, 33000)
    first = [x, tokens_of(x), mask_of(x).contiguous()]
    second = [normal(rows, 33000, 2), (first[1] + 5) % 33000, first[2].roll(5, 1)]

    def run(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if name == "draw":  # the ids are seeds and offsets
            return tuple(sample_with_logprobs(x, 0.8, 6, 0.9, top_n=7, seed=ids, offset=ids))
        if name == "masked step":
            return tuple(process_and_sample(copy_of(x), 0.8, 6, 0.9, top_n=7, bitmask=mask, seed=ids, offset=ids))
        return tuple(CALLS[name](x, ids))

    assert_same_bits(graph_replay(run, first, [x.clone() for x in second]), run(*second), any_nan=True)


@pytest.mark.parametrize("written", ["logits", "ids", "temperature", "bitmask"])
@pytest.mark.parametrize("rows", [2, 40])
def test_what_the_launch_before_writes_is_read_after_the_wait(rows: int, written: str) -> None:
    logits, ids, temperature = normal(rows, 9344, 1), tokens_of(normal(rows, 9344, 1)), torch.ones(rows, device="cuda")
    words = normal(rows, 292, 3)  # of a bitmask, as floats that process_logits can write
    target, others = {
        "logits": (logits, [normal(rows, 9344, n) for n in (5, 6)]),
        "ids": (ids, [(ids * 7 + n) % 9344 for n in (1, 2)]),
        "temperature": (temperature, [temperature * n for n in (0.5, 2.0)]),
        "bitmask": (words, [normal(rows, 292, n) for n in (7, 8)]),
    }[written]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        x = logits.clone() if written == "bitmask" else logits  # a step may write to its logits
        process_logits(others[i], out=target) if written in ("logits", "bitmask") else target.copy_(others[i])
        between()
        if written == "bitmask":
            allowed = words.view(torch.int32)
            found: Any = process_and_sample(x, 0.8, 6, top_n=5, bitmask=allowed, seed=ids, offset=ids)
        else:
            found = token_logprobs(x, ids, 5, temperature)
        return found.logprobs, found.top_logprobs

    assert_waits_for_the_launch_before(chain, repetitions=200)
