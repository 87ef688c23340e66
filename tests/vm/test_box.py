"""Boxes that run waker: booted ones with systemd, and minimal Debians in chroots."""

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from booted import INSTALL, LISTENS, Box
from computer import MAGIC, PATIENCE, Owner, computer_of
from conftest import (
    PASSPHRASE,
    PIN,
    Client,
    daemon,
    make,
    need,
    run_waker,
    wait_for,
)
from guests import (
    ADDRESS,
    BOX,
    BOXES,
    BUILD,
    MAC,
    PACKAGES,
    ROUTER,
    ready,
    run,
    run_in,
)
from homelab import Homelab
from namespaces import hosts
from phones import UP, WAITING, Phone, hello
from reported import ANSWER, HOST_KEY

import waker

KEPT = [f"/etc/waker/{name}" for name in ("ssh_key", "ssh_key.pub", "waker.env")]
INSTALLED = [
    "/etc/waker 700 0 0",
    *(f"{name} 600 0 0" for name in KEPT),
    "/usr/local/bin 755 0 0",
    "/usr/local/bin/waker 755 0 0",
    "/usr/local/lib/systemd 755 0 0",
    "/usr/local/lib/systemd/system 755 0 0",
    "/usr/local/lib/systemd/system/waker.service 644 0 0",
]
SETTINGS = {"WAKER_PIN": PIN, "WAKER_HOMELAB_MAC": MAC, "WAKER_HOMELAB_HOST": ROUTER}
# Other ways to run waker: for a second server, by a template, and by Python. All three
# have settings in other places.
OTHERS = """
for n in 2 -b -loop; do cp -a /etc/waker /etc/waker$n; done
echo WAKER_LISTEN=[::]:8081 >>/etc/waker2/waker.env
echo WAKER_LISTEN=[::]:8082 >>/etc/waker-b/waker.env
echo WAKER_LISTEN=203.0.113.9:8083 >>/etc/waker-loop/waker.env
cd /etc/systemd/system
unit=/usr/local/lib/systemd/system/waker.service
sed s,/etc/waker/,/etc/waker2/, $unit >waker2.service
sed s,/etc/waker/,/etc/waker-%i/, $unit >waker@.service
mkdir waker.service.d
printf '[Service]\nEnvironment=A=1 WAKER_HOMELAB_NAME=box\n' >waker.service.d/own.conf
cp /etc/waker/waker.env /etc/default/wk
cat >wk.service <<END
[Service]
DynamicUser=yes
Environment=WAKER_LISTEN=127.0.0.1:8084
EnvironmentFile=-/etc/default/w*
ExecStart="/usr/bin/python3" /usr/local//bin/waker
END
systemctl daemon-reload
systemctl start waker2 waker@b waker@loop wk
"""
RUNNING = "waker waker2 waker@b wk"
# A mistake in the settings of each service, where they are.
MISTAKES = {
    "waker": (
        "/etc/systemd/system/waker.service.d/own.conf",
        'Environment="WAKER_SSH_USER=a b"',
    ),
    "waker2": ("/etc/waker2/waker.env", "WAKER_SSH_USER=a b"),
    "waker@b": ("/etc/waker-b/waker.env", "WAKER_SSH_USER=a b"),
    "wk": ("/etc/default/wk", "WAKER_SSH_USER=a b"),
}
IS_COMPILED = """
import importlib.util, zipfile
code = zipfile.ZipFile("/usr/local/bin/waker").read("waker.pyc")
print(code.startswith(importlib.util.MAGIC_NUMBER))
"""


def new_machine(folder: Path, address: str = "127.0.0.1") -> Homelab:
    return Homelab(folder, address, packet_port=9, passphrase=PASSPHRASE)


def check_all_steps(owner: Owner) -> str:
    """Log in, wake and unlock, until the system is up; returns the wake message."""
    owner.router.run(owner.client.log_in)
    owner.wait_for("off")
    woken = owner.call("POST", "/api/wol")
    assert woken.status == 200
    owner.wait_for("locked")
    assert owner.unlock("wrong") == (400, "Wrong passphrase for disk cryptroot.")
    assert owner.unlock(PASSPHRASE) == (200, "Unlocked: cryptroot.")
    owner.wait_for("up")
    return str(woken.json["message"])


