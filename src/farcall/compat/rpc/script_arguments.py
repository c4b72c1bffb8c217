"""Are these arguments for that TorchScript function? Found out before anything is sent, by its schema.

Types are left to the function itself, which checks them where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_arguments"]


def check_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if there are too many or too few arguments, or one that the function does not know."""
    schema = function.schema
    name = schema.name.rpartition(".")[2]
    parameters = schema.arguments
    if len(args) > len(parameters):
        raise RuntimeError(
            f"{name}() expected at most {len(parameters)} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {schema}"
        )
    known = {parameter.name for parameter in parameters}
    for keyword in kwargs:
        if keyword not in known:
            raise RuntimeError(f"Unknown keyword argument '{keyword}' for {name}(). Declaration: {schema}")
    for parameter in parameters[len(args) :]:
        if parameter.name not in kwargs and not parameter.has_default_value():
            raise RuntimeError(f"{name}() is missing value for argument '{parameter.name}'. Declaration: {schema}")
