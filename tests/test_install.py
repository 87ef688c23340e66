"""What make builds, installs and never touches, how waker is started, and the demo."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import homelab
import pytest
from conftest import CHECKOUT, Client, each, make, need, wait_for
from ssh_servers import free_port
from stand_ins import mounted
from test_server import Terminal

UNITS = "usr/lib/systemd/system"


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of the files in a folder, and of the folder with settings."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777
        for path in [*found, *folder.glob("etc/waker")]
    }


# ---- make ----------------------------------------------------------------------------

INSTALLATIONS = {
    "systemd": ("INIT=systemd PREFIX=/usr", f"{UNITS}/waker.service", 0o644),
    "procd": ("INIT=procd", "etc/init.d/waker", 0o755),
}


@each("variables service mode", INSTALLATIONS)
def test_install_puts_each_file_in_its_place_and_never_touches_settings(
    variables: str, service: str, mode: int, tmp_path: Path
) -> None:
    to, root = [*variables.split(), "DESTDIR=root"], tmp_path / "root"
    program, settings = root / "usr/bin/waker", root / "etc/waker/waker.env"
    make(tmp_path, "install", *to)
    private = {"etc/waker": 0o700, "etc/waker/waker.env": 0o600}
    assert modes(root) == {"usr/bin/waker": 0o755, service: mode} | private
    assert re.search("[ =]/usr/bin/waker --env-file ", (root / service).read_text())
    # Debian's python3-paramiko is for this one, whatever else is in the PATH.
    assert program.read_bytes().startswith(b"#!/usr/bin/python3\n")
    # Another computer's Python may differ, and on a router, room is short.
    built = tmp_path / "dist/waker"
    assert program.read_bytes() == built.read_bytes()

    settings.parent.chmod(0o710)
    settings.write_text("WAKER_PIN=mine\n")
    make(tmp_path, "install", *to)
    assert settings.read_text() == "WAKER_PIN=mine\n"
    assert modes(root)["etc/waker"] == 0o710

    settings.unlink()
    settings.symlink_to("../unmounted/waker.env")
    make(tmp_path, "install", *to)
    make(tmp_path, "uninstall", *to)
    assert [path for path in root.rglob("*") if not path.is_dir()] == [settings]
    assert settings.is_symlink()


def test_install_makes_a_key_once_and_shows_it_with_the_next_step(
    tmp_path: Path,
) -> None:
    need("ssh-keygen")
    make(tmp_path, "dist")
    etc = tmp_path / "etc"
    etc.mkdir()
    shutil.copy("/etc/passwd", etc)  # for ssh-keygen
    command = [*mounted(tmp_path, "etc"), "make", "--silent", "-C", str(tmp_path)]
    command += ["install", "INIT=systemd", f"PREFIX={tmp_path}/usr"]
    shown = subprocess.check_output(command, text=True)
    private, public = etc / "waker/ssh_key", etc / "waker/ssh_key.pub"
    key = private.read_bytes()
    assert private.stat().st_mode & 0o777 == 0o600
    assert f"\n    {public.read_text()}" in shown
    assert shown.endswith("\n    waker prepare me@192.168.1.20\n")
    assert public.read_text() not in subprocess.check_output(command, text=True)
    assert private.read_bytes() == key


# ---- systemd and procd ---------------------------------------------------------------


def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    """And rates the exposure of what sends messages at most 1.2, on a scale to 10."""
    analyze = need("systemd-analyze")
    make(tmp_path, "install", "INIT=systemd", "PREFIX=/usr", "DESTDIR=root")
    units = tmp_path / "root" / UNITS
    shutil.copytree(CHECKOUT / "box/notify", units, dirs_exist_ok=True)
    program = tmp_path / "root/usr/local/bin/waker-notify"
    program.parent.mkdir(parents=True)
    units.joinpath("notify").rename(program)
    names = "waker.service", "waker-notify.service", "waker-notify.timer"
    verify = [analyze, "verify", "--man=no", "--recursive-errors=no"]
    verify += [f"--root={tmp_path}/root", *(f"/{UNITS}/{name}" for name in names)]
    assert subprocess.check_output(verify, stderr=subprocess.STDOUT) == b""
    rate = [analyze, "security", "--offline=true", "--threshold=12"]
    subprocess.run([*rate, str(units / "waker-notify.service")], check=True)


# Instead of /etc/rc.common: print what the script asks the system to do.
RC_COMMON = f"""\
for name in user_exists group_add_next user_add id chown chmod find logger \
    procd_open_instance procd_set_param procd_close_instance
do
    eval "$name() {{ echo $name \\"\\$@\\"; }}"
done
. {CHECKOUT}/waker.init
echo "$USE_PROCD $START $env_file"
env_file=./waker.env
"""
INSTANCE = """\
user_add waker  group_add_next waker
chown root:waker /etc/waker
chmod 0750 /etc/waker
find /etc/waker -type f -exec chown waker:waker {} ; -exec chmod 0600 {} ;
chown root:waker ./waker.env
chmod 0640 ./waker.env
procd_set_param command /usr/bin/waker --env-file ./waker.env
procd_set_param user waker
procd_set_param file ./waker.env
procd_set_param respawn 3600 5 0
procd_set_param term_timeout 100
procd_set_param stdout 1
procd_set_param stderr 1
procd_close_instance
"""
REFUSAL = "so waker is not started"
ROUTERS = {
    "new user": ("user_exists() { false; }", INSTANCE),
    "no user": ("id() { false; }", f"there is no user waker, {REFUSAL}"),
    "no settings": ("rm waker.env", f"./waker.env is missing, {REFUSAL}"),
}


@each("system asked", ROUTERS)
def test_procd_runs_waker_as_its_own_user_or_not_at_all(
    system: str, asked: str, tmp_path: Path
) -> None:
    tmp_path.joinpath("waker.env").touch()
    script = f"{RC_COMMON}{system}\nstart_service"
    command = [need("busybox"), "sh", "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    printed = ended.stdout.decode()
    assert printed.startswith("1 95 /etc/waker/waker.env\n")
    for line in asked.splitlines():
        assert line in printed
    assert ended.returncode == (REFUSAL in asked)
    assert ("procd_open_instance" in printed) == (asked == INSTANCE)


# ---- make demo -----------------------------------------------------------------------


def test_the_demo_shows_its_secrets_and_enter_switches_its_server_off() -> None:
    where = f"0.0.0.0:{free_port()}"  # nobody else takes it before the demo does
    folder = CHECKOUT / "tests/support"
    quickly = f"import homelab; print(homelab.main('{where}', pace=0.1))"
    demo = Terminal(["env", "-C", str(folder), sys.executable, "-c", quickly])
    assert demo.asks("listens on")
    place = r"http://(.*):(\d+)/\nPIN +(.*)\npassphrase +(.*)\n"
    ((host, port, pin, passphrase),) = re.findall(place, demo.printed)
    client = Client(int(port), host=host).log_in(pin)
    assert client.start(passphrase).status == 200
    demo.answer("\nstart: booting: Unlocked: cryptroot.\n", "")
    wait_for(lambda: client.status()["state"] == "off")
    demo.answer("", "\3")  # Ctrl-C interrupts its shell as well
    demo.end()
    assert demo.printed.endswith("\n0\n")


def test_a_demo_that_cannot_listen_says_so() -> None:
    with pytest.raises(SystemExit, match="LISTEN must be a free ADDRESS:PORT"):
        homelab.main("203.0.113.9:80")
