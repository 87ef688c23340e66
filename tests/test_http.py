"""HTTP from hostile clients: one JSON error each, and everybody else is served."""

import contextlib
import http.client
import io
import json
import os
import re
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
from certificate import Certificate, new_certificate
from conftest import (
    PASSPHRASE,
    PIN,
    PROGRAM,
    Client,
    Daemon,
    daemon,
    environment,
    need,
    need_root,
    new_app,
    run_waker,
    running,
)
from ssh_servers import free_port
from test_daemon import MAC, wait_for, wait_for_child

import waker

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\n"
JSON = b"Content-Type: application/json\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
MACHINE = MAC | {"WAKER_HOMELAB_HOST": "127.0.0.1"}

# What is wrong, and the status that tells so.
HOSTILE: list[tuple[bytes, int]] = [
    # The request line.
    (b"nonsense\r\n\r\n", 400),
    (b"\r\n\r\n", 400),
    (b"\r\n" + GET + b"\r\n", 400),
    (b" " + GET + b"\r\n", 400),
    (b"GET /\r\n", 400),
    (b"GET / HTTP/1.1\n", 400),
    (b"GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1 x\r\nHost: x\r\n\r\n", 400),
    (b"GET / http/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/x\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/01.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.10\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\rHost: x\r\n\r\n", 400),
    (b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"G(T / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"\x00" * 50, 400),
    (b"SSH-2.0-OpenSSH_9.2\r\n", 400),
    # The target.
    (b"GET x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /#x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /\\x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b'GET /"x HTTP/1.1\r\nHost: x\r\n\r\n', 400),
    (b"GET /% HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /\xc3\xa4 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /\x7f HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET http://u@x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET //x HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /../ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /%2e%2e/ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /api%2fstatus HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /api/status; HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    # Header fields.
    (GET + b"X : y\r\n\r\n", 400),
    (GET + b" X: y\r\n\r\n", 400),
    (GET + b"X: y\r\n folded\r\n\r\n", 400),
    (GET + b"X\r\n\r\n", 400),
    (GET + b": y\r\n\r\n", 400),
    (GET + b"X\x00: y\r\n\r\n", 400),
    (GET + b"X: \x00\r\n\r\n", 400),
    (GET + b"X: \x0b\r\n\r\n", 400),
    (GET + b"X: \x7f\r\n\r\n", 400),
    (GET + b"X: a\rAuthorization: b\r\n\r\n", 400),
    (GET + b"X: a\nAuthorization: b\r\n\r\n", 400),
    (GET + b"X: y\n\n", 400),
    (GET + b"X: y\r\n\n", 400),
    (GET + b"\r\r\n", 400),
    (GET + b"\xe4: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n X: y\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
    (b"GET / HTTP/1.0\r\nHost:\r\n\r\n", 400),
    (GET + b"Host: x\r\n\r\n", 400),
    (GET + b"Host: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x, y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: u@x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x:\xb2\r\n\r\n", 400),
    (GET + b"Authorization: a\r\nAuthorization: b\r\n\r\n", 400),
    (GET + b"Content-Type: a\r\ncontent-type: b\r\n\r\n", 400),
    # How long the body is.
    *(
        (POST + b"Content-Length:" + length + b"\r\n\r\n12345", 400)
        for length in (
            *(b" +5", b" -5", b" 0x5", b" 1_0", b" 5,5", b" 5, 5", b" 05", b" 5.0"),
            *(b"", b" five", b" 5 5", b" \xb2", b" \xef\xbc\x95", b" \xa05", b" 5\x0b"),
            *(b" 9999999999999999999", b" 1e1", b" '5'"),
        )
    ),
    (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n12345", 400),
    (POST + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n12345", 400),
    (POST + b"Content-Length : 5\r\n\r\n12345", 400),
    (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 501),
    *(
        (POST + b"Transfer-Encoding:" + coding + b"\r\n\r\n0\r\n\r\n" + SMUGGLED, 501)
        for coding in (
            *(b" chunked", b"", b" Chunked", b"\tchunked", b" chunked ", b"chunked"),
            *(b" identity", b" gzip, chunked", b" xchunked", b" \xa0chunked"),
            *(b" chunked\r\nTransfer-Encoding: x", b' "chunked"'),
        )
    ),
    (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Transfer-Encoding\r\n: chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"X: y\r\n\tTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # Too much.
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /" + b"x" * 100_000, 431),
    (b"x" * 100_000, 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000, 431),
    (GET + b"X: " + b"y" * 16384 + b"\r\n\r\n", 431),
    (GET + b"X: y\r\n" * 100 + b"\r\n", 431),
    (GET + b"a:\r\n" * 3000 + b"\r\n", 431),
    (POST + JSON + b"Content-Length: 16385\r\n\r\n" + b"x" * 16385, 413),
    (POST + JSON + b"Content-Length: 999999999999\r\n\r\n", 413),
]


def exchange(client: Client, *parts: bytes, end: bool = False) -> bytes:
    """Send parts, each in a packet of its own; returns all that comes back."""
    with socket.create_connection((client.host, client.port), timeout=20) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # it may be refused half-way
            for part in parts:
                tcp.sendall(part)
            if end:
                tcp.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: tcp.recv(65536), b""))


def status_of(received: bytes) -> int:
    """Read the status of what must be one whole response, and no more."""
    head, _, body = received.partition(b"\r\n\r\n")
    start, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert len(fields) == len(lines)
    assert fields["Content-Length"] == str(len(body))
    assert fields["Connection"] == "close"
    found = re.fullmatch(r"HTTP/1\.1 ([0-9]{3}) [A-Z][A-Za-z -]+", start)
    assert found
    if int(found[1]) >= 400:
        assert fields["Content-Type"] == "application/json"
        assert json.loads(body).keys() == {"error"}
    return int(found[1])


@pytest.fixture(scope="module")
def besieged() -> Iterator[Client]:
    """A client of a daemon whose log must stay clean."""
    with daemon(MACHINE) as started:
        yield started.client
        started.stop()
        text = "\n".join(started.log)
        assert re.fullmatch(r"[ -~\n]+", text)
        assert "Traceback" not in text
        assert "bug" not in text


@pytest.mark.parametrize(("request_bytes", "status"), HOSTILE)
def test_what_is_no_good_request_gets_one_json_error(
    besieged: Client, request_bytes: bytes, status: int
) -> None:
    assert status_of(exchange(besieged, request_bytes)) == status


@pytest.mark.parametrize(
    ("request_bytes", "status"), [row for row in HOSTILE if len(row[0]) < 200]
)
def test_it_gets_the_same_one_however_it_is_cut(
    besieged: Client, request_bytes: bytes, status: int
) -> None:
    bites = [request_bytes[at : at + 1] for at in range(len(request_bytes))]
    assert status_of(exchange(besieged, *bites)) == status


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"\r\n",
        GET + b"X:\r\nY:\t z \t\r\nX: \xe4\r\n\r\n",
        GET + b"Content-Length: 0\r\n\r\n",
        GET + b"Content-Length:5 \r\n\r\n12345",
        GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        GET + b"X: y\r\n" * 99 + b"\r\n",
        GET + b"X: " + b"y" * 16000 + b"\r\n\r\n",
        b"GET /?" + b"x" * 8000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET http://example.com HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET HTTPS://[::1]:8080/?a=/b?c HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        GET + b"\r\n" + SMUGGLED,
        GET + b"Content-Length: 5\r\n\r\n12345" + SMUGGLED,
    ],
)
def test_what_is_unusual_and_right_is_answered_once(
    besieged: Client, request_bytes: bytes
) -> None:
    assert status_of(exchange(besieged, request_bytes)) == 200
    assert status_of(exchange(besieged, request_bytes, end=True)) == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"G",
        b"GET / HTTP/1.1",
        GET,
        GET + b"X: y",
        POST + b"Content-Length: 9\r\n\r\n",
        POST + b"Content-Length: 9\r\n\r\n{",
    ],
)
def test_what_ends_early_is_a_bad_request(
    besieged: Client, request_bytes: bytes
) -> None:
    assert status_of(exchange(besieged, request_bytes, end=True)) == 400


def test_who_leaves_without_a_word_gets_none(besieged: Client) -> None:
    assert exchange(besieged, end=True) == b""


def test_a_client_that_waits_for_a_word_is_not_told_to_continue(api: Client) -> None:
    """It sends its body all the same; what it is told is the answer alone."""
    body = json.dumps({"pin": PIN}).encode()
    head = POST + JSON + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    assert status_of(exchange(api, head % len(body) + body)) == 200
    assert status_of(exchange(api, head % 99999)) == 413


def test_a_body_that_is_too_long_is_judged_after_route_and_token(
    api: Client,
) -> None:
    long = b"Content-Length: 16385\r\n\r\n" + b"x" * 16385
    for method, path, status in (
        (b"POST", b"/nothing", 404),
        (b"PUT", b"/api/unlock", 405),
        (b"POST", b"/api/unlock", 401),
    ):
        head = b"%b %b HTTP/1.1\r\nHost: x\r\n" % (method, path)
        assert status_of(exchange(api, head + JSON + long)) == status
    assert status_of(exchange(api, POST + JSON + long)) == 413


def test_an_error_reaches_a_client_that_is_still_sending(api: Client) -> None:
    head = POST + JSON + b"Content-Length: 999999\r\n\r\n"
    with socket.create_connection((api.host, api.port), timeout=20) as tcp:
        tcp.sendall(head)
        for _ in range(60):
            tcp.sendall(b"x" * 16384)
        received = b"".join(iter(lambda: tcp.recv(65536), b""))
    assert status_of(received) == 413


def knock(client: Client, address: str, data: bytes) -> socket.socket:
    """Connect from an address of loopback, and send something."""
    tcp = socket.create_connection((client.host, client.port), 20, (address, 0))
    tcp.sendall(data)
    return tcp


def is_open(tcp: socket.socket) -> bool:
    """Tell whether nothing came, not even an end."""
    tcp.setblocking(False)
    try:
        tcp.recv(1)
    except BlockingIOError:
        return True
    return False


def descriptors_and_threads(started: Daemon) -> tuple[int, int]:
    return started.descriptors(), started.threads()


@pytest.fixture
def started() -> Iterator[Daemon]:
    with daemon(MACHINE) as started:
        yield started


def half_requests(
    stack: contextlib.ExitStack, client: Client, sources: Iterable[str]
) -> list[socket.socket]:
    """Begin a request from each of these addresses, and do not go on."""
    return [stack.enter_context(knock(client, source, GET)) for source in sources]


def test_a_client_has_24_connections_and_the_25th_ends_one_of_them(
    api: Client,
) -> None:
    with contextlib.ExitStack() as stack:
        own = half_requests(stack, api, ["127.0.0.1"] * waker.PER_CLIENT)
        (other,) = half_requests(stack, api, ["127.0.0.2"])
        assert api.call("GET", "/").status == 200
        assert sum(map(is_open, own)) == waker.PER_CLIENT - 1
        for tcp in (other, *filter(is_open, own)):
            tcp.settimeout(20)
            tcp.sendall(b"\r\n")
            assert tcp.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_who_had_to_go_is_told_nothing_and_not_logged(started: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        half_requests(stack, started.client, ["127.0.0.1"] * 60)
        assert started.client.call("GET", "/").status == 200
        started.stop()
    assert started.log[1:] == ["stopping"]


def test_a_trusted_proxy_may_have_more_connections(config: waker.Config) -> None:
    proxies = waker.parse_networks("127.0.0.0/29")
    with running(config._replace(proxies=proxies)) as api, contextlib.ExitStack() as st:
        many = half_requests(st, api, ["127.0.0.1"] * 60)
        assert api.call("GET", "/").status == 200
        assert all(map(is_open, many))


def test_there_are_64_connections_in_all(started: Daemon) -> None:
    idle = started.threads()
    with contextlib.ExitStack() as stack:
        sources = [f"127.1.0.{place}" for place in range(1, 101)]
        many = half_requests(stack, started.client, sources)
        assert started.client.call("GET", "/").status == 200
        wait_for(lambda: started.threads() == idle + waker.THREADS - 1)
        assert sum(map(is_open, many)) == waker.THREADS - 1


def test_many_who_come_back_go_before_who_is_new(api: Client) -> None:
    """Or an owner who is far away would have to go while the request is under way.

    By chance alone, an owner would stay in three cases of five.
    """
    stayed = 0
    with contextlib.ExitStack() as stack:
        sources = [f"127.1.0.{place}" for place in range(1, 101)]
        many = dict(zip(sources, half_requests(stack, api, sources), strict=True))
        for turn in range(20):
            (owner,) = half_requests(stack, api, [f"127.2.0.{turn}"])
            for source in [s for s in sources if not is_open(many[s])][:30]:
                (many[source],) = half_requests(stack, api, [source])
            stayed += is_open(owner)
            owner.close()
    assert stayed > 16


def test_who_tries_again_among_many_who_are_new_is_not_kept_out(api: Client) -> None:
    """An owner stays by chance in six turns of seven, after a drop as well."""
    stayed = 0
    with contextlib.ExitStack() as stack:
        half_requests(stack, api, [f"127.1.0.{place}" for place in range(1, 101)])
        for turn in range(30):
            (owner,) = half_requests(stack, api, ["127.2.0.1"])
            new = [f"127.3.{turn}.{place}" for place in range(1, 11)]
            half_requests(stack, api, new)
            assert api.call("GET", "/").status == 200  # so all of them were let in
            stayed += is_open(owner)
            owner.close()
    assert stayed > 14


def test_who_goes_on_sending_after_the_answer_has_two_seconds(started: Daemon) -> None:
    with knock(started.client, "127.0.0.1", GET + b"\r\n") as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert tcp.recv(1)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):  # it is hung up on
            while time.monotonic() < began + 2 * waker.DRAIN_SECONDS:
                tcp.sendall(b"x")
    assert time.monotonic() - began < waker.DRAIN_SECONDS + 0.5


def test_who_is_being_answered_is_never_turned_away(owner: Client) -> None:
    """The machine is off, so the unlock takes its time, until its process is killed."""
    answers = []

    def unlock() -> None:
        answers.append(owner.call("POST", "/api/unlock", {"passphrase": PASSPHRASE}))

    thread = threading.Thread(target=unlock)
    thread.start()
    child = wait_for_child(os.getpid())
    with contextlib.ExitStack() as stack:
        half_requests(stack, owner, ["127.0.0.1"] * 200)
        assert owner.call("GET", "/").status == 200
        os.kill(child, signal.SIGKILL)
        thread.join()
    assert answers[0].error.endswith("The passphrase was not sent.")


def test_what_takes_time_keeps_nobody_else_waiting(owner: Client) -> None:
    """The machine sleeps, so a status takes most of a second; one look is for all."""
    status = b"GET /api/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    status += owner.token.encode() + b"\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(knock(owner, f"127.0.9.{place}", status[:-2]))
            for place in range(1, 61)
        ]
        began = time.monotonic()
        for tcp in clients:
            tcp.sendall(status[-2:])
        assert owner.call("GET", "/").status == 200
        assert owner.call("POST", "/api/auth", {"pin": "wrong-pin"}).status == 401
        assert not select.select(clients, [], [], 0)[0]
        for tcp in clients:
            assert tcp.recv(99).startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began < 3 * waker.KNOCK_SECONDS


