"""Functions and classes that no other worker can import: sent by value if cloudpickle is installed.

    a function or class                                       travels
    its module and name lead to it                            by name
    the same, of a ``__main__`` that is no file               by value: nobody else has run this session
    the same, of a program that launched its workers          by value: nobody else runs this program
    a lambda, a closure, something re-bound, a local class    by value

A ``__main__`` without a file is a REPL, a notebook or ``python -c``. If ``__main__`` is a file, farcall assumes that
every worker runs that file: names are quick, and mean the same code everywhere. Without cloudpickle code goes by name
or not at all; a program that launched its workers is told before anything is sent. Code that does not travel once
(`units.py`) is serialized anew for each call. Bytecode names the Python that wrote it: another one would crash on it.

Owns that decision, and the bytes of code. It does not know messages: the reducers of the surrounding message write the
tensors and references that a closure holds.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import platform
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from farcall.errors import FunctionNotFound, NotPicklable, RpcError, SerializationError
from farcall.made import made
from farcall.serialize.context import Encoding
from farcall.serialize.policy import REDUCERS, Reducer

HINT = "define it at module level, or install cloudpickle on all workers: pip install 'farcall[notebook]'"
_missing = object()


class Main:
    """Facts about the ``__main__`` of this process."""

    is_alone: bool = False
    """Is it a program that no other worker runs? `farcall.launch` sets this."""


MAIN: Main = Main()


@cache
def is_available() -> bool:
    """Is cloudpickle installed here?"""
    return importlib.util.find_spec("cloudpickle") is not None


def is_of_session(module_name: object, qualified_name: str) -> bool:
    """Is this of a ``__main__`` that no other worker has, and can its code be sent? Raises if it must, and cannot."""
    if module_name != "__main__":
        return False
    if not is_available():
        if not MAIN.is_alone:
            return False
        raise SerializationError(
            f"cannot send {qualified_name}: launched workers do not run your script; its functions and classes travel "
            f"by cloudpickle: pip install 'farcall[notebook]', or put {qualified_name} into a module"
        )
    if MAIN.is_alone:
        return True
    main = sys.modules["__main__"].__dict__
    # For a program read from a pipe, ``__file__`` is "<stdin>".
    return "get_ipython" in main or str(main.get("__file__", "<")).startswith("<")


def goes_by_value(code: Any) -> bool:
    """Does its name not lead back to ``code``, and is cloudpickle installed to send it by value?"""
    module_name, qualified_name = code.__module__, code.__qualname__
    if not is_of_session(module_name, qualified_name):
        found: Any = sys.modules.get(module_name, _missing)
        for name in qualified_name.split("."):
            found = getattr(found, name, _missing)
        if found is code:
            return False
    return is_available()


def reduce_code(code: Any, encoding: Encoding) -> Any:
    """Write a function or class by name, as pickle does, or by value."""
    if not goes_by_value(code):
        return NotImplemented

    def reduce_in_message(reducer: Reducer, value: Any) -> Any:
        encoding.contextual = True
        return reducer(value, encoding)

    try:
        data = _dump(code, reduce_in_message)
    except RpcError:
        raise
    except Exception as error:
        raise _explain(code, error) from error
    return load_code, (data, importlib.util.MAGIC_NUMBER, platform.python_version())


def _dump(code: Any, reduce: Callable[[Reducer, Any], Any]) -> bytes:
    """Write ``code`` with cloudpickle; ``reduce(reducer, value)`` writes what has a reducer of its own."""
    cloudpickle: Any = importlib.import_module("cloudpickle")
    from farcall.serialize.classes import on_sent_whole  # programs whose functions have names need none

    class CodePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if value.__class__ is FunctionType and (how := made(value)) is not None:
                return how.maker, how.arguments
            if isinstance(value, type):
                on_sent_whole(value)
            reducer = REDUCERS.get(type(value))
            return super().reducer_override(value) if reducer is None else reduce(reducer, value)

    file = io.BytesIO()
    CodePickler(file, 5).dump(code)
    return file.getvalue()


def _explain(code: Any, error: Exception) -> SerializationError:
    """Name the part of ``code`` that cannot be pickled."""
    from farcall.serialize.diagnosis import find_in_code  # no message that can be sent needs it

    def is_fine(part: Any) -> bool:
        try:
            _dump(part, lambda reducer, value: (int, ()))
        except Exception:
            return False
        return True

    title = f"the class {code.__qualname__}" if isinstance(code, type) else f"{code.__qualname__}()"
    found = find_in_code(code, is_fine)
    if found is None:
        return NotPicklable(f"cannot send {title} by value: {type(error).__name__}: {error}; {HINT}")
    where, kind = found
    return NotPicklable(
        f"cannot send {title} by value: {where}, a {kind.__module__}.{kind.__qualname__}, cannot be pickled "
        f"({type(error).__name__}: {error}); put it into a module that workers import, or make it inside the function"
    )


def load_code(data: bytes, magic_number: bytes, python_version: str) -> Any:
    """Load a function or class that was sent by value, by a worker with the same bytecode."""
    if magic_number != importlib.util.MAGIC_NUMBER:
        raise SerializationError(
            f"a function or class was sent by value from Python {python_version}, and this worker runs Python "
            f"{platform.python_version()}, which cannot run such bytecode: put it into a module that both can import "
            "(it then goes by name), or run the same version of Python on all workers"
        )
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ModuleNotFoundError:
        raise FunctionNotFound(
            "the caller sent code by value (from a notebook, a REPL, or a lambda), and this worker lacks cloudpickle: "
            "pip install 'farcall[notebook]'"
        ) from None
    from farcall import children  # whoever has no code by value does not need it

    children.begin()
    return cloudpickle.loads(data)
