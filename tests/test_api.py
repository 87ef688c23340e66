"""The API, request by request, over real connections."""

import base64
import email.utils
import re
import time
import tracemalloc
from pathlib import Path
from typing import cast

import pytest
from conftest import MAC, PASSPHRASE, PIN, PROGRAM, Client, new_app, running, wait_for
from cryptroot_unlock import Disks
from homelab import Homelab
from ssh_servers import paramiko_server

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
    ids=[
        *("trailing slash", "double slash", "capitals"),
        *("POST page", "PUT auth", "BREW start"),
    ],
)
def test_an_unknown_path_or_method_is_refused(
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
        assert (answer.status, answer.error) == (401, "Wrong PIN"), pin
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
    answer = api.attempt(PIN)  # the eleventh: attempts with the right PIN count
    assert answer.status == 429
    assert 0 < int(answer.headers["Retry-After"]) <= 60
    assert answer.error.startswith("Too many attempts")
    api.status()  # a token in hand still works


def all_attempts_are_left(api: Client) -> bool:
    return all(api.attempt(PIN).status == 200 for _ in range(10))


@pytest.mark.parametrize(
    "body",
    [
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
    ],
    ids=[
        *("empty", "another member", "number", "empty PIN", "not UTF-8", "surrogate"),
        *("bad escape", "two PINs", "trailing text", "deep nesting", "wide space"),
    ],
)
def test_a_body_without_a_pin_is_a_bad_request_and_no_attempt(
    api: Client, body: bytes
) -> None:
    answer = api.call("POST", "/api/auth", body)
    assert answer.status == 400
    assert answer.error == 'The body must be {"pin": "<some text>"}'
    assert all_attempts_are_left(api)


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "", "application/jsonx"],
    ids=["plain text", "empty", "similar"],
)
def test_another_content_type_is_refused_and_no_attempt(api: Client, kind: str) -> None:
    """Otherwise, a foreign page could use up the attempts.

    Without a preflight request, a browser does not let it send JSON.
    """
    answer = api.attempt(PIN, {"Content-Type": kind})
    assert answer.status == 415
    assert answer.error == "Content-Type must be application/json"
    assert all_attempts_are_left(api)


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON ; charset=utf-8"],
    ids=["plain", "with charset"],
)
def test_a_json_content_type_is_accepted(api: Client, kind: str) -> None:
    assert api.attempt(PIN, {"Content-Type": kind}).status == 200


def refused(gate: waker.Gate, client: str, now: float) -> str:
    """Make an attempt; returns Retry-After, or an empty string if it was allowed."""
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
        assert refused(gate, "192.0.2.1", now) == wait, now


def test_refused_attempts_are_not_counted() -> None:
    """Or a browser that keeps trying would never get in."""
    gate = waker.Gate()
    assert not any(refused(gate, "192.0.2.1", 0) for _ in range(10))
    assert all(refused(gate, "192.0.2.1", second) for second in range(30, 60))
    assert not refused(gate, "192.0.2.1", 60)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:ff:ffff::1", True),
        ("2001:db8:0:1::1", "2001:db8:0:100::1", False),
        ("fe80::1%eth0.100", "fe80::2%eth0.100", True),
    ],
    ids=["IPv4", "same network", "another network", "link-local"],
)
def test_attempts_are_counted_per_ipv4_address_or_ipv6_56(
    one: str, other: str, is_same: bool
) -> None:
    gate = waker.Gate()
    assert not any(refused(gate, one, 0) for _ in range(10))
    assert bool(refused(gate, other, 0)) == is_same


def test_4096_clients_are_remembered_and_the_least_recent_is_forgotten() -> None:
    gate = waker.Gate()
    assert not any(refused(gate, "192.0.2.1", 0) for _ in range(10))
    for first, last, known in ((0, 4095, True), (4095, 4096, True), (0, 4096, False)):
        for number in range(first, last):
            assert not refused(gate, f"2001:db8:{number:x}::1", 1)
        assert bool(refused(gate, "192.0.2.1", 1)) == known, (first, last)


def test_4096_remembered_clients_take_at_most_3_mb() -> None:
    """A quarter of them is measured, because measuring takes its time."""
    gate, before = waker.Gate(), 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for attempt in range(10):
            for number in range(1024):
                gate.count_attempt(f"2001:db8:{number:x}::1", attempt + number / 8192)
        assert tracemalloc.get_traced_memory()[0] - before < 3e6 / 4
    finally:
        tracemalloc.stop()


def test_a_token_lives_15_minutes_and_64_live_at_a_time(config: waker.Config) -> None:
    app = new_app(config)
    token, *others = (app.gate.issue_token(1000) for _ in range(64))
    for now, status in ((1899.9, 409), (1900, 401)):
        request = waker.Request("DELETE", "/api/start", "192.0.2.1", now, token=token)
        assert waker.respond(app, request, "").status == status, now
    others.append(app.gate.issue_token(1001))
    assert not app.gate.is_valid(token, 1001)
    assert all(app.gate.is_valid(other, 1001) for other in others)


PROTECTED = pytest.mark.parametrize(
    "request_line",
    [
        "GET /api/status",
        "POST /api/wol",
        "POST /api/unlock",
        "POST /api/start",
        "DELETE /api/start",
    ],
)


