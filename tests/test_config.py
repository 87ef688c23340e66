"""The configuration: what passes, and how each mistake is told."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, MODULE, PIN, environment, need, need_root, run_waker
from homelab import Homelab, new_key, public_line

import waker

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"


@pytest.fixture
def good(lab: Homelab) -> dict[str, str]:
    return {"WAKER_PIN": PIN} | lab.settings()


def faults(values: dict[str, str], folder: Path) -> list[str]:
    with pytest.raises(waker.ConfigError) as told:
        waker.read_config(values, folder)
    return str(told.value).splitlines()


def test_the_defaults_are_those_of_the_interface(
    good: dict[str, str], tmp_path: Path
) -> None:
    optional = ("BROADCAST", "INITRD_SSH_PORT", "SYSTEM_SSH_PORT", "SSH_KEY")
    values = {n: v for n, v in good.items() if not n.endswith(optional)}
    config = waker.read_config(values, tmp_path)
    assert str(config.broadcast) == "255.255.255.255"
    assert (config.packet_port, config.unlock_seconds) == (9, 90)
    assert config.name == config.machine.host == "127.0.0.1"
    assert (config.machine.initrd_port, config.machine.system_port) == (2222, 22)
    assert (config.machine.user, config.machine.dialect.name) == ("root", "cryptroot")
    assert config.machine.key == tmp_path / "ssh_key"
    assert config.listen == ("::", 8080)


HOST = "an IP address such as 192.168.1.20; `ping NAME` tells that of a name"
WHOLE_KEY = "a line such as ssh-ed25519 AAAA...; the whole key, not its fingerprint"
PORT = "a port, 1 to 65535"
WRONG_VALUES = (  # of a setting, separated by |; what is told of each
    (
        "WAKER_HOMELAB_MAC",
        "52:54:00:12:34:5|52:54:00:12:34:56:78|52:54:00-12-34-56|52.54.00.12.34.56|"
        "525400123456|52::54:00:12:34:56|52:54:00:12:34:5g|52:54:00:12:34:٣٣|5254  |"
        "52:54:00:12:34:56 |52:54:00:12:34:56\n|5:54:00:12:34:56|00:00:00:00:00:00|"
        "01:00:5e:00:00:01|ff:ff:ff:ff:ff:ff",
        "a MAC address such as 52:54:00:12:34:56",
    ),
    ("WAKER_HOMELAB_HOST", "nas.lan|http://nas|a b|-x|10.0.0.256|fe80::1%eth0", HOST),
    ("WAKER_HOMELAB_HOST", "192.168.1.0/24|“192.168.1.20”", HOST),
    ("WAKER_HOMELAB_BROADCAST", "192.168.1.256|192.168.1.0/24|::1", "an IPv4 address"),
    ("WAKER_HOMELAB_NAME", f"bell\a|{'x' * 65}", "a name of at most 64 characters"),
    ("WAKER_INITRD", "dracut|dropbear|Systemd", "cryptroot (dropbear) or systemd"),
    ("WAKER_INITRD_SSH_PORT", "0|70000|65536|ssh|022|-1|²", PORT),
    ("WAKER_SYSTEM_SSH_PORT", "0|70000|ssh", PORT),
    ("WAKER_SSH_USER", "two words|bell\a", "a user's name"),
    ("WAKER_SSH_KEY", "a\0b", "the path of the SSH key"),
    ("WAKER_TLS_CERT", "a\0b", "the path of a certificate"),
    ("WAKER_TLS_KEY", "a\0b", "the path of the TLS key"),
    (
        "WAKER_PIN",
        f"2468|{'x' * 129}|{os.fsdecode(bytes([255] * 8))}",
        "8 to 128 characters",
    ),
    (
        "WAKER_LISTEN",
        "8080|:8080|::8080|box:80|1.2.3.4|1.2.3.4:65536|[]:1|:",
        "ADDRESS:PORT such as 0.0.0.0:8080",
    ),
    ("WAKER_TRUSTED_PROXY", "nginx|::1, ::2", "addresses such as 10.0.0.2,10.0.0.3"),
    (
        "WAKER_SSH_HOST_KEY",
        "SHA256:lRP+ktIkxmN4gKSMSbjP/2lvAkF9hQyQ5hYuQdUNJZk|"
        f"{KEY[:-4]}|{KEY}AAAA|{KEY.replace('ed25519', 'rsa')}|{KEY.replace(' ', '')}|"
        f"{KEY.split()[1]}|ssh-ed25519 AAAAC3NzaC1lZDI1NTE5|@revoked {KEY}|{KEY},|"
        f"@cert-authority * {KEY}|two words {KEY}|{KEY} a comment, and a comma|"
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        WHOLE_KEY,
    ),
)


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        (name, value, right)
        for name, values, right in WRONG_VALUES
        for value in values.split("|")
    ],
)
def test_a_wrong_value_is_told_with_what_is_right(
    good: dict[str, str], tmp_path: Path, name: str, value: str, right: str
) -> None:
    assert faults(good | {name: value}, tmp_path) == [f"{name} must be {right}"]


SYSTEMD = {"WAKER_INITRD": "systemd", "WAKER_SYSTEM_SSH_PORT": "2222"}
IPV6 = {"WAKER_HOMELAB_HOST": "2001:db8::1", "WAKER_HOMELAB_BROADCAST": ""}
TLS = "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"WAKER_PORT": "80"}, "WAKER_PORT is not a setting; see `waker --help`"),
        ({"waker_pin": "80"}, "waker_pin is not a setting; see `waker --help`"),
        ({"WAKER_PIN": ""}, "WAKER_PIN is not set; it must be 8 to 128 characters"),
        (
            {"WAKER_HOMELAB_HOST": ""},
            f"WAKER_HOMELAB_HOST is not set; it must be {HOST.partition(';')[0]}",
        ),
        (
            SYSTEMD | {"WAKER_INITRD_SSH_PORT": "2222"},
            "WAKER_INITRD_SSH_PORT must differ from WAKER_SYSTEM_SSH_PORT for systemd",
        ),
        (IPV6, "WAKER_HOMELAB_BROADCAST must be set: WAKER_HOMELAB_HOST is IPv6"),
        ({"WAKER_TLS_CERT": "ssh_key"}, TLS),
        ({"WAKER_TLS_KEY": "ssh_key"}, TLS),
        ({"WAKER_SSH_KEY": "."}, "WAKER_SSH_KEY {} is not a file; correct the path"),
        ({"WAKER_SSH_KEY": "x"}, "WAKER_SSH_KEY {}/x is missing or empty"),
    ],
)
def test_settings_that_do_not_fit_are_told_with_the_remedy(
    good: dict[str, str], tmp_path: Path, values: dict[str, str], told: str
) -> None:
    assert faults(good | values, tmp_path) == [told.format(tmp_path)]


def test_all_mistakes_are_told_together_and_no_value_with_them() -> None:
    names = ["WAKER_X", "WAKER_HOMELAB_HOST", "WAKER_HOMELAB_MAC", "WAKER_PIN"]
    ended = run_waker(settings=dict.fromkeys(names, "s3crt"))
    assert [line.split()[0] for line in ended.stderr.splitlines()] == names
    assert "s3crt" not in ended.stderr
    assert ended.returncode == 78


COPIED = "is missing or empty (systemd copies it from /etc/waker/ssh_key)"
PUBLIC = "is a public key; name the private one, without .pub"
FOREIGN = "is PuTTY's or dropbear's; convert it to OpenSSH's format"
NO_KEY = "must be an Ed25519, ECDSA or RSA private key"
OPEN = "is open to others; chmod 600 {path}"


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        (b"", 0o600, COPIED),
        (b"\n", 0o600, COPIED),  # the unit's, in place of a file that is missing
        (KEY.encode(), 0o644, PUBLIC),
        (b"PuTTY-User-Key-File-3: ssh-ed25519\n", 0o644, FOREIGN),
        (b"\0\0\0\x0bssh-ed25519\0\0\0@", 0o600, FOREIGN),
        (b"-----BEGIN CERTIFICATE-----\n", 0o644, NO_KEY),
        (b"rubbish", 0o600, NO_KEY),
        (b"-----BEGIN PRIVATE KEY-----\n", 0o604, OPEN),
        (b"-----BEGIN PRIVATE KEY-----\n", 0o602, OPEN),
        (b"-----BEGIN PRIVATE KEY-----\n", 0o601, OPEN),
    ],
)
def test_a_private_key_of_no_use_is_told_with_the_remedy(
    good: dict[str, str], tmp_path: Path, content: bytes, mode: int, told: str
) -> None:
    path = tmp_path / "ssh_key"
    path.write_bytes(content)
    path.chmod(mode)
    (fault,) = faults(good, tmp_path)
    assert fault == f"WAKER_SSH_KEY {path} {told.format(path=path)}"


def test_a_private_key_of_a_group_after_empty_lines_is_right(
    good: dict[str, str], tmp_path: Path
) -> None:
    """Systemd's credentials have a group, as a key that several services share."""
    key = (tmp_path / "ssh_key").read_bytes()
    (tmp_path / "ssh_key").write_bytes(b"\n\n" + key)
    (tmp_path / "ssh_key").chmod(0o440)
    waker.read_config(good, tmp_path)


