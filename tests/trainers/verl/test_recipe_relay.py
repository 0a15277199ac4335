"""An epoch of verl's recipe: workers in Ray actors answer the calls of `--compat verl` through verl's own manager.

The manager's servers are Ray actors without a GPU. In the first test, each server has its own small model. In the
second test, the servers pass the token ids to a real vLLM for CPU, which runs in its own environment."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
import pytest
import ray
from openai import AsyncOpenAI
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import TokenOutput

from outrider.client.client import AsyncClient
from outrider.config import ModelConfig
from outrider.dialects.chat.request import parse_message
from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import Chunk, Engine, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.embedded import EmbeddedEngine
from outrider.harnesses.toolbox import TOOLS
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.lab.demo.task import ITEMS
from outrider.service.service import Service
from outrider.spec import EngineSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.verl_worker import RecipeWorker
from outrider.trajectory import Sample, Turn, unpack_ids, unpack_logprobs
from real.vllm_cpu import vllm_environment, vllm_server
from support.service import running_service
from trainers.verl import world

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(300)]

TASKS, STEP = 20, 12
SERVED = "policy"
CONTEXT = 1024


class SeededVllm(VLLMEngine):
    """A vLLM whose reply depends on the prompt's ids alone, because the protocol of the workers has no seed."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        sampling = msgspec.structs.replace(request.sampling, seed=zlib.crc32(request.input_ids.tobytes()))
        return super().generate(msgspec.structs.replace(request, sampling=sampling))


class Server:
    """The methods of a server that verl's client calls. The model is Outrider's demo policy, served by the vLLM at
    `url`, or by torch in this process if `url` is None."""

    def __init__(self, url: str | None) -> None:
        self._engine: Engine
        if url is None:
            self._engine = EmbeddedEngine(EngineOptions(name="embedded", model=str(POLICY)))
        else:
            self._engine = SeededVllm(EngineOptions(name="vllm", url=url, model=SERVED))
        self._served: list[list[int]] = []

    async def start(self) -> None:
        await self._engine.start()

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        params = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        request = GenerateRequest(
            request_id=request_id,
            session_key=request_id,
            input_ids=np.asarray(prompt_ids, dtype=np.int32),
            sampling=msgspec.convert(params, SamplingParams),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in self._engine.generate(request):
            ids += chunk.ids
            logprobs += chunk.logprobs
        self._served.append(ids)
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": STEP}
        )

    async def served(self) -> list[list[int]]:
        """Return the sampled ids of all generations."""
        return self._served


class Replica:
    """A replica of verl whose server is a Ray actor without a GPU."""

    url: str | None = None

    def __init__(self, *, replica_rank: int, **settings: Any) -> None:
        self._server_address = f"replica-{replica_rank}"
        self._server_handle: Any = None

    async def init_standalone(self) -> None:
        self._server_handle = ray.remote(Server).remote(self.url)
        await self._server_handle.start.remote()


class TurnOfRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A turn in the form of the contract."""

    request_messages: list[dict[str, Any]]
    completion_text: str
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    finish_reason: str | None
    tool_calls: list[dict[str, Any]] | None
    timing: dict[str, float] | None
    node_id: str | None
    gpu_id: str | None
    worker_id: str | None
    rank_info: dict[str, Any] | None


class Record(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    turns: list[TurnOfRecord]
    created_at: float
    completed: bool


class Rows(msgspec.Struct):
    """The row that the recipe's agent loop gives to its trainer."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]


async def converse(base_url: str, key: str, item: str, called: Callable[[], None]) -> None:
    """Run an agent that reads files as the model requests, for at most four calls."""
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=5) as client:
        messages: list[Any] = [{"role": "user", "content": f"Where is {item}?"}]
        tools: list[Any] = [TOOLS["bash"]]
        for _ in range(4):
            completion = await client.chat.completions.create(
                model="m", messages=messages, tools=tools, temperature=1.0, max_tokens=48
            )
            called()
            message = completion.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                read = json.loads(call.function.arguments).get("command") == f"cat {item}"
                text = "zone: jade" if read else "cat: No such file or directory"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


