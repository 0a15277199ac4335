"""A topology file of Polar, read as the settings of a service."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cli.polar_topology import read_topology
from outrider.cli.setting_options import read_settings
from outrider.config import all_settings, load_config
from outrider.errors import InvalidField

TOPOLOGY: dict[str, Any] = {
    "rollout": {"host": "127.0.0.1", "save_dir": "results", "callback_grace_seconds": 60},
    "gateway": {
        "heartbeat_interval_seconds": 10,
        "completion_persistence": {"enabled": True},
        "nodes": [
            {
                "id": name,
                "host": "0.0.0.0",
                "model_served": "qwen",
                "inference": {"engine": "vllm", "base_url": f"http://10.0.0.{number}:8000/v1"},
                "max_run_workers": 8,
                "default_runtime": {"backend": "apptainer"},
            }
            for number, name in enumerate(("a", "b"))
        ],
    },
}


def written(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


def test_the_nodes_become_one_service(tmp_path: Path) -> None:
    path = written(tmp_path, TOPOLOGY)
    config = load_config({"lanes.eval": "3"}, file=path, read=read_topology)
    assert (config.host, config.port, config.data, config.compat) == ("127.0.0.1", 8080, Path("results"), ("polar",))
    assert [(one.kind, one.name, one.url) for one in config.engines] == [
        ("vllm", "a", "http://10.0.0.0:8000"),
        ("vllm", "b", "http://10.0.0.1:8000"),
    ]
    assert (config.lanes.init, config.lanes.run, config.lanes.eval) == (8, 16, 3)  # a flag has precedence
    assert (config.model.name, config.sandboxes.default_kind) == ("qwen", "apptainer")
    assert config.read_from == path  # no task may read the file


def test_nodes_may_share_an_engine(tmp_path: Path) -> None:
    shared = copy.deepcopy(TOPOLOGY)
    for node in shared["gateway"]["nodes"]:
        node["inference"]["base_url"] = "http://10.0.0.9:8000/"
    assert [one["url"] for one in read_topology(written(tmp_path, shared))["engines"]] == ["http://10.0.0.9:8000"]


@pytest.mark.parametrize(
    ("part", "key", "value", "field"),
    [
        ("rollout", "odd", 1, "rollout.odd"),
        ("rollout", "port", "x", "rollout.port"),
        ("gateway", "nodes", [], "gateway.nodes"),
        ("node", "id", "b", "gateway.nodes"),
        ("node", "odd", 1, "gateway.nodes.0.odd"),
        ("node", "max_run_workers", 0, "gateway.nodes.0.max_run_workers"),
        ("node", "model_served", "other", "gateway.nodes.1.model_served"),
        ("node", "model_pool", [{}], "gateway.nodes.0.model_pool"),
        ("node", "default_runtime", {"backend": "docker", "image": "x"}, "gateway.nodes.0.default_runtime"),
        ("node", "default_runtime", None, "gateway.nodes.1.default_runtime"),
        ("node", "inference", {"engine": "tgi", "base_url": "u"}, "gateway.nodes.0.inference.engine"),
        (
            "node",
            "inference",
            {"engine": "sglang", "base_url": "u", "scheduler": "thunderagent"},
            "gateway.nodes.0.inference.scheduler",
        ),
    ],
)
def test_what_has_no_setting_is_refused_by_name(tmp_path: Path, part: str, key: str, value: Any, field: str) -> None:
    changed = copy.deepcopy(TOPOLOGY)
    parts = {"rollout": changed["rollout"], "gateway": changed["gateway"], "node": changed["gateway"]["nodes"][0]}
    parts[part][key] = value
    with pytest.raises(InvalidField) as caught:
        read_topology(written(tmp_path, changed))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "rollout: {}"])
def test_what_is_no_topology_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidField):
        read_topology(written(tmp_path, text))


def test_serve_reads_a_topology(tmp_path: Path) -> None:
    options = dict.fromkeys((path.replace(".", "__") for path, _, _ in all_settings()), None)
    path = written(tmp_path, TOPOLOGY)
    config = read_settings({**options, "config": path, "port": "9000"})
    assert (config.port, config.model.name, config.compat) == (9000, "qwen", ("polar",))
