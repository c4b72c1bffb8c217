"""farcall in the place of ``torch.distributed.rpc``: programs written for it run unchanged.

    farcall.compat.install()         from here on, in this process and in the processes it starts
    python -m farcall script.py      the same for a program that shall not be touched
    FARCALL_INSTALL=1 torchrun ...   the same for one that is started by something else

`installation` puts modules in place and back, `captured` finds what programs and torch itself took out of the old
modules before, `children` takes it to processes that multiprocessing starts, `waiting` has it wait for torch, `program`
runs a program with it. `rpc`, `autograd`, `nn` and `optim` are what is put in place: the names of torch, over the
functions of farcall.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall.compat.installation import install as install
    from farcall.compat.installation import is_installed as is_installed
    from farcall.compat.installation import uninstall as uninstall

__all__ = ["install", "is_installed", "uninstall"]


def __getattr__(name: str) -> object:
    # Later, because `waiting` is loaded at the start of processes that may never need any of the rest.
    if name not in __all__:
        raise AttributeError(f"module 'farcall.compat' has no attribute {name!r}")
    from farcall.compat import installation

    return getattr(installation, name)
