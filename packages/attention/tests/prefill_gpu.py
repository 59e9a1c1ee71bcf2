"""What the GPU tests of prefill share: each of the two kernels in turn, inputs, and ways to shape scores."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from kestrel_attention import decode, hot_calls, prefill

HOT_CALLS = {
    "kestrel_attention.flash_attn": ("_dense_calls", "_packed_calls"),
    "kestrel_attention.flash_attn_with_kvcache": ("_hot_calls",),
}


@pytest.fixture(params=["hopper", "portable"], autouse=True)
def each_kernel(request, monkeypatch):
    """On Hopper every test runs with its kernel, and with the one of all other GPUs."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has no kernel of its own")
    monkeypatch.setattr(prefill, "USE_HOPPER", request.param == "hopper")
    for plans in (prefill.dense_launches, prefill.packed_launches, decode.launches):
        plans.clear()
    for module, names in HOT_CALLS.items():  # a remembered launch would run the kernel of the test before
        for name in names:
            monkeypatch.setattr(importlib.import_module(module), name, hot_calls.HotCalls())


class Launches:
    """In place of a module's binary: the names of the kernels that the module itself launches, in order."""

    def __init__(self, binary: Any) -> None:
        self.binary, self.names = binary, []

    def arch(self, device: torch.device) -> str:
        return self.binary.arch(device)

    def kernel(self, variant: Any, device: torch.device) -> Any:
        kernel = self.binary.kernel(variant, device)

        def launch(*given: Any) -> None:
            self.names.append(variant.name)
            kernel(*given)

        return launch

    def taken(self) -> list[str]:
        """The names since the last call of this."""
        names, self.names = self.names, []
        return names


def launches_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> Launches:
    """Of launches that are made from now on."""
    launches = Launches(module._binary)
    monkeypatch.setattr(module, "_binary", launches)
    return launches


DTYPES = [torch.bfloat16, torch.float16]
SIZES = [64, 72, 80, 96, 128, 192, 256, 320, 512]
LENGTHS = [(0, 0), (1, 1), (54, 54), (512, 512), (17, 300), (300, 17), (1, 700), (64, 0), (2048, 2048)]


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


SPREADS = ["rising", "falling", "spikes", "rows"]


def spread_scores(kind: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Make scores grow by far more from tile to tile than weights may, in place."""
    steps = torch.linspace(0, 25, k.shape[1], device="cuda")
    if kind == "rows":  # of which few move
        q[:, 5::16] *= 20
    elif kind == "spikes":
        k[:, 130::97] *= 30
    else:
        k *= (steps if kind == "rising" else steps.flip(0)).to(k.dtype)[:, None, None]


def scores(batch: int, heads: int) -> dict[str, dict[str, Any]]:
    """Arguments that shape the scores, by a name."""
    torch.manual_seed(1)
    return {
        "full": {},
        "causal": {"causal": True},
        "negative scale": {"causal": True, "softmax_scale": -0.2},
        "scale 0": {"softmax_scale": 0.0, "window_size": (3, 5)},
        "window of 1": {"causal": True, "window_size": (0, 0)},
        "window": {"causal": True, "window_size": (100, -1)},
        "window behind": {"window_size": (-1, 20)},
        "prefix": {"causal": True, "prefix_len": 130},
        "prefix beyond the length": {"causal": True, "prefix_len": 10**9},
        "prefixes and a window": {
            "window_size": (40, 3),
            "prefix_len": ints([0, 200, 7, 90, 10**6, 1, 64, 65, 500][:batch]),
        },
        "soft cap": {"causal": True, "softcap": 5.0, "softmax_scale": 1.0},
        "sinks": {"causal": True, "sinks": torch.randn(heads, device="cuda") * 3},
        "sinks in bf16": {"window_size": (10, 0), "sinks": torch.randn(heads, device="cuda").bfloat16()},
    }


NAMES = [
    "full", "causal", "negative scale", "scale 0", "window of 1", "window", "window behind", "prefix",
    "prefix beyond the length", "prefixes and a window", "soft cap", "sinks", "sinks in bf16",
]  # fmt: skip


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def starts_of(lengths: Any) -> torch.Tensor:
    return ints([0, *torch.as_tensor(lengths).cumsum(0).tolist()])


def packed(size: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v and their starts, of the sequences of LENGTHS."""
    torch.manual_seed(0)
    queries, keys = ([pair[i] for pair in LENGTHS] for i in range(2))
    q = random(sum(queries), heads, size, dtype=dtype)
    k, v = (random(sum(keys), kv_heads, size, dtype=dtype) for _ in range(2))
    return [q, k, v, starts_of(queries), starts_of(keys)]


def scattered(lengths: list[int], page: int, kv_heads: int, size: int, dtype: torch.dtype, holes: bool) -> Any:
    """Caches in which everything that no sequence holds is NaN, their table, and k, v, exists of each sequence."""
    torch.manual_seed(0)
    columns = max(1, -(-max(lengths) // page)) + 2
    used = [max(0, -(-length // page)) for length in lengths]
    blocks = sum(used) + 3
    caches = [torch.full((blocks, page, kv_heads, size), math.nan, dtype=dtype, device="cuda") for _ in range(2)]
    table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(blocks).tolist()
    held = []
    for b, length in enumerate(lengths):
        k, v = (random(max(length, 0), kv_heads, size, dtype=dtype) for _ in range(2))
        exists = torch.ones(max(length, 0), dtype=torch.bool, device="cuda")
        for column in range(used[b]):
            if holes and column % 3 == 1:
                table[b, column] = (-1, blocks, -(2**31))[column % 9 // 3]
                exists[column * page : (column + 1) * page] = False
                continue
            block = free.pop()
            table[b, column] = block
            rows = slice(column * page, min((column + 1) * page, length))
            for cache, x in zip(caches, (k, v), strict=True):
                cache[block, : rows.stop - rows.start] = x[rows]
        held.append((k, v, exists))
    return caches, table.cuda(), held
