"""The interface: page, PIN, token, and what a malformed request is told."""

import base64
import gzip
import hashlib
import itertools
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ICON, MACHINE, PAGE, PIN, Client, each, serving
from ssh_servers import free_port

import waker

BEHIND_PROXY = {"WAKER_PIN": PIN, "WAKER_TRUSTED_PROXY": "127.0.0.1"}
CONFIG = waker.read_config(MACHINE | BEHIND_PROXY, Path())
JSON = "application/json"
NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def owner() -> Iterator[Client]:
    """A client with a token, of a daemon that many tests share."""
    with serving(CONFIG) as client:
        yield client.log_in()


def somebody(kind: str = JSON) -> dict[str, str]:
    """Return the fields of a request by a client that was never seen before."""
    address = "192.0.{}.{}".format(*divmod(next(NUMBERS), 256))
    return {"X-Forwarded-For": address, "Content-Type": kind}


# ---- The PIN and the tokens ----------------------------------------------------------


def test_the_pin_is_exchanged_for_a_token_of_15_minutes(owner: Client) -> None:
    for pasted in (PIN, f" {PIN}\n"):
        answer = owner.attempt(pasted, somebody(f"{JSON}; charset=utf-8"))
        assert answer.status == 200
        assert answer.json.keys() == {"token", "expires_in", "status"}
        assert answer.json["expires_in"] == 900
        assert answer.headers["Content-Type"] == JSON
        Client(owner.port, answer.json["token"]).status()


def test_the_eleventh_attempt_in_a_minute_is_refused(owner: Client) -> None:
    """Right and wrong PINs count alike.

    What is malformed does not count, nor what a foreign page can send without a
    preflight request: it could use up the attempts.
    """
    client = somebody()
    assert owner.call("POST", "/api/auth", b"{}", client).status == 400
    plain = client | {"Content-Type": "text/plain"}
    assert owner.attempt("wrong PIN", plain).status == 415
    statuses = [owner.attempt(pin, client).status for pin in [PIN, "wrong PIN"] * 5]
    assert statuses == [200, 401] * 5
    answer = owner.attempt(PIN, client)
    assert answer.status == 429
    assert answer.error
    assert 0 < int(answer.headers["Retry-After"]) <= 60
    assert owner.attempt(PIN, somebody()).status == 200


CLIENTS = {  # and whether they count as one
    "IPv4": ("198.51.100.1", "198.51.100.2", False),
    "mapped IPv4": ("198.51.100.3", "::ffff:198.51.100.3", True),
    "same IPv6 /56": ("2001:db8:0:1::1", "2001:db8:0:ff:ffff::1", True),
    "another IPv6 /56": ("2001:db8:1:1::1", "2001:db8:1:100::1", False),
}


@each("one other is_same", CLIENTS)
def test_attempts_are_counted_by_address_or_network(
    owner: Client, one: str, other: str, is_same: bool
) -> None:
    for _ in range(10):
        assert owner.attempt("wrong PIN", {"X-Forwarded-For": one}).status == 401
    answer = owner.attempt("wrong PIN", {"X-Forwarded-For": other})
    assert answer.status == (429 if is_same else 401)


@pytest.mark.parametrize("later", [9, 9.25, 9.5, 9.75, 59.01])
def test_a_client_that_waits_as_told_is_let_in(later: float) -> None:
    """Once. And it is told to wait less than a second longer than it must."""
    limiter = waker.PinLimiter()
    for attempt in range(10):
        limiter.count("192.0.2.1", attempt)
    with pytest.raises(waker.HttpError) as refusal:
        limiter.count("192.0.2.1", later)
    seconds = int(dict(refusal.value.headers)["Retry-After"])
    assert later + seconds < 60 + 1
    limiter.count("192.0.2.1", later + seconds)
    with pytest.raises(waker.HttpError):
        limiter.count("192.0.2.1", later + seconds)


