"""Installing farcall when torch is imported.

`install_when_torch_comes` is what ``farcall.pth`` runs at the start of every process in which FARCALL_INSTALL is set.
It must cost next to nothing: importing torch takes a second, and many a process never does. So the installation waits
for the program to do it, and nothing else of farcall is imported before that.
"""

from __future__ import annotations

from types import ModuleType

from farcall.imports import when_imported

__all__ = ["install_when_torch_comes"]

_waiting = False


def install_when_torch_comes() -> None:
    """Have farcall in place from the moment on at which torch is imported."""
    # Once: in an environment that sees another one's packages, Python reads each .pth file twice.
    global _waiting
    if not _waiting:
        _waiting = True
        when_imported("torch", _install)


def _install(torch: ModuleType) -> None:
    from farcall.compat.installation import install

    install()
