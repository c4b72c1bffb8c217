"""The C++ extension behind RPC in TorchScript: built once for each torch, kept, loaded.

Owns where it is kept, and what is said where it cannot be built. It is kept in a directory of its own, named after
everything that it depends on, below ``$FARCALL_CACHE``, ``$XDG_CACHE_HOME/farcall`` or ``~/.cache/farcall``.

Invariant: the file that `_READY` vouches for is complete. One process builds, however many want to: the lock is one
that the system takes away from a process that dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import sysconfig
import threading
from pathlib import Path
from time import monotonic
from types import ModuleType

import torch

from farcall.errors import RpcError

__all__ = ["build", "is_loaded", "load", "why_not"]

logger: logging.Logger = logging.getLogger("farcall")

_NAME = "farcall_torchscript"
_SOURCE = Path(__file__).with_name("bridge.cpp")
_READY = "ready"
_FLAGS = ("-O1", "-g0")

_lock = threading.Lock()
_loaded: ModuleType | None = None
_failure: str | None = None


def build() -> Path:
    """Build the extension, if that was not done before; where it is. Takes about a minute.

    Raises:
        RpcError: there is no compiler, or it failed; the text says what to do.
    """
    directory = _directory()
    library = directory / f"{_NAME}.so"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / _READY).exists():
            _compile(directory)
            (directory / _READY).touch()
    return library


def load() -> ModuleType:
    """The extension, built if need be. Raises what `build` raises, at once where it has failed before."""
    global _loaded, _failure
    with _lock:
        if _loaded is None:
            if _failure is not None:
                raise RpcError(_failure)
            try:
                _loaded = _import(build())
            except RpcError as error:
                _failure = str(error)
                raise
        return _loaded


def is_loaded() -> bool:
    """Is it loaded in this process? Then code that needs it may have been compiled."""
    return _loaded is not None


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _directory() -> Path:
    root = os.environ.get("FARCALL_CACHE")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "farcall")
    depends_on = (
        _SOURCE.read_text(),
        " ".join(_FLAGS),
        torch.__version__,
        torch.__file__,  # a build links to that very torch
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        sysconfig.get_config_var("SOABI") or sys.version,
        platform.machine(),
    )
    digest = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:16]
    return Path(root) / "torchscript" / f"torch-{torch.__version__}-{digest}"


def why_not() -> str | None:
    """What is missing here to build the extension, and what to do; None: nothing."""
    from torch.utils import cpp_extension

    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        return (
            f"RPC in TorchScript code needs a C++ compiler, once, and there is no {compiler!r} here. Install one (or "
            "name it in CXX) and run `farcall torchscript build`, or build where there is one and set FARCALL_CACHE to "
            "a directory that both see. Everything else works without"
        )
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return (
            f"RPC in TorchScript code needs Python's headers, once, to build an extension, and there are none in "
            f"{headers} (Debian: python3-dev). Then run `farcall torchscript build`. Everything else works without"
        )
    _find_ninja()
    if not cpp_extension.is_ninja_available():
        return (
            "RPC in TorchScript code needs ninja to build an extension, once: `pip install ninja`, then `farcall "
            "torchscript build`. Everything else works without"
        )
    return None


def _find_ninja() -> None:
    """``pip install ninja`` puts it beside the interpreter, where a shell finds it only in an activated environment."""
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))


def _compile(directory: Path) -> None:
    from torch.utils import cpp_extension

    missing = why_not()
    if missing is not None:
        raise RpcError(missing)
    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    logger.warning("building the extension for RPC in TorchScript code, once: about a minute (in %s)", directory)
    began = monotonic()
    # What a build that was killed left behind: torch would wait for its lock for good.
    (directory / "lock").unlink(missing_ok=True)
    try:
        cpp_extension.load(
            _NAME,
            [str(_SOURCE)],
            extra_cflags=list(_FLAGS),
            build_directory=str(directory),
            with_cuda=False,
            is_python_module=False,
            keep_intermediates=False,
        )
    except (OSError, RuntimeError) as error:
        raise RpcError(
            f"the extension for RPC in TorchScript code could not be built with torch {torch.__version__} and "
            f"{compiler!r}: {error}"
        ) from error
    logger.info("built in %.0f s", monotonic() - began)
