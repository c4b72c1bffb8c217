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


def is_not_found(complaint: str) -> bool:
    """Does kubectl say that there is no such object? It names the reason in the server's answer."""
    return "Error from server (NotFound)" in complaint
