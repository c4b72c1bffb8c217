"""The forms that values of options may have: one function for each.

Each takes a name for its error and a value, and returns the value in the form that farcall works with. The error says
what is wrong and what to write instead. `options.py` says which option has which form, and which may be left out.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

TRANSPORTS: Final = ("unix", "tcp")
"""Every way for bytes between processes, the preferred one first."""
LOG_LEVELS: Final = ("info", "debug")
_DEVICE = re.compile(r"cpu|[a-z]+:\d+")
_HOST = re.compile(r"[A-Za-z0-9._\-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._\-]+)?")


def flag(name: str, value: object) -> bool:
    """True or False; nothing else that Python takes for one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def text(name: str, value: object) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def count(name: str, value: object) -> int:
    """A number of things, at least one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def seconds(name: str, value: object, remedy: str = "0 means never") -> float:
    """A finite time, perhaps 0; ``remedy`` is the last hint of the error."""
    if isinstance(value, timedelta):
        raise TypeError(f"{name} must be a number of seconds, not a timedelta: pass {value.total_seconds()!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    number = float(value) if abs(value) < sys.float_info.max else math.inf
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} must be a finite number of seconds, at least 0, not {value!r} ({remedy})")
    return number


def some_seconds(name: str, value: object, remedy: str = "leave it out for the default") -> float:
    """A finite time, more than 0."""
    number = seconds(name, value, remedy)
    if number == 0:
        raise ValueError(f"{name} must be more than 0: {remedy}")
    return number


def port(name: str, value: object) -> int:
    """A port, 0 for one that the system chooses; environment variables give it as text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not 0 <= value <= 65535:
        raise ValueError(f"{name} must be a port, 0 to 65535, not {value}")
    return value


def host(name: str, value: object) -> str:
    """A host's name or address, an IPv6 address without its brackets."""
    bare = text(name, value).strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    if not _HOST.fullmatch(bare):
        raise ValueError(f"{name} must be a host name or IP address without a port, not {value!r}")
    if bare.count(":") == 1:
        raise ValueError(f"{name} takes no port: give only the host of {value!r}")
    return bare


def init_method(name: str, value: object) -> str:
    """A url. Only its form is checked: torch knows which schemes exist, and users may register more."""
    url = text(name, value)
    try:
        parts = urlsplit(url)
        number = parts.port
    except ValueError as error:
        raise ValueError(f"{name} {value!r} is not a url: {error}") from None
    if not parts.scheme or "://" not in url:
        raise ValueError(
            f"{name} {value!r} is not a url: use 'env://', 'tcp://host:port' or 'file:///path/of/a/new/file'"
        )
    if parts.scheme == "tcp" and (not parts.hostname or number is None):
        raise ValueError(f"{name} {value!r} lacks a host or a port: use 'tcp://host:port'")
    if parts.scheme == "file" and not parts.path:
        raise ValueError(f"{name} {value!r} lacks a path: use 'file:///path/of/a/new/file'")
    return url


def table(name: str, value: object) -> str:
    """The place of a table in a program: ``"module:table"``."""
    module, _, attribute = text(name, value).partition(":")
    if not module or not attribute.isidentifier():
        raise ValueError(f"{name} must name a table, as 'module:table', not {value!r}")
    return f"{module}:{attribute}"


def transports(name: str, value: object) -> tuple[str, ...]:
    """Some of TRANSPORTS, in their order; text has commas between them."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f"{name} must be a sequence of names, not {type(value).__name__}")
    if not value or any(one not in TRANSPORTS for one in value):
        raise ValueError(f"{name} must be one or more of {', '.join(TRANSPORTS)}, not {list(value)!r}")
    return tuple(one for one in TRANSPORTS if one in value)


def encryption(name: str, value: object) -> str:
    """Whether to encrypt."""
    if value not in ("on", "off"):
        raise ValueError(f"{name} must be 'on' or 'off', not {value!r}")
    return str(value)


def log(name: str, value: object) -> str:
    """How much to log, and perhaps where."""
    level, colon, file = text(name, value).partition(":")
    if level not in LOG_LEVELS or (colon and not file):
        raise ValueError(
            f"{name} must be one of {', '.join(LOG_LEVELS)}, perhaps with a file as in 'info:/path', not {value!r}"
        )
    return f"{level}{colon}{file}"


def device(value: object) -> str:
    """The name of a device. Not torch's own parser: options do not know torch."""
    if isinstance(value, bool) or not (isinstance(value, int | str) or hasattr(value, "type")):
        raise TypeError(f"a device must be a name, a number or a torch.device, not {value!r}")
    name = f"cuda:{value}" if isinstance(value, int) else str(value)
    if name == "cuda":
        name = "cuda:0"
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"{value!r} is not a device: use 'cpu', 'cuda:0' or a number")
    return name


def devices(name: str, value: object) -> tuple[str, ...]:
    """Names of devices."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a list of devices, not {value!r}: for one write [{value!r}]")
    return tuple(map(device, value))


def device_maps(name: str, value: object) -> dict[str, dict[str, str]]:
    """For each worker, from devices to devices."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of dicts, not {type(value).__name__}")
    maps: dict[str, dict[str, str]] = {}
    for peer, pairs in value.items():
        if not isinstance(peer, str) or not isinstance(pairs, Mapping):
            raise TypeError(f"{name} must map names of workers to dicts of devices, not {peer!r} to {pairs!r}")
        maps[peer] = {device(source): device(target) for source, target in pairs.items()}
    return maps
