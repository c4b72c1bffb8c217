"""Parts of a node are tested as they are inside one: with garbage collections watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall.runtime.io import reader


@pytest.fixture(autouse=True)
def _collections_are_watched() -> Iterator[None]:
    end = reader.watch_collections()
    yield
    end()
