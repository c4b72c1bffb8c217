"""Schemas of TorchScript functions and operators: arguments are checked against them before a request is sent.

Owns the resolution of an operator's Python function (``torch.add``) to the one overload that fits its arguments. The
rules and the error texts are torch's.

Python accepts more than operator schemas say: sizes may be separate numbers, and some keywords exist only in Python.
The request of such a call names the Python function instead. So does a call of an operator with several results, which
Python returns as a named tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.jit import ScriptFunction

from farcall.rpc.functions import AsyncScriptFunction
from farcall.serialize import encode_function, installed_pickler, policy

_ONLY_IN_PYTHON = frozenset(("requires_grad", "out", "names", "pin_memory"))
# Whether a value of these types fits a schema depends on its type alone, so the cached answer holds for all values.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))
_MOST_REMEMBERED = 4096

_check: Any = torch._C._check_schema_allow_fake_script_object
_resolve: Any = torch._C._jit_resolve_packet
# By the function's id and the types of its arguments. The entry holds the function, so its id is not reused.
_named: dict[tuple[Any, ...], tuple[Any, bytes]] = {}


def name_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes | None:
    """Return the bytes that name ``func`` for these arguments; None: pickle ``func`` with the arguments.

    Raises:
        RuntimeError: ``func`` has a schema, and the arguments do not fit it.
    """
    kind = func.__class__
    if kind is BuiltinFunctionType or kind is ScriptFunction:
        types = (*map(type, args), *map(type, kwargs.values())) if kwargs else tuple(map(type, args))
        key = (id(func), types, *kwargs) if kwargs else (id(func), types)
        known = _named.get(key)
        if known is not None and known[0] is func and policy.INSTALLED.pickler is None:
            return known[1]
        name = (_name_script if kind is ScriptFunction else _name_overload)(func, args, kwargs or {})
        if name is not None:
            if _PLAIN.issuperset(types):
                if len(_named) >= _MOST_REMEMBERED:
                    _named.clear()
                _named[key] = (func, name)
            return name
    elif kind is AsyncScriptFunction:
        _check(func.function.schema, *args, **(kwargs or {}))
    return encode_function(func)


@cache
def _operators() -> frozenset[str]:
    """The names that torch's dispatcher knows.

    TorchScript also has names for `torch.tensor` and `torch.get_num_threads`, with other schemas, or with none.
    """
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name for name in names if name.startswith("aten::"))


def _name_script(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
    _check(func.schema, *args, **kwargs)
    return encode_function(func)


def _name_overload(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
    if installed_pickler() is not None or getattr(func, "__module__", None) == "math":
        return None
    name: str | None = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    if name is None or name not in _operators():
        return None
    if _ONLY_IN_PYTHON.intersection(kwargs) or (args and all(isinstance(one, int) for one in args)):
        return None
    overload = _resolve(name, *args, **kwargs) or "default"
    path = f"aten.{name.removeprefix('aten::')}.{overload}"
    operator: Any = torch.ops
    for part in path.split("."):
        operator = getattr(operator, part, None)
    if operator is None or len(operator._schema.returns) != 1:
        return None
    return b"b" + path.encode()
