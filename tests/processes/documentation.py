"""The Python of the documentation, as programs: collects the code blocks of a page and runs them on a cluster.

    block                                      run as
    ```python, with `init_rpc(` in it          a program of its own, by two workers that are told their rank as by
                                               torchrun; by more if its first line says `# workers: 4`
    ```python                                  part of its page: every worker of one cluster (worker0, worker1, worker2)
                                               knows the functions and classes of the page; worker0 runs the rest, one
                                               block after the other
    ```python title="Not run: why"             not at all; the title is what a reader sees, too

Knows nothing of the pages themselves. A block has no expected output: it asserts what matters.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import farcall

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>python[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]*)"')
_WORKERS = re.compile(r"# workers: (\d+)")
PAGE_WORKERS = 3


@dataclass(frozen=True)
class Block:
    """One code block, and where it is."""

    page: str
    line: int
    code: str
    title: str

    @property
    def is_run(self) -> bool:
        return not self.title.startswith("Not run: ")

    @property
    def is_program(self) -> bool:
        return "init_rpc(" in self.code

    @property
    def workers(self) -> int:
        told = _WORKERS.match(self.code)
        return int(told[1]) if told else 2

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The README and everything under docs, by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks_of(page: str) -> list[Block]:
    """The Python blocks of a page."""
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["info"])
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, textwrap.dedent(match["code"]), title["title"] if title else ""))
    return found


def _compiled(block: Block, statements: list[ast.stmt]) -> Any:
    tree = ast.Module(statements, [])
    ast.increment_lineno(tree, block.line - 1)
    return compile(tree, str(ROOT / block.page), "exec", dont_inherit=True)


def _is_definition(statement: ast.stmt) -> bool:
    return isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    ) or (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant))


def run_page(rank: int, blocks: list[Block]) -> None:
    """In a worker of a cluster: know the functions of the page, and if it is the first worker run it."""
    module = ModuleType("page")
    sys.modules["page"] = module
    module.__dict__["__file__"] = str(ROOT / blocks[0].page)
    rest: list[tuple[Block, list[ast.stmt]]] = []
    for block in blocks:
        statements = ast.parse(block.code).body
        exec(_compiled(block, [one for one in statements if _is_definition(one)]), module.__dict__)
        rest.append((block, [one for one in statements if not _is_definition(one)]))
    farcall.barrier([f"worker{number}" for number in range(PAGE_WORKERS)])
    if rank == 0:
        for block, statements in rest:
            exec(_compiled(block, statements), module.__dict__)
        for name in [name for name in module.__dict__ if not name.startswith("__")]:
            del module.__dict__[name]  # references that the page keeps would be leaks


def join_and_run_page(rank: int, url: str, blocks: list[Block]) -> None:
    """A worker of the cluster that a page's blocks run on."""
    farcall.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=PAGE_WORKERS,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=url),
    )
    try:
        run_page(rank, blocks)
    except BaseException:
        farcall.shutdown(graceful=False)
        raise
    farcall.shutdown()


def run_program(rank: int, size: int, port: int, block: Block) -> None:
    """As one of the processes that a launcher starts."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(_compiled(block, ast.parse(block.code).body), main.__dict__)
