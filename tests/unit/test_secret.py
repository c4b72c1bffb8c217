"""The secret's file is read again when it changes, and never believed when it cannot be used."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.kit.times import LONG_S

from farcall.secret import Secret

OLD, NEW = b"the secret of last year, a long one", b"the secret of this year, a long one"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "secret"
    put(found, OLD)
    return found


def put(path: Path, *lines: bytes) -> None:
    partial = path.with_suffix(".new")
    partial.write_bytes(b"".join(line + b"\n" for line in lines))
    partial.chmod(0o600)
    partial.rename(path)


def test_a_value_stays_as_it_is() -> None:
    assert Secret(OLD).values == (OLD,)


def test_a_short_one_is_made_slow_to_try_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    scrypt = hashlib.scrypt

    def counted(value: bytes, **choices: Any) -> bytes:
        tries.append(value)
        return scrypt(value, **choices)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    word = b"correct horse battery"
    [key] = Secret(word).values
    assert Secret(word).values == Secret(word).values == (key,)
    assert key not in (word, *Secret(b"correct horse batterx").values)
    assert len(key) == 32
    assert len(tries) == 2
    assert Secret(word).given() == (word,)
    assert Secret(OLD).values == (OLD,)


def test_threads_that_need_a_short_one_at_the_same_time_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dials and the listener do behind a file that has changed, or nodes that start in one process."""
    tries, scrypt, together = [], hashlib.scrypt, threading.Barrier(4)

    def counted(value: bytes, **choices: Any) -> bytes:
        tries.append(value)
        return scrypt(value, **choices)

    def values() -> tuple[bytes, ...]:
        together.wait()
        return Secret(b"a word of four threads").values

    monkeypatch.setattr(hashlib, "scrypt", counted)
    with ThreadPoolExecutor(4) as pool:
        keys = [future.result() for future in [pool.submit(values) for _ in range(4)]]
    assert len(set(keys)) == 1
    assert len(tries) == 1


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """For one that makes a key at that moment, say."""
    program = """
import os
from farcall import secret
with secret._stretching:
    child = os.fork()
    if not child:
        os._exit(0 if secret.Secret(b"the word of a child").values else 1)
    raise SystemExit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", program], timeout=LONG_S, check=True)


def test_the_file_is_read_again_when_it_changes(path: Path) -> None:
    secret = Secret(path=str(path))
    for lines in ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,)):
        put(path, *lines)
        assert secret.values == lines
    path.write_bytes(OLD + b"\r\n" + NEW + b"\r\n\n")
    assert secret.values == (OLD, NEW)


def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "farcall")
    secret = Secret(path=str(path))
    for lines in ((b"short",), (), (OLD, NEW, b"one secret too many, though long")):
        put(path, *lines)
        caplog.clear()
        assert secret.values == secret.values == (OLD,)
        assert len(caplog.records) == 1
        assert "short" not in caplog.text.replace("shorter", "")
    os.unlink(path)
    assert secret.values == (OLD,)
    put(path, NEW)
    assert secret.values == (NEW,)


@pytest.mark.parametrize(("content", "text"), [(b"", "0 lines"), (b"short", "at least 16"), (b"x" * 20, "may write")])
def test_what_cannot_be_used_is_refused_at_first(path: Path, content: bytes, text: str) -> None:
    path.write_bytes(content)
    path.chmod(0o622 if text == "may write" else 0o600)
    with pytest.raises(ValueError, match=text):
        Secret(path=str(path))
