"""The interface specification, row by row, over real connections."""

import base64
import email.utils
import re
import time
import tracemalloc
from pathlib import Path
from typing import cast

import pytest
from conftest import PASSPHRASE, PIN, PROGRAM, Client, new_app, running, wait_for
from homelab import Homelab

import waker


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/auth/", ""),
        ("POST", "//api/auth", ""),
        ("BREW", "/API/auth", ""),
        ("POST", "/", "GET, HEAD"),
        ("PUT", "/api/auth", "POST"),
        ("BREW", "/api/start", "DELETE, POST"),
    ],
)
def test_another_path_or_method_is_refused(
    api: Client, method: str, path: str, allowed: str
) -> None:
    answer = api.call(method, path, {"pin": PIN})
    assert answer.status == (405 if allowed else 404)
    assert answer.headers.get("Allow", "") == allowed
    assert answer.error == (f"Allowed here: {allowed}" if allowed else "No such path")


# ---- The PIN and the tokens ----------------------------------------------------------


def test_the_pin_is_exchanged_for_a_token_in_ten_attempts_a_minute(api: Client) -> None:
    for pin in (PIN + "x", PIN[:-1], PIN.upper(), " ", "ü"):
        answer = api.attempt(pin)
        assert (answer.status, answer.error) == (401, "Wrong PIN")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    answer = api.attempt(PIN)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.json.keys() == {"token", "expires_in"}
    assert answer.json["expires_in"] == 900
    api.token = answer.json["token"]
    assert len(api.token) >= 43  # 32 random bytes
    pasted = PIN, f" {PIN}", f"{PIN}\n", f"\xa0{PIN} "  # pasting adds spaces
    tokens = {api.attempt(pin).json["token"] for pin in pasted}
    assert len(tokens - {api.token}) == 4
    answer = api.attempt(PIN)  # the eleventh: those with the right PIN count as well
    assert answer.status == 429
    assert 0 < int(answer.headers["Retry-After"]) <= 60
    assert answer.error.startswith("Too many attempts")
    api.status()  # a token in hand still works


def test_what_has_no_pin_is_a_bad_request_and_no_attempt(api: Client) -> None:
    """Or another page could spend them: without a preflight it sends no JSON."""
    for body in (
        b"",
        b'{"x": "x"}',
        b'{"pin": 12345678}',
        b'{"pin": ""}',
        b'{"pin": "\xff"}',
        b'{"pin": "\\ud800"}',
        b'{"pin": "\\x"}',
        b'{"pin": "x", "pin": "x"}',
        b'{"pin": "x"} x',
        b'{"pin": ' + b"[" * 16000 + b"}",
        '{"pin": "x"}\u3000'.encode(),
    ):
        answer = api.call("POST", "/api/auth", body)
        assert (answer.status, body) == (400, body)
        assert answer.error == 'The body must be {"pin": "<some text>"}'
    for kind in ("text/plain", "", "application/jsonx"):
        answer = api.attempt(PIN, {"Content-Type": kind})
        assert answer.status == 415
        assert answer.error == "Content-Type must be application/json"
    for kind in ("application/json", "Application/JSON ; charset=utf-8"):
        assert api.attempt(PIN, {"Content-Type": kind}).status == 200


def refused(gate: waker.Gate, client: str, now: float) -> str:
    """Attempt once; returns Retry-After, empty if it was let in."""
    try:
        gate.count_attempt(client, now)
    except waker.Fault as fault:
        assert fault.status == 429
        return dict(fault.headers)["Retry-After"]
    return ""


def test_attempts_are_counted_for_a_minute() -> None:
    gate = waker.Gate()
    assert not any(refused(gate, "192.0.2.1", second) for second in range(10))
    # At 60 s, the first attempt is a minute old.
    for now, wait in ((10, "50"), (59.5, "1"), (60, ""), (60.5, "1"), (61, "")):
        assert refused(gate, "192.0.2.1", now) == wait


def test_an_ipv6_address_counts_by_its_56() -> None:
    for one, other, same in (
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:ff:ffff::1", True),
        ("2001:db8:0:1::1", "2001:db8:0:100::1", False),
        ("fe80::1%eth0.100", "fe80::2%eth0.100", True),
    ):
        gate = waker.Gate()
        assert not any(refused(gate, one, 0) for _ in range(10))
        assert bool(refused(gate, other, 0)) == same


def test_strangers_lock_nobody_out_and_fill_no_memory() -> None:
    """4,096 clients are remembered, and who goes on is not forgotten."""
    gate = waker.Gate()
    assert not any(refused(gate, "192.0.2.1", 0) for _ in range(10))
    for first, last, known in ((0, 4095, True), (4095, 4096, True), (0, 4096, False)):
        for number in range(first, last):
            assert not refused(gate, f"2001:db8:{number:x}::1", 1)
        assert bool(refused(gate, "192.0.2.1", 1)) == known


def test_the_clients_that_are_remembered_take_3_mb_at_most() -> None:
    gate, before = waker.Gate(), 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for attempt in range(10):
            for number in range(4096):
                gate.count_attempt(f"2001:db8:{number:x}::1", attempt + number / 8192)
        assert tracemalloc.get_traced_memory()[0] - before < 3e6
    finally:
        tracemalloc.stop()


