"""Continuous batching of transformers on these kernels: `paged_attention` names a local kernel for it."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = "kestrel/kestrel-flash2"
VARIABLE = "LOCAL_KERNELS"  # of the package kernels: names of repositories and folders that stand for them


def paged_attention() -> str:
    """The attention implementation for ``model.generate_batch``: our decode and prefill kernels over its pages.

    ``model.set_attn_implementation(paged_attention())``; :func:`apply` with attention=False may come before. The name
    is that of a hub kernel, which transformers takes for flash-attention 2: decoding reads pages by their block table
    and runs in CUDA graphs. No network is used: the variable LOCAL_KERNELS of this process gets the folder of this
    package. bf16 and fp16. Windows are those that transformers passes to flash-attention: not Mistral's.

    Raises ImportError without the package ``kernels`` in a version that the installed transformers takes.

    >>> paged_attention()  # doctest: +SKIP
    'paged|kestrel/kestrel-flash2'
    """
    from transformers.utils.import_utils import is_kernels_available

    if not is_kernels_available():
        raise ImportError(
            "paged_attention: expected the package kernels, in a version that the installed transformers takes"
        )
    folder = Path(__file__).with_name("flash2")
    given = [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]
    others = [each for each in given if not each.startswith(f"{REPOSITORY}=")]
    os.environ[VARIABLE] = os.pathsep.join([*others, f"{REPOSITORY}={folder}"])
    return f"paged|{REPOSITORY}"
