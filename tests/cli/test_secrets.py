"""Secrets from the shell: typed at a prompt, piped or read from a file, and never shown."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.jobs.specs import SpecOptions, spec_of
from services.cli.main import app
from tests.cli.conftest import Run

VALUE = "hunter2-and-more"


class Terminal(io.StringIO):
    """Standard input as a person's terminal."""

    def isatty(self) -> bool:
        return True


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_secret_is_piped_in_listed_and_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("secrets", "list") == "no secrets\n"
    pipe(monkeypatch, f"{VALUE}\n")
    assert run("secrets", "set", "PIPED", "--project", "vision") == "PIPED is set for project vision (version 1)\n"
    pipe(monkeypatch, VALUE)
    assert run("secrets", "set", "PIPED", "--project", "vision") == "PIPED is set for project vision (version 2)\n"
    shown = run("secrets")
    assert "PIPED" in shown
    assert "vision" in shown
    assert VALUE not in shown + run("secrets", "list", "--json")
    assert run("secrets", "delete", "PIPED", "--project", "vision") == "PIPED is deleted\n"
    assert run("secrets") == "no secrets\n"


def test_a_person_is_asked_without_echo(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or VALUE)
    assert run("secrets", "set", "TYPED") == "TYPED is set (version 1)\n"
    assert asked == ["Value of TYPED: "]
    run("secrets", "delete", "TYPED")


def test_a_file_is_taken_whole(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(
        Gateway, "call", lambda self, method, path, body=None, **_: sent.append((method, path, body)) or {"version": 1}
    )
    (tmp_path / "key").write_text("BEGIN\nEND\n")
    run("secrets", "set", "KEY", "--from-file", str(tmp_path / "key"))
    assert sent == [("PUT", "/v1/secrets/KEY", {"value": "BEGIN\nEND\n", "project": None})]


@pytest.mark.parametrize(
    ("words", "typed", "message", "exit_code"),
    [
        (("set", "A"), "", "the value of A is empty", EXIT_USAGE),
        (("set", "A"), "x" * 70_000, "more than 65,536 bytes", EXIT_USAGE),
        (("set", "no way"), VALUE, "the name of a secret must be", EXIT_USAGE),
        (("set", "A", "--from-file", "/nowhere"), "", "/nowhere cannot be read", EXIT_NOT_FOUND),
        (("delete", "NONE"), "", "There is no such secret", EXIT_NOT_FOUND),
    ],
)
def test_what_cannot_be_is_one_line(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], typed: str, message: str, exit_code: int
) -> None:
    pipe(monkeypatch, typed)
    with pytest.raises(CliError, match=message) as raised:
        app(["secrets", *words], standalone_mode=False)
    assert raised.value.exit_code == exit_code
    assert VALUE not in str(raised.value)


def test_options_make_uses_of_secrets() -> None:
    options = SpecOptions(secret=["HF_TOKEN", "wandb.key=WANDB_API_KEY"], secret_file=["id_rsa", "cert=client.pem"])
    spec = spec_of(options, ["x"], "x", {})
    assert [use.model_dump(exclude_none=True) for use in spec.secrets or ()] == [
        {"name": "HF_TOKEN", "env": "HF_TOKEN"},
        {"name": "wandb.key", "env": "WANDB_API_KEY"},
        {"name": "id_rsa", "file": "id_rsa"},
        {"name": "cert", "file": "client.pem"},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret": ["wandb.key"]}, "--secret: wandb.key cannot be a variable; write wandb.key=VARIABLE"),
        ({"secret": ["A="]}, "--secret: 'A=' is not of the form NAME or NAME=VARIABLE"),
        ({"secret": ["A B"]}, "--secret: 'A B' is not of the form NAME or NAME=VARIABLE"),
        ({"secret": ["A=1x"]}, "--secret: must be the name of a variable"),
        ({"secret_file": ["A=../x"]}, "--secret-file: must match"),
        ({"secret": ["A=X", "B=X"]}, "secrets: the variable X is given twice"),
        ({"secret": ["A=X"], "env": ["X=1"]}, "secrets: the variable X is given twice"),
    ],
)
def test_options_that_make_no_sense_are_one_line(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(CliError) as raised:
        spec_of(SpecOptions(**options), ["x"], "x", {})  # pyright: ignore[reportArgumentType]
    assert message in str(raised.value)
    assert raised.value.exit_code == EXIT_USAGE


def test_a_job_with_a_missing_secret_is_refused(gateway: Gateway) -> None:
    with pytest.raises(CliError, match="There is no secret NONE; set it with `wattshift secrets set NONE`"):
        app(["submit", "--secret", "NONE", "--", "true"], standalone_mode=False)
