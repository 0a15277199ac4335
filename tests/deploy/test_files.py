"""The files in `deploy/` agree with each other and with the rest of the repository. Needs neither Docker nor Helm."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from outrider.config import Config, SandboxesConfig

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "outrider"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_engines_and_frozen_models_have_their_fields() -> None:
    fields = {name: set(each["properties"]) for name, each in SCHEMA["definitions"].items() if "properties" in each}
    (engine,) = Config.model_fields["engines"].annotation.__args__[:1]  # tuple[EngineSpec, ...]
    (frozen,) = Config.model_fields["frozen"].annotation.__args__[:1]
    assert fields["engine"] == set(engine.model_fields)
    assert fields["frozen"] == set(frozen.model_fields)
    (grader,) = Config.model_fields["graders"].annotation.__args__[:1]
    assert fields["grader"] == set(grader.model_fields)


def test_no_part_of_the_schema_takes_unknown_names() -> None:
    def objects(schema: Any, where: str = "") -> None:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("type") == "object":
                assert schema["additionalProperties"] is False, where
            for name, each in schema.items():
                objects(each, f"{where}/{name}")

    objects(SCHEMA)


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(given: Any, schema: dict[str, Any], where: str) -> None:
        if "properties" in schema and where not in ("settings", "nodes.settings"):
            assert set(given) == set(schema["properties"]) - {"global"}, where
            for name, each in given.items():
                compare(each, schema["properties"][name], f"{where}.{name}".lstrip("."))

    compare(values, SCHEMA, "")


def test_each_setting_of_sandboxes_gets_to_where_it_has_an_effect() -> None:
    """Each setting of sandboxes is a value of the service or of the nodes. The template copies `default_kind` and
    `pull` from the service's values to the nodes. The service's other settings have their effect at submission."""
    given = SCHEMA["properties"]
    service = set(given["settings"]["properties"]["sandboxes"]["properties"])
    own = set(given["nodes"]["properties"]["settings"]["properties"]["sandboxes"]["properties"])
    (picked,) = re.findall(r"pick \(.*\) (.*) }}", (CHART / "templates" / "nodes-config.yaml").read_text())
    shared = set(re.findall(r'"(\w+)"', picked))
    assert service | own == set(SandboxesConfig.model_fields)
    assert service - shared == {"allow", "runtimes", "images"}, "these have an effect at submission"
    assert shared == {"default_kind", "pull"}


def test_the_notes_name_no_kind_but_that_of_the_values() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    assert re.findall(r'kind = "(.*?)"', notes) == ["{{ .Values.nodes.sandboxes }}"]


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_the_image_is_made_of_files_that_the_build_gets() -> None:
    """The .dockerignore file admits exactly the paths that the Dockerfile copies."""
    copied = {
        word
        for line in instructions("COPY")
        if "--from" not in line
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert "*" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (*copied, project["readme"], *project["license-files"]):
        assert name in copied
        assert (ROOT / name).exists()


def test_the_image_runs_as_the_user_whom_the_pods_name() -> None:
    (user,) = instructions("USER")
    number = int(user.partition(":")[0])
    assert number >= 10_000
    (made,) = (line for line in instructions("RUN") if line.startswith("useradd"))
    assert f"--uid {number} " in made
    for name in ("service", "nodes"):
        text = (CHART / "templates" / f"{name}-deployment.yaml").read_text()
        assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", text)) == {str(number)}


def test_the_image_names_one_base_and_known_extras() -> None:
    (base,) = (line for line in instructions("ARG") if line.startswith("PYTHON="))
    assert base.partition("=")[2].count("/") == 0, "no registry's host"
    assert all(line.startswith("${PYTHON}") for line in instructions("FROM"))
    (extras,) = (line.partition("=")[2] for line in instructions("ARG") if line.startswith("EXTRAS="))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
