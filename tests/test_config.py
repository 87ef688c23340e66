"""The configuration: valid values, and how each mistake is refused."""

import base64
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    MACHINE,
    MODULE,
    PIN,
    daemon,
    environment,
    need,
    need_root,
)

import waker

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"
KEY = f"ssh-ed25519 {BLOB}"
FINGERPRINT = "SHA256:c5CSjps6Y5OSk8aYpkchHhILDzS+dm64U2iAOxSq/1g"  # by ssh-keygen -l
NISTP256 = "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY="
PINNED = base64.b64decode(BLOB)
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def good(tmp_path: Path) -> dict[str, str]:
    """The required settings. A group may read the key, as with systemd credentials."""
    (tmp_path / "ssh_key").write_text(f"\n\n{PEM}")
    (tmp_path / "ssh_key").chmod(0o640)
    return MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}


def faults(values: dict[str, str], folder: Path) -> list[str]:
    with pytest.raises(waker.ConfigError) as error:
        waker.read_config(values, folder)
    return str(error.value).splitlines()


VALID: dict[str, tuple[Callable[[str], object], str, object]] = {
    "MAC with colons": (
        waker.parse_mac,
        "52:54:00:ab:CD:ef",
        bytes.fromhex("525400abcdef"),
    ),
    "MAC with dashes": (
        waker.parse_mac,
        "52-54-00-AB-cd-EF",
        bytes.fromhex("525400abcdef"),
    ),
    "IPv6 in upper case": (waker.plain_address, "2001:DB8::9", "2001:db8::9"),
    "mapped IPv4": (waker.plain_address, "::ffff:10.0.0.9", "10.0.0.9"),
    "name of 64": (waker.PARSE_NAME, "Büro " + "x" * 59, "Büro " + "x" * 59),
    "listen on IPv6": (waker.parse_listen, "[fe80::1]:65535", ("fe80::1", 65535)),
    "no key": (waker.parse_host_keys, "", ()),
    "key and comment": (waker.parse_host_keys, f"  {KEY} a comment\t", (PINNED,)),
    "comma in the comment": (
        waker.parse_host_keys,
        f"{KEY} of the old box, in the cellar",
        (PINNED,),
    ),
    "key type in the comment": (
        waker.parse_host_keys,
        f"{KEY} new, my-ssh-rsa key was bad",
        (PINNED,),
    ),
    "port in brackets": (
        waker.parse_host_keys,
        f"[192.168.1.20]:2222 {KEY}",
        (PINNED,),
    ),
    "two keys": (waker.parse_host_keys, f"{KEY},{KEY} a@b", (PINNED, PINNED)),
    "spaces around the comma": (
        waker.parse_host_keys,
        f"{KEY} , {KEY}",
        (PINNED, PINNED),
    ),
    "two keys with names": (
        waker.parse_host_keys,
        f"nas,10.0.0.2 {KEY} a, b,nas,10.0.0.2 {KEY}",
        (PINNED, PINNED),
    ),
    "no proxy": (waker.parse_addresses, "", frozenset()),
    "two proxies": (
        waker.parse_addresses,
        "::FFFF:10.0.0.2 , ::1",
        {"10.0.0.2", "::1"},
    ),
}


@pytest.mark.parametrize(("parse", "text", "value"), VALID.values(), ids=[*VALID])
def test_a_valid_value_is_parsed(
    parse: Callable[[str], object], text: str, value: object
) -> None:
    assert parse(text) == value


def test_a_fingerprint_is_shown_as_openssh_shows_it() -> None:
    assert waker.fingerprint(PINNED) == FINGERPRINT


@pytest.mark.parametrize(
    "kind",
    [
        *("ssh-ed25519", "ssh-rsa"),
        *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ],
)
def test_a_host_key_may_have_any_common_type(kind: str) -> None:
    blob = b"\0\0\0%c%b\0\0\0\1x" % (len(kind), kind.encode())
    line = f"{kind} {base64.b64encode(blob).decode()}"
    assert waker.parse_host_keys(line) == (blob,)
    assert waker.parse_host_keys(f"{KEY},{line}") == (PINNED, blob)


