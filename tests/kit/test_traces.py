"""Traces: what they cost while they are off, what they say while they are on, and collectors that do not work."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from services.kit import traces
from services.kit.logging import Log, configure_logging
from services.kit.otel import OpenTelemetry
from services.kit.problems import install_problem_handlers, not_found
from services.kit.settings import SharedSettings, settings_faults
from tests.support.collector import collector
from tests.support.servers import ROOT

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
BROUGHT = (
    *("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.instrumentation", "opentelemetry.proto"),
    *("google.protobuf", "wrapt", "services.kit.otel"),
)
WITHOUT_EXTRA = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", *{BROUGHT[1:4]})):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
PROCESSES = (
    "gateway.app",
    "services.admission.app",
    "services.scheduler.app",
    "services.telemetry.app",
    "gpu_agent.app",
    "services.kit.celery",
)


class Kept(SpanExporter):
    """Keeps spans in the place of sending them, once ``gate`` is open."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.gate = threading.Event()
        self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait()
        self.spans += spans
        return SpanExportResult.SUCCESS


Switch = Callable[[SpanExporter | None], OpenTelemetry]


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Switches traces on for one test, without patching libraries for all."""
    levels = {name: logging.getLogger(name).level for name in ("opentelemetry", "urllib3")}

    def on(exporter: SpanExporter | None) -> OpenTelemetry:
        tracer = OpenTelemetry("oven", exporter)
        monkeypatch.setattr(traces, "_tracer", tracer)
        return tracer

    yield on
    traces.stop()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def kept(switch: Switch) -> Kept:
    exporter = Kept()
    switch(exporter)
    return exporter


def an_app() -> FastAPI:
    app = FastAPI()
    install_problem_handlers(app)

    @app.get("/ovens/{name}")
    async def read(name: str) -> None:
        raise not_found("oven")

    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=traces.traced(app)), base_url="http://kitchen")


def test_a_process_whose_traces_are_off_loads_nothing_of_the_extra() -> None:
    """FastAPI and redis-py load the interfaces of OpenTelemetry, and its metrics, by themselves."""
    script = f"""
import importlib, sys
from services.kit import traces, tracing
from services.kit.settings import SharedSettings
for name in {PROCESSES}:
    importlib.import_module(name)
settings = SharedSettings(WATTSHIFT_SERVICE_TOKEN="a-token-of-sixteen-and-more")
tracing.start("oven", settings)
with traces.span("bake", {GIVEN!r}) as span:
    assert (span.traceparent, traces.current(), traces.trace_id()) == ({GIVEN!r}, {GIVEN!r}, {TRACE!r})
print(sorted(name for name in sys.modules if name.startswith({BROUGHT})))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)

    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_while_they_are_off_problems_are_as_without() -> None:
    app = an_app()
    assert traces.traced(app) is app
    async with client_of(app) as http:
        answer = await http.get("/ovens/one", headers={"traceparent": GIVEN})

    assert "trace_id" not in answer.json()


def test_traces_without_their_packages_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRA)
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "WATTSHIFT_TRACES": "otlp",
        "GPU_AGENT_NODE_ID": "n0",
    }
    command = [sys.executable, "-m", "gpu_agent.app"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "WATTSHIFT_TRACES" in line]
    assert line.startswith("WATTSHIFT_TRACES=otlp: this needs the package opentelemetry: pip install ")
    assert "wattshift-control-plane[traces]" in line


def test_another_kind_of_traces_is_refused() -> None:
    environment = {"WATTSHIFT_SERVICE_TOKEN": "a-token-of-sixteen-and-more", "WATTSHIFT_TRACES": "yes"}
    (fault,) = settings_faults(SharedSettings, environment)
    assert fault.startswith("WATTSHIFT_TRACES=yes: must be 'off' or 'otlp'")


