"""HTTP beyond test_promises.py: ambiguous requests, crowds, and difficult systems."""

import fcntl
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    GET,
    MACHINE,
    MODULE,
    PIN,
    POST,
    Client,
    answer_on,
    daemon,
    environment,
    knock,
    need,
    need_root,
    places,
    preload,
    running,
    wait_for,
)
from conftest import is_open as is_listening
from homelab import bind
from machine import Frozen
from namespaces import hosts, ip

import waker

CONFIG = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())


@pytest.fixture
def server() -> Iterator[Client]:
    """A client of a daemon whose machine nobody watches."""
    with running(CONFIG) as client:
        yield client


RESET = struct.pack("ii", 1, 0)  # struct linger: hang up by RST, at once
Come = Callable[[Client, list[str]], list[socket.socket]]


@pytest.fixture
def come() -> Iterator[Come]:
    """Return a function that sends half a request from each of these addresses."""
    with ExitStack() as crowd:
        yield lambda client, sources: [
            crowd.enter_context(knock(client, GET, source)) for source in sources
        ]


def is_open(tcp: socket.socket) -> bool:
    """Return whether nothing has arrived, not even the end."""
    return not select.select([tcp], [], [], 0)[0]


# ---- From bytes to a request ---------------------------------------------------------


def read(data: bytes) -> waker.Request:
    """Parse a request that has arrived from a proxy; to read on would be an error."""
    proxies = frozenset({"10.0.0.1", "10.0.0.2"})
    return waker.read_request(data, pytest.fail, "10.0.0.1", proxies)


LENGTH = POST + b"Content-Length: "
CODING = POST + b"Transfer-Encoding:"
AMBIGUOUS = {
    "whole address": (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
    "length with a zero first": (LENGTH + b"05\r\n\r\n12345", 400),
    "length after a no-break space": (LENGTH + b"\xa05\r\n\r\n12345", 400),
    "two length fields": (LENGTH + b"5\r\nContent-Length: 5\r\n\r\n12345", 400),
    "coding beside a length": (CODING + b"chunked\r\nContent-Length: 5\r\n\r\n", 501),
    "empty coding": (CODING + b"\r\n\r\n", 501),
}


@pytest.mark.parametrize(("data", "status"), AMBIGUOUS.values(), ids=[*AMBIGUOUS])
def test_an_ambiguous_head_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(waker.Fault) as refusal:
        read(data)
    assert refusal.value.status == status


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("198.51.100.7, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("198.51.100.7, x, 10.0.0.2", "10.0.0.2"),
        ("fe80::1%x PIN accepted", "10.0.0.1"),
        (20 * "203.0.113.9, " + "198.51.100.7", "198.51.100.7"),
    ],
    ids=["two proxies", "rubbish", "scope ID", "many made up"],
)
def test_the_client_is_the_last_that_is_no_proxy(forwarded: str, client: str) -> None:
    data = GET + f"X-Forwarded-For: {forwarded}\r\n\r\n".encode()
    assert read(data).client == client


@pytest.mark.parametrize("proxies", ["", "127.0.0.1"], ids=["unknown", "trusted"])
def test_a_proxy_that_is_not_trusted_is_named(proxies: str) -> None:
    """As one in a container whose address has changed. But not at each status."""
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": proxies}) as started:
        client, forwarded = started.client.log_in(), {"X-Forwarded-For": "192.0.2.7"}
        client.call("GET", "/api/status", None, forwarded)
        Client(client.port).attempt("wrong PIN", forwarded)
        started.stop()
    named = [line for line in started.log if "WAKER_TRUSTED_PROXY" in line]
    assert len(named) == (not proxies)
    assert all(line.startswith("ip=127.0.0.1 sends X-Forw") for line in named)


@pytest.mark.timeout(60)  # an exponential pattern would take years
@pytest.mark.parametrize(
    "data",
    [
        b"x" * 16000,
        GET + b"X: " + b"x " * 8000 + b"\0",
        GET + b"Accept-Encoding: gzip" + b" " * 16000 + b"x",
        GET + b"Accept-Encoding: " + b"gzip;q=0," * 1700 + b"x",
        POST[:-2] + b" " * 16000 + b"x",
        LENGTH + b'15008\r\n\r\n{"pin":' + b" " * 15001,
        LENGTH + b'15008\r\n\r\n{"pin":"' + b"\\\\" * 7500,
    ],
    ids=["name", "value", "coding", "codings", "type", "spaces", "escapes"],
)
def test_no_request_costs_more_time_than_its_length(data: bytes) -> None:
    """Or one of 16 KiB could stop the daemon: no other thread runs meanwhile."""
    began = time.thread_time()
    with suppress(waker.Fault):
        request = read(data if b"\r\n\r\n" in data else data + b"\r\n\r\n")
        waker.GZIP.search(request.fields.get("accept-encoding", ""))
        waker.parse_body(request, "pin", str)
    assert time.thread_time() < began + 0.1  # seconds; most take 0.001


FIRST_BYTES = {
    "TLS": (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "https://"),
    "SOCKS": (b"\x05\x01\0", "another protocol"),
}


@pytest.mark.parametrize(("data", "seen"), FIRST_BYTES.values(), ids=[*FIRST_BYTES])
def test_what_is_no_http_is_refused_at_once(data: bytes, seen: str) -> None:
    """Or whoever types https:// by mistake would wait ten seconds."""
    with daemon(MACHINE) as started:
        began = time.monotonic()
        with knock(started.client, data) as tcp:
            assert answer_on(tcp).status == 400
        assert time.monotonic() < began + 5
        started.stop()
    line = f"ip=127.0.0.1 refused a request: 400 This looks like {seen}"
    assert started.log[1].startswith(line)


# ---- The end of a connection ---------------------------------------------------------


def test_a_client_that_keeps_sending_is_answered_and_cut_off_after_two_seconds(
    server: Client,
) -> None:
    """Whoever reads until the end of the answer need not wait so long."""
    with knock(server, POST + b"Content-Length: 999999\r\n\r\n") as tcp:
        tcp.sendall(b"x" * 960_000)
        assert answer_on(tcp).status == 413
        answered = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < answered + 9:
                tcp.sendall(b"x")
                time.sleep(0.05)  # it drips
    assert answered + 0.5 < time.monotonic() < answered + 5


def test_a_client_that_pours_is_cut_off_after_a_megabyte(server: Client) -> None:
    """Or many of them could fill the memory in those two seconds."""
    with knock(server, POST + b"Content-Length: 999999999\r\n\r\n") as tcp:
        assert answer_on(tcp).status == 413
        sent = 0
        with suppress(ConnectionError):
            while sent < 32 << 20:  # bytes; more than the kernel would keep
                sent += tcp.send(b"x" * 65536)
    assert sent < 32 << 20


def test_an_answer_is_kept_for_a_slow_reader() -> None:
    """By the kernel: no thread waits meanwhile, and waker may stop."""
    with daemon(MACHINE) as started, socket.socket() as reader:
        idle = started.uses()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        # An Ethernet's segments. Linux lets its buffers grow with them.
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)
        reader.connect((started.client.host, started.client.port))
        reader.sendall(GET + b"\r\n")
        assert select.select([reader], [], [], 20)[0]
        wait_for(lambda: started.uses() == idle, seconds=8)  # it would have 10
        assert started.stop() == 0
        reader.settimeout(20)
        assert answer_on(reader).status == 200


# ---- Many clients --------------------------------------------------------------------


def test_chance_decides_who_makes_room(come: Come, server: Client) -> None:
    """Or an attacker could arrive in the order that keeps the owner out."""
    first = come(server, places(1, 64))
    come(server, places(2, 32))
    assert server.call("GET", "/").status == 200
    # On average, 38 of 64 stay. If always the newest went, 63 would; if the oldest, 31.
    assert sum(map(is_open, first)) < 60
    assert any(map(is_open, first[:32]))


def test_clients_that_have_gone_are_not_asked_to_make_room(come: Come) -> None:
    """Or nobody does, until a request of the others has had its ten seconds."""
    with daemon(MACHINE) as started:
        idle = started.uses()
        gone = come(started.client, ["127.0.0.1"] * 64)
        wait_for(lambda: started.uses()[0] == idle[0] + 64)
        for tcp in gone:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            tcp.close()
        wait_for(lambda: started.uses() == idle)
        come(started.client, places(1, 64))
        began = time.monotonic()
        with knock(started.client, GET + b"\r\n", "127.0.0.9") as owner:
            assert answer_on(owner).status == 200
        assert time.monotonic() < began + 5


def test_a_request_that_arrives_at_the_last_moment_is_answered(come: Come) -> None:
    """Its thread has to make room, and has had no time to read it."""
    with daemon(MACHINE) as started:
        tasks = Path(f"/proc/{started.process.pid}/task")
        idle = {*tasks.iterdir()}
        waiting = come(started.client, places(1, 64))

        def is_settled() -> bool:
            return started.uses()[0] == len(idle) + 64 and started.busy(0.2) == 0

        wait_for(is_settled)
        frozen = Frozen({*tasks.iterdir()} - idle)
        for tcp in waiting:
            tcp.sendall(b"\r\n")
        naps = started.count_naps()
        with knock(started.client, GET + b"\r\n", "127.0.0.9") as newcomer:
            wait_for(lambda: started.count_naps() > naps + 5)  # several were chosen
            frozen.thaw()
            assert [answer_on(tcp).status for tcp in (*waiting, newcomer)] == [200] * 65


def test_six_connections_count_as_one(come: Come, server: Client) -> None:
    """Or a browser, which opens six, would have to make room for strangers."""
    browsers = [come(server, [address] * 6) for address in places(1, 10)]
    come(server, places(2, 4))
    come(server, places(3, 9))  # each one ends another, by chance
    assert server.call("GET", "/").status == 200
    # By another rule, each browser loses one; by chance, in 1 of 5,000 cases.
    assert [sum(map(is_open, each)) for each in browsers] != [5] * 10


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
        assert all(map(is_open, others))


# ---- A difficult system --------------------------------------------------------------


def test_few_descriptors_do_not_let_one_address_keep_others_out(come: Come) -> None:
    """There are fewer than places, as after `ulimit -n 64`."""
    with daemon(MACHINE, need("prlimit"), "--nofile=64") as started:
        come(started.client, ["127.0.0.1"] * 100)
        began = time.monotonic()
        with knock(started.client, GET + b"\r\n", "127.0.0.9") as owner:
            assert answer_on(owner).status == 200
        assert time.monotonic() < began + 5  # the others have their ten seconds


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


NO_IPV6 = """
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int socket(int domain, int type, int protocol)
{
    if (domain != AF_INET6)
        return syscall(SYS_socket, domain, type, protocol);
    errno = EAFNOSUPPORT;
    return -1;
}
"""


def test_the_default_address_works_on_a_box_without_ipv6(tmp_path: Path) -> None:
    """As with the kernel's option ipv6.disable=1."""
    settings = {"WAKER_LISTEN": "[::]:0"} | preload(tmp_path, NO_IPV6)
    with daemon(MACHINE | settings) as started:
        assert started.client.call("GET", "/").status == 200


# Whoever may write pauses before doing so, as on a busy box.
SLOW_WRITER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/select.h>
#include <unistd.h>

int select(int n, fd_set *in, fd_set *out, fd_set *other, struct timeval *limit)
{
    int (*real)(int, fd_set *, fd_set *, fd_set *, struct timeval *);
    real = dlsym(RTLD_NEXT, "select");
    int ready = real(n, in, out, other, limit);
    usleep(100000);
    return ready;
}
"""


def test_threads_that_log_at_once_do_not_wait_for_a_reader(tmp_path: Path) -> None:
    """There is room for four of their lines, which each of them may see."""
    with daemon(MACHINE | preload(tmp_path, SLOW_WRITER)) as started, ExitStack() as at:
        assert started.process.stderr
        fcntl.fcntl(started.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        request = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 900)
        crowd = [at.enter_context(knock(started.client, request)) for _ in range(20)]
        for tcp in crowd:
            assert select.select([tcp], [], [], 20)[0], "it waits for its log"
            assert answer_on(tcp).status == 404


def test_no_line_of_the_log_goes_to_a_client() -> None:
    """Even if whoever starts waker leaves descriptors 0 to 2 to its connections."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client, settings = Client(port), {"WAKER_PIN": PIN, "WAKER_LISTEN": f"[::]:{port}"}
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *MODULE]
    variables = environment(MACHINE | settings)
    with subprocess.Popen(command, cwd=CHECKOUT, env=variables) as process:
        try:
            wait_for(lambda: is_listening("127.0.0.1", port))
            with ExitStack() as crowd:
                waiting = [crowd.enter_context(knock(client, GET)) for _ in range(3)]
                assert client.call("GET", "/x").status == 404  # which is logged
                for tcp in waiting:
                    tcp.sendall(b"\r\n")
                    assert answer_on(tcp).status == 200
        finally:
            process.terminate()
    assert process.returncode == 0
