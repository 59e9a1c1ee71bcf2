"""How far 4-bit weights are from the weights they stand for. It times nothing and needs no GPU.

python packages/quant/benchmarks/w4_error.py packages/quant/results/w4_error.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import kestrel_quant

WHAT = (
    "Norm of the error of kestrel_quant.pack_w4 over the norm of the weight, bf16, values drawn from a normal "
    "distribution (seed 0); by reference, on a CPU."
)
ROWS, COLUMNS = 1024, 4096
GROUPS = (32, 64, 128)


def relative_error(group_size: int, symmetric: bool, rows: int = ROWS, columns: int = COLUMNS) -> float:
    """The norm of the error over the norm of the weight."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = kestrel_quant.pack_w4(weight, group_size, symmetric=symmetric)
    return float((packed.dequantize().float() - weight.float()).norm() / weight.float().norm())


def main(path: str) -> None:
    errors = {
        name: {f"groups of {group}": round(relative_error(group, name == "symmetric"), 4) for group in GROUPS}
        for name in ("symmetric", "zero points")
    }
    found = {"what": WHAT, "shape": [ROWS, COLUMNS], "torch": torch.__version__, "relative_error": errors}
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
