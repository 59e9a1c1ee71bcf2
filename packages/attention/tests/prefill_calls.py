"""Calls of prefill on CPU tensors whose kernels note their arguments, for the tests of launches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel_attention import (
    decode,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    prefill,
    prefill_scratch,
    prefill_transposed,
)
from kestrel_attention.kernels.parameters import (
    AppendInt4Tensors,
    AppendIntegerScalars,
    AppendScalars,
    AppendTensors,
    DequantiseScalars,
    DequantiseTensors,
    PrefillCombineScalars,
    PrefillCombineTensors,
    PrefillScalars,
    PrefillTensors,
    PrefillWorksScalars,
    PrefillWorksTensors,
)
from kestrel_attention.plans import Plans

NAMES = {
    "append_half_int8": AppendTensors._fields + AppendIntegerScalars._fields,
    "append_half_int4": AppendInt4Tensors._fields + AppendIntegerScalars._fields,
    "dequantise": (*DequantiseTensors._fields, *DequantiseScalars._fields, "batch"),
    "append": AppendTensors._fields + AppendScalars._fields,
    "prefill_combine": (*PrefillCombineTensors._fields, *PrefillCombineScalars._fields, "batch"),
    "prefill_works": (*PrefillWorksTensors._fields, *PrefillWorksScalars._fields, "batch"),
    "prefill_transpose": (
        *(*PrefillTensors._fields, *PrefillScalars._fields),
        *("outK", "outV", "outTable", "blocks", "batch"),
    ),
    "prefill": (*PrefillTensors._fields, *PrefillScalars._fields, "batch"),
}


class Recorder:
    """In place of the binary: kernels that note their names and arguments."""

    def __init__(self, arch: str) -> None:
        self.arch_here, self.calls = arch, []

    def arch(self, device: torch.device) -> str:
        return self.arch_here

    def kernel(self, variant: Any, device: torch.device) -> Callable[..., None]:
        names = next(names for start, names in NAMES.items() if variant.name.startswith(start))
        return lambda *given: self.calls.append((variant.name, dict(zip(names, given, strict=True))))

    @property
    def prefill(self) -> dict[str, Any]:
        """The arguments of the only kernel that ran."""
        ((name, given),) = self.calls
        assert name.startswith("prefill_")
        return given


def recording(monkeypatch: pytest.MonkeyPatch, arch: str) -> Recorder:
    found = Recorder(arch)
    for module in (prefill, prefill_scratch, prefill_transposed, decode):
        monkeypatch.setattr(module, "_binary", found)
    for module, name in ((prefill, "dense_launches"), (prefill, "packed_launches"), (decode, "launches")):
        monkeypatch.setattr(module, name, Plans())
    return found


def half(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


NO_SCALES = dict.fromkeys(("q_scale", "k_scale", "v_scale"))
SCORES = {"softmax_scale": None, "causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0}
SCORES |= {"prefix_len": 0, "prefix_lens": None, "sinks": None}


def dense(**changes: Any) -> Any:
    """Two sequences of 40 queries and 50 keys, four query heads and two KV heads."""
    module = importlib.import_module(flash_attn_func.__module__)
    given = {"q": half(2, 40, 4, 64), "k": half(2, 50, 2, 64), "v": half(2, 50, 2, 64)}
    return module._flash_attn_func.kernel_op.launch(**given | NO_SCALES | SCORES | changes)


def packed(**changes: Any) -> Any:
    """Sequences of 40 and 20 queries, 50 and 30 keys."""
    module = importlib.import_module(flash_attn_varlen_func.__module__)
    given = {"q": half(60, 4, 64), "k": half(80, 2, 64), "v": half(80, 2, 64)}
    given |= {"cu_seqlens_q": ints(0, 40, 60), "cu_seqlens_k": ints(0, 50, 80), "max_seqlen_q": 40, "max_seqlen_k": 50}
    given |= NO_SCALES | SCORES | {"block_table": None, "seqused_k": None}
    return module._flash_attn_varlen_func.kernel_op.launch(**given | changes)


def cached(**changes: Any) -> Any:
    """Two sequences of 40 queries over six pages of 16 slots."""
    module = importlib.import_module(flash_attn_with_kvcache.__module__)
    given = {"q": half(2, 40, 4, 64), "k_cache": half(6, 16, 2, 64), "v_cache": half(6, 16, 2, 64)}
    given |= {"cache_seqlens": ints(7, 48), "block_table": torch.zeros(2, 3, dtype=torch.int32)}
    given |= dict.fromkeys(("k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "seq_ids"))
    given |= SCORES | {"num_splits": 0} | changes
    if given.get("k") is None:
        return module._flash_attn_with_kvcache.kernel_op.launch(**given)
    for name in ("k_zero", "v_zero", "k_tail", "seq_ids"):
        del given[name]
    return module._flash_attn_with_kvcache_append.kernel_op.launch(**given)