def test_who_is_silent_keeps_nobody_waiting(config: waker.Config) -> None:
    """Neither one address with many connections, nor many with one each."""
    crowd = [f"127.1.0.{place}" for place in range(1, 101)]
    with running(config, defers=False) as api, contextlib.ExitStack() as stack:
        for sources in (["127.0.0.1"] * 40, crowd):
            silent = [stack.enter_context(knock(api, at, b"")) for at in sources]
            began = time.monotonic()
            assert api.call("GET", "/").status == 200
            assert time.monotonic() - began < waker.CLIENT_SECONDS / 5
            assert 0 < sum(map(is_open, silent)) < waker.THREADS


def test_a_few_clients_cannot_keep_others_out(api: Client) -> None:
    """Not even those who come later, and often, while an honest one is slow."""
    with contextlib.ExitStack() as stack:
        (honest,) = half_requests(stack, api, ["127.0.0.9"])
        half_requests(stack, api, [f"127.0.0.{1 + turn % 3}" for turn in range(300)])
        honest.sendall(b"\r\n")
        assert honest.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_slow_clients_have_ten_seconds(started: Daemon) -> None:
    idle = descriptors_and_threads(started)
    client, body = started.client, POST + b"Content-Length: 900\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def begin(data: bytes) -> list[socket.socket]:
            return [
                stack.enter_context(knock(client, f"127.0.0.{place}", data))
                for place in range(1, 16)
            ]

        began = time.monotonic()
        silent, heads, bodies = begin(b""), begin(GET), begin(body)
        stayed = begin(GET + b"\r\n")  # answered, and not hanging up
        assert client.call("GET", "/").status == 200
        wait_for(lambda: started.descriptors() <= idle[0] + 45)
        assert time.monotonic() - began < waker.DRAIN_SECONDS + 2
        while started.descriptors() > idle[0]:
            assert time.monotonic() - began < waker.CLIENT_SECONDS + 5
            with contextlib.suppress(OSError):
                for tcp in (*heads[1:], *bodies[1:]):
                    tcp.send(b"x")
            time.sleep(0.5)
        assert time.monotonic() - began > waker.CLIENT_SECONDS - 1
        wait_for(lambda: descriptors_and_threads(started) == idle)
        for tcp in silent:
            assert tcp.recv(9999) == b""
        for tcp in (heads[0], bodies[0]):
            assert status_of(tcp.recv(9999)) == 408
        for tcp in stayed:
            assert tcp.recv(9999).startswith(b"HTTP/1.1 200 ")


