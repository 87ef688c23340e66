"""The configuration: what passes, and how each mistake is told."""

import base64
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, MACHINE, MODULE, PIN, environment, need_root, run_waker

import waker

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"
KEY = f"ssh-ed25519 {BLOB}"
FINGERPRINT = "SHA256:c5CSjps6Y5OSk8aYpkchHhILDzS+dm64U2iAOxSq/1g"  # by ssh-keygen -l
NISTP256 = "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY="
PINNED = waker.HostKey("ssh-ed25519", base64.b64decode(BLOB))
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def good(tmp_path: Path) -> dict[str, str]:
    """The fewest settings; a group may read the key, as systemd's credentials."""
    (tmp_path / "ssh_key").write_text(f"\n\n{PEM}")
    (tmp_path / "ssh_key").chmod(0o640)
    return MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}


def faults(values: dict[str, str], folder: Path) -> list[str]:
    with pytest.raises(waker.ConfigError) as told:
        waker.read_config(values, folder)
    return str(told.value).splitlines()


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (waker.parse_mac, "52:54:00:ab:CD:ef", bytes.fromhex("525400abcdef")),
        (waker.parse_mac, "52-54-00-AB-cd-EF", bytes.fromhex("525400abcdef")),
        (waker.plain_address, "2001:DB8::9", "2001:db8::9"),
        (waker.plain_address, "::ffff:10.0.0.9", "10.0.0.9"),
        (waker.parse_listen, "[fe80::1]:65535", ("fe80::1", 65535)),
        (waker.HostKey.parse_all, f"  {KEY} a comment with blanks\t", (PINNED,)),
        (waker.HostKey.parse_all, f"{KEY} of the old box, in the cellar", (PINNED,)),
        (waker.HostKey.parse_all, f"{KEY} new, my-ssh-rsa key was bad", (PINNED,)),
        (waker.HostKey.parse_all, f"[192.168.1.20]:2222 {KEY}", (PINNED,)),
        (waker.HostKey.parse_all, f"nas.lan,192.168.1.20 {KEY}", (PINNED,)),
        (waker.HostKey.parse_all, f"{KEY},{KEY} root@box", (PINNED, PINNED)),
        (waker.HostKey.parse_all, f"{KEY} , {KEY}", (PINNED, PINNED)),
        (
            *(waker.HostKey.parse_all, f"nas,10.0.0.2 {KEY} a, b,nas,10.0.0.2 {KEY}"),
            (PINNED, PINNED),
        ),
        (waker.HostKey.parse_all, "", ()),
        (waker.parse_networks, "10.0.0.2 , ::1", waker.parse_networks("10.0.0.2,::1")),
        (waker.fingerprint, PINNED.blob, FINGERPRINT),
    ],
)
def test_a_right_value_has_one_meaning(
    parse: Callable[[object], object], text: object, value: object
) -> None:
    assert parse(text) == value


HOST = f"must be {waker.ADDRESS_FORM}"
MAC = f"must be {waker.MAC_FORM}"
PROXIES = f"must be {waker.PROXY_FORM}"
KEYS = "must be a line such as ssh-ed25519 AAAA...; the whole key, not its fingerprint"
PIN_LINE = "`WAKER_PIN=...` with 8 to 128 characters, without a space at either end"
PIN_FORM = "8 to 128 characters, without a space at either end"
DIGITS = f"must be {PIN_FORM}"
LISTEN = "must be ADDRESS:PORT such as 0.0.0.0:8080"


