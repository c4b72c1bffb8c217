"""Code that needs the extension: `watch` enables it just before TorchScript compiles such code.

Torch compiles ``rpc.rpc_async`` and ``RRef[...]``, whatever functions are in their place, and asks no Python when such
code runs; so `watch` looks at the code. Its caller, which took the place of ``torch.distributed.rpc``, names the
functions that count. Code comes in four ways, which `watch` wraps: source, annotations, values of inferred type, files.

Without the extension such code is compiled all the same, since libraries do so on import, whether they use it or not;
`refuse` makes its calls fail. Torch's own operators would fail with a text that sends the user to ``init_rpc``. A
reference that is to become part of a module fails at once: no object could hold it.

Invariant: until such code is compiled without the extension, torch's script classes are as torch made them.
"""

from __future__ import annotations

import ast
import io
import logging
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import IO, Any

import torch

from farcall.errors import RpcError
from farcall.rpc.rref import RRef
from farcall.torchscript import extension
from farcall.torchscript.bridging import enable

logger: logging.Logger = logging.getLogger("farcall")

_missing = object()
# TorchScript's bytes for a reference, and for the type of one.
_PICKLED_REFERENCE = b"ctorch.distributed.rpc\nrref\n"
_REFERENCE_TYPE = b"RRef["
_MOST_LOOKED_AT = 1000
# Torch's text for the operators that the extension replaces, and for the type of a reference.
_NEEDED_BY = re.compile(r"prim::rpc_(?:sync|async|remote)\b|aten::(?:get_gradients|dist_backward)\b|\bRRef[\[(]")
_CONSTANT_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')

native: Any = torch._C
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []


def watch(functions: Iterable[Any]) -> list[Callable[[], None]]:
    """From now on, enable the extension where code needs it; the returned functions end that."""
    from torch.jit import annotations, frontend

    if not hasattr(torch._C, "_rpc_init"):
        return []  # a torch without RPC compiles none of this
    wanted = list(functions)
    front: Any = frontend
    notes: Any = annotations
    parse, infer, make_type = front.parse_def, native._jit_try_infer_type, native.RRefType
    load, load_buffer = native.import_ir_module, native.import_ir_module_from_buffer
    failure = extension.failure()
    if failure is not None:
        refuse(failure)  # code that was compiled before farcall was uninstalled

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
        stop_refusing()

    return [undo]


def _prepare() -> None:
    """Prepare for code that needs the extension when it runs, and is about to be compiled."""
    try:
        enable()
    except RuntimeError as error:  # no extension, or one that does not know this torch
        refuse(str(error))


def _prepare_for_file(file: str | IO[bytes]) -> None:
    if mentions_in_file(file, "data.pkl", _PICKLED_REFERENCE):
        enable()  # the reference is read at once
    elif mentions_in_file(file, ".py", _REFERENCE_TYPE):
        _prepare()


def mentions_in_file(file: str | IO[bytes], ending: str, wanted: bytes) -> bool:
    """Does a part of the archive whose name has this ending hold those bytes? False for a file that is no archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(wanted in archive.read(name) for name in archive.namelist() if name.endswith(ending))
    except (OSError, zipfile.BadZipFile):
        return False  # torch says what is wrong with the file


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
    if issubclass(type(value), RRef):
        return True
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return any(_holds_reference(item, left // 2) for item in value[:left])
    return False


# ---------------------------------------------------------------------- without the extension


def refuse(reason: str) -> None:
    """Make scripts that need the extension raise an `RpcError` of that text. A second call changes nothing."""
    with _lock:
        if _undo:
            return
        logger.warning("compiled TorchScript code that uses RPC, which will fail when called: %s", reason)
        for kind in (native.ScriptFunction, native.ScriptMethod):
            _undo.append(_guard(kind, reason))


def stop_refusing() -> None:
    """Put torch's classes back as they were."""
    with _lock:
        while _undo:
            _undo.pop()()


def needs_extension(script: Any) -> bool:
    """Does this script function or method, or one that it calls, issue RPC or use references?"""
    return _is_needed(script.inlined_graph)


def _is_needed(graph: Any) -> bool:
    if _NEEDED_BY.search(_CONSTANT_TEXT.sub("", str(graph))):
        return True
    for fork in graph.findAllNodes("prim::fork"):
        forked = fork.g("Subgraph").copy()  # torch's inlining leaves these out
        native._jit_pass_inline(forked)
        if _is_needed(forked):
            return True
    return False


def _guard(kind: Any, reason: str) -> Callable[[], None]:
    plain = kind.__call__
    # The key of a method has its class, not the class's name: modules from files may share names. The value holds the
    # class, so that no other object gets its id.
    looked_at: dict[tuple[str, int], tuple[bool, Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is native.ScriptMethod:
            owner = self.raw_owner._type()
            key = (self.name, id(owner))
        else:
            owner = None
            key = (self.qualified_name, 0)
        found = looked_at.get(key)
        if found is None:
            found = looked_at[key] = (needs_extension(self), owner)
        if found[0]:
            raise RpcError(reason)
        return plain(self, *args, **kwargs)

    kind.__call__ = call

    def undo() -> None:
        kind.__call__ = plain

    return undo
