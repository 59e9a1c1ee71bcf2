"""tools/train_tiny.py: it repeats, holds out what it says, and writes whole files or none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def train(train_tiny, monkeypatch):
    """Trains a small model for three steps on a text of a few kilobytes and returns the record."""
    texts = {False: TOOL.read_bytes(), True: b"import os\n" * 200}
    monkeypatch.setattr(train_tiny, "modules", lambda *, held: iter([("module", texts[held])]))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # train_tiny sets it; the fixture restores it
    fills = torch.utils.deterministic.fill_uninitialized_memory

    def run(out: Path) -> dict[str, object]:
        options = ["--steps", "3", "--batch", "4", "--report", "3", "--eager", "--device", "cpu", "--warmup", "2"]
        train_tiny.main(["--out", str(out), "--shape", json.dumps(SMALL), "--revision", "none", *options])
        record: dict[str, object] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
        return record

    yield run
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_tf32 = False


def test_training_repeats_and_leaves_two_whole_files(train, tmp_path):
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
    trained_on = {name for name, _ in train_tiny.modules(held=False)}
    assert held
    assert trained_on
    assert all(hashlib.sha256(name.encode()).digest()[0] < 16 for name in held)
    assert not held & trained_on


def test_the_record_of_the_shipped_model_is_of_that_file():
    from kestrel_kernels.demo.weights import TINY_FILE

    record = json.loads(TINY_FILE.with_suffix(".json").read_text(encoding="utf-8"))
    state = torch.load(TINY_FILE, weights_only=True)["state"]
    content = b"".join(state[name].view(torch.uint8).numpy().tobytes() for name in sorted(state))
    assert record["state_sha256"] == hashlib.sha256(content).hexdigest()
    assert record["held_out_bits_per_byte"] < 1.2
