"""Readers of the dashboard and the alerts in `deploy/`, for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SCRAPING = DEPLOY / "prometheus" / "prometheus.yml"
DASHBOARD = DEPLOY / "grafana" / "outrider.json"


class PanelQuery(NamedTuple):
    panel: str
    expr: str

    def at(self, *, instance: str = ".*", interval: str = "1m") -> str:
        """Return the query as Grafana sends it."""
        return self.expr.replace("$instance", instance).replace("$__rate_interval", interval)


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def panel_queries() -> Iterator[PanelQuery]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield PanelQuery(panel["title"], target["expr"])


def alerts() -> dict[str, Any]:
    """Return the alert rules by name."""
    found = yaml.safe_load(ALERTS.read_text())
    return {rule["alert"]: rule for group in found["groups"] for rule in group["rules"]}


def metric_names(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:outrider|process)_[a-z_]+\b", re.sub(r'"[^"]*"', '""', expr)))