def test_who_does_not_take_the_answer_has_ten_seconds(started: Daemon) -> None:
    """What is answered fits into no buffer, as there are many requests at a time."""
    idle = descriptors_and_threads(started)
    with socket.socket() as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        tcp.connect((started.client.host, started.client.port))
        began = time.monotonic()
        tcp.sendall(GET + b"\r\n")
        wait_for(lambda: descriptors_and_threads(started) == idle)
    assert time.monotonic() - began < waker.CLIENT_SECONDS + waker.DRAIN_SECONDS + 1


def test_eleven_hundred_connections_are_survived(started: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.prlimit(started.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    idle = descriptors_and_threads(started)
    with contextlib.ExitStack() as stack:
        for place in range(1100):
            source = f"127.0.{place // 200}.{1 + place % 200}"
            half_requests(stack, started.client, [source])
            if place % 100 == 0:
                assert started.client.call("GET", "/").status == 200
        assert started.client.call("GET", "/").status == 200
        assert started.threads() <= idle[1] + waker.THREADS + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: descriptors_and_threads(started) == idle)
    assert started.busy(1) < 0.05


def test_without_a_descriptor_it_waits_for_one(started: Daemon) -> None:
    pid, client = started.process.pid, started.client
    used = started.descriptors()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, hard))
    with knock(client, "127.0.0.1", GET + b"\r\n") as tcp:
        assert started.busy(1) < 0.3
        assert is_open(tcp)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        tcp.settimeout(20)
        assert tcp.recv(9999).startswith(b"HTTP/1.1 200 ")
    assert started.busy(1) < 0.05


