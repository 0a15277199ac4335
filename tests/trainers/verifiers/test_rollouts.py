"""verifiers 0.4's own evaluation and environment server, with sessions of a real service as rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

from outrider.engines.base import EngineOptions
from outrider.errors import InvalidField
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers.verifiers_plugin import OutriderRow, OutriderTask
from support.ports import free_port
from support.scribe import Scribe, scribe_task
from support.service import call, running_service, say, scripted_engine
from support.tokenizer import write_tokenizer
from trainers.verifiers.world import ID, env_config, orchestrating, prime_rl, rows_file
from trainers.verifiers_world import model_server, training_samples

pytestmark = pytest.mark.trainers


async def ended(service: Any, number: int) -> list[Any]:
    """Return the service's first groups that have ended, at least `number`, with their samples."""
    found: list[Any] = []
    cursor = 0
    while len(found) < number:
        page = await service.results(after=cursor, wait=20, limit=100, samples=True)
        found, cursor = [*found, *page.groups], page.cursor
    return found


async def vf_eval(folder: Path, url: str, *arguments: str, at: Path | None = None) -> tuple[int, str]:
    """Run verifiers' own command in the folder `at`, and return its exit code and output."""
    program = Path(sys.executable).with_name("vf-eval")
    variables = {**os.environ, "OUTRIDER_URL": url, "HOME": str(folder)}
    fixed = ("--no-push", "--no-rich", "--output-dir", str(folder / "out"), "--run.name", "run")
    process = await asyncio.create_subprocess_exec(
        program, *arguments, *fixed, env=variables, cwd=at or folder, stdout=-1, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def episodes_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "run" / "traces.jsonl").read_text().splitlines()]


async def test_vf_eval_evaluates_rows_and_runs_failed_ones_again(tmp_path: Path) -> None:
    tasks = [scribe_task("eval well", rewards=[1, 0, 0.5]), scribe_task("eval ill", rewards=[0.25], fails=[0])]
    rows = str(rows_file(tmp_path, tasks))
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (_, url):
        code, output = await vf_eval(
            tmp_path, url, ID, "--env.taskset.rows", rows, "-m", "policy", "-r", "3", "-c", "1"
        )
        first = episodes_in(tmp_path)
        saved = tmp_path / "out" / "run" / "configs" / "resolved" / "eval.json"
        again, more = await vf_eval(tmp_path, url, "@", str(saved), "--resume")
    assert (code, again) == (0, 0), output + more
    rewards = [trace["rewards"].get("outrider") for episode in first for trace in episode["traces"]]
    assert Counter(reward and reward["score"] for reward in rewards) == {1.0: 1, 0.0: 1, 0.5: 1, 0.25: 2, None: 1}
    [failed] = [episode for episode in first if not episode["ok"]]
    [error] = failed["traces"][0]["errors"]
    assert (error["type"], "the scribe fell ill" in error["message"]) == ("HarnessError", True)
    assert Counter(episode["ok"] for episode in episodes_in(tmp_path)) == {True: 6}
    assert (Scribe.started["eval well"], Scribe.started["eval ill"]) == (3, 4)


async def test_the_example_is_evaluated(tmp_path: Path) -> None:
    here = Path(__file__).parents[3] / "examples" / "verifiers"
    process = ("--env.agent.harness.outrider.task.runtime.kind", "process")
    replies = [call("printf 42 > answer.txt"), say("It is done.")]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url):
        code, output = await vf_eval(tmp_path, url, "@", "eval.toml", *process, at=here)
    assert code == 0, output
    rewards = [
        (trace["task"]["data"]["row"]["label"], trace["rewards"]["outrider"]["score"])
        for episode in episodes_in(tmp_path)
        for trace in episode["traces"]
    ]
    assert Counter(rewards) == {("42", 1.0): 2, ("327", 0.0): 2, ("156", 0.0): 2, ("7", 0.0): 2}


