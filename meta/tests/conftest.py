"""What the tests of the demo share: the plain torch model, held-out text, and decoders of every kind."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kestrel_runtime.testing import pytest_collection_modifyitems, pytest_configure  # noqa: F401

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CPU = torch.device("cpu")
sys.path.append(str(Path(__file__).parent))  # logit_bounds, which tests import by name


def _tool(name: str) -> ModuleType:
    """A module of tools/, which no wheel holds."""
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="session")
def plain_model() -> ModuleType:
    return _tool("plain_model")


@pytest.fixture(scope="session")
def train_tiny() -> ModuleType:
    return _tool("train_tiny")


@pytest.fixture(scope="session")
def model_results() -> ModuleType:
    return _tool("model_results")


@pytest.fixture(scope="session")
def model_tables() -> ModuleType:
    return _tool("model_tables")


@pytest.fixture(scope="session")
def vllm_results() -> ModuleType:
    return _tool("vllm_results")


@pytest.fixture(scope="session")
def plain(plain_model):
    """The plain torch module with the trained weights, float32 on the CPU."""
    from kestrel_kernels.demo.weights import TINY_FILE

    return plain_model.from_checkpoint(torch.load(TINY_FILE, weights_only=True))


@pytest.fixture(scope="session")
def held_out(train_tiny) -> Tensor:
    """The standard-library modules that training never saw, as bytes [N] int64."""
    data = torch.frombuffer(bytearray(train_tiny.corpus(held=True)), dtype=torch.uint8).long()
    assert len(data) > 100_000
    return data


@pytest.fixture(scope="session")
def windows(held_out) -> Tensor:
    """Eight windows of held-out text, [8, 385], spread over the modules."""
    starts = torch.linspace(0, len(held_out) - 385, 8).long()
    return held_out[starts[:, None] + torch.arange(385)]


@pytest.fixture(scope="session")
def decoder() -> Callable[..., object]:
    """Makes a decoder with the trained weights; `order_seed` shuffles the pages it is given."""
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.model import Decoder
    from kestrel_kernels.demo.stores import STORES
    from kestrel_kernels.demo.weights import TINY_FILE, load, with_4_bit_layers

    def make(
        dtype: torch.dtype = torch.float32,
        *,
        tokens: int = 1024,
        kv_cache: str = "auto",
        fp8_experts: bool = False,
        w4_layers: bool = False,
        order_seed: int | None = None,
        device: torch.device = CPU,
    ) -> Decoder:
        weights = load(TINY_FILE, dtype, device, fp8_experts=fp8_experts)
        if w4_layers:
            weights = with_4_bit_layers(weights)
        order = list(range(-(-tokens // STORES[kv_cache].page)))
        if order_seed is not None:
            random.Random(order_seed).shuffle(order)
        cache = PagedCache(weights, tokens, kind=kv_cache, sequences=8, order=order)
        return Decoder(weights, cache)

    return make


@pytest.fixture(scope="session")
def prefill() -> Callable[..., Tensor]:
    """Logits [T, V] of whole sequences, packed, in one pass, or in chunks of so many tokens."""
    from kestrel_kernels.demo.model import Step

    def run(model, sequences: Sequence[Sequence[int]], chunk: int | None = None) -> Tensor:
        table = model.cache.reserve([len(sequence) for sequence in sequences])
        device = model.weights.device
        try:
            if chunk is None:
                tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
                return model(tokens, Step.prefill(table, [len(sequence) for sequence in sequences]))
            [sequence] = sequences
            parts = []
            for start in range(0, len(sequence), chunk):
                part = torch.tensor(sequence[start : start + chunk], device=device)
                if len(part) == 1:
                    step = Step.decode(table, torch.tensor([start], device=device))
                else:
                    step = Step.prefill(table, [len(part)], [start])
                parts.append(model(part, step))
            return torch.cat(parts)
        finally:
            table.release()

    return run


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "ministral": {
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite": {
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "pad_token_id": 0,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "phi": {"qk_layernorm": True},
    "phi3": {"pad_token_id": 0},
}
"""Model families that integrations.transformers knows, with the settings of a tiny one."""


@pytest.fixture(scope="session")
def tiny_transformer() -> Callable[..., torch.nn.Module]:
    """Makes a random model of transformers: 2 layers of 4 heads, 2 KV heads, 64 tokens. Its logits are of order 1."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()

    def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> torch.nn.Module:
        settings = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
            "attn_implementation": "eager",
        }
        config = AutoConfig.for_model(family, **{**settings, **FAMILIES.get(family, {}), **changes})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():  # larger weights, so that attention is far from uniform
            parameter.data = parameter * 3 if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter)
        model.generation_config.pad_token_id = 0
        return model

    return make


@pytest.fixture(scope="session")
def applied(tiny_transformer) -> Callable[..., torch.nn.Module]:
    """Makes a tiny model that runs on this library's ops."""
    from kestrel_kernels.integrations import transformers as integration

    def make(family: str = "llama", **changes: object) -> torch.nn.Module:
        model = tiny_transformer(family, **changes)
        integration.apply(model)
        return model

    return make


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def nibbles(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Words of eight neighbours of the last dimension, lowest nibble first."""
    words = values.long().unflatten(-1, (-1, 8))[..., list(order)]
    packed = sum(words[..., i] << (4 * i) for i in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


@pytest.fixture(scope="session")
def w4_checkpoint() -> Callable[..., None]:
    """Writes a model with random 4-bit weights in groups of 32 columns, as GPTQ and AWQ checkpoints are stored."""
    from safetensors.torch import save_file

    group = 32

    def write(
        model: torch.nn.Module,
        folder: Path,
        method: str,
        *,
        order: str | None = None,
        symmetric: bool = False,
        **changes: object,
    ) -> None:
        """Write the model with random 4-bit weights, and put their values into it."""
        random = torch.Generator().manual_seed(3)
        tensors, linears = {}, {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"}
        for name, linear in linears.items():
            rows, columns = linear.weight.shape
            codes = torch.randint(16, (columns, rows), generator=random)
            zeros = torch.randint(1, 16, (columns // group, rows), generator=random)
            zeros = torch.full_like(zeros, 8) if symmetric else zeros
            scales = torch.rand(columns // group, rows, generator=random) / 16
            groups = torch.arange(columns) // group
            if order is not None:
                groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
            linear.weight.data = ((codes - zeros[groups]) * scales[groups]).t().contiguous()
            if method == "awq":
                tensors |= {f"{name}.qweight": nibbles(codes, AWQ_ORDER), f"{name}.qzeros": nibbles(zeros, AWQ_ORDER)}
            else:
                less = int(changes.get("checkpoint_format", "gptq") == "gptq")
                tensors[f"{name}.qweight"] = nibbles(codes.t()).t().contiguous()
                tensors |= {f"{name}.qzeros": nibbles(zeros - less), f"{name}.g_idx": groups.int()}
            tensors[f"{name}.scales"] = scales
        kept = {f"{name}.weight" for name in linears}
        tensors |= {name: x.contiguous() for name, x in model.state_dict().items() if name not in kept}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = model.config.to_dict()
        found = {"quant_method": method, "bits": 4, "group_size": group, "desc_act": order is not None, **changes}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": found}))

    return write