def test_work_is_a_child_of_what_is_given(switch: Switch, kept: Kept) -> None:
    with traces.span("bake", GIVEN, oven="one") as bake:
        assert traces.trace_id() == TRACE
        inner = traces.begin("heat")
        inner.end()
        inner.end()
    assert traces.trace_id() is None
    assert bake.traceparent is not None
    traces.stop()

    heat, outer = kept.spans
    assert (outer.name, outer.attributes) == ("bake", {"wattshift.oven": "one"})
    assert outer.parent is not None
    assert outer.context is not None
    assert heat.parent is not None
    assert f"{outer.parent.span_id:016x}" == SPAN
    assert heat.parent.span_id == outer.context.span_id
    assert traces.id_of(bake.traceparent) == TRACE


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x",
        GIVEN[:-1],
        GIVEN + "0",
        GIVEN.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        "é" * 55,
    ],
)
def test_a_malformed_parent_begins_a_new_trace(given: str, kept: Kept) -> None:
    with traces.span("bake", given) as span:
        assert span.traceparent is not None
        assert len(traces.id_of(span.traceparent)) == 32
        assert traces.id_of(span.traceparent) not in (TRACE, "0" * 32)
        with traces.within(given):
            assert traces.trace_id() is None
    traces.stop()

    assert [each.parent for each in kept.spans] == [None]


def test_a_call_that_is_part_of_nothing_is_not_noted(kept: Kept) -> None:
    tracer = traces._tracer  # pyright: ignore[reportPrivateUsage]
    assert isinstance(tracer, OpenTelemetry)
    of_library = tracer._provider.get_tracer("library")  # pyright: ignore[reportPrivateUsage]
    of_library.start_span("SELECT", kind=SpanKind.CLIENT).end()
    with traces.within(GIVEN):
        of_library.start_span("UPDATE", kind=SpanKind.CLIENT).end()
    traces.stop()

    assert [span.name for span in kept.spans] == ["UPDATE"]


async def test_a_request_is_named_by_its_route_and_its_query_is_not_sent(kept: Kept) -> None:
    async with client_of(an_app()) as http:
        answer = await http.get("/ovens/one?code=hunter2", headers={"traceparent": GIVEN})
        await http.get("/healthz")
    traces.stop()

    assert answer.json()["trace_id"] == TRACE
    (span,) = kept.spans
    assert span.name == "GET /ovens/{name}"
    assert "hunter2" not in str(span.attributes)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_line_in_the_log_names_the_trace(
    log_format: str, kept: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging("oven", log_format=log_format)
    with traces.within(GIVEN):
        Log("oven").info("bread.baked", loaves=2)
    Log("oven").info("oven.cold")

    baked, cold = capsys.readouterr().out.splitlines()
    if log_format == "json":
        assert json.loads(baked)["trace_id"] == TRACE
    assert f"{TRACE}" in baked
    assert "trace_id" not in cold


def test_spans_go_to_the_collector_of_the_environment(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        switch(None)
        traces.begin("bake", GIVEN).end()
        traces.stop()

    assert [(span.process, span.name, span.trace_id, span.parent_id) for span in found.spans] == [
        ("oven", "bake", TRACE, SPAN)
    ]


class Broken(SpanExporter):
    """Fails until ``works``."""

    works = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self.works:
            raise OSError("no route")
        return SpanExportResult.SUCCESS


def test_a_collector_that_is_away_is_reported_once(switch: Switch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    broken = Broken()
    tracer = switch(broken)
    for broken.works in (False, False, True, True):
        traces.begin("bake").end()
        tracer._provider.force_flush()  # pyright: ignore[reportPrivateUsage]

    assert [record.getMessage() for record in caplog.records] == ["traces.not_sent", "traces.sent_again"]


async def test_no_collector_fails_no_request(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    switch(None)
    async with client_of(an_app()) as http:
        answers = [await http.get("/ovens/one") for _ in range(20)]

    assert {answer.status_code for answer in answers} == {404}


async def test_requests_do_not_wait_for_a_collector_that_hangs(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    hanging = Kept()
    hanging.gate.clear()
    switch(hanging)
    async with client_of(an_app()) as http:
        answers = [await http.get("/ovens/one") for _ in range(50)]
    hanging.gate.set()
    traces.stop()

    assert {answer.status_code for answer in answers} == {404}
    assert 0 < len(hanging.spans) < 50
