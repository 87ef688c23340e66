"""`waker check`: a table that says what does not work, and why."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import BOX, CHECKOUT, MACHINE, PAGE, PIN, need, need_root, run_waker
from homelab import Settings, public_line
from machine import Machine
from namespaces import IFF_TUN, Home, Namespace, ip, udp_packets
from ssh_servers import HOST_KEY, free_port, says, settings_at, unlock

OWN = {"PIN": PIN, "LISTEN": "127.0.0.1:0"}
BASE = MACHINE | {f"WAKER_{name}": value for name, value in OWN.items()}
OTHER_KEY = public_line(HOST_KEY)  # which no initrd has


def run(settings: Settings, *options: str, by: Sequence[str] = ()) -> str:
    """Run the command; returns the table, which decides the status."""
    ended = run_waker("check", *options, settings=settings, by=by, program=BOX)
    assert ended.stderr == ""
    assert ended.stdout.replace("\n", " ").isprintable()
    assert ended.returncode == bool(re.search("(?m)^WRONG", ended.stdout))
    return ended.stdout


# ---- Ports, keys and login -----------------------------------------------------------


def test_a_server_that_is_off_is_not_wrong(machine: Machine) -> None:
    """The rows are in the order of use."""
    lines = run(machine.settings(**OWN)).splitlines()
    assert [" ".join(line[:22].split()) for line in lines] == [
        *("ok configuration", "ok web port", "ok magic packet"),
        *("- initrd's port", "- system's port"),
        *("ok paramiko", "ok SSH key", "- host key"),
    ]


SEEN = {  # with these settings; a row that ends the table is followed by no login
    "all is right": (
        "",
        "ok +magic packet .*127.0.0.1 to 127.255.255.255",
        "ok +initrd's port .*port [0-9]+ is open; it says SSH-2.0-dropbear",
        "- +system's port .*port [0-9]+ refuses",
        "ok +host key +pinned and verified",
        "ok +login +root can log in",
    ),
    "mute": ("SYSTEM_SSH_PORT=MUTE", "- +system's port .*is open; it says nothing"),
    "not all is right": (
        "PIN=24681012 LISTEN=127.0.0.1:INITRD SSH_USER=nobody",
        "- +PIN +digits",
        "WRONG +web port .*another program .* choose another port in WAKER_LISTEN",
        "WRONG +login .*SHA256:.*nobody",
    ),
    "waker runs": ("LISTEN=127.0.0.1:PAGE", "ok +web port +waker's page is on [0-9]+"),
    "busy": ("LISTEN=127.0.0.1:MUTE", "LOOK +web port +[0-9]+ is in use, but waker"),
    "one is wrong": ("LISTEN=203.0.113.9:8080", "WRONG +web port", "ok +login"),
    "swapped ports": (
        "INITRD_SSH_PORT=CLOSED SYSTEM_SSH_PORT=INITRD",
        "- +system's port .* says SSH-2.0-dropbear.*; are the two ports swapped",
    ),
    "one port": ("SYSTEM_SSH_PORT=INITRD", "ok +login +root can"),
    "the system is up": (
        "SYSTEM_SSH_PORT=RED",
        "ok +system's port .*red",  # printed without control characters
        "- +host key +not seen",
    ),
    "no pin yet": (
        "SYSTEM_SSH_PORT=RED SSH_HOST_KEY=",
        "LOOK +host key +WAKER_SSH_HOST_KEY is not set.*cannot unlock; check again",
    ),
    "no pin": (
        "SSH_HOST_KEY=",
        "LOOK +host key .*not pinned.*cannot unlock.*_KEY=ssh-ed25519 AAAA.*\n$",
    ),
    "another pin": (
        "SSH_HOST_KEY=OTHER",
        "WRONG +host key .*pinned SHA256:.*SHA256:.*\n$",
    ),
}


@pytest.mark.parametrize("row", SEEN.values(), ids=SEEN)
def test_the_table_shows_what_was_seen(machine: Machine, row: tuple[str, ...]) -> None:
    """It does not log in to a stranger, nor if no key is pinned, and sends nothing."""
    machine.ask()
    changes, *expected = row
    settings = OWN | dict(change.split("=") for change in changes.split())
    odd = b"SSH-2.0-\x1b[31mred\x07\xc2\x9b\r\n"
    with says(odd) as red, says(b"") as mute, says(PAGE) as page:
        ports = {"INITRD": machine.initrd_port, "CLOSED": machine.system_port}
        ports |= {"RED": red, "MUTE": mute, "PAGE": page}
        for name, value in (ports | {"OTHER": OTHER_KEY}).items():
            settings = {n: v.replace(name, str(value)) for n, v in settings.items()}
        table = run(machine.settings(**settings))
    for pattern in expected:
        assert re.search(f"(?m)^{pattern}", table)
    assert machine.commands() == []
    assert machine.packets() == []


def test_files_that_cannot_be_used_are_wrong(tmp_path: Path) -> None:
    """A private key even if no host key is pinned."""
    key, file = tmp_path / "ssh_key", tmp_path / "waker.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in BASE.items()))
    table = run({}, "--env-file", str(file))
    assert re.search(f"(?m)^WRONG +SSH key .*{key} is missing", table)
    command = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "secret", "-f"]
    subprocess.run([*command, str(key)], check=True)
    for mode, seen in ((0o640, "ok +conf"), (0o604, f"WRONG +conf.* 600 {file}")):
        file.chmod(mode)
        table = run({}, "--env-file", str(file))
        assert re.search(f"(?m)^{seen}", table)
        assert re.search(f"(?m)^WRONG +SSH key .*{key} has a passphrase", table)
    key.unlink()
    os.mkfifo(key)
    table = run({}, "--env-file", str(file))
    assert re.search(f"(?m)^WRONG +SSH key .*{key} is not a regular file", table)


def test_a_full_disk_is_named_without_a_traceback() -> None:
    by = "sh", "-c", '"$@" >/dev/full', "sh"
    ended = run_waker("check", settings=BASE, by=by, program=BOX)
    assert ended.stderr == "standard output: No space left on device\n"
    assert ended.returncode == 1


def test_a_group_that_keeps_systemd_from_making_its_user_is_wrong() -> None:
    """Unless there is a user as well."""
    need_root()
    script = """
        mount -t tmpfs none /run; cp /etc/group /etc/passwd /run
        echo waker:x:4000: >>/run/group
        for name in group passwd; do mount --bind /run/$name /etc/$name; done
        "$@"
        echo waker:x:4000:4000::/: >>/run/passwd
        "$@"
    """
    by = need("unshare"), "--mount", "sh", "-c", script, "sh"
    need("systemctl")
    ended = run_waker("check", settings=BASE, by=by, program=BOX)
    (line,) = re.findall("(?m)^WRONG +user +(.*)", ended.stdout)
    assert line.startswith("there is a group waker, but no user waker. Run: ")


def test_whoever_reads_only_its_first_line_sees_no_traceback() -> None:
    script = '"$@" | head -n 1'
    by = "sh", "-c", script, "sh"
    ended = run_waker("check", settings=BASE, by=by, program=BOX)
    assert ended.stdout.startswith("ok     configuration")
    assert ended.stderr == ""


APK = "apk update && apk add python3-paramiko python3-six, or see docs/openwrt.md"


@pytest.mark.parametrize(
    ("tool", "module", "remedy"),
    [
        ("apt", "import no_such_six", "apt install python3-paramiko"),
        ("apk", "import os; os.TripleDES", APK),
    ],
)
def test_a_broken_paramiko_is_wrong_and_the_systems_tool_mends_it(
    tmp_path: Path, tool: str, module: str, remedy: str
) -> None:
    (tmp_path / tool).touch(0o755)
    (tmp_path / "paramiko.py").write_text(module)
    settings = BASE | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    mended = f"install it with: {remedy}"
    assert re.search(rf"WRONG +paramiko .*{mended} \(", run(settings))
    message = unlock(settings_at(tmp_path, free_port()) | settings)
    assert re.match(
        "error: paramiko .* `waker check`.* The passphrase was not", message
    )


# ---- Networks ------------------------------------------------------------------------

FAR = "192.168.88.9"
NEAR, SILENT, LIMITED = "192.168.77.20", "192.168.77.30", "255.255.255.255"
KNOWN, FIXED = "192.168.77.40", "192.168.77.50"  # of which the ARP table has entries


def run_at(box: Namespace, folder: Path, **where: str) -> str:
    """Run it in a network, and without paramiko, which takes time to load."""
    (folder / "paramiko.py").write_text("import nothing")
    others = {f"WAKER_HOMELAB_{name}": value for name, value in where.items()}
    return run(BASE | others | {"PYTHONPATH": str(folder)}, by=box.command())


def test_the_packets_route_is_shown_and_nothing_is_sent(
    home: Home, tmp_path: Path
) -> None:
    """A tunnel, as of Tailscale or WireGuard, may have a route, but cannot broadcast.

    Of a server that is off, the ARP table has no MAC address to compare.
    """
    router, machine, provider = home
    with (
        router.plug_in(IFF_TUN, "tun0", "10.8.0.2/24"),
        machine.capture() as at_machine,
        provider.capture() as at_provider,
    ):
        ip(f"-n {router.name} address add 10.9.0.2/24 dev tun0")
        # Behind the server is another network. All others are behind the tunnel.
        ip(f"-n {router.name} route add 192.168.88.0/24 via {NEAR}")
        ip(f"-n {router.name} route add 192.168.0.0/16 dev tun0")
        for address, kind in ((FIXED, "permanent"), (KNOWN, "reachable")):
            entry = f"{address} lladdr 02:00:00:00:00:01 dev lan nud {kind}"
            ip(f"-n {router.name} neighbour add {entry}")
        for box, host, broadcast, verdict, seen in (
            (router, SILENT, LIMITED, "ok", f"from 192.168.77.1 to {LIMITED}$"),
            (router, SILENT, "10.7.7.255", "-", "from 198.51.100.2 .*another network"),
            (router, "10.7.7.9", LIMITED, "WRONG", "on another network.*into the"),
            (router, SILENT, KNOWN, "WRONG", f"{KNOWN} is not a broadcast.*Delete"),
            (router, SILENT, FIXED, "LOOK", f"{FIXED} is not.*permanent ARP entry"),
            (machine, "203.0.113.9", LIMITED, "WRONG", "unreachable; connect this box"),
            (router, "10.8.0.9", LIMITED, "WRONG", "10.8.0.2 .*tun0 cannot broadcast"),
            (router, "10.9.0.9", LIMITED, "WRONG", "10.9.0.2 .*tun0 .*the route"),
            (router, "10.8.0.9", "10.8.0.255", "-", "the other end of tun0"),
            (router, SILENT, "127.255.255.255", "LOOK", "reached from 192.168.77.1"),
            (router, FAR, LIMITED, "WRONG", "on another network"),
            (router, FAR, "192.168.88.255", "-", "another network"),
        ):
            table = run_at(box, tmp_path, HOST=host, BROADCAST=broadcast)
            (line,) = re.findall("(?m)^.* magic packet .*", table)
            assert re.match(f"{verdict} +magic packet .*{seen}", line)
            assert "MAC address" not in table
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


def test_a_box_without_ipv4_is_told_so(home: Home, tmp_path: Path) -> None:
    machine = home[1]
    ip(f"-n {machine.name} address flush dev eth0")
    table = run_at(machine, tmp_path, HOST="2001:db8::9", BROADCAST="192.168.77.255")
    assert re.search("(?m)^WRONG +magic packet +this box has no IPv4 address", table)


def test_a_card_without_a_cable_is_seen(home: Home, tmp_path: Path) -> None:
    """The route over it stays, and so do packets that it will never send."""
    router, machine, _ = home
    ip(f"-n {machine.name} link set eth0 down")
    table = run_at(router, tmp_path, HOST=NEAR)
    assert re.search("(?m)^LOOK +magic packet .*lan has no link", table)


def test_empty_settings_are_followed_by_what_fills_them_in(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    shutil.copy(CHECKOUT / "waker.env.example", file)

    def next_step() -> str:
        ended = run_waker("--env-file", str(file), "check", program=BOX)
        assert (ended.returncode, ended.stdout) == (78, "")
        return ended.stderr.splitlines()[-1]

    prepare = f"waker prepare --config {tmp_path} me@192.168.1.20"
    assert next_step() == f"To fill them in, run: {prepare}"
    file.write_text(file.read_text().replace("PIN=", "PIN=12345678"))
    assert "WAKER_HOMELAB_MAC has no value" in next_step()


def test_the_mac_address_is_compared_with_arp(home: Home, tmp_path: Path) -> None:
    """The commonest mistake is the address of another card.

    A stranger that answers in the server's place is not overlooked, but is not wrong: a
    server may have two cards.
    """
    router, machine, _ = home
    seen, mac = "02:00:00:00:00:20", BASE["WAKER_HOMELAB_MAC"]
    ip(f"-n {machine.name} link set eth0 address {seen}")
    ip(f"-n {router.name} neighbour add {SILENT} lladdr {seen} dev lan")
    differs = f"has {seen} .*{mac}.*address"
    for host, own, words in (
        (NEAR, seen, f"ok +MAC address +{seen}"),
        (NEAR, mac, f"LOOK +MAC address +{NEAR} {differs}"),
        (SILENT, mac, f"LOOK +MAC address +{SILENT} {differs}"),
    ):
        table = run_at(router, tmp_path, HOST=host, MAC=own)
        assert re.search(f"(?m)^{words}", table)
