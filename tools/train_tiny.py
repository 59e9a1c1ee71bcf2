"""Trains the `tiny` preset of `kestrel-kernels generate` on the Python standard library of the machine it runs on.

    python tools/train_tiny.py --out meta/src/kestrel_kernels/demo/tiny.pt

The text is every *.py file of the standard library except tests and generated tables. A module is held out when the
first byte of the SHA-256 of its dotted name is below 16 (one in sixteen). The split depends on nothing else, so every
Python version has held-out text that training has not seen. A run is reproducible with the same seed, Python, torch and
GPU. It writes the checkpoint (a torch file: {"config": {...}, "state": {...}}, weights bf16) and a record of the run in
a file of the same name with the suffix .json. Both are written atomically.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from plain_model import TINY, PlainModel, Shape
from torch import Tensor
from torch.nn import functional as F

SKIPPED = {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
DOCUMENT = b"\0"


def modules(*, held: bool) -> Iterator[tuple[str, bytes]]:
    """Dotted name and text of the held-out or the training modules of the standard library, in order of name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        generated = any(part.startswith(("_sysconfigdata", "config-")) for part in parts)
        if not SKIPPED.intersection(parts) and not generated:
            found.append((".".join(parts), path))
    for name, path in sorted(found):
        if held_out(name) != held:
            continue
        text = path.read_bytes()
        if text and b"\0" not in text:
            yield name, text


def held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 16


def corpus(*, held: bool) -> bytes:
    """The held-out or the training modules, each preceded by byte 0."""
    return b"".join(DOCUMENT + text for _, text in modules(held=held)) + DOCUMENT


def windows(data: Tensor, starts: Tensor, length: int) -> Tensor:
    return data[starts[:, None] + torch.arange(length, device=data.device)].long()


@torch.no_grad()
def bits_per_byte(loss: Callable[[Tensor], Tensor], data: Tensor, context: int, batch: int, limit: int) -> float:
    """Mean over at most `limit` windows spread evenly over `data`; each window begins without context."""
    starts = torch.arange(0, len(data) - context - 1, context, device=data.device)
    if len(starts) > limit:
        starts = starts[torch.linspace(0, len(starts) - 1, limit, device=data.device).long()]
    losses = [loss(windows(data, part, context + 1)) * len(part) for part in starts.split(batch)]
    return float(torch.stack(losses).sum()) / len(starts) / math.log(2)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: `write` fills a temporary file, which then replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


class Trainer:
    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats bit for bit only with it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # the backward pass of cuDNN's attention does not repeat
        torch.backends.cuda.matmul.allow_tf32 = True
        self.options = options
        self.device = torch.device(options.device)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.model = PlainModel(shape, dropout=options.dropout)
        self.model.initialise(self.generator)
        self.model.to(self.device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            fused=self.device.type == "cuda",
        )
        run = self.model.run if options.eager else torch.compile(self.model.run)
        self.run: Callable[[Tensor], tuple[Tensor, Tensor]] = run
        self.train_data = self._load(held=False)
        self.held_data = self._load(held=True)

    def _load(self, *, held: bool) -> Tensor:
        return torch.frombuffer(bytearray(corpus(held=held)), dtype=torch.uint8).to(self.device)

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits, imbalance = self.run(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), imbalance

    def held_out_bits(self, limit: int) -> float:
        self.model.eval()
        bits = bits_per_byte(
            lambda batch: self.losses(batch)[0], self.held_data, self.context, self.options.batch, limit
        )
        self.model.train()
        return bits

    @property
    def context(self) -> int:
        return self.model.shape.context

    def train(self) -> list[dict[str, float]]:
        options, curve = self.options, []
        started = time.monotonic()
        self.model.train()
        for step in range(options.steps):
            rate = learning_rate(step, options.steps, options.learning_rate, options.warmup)
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            last = len(self.train_data) - self.context - 1
            starts = torch.randint(last, (options.batch,), generator=self.generator)
            loss, imbalance = self.losses(
                windows(self.train_data, starts.to(self.device, non_blocking=True), self.context + 1)
            )
            (loss + options.balance * imbalance).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            if (step + 1) % options.report == 0 or step + 1 == options.steps:
                point = {
                    "step": step + 1,
                    "train_bits": loss.item() / math.log(2),
                    "held_out_bits": self.held_out_bits(256),
                    "imbalance": imbalance.item(),
                    "seconds": time.monotonic() - started,
                }
                curve.append({key: round(value, 4) for key, value in point.items()})
                rate_tokens = (step + 1) * options.batch * self.context / point["seconds"]
                left = point["seconds"] / (step + 1) * (options.steps - step - 1)
                print(
                    f"step {step + 1:6d}/{options.steps}  train {point['train_bits']:.3f}  held-out "
                    f"{point['held_out_bits']:.3f} bits/byte  imbalance {point['imbalance']:.2f}  "
                    f"{rate_tokens / 1e6:.2f} M bytes/s  {left:.0f} s left",
                    flush=True,
                )
        return curve

    def finish(self) -> dict[str, Tensor]:
        """Round the weights to bf16, calibrate the FP8 cache, and return the state to save."""
        self.model.eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
        starts = torch.randint(len(self.train_data) - self.context, (64,), generator=self.generator)
        self.model.calibrate(windows(self.train_data, starts.to(self.device), self.context))
        names = {name for name, _ in self.model.named_parameters()}
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        return {name: tensor.bfloat16() if name in names else tensor for name, tensor in state.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes; the record goes beside it")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=64, help="windows of the context length per step")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balance loss of the routers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=int, default=200, help="steps between held-out losses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--revision", default=revision(), help="git revision to record, where there is no git")
    parser.add_argument(
        "--shape", type=json.loads, default={}, help="sizes other than tiny's, as JSON, for experiments"
    )
    options = parser.parse_args(arguments)

    shape = dataclasses.replace(TINY, **options.shape)
    trainer = Trainer(shape, options)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{parameters} parameters; {len(trainer.train_data)} bytes to train on, {len(trainer.held_data)} held out; "
        f"{options.steps * options.batch * shape.context / len(trainer.train_data):.1f} passes",
        flush=True,
    )
    started = time.monotonic()
    curve = trainer.train()
    seconds = time.monotonic() - started
    state = trainer.finish()
    bits = trainer.held_out_bits(1 << 30)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "revision": options.revision,
        "gpu": torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": options.seed,
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "options": {
            key: getattr(options, key)
            for key in ("steps", "batch", "learning_rate", "warmup", "weight_decay", "dropout", "balance")
        },
        "corpus": {
            "train_bytes": len(trainer.train_data),
            "held_out_bytes": len(trainer.held_data),
            "train_sha256": hashlib.sha256(corpus(held=False)).hexdigest(),
            "held_out_modules": [name for name, _ in modules(held=True)],
        },
        "seconds": round(seconds, 1),
        "held_out_bits_per_byte": round(bits, 4),
        "largest_fp8_cache_scale": round(max(float(t.max()) for n, t in state.items() if n.endswith("_scale")), 4),
        "largest_weight": round(max(float(t.abs().max()) for t in state.values()), 3),
        "state_sha256": hashlib.sha256(
            b"".join(state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(state))
        ).hexdigest(),
        "curve": curve,
    }
    checkpoint = {"config": dataclasses.asdict(shape), "state": state}
    write_whole(options.out, lambda path: torch.save(checkpoint, path))
    write_whole(options.out.with_suffix(".json"), lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))
    size = options.out.stat().st_size
    print(f"{bits:.4f} bits per held-out byte after {seconds:.0f} s; wrote {options.out} ({size} bytes)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
