"""Whether the elements of a tensor or array lie inside the memory that its message brought.

Owns the one check that every tensor and array passes which is made over memory of a message, whatever its form and
however far members trust each other. torch does not do it: ``set_`` enlarges a storage that is too small, by memory as
others left it. (``_speedups.c`` reads row-major tensors only, and compares their size with the bytes that are left.)

It does not know messages. Invariant: what passes reads and writes the ``held_bytes`` of its message and nothing else.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

EXPANSION: Final = 1 << 16
"""A tensor may show its memory several times, as an expanded one does (stride 0), but no more often than this: whoever
copies its elements needs memory for all. Memory below `_LEAST_BYTES` counts as that much, so 256 MiB always pass."""
_LEAST_BYTES: Final = 4096


def size_of(shape: tuple[int, ...], item_bytes: int) -> int:
    """Return the size of all elements, written out; raise ``ValueError`` if no tensor has such a shape."""
    if shape.__class__ is not tuple:
        raise ValueError("the message is malformed: a tensor's shape makes no sense")
    extent = 1
    for length in shape:
        if length.__class__ is not int or length < 0:
            raise ValueError("the message is malformed: a tensor's shape makes no sense")
        extent *= length or 1  # an empty tensor has strides, which count its other lengths
    if extent * item_bytes >= 1 << 63:
        raise ValueError("the message is malformed: a tensor's shape makes no sense")
    return 0 if 0 in shape else extent * item_bytes


def check_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, item_bytes: int, held_bytes: int
) -> None:
    """Raise ``ValueError`` unless each element lies within ``held_bytes`` of memory. The offset is in elements.

    Everything may be what a stranger wrote, of any type.
    """
    if (
        shape.__class__ is not tuple
        or strides.__class__ is not tuple
        or len(shape) != len(strides)
        or offset.__class__ is not int
        or offset < 0
    ):
        raise ValueError("the message is malformed: a tensor's shape makes no sense")
    last, count = offset, 1
    for length, stride in zip(shape, strides, strict=True):
        if length.__class__ is not int or stride.__class__ is not int or length < 0 or not 0 <= stride < 1 << 63:
            raise ValueError("the message is malformed: a tensor's shape makes no sense")
        count *= length
        last += (length - 1) * stride
    size = count * item_bytes
    if not size:
        size_of(shape, item_bytes)
    elif (last + 1) * item_bytes > held_bytes:
        raise ValueError("the message is malformed: a tensor lies outside the memory that it brought")
    elif size > held_bytes and _is_too_expanded(size, held_bytes):
        raise ValueError(f"the message is malformed: a tensor shows {held_bytes} bytes more than {EXPANSION} times")


def _is_too_expanded(size_bytes: int, held_bytes: int) -> bool:
    return size_bytes > EXPANSION * max(held_bytes, _LEAST_BYTES)


def must_be_written_out(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    """At the sender: does a view show its memory so often that no reader would take it as it is?"""
    size = prod(shape) * item_bytes
    if size <= EXPANSION * _LEAST_BYTES:
        return False
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    once = prod(length for length, stride in zip(shape, strides, strict=True) if stride)  # sent without the gaps
    return _is_too_expanded(size, min(span, once) * item_bytes)


def check_array(shape: Any, item_bytes: int, held_bytes: int) -> None:
    """Raise ``ValueError`` unless a numpy array of that shape has exactly ``held_bytes``, no element none."""
    if size_of(shape, max(item_bytes, 1)) != held_bytes:
        raise ValueError("the message is malformed: an array lies outside the memory that it brought")