def test_without_a_thread_it_hangs_up_and_goes_on(api: Client) -> None:
    usual = threading.stack_size(1 << 46)  # bytes, which nobody has
    try:
        for _ in range(waker.THREADS + 1):
            with pytest.raises(ConnectionError):
                api.call("GET", "/")
    finally:
        threading.stack_size(usual)
    assert api.call("GET", "/").status == 200


def test_it_stops_although_the_last_client_got_no_thread(config: waker.Config) -> None:
    with running(config) as api:
        usual = threading.stack_size(1 << 46)
        try:
            with pytest.raises(ConnectionError):
                api.call("GET", "/")
        finally:
            threading.stack_size(usual)


def test_a_log_that_nobody_reads_stops_nothing(started: Daemon) -> None:
    lines = 65536 // len("ip=127.0.0.1 refused GET /x: 404 There is nothing") + 100
    for _ in range(lines):
        assert started.client.call("GET", "/x").status == 404
    assert started.process.stderr
    os.read(started.process.stderr.fileno(), 32768)
    assert started.client.call("GET", "/x").status == 404
    assert started.stop() == 0
    assert started.log[-1] == "stopping"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_log_that_cannot_be_written_stops_nothing(redirection: str) -> None:
    port = free_port()
    settings = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": f"127.0.0.1:{port}"}
    command = ["sh", "-c", f'exec "$0" "$@" {redirection}', sys.executable, PROGRAM]
    process = subprocess.Popen(command, env=environment(settings))
    client = Client(port)

    def answers() -> bool:
        with contextlib.suppress(ConnectionError):
            return client.call("GET", "/x").status == 404
        return False

    wait_for(answers)
    client.log_in()
    assert client.call("GET", "/api/status").status == 200
    process.terminate()
    assert process.wait(10) == 0