def test_a_host_key_is_refused_wherever_it_was_cut(
    good: dict[str, str], tmp_path: Path
) -> None:
    """As when a mail program wraps it, so that the rest is another line."""
    for end in range(1, len(KEY)):
        (fault,) = faults(good | {"WAKER_SSH_HOST_KEY": KEY[:end]}, tmp_path)
        assert fault.startswith("WAKER_SSH_HOST_KEY must be whole lines")


def test_a_passphrase_is_taken_as_it_was_typed() -> None:
    """cryptsetup compares bytes: an accent of its own is not one with its letter."""
    assert waker.Passphrase(" e\u0301\u00e9 ").data == b" e\xcc\x81\xc3\xa9 "


@pytest.mark.parametrize("pin", ["8 digits", "ä" * 128], ids=len)
def test_a_pin_has_8_to_128_characters(pin: str) -> None:
    with daemon(MACHINE | {"WAKER_PIN": pin}) as started:
        assert started.client.attempt(pin).status == 200
        assert started.client.attempt(pin[:-1]).status == 401


def test_an_empty_value_leaves_the_default(
    good: dict[str, str], tmp_path: Path
) -> None:
    optional = {setting[0]: "" for setting in waker.SETTINGS if setting[0] not in good}
    config = waker.read_config(good, tmp_path)
    other = waker.read_config(good | optional, tmp_path)
    assert other._replace(pin=config.pin) == config
    assert config.name == MACHINE["WAKER_HOMELAB_HOST"]


# Values of which each is one mistake. test_promises.py has more.
WRONG = {
    "PIN without UTF-8": ("PIN", "2468101\udcff"),
    "PIN before a no-break space": ("PIN", "24681012\xa0"),
    "PIN of spaces": ("PIN", "         "),
    "MAC without colons": ("HOMELAB_MAC", "525400123456"),
    "MAC with colons and dashes": ("HOMELAB_MAC", "52:54:00-12-34-56"),
    "MAC with a g": ("HOMELAB_MAC", "52:54:00:12:34:5g"),
    "MAC with a newline": ("HOMELAB_MAC", "52:54:00:12:34:56\n"),
    "MAC of seven": ("HOMELAB_MAC", "52:54:00:12:34:56:78"),
    "name with a bell": ("HOMELAB_NAME", "bell\a"),
    "name with a C1 control": ("HOMELAB_NAME", "csi\x9b31m"),
    "name of 65": ("HOMELAB_NAME", "x" * 65),
    "name without UTF-8": ("HOMELAB_NAME", "B\udcfcro"),
    "port 0": ("INITRD_SSH_PORT", "0"),
    "port with a zero first": ("SYSTEM_SSH_PORT", "022"),
    "port in other digits": ("SYSTEM_SSH_PORT", "٢٢"),
    "user with a space": ("SSH_USER", "two words"),
    "SSH key with a NUL": ("SSH_KEY", "a\0b"),
    "SSH key with a tilde": ("SSH_KEY", "~/.ssh/id_ed25519"),
    "key without type": ("SSH_HOST_KEY", BLOB),
    "key with an asterisk": ("SSH_HOST_KEY", f"{KEY}*"),
    "key of another type": ("SSH_HOST_KEY", f"ecdsa-sha2-nistp384 {NISTP256}"),
    # No damaged, revoked or unknown key passes as a comment on a good one.
    "unknown type as second": ("SSH_HOST_KEY", f"{KEY},ssh-dss {BLOB}"),
    "two keys without comma": ("SSH_HOST_KEY", f"{KEY} replaces {KEY}"),
    "second key cut": ("SSH_HOST_KEY", f"{KEY},{KEY[:-4]}"),
    "authority as second": ("SSH_HOST_KEY", f"{KEY} x,@cert-authority a,b {KEY}"),
    "revoked key as second": ("SSH_HOST_KEY", f"{KEY} x,@revoked a,b {KEY}"),
    "listen on IPv6 without brackets": ("LISTEN", "::1:80"),
    "listen on a name": ("LISTEN", "localhost:80"),
    "whole network as proxy": ("TRUSTED_PROXY", "192.168.1.0/24"),
    "comma after the last proxy": ("TRUSTED_PROXY", "192.168.1.1,"),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=[*WRONG])
