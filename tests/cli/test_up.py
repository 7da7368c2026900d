"""What `wattshift up` says once an installation is up."""

from pathlib import Path

import pytest

from services.cli.site.local import print_up


def test_up_says_how_other_commands_find_a_folder_that_they_would_not_look_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, other = tmp_path / "usual", tmp_path / "an other"
    monkeypatch.setenv("WATTSHIFT_DATA_DIR", str(usual))
    said: list[bool] = []
    for folder in (usual, other):
        print_up("http://127.0.0.1:9", folder, False)
        said.append(f"WATTSHIFT_DATA_DIR='{folder}'" in capsys.readouterr().out.replace("\n", ""))
    assert said == [False, True]
