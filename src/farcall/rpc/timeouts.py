"""What a program may write as a timeout, and the one check of it.

    left out            the default of the node, or of the function that is called
    None                no limit, not even that of the call being served
    a number above 0    so many seconds
    0                   of a wait for a future or a version: do not wait, as everywhere in Python; of a call: an error
    anything else       an error

A call refuses 0 since programs mean two things by it: "do not wait", and, in ``torch.distributed.rpc``, "no limit".
Programs for that keep its numbers, 0 and -1 ("the default"): `farcall.compat` sets `torchs_numbers`, and TorchScript's
operators call `from_torch`.
"""

from __future__ import annotations

from farcall.runtime.io.timers import NEVER

LONGEST_S = 1e9
"""A longer timeout, about thirty years, counts as no limit."""


class _LeftOut(float):
    """The default of each parameter ``timeout``; known by its identity, so that a program cannot write it as -1."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET_TIMEOUT"

    def __reduce__(self) -> str:
        return "UNSET_TIMEOUT"  # the name of the one instance, also where it is unpickled


UNSET_TIMEOUT: float = _LeftOut(-1.0)  # a float, since torch's programs compare theirs, which is this one, with -1

torchs_numbers = False
"""Does a program for ``torch.distributed.rpc`` run here? `farcall.compat` sets it."""


def check_timeout(seconds: float | None) -> float:
    """Return the timeout of a call, checked; NEVER for None.

    For one that is given: whether it is left out, callers see by ``is UNSET_TIMEOUT``, on the path of each call.
    """
    if torchs_numbers and seconds in (0, -1):
        return _of_torch(seconds)
    return _checked(seconds, "more than 0", seconds != 0)


def check_wait(seconds: float | None) -> float:
    """Return the bound of a wait in this process, checked; NEVER for None."""
    return _checked(seconds, "at least 0", True)


def _checked(seconds: float | None, wanted: str, is_wanted: bool) -> float:
    if seconds is None:
        return NEVER
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(seconds).__name__}")
    if not seconds >= 0 or not is_wanted:
        raise ValueError(
            f"timeout must be {wanted} seconds, not {seconds!r}: write timeout=None for no limit, or leave it out "
            "for the default"
        )
    return seconds if seconds < LONGEST_S else NEVER


def from_torch(seconds: float) -> float | None:
    """Return what torch's number means, in farcall's terms: 0 is no limit, and -1 the default."""
    if seconds == 0:
        return None
    return UNSET_TIMEOUT if seconds == -1 else seconds


def _of_torch(seconds: float | None) -> float:
    from farcall.runtime.node import current_runtime

    return 0.0 if seconds == 0 else current_runtime().timeout_s
