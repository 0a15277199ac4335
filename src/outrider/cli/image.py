"""`outrider image`: makes, lists and removes images. An image is the root file system of a sandbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from click.exceptions import Exit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.tables import table
from outrider.cli.task_sources import examples_in
from outrider.cli.terminal import Terminal
from outrider.cli.wanted_images import HELP, pull_each, read_images
from outrider.config import load_config
from outrider.errors import ErrorRecord, InvalidField
from outrider.sandbox.engine_build import BuildEngine, build_by_engine
from outrider.sandbox.image_build import RUN_SECONDS
from outrider.sandbox.image_build import build_image as build_dockerfile
from outrider.sandbox.rootfs.build import Builder, Reuse
from outrider.sandbox.rootfs.dockerfile import DOCKERFILE
from outrider.sandbox.rootfs.pull import pull
from outrider.sandbox.rootfs.recipe import load_recipe
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.runtimes.kubernetes.pull_ahead import MOST_IMAGES, pull_ahead
from outrider.tasks.harbor.tasks import build_contexts

MEGABYTE = 1_000_000
Name = Annotated[str, CliArgument(metavar="NAME", help="Its name in a task's `runtime.image`.")]


class ImageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One name of an image. `path` is the image's root folder."""

    name: str
    path: str
    image: RootImage


class Images(msgspec.Struct, frozen=True):
    """The output of `outrider image list --json`. The commands `build` and `pull` have the same output for several
    images. `failed` has the errors of images that could not be pulled, by image name."""

    images: tuple[ImageRow, ...]
    failed: dict[str, ErrorRecord] = {}


@command
def import_image(
    terminal: Terminal,
    source: Annotated[Path, CliArgument(metavar="SOURCE", help="A file, or a folder with an OCI layout.")],
    name: Name,
) -> None:
    """Make an image from an archive.

    SOURCE is one of these:

    - a file written by `docker save` or `podman save`
    - an OCI layout
    - a SIF file
    - a tar file of a root file system

    Example:

        outrider image import python.tar python:3.12
    """
    store = ImageStore()
    _print_row(
        terminal, ImageRow(name=name, image=store.import_(source, name), path=str(store.root(store.image(name))))
    )


@command
def pull_image(terminal: Terminal, images: Annotated[list[str], CliArgument(metavar="IMAGE...", help=HELP)]) -> None:
    """Get images from container registries.

    The command needs the program skopeo. It pulls up to four images at once. If
    one image cannot be pulled, the command still pulls the others.

    Exit code 1: an image could not be pulled.

    Examples:

        outrider image pull docker.io/library/python:3.12-slim python

        outrider image pull python=docker.io/library/python:3.12 debian=docker.io/library/debian:13
    """
    store, wanted = ImageStore(), read_images(images)
    if len(wanted) == 1:
        terminal.note(f"pulling {next(iter(wanted.values()))}")
    pulled = asyncio.run(pull_each(wanted, lambda reference, name: pull(reference, name, store), terminal))
    rows, failed = [], {}
    for name, image in pulled.items():
        if isinstance(image, ErrorRecord):
            failed[name] = image
        else:
            rows.append(ImageRow(name=name, image=image, path=str(store.root(image))))
    if terminal.json and len(wanted) > 1:
        terminal.write_json(Images(tuple(rows), failed))
    else:
        for row in rows:
            _print_row(terminal, row)
    if failed:
        raise Exit(FAILURE)


@command
def pull_ahead_image(
    terminal: Terminal,
    images: Annotated[
        list[str] | None,
        CliArgument(metavar="[IMAGE]...", help="References, as machines of the cluster pull them."),
    ] = None,
    tasks: Annotated[
        list[str] | None, CliOption(metavar="SOURCE", help="Also the images of these tasks. Can be repeated.")
    ] = None,
    config: Annotated[Path | None, CliOption("--config", metavar="FILE", help="Settings of a node.")] = None,
    seconds: Annotated[float, CliOption(metavar="N", help="Time limit.")] = 1800.0,
) -> None:
    """Pull images on all machines of a Kubernetes cluster.

    The variable KUBECONFIG and a node's settings (--config) choose the cluster.
    The command creates a DaemonSet that pulls the images, and removes it at the
    end.

    Examples:

        outrider image pull-ahead docker.io/library/python:3.12-slim

        outrider image pull-ahead --tasks tasks.jsonl --config node.toml
    """
    wanted = dict.fromkeys(images or ())
    for source in tasks or ():
        for example in examples_in(source, limit=None, image=None):
            wanted |= dict.fromkeys(pod_images(example.task))
    if not wanted or len(wanted) > MOST_IMAGES:
        raise InvalidField(
            f"{len(wanted)} images are named",
            field="image",
            hint=f"name 1 to {MOST_IMAGES} images, or tasks of the runtime kind kubernetes",
        )
    settings = load_config({}, file=config).sandboxes.kubernetes
    printed = [-1]

    def progress(have: int, machines: int) -> None:
        if printed[0] != have:
            printed[0] = have
            terminal.note(f"{have} of {machines} machines have all {len(wanted)} images")

    pulled = asyncio.run(pull_ahead(list(wanted), settings, seconds=seconds, progress=progress))
    if terminal.json:
        terminal.write_json(pulled)


