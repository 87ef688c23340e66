"""What users would miss, seen from outside. Whatever changes inside, this must hold.

waker.py runs as a program here. The tests know its settings, commands, output and
answers, but import nothing from it. Only LIMITS quotes it.
"""

import contextlib
import itertools
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import (
    CHECKOUT,
    GET,
    LIMITS,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    POST,
    Client,
    answer_on,
    daemon,
    environment,
    knock,
    make,
    need,
    need_root,
    places,
    run_waker,
    shortened,
    stepping_clock,
    wait_for,
    wait_for_child,
)
from homelab import bind
from machine import (
    CLOSED,
    MAC,
    OPEN,
    SILENT,
    Frozen,
    Machine,
    is_gone,
    slow_to_open,
    wait_until,
    wait_until_shown,
)
from namespaces import Home, ip, udp_packets
from ssh_servers import tcp_server

WAKER = CHECKOUT / "waker.py"
PACKET = b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16
RIGHT = PASSPHRASE.encode()
OTHER_KEY = (  # which no initrd has
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"
)

# ---- What version 3 changes ----------------------------------------------------------

SETTINGS = (
    "PIN HOMELAB_MAC HOMELAB_HOST HOMELAB_NAME HOMELAB_BROADCAST INITRD_SSH_PORT"
    " SYSTEM_SSH_PORT SSH_USER SSH_KEY SSH_HOST_KEY LISTEN TRUSTED_PROXY"
)
TOKEN_MEMBERS = {"token", "expires_in", "status"}
STATUS_MEMBERS = {
    *("name", "state", "reachable", "initrd_ssh_open", "system_ssh_open"),
    *("usual_seconds", "start"),
}
START_MEMBERS = {
    *("phase", "outcome", "message", "hint", "seconds", "sent", "woke", "times")
}
# What our cryptroot-unlock for systemd says, apart from Debian's words.
SAYS = {
    "careful": "cryptroot-unlock: systemd may give up after another wrong passphrase",
    "open": "cryptroot-unlock: every disk is open",
    "gave up": "cryptroot-unlock: gave up on root",
    "booted": "cryptroot-unlock: the system has booted",
    "cannot": "cryptroot-unlock: a helper is missing",
    "old": "waker: asks root",  # the script of waker 2
}


def test_each_limit_that_takes_minutes_is_as_documented(tmp_path: Path) -> None:
    """LIMITS has the figures of the docs."""
    shortened(tmp_path, **dict.fromkeys(LIMITS, 1))


@pytest.fixture(scope="session")
def api() -> Iterator[Client]:
    """A client of a daemon whose machine nobody watches. Many tests share it.

    Each may be another client, with attempts of its own, behind a trusted proxy.
    """
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        yield started.client


Fields = dict[str, str]
NUMBERS = itertools.count(1)


def somebody() -> Fields:
    """Return the fields of a request by a client that was never seen before."""
    return {"X-Forwarded-For": "192.0.{}.{}".format(*divmod(next(NUMBERS), 256))}


# ---- The interface: page, PIN, token, errors -----------------------------------------


def test_the_page_and_its_icon_need_no_token(api: Client) -> None:
    page = api.call("GET", "/")
    assert (page.status, page.body) == (200, CHECKOUT.joinpath("ui.html").read_bytes())
    assert page.headers["Content-Type"].startswith("text/html")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    icon = api.call("GET", "/apple-touch-icon.png")
    assert icon.status == 200
    assert icon.body.startswith(b"\x89PNG")
    for path, got in (("/", page), ("/apple-touch-icon.png", icon)):
        head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n"
        assert api.raw(head.encode()) == (200, b"")
        answer = api.call("HEAD", path)
        assert answer.headers["Content-Length"] == str(len(got.body)), path


def test_the_pin_is_exchanged_for_a_token_of_15_minutes(api: Client) -> None:
    for pasted in (PIN, f" {PIN}\n"):
        answer = api.attempt(pasted, somebody())
        assert answer.status == 200
        assert answer.json.keys() == TOKEN_MEMBERS
        assert answer.json["expires_in"] == 900
        assert answer.headers["Content-Type"] == "application/json"
        Client(api.port, answer.json["token"]).status()


def test_the_eleventh_attempt_in_a_minute_is_refused_for_that_client(
    api: Client,
) -> None:
    """Right and wrong PINs count alike, a malformed request does not."""
    client = somebody()
    assert api.call("POST", "/api/auth", b"{}", client).status == 400
    statuses = [api.attempt(pin, client).status for pin in [PIN, "wrong PIN"] * 5]
    assert statuses == [200, 401] * 5
    answer = api.attempt(PIN, client)
    assert answer.status == 429
    assert answer.error
    assert 0 < int(answer.headers["Retry-After"]) <= 60
    assert api.attempt(PIN, somebody()).status == 200


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("198.51.100.1", "198.51.100.2", False),
        ("198.51.100.3", "::ffff:198.51.100.3", True),
        ("2001:db8:0:1::1", "2001:db8:0:ff:ffff::1", True),
        ("2001:db8:1:1::1", "2001:db8:1:100::1", False),
    ],
    ids=["IPv4", "mapped IPv4", "same IPv6 /56", "another IPv6 /56"],
)
def test_attempts_are_counted_by_address_or_network(
    api: Client, one: str, other: str, is_same: bool
) -> None:
    for _ in range(10):
        assert api.attempt("wrong PIN", {"X-Forwarded-For": one}).status == 401
    answer = api.attempt("wrong PIN", {"X-Forwarded-For": other})
    assert answer.status == (429 if is_same else 401)


def test_only_the_proxys_word_about_its_client_is_believed() -> None:
    """The last address that is no proxy counts; the ones before may be made up."""
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1,10.0.0.1"}) as started:
        client = started.client
        behind = [f"192.0.2.{n}, 203.0.113.9, 10.0.0.1" for n in range(11)]
        statuses = [
            client.attempt(PIN, {"X-Forwarded-For": by}).status for by in behind
        ]
    assert statuses == [200] * 10 + [429]
    with daemon(MACHINE) as started:
        statuses = [started.client.attempt(PIN, somebody()).status for _ in range(11)]
    assert statuses == [200] * 10 + [429]


def test_a_minute_after_the_first_attempt_there_is_room_for_one(tmp_path: Path) -> None:
    program = shortened(tmp_path, attempt_seconds=3)
    with daemon(MACHINE, program=program) as started:
        client, began = started.client, time.monotonic()
        for _ in range(10):
            assert client.attempt(PIN).status == 200
        assert int(client.attempt(PIN).headers["Retry-After"]) <= 3
        wait_for(lambda: client.attempt(PIN).status == 200)
        assert time.monotonic() > began + 2


def test_a_token_ends_after_its_time(tmp_path: Path) -> None:
    with daemon(MACHINE, program=shortened(tmp_path, token_seconds=3)) as started:
        began, client = time.monotonic(), started.client.log_in()
        assert client.call("DELETE", "/api/start").status == 409  # it is valid
        wait_for(lambda: client.call("DELETE", "/api/start").status == 401)
        assert time.monotonic() > began + 3


def test_64_tokens_are_valid_and_a_new_one_ends_the_oldest(api: Client) -> None:
    tokens = [api.attempt(PIN, somebody()).json["token"] for _ in range(65)]
    requests = [
        Client(api.port, token).call("DELETE", "/api/start") for token in tokens
    ]
    assert [answer.status for answer in requests] == [401] + [409] * 64
    assert requests[0].error == "Invalid or expired token"
    assert len({*tokens}) == 65
    assert min(map(len, tokens)) >= 43  # 32 bytes in base64


PROTECTED = (
    "GET /api/status",
    "POST /api/wol",
    "POST /api/unlock",
    "POST /api/start",
    "DELETE /api/start",
)


