"""Metrics that router processes share by way of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router import metrics as router_metrics
from services.router.metrics import ENDED, Gauge, Metrics, MetricsFolder

LABELS = ("llama", "SS", "200")


def counted(folder: MetricsFolder) -> tuple[float, float, list[float]]:
    gauges = [Gauge("held", "", ("server",), {}), Gauge("up", "", ("server",), {}, is_summed=False)]
    total, found = folder.read(gauges)
    waits = sum(sum(amounts[:-1]) for _, amounts in total.wait.amounts())
    return total.requests.values.get(LABELS, 0.0), waits, [sum(gauge.values.values()) for gauge in found]


def test_metrics_of_processes_are_added_up_and_stay_when_one_ends(tmp_path: Path) -> None:
    folder = MetricsFolder(tmp_path / "metrics")
    folder.begin()
    for process, requests in (("a", 3), ("b", 4), ("c", 5)):
        metrics = Metrics()
        metrics.requests.add(LABELS, requests)
        metrics.wait.observe(LABELS[:2], 0.3)
        gauges = [Gauge("held", "", ("server",), {("s",): 2.0}), Gauge("up", "", ("server",), {("s",): 1.0})]
        folder.write(process, metrics, gauges)
    assert counted(folder) == (12, 3, [6, 1])

    before = (tmp_path / "metrics" / "a.json").read_bytes()
    folder.end("a")
    assert counted(folder) == (12, 3, [4, 1])
    (tmp_path / "metrics" / "a.json").write_bytes(before)  # as if the folder's owner had been killed meanwhile
    assert counted(folder) == (12, 3, [4, 1])
    folder.end("b")
    folder.end("b")
    assert counted(folder) == (12, 3, [2, 1])
    assert (tmp_path / "metrics" / ENDED).exists()
    folder.begin()
    assert counted(folder) == (0, 0, [0, 0])


def test_what_is_counted_of_servers_that_are_gone_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_metrics, "MOST_SERIES", 3)
    metrics, total = Metrics(), Metrics()
    for server in range(5):
        metrics.blind.add((f"server_{server}", "here"))
        metrics.gen_ai_first.observe(("llama", "chat", f"server_{server}", "here"), 0.1)
    for labels, amounts in metrics.gen_ai_first.amounts():
        total.gen_ai_first.merge((*labels[:3], "there"), amounts)
        total.gen_ai_first.merge(labels, amounts)
    assert [labels[0] for labels in metrics.blind.values] == ["server_2", "server_3", "server_4"]
    assert len(metrics.gen_ai_first.amounts()) == len(total.gen_ai_first.amounts()) == 3
