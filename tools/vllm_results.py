"""Runs vLLM on a GPU with one attention backend, and prints greedy tokens or tokens per second as JSON.

    python tools/vllm_results.py tokens --attention FLASH_ATTN > own.json
    python tools/vllm_results.py tokens --attention KESTREL --replace all > ours.json
    python tools/vllm_results.py compare own.json ours.json
    python tools/vllm_results.py speed --attention KESTREL --replace all --shapes 1x128 16x128 8x8000
    python tools/vllm_results.py profile --attention KESTREL --replace all --shapes 16x128

The model has the layers of Llama 3.1 8B with random weights: 4 of them from a checkpoint that the command writes for
tokens, all 32 for the rest. --mode graphs decodes in full CUDA graphs and runs prompts eagerly, --mode compiled is
vLLM's default (torch.compile, graphs of pieces for prompts). It needs vLLM 0.33.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LENGTHS = ((5, 100, 33, 700, 1, 3000), (77,), tuple(range(20, 35)))
"""Of the prompts whose tokens are compared, by call."""
SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **SIZES}},
    "compiled": {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", **SIZES}},
}
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
FEW = 8  # tokens before those that are timed
TOKENS_OF_A_STEP = 8192  # of prompts; vLLM's default on this GPU is as large or larger
LINES = 30  # of a profile

Json = dict[str, Any]


def make_model(folder: Path, layers: int, *, weights: bool) -> None:
    """Write a configuration, and weights that lead to attention and logits of a realistic spread."""
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    if not weights:
        return
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int, std: float = 0.02, mean: float = 0.0) -> torch.Tensor:
        return (mean + std * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16).cpu()

    hidden, inner, vocabulary = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    queries, keys = (SHAPE[f"num_{name}_heads"] * SHAPE["head_dim"] for name in ("attention", "key_value"))
    tensors = {
        "model.embed_tokens.weight": random(vocabulary, hidden, std=1.0),
        "lm_head.weight": random(vocabulary, hidden, std=0.05),
        "model.norm.weight": random(hidden, std=0.1, mean=1.0),
    }
    shapes = {"self_attn.q": (queries, hidden), "self_attn.k": (keys, hidden), "self_attn.v": (keys, hidden)}
    shapes |= {"self_attn.o": (hidden, queries), "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden)}
    shapes |= {"mlp.down": (hidden, inner)}
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = random(hidden, std=0.1, mean=1.0)
        for name, shape in shapes.items():
            std = 0.03 if "attn" in name else 0.02
            tensors[f"model.layers.{layer}.{name}_proj.weight"] = random(*shape, std=std)
    save_file(tensors, folder / "model.safetensors")


def engine(folder: Path, options: argparse.Namespace, load_format: str) -> Any:
    os.environ.update(SETTINGS, KESTREL_VLLM=options.replace)
    from vllm import LLM

    tokens = max(length for _, length in options.shapes) + FEW + options.new
    return LLM(
        str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        attention_backend=options.attention,
        kv_cache_dtype=options.kv_cache,
        max_model_len=max(4096, tokens),
        max_num_batched_tokens=TOKENS_OF_A_STEP,
        max_num_seqs=16,
        kv_cache_memory_bytes=options.kv_bytes,
        seed=0,
        **MODES[options.mode],
    )


def prompts(lengths: tuple[int, ...], seed: int = 7) -> list[Json]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    of_length = (torch.randint(10, SHAPE["vocab_size"], (n,), generator=generator) for n in lengths)
    return [{"prompt_token_ids": ids.tolist()} for ids in of_length]


def tokens(llm: Any, new: int = 32) -> list[Json]:
    """Greedy tokens of every prompt, their log-probabilities, and how far the best logit leads the second."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=2)
    done = [each.outputs[0] for lengths in LENGTHS for each in llm.generate(prompts(lengths), sampling, use_tqdm=False)]
    rows = []
    for out in done:
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in out.logprobs]
        given = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
        rows.append({"tokens": list(out.token_ids), "logprobs": given, "leads": [one - two for one, two, *_ in best]})
    return rows