@pytest.mark.parametrize("request_line", PROTECTED)
def test_everything_else_needs_a_token_before_its_body_is_read(
    api: Client, request_line: str
) -> None:
    method, path = request_line.split()
    token = api.attempt(PIN, somebody()).json["token"]
    for text in ("", "Bearer", token, f"Basic {token}", f"Bearer {token}x"):
        fields = {"Authorization": text} if text else {}
        answer = api.call(method, path, b"x" * 20_000, fields)
        assert answer.status == 401, text
        assert answer.error == "Invalid or expired token"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/auth/", None),
        ("GET", "/ui.html", None),
        ("POST", "/API/auth", None),
        ("POST", "/", {"GET", "HEAD"}),
        ("GET", "/api/auth", {"POST"}),
        ("PUT", "/api/status", {"GET", "HEAD"}),
        ("BREW", "/api/start", {"POST", "DELETE"}),
    ],
)
def test_an_unknown_path_or_method_is_an_error(
    api: Client, method: str, path: str, allowed: set[str] | None
) -> None:
    answer = api.call(method, path, b"x" * 20_000)
    assert answer.status == (405 if allowed else 404)
    assert answer.error
    if allowed:
        assert {*answer.headers["Allow"].split(", ")} == allowed


BODIES: dict[str, tuple[bytes, str, int]] = {
    "too long": (b"x" * 16385, "application/json", 413),
    "plain text": (b'{"%s": "x"}', "text/plain", 415),
    "empty": (b"", "application/json", 400),
    "no JSON": (b"%s", "application/json", 400),
    "another member": (b'{"x": "x"}', "application/json", 400),
    "two members": (b'{"%s": "x", "x": "x"}', "application/json", 400),
    "duplicate": (b'{"%s": "x", "%s": "x"}', "application/json", 400),
    "text behind it": (b'{"%s": "x"} x', "application/json", 400),
    "number": (b'{"%s": 12345678}', "application/json", 400),
    "empty text": (b'{"%s": ""}', "application/json", 400),
    "surrogate": (b'{"%s": "\\ud800"}', "application/json", 400),
    "not UTF-8": (b'{"%s": "\xff"}', "application/json", 400),
    "nested": (b'{"%s": ' + b"[" * 16000, "application/json", 400),
}


@pytest.mark.parametrize(("body", "kind", "status"), BODIES.values(), ids=[*BODIES])
@pytest.mark.parametrize("path", ["auth", "unlock", "start"])
def test_a_malformed_body_is_refused(
    api: Client, path: str, body: bytes, kind: str, status: int
) -> None:
    fields = somebody()
    fields["Authorization"] = f"Bearer {api.attempt(PIN, fields).json['token']}"
    member = b"pin" if path == "auth" else b"passphrase"
    fields["Content-Type"] = kind
    answer = api.call("POST", f"/api/{path}", body.replace(b"%s", member), fields)
    assert answer.status == status
    assert answer.error


@pytest.mark.parametrize("path", ["unlock", "start"])
@pytest.mark.parametrize(
    "passphrase", ["a" * 513, "ä" * 257, "a\n", "a\0b", "\x7f", "\x85"], ids=ascii
)
def test_what_cannot_be_a_passphrase_is_refused(
    api: Client, path: str, passphrase: str
) -> None:
    fields = {"Authorization": f"Bearer {api.attempt(PIN, somebody()).json['token']}"}
    answer = api.call("POST", f"/api/{path}", {"passphrase": passphrase}, fields)
    assert answer.status == 400
    assert "passphrase" in answer.error


# ---- The machine: status and magic packet --------------------------------------------

STATES = pytest.mark.parametrize(
    ("initrd", "system", "expected"),
    [
        (SILENT, SILENT, ("off", False, False, False)),
        (CLOSED, SILENT, ("booting", True, False, False)),
        (OPEN, CLOSED, ("locked", True, True, False)),
        (CLOSED, OPEN, ("up", True, False, True)),
        (OPEN, OPEN, ("up", True, True, True)),
    ],
    ids=["off", "booting", "locked", "up", "both open"],
)
STATE_MEMBERS = "state", "reachable", "initrd_ssh_open", "system_ssh_open"


@STATES
def test_the_status_shows_what_the_ports_do(
    machine: Machine, initrd: str, system: str, expected: tuple[object, ...]
) -> None:
    machine.show(initrd, system)
    with daemon(machine.settings()) as started:
        status = started.client.log_in().status()
    assert status.keys() == STATUS_MEMBERS
    assert tuple(status[name] for name in STATE_MEMBERS) == expected
    assert (status["name"], status["start"]) == ("Home server", None)
    # The command needs no more than address and ports.
    names = "WAKER_HOMELAB_HOST", "WAKER_INITRD_SSH_PORT", "WAKER_SYSTEM_SSH_PORT"
    settings = {name: machine.settings()[name] for name in names}
    ended = run_waker("state", settings=settings)
    assert (ended.returncode, ended.stderr, ended.stdout.count("\n")) == (0, "", 1)
    assert json.loads(ended.stdout) == dict(zip(STATE_MEMBERS, expected, strict=True))


def says(banner: bytes) -> contextlib.AbstractContextManager[int]:
    """Listen, and send each client a banner; yields the port."""
    return tcp_server(lambda tcp: tcp.sendall(banner))


@pytest.mark.parametrize(
    ("banner", "state"),
    [
        (b"SSH-2.0-dropbear_2022.83\r\n", "locked"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "up"),
        (b"", "booting"),
    ],
    ids=["dropbear", "OpenSSH", "no banner"],
)
def test_one_port_for_both_is_told_apart_by_its_banner(
    banner: bytes, state: str
) -> None:
    with says(banner) as port:
        where = {"WAKER_HOMELAB_HOST": "127.0.0.1"}
        for name in ("WAKER_INITRD_SSH_PORT", "WAKER_SYSTEM_SSH_PORT"):
            where[name] = str(port)
        assert json.loads(run_waker("state", settings=where).stdout)["state"] == state


def test_a_check_that_fails_by_itself_is_no_state_of_the_machine() -> None:
    """Linux lets nobody connect to a broadcast address."""
    where = {"WAKER_HOMELAB_HOST": "127.255.255.255"}
    seen = json.loads(run_waker("state", settings=where).stdout)
    assert (seen["state"], seen["reachable"]) == ("unknown", False)


def test_the_status_of_a_silent_machine_comes_within_a_second(machine: Machine) -> None:
    machine.make_keys()

    def take_time() -> float:
        began = time.monotonic()
        assert client.status()["state"] == "off"
        return time.monotonic() - began

    with machine.waker(system_seconds=0) as started:  # both ports, each time
        client = started.client.log_in()
        # A busy computer may need a second attempt.
        wait_for(take_time, lambda seconds: seconds < 1, seconds=8)
        client.start()
        wait_for(take_time, lambda seconds: 0.5 < seconds < 1, seconds=8)


def test_a_second_of_requests_costs_one_check() -> None:
    """OpenSSH penalises clients that connect too often.

    If both have one port, a check waits 0.4 s for the banner of this server, so that
    other requests come in the meantime.
    """
    with bind("127.0.0.1", 0) as mute, ThreadPoolExecutor(9) as pool:
        mute.listen(99)
        where = {"WAKER_HOMELAB_HOST": "127.0.0.1"}
        for name in ("WAKER_INITRD_SSH_PORT", "WAKER_SYSTEM_SSH_PORT"):
            where[name] = str(mute.getsockname()[1])
        with daemon(MACHINE | where) as started:
            began, client = time.monotonic(), started.client.log_in()

            def ask(_: int) -> set[str]:
                seen = set()
                while time.monotonic() < began + 2.5:
                    seen.add(client.status()["state"])
                return seen

            assert {"booting"}.union(*pool.map(ask, range(9))) == {"booting"}
            seconds = time.monotonic() - began
        mute.setblocking(False)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                mute.accept()[0].close()
                count += 1
    assert count <= seconds + 1


def test_a_magic_packet_is_sent_three_times(machine: Machine) -> None:
    with machine.waker() as started:
        answer = started.client.log_in().call("POST", "/api/wol")
        assert (answer.status, answer.json["success"]) == (200, True)
        assert answer.json.keys() == {"success", "message"}
        assert MAC in answer.json["message"]
        assert machine.packets() == [PACKET] * 3


@pytest.mark.parametrize("broadcast", [None, "192.168.77.255"], ids=str)
def test_the_packet_leaves_by_the_interface_that_leads_to_the_machine(
    home: Home, broadcast: str | None
) -> None:
    """Without configuration; to UDP port 9."""
    router, machine, provider = home
    settings = MACHINE | {"WAKER_HOMELAB_HOST": "192.168.77.20"}
    if broadcast:
        settings["WAKER_HOMELAB_BROADCAST"] = broadcast
    at_machine, at_provider = machine.capture(), provider.capture()
    with at_machine, at_provider, daemon(settings, *router.command()) as started:
        answer = router.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        expected = f"{broadcast or '255.255.255.255'}:9", PACKET
        assert udp_packets(at_machine) == [expected] * 3
        assert udp_packets(at_provider) == []
    assert "192.168.77.1" in answer.json["message"]


