"""Host time of eager calls beside ``x.add_(1)``, on a GPU: ``python tools/host_calls.py [file.json]``.

The families must be installed. All calls are timed in turn in one process, as kestrel_runtime.bench times the host. The
targets of these calls are for a host where ``x.add_(1)`` takes 7.7 us: figures are printed scaled to it, too.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kestrel_attention
import kestrel_norm
import kestrel_sampling
from kestrel_runtime.bench import timer

SCALED_TO = 7.7  # us of x.add_(1) on the host of the targets
DECODE = {"b1 kv740 32/32 d64 p1": (1, 740, 32, 32, 64, 1), "b8 kv512 32/8 d128 p16": (8, 512, 32, 8, 128, 16)}
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def decode_arguments(cache: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
    """Tensors of flash_attn_with_kvcache, with keys and values to append."""
    batch, keys, heads, kv_heads, head_dim, page = shape
    pages = keys // page
    k_cache, v_cache = (
        torch.randn(batch * pages, page, kv_heads, head_dim, device="cuda").mul(8).to(CACHES[cache]) for _ in range(2)
    )
    k, v = torch.randn(2, batch, 1, kv_heads, head_dim, device="cuda").bfloat16()
    scales: tuple[int, ...] | None = {"bf16": None, "fp8": (1,), "int8": (batch * pages, page, kv_heads)}[cache]
    k_scale, v_scale = (None if scales is None else torch.ones(scales, device="cuda") for _ in range(2))
    return {
        "q": torch.randn(batch, 1, heads, head_dim, device="cuda").bfloat16(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "cache_seqlens": torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda"),
        "block_table": torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def decode_call(given: dict[str, torch.Tensor | None], window: tuple[int, int] = (-1, -1)) -> Callable[[], Any]:
    """A call as a model makes it: tensors in order, and the rest by name."""
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_scale, v_scale, *more = given.values()
    out = more[0] if more else None
    attend = kestrel_attention.flash_attn_with_kvcache
    return lambda: attend(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=True,
        window_size=window,
        out=out,
    )


def decode_calls(cache: str, shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Without and with an append, and with ``out``."""
    appends = decode_arguments(cache, shape)
    reads = appends | {"k": None, "v": None}
    out = {"out": torch.empty_like(appends["q"])}
    ways = {"": reads, " out=": reads | out, " append": appends, " append out=": appends | out}
    return {name: decode_call(given) for name, given in ways.items()}


def all_calls() -> dict[str, Callable[[], Any]]:
    x, weight = torch.randn(16, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()
    counter, logits = torch.zeros(16, device="cuda"), torch.randn(1, 32000, device="cuda")
    normed = torch.empty_like(x)
    generator = torch.Generator("cuda").manual_seed(1)
    calls: dict[str, Callable[[], Any]] = {
        "x.add_(1)": lambda: counter.add_(1),
        "rms_norm 16x4096 out=": lambda: kestrel_norm.rms_norm(x, weight, out=normed),
    }
    sample = kestrel_sampling.sample_from_logits
    calls |= {
        "sample_from_logits 1x32000 seed": lambda: sample(logits, seed=7),
        "sample_from_logits 1x32000 greedy": lambda: sample(logits, 0.0, seed=7),
        "sample_from_logits 1x32000 top-k top-p seed": lambda: sample(logits, 0.7, 50, 0.9, seed=7),
        "sample_from_logits 1x32000 generator": lambda: sample(logits, generator=generator),
    }
    for shape, sizes in DECODE.items():
        for cache in CACHES:
            calls |= {f"decode {cache}{how} {shape}": call for how, call in decode_calls(cache, sizes).items()}
    given = decode_arguments("bf16", DECODE["b8 kv512 32/8 d128 p16"]) | {"k": None, "v": None}
    near, far = decode_call(given, (64, 0)), decode_call(given, (128, 0))
    calls["decode bf16 b8 kv512 32/8 d128 p16 twice, of two windows"] = lambda: (near(), far())
    query = torch.randn(1, 32, 1, 64, device="cuda").bfloat16()
    key = torch.randn(1, 32, 740, 64, device="cuda").bfloat16()
    attention = torch.nn.functional.scaled_dot_product_attention
    calls["torch SDPA b1 kv740 32 d64"] = lambda: attention(query, key, key)
    return calls


def main() -> None:
    calls = all_calls()
    for call in calls.values():
        for _ in range(3):
            call()
    figures = timer.host_us({name: (lambda *_, call=call: call()) for name, call in calls.items()}, ())
    unit = figures["x.add_(1)"].us
    for name, f in figures.items():
        scaled = f.us / unit * SCALED_TO
        print(f"{name:60} {f.us:6.2f} us  {f.p20:6.2f} .. {f.p80:6.2f}  where x.add_(1) is {SCALED_TO}: {scaled:6.2f}")
    if len(sys.argv) > 1:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "what": "tools/host_calls.py: host microseconds of an eager call without a graph, medians of "
            f"{timer.HOST_TURNS} turns of {timer.HOST_CALLS} calls, all calls in turn in one process",
            "us": {name: round(f.us, 2) for name, f in figures.items()},
            "p20_p80": {name: [round(f.p20, 2), round(f.p80, 2)] for name, f in figures.items()},
        }
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
