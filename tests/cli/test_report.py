"""`wattshift report`: periods, CSV, and the page that is handed on."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.commands import CliError
from services.cli.main import app
from services.cli.reports import report as module
from services.cli.reports.figures import amounts, change
from services.cli.reports.ledger_lines import save_lines
from services.cli.reports.report import fetch, notes, period_of
from services.cli.reports.report_page import render
from services.cli.reports.savings import sentences, stored
from services.contracts.jobs import JobFootprint
from services.contracts.reports import (
    CarbonAccounts,
    FootprintLine,
    FootprintReport,
    FunctionalUnit,
    HalfWidth,
    LedgerLine,
    ZoneIntensity,
)

KNOWN = CarbonAccounts(
    facility_energy_j=3.6e6,
    market_gco2=0.0,
    embodied_gco2=7_000.0,
    baseline_gco2=2_000.0,
    estimated_gco2=250.0,
    half_width=HalfWidth(energy_j=0.36e6, carbon_gco2=125.0),
)
UNKNOWN = CarbonAccounts(facility_energy_j=3.6e6, unknown=["market factor of DE", "embodied emissions of H100"])
USED = JobFootprint(energy_j=3.6e6, gpu_energy_j=3.0e6, carbon_gco2=1_000.0, gpu_s=7_200.0, estimated_energy_j=0.36e6)


def a_report(accounts: CarbonAccounts = KNOWN, group_by: str = "project", lines: int = 1) -> dict[str, Any]:
    groups = [
        FootprintLine(group=f"2026-11-{number:02}", name="<b>resnet", footprint=USED, jobs=2, accounts=accounts)
        for number in range(1, lines + 1)
    ]
    sci = None if accounts.embodied_gco2 is None else 0.5
    return FootprintReport(
        start_at=datetime(2026, 11, 1, tzinfo=UTC),
        end_at=datetime(2026, 12, 1, tzinfo=UTC),
        group_by=group_by,  # type: ignore[arg-type]
        lines=groups,
        idle=JobFootprint(),
        total=USED,
        total_accounts=accounts,
        metered_gpu_energy_j=3.0e6,
        zones=[ZoneIntensity(zone="DE", mean_gco2_per_kwh=412.5, market_gco2_per_kwh=None)],
        units=[
            FunctionalUnit(
                unit="epoch", amount=4, jobs=1, operational_gco2=1.6, embodied_gco2=0.4, sci_gco2_per_unit=sci
            )
        ],
    ).model_dump(mode="json")


class FakeGateway:
    """Answers one line a page."""

    asked: list[dict[str, Any]]

    def __init__(self, accounts: CarbonAccounts = KNOWN) -> None:
        self.asked = []
        self._accounts = accounts

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        if path == "/v1/reports/savings":
            return {"days": [SAVED], "total": SAVED}
        assert path == "/v1/reports/footprint"
        self.asked.append(params)
        found = a_report(self._accounts, params["group_by"])
        also = [{"group_by": group, "lines": found["lines"]} for group in params.get("also", ())]
        line = {**found["lines"][0], "then_group": params["then_by"] and "2026-11"}
        more = {"then_by": params["then_by"], "lines": [line], "also": also}
        return {**found, **more, "next_cursor": None if "cursor" in params else "more"}


def test_a_month_is_a_calendar_month_in_utc() -> None:
    assert period_of(None, None, "2026-12") == {
        "start": "2026-12-01T00:00:00+00:00",
        "end": "2027-01-01T00:00:00+00:00",
    }
    assert period_of("2026-11-01", "2026-11-02T03:00+01:00", None) == {
        "start": "2026-11-01T00:00:00+00:00",
        "end": "2026-11-02T03:00:00+01:00",
    }
    assert period_of(None, None, None) == {"start": None, "end": None}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("soon", None, None), "--start soon: must be a date"),
        ((None, None, "November"), "--month November: must be a year and a month, such as 2026-11"),
        ((None, None, "2026-13"), "--month 2026-13: must be"),
        (("2026-11-01", None, "2026-11"), "give either --month, or --start and --end"),
        (("2026-11-02", "2026-11-01", None), "--end 2026-11-01: must be after --start 2026-11-02"),
    ],
)
def test_a_wrong_period_is_one_line(words: tuple[str | None, ...], line: str) -> None:
    with pytest.raises(CliError, match=line) as caught:
        period_of(*words)
    assert caught.value.exit_code == 2


def test_all_pages_are_read() -> None:
    gateway = FakeGateway()
    found = fetch(gateway, "zone", {"start": None, "end": None})  # type: ignore[arg-type]
    assert len(found["lines"]) == 2
    assert [params.get("cursor") for params in gateway.asked] == [None, "more"]
    assert gateway.asked[1]["end"] == found["end_at"], "all pages end at the moment of the first"


class GrowingGateway(FakeGateway):
    """A line comes late between the first page and the second, as often as that is asked for."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self._late = late

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        found = super().get(path, **params)
        found["end_at"] = params.get("end") or found["end_at"]
        if "cursor" in params and self._late:
            self._late -= 1
            found["total"] = {**found["total"], "energy_j": found["total"]["energy_j"] * 1.001}
        return found


