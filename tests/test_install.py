"""`make install`: what is put where, and what is never touched."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import PIN, make, need

import waker

UNIT = "usr/local/lib/systemd/system/waker.service"


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
    ("variables", "modes"),
    [
        (
            ["INIT=systemd"],
            {
                "usr/local/bin/waker": "0o100755",
                "usr/local/lib/systemd/system/waker.service": "0o100644",
                "etc/waker/waker.env": "0o100600",
            },
        ),
        (
            ["INIT=systemd", "PREFIX=/usr"],
            {
                "usr/bin/waker": "0o100755",
                "usr/lib/systemd/system/waker.service": "0o100644",
                "etc/waker/waker.env": "0o100600",
            },
        ),
        (
            ["INIT=procd"],
            {
                "usr/bin/waker": "0o100755",
                "etc/init.d/waker": "0o100755",
                "etc/waker/waker.env": "0o100600",
            },
        ),
    ],
)
def test_each_file_has_its_conventional_place_and_mode(
    variables: list[str], modes: dict[str, str], tmp_path: Path
) -> None:
    files = install(tmp_path, *variables)
    assert {name: mode for name, (mode, _) in files.items()} == modes
    assert (tmp_path / "root/etc/waker").stat().st_mode & 0o777 == 0o700
    program = next(name for name in modes if name.endswith("bin/waker"))
    for name, (_, text) in files.items():
        if name.endswith((".service", "init.d/waker")):
            assert f" /{program} --env-file " in text.replace("=", " ")


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
    folder = tmp_path / "root/etc/waker"
    folder.mkdir(parents=True)
    (folder / "waker.env").symlink_to("../unmounted/waker.env")
    install(tmp_path, "INIT=systemd")
    assert (folder / "waker.env").is_symlink()


def test_the_example_wants_three_values_and_shows_every_setting(tmp_path: Path) -> None:
    example = install(tmp_path, "INIT=systemd")["etc/waker/waker.env"][1]
    file = tmp_path / "waker.env"
    file.write_text(example)
    with pytest.raises(waker.ConfigError) as told:
        waker.read_config(waker.read_env_file(file), tmp_path)
    missing = ["WAKER_PIN", "WAKER_HOMELAB_MAC", "WAKER_HOMELAB_HOST"]
    faults = str(told.value).splitlines()
    assert sorted(fault.split()[0] for fault in faults) == sorted(missing)
    values = [PIN, "52:54:00:12:34:56", "192.168.1.20"]
    for name, value in zip(missing, values, strict=True):
        example = example.replace(f"\n{name}=\n", f"\n{name}={value}\n")
    file.write_text(example)
    config = waker.read_config(waker.read_env_file(file), tmp_path)
    file.write_text(example.replace("\n#WAKER", "\nWAKER"))
    shown = waker.read_env_file(file)
    assert shown.keys() == {setting[0] for setting in waker.SETTINGS}
    for name, default, _, _ in waker.SETTINGS:
        assert default in ("", shown[name])
    three = dict(zip(missing, values, strict=True))
    wanted = waker.read_config(three, tmp_path)
    assert config.pin.matches(PIN)
    assert config == wanted._replace(pin=config.pin)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    install(tmp_path, "INIT=systemd")
    verify = [need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no"]
    seen = subprocess.run(
        [*verify, f"--root={tmp_path}/root", f"/{UNIT}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (seen.returncode, seen.stderr) == (0, "")


def test_the_sandbox_leaves_little_exposed(tmp_path: Path) -> None:
    install(tmp_path, "INIT=systemd")
    unit = tmp_path / "root" / UNIT
    analyze = [need("systemd-analyze"), "security", "--offline=true", "--threshold=11"]
    for text, status in (
        (unit.read_text(), 0),
        (unit.read_text().replace("CapabilityBoundingSet=\n", ""), 1),
    ):
        unit.write_text(text)
        seen = subprocess.run([*analyze, str(unit)], capture_output=True, check=False)
        assert (seen.returncode, seen.stderr) == (status, b"")


def test_a_fault_in_the_configuration_is_not_tried_again(tmp_path: Path) -> None:
    unit = install(tmp_path, "INIT=systemd")[UNIT][1]
    assert f"\nRestartPreventExitStatus={os.EX_CONFIG}\n" in unit


def test_the_script_for_procd_is_sound(tmp_path: Path) -> None:
    install(tmp_path, "INIT=procd")
    script = tmp_path / "root/etc/init.d/waker"
    seen = subprocess.run(
        [need("shellcheck"), "--shell=dash", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (seen.returncode, seen.stdout) == (0, "")


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
