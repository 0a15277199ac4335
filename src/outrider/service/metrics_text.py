"""Writes metrics in Prometheus' text format, or in OpenMetrics if the client's `Accept` header requests it.

`prometheus_client` is imported by the first call, because its import takes longer than all other imports that a scrape
needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from outrider.counts import Distribution
from outrider.service.metrics import FAMILIES, Family, Labels, Value

if TYPE_CHECKING:
    from prometheus_client import Metric


class MetricsText(NamedTuple):
    content_type: str
    body: bytes


def metrics_text(values: Iterable[Value], accept: str = "") -> MetricsText:
    """Write the values, grouped by family, in the format that the `Accept` header `accept` requests. Also writes the
    processor time, memory and open descriptors of this process. Takes milliseconds, so call this in a thread."""
    from prometheus_client import ProcessCollector
    from prometheus_client.exposition import choose_encoder

    found: dict[str, list[tuple[Labels, float | Distribution]]] = {family.name: [] for family in FAMILIES}
    for family, labels, value in values:
        found[family].append((labels, value))
    metrics = [_metric(family, found[family.name]) for family in FAMILIES]
    metrics += ProcessCollector(registry=None).collect()
    encode, content_type = choose_encoder(accept)
    return MetricsText(content_type, encode(_Collected(metrics)))


class _Collected:
    """The part of a registry's interface that the encoders of prometheus_client use."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _metric(family: Family, values: list[tuple[Labels, float | Distribution]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in values:
            assert isinstance(value, Distribution)
            histogram.add_metric(labels, _buckets(family.bounds, value), value.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in values:
        assert not isinstance(value, Distribution)
        metric.add_metric(labels, float(value))
    return metric


def _buckets(bounds: tuple[float, ...], value: Distribution) -> list[tuple[str, float]]:
    """Return a histogram's buckets: each upper bound, as text, with the number of values up to it."""
    from prometheus_client.utils import floatToGoString

    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, accumulate(value.counts or (0,) * len(names)), strict=True))
