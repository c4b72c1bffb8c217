"""Modules that live on another worker."""

from farcall.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
