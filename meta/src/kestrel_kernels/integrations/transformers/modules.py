"""Forward functions of the modules that `apply` changes. Each falls back to the module's own where gradients flow."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kestrel_moe import fused_experts, gelu_and_mul, gemv, silu_and_mul, topk_softmax
from kestrel_norm import fused_add_rms_norm, rms_norm
from kestrel_rope import rotary_embedding

from . import few_tokens, w4
from .cache import HeadNorms, KestrelCache, KestrelLayer
from .few_tokens import activation
from .masks import NAME, Mask, wants_weights
from .prompts import DTYPES, Scores

_local = threading.local()


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Within, layers may change the residual stream in place and leave its last addition to the next norm.

    For callers that own every hidden state, and whose layers are all changed and without hooks.
    """
    before, _local.in_place = getattr(_local, "in_place", False), True
    try:
        yield
    finally:
        _local.in_place = before


@contextlib.contextmanager
def tabulated(tables: dict[Any, tuple[Tensor, Tensor]], length: int) -> Iterator[None]:
    """Within, rotary embeddings of positions below `length` are rows of tables, which are made at their first use."""
    before, _local.tables = getattr(_local, "tables", None), (tables, length)
    try:
        yield
    finally:
        _local.tables = before


def _keeps_its_own(module: Any, x: Tensor) -> bool:
    """Whether a module runs as transformers wrote it: gradients flow, or no op here takes the dtype of x."""
    if x.dtype not in DTYPES:
        return True
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def project(linear: Any, x: Tensor) -> Tensor:
    """A linear layer: for one token on a GPU by `gemv`, else as the module does it."""
    if not is_plain(linear):
        return _tensor(linear(x))
    return (gemv if is_one_row(x) else nn.functional.linear)(x, linear.weight, linear.bias)


def is_one_row(x: Tensor) -> bool:
    """Whether `gemv` has a kernel for a product with x."""
    return x.is_cuda and x.numel() == x.shape[-1] and x.is_contiguous()


def is_plain(linear: Any) -> bool:
    """Whether this is torch's own linear layer with one ordinary weight, without hooks."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__:
        return False
    return has_plain_weight(linear) and not (linear._forward_hooks or linear._forward_pre_hooks)


def has_plain_weight(linear: Any) -> bool:
    """Whether the weight is an ordinary one, no tensor of a subclass."""
    weight = linear._parameters.get("weight")  # attributes of modules take longer
    return type(weight) is nn.Parameter and not weight.is_meta


class Fused:
    """Several linear layers of one input as one: their parameters become rows of one tensor and stay parameters.

    A parameter that was moved or replaced since (``model.to``) is copied anew at the next call.
    """

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner = owner
        self.names = names
        self.linears = [getattr(owner, name) for name in names]
        self._fuse()

    def holds(self) -> bool:
        """Whether the owner still has these layers, and nothing watches or wraps them."""
        held, pairs = self.owner._modules, zip(self.names, self.linears, strict=True)
        return all(held.get(name) is linear and is_plain(linear) for name, linear in pairs)

    @staticmethod
    def refusal(linears: Sequence[Any]) -> str | None:
        """Why these cannot be fused, or None."""
        if not all(is_plain(linear) for linear in linears):
            return "not plain torch.nn.Linear"
        first = linears[0]
        if any(x.weight.dtype != first.weight.dtype or x.weight.device != first.weight.device for x in linears):
            return "weights of several dtypes or devices"
        if len({x.bias is None for x in linears}) > 1:
            return "only some have a bias"
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the joined tensors: a copy of the model joins its own parameters at its first call."""
        return {**vars(self), "weight": None, "bias": None}

    def _fuse(self) -> None:
        weights, biases = self._parameters()
        with torch.inference_mode(False), torch.no_grad():  # all memory first: a failure changes nothing
            self.weight = torch.cat([p.data for p in weights])
            self.bias = torch.cat([p.data for p in biases]) if biases else None
        for parameters, joined in ((weights, self.weight), (biases, self.bias)):
            if joined is not None:
                for p, rows in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
                    p.data = rows

    def _parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        weights, biases = ([linear._parameters[name] for linear in self.linears] for name in ("weight", "bias"))
        return weights, [bias for bias in biases if bias is not None]

    def _is_current(self) -> bool:
        weights, biases = self._parameters()
        return _are_rows(weights, self.weight) and _are_rows(biases, self.bias)

    def refresh(self) -> None:
        """Follow what was done to the layers since."""
        if not self._is_current():
            self._fuse()

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # where memory lies cannot be traced
            return torch.cat([linear(x) for linear in self.linears], -1)
        self.refresh()
        if is_one_row(x):
            return gemv(x, self.weight, self.bias)
        return nn.functional.linear(x, self.weight, self.bias)

    def split(self) -> None:
        """Give every parameter memory of its own."""
        for linear in self.linears:
            linear.weight.data = linear.weight.data.clone()
            if linear.bias is not None:
                linear.bias.data = linear.bias.data.clone()


