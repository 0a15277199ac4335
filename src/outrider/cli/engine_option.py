"""Parses the option value KIND=WHERE, which names an engine: `vllm=http://127.0.0.1:8000`. The module does not import a
service's settings, because they load slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidField

KIND = "KIND=WHERE"
ADDRESSED = frozenset({"vllm", "sglang", "openai", "prorl", "vllm-router", "sglang-router"})
"""Kinds of engines that are reached at a URL."""
KIND_HELP = (
    "vllm=URL, sglang=URL, openai=URL, prorl=URL, vllm-router=URL, sglang-router=URL (each of a router's workers), "
    "embedded=FOLDER (a model's folder), relay=NAME (workers connect to the service) "
    "or scripted=FILE.json (fixed replies)."
)


def parse_engine(text: str, *, field: str = "engine") -> dict[str, Any]:
    """Parse KIND=WHERE into the fields of an `EngineSpec`. Raises InvalidField."""
    kind, given, where = text.partition("=")
    if not (kind and given and where):
        raise InvalidField(f"{text!r} is not {KIND}", field=field, hint=f"give {KIND_HELP}")
    match kind:
        case "embedded":
            return {"kind": kind, "model": where}
        case "relay":
            return {"kind": kind, "name": where}
        case "scripted":
            try:
                options = msgspec.json.decode(Path(where).read_bytes(), type=dict[str, Any])
            except OSError as error:
                raise InvalidField(f"cannot read {where}: {error.strerror}", field=field) from error
            except msgspec.MsgspecError as error:
                raise InvalidField(f"{where} is not a JSON object: {error}", field=field) from error
            return {"kind": kind, "options": options}
        case _:
            if kind in ADDRESSED and "://" not in where:
                raise InvalidField(f"{where!r} has no scheme", field=field, hint=f"write {kind}=http://{where}")
            return {"kind": kind, "url": where}