@PROTECTED
@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Basic {}", "{}", "Bearer {}x", "Bearer \xe4"],
    ids=["none", "no token", "Basic", "no scheme", "wrong token", "not ASCII"],
)
def test_a_request_without_a_valid_token_is_refused(
    owner: Client, lab: Homelab, request_line: str, authorization: str
) -> None:
    token, owner.token = owner.token, ""
    text = authorization.format(token)
    fields = {"Authorization": text} if text else {}
    method, path = request_line.split()
    answer = owner.call(method, path, {"passphrase": PASSPHRASE}, fields)
    assert (answer.status, answer.error) == (401, "Invalid or expired token")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert lab.packets == []


@PROTECTED
def test_the_token_is_checked_before_the_body(api: Client, request_line: str) -> None:
    method, path = request_line.split()
    assert api.call(method, path, b"x" * 20_000).status == 401


@PROTECTED
def test_the_bearer_scheme_ignores_case(owner: Client, request_line: str) -> None:
    token, owner.token = owner.token, ""
    method, path = request_line.split()
    fields = {"Authorization": f"bEARER {token}"}
    assert owner.call(method, path, headers=fields).status != 401


# ---- The machine ---------------------------------------------------------------------


def test_a_machine_is_woken_and_unlocked(owner: Client, lab: Homelab) -> None:
    assert owner.status() == {
        "name": "127.0.0.1",
        "state": "off",
        "reachable": False,
        "initrd_ssh_open": False,
        "system_ssh_open": False,
        "start": None,
    }
    for body in (None, b"nonsense"):  # the body is ignored
        answer = owner.call("POST", "/api/wol", body)
        assert answer.status == 200, body
        message = f"Magic packet sent to {lab.mac} from 127.0.0.1"
        assert answer.json == {"success": True, "message": message}
    lab.wait_for("locked")
    wait_for(lambda: owner.status()["initrd_ssh_open"])
    answer = owner.unlock("wrong")
    assert answer.status == 400
    assert answer.error == "Wrong passphrase for disk cryptroot."
    answer = owner.unlock()
    assert answer.status == 200
    assert answer.json == {"success": True, "message": "Unlocked: cryptroot."}
    lab.wait_for("up")


@pytest.mark.parametrize(
    "passphrase",
    ["", "a" * 513, "ä" * 257, "a\n", "\r", "a\0b", "\x7f", "\x85", 5],
    ids=[
        *("empty", "513 bytes", "257 characters", "line feed", "carriage return"),
        *("NUL", "DEL", "NEL", "number"),
    ],
)
def test_an_impossible_passphrase_is_a_bad_request(
    owner: Client, passphrase: object
) -> None:
    for answer in (owner.unlock(passphrase), owner.start(passphrase)):
        assert answer.status == 400
        assert "passphrase" in answer.error


def test_a_passphrase_is_sent_as_it_was_given(tmp_path: Path) -> None:
    """With its spaces and accents as they are. An open disk needs none."""
    odd = " \u00a0\u00e9 e\u0301 \u00a0 "
    with paramiko_server(tmp_path, Disks({"d": odd})) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        with running(waker.read_config(settings, tmp_path)) as client:
            answer = client.log_in().unlock(odd)
            assert answer.json["message"] == "Unlocked: d."
            answer = client.unlock("another")
    assert answer.status == 200
    assert answer.json["message"].startswith("no passphrase is needed: all disks")


def test_an_unlock_that_ends_in_a_bug_leaves_room_for_the_next(
    config: waker.Config,
) -> None:
    config = config._replace(unlock_seconds=cast("int", "a bug, on purpose"))
    with running(config) as client:
        client.log_in()
        for _ in range(2):
            answer = client.unlock()
            assert (answer.status, answer.error[:14]) == (500, "Internal error")


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
        "connect-src 'self';",
        "img-src 'self' data:;",
        "form-action 'none'",
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


PATHS = pytest.mark.parametrize(
    "path", ["/", "/api/status", "/nothing"], ids=["page", "status", "unknown"]
)


@PATHS
def test_head_is_get_without_the_body(owner: Client, path: str) -> None:
    got = owner.call("GET", path)
    request = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n"
    request += f"Authorization: Bearer {owner.token}\r\n\r\n"
    assert owner.raw(request.encode()) == (got.status, b"")
    assert owner.call("HEAD", path).headers["Content-Length"] == str(len(got.body))
    owner.token = ""
    assert owner.call("HEAD", path).status == owner.call("GET", path).status


@PATHS
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_every_answer_has_the_security_headers(
    owner: Client, method: str, path: str
) -> None:
    fields = owner.call(method, path).headers
    assert fields["Cache-Control"] == "no-store"
    assert fields["X-Content-Type-Options"] == "nosniff"
    assert fields["Referrer-Policy"] == "no-referrer"
    assert fields["Cross-Origin-Resource-Policy"] == "same-origin"
    assert fields["Connection"] == "close"
    assert not {"Server", "Access-Control-Allow-Origin"} & fields.keys()
    date = email.utils.parsedate_to_datetime(fields["Date"])
    assert abs(date.timestamp() - time.time()) < 60


def test_a_bug_is_reported_without_details(
    config: waker.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = config._replace(name=cast("str", b"a bug, on purpose"))  # no JSON
    with running(broken) as client:
        answer = client.log_in().call("GET", "/api/status")
        assert answer.status == 500
        assert answer.error == "Internal error; see waker's log"
        assert "bug: TypeError, encoder.py:" in capfd.readouterr().err
        assert client.call("GET", "/").status == 200