def _are_rows(parameters: Sequence[nn.Parameter], joined: Tensor | None) -> bool:
    """Whether these are the rows of the joined tensor, in its memory; none at all have no tensor."""
    if joined is None or not parameters:
        return joined is None and not parameters
    start = joined.data_ptr()
    for p in parameters:
        if p.data_ptr() != start or p.dtype != joined.dtype:
            return False
        start += p.numel() * p.element_size()
    return start == joined.data_ptr() + joined.numel() * joined.element_size()


class Changed:
    """The forward function of a module that `apply` changed."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward function of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)


class Norm(Changed):
    """RMSNorm. weight_bias 1 is Gemma's form."""

    def __init__(self, module: Any, weight_bias: float) -> None:
        super().__init__(module)
        self.weight_bias = weight_bias
        self.eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps

    def __call__(self, hidden_states: Tensor) -> Tensor:
        residual = getattr(hidden_states, "_kestrel_residual", None)
        if residual is not None:
            del hidden_states._kestrel_residual  # type: ignore[attr-defined]
            return self.add(hidden_states, residual)
        weight = self.module.weight
        is_taken = weight.dtype == hidden_states.dtype and 2 <= hidden_states.ndim <= 4
        if not is_taken or _keeps_its_own(self.module, hidden_states):
            return _tensor(self.original(hidden_states))
        if hidden_states.stride(-1) != 1:
            hidden_states = hidden_states.contiguous()
        return rms_norm(hidden_states, weight, self.eps, weight_bias=self.weight_bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, in place; returns the norm of the sum, in x's memory."""
        fused_add_rms_norm(x, residual, self.module.weight, self.eps, weight_bias=self.weight_bias)
        return x


class MLP(Changed):
    """down(act(gate(x)) * up(x)), gate and up in one product. gate_up None: the module has one layer for both."""

    def __init__(self, module: Any, gate_up: Fused | w4.Fused | None, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self.gate_up = gate_up
        self.act = act

    def __call__(self, x: Tensor) -> Tensor:
        if _keeps_its_own(self.module, x) or (self.gate_up is not None and not self.gate_up.holds()):
            return _tensor(self.original(x))
        gate_up = project(self.module.gate_up_proj, x) if self.gate_up is None else self.gate_up(x)
        return project(self.module.down_proj, self.act(gate_up))

    def takes_residual(self, residual: Tensor, norm: Norm) -> bool:
        """Whether `add_to` is for this step."""
        up, down = self.gate_up or self.module.gate_up_proj, self.module.down_proj
        return (
            not (is_watched(self.module) or _keeps_its_own(self.module, residual))
            and all(map(is_product, (up, down)))
            and few_tokens.takes(up, residual, norm=norm, gated=True)
            and few_tokens.takes(down, residual)
        )

    def add_to(self, residual: Tensor, norm: Norm) -> None:
        """residual += the layer of norm(residual)."""
        up = self.gate_up or self.module.gate_up_proj
        few_tokens.add_product(
            self.module.down_proj, few_tokens.product_of_norm(up, residual, norm, self.act), residual
        )


class Head(Changed):
    """The language head, of 16 or 4 bits: for one token by the kernels of a decode step."""

    def __call__(self, x: Tensor) -> Tensor:
        if _keeps_its_own(self.module, x) or not is_one_row(x):
            return _tensor(self.original(x))
        if isinstance(self.module, nn.Linear):
            if not has_plain_weight(self.module):
                return _tensor(self.original(x))
            return gemv(x, self.module.weight, self.module.bias)
        return few_tokens.product(self.module, x) if few_tokens.takes(self.module, x) else _tensor(self.original(x))


def is_product(layer: Any) -> bool:
    """Whether this is a plain linear layer, of 16 or 4 bits, or several that are fused and still hold."""
    if isinstance(layer, (Fused, w4.Fused)):
        return layer.holds()
    return is_plain(layer) or w4.is_w4(layer)


def is_watched(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def cache_names(function: Any) -> tuple[str, ...]:
    """What transformers calls the cache among this forward function's arguments: `cache` from 5.24 on.

    Before, an argument of that name is one of continuous batching, for the attention function.
    """
    return ("cache", "past_key_values")["cache" not in inspect.signature(function).parameters :]


class Attention(Changed):
    """Q, K and V in one product, rotation in place, then the attention function that the config names."""

    def __init__(self, module: Any, qkv: Fused | w4.Fused | None, options: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__(module)
        self.qkv = qkv
        self.options = options
        self.cache_names = cache_names(type(module).forward)
        self.eager = sys.modules[type(module).__module__].eager_attention_forward
        pairs = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
        self.norms = next((pair for pair in pairs if hasattr(module, pair[0])), None)
        self.out = "o_proj" if hasattr(module, "o_proj") else "dense"

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | Tabulated | None = None,
        attention_mask: Any = None,
        norm: Norm | None = None,
        **kwargs: Any,
    ) -> Any:
        """norm: hidden_states is the residual stream; this layer normalises it, and adds its result in place."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module = self.module
        is_changed = self.qkv is not None and not self.qkv.holds()
        if _keeps_its_own(module, hidden_states) or position_embeddings is None or module.training or is_changed:
            names = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            return self.original(hidden_states, **names, **kwargs)
        cache = self._cache_among(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in self.cache_names}
        options, turned = self.options(module), rotation(position_embeddings, hidden_states.shape[0])
        rows, size = hidden_states.shape[:-1], module.head_dim
        if norm is not None:
            qkv = few_tokens.product_of_norm(self.qkv or module.qkv_proj, hidden_states, norm)
        else:
            qkv = project(module.qkv_proj, hidden_states) if self.qkv is None else self.qkv(hidden_states)
        kv_heads = qkv.shape[-1] // size // (module.num_key_value_groups + 2)
        heads = qkv.view(*rows, -1, size).split([kv_heads * module.num_key_value_groups, kv_heads, kv_heads], dim=-2)
        query, key, value = heads
        layer = self._decoding_layer(cache, attention_mask, query)
        if wants_weights(module, kwargs):
            layer = None
        norms = None if layer is None else self._head_norms(query, turned[1])
        if self.norms is not None and norms is None:
            query, key = (getattr(module, name)(x) for name, x in zip(self.norms, (query, key), strict=True))
        if layer is not None:
            scores = Scores(module.scaling, options.get("sliding_window"), options.get("softcap"))
            out = layer.decode(query, key, value, turned, attention_mask, scores, norms).view(*rows, -1)
            if norm is not None:
                return few_tokens.add_product(getattr(module, self.out), out, hidden_states), None
            return project(getattr(module, self.out), out), None
        rotary_embedding(turned[0], query, key, size, turned[1])
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            more = {"kwargs": kwargs} if "cache" in self.cache_names else {}  # continuous batching's changes them
            key, value = cache.update(key, value, module.layer_idx, **more)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, self.eager)
        out, weights = attend(
            module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling, **options, **kwargs
        )
        return project(getattr(module, self.out), out.reshape(*rows, -1)), weights

    def takes_residual(self, residual: Tensor, norm: Norm, kwargs: dict[str, Any]) -> bool:
        """Whether a call with this norm is for this step: its products have kernels, and the cache rotates."""
        module, qkv = self.module, self.qkv or getattr(self.module, "qkv_proj", None)
        out = getattr(module, self.out)
        cache, mask = self._cache_among(kwargs), kwargs.get("attention_mask")
        return (
            not (is_watched(module) or module.training or _keeps_its_own(module, residual))
            and kwargs.get("position_embeddings") is not None
            and all(map(is_product, (qkv, out)))
            and few_tokens.takes(qkv, residual, norm=norm)
            and few_tokens.takes(out, residual)
            and self._decoding_layer(cache, mask, residual) is not None
            and not wants_weights(module, kwargs)
        )

    def _cache_among(self, arguments: dict[str, Any]) -> Any:
        return next((arguments[name] for name in self.cache_names if arguments.get(name) is not None), None)

    def _head_norms(self, query: Tensor, table: Tensor) -> HeadNorms | None:
        """The norms of query and key heads, where the rotation can apply them."""
        if self.norms is None:
            return None
        norms = [getattr(self.module, name).__dict__.get("forward") for name in self.norms]
        if not all(isinstance(norm, Norm) and not is_watched(norm.module) for norm in norms):
            return None
        first, second = norms
        like = (first.eps, first.weight_bias) == (second.eps, second.weight_bias)
        size = query.shape[-1]
        weights = first.module.weight, second.module.weight
        lanes = size * query.element_size() // 32  # of a head, each with two packs of 16 bytes
        # What rotary_and_cache has a kernel for; see its docstring.
        whole = table.shape[-1] == size and lanes in (1, 2, 4, 8, 16, 32)
        if not (like and whole and all(w.shape == (size,) and w.dtype == query.dtype for w in weights)):
            return None
        return HeadNorms(*weights, first.eps, first.weight_bias)

    def _decoding_layer(self, cache: Any, mask: Any, query: Tensor) -> KestrelLayer | None:
        """The cache's layer that takes one new token of each sequence before its rotation, if there is one."""
        module = self.module
        if query.shape[1] != 1 or not isinstance(cache, KestrelCache) or not (mask is None or isinstance(mask, Mask)):
            return None
        if module.config._attn_implementation != NAME or not module.is_causal:
            return None
        layer = cache.layers[module.layer_idx]
        return layer if isinstance(layer, KestrelLayer) and layer.rotates else None


@dataclasses.dataclass(frozen=True)
class Tabulated:
    """Cos and sin of positions [B, S] as rows of `table`, as `rotary_embedding` takes them.

    A module that unpacks it, as transformers' own do, gets cos and sin: the rows of `both` are looked up then.
    """

    positions: Tensor
    table: Tensor
    both: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        yield from nn.functional.embedding(self.positions, self.both).chunk(2, -1)

    def __getitem__(self, index: int) -> Tensor:
        return tuple(self)[index]


def rotation(embeddings: tuple[Tensor, Tensor] | Tabulated, batch: int) -> tuple[Tensor, Tensor]:
    """Positions [B, S] and a table for `rotary_embedding`, from those or from transformers' cos, sin [1 or B, S, R].

    What is made from the latter is kept at `cos`.
    """
    if isinstance(embeddings, Tabulated):
        return embeddings.positions, embeddings.table
    cos, sin = embeddings
    found = getattr(cos, "_kestrel_rotation", None)
    if found is None or found[0].shape[0] != batch:
        half = cos.shape[-1] // 2
        table = torch.cat([cos[..., :half], sin[..., :half]], -1).view(-1, 2 * half)
        positions = torch.arange(len(table), device=cos.device).view(cos.shape[:2]).expand(batch, -1)
        found = positions.contiguous(), table
        cos._kestrel_rotation = found  # type: ignore[attr-defined]
    return found


class Rotary(Changed):
    """Cos and sin of positions [B, S]; within `tabulated` rows of a table in place of a dozen kernels."""

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tabulated:
        kind = () if layer_type is None else (layer_type,)
        held = getattr(_local, "tables", None)
        if held is None:
            cos, sin = self.original(x, position_ids, *kind)
            return cos, sin
        tables, length = held
        key = (id(self.module), x.dtype, *kind)
        if key not in tables:
            cos, sin = (each[0] for each in self.original(x, torch.arange(length, device=x.device)[None], *kind))
            half = cos.shape[-1] // 2
            tables[key] = torch.cat([cos, sin], -1), torch.cat([cos[:, :half], sin[:, :half]], -1)
        both, table = tables[key]
        return Tabulated(position_ids.contiguous(), table, both)


class Layer(Changed):
    """A decoder layer. `sandwich`: Gemma's form, with a norm before and after attention and feed-forward."""

    def __init__(self, module: Any, *, sandwich: bool) -> None:
        super().__init__(module)
        self.sandwich = sandwich

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        if not getattr(_local, "in_place", False) or args:
            return _tensor(self.original(hidden_states, *args, **kwargs))
        residual = getattr(hidden_states, "_kestrel_residual", None)
        if residual is None:
            if self._takes_residual(hidden_states, kwargs):
                module.self_attn(hidden_states=hidden_states, norm=module.input_layernorm.forward, **kwargs)
                module.mlp.forward.add_to(hidden_states, module.post_attention_layernorm.forward)
                return hidden_states
            residual = hidden_states
        x = module.input_layernorm(hidden_states)
        x, _ = module.self_attn(hidden_states=x, **kwargs)
        if self.sandwich:
            x = module.post_attention_layernorm(x)
            norm = module.pre_feedforward_layernorm
        else:
            norm = module.post_attention_layernorm
        x = norm.forward.add(x, residual)
        x = module.mlp(x)
        if isinstance(x, tuple):
            x = x[0]
        if self.sandwich:
            x = module.post_feedforward_layernorm(x)
        x._kestrel_residual = residual  # the next norm adds it
        return _tensor(x)

    def _takes_residual(self, residual: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this is a step whose attention and feed-forward add to the residual stream themselves."""
        module = self.module
        attention, mlp = (child.__dict__.get("forward") for child in (module.self_attn, module.mlp))
        if self.sandwich or not few_tokens.serves(residual):
            return False
        if not (isinstance(attention, Attention) and isinstance(mlp, MLP)):
            return False
        norms = module.input_layernorm.forward, module.post_attention_layernorm.forward
        return attention.takes_residual(residual, norms[0], kwargs) and mlp.takes_residual(residual, norms[1])


class Router(Changed):
    """Router of a layer of experts: a linear layer, then softmax and top-k in one kernel.

    rounds: the module rounds its weights to the dtype of the logits. Weights and ids for the experts function of this
    library are float32 and int32, as it takes them.
    """

    def __init__(self, module: Any, config: Any, *, renormalize: bool, rounds: bool) -> None:
        super().__init__(module)
        self.config = config
        self.renormalize = renormalize
        self.rounds = rounds

    def __call__(self, hidden_states: Tensor) -> Any:
        module = self.module
        if _keeps_its_own(module, hidden_states):
            return self.original(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = gemv(x, module.weight) if is_one_row(x) else nn.functional.linear(x, module.weight)
        weights, ids, _ = topk_softmax(logits, module.top_k, renormalize=self.renormalize)
        if self.config._experts_implementation == NAME:
            return logits, weights, ids
        return logits, weights.to(logits.dtype) if self.rounds else weights, ids.long()


def experts_function(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function. hidden_states [T, h], top_k_index and top_k_weights [T, K]; returns [T, h]."""
    from transformers.integrations.moe import batched_mm_experts_forward

    gated = activation(self.config.hidden_act) if hasattr(self.config, "hidden_act") else None
    fits = self.has_gate and self.is_concatenated and not self.is_transposed and not self.has_bias
    if hidden_states.is_cuda:  # as kernels take them: the reference is slower than transformers' function
        fits = fits and hidden_states.element_size() == 2 and all(size % 16 == 0 for size in self.down_proj.shape[1:])
    keeps = _keeps_its_own(self, hidden_states) or top_k_weights.requires_grad  # where a router alone is trained
    if not fits or gated not in (silu_and_mul, gelu_and_mul) or keeps:
        result: Tensor = batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return result
    return fused_experts(
        hidden_states,
        self.gate_up_proj,
        self.down_proj,
        top_k_weights.float(),
        top_k_index.int(),
        activation="silu_and_mul" if gated is silu_and_mul else "gelu_and_mul",
    )
