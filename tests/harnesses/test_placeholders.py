"""Placeholders in the texts of harnesses."""

import json
import tomllib
from typing import Any

import pytest

from outrider.harnesses.placeholders import fill, fill_file, names_in


def test_only_the_exact_words_are_replaced() -> None:
    text = 'curl {base_url}/v1 -d \'{"a": {"model": "{model}"}, "b": {x}, "c": "{ model }"}\''
    filled = fill(text, {"base_url": "http://h/s/k", "model": "m"})
    assert filled == 'curl http://h/s/k/v1 -d \'{"a": {"model": "m"}, "b": {x}, "c": "{ model }"}\''


def test_what_was_filled_in_is_not_scanned_again() -> None:
    words = {"instruction": "say {model} and {instruction}", "model": "{instruction}"}
    assert fill("{instruction}|{model}", words) == "say {model} and {instruction}|{instruction}"


def test_adjacent_and_nested_braces() -> None:
    assert fill("{{model}}{model}{model", {"model": "m"}) == "{m}m{model"


def test_regex_characters_in_words_and_values_are_plain_text() -> None:
    assert fill("{option.a+b} {option.aab}", {"option.a+b": r"\1 \g<0>"}) == r"\1 \g<0> {option.aab}"


@pytest.mark.parametrize(
    ("path", "text", "read"),
    [("a.json", '{"x": "{option.a}"}', json.loads), ("a.toml", 'x = "{option.a}"', tomllib.loads)],
)
def test_any_character_is_one_of_a_string(path: str, text: str, read: Any) -> None:
    value = "".join(map(chr, [*range(1, 0x100), 0x2028, 0x1F600]))
    assert read(fill_file(path, text, {"option.a": value})) == {"x": value}


def test_no_words_leaves_the_text_alone() -> None:
    assert fill("{model}", {}) == "{model}"


def test_values_in_a_json_file_are_escaped() -> None:
    text = fill_file(".pi/models.json", '{"id": "{model}", "n": {option.n}}', {"model": 'a"\\\né', "option.n": "3"})
    assert json.loads(text) == {"id": 'a"\\\né', "n": 3}
    assert fill_file("plain.txt", "{model}", {"model": 'a"'}) == 'a"'


def test_the_options_that_texts_mention() -> None:
    assert names_in(["{option.a} {option.b-c}", "{option.a}", "{option.}", "option.d"], "option") == {"a", "b-c"}
