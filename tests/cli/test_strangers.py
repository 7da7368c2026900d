"""What jobs, nodes and servers say never commands a terminal, a spreadsheet or a scrape."""

from __future__ import annotations

import ast
import csv
import inspect
import io
import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.text import Text

from services.cli import bars, main, output
from services.cli.commands import CliError
from services.cli.jobs import jobs
from services.cli.planning import solving
from services.core.domain.solving import Progress
from services.kit import logging as service_logging
from services.kit.scraping import merged
from services.kit.text import CONTROLS, write_row
from services.router import metrics as router_metrics

CLI = Path(output.__file__).parent
CONTROL_TEXT = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), 0x202E, 0x2066, 0x200F, 0x2028, 0xD800]))
PIECES = ["\x1b[31mX\x07<b>", "\x1b]52;c;aGVsbG8=\x1b\\", "\x1b]0;pwned\x07", "\x1b[2J", "\x9b31m"]
PIECES += ["[/x]", "[link=a]", "\\"]
HOSTILE = st.lists(st.sampled_from(PIECES) | st.text(CONTROL_TEXT + "ab 1[]/=\\", max_size=5), max_size=6).map("".join)
MOVES = re.compile(r"\x1b\[(\?1049|\?25)[hl]|\x1b\[H|\x1b\[[0-9]*[A-GK]|\r")
"""What Rich itself moves the cursor of a terminal with."""


class _Stream(io.TextIOWrapper):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def bytes(self) -> bytes:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@contextmanager
def streams(is_terminal: bool) -> Iterator[_Stream]:
    """What goes to standard output and standard error, both in one."""
    stream = _Stream(is_terminal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield stream


def _renderables(text: str) -> Iterator[Any]:
    table = output.table(f">{text}", "", title=text)
    table.add_row(output.state(text), f"[bold]{text}[/]")
    yield from (text, f"[dim]{text}[/]", Text(text), table, Group(text, Text(text)))


def _watched(text: str) -> None:
    def once(made: list[Any]) -> Any:
        if not made:
            raise KeyboardInterrupt
        return made.pop()

    left = list(_renderables(text))
    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(output.time, "sleep", lambda _: None)
        output.show(lambda: once(left), watch=output.console.is_terminal)


def _bars(text: str) -> None:
    with bars.bar(text) as advance:
        advance(text, 1, 2)
    with solving.solving_bar(quiet=False) as report:
        report(Progress(doing=text, share=0.5))


def _failure(text: str) -> None:
    def fails() -> None:
        raise CliError(text, 1)

    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(main, "add_commands", lambda *_: None)
        patch.setattr(main, "app", fails)
        main.main()


def _job(text: str) -> None:
    output.console.print(output.in_rows({"why": jobs._why({"reason": text, "detail": text})}))


def _log(text: str) -> None:
    content = text.encode(errors="surrogatepass")
    if sys.stdout.isatty():  # elsewhere bytes stay as they are
        output.print_log(content[at : at + 1] for at in range(len(content)))


def _told(text: str) -> None:
    for as_json in (False, True):
        output.tell([text], as_json, text)


DOORS: dict[str, Callable[[str], None]] = {
    "show": _watched,
    "tell": _told,
    "print_json": lambda text: output.print_json({text: [text]}),
    "say": output.say,
    "print_log": _log,
}
"""Each function of services/cli/output.py that prints."""
OTHER_DOORS: tuple[Callable[[str], None], ...] = (
    *(_bars, _failure, _job),
    lambda text: output.console.print(*_renderables(text)),
    lambda text: output.errors.print(*_renderables(text), soft_wrap=True),
    lambda text: write_row(sys.stdout, [text, 1]),
)
MOVING: dict[Callable[[str], None], re.Pattern[str]] = {_watched: MOVES, _bars: MOVES, _log: re.compile("\r")}


@given(HOSTILE)
@example("".join(PIECES))
def test_no_control_character_of_a_stranger_is_printed(text: str) -> None:
    for door, is_terminal in itertools.product((*DOORS.values(), *OTHER_DOORS), (True, False)):
        with streams(is_terminal) as stream:
            door(text)
        allowed = MOVING.get(door) if is_terminal else None
        shown = stream.bytes().decode()
        shown = allowed.sub("", shown) if allowed else shown
        assert not CONTROLS.search(shown), (door, shown)


def test_a_stranger_s_link_is_no_link() -> None:
    shown = output.console.render_str("[link=https://a.example]a[/] [bold]b[/]")
    assert (shown.plain, [str(span.style) for span in shown.spans]) == ("a b", ["bold"])


def test_every_door_is_known() -> None:
    """A new one is added to ``DOORS``; a command prints through them, or on a console of output.py."""
    streams = {"console", "errors", "stdout", "stderr", "print", "Console", "_Console"}
    doors: set[str] = set()
    for name, function in inspect.getmembers(output, inspect.isfunction):
        nodes = [*ast.walk(ast.parse(inspect.getsource(function)))]
        if function.__module__ == output.__name__ and streams & {
            getattr(node, "id", getattr(node, "attr", "")) for node in nodes
        }:
            doors.add(name)
    assert doors == set(DOORS)
    aside = {
        ("export.py", "sys.stdout"),  # write_row
        ("ledger_lines.py", "sys.stdout"),  # a file as the server wrote it, which `verify` reads
        ("load_sweep.py", "print"),  # on a node, for the command that reads it
        ("own_server.py", "sys.stderr"),  # on a node
        ("report.py", "sys.stdout"),  # write_row
        ("terminal.py", "os.write"),  # the user's own terminal of `exec` and `shell`
    }
    streams = {"sys.stdout", "sys.stderr", "typer.echo", "typer.secho", "click.echo", "os.write"}
    found: set[tuple[str, str]] = set()
    for file in CLI.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))] if file.name != "output.py" else []
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        asked = {id(node.value) for node in attributes if node.attr in ("isatty", "close", "fileno")}
        found |= {
            (file.name, name) for node in attributes if (name := ast.unparse(node)) in streams and id(node) not in asked
        }
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        found |= {(file.name, name) for name in calls & {"print", "Console"}}
    assert found == aside


