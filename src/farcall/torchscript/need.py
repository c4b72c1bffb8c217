"""Code that TorchScript is about to compile and that needs the extension: it is enabled just before.

Torch compiles ``rpc.rpc_async`` and ``RRef[...]`` whoever is in their place, and nobody is asked when such code runs;
so this looks at what is compiled. `watch` is told which functions count by whoever took the place of
``torch.distributed.rpc``, and wraps the doors through which such code comes: source, annotations, values whose type is
inferred, and files.

Where the extension cannot be had, code is compiled all the same (`refusing`). What fails at once is a reference that is
to become part of a module: there is nothing that could hold it.
"""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import IO, Any

import torch

from farcall.rpc.rref import RRef
from farcall.torchscript import extension, refusing
from farcall.torchscript.bridging import enable

__all__ = ["mentions", "mentions_in_file", "watch"]

_missing = object()
# How TorchScript writes a reference, and the type of one.
_PICKLED_REFERENCE = b"ctorch.distributed.rpc\nrref\n"
_REFERENCE_TYPE = b"RRef["
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
    load, load_buffer = native.import_ir_module, native.import_ir_module_from_buffer
    failure = extension.failure()
    if failure is not None:
        refusing.refuse(failure)  # what was compiled before farcall was taken away

    def parse_def(function: Any) -> Any:
        parsed = parse(function)
        if mentions(function, parsed.ast, wanted):
            _prepare()
        return parsed

    def infer_type(value: Any) -> Any:
        if _holds_reference(value):
            enable()
        return infer(value)

    def reference_type(element: Any) -> Any:
        _prepare()
        return make_type(element)

    def import_file(unit: Any, path: str, *rest: Any) -> Any:
        _prepare_for_file(path)
        return load(unit, path, *rest)

    def import_buffer(unit: Any, data: bytes, *rest: Any) -> Any:
        _prepare_for_file(io.BytesIO(data))
        return load_buffer(unit, data, *rest)

    front.parse_def, native._jit_try_infer_type, notes.RRefType = parse_def, infer_type, reference_type
    native.import_ir_module, native.import_ir_module_from_buffer = import_file, import_buffer

    def undo() -> None:
        front.parse_def, native._jit_try_infer_type, notes.RRefType = parse, infer, make_type
        native.import_ir_module, native.import_ir_module_from_buffer = load, load_buffer
        refusing.disable()

    return [undo]


def _prepare() -> None:
    """Code is about to be compiled that needs the extension when it runs."""
    try:
        enable()
    except RuntimeError as error:  # there is none, or it does not know this torch
        refusing.refuse(str(error))


def _prepare_for_file(file: str | IO[bytes]) -> None:
    if mentions_in_file(file, "data.pkl", _PICKLED_REFERENCE):
        enable()  # it is read at once
    elif mentions_in_file(file, ".py", _REFERENCE_TYPE):
        _prepare()


def mentions_in_file(file: str | IO[bytes], ending: str, wanted: bytes) -> bool:
    """Does a part of that archive whose name ends like this hold those bytes? What is no archive holds nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(wanted in archive.read(name) for name in archive.namelist() if name.endswith(ending))
    except (OSError, zipfile.BadZipFile):
        return False  # torch says what is wrong with it


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