def test_a_wrong_value_is_refused_with_its_form_and_not_quoted(
    good: dict[str, str], tmp_path: Path, name: str, value: str
) -> None:
    (fault,) = faults(good | {f"WAKER_{name}": value}, tmp_path)
    assert re.match(f"WAKER_{name} must be .", fault)
    assert value not in fault


@pytest.mark.parametrize(
    ("line", "problem"), [({}, "is not set"), ({"WAKER_PIN": ""}, "has no value")]
)
def test_a_required_setting_that_is_missing_is_named_with_its_form(
    good: dict[str, str], tmp_path: Path, line: dict[str, str], problem: str
) -> None:
    del good["WAKER_PIN"]
    (fault,) = faults(good | line, tmp_path)
    assert fault.startswith(f"WAKER_PIN {problem}; it must be 8 to 128 characters")


@pytest.mark.parametrize("name", ["WAKER_TLS_CERT", "WAKER_TLS_KEY"])
def test_whoever_used_https_is_warned_before_it_starts_without(
    good: dict[str, str], tmp_path: Path, name: str
) -> None:
    (fault,) = faults(good | {name: "pem"}, tmp_path)
    assert re.match(f"{name} has no effect.*forwarded port.*CHANGELOG", fault)


def test_an_unknown_name_is_refused(good: dict[str, str], tmp_path: Path) -> None:
    (fault,) = faults(good | {"WAKER_LISTN": "secret"}, tmp_path)
    assert re.match("WAKER_LISTN is not a setting.*--help", fault)
    assert "secret" not in fault


# ---- The private key -----------------------------------------------------------------

NO_KEY = "is not a private key; make it with: ssh-keygen -t ed25519 -N '' -f {}"
OPEN = "is open to others; chmod 600 {}"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (KEY, 0o644, NO_KEY),
        ("\0\0\0\x0bssh-ed25519\0\0\0@", 0o600, NO_KEY),
        ("\n", 0o600, NO_KEY),
        (PEM, 0o604, OPEN),
        (PEM, 0o602, OPEN),
    ],
    ids=["public", "dropbear's", "empty", "readable", "writable"],
)
def test_a_useless_private_key_is_refused_with_the_remedy(
    good: dict[str, str], tmp_path: Path, content: str, mode: int, words: str
) -> None:
    path = tmp_path / "ssh_key"
    path.write_text(content)
    path.chmod(mode)
    assert faults(good, tmp_path) == [f"WAKER_SSH_KEY {path} {words.format(path)}"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("none", " is missing; correct the path, or make it with: ssh-keygen "),
        (".", ": Is a directory"),
        ("ssh_key/x", ": Not a directory"),
    ],
)
def test_a_private_key_that_cannot_be_read_is_refused_with_the_reason(
    good: dict[str, str], tmp_path: Path, value: str, problem: str
) -> None:
    path = tmp_path / value
    (fault,) = faults(good | {"WAKER_SSH_KEY": value}, tmp_path)
    assert fault.startswith(f"WAKER_SSH_KEY {path}{problem}")


