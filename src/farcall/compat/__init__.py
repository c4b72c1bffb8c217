"""farcall in the place of ``torch.distributed.rpc``: programs written for it run unchanged.

    farcall.compat.install()         from here on, in this process and in the processes it starts
    python -m farcall script.py      the same for a program that shall not be touched
    FARCALL_INSTALL=1 torchrun ...   the same for one that is started by something else

`install` puts modules in place and back, `captured` finds what programs and torch itself took out of the old modules
before, `children` takes the installation to processes that multiprocessing starts. The packages `rpc`, `nn`, `optim`
and the module `autograd` are what is put in place: the names of torch, over the functions of farcall.
"""

from farcall.compat.install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