def test_pages_of_two_moments_are_not_put_together() -> None:
    gateway = GrowingGateway(late=2)
    found = fetch(gateway, "job", {"start": None, "end": None})  # type: ignore[arg-type]
    assert len(found["lines"]) == 2
    assert [params.get("cursor") for params in gateway.asked] == [None, "more"] * 3
    ends = [datetime.fromisoformat(params["end"]) for params in gateway.asked[2::2]]
    assert ends == [datetime(2026, 11, 30, 23, 59, tzinfo=UTC), datetime(2026, 11, 30, 23, 58, tzinfo=UTC)]
    assert found["end_at"] == ends[1].isoformat(), "a period that has settled is taken instead"
    with pytest.raises(CliError, match="still changes: name an earlier --end"):
        fetch(GrowingGateway(late=99), "job", {"start": None, "end": None})  # type: ignore[arg-type]


def test_the_page_is_of_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = FakeGateway()
    monkeypatch.setattr(module, "Gateway", lambda: gateway)
    CliRunner().invoke(app, ["report", "--html", str(tmp_path / "now.html")], catch_exceptions=False)
    assert [params.get("also") for params in gateway.asked] == [[*("day", "project", "user", "zone", "model")], None]


def test_csv_has_figures_with_units_and_empty_cells_for_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Gateway", lambda: FakeGateway(UNKNOWN))
    done = CliRunner().invoke(app, ["report", "--by", "job", "--csv", str(tmp_path / "out.csv")])
    assert done.exit_code == 0, done.output
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows] == ["2026-11-01", "2026-11-01", "(idle)", "(total)"]
    total = rows[-1]
    assert (total["energy_kwh"], total["gpu_h"], total["location_based_kgco2"]) == ("1.0", "2.0", "1.0")
    assert (total["market_based_kgco2"], total["embodied_kgco2"], total["baseline_kgco2"]) == ("", "", "")
    assert total["unknown"] == "market factor of DE; embodied emissions of H100"
    assert (total["energy_half_width_kwh"], total["location_based_half_width_kgco2"]) == ("", "")


def test_the_interval_stands_beside_energy_and_emissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gateway", FakeGateway)
    assert CliRunner().invoke(app, ["report", "--csv", str(tmp_path / "out.csv")]).exit_code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        total = list(csv.DictReader(file))[-1]
    assert (total["energy_half_width_kwh"], total["location_based_half_width_kgco2"]) == ("0.1", "0.125")
    (cells,) = amounts([{"footprint": USED.model_dump(), "accounts": KNOWN.model_dump()}])
    assert [cell.partition(" ±")[2] for cell in cells[:2]] == ["10.0 %", "12.5 %"]
    done = CliRunner().invoke(app, ["report"], env={"COLUMNS": "200"})
    assert "±10.0 %" in done.output
    assert "±: the 90 % interval" in done.output


def test_the_table_says_what_is_unknown_and_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_report(UNKNOWN)
    text = "\n".join(notes(found))
    assert "Estimated: 10.0 % of the energy" in text
    assert "Unknown: market factor of DE, embodied emissions of H100" in text
    assert "SCI per epoch: unknown; operational alone 0.4 gCO2 per epoch" in text
    assert "SCI: 0.5 gCO2e per epoch" in "\n".join(notes(a_report()))


