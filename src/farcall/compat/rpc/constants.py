"""Defaults, under the names of ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta

from farcall.options import DEFAULT_INIT_METHOD as _INIT_METHOD
from farcall.options import DEFAULT_NUM_WORKER_THREADS as _THREADS
from farcall.options import DEFAULT_RPC_TIMEOUT_S
from farcall.rpc.timeouts import UNSET_TIMEOUT

__all__: list[str] = []

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_RPC_TIMEOUT_S
DEFAULT_INIT_METHOD: str = _INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = _THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT
