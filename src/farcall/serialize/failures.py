"""Exceptions that travel from the worker that raised them to the caller.

Owns the record of a failure: texts that always survive (type, message, traceback) and, beside them, the
exception's own reduction, which may not. It does not know calls.

    payload: (type name, message, remote traceback, payload of the reduction or None), pickled
    buffers: those of the reduction (an exception may carry tensors)

If members accept no pickles, the payload is flat and has no reduction: builtin exceptions and farcall's own are rebuilt
from their name and message.

Invariants: neither encoding nor decoding raises, whatever the exception's class does; an exception that would stop the
receiving process (KeyboardInterrupt, SystemExit: anything that is not an Exception) is never raised there as itself.
"""

from __future__ import annotations

import builtins
import os
import pickle
import re
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from farcall import errors
from farcall.errors import RemoteError, RemoteTraceback
from farcall.protocol.frames import FAILURE, Frame
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.pickler import read_value, write_value

_LONGEST_TEXT = 1 << 20
_LONGEST_MESSAGE = 1 << 12
_FRAMES_AT_EACH_END = 25
_FRAMES = re.compile(r'^(?P<margin>[ |]*)File ".*\n(?:(?P=margin).*\n)*', re.MULTILINE)
_THERE = "; error.remote_traceback has them"
_MISPLACED = re.compile("unexpected keyword argument '(?P<option>timeout|retry|metadata|serial)'")
_OURS = str(Path(__file__).parent.parent) + os.sep

# The parts from which an exception is rebuilt: class, args, callable, its arguments, state, group members.
_Reduction = tuple[type[Exception], tuple[Any, ...], Any, tuple[Any, ...], Any, "list[Any] | None"]


class ScriptError(torch.jit.Error, RuntimeError):
    """An error of TorchScript code on the callee. Also a RuntimeError, as callers did not choose how the code runs."""


def encode_failure(error: BaseException, worker: object, peer: Any = None) -> Frame:
    """Encode an exception raised on ``worker`` (its name or WorkerInfo) as a failure to be sent to ``peer``."""
    if isinstance(error, TypeError):
        _explain_misplaced_option(error)
    texts = (_type_name(error), _message(error), f"On {worker}:\n{_traceback(error)}")
    frame = Frame(FAILURE)
    reduction: bytes | memoryview | None = None
    if not INSTALLED.takes_pickles:
        write_value(frame, (*texts, None))
        return frame
    if isinstance(error, Exception):
        try:
            reduced = _reduce(error)
            try:
                write_value(frame, reduced, peer)
            except BaseException:
                write_value(frame, _without_unpicklable_state(reduced), peer)
            reduction = frame.payload
        except BaseException:
            pass  # its class or state cannot be pickled: the texts still travel
    frame.payload = pickle.dumps((*texts, reduction), 5)
    return frame


def _explain_misplaced_option(error: TypeError) -> None:
    """Add a note if the function refused an argument that is an option of calls, such as ``timeout``."""
    found = _MISPLACED.search(_message(error))
    if found is None or not _is_raised_by_call(error) or hasattr(error, "remote_traceback"):
        return
    option = found["option"]
    of_reference = ", or reference.rpc_sync(timeout=...).method(x)" if option == "timeout" else ""
    error.add_note(
        f"{option}= went to the function, with its arguments; as an option of the call, write "
        f"farcall.worker(name).options({option}=...).call(f, x){of_reference}"
    )


def _is_raised_by_call(error: BaseException) -> bool:
    """Did a function refuse its arguments, before its own code began? Then all frames are farcall's."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and all(name.startswith(_OURS) for name in frames)


def in_one_line(error: BaseException) -> str:
    """Return an error's type and message on one line, for a list of errors."""
    return " ".join(f"{type(error).__name__}: {_message(error)}".split())


def decode_failure(frame: Frame, peer: Any = None) -> BaseException:
    """Return the exception to raise: of the original type, or a RemoteError that describes it.

    Its attribute ``remote_traceback`` is the remote traceback; so is its ``__cause__``, which Python prints, but for
    frames in the middle of many.
    """
    try:
        type_name, message, remote_traceback, reduction = read_value(Frame(FAILURE, payload=frame.payload))
        if not type_name.__class__ is message.__class__ is remote_traceback.__class__ is str:
            raise ValueError("the message is malformed: an error without its texts")
    except Exception as error:
        return RemoteError(f"the call failed, and its error cannot be read: {type(error).__name__}: {error}")
    rebuilt: BaseException | None = None
    if reduction is None and not INSTALLED.takes_pickles:
        rebuilt = _by_name(type_name, message)
    if reduction is not None:
        try:
            inner = Frame(FAILURE, payload=reduction, buffers=frame.buffers, forks=frame.forks)
            rebuilt = _rebuild(read_value(inner, peer), message)
        except Exception:
            rebuilt = None
    if rebuilt is None:
        text = f"{type_name}: {message}\n\n{_for_people(remote_traceback)}"
        return RemoteError(text, type_name=type_name, message=message, remote_traceback=remote_traceback)
    with suppress(Exception):  # a class that forbids attributes still shows the text as its cause
        rebuilt.remote_traceback = remote_traceback  # type: ignore[attr-defined]
    rebuilt.__cause__ = RemoteTraceback(_for_people(remote_traceback))
    return rebuilt


