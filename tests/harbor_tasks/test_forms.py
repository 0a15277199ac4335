"""The forms of public Harbor folders: each form runs, or is refused with the file, the line and a remedy.

The forms are rebuilt from 28 folders of 17 public repositories. No folder had a form with the number 0.
docs/datasets.md has the table.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from outrider.errors import InvalidField
from outrider.sandbox.rootfs.dockerfile import read_dockerfile
from outrider.sandbox.rootfs.store import ImageStore
from outrider.tasks.datasets import harbor_examples
from test_datasets import as_task, harbor_task

DOCS = Path(__file__).parent.parent.parent / "docs" / "datasets.md"
PIN = f"sha256:{'4' * 64}"
CLOSED = "[environment]\nallow_internet = false\n"
RUNS = "runs"


class Form(NamedTuple):
    """A row of the table: a property of folders, how many of the 28 folders have it, and the outcome. `refused` is the
    place and a part of the error's message, or None if the task loads after its image is built."""

    has: str
    folders: int
    outcome: str
    dockerfile: str = "FROM py\n"
    toml: str = CLOSED
    refused: tuple[str, str] | None = None
    remedy: str = ""
    files: Mapping[str, str] = MappingProxyType({})
    offline: bool = False


FORMS = (
    Form('`allow_internet = false` or `network_mode = "no-network"`', 7, RUNS),
    Form(
        "a separate verifier with a Dockerfile of its own",
        1,
        RUNS,
        toml='[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "separate"\n',
        files={"tests/Dockerfile": "FROM py\nCOPY test.sh /tests/\n"},
    ),
    Form(
        "`allow_internet = true`, or nothing said of a network",
        21,
        "runs where the operator [allows](network.md#harbor) `*`; with `--network mirror:pip`, with that network",
        toml="[agent]\ntimeout_sec = 5\n[environment]\nallow_internet = true\n",
    ),
    Form("the same, loaded with `--offline`", 21, RUNS, toml="[environment]\nallow_internet = true\n", offline=True),
    Form(
        "`test.sh` with `apt-get`, `curl … | sh` or `uvx`",
        7,
        "runs with a network; without one, `task list` and `task check` name its lines",
        toml="[environment]\ncpus = 1\n",
        files={"tests/test.sh": "#!/bin/bash\napt-get update\nuvx pytest /tests\n"},
    ),
    Form("`FROM NAME@sha256:…`, pulled by its digest", 8, RUNS, f"FROM docker.io/library/pinned:1@{PIN}\n"),
    Form(
        "a digest, with an image of another or no known digest",
        8,
        "refused at `FROM`: pull it by its digest, or write the name alone",
        f"FROM py@{PIN}\n",
        refused=("Dockerfile, line 1: ", f"is not known to be {PIN}"),
        remedy=f"outrider image pull py@{PIN} py@{PIN} (which checks the digest)",
    ),
    Form(
        "a digest that is cut off",
        1,
        "refused at `FROM`: write the whole digest",
        "FROM py@sha256:fcbd8dfc\n",
        refused=("Dockerfile, line 1: ", "'sha256:fcbd8dfc' is no digest"),
        remedy="write the whole digest",
    ),
    Form(
        "a base image that is not on this machine (`ghcr.io/…`, `public.ecr.aws/…`)",
        28,
        "refused at `FROM`: `outrider image pull`",
        "# a comment\n\nFROM ghcr.io/org/base:1\n",
        refused=("Dockerfile, line 3: ", "there is no image 'ghcr.io/org/base:1'"),
        remedy="outrider image pull ghcr.io/org/base:1 ghcr.io/org/base:1",
    ),
    Form(
        "`RUN apt-get …` or `RUN pip install …`",
        25,
        "runs, built with `--allow-host` for each host of your mirror or proxy; without, the build names the hosts",
        "FROM py\nENV DEBIAN_FRONTEND=noninteractive\nRUN apt-get update \\\n    && apt-get install -y x\n",
    ),
    Form(
        "`.dockerignore`",
        2,
        RUNS,
        "FROM py\nCOPY . /app\n",
        files={"environment/.dockerignore": "**/*.log\nDockerfile\n", "environment/x.log": ""},
    ),
    Form(
        "`COPY --from=IMAGE`, for uv",
        2,
        RUNS,
        "FROM py\nCOPY --from=tools:1 /uv /uvx /usr/local/bin/\n",
    ),
    Form("`FROM --platform=linux/…` of this machine", 0, RUNS, "FROM --platform=$TARGETPLATFORM py AS base\n"),
    Form("`ARG` in `RUN`", 4, RUNS, "ARG TAG=py\nFROM ${TAG}\nARG COMMIT=1\nRUN echo ${COMMIT}\n"),
    Form(
        "a copied file that the repository lacks",
        1,
        "refused at `COPY`: add the file",
        "FROM py\nWORKDIR /app\nCOPY data/big.zip /tmp/\n",
        refused=("Dockerfile, line 3: ", "there is no file or folder 'data/big.zip'"),
        remedy="left it out of git",
    ),
    Form(
        "`COPY environment/…`, for a build in the task's folder",
        0,
        RUNS,
        "FROM py\nCOPY environment/data /app/\n",
        files={"environment/data/x": "1"},
    ),
    Form(
        "`COPY solution/` or `COPY tests/`",
        0,
        "refused at `COPY`: the agent would see them, and Harbor does not build it",
        "FROM py\nCOPY tests/ /app/tests/\n",
        refused=("Dockerfile, line 2: ", "would show the agent files of the task"),
        remedy="Harbor builds",
    ),
    Form(
        "`USER agent`, or `agent.user`",
        2,
        "refused at the line: root is the only user of a sandbox",
        "FROM py\nUSER agent\n",
        refused=("Dockerfile, line 2: ", "root is the only user"),
        remedy="remove the line",
    ),
    Form(
        "`ENTRYPOINT` of a shell, `CMD`, `EXPOSE`",
        2,
        RUNS,
        'FROM py\nENTRYPOINT ["/bin/bash", "-lc"]\nCMD ["x"]\nEXPOSE 1\n',
    ),
    Form(
        "a name that is not `org/name`",
        2,
        "refused at `name`, as by Harbor: write an organisation before it",
        toml='[task]\nname = "finding-router"\n',
        refused=("task.toml, line 2,", "'finding-router' is not of the form org/name"),
        remedy="my-org/my-task",
    ),
    Form(
        "`gpu_types`",
        2,
        "refused at the field: remove it, if any GPU will do",
        toml=f'{CLOSED}gpus = 1\ngpu_types = ["H100"]\n',
        refused=("task.toml, line 4,", "GPUs of a certain type"),
        remedy="remove it",
    ),
    Form(
        '`version = "1.0"`, `memory = "2G"`, fields that Harbor ignores',
        7,
        RUNS,
        toml=f'version = "1.0"\nx = 1\n{CLOSED}memory = "2G"\n',
    ),
    Form(
        "scratch, `ADD` of an archive, `RUN --mount`, `ONBUILD`",
        0,
        "refused at the line: `--engine podman` or `docker` builds it",
        "FROM py\nRUN --mount=type=cache,target=/c make\n",
        refused=("Dockerfile, line 2: ", "RUN takes no --mount"),
        remedy="--engine podman",
    ),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    store = ImageStore()
    for name in ("py", "tools:1", f"pinned:1@{PIN}"):
        an_image(store, tmp_path, name)
    return store


def an_image(store: ImageStore, folder: Path, name: str) -> None:
    (folder / "x").write_text(name)
    with tarfile.open(folder / "x.tar", "w") as archive:
        archive.add(folder / "x", arcname="x")
    store.import_(folder / "x.tar", name, pulled=True)


@pytest.mark.parametrize("form", FORMS, ids=[form.has for form in FORMS])
def test_a_form_runs_or_is_refused_with_its_line_and_remedy(tmp_path: Path, store: ImageStore, form: Form) -> None:
    task = harbor_task(tmp_path / "tasks" / "a", form.toml)
    for name, text in {"environment/Dockerfile": form.dockerfile, **form.files}.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)

    def loaded() -> Any:
        return harbor_examples(tmp_path / "tasks", offline=form.offline)

    if form.refused is None:
        for context in (task / "environment", task / "tests"):
            if (context / "Dockerfile").exists():
                an_image(store, tmp_path, read_dockerfile(context, store).name)  # stands for the built image
        [example] = loaded()
        assert as_task(example.task).runtime.image.startswith("dockerfile/")
        return
    place, says = form.refused
    with pytest.raises(InvalidField, match=f"{re.escape(place)}.*{re.escape(says)}") as refused:
        loaded()
    assert form.remedy in str(refused.value.hint)


def test_the_docs_have_the_table() -> None:
    rows = [f"| {form.has} | {form.folders or '-'} | {form.outcome} |" for form in FORMS]
    table = "\n".join(("| The folder has | Of 28 | What becomes of it |", "|---|---|---|", *rows))
    assert table in DOCS.read_text(), table


def test_services_beside_the_sandbox_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "a")
    (folder / "environment").mkdir()
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(InvalidField, match="does not do: services beside the agent's sandbox") as refused:
        harbor_examples(tmp_path)
    assert "remove docker-compose.yaml" in str(refused.value.hint)


def test_a_folder_of_the_older_form_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(InvalidField, match=r"has task\.toml and instruction\.md") as refused:
        harbor_examples(tmp_path)
    assert "task.yaml is of Terminal-Bench's older form" in str(refused.value.hint)
