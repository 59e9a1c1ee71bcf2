"""FP8 pages for continuous batching. transformers has no name to choose them by, so private names are used here."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor

from kestrel_kvcache import reshape_and_cache

from .batching import REPOSITORY

TESTED = (5, 17)
"""The release series of transformers whose private names these are: that of ``nox -s engines``, which tests them."""


def fp8_pages(model: Any, continuous_batching_config: Any, generation_config: Any = None) -> Any:
    """Make ``model.generate_batch`` keep keys and values as e4m3 of scale 1, in half the memory; returns its manager.

    model: after ``model.set_attn_implementation(paged_attention())``.
    continuous_batching_config: with num_blocks and max_batch_tokens. transformers checks that pages of FP8 and
        activations of the model's dtype fit into the free memory.
    generation_config: by default the model's. ``generate_batch`` uses these two until
        ``model.destroy_cached_continuous_batching_manager()``; a second call here destroys the manager of the first.
        Pages and CUDA graphs last from one ``generate_batch`` to the next with ``persistent_manager=True`` alone.

    Raises NotImplementedError for another transformers than 5.17, ValueError without num_blocks or max_batch_tokens or
    with another attention implementation, and ``generate_batch`` MemoryError for more pages than fit.

    >>> fp8_pages(model, ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=1024))  # doctest: +SKIP
    """
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) != TESTED:
        expected = ".".join(map(str, TESTED))
        raise NotImplementedError(
            f"fp8_pages: transformers: expected {expected}, whose private names are used, "
            f"found {transformers.__version__}"
        )
    for name in ("num_blocks", "max_batch_tokens"):
        if getattr(continuous_batching_config, name) is None:
            raise ValueError(f"fp8_pages: continuous_batching_config.{name}: expected a number, got None")
    _check_attention(model)
    config = model.generation_config if generation_config is None else generation_config
    if config.eos_token_id is None:
        config.eos_token_id = -1  # as transformers does: no token
    model.destroy_cached_continuous_batching_manager()
    manager = _manager()(model, generation_config=config, continuous_batching_config=continuous_batching_config)
    model._cached_continuous_batching_manager = manager
    return manager


def _check_attention(model: Any) -> None:
    """Other attention implementations would take the codes of e4m3 for keys and values."""
    expected, found = f"paged|{REPOSITORY}", model.config._attn_implementation
    if found != expected:
        raise ValueError(f"fp8_pages: model: expected the attention implementation {expected}, got {found}")


@functools.cache
def _manager() -> type[Any]:
    """transformers' manager, over a cache of FP8."""
    from transformers.generation.continuous_batching import cache, continuous_api

    class MemoryHandler(cache.PagedAttentionMemoryHandler):  # type: ignore[misc]
        """Memory of pages in one dtype and activations in another. transformers' has one dtype for both."""

        def __init__(self, *args: Any, activation_dtype: torch.dtype, group_types: list[str], **options: Any) -> None:
            super().__init__(*args, group_types=group_types, **options)  # type: ignore[call-arg]
            self.activation_dtype = activation_dtype
            # For one element that a prompt reads: its code; with a window, the mask and the counts of masked_scatter_.
            self.bytes_of_reading = self.cache_dtype.itemsize + (9 if "sliding_attention" in group_types else 0)

        @property
        def activation_peak(self) -> dict[str, tuple[int, ...]]:
            peaks = super().activation_peak  # type: ignore[misc]
            of_tokens, of_pages, *others = peaks["attention"]
            peaks["attention"] = (of_tokens, of_pages + self.page_size * self.bytes_of_reading, *others)  # type: ignore[attr-defined]
            return peaks  # type: ignore[no-any-return]

    class Fp8Cache(continuous_api.PagedAttentionCache):  # type: ignore[misc, name-defined]
        """Pages of e4m3. Decoding gives them to flash_attn_with_kvcache, which stores and reads them."""

        def __init__(self, *args: Any, dtype: torch.dtype, **options: Any) -> None:
            handler = functools.partial(MemoryHandler, activation_dtype=dtype)
            made = _with_names(continuous_api.PagedAttentionCache.__init__, PagedAttentionMemoryHandler=handler)  # type: ignore[attr-defined]
            made(self, *args, dtype=torch.float8_e4m3fn, **options)

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            read_index: list[Tensor],
            write_index: list[Tensor],
        ) -> tuple[Tensor, Tensor]:
            """Store keys and values [1, Hk, q, D] of prompts; returns all that they see, [tokens, Hk, D]."""
            group, index = self.layer_index_to_group_indices[layer_idx]
            slots, reading = write_index[group], read_index[group]
            new = [states.transpose(1, 2).squeeze(0) for states in (key_states, value_states)]
            caches = [pages[index] for pages in (self.key_cache, self.value_cache)]
            has_window = self.sliding_windows[layer_idx] != 1
            if not has_window:
                self._write(new, caches, slots)
            seen = new
            if reading.numel():
                seen = [x.view(torch.uint8).index_select(0, reading).view(x.dtype).to(new[0].dtype) for x in caches]
            if has_window:  # new tokens may take the places of tokens that they see
                if reading.numel():
                    is_new = (reading == self.sentinel_index)[:, None, None]
                    seen = [x.masked_scatter_(is_new, states) for x, states in zip(seen, new, strict=True)]
                self._write(new, caches, slots)
            return seen[0], seen[1]

        def _write(self, new: list[Tensor], caches: list[Tensor], slots: Tensor) -> None:
            keys, values = (x.view(-1, self.block_size, *x.shape[1:]) for x in caches)
            reshape_and_cache(new[0], new[1], keys, values, slots.long(), "fp8")

    class Manager(continuous_api.ContinuousBatchingManager):  # type: ignore[misc]
        _create_batch_processor = _with_names(
            continuous_api.ContinuousBatchingManager._create_batch_processor, PagedAttentionCache=Fp8Cache
        )
        is_destroyed = False

        def switch_to_cb_friendly_attn(self, model: Any) -> None:  # type: ignore[override]
            """transformers calls this before each use. Destroyed by the last one, the manager begins anew."""
            _check_attention(model)
            super().switch_to_cb_friendly_attn(model)
            if self.is_destroyed:
                self.is_destroyed = False
                continuous_api.ContinuousBatchingManager.__init__(
                    self, model, self.generation_config, self.continuous_batching_config
                )

        def destroy(self) -> None:
            super().destroy()
            self.batch_processor, self.is_destroyed = None, True

    return Manager


def _with_names(function: Any, **names: Any) -> Any:
    """A copy of a function that finds these objects under the names of its module; the module stays as it is."""
    plain = inspect.unwrap(function)
    return types.FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
