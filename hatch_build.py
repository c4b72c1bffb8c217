"""Builds the compiled code (the core, ``_speedups.c`` of the flat form, ``_frames.c`` of frames), where that can be.

A hook of hatchling, for wheels and editable installs; as a program, it builds for the tree that it lies in. Without
compilers or Python's headers the wheel is pure Python, which does the same: that is never an error.
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
SUFFIX = ".abi3.so"
LIBRARIES = {
    PACKAGE / "serialize" / f"_speedups{SUFFIX}": PACKAGE / "serialize" / "_speedups.c",
    PACKAGE / "protocol" / f"_frames{SUFFIX}": PACKAGE / "protocol" / "_frames.c",
    PACKAGE / "core" / f"_core{SUFFIX}": PACKAGE / "core" / "native",
}
"""Each with its source: a file in C, or a folder of files in C++."""
TAG = "cp311-abi3"
"""The limited API of this Python, as the source asks for it: later ones have it, too."""


def build(target: Path, source: Path) -> str:
    """Compile ``source`` to ``target``; return why that failed, or nothing."""
    if os.name != "posix" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "only a CPython with its usual lock, on Linux or a Mac, can use it"
    in_c = source.suffix == ".c"
    name, usual = ("CC", "cc") if in_c else ("CXX", "c++")
    compiler = shlex.split(os.environ.get(name) or sysconfig.get_config_var(name) or usual)
    on_a_mac = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    fresh = target.with_name(f"{target.name}.{os.getpid()}")  # a process may have the old one mapped
    command = [
        *compiler,
        *("-O2", "-std=c11" if in_c else "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-DNDEBUG"),
        *on_a_mac,
        f"-I{sysconfig.get_path('include')}",
        *("-o", str(fresh), *map(str, [source] if in_c else sorted(source.glob("*.cc"))), "-pthread"),
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
    """Puts the libraries into the wheel; an editable install finds them in the tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._folder = tempfile.TemporaryDirectory()
        for library, source in LIBRARIES.items():
            target = root / library if version == "editable" else Path(self._folder.name, library.name)
            why_not = build(target, root / source)
            if why_not:
                self.app.display_warning(f"farcall's {library.name} is left out, Python does the same: {why_not}")
            elif version != "editable":
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"{TAG}-{platform}"
                build_data["force_include"][str(target)] = str(library.relative_to("src"))


def build_here(root: Path) -> None:
    """Build what is older than its source."""
    for library, source in LIBRARIES.items():
        target, files = root / library, [root / source, *(root / source).glob("*")]
        if target.exists() and target.stat().st_mtime > max(one.stat().st_mtime for one in files):
            continue
        if failed := build(target, root / source):
            print(f"farcall's {library.name} is not built, Python does the same: {failed}", file=sys.stderr)


if __name__ == "__main__":
    build_here(Path(__file__).parent)
