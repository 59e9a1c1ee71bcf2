"""Generation: a prefill, then decode steps as one CUDA graph with the sampler inside."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kestrel_runtime import UnsupportedError
from kestrel_sampling import sample_from_logits

from ...graphs import captured, replay
from ...host_copy import HostCopy
from .cache import KestrelCache
from .modules import cache_names, in_place, tabulated
from .patch import is_applied, modules_of, owns_residuals, reads_positions

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "penalty_alpha": (None,),
    "guidance_scale": (None, 1, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_model": (None,),
    "logits_processor": (None, []),
    "stop_strings": (None,),
    "max_time": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "token_healing": (None, False),
    "dola_layers": (None,),
    "return_dict_in_generate": (None, False),
}
"""Settings of transformers that have no counterpart here, with the values at which they do nothing."""

_TOP_K = 50
"""transformers' own default of top_k."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 takes the largest logit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Sampler:
    """Logits [B, V] to ids int32 [B], and bool [B], False for a row with NaN; all state is on the device.

    draw: int64 [1], the number of the draw, which the caller counts.
    """

    def __init__(self, sampling: Sampling, batch: int, vocabulary: int, draw: Tensor) -> None:
        device = draw.device
        self.sampling = sampling
        self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        self.draw = draw
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)

    def start(self, prompt: Tensor, mask: Tensor | None, seed: int) -> None:
        """prompt: int64 [B, S]; mask: bool [B, S], False for padding, which no penalty counts."""
        self.seeds.copy_(seed + torch.arange(len(prompt), device=prompt.device))
        if self.seen is not None:
            rows = torch.arange(len(prompt), device=prompt.device)[:, None].expand_as(prompt)
            real = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
            self.seen.zero_()
            self.seen[rows[real], prompt[real]] = True

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        given = self.sampling
        if self.seen is not None:
            logits, penalty = logits.float(), given.repetition_penalty
            logits = torch.where(self.seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        filters = (given.temperature, given.top_k, given.top_p, given.min_p)
        ids, valid = sample_from_logits(logits, *filters, seed=self.seeds, offset=self.draw, return_valid=True)
        if self.seen is not None:
            self.seen.scatter_(1, ids.long()[:, None], True)
        return ids, valid


class Decoding:
    """A batch of sequences that grow by one token per step. It keeps its CUDA graph when it starts anew.

    `ids`: int32 [B, 1], the newest token of each sequence, -1 where its logits held NaN; a step changes it in place.
    `tokens`: the same for the next step, 0 where its logits held NaN.
    `stops`: whether sequences may end: at a token of `eos`, or where the caller sets `done`.
    """

    EAGER_STEPS = 2
    """Steps before the capture: libraries and kernels set up state on first use."""

    def __init__(
        self,
        model: Any,
        cache: KestrelCache,
        batch: int,
        sampling: Sampling,
        *,
        eos: Sequence[int],
        pad: int,
        stops: bool,
        in_place: bool,
    ) -> None:
        self.model = model
        self._cache = weakref.ref(cache)  # which holds this object
        self.device = device = model.device
        self.cache_name = cache_names(type(model).forward)[0]
        self.pad = torch.tensor(pad, dtype=torch.int32, device=device)
        self.invalid = torch.tensor([[0], [-1]], dtype=torch.int32, device=device)  # tokens and ids of logits with NaN
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self.counters = torch.zeros(2 * batch + 1, dtype=torch.int64, device=device)  # all in one launch
        self.positions, self.slots, draw = self.counters[:batch, None], self.counters[batch:-1], self.counters[-1:]
        self.sampler = Sampler(sampling, batch, model.config.get_text_config().vocab_size, draw)
        self.eos = torch.tensor(list(eos), dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.chosen = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self.tokens, self.ids = self.chosen[..., None]
        self.stops = stops
        self.in_place = in_place
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capturable = device.type == "cuda" and not any(map(reads_positions, modules_of(model)))

    @property
    def cache(self) -> KestrelCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def start(self, input_ids: Tensor, attention_mask: Tensor | None, seed: int) -> None:
        """Reads the prompts [B, S] behind what the cache holds, and puts the first new tokens into `ids`."""
        if attention_mask is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(len(input_ids), -1)
        else:
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        self.done.zero_()
        self.counters.zero_()
        self.sampler.start(input_ids, attention_mask, seed)
        held = self.cache.get_seq_length()
        options = {"attention_mask": attention_mask, "logits_to_keep": 1}
        self._forward(input_ids[:, held:], positions[:, held:], **options)
        self.positions.add_(positions[:, -1:])
        self.slots.copy_(self.cache.next_slots())

    def _forward(self, ids: Tensor, positions: Tensor, **options: Any) -> None:
        """Puts the next token of each sequence into `ids`."""
        options |= {"position_ids": positions, self.cache_name: self.cache, "use_cache": True}
        owned = in_place() if self.in_place else contextlib.nullcontext()
        with owned, tabulated(self.tables, self.cache.max_tokens + 1):
            logits = self.model(input_ids=ids, **options).logits[:, -1]
        chosen, valid = self.sampler(logits)  # behind the head at once, so that their launches overlap
        if self.stops:
            chosen, valid = torch.where(self.done, self.pad, chosen), valid | self.done
            if self.eos.numel():
                self.done |= chosen == self.eos if self.eos.numel() == 1 else torch.isin(chosen, self.eos)
        torch.where(valid, chosen, self.invalid, out=self.chosen)
        self.cache.settle()
        self.counters.add_(1)

    def _step(self) -> None:
        self.cache.count(self.slots)
        self._forward(self.tokens, self.positions)

    def advance(self, *, graph: bool = True) -> None:
        """Puts the next token of each sequence into `ids`."""
        if graph and self.capturable and self.graph is None and self.steps >= self.EAGER_STEPS:
            self._capture()
        if graph and self.graph is not None:
            replay(self.graph, self.device)
            self.cache.skip(1)
        else:
            self._step()
        self.steps += 1

    def _capture(self) -> None:
        """Capture one step. Nothing runs, so what the host counted meanwhile is taken back."""
        before = self.cache.get_seq_length()
        collects = gc.isenabled()
        gc.disable()  # an older graph that is collected now would end the capture
        try:
            graph = captured(self._step, self.device, capture_error_mode="thread_local")
        except (UnsupportedError, RuntimeError) as error:
            self.capturable = False
            reason = str(error).splitlines()[0]
            warnings.warn(f"kestrel-kernels: decode steps run without a CUDA graph: {reason}", stacklevel=4)
        else:
            self.graph = graph
        finally:
            if collects:
                gc.enable()
        self.cache.rewind(before)


def decoding_of(
    model: Any, cache: KestrelCache, batch: int, sampling: Sampling, eos: list[int], pad: int, *, stops: bool
) -> Decoding:
    """The cache's last decoding if it was of the same model, weights in place, and settings; else a new one."""
    in_place = owns_residuals(model)
    held = [x for module in modules_of(model) for x in (*module._parameters.values(), *module._buffers.values())]
    weights = tuple([x.data_ptr() for x in held if x is not None])  # 4-bit weights are buffers
    key = (id(model), weights, in_place, batch, sampling, tuple(eos), pad, stops)
    if cache.decoding is None or cache.decoding[0] != key:
        with torch.inference_mode(False):  # so that later calls without it can change its tensors
            options: dict[str, Any] = {"eos": eos, "pad": pad, "stops": stops, "in_place": in_place}
            cache.decoding = key, Decoding(model, cache, batch, sampling, **options)
    found = cache.decoding[1]
    assert isinstance(found, Decoding)
    return found


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    stopping_criteria: Callable[[Tensor, Any], Any] | Iterable[Callable[[Tensor, Any], Any]] | None = None,
    kv_cache: str = "auto",
    page_size: int | None = None,
    past_key_values: KestrelCache | None = None,
    cuda_graph: bool = True,
    **settings: Any,
) -> Tensor:
    """Generate as ``model.generate`` does; on a GPU a decode step is one CUDA graph, the sampler included.

    model: a causal language model after :func:`apply`. input_ids: int64 [B, S]. attention_mask: [B, S], 0 for padding,
    which is on the left.
    max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, pad_token_id: as in
        transformers, by default the model's generation_config, then transformers' defaults: top_k is 50, and 0 turns it
        off. min_p drops before top-k and top-p. The penalty does not count padding.
    seed: sequence b draws with ``seed + b``, whatever the batch; by default from torch's generator.
    streamer: gets prompt and tokens on the CPU, as transformers calls it. stopping_criteria: callables of (ids, None).
    kv_cache, page_size: of the :class:`KestrelCache` that is made; or past_key_values, whose tokens come first in
        input_ids. A cache keeps the CUDA graph: after its reset(), a call with the same model, batch and settings
        needs no new one.
    cuda_graph: False runs every step eagerly.

    Returns ids int64 [B, S + new tokens]; behind its end-of-sequence token a row holds pad_token_id.
    The host reads a token while the device computes the next one, and reads nothing else.
    Raises ValueError for other settings of transformers that are in use (beams, processors, ...), padding on the right
    and too small a cache; TypeError for another cache and other wrong types; RuntimeError for logits with NaN.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kestrel_kernels.integrations.transformers import apply
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    >>> report = apply(model)
    >>> generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, eos_token_id=[]).shape
    torch.Size([1, 7])
    """
    config = _config_of(model)
    _check_settings(config, settings)
    attention_mask = _checked_prompts(input_ids, attention_mask)
    length = input_ids.shape[1]
    new = max_new_tokens if max_new_tokens is not None else getattr(config, "max_new_tokens", None)
    if new is None and getattr(config, "max_length", None):
        new = config.max_length - length
    new = 0 if new is None else _integer("max_new_tokens", new)
    if new < 1:
        raise ValueError(f"generate: max_new_tokens: expected a positive integer, got {new}")
    eos = _tokens(eos_token_id if eos_token_id is not None else config.eos_token_id)
    pads = (pad_token_id, config.pad_token_id, *eos, 0)
    pad = _integer("pad_token_id", next(token for token in pads if token is not None))
    if pad < 0 and eos and len(input_ids) > 1:
        raise ValueError(f"generate: pad_token_id: expected a token for rows that end early, got {pad}")
    sampling = _sampling(config, do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
    seed = int(torch.randint(2**62, ())) if seed is None and sampling.temperature else _integer("seed", seed or 0)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"generate: seed: expected an integer of 64 bits, got one of {seed.bit_length()}")
    cache = past_key_values
    if not (cache is None or isinstance(cache, KestrelCache)):
        raise TypeError(f"generate: past_key_values: expected a KestrelCache, got {type(cache).__name__}")
    if cache is None:
        cache = KestrelCache(
            model.config, kv_cache=kv_cache, page_size=page_size, max_batch=len(input_ids), max_tokens=length + new
        )
    elif cache.max_tokens < length + new - 1 or cache.get_seq_length() >= length:
        raise ValueError(
            f"generate: past_key_values: expected fewer than {length} tokens and room for {length + new - 1}, "
            f"got {cache.get_seq_length()} and {cache.max_tokens}"
        )
    criteria = stopping_criteria if isinstance(stopping_criteria, Iterable) else [stopping_criteria]
    criteria = [stop for stop in criteria if stop is not None]

    if streamer is not None:
        streamer.put(input_ids.cpu())
    decoding = decoding_of(model, cache, len(input_ids), sampling, eos, pad, stops=bool(eos or criteria))
    decoding.start(input_ids, attention_mask, seed)
    ends = torch.tensor(eos, dtype=torch.int64)
    finished = torch.zeros(len(input_ids), dtype=torch.bool)
    can_crop = past_key_values is None or cache.kv_cache != "int4"
    overlap = input_ids.is_cuda and can_crop and not criteria
    columns: list[Tensor] = []
    for count in range(1, new + 1):
        ids = HostCopy(decoding.ids)
        if overlap and count < new:
            decoding.advance(graph=cuda_graph)
        tokens = ids.wait()[:, 0].long()
        if int(tokens.min()) < 0:
            raise RuntimeError("generate: the model: expected finite logits, got NaN or infinity")
        columns.append(tokens)
        if streamer is not None:
            streamer.put(tokens)
        finished |= torch.isin(tokens, ends)
        if criteria:
            so_far = torch.cat([input_ids, torch.stack(columns, 1).to(input_ids.device)], 1)
            for stop in criteria:
                finished |= torch.as_tensor(stop(so_far, None)).cpu()
            decoding.done |= finished.to(input_ids.device)
        if bool(finished.all()):
            break
        if not overlap and count < new:
            decoding.advance(graph=cuda_graph)
    if streamer is not None:
        streamer.end()
    if past_key_values is not None:  # a step may have run ahead
        cache.crop(length + len(columns) - 1)
    return torch.cat([input_ids, torch.stack(columns, 1).to(input_ids.device)], 1)


def _config_of(model: Any) -> Any:
    """The generation_config of a model that can generate here."""
    if not is_applied(model):
        raise ValueError(
            "generate: model: expected one after apply(model, attention=True), got an unchanged one, "
            "or one with another attention implementation since"
        )
    config = getattr(model, "generation_config", None)
    if config is None:
        raise ValueError(f"generate: model: expected a model with a language head, got {type(model).__name__}")
    return config


def _checked_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The mask as bool, after checks of both."""
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not (isinstance(given, Tensor) or (given is None and name == "attention_mask")):
            raise TypeError(f"generate: {name}: expected a tensor, got {type(given).__name__}")
    if input_ids.ndim != 2 or input_ids.dtype != torch.int64 or input_ids.numel() == 0:
        raise ValueError(
            f"generate: input_ids: expected int64 [B, S], not empty, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: attention_mask: expected shape {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}"
        )
    valid = attention_mask.bool()
    if not bool(valid[:, -1].all()):
        raise ValueError("generate: attention_mask: expected padding on the left, got padding in the last column")
    return valid


def _integer(name: str, value: Any) -> int:
    """The value of any integer type: Python's, numpy's, or a tensor of one element."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"generate: {name}: expected an integer, got {type(value).__name__}") from None


def _tokens(eos: int | Iterable[int] | Tensor | None) -> list[int]:
    if eos is None:
        return []
    if isinstance(eos, Tensor):
        eos = eos.flatten().tolist()
    return [_integer("eos_token_id", token) for token in (eos if isinstance(eos, Iterable) else [eos])]


def _check_settings(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name not in _NEUTRAL:
            raise TypeError(f"generate: expected an argument that the docstring names, got {name}")
        if value not in _NEUTRAL[name]:
            raise ValueError(
                f"generate: {name}: expected {_NEUTRAL[name][-1]} (there is no kernel for it), got {value}"
            )
    for name, neutral in _NEUTRAL.items():
        if name not in settings and getattr(config, name, None) not in neutral:
            raise ValueError(
                f"generate: {name} of the model's generation_config: expected {neutral[-1]} (it has no counterpart; "
                f"pass {name}={neutral[-1]} to ignore it), got {getattr(config, name)}"
            )


def _sampling(
    config: Any,
    do_sample: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> Sampling:
    def value(given: Any, name: str, default: Any) -> Any:
        for found in (given, getattr(config, name, None)):
            if found is not None:
                return found
        return default

    penalty = value(repetition_penalty, "repetition_penalty", 1.0)
    if not penalty > 0:
        raise ValueError(f"generate: repetition_penalty: expected a positive number, got {penalty}")
    if not value(do_sample, "do_sample", False):
        return Sampling(repetition_penalty=float(penalty))
    heat = value(temperature, "temperature", 1.0)
    if not heat > 0:
        raise ValueError(f"generate: temperature: expected a positive number (or do_sample=False), got {heat}")
    return Sampling(
        temperature=float(heat),
        top_k=int(value(top_k, "top_k", _TOP_K)),
        top_p=float(value(top_p, "top_p", 1.0)),
        min_p=float(value(min_p, "min_p", 0.0)),
        repetition_penalty=float(penalty),
    )