def test_without_a_pinned_host_key_no_private_key_is_needed(
    good: dict[str, str], tmp_path: Path
) -> None:
    good |= {"WAKER_SSH_HOST_KEY": "", "WAKER_SSH_KEY": "nowhere"}
    assert waker.read_config(good, tmp_path).machine.host_keys == ()


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (waker.parse_mac, "52:54:00:ab:CD:ef", bytes.fromhex("525400abcdef")),
        (waker.parse_mac, "52-54-00-AB-cd-EF", bytes.fromhex("525400abcdef")),
        (waker.plain_address, "10.0.0.9", "10.0.0.9"),
        (waker.plain_address, "2001:DB8::9", "2001:db8::9"),
        (waker.plain_address, "::ffff:10.0.0.9", "10.0.0.9"),
        (waker.parse_listen, "[::]:8080", ("::", 8080)),
        (waker.parse_listen, "127.0.0.1:0", ("127.0.0.1", 0)),
        (waker.parse_listen, "[fe80::1]:65535", ("fe80::1", 65535)),
        (waker.parse_listen, "[::ffff:127.0.0.1]:80", ("127.0.0.1", 80)),
    ],
)
def test_a_right_value_has_one_meaning(
    parse: Callable[[str], object], text: str, value: object
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY} root@box",
        f"{KEY} a comment with blanks",
        f"192.168.1.20 {KEY}",
        f"[192.168.1.20]:2222 {KEY}",
        f"|1|salt=|hash= {KEY}",
        f"  {KEY}\t",
    ],
)
def test_a_host_key_can_be_pasted_from_where_it_is_printed(text: str) -> None:
    other = public_line(new_key())
    told = [str(key) for key in waker.HostKey.parse_all(f"{text},{other}")]
    assert told == [KEY, other]