async def test_the_environment_server_returns_each_token_once_with_its_log_probability(tmp_path: Path) -> None:
    tasks = [scribe_task("served", rewards=[0.25, 0.75], rewrites=[0])]
    async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")]) as (service, url):
        async with orchestrating(env_config(rows_file(tmp_path, tasks), {"url": url, "metrics": ["number"]})) as prime:
            episodes = [await prime.run(), await prime.run()]
        groups = await ended(service, 2)
    samples = defaultdict(list)
    for group in groups:
        for sample in group.samples:
            samples[sample.session_id].append(sample)
    for number, episode in enumerate(episodes):
        [trace] = episode.traces
        rows = samples[trace.info["outrider"]["session"]]
        assert (episode.ok, trace.ok, trace.reward, trace.metrics["number"]) == (
            True,
            True,
            (0.25, 0.75)[number],
            number,
        )
        assert len(rows) == (2, 1)[number]
        for branch, row in zip(trace.branches, rows, strict=True):  # verifiers' reading of the trace
            assert branch.token_ids == row.ids.tolist()
            assert branch.sampled_mask == [bool(one) for one in row.loss_mask]
            assert branch.logprobs == row.logprobs.tolist()
        made = training_samples([node.model_dump() for node in trace.nodes])  # prime-rl's reading of the trace
        assert [(ids, mask, logprobs) for ids, mask, logprobs in made] == [
            (row.ids.tolist(), [bool(one) for one in row.loss_mask], row.logprobs.tolist()) for row in rows
        ]
        sampled = sum(group_session.result.tokens.sampled for group_session in sessions_of(groups, trace))
        assert sum(sum(mask) for _, mask, _ in made) == sampled
        assert trace.num_turns == len(trace.calls) == (3, 2)[number]
        assert [message.role for message in trace.branches[0].messages] == ["user", "assistant"] * 2
        assert trace.last_reply == "two"
        assert trace.usage.completion_tokens == sampled
        assert (trace.stop_condition, trace.is_truncated) == ("agent_completed", False)


def sessions_of(groups: list[Any], trace: Any) -> list[Any]:
    name = trace.info["outrider"]["session"]
    return [session for group in groups for session in group.sessions if session.id == name]


async def test_a_failure_is_an_error_of_its_boundary_and_verifiers_rules_retry_it(tmp_path: Path) -> None:
    tasks = [
        scribe_task("served ill", fails=[0], rewards=[0.5]),
        scribe_task("served odd") | {"colour": "red"},
        scribe_task("served down"),
    ]
    down = {"when": "say it", "fail": "rejected"}
    retries = {"rules": [{"type": "HarnessError", "status_code": ["5xx"], "max_retries": 1}]}
    async with running_service(tmp_path=tmp_path) as (_, url), prime_rl(tmp_path, tasks, url) as prime:
        ill, odd = await prime.run(0), await prime.run(1)
    Scribe.started["served ill"] = 0
    async with running_service(tmp_path=tmp_path) as (_, url), prime_rl(tmp_path, tasks, url, retries=retries) as prime:
        healed = await prime.run(0)
    async with (
        running_service(tmp_path=tmp_path, replies=[down]) as (_, url),
        prime_rl(tmp_path, tasks, url) as prime,
    ):
        rejected = await prime.run(2)
    expected = [(ill, "HarnessError", 500), (odd, "TaskError", 422), (rejected, "ProviderError", 400)]
    for episode, kind, status in expected:
        [trace] = episode.traces
        assert not episode.ok
        assert not trace.ok
        assert trace.rewards == {}  # no reward, instead of the reward 0
        assert (trace.last_error.type, trace.last_error.status_code) == (kind, status), trace.last_error
        assert training_samples([node.model_dump() for node in trace.nodes]) == []
    assert healed.ok
    assert healed.traces[0].reward == 0.5
    assert [error.type for error in healed.traces[0].errors] == ["HarnessError"]


