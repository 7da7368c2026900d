"""Whether the account that jobs run as can enter the folder they are submitted from."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Any

import pytest

from services.cli.client import CliError
from services.cli.reach import blocking_folder
from services.cli.submit import check_folders
from services.contracts.jobs import JobSpec
from tests.support.servers import scratch_folder


class FakeGateway:
    """Jobs of its caller run as ``nobody``."""

    url = "http://127.0.0.1:8000"

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/whoami"
        return {"account": "nobody"}


def test_the_first_folder_that_keeps_an_account_out_is_named() -> None:
    with scratch_folder() as folder:
        closed, inner = folder / "closed", folder / "closed" / "inner"
        inner.mkdir(parents=True)
        folder.chmod(0o711)
        closed.chmod(0o700)
        assert blocking_folder(inner, "nobody") == closed
        assert blocking_folder(inner, getpass.getuser()) is None, "its owner is not kept out"
        with pytest.raises(CliError, match=f"account nobody, which cannot enter {closed}; let it in"):
            check_folders(FakeGateway(), [JobSpec(name="a", command=["true"], working_dir=str(inner))])  # type: ignore[arg-type]
        closed.chmod(0o711)
        assert blocking_folder(inner, "nobody") is None
        check_folders(FakeGateway(), [JobSpec(name="a", command=["true"], working_dir=str(inner))])  # type: ignore[arg-type]


def test_what_cannot_be_known_keeps_nobody_out(tmp_path: Path) -> None:
    assert blocking_folder(tmp_path / "missing", "nobody") is None
    assert blocking_folder(tmp_path, "no-such-account") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away takes root")
def test_the_owners_bits_count_before_those_of_others() -> None:
    with scratch_folder() as folder:
        folder.chmod(0o711)
        own = folder / "own"
        own.mkdir()
        own.chmod(0o077)
        os.chown(own, 65534, 65534)
        assert blocking_folder(own, "nobody") == own
