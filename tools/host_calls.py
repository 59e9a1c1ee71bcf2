"""Host time of eager calls beside ``x.add_(1)``, on a GPU: ``python tools/host_calls.py [file.json]``.

The families must be installed. Every call runs 200 times in a turn, all calls in turn in one process; the figure is the
median of 15 turns. The targets of these calls are for a host where ``x.add_(1)`` takes 7.7 us.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from functools import partial
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


def decode_calls(cache: str, shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """flash_attn_with_kvcache without and with an append, and with ``out``."""
    batch, keys, heads, kv_heads, head_dim, page = shape
    pages = keys // page
    k_cache, v_cache = (
        torch.randn(batch * pages, page, kv_heads, head_dim, device="cuda").mul(8).to(CACHES[cache]) for _ in range(2)
    )
    given: dict[str, Any] = {
        "q": torch.randn(batch, 1, heads, head_dim, device="cuda").bfloat16(),
        "cache_seqlens": torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda"),
        "block_table": torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages),
        "causal": True,
    }
    if cache == "fp8":
        given |= {name: torch.ones(1, device="cuda") for name in ("k_scale", "v_scale")}
    if cache == "int8":
        given |= {name: torch.ones(k_cache.shape[:3], device="cuda") for name in ("k_scale", "v_scale")}
    new = dict(zip("kv", torch.randn(2, batch, 1, kv_heads, head_dim, device="cuda").bfloat16(), strict=True))
    out = {"out": torch.empty_like(given["q"])}
    attend = partial(kestrel_attention.flash_attn_with_kvcache, k_cache=k_cache, v_cache=v_cache, **given)
    return {
        "": attend,
        " out=": partial(attend, **out),
        " append": partial(attend, **new),
        " append out=": partial(attend, **new, **out),
    }


def all_calls() -> dict[str, Callable[[], Any]]:
    x, weight = torch.randn(16, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()
    counter, logits = torch.zeros(16, device="cuda"), torch.randn(1, 32000, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    calls: dict[str, Callable[[], Any]] = {
        "x.add_(1)": lambda: counter.add_(1),
        "rms_norm 16x4096 out=": partial(kestrel_norm.rms_norm, x, weight, out=torch.empty_like(x)),
    }
    sample = partial(kestrel_sampling.sample_from_logits, logits)
    calls |= {
        "sample_from_logits 1x32000 seed": partial(sample, seed=7),
        "sample_from_logits 1x32000 greedy": partial(sample, 0.0, seed=7),
        "sample_from_logits 1x32000 generator": partial(sample, generator=generator),
    }
    for shape, sizes in DECODE.items():
        for cache in CACHES:
            calls |= {f"decode {cache}{how} {shape}": call for how, call in decode_calls(cache, sizes).items()}
    windows = [partial(call, window_size=(left, 0)) for call, left in ((calls["decode bf16 b8 kv512 32/8 d128 p16"], n) for n in (64, 128))]
    calls["decode bf16 b8 kv512 32/8 d128 p16, two calls of different windows"] = lambda: [call() for call in windows]
    query = torch.randn(1, 32, 1, 64, device="cuda").bfloat16()
    key = torch.randn(1, 32, 740, 64, device="cuda").bfloat16()
    attention = torch.nn.functional.scaled_dot_product_attention
    calls["torch SDPA b1 kv740 32 d64"] = partial(attention, query, key, key)
    return calls


def main() -> None:
    calls = all_calls()
    for call in calls.values():
        for _ in range(3):
            call()
    figures = timer.host_us({name: (lambda *_, call=call: call()) for name, call in calls.items()}, ())
    unit = figures["x.add_(1)"].us
    for name, f in figures.items():
        print(f"{name:72} {f.us:6.2f} us {f.p20:6.2f} .. {f.p80:6.2f}   at x.add_(1) = {SCALED_TO}: {f.us / unit * SCALED_TO:6.2f}")
    if len(sys.argv) > 1:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "what": "tools/host_calls.py: host microseconds of an eager call without a graph, medians of 15 turns of "
            "200 calls, all calls in turn in one process",
            "us": {name: round(f.us, 2) for name, f in figures.items()},
            "p20_p80": {name: [round(f.p20, 2), round(f.p80, 2)] for name, f in figures.items()},
        }
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