async def test_an_agent_that_verifiers_stops_gets_no_reward_and_its_session_ends(tmp_path: Path) -> None:
    tasks = [scribe_task("served slow")]
    engine = scripted_engine(tmp_path, [{"reply": say("one"), "stall": 1}])
    async with running_service(tmp_path=tmp_path, engine=engine) as (service, url):
        async with prime_rl(tmp_path, tasks, url, timeout={"rollout": 0.5}) as prime:
            episode = await prime.run()
        [group] = await ended(service, 1)
    [trace] = episode.traces
    assert group.cancelled
    assert (episode.ok, trace.ok, trace.is_timeout) == (False, False, True)
    assert trace.rewards == {"outrider": None}
    assert "has no session of Outrider" in trace.last_error.message


async def test_a_cancelled_episode_cancels_its_session(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [{"reply": say("one"), "stall": 1}])
    async with (
        running_service(tmp_path=tmp_path, engine=engine) as (service, url),
        prime_rl(tmp_path, [scribe_task("served stale")], url) as prime,
    ):
        running = asyncio.create_task(prime.run())
        await engine.stalled.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        [group] = await ended(service, 1)
    assert group.cancelled


async def test_fifty_rows_at_once(tmp_path: Path) -> None:
    tasks = [scribe_task(f"served crowd {number}", rewards=[number]) for number in range(50)]
    async with running_service(tmp_path=tmp_path) as (_, url), prime_rl(tmp_path, tasks, url) as prime:
        episodes = await asyncio.gather(*(prime.run(number) for number in range(50)))
    assert [episode.traces[0].reward for episode in episodes] == [float(number) for number in range(50)]
    assert all(training_samples([node.model_dump() for node in episode.traces[0].nodes]) for episode in episodes)


async def test_a_rollout_goes_on_when_the_service_is_restarted(tmp_path: Path) -> None:
    rows = rows_file(tmp_path, [scribe_task("served restart", rewards=[0.5])])
    engine = scripted_engine(tmp_path, [{"reply": say("one"), "stall": 1}, say("two")])
    port = free_port()
    async with orchestrating(env_config(rows, {"url": f"http://127.0.0.1:{port}"})) as prime:
        async with running_service(tmp_path=tmp_path, engine=engine, port=port):
            running = asyncio.create_task(prime.run())
            await engine.stalled.wait()
        async with running_service(tmp_path=tmp_path, replies=[say("one"), say("two")], port=port) as (service, _):
            episode = await running
            [group] = await ended(service, 1)
    [trace] = episode.traces
    assert (trace.ok, trace.reward) == (True, 0.5)
    assert trace.branches[0].token_ids == group.samples[0].ids.tolist()


async def test_episodes_at_once_are_sampled_by_prime_rls_server_with_its_versions(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=str(folder), options={"replies": [say("one")]}))
    await fake.start()
    app = engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder), labels=False))
    tasks = [scribe_task("served by prime-rl")]
    async with serving(app) as engine, running_service(tmp_path=tmp_path, engines=()) as (service, url):
        config = env_config(rows_file(tmp_path, tasks), {"url": url, "engines": "client"})
        async with orchestrating(config) as prime:
            first = await asyncio.gather(*(prime.run(base_url=f"{engine}/v1", salt="3") for _ in range(8)))
            later = await prime.run(base_url=f"{engine}/v1", salt="4")
        attached = [(status.name, status.url) for status in service.pool.status()]
    await fake.close()
    assert attached == [("verifiers-0", engine)]
    for episode, version in [*((each, 3) for each in first), (later, 4)]:
        [trace] = episode.traces
        assert trace.ok, trace.errors
        assert (trace.metrics["outrider_version_min"], trace.metrics["outrider_version_max"]) == (version, version)
        assert {call.sampling.temperature for call in trace.calls} == {1.0}


