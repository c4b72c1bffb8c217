"""What test processes import, for the server that forks them (`farcall.testing.cluster`): loaded once, not by each.

pytest takes 0.1 s of every process that loads it, and what an optimizer of torch asks for takes 0.7 s. Nothing here
starts a thread, or leaves state that a forked process must not share.
"""

from __future__ import annotations

import encodings.ascii
import encodings.idna  # noqa: F401
import gc
import importlib
import multiprocessing.popen_forkserver
import multiprocessing.synchronize  # noqa: F401
import os
from contextlib import suppress

import numpy
import pytest  # noqa: F401
import tests.kit.team
import tests.kit.waiting  # noqa: F401
import torch  # noqa: F401

import farcall.api
import farcall.debug
import farcall.nn
import farcall.observe.observer
import farcall.observe.trace
import farcall.optim
import farcall.rpc.gather
import farcall.rpc.node_streams
import farcall.testing.cluster
import farcall.testing.faults
import farcall.weights.node  # noqa: F401

with suppress(Exception):  # a Python that it does not know yet: only tests that need it fail there
    importlib.import_module("torch._dynamo")  # for optimizers
# Python's generator does this by itself. torch's begins with the same seed in every process anyway.
os.register_at_fork(after_in_child=numpy.random.seed)
# A collection in a forked process would touch, and so copy, all that was loaded here.
gc.collect()
gc.freeze()
