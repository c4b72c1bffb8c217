"""Every Python block of README.md and docs is run; those that are not say so, to their reader as well.

See documentation.py for how. For the blocks of one page: ``pytest tests/processes/test_documentation.py -k tutorial``.
"""

from __future__ import annotations

import re

import pytest
from tests.kit.ports import held_port, tcp_url
from tests.processes.documentation import (
    PAGE_WORKERS,
    ROOT,
    Block,
    blocks_of,
    join_and_run_page,
    pages,
    run_program,
)

from farcall.testing.cluster import finish, start_processes

BLOCKS = [block for page in pages() for block in blocks_of(page)]
PAGES = {page: [block for block in blocks_of(page) if block.is_run and not block.is_program] for page in pages()}


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_a_page(page: str) -> None:
    url = tcp_url()
    finish(start_processes(PAGE_WORKERS, join_and_run_page, url, PAGES[page]), 100.0)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.is_run and block.is_program], ids=lambda block: block.place
)
def test_a_program(block: Block) -> None:
    finish(start_processes(block.workers, run_program, block.workers, held_port(), block), 100.0)


def test_blocks_that_are_not_run_are_few_and_known() -> None:
    """A fragment is for what cannot run here. Whoever adds one enters it here, and gives a reason to its reader."""
    assert sorted(f"{block.page}: {block.title}" for block in BLOCKS if not block.is_run) == [
        "docs/faults.md: Not run: the test and its url are yours",
        "docs/gpu.md: Not run: needs two GPUs",
        "docs/secret.md: Not run: the file is yours",
        "docs/torchscript.md: Not run: it needs a C++ compiler",
        "docs/torchscript.md: Not run: the package is yours",
    ]


@pytest.mark.parametrize("page", pages())
def test_no_block_is_overlooked(page: str) -> None:
    fences = re.findall(r"^ *```+ *(\w*).*$", (ROOT / page).read_text(), re.MULTILINE)
    assert fences.count("python") == len(blocks_of(page))
    assert not {"py", "python3", "pycon"} & set(fences), "write ```python"
    for block in blocks_of(page):
        assert not block.title or not block.is_run, f"{block.place}: a title is only for what is not run"
