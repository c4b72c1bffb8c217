"""The classes of PyTorch's own RPC suite, made from the installed torch wheel.

Imported by suite servers only (``server.py``): importing it imports torch and the whole suite, with farcall in
the place of ``torch.distributed.rpc`` or, for comparison, without.

The fault-injecting part must have a process of its own: importing its fixture registers one more backend, which
tests of the ordinary part can see (on stock as well).
"""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

# Classes that a test pickles are looked up by module and name, in every rank.
MODULE = "farcall_conformance_suite"
PARTS = ("ordinary", "faulty")
# Not of PyTorch: classes that fail in known ways, to see that this driver notices (test_driver.py).
SAMPLE = "sample"


def part_of(test: str) -> str:
    """Which part of the suite a test named Class.method belongs to."""
    if test.startswith("Sample"):
        return SAMPLE
    return "faulty" if test.startswith("Faulty") else "ordinary"


def put_farcall_in_place() -> None:
    import torch  # noqa: F401  (a program that is run unchanged has imported torch by then, too)

    import farcall.compat

    farcall.compat.install()


def load(part: str) -> dict[str, Any]:
    """The test classes of one part by name. Whatever is to be in the place of torch's RPC is there already."""
    if part == SAMPLE:
        # What ranks import themselves: in a fork, it would take longer than the test.
        import torch.testing._internal.common_distributed  # noqa: F401
        from tests.conformance.sample import SampleTest

        return {"SampleTest": SampleTest}
    from torch.testing._internal.distributed import rpc_utils

    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    if part == "faulty":
        from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture

        classes = rpc_utils.generate_tests("Faulty", FaultyRpcAgentTestFixture, rpc_utils.FAULTY_AGENT_TESTS, MODULE)
    else:
        from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
            TensorPipeRpcAgentTestFixture,
        )

        suites = [
            *rpc_utils.GENERIC_TESTS,
            *rpc_utils.TENSORPIPE_TESTS,
            *rpc_utils.GENERIC_CUDA_TESTS,
            *rpc_utils.TENSORPIPE_CUDA_TESTS,
        ]
        classes = rpc_utils.generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, suites, MODULE)
    vars(module).update(classes)
    return dict(classes)


def names(classes: dict[str, Any]) -> list[str]:
    loader = unittest.TestLoader()
    return sorted(f"{name}.{method}" for name, kind in classes.items() for method in loader.getTestCaseNames(kind))
