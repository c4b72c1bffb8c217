"""Are these the arguments of that TorchScript function or operator? Found out before anything is sent, by its schema.

Owns the way from an operator's Python function (``torch.add``) to the one overload that its arguments mean. The rules
and the texts of errors are torch's own.

Python is more generous with operators than their schemas are: sizes may be separate numbers, and some keywords exist
only there. Such a call goes by the function's path, and so does one with several results, which Python names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.jit import ScriptFunction

from farcall.remote.functions import AsyncScriptFunction
from farcall.serialize import encode_function, installed_pickler

__all__ = ["name_function"]

_ONLY_IN_PYTHON = frozenset(("requires_grad", "out", "names", "pin_memory"))
# Values of these types match or do not whatever they are, so that what was found once holds.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))
_MOST_REMEMBERED = 4096

_check: Any = torch._C._check_schema_allow_fake_script_object
_resolve: Any = torch._C._jit_resolve_packet
_operators: dict[int, tuple[Any, str]] = {}
_overloads: dict[Any, bytes | None] = {}


def name_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes | None:
    """The bytes that name ``func`` for these arguments, or None if it goes with them.

    Raises:
        RuntimeError: ``func`` has a schema, and these are not its arguments.
    """
    kind = func.__class__
    if kind is BuiltinFunctionType:
        overload = _name_overload(func, args, kwargs)
        if overload is not None:
            return overload
    elif kind is ScriptFunction:
        _check(func.schema, *args, **(kwargs or {}))
    elif kind is AsyncScriptFunction:
        _check(func.function.schema, *args, **(kwargs or {}))
    return encode_function(func)


def _name_overload(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes | None:
    known = _operators.get(id(func))
    if known is None:
        known = _find_operator(func)
    if known[0] is not func or not known[1] or installed_pickler() is not None:
        return None
    key = (known[1], *map(type, args), *kwargs, *map(type, kwargs.values())) if kwargs else (known[1], *map(type, args))
    found = _overloads.get(key, key)
    if found is not key:
        return found  # type: ignore[return-value]
    named = _resolve_overload(known[1], args, kwargs or {})
    if _PLAIN.issuperset(map(type, args)) and (not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))):
        if len(_overloads) >= _MOST_REMEMBERED:
            _overloads.clear()
        _overloads[key] = named
    return named


def _find_operator(func: Any) -> tuple[Any, str]:
    """``func`` and its operator's name, "" for none; remembered, with the function, so that its id stays its own."""
    name: str | None = None
    if getattr(func, "__module__", None) != "math":
        name = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    found = (func, name if name is not None and name.startswith("aten::") else "")
    if len(_operators) >= _MOST_REMEMBERED:
        _operators.clear()
    _operators[id(func)] = found
    return found


def _resolve_overload(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
    if _ONLY_IN_PYTHON.intersection(kwargs) or (args and all(isinstance(one, int) for one in args)):
        return None
    overload = _resolve(name, *args, **kwargs) or "default"
    path = f"aten.{name.removeprefix('aten::')}.{overload}"
    operator: Any = torch.ops
    for part in path.split("."):
        operator = getattr(operator, part, None)
    if operator is None or len(operator._schema.returns) != 1:
        return None
    return b"o" + path.encode()
