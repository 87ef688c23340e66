"""The interface specification, row by row, over real connections."""

import base64
import datetime as dt
import email.utils
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import cast

import pytest
from conftest import PASSPHRASE, PIN, Client, new_app, running
from homelab import Homelab
from test_daemon import wait_for, wait_for_child

import waker

JSON = {"Content-Type": "application/json"}
PROTECTED = [row[:2] for row in waker.ROUTES if not row[3]]


def test_the_routes_are_those_of_the_interface() -> None:
    rows = {(method, path, is_open) for method, path, _, is_open in waker.ROUTES}
    assert rows == {
        ("GET", "/", True),
        ("GET", "/apple-touch-icon.png", True),
        ("POST", "/api/auth", True),
        ("GET", "/api/status", False),
        ("POST", "/api/wol", False),
        ("POST", "/api/unlock", False),
        ("POST", "/api/start", False),
        ("DELETE", "/api/start", False),
    }


def test_the_pin_is_exchanged_for_a_token(api: Client) -> None:
    answer = api.call("POST", "/api/auth", {"pin": PIN})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json.keys() == {"token", "expires_in"}
    assert answer.json["expires_in"] == 900
    api.token = answer.json["token"]
    assert api.call("GET", "/api/status").status == 200


@pytest.mark.parametrize("pin", [PIN + "x", PIN[:-1], PIN.upper(), " " + PIN, "x", "ü"])
def test_a_wrong_pin_is_refused(api: Client, pin: str) -> None:
    answer = api.call("POST", "/api/auth", {"pin": pin})
    assert (answer.status, answer.error) == (401, "Wrong PIN")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'"pin"',
        b"null",
        b"{}",
        b'{"pin": null}',
        b'{"pin": 123456}',
        b'{"pin": ["123456"]}',
        b'{"pin": ""}',
        b'{"pin": "\\ud800"}',
        b'{"pin": "\xff\xff\xff\xff\xff\xff"}',
        b'{"pin": "x", "pin": "x"}',
        b'{"pin": "123456", "n": NaN}',
        b'{"pin": "123456"} x',
        b'{"pin": "123456", "n": ' + b"[" * 8000 + b"}",
        b'{"pin": "123456", "n": ' + b"1" * 8000 + b"}",
        b'\xef\xbb\xbf{"pin": "123456"}',
        '{"pin": "123456"}'.encode("utf-16"),
    ],
)
def test_a_malformed_body_is_a_bad_request(api: Client, body: bytes) -> None:
    answer = api.call("POST", "/api/auth", body)
    assert answer.status == 400
    assert "pin" in answer.error.lower()


@pytest.mark.parametrize("kind", ["text/plain", "", "application/jsonx", "text/json"])
def test_a_body_of_another_content_type_is_refused(api: Client, kind: str) -> None:
    body = json.dumps({"pin": PIN}).encode()
    answer = api.call("POST", "/api/auth", body, {"Content-Type": kind})
    assert (answer.status, answer.error) == (
        415,
        "Content-Type must be application/json",
    )


def test_the_content_type_may_have_parameters_and_capitals(api: Client) -> None:
    kind = {"Content-Type": "Application/JSON ; charset=utf-8"}
    assert api.call("POST", "/api/auth", {"pin": PIN}, kind).status == 200


def test_the_eleventh_attempt_in_a_minute_is_limited(api: Client) -> None:
    statuses = [
        api.call("POST", "/api/auth", {"pin": pin}).status
        for pin in ("wrong!", PIN) * 5
    ]
    assert statuses == [401, 200] * 5  # all of them count
    answer = api.call("POST", "/api/auth", {"pin": PIN})
    assert answer.status == 429
    assert 0 < int(answer.headers["Retry-After"]) <= 60
    assert answer.error.startswith("Too many attempts")


