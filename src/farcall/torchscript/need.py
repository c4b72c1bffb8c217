"""Code that TorchScript is about to compile and that needs the extension: it is enabled just before.

Torch compiles ``rpc.rpc_async`` and ``RRef[...]`` whoever is in their place, and nobody is asked when such code runs;
so this looks at what is compiled. `watch` is told which functions count by whoever took the place of
``torch.distributed.rpc``, and wraps the three doors through which such code comes: source, annotations and values
whose type is inferred.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from farcall.remote.reference import RRef
from farcall.torchscript.bridging import enable

__all__ = ["mentions", "watch"]

_missing = object()
_MOST_LOOKED_AT = 1000


def watch(functions: Iterable[Any]) -> list[Callable[[], None]]:
    """From now on enable the extension where it is needed; what is returned ends that."""
    from torch.jit import annotations, frontend

    if not hasattr(torch._C, "_rpc_init"):
        return []  # a torch without RPC compiles none of this
    wanted = list(functions)
    front: Any = frontend
    notes: Any = annotations
    native: Any = torch._C
    parse, infer, make_type = front.parse_def, native._jit_try_infer_type, native.RRefType

    def parse_def(function: Any) -> Any:
        parsed = parse(function)
        if mentions(function, parsed.ast, wanted):
            enable()
        return parsed

    def infer_type(value: Any) -> Any:
        if _holds_reference(value):
            enable()
        return infer(value)

    def reference_type(element: Any) -> Any:
        enable()
        return make_type(element)

    front.parse_def, native._jit_try_infer_type, notes.RRefType = parse_def, infer_type, reference_type

    def undo() -> None:
        front.parse_def, native._jit_try_infer_type, notes.RRefType = parse, infer, make_type

    return [undo]


def mentions(function: Any, tree: ast.AST, wanted: list[Any]) -> bool:
    """Does the code of ``function`` name one of the ``wanted`` functions?"""
    if not isinstance(function, FunctionType):
        return False
    names: dict[str, Any] = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            pass  # not bound yet
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            found = _resolve(node, names)
            if any(found is one for one in wanted):
                return True
    return False


def _resolve(node: ast.AST, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, _missing)
    if isinstance(node, ast.Attribute):
        module = _resolve(node.value, names)
        if isinstance(module, ModuleType):
            return getattr(module, node.attr, _missing)
    return _missing


def _holds_reference(value: Any, left: int = _MOST_LOOKED_AT) -> bool:
    if type(value) is RRef:
        return True
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return any(_holds_reference(item, left // 2) for item in value[:left])
    return False
