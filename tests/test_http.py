"""HTTP: one answer for each request, crowds of clients, and difficult systems."""

from __future__ import annotations  # names of waker.py may go

import http.client
import re
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import (
    GET,
    MACHINE,
    PIN,
    POST,
    Answer,
    Client,
    Daemon,
    daemon,
    each,
    need,
    run_python,
    serving,
    wait_for,
    with_limits,
)
from namespaces import hosts, ip

import waker

CONFIG = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
OWNER = "127.0.0.99"
Come = Callable[[Client, list[str]], list[socket.socket]]


def knock(client: Client, data: bytes, at: str = "127.0.0.1") -> socket.socket:
    """Connect from a loopback address, and send something."""
    tcp = socket.create_connection((client.host, client.port), 30, (at, 0))
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.sendall(data)
    return tcp


def answer_on(tcp: socket.socket) -> Answer:
    """Read the one answer that comes before the connection ends."""
    response = http.client.HTTPResponse(tcp)
    response.begin()
    answer = Answer(response.status, dict(response.getheaders()), response.read())
    assert tcp.recv(1) == b""
    return answer


@pytest.fixture
def server() -> Iterator[Client]:
    """A client of a daemon in this process, whose machine nobody watches."""
    with serving(CONFIG) as client:
        yield client


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon in a process of its own, whose machine nobody watches.

    Its clients have 100 s, not ten. What a test waits for comes before they end, even
    if this computer is busy.
    """
    with daemon(MACHINE, program=with_limits(tmp_path, CLIENT_SECONDS=100)) as started:
        yield started


@pytest.fixture
def come() -> Iterator[Come]:
    """Return a function that sends half a request from each of these addresses."""
    with ExitStack() as crowd:
        yield lambda client, sources: [
            crowd.enter_context(knock(client, GET, source)) for source in sources
        ]


def places(network: int, count: int) -> list[str]:
    """List loopback addresses."""
    return [f"127.{network}.{n // 200}.{1 + n % 200}" for n in range(count)]


def is_kept(tcp: socket.socket) -> bool:
    """Return whether nothing has arrived, not even the end."""
    return not select.select([tcp], [], [], 0)[0]


def check_owner_is_let_in(client: Client) -> None:
    """Long before the requests of all others have had their time."""
    with knock(client, GET + b"\r\n", OWNER) as owner:  # for 30 s
        assert answer_on(owner).status == 200


# ---- From bytes to a request ---------------------------------------------------------

LENGTH = POST + b"Content-Length: "
CODING = POST + b"Transfer-Encoding:"
BODY = b'\r\n\r\n{"pin": "x"}'  # of 12 bytes, for which the answer is 401
REQUESTS = {
    "wrong PIN": (LENGTH + b"12" + BODY, 401),
    "no version": (b"GET /\r\n\r\n", 400),
    "HTTP 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "whole address": (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
    "space before the colon": (GET + b"X : y\r\n\r\n", 400),
    "folded field": (GET + b"X: y\r\n z\r\n\r\n", 400),
    "bare LF": (GET + b"X: y\nZ: z\r\n\r\n", 400),
    "bare CR": (GET + b"X: y\rZ: z\r\n\r\n", 400),
    "NUL": (GET + b"X: \0\r\n\r\n", 400),
    "coding": (CODING + b" chunked\r\n\r\n0\r\n\r\n", 501),
    "coding beside a length": (CODING + b"chunked\r\nContent-Length: 5\r\n\r\n", 501),
    "empty coding": (CODING + b"\r\n\r\n", 501),
    "length with a plus": (LENGTH + b"+12" + BODY, 400),
    "length with a zero first": (LENGTH + b"012" + BODY, 400),
    "length after a no-break space": (LENGTH + b"\xa012" + BODY, 400),
    "negative length": (LENGTH + b"-1\r\n\r\n", 400),
    "two lengths": (LENGTH + b"12, 12" + BODY, 400),
    "two length fields": (LENGTH + b"12\r\nContent-Length: 12" + BODY, 400),
    "long head": (GET + b"X: " + b"y" * 16384 + b"\r\n\r\n", 431),
    "101 fields": (GET + b"X: y\r\n" * 100 + b"\r\n", 431),
    "long head for no path": (b"GET /x HTTP/1.1\r\n" + b"X" * 20_000, 431),
    "long body": (LENGTH + b"16385\r\n\r\n", 413),
    "cut off": (LENGTH + b"13" + BODY, 400),
    "pipelined": (GET + b"\r\n" + GET + b"\r\n", 200),
    "HTTP 1.0": (b"GET / HTTP/1.0\r\n\r\n", 200),
    "query": (b"GET /?from=home HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    "100 fields": (GET + b"X: y\r\n" * 99 + b"\r\n", 200),
}


@each("data status", REQUESTS)
def test_a_request_gets_one_answer_and_a_bad_one_a_json_error(
    server: Client, data: bytes, status: int
) -> None:
    with knock(server, data) as tcp:
        tcp.shutdown(socket.SHUT_WR)
        answer = answer_on(tcp)
    assert answer.status == status
    assert answer.headers["Connection"] == "close"
    assert "Server" not in answer.headers
    if status != 200:
        assert answer.headers["Content-Type"] == "application/json"
        assert (answer.json.keys(), bool(answer.error)) == ({"error"}, True)


HEADS_TO_REFUSE = {
    "no such path": (b"x HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "no version": (b"\r\n\r\n", 400),
    "coding": (b" HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n", 501),
    "long": (b"x" * 17_000, 431),
    "cut off": (b"", 400),
}


@each("rest status", HEADS_TO_REFUSE)
def test_an_answer_to_head_has_no_body(
    server: Client, rest: bytes, status: int
) -> None:
    """Even if it is an error. Source: RFC 9110, 9.3.2."""
    with knock(server, b"HE") as tcp:
        tcp.sendall(b"AD /" + rest)
        tcp.shutdown(socket.SHUT_WR)
        head, _, body = tcp.makefile("rb").read().partition(b"\r\n\r\n")
    assert (int(head.split()[1]), body) == (status, b"")
    assert b"\r\nContent-Length: " in head


def read(data: bytes, peer: str = "10.0.0.1") -> waker.Request:
    """Parse a request that has arrived, perhaps from a proxy, and read no more."""
    proxies = frozenset({"10.0.0.1", "10.0.0.2"})
    return waker.read_request(data, pytest.fail, peer, proxies)


FORWARDED = {  # by a peer, for a client
    "two proxies": ("198.51.100.7, 203.0.113.9, 10.0.0.2", "10.0.0.1", "203.0.113.9"),
    "only proxies": ("10.0.0.2", "10.0.0.1", "10.0.0.2"),
    "rubbish": ("198.51.100.7, x, 10.0.0.2", "10.0.0.1", "10.0.0.2"),
    "scope ID": ("fe80::1%x PIN accepted", "10.0.0.1", "10.0.0.1"),
    "many made up": (20 * "10.9.9.9, " + "198.51.100.7", "10.0.0.1", "198.51.100.7"),
    "not a proxy": ("198.51.100.7", "10.0.0.3", "10.0.0.3"),
}


@each("text peer client", FORWARDED)
def test_the_client_is_the_last_that_is_no_proxy(
    capfd: pytest.CaptureFixture[str], text: str, peer: str, client: str
) -> None:
    """A proxy that is not trusted is named, as its address may have changed."""
    request = read(GET + f"X-Forwarded-For: {text}\r\n\r\n".encode(), peer)
    assert request.client == client
    named = re.findall("ip=(.*) sends X-Forw.*WAKER_TRUSTED_", capfd.readouterr().err)
    assert named == (["10.0.0.3"] if peer == "10.0.0.3" else [])


LONG = {
    "name": b"x" * 16000,
    "value": GET + b"X: " + b"x " * 8000 + b"\0",
    "coding": GET + b"Accept-Encoding: gzip" + b" " * 16000 + b"x",
    "codings": GET + b"Accept-Encoding: " + b"gzip;q=0," * 1700 + b"x",
    "type": POST[:-2] + b" " * 16000 + b"x",
    "spaces": LENGTH + b'15008\r\n\r\n{"pin":' + b" " * 15001,
    "escapes": LENGTH + b'15008\r\n\r\n{"pin":"' + b"\\\\" * 7500,
}


def test_no_request_costs_more_time_than_its_length(service: Daemon) -> None:
    """Or one of 16 KiB could stop the daemon: no other thread runs meanwhile."""
    for name, data in LONG.items():
        before = service.cpu_seconds()
        service.client.raw(data if b"\r\n\r\n" in data else data + b"\r\n\r\n")
        assert service.cpu_seconds() < before + 0.1, name  # most take 0.001


# ---- The end of a connection ---------------------------------------------------------


def test_a_slow_client_has_one_deadline_for_a_whole_request(tmp_path: Path) -> None:
    """Not for each byte."""
    program = with_limits(tmp_path, CLIENT_SECONDS=2)
    with daemon(MACHINE, program=program) as started, ExitStack() as at:
        began = time.monotonic()
        starts = (GET, GET, LENGTH + b"9000\r\n\r\n")
        clients = [at.enter_context(knock(started.client, data)) for data in starts]
        dripping = clients[1:]
        while not select.select(dripping, [], [], 0.2)[0]:
            assert time.monotonic() < began + 20
            for tcp in dripping:
                tcp.sendall(b"x")
        assert time.monotonic() > began + 1.8
        assert [answer_on(tcp).status for tcp in clients] == [408] * 3


@each("chunk pause", {"drips": (1, 0.05), "pours": (1 << 16, 0)})
def test_a_client_that_keeps_sending_is_cut_off(
    server: Client, chunk: int, pause: float
) -> None:
    """After two seconds or a megabyte: many of them could fill the memory.

    Whoever reads to the end of the answer need not wait.
    """
    with knock(server, LENGTH + b"999999999\r\n\r\n") as tcp:
        tcp.sendall(b"x" * 960_000)
        assert answer_on(tcp).status == 413
        answered = time.monotonic()
        sent = 0  # bytes; the kernel keeps some
        with suppress(ConnectionError):
            while sent < 32 << 20 and time.monotonic() < answered + 5:
                sent += tcp.send(b"x" * chunk)
                time.sleep(pause)
    assert sent < 32 << 20
    assert time.monotonic() < answered + 5
    assert pause == 0 or time.monotonic() > answered + 0.5


def test_an_answer_is_kept_for_a_slow_reader(service: Daemon) -> None:
    """By the kernel: no thread waits meanwhile, and waker may stop."""
    with socket.socket() as reader:
        idle = service.uses()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        # An Ethernet's segments. Linux lets its buffers grow with them.
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
        reader.connect((service.client.host, service.client.port))
        reader.sendall(GET + b"\r\n")
        assert select.select([reader], [], [], 20)[0]
        wait_for(lambda: service.uses() == idle)  # it would have 100 s
        assert service.stop() == 0
        reader.settimeout(20)
        assert answer_on(reader).status == 200


# ---- Many clients --------------------------------------------------------------------


def test_slow_clients_keep_nobody_out(service: Daemon) -> None:
    """Nor fill the memory, though they have sent almost a whole head."""
    client = service.client
    client.attempt(PIN)
    wait_for(lambda: service.uses()[0] == 2)
    used = service.memory()
    with ExitStack() as crowd:
        for source in ["127.0.0.1"] * 75 + places(1, 75):
            data = GET + b"X: " + b"y" * 16000
            crowd.enter_context(knock(client, data, source))
        check_owner_is_let_in(client)
        # A thread may outlive its place for a moment.
        wait_for(lambda: service.uses()[0] <= 2 + 64)
        assert service.memory() < used + (8 << 20)


def test_clients_that_send_nothing_take_no_thread(service: Daemon) -> None:
    idle = service.uses()
    with ExitStack() as crowd:
        for source in places(1, 9):
            crowd.enter_context(knock(service.client, b"", source))
        assert service.client.call("GET", "/").status == 200  # it came after them
        wait_for(lambda: service.uses() == idle)


def test_the_client_with_the_most_makes_room(come: Come, server: Client) -> None:
    """Up to six connections count as one, because a browser opens as many."""
    crowd = come(server, ["127.0.0.1"] * 100)
    browser, others = come(server, ["127.0.0.9"] * 6), come(server, places(1, 20))
    assert server.call("GET", "/").status == 200
    assert all(map(is_kept, browser + others))
    # Without an answer, or a line in the log, of which there could be thousands.
    assert {tcp.recv(1) for tcp in crowd if not is_kept(tcp)} == {b""}
    others += come(server, places(2, 37))  # six more than until the crowd has six
    assert server.call("GET", "/").status == 200
    # Crowd and browser would have made room, if six counted as more than one.
    assert not all(map(is_kept, others))


def test_chance_decides_who_makes_room(come: Come, server: Client) -> None:
    """Or an attacker could arrive in the order that keeps the owner out."""
    first = come(server, places(1, 64))
    come(server, places(2, 32))
    assert server.call("GET", "/").status == 200
    # On average, 38 of 64 stay. If always the newest went, 63 would; if the oldest, 31.
    assert sum(map(is_kept, first)) < 60
    assert any(map(is_kept, first[:32]))


def test_an_ipv6_network_counts_as_one_client(come: Come) -> None:
    """A home has a /56, and could otherwise take every place."""
    settings = MACHINE | {"WAKER_LISTEN": "[::1]:0"}
    with hosts(1) as (host,), daemon(settings, *host.command()) as started:
        ip(f"-n {host.name} -6 route add local 2001:db8::/32 dev lo")
        any_address = Path("/proc/sys/net/ipv6/ip_nonlocal_bind")
        host.run(lambda: any_address.write_text("1"))
        client = Client(started.client.port, host="::1")

        def gather(addresses: list[str]) -> list[socket.socket]:
            return host.run(lambda: come(client, addresses))

        others = gather([f"2001:db8:1:{number:x}00::1" for number in range(50)])
        gather([f"2001:db8:2::{number:x}" for number in range(1, 41)])
        assert host.run(lambda: client.call("GET", "/")).status == 200
        assert all(map(is_kept, others))


def test_clients_that_have_gone_are_not_asked(come: Come, service: Daemon) -> None:
    """Or nobody does, until a request of the others has had its ten seconds."""
    idle = service.uses()
    gone = come(service.client, ["127.0.0.1"] * 64)
    wait_for(lambda: service.uses()[0] == idle[0] + 64)
    for tcp in gone:  # by RST, at once
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tcp.close()
    wait_for(lambda: service.uses() == idle)
    come(service.client, places(1, 64))
    check_owner_is_let_in(service.client)


def test_a_request_at_the_last_moment_is_answered() -> None:
    """It has arrived, and its connection is dropped before a thread has read it.

    But nobody waits for the rest of another one.
    """
    with waker.listen(("127.0.0.1", 0)) as tcp:
        server = waker.Server(waker.App(CONFIG, ([], {})), tcp)
        server.is_stopping = True  # then a thread drops its client before it reads
        for request, status in ((GET + b"\r\n", b"HTTP/1.1 200"), (GET, b"")):
            with knock(Client(tcp.getsockname()[1]), request) as client:
                client.settimeout(5)  # seconds; a request has ten
                server.handle_request()
                assert client.recv(12) == status


# ---- The log -------------------------------------------------------------------------

EVENTS = (
    "sends X-Forwarded-For, but is not in WAKER_TRUSTED_PROXY",
    "refused POST /api/auth: 401 ",
    "PIN accepted",
    "refused GET /x'b: 404 ",
    "refused a request: 400 A request must begin with ",
    "refused a request: 400 This looks like https://; use http://, and if the browser",
    "refused a request: 400 This looks like another protocol",
)


def test_the_log_has_a_line_for_each_event_and_names_the_client() -> None:
    """Whoever types https:// by mistake is refused at once, not after ten seconds."""
    forwarded = {"X-Forwarded-For": "192.0.2.7"}
    with daemon(MACHINE | {"WAKER_LISTEN": "[::]:0"}) as started:
        client = started.client
        client.attempt("wrong PIN", forwarded)
        client.log_in().call("GET", "/api/status", None, forwarded)
        client.call("GET", "/x'b")
        for odd in (b"GET /\xff HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\x05\x01\0"):
            assert client.raw(odd)[0] == 400
        started.stop()
    for line, words in zip(started.log[1:-1], EVENTS, strict=True):
        assert line.startswith(f"ip=127.0.0.1 {words}")


def test_a_log_that_nobody_reads_stops_nothing(service: Daemon) -> None:
    client, log = service.client, service.process.stderr
    assert log
    request = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 900)
    for _ in range(90):  # lines of about 900 bytes; a pipe has 65,536
        with knock(client, request) as tcp:
            assert select.select([tcp], [], [], 20)[0], "it waits for its log"
            assert answer_on(tcp).status == 404
    log.close()
    client.log_in()
    service.process.terminate()
    assert service.process.wait(60) == 0


CROWD = """
import fcntl, os, threading, waker
from concurrent.futures import ThreadPoolExecutor

reads, writes = os.pipe2(os.O_DIRECT)  # each line takes a page
fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
os.dup2(writes, 2)
together = threading.Barrier(20)

def write(_):
    together.wait()
    waker.log("x" * 900)

with ThreadPoolExecutor(20) as pool:
    for _ in range(300):
        list(pool.map(write, range(20)))
        os.read(reads, 4096)
"""


def test_threads_that_log_at_once_do_not_wait_for_a_reader() -> None:
    """There is room for one of their lines, which each of them may see."""
    run_python(CROWD)


CLOSED = """
import os, waker

os.closerange(0, 3)
waker.main(["state"])
assert {os.readlink(f"/proc/self/fd/{n}") for n in range(3)} == {"/dev/null"}
"""


def test_no_line_of_the_log_goes_to_a_client() -> None:
    """Even if whoever starts waker leaves descriptors 0 to 2 to its connections."""
    run_python(CLOSED)


# ---- A difficult system --------------------------------------------------------------


def test_an_idle_daemon_does_not_wake_up(service: Daemon) -> None:
    idle = service.uses()
    service.client.log_in().status()
    wait_for(lambda: service.uses() == idle)  # its threads have ended

    def sleeps() -> bool:
        before = service.count_naps()
        time.sleep(1.2)  # more than any usual interval
        return service.count_naps() == before

    wait_for(sleeps, seconds=8)


def test_without_a_free_descriptor_it_waits_for_one(service: Daemon) -> None:
    """And keeps no processor busy meanwhile."""
    pid = service.process.pid
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (service.uses()[1], usual[1]))
    with knock(service.client, GET + b"\r\n") as tcp:
        begun = service.count_naps()
        wait_for(lambda: service.count_naps() > begun + 5)  # between attempts
        assert service.busy(1) < 0.3
        assert is_kept(tcp)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
        assert answer_on(tcp).status == 200


def test_few_descriptors_do_not_let_one_address_keep_others_out(
    come: Come, tmp_path: Path
) -> None:
    """There are fewer than places, as after `ulimit -n 64`."""
    limited = need("prlimit"), "--nofile=64"
    program = with_limits(tmp_path, CLIENT_SECONDS=100)
    with daemon(MACHINE, *limited, program=program) as started:
        come(started.client, ["127.0.0.1"] * 100)
        check_owner_is_let_in(started.client)


DIFFICULT = """
import errno, socket, sys

def refuse(event, arguments):
    if event == "socket.__new__" and arguments[1] == socket.AF_INET6:
        raise OSError(errno.EAFNOSUPPORT, "no IPv6")
    if event.startswith("socket.gethostby"):
        raise RuntimeError("a look-up may take minutes")

sys.addaudithook(refuse)
"""


def test_it_starts_without_ipv6_and_looks_up_no_name(tmp_path: Path) -> None:
    """As with the kernel's option ipv6.disable=1, and before there is a network."""
    tmp_path.joinpath("sitecustomize.py").write_text(DIFFICULT)
    settings = {"WAKER_LISTEN": "[::]:0", "PYTHONPATH": str(tmp_path)}
    with daemon(MACHINE | settings) as started:
        assert started.client.call("GET", "/").status == 200
