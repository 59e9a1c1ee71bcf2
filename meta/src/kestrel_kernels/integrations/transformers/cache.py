"""A KV cache for transformers whose pages attention reads in place."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kestrel_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from kestrel_kvcache import gather_cache, rotary_and_cache
from kestrel_runtime.paged_cache import INT4_PAGE

from .formats import FORMATS, Pages
from .masks import Mask
from .prompts import DTYPES, Packing, Scores, causal_attention, dense_attention, serves

_APPEND_QUERIES = 16
"""The most new tokens per sequence that decode kernels take; longer inputs are written, then attended to densely."""
# Decode kernels of twice the warps (num_splits=-1) are measured to be faster where all of these hold, for heads of 128:
_ONE_SPLIT_KEYS = 1024  # at most so many keys, which are one split in any case
_ONE_SPLIT_GROUP = 4  # so many query heads of each KV head
_FEW_KV_HEADS = 66  # at most so many KV heads in all sequences together
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass
class Step:
    """One forward pass, shared by all layers. B sequences, `count` new tokens each, `start` tokens before them.

    lengths: int32 [B], tokens stored before; where the only new token is padding, -1.
    valid: bool [B, count], False for padding; None if there is none.
    advance: tokens that each sequence gains.
    """

    start: int
    count: int
    lengths: Tensor
    valid: Tensor | None
    advance: Tensor | int
    slots: tuple[Tensor, Tensor] | None = None
    lengths_after: Tensor | None = None
    _packing: Packing | None = None

    @property
    def packing(self) -> Packing | None:
        """The tokens that are not padding; None if there is no padding. Reads the mask once."""
        if self._packing is None and self.valid is not None:
            self._packing = Packing.of(self.valid)
        return self._packing


class CountedStep(Step):
    """A pass whose tokens `lengths` holds already: those of the cache, which `lengths_after` is, too."""

    def take_back(self) -> None:
        self.lengths.sub_(1)


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of the heads of a query and a key before their rotation."""

    query: Tensor
    key: Tensor
    eps: float
    weight_bias: float

    def arguments(self) -> dict[str, Any]:
        """As rotary_and_cache takes them."""
        weights = {"query_norm": self.query, "key_norm": self.key}
        return {**weights, "norm_eps": self.eps, "norm_weight_bias": self.weight_bias}


