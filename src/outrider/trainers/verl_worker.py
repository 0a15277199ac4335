"""A worker of verl's RemoteAgentLoop recipe, as a Ray actor. Through it, verl's own servers answer the model calls of
the recipe's session proxy.

    worker = ray.remote(RecipeWorker).remote("http://proxy:8080", manager.get_client(), tokenizer=folder)
    running = worker.run.remote()

`manager` is verl's LLMServerManager, whose client balances the calls over verl's servers. The proxy is the recipe's
own, or `outrider serve --compat verl`. The protocol is that of `outrider.relay.verl`.
"""

from __future__ import annotations

from typing import Any

import ray

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.relay.verl import ProxyWorker
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.verl import VerlGenerate


class RecipeWorker:
    """One worker. All arguments can be sent to a Ray actor.

    client: an LLMServerClient of verl.
    tokenizer: the folder of the model's tokenizer.
    renderer: the name of the model's family (see `make_renderer`); by default, derived from the model's name.
    token, ca: as for `ProxyWorker`.

    Raises InvalidField for an unknown family.
    """

    def __init__(
        self,
        url: str,
        client: Any,
        *,
        tokenizer: str,
        renderer: str | None = None,
        worker_id: str | None = None,
        token: str | None = None,
        ca: str | None = None,
    ) -> None:
        facts: dict[str, Any] = {}
        if ray.is_initialized():
            context = ray.get_runtime_context()
            facts["node_id"] = context.get_node_id()
            facts["gpu_id"] = ",".join(map(str, ray.get_gpu_ids())) or None
        self._worker = ProxyWorker(
            url,
            FunctionEngine(VerlGenerate(client), name="verl"),
            make_renderer(Tokenizer.load(tokenizer), renderer),
            worker_id=worker_id,
            facts=facts,
            token=token,
            ca=ca,
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises the errors of `ProxyWorker.run`."""
        await self._worker.run()

    async def attached(self) -> None:
        """Wait until the proxy has acknowledged the worker."""
        await self._worker.attached.wait()
