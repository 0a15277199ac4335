"""Merges the settings of a node on another machine from two sources: the service, and that machine.

The service sets models, harnesses and limits. The machine sets lanes, sandboxes and folders. It can also set `files`
and `sandboxes.allow`, the folders from which tasks may use files. By default, these two settings have the service's
values. The paths are always checked on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.config import OWN, Config, FrozenConfig, ModelConfig
from outrider.nodes.messages import NodeSetup
from outrider.sandbox.node_folder import NodeFolder
from outrider.sessions.resources import Capacity
from outrider.tokens.rendering.image_grids import SETTINGS_FILES
from outrider.tokens.rendering.tokenizer import FILES

M = TypeVar("M", ModelConfig, FrozenConfig)
COPIED = (*FILES, *SETTINGS_FILES)
"""Files of a model's folder that are copied to a node on another machine."""


def settings_for_node(config: Config, name: str, capacity: Capacity) -> NodeSetup:
    """Return the service's settings without secrets, and the contents of the tokenizers' files. Blocks while it reads
    these files."""
    tokenizers = {config.model.tokenizer, *(model.tokenizer for model in config.frozen)} - {None}
    changes = {
        # A joining machine that does not set `files` or `sandboxes.allow` uses these values, so it must have the files
        # at the same paths.
        "files": None if config.files is None else config.files.absolute(),
        "sandboxes": config.sandboxes.model_copy(
            update={"allow": tuple(path.absolute() for path in config.sandboxes.allow)}
        ),
    }
    return NodeSetup(
        name=name,
        config=config.for_nodes().model_copy(update=changes).model_dump_json().encode(),
        capacity=capacity,
        level=0,
        folders={
            folder: {path.name: path.read_bytes() for path in (Path(folder, name) for name in COPIED) if path.exists()}
            for folder in tokenizers
            if folder is not None
        },
    )


@asynccontextmanager
async def merged_settings(sent: NodeSetup, own: NodeSetup) -> AsyncIterator[NodeSetup]:
    """Yield the service's settings (`sent`) merged with this machine's settings (`own`). The tokenizers are copied to a
    folder that exists while the block runs. If this process is killed, another node on this machine removes the
    folder."""
    service, here = (Config.model_validate_json(each.config) for each in (sent, own))
    async with opened_in_thread(NodeFolder.make, NodeFolder.remove) as folder:
        # `shielded` waits for the thread even if the caller is cancelled. Otherwise the thread could still write files
        # after the folder was removed.
        copies = await shielded(lambda: asyncio.to_thread(_copies, sent.folders, folder.path))

        def with_copy(model: M) -> M:
            return model.model_copy(update={"tokenizer": model.tokenizer and copies[model.tokenizer]})

        changes = {
            **{name: getattr(here, name) for name in OWN},
            "files": here.files or service.files,
            "sandboxes": here.sandboxes.model_copy(update={"allow": here.sandboxes.allow or service.sandboxes.allow}),
            "model": with_copy(service.model),
            "frozen": tuple(map(with_copy, service.frozen)),
        }
        config = service.model_copy(update=changes)
        yield msgspec.structs.replace(
            sent,
            config=config.model_dump_json().encode(),
            path=own.path,
            level=own.level,
            json_log=own.json_log,
            file=own.file,
            folders={},
        )


def _copies(folders: Mapping[str, Mapping[str, bytes]], into: Path) -> dict[str, str]:
    """Write copies of the service's folders below `into`. Returns the path of each copy, by the path of the copied
    folder. The copy's path ends with the last two names of the copied folder's path, because these names may be the
    model's name (`owner/model`)."""
    copies = {}
    for number, (folder, files) in enumerate(folders.items()):
        names = [part for part in Path(folder).parts if part not in ("/", "..")]
        copy = into.joinpath(str(number), *names[-2:])
        copy.mkdir(parents=True)
        for name, data in files.items():
            if name in COPIED:
                (copy / name).write_bytes(data)
        copies[folder] = str(copy)
    return copies
