"""Presets, the file that ships, and files that are not what they should be."""

from __future__ import annotations

import dataclasses
import random

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

    assert 8.5e9 < parameters(PRESETS["moondream3"]) < 9.5e9
    config = dataclasses.replace(PRESETS["moondream3"], layers=6)  # four dense, two with experts
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


@pytest.mark.parametrize("fp8", [False, True])
def test_memory_of_weights_counts_every_tensor_and_the_copies_made_while_experts_are_quantised(fp8):
    """While quantise() runs, the 16-bit tensor, its magnitudes and one expert in float32 exist beside the codes."""
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.weights import bytes_needed, shapes

    expected = largest = 0
    for name, shape in shapes(PRESETS["moondream3"]).items():
        count = 1
        for size in shape:
            count *= size
        if fp8 and name.endswith(("w1", "w2")):
            expected += count + 4 * shape[0] * shape[1]  # codes, and a float32 scale for each expert and output
            largest = max(largest, 2 * count)
        else:
            expected += 2 * count
    assert bytes_needed(PRESETS["moondream3"], torch.bfloat16, fp8_experts=fp8) == expected + 3 * largest


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8", "int4"])
def test_memory_of_a_cache_is_that_of_the_tensors_it_allocates(kv_cache):
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.weights import random

    config = PRESETS["tiny"]
    cache = PagedCache(random(config, torch.bfloat16, META), 300, kind=kv_cache, sequences=3)
    allocated = 0
    for store in cache.layers:
        tensors = getattr(store, "written", (store.keys, store.values))
        allocated += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert PagedCache.bytes_needed(config, 300, torch.bfloat16, kind=kv_cache, sequences=3) == allocated


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


RANDOM = random.Random(0)
UNREADABLE = [b"", b"not a model", b"PK\x03\x04 broken"]
UNREADABLE += [bytes([opcode]) + RANDOM.randbytes(40) for opcode in range(256)]  # of a pickle, all first opcodes


@pytest.mark.parametrize("content", UNREADABLE, ids=lambda content: content[:4].hex() or "empty")
def test_a_file_that_torch_cannot_read_is_refused(content, tmp_path):
    from kestrel_kernels.demo.config import DemoError

    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=r"^--model: expected a file that tools/train_tiny.py wrote, got .*model.pt"):
        load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    from kestrel_kernels.demo.config import DemoError

    with pytest.raises(DemoError, match="not a file"):
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
