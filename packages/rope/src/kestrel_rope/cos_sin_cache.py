"""Tables of cosines and sines for rotary embeddings, plain and for stretched contexts."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from kestrel_runtime import check

_OP = "build_cos_sin_cache"
_KEYS = {  # of a Hugging Face rope_scaling dict, by type: required, optional
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    ),
}
_LARGEST = sys.float_info.max  # an int above it has no float value
_LEAST, _MOST = 1e-30, 1e30  # of a number in scaling, so that nothing overflows
_OF_OTHER_ARGUMENTS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def build_cos_sin_cache(
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    *,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Build the table of cosines and sines that :func:`rotary_embedding` reads.

    rotary_dim: R, even, >= 2. max_position: rows of the table, >= 0. base: theta, finite, > 1.
    scaling: None, or a Hugging Face ``rope_scaling`` / ``rope_parameters`` dict. Its ``rope_type`` (or ``type``) and
        the keys of that type:
        ``default``: none.
        ``linear``: factor.
        ``dynamic`` (NTK): factor, original_max_position_embeddings. The base fits a context of max_position, so the
        whole table is for that length.
        ``llama3``: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
        ``yarn``: factor, original_max_position_embeddings; optional attention_factor, mscale, mscale_all_dim,
        beta_fast 32, beta_slow 1, truncate True. The attention factor multiplies the whole table.
        All numbers are from 1e-30 to 1e30; the two mscale may be 0. ``rope_theta`` must equal ``base``.
        ``partial_rotary_factor`` and ``mrope_*`` concern other arguments and are not read. Any other key raises.
    dtype: of the table: float32, bf16 or fp16. device: of the table (default: torch's default device).

    Returns [max_position, R]: cosines of the R/2 frequencies, then their sines. Angles are float64, the result is
    rounded once. This is not an op: it runs once, in PyTorch, when a model is loaded.
    Raises TypeError for a wrong type, ValueError for a wrong value, key or device.
    Semantics: Hugging Face transformers, ``modeling_rope_utils``; YaRN: Peng et al., arXiv 2309.00071.

    >>> import kestrel_rope
    >>> kestrel_rope.build_cos_sin_cache(2, 3)  # one frequency: 1 radian per position
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    >>> kestrel_rope.build_cos_sin_cache(2, 3, scaling={"rope_type": "linear", "factor": 2.0})[2]
    tensor([0.5403, 0.8415])
    """
    check.number(_OP, "rotary_dim", rotary_dim, integer=True, minimum=2)
    if rotary_dim % 2:
        check.fail(_OP, "rotary_dim", "an even number", rotary_dim)
    check.number(_OP, "max_position", max_position, integer=True, minimum=0)
    check.number(_OP, "base", base)
    if not 1 < base <= _LARGEST:
        check.fail(_OP, "base", "a finite number > 1", base)
    base = float(base)
    check.choice(_OP, "dtype", dtype, (torch.float32, torch.bfloat16, torch.float16))
    _check_device(device)
    rope_type, values = _parse(scaling, base)

    attention_factor = 1.0
    if rope_type == "dynamic":
        base = _ntk_base(rotary_dim, max_position, base, values)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    frequencies = base**-exponents
    if rope_type == "linear":
        frequencies = frequencies / values["factor"]
    elif rope_type == "llama3":
        frequencies = _llama3(frequencies, values)
    elif rope_type == "yarn":
        frequencies = _yarn(frequencies, rotary_dim, base, values)
        attention_factor = _yarn_attention_factor(values)

    positions = torch.arange(max_position, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor).to(dtype)


def _check_device(device: object) -> None:
    """A tensor can be allocated there."""
    try:
        torch.empty(0, device=device)  # type: ignore[arg-type]
    except Exception as error:  # of which kind depends on the build of torch
        kind = TypeError if isinstance(error, TypeError) else ValueError
        reason = str(error).partition("\n")[0].partition(". ")[0]
        check.fail(_OP, "device", "a device that torch can allocate on", f"{check.shown(device)} ({reason})", kind)


def _parse(scaling: Mapping[str, Any] | None, base: float) -> tuple[str, dict[str, Any]]:
    """The type of a scaling dict and the values that type reads, checked."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        check.fail(_OP, "scaling", "a dict or None", type(scaling).__name__, TypeError)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(rope_type, str):
        check.fail(_OP, "scaling", "a rope_type that is a string", check.shown(rope_type), TypeError)
    if rope_type not in _KEYS:
        check.fail(_OP, "scaling", "a rope_type of " + ", ".join(map(repr, _KEYS)), repr(rope_type))
    required, optional = _KEYS[rope_type]
    for key in required:
        if scaling.get(key) is None:
            check.fail(_OP, "scaling", f"a value for {key!r} with rope_type {rope_type!r}", f"keys {list(scaling)}")
    for key, value in scaling.items():
        if key not in required and key not in optional and key not in _OF_OTHER_ARGUMENTS:
            check.fail(_OP, "scaling", f"no key but {', '.join(required + optional)} for {rope_type!r}", repr(key))
        if key in _OF_OTHER_ARGUMENTS or value is None:
            continue
        name = f"scaling[{key!r}]"
        if key == "truncate":
            check.flag(_OP, name, value)
        elif key.startswith("mscale"):
            check.number(_OP, name, value, minimum=0, maximum=_MOST)
        else:
            check.number(_OP, name, value, minimum=_LEAST, maximum=_MOST)
    theta = scaling.get("rope_theta")
    if theta is not None:
        check.number(_OP, "scaling['rope_theta']", theta)
    if theta is not None and theta != base:
        check.fail(_OP, "scaling", f"the rope_theta that base gives, {base}", theta)
    values = {key: scaling[key] for key in (*required, *optional) if scaling.get(key) is not None}
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        wanted = f"a high_freq_factor above low_freq_factor {values['low_freq_factor']}"
        check.fail(_OP, "scaling", wanted, values["high_freq_factor"])
    return rope_type, values


def _ntk_base(rotary_dim: int, max_position: int, base: float, values: dict[str, Any]) -> float:
    """Grow the base with the context, so that the slowest frequency spans it ("dynamic NTK")."""
    if rotary_dim == 2:
        return base  # its only frequency is 1 whatever the base
    original = values["original_max_position_embeddings"]
    stretch = max(max_position, original) / original
    growth = 1 + values["factor"] * (stretch - 1)
    return float(base * growth ** (rotary_dim / (rotary_dim - 2)))


def _llama3(frequencies: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly between the two bounds."""
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    turns = values["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / values["factor"]


def _yarn(frequencies: torch.Tensor, rotary_dim: int, base: float, values: dict[str, Any]) -> torch.Tensor:
    """Divide frequencies below beta_slow turns in the original context by the factor, keep those above beta_fast."""

    def dimension_with(turns: float) -> float:
        wavelength_ratio = values["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength_ratio) / (2 * math.log(base))

    low, high = dimension_with(values.get("beta_fast", 32)), dimension_with(values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    if low == high:
        high += 0.001  # a step instead of a ramp
    index = torch.arange(rotary_dim // 2, dtype=torch.float64, device=frequencies.device)
    interpolate = ((index - low) / (high - low)).clamp(0, 1)
    return interpolate * frequencies / values["factor"] + (1 - interpolate) * frequencies


def _yarn_attention_factor(values: dict[str, Any]) -> float:
    if "attention_factor" in values:
        return float(values["attention_factor"])

    def magnitude(weight: float) -> float:
        factor = float(values["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return magnitude(values["mscale"]) / magnitude(values["mscale_all_dim"])
    return magnitude(1.0)
