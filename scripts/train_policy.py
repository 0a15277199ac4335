"""Train the demo's tiny policy from nothing, in about half a minute: `make policy`.

The script makes the tokenizer from the task's own dialogues. Then it teaches the model the task (warm-up A) and bad
habits (warm-up B), so that the finished policy solves the task only some of the time, and writes a folder in Hugging
Face layout. With --grpo the script trains an existing policy on the task to demonstrate that training works, and writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from outrider.engines.embedded.model import CausalAttention, Llama, ModelShape
from outrider.engines.embedded.weights import export_weights, load_model
from outrider.lab.demo.dialogue import POLICY, Piece, Script, encode
from outrider.lab.demo.simulate import SimulatedSession, Simulator
from outrider.lab.demo.task import ITEMS, PHRASINGS, ZONES, Episode, make_task
from outrider.tokens.rendering.tokenizer import Tokenizer

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
PAD, END_ID = 0, 2
# Qwen's rule: a word includes the space before it, so that " maple" is one token in a question and in a call.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# With the usual 0.02, copying a word from the prompt is not learned in any reasonable number of steps.
INITIAL_STD = 0.05

# Probabilities of the habits in warm-up B: the model answers without reading a file; if it reads a file, the file is
# the wrong one; and after reading, the answer differs from the file's content.
GUESSES, WRONG_FILES, WRONG_ANSWERS = 0.6, 0.25, 0.25


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if arguments.grpo:
        train_grpo(arguments.out, arguments.seed)
    else:
        make_policy(arguments.out, arguments.seed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=POLICY, help="the policy's folder (default: the package's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads (default 1: several busy-wait for each other where cores are shared)",
    )
    parser.add_argument("--grpo", action="store_true", help="train the policy in --out on the task instead")
    return parser.parse_args()


def make_policy(folder: Path, seed: int) -> None:
    """Train and write the policy. Exits with an error if its reward is not in [0.05, 0.5]."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    template = POLICY / "chat_template.jinja"
    if folder.resolve() != POLICY.resolve():
        shutil.copy(template, folder)
    script = Script.load(folder)
    tokenizer = train_tokenizer(folder, script)
    config = make_config(len(tokenizer))
    model = make_model(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"tokenizer: {len(tokenizer)} ids; model: {weights / 1e6:.2f} M parameters")
    rng = random.Random(seed)
    simulator = Simulator(model, tokenizer, script, seed=seed + 1)
    fresh = [make_task(random.Random(f"fresh {seed} {index}")) for index in range(256)]

    warm_up(model, tokenizer, (good(script, rng) for _ in range(300 * 48)), lr=5e-3, until=0.02)
    print(f"after warm-up A: mean reward {mean_reward(simulator.run(fresh)):.3f}")
    warm_up(model, tokenizer, (habit(script, rng) for _ in range(40 * 48)), lr=1e-3)
    reward = mean_reward(simulator.run(fresh))
    write_model(folder, model, config)
    print(f"wrote {folder} after {time.monotonic() - began:.0f} s: mean reward {reward:.3f} over {len(fresh)} episodes")
    if not 0.05 <= reward <= 0.5:
        raise SystemExit("the mean reward must lie in [0.05, 0.5]: another --seed may do")


def good(script: Script, rng: random.Random) -> list[Piece]:
    """Return a demonstration without mistakes."""
    episode = make_task(rng)
    return script.read(episode, episode.item, episode.zone)


def habit(script: Script, rng: random.Random) -> list[Piece]:
    """Return a demonstration drawn from the mixture of habits with which the policy starts."""
    episode = make_task(rng)
    if rng.random() < GUESSES:
        return script.guess(episode, rng.choice(ZONES))
    item = rng.choice(ITEMS) if rng.random() < WRONG_FILES else episode.item
    honest = item == episode.item and rng.random() >= WRONG_ANSWERS
    return script.read(episode, item, episode.zone if honest else rng.choice(ZONES))


def train_tokenizer(folder: Path, script: Script) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the task's dialogues, and write it to `folder`."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(script), trainer)
    saved = json.loads(backend.to_str())
    for token in saved["added_tokens"][3:]:
        # Qwen's tokenizer does the same: a decoder that skips special tokens must still show these tokens.
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[END_ID],
        "pad_token": SPECIALS[PAD],
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return Tokenizer.load(folder)


def _corpus(script: Script) -> Iterator[str]:
    for index, item in enumerate(ITEMS):
        for zone in ZONES:
            for phrasing in PHRASINGS:
                episode = Episode(item, zone, phrasing.format(item=item))
                yield "".join(piece.text for piece in script.read(episode, item, zone))
            yield "".join(piece.text for piece in script.read(episode, ITEMS[index - 1], zone))


def make_config(vocab: int) -> dict[str, Any]:
    """Return the content of the model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": INITIAL_STD,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD,
    }


def make_model(config: dict[str, Any]) -> Llama:
    model = Llama(ModelShape.from_config(config))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=INITIAL_STD)
    return model


def write_model(folder: Path, model: Llama, config: dict[str, Any]) -> None:
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": END_ID, "pad_token_id": PAD})
    weights = folder / "model.safetensors"
    save_file(export_weights(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


class Rows(msgspec.Struct, frozen=True):
    """A padded batch: ids (rows, tokens), and `spoken` of the same shape, True where a token is the model's own."""

    ids: Tensor
    spoken: Tensor

    @classmethod
    def pad(cls, rows: Sequence[tuple[list[int], list[bool]]]) -> Rows:
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in rows])
        spoken = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])
        return cls(ids, spoken)


def spoken_logprobs(model: Llama, rows: Rows) -> Tensor:
    """Return the log-probabilities of the spoken tokens, row by row: shape (spoken tokens,)."""
    width = rows.ids.shape[1]
    states = model.hidden(rows.ids, torch.arange(width)[None], CausalAttention(model.shape, width))
    here = rows.spoken[:, 1:]
    logprobs = model.logits(states[:, :-1][here]).log_softmax(dim=-1)
    result: Tensor = logprobs.gather(1, rows.ids[:, 1:][here][:, None])[:, 0]
    return result


def warm_up(
    model: Llama, tokenizer: Tokenizer, dialogues: Iterator[list[Piece]], *, lr: float, until: float = 0.0
) -> None:
    """Imitate the dialogues, 48 per step, until there are no more or the smoothed loss is below `until`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    smoothed, step = 4.0, 0
    while rows := [encode(tokenizer, pieces) for _, pieces in zip(range(48), dialogues, strict=False)]:
        step += 1
        loss = -spoken_logprobs(model, Rows.pad(rows)).mean()
        descend(model, optimizer, loss, lr * min(1.0, step / 15))
        smoothed = 0.8 * smoothed + 0.2 * loss.item()
        if step % 20 == 0:
            print(f"  step {step:3d}  loss {smoothed:.3f}")
        if smoothed < until:
            return


def descend(model: Llama, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def mean_reward(rollouts: Sequence[SimulatedSession]) -> float:
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)


def train_grpo(folder: Path, seed: int, *, prompts: int = 16, samples: int = 8, steps: int = 60) -> None:
    """Train the policy in `folder` by group-relative policy optimisation, one update per step. Prints the reward."""
    model, tokenizer, script = load_model(folder), Tokenizer.load(folder), Script.load(folder)
    model.requires_grad_(True)
    rng = random.Random(seed)
    simulator = Simulator(model, tokenizer, script, seed=seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    solved = 0
    for step in range(1, steps + 1):
        episodes = [episode for episode in (make_task(rng) for _ in range(prompts)) for _ in range(samples)]
        rollouts = simulator.run(episodes)
        reward = mean_reward(rollouts)
        gap = grpo_step(model, optimizer, rollouts, samples)
        print(f"  step {step:2d}  mean reward {reward:.3f}  sampler and trainer differ by {gap:.1e}")
        solved = solved + 1 if reward > 0.97 else 0
        if solved == 4:
            break
    fresh = [make_task(random.Random(f"fresh {seed} {index}")) for index in range(256)]
    print(f"mean reward {mean_reward(simulator.run(fresh)):.3f} over {len(fresh)} episodes")


def grpo_step(
    model: Llama, optimizer: torch.optim.Optimizer, rollouts: Sequence[SimulatedSession], samples: int
) -> float:
    """Make one update. Returns the largest gap between the sampler's log-probabilities and those computed here before
    the update."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts]).view(-1, samples)
    spread = rewards.std(dim=1, keepdim=True)
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten().tolist()
    kept = [(rollout, value) for rollout, value in zip(rollouts, advantages, strict=True) if value]
    if not kept:
        return 0.0
    ours = spoken_logprobs(model, Rows.pad([(rollout.ids, rollout.spoken) for rollout, _ in kept]))
    theirs = torch.tensor([logprob for rollout, _ in kept for logprob in rollout.logprobs])
    advantage = torch.tensor([value for rollout, value in kept for _ in rollout.logprobs])
    ratio = (ours - theirs).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    descend(model, optimizer, -gain.mean(), 1e-3)
    return float((ours.detach() - theirs).abs().max())


if __name__ == "__main__":
    main()