async def test_prime_rls_server_is_attached_again_after_a_restart_in_the_middle(tmp_path: Path) -> None:
    """The test takes ten seconds: two intervals of `AttachLimits.look_seconds`."""
    replies: list[str | dict[str, Any]] = [{"reply": say("one"), "stall": 1}, say("two")]
    port = free_port()
    rows = rows_file(tmp_path, [scribe_task("served anew", rewards=[0.5])])
    config = env_config(rows, {"url": f"http://127.0.0.1:{port}", "engines": "client"})
    async with model_server(tmp_path, replies) as (fake, engine), orchestrating(config) as prime:
        async with running_service(tmp_path=tmp_path, engines=(), port=port):
            running = asyncio.create_task(prime.run(base_url=f"{engine}/v1", salt="7"))
            await fake.stalled.wait()
        fake.release()
        async with running_service(tmp_path=tmp_path, engines=(), port=port):
            episode = await running
    [trace] = episode.traces
    assert (trace.ok, trace.reward) == (True, 0.5), trace.errors
    assert trace.metrics["outrider_version_min"] == 7


async def test_messages_have_the_tool_calls_and_the_tools(tmp_path: Path) -> None:
    task = {
        "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
        "runtime": {"kind": "process"},
        "evaluator": {"run": "test -e done"},
    }
    async with running_service(tmp_path=tmp_path, replies=[call("touch done"), say("It is done.")]) as (service, url):
        async with prime_rl(tmp_path, [task], url) as prime:
            episode = await prime.run()
        [group] = await ended(service, 1)
    [trace] = episode.traces
    [branch] = trace.branches
    assert trace.reward == 1.0
    assert branch.token_ids == group.samples[0].ids.tolist()
    called, told, said = branch.messages[-3:]
    assert [(one.name, json.loads(one.arguments)) for one in called.tool_calls] == [("bash", {"command": "touch done"})]
    assert (told.role, told.tool_call_id) == ("tool", called.tool_calls[0].id)
    assert said.content == "It is done."
    assert [tool.name for tool in trace.tools] == [tool.name for tool in branch.tools] == ["bash"]
    assert [call.finish_reason for call in trace.calls] == ["tool_calls", "stop"]


async def test_attempts_of_verifiers_best_of_n(tmp_path: Path) -> None:
    tasks = [scribe_task("served best", rewards=[0, 1])]
    async with running_service(tmp_path=tmp_path) as (_, url):
        config = env_config(rows_file(tmp_path, tasks), {"url": url}, env="best-of-n")
        async with orchestrating(config.model_copy(update={"n": 2})) as prime:
            episode = await prime.run()
    assert sorted(trace.reward for trace in episode.traces) == [0, 1]
    assert [trace.metrics["best"] for trace in sorted(episode.traces, key=lambda trace: trace.reward)] == [0, 1]


async def test_a_trace_without_a_session_has_no_reward(tmp_path: Path) -> None:
    rows = rows_file(tmp_path, [scribe_task("served none")])
    environment = load_environment(env_config(rows, {}))
    [task] = environment.taskset
    assert isinstance(task, OutriderTask)
    assert isinstance(task.data, OutriderRow)
    trace = vf.Trace(
        task=vf.TraceTask(type="OutriderTask", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig())
    )
    with pytest.raises(vf.TaskError, match="needs the harness outrider-rollouts"):
        await task.score(trace)
    assert trace.rewards == {"outrider": None}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no rows"),
        ('{"prompt": "a lone \\ud83d surrogate"}\n', "row 0 cannot be written as JSON"),
        ('{"prompt": "hi"}\n{"prompt": ["hi"]}\n', "the prompt of row 1 is no list of messages"),
    ],
)
async def test_rows_that_verifiers_cannot_take_are_named(tmp_path: Path, text: str, named: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    with pytest.raises(InvalidField, match=named):
        list(vf.load_taskset(env_config(rows, {}).taskset))


async def test_a_prompt_with_an_image_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is this?"}, image]
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": content}], "task": scribe_task("vf image")}))
    async with running_service(tmp_path=tmp_path) as (_, url), orchestrating(env_config(rows, {"url": url})) as prime:
        episode = await prime.run()
    [trace] = episode.traces
    assert (trace.ok, trace.rewards, trace.last_error.type) == (False, {}, "TaskError")
    assert "an image" in trace.last_error.message