def test_4096_clients_are_remembered_and_the_least_recent_is_forgotten() -> None:
    limiter = waker.PinLimiter()
    for attempt in range(10):
        limiter.count("192.0.2.1", attempt)
    for prefix in ("2001:db8", "2001:db9"):
        for number in range(4095):
            limiter.count(f"{prefix}:{number:x}::1", 10)
        with pytest.raises(waker.HttpError):
            limiter.count("192.0.2.1", 10)  # the most recent now
    for number in range(4096):
        limiter.count(f"2001:db8:{number:x}::1", 10)
    limiter.count("192.0.2.1", 10)


def test_a_token_ends_after_15_minutes_or_when_64_others_are_newer() -> None:
    tokens = waker.TokenStore()
    first, *others = (tokens.issue(0) for _ in range(65))
    assert len({first, *others}) == 65
    assert min(map(len, others)) >= 43  # 32 bytes in base64
    assert not tokens.is_valid(first, 0)
    assert all(tokens.is_valid(each, 899.9) for each in others)
    assert not any(tokens.is_valid(each, 900) for each in others)


PROTECTED = (
    ("GET", "/api/status"),
    ("POST", "/api/wol"),
    ("POST", "/api/unlock"),
    ("POST", "/api/start"),
    ("DELETE", "/api/start"),
)


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_everything_else_needs_a_token(owner: Client, method: str, path: str) -> None:
    """Before its body is read."""
    token = owner.token
    for text in ("", "Bearer", token, f"Basic {token}", f"Bearer {token}x"):
        fields = {"Authorization": text} if text else {}
        answer = Client(owner.port).call(method, path, b"x" * 20_000, fields)
        assert answer.status == 401, text
        assert answer.error == "Invalid or expired token"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_the_status_comes_with_the_token_but_no_refused_attempt_looks_for_it() -> None:
    """Or strangers could have the machine's SSH penalise this box."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.setblocking(False)
        system_port = int(port.getsockname()[1])
        config = CONFIG._replace(initrd_port=free_port(), system_port=system_port)
        with serving(config) as client:
            assert client.attempt("wrong PIN").status == 401
            assert client.call("POST", "/api/auth", b"{}").status == 400
            with pytest.raises(BlockingIOError):
                port.accept()
            status = client.attempt(PIN).json["status"]
            assert status["state"] == "up"
            assert status == client.log_in().status()


def test_a_bug_in_the_status_withholds_no_token(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nor shows it details. A host that is no text makes connecting fail oddly."""
    with serving(CONFIG._replace(host="\ud800")) as client:
        answer = client.log_in().call("GET", "/api/status")
        assert answer.status == 500
        assert re.match("Internal error(?!.*codec)", answer.error)
    assert len(re.findall(r"(?m)^bug: Unicode\w+, \S+$", capfd.readouterr().err)) == 2


# ---- Paths, methods and bodies -------------------------------------------------------

NO_ROUTE = (  # and the methods that are allowed there
    ("GET", "/api/auth/", ""),
    ("GET", "/ui.html", ""),
    ("POST", "/API/auth", ""),
    ("POST", "/", "GET, HEAD"),
    ("GET", "/api/auth", "POST"),
    ("PUT", "/api/status", "GET, HEAD"),
    ("BREW", "/api/start", "DELETE, POST"),
)


@pytest.mark.parametrize(("method", "path", "allowed"), NO_ROUTE)
def test_an_unknown_path_or_method_is_an_error(
    owner: Client, method: str, path: str, allowed: str
) -> None:
    answer = Client(owner.port).call(method, path, b"x" * 20_000)
    assert answer.status == (405 if allowed else 404)
    assert answer.error
    assert answer.headers.get("Allow", "") == allowed


BODIES: dict[str, tuple[bytes, str, int]] = {
    "too long": (b"x" * 16385, JSON, 413),
    "plain text": (b'{"%s": "x"}', "text/plain", 415),
    "another type": (b'{"%s": "x"}', "application/jsonx", 415),
    "no type": (b'{"%s": "x"}', "", 415),
    "empty": (b"", JSON, 400),
    "no JSON": (b"%s", JSON, 400),
    "no space of JSON's": (b'{"%s":\x0c"x"}', JSON, 400),
    "another member": (b'{"x": "x"}', JSON, 400),
    "two members": (b'{"%s": "x", "x": "x"}', JSON, 400),
    "duplicate": (b'{"%s": "x", "%s": "x"}', JSON, 400),
    "text behind it": (b'{"%s": "x"} x', JSON, 400),
    "number": (b'{"%s": 12345678}', JSON, 400),
    "empty text": (b'{"%s": ""}', JSON, 400),
    "surrogate": (b'{"%s": "\\ud800"}', JSON, 400),
    "not UTF-8": (b'{"%s": "\xff"}', JSON, 400),
    "nested": (b'{"%s": ' + b"[" * 16000, JSON, 400),
}


