"""`make install`: what is put where, and what is never touched."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKOUT, PIN, make, need

import waker

UNIT = "usr/local/lib/systemd/system/waker.service"
USR_UNIT = UNIT.replace("local/", "")


def install(folder: Path, *variables: str) -> dict[str, tuple[str, str]]:
    """Install; returns each file's mode and text."""
    make(folder, "install", "DESTDIR=root", *variables)
    root = folder / "root"
    return {
        str(path.relative_to(root)): (oct(path.stat().st_mode), path.read_text())
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("variables", "program", "service", "mode"),
    [
        ("INIT=systemd", "usr/local/bin/waker", UNIT, "0o100644"),
        ("INIT=systemd PREFIX=/usr", "usr/bin/waker", USR_UNIT, "0o100644"),
        ("INIT=procd", "usr/bin/waker", "etc/init.d/waker", "0o100755"),
    ],
)
def test_each_file_has_its_conventional_place_and_mode(
    variables: str, program: str, service: str, mode: str, tmp_path: Path
) -> None:
    files = install(tmp_path, *variables.split())
    assert {name: seen for name, (seen, _) in files.items()} == {
        program: "0o100755",
        service: mode,
        "etc/waker/waker.env": "0o100600",
    }
    assert (tmp_path / "root/etc/waker").stat().st_mode & 0o777 == 0o700
    assert f" /{program} --env-file " in files[service][1].replace("=", " ")


def test_a_place_that_begins_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        make(tmp_path, "install-program", "PREFIX=usr", f"DESTDIR={tmp_path}/")
    assert not (tmp_path / "usr").exists()


def test_a_configuration_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    install(tmp_path, "INIT=systemd")
    folder = tmp_path / "root/etc/waker"
    folder.chmod(0o710)
    (folder / "waker.env").write_text("WAKER_PIN=mine\n")
    names = ["cert.pem", "key.pem", "ssh_key", "ssh_key.pub", "waker.env"]
    for name in names[:-1]:
        (folder / name).write_text("mine, too")
    install(tmp_path, "INIT=procd")
    files = install(tmp_path, "INIT=systemd")
    assert files["etc/waker/waker.env"][1] == "WAKER_PIN=mine\n"
    assert folder.stat().st_mode & 0o777 == 0o710
    told = make(tmp_path, "uninstall", "DESTDIR=root", "PREFIX=/usr").stdout
    told = make(tmp_path, "uninstall", "DESTDIR=root").stdout
    assert told == "root/etc/waker is left; it has your settings and keys.\n"
    left = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert sorted(left) == [folder / name for name in names]


def test_settings_that_are_elsewhere_just_now_are_not_overwritten(
    tmp_path: Path,
) -> None:
    link = tmp_path / "root/etc/waker/waker.env"
    link.parent.mkdir(parents=True)
    link.symlink_to("../unmounted/waker.env")
    install(tmp_path, "INIT=systemd")
    assert link.is_symlink()


def test_the_example_wants_three_values_and_shows_every_setting(tmp_path: Path) -> None:
    example = CHECKOUT.joinpath("waker.env.example").read_text()
    file = tmp_path / "waker.env"
    file.write_text(example)
    three = {
        "WAKER_PIN": PIN,
        "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST": "192.168.1.20",
    }
    with pytest.raises(waker.ConfigError) as told:
        waker.read_config(waker.read_env_file(file), tmp_path)
    assert {fault.split()[0] for fault in str(told.value).splitlines()} == {*three}
    file.write_text(example.replace("\n#WAKER", "\nWAKER"))
    shown = waker.read_env_file(file)
    assert shown.keys() == {setting[0] for setting in waker.SETTINGS}
    for name, default, _, _ in waker.SETTINGS:
        assert default in ("", shown[name])


def ended(*command: str) -> tuple[int, str]:
    """Run a program, if there is one; returns its status, and all that it printed."""
    seen = subprocess.run(
        [need(command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return seen.returncode, seen.stdout


def test_systemd_understands_the_unit_and_does_not_restart_a_mistake(
    tmp_path: Path,
) -> None:
    unit = install(tmp_path, "INIT=systemd")[UNIT][1]
    verify = "systemd-analyze", "verify", "--man=no", "--recursive-errors=no"
    assert ended(*verify, f"--root={tmp_path}/root", f"/{UNIT}") == (0, "")
    assert f"\nRestartPreventExitStatus={os.EX_CONFIG}\n" in unit


def test_the_sandbox_leaves_little_exposed(tmp_path: Path) -> None:
    install(tmp_path, "INIT=systemd")
    unit = tmp_path / "root" / UNIT
    analyze = "systemd-analyze", "security", "--offline=true", "--threshold=11"
    assert ended(*analyze, str(unit))[0] == 0
    unit.write_text(unit.read_text().replace("CapabilityBoundingSet=\n", ""))
    assert ended(*analyze, str(unit))[0] == 1


def test_the_script_for_procd_is_sound(tmp_path: Path) -> None:
    install(tmp_path, "INIT=procd")
    script = tmp_path / "root/etc/init.d/waker"
    assert ended("shellcheck", "--shell=dash", str(script)) == (0, "")


# In place of /etc/rc.common: what the script asks of the system is printed.
RC_COMMON = """\
for name in user_add chown chmod find logger procd_open_instance procd_close_instance \
    procd_set_param
do
    eval "$name() { echo $name \\"\\$@\\"; }"
done
user_exists() { return "$unknown"; }
group_add_next() { echo 1000; }
id() { return "$unmade"; }
. ./waker.init
env_file=./waker.env
echo "$USE_PROCD $START"
start_service
"""


def ask_procd(folder: Path, *, unknown: int = 0, unmade: int = 0) -> tuple[int, str]:
    """Run the script in a folder of its own."""
    make(folder, "dist")
    script = f"unknown={unknown}\nunmade={unmade}\n{RC_COMMON}"
    ended = subprocess.run(
        [need("busybox"), "sh", "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_procd_is_asked_to_run_it_as_nobody_else_and_for_ever(tmp_path: Path) -> None:
    tmp_path.joinpath("waker.env").touch()
    begin = "1 95\n"
    instance = """\
chown root:waker /etc/waker
chmod 0750 /etc/waker
find /etc/waker -type f -exec chown waker:waker {} ; -exec chmod 0600 {} ;
chown root:waker ./waker.env
chmod 0640 ./waker.env
procd_open_instance
procd_set_param command /usr/bin/waker --env-file ./waker.env
procd_set_param user waker
procd_set_param file ./waker.env
procd_set_param respawn 3600 5 0
procd_set_param term_timeout 100
procd_set_param stdout 1
procd_set_param stderr 1
procd_close_instance
"""
    new_user = "user_add waker  1000\n"
    assert ask_procd(tmp_path) == (0, begin + instance)
    assert ask_procd(tmp_path, unknown=1) == (0, begin + new_user + instance)
    status, asked = ask_procd(tmp_path, unmade=1)
    assert status == 1
    assert "there is no user waker, so waker is not started" in asked
    assert "procd" not in asked


def test_procd_is_asked_nothing_without_settings(tmp_path: Path) -> None:
    status, asked = ask_procd(tmp_path)
    assert status == 1
    assert asked == (
        "1 95\nlogger -s -t waker -p daemon.err ./waker.env is missing, so waker is not"
        " started\n"
    )
