"""torch's number of threads, the same in all threads that run functions.

torch keeps one number for the process, and OpenMP one for each thread, by which matrix products go. A thread takes over
the process's when torch first asks for it there, which a product does not: a team of all cores appears instead. Later
changes never reach it. torch tells nobody of a change, so `torch.set_num_threads` is wrapped while there is a node.

A number counts that the main thread sets, or a function that farcall runs. Other threads set their own, as the one of a
``DataLoader`` that pins memory does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from farcall.runtime.node.current import STARTED, runtime_of_thread, while_there_are_nodes


class TorchThreads:
    """The program's number, 0 if none was set since the first node began, and torch's own function."""

    def __init__(self) -> None:
        self._number = 0
        self._own: Any = torch.set_num_threads

    def take_over(self) -> None:
        """The calling thread computes with the program's number from now on."""
        if self._number:
            self._own(self._number)
        else:
            torch.get_num_threads()  # takes over the process's, see above

    def begin(self) -> Callable[[], None]:
        """Hear of changes, until what is returned is called."""
        self._number, self._own = 0, torch.set_num_threads

        def set_num_threads(nthreads: int) -> None:
            self._own(nthreads)
            if runtime_of_thread() is not None or threading.current_thread() is threading.main_thread():
                self._number = nthreads
                for runtime in list(STARTED):
                    runtime.renew_threads()

        functools.update_wrapper(set_num_threads, self._own)  # so that it is pickled by torch's name
        torch.set_num_threads = set_num_threads
        return self._end

    def _end(self) -> None:
        torch.set_num_threads = self._own


TORCH_THREADS = TorchThreads()
while_there_are_nodes(TORCH_THREADS.begin)