@command
def build_image(
    terminal: Terminal,
    recipe: Annotated[
        Path,
        CliArgument(
            metavar="RECIPE",
            help="A TOML file, as docs/images.md describes it, or a folder with a Dockerfile or Harbor tasks.",
        ),
    ],
    name: Annotated[
        str | None,
        CliArgument(
            metavar="NAME",
            help="Its name in a task's `runtime.image`.",
            show_default="of a Dockerfile, a name by which Harbor tasks find it",
        ),
    ] = None,
    reuse: Annotated[
        Reuse, CliOption(help="Reuse an earlier build: never, of the same recipe, or with the same packages.")
    ] = Reuse.VERSIONED,
    seconds: Annotated[float, CliOption(metavar="N", help="Time limit of each RUN of a Dockerfile.")] = RUN_SECONDS,
    allow_host: Annotated[
        list[str] | None,
        CliOption(
            metavar="HOST",
            help="A host that RUN may reach, such as your package mirror. Can be repeated.",
            show_default="none: RUN has no network",
        ),
    ] = None,
    engine: Annotated[
        BuildEngine | None,
        CliOption(help="Have this container engine build Dockerfiles.", show_default="none is needed"),
    ] = None,
    network: Annotated[
        bool, CliOption("--network", help="With --engine: the steps have the engine's network.")
    ] = False,
) -> None:
    """Build an image from a recipe or a Dockerfile.

    A recipe names a base image, packages, files and commands. Building it needs
    the program apptainer.

    A Dockerfile needs no container engine, because its commands run in a
    sandbox. The sandbox can reach only the hosts that --allow-host names. FROM
    must name an image that this machine already has.

    Examples:

        outrider image build tools.toml tools

        outrider image build my-task/environment

        outrider image build harbor-tasks

        outrider image build my-task/environment --allow-host mirror.lan:3141

        outrider image build my-task/environment --engine podman --network
    """
    store = ImageStore()
    hosts = tuple(allow_host or ())
    if network and engine is None:
        raise InvalidField("--network is of a container engine", field="network", hint="--engine, or --allow-host HOST")
    if hosts and engine is not None:
        raise InvalidField(
            "a container engine cannot be kept to some hosts", field="allow_host", hint="--network, or no --engine"
        )
    if recipe.is_dir():
        folders = [recipe]
        if not (recipe / DOCKERFILE).exists():  # a folder without a Dockerfile contains Harbor tasks
            folders = build_contexts(recipe) or folders
        if name is not None and len(folders) > 1:
            raise InvalidField(
                f"there are {len(folders)} Dockerfiles below {recipe}: they have no one name", field="name"
            )
        rows = []
        for folder in folders:
            if engine is not None:
                image = build_by_engine(folder, store, engine, name=name, network=network, note=terminal.note)
            else:
                image = build_dockerfile(folder, store, name=name, hosts=hosts, seconds=seconds, note=terminal.note)
            known = name or next(known for known, other in store.images().items() if other == image)
            rows.append(ImageRow(name=known, image=image, path=str(store.root(image))))
        if terminal.json and folders != [recipe]:
            terminal.write_json(Images(tuple(rows)))
            return
        for row in rows:
            _print_row(terminal, row)
        return
    if name is None:
        raise InvalidField("the image of a recipe needs a name", field="name")
    sif = Builder(store, note=terminal.note).build(load_recipe(recipe), reuse)
    terminal.note(f"importing {sif}")
    _print_row(terminal, ImageRow(name=name, image=store.import_(sif, name), path=str(store.root(store.image(name)))))


@command
def list_images(terminal: Terminal) -> None:
    """List the images of this user.

    The images are stored below ~/.cache/outrider (or $OUTRIDER_HOME).

    Example:

        outrider image list --json
    """
    store = ImageStore()
    rows = [ImageRow(name=name, image=image, path=str(store.root(image))) for name, image in store.images().items()]
    cells = []
    for row in rows:
        imported = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.image.created))
        digest = row.image.digest.removeprefix("sha256:")[:12]
        cells.append((row.name, digest, f"{row.image.bytes / MEGABYTE:,.1f} MB", imported))
    terminal.show(Images(tuple(rows)), table(("image", "digest", "size", "imported"), cells))


@command
def remove_image(terminal: Terminal, name: Name) -> None:
    """Remove a name from an image.

    An image may have several names. Removing the last name deletes the image.

    Example:

        outrider image rm python
    """
    gone = ImageStore().remove(name)
    kept = "" if gone else "; the image has another name"
    terminal.show({"name": name, "removed": gone}, f"{name} is removed{kept}")


def pod_images(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield the images of a task's pods. The pods are the sandboxes of the kind `kubernetes`, both the agent's sandbox
    and those of the evaluators."""
    steps = [task, *task.get("then", ())]
    runtimes = [task.get("runtime"), *((step.get("evaluator") or {}).get("runtime") for step in steps)]
    for runtime in runtimes:
        if runtime and runtime.get("kind") == "kubernetes" and runtime.get("image"):
            yield runtime["image"]


def _print_row(terminal: Terminal, row: ImageRow) -> None:
    left_out = f" ({row.image.left_out} special files left out)" if row.image.left_out else ""
    owned = f"; sandboxes need several users for {row.image.owners.foreign}" if row.image.owners.foreign else ""
    size = f"{row.image.bytes / MEGABYTE:,.1f} MB"
    terminal.show(row, f"{row.name} is {size} in {row.image.entries} files{left_out}{owned}: {row.path}")
