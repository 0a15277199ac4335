"""Secrets in text: which ones are found, and which text is left alone."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from outrider.api.control_replies import error_reply
from outrider.errors import EngineUnavailable
from outrider.logs import LogFormatter
from outrider.redaction import redacted, redacted_tail, secrets_in, without_keys

KEY = "outrider_s_" + "Ab3-_" * 6 + "xy"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"POST http://127.0.0.1:61080/s/{KEY}/v1/messages", "POST http://127.0.0.1:61080/s/[redacted]/v1/messages"),
        (f"OPENAI_API_KEY={KEY}\n", "OPENAI_API_KEY=[redacted]\n"),
        ("http://me:pass@engine:80/v1", "http://[redacted]@engine:80/v1"),
        ("https://hf_token@host/x and ftp://a:b@c", "https://[redacted]@host/x and ftp://[redacted]@c"),
        ("postgresql://u:p@ssw0rd@db/x?a=b@c", "postgresql://[redacted]@db/x?a=b@c"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer [redacted]"),
        ("{'api_key': 'sk-12345678'}", "{'api_key': '[redacted]'}"),
        ('PASSWORD="correct horse"', 'PASSWORD="[redacted] horse"'),
        ("?api-key=abcdefghi&x=1", "?api-key=[redacted]&x=1"),
    ],
)
def test_a_secret_is_taken_out(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "check the engine's api_key option",
        "max_tokens: 100000000",
        "mail me@example.org about http://host/path?x=a@b",
        "outrider_evaluation_label",
        "Bearer of bad news",
        "",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert redacted(text) == text
    assert without_keys(text) == text


def test_variables_are_secrets_by_their_names() -> None:
    env = {"GITHUB_TOKEN": "ghp_12345", "DEBUG_KEY": "1", "HOME": "/home/agent", "DB_PASSWORD": "ghp_12345678"}
    assert secrets_in(env.items()) == ["ghp_12345678", "ghp_12345"]
    assert redacted("cloning with ghp_12345678 failed", secrets_in(env.items())) == "cloning with [redacted] failed"


@pytest.mark.parametrize(
    "secret", ["-----BEGIN KEY-----\nMIIEvgIBADAN\n-----END KEY-----\n", 'a"quote\\slash', "caf\u00e9-\udc80-secret"]
)
def test_a_secret_of_several_lines_is_found_in_json_too(secret: str) -> None:
    line = json.dumps({"output": f"KEY={secret};"}, ensure_ascii=False)
    assert redacted(line, [secret]) == '{"output": "KEY=[redacted];"}'
    assert redacted(f"KEY={secret};", [secret]) == "KEY=[redacted];"


PEM = "-----BEGIN KEY-----\nMIIEvgIBADANBgkqhkiG\n9w0BAQEFAASCBKgwggSk\n-----END KEY-----"


@pytest.mark.parametrize("cut", [0, 1, 10, 30, len(PEM) - 8])
def test_a_secret_that_the_end_of_a_log_has_cut_is_taken_out(cut: int) -> None:
    for shown in (PEM, json.dumps(PEM)[1:-1]):
        assert redacted_tail(f"{shown[cut:]}; {shown}\nbye", [PEM]) == "[redacted]; [redacted]\nbye"


def test_the_end_of_a_log_without_a_secret_is_left_alone() -> None:
    for text in ("", "bye", "BEGIN KEY is no secret\n", "----", "--------- and more"):
        assert redacted_tail(text, [PEM, "-" * 100_000 + "x"]) == text


def test_errors_and_lines_of_the_log_are_written_without_them() -> None:
    error = EngineUnavailable("no answer from http://me:pass@engine:80", log_tail=f"curl /s/{KEY}/v1")
    told = msgspec.json.decode(error_reply(error).body)
    assert (told["message"], told["log_tail"]) == (
        "no answer from http://[redacted]@engine:80",
        "curl /s/[redacted]/v1",
    )
    assert b"pass" not in error_reply(ValueError("http://me:pass@engine")).body
    line = logging.LogRecord("x", logging.ERROR, "f", 1, "token %s of %s", ("root-token", "http://a:b@c"), None)
    assert LogFormatter("root-token").format(line).endswith("token [redacted] of http://[redacted]@c")


def test_a_long_text_is_read_once() -> None:
    """A search that takes quadratic time exceeds the test's time limit."""
    for text in (
        "://" * 200_000,
        "://" + "a" * 500_000,
        "://" + "@" * 500_000 + "://@a" * 100_000,
        "bearer " * 100_000,
        "api_key=" * 100_000,
        "outrider_" * 100_000,
    ):
        redacted(text)