def test_a_token_lives_15_minutes_and_64_live_at_a_time(config: waker.Config) -> None:
    app = new_app(config)
    token, *others = (app.gate.issue_token(1000) for _ in range(64))
    for now, status in ((1899.9, 409), (1900, 401)):
        request = waker.Request("DELETE", "/api/start", "192.0.2.1", now, token=token)
        assert waker.respond(app, request, "").status == status
    others.append(app.gate.issue_token(1001))
    assert not app.gate.is_valid(token, 1001)
    assert all(app.gate.is_valid(other, 1001) for other in others)


@pytest.mark.parametrize(
    "row",
    [
        ("GET", "/api/status"),
        ("POST", "/api/wol"),
        ("POST", "/api/unlock"),
        ("POST", "/api/start"),
        ("DELETE", "/api/start"),
    ],
    ids=" ".join,
)
def test_without_a_token_nothing_is_done(
    owner: Client, lab: Homelab, row: tuple[str, str]
) -> None:
    token, owner.token = owner.token, ""
    body = {"passphrase": PASSPHRASE}
    for text in ("", "Bearer", "Basic {}", "{}", "Bearer {}x", "Bearer \xe4"):
        fields = {"Authorization": text.format(token)} if text else {}
        answer = owner.call(*row, body, fields)
        assert (answer.status, answer.error) == (401, "Invalid or expired token")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert owner.call(*row, b"x" * 20_000).status == 401  # a body is looked at later
    assert lab.packets == []
    fields = {"Authorization": f"bEARER {token}"}
    assert owner.call(*row, headers=fields).status != 401


# ---- The machine ---------------------------------------------------------------------


def test_the_journey_wakes_and_unlocks(owner: Client, lab: Homelab) -> None:
    assert owner.status() == {
        "name": "127.0.0.1",
        "state": "off",
        "reachable": False,
        "initrd_ssh_open": False,
        "system_ssh_open": False,
        "start": None,
    }
    for body in (None, b"nonsense"):  # any, or none
        answer = owner.call("POST", "/api/wol", body)
        assert answer.status == 200
        told = f"Magic packet sent to {lab.mac} from 127.0.0.1"
        assert answer.json == {"success": True, "message": told}
    lab.wait_for("locked")
    wait_for(lambda: owner.status()["initrd_ssh_open"])
    answer = owner.unlock("wrong")
    assert answer.status == 400
    assert answer.error == "Wrong passphrase for disk cryptroot."
    answer = owner.unlock()
    assert answer.status == 200
    assert answer.json == {"success": True, "message": "Unlocked: cryptroot."}
    lab.wait_for("up")


def test_an_impossible_passphrase_is_a_bad_request(owner: Client) -> None:
    for odd in ("", "a" * 513, "ä" * 257, "a\n", "\r", "a\0b", "\x7f", "\x85", 5):
        answer = owner.unlock(odd)
        assert answer.status == 400
        assert "passphrase" in answer.error


# ---- The page, and every answer ------------------------------------------------------


def test_the_page_needs_no_token_and_allows_only_its_own_code(api: Client) -> None:
    page = api.call("GET", "/?from=home-screen")
    assert page.status == 200
    assert page.body == Path(PROGRAM).with_name("ui.html").read_bytes()
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    for tag in (b"script", b"style"):
        codes = re.findall(rb"<%b[^>]*>(.*?)</%b>" % (tag, tag), page.body, re.DOTALL)
        digests = [base64.b64encode(waker.sha256(code)).decode() for code in codes]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f" {tag.decode()}-src {allowed};" in policy
    for part in (
        "default-src 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert part in policy
    assert "unsafe" not in policy
    assert not re.search(rb"\son\w+=|\sstyle=|innerHTML|javascript:", page.body)
    icon = api.call("GET", "/apple-touch-icon.png")
    assert icon.headers["Content-Type"] == "image/png"
    assert icon.body.startswith(b"\x89PNG")


def test_an_answer_is_private_and_head_is_get_without_the_body(owner: Client) -> None:
    for path in ("/", "/api/status", "/nothing"):
        got = owner.call("GET", path)
        request = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n"
        request += f"Authorization: Bearer {owner.token}\r\n\r\n"
        assert owner.raw(request.encode()) == (got.status, b"")
        fields = owner.call("HEAD", path).headers
        assert fields["Content-Length"] == str(len(got.body))
        assert fields["Cache-Control"] == "no-store"
        assert fields["X-Content-Type-Options"] == "nosniff"
        assert fields["Referrer-Policy"] == "no-referrer"
        assert fields["Cross-Origin-Resource-Policy"] == "same-origin"
        assert fields["Connection"] == "close"
        assert not {"Server", "Access-Control-Allow-Origin"} & fields.keys()
        told = email.utils.parsedate_to_datetime(fields["Date"])
        assert abs(told.timestamp() - time.time()) < 60


def test_a_bug_is_told_without_its_text(config: waker.Config) -> None:
    broken = config._replace(name=cast("str", b"a bug, on purpose"))  # no JSON
    with running(broken) as client:
        answer = client.log_in().call("GET", "/api/status")
        assert answer.status == 500
        assert answer.error == "Internal error; see waker's log"
        assert client.call("GET", "/").status == 200
