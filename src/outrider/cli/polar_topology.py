"""Reads a topology file of Polar, and returns the settings of one service that replaces all of Polar's servers.

The service uses the engines of all gateway nodes. Its lanes `init`, `run` and `eval` get as many slots as all nodes
together have init, run and postrun workers. Three kinds of keys have no effect: those about connections between Polar's
servers, about clean-up, and about the storage of completions. Invariant: all other keys without a matching setting, and
unknown keys, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.spec import Name, Spec, Text
from outrider.text_files import read_text_file

MOST = 1 << 20
"""Maximum size of a topology file in bytes."""
FIELD = "config"
KINDS = ("docker", "apptainer")
"""Kinds of sandboxes that a topology may name."""

Workers = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class _Rollout(Spec):
    host: Name
    port: Port = 8080
    public_url: Text | None = None
    save_dir: Name | None = None
    dispatch_poll_interval_seconds: float = 1
    callback_grace_seconds: float = 120
    http_max_connections: int = 1024
    http_max_keepalive_connections: int = 256
    cleanup_max_concurrency: int = 128
    cleanup_max_attempts: int = 3
    cleanup_retry_backoff_seconds: float = 0.1


class _Persistence(Spec):
    enabled: bool = True
    max_field_bytes: int | None = None
    queue_size: int | None = None
    write_workers: int = 8
    batch_size: int = 16
    write_max_attempts: int = 3
    retry_backoff_seconds: float | None = None


class _Inference(Spec):
    engine: Literal["sglang", "vllm"]
    base_url: Name
    scheduler: Literal["none", "thunderagent"] = "none"


class _GatewayNode(Spec):
    id: Name
    host: Name
    port: Port = 8081
    public_url: Text | None = None
    model_served: Name
    inference: _Inference
    max_init_workers: Workers = 4
    max_run_workers: Workers = 2
    max_postrun_workers: Workers = 4
    default_runtime: dict[str, Any] | None = None
    model_pool: list[Any] = Field(default_factory=list)


class _Gateways(Spec):
    heartbeat_interval_seconds: float = 30
    rollout_server_url: Text | None = None
    completion_persistence: _Persistence | None = None
    nodes: Annotated[list[_GatewayNode], Field(min_length=1)]

    @field_validator("nodes")
    @classmethod
    def _named_apart(cls, value: list[_GatewayNode]) -> list[_GatewayNode]:
        if len({node.id for node in value}) < len(value):
            raise ValueError("two nodes have the same id")
        return value


class PolarTopology(Spec):
    """A topology file."""

    rollout: _Rollout
    gateway: _Gateways


def read_topology(path: Path) -> dict[str, Any]:
    """Read a topology file, and return its settings in the same form as a settings file. Raises InvalidField with the
    name of the key if the file is invalid or a key has no matching setting."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidField(
            f"{path} cannot be read without the package pyyaml", field=FIELD, hint="pip install pyyaml"
        ) from error
    try:
        value = yaml.safe_load(read_text_file(path, field=FIELD, limit=MOST, what="topology file"))
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidField(f"{path} is not YAML: {error}", field=FIELD) from error
    try:
        return settings_of(PolarTopology.model_validate(value))
    except ValidationError as error:
        fault = first_fault(error, PolarTopology)
        raise InvalidField(f"{path}: {fault.message}", field=fault.field or FIELD) from error


def settings_of(topology: PolarTopology) -> dict[str, Any]:
    """Return the settings of one service that replaces all gateway nodes. Raises InvalidField."""
    rollout, nodes = topology.rollout, topology.gateway.nodes
    for number, node in enumerate(nodes):
        field = f"gateway.nodes.{number}"
        if node.model_served != nodes[0].model_served:
            raise InvalidField(
                f"{node.model_served!r} is another model than {nodes[0].model_served!r}: a service has one policy",
                field=f"{field}.model_served",
                hint="start a service for each policy; models that are not trained are in the setting `frozen`",
            )
        if node.inference.scheduler != "none":
            raise InvalidField(
                "Outrider places sessions on engines itself", field=f"{field}.inference.scheduler", hint="leave it out"
            )
        if node.model_pool:
            raise InvalidField(
                "a pool of models is in the setting `frozen`, not in a topology",
                field=f"{field}.model_pool",
                hint="write the settings to a TOML file (docs/frozen-models.md)",
            )
    engines: dict[str, dict[str, Any]] = {}
    for node in nodes:
        url = node.inference.base_url.rstrip("/").removesuffix("/v1")
        engines.setdefault(url, {"kind": node.inference.engine, "name": node.id, "url": url})
    settings: dict[str, Any] = {
        "host": rollout.host,
        "port": rollout.port,
        "compat": ["polar"],
        "engines": list(engines.values()),
        "model": {"name": nodes[0].model_served},
        "lanes": {
            "init": sum(node.max_init_workers for node in nodes),
            "run": sum(node.max_run_workers for node in nodes),
            "eval": sum(node.max_postrun_workers for node in nodes),
        },
    }
    if rollout.save_dir is not None:
        settings["data"] = rollout.save_dir
    if (kind := _default_kind(nodes)) is not None:
        settings["sandboxes"] = {"default_kind": kind}
    return settings


def _default_kind(nodes: Sequence[_GatewayNode]) -> str | None:
    """Return the kind of sandbox for tasks that do not name one, or None if no node has a default runtime."""
    for number, node in enumerate(nodes):
        runtime = node.default_runtime
        same = runtime == nodes[0].default_runtime
        if not same or (runtime is not None and (runtime.keys() != {"backend"} or runtime["backend"] not in KINDS)):
            raise InvalidField(
                "only the backend of a default runtime has a setting, and all nodes must have the same",
                field=f"gateway.nodes.{number}.default_runtime",
                hint="name the image and the rest in each task's runtime",
            )
    return None if nodes[0].default_runtime is None else str(nodes[0].default_runtime["backend"])
