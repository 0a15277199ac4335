"""NeMo Gym's head server, its environment server that passes rows on to our agent server, and NeMo Gym's own client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from environment_servers.legacy_agent.app import LegacyAgentEnvironmentServer
from nemo_gym import global_config, server_utils
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import HeadServer, ServerClient
from omegaconf import OmegaConf

from outrider.trainers.nemo_gym import agent_class
from trainers.gym_world import AGENT

RELAY = "outrider_environment_server"


class Gym:
    """The addresses of the servers, and NeMo RL's call to them."""

    def __init__(self, head: BaseServerConfig, port: int, ended: asyncio.Event) -> None:
        self.head = head
        self.url = f"http://127.0.0.1:{port}"
        self.ended = ended
        """Set when the agent server has ended a request, with a reply or because the client has disconnected."""

    async def collect(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the results of rows, in the rows' order, through NeMo Gym's client as in NemoGym.run_rollouts of NeMo
        RL. Raises the first failure."""
        helper = RolloutCollectionHelper()
        found = [await future for future in helper.run_examples(list(rows), self.head)]
        return [result for _, result in sorted(found, key=lambda pair: pair[0]["_rowidx"])]


@asynccontextmanager
async def running_gym(settings: dict[str, Any]) -> AsyncIterator[Gym]:
    """Run NeMo Gym's servers, with the agent server's settings under `outrider`."""
    with socket.socket() as own, socket.socket() as relays, socket.socket() as heads:
        for one in (own, relays, heads):
            one.bind(("127.0.0.1", 0))
        port, relay_port, head_port = (one.getsockname()[1] for one in (own, relays, heads))
        inner = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, "outrider": settings}
        agent_server = {"type": "responses_api_agents", "name": AGENT}
        relay_inner = {"entrypoint": "app.py", "host": "127.0.0.1", "port": relay_port, "agent_server": agent_server}
        config = OmegaConf.create(
            {
                AGENT: {"responses_api_agents": {"outrider": inner}},
                RELAY: {"environment_servers": {"legacy_agent": relay_inner}},
                "head_server": {"host": "127.0.0.1", "port": head_port},
                "error_on_agent_without_environment_server": True,
            }
        )
        parsed = GlobalConfigDictParserConfig(
            initial_global_config_dict=config, skip_load_from_cli=True, skip_load_from_dotenv=True
        )
        global_config.set_global_config_dict(parsed)
        head = BaseServerConfig(host="127.0.0.1", port=head_port)
        kind: Any = agent_class()
        client = ServerClient(head_server_config=head, global_config_dict=global_config.get_global_config_dict())
        agent = kind(config={**inner, "name": AGENT}, server_client=client)
        app = agent.setup_webserver()
        agent.setup_liveness(app)
        agent.setup_exception_middleware(app)
        relay = LegacyAgentEnvironmentServer(config={**relay_inner, "name": RELAY}, server_client=client)
        ended = asyncio.Event()

        async def noticing(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if scope["type"] == "http":
                ended.set()

        def server_of(app: Any) -> uvicorn.Server:
            return uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

        server, relay_server = server_of(noticing), server_of(relay.setup_webserver())
        heads_server = server_of(HeadServer(config=head).setup_webserver())
        thread = threading.Thread(target=heads_server.run, kwargs={"sockets": [heads]})
        thread.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.serve(sockets=[own]))
                tasks.create_task(relay_server.serve(sockets=[relays]))
                # uvicorn has no event for its start
                while not (server.started and relay_server.started and heads_server.started):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                try:
                    yield Gym(head, port, ended)
                finally:
                    server.should_exit = relay_server.should_exit = True
                    if server_utils.is_global_aiohttp_client_setup():
                        await server_utils.get_global_aiohttp_client().close()
                        server_utils._GLOBAL_AIOHTTP_CLIENT = None
        finally:
            heads_server.should_exit = True
            await asyncio.to_thread(thread.join)
