"""4-bit weights in models of transformers: the quantizer "kestrel_w4", and linear layers over a `W4Weight`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from kestrel_quant import W4Weight, pack_w4, w4_from_awq, w4_from_compressed_tensors, w4_from_gptq, w4a16_linear

METHOD = "kestrel_w4"
COMPRESSED = "compressed-tensors"
CHECKPOINTS = (None, "gptq", "gptq_v2", "awq", COMPRESSED)
_lock = threading.Lock()
_is_registered = False


class W4Config(QuantizationConfigMixin):
    """4-bit weights of the linear layers, for ``from_pretrained(..., quantization_config=W4Config())``.

    Weights are rounded to the nearest code while they are loaded, one layer at a time. Embeddings, the head and routed
    experts stay as they are; so do layers whose columns are no multiple of `group_size`.

    group_size: columns that share a scale; -1 is whole rows.
    symmetric: codes -7..7 around 0; else 0..15 with a zero point for each group.
    modules_to_not_convert: names, or patterns of names, of layers that stay; besides them the head stays.
    checkpoint: None for weights in 16 or 32 bits; "gptq", "gptq_v2", "awq" or "compressed-tensors" for a checkpoint
        that has 4 bits already. :func:`load_w4` fills this in.
    desc_act: the checkpoint names the group of each column (activation order).
    head: the language head has 4 bits too. It must not share its weight with the embedding.

    Raises ValueError for values out of range.

    >>> W4Config(group_size=64).quant_method
    'kestrel_w4'
    """

    def __init__(
        self,
        group_size: int = 128,
        symmetric: bool = True,
        modules_to_not_convert: Sequence[str] | None = None,
        checkpoint: str | None = None,
        desc_act: bool = False,
        quant_method: str = METHOD,
        head: bool = False,
    ) -> None:
        if not isinstance(group_size, int) or (group_size != -1 and (group_size < 2 or group_size % 2)):
            raise ValueError(f"W4Config: group_size: expected -1 or an even number of columns, got {group_size!r}")
        if checkpoint not in CHECKPOINTS:
            raise ValueError(f"W4Config: checkpoint: expected one of {CHECKPOINTS}, got {checkpoint!r}")
        if quant_method != METHOD:
            raise ValueError(f"W4Config: quant_method: expected {METHOD!r}, got {quant_method!r}")
        self.quant_method = quant_method  # type: ignore[assignment]
        self.group_size = group_size
        self.symmetric = bool(symmetric)
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.checkpoint = checkpoint
        self.desc_act = bool(desc_act)
        self.head = bool(head)
        register()

    @classmethod
    def of_checkpoint(cls, found: dict[str, Any]) -> W4Config:
        """The config of a GPTQ, AWQ or compressed-tensors checkpoint. found: its `quantization_config`.

        Raises ValueError for other methods, other numbers of bits, AWQ layouts other than "gemm" and entries of
        compressed-tensors other than weights of linear layers in the format "pack-quantized".
        """
        method = found.get("quant_method")
        if method not in ("gptq", "awq", COMPRESSED, METHOD):
            expected = f"gptq, awq or {COMPRESSED}"
            raise ValueError(f"load_w4: quant_method of the checkpoint: expected {expected}, got {method!r}")
        if method == METHOD:
            return cls(**found)
        if method == COMPRESSED:
            return cls(**_compressed(found))
        if (bits := found.get("bits", found.get("w_bit"))) != 4:
            raise ValueError(f"load_w4: bits of the checkpoint: expected 4, got {bits!r}")
        group_size = int(found.get("group_size", found.get("q_group_size", 128)))
        skipped = found.get("modules_to_not_convert")
        if method == "gptq":
            layout = found.get("checkpoint_format") or "gptq"
            return cls(
                group_size=group_size,
                modules_to_not_convert=skipped,
                checkpoint=layout,
                desc_act=bool(found.get("desc_act")),
                head=bool(found.get("lm_head")),
            )
        if (layout := str(found.get("version", "gemm")).lower()) != "gemm":
            raise ValueError(f"load_w4: version of the AWQ checkpoint: expected gemm, got {layout!r}")
        symmetric = not found.get("zero_point", True)
        return cls(group_size=group_size, symmetric=symmetric, modules_to_not_convert=skipped, checkpoint="awq")


class W4Linear(nn.Module):
    """A linear layer whose weight [out_features, in_features] is a `W4Weight`, kept as buffers."""

    codes: Tensor | None
    scales: Tensor | None
    zeros: Tensor | None
    permutation: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = 0
        for name in ("codes", "scales", "zeros", "permutation"):
            self.register_buffer(name, None)
        self.register_parameter("bias", bias)

    @property
    def packed(self) -> W4Weight:
        """The weight. Raises ValueError if none was loaded."""
        if self.codes is None or self.scales is None:
            raise ValueError("W4Linear: weight: expected a packed one, got none (was the checkpoint complete?)")
        shape = (self.out_features, self.in_features)
        return W4Weight(self.codes, self.scales, shape, self.group_size, self.zeros, self.permutation)

    @packed.setter
    def packed(self, weight: W4Weight) -> None:
        self.group_size = weight.group_size
        self.codes, self.scales = weight.codes, weight.scales
        self.zeros, self.permutation = weight.zeros, weight.permutation

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}"
        return f"{sizes}, bias={self.bias is not None}"


class Fused:
    """Several W4Linear of one input as one: their codes become rows of one tensor; scales are copied, and followed.

    It has the interface of ``modules.Fused``, which is for ordinary linear layers.
    """

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner = owner
        self.names = names
        self.linears: list[W4Linear] = [getattr(owner, name) for name in names]
        self.weight: W4Weight | None = None
        self._fuse()

    def holds(self) -> bool:
        """Whether the owner still has these layers, without hooks or wrappers."""
        pairs = zip(self.names, self.linears, strict=True)
        return all(getattr(self.owner, name) is linear and is_w4(linear) for name, linear in pairs)

    @staticmethod
    def refusal(linears: Sequence[Any]) -> str | None:
        """Why these cannot be fused, or None."""
        if not all(is_w4(linear) for linear in linears):
            return "not plain W4Linear"
        first, *others = (linear.packed for linear in linears)
        if any((x.group_size, x.dtype, x.device) != (first.group_size, first.dtype, first.device) for x in others):
            return "4-bit weights of several group sizes, dtypes or devices"
        if any(linear.out_features % 16 for linear in linears):
            return "4-bit weights with rows that are no multiple of 16"
        orders = [x.permutation for x in (first, *others)]
        if not all(_are_equal(orders[0], order) for order in orders):
            return "4-bit weights with columns in several orders"
        if len({linear.bias is None for linear in linears}) > 1:
            return "only some have a bias"
        return None

    def _fuse(self) -> None:
        weights = [linear.packed for linear in self.linears]
        scales, zeros, self.bias = self._copies(weights)
        with torch.inference_mode(False), torch.no_grad():
            codes = torch.cat([x.codes for x in weights])
        for linear, rows in zip(self.linears, codes.split([len(x.codes) for x in weights]), strict=True):
            linear.codes = rows
        first, rows = weights[0], sum(x.shape[0] for x in weights)
        self.weight = W4Weight(codes, scales, (rows, first.shape[1]), first.group_size, zeros, first.permutation)
        self._copied = self._sources()

    def _copies(self, weights: Sequence[W4Weight]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scales, zero points and biases of all layers, joined."""
        with torch.inference_mode(False), torch.no_grad():
            zeros = None
            if any(x.zeros is not None for x in weights):
                filled = [
                    torch.full_like(x.scales, 8, dtype=torch.int16) if x.zeros is None else x.zeros for x in weights
                ]
                zeros = torch.cat(filled, 1)
            biases = [linear.bias.data for linear in self.linears if linear.bias is not None]
            return torch.cat([x.scales for x in weights], 1), zeros, torch.cat(biases) if biases else None

    def _sources(self) -> list[tuple[int, int]]:
        """Where the tensors that are copied lie, and how often they were changed."""
        found = [x for linear in self.linears for x in (linear.scales, linear.zeros, linear.bias) if x is not None]
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in found]

    def __getstate__(self) -> dict[str, Any]:
        """Without the joined tensors: a copy of the model joins its own at its first call."""
        return {**vars(self), "weight": None, "bias": None}

    def _has_codes(self) -> bool:
        """Whether the layers' codes are still rows of the joined ones, in their memory."""
        if self.weight is None:
            return False
        start = self.weight.codes.data_ptr()
        for linear in self.linears:
            codes, scales = linear.codes, linear.scales
            if codes is None or scales is None or codes.data_ptr() != start or scales.dtype != self.weight.dtype:
                return False
            start += codes.numel() * codes.element_size()
        return True

    def refresh(self) -> None:
        """Follow what was done to the layers since: moved or replaced codes, other scales in place."""
        if not self._has_codes():
            self._fuse()
            return
        sources = self._sources()
        if sources == self._copied:
            return
        assert self.weight is not None
        held = (self.weight.scales, self.weight.zeros, self.bias)
        for old, new in zip(held, self._copies([linear.packed for linear in self.linears]), strict=True):
            if old is not None and new is not None:
                old.copy_(new)  # in place: a CUDA graph may hold it
        self._copied = sources

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # where memory lies cannot be traced
            return torch.cat([linear(x) for linear in self.linears], -1)
        self.refresh()
        assert self.weight is not None
        return _product(x, self.weight, self.bias)

    def split(self) -> None:
        """Give every layer memory of its own."""
        for linear in self.linears:
            if linear.codes is not None:
                linear.codes = linear.codes.clone()


