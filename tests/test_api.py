"""The API, request by request, over real connections."""

import base64
import email.utils
import gzip
import re
import time
import tracemalloc
from pathlib import Path

import pytest
from conftest import (
    PASSPHRASE,
    PIN,
    PROGRAM,
    Client,
    new_app,
    running,
    serving,
    wait_for,
)
from homelab import Homelab, bind
from ssh_servers import free_port

import waker

# ---- The PIN and the tokens ----------------------------------------------------------


def test_the_pin_is_exchanged_for_a_token_in_ten_attempts_a_minute(api: Client) -> None:
    for pin in (PIN + "x", PIN[:-1], PIN.upper(), " ", "ü"):
        answer = api.attempt(pin)
        assert (answer.status, answer.error) == (401, "Wrong PIN"), pin
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    pasted = PIN, f" {PIN}", f"{PIN}\n", f"\xa0{PIN} "  # pasting adds spaces
    tokens = {api.attempt(pin).json["token"] for pin in pasted}
    assert len(tokens) == 4
    api.log_in()
    answer = api.attempt(PIN)  # the eleventh: attempts with the right PIN count
    assert answer.status == 429
    assert answer.error.startswith("Too many attempts")
    api.status()  # a token in hand still works


def test_the_token_comes_with_the_status(api: Client, lab: Homelab) -> None:
    answer = api.attempt(PIN)
    api.token = answer.json["token"]
    assert answer.json["status"] == api.status()
    assert api.call("POST", "/api/wol").status == 200
    lab.wait_for("locked")
    wait_for(lambda: api.status()["state"] == "locked")
    answer = api.attempt(PIN)
    assert answer.json["status"]["state"] == "locked"
    assert answer.json["status"] == api.status()


def test_a_refused_attempt_does_not_look_at_the_ports(config: waker.Config) -> None:
    """Or strangers could have the machine's SSH penalise this box."""
    with bind("127.0.0.1", 0) as port:
        port.listen(9)
        number = int(port.getsockname()[1])
        config = config._replace(
            initrd_port=free_port(),
            system_port=number,
            proxies=frozenset({"127.0.0.1"}),
        )
        with running(config) as client:
            statuses = [client.attempt("wrong PIN").status for _ in range(11)]
            assert statuses == [401] * 10 + [429]
            assert client.call("POST", "/api/auth", b"{}").status == 400
            port.setblocking(False)
            with pytest.raises(BlockingIOError):
                port.accept()
            answer = client.attempt(PIN, {"X-Forwarded-For": "192.0.2.1"})
            assert answer.json["status"]["state"] == "up"
            port.accept()[0].close()


def test_a_bug_in_the_status_withholds_no_token_and_shows_no_details(
    config: waker.Config, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host that is no text makes connecting fail in an unexpected way."""
    with running(config._replace(host="\ud800")) as client:
        answer = client.attempt(PIN)
        assert answer.status == 200
        assert answer.json.keys() == {"token", "expires_in"}
        bug = r"(?m)^bug: UnicodeEncodeError, waker\.py:\d+$"
        assert re.search(bug, capfd.readouterr().err)
        client.token = answer.json["token"]
        answer = client.call("GET", "/api/status")
        assert (answer.status, answer.error[:14]) == (500, "Internal error")
        assert re.search(bug, capfd.readouterr().err)
        assert client.call("GET", "/").status == 200


def all_attempts_are_left(api: Client) -> bool:
    return all(api.attempt(PIN).status == 200 for _ in range(10))


@pytest.mark.parametrize(
    "body",
    [b'{"pin": "\\x"}', b'{"pin": "x"} x', '{"pin": "x"}\u3000'.encode()],
    ids=["bad escape", "trailing text", "wide space"],
)
def test_a_body_without_a_pin_is_a_bad_request_and_no_attempt(
    api: Client, body: bytes
) -> None:
    """test_promises.py has more of them."""
    answer = api.call("POST", "/api/auth", body)
    assert answer.status == 400
    assert answer.error.startswith('The body must be {"pin": ')
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


def test_attempts_are_counted_per_ipv6_network_even_if_it_is_link_local() -> None:
    gate = waker.Gate()
    assert not any(refused(gate, "fe80::1%eth0.100", 0) for _ in range(10))
    assert refused(gate, "fe80::2%eth0.100", 0)


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


def test_a_token_lives_15_minutes() -> None:
    gate = waker.Gate()
    token = gate.issue_token(1000)
    assert gate.is_valid(token, 1899.9)
    assert not gate.is_valid(token, 1900)


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
def test_a_request_without_a_valid_token_does_nothing(
    owner: Client, lab: Homelab, request_line: str
) -> None:
    method, path = request_line.split()
    token, owner.token = owner.token, ""
    fields = {"Authorization": "Bearer \xe4"}
    answer = owner.call(method, path, {"passphrase": PASSPHRASE}, fields)
    assert (answer.status, answer.error) == (401, "Invalid or expired token")
    assert owner.call("HEAD", "/api/status").status == 401
    assert lab.packets == []
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
        "usual_seconds": None,
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


@pytest.mark.parametrize("passphrase", ["", "\r", 5], ids=ascii)
def test_an_impossible_passphrase_is_a_bad_request(
    owner: Client, passphrase: object
) -> None:
    """test_promises.py has more of them."""
    for answer in (owner.unlock(passphrase), owner.start(passphrase)):
        assert answer.status == 400
        assert "passphrase" in answer.error


def test_an_unlock_that_ends_in_a_bug_leaves_room_for_the_next(
    config: waker.Config, lab: Homelab
) -> None:
    settings = lab.settings() | {"LD_LIBRARY_PATH": "\0"}  # which no process can get
    with serving(new_app(config, settings)) as client:
        client.log_in()
        for _ in range(2):
            answer = client.unlock()
            assert (answer.status, answer.error[:14]) == (500, "Internal error")


# ---- The page, and every answer ------------------------------------------------------


def test_the_page_needs_no_token_and_allows_only_its_own_code(api: Client) -> None:
    page = api.call("GET", "/?from=home-screen")
    assert page.status == 200
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


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("GZIP", True),
        ("gzip;q=0.001", True),
        ("gzip , br", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip ;Q=0, deflate", False),
        ("br, gzip;q=0, *", False),
        ("identity", False),
        ("x-gzip", False),
        ("gzipped", False),
        ("", False),
    ],
)
def test_the_page_is_packed_for_clients_that_accept_it(
    owner: Client, accepted: str, is_packed: bool
) -> None:
    fields = {"Accept-Encoding": accepted}
    page = owner.call("GET", "/", headers=fields)
    assert page.headers.get("Content-Encoding") == ("gzip" if is_packed else None)
    body = gzip.decompress(page.body) if is_packed else page.body
    assert body == Path(PROGRAM).with_name("ui.html").read_bytes()
    assert page.headers["Vary"] == "Accept-Encoding"
    assert "Content-Security-Policy" in page.headers
    head = owner.call("HEAD", "/", headers=fields)
    for name in ("Content-Length", "Content-Encoding", "Vary"):
        assert head.headers.get(name) == page.headers.get(name)
    answer = owner.call("GET", "/api/status", headers=fields)
    assert "Content-Encoding" not in answer.headers
    assert answer.json["state"] == "off"


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
