"""``torch.distributed.rpc.server_process_global_profiler``: one profile of all requests that a process serves.

Entered on a worker, usually through a reference to it, it records the operators of every request until it is left.
Several may be entered at once; each has the records of its own time.
"""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList

from farcall.compat.rpc.unserved import find_unserved
from farcall.ids import WorkerInfo

if TYPE_CHECKING:
    from farcall.observe import capture
    from farcall.observe.profile import Collector
    from farcall.observe.spans import Harvest

__all__: list[str] = []


class _Everything:
    """The operators of every request, as torch recorded them; a `ProcessRecorder`."""

    def __init__(self, options: int) -> None:
        self.options = options
        self.records: list[capture.Records] = []

    def take_harvest(self, worker: WorkerInfo, harvest: Harvest) -> None:
        """Do nothing: a harvest has no operators."""

    def take_records(self, records: capture.Records) -> None:
        self.records.append(records)

    def collector_of(self, worker: WorkerInfo) -> Collector | None:
        return None


class _server_process_global_profile(profiler_legacy.profile):
    """As ``torch.autograd.profiler_legacy.profile``, but of all threads that serve requests.

    Afterwards ``function_events`` has all events, and ``process_global_function_events`` a list for each part of a
    request that ran meanwhile.
    """

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        from farcall.observe.capture import Detail  # loaded at the first use: programs start without it
        from farcall.observe.profile import PROFILER

        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        bits = {
            Detail.SHAPES: self.record_shapes,
            Detail.MEMORY: self.profile_memory,
            Detail.DEVICE: self.use_cuda,
        }
        self._everything = _Everything(sum(bit for bit, wanted in bits.items() if wanted))
        PROFILER.add(self._everything)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if not self.enabled:
            return None
        from farcall.observe.profile import PROFILER

        PROFILER.remove(self._everything)
        module: Any = profiler_legacy
        found = [module._parse_legacy_records(records) for records in self._everything.records]
        self.process_global_function_events = found
        events: Any = EventList(  # type: ignore[no-untyped-call]
            itertools.chain.from_iterable(found),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        events._build_tree()
        self.function_events = events
        return False

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, such as ``rref.rpc_sync().__enter__()`` returns: results, and no recorder."""
        return {name: value for name, value in self.__dict__.items() if name != "_everything"}


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
