"""KestrelCache where generate of today does not go: other ways to select, crop and reset sequences."""

from __future__ import annotations

import pytest
import torch
from logit_bounds import ROUNDING

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache


@pytest.fixture
def model(tiny_transformer):
    model = tiny_transformer("llama")
    integration.apply(model)
    return model


def ids_of(batch, length):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def logits(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, past_key_values=cache, attention_mask=mask, use_cache=True).logits


def filled(model, ids, **options):
    cache = KestrelCache(model.config, **{"max_tokens": 90, **options})
    logits(model, cache, ids)
    return cache


def test_tokens_of_a_replayed_graph_count_in_every_layer(model):
    cache = filled(model, ids_of(2, 5))
    cache.skip(3)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    assert cache.lengths.tolist() == [5, 5], "those on the device are the graph's to count"


@pytest.mark.parametrize("indices", [torch.tensor([False, True, True]), torch.tensor([1, 2])], ids=["mask", "places"])
@pytest.mark.parametrize("kind", ["auto", "int4"])
def test_selected_sequences_go_on_as_they_were(model, kind, indices):
    ids, more = ids_of(3, 70), ids_of(3, 2)
    cache = filled(model, ids, kv_cache=kind)
    cache.batch_select_indices(indices)
    assert cache.lengths.tolist() == [70, 70]
    expected = logits(model, filled(model, ids, kv_cache=kind), more)[1:]
    torch.testing.assert_close(logits(model, cache, more[1:]), expected, **ROUNDING)
    assert cache.lengths.tolist() == [72, 72]


@pytest.mark.parametrize(
    ("crop", "kept"), [(20, 20), (-3, 27), (29, 29), (30, 30), (100, 30), (0, 30), (-30, 0), (-99, 0)]
)
def test_crop_keeps_a_number_or_removes_one(model, crop, kept):
    ids, more = ids_of(2, 30), ids_of(2, 4)
    cache = filled(model, ids)
    cache.crop(crop)
    assert cache.get_seq_length() == kept
    assert cache.lengths.tolist() == [kept, kept]
    expected = logits(model, None, torch.cat([ids[:, :kept], more], 1))[:, kept:]
    torch.testing.assert_close(logits(model, cache, more), expected, **ROUNDING)


@pytest.mark.parametrize(
    ("length", "removed", "allowed"), [(70, 6, True), (70, 7, False), (64, 1, False), (64, 64, True)]
)
def test_int4_gives_back_the_tokens_of_its_unfinished_page(model, length, removed, allowed):
    cache = filled(model, ids_of(2, length), kv_cache="int4")
    if allowed:
        cache.crop(-removed)
        assert cache.get_seq_length() == length - removed
    else:
        with pytest.raises(ValueError, match="crop: expected to remove tokens of unfinished pages"):
            cache.crop(-removed)
        assert cache.get_seq_length() == length
        assert cache.lengths.tolist() == [length] * 2


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8", "int4"])
def test_a_capacity_that_fills_its_last_page_holds_its_last_token(model, kind):
    for capacity in (64, 65):
        ids = ids_of(2, capacity)
        cache = KestrelCache(model.config, kv_cache=kind, max_tokens=capacity)
        logits(model, cache, ids[:, :-1])
        assert bool(logits(model, cache, ids[:, -1:]).isfinite().all())
        assert cache.lengths.tolist() == [capacity] * 2
        with pytest.raises(ValueError, match=f"max_tokens: expected at least {capacity + 1} per sequence"):
            logits(model, cache, ids[:, :1])


@pytest.mark.parametrize(("kind", "page"), [("auto", 16), ("fp8", 16), ("int8", 16), ("int4", 64)])
def test_pages_have_their_size_unless_told(model, kind, page):
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=33)
    assert cache.page_size == page
    assert cache.pages_per_sequence == -(-33 // page)


def test_a_reset_cache_forgets_where_padding_was(model):
    ids = ids_of(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cache = KestrelCache(model.config, max_tokens=40)
    logits(model, cache, ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(logits(model, cache, ids), logits(model, None, ids), **ROUNDING)
    cache.crop(4)  # refused while padding lies before the tenth token
    assert cache.lengths.tolist() == [4, 4]


LONG = [*((kind, served) for kind in ("int8", "int4") for served in (True, False)), ("auto", False), ("fp8", False)]
FLIPPED = {"auto": 1e-4, "fp8": 0.02, "int8": 0.005, "int4": 0.05}
"""The relative error of logits where another order of sums moves some values to the next code."""


@pytest.mark.parametrize(("kind", "served"), LONG)
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_long_second_prompt_sees_what_single_tokens_see(tiny_transformer, monkeypatch, family, kind, served):
    """Over pages that prefill kernels do not read, and where no kernel covers the call, keys are gathered."""
    monkeypatch.setattr("kestrel_kernels.integrations.transformers.cache.serves", lambda *_: served)
    model = tiny_transformer(family)
    integration.apply(model)
    ids = ids_of(2, 27)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 12:15] = 0, 0
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for sizes in ([8, 1, 18], [8, *[1] * 19]):
        cache, start, parts = KestrelCache(model.config, kv_cache=kind, max_tokens=27), 0, []
        for size in sizes:
            stop = start + size
            given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            with torch.no_grad():
                parts.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **given).logits)
            start = stop
        assert cache.lengths.tolist() == mask.sum(1).tolist()
        found.append(torch.cat(parts, 1)[mask.bool()])
    assert (found[0] - found[1]).norm() <= FLIPPED[kind] * found[1].norm()


@pytest.mark.parametrize("left", [False, True])
def test_crop_refuses_padding_among_single_steps(model, left):
    ids, mask = ids_of(2, 7), torch.ones(2, 9, dtype=torch.long)
    mask[0, 0] = 0 if left else 1
    mask[1, 7] = 0  # the first of two single tokens is padding in one row alone
    cache = KestrelCache(model.config, max_tokens=20)
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 9)):
            options = {"attention_mask": mask[:, :stop], "position_ids": mask[:, :stop].cumsum(1)[:, start:] - 1}
            model(ids[:, : stop - start], past_key_values=cache, **options)
    kept = cache.lengths.tolist()
    with pytest.raises(ValueError, match="crop: expected sequences without padding among the tokens of single steps"):
        cache.crop(-1)
    assert cache.lengths.tolist() == kept
    cache.batch_select_indices(torch.tensor([0]))  # the row without such padding
    cache.crop(-1)
    assert cache.lengths.tolist() == [kept[0] - 1]