class AgentLoop:
    """The recipe's RemoteAgentLoop, written from the contract alone: it registers a session, has an agent call the
    model, completes, reads and deletes the session, and builds the trainer's row."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.called: Counter[str] = Counter()
        self.halfway = asyncio.Event()
        self._http = http
        self._url = url
        self._renderer = make_renderer(Tokenizer.load(POLICY), RENDERER)

    async def run(self, sid: str, item: str = "maple") -> tuple[Record, Rows]:
        def called() -> None:
            self.called[sid] += 1
            if self.called.total() == TASKS // 2:
                self.halfway.set()

        await self._status("POST", f"/sessions/{sid}", "created")
        try:
            await converse(f"{self._url}/{sid}/v1", "none", item, called)
            await self._status("POST", f"/sessions/{sid}/complete", "completed")
            async with self._http.get(f"{self._url}/sessions/{sid}") as reply:
                record = msgspec.json.decode(await reply.read(), type=Record)
        finally:
            await self._status("DELETE", f"/sessions/{sid}", "deleted")
        return record, self._rows(record)

    async def _status(self, method: str, path: str, expected: str) -> None:
        async with self._http.request(method, self._url + path) as reply:
            body = await reply.json()
            assert (reply.status, body["status"]) == (200, expected)

    def _rows(self, record: Record) -> Rows:
        """Return the row of a record. Sampled ids have the mask 1, and the ids of tool results the mask 0."""
        first = record.turns[0].request_messages
        prompt = self._renderer.render([_message(each) for each in first], [TOOLS["bash"]])
        rows = Rows(prompt, [], [], [])
        for turn in record.turns:
            if turn is not record.turns[0]:
                before, new = [*prompt, *rows.response_ids], [_message(each) for each in turn.request_messages]
                gap = self._renderer.bridge(before[:-1], before[-1:], new, [TOOLS["bash"]], "recorded")
                assert gap is not None
                rows.response_ids += gap
                rows.mask += [0] * len(gap)
                rows.logprobs += [0.0] * len(gap)
            rows.response_ids += turn.completion_token_ids
            rows.mask += [1] * len(turn.completion_token_ids)
            rows.logprobs += turn.completion_logprobs
        return rows


def _message(wire: dict[str, Any]) -> Any:
    return parse_message(msgspec.json.encode(wire), "messages")


def own_row(turns: list[Turn]) -> Rows:
    """Return the row of our own API, made of the turns of one branch."""
    rows = Rows(unpack_ids(turns[0].prompt_delta).tolist(), [], [], [])
    for turn in turns:
        if turn.index:
            assert turn.parent == turn.index - 1
            delta = unpack_ids(turn.prompt_delta).tolist()
            rows.response_ids += delta
            rows.mask += [0] * len(delta)
            rows.logprobs += [0.0] * len(delta)
        output = unpack_ids(turn.output_ids).tolist()
        rows.response_ids += output
        rows.mask += [1] * len(output)
        rows.logprobs += unpack_logprobs(turn.logprobs).tolist()
    return rows


def row_of(sample: Sample) -> Rows:
    """Return the row of our own API, made of a sample that the API has delivered."""
    ids, length = sample.ids.tolist(), sample.prompt_length
    mask, logprobs = sample.loss_mask.tolist(), sample.logprobs.tolist()
    return Rows(ids[:length], ids[length:], mask[length:], logprobs[length:])


@pytest.fixture
def cluster() -> Iterator[None]:
    tests = Path(__file__).parents[2]
    workers = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tests}:{tests.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": workers},
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


class Recipe(NamedTuple):
    """A service with `--compat verl`, and the Ray actors that answer its calls."""

    service: Service
    url: str
    http: aiohttp.ClientSession
    servers: list[Any]
    workers: list[Any]

    async def served(self) -> list[list[list[int]]]:
        """Return the sampled ids of each server's generations."""
        return list(await asyncio.gather(*(server.served.remote() for server in self.servers)))


async def managed(folder: Path, replica: type[Replica]) -> LLMServerManager:
    """Return verl's manager with two servers of a class of replicas, as a recipe may have. This function is a
    coroutine, because `create` checks whether its caller is a coroutine."""

    class Manager(LLMServerManager):  # type: ignore[misc]  # verl has no types
        rollout_replica_class = replica

    rollout = {"prompt_length": 512, "nnodes": 1, "n_gpus_per_node": 2, "tensor_model_parallel_size": 1}
    overrides = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    return await Manager.create(world.verl_config(folder, POLICY, {}, overrides))


@asynccontextmanager
async def recipe(folder: Path, replica: type[Replica]) -> AsyncIterator[Recipe]:
    """Run a service with three workers, which call two servers through verl's manager."""
    manager = await managed(folder, replica)
    servers = [each._server_handle for each in manager.get_replicas()]
    assert len(servers) == 2
    model = ModelConfig(tokenizer=str(POLICY), renderer=RENDERER)
    async with (
        running_service(tmp_path=folder, compat=("verl",), model=model, engines=()) as (service, url),
        aiohttp.ClientSession() as http,
    ):
        actor = ray.remote(num_cpus=0)(RecipeWorker)
        workers = [
            actor.remote(url, manager.get_client(), tokenizer=str(POLICY), renderer=RENDERER, worker_id=f"w-{number}")
            for number in range(3)
        ]
        running = [worker.run.remote() for worker in workers]
        await asyncio.gather(*(worker.attached.remote() for worker in workers))
        async with http.get(f"{url}/health") as reply:
            assert (await reply.json()) == {"status": "ok", "mode": "relay", "connected_workers": 3}
        yield Recipe(service, url, http, servers, workers)
        for worker, run in zip(workers, running, strict=True):
            ray.cancel(run)
            ray.kill(worker)