def test_a_page_of_a_stranger_in_the_owners_browser_cannot_spend_the_attempts(
    api: Client,
) -> None:
    """Without a preflight a page can send no JSON; what has no PIN is no guess."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        for _ in range(11):
            body = (
                b"no PIN" if "json" in kind else json.dumps({"pin": "guess"}).encode()
            )
            answer = api.call("POST", "/api/auth", body, {"Content-Type": kind})
            assert answer.status in {400, 415}
    assert api.call("POST", "/api/auth", {"pin": PIN}).status == 200


def test_strangers_who_guess_do_not_lock_the_owner_out(api: Client) -> None:
    """Each of them has an address of its own; one that has its ten has no more."""
    wrong = b'{"pin": "wrong-pin"}'
    guess = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    guess += b"Content-Length: %d\r\n\r\n%b" % (len(wrong), wrong)

    def attempt(source: str) -> int:
        """Try a wrong PIN from an address of loopback; returns the status."""
        address = api.host, api.port
        with socket.create_connection(address, 20, (source, 0)) as tcp:
            tcp.sendall(guess)
            return int(tcp.recv(4096).split()[1])

    for count in (150, 6000):
        sources = {f"127.9.{n // 250}.{1 + n % 250}" for n in range(count)}
        assert {attempt(source) for source in sources} == {401}
    assert api.call("POST", "/api/auth", {"pin": PIN}).status == 200
    assert [attempt("127.8.8.8") for _ in range(12)] == [401] * 10 + [429] * 2


def test_an_attempt_counts_when_it_is_complete_not_when_it_began(
    api: Client, config: waker.Config
) -> None:
    """Else many could be begun, grow old together, and be completed at once."""
    body = json.dumps({"pin": "wrong!"}).encode()
    head = b"POST /api/auth HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\n\r\n"
    with socket.create_connection((api.host, api.port), timeout=20) as tcp:
        tcp.sendall(head + body[:5])
        assert api.call("POST", "/api/auth", {"pin": "x"}).status == 401  # time passes
        between = time.monotonic()
        tcp.sendall(body[5:])
        assert tcp.recv(65536).startswith(b"HTTP/1.1 401 ")
    assert len(api.attempts()) == 2
    assert api.attempts()[1] > between


def test_a_token_in_hand_works_while_attempts_are_limited(owner: Client) -> None:
    for _ in range(12):
        last = owner.call("POST", "/api/auth", {"pin": "wrong!"})
    assert last.status == 429
    assert owner.call("GET", "/api/status").status == 200


def test_a_token_that_has_expired_is_refused(config: waker.Config) -> None:
    app = new_app(config)

    def ask(token: str, now: float) -> waker.Response:
        request = waker.Request("GET", "/api/status", "192.0.2.1", now, token=token)
        return waker.dispatch(app, request)

    token = app.gate.issue(1000)
    assert ask(token, 1899.9).status == 200
    with pytest.raises(waker.Fault) as told:
        ask(token, 1900)
    assert told.value.status == 401


@pytest.mark.parametrize("row", PROTECTED, ids=[" ".join(row) for row in PROTECTED])
@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Basic {}",
        "{}",
        "Bearer {}x",
        "Bearer \xe4",
    ],
)
def test_nothing_protected_is_done_without_a_valid_token(
    owner: Client, lab: Homelab, row: tuple[str, str], authorization: str
) -> None:
    token, owner.token = owner.token, ""
    fields = {"Authorization": authorization.format(token)} if authorization else {}
    answer = owner.call(*row, {"passphrase": PASSPHRASE}, fields)
    assert (answer.status, answer.error) == (401, "Invalid or expired token")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert lab.packets == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_schemes_case_does_not_matter(owner: Client, scheme: str) -> None:
    token, owner.token = owner.token, ""
    fields = {"Authorization": f"{scheme} {token}"}
    assert owner.call("GET", "/api/status", headers=fields).status == 200


def test_the_status_has_the_promised_fields(owner: Client) -> None:
    assert owner.call("GET", "/api/status").json == {
        "name": "127.0.0.1",
        "state": "off",
        "reachable": False,
        "initrd_ssh_open": False,
        "system_ssh_open": False,
        "start": None,
    }


def test_a_wol_request_may_have_any_body_or_none(owner: Client, lab: Homelab) -> None:
    bodies: list[object] = [None, b"", b"nonsense", {}]
    for body in bodies:
        assert owner.call("POST", "/api/wol", body).status == 200
    lab.wait_for("locked")


def test_the_journey_wakes_and_unlocks(owner: Client, lab: Homelab) -> None:
    assert owner.call("GET", "/api/status").json["state"] == "off"
    assert owner.call("POST", "/api/wol").status == 200
    lab.wait_for("locked")
    wait_for(lambda: owner.call("GET", "/api/status").json["initrd_ssh_open"])
    answer = owner.call("POST", "/api/unlock", {"passphrase": "wrong"})
    assert (answer.status, answer.error) == (
        400,
        "Wrong passphrase for disk cryptroot.",
    )
    answer = owner.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
    assert answer.status == 200
    assert answer.json == {"success": True, "message": "Unlocked: cryptroot."}
    lab.wait_for("up")


@pytest.mark.parametrize(
    "passphrase",
    [
        "",
        "a" * 513,
        "ä" * 257,
        "a\n",
        "\r",
        "a\0b",
        "a\tb",
        "\x1b[A",
        "\x7f",
        "\x85",
        5,
    ],
)
def test_an_impossible_passphrase_is_a_bad_request(
    owner: Client, passphrase: object
) -> None:
    answer = owner.call("POST", "/api/unlock", {"passphrase": passphrase})
    assert answer.status == 400
    assert "passphrase" in answer.error


def test_an_unlock_that_fails_says_so_and_where_the_passphrase_is(
    owner: Client,
) -> None:
    answer = owner.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
    assert answer.status == 500
    assert re.fullmatch(
        r"Failed to unlock: port \d+ of 127.0.0.1 did not answer within 5 s."
        r" The passphrase was not sent.",
        answer.error,
    )


@pytest.mark.parametrize(
    "path",
    ["/x", "/api", "/api/", "/api/auth/", "//api/auth", "/api/%61uth", "/API/auth"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "BREW"])
def test_another_path_is_not_found(api: Client, method: str, path: str) -> None:
    answer = api.call(method, path, {"pin": PIN})
    assert (answer.status, answer.error) == (404, "No such path")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/", "GET, HEAD"),
        ("GET", "/api/auth", "POST"),
        ("HEAD", "/api/auth", "POST"),
        ("POST", "/api/status", "GET, HEAD"),
        ("GET", "/api/wol", "POST"),
        ("PUT", "/api/unlock", "POST"),
        ("GET", "/api/start", "DELETE, POST"),
        ("OPTIONS", "/api/unlock", "POST"),
        ("BREW", "/api/wol", "POST"),
    ],
)
def test_another_method_is_told_which_ones_there_are(
    api: Client, method: str, path: str, allowed: str
) -> None:
    answer = api.call(method, path)
    assert answer.status == 405
    assert answer.headers["Allow"] == allowed
    if method != "HEAD":
        assert answer.error == f"Allowed here: {allowed}"


def test_head_is_get_without_the_body(owner: Client) -> None:
    for path in ("/", "/api/status"):
        got, head = owner.call("GET", path), owner.call("HEAD", path)
        assert head.headers["Content-Length"] == str(len(got.body))
        request = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n"
        request += f"Authorization: Bearer {owner.token}\r\n\r\n"
        assert owner.raw(request.encode()) == (200, b"")


def test_the_page_needs_no_token_and_allows_only_its_own_code(api: Client) -> None:
    page = api.call("GET", "/?from=home-screen")
    assert page.status == 200
    assert page.body == (Path(waker.__file__).with_name("ui.html")).read_bytes()
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    for tag in (b"script", b"style"):
        (code,) = re.findall(rb"<%b[^>]*>(.*?)</%b>" % (tag, tag), page.body, re.DOTALL)
        digest = base64.b64encode(waker.sha256(code)).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}';" in policy
    for part in ("default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert page.headers["Referrer-Policy"] == "no-referrer"


def test_the_page_has_no_code_but_in_its_two_tags() -> None:
    page = Path(waker.__file__).with_name("ui.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|innerHTML|javascript:", page)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


def test_every_answer_has_the_fields_that_keep_it_private(owner: Client) -> None:
    for method, path in [("GET", "/"), ("GET", "/api/status"), ("GET", "/nothing")]:
        fields = owner.call(method, path).headers
        assert fields["Cache-Control"] == "no-store"
        assert fields["X-Content-Type-Options"] == "nosniff"
        assert fields["Connection"] == "close"
        assert "Server" not in fields
        told = email.utils.parsedate_to_datetime(fields["Date"])
        assert abs(dt.datetime.now(dt.UTC) - told) < dt.timedelta(seconds=60)
        assert email.utils.format_datetime(told, usegmt=True) == fields["Date"]
        assert "Access-Control-Allow-Origin" not in fields


def test_two_unlocks_at_once_are_one_too_many(owner: Client) -> None:
    answers = []

    def unlock() -> None:
        answers.append(owner.call("POST", "/api/unlock", {"passphrase": PASSPHRASE}))

    threads = [threading.Thread(target=unlock) for _ in range(3)]
    for thread in threads:
        thread.start()
    child = wait_for_child(os.getpid())
    wait_for(lambda: len(answers) == 2)
    os.kill(child, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert sorted(answer.status for answer in answers) == [409, 409, 500]
    for answer in answers:
        if answer.status == 409:
            assert answer.error.startswith("Another unlock or start is running")


def test_a_bug_is_told_without_its_text(config: waker.Config) -> None:
    app = new_app(config)
    app.watcher = cast("waker.Watcher", None)  # a bug, on purpose
    with running(config, app) as client:
        client.token = app.gate.issue(time.monotonic())
        answer = client.call("GET", "/api/status")
        assert answer.status == 500
        assert answer.error == "Internal error; see waker's log"
        assert client.call("GET", "/").status == 200