def test_deep_nesting_is_refused_on_the_smallest_stack() -> None:
    """128 KiB a thread is what musl gives, and glibc where the limit says so."""
    need("prlimit")
    with daemon(MACHINE, "prlimit", "--stack=131072") as started:
        for body in (b"[" * 16384, b'{"pin":' * 2000, b'{"pin": ' + b"[" * 16000):
            head = POST + JSON + b"Content-Length: %d\r\n\r\n" % len(body)
            assert status_of(exchange(started.client, head + body)) == 400
        started.client.log_in()


def test_it_starts_where_no_name_can_be_resolved(tmp_path: Path) -> None:
    """Not even its own."""
    need_root()
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.1\n")
    (tmp_path / "hosts").touch()
    script = (
        "for name in hosts resolv.conf; do"
        f" mount --bind {tmp_path}/$name /etc/$name; done;"
        " ip link set lo up; ip route add 192.0.2.1 dev lo; hostname of-nobody;"
        ' exec "$0" "$@"'
    )
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", script]
    settings = {"WAKER_LISTEN": "0.0.0.0:0"}
    began = time.monotonic()
    with daemon(MACHINE | settings, *command) as started:
        assert time.monotonic() - began < 4  # a look-up takes 5 s and more to fail
        assert started.stop() == 0


