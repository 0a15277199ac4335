"""Writes the settings of config.py into docs/config.md, and into the schema of the Helm chart's values.

Run the script by hand after a setting has changed; tests compare the files with config.py. The rest of both files stays
as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.config import Config, all_settings, variable_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "config.md"
SCHEMA = ROOT / "deploy" / "helm" / "outrider" / "values.schema.json"

HEAD = "| Setting | Flag | Environment | Default | Meaning |\n|---|---|---|---|---|\n"
OF_NODES = {
    "lanes",
    *(f"sandboxes.{name}" for name in ("cpus", "memory_mb", "gpus", "starts_per_second", "warm", "warm_memory_mb")),
    "sandboxes.kubernetes",
}
"""Settings and sections of settings that the Helm chart gives to nodes."""
OF_CHART = {
    *("host", "port", "tls", "token", "store", "data", "files", "processes", "stop_seconds"),
    *("callbacks.secret", "task_key"),
}
"""Settings that the Helm chart itself sets, from other values. `task_key` is stored on the data volume, or is a
variable of `service.envFromSecret`."""
DEFINITIONS = {
    "AgentServiceConfig": "agents",
    "EngineSpec": "engine",
    "FrozenConfig": "frozen",
    "GraderConfig": "grader",
    "TenantNetwork": "tenantNetwork",
}
WIDTH = 120


def with_table(page: str) -> str:
    """Return the page's text with its table of settings replaced by the current table."""
    before, _, after = page.partition(HEAD)
    return before + HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows()) + after[after.index("\n\n") + 1 :]


def with_settings(schema: str) -> str:
    """Return the schema's text with its properties of settings replaced by the current properties."""
    whole = json.loads(schema)
    properties = whole["properties"]
    chosen = {path for path, _, _ in all_settings() if not {path, path.partition(".")[0]} & OF_CHART}
    of_nodes = {path for path in chosen if {path, path.partition(".")[0], path.rpartition(".")[0]} & OF_NODES}
    properties["settings"] = _object(chosen - of_nodes)
    properties["nodes"]["properties"]["settings"] = _object(of_nodes)
    return _json(whole) + "\n"


def _rows() -> Iterator[tuple[str, ...]]:
    for path, field, setting in all_settings():
        default = field.default.model_dump() if hasattr(field.default, "model_dump") else field.default
        shown = setting.default or ("none" if default is None else f"`{json.dumps(default, default=str)}`")
        flag = f"`{setting.option.split()[0]}`" if setting.option else "none"
        meaning = (field.description or "").replace("\n", " ").removesuffix(".")
        yield f"`{path}`", flag, f"`{variable_of(path)}`", shown, meaning


def _object(paths: set[str]) -> dict[str, Any]:
    """Return the schema of an object with these settings, in the order of `Config`."""
    schema = Config.model_json_schema()
    made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for path in (path for path, _, _ in all_settings() if path in paths):
        *sections, name = path.split(".")
        into, within = made, schema
        for section in sections:
            within = schema["$defs"][within["properties"][section]["$ref"].rpartition("/")[2]]
            empty = {"type": "object", "additionalProperties": False, "properties": {}}
            into = into["properties"].setdefault(section, empty)
        into["properties"][name] = _stripped(within["properties"][name])
    return made


def _stripped(schema: Any) -> Any:
    """Return a schema without descriptions and without the type null, because a value that is not given has no line in
    the values."""
    if "$ref" in schema:
        return {"$ref": f"#/definitions/{DEFINITIONS[schema['$ref'].rpartition('/')[2]]}"}
    if "anyOf" in schema:
        [schema] = [each for each in schema["anyOf"] if each != {"type": "null"}]
    kept = ("type", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern")
    found = {name: schema[name] for name in kept if name in schema}
    return found | ({"items": _stripped(schema["items"])} if "items" in schema else {})


def _json(value: Any, indent: int = 0, before: int = 0) -> str:
    """Return JSON in which each object and each list is on one line if it fits."""
    flat = json.dumps(value)
    if indent + before + len(flat) <= WIDTH or not isinstance(value, dict | list):
        return flat
    inner = indent + 2
    if isinstance(value, list):
        rows, ends = [_json(each, inner, 1) for each in value], "[]"
    else:
        rows = [f'"{name}": {_json(each, inner, len(name) + 5)}' for name, each in value.items()]
        ends = "{}"
    return f"{ends[0]}\n" + ",\n".join(" " * inner + row for row in rows) + f"\n{' ' * indent}{ends[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    SCHEMA.write_text(with_settings(SCHEMA.read_text()))
