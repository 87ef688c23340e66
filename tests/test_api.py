"""What the interface promises beyond test_promises.py."""

import base64
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CHECKOUT, MACHINE, PIN, Client, running
from homelab import bind
from ssh_servers import free_port

import waker

CONFIG = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())


@pytest.fixture(scope="session")
def owner() -> Iterator[Client]:
    """A client with a token, of a daemon that many tests share."""
    with running(CONFIG) as client:
        yield client.log_in()


# ---- The PIN and the tokens ----------------------------------------------------------


def test_the_status_comes_with_the_token_but_no_refused_attempt_looks_for_it() -> None:
    """Or strangers could have the machine's SSH penalise this box."""
    with bind("127.0.0.1", 0) as port:
        port.listen(9)
        port.setblocking(False)
        system_port = int(port.getsockname()[1])
        config = CONFIG._replace(initrd_port=free_port(), system_port=system_port)
        with running(config) as client:
            for _ in range(9):
                assert client.attempt("wrong PIN").status == 401
            assert client.call("POST", "/api/auth", b"{}").status == 400
            with pytest.raises(BlockingIOError):
                port.accept()
            answer = client.attempt(PIN).json
            assert client.attempt(PIN).status == 429
            client.token = answer["token"]
            assert answer["status"]["state"] == "up"
            assert answer["status"] == client.status()


def test_a_bug_in_the_status_withholds_no_token_and_shows_no_details(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A host that is no text makes connecting fail in an unexpected way."""
    with running(CONFIG._replace(host="\ud800")) as client:
        answer = client.attempt(PIN)
        assert (answer.status, answer.json.keys()) == (200, {"token", "expires_in"})
        client.token = answer.json["token"]
        answer = client.call("GET", "/api/status")
        assert answer.status == 500
        assert re.match("Internal error(?!.*codec)", answer.error)
    assert len(re.findall(r"(?m)^bug: Unicode\w+, \S+$", capfd.readouterr().err)) == 2


@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json; charset=utf-8", 401), ("application/jsonx", 415), ("", 415)],
)
def test_only_json_counts_as_an_attempt(kind: str, status: int) -> None:
    """A foreign page cannot send it without a preflight request.

    Otherwise, it could use up the attempts.
    """
    with running(CONFIG) as client:
        fields = {"Content-Type": kind}
        answer = client.call("POST", "/api/auth", b'{"pin": "x"}', fields)
        assert answer.status == status
        statuses = [client.attempt(PIN).status for _ in range(10)]
    assert statuses == [200] * 9 + [429 if status == 401 else 200]


def test_each_minute_has_room_for_ten_attempts_and_no_more() -> None:
    gate = waker.Gate()
    for minute in range(0, 180, 60):
        for second in range(10):
            gate.count_attempt("192.0.2.1", minute + second)
        with pytest.raises(waker.Fault):
            gate.count_attempt("192.0.2.1", minute + 10)


@pytest.mark.parametrize("later", [9, 9.25, 9.5, 9.75, 59.01])
def test_a_client_that_waits_as_told_is_let_in(later: float) -> None:
    """And it is told to wait less than a second longer than it must."""
    gate = waker.Gate()
    for attempt in range(10):
        gate.count_attempt("192.0.2.1", attempt)
    with pytest.raises(waker.Fault) as refusal:
        gate.count_attempt("192.0.2.1", later)
    seconds = int(dict(refusal.value.headers)["Retry-After"])
    assert later + seconds < 60 + 1
    gate.count_attempt("192.0.2.1", later + seconds)


def test_4096_clients_are_remembered_and_the_least_recent_is_forgotten() -> None:
    gate = waker.Gate()
    for attempt in range(10):
        gate.count_attempt("192.0.2.1", attempt)
    for prefix in ("2001:db8", "2001:db9"):
        for number in range(4095):
            gate.count_attempt(f"{prefix}:{number:x}::1", 10)
        with pytest.raises(waker.Fault):
            gate.count_attempt("192.0.2.1", 10)  # the most recent now
    for number in range(4096):
        gate.count_attempt(f"2001:db8:{number:x}::1", 10)
    gate.count_attempt("192.0.2.1", 10)


# ---- The page, and every answer ------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("deflate, GZIP;q=0.5", True), ("br, gzip; q=0.000, *", False)],
)
def test_the_page_is_packed_for_clients_that_accept_it(
    owner: Client, accepted: str, is_packed: bool
) -> None:
    """What contains a secret is never packed."""
    fields = {"Accept-Encoding": accepted}
    page = owner.call("GET", "/", headers=fields)
    assert page.headers.get("Content-Encoding") == ("gzip" if is_packed else None)
    body = gzip.decompress(page.body) if is_packed else page.body
    assert body == CHECKOUT.joinpath("ui.html").read_bytes()
    assert page.headers["Vary"] == "Accept-Encoding"
    assert "Content-Security-Policy" in page.headers
    status = owner.call("GET", "/api/status", headers=fields)
    assert "Content-Encoding" not in status.headers


def test_the_page_allows_only_its_own_code(api: Client) -> None:
    page = api.call("GET", "/")
    policy = page.headers["Content-Security-Policy"]
    for tag in (b"script", b"style"):
        codes = re.findall(rb"<%b[^>]*>(.*?)</%b>" % (tag, tag), page.body, re.DOTALL)
        digests = [base64.b64encode(waker.sha256(code)).decode() for code in codes]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f" {tag.decode()}-src {allowed};" in policy
    for part in (
        "connect-src 'self';",
        "img-src 'self' data:;",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert part in policy


@pytest.mark.parametrize("path", ["/", "/api/status", "/nothing"])
def test_every_answer_has_the_security_headers(owner: Client, path: str) -> None:
    fields = owner.call("GET", path).headers
    assert fields["Cache-Control"] == "no-store"
    assert fields["X-Content-Type-Options"] == "nosniff"
    assert fields["Referrer-Policy"] == "no-referrer"
    assert fields["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in fields