@each("body kind status", BODIES)
@pytest.mark.parametrize("path", ["auth", "unlock", "start"])
def test_a_malformed_body_is_refused(
    owner: Client, path: str, body: bytes, kind: str, status: int
) -> None:
    member = b"pin" if path == "auth" else b"passphrase"
    data, fields = body.replace(b"%s", member), {"Content-Type": kind}
    answer = owner.call("POST", f"/api/{path}", data, fields)
    assert answer.status == status
    assert answer.error


def test_names_and_values_may_have_escapes_as_in_any_json(owner: Client) -> None:
    pin = "".join(f"\\u{ord(letter):04x}" for letter in PIN)
    body = f'{{"\\u0070in": "{pin}"}}'.encode()
    assert owner.call("POST", "/api/auth", body).status == 200


def test_what_cannot_be_a_passphrase_is_refused(owner: Client) -> None:
    for passphrase in ("a" * 513, "ä" * 257, "a\n", "a\0b", "\x7f", "\x85"):
        for answer in (owner.unlock(passphrase), owner.start(passphrase)):
            assert answer.status == 400, ascii(passphrase)
            assert "passphrase" in answer.error


# ---- The page, and every answer ------------------------------------------------------


def test_the_page_and_its_icon_need_no_token(owner: Client) -> None:
    """The page is packed for clients that accept that."""
    client = Client(owner.port)
    for accepted, coding in (
        ("", None),
        ("deflate, GZIP;q=0.5", "gzip"),
        ("br, gzip; q=0.000, *", None),
    ):
        page = client.call("GET", "/", headers={"Accept-Encoding": accepted})
        assert page.status == 200
        assert page.headers["Content-Type"].startswith("text/html")
        assert page.headers.get("Content-Encoding") == coding
        assert page.headers["Vary"] == "Accept-Encoding"
        assert (gzip.decompress(page.body) if coding else page.body) == PAGE
    icon = client.call("GET", "/apple-touch-icon.png")
    assert icon.status == 200
    assert icon.body.startswith(b"\x89PNG")
    assert base64.b64encode(icon.body) == ICON.removesuffix(b" -->\n")
    assert (icon.body[24], icon.body[25]) == (4, 3)  # sixteen colours, of a palette
    head = b"HEAD /apple-touch-icon.png HTTP/1.1\r\nHost: x\r\n\r\n"
    assert client.raw(head) == (200, b"")
    length = client.call("HEAD", "/apple-touch-icon.png").headers["Content-Length"]
    assert length == str(len(icon.body))


def test_the_page_allows_only_its_own_code(owner: Client) -> None:
    hashes = dict.fromkeys(("script", "style"), "")
    for tag, code in re.findall(rb"(?s)<(script|style)[^>]*>(.*?)</\1>", PAGE):
        digest = base64.b64encode(hashlib.sha256(code).digest()).decode()
        hashes[tag.decode()] += f" 'sha256-{digest}'"
    policy = owner.call("GET", "/").headers["Content-Security-Policy"]
    assert {*policy.split("; ")} == {
        "default-src 'none'",
        *(f"{tag}-src{allowed}" for tag, allowed in hashes.items()),
        "connect-src 'self'",
        "img-src 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
    }


def test_every_answer_has_the_security_headers(owner: Client) -> None:
    """What contains a secret is never packed."""
    for path in ("/", "/api/status", "/nothing"):
        fields = owner.call("GET", path, headers={"Accept-Encoding": "gzip"}).headers
        assert ("Content-Encoding" in fields) == (path == "/")
        assert fields["Cache-Control"] == "no-store"
        assert fields["X-Content-Type-Options"] == "nosniff"
        assert fields["Referrer-Policy"] == "no-referrer"
        assert fields["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in fields