def test_it_stops_at_once_whoever_is_connected(started: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        for place in range(1, 101):
            for data in (b"", GET, GET + b"\r\n"):
                stack.enter_context(knock(started.client, f"127.0.0.{place}", data))
        began = time.monotonic()
        assert started.stop() == 0
        assert time.monotonic() - began < 2


def test_a_bug_in_the_loop_does_not_end_it(config: waker.Config) -> None:
    app = new_app(config)
    broken = cast("tuple[waker.Network, ...]", (None,))  # a bug, on purpose
    with running(config._replace(proxies=broken), app) as client:
        for _ in range(3):
            with pytest.raises(ConnectionError):
                client.call("GET", "/")


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", "", "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),  # no proxy of ours
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9,198.51.100.7 , 10.9.9.9", "198.51.100.7"),
        ("10.0.0.1", "10.2.2.2, 10.3.3.3", "10.2.2.2"),
        ("10.0.0.1", "::ffff:198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, ::ffff:10.0.0.2", "203.0.113.9"),
        ("::1", "2001:DB8::7", "2001:db8::7"),
        ("10.0.0.1", "198.51.100.7, unknown", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7, x, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "198.51.100.7:80", "10.0.0.1"),
        ("10.0.0.1", "fe80::1%x PIN accepted", "10.0.0.1"),
        ("10.0.0.1", ",", "10.0.0.1"),
        ("10.0.0.1", "," * 16000, "10.0.0.1"),
    ],
)
def test_the_client_is_whom_the_last_trusted_proxy_saw(
    peer: str, forwarded: str, client: str
) -> None:
    proxies = waker.parse_networks("10.0.0.0/8,::1")
    data = GET + f"X-Forwarded-For: {forwarded}\r\n\r\n".encode()
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(data))
    assert waker.read_request(file, peer, proxies).client == client


def test_attempts_are_counted_for_whom_the_proxy_saw(config: waker.Config) -> None:
    def statuses(proxies: str) -> list[int]:
        trusting = config._replace(proxies=waker.parse_networks(proxies))
        with running(trusting) as api:
            return [
                api.call(
                    "POST",
                    "/api/auth",
                    {"pin": PIN},
                    {"X-Forwarded-For": f"192.0.2.{n}"},
                ).status
                for n in range(12)
            ]

    assert statuses("127.0.0.0/8") == [200] * 12
    assert statuses("192.0.2.0/24") == [200] * 10 + [429] * 2
    assert statuses("") == [200] * 10 + [429] * 2