async def test_an_epoch_with_verls_manager_and_a_killed_worker(tmp_path: Path, cluster: None) -> None:
    async with recipe(tmp_path, Replica) as epoch:
        loop = AgentLoop(epoch.http, epoch.url)

        async def kill_one() -> None:
            await loop.halfway.wait()
            ray.kill(epoch.workers[0])

        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(kill_one())
            rolling = [tasks.create_task(loop.run(f"swe-{number}")) for number in range(TASKS)]
        assert killing.done()
        records = [task.result() for task in rolling]
        called = loop.called
        assert called.total() > TASKS, "most agents call the model again after the tool's result"

        store = epoch.service.store
        groups = await store.groups_before(None, limit=100, harness="external", tenant=None)
        by_sid = {group.labels["verl.session"]: group.id for group in groups}
        assert len(by_sid) == TASKS
        for record, rows in records:
            [session] = await store.sessions(by_sid[record.session_id])
            own = await store.turns(session.id)
            assert record.completed
            assert len(record.turns) == len(own) == called[record.session_id], "nothing is lost, nothing is twice"
            assert rows == own_row(list(own))
            assert len(rows.response_ids) == len(rows.mask) == len(rows.logprobs)
            for turn, row in zip(record.turns, own, strict=True):
                assert turn.completion_token_ids
                assert all(math.isfinite(value) and value <= 0 for value in turn.completion_logprobs)
                assert [(span.version, span.end) for span in row.versions] == [(STEP, len(turn.completion_token_ids))]
        served = await epoch.served()
        assert min(map(len, served)) > 0, "verl's balancer gives work to both servers"
        assert sum(map(len, served)) >= called.total()


@pytest.mark.nightly
@pytest.mark.timeout(900)  # a loaded machine takes minutes to start vLLM
async def test_an_epoch_over_a_real_vllm_has_the_rows_of_our_own_api(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, cluster: None
) -> None:
    """The replies are vLLM's, token for token, after they have passed through verl's servers and balancer, the workers
    and the relay."""
    prefix = vllm_environment(install=False)
    items = ITEMS[:TASKS]
    model = ModelConfig(tokenizer=str(POLICY), renderer=RENDERER)
    async with vllm_server(prefix, POLICY, model=SERVED, context_tokens=CONTEXT) as vllm:

        class OverVllm(Replica):
            url = vllm.url

        async with recipe(tmp_path, OverVllm) as epoch:
            loop = AgentLoop(epoch.http, epoch.url)
            theirs = await asyncio.gather(*(loop.run(f"swe-{item}", item) for item in items))
            served = await epoch.served()
        engine = EngineSpec(kind=f"{__name__}:SeededVllm", name="vllm", url=vllm.url, model=SERVED)
        async with (
            running_service(tmp_path=tmp_path_factory.mktemp("own"), model=model, engines=(engine,)) as (_, url),
            AsyncClient(url) as client,
        ):

            async def own(item: str) -> Rows:
                async with client.external_session() as session:
                    await converse(f"{session.base_url}/v1", session.key, item, lambda: None)
                    await session.complete(reward=1.0)
                await client.wait([session.group_id])
                [sample] = await client.samples(session.id)
                return row_of(sample)

            ours = await asyncio.gather(*map(own, items))
    replies = [tuple(turn.completion_token_ids) for record, _ in theirs for turn in record.turns]
    assert Counter(replies) == Counter(tuple(ids) for server in served for ids in server)
    assert min(map(len, served)) > 0, "verl's balancer gives work to both servers"
    assert len(replies) > TASKS, "most agents call the model again after the tool's result"
    assert len({tuple(row.response_ids) for row in ours}) > TASKS // 2, "the conversations differ"
    for (_, row), expected in zip(theirs, ours, strict=True):
        assert (row.prompt_ids, row.response_ids, row.mask) == (
            expected.prompt_ids,
            expected.response_ids,
            expected.mask,
        )
        # vLLM computes a batch at a time, and the sum of a row's products depends on the other rows of the batch.
        assert row.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
