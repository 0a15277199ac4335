"""Real programs look at images and a document with their own tools, on an engine that takes token ids."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.harnesses.install import install

from .rollout import END, a_world, call

pytestmark = pytest.mark.real


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PIXELS = zlib.compress((b"\0" + b"\x80\x20\x20" * 64) * 48)
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0))
    + chunk(b"IDAT", PIXELS)
    + chunk(b"IEND", b"")
)
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj\n%%EOF\n"


class Viewer(NamedTuple):
    """A program, its tool for commands (`shell`, with the command's argument), its tool for files (`view`, with the
    path's argument), and the files to view.

    `notes` are the counts of ignored parts in tool results. `said` is a part of the text that the model gets in place
    of the image.
    """

    preset: str
    shell: tuple[str, str]
    view: tuple[str, str]
    folder: str
    files: dict[str, bytes]
    notes: dict[str, int]
    said: str = "[image/png, 64x48, "


IMAGE = {"results.image/png": 1}
BOTH = {"a.png": PNG, "b.pdf": PDF}
VIEWERS = (
    Viewer("claude-code", ("Bash", "command"), ("Read", "file_path"), "/tmp/", BOTH,
           {**IMAGE, "results.application/pdf": 1}),
    Viewer("codex", ("exec_command", "cmd"), ("view_image", "path"), "", {"a.png": PNG}, IMAGE),
    Viewer("gemini-cli", ("run_shell_command", "command"), ("read_file", "file_path"), "", BOTH,
           {**IMAGE, "results.application/pdf": 1}),
    # The presets of these two declare no images, so the programs leave files out and give the model a notice.
    Viewer("opencode", ("bash", "command"), ("read", "filePath"), "/tmp/", BOTH, {},
           "this model does not support image input"),
    Viewer("pi", ("bash", "command"), ("read", "path"), "", {"a.png": PNG}, {},
           "Current model does not support images"),
)  # fmt: skip


@pytest.mark.parametrize("viewer", VIEWERS, ids=lambda viewer: viewer.preset)
async def test_a_look_at_a_file_does_not_end_a_program(viewer: Viewer, policy_folder: Path, tmp_path: Path) -> None:
    """The model gets a text in place of the file, and the program continues the same conversation."""
    install(viewer.preset)
    writes = [
        f"echo {base64.b64encode(data).decode()} | base64 -d > {viewer.folder}{name}"
        for name, data in viewer.files.items()
    ]
    shell, command = viewer.shell
    view, path = viewer.view
    replies: list[str | dict[str, Any]] = [
        {"when": "Generate a title for this conversation", "reply": "A file" + END},  # OpenCode requests a title
        call(shell, **{command: " && ".join(writes)}) + END,
        *(call(view, **{path: f"{viewer.folder}{name}"}) + END for name in viewer.files),
        call(shell, **{command: "echo hello > out.txt"}) + END,
        "All done." + END,
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run(viewer.preset)
    result = rollout.session.result
    assert result is not None
    noted = {name: count for name, count in result.ignored.items() if name.startswith("results.")}
    assert noted == viewer.notes
    main = [turn for turn in rollout.turns if turn.kind == "main"]
    assert [turn.join for turn in main] == ["root", *["append"] * (len(viewer.files) + 2)]
    assert viewer.said in "".join(turn.context for turn in main)
