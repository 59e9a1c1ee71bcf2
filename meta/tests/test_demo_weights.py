"""Presets, the file that ships, and files that are not what they should be."""

from __future__ import annotations

import dataclasses

import pytest
import torch

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def checkpoint():
    from kestrel_kernels.demo.weights import TINY_FILE

    return torch.load(TINY_FILE, weights_only=True)


def load(path):
    from kestrel_kernels.demo.weights import load

    return load(path, torch.float32, CPU)


def test_the_shipped_file_is_the_tiny_preset(checkpoint, plain_model):
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.weights import TINY_FILE, parameters

    assert checkpoint["config"] == dataclasses.asdict(PRESETS["tiny"]) == dataclasses.asdict(plain_model.TINY)
    assert parameters(PRESETS["tiny"]) <= 2_000_000
    assert TINY_FILE.stat().st_size <= 4_000_000


def test_the_shipped_file_holds_bf16_without_outliers(checkpoint):
    from kestrel_kernels.demo.weights import is_parameter

    for name, tensor in checkpoint["state"].items():
        assert tensor.dtype == (torch.bfloat16 if is_parameter(name) else torch.float32), name
        assert tensor.isfinite().all(), name
        assert tensor.abs().max() < 16, name


def test_names_and_shapes_are_the_plain_modules(plain_model):
    from kestrel_kernels.demo.config import DecoderConfig
    from kestrel_kernels.demo.weights import parameters, shapes

    for shape in (plain_model.TINY, dataclasses.replace(plain_model.TINY, heads=4)):
        state = plain_model.PlainModel(shape).state_dict()
        config = DecoderConfig(**dataclasses.asdict(shape))
        assert shapes(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}
        model = plain_model.PlainModel(shape)
        assert parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("kv_cache", "fp8"), [("auto", False), ("fp8", True), ("int8", False), ("int4", False)])
def test_moondream3_runs_on_shapes_alone(kv_cache, fp8):
    """Prefill and decoding at the published sizes on the meta device: ops accept the shapes, nothing is allocated."""
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.model import Decoder, Step
    from kestrel_kernels.demo.weights import parameters, random

    config = PRESETS["moondream3"]
    assert 8.5e9 < parameters(config) < 9.5e9
    weights = random(config, torch.bfloat16, META, fp8_experts=fp8)
    assert weights.layers[3].feed_forward.up.weight.shape == (8192, 2048)
    assert weights.layers[4].feed_forward.w1.shape == (64, 2048, 2048)
    assert weights.layers[4].feed_forward.w1.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    cache = PagedCache(weights, 128, kind=kv_cache, sequences=2)
    model = Decoder(weights, cache)
    table = cache.reserve([7, 3])
    tokens = torch.empty(9, dtype=torch.int64, device=META)
    assert model(tokens, Step.prefill(table, [7, 2])).shape == (9, 51200)
    positions = torch.empty(2, dtype=torch.int64, device=META)
    assert model(tokens[:2], Step.decode(table, positions)).shape == (2, 51200)


def test_a_model_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    from kestrel_kernels.demo import memory
    from kestrel_kernels.demo.config import PRESETS, DemoError

    def require(free: float, *, fp8_experts: bool) -> None:
        monkeypatch.setattr(memory, "free_bytes", lambda device: int(free * memory.GIB))
        arguments = (PRESETS["moondream3"], 4096, torch.bfloat16, CPU)
        memory.require(*arguments, kv_cache="auto", fp8_experts=fp8_experts)

    with pytest.raises(DemoError, match=r"expected 18\.\d GiB of free memory on cpu .*got 16\.0 GiB"):
        require(16, fp8_experts=False)
    require(32, fp8_experts=False)
    require(16, fp8_experts=True)
    monkeypatch.undo()
    assert memory.free_bytes(CPU) is None or memory.free_bytes(CPU) > 0


def test_fp8_experts_are_within_rounding_of_the_weights():
    from kestrel_kernels.demo.weights import quantise

    weight = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    weight[1, 7] = 0
    codes, scale = quantise(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.isfinite().all()
    error = (codes.float() * scale[..., None] - weight).abs()
    # Half a unit in the last of 3 mantissa bits; below the least normal code half the spacing of the subnormals.
    assert (error <= torch.maximum(weight.abs() / 16, scale[..., None] * 2.0**-10) * 1.0001).all()


def test_random_weights_repeat_with_their_seed():
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.weights import random

    first, again, other = (random(PRESETS["tiny"], torch.float32, CPU, seed=seed).embedding for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def _without(name):
    def change(checkpoint):
        del checkpoint["state"][name]

    return change


def _with(name, tensor):
    def change(checkpoint):
        checkpoint["state"][name] = tensor

    return change


def _config(**values):
    def change(checkpoint):
        checkpoint["config"].update(values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("head.bias"), "to hold head.bias, got a file without it"),
        (_with("head.bias", torch.zeros(3)), r"head.bias in .* floating with shape \(256,\), got torch.float32 \(3,\)"),
        (_with("head.bias", torch.zeros(256, dtype=torch.int32)), "got torch.int32"),
        (_with("layers.9.norm.bias", torch.zeros(3)), "got also layers.9.norm.bias"),
        (_with("head.bias", 3), "to hold tensors by name"),
        (_config(width=0), "expected width to be a positive int, got 0"),
        (_config(heads=2.0), "expected heads to be a positive int, got 2.0"),
        (_config(colour="red"), "the sizes of a decoder"),
        (_config(layers=10**12), "to hold layers.7.norm.weight, got a file without it"),
        (_config(context=10**12), "expected context to be at most 1048576"),
        (_config(experts_per_token=9), "expected experts_per_token to be at most the 8 experts, got 9"),
        (_config(heads=3, kv_heads=2), "expected heads to be a multiple of the 2 kv_heads, got 3"),
        (_config(rotary_size=66), "expected rotary_size to be even and at most the head_size 64, got 66"),
        (lambda checkpoint: checkpoint.pop("config"), "expected 'config' and 'state'"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused(change, message, checkpoint, tmp_path):
    from kestrel_kernels.demo.config import DemoError

    change(checkpoint)
    torch.save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(DemoError, match=message) as error:
        load(tmp_path / "model.pt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04 broken"])
def test_a_file_that_torch_cannot_read_is_refused(content, tmp_path):
    from kestrel_kernels.demo.config import DemoError

    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=r"^--model: expected a file that tools/train_tiny.py wrote, got .*model.pt"):
        load(path)
    with pytest.raises(DemoError, match="is no file"):
        load(tmp_path / "missing.pt")
    with pytest.raises(DemoError, match="--model"):
        load(tmp_path)


def test_half_a_file_is_refused(tmp_path):
    from kestrel_kernels.demo.config import DemoError
    from kestrel_kernels.demo.weights import TINY_FILE

    path = tmp_path / "model.pt"
    path.write_bytes(TINY_FILE.read_bytes()[:1_000_000])
    with pytest.raises(DemoError, match="--model"):
        load(path)
