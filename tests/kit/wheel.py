"""farcall as its users have it: built as a wheel, and installed where nothing else of it is.

An editable install hides what only a wheel has (the path file, the command) and what only a wheel lacks. So tests of
the installation, the commands, the examples and the pages run with the interpreter of `Installed`. One build serves
the whole run of pytest, all of its processes included.
"""

from __future__ import annotations

import fcntl
import os
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.distribution import folder_of_the_run

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "tests" / "kit" / "quick_start"
"""On the path of every process of the tests: Python imports `sitecustomize` from there."""
BUILD_S = 250.0


@dataclass(frozen=True)
class Installed:
    """An environment with farcall from its wheel; torch and the like are lent by the one of the tests."""

    folder: Path

    @property
    def dist(self) -> Path:
        """The folder with the wheel and the source distribution."""
        return self.folder / "dist"

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    @property
    def command(self) -> str:
        return str(self.folder / "venv" / "bin" / "farcall")

    @property
    def packages(self) -> Path:
        [found] = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return found

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of a shell in which the environment was activated: its commands, and no path of the tests."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | {"PATH": f"{self.folder / 'venv' / 'bin'}:{os.environ['PATH']}"} | dict(more or {})

    def run(
        self, *command: str | Path, timeout_s: float = 250.0, cwd: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there, to its end; keywords in capitals are variables of the environment."""
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env=self.environment(more),
        )


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """farcall from its wheel."""
    pytest.importorskip("build", reason="the dev extra is not installed")
    pytest.importorskip("hatchling", reason="the dev extra is not installed")
    folder = folder_of_the_run(tmp_path_factory) / "installed"
    folder.mkdir(exist_ok=True)
    made = Installed(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _build(made)
            (folder / "ready").touch()
    return made


def _build(made: Installed) -> None:
    # Without isolation: that would fetch the build backend from the network.
    _do(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made.dist), str(ROOT))
    [wheel] = made.dist.glob("*.whl")
    venv.create(made.folder / "venv", with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", made.python]
    _do(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    # An editable install of farcall is not lent: the path files of a folder that is itself named in a path file are
    # not read.
    (made.packages / "lent.pth").write_text("\n".join([str(QUICK_START), *_lent()]))
    # The command that torch would bring.
    torchrun = made.folder / "venv" / "bin" / "torchrun"
    torchrun.write_text(f"#!{made.python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _lent() -> list[str]:
    """Where the packages that this Python sees are."""
    import msgspec
    import torch

    found = [str(Path(module.__file__ or "").parents[1]) for module in (torch, msgspec)]
    return list(dict.fromkeys([*found, *site.getsitepackages()]))
