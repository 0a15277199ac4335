"""The dashboard and the alerts use existing metrics of the service, and existing labels of these metrics.
tests/real/test_prometheus.py tests the results of their queries with a real Prometheus."""

from __future__ import annotations

import re

import pytest
import yaml

from outrider.service.metrics import FAMILIES

from .monitoring import SCRAPING, alerts, dashboard, metric_names, panel_queries

NAMES = {
    name: family
    for family in FAMILIES
    for name in {
        "counter": (f"{family.name}_total",),
        "gauge": (family.name,),
        "histogram": tuple(f"{family.name}_{part}" for part in ("bucket", "sum", "count")),
    }[family.kind]
}
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
EXPRESSIONS = [*(query.expr for query in panel_queries()), *(rule["expr"] for rule in alerts().values())]
VARIABLES = {"datasource", "instance", "__rate_interval"}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_a_query_names_metrics_and_labels_that_there_are(expr: str) -> None:
    used = metric_names(expr) - PROCESS
    assert used | metric_names(expr) & PROCESS or expr == 'up{job="outrider"} == 0'
    assert used <= NAMES.keys()
    labels = {label for name in used for label in NAMES[name].labels} | {"instance", "job", "le"}
    matched = {label for inner in re.findall(r"\{([^}]*)\}", expr) for label in re.findall(r"(\w+)\s*(?:=|!)", inner)}
    grouped = {label for inner in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr) for label in re.findall(r"\w+", inner)}
    assert matched | grouped <= labels, expr
    for name in re.findall(r"\b(?:rate|increase)\((\w+)", expr):
        assert name in PROCESS or NAMES[name].kind != "gauge", name


def test_the_dashboard_shows_every_metric_of_the_service() -> None:
    shown = {NAMES[name].name for query in panel_queries() for name in metric_names(query.expr) - PROCESS}
    assert {family.name for family in FAMILIES} - shown == set()


def test_the_dashboard_needs_nothing_of_the_grafana_that_loads_it() -> None:
    board = dashboard()
    text = str(board)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}
    assert set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__all"} == VARIABLES
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or all(
            target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]
        )


def test_every_alert_describes_what_to_do() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"Outrider[A-Z]\w+", name)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == rule["annotations"].keys()


def test_the_example_scrapes_the_job_of_the_alerts() -> None:
    settings = yaml.safe_load(SCRAPING.read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "outrider"
    assert settings["rule_files"] == ["alerts.yml"]