def _reduce(error: Exception) -> _Reduction:
    """Take an exception apart so that it can be rebuilt with or without its constructor."""
    if type(error) is ExceptionGroup:
        # Reduce members one by one: each may need its own fallback.
        members = [(_message(member), _reduce(member)) for member in error.exceptions]
        return ExceptionGroup, (error.message,), ExceptionGroup, (), dict(error.__dict__), members
    if type(error) is torch.jit.Error:
        return ScriptError, error.args, ScriptError, error.args, None, None
    reduced = error.__reduce_ex__(5)
    assert isinstance(reduced, tuple)
    function, arguments, *rest = reduced
    return type(error), error.args, function, arguments, rest[0] if rest else None, None


def _without_unpicklable_state(reduction: _Reduction) -> _Reduction:
    cls, args, function, arguments, state, members = reduction
    if members is not None:
        members = [(message, _without_unpicklable_state(member)) for message, member in members]
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if _is_picklable(value)}
    return cls, args, function, arguments, state, members


def _is_picklable(value: Any) -> bool:
    try:
        write_value(Frame(FAILURE), value)
    except BaseException:
        return False
    return True


def _rebuild(reduction: _Reduction, message: str) -> Exception | None:
    """Rebuild the exception as pickle would; else without its constructor; else return None."""
    cls, args, function, arguments, state, members = reduction
    if INSTALLED.allowance is not None and (function is not cls or not issubclass(cls, Exception)):
        return None
    if members is not None:
        parts = [_rebuild(member, text) or RemoteError(text, message=text) for text, member in members]
        group: Exception = ExceptionGroup(args[0], parts)
        group.__dict__.update(state)
        return group
    for way in (_by_constructor, _by_hand):
        with suppress(Exception):  # a user's class may raise anything here: try the next way
            error = way(cls, args, function, arguments)
            if state:
                error.__setstate__(state)
            if type(error) is cls and isinstance(error, Exception) and _message(error) == message:
                return error
    return None


def _by_name(type_name: str, message: str) -> Exception | None:
    """Rebuild a builtin exception or one of farcall's, if its message is all that it carries."""
    home, _, name = type_name.rpartition(".")
    kind = vars(builtins if not home else errors).get(name) if home in ("", errors.__name__) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            error = kind(message)
            if str(error) == message:
                return error
    return None


def _by_constructor(cls: Any, args: tuple[Any, ...], function: Any, arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def _by_hand(cls: Any, args: tuple[Any, ...], function: Any, arguments: tuple[Any, ...]) -> Any:
    # For classes whose constructor takes other arguments than they pass on to ``Exception``.
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"<its message cannot be made: {type(broken).__name__}>"


def _from_the_function_on(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` without farcall's own frames above the user's function."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_OURS):
        found = found.tb_next
    return found or error.__traceback__


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(error), error, _from_the_function_on(error)))
    except BaseException as broken:
        text = f"<its traceback cannot be made: {type(broken).__name__}>\n{_type_name(error)}: {_message(error)}"
    # The message travels beside it. What another worker's error had, and where, means nothing at the next one.
    message = _message(error)
    text = text.replace(message, _cut(message, _LONGEST_MESSAGE)).replace(_THERE, "")
    return _cut(text, _LONGEST_TEXT)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _for_people(remote_traceback: str) -> str:
    """A remote traceback as it is printed: without the middle of long sequences of frames."""

    def cut(frames: re.Match[str]) -> str:
        _, *found = re.split(rf'^(?={re.escape(frames["margin"])}File ")', frames[0], flags=re.MULTILINE)
        if len(found) <= 2 * _FRAMES_AT_EACH_END:
            return frames[0]
        left_out = f"{frames['margin']}[... {len(found) - 2 * _FRAMES_AT_EACH_END} frames left out{_THERE}]\n"
        return "".join([*found[:_FRAMES_AT_EACH_END], left_out, *found[-_FRAMES_AT_EACH_END:]])

    return _FRAMES.sub(cut, remote_traceback)
