"""The settings: each value, the private key, and the file."""

import base64
import os
import re
import time
from pathlib import Path

import pytest
from conftest import (
    BOX,
    CHECKOUT,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    daemon,
    each,
    has_other_users,
    need,
    need_root,
    run_waker,
)
from machine import Machine
from ssh_servers import BLOB, FINGERPRINT, KEY

import waker

NISTP256 = "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY="
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


SETTINGS = MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a private key that a group may read."""
    key = tmp_path / "ssh_key"
    key.write_text(f"\n\n{PEM}")
    key.chmod(0o640)
    return tmp_path


def mistake(folder: Path, **others: str) -> str:
    """Return what is reported of the settings, which must be one line."""
    settings = SETTINGS | {f"WAKER_{name}": value for name, value in others.items()}
    with pytest.raises(waker.ConfigError, match=r"\A.+\Z") as error:
        waker.read_config(settings, folder)
    return str(error.value)


# ---- Values --------------------------------------------------------------------------


def test_host_keys_paste_as_whole_lines(folder: Path) -> None:
    for text, count in {
        f"  {KEY} of the old box, in the cellar\t": 1,
        f"[10.0.0.2]:2222 {KEY}": 1,
        f"nas,10.0.0.2 {KEY} a, b,nas,10.0.0.2 {KEY}": 2,
    }.items():
        config = waker.read_config(SETTINGS | {"WAKER_SSH_HOST_KEY": text}, folder)
        assert config.host_key == (base64.b64decode(BLOB),) * count


def test_a_host_key_is_refused_wherever_it_was_cut(folder: Path) -> None:
    """As when a mail program wraps it, so that the rest is another line."""
    for end in range(1, len(KEY)):
        told = mistake(folder, SSH_HOST_KEY=KEY[:end])
        assert told.startswith("WAKER_SSH_HOST_KEY must be whole lines")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["A" * 40_000, "AAAA " * 8_000, "ssh-rsa " * 5_000])
def test_no_host_key_costs_more_time_than_its_length(folder: Path, text: str) -> None:
    """A server may report one of 40 kB, which once took 46 s to refuse."""
    began = time.thread_time()
    mistake(folder, SSH_HOST_KEY=f"ssh-ed25519 {text}")
    assert time.thread_time() < began + 1  # second


# Values of which each is one mistake.
WRONG = {
    "PIN": ("2468101", " 24681012", "x" * 129),
    "HOMELAB_MAC": ("52:54:00:12:99", "00:00:00:00:00:00", "01:00:5e:00:00:01"),
    "HOMELAB_HOST": ("nas.lan", "192.0.2.256", "fe80::1%eth0"),
    "HOMELAB_BROADCAST": ("::2", "192.0.2", "all"),
    "HOMELAB_LINK": ("nas.lan", "javascript://nas/", "https://", "https://nas lan/"),
    "INITRD_SSH_PORT": ("65536", "-2222", "by name"),
    "SYSTEM_SSH_PORT": ("65537", "-22", "22.0"),
    "SSH_KEY": ("~/.ssh/id_ed25519",),
    # No damaged, revoked or unknown key passes as a comment on a good one. With a NUL,
    # the setting could not be passed on.
    "SSH_HOST_KEY": (
        FINGERPRINT,
        KEY[:-4],
        f"@revoked {KEY}",
        f"@cert-authority * {KEY}",
        f"{KEY},ssh-dss {BLOB}",
        f"{KEY} replaces {KEY}",
        f"{KEY},{KEY[:-4]}",
        f"{KEY} x,@revoked a,b {KEY}",
        f"ecdsa-sha2-nistp384 {NISTP256}",
        f"{KEY} old\0box",
        f"{KEY} old\x1b[31mbox",
    ),
    "LISTEN": ("8099", "127.0.0:8099", "127.0.0.9:65536"),
    "TRUSTED_PROXY": ("nginx", "192.0.2.1/24", "192.0.2.1;192.0.2.2"),
}
MISTAKES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), MISTAKES)
def test_a_wrong_value_is_refused(folder: Path, name: str, value: str) -> None:
    """It is told its form. The value, which may be a secret, is not quoted."""
    told = mistake(folder, **{name: value})
    assert re.match(f"WAKER_{name} must be .", told)
    assert value not in told


def test_an_ipv6_address_needs_a_broadcast_address(folder: Path) -> None:
    """From which the packet goes to the machine's network."""
    address = {"HOMELAB_HOST": "2001:db8::1"}
    for broadcast in ("", "255.255.255.255"):
        told = mistake(folder, **address, HOMELAB_BROADCAST=broadcast)
        assert told.startswith("WAKER_HOMELAB_BROADCAST must be your network's own,")
    told = mistake(folder, **address, HOMELAB_BROADCAST="192.0.2.255", PIN="")
    assert told.startswith("WAKER_PIN ")