@pytest.fixture(params=BOXES, ids=[box.name for box in BOXES])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    """A box to which the one file was copied."""
    make(tmp_path / "checkout", "dist")
    ready()
    with computer_of(request.param.hardware(), tmp_path) as computer:
        computer.switch_on()
        box = Box(computer)
        box.wait("true")
        program = tmp_path / "checkout/dist/waker"
        box.run("cat >waker", program.read_bytes())
        yield box


@pytest.fixture
def machine(box: Box, tmp_path: Path) -> Iterator[Homelab]:
    """A machine that is off, in the box's network."""
    sleeping = box.computer.router.run(partial(new_machine, tmp_path, ROUTER))
    with contextlib.closing(sleeping):
        yield sleeping


def test_waker_is_a_sandboxed_systemd_service(
    box: Box, machine: Homelab, tmp_path: Path
) -> None:
    router = box.computer.router
    assert "waker prepare me@" in box.run(INSTALL)
    assert box.run("systemctl is-enabled waker || :") == "disabled\n"

    # Errors name each missing setting and each missing file.
    report = box.run("waker check 2>&1 || [ $? = 78 ]")
    assert report.count(" has no value") == 3
    box.run("rm /etc/waker/*")
    (line,) = box.fail_to_start()
    assert line.startswith("/etc/waker/waker.env is missing or empty, or systemd")
    settings = machine.settings() | {"WAKER_PIN": PIN}
    for name in ("WAKER_SSH_KEY", "WAKER_HOMELAB_BROADCAST"):
        del settings[name]
    box.settle(settings)
    _, line = box.fail_to_start()
    assert line.startswith(
        "WAKER_SSH_KEY /etc/waker/ssh_key is missing or empty, or systemd"
    )

    # When all are there, it works, in a sandbox, and logs no secret.
    box.write("/etc/waker/ssh_key", machine.ssh_key.read_text())
    box.settle(settings)
    box.run("systemctl enable --now waker")
    box.wait(LISTENS)
    pid = box.show("MainPID")
    lines = box.run(f"cat /proc/{pid}/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert "0" not in status["Uid"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    limit = box.run(f"prlimit --core --raw --noheadings -o SOFT,HARD -p {pid}")
    assert limit.split() == ["1", "1"]
    assert box.show("OOMPolicy") == "continue"
    owner = Owner(Client(8080, host=ADDRESS), router)
    assert f"from {ADDRESS}" in check_all_steps(owner)
    lines = box.journal()
    assert sum(line.startswith(f"ip={ROUTER} PIN accepted") for line in lines) == 1
    assert not any(secret in line for line in lines for secret in (PIN, PASSPHRASE))

    # After a crash, it restarts with its new settings.
    box.settle(settings | {"WAKER_HOMELAB_NAME": "another name"})
    box.run("systemctl kill --signal=SEGV waker")
    box.wait(f"[ $(systemctl show waker --value -p NRestarts) = 1 ] && {LISTENS}")
    router.run(owner.client.log_in)
    assert owner.status()["name"] == "another name"

    # It stops within 2 s, even while a client is connected.
    stop = "a=$(date +%s%N); systemctl stop waker; echo $(($(date +%s%N) - a))"
    with router.run(lambda: socket.create_connection((ADDRESS, 8080))):
        assert int(box.run(stop)) < 2e9
    assert box.show("Result") == "success"

    # It starts without a network, and works as soon as there is one.
    box.settle(settings)
    box.run("systemd-run --on-active=1 systemctl reboot")
    box.computer.plug(in_=False)
    box.computer.wait_for("guest login:", 2)
    box.computer.plug(in_=True)
    box.wait(LISTENS)
    assert box.show("NRestarts") == "0"
    router.run(owner.client.log_in)
    owner.wait_for("up")


def test_messages_about_the_server_arrive_on_a_phone(
    box: Box, machine: Homelab
) -> None:
    router = box.computer.router
    settings = machine.settings() | {"WAKER_PIN": PIN}
    del settings["WAKER_SSH_KEY"]
    box.run(INSTALL)
    box.settle(settings)
    box.write("/etc/waker/ssh_key", machine.ssh_key.read_text())
    box.run(f"echo {ROUTER} phone >>/etc/hosts")  # curl looks up its name
    install, log = "waker install notify", "journalctl -qu waker-notify"
    with router.run(partial(Phone, ROUTER)).listening() as phone:
        url = f"{phone.url.replace(ROUTER, 'phone')}\n".encode()

        # A failure is loud, and says where the reason is.
        phone.status = 500
        failed = box.computer.ssh(install, url)
        assert (failed.returncode, phone.messages) == (1, [])
        assert b"curl: (22) The requested URL returned error: 500\n" in failed.stderr
        assert b"Nothing was changed: the message could not be sent." in failed.stderr
        assert box.run("find / -xdev -name '*notify*' -path '*waker*'") == ""

        # Then each message is sent once, by the timer, and without a line in the log.
        phone.status = 200
        since = box.run("date +%s.%N").strip()
        box.run(install, url)
        assert phone.messages == [hello("off")]
        assert box.run("stat -c '%a %U' /etc/waker/notify_url") == "600 root\n"
        box.run("systemctl is-enabled waker-notify.timer")
        with router.run(lambda: socket.socket(type=socket.SOCK_DGRAM)) as udp:
            udp.sendto(MAGIC, (ROUTER, 9))
        wait_for(lambda: phone.messages[1:], bool, PATIENCE)
        assert box.run("systemctl is-active waker-notify.timer") == "active\n"
        box.run("waker unlock", PASSPHRASE.encode())
        wait_for(lambda: phone.messages[2:], bool, PATIENCE)
        box.run("systemctl start waker-notify")
        assert phone.messages == [hello("off"), WAITING, UP]
        assert box.run(f"journalctl --sync; {log} --since=@{since} --output=cat") == ""

        # Only the file has the address.
        box.run(f"grep -q {phone.topic} /etc/waker/notify_url")
        shown = box.run(
            "systemctl show waker-notify.service waker-notify.timer;"
            " journalctl -q --output=json; cat /usr/local/lib/systemd/system/*"
        )
        assert phone.topic.strip("/") not in shown

        # No message, no timer and no topic is left.
        assert "no longer sends messages" in box.run("waker uninstall --yes")
        left = box.run("find /etc /usr/local /var/lib -name '*waker*'")
        assert left == "/etc/waker\n/etc/waker/waker.env\n"


def test_an_upgrade_keeps_everything_and_restarts_every_service(
    box: Box, tmp_path: Path
) -> None:
    """Or it changes nothing. Uninstalling waits for the others."""
    make(tmp_path / "checkout", "install", "DESTDIR=stage")  # where 3.1 was, uncompiled
    box.send(tmp_path / "checkout/stage", "/")
    box.run("mkdir -m 700 /etc/waker")
    box.settle(SETTINGS)
    box.write("/etc/waker/ssh_key", "a key")
    box.run(f"{OTHERS} systemctl enable --now waker")
    state = "sha256sum /etc/waker*/*; systemctl is-enabled waker"
    program = "sha256sum /usr/local/bin/waker"
    pids = f"systemctl show {RUNNING} --value -p MainPID"
    before, old, packed = box.run(state), box.run(pids), box.run(program)
    for name, (place, mistake) in MISTAKES.items():
        box.run(f"cp {place} /root/right; cat >>{place}", f"{mistake}\n".encode())
        refused = box.computer.ssh(INSTALL)
        assert refused.returncode == 78, refused
        shown = refused.stderr.decode()
        assert re.search(rf"Nothing was changed: {name}\b.*:\nWAKER_SSH_USER", shown)
        box.run(f"cat /root/right >{place}; systemctl daemon-reload")
        assert (box.run(pids), box.run(program)) == (old, packed)
    # One that is restarted over and over counts as running.
    asked = box.computer.ssh("python3 waker install", b"n\n")
    assert b"\n    restart waker@loop\n" in asked.stdout
    box.run("systemctl stop waker@loop")
    shown = box.run(INSTALL)
    for name, port in zip(RUNNING.split(), (8080, 8081, 8082, 8084), strict=True):
        assert f"{name} answers on port {port}." in shown
    assert box.run(state) == before
    assert not {*old.split()} & {*box.run(pids).split()}
    assert box.run(f"python3 -c '{IS_COMPILED}'") == "True\n"

    refused = box.computer.ssh("waker uninstall --yes")
    (line,) = refused.stderr.splitlines()
    assert {*line.partition(b"runs waker: ")[2].split(b", ")} == {
        b"waker2",
        b"waker@b",
        b"wk",
    }
    box.run("systemctl disable --now waker2 waker@b wk")
    by_hand = "systemd-run --quiet --unit=by-hand /bin/sh -c"
    box.run(f"{by_hand} 'waker --env-file /etc/waker2/waker.env & wait'")
    box.wait("ss -lnt | grep :8081")
    refused = box.computer.ssh("waker uninstall --yes")
    assert re.search(b"runs waker: process [0-9]+$", refused.stderr)
    box.run("systemctl stop by-hand; waker uninstall --yes")
    assert box.computer.ssh("ss -lnt | grep :808").returncode == 1
    assert box.run("sha256sum /etc/waker*/*") == before.removesuffix("enabled\n")
    left = box.run("find /etc/systemd /usr/local -name '*waker*'")
    owners = "waker.service.d", "waker2.service", "waker@.service"
    assert {*left.split()} == {f"/etc/systemd/system/{name}" for name in owners}


# In place of ssh: a server that has been prepared.
SSH = f"""\
#!/bin/sh
[ "$1" = -V ] && exec /usr/bin/ssh -V
sent=$(echo "$@" | sed 's/.*(echo \\(.*\\) | base64.*/\\1/' | base64 -d)
nonce=$(echo "$sent" | sed -n 's/.* --nonce \\([0-9a-f]*\\) .*/\\1/p')
sed "s/NONCE/$nonce/" <<END
{ANSWER}END
"""


@pytest.mark.parametrize("suite", PACKAGES)
def test_one_file_does_everything_on_a_minimal_debian(
    suite: str, tmp_path: Path
) -> None:
    ready()
    tree = BUILD / f"minimal-{suite}"
    make(tmp_path / "checkout", "dist")
    with hosts(1) as (host,), tempfile.TemporaryDirectory(dir=tree) as name:
        folder = Path(name)
        shutil.copy(tmp_path / "checkout/dist/waker", folder)
        enter = [*host.command(), need("chroot"), str(tree)]
        program = f"/{folder.name}/waker"
        machine = host.run(partial(new_machine, tmp_path))
        with contextlib.closing(machine):
            shutil.copy(machine.ssh_key, folder)
            settings = machine.settings() | {"WAKER_SSH_KEY": f"/{folder.name}/ssh_key"}
            own = {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
            checked = run_waker(
                "check", settings=settings | own, by=enter, program=(program,)
            )
            assert re.search("(?m)^ok +paramiko", checked.stdout), checked
            assert (checked.returncode, checked.stderr) == (0, "")
            with daemon(settings, *enter, program=(program,)) as started:
                check_all_steps(Owner(started.client, host))
        assert sorted(path.name for path in folder.iterdir()) == ["ssh_key", "waker"]
        folder.joinpath("ssh").write_text(SSH)
        folder.joinpath("ssh").chmod(0o755)
        config = f"/{folder.name}/router"
        subprocess.run(
            [*enter, program, "prepare", "me@192.168.77.20", "--config", config],
            env={"PATH": f"/{folder.name}:/usr/bin:/bin"},
            check=True,
        )
        settings = waker.read_env_file(folder / "router/waker.env")
        assert settings["WAKER_SSH_HOST_KEY"] == HOST_KEY
        assert (folder / "router/ssh_key").exists()


@pytest.mark.parametrize("suite", PACKAGES)
def test_the_file_installs_itself_on_a_debian_that_is_not_running(
    suite: str, tmp_path: Path
) -> None:
    """With its packages, by its own apt. Nothing is started there."""
    ready()
    make(tmp_path / "checkout", "dist")
    tree = tmp_path / "tree"
    run("cp", "--archive", BUILD / f"fresh-{suite}", tree)
    shutil.copy(tmp_path / "checkout/dist/waker", tree / "root")
    shown = run_in(tree, "python3", "/root/waker", "install", "--yes")
    for package in BOX.split():
        assert f"\n    install {package} with apt\n" in shown
    assert "Nothing was started, because systemd is not running here." in shown
    assert "Next, prepare the server:\n\n    waker prepare me@192.168.1.20\n" in shown
    names = "/etc/waker /usr/local/bin /usr/local/lib/systemd"
    listed = run_in(tree, "find", *names.split(), "-printf", "%p %m %U %G\n")
    assert sorted(listed.splitlines()) == INSTALLED
    assert run_in(tree, "waker", "--version").startswith("waker ")
    fingerprint = run_in(tree, "ssh-keygen", "-lf", "/etc/waker/ssh_key")
    assert fingerprint.endswith("(ED25519)\n")
    enabled = tree / "etc/systemd/system/multi-user.target.wants/waker.service"
    assert not enabled.is_symlink()
    run_in(tree, "waker", "uninstall", "--yes")
    assert not enabled.is_symlink()
    left = run_in(tree, "find", *names.split(), "!", "-type", "d")
    assert sorted(left.splitlines()) == sorted(KEPT)
