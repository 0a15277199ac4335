"""The shipped policy: its token ids are the same in serving as in training, and it solves some of the tasks."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import renderers

from outrider.harnesses.toolbox import TOOLS
from outrider.lab.demo.dialogue import POLICY, Piece, Script, encode, tool_output
from outrider.lab.demo.task import ITEMS, ZONES, Episode, make_task
from outrider.messages import Message, Role
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.later import torch
from support.reference_llama import ReferenceLlama

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
TOKENIZER = Tokenizer.load(POLICY)
SCRIPT = Script.load()
EPISODE = Episode("maple", "jade", "Where is maple?")


def ids_of(pieces: list[Piece]) -> list[int]:
    return encode(TOKENIZER, pieces)[0]


def test_the_services_first_prompt_is_the_trained_one() -> None:
    renderer = make_renderer(TOKENIZER, "template:qwen3")
    prompt = renderer.render([Message(role=Role.USER, content=EPISODE.question)], [TOOLS["bash"]])
    assert list(prompt) == TOKENIZER.encode(SCRIPT.prompt(EPISODE.question))
    assert len(prompt) < 80


@pytest.mark.parametrize("command", ["cat maple", "cat elm"])
def test_what_stands_between_turns_is_what_qwen3_puts_there(command: str) -> None:
    family = renderers.create_renderer(TOKENIZER, renderers.Qwen3RendererConfig())
    prompt = TOKENIZER.encode(SCRIPT.prompt(EPISODE.question))
    call = TOKENIZER.encode(SCRIPT.call(command.removeprefix("cat ")))
    output = tool_output(EPISODE, command)
    assert output is not None
    bridged = family.bridge_to_next_turn(prompt, call, [{"role": "tool", "content": output}], tools=[TOOLS["bash"]])
    assert bridged is not None
    assert bridged.token_ids == prompt + call + TOKENIZER.encode(SCRIPT.result(output))


def test_the_services_parser_reads_the_call() -> None:
    renderer = make_renderer(TOKENIZER, "template:qwen3")
    parsed = renderer.parse([], TOKENIZER.encode(SCRIPT.call("maple")), [TOOLS["bash"]])
    (call,) = parsed.calls
    assert (call.name, call.arguments.replace(" ", "")) == ("bash", '{"command":"catmaple"}')


@pytest.mark.parametrize("item", ITEMS)
def test_prompt_and_call_hold_the_item_as_the_same_token(item: str) -> None:
    (token,) = TOKENIZER.encode(f" {item}")
    prompt, call, *_ = SCRIPT.read(Episode(item, "jade", f"Where is {item}?"), item, "jade")
    assert token in ids_of([prompt])
    assert token in ids_of([call])


@pytest.mark.parametrize("zone", ZONES)
def test_result_and_answer_hold_the_zone_as_the_same_token(zone: str) -> None:
    (token,) = TOKENIZER.encode(f" {zone}")
    *_, result, answer = SCRIPT.read(Episode("elm", zone, "Where is elm?"), "elm", zone)
    assert token in ids_of([result])
    assert token in ids_of([answer])


@pytest.mark.deep
@pytest.mark.transformers
def test_transformers_renders_a_conversation_to_the_same_ids() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(POLICY)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "cat maple"}}}
    messages = [
        {"role": "user", "content": EPISODE.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "zone: jade"},
    ]
    text = theirs.apply_chat_template(messages, tools=[TOOLS["bash"]], tokenize=False, add_generation_prompt=True)
    assert text == "".join(piece.text for piece in SCRIPT.read(EPISODE, "maple", "jade")[:-1])
    assert theirs(text)["input_ids"] == ids_of(SCRIPT.read(EPISODE, "maple", "jade")[:-1])
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_two_results_share_one_user_turn_as_in_qwen3() -> None:
    renderer = make_renderer(TOKENIZER, "template:qwen3")
    results = [Message(role=Role.TOOL, content=text, tool_call_id=text) for text in ("one", "two")]
    asked = [Message(role=Role.USER, content="Where?"), Message(role=Role.ASSISTANT, content="There.")]
    before = TOKENIZER.encode("<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n")
    output = TOKENIZER.encode("There.<|im_end|>")
    bridged = renderer.bridge(before, output, results, [], "recorded")
    assert bridged is not None
    assert renderer.render([*asked, *results], []) == before + output + list(bridged)


@pytest.mark.deep
def test_the_policy_is_right_some_of_the_time_and_its_logprobs_are_its_own() -> None:
    from outrider.engines.embedded.weights import load_model
    from outrider.lab.demo.simulate import Simulator

    torch.set_num_threads(1)
    simulator = Simulator(load_model(POLICY), TOKENIZER, SCRIPT, seed=11)
    rng = random.Random(12)
    rollouts = simulator.run([make_task(rng) for _ in range(256)])
    assert 0.05 <= sum(rollout.reward for rollout in rollouts) / len(rollouts) <= 0.5
    reference = ReferenceLlama(POLICY)
    longest = max(rollouts, key=lambda rollout: len(rollout.logprobs))
    table = reference.logits(longest.ids).log_softmax(dim=-1)
    spoken = [at for at, mine in enumerate(longest.spoken) if mine]
    expected = [float(table[at - 1, longest.ids[at]]) for at in spoken]
    assert longest.logprobs == pytest.approx(expected, abs=1e-4)
    assert any(len(rollout.transcript) > 1 for rollout in rollouts)
