"""tools/train_tiny.py: it repeats, holds out what it says, and writes whole files or none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "train_tiny.py"
SMALL = {
    "width": 32,
    "layers": 2,
    "dense_inner": 32,
    "expert_inner": 16,
    "head_size": 16,
    "rotary_size": 8,
    "context": 64,
}


def train(out: Path) -> dict[str, object]:
    options = ["--steps", "3", "--batch", "4", "--report", "3", "--eager", "--device", "cpu", "--warmup", "2"]
    subprocess.run(
        [sys.executable, TOOL, "--out", out, "--shape", json.dumps(SMALL), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    record: dict[str, object] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    return record


def test_training_repeats_and_leaves_two_whole_files(tmp_path):
    records = [train(tmp_path / name) for name in ("a.pt", "b.pt")]
    assert records[0]["state_sha256"] == records[1]["state_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.pt", "b.json", "b.pt"]


def test_an_interrupted_write_leaves_what_was_there(train_tiny, tmp_path):
    path = tmp_path / "model.pt"
    path.write_text("before")

    def broken(target: Path) -> None:
        target.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tiny.write_whole(path, broken)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_no_module_is_both_trained_on_and_held_out(train_tiny):
    held = {name for name, _ in train_tiny.modules(held=True)}
    assert held
    assert all(hashlib.sha256(name.encode()).digest()[0] < 16 for name in held)
    assert not any(train_tiny.held_out(name) for name, _ in train_tiny.modules(held=False))


def test_the_record_of_the_shipped_model_is_of_that_file():
    import torch

    from kestrel_kernels.demo.weights import TINY_FILE

    record = json.loads(TINY_FILE.with_suffix(".json").read_text(encoding="utf-8"))
    state = torch.load(TINY_FILE, weights_only=True)["state"]
    content = b"".join(state[name].view(torch.uint8).numpy().tobytes() for name in sorted(state))
    assert record["state_sha256"] == hashlib.sha256(content).hexdigest()
    assert record["held_out_bits_per_byte"] < 1.2
