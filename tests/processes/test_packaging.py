"""What is published: it builds, it can be installed where nothing of farcall is, and a program runs with it."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from tests.kit.wheel import ROOT, Installed

import farcall


def told(installed: Installed, *command: str | Path, **more: str) -> str:
    done = installed.run(*command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    [wheel] = installed.dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name for name in names if name.endswith(".so")}
    is_compiled = bool(libraries)
    assert is_compiled == can_compile()
    assert libraries in (
        set(),
        {f"farcall/{path}.abi3.so" for path in ("serialize/_speedups", "protocol/_frames", "core/_core")},
    )
    tags = "cp311-abi3-*" if is_compiled else "py3-none-any"
    assert fnmatch(wheel.name, f"farcall-{farcall.__version__}-{tags}.whl")
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"farcall", "farcall.pth", f"farcall-{farcall.__version__}.dist-info"}
    assert "farcall/py.typed" in names
    assert f"farcall-{farcall.__version__}.dist-info/licenses/LICENSE" in names
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "farcall").rglob("*.py")}
    assert sources <= set(names)


def can_compile() -> bool:
    """Whether this machine has compilers and Python's headers."""
    compilers = [(sysconfig.get_config_var(name) or usual).split()[0] for name, usual in (("CC", "cc"), ("CXX", "c++"))]
    return Path(sysconfig.get_path("include"), "Python.h").exists() and all(map(shutil.which, compilers))


def test_calls_use_the_compiled_codec_of_the_wheel(installed: Installed) -> None:
    program = "from farcall.serialize.flat import speedups; print(speedups)"
    why_not = told(installed, installed.python, "-c", program).strip()
    assert (not why_not) == (can_compile() and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))
    program = "from farcall.protocol.compiled import library; print(library is not None)"
    assert told(installed, installed.python, "-c", program).strip() == str(can_compile())
    program = "from farcall.core import compiled; print(compiled() is not None)"
    assert told(installed, installed.python, "-c", program).strip() == str(can_compile())


def test_without_a_compiler_the_wheel_is_pure(installed: Installed, tmp_path: Path) -> None:
    [archive] = installed.dist.glob("*.tar.gz")
    command = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    told(installed, *command, "--wheel-dir", tmp_path, archive, CC="no-such-compiler", CXX="no-such-compiler")
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"farcall-{farcall.__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_the_source_distribution_can_be_worked_on(installed: Installed) -> None:
    [archive] = installed.dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ("Makefile", "constraints.txt", "mkdocs.yml", "examples/pipeline.py", "tests/conftest.py", "docs/index.md")
    assert {
        *wanted,
        "hatch_build.py",
        "src/farcall/serialize/_speedups.c",
        "src/farcall/protocol/_frames.c",
        "src/farcall/core/native/core.cc",
    } <= names


def test_the_wheel_is_what_is_tested(installed: Installed) -> None:
    where = told(installed, installed.python, "-c", "import farcall, torch; print(farcall.__file__)").strip()
    assert Path(where).parent == installed.packages / "farcall"
    assert told(installed, installed.command, "--version").startswith(f"farcall {farcall.__version__} ")


STOCK = "import torch.distributed.rpc as rpc; print(rpc.rpc_sync.__module__)"


def test_the_path_file_puts_farcall_in_the_place_of_torchs_rpc(installed: Installed) -> None:
    """For programs that know nothing of farcall."""
    assert told(installed, installed.python, "-c", STOCK, FARCALL_INSTALL="1").startswith("farcall.")
    assert told(installed, installed.python, "-c", STOCK).startswith("torch.")


@pytest.mark.parametrize(
    "first",
    [
        "import farcall; farcall.init_rpc",
        "from farcall import rpc_sync",
        "import farcall.cli.app",
        "import torch, farcall; farcall.init_rpc",
        "import farcall.errors, farcall.compat.rpc",
    ],
)
def test_the_path_file_leaves_farcalls_own_import_alone(installed: Installed, first: str) -> None:
    """Whoever imports torch first may be farcall itself, in the midst of its own import."""
    told_module = told(installed, installed.python, "-c", f"{first}; {STOCK}", FARCALL_INSTALL="1")
    assert told_module.startswith("farcall.")


def test_commands_run_where_the_path_file_works(installed: Installed) -> None:
    assert "torch" in told(installed, installed.command, "doctor", FARCALL_INSTALL="1")