def test_a_fingerprint_is_written_as_openssh_writes_it() -> None:
    (key,) = waker.HostKey.parse_all(KEY)
    keygen = [need("ssh-keygen"), "-lf", "-"]
    printed = subprocess.run(
        keygen, input=KEY, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split()[1] == waker.fingerprint(key.blob)


@pytest.mark.parametrize(
    "encode", ["utf-8", "utf-8-sig"], ids=["plain", "with a byte order mark"]
)
def test_the_file_is_read_and_the_environment_wins(tmp_path: Path, encode: str) -> None:
    file = tmp_path / "waker.env"
    text = (
        "# a comment\n\n  WAKER_PIN=plain#stays \r\nWAKER_SSH_USER='single # q'\n"
        'WAKER_HOMELAB_NAME = " double q"\r\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
        "waker_pin=x"
    )
    file.write_bytes(text.encode(encode))
    assert waker.read_env_file(file) == {
        "WAKER_PIN": "plain#stays",
        "WAKER_SSH_USER": "single # q",
        "WAKER_HOMELAB_NAME": " double q",
        "WAKER_HOMELAB_HOST": "",
        "waker_pin": "x",
    }
    settings = {"WAKER_SSH_USER": "root", "WAKER_INITRD": "x"}
    ended = run_waker("--env-file", str(file), settings=settings)
    told = [line.split()[0] for line in ended.stderr.splitlines()]
    mine = ["WAKER_HOMELAB_HOST", "WAKER_INITRD", "WAKER_HOMELAB_MAC"]
    assert told == ["waker_pin", *mine]
    assert ended.returncode == 78


LINE = "write NAME=value, without `export`"
COMMENT = "move the comment to its own line, or quote it"
STRAIGHT = "use straight quotes, or none"
QUOTE = "end the value with the quote that begins it"
TWO = "give each setting a line of its own"
TWICE = "WAKER_PIN is set twice; delete one of the two lines"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, " is missing or empty"),
        ("", " is missing or empty (systemd copies it from /etc/waker/waker.env)"),
        ("WAKER_PIN=äöü".encode("utf-16"), " must be UTF-8; save it as that"),
        ("WAKER_PIN=äöü".encode("latin-1"), " must be UTF-8; save it as that"),
        ("export WAKER_PIN=x\n\nexport WAKER_INITRD=x", f", line 1, 3: {LINE}"),
        ("my secret\n = \n'WAKER_PIN=x'\nWAKER_PIN: x", f", line 1, 2, 3, 4: {LINE}"),
        ("WAKER_PIN=“secret”\nWAKER_SSH_USER=\u2018x", f", line 1, 2: {STRAIGHT}"),
        ("WAKER_PIN='secret\nWAKER_INITRD=\"x'", f", line 1, 2: {QUOTE}"),
        ("WAKER_PIN='secret' # mine", f", line 1: {COMMENT}"),
        ("WAKER_PIN=secret # mine", f", line 1: {COMMENT}"),
        ("WAKER_SSH_USER=\nWAKER_PIN=secret\t#mine", f", line 2: {COMMENT}"),
        ("WAKER_PIN= # secret", f", line 1: {COMMENT}"),
        ("WAKER_PIN=secret WAKER_INITRD=systemd", f", line 1: {TWO}"),
        ("WAKER_PIN=secret\nWAKER_PIN=secret", f", line 2: {TWICE}"),
    ],
)
def test_a_file_that_could_be_misread_is_told_and_not_quoted(
    tmp_path: Path, content: str | bytes | None, told: str
) -> None:
    file = tmp_path / "waker.env"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    ended = run_waker("--env-file", str(file))
    assert (ended.returncode, ended.stderr) == (78, f"{file}{told}\n")