class KestrelCache(Cache):
    """A paged KV cache for ``model.generate(..., past_key_values=cache)`` after :func:`apply`.

    config: the model's configuration.
    kv_cache: "auto" (the model's dtype), "fp8" (e4m3), "int8" or "int4" (KIVI).
    page_size: slots per page; by default 16, for "int4" 64, its only size.
    max_tokens: capacity of each sequence, prompt and padding included.
    max_batch: sequences that memory is reserved for; by default those of the first call. Beam search counts each beam.

    Padding, on either side of a prompt, takes no room in the pages. Windows of sliding layers count tokens, not
    padding; all tokens are kept. Sequences are reordered for beam search by copying pages. ``crop`` removes tokens
    behind all padding; "int4" does not give back a token of a full page. Memory is reserved at the first call.

    Raises ValueError for an unknown format, a page size or capacity out of range, and layers that are not attention.

    >>> from transformers import LlamaConfig
    >>> KestrelCache(LlamaConfig(num_hidden_layers=2), kv_cache="fp8", max_tokens=100).get_max_length()
    100
    """

    def __init__(
        self,
        config: Any,
        *,
        kv_cache: str = "auto",
        page_size: int | None = None,
        max_batch: int | None = None,
        max_tokens: int,
    ) -> None:
        if kv_cache not in FORMATS:
            raise ValueError(f"KestrelCache: kv_cache: expected one of {', '.join(FORMATS)}, got {kv_cache!r}")
        page = (INT4_PAGE if kv_cache == "int4" else 16) if page_size is None else page_size
        if kv_cache == "int4" and page != INT4_PAGE:
            raise ValueError(f"KestrelCache: page_size: expected {INT4_PAGE} for int4, got {page}")
        for name, value in (("page_size", page), ("max_tokens", max_tokens), ("max_batch", max_batch or 1)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"KestrelCache: {name}: expected a positive integer, got {value!r}")
        text = config.get_text_config(decoder=True)
        types = set(getattr(text, "layer_types", None) or _LAYER_TYPES[:1])
        if not types <= set(_LAYER_TYPES) or getattr(text, "num_kv_shared_layers", None):
            raise ValueError(f"KestrelCache: config: expected layers of {_LAYER_TYPES}, each with keys, got {types}")
        self._pages = [KestrelLayer(self, index) for index in range(text.num_hidden_layers)]
        super().__init__(layers=list(self._pages))
        self.kv_cache = kv_cache
        self.page_size = page
        self.max_tokens = max_tokens
        self.pages_per_sequence = -(-max_tokens // page)
        self._rows = max_batch
        self._batch: int | None = None
        self._padded_until = 0
        self._padding: Tensor | int = 0  # tokens of each sequence that were padding, without steps of one token
        self._step: Step | None = None
        self._lengths: Tensor | None = None
        self._table: Tensor | None = None
        self._numbers: Tensor | None = None
        self._first_slots: Tensor | None = None
        self.decoding: tuple[Any, Any] | None = None  # of generation.decoding_of

    def __deepcopy__(self, memo: dict[int, Any]) -> KestrelCache:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = None if name == "decoding" else copy.deepcopy(value, memo)
        for layer in twin._pages:
            layer.owner = weakref.ref(twin)
        return twin

    def bytes(self) -> int:
        """Memory of keys and values, with their scales."""
        return sum(layer.pages.bytes() for layer in self._pages if layer.pages is not None)

    def settle(self) -> None:
        """Count the tokens of the last forward pass. The next pass does this itself; a CUDA graph must contain it."""
        step, self._step = self._step, None
        if step is not None and not isinstance(step, CountedStep):
            assert self._lengths is not None
            self._lengths[: self._batch].add_(step.advance)
        elif step is not None and step.start == self.get_seq_length():  # a pass that failed before its first layer
            step.take_back()

    @property
    def lengths(self) -> Tensor:
        """Tokens stored of each sequence, int32 [B], without padding."""
        if self._lengths is None:
            raise ValueError("KestrelCache: lengths: expected a cache that has been used, got a new one")
        self.settle()
        return self._lengths[: self._batch]

    def skip(self, tokens: int) -> None:
        """Tell the host that replays of a CUDA graph added so many tokens to every sequence."""
        for layer in self._pages:
            layer.seen += tokens

    def rewind(self, seen: int) -> None:
        """Take back what the host counted since `seen` tokens, as in a pass that was captured and did not run."""
        self._step = None
        for layer in self._pages:
            layer.seen, layer.pending = seen, False

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self._step, self._batch, self._padded_until, self._padding = None, None, 0, 0
        if self._lengths is not None:
            self._lengths.zero_()
        for layer in self._pages:
            layer.seen, layer.pending = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every sequence (a positive number: keep so many)."""
        seen, tokens_to_remove = self.get_seq_length(), int(tokens_to_remove)
        removed = max(seen - tokens_to_remove, 0) if tokens_to_remove > 0 else min(-tokens_to_remove, seen)
        if removed == 0:
            return
        if seen - removed < self._padded_until:
            raise ValueError(
                f"KestrelCache: crop: expected at least {self._padded_until} tokens to stay, as padding lies before "
                f"them, got {seen - removed}"
            )
        if removed < seen and not bool((seen - self.lengths == self._padding).all()):
            raise ValueError(
                f"KestrelCache: crop: expected sequences without padding among the tokens of single steps, got {seen} "
                f"tokens with padding, of which {seen - removed} should stay"
            )
        if self.kv_cache == "int4" and seen > removed and bool((self.lengths % INT4_PAGE < removed).any()):
            raise ValueError(
                f"KestrelCache: crop: expected to remove tokens of unfinished pages of {INT4_PAGE}, as full ones "
                f"are quantised, got {removed} tokens"
            )
        self.lengths.sub_(removed).clamp_(min=0)
        for layer in self._pages:
            layer.seen -= removed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes a copy of sequence ``beam_idx[b]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._batch is not None:
            self.batch_select_indices(torch.arange(self._batch, device=self.lengths.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._batch is None:
            return
        assert self._lengths is not None
        self.settle()
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        indices = indices.to(self._lengths.device)
        batch, n = indices.numel(), self.pages_per_sequence
        if batch > self._lengths.numel():
            raise ValueError(
                f"KestrelCache: max_batch: expected at least {batch} sequences, got {self._lengths.numel()}"
            )
        self._lengths[:batch] = self._lengths[indices]
        if isinstance(self._padding, Tensor):
            self._padding = self._padding[indices]
        for layer in self._pages:
            if layer.pages is not None:
                for x in layer.pages.block_tensors:
                    rows = x.view(torch.uint8).view(-1, n, *x.shape[1:-1], x.shape[-1] * x.element_size())
                    rows[:batch] = rows[indices]
                for x in layer.pages.sequence_tensors:
                    x[:batch] = x[indices]
        self._batch = batch
        for layer in self._pages:
            layer.batch_size = batch

    def _begin(self, batch: int, device: torch.device) -> None:
        """Reserve what all layers share, for a first call."""
        if self._batch is None:
            if self._lengths is None:
                rows = self._rows = self._rows or batch
                n = self.pages_per_sequence
                with torch.inference_mode(False):  # so that calls with and without it can share the cache
                    self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
                    self._table = torch.arange(rows * n, dtype=torch.int32, device=device).view(rows, n)
                    self._numbers = torch.arange(rows, dtype=torch.int32, device=device)
                    self._first_slots = self._numbers.long() * (n * self.page_size)
            if batch > self._lengths.numel():
                raise ValueError(f"KestrelCache: max_batch: expected at least {batch}, got {self._lengths.numel()}")
            self._batch = batch
        elif batch != self._batch:
            raise ValueError(
                f"KestrelCache: batch: expected {self._batch} sequences as before (reset() starts anew), got {batch}"
            )

    def count(self, slots: Tensor) -> None:
        """Count a pass of one token of each sequence ahead of it, where layers take the lengths behind it alone.

        slots: int64 [B], those of the new tokens. None of them is padding.
        """
        if self._pages[0].rotates:
            after = self.lengths.add_(1)
            assert self._numbers is not None
            places = slots, self._numbers[: len(slots)]
            self._step = CountedStep(self.get_seq_length(), 1, after, None, 1, slots=places, lengths_after=after)

    def step(self, layer: KestrelLayer, count: int, mask: Mask | None) -> Step:
        """The forward pass that `layer` is part of: the last one, or a new one behind it."""
        step = self._step
        if isinstance(step, CountedStep) and mask is not None and mask.rows is not None:
            step = None
        if step is None or step.start != layer.seen or step.count != count:
            self.settle()
            step = self._step = self._new_step(layer.seen, count, mask)
        return step

    def _new_step(self, start: int, count: int, mask: Mask | None) -> Step:
        valid = None if mask is None or mask.rows is None else mask.rows[:, -count:]
        if valid is None:
            return Step(start, count, self.lengths, None, count)
        if count == 1:  # no synchronisation in decoding
            lengths = torch.where(valid[:, 0], self.lengths, -1)
            return Step(start, count, lengths, valid, valid[:, 0].to(torch.int32))
        if bool(valid.all()):
            return Step(start, count, self.lengths, None, count)
        stored = valid.sum(1, dtype=torch.int32)
        self._padded_until, self._padding = start + count, self._padding + count - stored
        return Step(start, count, self.lengths, valid, stored)

    def next_slots(self) -> Tensor:
        """The slot int64 [B] of the next token of each sequence."""
        lengths = self.lengths
        assert self._first_slots is not None
        return self._first_slots[: len(lengths)] + lengths

    def slots(self, step: Step) -> tuple[Tensor, Tensor]:
        """Slots [B * count] of a step's tokens, -1 for padding, and their sequences."""
        if step.slots is None:
            assert self._numbers is not None
            assert self._first_slots is not None
            batch = step.lengths.numel()
            numbers, slots = self._numbers[:batch], self._first_slots[:batch] + step.lengths
            if step.valid is not None:
                slots = torch.where(step.valid, slots[:, None] + step.valid.cumsum(1) - 1, -1).reshape(-1)
            elif step.count > 1:
                slots = (slots[:, None] + torch.arange(step.count, device=slots.device)).reshape(-1)
            step.slots = slots, numbers if step.count == 1 else numbers.repeat_interleave(step.count)
        return step.slots


class KestrelLayer(CacheLayerMixin):
    """The pages of one layer. `seen`: tokens so far, padding included, as transformers counts them."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, cache: KestrelCache, index: int) -> None:
        super().__init__()
        self.owner = weakref.ref(cache)  # no cycle: a cache that nobody uses gives its memory back at once
        self.index = index
        self.seen = 0
        self.pending = False
        self.pages: Pages | None = None

    @property
    def cache(self) -> KestrelCache:
        cache = self.owner()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"KestrelCache: values: expected the keys' shape {tuple(key_states.shape)}, "
                f"got {tuple(value_states.shape)}"
            )
        cache, (batch, heads, _, size) = self.cache, key_states.shape
        cache._begin(batch, key_states.device)
        self.batch_size = batch
        if self.pages is None:
            assert cache._lengths is not None
            rows = cache._lengths.numel()
            blocks, dtype, device = rows * cache.pages_per_sequence, key_states.dtype, key_states.device
            with torch.inference_mode(False):
                self.pages = FORMATS[cache.kv_cache](blocks, cache.page_size, heads, size, rows, dtype, device)
            self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values; the attention function finds this layer at the keys, writes and attends."""
        self._make_room(key_states, value_states)
        self.pending = True
        keys = key_states.detach()
        keys._kestrel_layer = self  # type: ignore[attr-defined]
        return keys, value_states

    def _make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check that new keys and values [B, Hk, q, D] fit; reserve memory at the first call."""
        if torch.compiler.is_compiling():
            raise RuntimeError("KestrelCache: expected eager execution, got torch.compile")
        if self.pending:
            raise RuntimeError(
                "KestrelCache: expected a model after apply(model, attention=True), got another attention function"
            )
        if self.index == 0:
            stopped = next((layer.index for layer in self.cache._pages if layer.seen != self.seen), None)
            if stopped is not None:
                raise RuntimeError(
                    f"KestrelCache: expected a last forward pass through all layers, got one that failed before layer "
                    f"{stopped} had its tokens (reset() starts anew)"
                )
        if key_states.dtype not in DTYPES:
            raise ValueError(f"KestrelCache: keys: expected bfloat16, float16 or float32, got {key_states.dtype}")
        if key_states.requires_grad or value_states.requires_grad:
            raise ValueError("KestrelCache: keys: expected torch.no_grad(), as there is no autograd, got gradients")
        count = self.seen + key_states.shape[2]
        if count > self.cache.max_tokens:
            raise ValueError(
                f"KestrelCache: max_tokens: expected at least {count} per sequence, got {self.cache.max_tokens}"
            )
        self.lazy_initialization(key_states, value_states)

    @property
    def rotates(self) -> bool:
        """Whether `decode` serves this format."""
        return self.cache.kv_cache in ("auto", "fp8")

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Mask | None,
        scores: Scores,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """One new token per sequence: normalise, rotate and store in one kernel, then attend.

        query [B, 1, H, D], key, value [B, 1, Hk, D]; query and key are rotated in place by positions [B, 1] and a table
        of `rotary_embedding`. Returns [B, 1, H, D].
        """
        self._make_room(key.transpose(1, 2), value.transpose(1, 2))
        cache, pages, (positions, table) = self.cache, self.pages, rotation
        assert pages is not None
        assert cache._table is not None
        step = cache.step(self, 1, mask)
        self.seen += 1
        slots, _ = cache.slots(step)
        if step.lengths_after is None:
            step.lengths_after = step.lengths + step.advance
        rows = positions.view(-1), query[:, 0], key[:, 0], value[:, 0]
        options: dict[str, Any] = {"kv_cache_dtype": pages.stored} | (norms.arguments() if norms else {})
        rotary_and_cache(*rows, query.shape[-1], table, pages.keys, pages.values, slots, **options)
        out = flash_attn_with_kvcache(
            query,
            pages.keys,
            pages.values,
            cache_seqlens=step.lengths_after,
            block_table=cache._table[: len(query)],
            num_splits=-1 if self._gains_by_warps(query, key) else 0,
            **scores.arguments(),
        )
        assert isinstance(out, Tensor)
        return out

    def _gains_by_warps(self, query: Tensor, key: Tensor) -> bool:
        """Whether kernels of twice the warps are faster for query [B, 1, H, D] and key [B, 1, Hk, D]."""
        batch, kv_heads = len(query), key.shape[2]
        is_measured = query.shape[3] == 128 and query.shape[2] == _ONE_SPLIT_GROUP * kv_heads
        return is_measured and batch * kv_heads <= _FEW_KV_HEADS and self.cache.max_tokens <= _ONE_SPLIT_KEYS

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scores: Scores) -> Tensor:
        """Store the new keys and values [B, Hk, q, D], attend with query [B, H, q, D]; returns [B, q, H, D]."""
        cache, pages = self.cache, self.pages
        assert pages is not None
        assert cache._table is not None
        assert cache._numbers is not None
        self.pending = False
        batch, _, count, _ = query.shape
        if self.seen > 0 and count > 1 and mask is not None and not mask.is_causal:
            raise ValueError("KestrelCache: attention_mask: expected causality after a context, got another pattern")
        step = cache.step(self, count, mask)
        before = step.lengths - 1 if isinstance(step, CountedStep) else step.lengths
        self.seen += count
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if count == 1 or (step.start > 0 and step.valid is None and count <= _APPEND_QUERIES):
            out = flash_attn_with_kvcache(
                q,
                pages.keys,
                pages.values,
                k,
                v,
                cache_seqlens=before,
                block_table=cache._table[:batch],
                **scores.arguments(),
                **pages.reading(cache._numbers[:batch]),
            )
            assert isinstance(out, Tensor)
            return out
        slots, sequences = cache.slots(step)
        pages.write(k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), slots, sequences)
        if step.start > 0:
            return self._after_context(q, step, scores)
        if serves(query, key, value) and (mask is None or mask.is_causal):
            return causal_attention(q, k, v, step.packing, scores)
        dense = None if mask is None else mask.dense()
        return dense_attention(query, key, value, dense, scores)

    def _after_context(self, query: Tensor, step: Step, scores: Scores) -> Tensor:
        """Many new tokens [B, q, H, D] after a context: over the pages where kernels read them, else gathered."""
        cache, pages = self.cache, self.pages
        assert pages is not None
        assert cache._table is not None
        batch = len(query)
        if not pages.prefills or not serves(query, pages.keys):
            return self._over_gathered(query, step, scores)
        if step.lengths_after is None:
            step.lengths_after = step.lengths + step.advance
        lengths, packing = step.lengths_after, step.packing
        if packing is None:
            out = flash_attn_with_kvcache(
                query,
                pages.keys,
                pages.values,
                cache_seqlens=lengths,
                block_table=cache._table[:batch],
                **scores.arguments(),
            )
            assert isinstance(out, Tensor)
            return out
        out = flash_attn_varlen_func(
            packing.pack(query),
            pages.keys,
            pages.values,
            packing.starts,
            None,
            packing.longest,
            cache.max_tokens,
            block_table=cache._table[:batch],
            seqused_k=lengths,
            **scores.arguments(),
        )
        assert isinstance(out, Tensor)
        return packing.unpack(out, query)

    def _over_gathered(self, query: Tensor, step: Step, scores: Scores) -> Tensor:
        """One sequence at a time, over its gathered keys. Reads the lengths."""
        cache, pages = self.cache, self.pages
        assert pages is not None
        assert cache._table is not None
        assert cache._numbers is not None
        out = torch.zeros_like(query)
        for b, before in enumerate(step.lengths.tolist()):
            rows = slice(None) if step.valid is None else step.valid[b]
            queries = query[b : b + 1, rows]
            new = queries.shape[1]
            if new == 0:
                continue
            reading = pages.reading(cache._numbers[b : b + 1])
            keys, values = gather_cache(
                pages.keys, pages.values, cache._table[b], before + new, dtype=query.dtype, **reading
            )
            keys, values = keys[None], values[None]
            if serves(queries, keys):
                out[b, rows] = causal_attention(queries, keys, values, None, scores)[0]
                continue
            place = torch.arange(before, before + new, device=query.device)[:, None]
            at = torch.arange(before + new, device=query.device)
            visible = at <= place
            if scores.window is not None:
                visible &= at > place - scores.window
            q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
            out[b, rows] = dense_attention(q, k, v, visible, scores)[0]
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.cache.max_tokens

    def reset(self) -> None:
        raise NotImplementedError("KestrelLayer: expected a call of its cache's reset()")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("KestrelLayer: expected a call of its cache's reorder_cache()")
