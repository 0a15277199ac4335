"""Starts SkyRL's server of Tinker's interface on the CPU: `skyrl_server.py MODEL PORT FOLDER`.

SkyRL 0.4.0 is written for Python 3.12, starts its engine with `uv run`, and serves client 0.25. This module adds what
client 0.38 needs: names of sampled sequences, and the end of a client's session.
"""

from __future__ import annotations

import json
import runpy
import sys
import typing
from typing import Any

import typing_extensions

ENGINE = "engine"
JSON = b"application/json"


class ForNewerClient:
    """An ASGI application that adds `sample_sequence_ids` to the replies of `/api/v1/asample`, for requests of one
    sequence, and answers `/api/v1/sessions/ID/finish`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.endswith("/finish"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", JSON)]})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        if not path.endswith("/asample"):
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}

        async def named(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            reply = json.loads(message["body"])
            if "request_id" in reply:
                reply["sample_sequence_ids"] = [f"sequence-{reply['request_id']}"]
            body = json.dumps(reply).encode()
            kept = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, named)


def serve(model: str, port: int, folder: str) -> None:
    import uvicorn
    from cloudpathlib import AnyPath
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    config = EngineConfig(
        base_model=model,
        backend="jax",
        # batches of one size, because JAX compiles anew for each size
        backend_config={
            "max_lora_adapters": 4,
            "max_lora_rank": 8,
            "sample_max_num_sequences": 8,
            "train_micro_batch_size": 1,
        },
        checkpoints_base=AnyPath(f"{folder}/checkpoints"),
        database_url=f"sqlite:///{folder}/tinker.db",
    )
    api._build_uv_run_cmd_engine = lambda _, config: [sys.executable, __file__, ENGINE, *config_to_argv(config)]
    api.app.state.engine_config = config
    uvicorn.run(ForNewerClient(api.app), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typing.TypedDict = typing_extensions.TypedDict
    if sys.argv[1] == ENGINE:
        del sys.argv[1]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__", alter_sys=True)
    else:
        serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