def test_a_packet_that_cannot_be_sent_is_an_error(home: Home) -> None:
    settings = MACHINE | {"WAKER_HOMELAB_HOST": "203.0.113.20"}
    isolated = home[2]
    with daemon(settings, *isolated.command()) as started:
        answer = isolated.run(lambda: started.client.log_in().call("POST", "/api/wol"))
    assert answer.status == 500
    assert re.match("Failed to send WOL packet: .", answer.error)


# ---- Settings and commands -----------------------------------------------------------


def test_all_mistakes_are_reported_together_and_no_value(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text(
        "WAKER_PIN=s3crt\nWAKER_HOMELAB_MAC=\nWAKER_INITRD_SSH_PORT='s3crt'\n"
    )
    settings = {"WAKER_LISTEN": "s3crt", "WAKER_HOMELAB_NAM": "s3crt"}
    for command in ((), ("serve",), ("check",)):
        ended = run_waker("--env-file", str(file), *command, settings=settings)
        assert (ended.returncode, ended.stdout) == (78, "")
        names = {line.split()[0] for line in ended.stderr.splitlines()}
        wrong = "PIN HOMELAB_MAC HOMELAB_HOST INITRD_SSH_PORT LISTEN HOMELAB_NAM"
        assert names == {f"WAKER_{name}" for name in wrong.split()}
        assert "s3" not in ended.stderr


def test_the_setting_that_only_waker_2_had_is_ignored(tmp_path: Path) -> None:
    """An upgrade locks nobody out."""
    file = tmp_path / "waker.env"
    file.write_text("WAKER_HOMELAB_HOST=127.0.0.1\nWAKER_INITRD=s3crt\n")
    ended = run_waker("--env-file", str(file), "state")
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1)
    assert re.fullmatch("WAKER_INITRD has no effect.*\n", ended.stderr)
    assert "s3crt" not in ended.stderr


WRONG = {
    "PIN": ("2468101", " 24681012", "x" * 129),
    "HOMELAB_MAC": ("52:54:00:12:99", "00:00:00:00:00:00", "01:00:5e:00:00:01"),
    "HOMELAB_HOST": ("nas.lan", "192.0.2.256", "fe80::1%eth0"),
    "HOMELAB_BROADCAST": ("::2", "192.0.2", "all"),
    "INITRD_SSH_PORT": ("65536", "-2222", "by name"),
    "SYSTEM_SSH_PORT": ("65537", "-22", "22.0"),
    "SSH_HOST_KEY": (
        "SHA256:c5CSjps6Y5OSk8aY",
        OTHER_KEY[:-4],
        f"@revoked {OTHER_KEY}",
    ),
    "LISTEN": ("8099", "127.0.0:8099", "127.0.0.9:65536"),
    "TRUSTED_PROXY": ("nginx", "192.0.2.1/24", "192.0.2.1;192.0.2.2"),
}


@pytest.mark.parametrize("column", range(3))
def test_each_wrong_value_is_refused_by_its_name(column: int) -> None:
    settings = {f"WAKER_{name}": values[column] for name, values in WRONG.items()}
    ended = run_waker("serve", settings=settings)
    assert ended.returncode == 78
    for name, value in settings.items():
        assert re.search(rf"(?m)^{name}\b", ended.stderr), name
        assert value not in ended.stderr


def test_an_ipv6_address_needs_a_broadcast_address() -> None:
    """From which the packet goes to the machine's network."""
    settings = MACHINE | {"WAKER_PIN": PIN, "WAKER_HOMELAB_HOST": "2001:db8::1"}
    ended = run_waker("check", settings=settings)
    assert ended.returncode == 78
    assert "WAKER_HOMELAB_BROADCAST" in ended.stderr


@pytest.mark.parametrize(
    "line",
    ["export WAKER_PIN=s3crt", "WAKER_PIN='s3crt", "WAKER_PIN=s3crt\nWAKER_PIN=s3crt"],
    ids=["export", "open quote", "twice"],
)
def test_a_line_that_could_be_misread_is_refused_by_its_number(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "waker.env"
    file.write_text(f"# a comment\n\n{line}\n")
    ended = run_waker("--env-file", str(file))
    assert ended.returncode == 78
    number = 2 + len(line.splitlines())
    assert re.search(rf"waker\.env, line {number}\b", ended.stderr)
    assert "s3crt" not in ended.stderr


def test_settings_come_from_a_file_and_the_environment_wins(machine: Machine) -> None:
    """A relative path starts at the folder of the file."""
    file = machine.ask().folder / "waker.env"
    lines = [f'{name} = "{value}"' for name, value in machine.settings().items()]
    lines += ["# a comment", "", "TZ=UTC # another program's", f"WAKER_PIN='{PIN}'"]
    file.write_text("\n".join(lines).replace(str(machine.ssh_key), "ssh_key"))
    by_file = "--env-file", str(file)
    settings = {"WAKER_HOMELAB_NAME": "another"}
    with daemon(settings, program=(sys.executable, str(WAKER), *by_file)) as started:
        client = started.client.log_in()
        assert client.status()["name"] == "another"
        assert client.unlock().status == 200
    assert machine.received() == [RIGHT]


def test_without_any_setting_the_usual_file_is_read(tmp_path: Path) -> None:
    """In a mount namespace, where a folder of the test replaces /etc."""
    need_root()
    tmp_path.joinpath("waker").mkdir()
    tmp_path.joinpath("waker/waker.env").write_text("WAKER_INITRD_SSH_PORT=two words\n")
    script = 'mount --bind "$0" /etc && exec "$@"'
    ended = subprocess.run(
        [*("unshare", "--mount", "sh", "-c", script), tmp_path, sys.executable, WAKER],
        env=environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 78
    assert "WAKER_INITRD_SSH_PORT" in ended.stderr


def test_help_names_each_setting_and_version_the_version() -> None:
    text = run_waker("--help")
    assert text.returncode == 0
    for name in SETTINGS.split():
        assert f"WAKER_{name} " in text.stdout
    for command in ("serve", "check", "unlock", "state"):
        assert command in text.stdout
    ended = run_waker("--version")
    assert ended.returncode == 0
    assert re.fullmatch(r"waker \d+\.\d+\.\d+\S*\n", ended.stdout)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["shutdown"], 2),
        (["--seconds", "5", "unlock"], 2),
        (["--env-file", "/nowhere/waker.env"], 78),
        (["--env-file", "/nowhere/waker.env", "check"], 78),
        (["--env-file", "/nowhere/waker.env", "unlock"], 78),
        (["--env-file", "/nowhere/waker.env", "state"], 78),
    ],
    ids=str,
)
def test_a_command_that_cannot_run_says_so_by_its_status(
    arguments: list[str], status: int
) -> None:
    ended = run_waker(*arguments)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr


def test_a_port_that_is_taken_ends_the_daemon_with_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": f"127.0.0.1:{port}"}
        ended = run_waker(settings=settings)
    assert ended.returncode == 1
    assert str(port) in ended.stderr


