"""``torch.distributed.rpc.server_process_global_profiler``: not served yet; see `unserved`."""

from __future__ import annotations

from typing import Any

from farcall.compat.rpc.unserved import Unserved, find_unserved

__all__: list[str] = []

_server_process_global_profile: Any = Unserved("_server_process_global_profile", "use farcall.profile")


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
