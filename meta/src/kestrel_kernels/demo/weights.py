"""The decoder's weights: their names and shapes, loaded from a file or drawn at random."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kestrel_quant import W4Weight, pack_w4

from .config import DecoderConfig, DemoError

TINY_FILE = Path(__file__).with_name("tiny.pt")
FP8_MAX = 448.0

Source = Callable[[str, tuple[int, ...]], Tensor]
"""Returns the tensor of a name and shape, in its final dtype and on its device."""


@dataclasses.dataclass(frozen=True)
class Norm:
    weight: Tensor
    bias: Tensor


@dataclasses.dataclass(frozen=True)
class Linear:
    weight: Tensor | W4Weight
    bias: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Dense:
    up: Linear
    down: Linear


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts; with scales the weights are FP8, one scale for each expert and output."""

    router: Linear
    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Layer:
    norm: Norm
    qkv: Linear
    tau: Linear
    tau_table: Tensor
    out: Linear
    feed_forward: Dense | Experts
    k_scale: Tensor
    v_scale: Tensor


@dataclasses.dataclass(frozen=True)
class Weights:
    config: DecoderConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model file by name, as tools/plain_model.py names them."""
    return dict(_named_shapes(config))


def _named_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Lazily, so that a file that claims a billion layers is refused at the first missing one."""
    width, heads, kv_heads = config.width, config.heads, config.kv_heads
    yield "embedding.weight", (config.vocabulary, width)
    yield "norm.weight", (width,)
    yield "norm.bias", (width,)
    yield "head.weight", (config.vocabulary, width)
    yield "head.bias", (config.vocabulary,)
    for index in range(config.layers):
        layer: dict[str, tuple[int, ...]] = {
            "norm.weight": (width,),
            "norm.bias": (width,),
            "attention.qkv.weight": (config.qkv_width, width),
            "attention.qkv.bias": (config.qkv_width,),
            "attention.tau.weight": (heads + kv_heads, config.qkv_width),
            "attention.tau_alpha": (heads,),
            "attention.out.weight": (width, heads * config.head_size),
            "attention.out.bias": (width,),
            "attention.k_scale": (kv_heads,),
            "attention.v_scale": (kv_heads,),
        }
        if not config.shared_tau_table:
            layer["attention.tau_alpha_v"] = (kv_heads,)
        if config.is_dense(index):
            layer["dense.up.weight"] = (config.dense_inner, width)
            layer["dense.up.bias"] = (config.dense_inner,)
            layer["dense.down.weight"] = (width, config.dense_inner)
            layer["dense.down.bias"] = (width,)
        else:
            layer["experts.router.weight"] = (config.experts, width)
            layer["experts.router.bias"] = (config.experts,)
            layer["experts.w1"] = (config.experts, 2 * config.expert_inner, width)
            layer["experts.w2"] = (config.experts, width, config.expert_inner)
        for name, shape in layer.items():
            yield f"layers.{index}.{name}", shape


def is_parameter(name: str) -> bool:
    """True for trained tensors; the scales of an FP8 cache are measured."""
    return not name.endswith("_scale")


def parameters(config: DecoderConfig) -> int:
    return sum(math.prod(shape) for name, shape in shapes(config).items() if is_parameter(name))


def bytes_needed(config: DecoderConfig, dtype: torch.dtype, *, fp8_experts: bool) -> int:
    """Peak bytes of the weights. While one tensor of experts is quantised, it exists in 16 bits and in FP8."""
    total = largest = 0
    for name, shape in shapes(config).items():
        full = math.prod(shape) * dtype.itemsize
        if fp8_experts and name.endswith((".w1", ".w2")):
            total += math.prod(shape) + 4 * math.prod(shape[:2])
            largest = max(largest, full)
        else:
            total += full
    return total + 3 * largest


def load(path: Path, dtype: torch.dtype, device: torch.device, *, fp8_experts: bool = False) -> Weights:
    """The weights of a file that tools/train_tiny.py wrote."""
    config, state = _read(path)
    for name, shape in _named_shapes(config):
        if name not in state:
            raise DemoError(f"--model: expected {path} to hold {name}, got a file without it")
        tensor = state[name]
        dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not dense:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" + ("" if dense else f", {tensor.layout} on {tensor.device}")
            raise DemoError(f"--model: expected {name} in {path} to be floating with shape {shape}, got {got}")
    unknown = sorted(set(state) - set(shapes(config)))
    if unknown:
        raise DemoError(f"--model: expected the tensors of a decoder in {path}, got also {unknown[0]}")
    return assemble(config, lambda name, _: state[name].to(device, dtype), fp8_experts=fp8_experts)


def random(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    fp8_experts: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Weights:
    """Random weights of a size that keeps activations near one. On the device `meta`: shapes only."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        progress(f"random weights: {name}")
        if name.endswith(("norm.weight", "_scale")):
            return torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, shape[-1] ** -0.5, generator=generator)

    return assemble(config, draw, fp8_experts=fp8_experts)


def assemble(config: DecoderConfig, source: Source, *, fp8_experts: bool) -> Weights:
    expected = shapes(config)

    def take(name: str) -> Tensor:
        return source(name, expected[name])

    def linear(name: str) -> Linear:
        return Linear(take(f"{name}.weight"), take(f"{name}.bias") if f"{name}.bias" in expected else None)

    def norm(name: str) -> Norm:
        return Norm(take(f"{name}.weight"), take(f"{name}.bias"))

    def layer(index: int) -> Layer:
        at = f"layers.{index}"
        alphas = [take(f"{at}.attention.tau_alpha")]
        if not config.shared_tau_table:
            alphas.append(take(f"{at}.attention.tau_alpha_v"))
        feed_forward: Dense | Experts
        if config.is_dense(index):
            feed_forward = Dense(linear(f"{at}.dense.up"), linear(f"{at}.dense.down"))
        else:
            router = linear(f"{at}.experts.router")
            if fp8_experts:
                w1, w1_scale = quantise(take(f"{at}.experts.w1"))
                w2, w2_scale = quantise(take(f"{at}.experts.w2"))
                feed_forward = Experts(router, w1, w2, w1_scale, w2_scale)
            else:
                feed_forward = Experts(router, take(f"{at}.experts.w1"), take(f"{at}.experts.w2"))
        return Layer(
            norm=norm(f"{at}.norm"),
            qkv=linear(f"{at}.attention.qkv"),
            tau=linear(f"{at}.attention.tau"),
            tau_table=tau_table(torch.cat(alphas), config.context),
            out=linear(f"{at}.attention.out"),
            feed_forward=feed_forward,
            k_scale=take(f"{at}.attention.k_scale").float(),
            v_scale=take(f"{at}.attention.v_scale").float(),
        )

    return Weights(
        config=config,
        embedding=take("embedding.weight"),
        layers=tuple(layer(index) for index in range(config.layers)),
        norm=norm("norm"),
        head=linear("head"),
    )


def with_4_bit_layers(weights: Weights, group_size: int = 128, *, head: bool = True) -> Weights:
    """The same decoder with 4-bit weights in its linear layers; router, experts, and a head left out stay."""

    def packed(linear: Linear) -> Linear:
        assert isinstance(linear.weight, Tensor)
        return Linear(pack_w4(linear.weight, group_size, symmetric=False), linear.bias)

    def layer(whole: Layer) -> Layer:
        feed_forward = whole.feed_forward
        if isinstance(feed_forward, Dense):
            feed_forward = Dense(packed(feed_forward.up), packed(feed_forward.down))
        qkv, tau, out = (packed(linear) for linear in (whole.qkv, whole.tau, whole.out))
        return dataclasses.replace(whole, qkv=qkv, tau=tau, out=out, feed_forward=feed_forward)

    return dataclasses.replace(
        weights, layers=tuple(map(layer, weights.layers)), head=packed(weights.head) if head else weights.head
    )


def tau_table(alpha: Tensor, context: int) -> Tensor:
    """Learnt scales by log position, one column per head: float32 [context, heads]."""
    positions = torch.arange(context, dtype=torch.float32, device=alpha.device)
    return 0.5 + torch.sigmoid(alpha.float() * torch.log1p(positions)[:, None])


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, N, K] as e4m3 codes and one scale for each expert and output [E, N]: weight = code * scale."""
    from kestrel_runtime.reference import to_fp8

    scale = weight.abs().amax(-1).float().clamp(min=1e-12) / FP8_MAX
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for expert in range(len(weight)):  # one at a time: a float32 copy of all would be too large
        codes[expert] = to_fp8(weight[expert].float() / scale[expert, :, None])
    return codes, scale


def _read(path: Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    if not path.is_file():
        raise DemoError(f"--model: expected a file that tools/train_tiny.py wrote, got {path}, not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are no checkpoints
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a file that is no checkpoint
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise DemoError(f"--model: expected a file that tools/train_tiny.py wrote, got {path} ({reason})") from None
    if not isinstance(found, Mapping) or not {"config", "state"} <= set(found):
        raise DemoError(f"--model: expected 'config' and 'state' in {path}, got another kind of file")
    config, state = found["config"], found["state"]
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise DemoError(f"--model: expected 'state' in {path} to hold tensors by name, got something else")
    try:
        return DecoderConfig(**config), dict(state)
    except TypeError:
        raise DemoError(f"--model: expected the sizes of a decoder as 'config' in {path}, got {config!r}") from None