def _product(x: Tensor, weight: W4Weight, bias: Tensor | None) -> Tensor:
    """`w4a16_linear` of x as a matrix, whose arguments the op checks faster."""
    if x.ndim == 2:
        return w4a16_linear(x, weight, bias)
    return w4a16_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def is_w4(linear: Any) -> bool:
    """Whether this is a W4Linear with a weight, without hooks."""
    return (
        type(linear) is W4Linear
        and linear.codes is not None
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def quantize(
    model: nn.Module,
    *,
    group_size: int = 128,
    symmetric: bool = True,
    modules_to_not_convert: Sequence[str] | None = None,
    head: bool = False,
) -> list[str]:
    """Replace the linear layers of a model of transformers by 4-bit ones, in place, before :func:`apply`.

    The arguments are those of :class:`W4Config`. Each weight is freed before the next one is packed. Returns the names
    of the replaced layers. Raises TypeError if `model` is no model of transformers, ValueError if no layer fits, the
    model is changed by `apply`, or its head is asked for and shares its weight with the embedding.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    >>> quantize(model, group_size=8)[0]
    'model.layers.0.self_attn.q_proj'
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"quantize: model: expected a transformers model, got {type(model).__name__}")
    if "_kestrel_applied" in model.__dict__:
        raise ValueError("quantize: model: expected one before apply(model), got one after it")
    config = W4Config(group_size, symmetric, modules_to_not_convert, head=head)
    names = [name for name, _ in _layers(model, config)]
    if not names:
        raise ValueError(f"quantize: model: expected linear layers with groups of {group_size} columns, got none")
    with torch.no_grad():
        for name in names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            layer = W4Linear(linear.in_features, linear.out_features, linear.bias)
            layer.packed = _packed(linear.weight.data, config)
            model.set_submodule(name, layer)
            del linear
    return names


def load_w4(path: Any, *, model_class: Any = None, config: W4Config | None = None, **options: Any) -> Any:
    """Load a checkpoint with 4-bit linear layers: those in 4 bits as they are, others rounded to the nearest code.

    As they are: GPTQ, AWQ, and compressed-tensors in the format "pack-quantized", which llm-compressor writes.

    path: a folder or the name of a checkpoint, as ``from_pretrained`` takes it. model_class: by default
    ``AutoModelForCausalLM``. config: for a checkpoint without 4-bit weights; default ``W4Config()``. options: further
    arguments of ``from_pretrained``, such as `dtype`, which is also the activations' dtype. No checkpoint needs another
    package here. Returns the model, on which :func:`apply` runs.

    Raises ValueError for checkpoints of other methods, bits or layouts, and for 4-bit checkpoints of models with routed
    experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = options.pop("config", None) or AutoConfig.from_pretrained(path)
    found = getattr(loaded, "quantization_config", None)
    if found is None:
        options["quantization_config"] = config or W4Config()
    else:
        if config is not None:
            raise ValueError("load_w4: config: expected None for a checkpoint that is quantised, got one")
        found = found if isinstance(found, dict) else found.to_dict()
        loaded.quantization_config = W4Config.of_checkpoint(found).to_dict()
    return (model_class or AutoModelForCausalLM).from_pretrained(path, config=loaded, **options)


class Quantizer(HfQuantizer):
    """Replaces linear layers by W4Linear before weights are loaded, and packs what was loaded."""

    requires_calibration = False
    quantization_config: W4Config

    def __init__(self, quantization_config: W4Config, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if (quantization_config.checkpoint is None) == self.pre_quantized:
            expected = f"one of {CHECKPOINTS[1:]}" if self.pre_quantized else "None"
            raise ValueError(
                f"W4Config: checkpoint: expected {expected} for this checkpoint, got {quantization_config.checkpoint!r}"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, W4Linear) and name == "weight"

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self.quantization_config)

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        config = self.quantization_config
        if self.pre_quantized and any(p.ndim > 2 for p in model.parameters()):
            raise ValueError("load_w4: expected a model of linear layers alone, got one with routed experts")
        for name, linear in _layers(model, config):
            layer = W4Linear(linear.in_features, linear.out_features, linear.bias)
            if self.pre_quantized:
                for stored, (shape, dtype) in _stored(config, linear).items():
                    layer.register_buffer(stored, torch.empty(shape, dtype=dtype, device="meta"))
            else:
                layer.weight = linear.weight
            model.set_submodule(name, layer)
        if self.pre_quantized and not config.desc_act:  # g_idx is then the order of the columns
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = ignored | {r"\.g_idx$"}
        return model

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        for name, layer in model.named_modules():
            if isinstance(layer, W4Linear) and self.pre_quantized:
                _convert(name, layer, self.quantization_config)
        return model

    def is_serializable(self, **options: Any) -> bool:
        return False  # the layout of a W4Weight is private

    @property
    def is_trainable(self) -> bool:
        return False


class _Pack(ConversionOps):
    """Packs a weight while it is loaded, so that one at a time is held in full."""

    def __init__(self, config: W4Config) -> None:
        self.config = config

    def convert(self, input_dict: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        [(key, value)] = input_dict.items()
        value = value[0] if isinstance(value, list) else value
        layer, _ = get_module_from_name(options["model"], key)
        del layer.weight
        layer.packed = _packed(value, self.config)
        if (missing := options.get("missing_keys")) is not None:
            missing.discard(key)
        return {}


def _packed(weight: Tensor, config: W4Config) -> W4Weight:
    group_size = weight.shape[1] if config.group_size == -1 else config.group_size
    return pack_w4(weight, group_size, symmetric=config.symmetric)


def _layers(model: Any, config: W4Config) -> Iterable[tuple[str, nn.Linear]]:
    """The linear layers that the config converts."""
    kept = [*(config.modules_to_not_convert or []), *(getattr(model, "_keep_in_fp32_modules", None) or [])]
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and (config.head or module is not head) and should_convert_module(name, kept):
            if module is head and model.config.get_text_config().tie_word_embeddings:
                raise ValueError(
                    "W4Config: head: expected a head of its own, got one that shares the embedding's weight"
                )
            columns = module.in_features
            if columns % (columns if config.group_size == -1 else config.group_size) == 0 and columns % 2 == 0:
                yield name, module
            elif config.checkpoint == COMPRESSED:
                groups = f"whole groups of {config.group_size}" if columns % 2 == 0 else "an even number"
                raise ValueError(f"load_w4: {name}: expected {groups} columns, got {columns}")


def _stored(config: W4Config, linear: nn.Linear) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a layer's tensors in a 4-bit checkpoint."""
    columns, rows, dtype = linear.in_features, linear.out_features, linear.weight.dtype
    groups = 1 if config.group_size == -1 else columns // config.group_size
    if config.checkpoint == COMPRESSED:
        return {
            "weight_packed": ((rows, -(-columns // 8)), torch.int32),
            "weight_scale": ((rows, groups), dtype),
            "weight_shape": ((2,), torch.int64),
            **({} if config.symmetric else {"weight_zero_point": ((-(-rows // 8), groups), torch.int32)}),
            **({"weight_g_idx": ((columns,), torch.int32)} if config.desc_act else {}),
        }
    packed = (columns, rows // 8) if config.checkpoint == "awq" else (columns // 8, rows)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "qweight": (packed, torch.int32),
        "qzeros": ((groups, -(-rows // 8)), torch.int32),
        "scales": ((groups, rows), dtype),
    }
    if config.desc_act:
        found["g_idx"] = ((columns,), torch.int32)
    return found


def _convert(name: str, layer: W4Linear, config: W4Config) -> None:
    """Pack what was loaded from a 4-bit checkpoint, and drop it."""
    stored: dict[str, Any] = dict(sorted(layer.named_buffers()))  # the layer has none of its own yet
    if absent := [each for each, x in stored.items() if not getattr(x, "_is_hf_initialized", False)]:
        raise ValueError(
            f"load_w4: {name}: expected 4-bit weights in every linear layer that the checkpoint's quantization_config "
            f"does not leave out, got none ({', '.join(absent)} missing)"
        )
    for each in stored:
        delattr(layer, each)
    layer.register_buffer("scales", None)
    if config.checkpoint == COMPRESSED:
        layer.packed = w4_from_compressed_tensors(**stored)
    elif config.checkpoint == "awq":
        layer.packed = w4_from_awq(**stored)
    else:
        layer.packed = w4_from_gptq(**stored, checkpoint_format=config.checkpoint)  # type: ignore[arg-type]


def _compressed(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of W4Config for compressed-tensors. Raises ValueError that names the first entry not covered."""

    def only(entry: str, value: Any, *expected: Any) -> None:
        if value not in expected:
            listed = " or ".join(map(repr, expected))
            raise ValueError(f"load_w4: {entry} of the checkpoint: expected {listed}, got {value!r}")

    groups = found.get("config_groups") or {}
    only("number of config_groups", len(groups), 1)
    [(name, scheme)] = groups.items()
    group = f"config_groups.{name}"
    weights = scheme.get("weights") or {} if isinstance(scheme, dict) else {}
    if not weights:
        raise ValueError(f"load_w4: {group} of the checkpoint: expected a scheme of weights, got {scheme!r}")
    only("format", found.get("format"), "pack-quantized")
    only(f"{group}.format", scheme.get("format"), None, "pack-quantized")
    only("kv_cache_scheme", found.get("kv_cache_scheme"), None)
    only("sparsity_config.format", (found.get("sparsity_config") or {}).get("format", "dense"), "dense")
    for each in ("moe_sparsity_config", "transform_config"):
        only(each, found.get(each) or None, None)
    only(f"{group}.targets", scheme.get("targets"), ["Linear"])
    for each in ("input_activations", "output_activations"):
        only(f"{group}.{each}", scheme.get(each), None)
    only(f"{group}.weights.num_bits", weights.get("num_bits"), 4)
    only(f"{group}.weights.type", weights.get("type"), "int")
    only(f"{group}.weights.dynamic", weights.get("dynamic", False), False)
    only(f"{group}.weights.strategy", strategy := weights.get("strategy"), "group", "channel")
    orders = ("group", "dynamic", True), ("weight", "static", None, False)  # with weight_g_idx, without
    only(f"{group}.weights.actorder", order := weights.get("actorder"), *orders[0], *orders[1])
    return {
        "group_size": weights.get("group_size") if strategy == "group" else -1,
        "symmetric": weights.get("symmetric", True),
        "modules_to_not_convert": [_pattern(entry) for entry in found.get("ignore") or []],
        "checkpoint": COMPRESSED,
        "desc_act": order in orders[0],
        "head": True,  # unless it is ignored by name
    }


def _pattern(entry: str) -> str:
    """An entry of `ignore` for modules_to_not_convert: a whole name, or after "re:" a pattern of how names begin."""
    pattern = f"(?:{entry[3:]}).*" if entry.startswith("re:") else f"{re.escape(entry)}$"
    try:
        re.compile(f"(?:{pattern})")
    except re.error as error:
        raise ValueError(f"load_w4: ignore of the checkpoint: expected patterns, got {entry!r} ({error})") from None
    return pattern


def register() -> None:
    """Register the quantizer with transformers, once. Nothing uses it before a config names it."""
    global _is_registered
    with _lock:
        if not _is_registered:
            register_quantization_config(METHOD)(W4Config)
            register_quantizer(METHOD)(Quantizer)
            _is_registered = True
