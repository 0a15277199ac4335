"""The service's nodes in the form of Polar's gateways, whose stages are the lanes of a node."""

from __future__ import annotations

import time

from starlette.requests import Request

from outrider.api.compat.polar_results import PolarObject
from outrider.schemas import LaneStats, NodeStats
from outrider.service.service import Service

METRICS = (
    "init_queue_depth",
    "init_inflight",
    "ready_depth",
    "run_inflight",
    "postrun_queue_depth",
    "postrun_inflight",
)


def nodes_of(service: Service, request: Request) -> list[PolarObject]:
    """Return the nodes, with the address at which the client has called."""
    return [_node_info(node, url_of(request)) for node in service.nodes().nodes]


def url_of(request: Request) -> str:
    """Return the address at which the client has called."""
    return f"{request.url.scheme}://{request.url.netloc}"


def _node_info(node: NodeStats, url: str) -> PolarObject:
    none = LaneStats(name="", size=0, in_use=0, waiting=0, served=0, waited_seconds=0.0)
    lanes = {lane.name: lane for lane in node.lanes}
    init, ready, run, grading = (lanes.get(name, none) for name in ("init", "ready", "run", "eval"))
    depths = (init.waiting + ready.waiting, init.in_use, run.waiting, run.in_use, grading.waiting, grading.in_use)
    return {
        "node_id": node.name,
        "gateway_url": url,
        "max_init_workers": max(1, init.size),
        "max_run_workers": max(1, run.size),
        "max_postrun_workers": max(1, grading.size),
        "heartbeat_interval_seconds": 30,
        "metrics": dict(zip(METRICS, depths, strict=True)),
        "dispatch_reservations": 0,
        "healthy": True,
        "draining": node.drained,
        "last_heartbeat": time.time(),
    }