@pytest.mark.parametrize(
    ("accounts", "unknown"), [(KNOWN, set[str]()), (UNKNOWN, {"market-based", "embodied", "baseline", "change"})]
)
def test_a_column_of_which_nothing_is_known_takes_no_room(
    accounts: CarbonAccounts, unknown: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Gateway", lambda: FakeGateway(accounts))
    done = CliRunner().invoke(app, ["report"], env={"COLUMNS": "200"}, catch_exceptions=False)
    shown = set(done.output.splitlines()[0].split())
    assert {"market-based", "embodied", "baseline", "change"} - shown == unknown


@pytest.mark.parametrize(
    ("baseline", "shown"), [(2_000.0, "-50.0 %"), (500.0, "+100.0 %"), (None, "unknown"), (0.0, "-"), (-5.0, "-")]
)
def test_a_difference_to_the_baseline_has_its_sign(baseline: float | None, shown: str) -> None:
    assert change(1_000.0, baseline) == shown


class Reader(HTMLParser):
    """Text and open tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.mark.parametrize("accounts", [KNOWN, UNKNOWN])
def test_the_page_stands_alone_and_shows_every_account(accounts: CarbonAccounts) -> None:
    groups = ("day", "project", "user", "zone", "model")
    tables = [{"group_by": group, "lines": a_report(accounts, group, lines=30)["lines"]} for group in groups]
    whole = a_report(accounts, "job", lines=30) | {"also": tables}
    page = render(whole, datetime(2026, 12, 2, 8, tzinfo=UTC))
    read = Reader()
    read.feed(page)
    assert "Energy and emissions of GPU work, November 2026" in read.text
    assert read.tags.count("svg") == 2
    assert "script" not in read.tags
    assert read.sources == [], "nothing is fetched"
    assert "<b>resnet (2026-11-01)" in read.text, "names are escaped"
    assert "Sign-off" in read.text
    assert "5 others" in read.text
    expected = ["unknown"] if accounts is UNKNOWN else ["-50.0 %", "7.000 kg", "0.5 g", "±10.0 %", "±12.5 %"]
    assert all(word in read.text for word in expected)


def test_days_without_emissions_are_drawn() -> None:
    """A grid of hydropower alone emits nothing directly, and its jobs used energy all the same."""
    clean = KNOWN.model_copy(update={"baseline_gco2": 0.0, "estimated_gco2": 0.0})
    whole = a_report(clean, "job")
    for line in (day := a_report(clean, "day"))["lines"]:
        line["footprint"]["carbon_gco2"] = 0.0
    tables = [
        {"group_by": group, "lines": a_report(clean, group)["lines"]} for group in ("project", "user", "zone", "model")
    ]
    page = render(
        whole | {"also": [{"group_by": "day", "lines": day["lines"]}, *tables]}, datetime(2026, 12, 2, tzinfo=UTC)
    )
    assert page.count("<svg") == 2
    assert "location-based, 01: 0.000" in page


def test_a_page_that_was_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gateway", FakeGateway)
    out = tmp_path / "november.html"
    CliRunner().invoke(app, ["report", "--month", "2026-11", "--html", str(out)])
    checked = CliRunner().invoke(app, ["report", "--check", str(out)])
    assert (checked.exit_code, f"{out} is as it was made; SHA-256 " in checked.output) == (0, True)
    out.write_text(out.read_text().replace("1.000 kg", "0.900 kg"))
    changed = CliRunner().invoke(app, ["report", "--check", str(out)])
    assert str(changed.exception) == f"{out} is not as it was made: its checksum does not fit"
    missing = CliRunner().invoke(app, ["report", "--check", str(tmp_path / "none.html")])
    assert "cannot be read: No such file" in str(missing.exception)


def test_the_page_is_written_whole_and_a_folder_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Gateway", FakeGateway)
    out = tmp_path / "november.html"
    done = CliRunner().invoke(app, ["report", "--month", "2026-11", "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text().endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["november.html"]
    failed = CliRunner().invoke(app, ["report", "--html", str(tmp_path / "none" / "x.html")])
    assert isinstance(failed.exception, CliError)
    assert "cannot write" in str(failed.exception)
    wrong = CliRunner().invoke(app, ["report", "--by", "planet"])
    assert "--by planet: must be one of job, user, project" in str(wrong.exception)


class RequestsGateway:
    """Answers with one report of requests."""

    def __init__(self, servers: dict[str, float] | None) -> None:
        self.servers = servers

    def get(self, path: str, **params: Any) -> Any:
        assert (path, params["group_by"]) == ("/v1/reports/requests", "key")
        line = {"group": "key_1", "requests": 7, "input_tokens": 70, "output_tokens": 700}
        line["estimated_requests"] = 3
        amounts = {"energy_j": 3_600.0, "carbon_gco2": 2.0, "outside_energy_j": 0.0, "outside_carbon_gco2": 0.0}
        return {"lines": [line | amounts], "servers": self.servers}


def test_requests_are_shown_with_the_part_that_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {"energy_j": 7_200.0, "carbon_gco2": 5.0}
    servers |= {"unattributed_energy_j": 3_600.0, "unattributed_carbon_gco2": 3.0}
    monkeypatch.setattr(module, "Gateway", lambda: RequestsGateway(servers))
    module.report(by="key", requests=True)
    out = capsys.readouterr().out
    assert "Tokens of 3 requests are estimates" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["key_1", "7", "70", "700", "1.00", "Wh", "2.00", "g", "-", "-"] in rows
    assert any(row[:2] == ["(no", "request's)"] and "3.00" in row for row in rows)
    assert any(row[:1] == ["servers"] and "2.00" in row for row in rows)


def test_requests_are_grouped_by_what_requests_have() -> None:
    with pytest.raises(CliError, match="--by zone: must be one of model, key, class, tenant, day"):
        module.report(by="zone", requests=True)


LINES = (
    ",".join(LedgerLine.model_fields)
    + "\n2026-11-01T00:00:00.5+00:00,2026-11-01T00:00:02+00:00,n0,boot,7,,,,,,A100,0 1,2,4.0,"
    + "3.5,3,0.5,0,counter,modelled,,,"
    + "0.5,DE,average_direct,uk,2026-11-01T00:00:00+00:00,measured,360.0,1.0,3.5,0.00035,5e-05,0.1.0,false,true,12,\n"
)


class StreamingGateway:
    """Answers with lines, piece by piece, and then breaks off if it should."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.asked: dict[str, Any] = {}
        self._breaks = breaks

    @contextmanager
    def stream(self, path: str, **params: Any) -> Iterator[Any]:
        assert path == "/v1/reports/lines"
        self.asked = params
        yield self

    def iter_bytes(self) -> Iterator[bytes]:
        for at in range(0, len(LINES), 7):
            yield LINES[at : at + 7].encode()
        if self._breaks:
            raise CliError("the control plane does not answer", 5)


def test_lines_are_written_as_they_come_in_the_format_of_the_files_name(tmp_path: Path) -> None:
    gateway = StreamingGateway()
    for name, form in (("lines.csv", "csv"), ("lines.jsonl", "jsonl")):
        save_lines(gateway, str(tmp_path / name), {"start": "2026-11-01", "end": None})  # type: ignore[arg-type]
        assert gateway.asked == {"format": form, "start": "2026-11-01"}
        assert (tmp_path / name).read_text() == LINES


def test_lines_are_written_as_parquet_with_their_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    save_lines(StreamingGateway(), str(tmp_path / "lines.parquet"), {})  # type: ignore[arg-type]
    table = parquet.read_table(tmp_path / "lines.parquet")
    (row,) = table.to_pylist()
    line = LedgerLine.model_validate({**row, "allocation_id": ""})
    assert (line.gpu_s, line.sequence, line.job_id, line.gpus) == (4.0, 7, None, 2)
    assert (row["intensity_estimated"], row["estimated"], line.batch, line.sum_number) == (False, True, 12, None)
    assert line.start_at == datetime(2026, 11, 1, 0, 0, 0, 500_000, tzinfo=UTC)
    assert table.column_names == list(LedgerLine.model_fields)


@pytest.mark.parametrize("name", ["lines.csv", "lines.parquet"])
def test_an_export_that_breaks_off_leaves_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(CliError, match="does not answer"):
        save_lines(StreamingGateway(breaks=True), str(tmp_path / name), {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_lines_go_to_files_of_known_kinds(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"must end in \.csv, \.jsonl or \.parquet, or be -"):
        save_lines(StreamingGateway(), str(tmp_path / "lines.txt"), {})  # type: ignore[arg-type]
    done = CliRunner().invoke(app, ["report", "--lines", "a.csv", "--json"])
    assert "give one of --csv, --html, --lines, --as and --json" in str(done.exception)


def test_two_dimensions_are_asked_for_and_shown_in_table_csv_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = FakeGateway()
    monkeypatch.setattr(module, "Gateway", lambda: gateway)
    done = CliRunner().invoke(app, ["report", "--by", "project,month"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert (gateway.asked[0]["group_by"], gateway.asked[0]["then_by"]) == ("project", "month")
    assert "(2026-11-01), 2026-11" in done.output
    target = tmp_path / "out.csv"
    assert CliRunner().invoke(app, ["report", "--by", "project,month", "--csv", str(target)]).exit_code == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["then_group"] for row in rows] == ["2026-11", "2026-11", "", ""]
    page = tmp_path / "out.html"
    assert CliRunner().invoke(app, ["report", "--by", "project,zone", "--html", str(page)]).exit_code == 0
    assert "<h2>By project and zone</h2>" in page.read_text()
    assert gateway.asked[-1]["end"] == "2026-12-01T00:00:00Z"  # as the answer before it said


@pytest.mark.parametrize("by", ["project,moon", "project,project", "project,month,zone", "project,"])
def test_dimensions_that_make_no_table_are_refused(by: str) -> None:
    done = CliRunner().invoke(app, ["report", "--by", by])
    assert f"--by {by}: must be one of job, user, project" in str(done.exception)


class ChangingGateway(FakeGateway):
    """Of a ledger to which a line comes late between two requests."""

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        found = super().get(path, **params)
        return {**found, "next_cursor": None, "total": {**found["total"], "energy_j": float(len(self.asked))}}


def test_a_page_whose_tables_would_differ_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gateway", ChangingGateway)
    page = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["report", "--by", "project,zone", "--html", str(page)])
    assert "the ledger of this period still changes" in str(done.exception)
    assert not page.exists()


SAVED: dict[str, Any] = {
    "saved_gco2": -120.0,
    "low_gco2": -150.0,
    "high_gco2": -90.0,
    "emitted_gco2": 1_000.0,
    "later_s": -40.0,
    "levers": [
        {"lever": "order", "saved_gco2": -140.0},
        {"lever": "power_limit", "saved_gco2": 20.0},
        {"lever": "width", "known": False, "saved_gco2": 0.0},
    ],
    "why": "More was emitted: no job had time to wait; order cost most.",
    "slack_s": 43_200.0,
    "slack_saved_gco2": 80.0,
    "slack_later_s": 7_200.0,
}


def test_a_report_says_what_was_saved_how_sure_by_what_and_what_slack_would_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Gateway", FakeGateway)
    done = CliRunner().invoke(app, ["report", "--month", "2026-11"], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    assert "-120.00 g CO2 (-150.00 g to -90.00 g at 90 %), jobs ending 40 s earlier on average" in done.output
    assert "order -140.00 g, power limit 20.00 g; not known, as no history tells how jobs answer to it" in done.output
    assert "answer to it: width (days replayed: 1)" in done.output
    assert "More was emitted: no job had time to wait; order cost most." in done.output
    assert "12 h of slack would have saved 80.00 g more (8%), jobs ending 2 h later on average." in done.output


class RefusingGateway:
    """Answers a user, who is no operator."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def get(self, path: str, **params: Any) -> Any:
        raise CliError("no", self._exit_code)


def test_who_may_not_see_savings_gets_none() -> None:
    assert stored(RefusingGateway(4), {}) is None  # type: ignore[arg-type]
    with pytest.raises(CliError):
        stored(RefusingGateway(5), {})  # type: ignore[arg-type]
    assert sentences(None) == sentences({"days": [], "total": None}) == []
