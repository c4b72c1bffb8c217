"""Exceptions brought from another worker."""

import asyncio
import pickle
import subprocess
import threading
import traceback

import pytest
import torch

from farcall import errors
from farcall.errors import MissingPeers, RemoteError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, Frame
from farcall.serialize import decode_failure, encode_failure, restrict, write_value
from farcall.serialize.allowance import Allowance

WORKER = WorkerInfo("trainer", 3)


def raised(error, cause=None):
    """Raise and catch, so that there is a traceback."""

    def remote_function():
        raise error from cause

    try:
        remote_function()
    except BaseException as caught:
        return caught


def brought(error, cause=None):
    frame = encode_failure(raised(error, cause), WORKER)
    frame.buffers = [memoryview(bytearray(buffer)) for buffer in frame.buffers]
    return decode_failure(frame)


class Simple(Exception):
    pass


class OddSignature(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code = code


class DecoratesItsMessage(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class OwnReduction(Exception):
    def __init__(self, a, b):
        self.a, self.b = a, b

    def __str__(self):
        return f"{self.a}/{self.b}"

    def __reduce__(self):
        return OwnReduction, (self.a, self.b)


class BrokenText(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Meta(type):
    def __call__(cls, *args, **kwargs):
        if kwargs.pop("secret", None) != "xyz":
            raise RuntimeError("not so")
        return super().__call__(*args, **kwargs)


class Untouchable(Exception, metaclass=Meta):
    def __new__(cls, *args):
        if args != ("only this",):
            raise RuntimeError("no")
        return super().__new__(cls, *args)

    def __init__(self, text):
        super().__init__("something else")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        TypeError("a", 2),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "why"),
        subprocess.CalledProcessError(3, ["cmd"]),
        StopIteration(4),
        Simple(),
        Simple("text", 5),
        OddSignature(7, detail="x"),
        DecoratesItsMessage(8),
        OwnReduction(1, 2),
        RpcTimeout("too late"),
        MissingPeers("gone", ["a"]),
        AssertionError("two\nlines é"),
        torch.OutOfMemoryError("oom"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_message_args_and_attributes_survive(error):
    attributes = dict(error.__dict__)
    received = brought(error)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.args == error.args
    for name, value in attributes.items():
        assert getattr(received, name) == value


def test_an_error_of_torchscript_is_a_runtime_error_too():
    received = brought(torch.jit.Error("in a script"))
    assert isinstance(received, torch.jit.Error)
    assert isinstance(received, RuntimeError)
    assert str(received) == "in a script"
    assert str(brought(received)) == "in a script"


def test_remote_traceback_is_there_and_printed():
    received = brought(ValueError("bad value"), KeyError("root"))
    for text in (received.remote_traceback, "".join(traceback.format_exception(received))):
        assert "On WorkerInfo(id=3, name=trainer)" in text
        assert "in remote_function" in text
        assert "KeyError: 'root'" in text
        assert "direct cause" in text
    assert str(received) == "bad value"


def test_what_a_user_reads_names_public_classes_only():
    text = "".join(traceback.format_exception(decode_failure(encode_failure(ValueError("x"), "w1"))))
    assert "farcall.errors.RemoteTraceback" in text
    for name in errors.__all__:
        assert getattr(errors, name).__module__ == "farcall.errors"


def test_a_failure_passed_on_keeps_the_first_traceback():
    first = brought(ValueError("deep"))
    second = decode_failure(encode_failure(raised(first, first.__cause__), WorkerInfo("middle", 1)))
    assert type(second) is ValueError
    assert "name=middle" in second.remote_traceback
    assert "name=trainer" in second.remote_traceback


def test_notes_survive():
    error = ValueError("x")
    error.add_note("look here")
    received = brought(error)
    assert received.__notes__ == ["look here"]


def test_exceptions_may_carry_tensors():
    error = Simple("with", torch.arange(3))
    error.big = torch.arange(5000)
    received = brought(error)
    assert torch.equal(received.args[1], torch.arange(3))
    assert torch.equal(received.big, torch.arange(5000))


def test_unpicklable_attributes_are_left_out():
    error = Simple("x")
    error.lock = threading.Lock()
    error.code = 4
    received = brought(error)
    assert type(received) is Simple
    assert received.code == 4
    assert not hasattr(received, "lock")


def local_class():
    class Local(Exception):
        pass

    return Local("local text")


@pytest.mark.parametrize(
    ("make", "type_name", "message"),
    [
        (local_class, "Local", "local text"),
        (lambda: Simple(threading.Lock()), "Simple", "lock object"),
        (lambda: Untouchable("only this", secret="xyz"), "Untouchable", "something else"),
        (lambda: KeyboardInterrupt("stop"), "KeyboardInterrupt", "stop"),
        (lambda: SystemExit(3), "SystemExit", "3"),
        (lambda: GeneratorExit("g"), "GeneratorExit", "g"),
        (lambda: asyncio.CancelledError("c"), "CancelledError", "c"),
        (lambda: BaseExceptionGroup("group", [KeyboardInterrupt()]), "BaseExceptionGroup", "group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_rebuilt_is_a_remote_error_with_all_of_it(make, type_name, message):
    received = brought(make())
    assert type(received) is RemoteError
    assert received.type_name.endswith(type_name)
    assert message in received.message
    assert message in str(received)
    assert type_name in str(received)
    assert "in remote_function" in received.remote_traceback
    assert "name=trainer" in received.remote_traceback


def test_a_message_that_cannot_be_made():
    received = brought(BrokenText())
    assert type(received) is BrokenText
    assert "in remote_function" in received.remote_traceback


def test_class_missing_here(monkeypatch):
    frame = encode_failure(raised(Simple("x")), WORKER)
    monkeypatch.delattr(f"{__name__}.Simple")
    received = decode_failure(frame)
    assert type(received) is RemoteError
    assert received.type_name.endswith("Simple")


def test_groups():
    received = brought(ExceptionGroup("all", [ValueError("a"), ExceptionGroup("inner", [OddSignature(1, detail="d")])]))
    assert type(received) is ExceptionGroup
    assert received.message == "all"
    assert str(received.exceptions[0]) == "a"
    assert type(received.exceptions[1].exceptions[0]) is OddSignature
    assert "in remote_function" in received.remote_traceback


def test_group_with_a_member_that_cannot_be_rebuilt():
    received = brought(ExceptionGroup("all", [ValueError("a"), Untouchable("only this", secret="xyz")]))
    assert type(received) is ExceptionGroup
    assert [type(member) for member in received.exceptions] == [ValueError, RemoteError]
    assert "something else" in str(received.exceptions[1])


def test_long_tracebacks_are_cut():
    received = brought(Simple("x" * 1_000_000))
    assert len(received.remote_traceback) < 10_000
    assert len(str(received)) == 1_000_000


@pytest.mark.parametrize("kind", [Simple, asyncio.CancelledError], ids=["rebuilt here", "a RemoteError"])
def test_of_many_frames_the_first_and_the_last_are_printed_and_all_are_kept(kind):
    def ping(n):  # Python itself folds only frames that repeat one by one
        if not n:
            raise kind("bottom")
        pong(n)

    def pong(n):
        ping(n - 1)

    with pytest.raises(kind) as caught:
        ping(400)
    received = decode_failure(encode_failure(caught.value, WORKER))
    assert received.remote_traceback.count("File ") == 1 + 801  # this test's own is the first
    printed = "".join(traceback.format_exception(received))
    assert printed.count("File ") == 50
    assert "\n  [... 752 frames left out; error.remote_traceback has them]\n  File " in printed
    passed_on = decode_failure(encode_failure(raised(received, received.__cause__), WorkerInfo("middle", 1)))
    assert "error.remote_traceback has them" not in passed_on.remote_traceback


def test_deep_recursion():
    def recurse():
        recurse()

    try:
        recurse()
    except RecursionError as error:
        frame = encode_failure(error, WORKER)
    assert type(decode_failure(frame)) is RecursionError


MADE_UP = [5, (5, "message", "traceback", None), ("ValueError", None, "traceback", b""), ("A", "message", 7, None)]


@pytest.mark.parametrize("garbage", [b"", b"garbage", *map(pickle.dumps, MADE_UP)])
def test_garbage_is_still_an_exception(garbage):
    assert isinstance(decode_failure(Frame(FAILURE, payload=garbage)), RemoteError)


@pytest.mark.parametrize("made_up", MADE_UP)
def test_garbage_without_pickle_is_one_too(made_up):
    frame = Frame(FAILURE)
    restrict(Allowance((), (), "data"))
    try:
        write_value(frame, made_up)
        assert isinstance(decode_failure(frame), RemoteError)
    finally:
        restrict(None)
