"""Launches on a GPU: captured in a CUDA graph, and after a launch that triggers them early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_replay(function: Callable[..., Any], args: Sequence[Any], new_args: Sequence[Any]) -> Any:
    """Capture ``function(*args)`` in a CUDA graph, write ``new_args`` into the same tensors, replay, return the result.

    The tensors in ``args`` are overwritten. The result must equal ``function(*new_args)`` if nothing was baked in.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        saved = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
        function(*args)
        _overwrite(args, saved)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*args)
    _overwrite(args, new_args)
    graph.replay()
    torch.cuda.synchronize()
    return result


def _overwrite(args: Sequence[Any], values: Sequence[Any]) -> None:
    for target, value in zip(args, values, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(value)


def assert_waits_for_the_launch_before(
    chain: Callable[[int, Callable[[], None]], Sequence[torch.Tensor]], contents: int = 2, repetitions: int = 1000
) -> None:
    """A launch that may start before the previous one has ended reads what that one wrote.

    ``chain(i, between)`` writes the i-th contents of an input by a launch that triggers the next one early, launches
    the reader, and returns its results. It calls ``between()`` wherever a launch reads what the previous one wrote.
    The expected results come from a run that synchronises there. A CUDA graph then runs the chain ``repetitions``
    times without, alternating the contents, and every result must be the same, bit for bit.
    """
    wanted = [[_as_bytes(x).clone() for x in chain(i, torch.cuda.synchronize)] for i in range(contents)]
    for i in range(contents):
        same = all(map(torch.equal, wanted[i], wanted[i - 1]))
        assert not same, f"contents {i - 1 if i else contents - 1} and {i} give the same: nothing would be noticed"
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns = contents * -(-20 // contents)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            results = chain(turn % contents, lambda: None)
            for got, want in zip(results, wanted[turn % contents], strict=True):
                wrong.add_((_as_bytes(got) != want).any())
    replays = -(-repetitions // turns)
    for _ in range(replays):
        graph.replay()
    assert int(wrong) == 0, f"{int(wrong)} results of {replays * turns} repetitions differ"


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
