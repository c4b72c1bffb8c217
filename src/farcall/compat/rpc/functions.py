"""``torch.distributed.rpc.functions``: functions whose answer comes later than their return."""

from farcall.rpc.functions import async_execution

__all__ = ["async_execution"]
