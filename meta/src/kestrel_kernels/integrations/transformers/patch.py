"""`apply` and `restore`: which modules of a transformers model run on these kernels."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from . import masks, w4
from .few_tokens import activation
from .modules import MLP, Attention, Fused, Head, Layer, Norm, Rotary, Router, experts_function, is_plain
from .prompts import DTYPES

TESTED = ((5, 17), (5, 24))
"""The first and the last release series of transformers that the tests ran with."""

_STATE = "_kestrel_applied"
_warned = False


class VersionWarning(UserWarning):
    """This version of transformers is outside the range that was tested."""


@dataclasses.dataclass
class Report:
    """What `apply` did. replaced: how many modules of each class; left: what stays as it was, with the reason."""

    replaced: dict[str, int]
    left: list[str]

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.replaced.items()) or "nothing"
        return f"kestrel-kernels: replaced {done}; left: {', '.join(self.left) or 'nothing'}"


def _no_options(module: Any) -> dict[str, Any]:
    return {}


def _window_of_config(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def _window_of_module(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _window_and_softcap(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family of transformers. Its classes are called `prefix` + RMSNorm, MLP, Attention, ...

    sandwich: a layer has norms before and after attention and feed-forward. scales: it multiplies what it adds.
    """

    prefix: str
    options: Callable[[Any], dict[str, Any]]
    weight_bias: float = 0.0
    sandwich: bool = False
    scales: bool = False


_FAMILIES = {
    "llama": Family("Llama", _no_options),
    "qwen2": Family("Qwen2", _window_of_module),
    "qwen3": Family("Qwen3", _window_of_module),
    "qwen3_moe": Family("Qwen3Moe", _window_of_module),
    "granite": Family("Granite", _no_options, scales=True),
    "ministral": Family("Ministral", _window_of_module),
    "mistral": Family("Mistral", _window_of_config),
    "mixtral": Family("Mixtral", _window_of_config),
    "phi": Family("Phi", _no_options),
    "phi3": Family("Phi3", _window_of_config),
    "gemma": Family("Gemma", _no_options, 1.0),
    "gemma2": Family("Gemma2", _window_and_softcap, 1.0, sandwich=True),
    "gemma3": Family("Gemma3", _window_of_module, 1.0, sandwich=True),
}


_ATTENTION = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cache", "kwargs"}
_ARGUMENTS = {
    "RMSNorm": {"x", "hidden_states"},
    "DecoderLayer": _ATTENTION | {"position_ids", "use_cache"},
    "MLP": {"x", "hidden_states"},
    "Attention": _ATTENTION,
    "TopKRouter": {"hidden_states"},
    "RotaryEmbedding": {"x", "position_ids", "layer_type"},
}
"""The arguments of the forward functions that are replaced, in all tested versions of transformers."""


def check_version() -> None:
    """Warn once if the installed transformers is outside the tested range."""
    global _warned
    import transformers

    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not TESTED[0] <= found <= TESTED[1] and not _warned:
        _warned = True
        first, last = (".".join(map(str, version)) for version in TESTED)
        warnings.warn(
            f"kestrel-kernels is tested with transformers {first} to {last}, found {transformers.__version__}",
            VersionWarning,
            stacklevel=3,
        )


class _Applied:
    """The changes to one model. Plain data, so that a deep copy of the model restores itself."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.modules: list[Any] = []
        self.fused: list[Fused | w4.Fused] = []
        self.settings: list[tuple[Any, str, Any]] = []
        self.replaced: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()

    def patch(self, module: Any, forward: Any) -> None:
        if "forward" in module.__dict__:
            self.left[f"{type(module).__name__} (its forward is replaced already)"] += 1
            return
        module.__dict__["forward"] = forward
        self.modules.append(module)
        self.replaced[type(module).__name__] += 1

    def fuse(self, fused: Fused | w4.Fused) -> Fused | w4.Fused:
        self.fused.append(fused)
        return fused

    def leave(self, module: Any, reason: str) -> None:
        self.left[f"{type(module).__name__} ({reason})"] += 1

    def set(self, config: Any, name: str) -> None:
        """Name this library in a property of a transformers config whose value is stored as `<name>_internal`."""
        stored = f"{name}_internal"
        self.settings.append((config, stored, getattr(config, stored)))
        setattr(config, stored, masks.NAME)

    def undo(self) -> None:
        for module in self.modules:
            module.__dict__.pop("forward", None)
        for fused in self.fused:
            fused.split()
        for config, name, value in reversed(self.settings):
            if getattr(config, name) == masks.NAME:  # else the caller, or another model's restore, set it since
                setattr(config, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickled model: the process that loads it needs the functions that its config names."""
        self.__dict__.update(state)
        register()

    def report(self) -> Report:
        return Report(dict(self.replaced), [f"{count} {reason}" for reason, count in self.left.items()])


