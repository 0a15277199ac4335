"""A script in place of skopeo, with a registry of one image."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rootfs.archives import as_folder, oci_files

BOTH = (
    'case "${3##*/}" in *:*@*)'
    " echo Docker references with both a tag and digest are currently not supported >&2; exit 1 ;; esac"
)
"""Refuses a reference with both a tag and a digest, with the message of the real skopeo."""


def fake_skopeo(folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.0) -> Callable[[], list[str]]:
    """Put the script first in the PATH, and give this test its own cache of images. The only image is `registry/x`,
    with any digest. The script takes `seconds` to answer, and with 60 or more it never answers. Returns a function that
    lists the requested references."""
    layout = as_folder(oci_files(), folder / "layout")
    asked = folder / "asked"
    skopeo = folder / "bin" / "skopeo"
    skopeo.parent.mkdir()
    # With exec, because a killed shell would leave its child running.
    wait = f"exec sleep {seconds}" if seconds >= 60 else f"sleep {seconds}"
    check = 'case "$3" in docker://registry/x | docker://registry/x@*) ;; *) echo no such image >&2; exit 1 ;; esac'
    skopeo.write_text(f'#!/bin/sh\necho "$3" >> {asked}\n{wait}\n{BOTH}\n{check}\ncp -r {layout} "${{4#oci:}}"\n')
    skopeo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{skopeo.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OUTRIDER_HOME", str(folder / "home"))
    return lambda: asked.read_text().split() if asked.exists() else []
