"""Test helpers of every family. Needs pytest; nothing outside tests imports it.

A family's conftest.py makes the plugin available with one line, wherever the tests are run from:

    from kestrel_runtime.testing import kernels_only, pytest_collection_modifyitems, pytest_configure  # noqa: F401

| module | holds |
|---|---|
| `plugin` | the marker `gpu` and the fixture `kernels_only` |
| `buffers` | poisoned outputs, canaries, copies of arguments that keep layout and aliasing |
| `compare` | distances in ulps, error against float64, bit equality, two runs |
| `contract` | bad inputs through every entry, odd calls, registration and opcheck |
| `launches` | CUDA graphs, chains of dependent launches |
| `memory` | large tensors on a GPU that several processes share |
| `random_cases` | kernel against reference on random calls, within a time budget |
| `values` | random values on a GPU, rows of large, denormal and equal values |
"""

from .buffers import LAYOUTS, canaries, canary, in_layout, poison, twins
from .compare import (
    assert_close_to_f64,
    assert_runs_repeat,
    assert_same_bits,
    fp8_code_distance,
    ulp_distance,
)
from .contract import (
    ODD_VALUES,
    OPCHECK_TESTS,
    REFUSAL_PATHS,
    BadInput,
    assert_launch_agrees,
    assert_refused,
    assert_registered,
    assert_rejects,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    opcheck,
    refusal_params,
    skip_without_binary,
)
from .launches import assert_waits_for_the_launch_before, graph_replay
from .memory import large_allocation
from .plugin import kernels_only, pytest_collection_modifyitems, pytest_configure
from .random_cases import RandomCase, by_reference, compare_at_random
from .values import ROW_KINDS, normal, rows_of

__all__ = [
    "LAYOUTS",
    "ODD_VALUES",
    "OPCHECK_TESTS",
    "REFUSAL_PATHS",
    "ROW_KINDS",
    "BadInput",
    "RandomCase",
    "assert_close_to_f64",
    "assert_launch_agrees",
    "assert_refused",
    "assert_registered",
    "assert_rejects",
    "assert_runs_repeat",
    "assert_same_bits",
    "assert_waits_for_the_launch_before",
    "assert_works_or_is_named",
    "by_reference",
    "canaries",
    "canary",
    "cases_of",
    "compare_at_random",
    "derived_bad_inputs",
    "fp8_code_distance",
    "graph_replay",
    "in_layout",
    "kernels_only",
    "large_allocation",
    "normal",
    "odd_calls",
    "opcheck",
    "poison",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "refusal_params",
    "rows_of",
    "skip_without_binary",
    "twins",
    "ulp_distance",
]
