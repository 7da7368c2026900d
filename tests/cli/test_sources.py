"""``--upload`` and ``--git``: what travels with a submission."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.cli.client import Gateway
from services.cli.commands import EXIT_REFUSED, EXIT_USAGE, CliError
from services.cli.jobs.specs import SpecOptions, read_specs, spec_of
from services.cli.main import app
from services.contracts.jobs import JobSpec
from tests.cli.conftest import Run
from wattshift.sources import Archive

COMMIT = "c" * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a person is in."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print(1)")
    (tmp_path / "noise").write_bytes(os.urandom(600_000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submitted(run: Run, gateway: Gateway, *words: str) -> Any:
    (accepted,) = json.loads(run("submit", "--json", "--hold", *words))
    return gateway.get(f"/v1/jobs/{accepted['id']}")["spec"]


def test_a_folder_travels_with_its_job_once(
    run: Run, gateway: Gateway, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = submitted(run, gateway, "--upload", ".", "--workdir", "src", "--", "python3", "train.py")
    with Archive(folder) as archive:
        assert spec["source"]["upload"] == archive.sha256
    assert spec["working_dir"] == "src"
    kept = gateway.get(f"/v1/uploads/{spec['source']['upload']}")
    assert (kept["chunks"], kept["next_chunk"]) == (2, None)
    monkeypatch.setattr(Archive, "chunk", lambda self, number: pytest.fail("sent again"))
    again = submitted(run, gateway, "--upload", ".", "--", "python3", "src/train.py")
    assert (again["source"], again.get("working_dir")) == (spec["source"], None)


def test_a_directive_and_a_file_of_specs_say_the_same(run: Run, gateway: Gateway, folder: Path) -> None:
    (folder / "train.sh").write_text("#!/bin/bash\n#WATTSHIFT --upload src\npython3 train.py\n")
    (folder / "job.yaml").write_text("name: j\ncommand: [python3, train.py]\nhold: true\nsource: {upload: src}\n")
    script = submitted(run, gateway, "train.sh")
    (accepted,) = json.loads(run("submit", "--json", "job.yaml"))
    assert gateway.get(f"/v1/jobs/{accepted['id']}")["spec"]["source"] == script["source"]


def test_testing_sends_nothing(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    tested: list[JobSpec] = []
    monkeypatch.setattr(Gateway, "send", lambda self, archive: sent.append(archive.sha256))
    monkeypatch.setattr("services.cli.jobs.submit.show_estimates", lambda gateway, specs, as_json: tested.extend(specs))
    run("submit", "--test-only", "--upload", ".", "--workdir", "src", "--", "true")
    (spec,) = tested
    assert sent == []
    # The estimate of a job whose archive is not there would be refused.
    assert (spec.source, spec.working_dir) == (None, None)


def test_an_upload_that_a_file_names_is_tested_for(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[JobSpec] = []
    monkeypatch.setattr("services.cli.jobs.submit.show_estimates", lambda gateway, specs, as_json: tested.extend(specs))
    (folder / "job.yaml").write_text(f"name: j\ncommand: [x]\nsource: {{upload: {'a' * 64}}}\n")
    run("submit", "--test-only", "job.yaml")
    assert [spec.source and spec.source.upload for spec in tested] == ["a" * 64]


def test_an_archive_that_is_refused_names_its_biggest_files(
    gateway: Gateway, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Archive, "size_bytes", property(lambda self: 2**31, lambda self, value: None), raising=False)
    with pytest.raises(CliError, match=r"at most 64\.0 MiB can be uploaded\. The biggest files are noise") as raised:
        app(["submit", "--upload", ".", "--", "true"], standalone_mode=False)
    assert raised.value.exit_code == EXIT_REFUSED


def test_the_callers_programs_are_not_named_where_they_are_not() -> None:
    own, source = {"PATH": "/opt/mine/bin", "TOKEN": "t"}, {"upload": "a" * 64}
    here = spec_of(SpecOptions(), ["x"], "x", own, source)
    there = spec_of(SpecOptions(env=["TOKEN"]), ["x"], "x", own, source, elsewhere=True)
    assert here.environment == {"PATH": "/opt/mine/bin"}
    assert there.environment == {"TOKEN": "t"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--upload", ".", "--git", "https://h/r"], "--upload and --git: give one of them"),
        (["--upload", "none"], "--upload: none is not a folder"),
        (["--upload", ".", "--workdir", "/tmp"], "--workdir: /tmp must be a folder in the source"),
        (["--upload", ".", "--workdir", "../x"], "--workdir: ../x must be a folder in the source"),
        (["--upload", ".", "--git-secret", "A"], "--git-secret goes with --git"),
        (["--git", "ext::sh"], "--git: 'ext::sh' is not https://HOST/PATH@REVISION"),
        (["--git", f"https://h/r@{COMMIT}", "--git-secret", "a b"], "--git-secret: must be 1 to 63 letters"),
    ],
)
def test_what_cannot_be_is_one_line(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(CliError) as raised:
        app(["submit", *words, "--", "true"], standalone_mode=False)
    assert message in str(raised.value)
    assert raised.value.exit_code == EXIT_USAGE


def test_a_commit_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: j\ncommand: [x]\nsource: {{git: {{url: 'git@h:r.git', revision: {COMMIT}}}}}\n")
    (spec,) = read_specs(file)
    assert spec.source is not None
    assert spec.source.git is not None
    assert spec.source.git.revision == COMMIT
