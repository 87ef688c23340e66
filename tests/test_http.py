"""HTTP from hostile clients: one JSON error each, and everybody else is served."""

import ctypes
import errno
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CHECKOUT,
    MACHINE,
    PIN,
    Client,
    daemon,
    need_root,
    new_app,
    no_threads,
    running,
    wait_for,
)
from namespaces import hosts, ip

import waker

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\n"
JSON = b"Content-Type: application/json\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
LOGIN = json.dumps({"pin": PIN}).encode()
NO_DEFERRING = socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0


Case = tuple[bytes, int]  # a request, and the status of its answer


def line(start: bytes, status: int = 400) -> Case:
    """Make a request with this beginning."""
    return start + b"\r\nHost: x\r\n\r\n", status


def field(text: bytes, start: bytes = GET) -> Case:
    """Make a bad request with this header field."""
    return start + text + b"\r\n\r\n12345", 400


def coding(name: bytes) -> Case:
    """Make a request whose body has a transfer coding, with another one behind it."""
    return POST + b"Transfer-Encoding:" + name + b"\r\n\r\n0\r\n\r\n" + SMUGGLED, 501


# Beside those of test_promises.py.
HOSTILE: dict[str, Case] = {
    # The request line.
    "empty line first": line(b"\r\nGET / HTTP/1.1"),
    "two spaces": line(b"GET  / HTTP/1.1"),
    "bracket in the method": line(b"G(T / HTTP/1.1"),
    "version in lower case": line(b"GET / http/1.1"),
    "version 1.10": line(b"GET / HTTP/1.10"),
    "bare LF after the version": line(b"GET / HTTP/1.1\nX: y"),
    # The target.
    "target without slash": line(b"GET x HTTP/1.1"),
    "UTF-8 in the path": line(b"GET /\xc3\xa4 HTTP/1.1"),
    "DEL in the query": line(b"GET /?\x7f HTTP/1.1"),
    "whole address": line(b"GET http://x/ HTTP/1.1"),
    "asterisk": line(b"OPTIONS * HTTP/1.1"),
    "encoded dots": line(b"GET /%2e%2e/ HTTP/1.1", 404),
    "encoded slash": line(b"GET /api%2fstatus HTTP/1.1", 404),
    "fragment": line(b"GET /#x HTTP/1.1", 404),
    # Header fields.
    "field without colon": field(b"X"),
    "field without name": field(b": y"),
    "two Authorizations": (
        GET.replace(b"/ ", b"/api/status ")
        + b"Authorization: Bearer a\r\nauthorization: Bearer a\r\n\r\n",
        401,
    ),
    # How long the body is.
    "length with a zero first": field(b"Content-Length: 05"),
    "length with an underscore": field(b"Content-Length: 1_0"),
    "length in superscript": field(b"Content-Length: \xb2"),
    "length after a no-break space": field(b"Content-Length: \xa05"),
    "length with a space before the colon": field(b"Content-Length : 5"),
    "two length fields": field(b"Content-Length: 5\r\nContent-Length: 5"),
    "length beyond 64 bits": field(b"Content-Length: 5000000000000000000"),
    "empty length": field(b"Content-Length:"),
    "coding with a space before the colon": field(b"Transfer-Encoding : chunked"),
    "coding in a folded field": field(b"X: y\r\n\tTransfer-Encoding: chunked"),
    "coding and length": coding(b" chunked\r\nContent-Length: 5"),
    "coding after a no-break space": coding(b" \xa0Chunked"),
    "empty coding": coding(b""),
    # Too much.
    "endless line": (b"x" * 100_000, 431),
    "body too long": (
        POST + JSON + b"Content-Length: 16385\r\n\r\n" + b"x" * 16385,
        413,
    ),
}
# Answered like any other request, and only once.
ODD = {
    "body of a GET": GET
    + b"X:\r\nX: \xe4\r\nContent-Length:5 \t\r\n\r\n12345"
    + SMUGGLED,
    "upgrade": GET
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
    + SMUGGLED,
    # A client that waits for "100 Continue" sends its body after a while without it.
    "expectation": POST
    + JSON
    + b"Expect: 100-continue\r\nContent-Length: 23\r\n\r\n"
    + LOGIN,
    "longest body": POST + JSON + b"Content-Length: 16384\r\n\r\n" + LOGIN.ljust(16384),
}


def knock(client: Client, data: bytes = GET, at: str = "127.0.0.1") -> socket.socket:
    """Connect from a loopback address and send something, such as half a request."""
    tcp = socket.create_connection((client.host, client.port), 20, (at, 0))
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.sendall(data)
    return tcp