# ---- HTTPS ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return new_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def https(certificate: Certificate) -> Iterator[Daemon]:
    with daemon(MACHINE | certificate.settings()) as started:
        yield started


def trusting(certificate: Certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate.cert))


def test_https_answers_and_says_farewell(
    https: Daemon, certificate: Certificate
) -> None:
    address = (https.client.host, https.client.port)
    with socket.create_connection(address, 20) as tcp:
        with trusting(certificate).wrap_socket(
            tcp, server_hostname="127.0.0.1", suppress_ragged_eofs=False
        ) as tls:
            for byte in GET + b"\r\n":
                tls.send(bytes([byte]))
            received = b"".join(iter(lambda: tls.recv(65536), b""))
    assert status_of(received) == 200


def test_https_is_tls_1_2_or_later(https: Daemon, certificate: Certificate) -> None:
    old = trusting(certificate)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((https.client.host, https.client.port), 20) as tcp:
        with pytest.raises(ssl.SSLError, match=r"(?i)version|handshake failure"):
            old.wrap_socket(tcp, server_hostname="127.0.0.1")


def test_tls_has_one_curve_and_no_cbc(https: Daemon) -> None:
    """One hello for the group ffdhe8192 would cost 100 ms of CPU."""
    address = f"{https.client.host}:{https.client.port}"
    curve, other = "X25519", "P-256"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ecdh_curve(curve)
    except ssl.SSLError:  # Python 3.11.2, as in Debian 12
        curve, other = other, curve
    for options, status in (
        (f"-groups {curve}", 0),
        (f"-groups ffdhe8192:{curve}", 0),
        ("-groups ffdhe8192", 1),
        (f"-groups {other}", 1),
        ("-tls1_2 -cipher ECDHE-ECDSA-AES128-GCM-SHA256", 0),
        ("-tls1_2 -cipher ECDHE-ECDSA-AES128-SHA256", 1),
    ):
        command = [need("openssl"), "s_client", "-connect", address, *options.split()]
        told = subprocess.run(command, input=b"Q", capture_output=True, check=False)
        assert told.returncode == status, options


def test_half_a_handshake_keeps_nobody_waiting(
    https: Daemon, certificate: Certificate
) -> None:
    idle, client = descriptors_and_threads(https), https.client
    hello = ssl.MemoryBIO()
    tls = trusting(certificate).wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    halves = (b"", hello.read()[:100], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01")
    with contextlib.ExitStack() as stack:
        for place in range(1, 21):
            for data in halves:
                stack.enter_context(knock(client, f"127.0.0.{place}", data))
        connection = http.client.HTTPSConnection(
            client.host, client.port, timeout=5, context=trusting(certificate)
        )
        with contextlib.closing(connection):
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
    wait_for(lambda: descriptors_and_threads(https) == idle)
    assert https.busy(1) < 0.05


def test_what_is_no_tls_does_not_wait_for_more(https: Daemon) -> None:
    """It would hold a thread for ten seconds: a record has five bytes at least."""
    with knock(https.client, "127.0.0.1", b"\x01\x02\x03\x04") as tcp:
        tcp.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert tcp.recv(1) == b""


def test_what_is_wrong_with_a_certificate_is_told(
    certificate: Certificate, tmp_path: Path
) -> None:
    locked = new_certificate(tmp_path, passphrase=b"x")
    cert, key = certificate.settings().values()
    for files, words in (
        ((cert, ""), "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"),
        (("", key), "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"),
        ((cert, "/nowhere"), "/nowhere is missing or empty"),
        (("/nowhere", key), "/nowhere is missing or empty"),
        ((cert, cert), "must be an Ed25519, ECDSA or RSA private key"),
        ((key, key), "must be a certificate and its private key"),
        ((cert, str(locked.key)), "both PEM, not encrypted"),
        ((str(locked.cert), key), "must be a certificate and its private key"),
    ):
        names = ("WAKER_TLS_CERT", "WAKER_TLS_KEY")
        settings = MACHINE | {"WAKER_PIN": PIN} | dict(zip(names, files, strict=True))
        ended = run_waker(settings=settings)
        assert ended.returncode == 78
        assert words in ended.stderr
        assert "WAKER_TLS_" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
