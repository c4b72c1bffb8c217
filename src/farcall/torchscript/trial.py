"""A program that builds the extension and tries it out: ``python -m farcall.torchscript.trial DIRECTORY``.

Builds and loads the library, compiles scripts that make calls and use references, runs them, and has one fail. Ends
with 0 if all of that is right. A library that kills its process (by a signal, more often than not) kills only this one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from farcall import api
from farcall.errors import RpcError
from farcall.options import RpcBackendOptions
from farcall.torchscript import bridging, extension


def _add(x: torch.Tensor, y: int) -> torch.Tensor:
    if y < 0:
        raise ValueError("too small")
    return x + y


def _ask(to: str, y: int) -> torch.Tensor:
    given = rpc.remote(to, _add, (torch.ones(2), y))
    return rpc.rpc_sync(to, _add, (given.to_here(), y))  # type: ignore[no-any-return]


def main(library: Path) -> None:
    """Raise, or be killed, unless ``library`` works."""
    extension.use(library)
    bridging.enable()
    globals()["_add"] = torch.jit.script(_add)
    ask = torch.jit.script(_ask)
    with tempfile.TemporaryDirectory() as directory:
        options = RpcBackendOptions(init_method=f"file://{directory}/meeting")
        api.init_rpc("trial", rank=0, world_size=1, rpc_backend_options=options)
        found = ask("trial", 3)
        if found.tolist() != [7.0, 7.0]:
            raise RuntimeError(f"a script's call returned {found}")
        try:
            ask("trial", -1)
        except Exception as error:
            if "too small" not in str(error):
                raise
        else:
            raise RuntimeError("a script's call that must fail did not")
        api.shutdown()


def build_and_try(directory: Path) -> None:
    """Build the library and try it out; exit with NOT_BUILT where the compiler fails."""
    try:
        built = extension.compile_here(directory)
    except RpcError as error:
        print(error, file=sys.stderr)
        sys.exit(extension.NOT_BUILT)
    main(built)


if __name__ == "__main__":
    build_and_try(Path(sys.argv[1]))
