"""Reading ids of one decode step on the host while the GPU computes the next."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host. The host waits for this copy alone, not for work that is queued after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))  # the copy's, not the current device's
        else:
            self._copy = tensor.clone()

    def wait(self) -> Tensor:
        """The copy, once it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy
