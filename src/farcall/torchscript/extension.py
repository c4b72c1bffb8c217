"""The C++ extension behind RPC in TorchScript: built once for each torch, kept, loaded.

Owns the cache, and the errors where a build is impossible. A library lies in a directory of its own, named after
everything that it depends on, below ``$FARCALL_CACHE``, ``$XDG_CACHE_HOME/farcall`` or ``~/.cache/farcall``. A process
that finds it there needs no right to write, and no compiler.

Invariant: a library in its place is complete, and works. It is built elsewhere, tried out by a process of its own
(`trial.py`), since some compilers make one that kills every process that loads it, and comes to its place by one
rename. A file ``refused`` there says why there is none. No library is loaded that another user than root could have put
there. One process builds, however many want to: the system releases the lock of a process that dies. Its compiler may
live on, and never meets the next one's: each build has a directory of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import IO

import torch

from farcall.errors import RpcError

logger: logging.Logger = logging.getLogger("farcall")

_NAME = "farcall_torchscript"
_SOURCES = Path(__file__).with_name("bridge")
_FLAGS = ("-O1", "-g0")
_BUILDING = "build-"
_LONGEST_WAIT_S = 600.0  # for another process's build
_LOOK_AGAIN_S = 0.2
NOT_BUILT = 3
"""The exit status of `trial.py` where there is nothing to try out."""
_REFUSED = "refused"

_lock = threading.Lock()
_loaded: ModuleType | None = None
_failure: str | None = None


def build() -> Path:
    """Build the extension, unless it is there; return its path. Takes about a minute.

    Raises:
        RpcError: no compiler was found, it failed, or the cache cannot be written; the text says what to do.
    """
    directory = _directory()
    library = directory / f"{_NAME}.so"
    if library.exists():
        _check_owner(library)
        return library
    missing = why_not()
    if missing is not None:
        raise RpcError(missing)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o755, exist_ok=True)
        _check_owner(directory)  # before the first write: another user may have put links or libraries there
        with (directory / "building").open("a+") as lock:
            _acquire(lock, directory)
            if (directory / _REFUSED).exists():  # written by the process that this one waited for
                raise RpcError((directory / _REFUSED).read_text())
            if not library.exists():
                _build_into(library)
            _check_owner(library)
    except OSError as error:
        raise RpcError(
            f"the extension for RPC in TorchScript code cannot be stored in {directory}: {error}. Set FARCALL_CACHE to "
            "a writable directory"
        ) from error
    return library


def _acquire(lock: IO[str], directory: Path) -> None:
    """Wait until no other process builds; the file names the builder."""
    import fcntl  # not on Windows, which imports this module

    until = monotonic() + _LONGEST_WAIT_S
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            builder = lock.read() or "another process"
        if not told:
            logger.warning("waiting for %s, which builds the extension for RPC in TorchScript code", builder)
            told = True
        if monotonic() > until:
            raise RpcError(
                f"{builder} has been building the extension for RPC in TorchScript code for more than "
                f"{_LONGEST_WAIT_S:.0f} s, in {directory}. See what its compiler does, or end it"
            )
        sleep(_LOOK_AGAIN_S)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()


def _build_into(library: Path) -> None:
    for left_behind in library.parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(left_behind, ignore_errors=True)  # the build was killed
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=library.parent, ignore_cleanup_errors=True) as scratch:
        built = _compile(Path(scratch))
        built.chmod(0o755)
        built.replace(library)


def _check_owner(found_at: Path) -> None:
    """Raise if others than this user and root can have put the library, or its directory, ``found_at`` there.

    Who may rename a directory above it can put another in its place, so all are looked at, up to the root.
    """
    library = found_at if found_at.suffix == ".so" else found_at / f"{_NAME}.so"
    owners = {os.geteuid(), 0}
    for path in (found_at, *found_at.parents):
        found = path.stat()
        if path in (library, library.parent):
            is_safe = found.st_uid in owners and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        else:  # a group may share these; in some containers root, whose "/" is, has another number
            is_safe = found.st_uid in owners | {os.stat("/").st_uid}
            is_safe = is_safe and (not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX))
        if not is_safe:
            raise RpcError(
                f"the extension for RPC in TorchScript code is not loaded from {library}: others than you and root may "
                f"have put it there ({path} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}). Set "
                "FARCALL_CACHE to a directory of your own"
            )


def load() -> ModuleType:
    """The extension, built if need be. Raises like `build`; at once, if that has failed before."""
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


def use(library: Path) -> None:
    """Load ``library`` in this process, untried; for `trial.py`."""
    global _loaded
    with _lock:
        _loaded = _import(library)


def is_loaded() -> bool:
    """Is it loaded in this process? If so, code that needs it may have been compiled."""
    return _loaded is not None


def failure() -> str | None:
    """The error with which it failed to load in this process; None: it was loaded, or never wanted."""
    return _failure


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RpcError(
            f"the extension for RPC in TorchScript code cannot be loaded: {error}. Remove {library.parent} and run "
            "`farcall torchscript build`"
        ) from error
    return module


def _directory() -> Path:
    root = os.environ.get("FARCALL_CACHE")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "farcall")
    # Without torch's path: environments and hosts with the same torch share one library.
    depends_on = (
        *(source.read_text() for source in sorted(_SOURCES.iterdir())),
        " ".join(_FLAGS),
        torch.__version__,
        str(torch.version.git_version),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        sysconfig.get_config_var("SOABI") or sys.version,
        platform.machine(),
    )
    digest = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:16]
    # Without links, so that `_check_owner` looks at the directories that are used.
    return Path(root).resolve() / "torchscript" / f"torch-{torch.__version__}-{digest}"


def why_not() -> str | None:
    """The reason why the extension cannot be built or used here, and the remedy; None: no reason is known."""
    refused = _directory() / _REFUSED
    if refused.exists():
        return refused.read_text()
    from torch.utils import cpp_extension

    compiler = _compiler()
    command = shlex.split(compiler)  # "ccache g++"
    if not command or shutil.which(command[0]) is None:
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
    """Find the ninja that pip puts beside the interpreter, which a shell finds only in an activated environment."""
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))


def _compile(directory: Path) -> Path:
    """Build it in a fresh directory and try it out, in a process of its own; return the library."""
    logger.warning("building the extension for RPC in TorchScript code, once: about a minute (in %s)", directory)
    began = monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            [sys.executable, "-m", "farcall.torchscript.trial", str(directory)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_WAIT_S,
            check=False,
        )
        how, said = child.returncode, child.stderr.strip()
    except subprocess.TimeoutExpired:
        how, said = 1, f"it did not end within {_LONGEST_WAIT_S:.0f} s"
    if how == NOT_BUILT:
        raise RpcError(said)
    if how != 0:
        raise _refused(directory.parent, how, said)
    logger.info("built in %.0f s", monotonic() - began)
    return _library_in(directory)


def _compiler() -> str:
    from torch.utils import cpp_extension

    return str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]


def _refused(home: Path, how: int, said: str) -> RpcError:
    """The library was built, and its trial failed: keep the verdict in a file, for other processes."""
    died = f"was killed by {signal.Signals(-how).name}" if how < 0 else f"failed: {said.rpartition(chr(10))[2]}"
    verdict = (
        f"the extension for RPC in TorchScript code was built with {_compiler()!r}, and a process that tried it out "
        f"{died}. Set CXX to another compiler, one that links libstdc++ as torch does, and remove {home}. Everything "
        "else works without"
    )
    (home / _REFUSED).write_text(verdict)
    return RpcError(verdict)


def _library_in(directory: Path) -> Path:
    (library,) = directory.glob(f"{_NAME}*.so")  # torch numbers them where a process builds again
    return library


def compile_here(directory: Path) -> Path:
    """Build it in this process, into which torch then loads it; for `trial.py`."""
    from torch.utils import cpp_extension

    _find_ninja()
    try:
        cpp_extension.load(
            _NAME,
            [str(_SOURCES / "bridge.cpp")],
            extra_cflags=list(_FLAGS),
            build_directory=str(directory),
            with_cuda=False,
            is_python_module=False,
            keep_intermediates=False,
        )
    except (OSError, RuntimeError) as error:
        raise RpcError(
            f"the extension for RPC in TorchScript code could not be built with torch {torch.__version__} and "
            f"{_compiler()!r}: {error}"
        ) from error
    return _library_in(directory)
