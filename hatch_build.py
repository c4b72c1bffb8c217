"""Builds the compiled code (``_speedups.c`` of the flat form, ``_frames.c`` of the frames), where that can be done.

A hook of hatchling, for wheels and editable installs; as a program, it builds for the tree that it lies in. Without a C
compiler or Python's headers the wheel is pure Python, which does the same: that is never an error.

The core (``core/native``, docs/design/CORE.md) is built by the program alone, for its tests: nothing uses it yet.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program it needs nothing
    BuildHookInterface = object  # type: ignore[assignment, misc]

PACKAGE = Path("src", "farcall")
SOURCES = (PACKAGE / "serialize" / "_speedups.c", PACKAGE / "protocol" / "_frames.c")
CORE = PACKAGE / "core"
SUFFIX = ".abi3.so"
TAG = "cp311-abi3"
"""The limited API of this Python, as the source asks for it: later ones have it, too."""


def build(target: Path, *sources: Path) -> str:
    """Compile ``sources`` to ``target``; return why that failed, or nothing."""
    if os.name != "posix" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "only a CPython with its usual lock, on Linux or a Mac, can use it"
    in_c = sources[0].suffix == ".c"
    name, usual = ("CC", "cc") if in_c else ("CXX", "c++")
    compiler = shlex.split(os.environ.get(name) or sysconfig.get_config_var(name) or usual)
    on_a_mac = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    fresh = target.with_name(f"{target.name}.{os.getpid()}")  # a process may have the old one mapped
    command = [
        *compiler,
        *("-O2", "-std=c11" if in_c else "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-DNDEBUG"),
        *on_a_mac,
        f"-I{sysconfig.get_path('include')}",
        *("-o", str(fresh), *map(str, sources), "-pthread"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip() or f"{compiler[0]} ended with status {done.returncode}"
    fresh.replace(target)
    return ""


class SpeedupsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the wheel; an editable install finds it in the tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._folder = tempfile.TemporaryDirectory()
        for source in SOURCES:
            library = source.with_suffix(SUFFIX)
            target = root / library if version == "editable" else Path(self._folder.name, library.name)
            why_not = build(target, root / source)
            if why_not:
                self.app.display_warning(f"farcall's {source.name} is left out, Python does the same: {why_not}")
            elif version != "editable":
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"{TAG}-{platform}"
                build_data["force_include"][str(target)] = str(library.relative_to("src"))


def build_here(root: Path) -> None:
    """Build what is older than its source."""
    native = root / CORE / "native"
    libraries = [((root / one).with_suffix(SUFFIX), [root / one]) for one in SOURCES]
    libraries.append((root / CORE / f"_core{SUFFIX}", sorted(native.glob("*.cc"))))
    for library, sources in libraries:
        depends_on = [*sources, *native.glob("*.h")] if sources[0].parent == native else sources
        if library.exists() and library.stat().st_mtime > max(one.stat().st_mtime for one in depends_on):
            continue
        if failed := build(library, *sources):
            print(f"farcall's {library.name} is not built, Python does the same: {failed}", file=sys.stderr)


if __name__ == "__main__":
    build_here(Path(__file__).parent)
