"""Every page of README.md and docs is used as its reader would use it: see documentation.py.

One page: ``pytest tests/processes/test_documentation.py -k tutorial``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.kit.wheel import Installed
from tests.processes.documentation import ROOT, blocks_of, commands_of, compare, files_of, pages, run_page


@pytest.mark.timeout(900)  # the tutorial has many commands
@pytest.mark.parametrize("page", [page for page in pages() if commands_of(page) and page != "docs/profiling.md"])
def test_a_page(installed: Installed, tmp_path: Path, page: str) -> None:
    if page == "docs/notebook.md":
        pytest.importorskip("cloudpickle", reason="the notebook extra is not installed")
    run_page(page, installed, tmp_path)


def unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("page", pages())
def test_no_block_is_overlooked(page: str) -> None:
    assert not {"py", "python3", "pycon"} & {block.kind for block in blocks_of(page)}, "write ```python"
    files, commands = files_of(page), [command.text for command in commands_of(page)]
    for block in blocks_of(page):
        if block.kind != "python":
            continue
        assert block.title, f"{block.place}: a reader cannot run this: give it a file name, and a command"
        if block.title.startswith("Part of "):
            whole = files[block.title.removeprefix("Part of ")]
            assert unindented(block.text) in unindented(whole), f"{block.place} is not in that file"
        elif block.title in files:
            assert any(block.title in command for command in commands), f"{block.place}: no command runs it"


def test_blocks_that_are_not_run_are_few_and_known() -> None:
    """A fragment is for what cannot run here. Whoever adds one enters it here, and gives a reason to its reader."""
    titles = [(block.page, block.title) for page in pages() for block in blocks_of(page)]
    assert sorted(f"{page}: {title}" for page, title in titles if title.startswith("Not run: ")) == [
        "docs/gpu.md: Not run: needs a GPU",
        "docs/gpu.md: Not run: needs two GPUs",
        "docs/least_privilege.md: Not run: the module is yours",
        "docs/torchscript.md: Not run: it needs a C++ compiler",
        "docs/torchscript.md: Not run: the package is yours",
        "docs/weights.md: Not run: it needs NIXL",
        "docs/weights.md: Not run: it needs torchrl",
        "docs/weights.md: Not run: it needs vLLM",
    ]


@pytest.mark.parametrize(
    ("shown", "output", "is_right"),
    [
        (("a", "b"), "b\na\n", True),
        (("a",), "a\nb\n", False),
        (("a", "..."), "a\nb\n", True),
        (("took ... s",), "took 0.3 s\n", True),
        (("a", "a"), "a\n", False),
    ],
)
def test_what_counts_as_the_same_output(shown: tuple[str, ...], output: str, is_right: bool) -> None:
    assert (compare(shown, output) == "") is is_right


def test_readme_begins_with_the_way_to_install_it() -> None:
    for page in ("README.md", "docs/index.md"):
        before = (ROOT / page).read_text().partition("```python")[0]
        assert re.search(r"pip install '\.\[cli,notebook\]' +# in a checkout", before), page


def test_the_compose_file_gives_each_worker_what_it_needs() -> None:
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    files = files_of("docs/containers.md")
    services = yaml.safe_load(files["compose.yaml"])["services"]
    environments = [service["environment"] for service in services.values()]
    assert [environment["RANK"] for environment in environments] == ["0", "1"]
    for environment in environments:
        assert environment["WORLD_SIZE"] == str(len(services))
        assert environment["MASTER_ADDR"] in services
        assert {"MASTER_PORT", "FARCALL_SECRET"} < environment.keys()
    assert "COPY train.py /\n" in files["Dockerfile"]
