"""Signatures of callbacks: which ones a receiver accepts, and which ones it refuses."""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec
import pytest

from outrider.callbacks import check_secret, signed_headers, verify
from outrider.config import load_config
from outrider.errors import InvalidField, RequestError, Unauthorized
from outrider.lifecycle import GroupState
from outrider.schemas import GroupView

SECRET = "correct horse battery staple"
NOW = 1_700_000_000.9
GROUP = GroupView(
    id="g-1",
    state=GroupState.DONE,
    cancelled=False,
    n=0,
    priority=0,
    created=1.0,
    finished=2.0,
    cursor=1,
    labels={},
    sessions=(),
)
BODY = msgspec.json.encode(GROUP)


def signed(secret: str = SECRET, body: bytes = BODY) -> dict[str, str]:
    return signed_headers(secret, "g-1", body, now=NOW)


def test_what_was_signed_is_accepted_whatever_the_case_of_the_headers() -> None:
    headers = {name.upper(): value for name, value in signed().items()}
    assert verify(headers | {"Host": "here"}, BODY, SECRET, now=NOW + 299) == GROUP


def test_the_signature_is_that_of_the_standard() -> None:
    """The signature is computed over the identifier, the time and the body, joined by full stops."""
    key = bytes(range(24))
    secret = "whsec_" + base64.b64encode(key).decode()
    expected = hmac.digest(key, b"g-1.1700000000." + BODY, hashlib.sha256)
    assert signed(secret) == {
        "webhook-id": "g-1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(expected).decode(),
    }
    assert verify(signed(secret), BODY, secret, now=NOW) == GROUP


def test_a_secret_can_be_replaced_while_callbacks_come() -> None:
    new = "another one of some length"
    for used in (SECRET, new):
        assert verify(signed(used), BODY, [SECRET, new], now=NOW) == GROUP
    both = signed() | {"webhook-signature": f"v1,abc {signed(new)['webhook-signature']}"}
    assert verify(both, BODY, new, now=NOW) == GROUP


@pytest.mark.parametrize(
    "changed",
    [
        {"webhook-id": "g-2"},
        {"webhook-timestamp": "1700000001"},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "1" * 5000},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v2," + signed()["webhook-signature"].removeprefix("v1,")},
        {"webhook-signature": "\udcff é"},
        {"webhook-id": "\udcff"},
    ],
)
def test_a_changed_header_is_refused(changed: dict[str, str]) -> None:
    with pytest.raises(Unauthorized, match="does not match"):
        verify(signed() | changed, BODY, SECRET, now=NOW)


def test_the_signed_text_cannot_be_divided_in_another_way() -> None:
    """The parts are joined by full stops, and a body may begin with a number and a full stop."""
    body = b"1.5"
    headers = signed(body=body)
    for group_id, timestamp, rest in (("g-1.1700000000", "1", b"5"), ("g-1", "1700000000.1", b"5")):
        with pytest.raises(Unauthorized, match="does not match"):
            verify(headers | {"webhook-id": group_id, "webhook-timestamp": timestamp}, rest, SECRET, now=NOW)


def test_a_changed_body_and_another_secret_are_refused() -> None:
    with pytest.raises(Unauthorized, match="does not match"):
        verify(signed(), BODY + b" ", SECRET, now=NOW)
    with pytest.raises(Unauthorized, match="does not match"):
        verify(signed(), BODY, SECRET + ".", now=NOW)
    with pytest.raises(Unauthorized, match="does not match"):
        verify(signed(), BODY, [], now=NOW)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_callback_without_a_signature_is_refused(name: str) -> None:
    headers = signed()
    del headers[name]
    with pytest.raises(Unauthorized, match="not signed"):
        verify(headers, BODY, SECRET, now=NOW)


@pytest.mark.parametrize("away", [-302, 302])
def test_a_recorded_callback_is_refused(away: float) -> None:
    with pytest.raises(Unauthorized, match="s ago"):
        verify(signed(), BODY, SECRET, now=NOW + away)
    assert verify(signed(), BODY, SECRET, tolerance=400, now=NOW + away) == GROUP


def test_a_signed_body_that_is_no_group_is_refused() -> None:
    with pytest.raises(RequestError, match="no group"):
        verify(signed(body=b"{}"), b"{}", SECRET, now=NOW)


@pytest.mark.parametrize("secret", ["", "short", "whsec_not base64 at all", "whsec_é123456789012345"])
def test_a_secret_that_protects_nothing_is_refused(secret: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_secret(secret)
    assert caught.value.field == "callbacks.secret"


def test_the_setting_is_checked_and_never_shown() -> None:
    config = load_config({"callbacks": {"secret": SECRET}})
    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()
    with pytest.raises(InvalidField) as caught:
        load_config({"callbacks": {"secret": "s3cret"}})
    assert caught.value.field == "callbacks.secret"
    assert "s3cret" not in str(caught.value)
