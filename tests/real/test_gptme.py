"""The certification of gptme, a program without a preset, with the example in docs/bring-your-own-agent.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import page
from outrider.cli import main
from outrider.environment import cache_home
from outrider.harnesses.build_in_place import BuildInputs, build_in_place

pytestmark = [pytest.mark.real, pytest.mark.nightly]

PACKAGES = ("gptme==0.35.1",)
[TASK] = [block.text for block in page("docs/bring-your-own-agent.md").blocks if '"gptme"' in block.text]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of gptme's virtual environment, kept in $OUTRIDER_HOME. uv makes it without compiled modules."""
    made = cache_home().absolute() / "harnesses" / PACKAGES[0] / "gptme"

    def build() -> None:
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, made], check=True)
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", made / "bin/python", *PACKAGES], check=True)

    build_in_place(made, BuildInputs(PACKAGES), build)
    return made.parent


def test_gptme_is_certified(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gptme passes every row except those for sub-agents and images, which are not tried. It does not send its
    reasoning back, so the row `reasoning` holds with a remark about its forks."""
    task = tmp_path / "gptme.toml"
    task.write_text(TASK.replace("/srv/agents", str(folder)))
    code = main(["harness", "check", "--task", str(task), "--runtime", "namespace", "--seconds", "300", "--json"])
    made = json.loads(capsys.readouterr().out)
    told = {row["row"]: (row["verdict"], row["reason"]) for row in made["rows"]}
    assert (code, made["ok"]) == (0, True), told
    assert told.pop("sub-agent") == (
        "not tried",
        "no tool started a sub-agent; not called, because it takes no free text: complete; "
        "not called, because its use is known from its declaration: shell",
    )
    assert told.pop("image")[0] == "not tried"  # gptme has no tool for images
    assert {verdict for verdict, _ in told.values()} == {"holds"}
    assert {name for name, (_, reason) in told.items() if reason} == {"reasoning"}
    assert {row["drift_tokens"] for row in made["rows"]} == {0}
