"""The examples of the READMEs run, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{path.parent.name}-{number}")
    for path in READMES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S))
    if "@kernel_op" not in code  # how an op is written, not how one is called
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(code):
    try:
        exec(compile(code, "README.md", "exec"), {})
    finally:
        torch.set_default_device(None)
