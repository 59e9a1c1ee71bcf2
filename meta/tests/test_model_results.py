"""tools/model_results.py: what quantised caches cost, measured; tables that say what the results files say."""

from __future__ import annotations

import json
import math

import pytest
import torch


@pytest.fixture(scope="module")
def short(decoder, held_out, model_results):
    """What compared() says of six short texts, by kind of cache."""
    windows = model_results.windows_of(bytes(held_out.tolist()), 6, 192)
    weights = decoder(torch.bfloat16).weights

    def measure() -> dict[str, dict[str, float]]:
        with torch.no_grad():
            return {row["kv_cache"]: row for row in model_results.compared(weights, windows)}

    return measure


@pytest.fixture(scope="module")
def found(short):
    return short()


@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_integer_caches_cost_no_more_perplexity_than_allowed(kv_cache, found, model_tables):
    """By the divergence: what the perplexity of 1152 bytes changes by is chance as much as it is the cache."""
    assert 0 < math.expm1(found[kv_cache]["divergence"]) <= model_tables.BOUNDS[kv_cache]


def test_coarser_codes_would_be_noticed(short, model_tables, monkeypatch):
    """INT8 with 6 bits and INT4 with 2 cost more than is allowed, so the bounds say something."""
    from kestrel_runtime import paged_cache

    int8, int4 = paged_cache.encode_int8, paged_cache.encode_int4

    def six_bits(x):
        codes, scale = int8(x)
        return ((codes.float() / 4).round() * 4).clamp(-127, 127).to(torch.int8), scale

    def two_bits(x, dim):
        codes, scale, zero = int4(x, dim)
        return (codes + 2) // 5 * 5, scale, zero

    monkeypatch.setattr(paged_cache, "encode_int8", six_bits)
    monkeypatch.setattr(paged_cache, "encode_int4", two_bits)
    for kind, row in short().items():
        assert kind not in model_tables.BOUNDS or math.expm1(row["divergence"]) > model_tables.BOUNDS[kind]


def test_passes_of_many_bytes_see_the_cache_of_one_byte_at_a_time(decoder, held_out, model_results):
    """With INT4 as well: the last byte of a page, which quantises its keys, has a pass of its own.

    Sums of other shapes round differently, which turns a code here and there: 0.009 of a logit on average. Bytes that
    saw a whole page of codes too early would be off by 0.18.
    """
    weights = decoder(torch.float32).weights
    windows = model_results.windows_of(bytes(held_out.tolist()), 2, 70)
    with torch.no_grad():
        one, many, early = (
            model_results.teacher_forced(weights, "int4", windows, ends)
            for ends in (list(range(1, 71)), model_results.ends_of_passes(70), [64, 70])
        )
    assert (many - one).abs().mean() < 0.03 < 0.1 < (early - one).abs().mean()


def test_the_figures_on_record_keep_the_bounds(model_tables):
    records = [json.loads(path.read_text(encoding="utf-8")) for path in model_tables.RESULTS.glob("*.json")]
    rows = [row for record in records if "perplexity" in record for row in record["perplexity"]["rows"]]
    assert {row["kv_cache"] for row in rows} == set(model_tables.KV_CACHES)
    for row in rows:
        assert row["cost"] <= model_tables.BOUNDS.get(row["kv_cache"], math.inf)


def test_a_prompt_is_timed_and_has_a_row_in_the_tables(model_results, model_tables, tmp_path):
    out = tmp_path / "cpu.json"
    given = ["--device", "cpu", "--tokens", "20", "--runs", "3", "--experts", "fp8", "--kv-cache", "int8"]
    assert model_results.main(["prompt", "tiny", *given, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text(encoding="utf-8"))["prompt tiny"]["rows"]
    assert 0 < row["p20"] <= row["ms"] <= row["p80"]
    ops = ", ".join(f"`{op}`" for op in row["by_reference"])
    wanted = f"| FP8 | INT8 | {ops} | 20 | {row['ms']:.2f} | {row['p20']:.2f} .. {row['p80']:.2f} |"
    assert wanted in model_tables.section(tmp_path).splitlines()


def test_tables_are_those_of_the_results_files(model_results, capsys):
    assert model_results.main(["tables", "--check"]) == 0, capsys.readouterr().err


def test_a_changed_figure_makes_the_tables_stale(model_results, model_tables, monkeypatch, tmp_path):
    for path in model_tables.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(
            path.read_text(encoding="utf-8").replace('"bits_per_byte": 1.', '"bits_per_byte": 2.')
        )
    monkeypatch.setattr(model_tables, "RESULTS", tmp_path)
    assert model_results.main(["tables", "--check"]) == 1