def test_without_any_setting_the_usual_file_is_read(tmp_path: Path) -> None:
    """In a mount namespace of its own, in which a folder of the test lies over /etc."""
    need_root()
    file = "WAKER_PIN=24681012\nWAKER_SSH_USER=two words\n"
    script = (
        f"cd {tmp_path} && mount -t tmpfs none . && cd {tmp_path} && mkdir -p up/waker"
        f" work && printf '{file}' >up/waker/waker.env && mount -t overlay none /etc -o"
        f" lowerdir=/etc,upperdir={tmp_path}/up,workdir={tmp_path}/work"
        f' && cd {CHECKOUT} && exec "$0" "$@"'
    )

    def told(command: str, **settings: str) -> list[str]:
        """Run a command; returns the names of which it complains."""
        ended = subprocess.run(
            [need("unshare"), "--mount", "sh", "-c", script, *MODULE, command],
            env=environment(settings),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 78, ended.stderr
        return re.findall("WAKER_[A-Z_]+", ended.stdout + ended.stderr)

    mine = ["WAKER_HOMELAB_HOST", "WAKER_SSH_USER"]
    assert told("serve") == told("check") == [*mine, "WAKER_HOMELAB_MAC"]
    assert told("unlock") == told("state") == mine
    assert told("state", WAKER_INITRD="systemd") == ["WAKER_HOMELAB_HOST"]
