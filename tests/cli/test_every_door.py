"""Every command before a server whose every text is hostile: none lets it command the terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest

from services.cli import client, main
from services.kit.text import CONTROLS
from tests.cli.test_profile_pool import a_pool
from tests.cli.test_strangers import MOVES, PIECES, streams
from tests.support.commands import whole
from tests.support.servers import ROOT

API = json.loads((ROOT / "deploy" / "openapi.json").read_text())
HOSTILE = "=cmd|' /C calc'!A0" + "".join(PIECES) + "<script>x</script>"
SHOWN = re.compile(r"\\x1b|\\u001b")
NOW = datetime.now(UTC).isoformat()
JOB = f"job_{'0' * 26}"


def walk(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from walk(each, f"{path} {name}".strip())
    if not hasattr(command, "commands"):
        yield path, command


COMMANDS = dict(walk(whole()))

LOCAL = {
    *("up", "down", "backup", "restore", "rotate-secret", "admin-key", "ca init", "ca issue", "credential"),
    *("join", "leave", "downgrade"),
    *("status", "clusters use", "logout", "engine slurm", "engine ray", "engine slurm-history"),
    *("plan allocation", "plan partition", "plan placement", "plan pools", "carbon forecast"),
    *("simulate experiment", "simulate inference", "simulate serving", "simulate training", "verify", "factors add"),
    "profile inference",
}
"""They ask no gateway, or say only what they do here: files, programs and this machine's installation."""
ASIDE = {"exec", "shell", "forward", "cp", "notebook", "mcp"}
"""The user's own terminal in a job, as ssh is."""
PLAIN = {
    *(
        "apps delete",
        "budgets remove",
        "cells remove",
        "endpoints delete",
        "fleets apply",
        "fleets delete",
        "fleets set",
    ),
    *("cells drain", "cells remove", "cells undrain"),
    *("keys expire", "keys revoke", "login", "secrets set", "secrets delete", "tenants create", "tenants set"),
    *("nodes drain", "nodes partition", "nodes pin-awake", "nodes resume", "nodes revoke", "nodes sleep"),
    *("nodes unpin", "nodes wake", "pools delete", "pools mode", "pools report", "pools set", "users create"),
    *("users disable", "users enable", "users set", "webhooks delete", "webhooks disable", "webhooks enable"),
}
"""They answer with the user's own words."""
REFUSED_ALONE = {"pools show"}
"""Its answer has rules between fields, which made-up values break."""
WORDS = {
    "budgets set": ["a", "--kwh", "1"],
    "cells add": ["a", "--url", "http://127.0.0.1:1", "--key-file", __file__],
    "export": ["--out", "-"],
    "nodes topology": [],
    "grid amend": ["a", "--cut", "35%"],
    "grid order": ["--cut", "35%", "--for", "3h"],
    "fleets set": ["a", "--gpus", "1", "--gpu-model", "A100", "--zone", "DE"],
    "keys expire": ["a", "1h"],
    "keys set": ["a", "--models", "m"],
    "nodes maintain": ["a", "--for", "3h"],
    "reserve": ["--gpus", "1", "--from", "+1h", "--for", "3h"],
    "login": ["http://127.0.0.1:1", "--key-stdin"],
    "tenants set": ["a", "--max-gpus", "1"],
    "top": ["--once"],
    "users set": ["a", "--account", "b"],
}


def made(schema: dict[str, Any], name: str = "") -> Any:
    """Return an answer that has every field, with hostile text wherever text may be any."""
    if ref := schema.get("$ref"):
        return made(API["components"]["schemas"][ref.rpartition("/")[2]], name)
    if name == "next_cursor":
        return None
    if "const" in schema or "enum" in schema:
        return schema.get("enum", [schema.get("const")])[-1]
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return made(next(each for each in schema[word] if each.get("type") != "null"), name)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: made(each, key) for key, each in schema["properties"].items()}
        case "object":
            each = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {}).values()), None)
            return {HOSTILE: made(each if isinstance(each, dict) else {})}
        case "array":
            return [made(schema.get("items", {}))]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
        case "boolean":
            return True
        case _:
            return NOW if schema.get("format") == "date-time" else HOSTILE


def answer_of(method: str, path: str) -> str:
    path = unquote(path).replace(HOSTILE, "x")
    if path == "/sign-in/link":  # of the dashboard, and no operation of the API
        return json.dumps({"path": HOSTILE})
    for template, operations in API["paths"].items():
        if re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", template), path) and method.lower() in operations:
            answers = operations[method.lower()]["responses"]
            content = next(answers[code].get("content", {}) for code in sorted(answers) if code.startswith("2"))
            if "application/json" in content:
                return json.dumps(made(content["application/json"]["schema"]))
            return HOSTILE if content else ""
    raise AssertionError(f"{method} {path} is no operation of the API")


