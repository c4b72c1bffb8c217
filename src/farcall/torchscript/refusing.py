"""Where the extension cannot be had: code that needs it is compiled, and refused when it is called.

Libraries compile such code while they are imported, whoever uses it or not; so it is not compiling it that fails.
Torch's own operators would fail where it runs, by a text that sends the user to ``init_rpc``. Here the call of a script
from Python looks first at what that script does. Only then: while nothing was compiled that needs the extension, or
where it is at work, torch's classes are as torch made them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from farcall.errors import RpcError

__all__ = ["disable", "needs_extension", "refuse"]

logger: logging.Logger = logging.getLogger("farcall")

native: Any = torch._C
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
# What is printed of the operators that the extension replaces, and of the type of a reference.
_NEEDED_BY = re.compile(r"prim::rpc_(?:sync|async|remote)\b|aten::(?:get_gradients|dist_backward)\b|\bRRef[\[(]")
_CONSTANT_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def refuse(reason: str) -> None:
    """From now on calls of scripts that need the extension raise an `RpcError` of that text. Again: changes nothing."""
    with _lock:
        if _undo:
            return
        logger.warning("TorchScript code that uses RPC is compiled, and will fail when it is called: %s", reason)
        for kind in (native.ScriptFunction, native.ScriptMethod):
            _undo.append(_guard(kind, reason))


def disable() -> None:
    """Have torch's classes as they were."""
    with _lock:
        while _undo:
            _undo.pop()()


def needs_extension(script: Any) -> bool:
    """Does this function or method, or one that it calls, issue RPC or use references?"""
    return _is_needed(script.inlined_graph)


def _is_needed(graph: Any) -> bool:
    if _NEEDED_BY.search(_CONSTANT_TEXT.sub("", str(graph))):
        return True
    for fork in graph.findAllNodes("prim::fork"):
        forked = fork.g("Subgraph").copy()  # torch does not look into these when it inlines
        native._jit_pass_inline(forked)
        if _is_needed(forked):
            return True
    return False


def _guard(kind: Any, reason: str) -> Callable[[], None]:
    plain = kind.__call__
    # A method is found again by its class, not by that one's name: modules from files may have the same. The class
    # is held, so that its id stays its own.
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
