"""Errors of other programs that only their text tells apart: all such texts are here.

Our own errors have classes, and codes on the wire. `tests/processes/test_foreign_errors.py` has the programs themselves
say these.
"""

from __future__ import annotations


def is_port_taken(error: RuntimeError) -> bool:
    """Could torch's store not listen, since somebody else does? Its two servers say so in two ways."""
    return "EADDRINUSE" in str(error) or "Address already in use" in str(error)


def is_changed_in_place(error: RuntimeError) -> bool:
    """Does torch's backward pass miss a value that was changed in place since?"""
    return "modified by an inplace operation" in str(error)


def is_of_local_code(error: Exception) -> bool:
    """Does Python's pickle refuse a function or class since no module has it under its name?"""
    return "<lambda>" in str(error) or "<locals>" in str(error) or "local object" in str(error)


def is_attribute_missing(error: AttributeError) -> bool:
    """Does Python's pickle not find what a message names? An object's own code may raise the same class."""
    return "attribute" in str(error)


def refused_forward(port: int) -> str:
    """How a line of ssh's ends whose server does not forward ``port``; ssh goes on."""
    return f"remote port forwarding failed for listen port {port}"


def is_not_found(complaint: str) -> bool:
    """Does kubectl say that there is no such object? It names the reason in the server's answer."""
    return "Error from server (NotFound)" in complaint