def test_check_says_what_is_right_and_sends_nothing(machine: Machine) -> None:
    own = {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
    ended = run_waker("check", settings=machine.ask().settings() | own)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "WRONG" not in ended.stdout
    for words in (
        f"port {machine.initrd_port} is open; it says SSH-2.0-dropbear",
        f"port {machine.system_port} refuses",
        "verified",
        "root can log in",
        "127.0.0.1 to 127.255.255.255",
    ):
        assert words in ended.stdout
    assert not machine.has_run()
    assert machine.packets() == []


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        (
            {"PIN": "24681012", "SSH_HOST_KEY": ""},
            *(0, ["PIN.*digits", "WAKER_SSH_HOST_KEY=ssh-ed25519 AAAA"]),
        ),
        (
            {"LISTEN": "203.0.113.9:8080", "SSH_HOST_KEY": OTHER_KEY},
            *(1, ["WRONG.*203.0.113.9", "WRONG.*host key.*SHA256:.*SHA256:"]),
        ),
        ({"LISTEN": "203.0.113.9:8080"}, 1, ["WRONG.*203.0.113.9", "login +.*root"]),
        ({"SSH_USER": "nobody"}, 1, ["WRONG.*login.*SHA256:.*nobody"]),
        ({"SSH_KEY": "/nowhere"}, 78, ["WAKER_SSH_KEY /nowhere"]),
    ],
    ids=["hints", "wrong", "one is wrong", "not let in", "wrong setting"],
)
def test_check_says_what_to_mend(
    machine: Machine, settings: dict[str, str], status: int, words: list[str]
) -> None:
    own = {"PIN": PIN, "LISTEN": "127.0.0.1:0"} | settings
    ended = run_waker("check", settings=machine.ask().settings(**own))
    assert ended.returncode == status
    for each in words:
        assert re.search(each, ended.stdout + ended.stderr)


def test_check_shows_no_control_characters(machine: Machine) -> None:
    own = {"PIN": PIN, "LISTEN": "127.0.0.1:0"}
    with says(b"SSH-2.0-\x1b[31mred\x07\xc2\x9b\r\n") as port:
        settings = machine.settings(SYSTEM_SSH_PORT=str(port), SSH_KEY="", **own)
        shown = run_waker("check", settings=settings).stdout
    assert "red" in shown
    assert shown.replace("\n", " ").isprintable()


