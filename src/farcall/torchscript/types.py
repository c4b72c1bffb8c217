"""Which type a value has for TorchScript: known from the function that made it, said by its user, or seen from it.

Owns nothing but the rules. A reference's holder knows the type where it made the creating call itself; anybody else
asks the owner, where the value is.
"""

from __future__ import annotations

from typing import Any

import torch

from farcall import api
from farcall.rpc.owned_values import Owned, wait_for_value
from farcall.rpc.rref import RRef
from farcall.serialize.functions import decode_function
from farcall.torchscript import extension

__all__ = ["type_of", "type_of_result"]


def type_of_result(function: Any) -> Any:
    """The type that ``function`` returns, if that is fixed: a TorchScript function or one operator; else None."""
    if isinstance(function, torch.jit.ScriptFunction):
        schema: Any = function.schema  # a property, whatever torch's stubs say
        returns = schema.returns
    elif isinstance(function, torch._ops.OpOverload):
        returns = function._schema.returns
    else:
        return None
    return returns[0].type if len(returns) == 1 else None


def type_of(rref: RRef[Any]) -> Any:
    """The type of a reference's value; None if it is nothing that TorchScript knows."""
    if rref._creation is not None:
        known = type_of_result(rref._creation.what)
        if known is not None:
            return known
    if rref._owned is not None:
        wait_for_value(rref, rref._owned, api.current_runtime().timeout_s)
        return _type_of_owned(rref._owned)
    text = api.rpc_sync(rref.owner(), _type_as_text, (rref,))
    return None if text is None else extension.load().parse_type(text)


def _type_as_text(rref: RRef[Any]) -> str | None:
    """At the owner."""
    found = type_of(rref)
    return None if found is None else str(found.annotation_str)


def _type_of_owned(owned: Owned) -> Any:
    if owned.type_hint is not None:
        from torch._sources import fake_range
        from torch.jit.annotations import try_ann_to_type

        return try_ann_to_type(owned.type_hint, fake_range())  # type: ignore[no-untyped-call]
    if owned.made_by[:1] in (b"s", b"o", b"b"):
        known = type_of_result(decode_function(owned.made_by))
        if known is not None:
            return known
    inferred = torch._C._jit_try_infer_type(owned.get())
    return inferred.type() if inferred.success() else None
