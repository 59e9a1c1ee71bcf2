"""vLLM on the CPU with the backend KESTREL: greedy tokens of a checkpoint, or a recipe of ENGINES.md.

Run by test_integrations_vllm.py.

vLLM's wheel is built for CUDA, so four of its C++ functions for the CPU are stand-ins here, and the platform's only
backend is replaced by KESTREL.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
SECOND_RUNNER = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",  # its kernels run in Python
    "CUDA_VISIBLE_DEVICES": "",  # so that vLLM takes Triton without a driver
}


def stand_in() -> None:
    """The functions of vLLM's extension for CPUs that a rehearsal calls."""
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.define("compute_slot_mapping_kernel_impl(Tensor s, Tensor p, Tensor t, Tensor(a!) m, int size) -> ()")
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor")

    def slots(starts, positions, table, mapping, size):
        for row in range(len(starts) - 1):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            at = positions[tokens]
            mapping[tokens] = table[row, at // size].long() * size + at % size
        mapping[int(starts[-1]) :] = -1

    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    library.impl("compute_slot_mapping_kernel_impl", slots, "CPU")
    library.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
    library.impl("fused_gumbel_argmax", lambda logits, seeds: logits.argmax(-1), "CPU")  # in vLLM's warm-up alone
    stand_in.library = library
    torch.cpu._is_amx_tile_supported = lambda: False  # so that every processor runs the same products


def prepare(parts: str, compiled: bool = False, second_runner: bool = False) -> None:
    os.environ.update(SETTINGS, KESTREL_VLLM=parts, TORCHDYNAMO_DISABLE="0" if compiled else "1")
    if second_runner:
        os.environ.update(SECOND_RUNNER)
    stand_in()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kestrel_kernels.integrations import vllm as integration

    integration.register()
    integration.register()  # vLLM may load plugins several times
    register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum["KESTREL"].get_path())


def recipe(code: str) -> dict:
    prepare("all")
    from kestrel_runtime import trace

    names: dict = {}
    with trace() as counts:
        exec(compile(code, "ENGINES.md", "exec"), names)
    return {"tokens": names["tokens"], "ops": sorted(op for op, served in counts.items() if any(served.values()))}


def main(asked: dict) -> dict:
    if "recipe" in asked:
        return recipe(asked["recipe"])
    compiled = asked["compiled"]
    prepare(asked["parts"], compiled, asked["second_runner"])
    from vllm import LLM, SamplingParams

    from kestrel_runtime import trace

    llm = LLM(
        asked["model"],
        dtype=asked["dtype"],
        kv_cache_dtype=asked["kv_cache"],
        block_size=asked["block_size"],
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        enforce_eager=not compiled,
        enable_prefix_caching=True,
    )
    assert compiled == (llm.llm_engine.vllm_config.compilation_config.mode != 0)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False, logprobs=1, min_tokens=0
    )
    with trace() as counts:
        done = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling, use_tqdm=False)
    layers = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules()
    outputs = [each.outputs[0] for each in done]
    return {
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)] for each in outputs
        ],
        "ops": sorted(op for op, served in counts.items() if any(served.values())),
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "runner": type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__module__,
    }


if __name__ == "__main__":
    found = main(json.loads(sys.argv[1]))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)
