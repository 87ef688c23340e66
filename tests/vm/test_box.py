"""The box that runs waker: a booted systemd, and a Debian with nothing else on it."""

import contextlib
import http.client
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificate import new_certificate
from computer import Computer, Lan, Owner, home_lan
from conftest import PASSPHRASE, PIN, Client, daemon, environment, make, need
from cryptroot_unlock import Disks
from guests import ADDRESS, BOXES, BUILD, PACKAGES, ROUTER, SSH_KEY, ready
from homelab import Homelab
from namespaces import hosts

PARAMIKO = {"bookworm": "2.12.0", "trixie": "3.5.1"}
LISTENS = "ss -lnt | grep -q :8080"  # with Type=exec, a service is active before that


@dataclass
class Box:
    """A booted Debian, and root's shell on it."""

    computer: Computer
    lan: Lan
    folder: Path

    def ssh(self, *arguments: str, given: bytes = b"") -> str:
        """Run ssh, which must succeed; returns what was printed."""
        known_hosts = self.folder / "known_hosts"
        host_key = (self.computer.guest.folder / "host_key.pub").read_text()
        known_hosts.write_text(f"{ADDRESS} {host_key}")
        options = {
            "UserKnownHostsFile": known_hosts,
            "ConnectTimeout": 5,
            "ControlMaster": "auto",  # one connection for all: each takes seconds
            "ControlPath": self.folder / "ssh",
            "ControlPersist": 300,
            "ServerAliveInterval": 5,
        }
        shell = [need("ssh"), "-q", "-i", str(SSH_KEY)]
        shell += [f"-o{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [*self.lan.router.command(), *shell, f"root@{ADDRESS}", *arguments],
            input=given,
            capture_output=True,
            check=False,
        )
        printed = done.stdout.decode() + done.stderr.decode()
        if done.returncode:
            raise RuntimeError(f"{arguments}: {done.returncode}: {printed}")
        return printed

    def run(self, command: str, given: bytes = b"") -> str:
        """Run a command, which must succeed; returns what it printed."""
        return self.ssh(command, given=given)

    def wait(self, command: str, seconds: float = 120) -> None:
        """Wait until a command succeeds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.run(command)
            except RuntimeError:
                late = time.monotonic() > deadline
                assert not late, f"{command}: {self.journal()}"
            else:
                return
            time.sleep(0.5)

    def write(self, path: str, content: str, mode: str = "600") -> None:
        self.run(f"cat > {path} && chmod {mode} {path}", content.encode())

    def settle(self, settings: dict[str, str]) -> None:
        """Write the settings."""
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self.write("/etc/waker/waker.env", "".join(lines))

    def journal(self) -> list[str]:
        """Read what waker has logged since the last time."""
        options = "--quiet --output=cat --cursor-file=/run/cursor"
        # It ends with 1 where there are none.
        read = f"journalctl --identifier=waker {options} || [ $? = 1 ]"
        return self.run(f"journalctl --sync; {read}").splitlines()

    def show(self, name: str) -> str:
        """Read a property of the unit."""
        return self.run(f"systemctl show waker --value -p {name}").strip()


@pytest.fixture(params=BOXES, ids=[box.name for box in BOXES])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    need("qemu-system-x86_64")
    ready()
    with home_lan() as lan:
        computer = Computer(request.param, lan, tmp_path / "console")
        box = Box(computer, lan, tmp_path)
        computer.switch_on()
        try:
            box.wait("systemctl is-system-running --wait || [ $? = 1 ]")
            yield box
        finally:
            with contextlib.suppress(RuntimeError):  # there may be no connection
                box.ssh("-O", "exit")
            computer.cut_power()
            print(computer.console)


@pytest.fixture
def machine(box: Box, tmp_path: Path) -> Iterator[Homelab]:
    """A machine that sleeps, in the same LAN."""

    def set_up() -> Homelab:
        disks = Disks({"cryptroot": PASSPHRASE})
        return Homelab(tmp_path, disks=disks, address=ROUTER, packet_port=9)

    with contextlib.closing(box.lan.router.run(set_up)) as machine:
        yield machine


def install(box: Box, folder: Path) -> None:
    """Install as a package does: `make install`, and its files to the box."""
    make(folder, "install", "DESTDIR=stage", "INIT=systemd")
    packed = subprocess.run(
        [need("tar"), "-C", str(folder / "stage"), "-c", "."],
        check=True,
        capture_output=True,
    )
    box.run("tar -C / --no-overwrite-dir -x", packed.stdout)
    box.run("systemctl daemon-reload")
    assert box.run("stat -c %a%U /etc/waker /etc/waker/waker.env") == (
        "700root\n600root\n"
    )


def see_that_it_does_not_start(box: Box) -> list[str]:
    """Returns the lines that say why."""
    box.journal()
    box.run("systemctl reset-failed")  # or starts in a row would be too many
    box.run("systemctl restart waker")
    box.wait("systemctl is-failed waker")
    assert (box.show("ExecMainStatus"), box.show("NRestarts")) == ("78", "0")
    return box.journal()


def missing(name: str) -> str:
    """Tell how a file that the unit could not hand over is named."""
    path = f"/run/credentials/waker.service/{name}"
    return f"{path} is missing or empty (systemd copies it from /etc/waker/{name})"


def see_each_fault_named(box: Box, right: dict[str, str], key: str) -> None:
    assert see_that_it_does_not_start(box) == [
        "WAKER_HOMELAB_HOST is not set; it must be an IP address such as 192.168.1.20",
        "WAKER_HOMELAB_MAC is not set; it must be a MAC address such as"
        " 52:54:00:12:34:56",
        "WAKER_PIN is not set; it must be 8 to 128 characters",
    ]
    told = box.run("waker check || [ $? = 78 ]")  # it finds the file that was installed
    assert told.count("WAKER_") == 3
    box.run("rm /etc/waker/waker.env")
    assert see_that_it_does_not_start(box) == [missing("waker.env")]
    box.settle(right)
    assert see_that_it_does_not_start(box) == [f"WAKER_SSH_KEY {missing('ssh_key')}"]
    box.write("/etc/waker/ssh_key", key)
    box.settle(right | {"WAKER_INITRD": "mandos", "WAKER_HOMELAB_MAK": ""})
    assert see_that_it_does_not_start(box) == [
        "WAKER_HOMELAB_MAK is not a setting; see `waker --help`",
        "WAKER_INITRD must be cryptroot (dropbear) or systemd",
    ]
    box.settle(right | {"WAKER_TLS_CERT": "cert.pem", "WAKER_TLS_KEY": "key.pem"})
    assert see_that_it_does_not_start(box) == [
        f"WAKER_TLS_CERT {missing('cert.pem')}",
        f"WAKER_TLS_KEY {missing('key.pem')}",
    ]


def see_it_wait_for_its_port(box: Box, right: dict[str, str]) -> None:
    """Another program has the port at first."""
    box.settle(right)
    box.journal()
    box.run("systemd-run --unit=other -q python3 -m http.server 8080 --bind ::")
    box.wait(LISTENS)
    box.run("systemctl restart waker")
    box.wait("[ $(systemctl show waker --value -p NRestarts) -gt 0 ]")
    told = "WAKER_LISTEN: Address already in use"
    assert any(line.startswith(told) for line in box.journal())
    box.run("systemctl stop other")
    box.wait(LISTENS)


def see_the_sandbox(box: Box) -> None:
    pid = box.show("MainPID")
    lines = box.run(f"cat /proc/{pid}/status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert "0" not in status["Uid"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    limit = box.run(f"prlimit --core --raw --noheadings -o SOFT,HARD -p {pid}")
    assert limit.split() == ["1", "1"]


def see_a_journey(owner: Owner, machine: Homelab) -> str:
    """From the PIN to the booted system; returns what was said of the packet."""
    owner.router.run(owner.client.log_in)
    assert owner.state() == "off"
    woken = owner.call("POST", "/api/wol")
    assert woken.status == 200
    machine.wait_for("locked")
    owner.wait_for("locked")
    assert owner.unlock("wrong") == (400, "Wrong passphrase for disk cryptroot.")
    assert owner.unlock(PASSPHRASE) == (200, "Unlocked: cryptroot.")
    owner.wait_for("up")
    return str(woken.json["message"])


def see_a_session(box: Box, owner: Owner, machine: Homelab) -> None:
    """A journey through the sandbox, and its traces in the journal."""
    assert f"from {ADDRESS}" in see_a_journey(owner, machine)
    lines = box.journal()
    assert sum(line.startswith(f"ip={ROUTER} PIN accepted") for line in lines) == 1
    assert not any(secret in line for line in lines for secret in (PIN, PASSPHRASE))


def see_it_start_again(box: Box, owner: Owner, signal: str, seconds: float) -> None:
    """After a signal that ends or stops it, it comes back by itself."""
    before = box.show("MainPID")
    box.run(f"kill -{signal} {before}")
    box.wait(f"[ $(systemctl show waker --value -p MainPID) != {before} ]", seconds)
    box.wait(LISTENS, 60)
    box.lan.router.run(owner.client.log_in)
    assert owner.state() == "up"


def see_it_stop(box: Box) -> None:
    """Within 2 s, whoever is connected."""
    stop = "a=$(date +%s%N); systemctl stop waker; echo $(($(date +%s%N) - a))"

    def talk() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(ADDRESS, 8080)
        connection.connect()
        return connection

    with contextlib.closing(box.lan.router.run(talk)):
        nanoseconds = int(box.run(stop))
    print(f"stopped in {nanoseconds / 1e9} s")
    assert nanoseconds < 2e9
    assert box.show("Result") == "success"


def see_https(box: Box, right: dict[str, str], folder: Path) -> None:
    certificate = new_certificate(folder)
    box.write("/etc/waker/cert.pem", certificate.cert.read_text())
    box.write("/etc/waker/key.pem", certificate.key.read_text())
    box.settle(right | {"WAKER_TLS_CERT": "cert.pem", "WAKER_TLS_KEY": "key.pem"})
    box.run("systemctl restart waker")
    box.wait(LISTENS)
    context = ssl.create_default_context(cafile=str(certificate.cert))
    context.check_hostname = False

    def get() -> int:
        connection = http.client.HTTPSConnection(ADDRESS, 8080, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            return connection.getresponse().status

    assert box.lan.router.run(get) == 200


def see_it_boot_without_a_network(box: Box, owner: Owner) -> None:
    box.run("systemctl enable waker; systemd-run --on-active=10 systemctl reboot")
    box.computer.plug(in_=False)
    box.computer.wait_for("guest login:", 2)
    box.computer.plug(in_=True)
    box.wait(LISTENS)
    assert box.show("NRestarts") == "0"
    box.lan.router.run(owner.client.log_in)
    owner.wait_for("up", 30)


def test_it_is_a_service_of_a_booted_systemd(
    box: Box, machine: Homelab, tmp_path: Path
) -> None:
    install(box, tmp_path / "checkout")
    settings = machine.settings() | {"WAKER_PIN": PIN}
    for name in ("WAKER_SSH_KEY", "WAKER_HOMELAB_BROADCAST"):
        del settings[name]
    see_each_fault_named(box, settings, machine.ssh_key.read_text())
    see_it_wait_for_its_port(box, settings)
    see_the_sandbox(box)
    owner = Owner(Client(8080, host=ADDRESS), box.lan.router)
    see_a_session(box, owner, machine)
    see_it_start_again(box, owner, "SEGV", 20)
    see_it_stop(box)
    see_https(box, settings, tmp_path)
    box.settle(settings)
    see_it_boot_without_a_network(box, owner)


@pytest.mark.parametrize("suite", PACKAGES)
def test_one_file_does_the_whole_journey_on_a_minimal_debian(
    suite: str, tmp_path: Path
) -> None:
    ready()
    tree = BUILD / f"minimal-{suite}"
    make(tmp_path / "checkout", "dist")
    with hosts(1) as (host,), tempfile.TemporaryDirectory(dir=tree) as name:
        folder = Path(name)
        shutil.copy(tmp_path / "checkout" / "dist" / "waker", folder)

        def set_up() -> Homelab:
            disks = Disks({"cryptroot": PASSPHRASE})
            return Homelab(tmp_path, disks=disks, packet_port=9)

        with contextlib.closing(host.run(set_up)) as machine:
            shutil.copy(machine.ssh_key, folder)
            settings = machine.settings()
            settings["WAKER_SSH_KEY"] = f"/{folder.name}/ssh_key"
            enter = [*host.command(), need("chroot"), str(tree)]
            program = f"/{folder.name}/waker"
            with daemon(settings, *enter, program=(program,)) as started:
                see_a_journey(Owner(started.client, host), machine)
            ended = subprocess.run(
                [*enter, program, "check"],
                env=environment(settings | {"WAKER_PIN": PIN}),
                capture_output=True,
                text=True,
                check=True,
            )
            assert f"ok     paramiko       {PARAMIKO[suite]}\n" in ended.stdout
            assert ended.stderr == ""
        assert sorted(path.name for path in folder.iterdir()) == ["ssh_key", "waker"]
