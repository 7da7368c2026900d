"""``wattshift lab experiment``: results, page, and what is said of a file that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.commands import app
from services.cli.commands import CliError

FILE = """
zones = ["SE"]
cluster = "4x2:RTX3090"
baseline = "las"
traces = [{ label = "an hour", jobs = "green-year", start = "2023-08-01", days = 0.04, tail_days = 2 }]
policies = [{ policy = "las" }, { policy = "fifo" }]
"""


def test_an_experiment_leaves_a_table_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(FILE, encoding="utf-8")
    ran = CliRunner().invoke(app, ["experiment", str(tmp_path / "one.toml"), "--out", str(tmp_path / "out"), "--json"])

    assert ran.exit_code == 0, ran.output
    assert [(row["label"], row["cells"]) for row in json.loads(ran.stdout)] == [("las", 1), ("fifo", 1)]
    assert (tmp_path / "out" / "results.csv").read_text().startswith("policy,trace,zone,signal,seed,jobs")
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("text", "message"), [("zones = 3", "traces must be a list"), ("x", "is not TOML")])
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    ran = CliRunner().invoke(app, ["experiment", str(tmp_path / "bad.toml"), "--out", str(tmp_path)])

    assert isinstance(ran.exception, CliError)
    assert message in str(ran.exception)


def test_several_experiments_fill_one_page(tmp_path: Path) -> None:
    named = FILE.replace('baseline = "las"', 'baseline = "Tiresias (LAS)"')
    named = named.replace('policy = "las" }', 'policy = "las", label = "Tiresias (LAS)" }')
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\n{named}', encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- one means -->\n<!-- end -->\n<!-- two -->\n<!-- end -->\n", encoding="utf-8")
    files = [str(tmp_path / "one.toml"), str(tmp_path / "two.toml")]

    ran = CliRunner().invoke(
        app, ["experiment", *files, "--out", str(tmp_path / "out"), "--page", str(page), "--workers", "1"]
    )

    assert ran.exit_code == 0, ran.output
    assert page.read_text("utf-8").count("| fifo |") == 2
    assert (tmp_path / "out" / "two" / "report.html").exists()
