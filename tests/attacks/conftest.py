"""The installation that the live attacks of this room share; each leaves it running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import Installation
from tests.support.servers import scratch_folder


@pytest.fixture(scope="package")
def installation() -> Iterator[Installation]:
    """Two nodes of one GPU each."""
    with scratch_folder() as folder:
        made = Installation(folder / "data", "2x1")
        made.up()
        yield made
        made.down()