@pytest.mark.parametrize(
    ("name", "values", "told"),  # the values are separated by |
    [
        ("WAKER_PORT", "80", "is not a setting; see `waker --help`"),
        (
            "WAKER_PIN",
            "",
            f"is not set (names without WAKER_ are ignored); add a line {PIN_LINE}",
        ),
        ("WAKER_PIN", "2468101|2468101\udcff", DIGITS),
        ("WAKER_PIN", "x" * 129, DIGITS),
        ("WAKER_PIN", " 24681012|24681012\xa0|         ", DIGITS),
        ("WAKER_HOMELAB_MAC", "525400123456|52:54:00-12-34-56|52:54:00:12:34:5g", MAC),
        ("WAKER_HOMELAB_MAC", "52:54:00:12:34:56\n|52:54:00:12:34", MAC),
        ("WAKER_HOMELAB_MAC", "00:00:00:00:00:00|01:00:5e:00:00:01", MAC),
        ("WAKER_HOMELAB_HOST", "nas.lan|fe80::1%eth0|fe80::1", HOST),
        ("WAKER_HOMELAB_BROADCAST", "::1", "must be an IPv4 address"),
        ("WAKER_HOMELAB_NAME", "bell\a", "must be a name of at most 64 characters"),
        ("WAKER_HOMELAB_NAME", "x" * 65, "must be a name of at most 64 characters"),
        ("WAKER_INITRD", "dracut", "must be cryptroot (dropbear) or systemd"),
        ("WAKER_INITRD_SSH_PORT", "0|65536|ssh", "must be a port, 1 to 65535"),
        ("WAKER_SYSTEM_SSH_PORT", "0", "must be a port, 1 to 65535"),
        ("WAKER_SSH_USER", "two words", "must be a user's name"),
        ("WAKER_SSH_KEY", "a\0b", f"must be the path of the SSH key{waker.WHOLE}"),
        ("WAKER_SSH_KEY", ".", "{} is not a file; correct the path"),
        (
            "WAKER_SSH_KEY",
            "x",
            f"{{0}} is missing; correct the path, or {waker.MAKE_KEY.format('{0}')}",
        ),
        ("WAKER_SSH_KEY", "ssh_key/x", "{}: Not a directory; correct the path"),
        ("WAKER_SSH_HOST_KEY", f"{FINGERPRINT}|{BLOB}|@revoked {KEY}", KEYS),
        ("WAKER_SSH_HOST_KEY", f"{KEY[:-4]}|{KEY}*|ssh-ed25519 {BLOB[:20]}", KEYS),
        ("WAKER_SSH_HOST_KEY", f"ecdsa-sha2-nistp384 {NISTP256}", KEYS),
        # Nothing that looks like a second key is taken for a comment on the first.
        ("WAKER_SSH_HOST_KEY", f"{KEY} {KEY}|{KEY} root@box {KEY}|{KEY},", KEYS),
        ("WAKER_SSH_HOST_KEY", f"{KEY} x,@revoked a,b {KEY}|{KEY},x", KEYS),
        ("WAKER_SSH_HOST_KEY", f"{KEY},{KEY[:-4]}|{KEY} replaces {KEY}", KEYS),
        ("WAKER_SSH_HOST_KEY", f"# old: {KEY},{KEY}", KEYS),
        ("WAKER_SSH_HOST_KEY", f"{KEY} x,@cert-authority a,b {KEY}", KEYS),
        ("WAKER_LISTEN", "8080|::1:80|1.2.3:80|1.2.3.4:65536", LISTEN),
        ("WAKER_TRUSTED_PROXY", "nginx", PROXIES),
        ("WAKER_TLS_CERT", "a\0b", f"must be the path of a certificate{waker.WHOLE}"),
        ("WAKER_TLS_KEY", "a\0b", f"must be the path of the TLS key{waker.WHOLE}"),
    ],
)
def test_a_wrong_value_is_told_with_the_remedy(
    good: dict[str, str], tmp_path: Path, name: str, values: str, told: str
) -> None:
    for value in values.split("|"):
        fault = f"{name} {told.format(tmp_path / value)}"
        assert faults(good | {name: value}, tmp_path) == [fault]


PUTTY = "is in PuTTY's format; run puttygen {0} -O private-openssh -o {0}.new"
DROPBEAR = "is in dropbear's format; run dropbearconvert dropbear openssh {0} {0}.new"
OPEN = "is open to others; chmod 600 {}"


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        (KEY, 0o644, "is a public key; name the private one, without .pub"),
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", 0o644, PUTTY),
        ("\0\0\0\x0bssh-ed25519\0\0\0@", 0o600, DROPBEAR),
        ("rubbish", 0o644, "must be an Ed25519, ECDSA or RSA private key"),
        (PEM, 0o604, OPEN),
        (PEM, 0o602, OPEN),
    ],
)
def test_a_private_key_of_no_use_is_told_with_the_remedy(
    good: dict[str, str], tmp_path: Path, content: str, mode: int, told: str
) -> None:
    path = tmp_path / "ssh_key"
    path.write_text(content)
    path.chmod(mode)
    assert faults(good, tmp_path) == [f"WAKER_SSH_KEY {path} {told.format(path)}"]


def test_a_pin_has_up_to_128_characters() -> None:
    assert waker.Pin("x" * 128).matches("x" * 128)


