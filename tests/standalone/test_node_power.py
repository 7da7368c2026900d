"""Which nodes are to run, as it is written and read."""

from pathlib import Path

from services.standalone import backup, node_power
from services.standalone.data_folder import DataFolder


def test_what_a_killed_process_was_writing_is_no_request_and_no_secret(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    node_power.write_wanted(folder, "node-1", on=False)
    (tmp_path / "power" / "node-2.tmp").write_bytes((tmp_path / "power" / "node-1").read_bytes())
    assert node_power.read_wanted(folder) == {"node-1": node_power.Wanted(on=False)}
    (tmp_path / "secrets").mkdir()
    for name in ("service-root", "service-root.tmp"):
        (tmp_path / "secrets" / name).write_text("x")
    assert backup._kept(tmp_path) == [tmp_path / "secrets" / "service-root"]