def test_a_setting_without_a_value_has_its_default(folder: Path) -> None:
    usual = waker.read_config(SETTINGS, folder)
    empty = dict.fromkeys(waker.SETTINGS, "") | SETTINGS
    assert waker.read_config(empty, folder)._replace(pin=usual.pin) == usual


# ---- The private key -----------------------------------------------------------------

USELESS = {
    "public": (KEY.encode(), 0o644, "not a private key; .*ssh-keygen"),
    "dropbear's": (b"\0\x0bssh-ed25519\0@\xff", 0o600, "not a private key; "),
    "readable": (PEM.encode(), 0o604, "open to others; as its owner, run: chmod 600"),
}


@each("content mode problem", USELESS)
def test_a_useless_private_key_is_refused_with_the_remedy(
    folder: Path, content: bytes, mode: int, problem: str
) -> None:
    key = folder / "ssh_key"
    key.write_bytes(content)
    key.chmod(mode)
    assert re.match(f"WAKER_SSH_KEY {key} is {problem}", mistake(folder))


@pytest.mark.timeout(20)
def test_a_private_key_that_is_no_regular_file_is_refused(folder: Path) -> None:
    """At once: reading a pipe could take forever."""
    key = folder / "ssh_key"
    key.unlink()
    os.mkfifo(key)
    assert re.match(f"WAKER_SSH_KEY {key} is not a regular file;", mistake(folder))


def test_a_missing_credential_is_sought_where_the_user_put_it(tmp_path: Path) -> None:
    """waker.service passes a single newline instead.

    So it does if a drop-in of the container has emptied LoadCredential=. Then the file
    must not be replaced. A folder of one's own may have such a name.
    """
    passed = tmp_path / "credentials/waker.service"
    passed.mkdir(parents=True)
    for name in ("waker.env", "ssh_key"):
        (passed / name).write_text("\n")
    words = "is missing or empty, or .* not pass it on.*systemctl cat waker"
    told = mistake(passed)
    assert re.match(f"WAKER_SSH_KEY /etc/waker/ssh_key {words}", told)
    assert "ssh-keygen" not in told
    with pytest.raises(waker.ConfigError, match=f"^/etc/waker/waker.env {words}") as it:
        waker.read_env_file(passed / "waker.env")
    assert "example" not in str(it.value)
    own = tmp_path / "credentials/waker"
    assert mistake(own).startswith(f"WAKER_SSH_KEY {own}/ssh_key is missing")
    (own / "ssh_key").mkdir(parents=True)
    assert mistake(own).startswith(f"WAKER_SSH_KEY {own}/ssh_key is not a regular")


# ---- The file ------------------------------------------------------------------------


