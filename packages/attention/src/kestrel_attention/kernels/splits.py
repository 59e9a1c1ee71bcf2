"""How a sequence is split: one rule for the host and for the decode kernel. Imports without the DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

from kestrel_runtime.cute_dsl import portable

from .constants import MAX_SPLITS, MULTIPROCESSORS, SPLIT_ROWS, TILE_KEYS


class SplitRule(NamedTuple):
    """Split-KV of a sequence by the number of keys that it visits, whatever the rest of its batch.

    One long sequence should occupy the GPU, but the fixed cost of a split is that of some 100 keys.
    """

    unsplit_keys: int
    """Sequences of up to so many keys are one split."""
    medium_split_keys: int
    """Least keys of a split of sequences of up to ``medium_keys`` keys."""
    medium_keys: int
    long_split_keys: int
    """Least keys of a split of longer sequences."""
    max_splits: int

    def keys(self, visited: int, granularity: int = TILE_KEYS) -> int:
        """Keys of a split of a sequence that visits so many keys; splits start at multiples of ``granularity``."""
        return int(split_keys(visited, self, granularity, *HOST))

    def num_splits(self, longest: int) -> int:
        """The most splits of a sequence that visits up to ``longest`` keys."""
        select = HOST[0]
        ends = [longest, *(end for end in (self.unsplit_keys, self.medium_keys) if end < longest)]
        return max(1, min(self.max_splits, max(-(-end // least_split_keys(end, self, select)) for end in ends)))


HOST = (lambda condition, yes, no: yes if condition else no), int, (lambda a, b: a // b)
"""select, wide and divide of :func:`split_keys` on Python's integers."""


def least_split_keys(visited: Any, rule: Any, select: Any) -> Any:
    """Keys of a split where ``max_splits`` does not bound their number."""
    keys = select(visited <= rule.medium_keys, rule.medium_split_keys, rule.long_split_keys)
    return select(visited <= rule.unsplit_keys, rule.unsplit_keys, keys)


@portable.jit
def split_keys(visited: Any, rule: Any, granularity: Any, select: Any, wide: Any, divide: Any) -> Any:
    """Keys of a split. rule: has the fields of SplitRule. select, wide, divide: the arithmetic of host or device."""
    keys = least_split_keys(visited, rule, select)
    if visited > wide(keys) * rule.max_splits:
        even = divide(visited + rule.max_splits - 1, rule.max_splits)
        keys = (even + granularity - 1) // granularity * granularity
    return keys


def prefill_split_limit(queries: Any, heads: Any, divide: Any, clamp: Any) -> Any:
    """The most splits of a block of rows in prefill: enough that one sequence of so many queries fills the GPU.

    divide, clamp: the arithmetic of host or device. queries: at least 1.
    """
    blocks = heads * divide(queries + SPLIT_ROWS - 1, SPLIT_ROWS)
    return clamp(divide(MULTIPROCESSORS, blocks), 1, MAX_SPLITS)