IPV6 = {"WAKER_HOMELAB_HOST": "2001:db8::1"}
SYSTEMD = {"WAKER_INITRD": "systemd", "WAKER_INITRD_SSH_PORT": "22"}
ONE_PORT = "WAKER_INITRD_SSH_PORT must differ from WAKER_SYSTEM_SSH_PORT for systemd"
TLS = "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"


def test_settings_that_do_not_fit_each_other_are_told(
    good: dict[str, str], tmp_path: Path
) -> None:
    for values, told in (
        (SYSTEMD, ONE_PORT),
        (IPV6, "WAKER_HOMELAB_BROADCAST must be set: WAKER_HOMELAB_HOST is IPv6"),
        ({"WAKER_TLS_CERT": "ssh_key"}, TLS),
        ({"WAKER_TLS_KEY": "ssh_key"}, TLS),
    ):
        assert faults(good | values, tmp_path) == [told]


def test_a_file_is_read_as_people_and_editors_write_it(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    text = (
        "# a comment\n;WAKER_PIN=x\n\n  WAKER_PIN=plain#stays \r\n"
        "WAKER_SSH_USER='single # q'\n"
        'WAKER_TLS_CERT="it\'s "so""\n'
        'WAKER_HOMELAB_NAME = " double q"\r\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
    )
    file.write_text(text, encoding="utf-8-sig", newline="")  # begins with a mark
    assert waker.read_env_file(file) == {
        "WAKER_PIN": "plain#stays",
        "WAKER_SSH_USER": "single # q",
        "WAKER_TLS_CERT": 'it\'s "so"',
        "WAKER_HOMELAB_NAME": " double q",
        "WAKER_HOMELAB_HOST": "",
    }


JOIN = (
    "write NAME=value, without `export` or `Environment`; or join it to the line above"
)
MISREAD = """\
export WAKER_PIN=secret
WAKER_INITRD= # secret
WAKER_LISTEN='secret' # mine
WAKER_SSH_USER=secret\t#mine
WAKER_HOMELAB_HOST=“secret”
WAKER_TLS_KEY="secret'
WAKER_SSH_KEY=secret WAKER_PIN=secret
WAKER_SSH_KEY=secret
WAKER_TLS_CERT="secret" "secret"
WAKER_HOMELAB_NAME="secret"  'secret'
"""


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            MISREAD.encode(),
            [
                f", line 1: {JOIN}",
                ", line 2, 3, 4: move the comment to its own line, or quote it",
                ", line 5: use straight quotes, or none",
                ", line 6: end the value with the quote that begins it",
                ", line 7: give each setting a line of its own",
                ", line 8: WAKER_SSH_KEY is set twice; delete one of the two lines",
                ", line 9, 10: quote the value once, as a whole",
            ],
        ),
        ("WAKER_PIN=äöü".encode("latin-1"), [" is not UTF-8; save it as UTF-8"]),
    ],
)
def test_a_file_that_could_be_misread_is_told_and_not_quoted(
    tmp_path: Path, content: bytes, told: list[str]
) -> None:
    file = tmp_path / "waker.env"
    file.write_bytes(content)
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(file)
    assert str(error.value).splitlines() == [f"{file}{fault}" for fault in told]


def test_the_environment_wins_and_all_mistakes_are_told_without_their_values(
    tmp_path: Path,
) -> None:
    file = tmp_path / "waker.env"
    file.write_text("WAKER_PIN=s3crt\nWAKER_SSH_USER=s3 crt\nwaker_x=s3crt\n")
    settings = MACHINE | {"WAKER_SSH_USER": "root", "WAKER_X": "s3crt"}
    ended = run_waker("--env-file", str(file), settings=settings)
    told = [line.split()[0] for line in ended.stderr.splitlines()]
    assert told == ["WAKER_X", "waker_x", "WAKER_PIN"]
    assert "s3crt" not in ended.stderr
    assert ended.returncode == 78


def test_without_any_setting_the_usual_file_is_read(tmp_path: Path) -> None:
    """In a mount namespace of its own, in which a folder of the test lies over /etc."""
    need_root()
    (tmp_path / "waker").mkdir()
    (tmp_path / "waker/waker.env").write_text("WAKER_INITRD_SSH_PORT=two words\n")
    script = 'mount --bind "$0" /etc && "$@" state; WAKER_INITRD=systemd "$@" state'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(tmp_path), *MODULE],
        cwd=CHECKOUT,
        env=environment({}),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    told = [line.split()[0] for line in ended.stderr.splitlines()]
    assert told == ["WAKER_HOMELAB_HOST", "WAKER_INITRD_SSH_PORT", "WAKER_HOMELAB_HOST"]