def test_rows_of_csv_are_written_by_one_function() -> None:
    root = CLI.parents[1]
    files = [*(root / "services").rglob("*.py"), *(root / "gateway").rglob("*.py")]
    writers = {str(file.relative_to(root)) for file in files if re.search(r"csv\.(DictW|w)riter\(", file.read_text())}
    assert writers == {"services/kit/text.py"}


@given(HOSTILE | st.text("=+-@\t\x1b1.e", min_size=1))
@example("-1.5e-3")
@example("-.")
@example("-1.2.3")
@example("=cmd|' /C calc'!A0")
def test_a_cell_of_text_is_no_formula_and_a_number_stays_one(text: str) -> None:
    file = io.StringIO(newline="")
    write_row(file, [text, -1.5, None])
    cell, *others = next(csv.reader(io.StringIO(file.getvalue(), newline="")))
    assert others == ["-1.5", ""]
    assert not CONTROLS.search(cell)
    with suppress(ValueError):
        float(cell)
        return
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\n"))


@pytest.mark.parametrize("raw", [False, True])
def test_output_of_a_job_is_shown_on_a_terminal_and_passed_on_elsewhere(raw: bool) -> None:
    content = "\x1b[31mé\x9b\tx\r10 %\r\n".encode() + b"\xff\x9b\xc3"
    for is_terminal in (True, False):
        with streams(is_terminal) as stream:
            output.print_log((content[at : at + 1] for at in range(len(content))), raw=raw)
        shown = "\\x1b[31mé\\x9b\tx\r10 %\r\n\\xff\\x9b\\xc3".encode()
        assert stream.bytes() == (shown if is_terminal and not raw else content)


@given(HOSTILE)
@example('a\x0bb\x85c\u2028d\re\nf"g\\')
def test_labels_of_any_text_are_read_back_as_they_are(text: str) -> None:
    text = text.replace("\ud800", "")
    gauge = router_metrics.Gauge("x", "Of x.", ("of",), {(text,): 1.0, (text + "2",): 2.0})
    lines = "".join(f"{line}\n" for line in gauge.lines())
    families = [*text_string_to_metric_families(merged([({"by": text}, lines)]))]
    samples = {(sample.labels["by"], sample.labels["of"], sample.value) for sample in families[0].samples}
    assert len(families) == 1
    assert samples == {(text, text, 1.0), (text, text + "2", 2.0)}


@pytest.mark.parametrize("as_json", [False, True])
@given(text=HOSTILE)
@example(text="".join(PIECES) + "\x7f\x9b\ud800")
def test_a_line_of_a_log_commands_no_terminal(as_json: bool, text: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, text, (), None)
    names = [text.replace("\ud800", "")]
    record.fields = {"name": text, "names": names}
    line = service_logging._Formatter("x", as_json=as_json).format(record)
    assert not CONTROLS.search(line)
    if as_json:
        assert json.loads(line)["names"] == names
