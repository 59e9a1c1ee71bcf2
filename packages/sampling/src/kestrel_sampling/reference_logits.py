"""The PyTorch references of what comes before and after a draw: logit processing and log-probabilities."""

from __future__ import annotations

import torch

from kestrel_runtime.reference import row_sums

from . import reference, reference_sampling
from .reference_sampling import per_row


def process_logits(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
    prompt_lengths: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    repetition_penalty_value: float,
    presence_penalty: torch.Tensor | None,
    presence_penalty_value: float,
    frequency_penalty: torch.Tensor | None,
    frequency_penalty_value: float,
    bias_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    bitmask: torch.Tensor | None,
) -> torch.Tensor:
    """float32 logits after bias, penalties and bitmask; every step is rounded to float32."""
    values, width, device = logits.to(torch.float32, copy=True), logits.shape[1], logits.device
    if bias_ids is not None and bias_values is not None:
        index = column_of(bias_ids, width)
        bias = values.new_zeros(values.shape[0], width + 1, dtype=torch.float64)
        # Unlike scatter_add_, index_put_ adds equal ids in an order that does not change from call to call.
        rows = torch.arange(values.shape[0], device=device).unsqueeze(1).expand_as(index)
        bias = bias.index_put_((rows, index), bias_values.double(), accumulate=True)[:, :width]
        values = torch.where(count(index, width) > 0, (values.double() + bias).float(), values)
    if token_ids is not None:
        position = torch.arange(token_ids.shape[1], device=device)
        in_history = torch.ones_like(token_ids, dtype=torch.bool)
        if lengths is not None:
            in_history = position < lengths.view(-1, 1)
        in_output = in_history
        if prompt_lengths is not None:
            in_output = in_history & (position >= prompt_lengths.view(-1, 1))
        repetition = per_row(repetition_penalty, repetition_penalty_value, device)
        presence = per_row(presence_penalty, presence_penalty_value, device)
        frequency = per_row(frequency_penalty, frequency_penalty_value, device)
        seen = count(column_of(token_ids, width, in_history), width) > 0
        outputs = count(column_of(token_ids, width, in_output), width)
        values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
        penalised = values - frequency * outputs.float() - presence
        values = torch.where(outputs > 0, penalised, values)
    if bitmask is not None:
        id_ = torch.arange(width, device=device)
        allowed = (bitmask[:, id_ // 32] >> (id_ % 32).to(torch.int32)) & 1
        values = torch.where(allowed == 1, values, -torch.inf)
    return values


def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    top_n: int,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and ranks of the ids, then the ids and log-probabilities of the first n in descending order."""
    width, device = logits.shape[1], logits.device
    temperatures = per_row(temperature, temperature_value, device)
    weights = reference_sampling.exponentials(logits, temperatures)
    mass, _ = reference_sampling.integer_mass(weights)
    reaches_min_p = reference_sampling.keep_min_p(weights, per_row(min_p, min_p_value, device))
    mass = torch.where(reaches_min_p, mass, 0)
    k = torch.where(temperatures <= 0, 1, per_row(top_k, top_k_value, device).long())
    p = per_row(top_p, top_p_value, device)
    _, kept, _ = reference_sampling.keep_filtered(logits.float(), mass, k, p, joint)
    every = log_softmax(logits, temperatures, kept & reaches_min_p)

    exists = (ids >= 0) & (ids < width)
    column = torch.where(exists, ids, 0).long().unsqueeze(1)
    chosen = torch.where(exists.unsqueeze(1), every.gather(1, column), -torch.inf)
    logit, id_ = logits.gather(1, column), torch.arange(width, device=device)
    before = (logits > logit) | ((logits == logit) & (id_ < column))
    has_rank = exists & ~every[:, 0].isnan()
    ranks = torch.where(has_rank, 1 + before.sum(1), 0).to(torch.int32)
    top_ids = reference.topk_fwd(logits, top_n)[1]
    return chosen.squeeze(1), ranks, top_ids, every.gather(1, top_ids.long())


def sample_with_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    top_n: int,
    processed: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The draw of sample_from_logits, then the log-probabilities of what it draws; NaN for a row that is not valid."""
    filters = (temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value, joint)
    ids, valid = reference_sampling.sample_from_logits(
        logits, *filters, seed, seed_value, offset, offset_value, offset_stride
    )
    given = filters if processed else (None, 1.0, None, 0, None, 1.0, None, 0.0, False)
    logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits, ids, top_n, *given)
    logprobs, ranks = torch.where(valid, logprobs, torch.nan), torch.where(valid, ranks, 0)
    return ids, valid, logprobs, ranks, top_ids, torch.where(valid[:, None], top_logprobs, torch.nan)


def process_and_sample(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
    prompt_lengths: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    repetition_penalty_value: float,
    presence_penalty: torch.Tensor | None,
    presence_penalty_value: float,
    frequency_penalty: torch.Tensor | None,
    frequency_penalty_value: float,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor | None,
    temperature_value: float,
    top_k: torch.Tensor | None,
    top_k_value: int,
    top_p: torch.Tensor | None,
    top_p_value: float,
    min_p: torch.Tensor | None,
    min_p_value: float,
    joint: bool,
    top_n: int,
    processed: bool,
    seed: torch.Tensor | None,
    seed_value: int,
    offset: torch.Tensor | None,
    offset_value: int,
    offset_stride: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """process_logits in place, then sample_with_logprobs."""
    logits.copy_(
        process_logits(
            logits, token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value, presence_penalty,
            presence_penalty_value, frequency_penalty, frequency_penalty_value, None, None, bitmask,
        )
    )  # fmt: skip
    return sample_with_logprobs(
        logits, temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value, joint,
        top_n, processed, seed, seed_value, offset, offset_value, offset_stride,
    )  # fmt: skip


# ---- parts -----------------------------------------------------------------------------------------------------------


def column_of(ids: torch.Tensor, width: int, counted: torch.Tensor | None = None) -> torch.Tensor:
    """The ids as int64, ``width`` where they lie outside the vocabulary or are not counted."""
    exists = (ids >= 0) & (ids < width)
    return torch.where(exists if counted is None else exists & counted, ids, width).long()


def count(columns: torch.Tensor, width: int) -> torch.Tensor:
    """How often each id of the vocabulary occurs in a row: int32 [B, V]."""
    zeros = columns.new_zeros(columns.shape[0], width + 1, dtype=torch.int32)
    return zeros.scatter_add_(1, columns, torch.ones_like(columns, dtype=torch.int32))[:, :width]


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """float32 log-probabilities of the kept entries, from float64; -inf for the others.

    A row whose largest logit is not finite becomes NaN.
    """
    values = logits.double()
    largest = values.amax(dim=1, keepdim=True)
    scaled = (values - largest) / torch.where(temperature <= 0, 1.0, temperature).double()
    scaled = torch.where(kept & (values > -torch.inf), scaled, -torch.inf)
    result = (scaled - row_sums(scaled.exp()).log()).float()
    return torch.where(largest.isfinite(), result, torch.nan)