def status_of(tcp: socket.socket) -> int:
    """Read the status of what must be one whole response, and no more."""
    head, _, body = tcp.makefile("rb").read().partition(b"\r\n\r\n")
    start, *fields = head.decode().split("\r\n")
    assert re.fullmatch("HTTP/1.1 [0-9]{3} [A-Z][A-Za-z -]+", start)
    assert f"Content-Length: {len(body)}" in fields
    status = int(start.split()[1])
    if status >= 400:
        assert "Content-Type: application/json" in fields
        assert json.loads(body).keys() == {"error"}
    return status


@pytest.fixture(scope="session")
def server() -> Iterator[Client]:
    """A client of a daemon that has no machine."""
    with running(waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())) as client:
        yield client


@pytest.mark.parametrize(("data", "status"), HOSTILE.values(), ids=[*HOSTILE])
def test_a_bad_request_gets_one_error(server: Client, data: bytes, status: int) -> None:
    with knock(server, data) as tcp:
        assert status_of(tcp) == status


@pytest.mark.parametrize("data", ODD.values(), ids=[*ODD])
def test_an_odd_request_is_answered_once(server: Client, data: bytes) -> None:
    with knock(server, data) as tcp:
        assert status_of(tcp) == 200


@pytest.mark.parametrize(
    ("size", "status"), [(16384, 200), (16385, 431)], ids=["at most", "one too many"]
)
@pytest.mark.parametrize(
    ("start", "end"),
    [
        (b"GET /?", b" HTTP/1.0\r\n\r\n"),
        (b"GET /?", b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (GET + b"X: ", b"\r\n\r\n"),
    ],
    ids=["no field", "long target", "long field"],
)
def test_a_head_has_at_most_16384_bytes(
    server: Client, start: bytes, end: bytes, size: int, status: int
) -> None:
    """Up to and including the empty line."""
    filler = b"x" * (size - len(start) - len(end))
    with knock(server, start + filler + end) as tcp:
        assert status_of(tcp) == status


@pytest.mark.parametrize(
    ("size", "status"),
    [(1, 400), (14, 400), (30, 400), (-1, 400), (None, 200)],
    ids=["first byte", "method and path", "half the head", "all but a byte", "all"],
)
def test_a_request_may_come_byte_by_byte_but_not_end_early(
    server: Client, size: int | None, status: int
) -> None:
    whole = POST + JSON + b"Content-Length: 24\r\n\r\n" + LOGIN + b"\n"
    with knock(server, b"") as tcp:
        for byte in whole[:size]:
            tcp.send(bytes([byte]))
        tcp.shutdown(socket.SHUT_WR)
        assert status_of(tcp) == status


def test_a_client_that_sends_nothing_gets_no_answer(server: Client) -> None:
    with knock(server, b"") as tcp:
        tcp.shutdown(socket.SHUT_WR)
        assert tcp.recv(1) == b""


def test_a_client_that_keeps_sending_is_answered_and_cut_off_after_two_seconds(
    server: Client,
) -> None:
    began = time.monotonic()
    with knock(server, POST + JSON + b"Content-Length: 999999\r\n\r\n") as tcp:
        for _ in range(60):
            tcp.sendall(b"x" * 16000)
        assert status_of(tcp) == 413
        answered = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < answered + 9:
                tcp.sendall(b"x")
                time.sleep(0.05)  # it drips
    assert time.monotonic() - began > 2
    assert time.monotonic() - answered < 5


def test_the_connection_ends_with_the_answer(server: Client) -> None:
    """Or a client that reads until its end would wait 2 s longer."""

    def take_time() -> float:
        began = time.monotonic()
        assert server.raw(GET + b"\r\n")[0] == 200
        return time.monotonic() - began

    wait_for(take_time, lambda seconds: seconds < 1.5, seconds=20)


# Reads requests as lines of hex digits, and prints the seconds that each one costs.
PARSER = """
import contextlib, sys, time, waker
proxies = waker.parse_addresses("127.0.0.1")
for line in sys.stdin:
    data, began = bytes.fromhex(line), time.process_time()
    with contextlib.suppress(waker.Fault):
        request = waker.read_request(data, bytes, "127.0.0.1", proxies)
        waker.GZIP.search(request.fields.get("accept-encoding", ""))
        waker.parse_body(request, "pin", str)
    print(time.process_time() - began)
"""


def login(body: bytes) -> bytes:
    return POST + JSON + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def test_no_request_costs_more_time_than_its_length() -> None:
    """Or one of 16 KiB could stop the daemon: no other thread runs meanwhile."""
    many, end = 16000, b"\r\n\r\n"
    requests = [
        b"x" * many + end,
        b"GET /" + b"x" * many + b"#" + end,
        b"GET /" + b"%41" * (many // 3) + b"#" + end,
        b"GET /?" + b"x" * many + b"#" + end,
        GET + b"X" * many + end,
        GET + b"X: " + b" " * many + b"\0" + end,
        GET + b"X: " + b"x " * (many // 2) + b"\0" + end,
        GET + b"Accept-Encoding: " + b"gzip, " * (many // 6) + b"\0" + end,
        GET + b"Accept-Encoding: gzip" + b" " * many + b"x" + end,
        GET + b"Accept-Encoding: gzip;q=0." + b"0" * many + b"x" + end,
        GET + b"Accept-Encoding: " + b"gzip;q=0," * (many // 9) + b"x" + end,
        GET + b"Content-Length: " + b"5" * many + b"x" + end,
        GET + b"X-Forwarded-For: " + b"," * many + end,
        GET + b"Authorization: " + b" " * many + b"x" + end,
        POST + b"Content-Type: application/json" + b" " * many + b"x" + end,
        login(b'{"pin":' + b" " * many),
        login(b'{"pin":"' + b"x" * many),
        login(b'{"pin":"' + b"\\\\" * (many // 2)),
    ]
    ended = subprocess.run(
        [sys.executable, "-c", PARSER],
        cwd=CHECKOUT,
        input="".join(f"{request.hex()}\n" for request in requests),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,  # seconds; an exponential pattern would take years
        check=True,
    )
    costs = [float(cost) for cost in ended.stdout.split()]
    assert len(costs) == len(requests)
    assert max(costs) < 0.1  # seconds of CPU; most take 0.001


# ---- Many clients, and slow ones -----------------------------------------------------


def is_open(tcp: socket.socket) -> bool:
    """Return whether nothing has arrived, not even the end."""
    return not select.select([tcp], [], [], 0)[0]


def places(network: int, count: int) -> list[str]:
    """List loopback addresses."""
    return [f"127.{network}.{n // 200}.{1 + n % 200}" for n in range(count)]


class Crowd(ExitStack):
    """Clients whose connections stay open until the test ends."""

    def come(
        self, client: Client, sources: Iterable[str], data: bytes = GET
    ) -> list[socket.socket]:
        """Have one connect from each of these addresses."""
        return [self.enter_context(knock(client, data, source)) for source in sources]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with Crowd() as crowd:
        yield crowd


def test_chance_decides_who_makes_room(
    api: Client, crowd: Crowd, capfd: pytest.CaptureFixture[str]
) -> None:
    """Or an attacker could arrive in the order that keeps the owner out.

    Connections that have to go get no answer, and are not logged.
    """
    first = crowd.come(api, places(1, 64))
    crowd.come(api, places(2, 32))
    assert api.call("GET", "/").status == 200
    # On average, 38 of 64 stay. If always the newest went, 63 would; if the oldest, 31.
    assert sum(map(is_open, first)) < 60
    assert any(map(is_open, first[:32]))
    assert all(is_open(tcp) or tcp.recv(1) == b"" for tcp in first)
    assert capfd.readouterr().err == ""


def test_six_connections_count_as_one(api: Client, crowd: Crowd) -> None:
    """Or a browser, which opens six, would have to make room for strangers."""
    browsers = [crowd.come(api, [address] * 6) for address in places(1, 10)]
    crowd.come(api, places(2, 4))
    crowd.come(api, places(3, 9))  # each one ends another, by chance
    assert api.call("GET", "/").status == 200
    # By another rule, each browser loses one; by chance, in 1 of 5,000 cases.
    assert [sum(map(is_open, each)) for each in browsers] != [5] * 10


@contextmanager
def serving_on(tcp: socket.socket, config: waker.Config) -> Iterator[waker.Server]:
    server = waker.Server(new_app(config), tcp)
    threading.Thread(target=server.serve_forever, args=(None,)).start()
    try:
        yield server
    finally:
        server.stop()
        server.server_close()


def test_an_ipv6_network_counts_as_one_client(
    config: waker.Config, crowd: Crowd
) -> None:
    """A home has a /56, and could otherwise take every place."""
    with hosts(1) as (host,):
        ip(f"-n {host.name} -6 route add local 2001:db8::/32 dev lo")
        any_address = Path("/proc/sys/net/ipv6/ip_nonlocal_bind")
        host.run(lambda: any_address.write_text("1"))
        listener = host.run(lambda: waker.listen(("::1", 0)))
        client = Client(int(listener.getsockname()[1]), host="::1")

        def come(sources: Iterable[str]) -> list[socket.socket]:
            return host.run(lambda: crowd.come(client, sources))

        with serving_on(listener, config):
            others = come(f"2001:db8:1:{number:x}00::1" for number in range(50))
            come(f"2001:db8:2::{number:x}" for number in range(1, 41))
            assert host.run(lambda: client.call("GET", "/")).status == 200
            assert all(map(is_open, others))


def test_a_request_that_arrives_at_the_last_moment_is_answered(
    config: waker.Config,
) -> None:
    """Its thread was waiting, and has not yet had the time to read it."""
    listener = waker.listen(("127.0.0.1", 0))
    client = Client(int(listener.getsockname()[1]))
    with serving_on(listener, config) as server:
        for _ in range(20):
            with knock(client, GET) as tcp:
                (handler,) = wait_for(server.waiting.copy)
                tcp.sendall(b"\r\n")
                handler.drop()
                assert status_of(tcp) == 200
            wait_for(server.waiting.copy, lambda waiting: not waiting)


def test_a_thousand_clients_can_wait_to_be_let_in() -> None:
    """Linux limits their number as well."""
    with waker.listen(("127.0.0.1", 0)) as tcp:
        info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (limit,) = struct.unpack_from("I", info, 28)  # tcpi_sacked, if it listens
    assert limit >= min(1024, int(Path("/proc/sys/net/core/somaxconn").read_text()))


def test_a_client_that_sends_nothing_takes_no_thread_of_ours() -> None:
    """It stays in the kernel."""
    with daemon(MACHINE) as started:
        idle, client = started.uses(), started.client
        with knock(client, b"") as silent:
            assert client.call("GET", "/").status == 200
            wait_for(started.uses, lambda now: now == idle, seconds=8)
            assert is_open(silent)


def test_silent_clients_keep_nobody_waiting(config: waker.Config, crowd: Crowd) -> None:
    """Neither one address with many connections, nor many with one each."""
    with running(config, options=[NO_DEFERRING]) as api:
        for sources in (["127.0.0.1"] * 40, places(1, 100)):
            began, count = time.monotonic(), len(sources)
            silent = crowd.come(api, sources, b"")
            assert api.call("GET", "/").status == 200, count
            assert time.monotonic() - began < 9, count  # silence ends after 10 s
            assert 0 < sum(map(is_open, silent)) < 64, count


def test_slow_clients_have_ten_seconds(config: waker.Config, crowd: Crowd) -> None:
    """To send something, and again to take an answer that is too long to be kept."""
    small, threads = (
        (socket.SOL_SOCKET, socket.SO_SNDBUF, 2048),
        threading.active_count(),
    )
    with running(config, options=[NO_DEFERRING, small]) as api:
        began = time.monotonic()
        reader, sipping = (crowd.enter_context(socket.socket()) for _ in range(2))
        for tcp in (reader, sipping):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            tcp.connect((api.host, api.port))
            tcp.sendall(GET + b"\r\n")  # for the page, of which `reader` takes nothing
        garbage = b"GET / HTTP/1.1\nHost: x\n\n"
        silent, talking = (
            crowd.enter_context(knock(api, data)) for data in (b"", garbage)
        )

        def sip() -> None:
            with suppress(OSError):  # nothing is there, or it has ended
                sipping.recv(40, socket.MSG_DONTWAIT)

        assert silent.recv(1) == b""
        assert status_of(talking) == 408
        assert time.monotonic() - began > 9
        # One thread of the daemon is left: the one that listens.
        wait_for(sip, lambda _: threading.active_count() <= threads + 1)
        assert 9 < time.monotonic() - began < 19


def test_an_answer_is_kept_for_a_slow_reader(crowd: Crowd) -> None:
    """By the kernel: no thread waits meanwhile, and waker may stop."""
    with daemon(MACHINE) as started, socket.socket() as reader:
        idle = started.uses()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.connect((started.client.host, started.client.port))
        reader.sendall(GET + b"\r\n")
        assert select.select([reader], [], [], 20)[0]
        wait_for(lambda: started.uses() == idle, seconds=8)  # it would have 10
        assert started.stop() == 0
        reader.settimeout(20)
        assert status_of(reader) == 200


class Failing(socket.socket):
    """A listener that has no memory for its first three clients."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        accepted = super().accept()
        if self.failures < 3:
            self.failures += 1
            accepted[0].close()
            raise MemoryError
        return accepted


def test_an_error_in_accepting_is_survived(config: waker.Config) -> None:
    listener = Failing(fileno=waker.listen(("127.0.0.1", 0)).detach())
    client = Client(int(listener.getsockname()[1]))
    with serving_on(listener, config):
        for _ in range(3):
            with pytest.raises(ConnectionError):
                client.call("GET", "/")
        assert client.call("GET", "/").status == 200
    assert listener.failures == 3


def test_without_a_thread_it_hangs_up_and_goes_on(
    api: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    with no_threads():
        for _ in range(65):  # one more than may be open at a time
            with pytest.raises(ConnectionError):
                api.call("GET", "/")
    assert api.call("GET", "/").status == 200
    logged = capfd.readouterr().err.splitlines()
    assert len(logged) == 65
    assert all(re.match("bug: (RuntimeError|MemoryError), ", line) for line in logged)


# ---- A difficult system --------------------------------------------------------------


def test_it_starts_when_no_name_can_be_resolved(tmp_path: Path) -> None:
    """Not even its own."""
    need_root()
    servers = tmp_path / "resolv.conf"
    servers.write_text("nameserver 192.0.2.1\n")
    script = (
        f"mount --bind {servers} /etc/resolv.conf;"
        " ip link set lo up; ip route add 192.0.2.1 dev lo; hostname of-nobody;"
        ' exec "$0" "$@"'
    )
    command = ["unshare", "--mount", "--net", "--uts", "sh", "-c", script]
    began = time.monotonic()
    with daemon(MACHINE | {"WAKER_LISTEN": "0.0.0.0:0"}, *command):
        assert time.monotonic() - began < 5  # a look-up takes as long, or longer


def forbid_ipv6() -> None:
    """Let this thread open no IPv6 socket. Source: linux/seccomp.h, linux/filter.h."""
    number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]  # of `socket`
    load, compare, answer = 0x20, 0x15, 0x06
    instructions = [
        (load, 0, 0, 0),  # the number of the system call
        (compare, 0, 3, number),  # another one: skip three
        (load, 0, 0, 16),  # its first argument
        (compare, 0, 1, socket.AF_INET6),
        (answer, 0, 0, 0x00050000 | errno.EAFNOSUPPORT),
        (answer, 0, 0, 0x7FFF0000),  # go on
    ]
    code = b"".join(struct.pack("HBBI", *each) for each in instructions)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(instructions), ctypes.addressof(kept))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, with a filter


@pytest.mark.skipif(
    os.uname().machine not in {"x86_64", "aarch64"}, reason="no number for `socket`"
)
def test_the_default_address_works_on_a_box_without_ipv6() -> None:
    """As with the kernel's option ipv6.disable=1."""
    with ThreadPoolExecutor(1, initializer=forbid_ipv6) as without:
        with pytest.raises(OSError, match="Address family not supported"):
            without.submit(socket.socket, socket.AF_INET6).result()
        with without.submit(waker.listen, ("::", 0)).result() as tcp:
            assert tcp.getsockname()[0] == "0.0.0.0"


# ---- Behind a proxy ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9,198.51.100.7 , 10.0.0.3", "198.51.100.7"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9, ::ffff:10.0.0.2", "203.0.113.9"),
        ("::1", "2001:DB8::7", "2001:db8::7"),
        ("10.0.0.1", "198.51.100.7, x, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "fe80::1%x PIN accepted", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9\r\nX-Forwarded-For: 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", 20 * "203.0.113.9, " + "198.51.100.7", "198.51.100.7"),
    ],
    ids=[
        "no proxy of ours",
        "nothing forwarded",
        "last unknown address",
        "only proxies",
        "mapped proxy",
        "IPv6",
        "rubbish in between",
        "scope ID",
        "two fields",
        "many made up",
    ],
)
def test_the_client_is_the_one_that_the_proxy_saw(
    peer: str, forwarded: str, client: str
) -> None:
    proxies = waker.parse_addresses("10.0.0.1, 10.0.0.2,10.0.0.3,::1")
    data = GET + f"X-Forwarded-For: {forwarded}\r\n\r\n".encode()
    assert waker.read_request(data, bytes, peer, proxies).client == client
