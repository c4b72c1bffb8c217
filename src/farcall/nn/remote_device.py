"""Where a remote module lives: ``worker``, ``worker/device`` or ``rank:N/device``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from farcall.ids import WorkerInfo

__all__ = ["RemoteDevice", "parse_remote_device"]


class RemoteDevice(NamedTuple):
    """A worker, by name or rank, and a device of it."""

    worker: str | int
    device: torch.device


class BadRemoteDevice(ValueError, RuntimeError):
    """A remote device that is none; torch raises the one or the other, depending on what is wrong."""


def parse_remote_device(text: str | WorkerInfo) -> RemoteDevice:
    """Read ``text``; raises ValueError with what is wrong."""
    if isinstance(text, WorkerInfo):
        return RemoteDevice(text.name, torch.device("cpu"))
    if not isinstance(text, str):
        raise TypeError(f"a remote device is a string such as 'worker1/cpu', not {type(text).__name__}")
    place, slash, device_text = text.partition("/")
    if place and slash and not device_text:
        raise BadRemoteDevice(f"could not parse the remote device {text!r}: Device string must not be empty")
    if not place or "/" in device_text:
        # The first sentence is what programs written for torch look for.
        raise BadRemoteDevice(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>': could not parse the "
            "remote device, expected 'worker', 'worker/device' or 'rank:N/device', for example 'worker1/cuda:0'"
        )
    try:
        device = torch.device(device_text or "cpu")
    except RuntimeError as error:
        raise BadRemoteDevice(f"could not parse the remote device {text!r}: {error}") from None
    if not slash and _is_device(place):
        raise BadRemoteDevice(f"the remote device {text!r} names no worker: write 'worker/{place}'")
    if place.startswith("rank:"):
        number = place.removeprefix("rank:")
        if not number.isdecimal():
            raise BadRemoteDevice(f"could not parse the remote device {text!r}: {number!r} is no rank")
        return RemoteDevice(int(number), device)
    return RemoteDevice(place, device)


def _is_device(text: str) -> bool:
    return text == "cpu" or text.partition(":")[0] == "cuda"
