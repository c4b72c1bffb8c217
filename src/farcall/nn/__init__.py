"""Modules that live on another worker, and modules that many workers use at once."""

from farcall.nn.remote_module import RemoteModule
from farcall.nn.shared import Shared

__all__ = ["RemoteModule", "Shared"]