def apply(
    model: Any,
    *,
    norms: bool = True,
    rotary: bool = True,
    mlp: bool = True,
    experts: bool = True,
    attention: bool = True,
) -> Report:
    """Run the parts of a transformers model on these kernels, through instances and public registries alone.

    Knows Llama, Qwen2 and 2.5, Qwen3, Qwen3-MoE, Mistral, Ministral, Mixtral, Gemma 1 to 3 (text), Granite, Phi (its
    attention) and Phi3. Other modules stay as they are, and the report names them.

    norms: RMSNorm, and its fusion with the addition before it.
    rotary: the attention modules: Q, K and V in one product, rotation in place.
    mlp: gate and up projection in one product, gated activation; the language head of one token.
    experts: routers, and the experts through transformers' ExpertsInterface.
    attention: the attention function "kestrel", which a :class:`KestrelCache` needs. Prompts run the prefill kernels.
        With other caches later tokens run scaled_dot_product_attention, and softcap is honoured.

    Fused projections keep their parameters, as rows of one tensor; memory use stays. Where gradients are needed, a
    module's own forward runs. Applying again replaces the earlier choice. Returns a :class:`Report`; print it.

    Raises TypeError if `model` is no transformers model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    >>> apply(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))).replaced["LlamaRMSNorm"]
    3
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"apply: model: expected a transformers model, got {type(model).__name__}")
    check_version()
    restore(model)
    applied = _Applied(model.config.get_text_config())
    try:
        _change(applied, model, norms=norms, rotary=rotary, mlp=mlp, experts=experts, attention=attention)
    except BaseException:
        applied.undo()
        raise
    model.__dict__[_STATE] = applied
    return applied.report()


def _change(
    applied: _Applied, model: Any, *, norms: bool, rotary: bool, mlp: bool, experts: bool, attention: bool
) -> None:
    chosen = {"RMSNorm": norms, "DecoderLayer": norms, "Attention": rotary, "MLP": mlp, "TopKRouter": experts}
    chosen["RotaryEmbedding"] = rotary
    for module in model.modules():
        family = _family(module)
        if family is None:
            if _is_of_interest(module):
                applied.leave(module, "unknown")
            elif norms and type(module) is nn.LayerNorm:
                applied.leave(module, "torch's own")
        elif chosen.get(part := type(module).__name__[len(family.prefix) :]):
            if reason := _refusal(module, part):
                applied.leave(module, reason)
            else:
                _PATCHES[part](applied, module, family)
    if mlp and _family(model) is not None:
        _patch_head(applied, model.get_output_embeddings())
    if attention:
        _set_function(applied, model, "Attention", "_attn_implementation", "attention function")
    if experts:
        _set_function(applied, model, "Experts", "_experts_implementation", "experts function")


def restore(model: Any) -> None:
    """Undo `apply`: every module, parameter and setting is as before. Does nothing to other models.

    An attention or experts implementation that was chosen since then stays.
    """
    applied = model.__dict__.pop(_STATE, None)
    if applied is not None:
        applied.undo()


def is_applied(model: Any) -> bool:
    """Whether `apply` changed this model and it still has the attention function that a KestrelCache needs."""
    applied = model.__dict__.get(_STATE)
    if applied is None or applied.replaced["attention function"] == 0:
        return False
    return bool(applied.config._attn_implementation == masks.NAME)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, each once; `model.modules()` takes ten times as long, as long as some layers of a forward pass."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def owns_residuals(model: Any) -> bool:
    """Whether a caller that keeps every hidden state to itself may run this model within `in_place`."""
    layers = [module for module in modules_of(model) if type(module).__name__.endswith("DecoderLayer")]
    decoder, dtype = model.get_decoder(), model.dtype
    norms = [child for layer in layers for name, child in layer.named_children() if name.endswith("layernorm")]
    norms.append(decoder.norm if hasattr(decoder, "norm") else decoder)
    whole = all(isinstance(layer.__dict__.get("forward"), Layer) for layer in layers) and all(
        isinstance(norm.__dict__.get("forward"), Norm) and norm.weight.dtype == dtype for norm in norms
    )
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in (*layers, *norms))
    return bool(layers) and whole and not watched and not model.training and dtype in DTYPES


def _family(module: Any) -> Family | None:
    path = type(module).__module__.split(".")
    if path[:2] != ["transformers", "models"] or path[2] not in _FAMILIES:
        return None
    family = _FAMILIES[path[2]]
    return family if type(module).__name__.startswith(family.prefix) else None


def _is_of_interest(module: Any) -> bool:
    """Whether a module of no known family, in transformers or elsewhere, is named as one that would be replaced."""
    kinds = ("Norm", "Attention", "MLP", "Experts", "Router")
    return type(module).__name__.endswith(kinds) and not type(module).__module__.startswith("torch.")


def _refusal(module: Any, part: str) -> str | None:
    """Why the forward function of a module's class is not the one that is known, or None."""
    forward = type(module).forward
    if forward.__module__ != type(module).__module__:
        return "its class has another forward"
    unknown = [name for name in inspect.signature(forward).parameters if name not in _ARGUMENTS[part] | {"self"}]
    return f"its forward takes {', '.join(unknown)}" if unknown else None


