"""Which code needs the extension: that which names the functions in question, by whatever name."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import farcall
import farcall.api as calls
from farcall.api import rpc_async as issue
from farcall.torchscript.need import mentions, mentions_in_file

WANTED = [calls.rpc_sync, calls.rpc_async]
remote = SimpleNamespace(rpc_sync=len)


def by_module(x: Any) -> Any:
    return calls.rpc_sync("other", by_module, (x,))


def by_package(x: Any) -> Any:
    return farcall.api.rpc_sync("other", by_module, (x,))


def by_name_of_its_own(x: Any) -> Any:
    return issue("other", by_module, (x,)).wait()


def by_the_same_name_of_another(x: Any) -> Any:
    return remote.rpc_sync(x)


def by_another_function_of_the_module(x: Any) -> Any:
    return calls.get_rpc_timeout() + x


def not_at_all(x: Any) -> Any:
    return x + missing  # type: ignore[name-defined]  # noqa: F821


def in_a_closure() -> Callable[..., Any]:
    call = calls.rpc_sync

    def inside(x: Any) -> Any:
        return call("other", by_module, (x,))

    return inside


@pytest.mark.parametrize(
    ("function", "needs"),
    [
        (by_module, True),
        (by_package, True),
        (by_name_of_its_own, True),
        (in_a_closure(), True),
        (by_the_same_name_of_another, False),
        (by_another_function_of_the_module, False),
        (not_at_all, False),
    ],
)
def test_names_count_by_what_they_stand_for(function: Callable[..., Any], needs: bool) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    assert mentions(function, tree, WANTED) is needs


def test_what_is_no_function_names_nothing() -> None:
    assert not mentions(remote, ast.parse("calls.rpc_sync"), WANTED)


def archive(parts: dict[str, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, content in parts.items():
            written.writestr(name, content)
    return file


def test_files_are_asked_part_by_part() -> None:
    file = archive({"m/data.pkl": b"..reference..", "m/code/m.py": b"def f(): ..", "m/constants.pkl": b"def"})
    assert mentions_in_file(file, "data.pkl", b"reference")
    assert not mentions_in_file(file, ".py", b"reference")
    assert mentions_in_file(file, ".py", b"def")


def test_what_is_no_archive_holds_nothing(tmp_path: Path) -> None:
    assert not mentions_in_file(io.BytesIO(b"reference"), "", b"reference")
    assert not mentions_in_file(str(tmp_path / "missing"), "", b"reference")
