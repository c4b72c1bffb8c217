"""What is published: it builds, it can be installed where nothing of farcall is, and a program runs with it."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.kit.wheel import ROOT, Installed

import farcall


def told(installed: Installed, *command: str | Path, **more: str) -> str:
    done = installed.run(*command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    [wheel] = installed.dist.glob("*.whl")
    assert wheel.name.startswith(f"farcall-{farcall.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"farcall", "farcall.pth", f"farcall-{farcall.__version__}.dist-info"}
    assert "farcall/py.typed" in names
    assert f"farcall-{farcall.__version__}.dist-info/licenses/LICENSE" in names
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "farcall").rglob("*.py")}
    assert sources <= set(names)


def test_the_source_distribution_can_be_worked_on(installed: Installed) -> None:
    [archive] = installed.dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ("Makefile", "constraints.txt", "mkdocs.yml", "examples/pipeline.py", "tests/conftest.py", "docs/index.md")
    assert set(wanted) <= names


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