class HostileServer:
    """In the place of the client's requests: answers each, or refuses it, and counts them."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.requests = refuses, 0
        self._given: set[str] = set()

    def request(
        self, _client: Any, method: str, path: str, params: dict[str, Any] | None = None, **_: Any
    ) -> httpx.Response:
        self.requests += 1
        if self.refuses:
            raise client.ApiError(409, HOSTILE, HOSTILE, (), HOSTILE)
        request = httpx.Request(method, f"http://127.0.0.1{quote(path)}")
        content = answer_of(method, path)
        if content == HOSTILE and path in self._given:  # all of a text
            content = ""
        self._given.add(path)
        if tables := (params or {}).get("also"):  # as asked for
            found = json.loads(content)
            content = json.dumps({**found, "also": [{**found["also"][0], "group_by": each} for each in tables]})
        if path == "/v1/jobs" and (states := (params or {}).get("state")):  # as asked for
            content = content.replace('"state": "cancelled"', f'"state": "{states[0]}"')
        return httpx.Response(200, content=content, request=request)

    @contextmanager
    def stream(self, _client: Any, path: str, *, method: str = "GET", **_: Any) -> Iterator[httpx.Response]:
        yield self.request(None, method, path)


def once(_: float) -> None:
    raise KeyboardInterrupt


def words_of(name: str, folder: Path) -> list[str]:
    if name in WORDS:
        return WORDS[name]
    document = folder / "document.json"
    document.write_text("arrived_at,input_tokens,output_tokens\n1000,1,1\n" if name == "pools report" else "{}")
    if name == "profile pool":
        document.write_text(json.dumps(a_pool()))
    if name == "submit":
        document.write_text('{"name": "a", "command": ["true"]}')
    known = {"file": str(document), "gpu": "0", "slices": "3g", "job": JOB, "jobs": JOB, "mode": "act"}
    asked = [each.name for each in COMMANDS[name].params if each.param_type_name == "argument"]
    return [known.get(each, "a") for each in asked]


def outcome(name: str, words: list[str], *, refuses: bool) -> tuple[str, int]:
    """Return what a command shows on a terminal, and how many requests it made."""
    server = HostileServer(refuses=refuses)
    with pytest.MonkeyPatch.context() as patch, streams(is_terminal=True) as stream:
        patch.setattr(client.Client, "request", lambda c, *a, **k: server.request(c, *a, **k))
        patch.setattr(client.Client, "stream", lambda c, *a, **k: server.stream(c, *a, **k))
        patch.setattr(main, "add_commands", lambda *_: None)
        patch.setattr(main, "app", lambda: COMMANDS[name].main(words, standalone_mode=False))
        patch.setattr("time.sleep", once)
        patch.setattr("sys.stdin", io.StringIO("k\n"))
        with suppress(SystemExit):
            main.main()
    return stream.bytes().decode(errors="surrogateescape"), server.requests


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - LOCAL - ASIDE))
def test_no_command_lets_a_server_command_the_terminal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in {"URL": "http://127.0.0.1:1", "API_KEY": "k", "DATA_DIR": str(tmp_path / "none")}.items():
        monkeypatch.setenv(f"WATTSHIFT_{variable}", value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = words_of(name, tmp_path)
    has_json = any(each.name == "as_json" for each in COMMANDS[name].params)
    for ways in ([], ["--json"] if has_json else []):
        for refuses in (True,) if name in REFUSED_ALONE else (False, True):
            shown, requests = outcome(name, [*ways, *words], refuses=refuses)
            assert requests, shown
            assert not CONTROLS.search(MOVES.sub("", shown)), (ways, refuses)
            assert SHOWN.search(shown) or (name in PLAIN and not refuses), shown


def test_a_page_has_no_tag_and_a_table_no_formula_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"URL": "http://127.0.0.1:1", "API_KEY": "k"}.items():
        monkeypatch.setenv(f"WATTSHIFT_{variable}", value)
    page = tmp_path / "report.html"
    outcome("report", ["--html", str(page)], refuses=False)
    text = page.read_text()
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    for name, words in {"report": ["--csv", "-"], "export": ["--out", "-"]}.items():
        shown, _ = outcome(name, words, refuses=False)
        cells = [cell for row in csv.reader(io.StringIO(shown)) for cell in row]
        assert any("=cmd" in cell for cell in cells), name
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t"))]


def test_local_commands_are_commands() -> None:
    assert COMMANDS.keys() > LOCAL | ASIDE | PLAIN | REFUSED_ALONE | WORDS.keys()
