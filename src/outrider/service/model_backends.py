"""Opens the policy and the frozen models: a renderer and an engine pool for each.

A service and each of its node processes open the same models. This module does not depend on `service.py`, so that node
processes need not import the service.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple

from outrider.concurrency.cancellation import OffloadThread
from outrider.concurrency.chores import Failures
from outrider.config import Config
from outrider.engines.pool.follower import FollowedPolicy, Leader
from outrider.engines.pool.policy import KnownPolicy
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.waits import RememberedPace
from outrider.environment import install_command
from outrider.errors import InvalidField
from outrider.plugins import resolve
from outrider.service.tokenizer_check import tokenizer_check
from outrider.sessions.calls.call import FrozenModel, ModelBackend, image_room
from outrider.sessions.calls.limits import Intake
from outrider.spec import Limits
from outrider.tokens.rendering.renderer import Renderer, make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.vision.preparer import DecodingProcess, DocumentReader, ImagePreparer, has_pdfium, has_pillow

log = logging.getLogger("outrider.service")


class Models(NamedTuple):
    """The backends of the policy and of the frozen models."""

    policy: ModelBackend
    frozen: tuple[FrozenModel, ...]

    @property
    def pools(self) -> dict[str | None, EnginePool]:
        """The engine pool of each frozen model by its name. The policy's pool has the key None."""
        return {None: self.policy.pool} | {model.backend.model: model.backend.pool for model in self.frozen}


@asynccontextmanager
async def open_models(
    config: Config,
    *,
    known: KnownPolicy | None = None,
    keep: Callable[[KnownPolicy], Awaitable[None]] | None = None,
    paces: Mapping[str, RememberedPace] = {},
    leader: Callable[[str | None], Leader] | None = None,
    failures: Failures | None = None,
) -> AsyncIterator[Models]:
    """Open the models that the settings name, with engine pools that are still empty. Raises InvalidField for a wrong
    setting of a model.

    known, paces: the policy's version and the engines' usual speeds, as an earlier service process stored them.
    keep: stores a new version.
    leader: if given, each pool follows the pool of the same model in another process.
    failures: records failures of the pools' background work."""
    if config.model.tokenizer is None:
        # A misspelt engine kind is reported before the missing tokenizer, because the intended engine may provide a
        # tokenizer.
        for engine in config.engines:
            resolve("engine", engine.kind, field="engine")
        raise InvalidField(
            "no tokenizer is set",
            field="model.tokenizer",
            hint="give the model's folder: --tokenizer DIR (the folder with tokenizer.json); "
            "an engine embedded=DIR brings its own",
        )
    renderer = make_renderer(
        Tokenizer.load(config.model.tokenizer), config.model.renderer, image_tokens=config.model.image_tokens
    )
    frozen_renderers = _frozen_renderers(config, renderer)
    intake, offload, room = Intake(), OffloadThread(), image_room()
    engine_names: set[str] = set()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(offload.close)

        async def backend_of(name: str, renderer: Renderer, context: int | None, serves: str | None) -> ModelBackend:
            tokenizer = renderer.tokenizer
            pool = EnginePool(
                serves=serves,
                claimed=engine_names,
                tokenizer=tokenizer.name_or_path,
                vocabulary=tokenizer.vocabulary,
                context_tokens=context,
                text=tokenizer.stream,
                check=tokenizer_check(tokenizer, serves),
                known=None if serves else known,
                keep=None if serves else keep,
                paces=paces,
                near=config.near,
                follows=None if leader is None else partial(FollowedPolicy, leader=leader(serves)),
                failures=failures,
            )
            await stack.enter_async_context(pool)
            # Documents have a separate process, because reading a document takes longer than decoding an image, and no
            # image should wait for a document.
            images, decoding, reading = None, DecodingProcess(), DecodingProcess()
            stack.push_async_callback(decoding.close)
            stack.push_async_callback(reading.close)
            if renderer.images is not None and not has_pillow():
                log.warning("model %s is served without images: %s", name, install_command("images"))
            elif renderer.images is not None:
                images = ImagePreparer(renderer.images, decoding)
            settings = None if images is None else images.settings
            return ModelBackend(
                renderer=renderer,
                pool=pool,
                model=name,
                context_tokens=context,
                intake=intake,
                images=images,
                documents=DocumentReader(settings, reading) if has_pdfium() else None,
                image_room=room,
                offload=offload,
            )

        policy = await backend_of(config.model.name, renderer, config.model.context_tokens, None)
        frozen = [
            FrozenModel(
                backend=await backend_of(model.name, frozen_renderer, model.context_tokens, model.name),
                limits=Limits(turns=model.turns, response_tokens=model.response_tokens),
            )
            for model, frozen_renderer in zip(config.frozen, frozen_renderers, strict=True)
        ]
        yield Models(policy, tuple(frozen))


def _frozen_renderers(config: Config, policy: Renderer) -> list[Renderer]:
    """Return the renderer of each frozen model. Raises InvalidField if two models have the same name, or if a tokenizer
    or renderer does not work."""
    names = [config.model.name]
    renderers = []
    for at, model in enumerate(config.frozen):
        if model.name in names:
            whose = "the policy" if model.name == config.model.name else "another frozen model"
            raise InvalidField(
                f"the frozen model's name {model.name!r} is also the name of {whose}",
                field=f"frozen.{at}.name",
                hint="agents choose a model by its name: give each model a name of its own",
            )
        names.append(model.name)
        if model.tokenizer is None and model.renderer is None:
            renderers.append(policy)
            continue
        try:
            tokenizer = policy.tokenizer if model.tokenizer is None else Tokenizer.load(model.tokenizer)
            renderers.append(make_renderer(tokenizer, model.renderer, image_tokens=config.model.image_tokens))
        # The error names a field of `config.model`, so it is raised again with the matching field of `config.frozen`.
        except InvalidField as error:
            field = f"frozen.{at}.{(error.field or '').removeprefix('model.')}"
            raise InvalidField(error.message, field=field, hint=error.hint) from error
    return renderers