def compare(own: list[Json], ours: list[Json]) -> Json:
    """Tokens up to the first that differs in each row, and how far the first row's best logit led there.

    >>> rows = [{"tokens": [4, 5, 6], "leads": [1.0, 0.1, 2.0]}]
    >>> compare(rows, [{"tokens": [4, 7, 6], "leads": [1.0, 0.1, 2.0]}])
    {'compared': 2, 'equal': 1, 'leads_where_apart': [0.1]}
    """
    compared, equal, leads = 0, 0, []
    for one, other in zip(own, ours, strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=True))
        same = next((at for at, (left, right) in enumerate(pairs) if left != right), len(pairs))
        equal, compared = equal + same, compared + min(same + 1, len(pairs))
        leads += one["leads"][same : same + 1]
    return {"compared": compared, "equal": equal, "leads_where_apart": sorted(leads, reverse=True)}


@contextlib.contextmanager
def in_turn(folder: Path | None, count: int) -> Iterator[None]:
    """Waits for `count` engines that share a folder to be ready, at most two minutes, then for this one's turn."""
    if folder is None:
        yield
        return
    folder.mkdir(exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    end = time.monotonic() + 120
    while len(list(folder.glob("*.ready"))) < count and time.monotonic() < end:
        time.sleep(0.1)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shape(text: str) -> tuple[int, int]:
    """Sequences and tokens of each prompt.

    >>> shape("16x128")
    (16, 128)
    """
    batch, length = text.split("x")
    return int(batch), int(length)


def speed(llm: Any, shapes: list[tuple[int, int]], new: int) -> list[Json]:
    """Tokens per second from the ninth on, and milliseconds to the first token of prompts that no cache holds."""
    from vllm import SamplingParams

    def seconds(asked: list[Json], count: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rows = []
    for batch, length in shapes:
        asked = prompts((length,) * batch)
        seconds(asked, FEW + new)
        first = [seconds(prompts((length,) * batch, seed=1000 * batch + at), 1) for at in range(3)]
        seconds(asked, FEW)
        times = [seconds(asked, FEW + new) - seconds(asked, FEW) for _ in range(3)]
        rate, first_ms = batch * new / statistics.median(times), 1e3 * statistics.median(first)
        rows.append({"prompt": length, "batch": batch, "tokens_per_second": rate, "first_ms": first_ms})
    return rows


def profiled(llm: Any, batch: int, length: int) -> Json:
    """Where the time to the first token goes: microseconds by kernel on the GPU, and by call on the host."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate(prompts((length,) * batch, seed=1), sampling, use_tqdm=False)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        llm.generate(prompts((length,) * batch, seed=2), sampling, use_tqdm=False)
    found: Json = {"batch": batch}
    for side, name in (("gpu", "self_device_time_total"), ("host", "self_cpu_time_total")):
        rows = sorted(traced.key_averages(), key=lambda each: -float(getattr(each, name)))
        found[f"{side}_us"] = round(sum(getattr(each, name) for each in rows))
        found[side] = [[each.key[:80], each.count, round(getattr(each, name))] for each in rows[:LINES]]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tokens", "speed", "profile"):
        command = commands.add_parser(name)
        command.add_argument("--attention", default="KESTREL", help="vLLM's name of the backend")
        command.add_argument("--replace", default="", help="value of KESTREL_VLLM")
        command.add_argument("--kv-cache", default="auto")
        command.add_argument("--mode", choices=MODES, default="graphs")
        command.add_argument(
            "--shapes", type=shape, nargs="+", default=[(1, 128), (16, 128)], help="sequences x prompt tokens"
        )
        command.add_argument("--new", type=int, default=256)
        command.add_argument("--layers", type=int, help="fewer than 4 for tokens, than 32 for the rest")
        command.add_argument("--kv-bytes", type=int, help="memory of the KV cache, instead of all that is free")
        command.add_argument("--turns", type=Path, help="a folder that engines share which start at the same time")
        command.add_argument("--engines", type=int, default=2, help="how many share it")
    command = commands.add_parser("compare")
    command.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args(arguments)
    if options.command == "compare":
        found: Any = compare(*(json.loads(path.read_text().splitlines()[-1]) for path in options.files))
    else:
        of_tokens = options.command == "tokens"
        with tempfile.TemporaryDirectory() as name:
            make_model(Path(name), options.layers or (4 if of_tokens else 32), weights=of_tokens)
            llm = engine(Path(name), options, "auto" if of_tokens else "dummy")
            if of_tokens:
                found = tokens(llm)
            else:
                with in_turn(options.turns, options.engines):
                    if options.command == "speed":
                        found = speed(llm, options.shapes, options.new)
                    else:
                        found = [profiled(llm, *each) for each in options.shapes]
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
