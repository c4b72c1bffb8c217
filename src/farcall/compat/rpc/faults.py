"""``torch.distributed.rpc._testing``: an agent that loses and delays messages on purpose. Not served yet."""

from __future__ import annotations

from typing import Any

from farcall.compat.rpc.unserved import Unserved

__all__: list[str] = []


def is_available() -> bool:
    """Is there such an agent?"""
    return False


FaultyTensorPipeAgent: Any = Unserved("FaultyTensorPipeAgent", "use farcall.testing")
FaultyTensorPipeRpcBackendOptions: Any = Unserved("FaultyTensorPipeRpcBackendOptions", "use farcall.testing")
