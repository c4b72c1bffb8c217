"""What is published: it builds, it can be installed where nothing of farcall is, and a program runs with it."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import farcall

pytest.importorskip("build", reason="the dev extra is not installed")
pytest.importorskip("hatchling", reason="the dev extra is not installed")
ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **more: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")} | more
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=110, check=False, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what `python -m build` makes; the wheel is made from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: that would fetch the build backend from the network.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"farcall-{farcall.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"farcall", "farcall.pth", f"farcall-{farcall.__version__}.dist-info"}
    assert "farcall/py.typed" in names
    assert f"farcall-{farcall.__version__}.dist-info/licenses/LICENSE" in names
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "farcall").rglob("*.py")}
    assert sources <= set(names)


def test_the_source_distribution_can_be_worked_on(built: Path) -> None:
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ("Makefile", "constraints.txt", "mkdocs.yml", "examples/pipeline.py", "tests/conftest.py", "docs/index.md")
    assert set(wanted) <= names


def test_a_program_runs_where_only_the_wheel_is(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Its dependencies, torch above all, are not installed again but lent. An editable install of farcall is not: the
    # path files of a folder that is itself named in a path file are not read.
    (packages / "lent.pth").write_text("\n".join(_dependencies()))
    where = run(python, "-c", "import farcall, torch; print(farcall.__file__)").strip()
    assert Path(where).parent == packages / "farcall"
    version = run(tmp_path / "venv" / "bin" / "farcall", "--version")
    assert version.startswith(f"farcall {farcall.__version__} ")
    # The path file that the wheel brings: farcall in the place of torch's RPC, for programs that know nothing of it.
    stock = "import torch.distributed.rpc as rpc; print(rpc.rpc_sync.__module__)"
    assert run(python, "-c", stock, FARCALL_INSTALL="1").startswith("farcall.")
    assert run(python, "-c", stock).startswith("torch.")
    told = run(python, ROOT / "examples" / "asyncio_program.py")
    assert "100 requests, every answer right" in told


def _dependencies() -> list[str]:
    """Where the packages that this Python sees are."""
    import msgspec
    import torch

    found = [str(Path(module.__file__ or "").parents[1]) for module in (torch, msgspec)]
    return list(dict.fromkeys([*found, *site.getsitepackages()]))