def _patch_norm(applied: _Applied, module: Any, family: Family) -> None:
    applied.patch(module, Norm(module, family.weight_bias))


def _patch_layer(applied: _Applied, module: Any, family: Family) -> None:
    # Phi's has one norm, for attention and feed-forward.
    if hasattr(module, "post_attention_layernorm") and not family.scales:
        applied.patch(module, Layer(module, sandwich=family.sandwich))


def _patch_mlp(applied: _Applied, module: Any, family: Family) -> None:
    if hasattr(module, "fc1"):
        applied.leave(module, "without a gate")
    elif (act := _activation_of(module)) is None:
        applied.leave(module, "activation without a gated form")
    elif hasattr(module, "gate_up_proj"):
        applied.patch(module, MLP(module, None, act))
    else:
        _patch_fused(applied, module, ["gate_proj", "up_proj"], lambda gate_up: MLP(module, gate_up, act))


def _activation_of(module: Any) -> Callable[..., Any] | None:
    """The gated form of an MLP's own activation: configs may name two, of which the module uses one."""
    from transformers.activations import ACT2FN

    own = module.act_fn if hasattr(module, "act_fn") else module.activation_fn
    names = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu")
    return next((activation(name) for name in names if type(own) is type(ACT2FN[name])), None)


def _patch_attention(applied: _Applied, module: Any, family: Family) -> None:
    if hasattr(module, "qkv_proj"):
        applied.patch(module, Attention(module, None, family.options))
    else:
        _patch_fused(
            applied, module, ["q_proj", "k_proj", "v_proj"], lambda qkv: Attention(module, qkv, family.options)
        )


def _patch_head(applied: _Applied, head: Any) -> None:
    """The language head of a model that has one; layers of other classes stay as they are."""
    if is_plain(head) or w4.is_w4(head):
        applied.patch(head, Head(head))


def _patch_rotary(applied: _Applied, module: Any, family: Family) -> None:
    if not reads_positions(module):
        applied.patch(module, Rotary(module))


def reads_positions(module: Any) -> bool:
    """Whether this is a rotary embedding that depends on the largest position, which transformers reads on the host."""
    kinds = module.__dict__.get("rope_type")
    return any(kind in ("dynamic", "longrope") for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _patch_fused(applied: _Applied, module: Any, names: list[str], make: Callable[[Fused | w4.Fused], Any]) -> None:
    linears = [getattr(module, name) for name in names]
    kind = w4.Fused if w4.is_w4(linears[0]) else Fused
    reason = kind.refusal(linears) or ("its forward is replaced already" if "forward" in module.__dict__ else None)
    if reason is not None:
        applied.leave(module, reason)
        return
    applied.patch(module, make(applied.fuse(kind(module, names))))


def _patch_router(applied: _Applied, module: Any, family: Family) -> None:
    renormalize = getattr(module, "norm_topk_prob", True)
    rounds = hasattr(module, "norm_topk_prob")
    applied.patch(module, Router(module, applied.config, renormalize=renormalize, rounds=rounds))


_PATCHES: dict[str, Callable[[_Applied, nn.Module, Family], None]] = {
    "RMSNorm": _patch_norm,
    "DecoderLayer": _patch_layer,
    "MLP": _patch_mlp,
    "Attention": _patch_attention,
    "TopKRouter": _patch_router,
    "RotaryEmbedding": _patch_rotary,
}


def _set_function(applied: _Applied, model: Any, part: str, setting: str, name: str) -> None:
    """Name this library's function in the configs of all known modules of a kind, unless the forward of one is not."""
    owners = [module for module in model.modules() if (family := _family(module)) and _is_part(module, family, part)]
    foreign = {id(module.config) for module in owners if part in _ARGUMENTS and _refusal(module, part)}
    configs = {id(module.config): module.config for module in owners if id(module.config) not in foreign}
    if not configs:
        return
    register()
    for config in configs.values():
        applied.set(config, setting)
    applied.replaced[name] += 1


def register() -> None:
    """Enter the attention, mask and experts functions into transformers' registries; nothing uses them by itself."""
    from transformers.integrations.moe import ExpertsInterface

    masks.register()
    ExpertsInterface.register(masks.NAME, experts_function)


def _is_part(module: Any, family: Family, part: str) -> bool:
    return type(module).__name__ == family.prefix + part
