"""farcall in the place of ``torch.distributed.rpc``: programs written for it run unchanged.

    farcall.compat.install()         from here on, in this process and in the processes it starts
    python -m farcall script.py      for a program that shall not be touched
    FARCALL_INSTALL=1 torchrun ...   for a program that something else starts

`installation` puts modules in place and back, `patches` changes single names of torch's modules, `program` runs a
program with both. `rpc`, `autograd`, `nn` and `optim` take the places: torch's names, over farcall's functions.

Importing this package costs next to nothing and imports none of the rest: ``farcall.pth`` runs
`install_when_torch_comes` at the start of every process in which FARCALL_INSTALL is set. Importing torch takes a
second, and many processes never do it, so the installation waits for the program to import torch. Where a module of
farcall's imports torch, the installation waits until that module is complete, since it needs it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from farcall.imports import Loading, when_imported

if TYPE_CHECKING:
    from farcall.compat.installation import install as install
    from farcall.compat.installation import is_installed as is_installed
    from farcall.compat.installation import uninstall as uninstall

__all__ = ["install", "is_installed", "uninstall"]

_loading: Loading | None = None
"""Modules of farcall's that are being loaded, from the start of a process with FARCALL_INSTALL until torch is there."""


def install_when_torch_comes() -> None:
    """Put farcall in place as soon as torch is imported."""
    # Once: in an environment that sees the packages of another one, Python reads each .pth file twice.
    global _loading
    if _loading is None:
        _loading = Loading("farcall.")
        when_imported("torch", _install)


def _install(torch: ModuleType) -> None:
    assert _loading is not None
    _loading.then(_install_now)


def _install_now() -> None:
    from farcall.compat.installation import install

    install()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'farcall.compat' has no attribute {name!r}")
    from farcall.compat import installation

    return getattr(installation, name)
