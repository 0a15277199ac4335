"""Keys whose letters are written as JSON escapes are the same keys. Arguments that are no JSON object come back
unchanged."""

from __future__ import annotations

import re

import pytest
from msgspec import Raw

from outrider.dialects.gemini.contents import arguments_from_wire, arguments_on_wire
from outrider.dialects.reading import INVALID_JSON
from support.gemini import DIALECT, GENERATE, messages

BODY = (
    '{"contents": [{"role": "user", "parts": [{"text": "go"}]},'
    ' {"role": "model", "parts": [{"function_call": {"name": "bash", "args": {"a": 1}}, "thought_signature": "x"}]},'
    ' {"role": "user", "parts": [{"function_response": {"name": "bash", "response": {"output": "done"}}}]}],'
    ' "generation_config": {"max_output_tokens": 7, "stop_sequences": ["e"]}}'
)


@pytest.mark.parametrize("letter", ["_", "u", "r", "o", "e"])
def test_escaped_letters_of_keys(letter: str) -> None:
    def escaped(key: re.Match[str]) -> str:
        return key[0].replace(letter, f"\\u{ord(letter):04x}")

    spelled = re.sub(r'"\w+_\w+":', escaped, BODY)
    assert spelled != BODY
    plain, request = (DIALECT.parse(GENERATE, body.encode(), {}) for body in (BODY, spelled))
    assert messages(request) == messages(plain)
    assert request.sampling == plain.sampling
    assert [message.content for message in messages(request)] == ["go", "", "done"]
    assert (request.sampling.max_tokens, request.sampling.stop) == (7, ("e",))


@pytest.mark.parametrize("letter", ["", "I", "J", "_", "N"])
def test_escaped_letters_of_the_key_of_arguments_that_are_no_json(letter: str) -> None:
    key = INVALID_JSON.replace(letter, f"\\u{ord(letter):04x}") if letter else INVALID_JSON
    assert arguments_from_wire(Raw(f'{{"{key}" : "not json"}}'.encode())) == "not json"
    assert arguments_from_wire(Raw(f'{{"{key}" : "x", "a": 1}}'.encode())) == f'{{"{key}":"x","a":1}}'
    assert arguments_from_wire(Raw(f'{{"{key}" : 1}}'.encode())) == f'{{"{key}":1}}'


@pytest.mark.parametrize("arguments", ["", "x", "[]", '{"INVALID_JSON":"x"}', '{"INVALID_JSON":""}', '{"a":1}', "{}"])
def test_arguments_come_back_as_the_model_made_them(arguments: str) -> None:
    assert arguments_from_wire(Raw(arguments_on_wire(arguments))) == arguments