def test_a_file_is_read_as_people_and_editors_write_it(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    text = (
        "# a comment\n;WAKER_PIN=x\n\n  WAKER_PIN=plain#stays \r\n"
        "WAKER_SSH_USER='single # q'\nWAKER_SSH_KEY=\"it's so\"\n"
        'WAKER_HOMELAB_NAME = " double q"\r\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
    )
    file.write_text(text, encoding="utf-8-sig", newline="")  # begins with a mark
    assert waker.read_env_file(file) == {
        "WAKER_PIN": "plain#stays",
        "WAKER_SSH_USER": "single # q",
        "WAKER_SSH_KEY": "it's so",
        "WAKER_HOMELAB_NAME": " double q",
        "WAKER_HOMELAB_HOST": "",
    }


UNREADABLE = {
    "UTF-16": ("WAKER_PIN=secret".encode("utf-16"), "is UTF-16,.* save it as UTF-8"),
    "empty": (b"\n", "is empty; delete it, and run `sudo waker install`"),
    "missing": (None, "is missing; .*run `sudo waker install`"),
}


@each("content problem", UNREADABLE)
def test_a_file_that_cannot_be_used_is_one_mistake(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "waker.env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(waker.ConfigError, match=rf"\A{file} {problem}\Z"):
        waker.read_env_file(file)


MISREAD = (
    "export WAKER_PIN=secret",
    "WAKER_PIN='secret",
    'Environment="WAKER_PIN=secret"',
    "waker_pin=secret",
    "WAKER_LISTEN='secret' # mine",
    "WAKER_HOMELAB_HOST= “secret”",
    "WAKER_HOMELAB_NAME=secret WAKER_LISTEN=127.0.0.1:80",
)


def test_a_line_that_could_be_misread_is_refused(tmp_path: Path) -> None:
    """By its number, and not quoted. As is a name that is set twice."""
    file, once = tmp_path / "waker.env", "WAKER_SSH_USER=secret"
    file.write_text("\n".join(["# a comment", once, *MISREAD, once]))
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(file)
    form = rf"(?m)^{file}, line (\d+)(?: must be WAKER_NAME|: WAKER_SSH_USER is set)"
    wrong = [str(number) for number in range(3, len(MISREAD) + 4)]
    assert re.findall(form, str(error.value)) == wrong
    assert "secret" not in str(error.value)


def test_all_mistakes_are_reported_together_and_no_value(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text(
        "WAKER_PIN=s3crt\nWAKER_HOMELAB_MAC=\nWAKER_INITRD_SSH_PORT='s3crt'\n"
    )
    settings = {"WAKER_LISTEN": "s3crt", "WAKER_HOMELAB_NAM": "s3crt"}
    for command in ("serve", "check"):
        arguments = "--env-file", str(file), command
        ended = run_waker(*arguments, settings=settings, program=BOX)
        assert (ended.returncode, ended.stdout) == (78, "")
        names = {line.split()[0] for line in ended.stderr.splitlines()}
        wrong = "PIN HOMELAB_MAC HOMELAB_HOST INITRD_SSH_PORT LISTEN HOMELAB_NAM"
        assert names == {f"WAKER_{name}" for name in wrong.split()}
        assert "s3" not in ended.stderr


def test_settings_come_from_a_file_and_the_environment_wins(machine: Machine) -> None:
    """A relative path starts at the folder of the file, even if that is a link."""
    link, file = machine.ask().folder / "waker.env", machine.folder / "home/settings"
    lines = [f'{name} = "{value}"' for name, value in machine.settings().items()]
    lines += ["# a comment", "", "TZ=UTC # another program's", f"WAKER_PIN='{PIN}'"]
    file.write_text("\n".join(lines).replace(str(machine.ssh_key), "ssh_key"))
    link.symlink_to(file)
    program = *MODULE, "--env-file", str(link)
    others = {"HOMELAB_NAME": "another", "HOMELAB_LINK": "http://[::1]:8096/x?y#z"}
    settings = {f"WAKER_{name}": value for name, value in others.items()}
    with daemon(settings, program=program) as started:
        client = started.client.log_in()
        status = client.status()
        assert [status["name"], status["link"]] == [*others.values()]
        assert client.unlock().status == 200
    assert machine.received() == [PASSPHRASE.encode()]


def test_only_without_any_setting_the_usual_file_is_read(tmp_path: Path) -> None:
    """In a mount namespace, where a folder of the test replaces /etc."""
    need_root()
    file = tmp_path / "waker/waker.env"
    file.parent.mkdir()
    file.write_text("WAKER_HOMELAB_HOST=127.0.0.1\n")
    file.chmod(0)
    script = 'mount --bind "$0" /etc && exec "$@"'
    by = "unshare", "--mount", "sh", "-c", script, str(tmp_path)
    ended = run_waker("state", by=by)
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1)

    ended = run_waker("state", settings={"WAKER_SSH_USER": "x"}, by=by)
    assert ended.returncode == 78
    assert ended.stderr.startswith("WAKER_HOMELAB_HOST is not set")

    # Whoever forgets sudo may not read the file.
    tmp_path.chmod(0o755)
    become = [need("setpriv"), "--bounding-set=-dac_override,-dac_read_search"]
    if has_other_users():  # the owner can read the checkout, even in a private home
        become += [f"--reuid={CHECKOUT.stat().st_uid}", "--keep-groups"]
    ended = run_waker("state", by=(*by, *become))
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == "/etc/waker/waker.env cannot be read; use sudo\n"
