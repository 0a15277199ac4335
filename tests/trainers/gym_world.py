"""Rows of NeMo Gym, and NeMo RL's reading of a reply, for tests with and without the package."""

from __future__ import annotations

from typing import Any

AGENT = "outrider_agent"


def gym_row(task: Any, number: int = 0, *, text: str = "say it", **params: Any) -> dict[str, Any]:
    """Return a row in the form in which NeMo RL sends it: with sampling parameters and the row's place in the batch."""
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": text}],
            "temperature": 0.5,
            "top_p": 1.0,
            "max_output_tokens": 64,
            **params,
        },
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "task": task,
        "_rowidx": number,
    }


def message_log(reply: dict[str, Any]) -> list[tuple[str, list[int], list[float]]]:
    """Return the messages that NeMo RL trains on: role, ids and log-probabilities, from a reply's output.

    Written after `NemoGym._postprocess_nemo_gym_to_nemo_rl_result`, with its assertion and its errors: NeMo RL itself
    cannot be installed without CUDA.
    """
    log: list[tuple[str, list[int], list[float]]] = []
    seen: list[int] = []
    for item in reply["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, ids = item["prompt_token_ids"], item["generation_token_ids"]
        assert seen == prompt[: len(seen)], "Non-contiguous messages found!"
        assert len(ids) == len(item["generation_log_probs"])
        log += [("user", prompt[len(seen) :], []), ("assistant", ids, item["generation_log_probs"])]
        seen = prompt + ids
    if not log:
        raise ValueError("NeMo Gym returned a result with no generation data")
    assert isinstance(reply["reward"], float)
    return log
