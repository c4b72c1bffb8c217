"""What a profiler sees of a backward pass, under the names that `torch.distributed.autograd` gives it.

Only the thread that is being profiled leaves marks: at the origin of a pass that is the caller of `backward`, which
runs this worker's part. Without a profiler a mark costs one question.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd.profiler import record_function

__all__ = ["BACKWARD_NAME", "RECEIVE_NAME", "SEND_NAME", "is_profiled", "leave_mark", "record_function"]

BACKWARD_NAME: Final = "torch::distributed::autograd::backward"
RECEIVE_NAME: Final = "torch::distributed::autograd::RecvRpcBackward"
SEND_NAME: Final = "torch::distributed::autograd::SendRpcBackward"

_autograd: Any = torch.autograd
is_profiled: Any = _autograd._profiler_enabled


def leave_mark(name: str) -> None:
    """Note that a send was given its gradient, or a receive sent one: neither takes time of its own."""
    with record_function(name):
        pass