def test_check_compares_the_mac_address_with_arp(home: Home) -> None:
    """The commonest mistake: the address of another card."""
    router, machine, _ = home
    ip(f"-n {machine.name} link set eth0 address 02:00:00:00:00:20")
    own = {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
    shown = {}
    for mac in ("02:00:00:00:00:20", "02:00:00:00:00:21"):
        where = {"WAKER_HOMELAB_HOST": "192.168.77.20", "WAKER_HOMELAB_MAC": mac}
        ended = subprocess.run(
            [*router.command(), sys.executable, WAKER, "check"],
            env=environment(own | where),
            capture_output=True,
            text=True,
            check=False,
        )
        lines = ended.stdout.splitlines()
        (shown[mac],) = [line for line in lines if "MAC address" in line]
    right, wrong = shown.values()
    assert right.startswith("ok")
    assert not wrong.startswith("ok")
    assert re.search("02:00:00:00:00:20.*02:00:00:00:00:21", wrong)


def test_without_paramiko_it_wakes_and_watches_but_starts_nothing(
    machine: Machine,
) -> None:
    machine.make_keys()
    program = shortened(machine.folder, packet_port=machine.packet_port)
    bare = program[0], "-S", program[1]  # without the installed modules
    with daemon(machine.settings(), program=bare) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "off"
        for answer in (client.start(), client.unlock()):
            assert answer.status == 500
            assert re.search("paramiko.*not sent", answer.error)
        assert client.status()["start"] is None
        assert machine.packets() == []
        assert client.call("POST", "/api/wol").status == 200


# ---- Unlocking: what the initrd does, and what is said of it -------------------------


class Unlock(NamedTuple):
    """What an initrd's command does, and how often it gets the passphrase."""

    script: str
    outcome: str
    sent: int = 0
    words: str = ""


# REACHED, below, has more of them.
ONCE = "[ -e root.open ] && exit; echo >root.open"
UNLOCKS = {
    "two disks": Unlock("disk root; disk data", "unlocked", 2, "root.*data"),
    "wrong for the second of two": Unlock(
        "disk root; asks data; take; rejects", "wrong_passphrase", 2, "data.*root"
    ),
    "wrong for the third time": Unlock(
        "asks root; take; echo cryptsetup: maximum number of tries exceeded for root",
        *("wrong_passphrase", 1, "root"),
    ),
    "nothing asks": Unlock(
        "echo Error: Timeout reached while waiting for askpass. >&2; exit 1",
        "not_asked",
    ),
    "ends before it asks": Unlock("exit 1", "not_asked"),
    "hangs up before it asks": Unlock("kill -9 $PPID", "not_asked"),
    "not executable": Unlock("exit 126", "error", 0, "command"),
    "succeeds without a word": Unlock("asks root; take", "not_confirmed", 1),
    "slow key derivation": Unlock(
        "asks root; take; echo Error: Timeout reached while waiting for PID 9.; exit 1",
        *("not_confirmed", 1),
    ),
    "hangs up": Unlock(
        "asks root; take; kill -9 $PPID", "not_confirmed", 1, "did not confirm"
    ),
    "opens another disk": Unlock(
        f"{ONCE}; asks root; take; opens data; exit 1", "not_confirmed", 1
    ),
    "opens before it asks": Unlock(
        f"{ONCE}; opens root 2>&1; asks root; take; exit 1", "not_confirmed", 1
    ),
    "opens before it is answered": Unlock(
        f"{ONCE}; asks root | sed 'a cryptsetup: root set up successfully'; take",
        *("not_confirmed", 1),
    ),
    "asks again": Unlock("asks root; take; opens root", "not_confirmed", 1),
    "17 disks": Unlock(
        "n=$(cat received | wc -l); asks disk$n; take; opens disk$n",
        *("not_confirmed", 16),
    ),
    "systemd, wrong": Unlock(
        f"asks root; take; echo {SAYS['careful']}; rejects",
        *("wrong_passphrase", 1, "root.*give up"),
    ),
    "systemd, gives up": Unlock(
        f"asks root; take; echo {SAYS['gave up']}; exit 1", "gave_up", 1, "restart"
    ),
    # The server may boot without the other disk.
    "systemd, gives up on another disk": Unlock(
        f"disk data; asks root; take; echo {SAYS['gave up']}; exit 1",
        *("not_confirmed", 2, "gave up on.* unlocked: data"),
    ),
    "systemd, had given up on another disk": Unlock(
        f"disk data; echo {SAYS['gave up']}; exit 1", "unlocked", 1, "data"
    ),
    "systemd, all open": Unlock(f"echo {SAYS['open']}", "already_open", 0, "open"),
    "systemd, cannot": Unlock(f"echo {SAYS['cannot']}; exit 1", "error", 0, "a helper"),
    "script of waker 2": Unlock(
        f"echo {SAYS['old']}; take; exit 1",
        *("error", 0, "put waker 2.1 back"),
    ),
}


@pytest.mark.parametrize("row", UNLOCKS.values(), ids=[*UNLOCKS])
def test_only_the_initrds_own_words_decide(machine: Machine, row: Unlock) -> None:
    """The passphrase is sent only if it asks, and once to each disk."""
    result = machine.ask(row.script).unlock()
    assert result["outcome"] == row.outcome
    assert result["sent"] == bool(row.sent)
    assert re.search(row.words, f"{result['message']} {result['hint']}")
    assert len(machine.received()) == row.sent
    assert {*machine.received()} <= {RIGHT}
    # People read whether it was sent, unless the words imply it.
    if row.outcome not in ("unlocked", "wrong_passphrase"):
        assert ("not sent" in result["message"]) == (not row.sent)
        assert "sent" in result["message"]


def test_the_command_is_cryptroot_unlock(machine: Machine) -> None:
    """Nothing else, so that waker's key can be limited to it."""
    assert machine.ask().unlock()["outcome"] == "unlocked"
    commands = machine.folder.joinpath("commands").read_text().splitlines()
    assert {*commands} == {"cryptroot-unlock"}


@pytest.mark.parametrize(
    ("script", "seconds", "outcome", "words"),
    [
        ("sleep 60", 10, "not_asked", "no disk asked.*not sent"),
        ("asks root; take; sleep 60", 12, "not_confirmed", "was sent"),
    ],
    ids=["before it asks", "after it asked"],
)
def test_silence_ends_at_the_deadline(
    machine: Machine, script: str, seconds: int, outcome: str, words: str
) -> None:
    began = time.monotonic()
    result = machine.ask(script).unlock(PASSPHRASE, seconds)
    assert result["outcome"] == outcome
    assert re.search(words, result["message"])
    assert time.monotonic() < began + 30


def test_a_stranger_gets_neither_login_nor_passphrase(machine: Machine) -> None:
    """Several keys may be pinned."""
    known, other = machine.ask().host_key, OTHER_KEY
    result = machine.unlock(SSH_HOST_KEY=other)
    assert (result["outcome"], result["sent"]) == ("host_key_differs", False)
    assert re.search("SHA256:.*SHA256:.*not sent", result["message"])
    assert not machine.has_run()
    assert machine.unlock(SSH_HOST_KEY=f"{other},{known}")["outcome"] == "unlocked"


@pytest.mark.parametrize(
    ("settings", "outcome", "words"),
    [
        ({"SSH_USER": "nobody"}, "key_refused", "SHA256:.*nobody"),
        ({"SSH_HOST_KEY": ""}, "error", "pinned"),
        ({"INITRD_SSH_PORT": "closed"}, "not_asked", "refused"),
        ({"INITRD_SSH_PORT": "not SSH"}, "not_asked", "SSH"),
        ({"INITRD_SSH_PORT": "silent"}, "not_asked", ""),
    ],
    ids=["key refused", "not pinned", "closed", "not SSH", "silent"],
)
def test_a_server_that_cannot_be_asked_gets_nothing(
    machine: Machine, settings: dict[str, str], outcome: str, words: str
) -> None:
    machine.ask()
    with says(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web, bind("127.0.0.1", 0) as mute:
        mute.listen()
        ports = {"closed": machine.system_port, "not SSH": web}
        ports["silent"] = mute.getsockname()[1]
        for name, value in settings.items():
            settings = {name: str(ports.get(value, value))}
        result = machine.unlock(**settings)
    assert (result["outcome"], result["sent"]) == (outcome, False)
    assert re.search(f"{words}.*not sent", result["message"])
    assert not machine.has_run()


ODD = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes


def test_a_passphrase_is_sent_as_it_was_given(machine: Machine) -> None:
    """Byte by byte, and without a newline. One that ends the input is removed."""
    assert len(ODD.encode()) == 512
    assert machine.ask("disk root", ODD).unlock(f"{ODD}\n")["outcome"] == "unlocked"
    assert machine.received() == [ODD.encode()]
    machine.ask("disk root", ODD)
    with machine.waker() as started:
        client = started.client.log_in()
        client.start(ODD)
        assert wait_until(client, "booting")["outcome"] == "unlocked"
    assert machine.received() == [ODD.encode()]


@pytest.mark.parametrize("given", ["", "two\n\n", "x" * 513, "\x07"], ids=len)
def test_input_that_is_no_passphrase_is_an_error(machine: Machine, given: str) -> None:
    result = machine.ask().unlock(given)
    assert (result["outcome"], result["sent"]) == ("error", False)
    assert "512" in result["message"]
    assert not machine.has_run()


def test_input_without_end_is_an_error(machine: Machine) -> None:
    machine.make_keys()
    with Path("/dev/zero").open("rb") as endless:
        ended = subprocess.run(
            [*MODULE, "unlock"],
            cwd=CHECKOUT,
            env=environment(machine.settings()),
            stdin=endless,
            capture_output=True,
            check=False,
        )
    assert (ended.returncode, json.loads(ended.stdout)["outcome"]) == (1, "error")


def test_a_name_that_contains_the_passphrase_is_not_shown(machine: Machine) -> None:
    secret = "opensesame"
    machine.ask(f"asks my-{secret}-disk; take; opens my-{secret}-disk")
    result = machine.unlock(secret)
    assert machine.received() == [secret.encode()]
    assert secret not in result["message"]


def test_names_that_contain_the_passphrase_are_told_apart(machine: Machine) -> None:
    """Though they are not shown: the success of another disk is none."""
    machine.ask(f"{ONCE}; asks sda-x; take; opens sdb-x; exit 1", "x")
    assert machine.unlock("x")["outcome"] == "not_confirmed"


def test_it_is_reported_that_the_passphrase_is_sent_before_it_is(
    machine: Machine,
) -> None:
    machine.ask("asks root; take; sleep 60")
    with subprocess.Popen(
        [sys.executable, str(WAKER), "unlock"],
        env=environment(machine.settings()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as unlocking:
        assert unlocking.stdin
        assert unlocking.stdout
        unlocking.stdin.write(RIGHT)
        unlocking.stdin.close()
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        assert select.select([unlocking.stdout], [], [], 0)[0]
        assert json.loads(unlocking.stdout.readline()) == {"sent": True}
        unlocking.kill()


class Reach(NamedTuple):
    """An initrd, the answer of POST /api/unlock, and where a start gets.

    A failed start is forgotten once the system is up, but not an alarm.
    """

    script: str
    status: int
    begins: str
    says: str
    phase: str
    outcome: str
    settings: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


FAILED = 500, "Failed to unlock: ", "was not sent", "failed"
REACHED = (
    Reach("disk root", 200, "", "root", "booting", "unlocked"),
    Reach("", 200, "", "open.*not sent", "booting", "already_open"),
    Reach(f"echo {SAYS['booted']}", 200, "", "up.*not sent", "done", "up"),
    Reach(
        "asks root; take; rejects",
        *(400, "Wrong passphrase", "root", "failed", "wrong_passphrase"),
    ),
    Reach(
        "asks root; take",
        *(500, "Not confirmed: (?=.*GET /api/status)", "was sent"),
        *("booting", "not_confirmed"),
    ),
    Reach("echo Try again later", *FAILED, "not_asked"),
    Reach(f"echo {SAYS['gave up']}", *FAILED, "gave_up"),
    Reach("exit 127", *FAILED, "error"),
    Reach("disk root", *FAILED, "host_key_differs", {"SSH_HOST_KEY": OTHER_KEY}),
    Reach("disk root", *FAILED, "key_refused", {"SSH_USER": "nobody"}),
)


@pytest.mark.parametrize("row", REACHED, ids=lambda row: row.outcome)
def test_each_outcome_reaches_the_client_and_the_status(
    machine: Machine, row: Reach
) -> None:
    settings = machine.ask(row.script).settings(**row.settings)
    program = shortened(machine.folder, prompt_seconds=8, retry_seconds=0.5)
    with daemon(settings, program=program) as started:
        client = started.client.log_in()
        answer = client.unlock()
        assert answer.status == row.status
        if row.status == 200:
            assert answer.json.keys() == {"success", "message"}
            assert answer.json["success"] is True
        text = answer.json["message"] if row.status == 200 else answer.error
        assert re.match(f"{row.begins}.*{row.says}", text)
        machine.ask(row.script)
        assert client.start().json["success"] is True
        start = wait_until(client, row.phase)
        is_sent = bool(machine.received())
        assert (start["outcome"], start["sent"]) == (row.outcome, is_sent)
        assert re.search(row.says, start["message"])
        if row.outcome == "not_asked":
            tries = machine.folder.joinpath("commands").read_text().splitlines()
            assert len(tries) > 1
        if row.phase == "failed":
            machine.show(CLOSED, OPEN)
            seen = wait_for(client.status, lambda now: now["state"] == "up", pause=0.2)
            # Any listener could open the port, and erase an alarm.
            is_alarm = row.outcome == "host_key_differs"
            assert (seen["start"] is not None) == is_alarm
            machine.show()  # what is forgotten does not come back
            seen = wait_for(client.status, lambda now: now["state"] == "off", pause=0.2)
            assert (seen["start"] is not None) == is_alarm


def test_an_unlock_shows_no_secret_and_leaves_nothing(machine: Machine) -> None:
    """Not in arguments, environment, log, answers and files; and no core dump."""
    secret, shown = "the-secret-passphrase", ""
    machine.ask(
        "[ -e go ] && exit; asks d; take; until [ -e go ]; do sleep 0.1; done; opens d",
        secret,
    )
    files = {*machine.folder.rglob("*")}
    with machine.waker() as started, ThreadPoolExecutor() as pool:
        parent, idle = started.process.pid, started.uses()
        client = started.client.log_in()
        client.attempt("a-wrong-pin")
        answers = [client.call("POST", f"/api/unlock?{secret}", secret.encode())]
        unlocking = pool.submit(client.unlock, secret)
        child = wait_for_child(parent)
        wait_for(machine.received, lambda seen: seen == [secret.encode()])
        for pid in (parent, child):
            proc = Path(f"/proc/{pid}")
            shown += (proc / "cmdline").read_text()
            limits = (proc / "limits").read_text()
            assert re.search(r"core file size +[01] +[01] ", limits)
        childs = (proc / "environ").read_text()
        machine.folder.joinpath("go").touch()
        answers.append(unlocking.result())
        assert answers[-1].status == 200
        answers.append(
            client.call("POST", "/api/unlock", {"passphrase": f"{secret}\n"})
        )
        assert is_gone(child)
        assert client.call("DELETE", "/api/start").status == 200  # or it is watched
        wait_for(lambda: started.uses() == idle)
        assert started.stop() == 0
    shown += "\n".join(started.log) + "".join(str(answer) for answer in answers)
    for hidden in (secret, client.token, PIN, "a-wrong-pin"):
        assert hidden not in shown + childs
    assert "PIN accepted" in shown  # what was searched is the log
    left = {path.name for path in machine.folder.rglob("*") if path not in files}
    assert left <= {"received", "commands", "go", "waker.py", "waker.pyc", "ui.html"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 60", "^Failed to unlock: .*status -9.*not sent"),
        ("asks root; take; sleep 60", "^Not confirmed: .*was sent.*status -9"),
    ],
    ids=["before sending", "after sending"],
)
def test_an_unlocking_process_that_dies_is_reported_as_it_died(
    machine: Machine, script: str, words: str
) -> None:
    with machine.ask(script).waker() as started, ThreadPoolExecutor() as pool:
        client = started.client.log_in()
        unlocking = pool.submit(client.unlock)
        child = wait_for_child(started.process.pid)
        wait_for(machine.received if "take" in script else machine.has_run)
        os.kill(child, signal.SIGKILL)
        answer = unlocking.result()
        assert answer.status == 500
        assert re.search(words, answer.error)
        if "take" not in script:
            assert client.start().status == 200  # the next may begin


def test_an_unlock_that_hangs_is_killed_at_its_deadline(machine: Machine) -> None:
    program = shortened(machine.ask("sleep 60").folder, unlock_seconds=6)
    with daemon(machine.settings(), program=program) as started:
        client = started.client.log_in()
        with ThreadPoolExecutor() as pool:
            unlocking = pool.submit(client.unlock)
            child = wait_for_child(started.process.pid)
            os.kill(child, signal.SIGSTOP)  # by itself it would end in time
            began = time.monotonic()
            answer = unlocking.result()
        assert time.monotonic() < began + 30
        assert answer.status == 500
        assert "not sent" in answer.error
        assert is_gone(child)


# ---- A start -------------------------------------------------------------------------


def test_a_start_wakes_unlocks_and_watches_until_the_system_is_up(
    machine: Machine,
) -> None:
    machine.make_keys()
    with machine.waker(packet_seconds=1) as started:
        client = started.client.log_in()
        answer = client.start()
        assert (answer.status, answer.json.keys()) == (200, {"success", "message"})
        start = wait_until(client, "waking")
        assert start.keys() == START_MEMBERS
        assert (start["outcome"], start["sent"]) == (None, False)
        packets: list[bytes] = []
        while len(packets) < 6:
            packets += wait_for(machine.packets)
        assert {*packets} == {PACKET}
        machine.ask()
        start = wait_until(client, "booting")
        assert (start["outcome"], start["sent"]) == ("unlocked", True)
        assert "root" in start["message"]
        machine.show(CLOSED, CLOSED).show(CLOSED, OPEN)
        start = wait_until(client, "done")
        assert (start["outcome"], start["sent"]) == ("up", True)
        assert "root" in start["message"]
        assert "system is up" in start["message"]
        times = start["times"]
        assert [*times] == ["waking", "unlocking", "booting", "done"]
        assert [*times.values()] == sorted(times.values())
        assert (times["waking"], times["done"]) == (0, start["seconds"])
        machine.show(OPEN, OPEN).packets()  # a system may use the initrd's port as well
        client.start("another")
        start = wait_until(client, "done")
        assert (start["outcome"], start["sent"]) == ("up", False)
        assert "not sent" in start["message"]
        assert machine.packets() == []
        assert client.call("DELETE", "/api/start").status == 409


@pytest.mark.parametrize(
    ("ports", "script", "words", "outcome"),
    [
        ((SILENT, SILENT), "", "wake.*not sent", "not_awake"),
        ((CLOSED, CLOSED), "", "initrd.*not sent", "not_awake"),
        ((), "disk root", "root", "not_up"),
        ((), "asks root; take", "Not confirmed.*was sent", "not_up"),
    ],
    ids=["asleep", "awake", "not up", "not confirmed"],
)
def test_a_start_that_takes_too_long_says_what_it_saw(
    machine: Machine, ports: tuple[str, ...], script: str, words: str, outcome: str
) -> None:
    machine.make_keys()
    if ports:
        machine.show(*ports)
    else:
        machine.ask(script)
    with machine.waker(start_seconds=2) as started:
        client = started.client.log_in()
        client.start()
        start = wait_until(client, "failed")
    assert start["outcome"] == outcome
    assert start["sent"] == bool(script)
    assert re.search(words, start["message"])


def test_an_early_initrd_is_asked_until_it_asks(machine: Machine) -> None:
    machine.ask("[ -e go ] || { echo Try again later; exit 1; }; disk root")
    with machine.waker(retry_seconds=0.3) as started:
        client = started.client.log_in()
        client.start()
        start = wait_until_shown(client, lambda now: "try again" in now["message"])
        assert (start["phase"], start["outcome"]) == ("unlocking", None)
        machine.folder.joinpath("go").touch()
        assert wait_until(client, "booting")["outcome"] == "unlocked"


def test_an_unconfirmed_unlock_is_doubted_and_may_still_come_up(
    machine: Machine,
) -> None:
    machine.ask("asks root; take")
    with machine.waker(doubt_seconds=2) as started:
        client = started.client.log_in()
        client.start()
        first = wait_until(client, "booting")["message"]
        doubt = wait_until_shown(client, lambda now: now["message"] != first)
        assert doubt["phase"] == "booting"
        assert re.search("still.*or.*wrong", doubt["message"])
        machine.show(CLOSED, CLOSED)  # no longer, then
        wait_until_shown(client, lambda now: now["message"] == first)
        machine.show(CLOSED, OPEN)
        start = wait_until(client, "done")
    assert start["outcome"] == "up"
    assert re.match("The system is up.*Not confirmed", start["message"])


def test_a_second_request_waits_until_the_first_has_sent(machine: Machine) -> None:
    """Then it replaces the watch. Nothing is sent twice by itself."""
    machine.ask("asks root; take; until [ -e go ]; do sleep 0.1; done; exit 1")
    with machine.waker() as started:
        client = started.client.log_in()
        client.start()
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        for ask in (client.start, client.unlock):
            answer = ask("x")
            assert answer.status == 409
            assert answer.error
        machine.folder.joinpath("go").touch()
        first = wait_until(client, "booting")
        assert machine.received() == [RIGHT]
        assert client.start("y").status == 200  # replaces the watch
        wait_for(machine.received, lambda seen: seen == [RIGHT, b"y"])
        wait_until(client, "booting")
        assert client.unlock("z").status == 500  # so does this, which is watched, too
        start = wait_until(client, "booting")
        assert (start["outcome"], start["message"]) == (
            "not_confirmed",
            first["message"],
        )
        assert [*start["times"]] == ["unlocking", "booting"]
        assert machine.received() == [RIGHT, b"y", b"z"]


SLOWLY = f"{ONCE}; asks root; take; sleep 1; opens root"


@pytest.mark.parametrize("way", ["DELETE", "SIGTERM"])
@pytest.mark.parametrize("script", ["sleep 60", SLOWLY], ids=["unsent", "sent"])
def test_a_cancel_sends_nothing_or_keeps_what_was_reported(
    machine: Machine, script: str, way: str
) -> None:
    with machine.ask(script).waker() as started:
        client = started.client.log_in()
        client.start()
        child = wait_for_child(started.process.pid)
        is_sent = script == SLOWLY
        wait_for(machine.received if is_sent else machine.has_run)
        if way == "DELETE":
            assert client.call("DELETE", "/api/start").json["success"] is True
            start = wait_until(client, "cancelled")
            assert start["outcome"] == ("unlocked" if is_sent else "cancelled")
            assert start["sent"] == is_sent
            assert ("root" if is_sent else "not sent") in start["message"]
            assert client.call("DELETE", "/api/start").status == 409
        else:
            began = time.monotonic()
            assert started.stop() == 0
            assert time.monotonic() < began + 20  # an unlock may take 90
            words = "(?i)unlocked.*root" if is_sent else "cancelled.*not sent"
            assert re.search(words, "\n".join(started.log))
        assert is_gone(child)
    assert machine.received() == [RIGHT] * is_sent


def test_a_start_is_forgotten_after_an_hour(machine: Machine) -> None:
    machine.make_keys()
    machine.show(CLOSED, OPEN)
    with machine.waker(shown_seconds=2) as started:
        client = started.client.log_in()
        client.start()
        wait_until(client, "done")
        wait_until_shown(client, lambda now: now is None)


def test_a_start_that_cannot_unlock_wakes_nothing(machine: Machine) -> None:
    machine.make_keys()
    with machine.waker() as started:
        client = started.client.log_in()
        machine.ssh_key.rename(machine.folder / "away")
        answers = [client.start(), client.unlock()]
        machine.folder.joinpath("away").rename(machine.ssh_key)
        assert client.status()["start"] is None
    with daemon(machine.settings(SSH_HOST_KEY="")) as started:
        client = started.client.log_in()
        answers += [client.start(), client.unlock()]
        assert client.status()["start"] is None
    for answer, request in zip(answers, ["start", "unlock"] * 2, strict=True):
        assert answer.status == 500
        assert re.match(f"Failed to {request}: .*was not sent", answer.error)
    assert machine.packets() == []


def test_one_port_for_both_is_no_alarm_while_the_system_is_up(
    machine: Machine,
) -> None:
    machine.make_keys()
    with says(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n") as port:
        ports = {"INITRD_SSH_PORT": str(port), "SYSTEM_SSH_PORT": str(port)}
        with daemon(machine.settings(**ports)) as started:
            client = started.client.log_in()
            client.start()
            assert wait_until(client, "done")["outcome"] == "up"


# ---- Hostile clients -----------------------------------------------------------------

REQUESTS = {
    "garbage": (b"\x16\x03\x01\r\n\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "HTTP 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "space before the colon": (GET + b"X : y\r\n\r\n", 400),
    "folded field": (GET + b"X: y\r\n z\r\n\r\n", 400),
    "bare LF": (GET + b"X: y\nZ: z\r\n\r\n", 400),
    "bare CR": (GET + b"X: y\rZ: z\r\n\r\n", 400),
    "NUL": (GET + b"X: \0\r\n\r\n", 400),
    "coding": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "length with a plus": (POST + b"Content-Length: +5\r\n\r\n12345", 400),
    "two lengths": (POST + b"Content-Length: 5, 5\r\n\r\n12345", 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "long head": (GET + b"X: " + b"y" * 16384 + b"\r\n\r\n", 431),
    "101 fields": (GET + b"X: y\r\n" * 100 + b"\r\n", 431),
    "long head for no path": (b"GET /x HTTP/1.1\r\n" + b"X" * 20_000, 431),
    "long body": (POST + b"Content-Length: 16385\r\n\r\n", 413),
    "cut off": (POST + b"Content-Length: 5\r\n\r\n1234", 400),
    "pipelined": (GET + b"\r\n" + GET + b"\r\n", 200),
    "HTTP 1.0": (b"GET / HTTP/1.0\r\n\r\n", 200),
    "query": (b"GET /?from=home HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    "100 fields": (GET + b"X: y\r\n" * 99 + b"\r\n", 200),
}


@pytest.mark.parametrize(("data", "status"), REQUESTS.values(), ids=[*REQUESTS])
def test_a_request_gets_one_answer_and_a_bad_one_a_json_error(
    api: Client, data: bytes, status: int
) -> None:
    with knock(api, data) as tcp:
        tcp.shutdown(socket.SHUT_WR)
        answer = answer_on(tcp)
    assert answer.status == status
    assert answer.headers["Connection"] == "close"
    assert "Server" not in answer.headers
    assert status == 200 or answer.error


def test_slow_clients_have_ten_seconds_for_a_whole_request() -> None:
    """Not for each byte."""
    head = POST + b"Content-Length: 9000\r\n\r\n"
    with daemon(MACHINE) as started, contextlib.ExitStack() as stack:
        began, client = time.monotonic(), started.client
        waiting = stack.enter_context(knock(client, GET))
        dripping = [stack.enter_context(knock(client, data)) for data in (GET, head)]
        while not select.select(dripping, [], [], 0.5)[0]:
            assert time.monotonic() < began + 20
            for tcp in dripping:
                tcp.sendall(b"x")
        assert time.monotonic() > began + 9
        for tcp in (waiting, *dripping):
            assert answer_on(tcp).status == 408


def memory(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "sources", [["127.0.0.1"] * 150, places(1, 150)], ids=["one address", "many"]
)
def test_slow_clients_keep_nobody_out_and_fill_no_memory(sources: list[str]) -> None:
    """They have sent almost a whole head. The owner is at another address."""
    data = GET + b"X: " + b"y" * 16000
    with daemon(MACHINE) as started, contextlib.ExitStack() as crowd:
        client, pid = started.client, started.process.pid
        client.attempt(PIN)
        wait_for(lambda: started.uses()[0] <= 2)
        used, threads = memory(pid), started.uses()[0]
        for source in sources:
            crowd.enter_context(knock(client, data, source))
        began = time.monotonic()
        with knock(client, GET + b"\r\n", "127.0.0.99") as owner:
            assert answer_on(owner).status == 200
        assert time.monotonic() < began + 5  # a request may take 10
        # A thread may outlive its place for a moment.
        wait_for(lambda: started.uses()[0] <= threads + 64, seconds=5)
        assert memory(pid) < used + (8 << 20)


def test_the_client_with_the_most_connections_makes_room() -> None:
    """Each of the others has up to six, as many as a browser opens."""
    with daemon(MACHINE) as started, contextlib.ExitStack() as crowd:
        client = started.client

        def come(sources: Iterable[str]) -> list[socket.socket]:
            return [crowd.enter_context(knock(client, GET, at)) for at in sources]

        browser, others = come(["127.0.0.9"] * 6), come(places(2, 20))
        come(["127.0.0.1"] * 100)
        assert client.call("GET", "/").status == 200
        for tcp in (*browser, *others):
            tcp.sendall(b"\r\n")
            assert answer_on(tcp).status == 200


def test_an_unlock_is_never_dropped_to_make_room(machine: Machine) -> None:
    machine.ask("asks root; take; until [ -e go ]; do sleep 0.1; done; rejects")
    with (
        machine.waker() as started,
        ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as crowd,
    ):
        client = started.client.log_in()
        unlocking = pool.submit(client.unlock)
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        for source in ["127.0.0.1"] * 100 + places(1, 100):
            crowd.enter_context(knock(client, GET, source))
        assert client.call("GET", "/").status == 200
        machine.folder.joinpath("go").touch()
        assert unlocking.result().status == 400


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    with daemon(MACHINE) as started:
        client, log = started.client, started.process.stderr
        assert log
        request = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 900)
        for _ in range(90):  # lines of about 900 bytes; a pipe has 65,536
            with knock(client, request) as tcp:
                assert select.select([tcp], [], [], 20)[0], "it waits for its log"
                assert answer_on(tcp).status == 404
        log.close()
        client.log_in()
        started.process.terminate()
        assert started.process.wait(60) == 0


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::]:0"])
def test_the_log_has_a_line_for_each_event_and_names_the_client(listen: str) -> None:
    with daemon(MACHINE | {"WAKER_LISTEN": listen}) as started:
        client = started.client
        client.attempt("wrong PIN")
        client.log_in()
        client.raw(b"GET /\x1b[31m\xff HTTP/1.1\r\n\r\n")
        client.call("GET", "/x'b", None)
        started.stop()
    log = "\n".join(started.log)
    assert re.search(r"ip=127\.0\.0\.1 .*401", log)
    assert re.search(r"ip=127\.0\.0\.1 PIN accepted", log)
    assert re.search(r"ip=127\.0\.0\.1 .*404", log)
    assert log.isascii()
    assert log.replace("\n", " ").isprintable()


def test_the_log_names_a_proxys_client_and_never_the_proxy() -> None:
    """Or fail2ban would ban everybody behind it."""
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        started.client.attempt("wrong PIN", {"X-Forwarded-For": "192.0.2.7"})
        started.client.attempt("wrong PIN")
        started.stop()
    named, unnamed = (line for line in started.log if "401" in line)
    assert named.startswith("ip=192.0.2.7 refused")
    assert "ip=" not in unnamed


def test_without_a_free_descriptor_it_waits_for_one() -> None:
    """And keeps no processor busy meanwhile."""
    with daemon(MACHINE) as started:
        pid, client = started.process.pid, started.client
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (started.uses()[1], usual[1]))
        with knock(client, GET + b"\r\n") as tcp:
            begun = started.count_naps()
            wait_for(lambda: started.count_naps() > begun + 5)  # between attempts
            assert started.busy(1) < 0.3
            assert not select.select([tcp], [], [], 0)[0]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
            assert answer_on(tcp).status == 200


def test_an_idle_daemon_does_not_wake_up() -> None:
    with daemon(MACHINE) as started:
        idle = started.uses()
        started.client.log_in().status()
        wait_for(lambda: started.uses() == idle)  # its threads have ended

        def sleeps() -> bool:
            before = started.count_naps()
            time.sleep(1.2)  # more than any usual interval
            return started.count_naps() == before

        wait_for(sleeps, seconds=8)


def test_sigterm_ends_waiting_and_lets_a_running_request_finish(
    machine: Machine,
) -> None:
    machine.ask(SLOWLY)
    with machine.waker() as started, ThreadPoolExecutor() as pool:
        client = started.client.log_in()
        unlocking = pool.submit(client.unlock)
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        with knock(client, GET) as waiting:
            waiting.settimeout(8)  # seconds, of the ten for its request
            assert client.call("GET", "/").status == 200  # it came later
            started.process.terminate()
            while waiting.recv(4096):
                pass
        assert started.process.wait(60) == 0
        assert unlocking.result().status == 200


# ---- The box -------------------------------------------------------------------------


def test_one_file_is_enough_and_needs_no_privileges(tmp_path: Path) -> None:
    """Alone in a folder, into which it writes nothing."""
    make(tmp_path / "build", "dist")
    program = tmp_path / "box/waker"
    program.parent.mkdir()
    (tmp_path / "build/dist/waker").rename(program)
    powerless = [need("setpriv"), "--bounding-set=-all"] if not os.geteuid() else []
    with daemon(MACHINE, *powerless, program=(sys.executable, str(program))) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == CHECKOUT.joinpath("ui.html").read_bytes()
        assert client.status()["name"] == "127.0.0.1"
        shown = Path(f"/proc/{started.process.pid}/status").read_text()
        assert re.search(r"CapEff:\t0+\n", shown)
    assert [*program.parent.iterdir()] == [program]


def test_the_service_is_hardened() -> None:
    """Exposure of at most 1.2, by systemd's own scale of 0 to 10."""
    command = [need("systemd-analyze"), "security", "--offline=true", "--threshold=12"]
    unit = str(CHECKOUT / "waker.service")
    ended = subprocess.run(
        [*command, unit], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:]


# ---- Bugs of version 2.1 -------------------------------------------------------------


def test_a_machine_that_only_shuts_down_did_not_wake(machine: Machine) -> None:
    machine.make_keys()
    with machine.show(CLOSED, CLOSED).waker(start_seconds=4) as started:
        client = started.client.log_in()
        client.start()
        wait_until_shown(client, lambda now: now["seconds"] >= 2)  # it was looked at
        machine.show(SILENT, SILENT)
        start = wait_until(client, "failed")
    assert start["outcome"] == "not_awake"
    assert "woke" not in start["message"]


def test_packets_are_sent_while_something_refuses(machine: Machine) -> None:
    """As a router does on behalf of a machine that sleeps."""
    machine.make_keys()
    with machine.show(CLOSED, CLOSED).waker(start_seconds=2) as started:
        client = started.client.log_in()
        client.start()
        wait_until(client, "failed")
    assert PACKET in machine.packets()


def test_an_unlock_of_a_system_that_is_up_is_a_success(machine: Machine) -> None:
    """Whether or not waker could unlock it: here, no host key is pinned."""
    machine.make_keys()
    settings = machine.show(CLOSED, OPEN).settings(SSH_HOST_KEY="")
    with daemon(settings) as started:
        answer = started.client.log_in().unlock()
    assert answer.status == 200
    assert "not sent" in answer.json["message"]


def test_a_step_of_the_clock_discards_no_verdict(machine: Machine) -> None:
    """A box without a clock of its own sets it when it reaches a time server."""
    clock, stepped = stepping_clock(machine.folder)
    machine.ask(SLOWLY.replace("sleep 1", "sleep 1; echo >stepped; sleep 0.5"))
    ended = run_waker("unlock", settings=machine.settings() | clock, given=PASSPHRASE)
    assert stepped.exists()
    assert json.loads(ended.stdout.splitlines()[-1])["outcome"] == "unlocked"


def test_a_machine_that_resets_has_its_time_to_ask_again(machine: Machine) -> None:
    early = "echo Try again later; exit 1"
    limits = {"prompt_seconds": 10, "retry_seconds": 1}
    with machine.ask(early).waker(**limits) as started:
        client = started.client.log_in()
        client.start()
        wait_for(machine.has_run)
        began = time.monotonic()
        machine.show(SILENT, SILENT)
        wait_for(lambda: time.monotonic() > began + 11)  # more than prompt_seconds
        machine.ask(f"[ -e early ] || {{ echo >early; {early}; }}; disk root")
        assert wait_until(client, "booting")["outcome"] == "unlocked"


def test_sigterm_ends_an_unlock_that_has_sent_nothing(machine: Machine) -> None:
    with (
        ThreadPoolExecutor() as pool,
        machine.ask("sleep 60").waker() as started,
    ):
        unlocking = pool.submit(started.client.log_in().unlock)
        wait_for(machine.has_run)
        started.process.terminate()
        try:
            wait_for(lambda: started.process.poll() is not None, seconds=5)
            assert re.search("cancelled.* not sent", unlocking.result().error)
        finally:
            machine.show()  # or it would go on for a minute
            assert started.process.wait(60) == 0


def test_the_status_does_not_wait_for_a_slow_key_file(machine: Machine) -> None:
    machine.make_keys()
    with machine.waker() as started, ThreadPoolExecutor() as pool:
        client = started.client.log_in()
        with slow_to_open(machine.ssh_key) as is_waited_for:
            starting = pool.submit(client.start)
            wait_for(is_waited_for)
            status = pool.submit(client.status)
            wait_for(status.done, seconds=3)
        assert status.result()["state"] == "off"
        assert starting.result().status == 200


def test_80_dripping_clients_of_one_address_do_not_delay_the_owner() -> None:
    """On a busy box, each may have a byte that its thread has had no time to read."""
    with daemon(MACHINE) as started, contextlib.ExitStack() as crowd:
        client, tasks = started.client, Path(f"/proc/{started.process.pid}/task")
        idle = {*tasks.iterdir()}
        many = [crowd.enter_context(knock(client, GET)) for _ in range(80)]

        def handlers() -> set[Path]:
            return {*tasks.iterdir()} - idle

        def is_settled() -> bool:
            made_room = select.select(many, [], [], 0)[0]
            held = len(many) - len(made_room)
            return len(handlers()) == held and started.busy(0.2) == 0

        began = time.monotonic()
        wait_for(is_settled)
        while len(handlers()) < 64:  # a slow thread had two make room for one
            assert time.monotonic() < began + 20, "clients make room, but stay"
            many.append(crowd.enter_context(knock(client, GET)))
            wait_for(is_settled)
        files = started.uses()[1]
        frozen = Frozen(handlers())
        for tcp in many:
            with contextlib.suppress(ConnectionError):  # it had to make room
                tcp.sendall(b"x")
        with ThreadPoolExecutor() as pool:
            with knock(client, GET + b"\r\n", "127.0.0.2") as tcp:
                began = time.monotonic()
                owner = pool.submit(answer_on, tcp)
                wait_for(lambda: started.uses()[1] > files)  # the owner was let in
                frozen.thaw()
                assert owner.result().status == 200
                assert time.monotonic() < began + 5  # the others have their 10 s
