"""The public API, pinned: a name that comes or goes does so on purpose."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import farcall

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "Cluster",
    "CurrentCall",
    "Future",
    "LimitOptions",
    "MemberEvent",
    "MembershipOptions",
    "MemoryOptions",
    "Node",
    "ObservingOptions",
    "Part",
    "RRef",
    "RemoteTensor",
    "Retry",
    "RpcBackendOptions",
    "Stream",
    "TlsOptions",
    "Worker",
    "WorkerInfo",
    "all_gather",
    "allow",
    "as_completed",
    "autograd",
    "barrier",
    "batched",
    "compat",
    "current_call",
    "debug",
    "errors",
    "functions",
    "gather",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "launch",
    "map",
    "member_events",
    "members",
    "metrics",
    "nn",
    "on_member",
    "optim",
    "outgoing",
    "profile",
    "publish",
    "publish_part",
    "remote",
    "rpc_async",
    "rpc_sync",
    "share",
    "shared_empty",
    "shutdown",
    "subscribe",
    "subscribe_parts",
    "torchscript",
    "wait_all",
    "worker",
]
UNDERSCORED = [
    "_delete_all_user_and_unforked_owner_rrefs",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "_use_rpc_pickler",
]
OF_NODE = [
    "aclose",
    "all_gather",
    "barrier",
    "checks_leaks",
    "dashboard_url",
    "get_worker_info",
    "member_events",
    "members",
    "metrics",
    "metrics_port",
    "on_member",
    "publish",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shared_empty",
    "shutdown",
    "snapshot",
    "start",
    "subscribe",
    "workers",
]
MODULES = ("autograd", "compat", "debug", "errors", "functions", "nn", "optim", "torchscript")


def test_the_names() -> None:
    assert sorted(farcall.__all__) == PUBLIC
    assert set(PUBLIC + UNDERSCORED) == set(farcall._HOMES)
    assert set(PUBLIC + UNDERSCORED) <= set(dir(farcall))


@pytest.mark.parametrize("name", PUBLIC + UNDERSCORED)
def test_each_can_be_had(name: str) -> None:
    found = getattr(farcall, name)
    assert isinstance(found, ModuleType) if name in MODULES else callable(found)


def test_calls_on_pages_need_no_other_import() -> None:
    """A page that writes `farcall.compat.install()` is followed by `import farcall` alone."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    called = {name for page in pages for name in re.findall(r"`(farcall(?:\.\w+)+)\(", page.read_text())}
    assert "farcall.compat.install" in called
    program = f"import farcall\nfor name in {sorted(called)}:\n    eval(name)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_node_shows_what_is_documented_of_it() -> None:
    assert [name for name in dir(farcall.Node) if not name.startswith("_")] == OF_NODE
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.search(r"::: farcall\.node\.Node\n    options:\n      members: \[([^]]*)\]", page)
    assert listed is not None
    assert sorted(name.strip() for name in listed[1].split(",")) == OF_NODE


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        farcall.nonsense  # noqa: B018


def test_importing_loads_nothing_else() -> None:
    program = "import farcall, sys; print('torch' in sys.modules, 'farcall.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_version_is_one_that_tools_can_order() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\w+)?", farcall.__version__)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.search(rf"(^::: farcall\..*\b{name}$)|`farcall\.{name}`", page, re.MULTILINE), "enter it in docs/api.md"
