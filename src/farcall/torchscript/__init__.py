"""TorchScript code that issues calls and uses references, over farcall.

A call of a TorchScript function, or of a script module's method, needs none of this: see `farcall.serialize` and
`farcall.rpc`. This package is for scripts that themselves say ``rpc.rpc_async(...)`` or take an ``RRef[Tensor]``. Torch
compiles those into C++ operators; the optional extension in `bridge/`, built on first use, replaces them.

    extension   building, keeping and loading it; errors where that is not possible
    bridging    putting it to work, and out of work
    handlers    the operators' work, in Python, and the types of values
    need        code that needs it: found before it is compiled; refused where there is no extension

`operator` serves calls inside ``torch.compile``d functions, and needs no extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall.torchscript.bridging import enable as enable
    from farcall.torchscript.extension import build as build
    from farcall.torchscript.operator import call as call

__all__ = ["build", "call", "enable"]

_HOMES = {"build": "extension", "enable": "bridging", "call": "operator"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'farcall.torchscript' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"farcall.torchscript.{_HOMES[name]}"), name)