def test_a_credential_that_is_missing_is_sought_where_the_user_put_it(
    good: dict[str, str], tmp_path: Path
) -> None:
    """waker.service passes a single newline instead."""
    folder = tmp_path / "credentials/waker.service"
    folder.mkdir(parents=True)
    for name in ("waker.env", "ssh_key"):
        (folder / name).write_text("\n")
    remedy = NO_KEY.format("/etc/waker/ssh_key")
    assert faults(good, folder) == [f"WAKER_SSH_KEY /etc/waker/ssh_key {remedy}"]
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(folder / "waker.env")
    assert re.match("/etc/waker/waker.env is missing.*example", str(error.value))


# ---- The file ------------------------------------------------------------------------


def test_a_file_is_read_as_people_and_editors_write_it(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    text = (
        "# a comment\n;WAKER_PIN=x\n\n  WAKER_PIN=plain#stays \r\n"
        "WAKER_SSH_USER='single # q'\n"
        'WAKER_SSH_KEY="it\'s so"\n'
        'WAKER_HOMELAB_NAME = " double q"\r\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
        "http_proxy=x # y\nWAKER_LISTEN =\tplain\n"
    )
    file.write_text(text, encoding="utf-8-sig", newline="")  # begins with a mark
    assert waker.read_env_file(file) == {
        "WAKER_PIN": "plain#stays",
        "WAKER_SSH_USER": "single # q",
        "WAKER_SSH_KEY": "it's so",
        "WAKER_HOMELAB_NAME": " double q",
        "WAKER_HOMELAB_HOST": "",
        "WAKER_LISTEN": "plain",
    }


@pytest.mark.parametrize(
    "line",
    [
        "Environment=WAKER_PIN=secret",
        'Environment="WAKER_PIN=secret"',
        "Public key portion is: secret",  # dropbearkey prints that
        "waker_pin=secret",
        "WAKER_HOMELAB_MAC= # secret",
        "WAKER_LISTEN='secret' # mine",
        "WAKER_SSH_USER=secret\t#mine",
        "WAKER_HOMELAB_HOST=“secret”",
        "WAKER_HOMELAB_NAME= “secret”",
        "WAKER_SSH_KEY=\"secret'",
        'WAKER_HOMELAB_NAME= "secret',
        'WAKER_HOMELAB_NAME="secret" "secret"',
        "WAKER_HOMELAB_NAME=secret WAKER_LISTEN=127.0.0.1:80",
    ],
)
def test_each_line_that_could_be_misread_is_refused_by_number_and_not_quoted(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "waker.env"
    file.write_text(f"# a comment\n{line}\n\n{line}\n")
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(file)
    found = re.findall(rf"(?m)^{file}, line (\d+) must be WAKER_NAME", str(error.value))
    assert found == ["2", "4"]
    assert "secret" not in str(error.value)


def test_with_any_setting_the_usual_file_is_not_read(tmp_path: Path) -> None:
    """In a mount namespace, where a folder of the test replaces /etc."""
    need_root()
    (tmp_path / "waker").mkdir()
    (tmp_path / "waker/waker.env").write_text("WAKER_INITRD_SSH_PORT=two words\n")
    script = 'mount --bind "$0" /etc && exec "$@" state'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(tmp_path), *MODULE],
        cwd=CHECKOUT,
        env=environment({"WAKER_SSH_USER": "x"}),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    names = [line.split()[0] for line in ended.stderr.splitlines()]
    assert names == ["WAKER_HOMELAB_HOST"]


def test_whoever_forgets_sudo_is_told_and_not_to_replace_the_file(
    tmp_path: Path,
) -> None:
    need_root()  # the command below loses its right to read any file
    file = tmp_path / "waker.env"
    file.write_text("WAKER_PIN=secret\n")
    file.chmod(0)
    rights = "--bounding-set=-dac_override,-dac_read_search"
    ended = subprocess.run(
        [need("setpriv"), rights, *MODULE, "--env-file", str(file), "check"],
        cwd=CHECKOUT,
        env=environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == f"{file} cannot be read; use sudo\n"
    assert (ended.returncode, ended.stdout) == (78, "")
