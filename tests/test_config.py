"""The configuration: valid values, and the message for each mistake."""

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
    """The required settings. A group may read the key, as with systemd credentials."""
    (tmp_path / "ssh_key").write_text(f"\n\n{PEM}")
    (tmp_path / "ssh_key").chmod(0o640)
    return MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}


def faults(values: dict[str, str], folder: Path) -> list[str]:
    with pytest.raises(waker.ConfigError) as error:
        waker.read_config(values, folder)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (waker.parse_mac, "52:54:00:ab:CD:ef", bytes.fromhex("525400abcdef")),
        (waker.parse_mac, "52-54-00-AB-cd-EF", bytes.fromhex("525400abcdef")),
        (waker.plain_address, "2001:DB8::9", "2001:db8::9"),
        (waker.plain_address, "::ffff:10.0.0.9", "10.0.0.9"),
        (waker.parse_host, "169.254.7.7", "169.254.7.7"),
        (waker.PARSE_NAME, "Büro " + "x" * 59, "Büro " + "x" * 59),
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
    ids=[
        "MAC with colons",
        "MAC with dashes",
        "IPv6 in upper case",
        "mapped IPv4",
        "link-local IPv4",
        "name of 64",
        "listen on IPv6",
        "key and comment",
        "comma in the comment",
        "key type in the comment",
        "port in brackets",
        "two names",
        "two keys",
        "spaces around the comma",
        "two keys with names",
        "no key",
        "spaces in a list",
        "fingerprint",
    ],
)
def test_a_valid_value_is_parsed(
    parse: Callable[[object], object], text: object, value: object
) -> None:
    assert parse(text) == value


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
    assert waker.HostKey.parse_all(line) == (waker.HostKey(kind, blob),)
    with pytest.raises(ValueError, match=r"^$"):  # a second key is no comment
        waker.HostKey.parse_all(f"{KEY} {line}")


def test_a_passphrase_is_taken_as_it_was_typed() -> None:
    """cryptsetup compares bytes: an accent of its own is not one with its letter."""
    assert waker.Passphrase(" e\u0301\u00e9 ").data == b" e\xcc\x81\xc3\xa9 "


HOST = f"must be {waker.ADDRESS_FORM}"
MAC = f"must be {waker.MAC_FORM}"
PROXIES = f"must be {waker.PROXY_FORM}"
KEYS = "must be a line such as ssh-ed25519 AAAA...; the whole key, not its fingerprint"
PIN_LINE = "`WAKER_PIN=...` with 8 to 128 characters, without a space at either end"
PIN_FORM = "8 to 128 characters, without a space at either end"
DIGITS = f"must be {PIN_FORM}"
LISTEN = "must be ADDRESS:PORT such as 0.0.0.0:8080"


USER = "must be a user's name"
NAME = "must be a name of at most 64 characters"
PORT = "must be a port, 1 to 65535"
UNSET = f"is not set (names without WAKER_ are ignored); add a line {PIN_LINE}"
KEY_PATH = f"must be the path of the SSH key{waker.WHOLE}"
KEY_MISSING = f"{{0}} is missing; correct the path, or {waker.MAKE_KEY.format('{0}')}"
CERT_PATH = f"must be the path of a certificate{waker.WHOLE}"
TLS_KEY_PATH = f"must be the path of the TLS key{waker.WHOLE}"
WRONG = {
    "unknown name": ("PORT", "80", "is not a setting; see `waker --help`"),
    "no PIN": ("PIN", "", UNSET),
    "PIN of 7": ("PIN", "2468101", DIGITS),
    "PIN without UTF-8": ("PIN", "2468101\udcff", DIGITS),
    "PIN of 129": ("PIN", "x" * 129, DIGITS),
    "PIN after a space": ("PIN", " 24681012", DIGITS),
    "PIN before a no-break space": ("PIN", "24681012\xa0", DIGITS),
    "PIN of spaces": ("PIN", "         ", DIGITS),
    "MAC without colons": ("HOMELAB_MAC", "525400123456", MAC),
    "MAC with colons and dashes": ("HOMELAB_MAC", "52:54:00-12-34-56", MAC),
    "MAC with a g": ("HOMELAB_MAC", "52:54:00:12:34:5g", MAC),
    "MAC with a newline": ("HOMELAB_MAC", "52:54:00:12:34:56\n", MAC),
    "MAC of five": ("HOMELAB_MAC", "52:54:00:12:34", MAC),
    "MAC of seven": ("HOMELAB_MAC", "52:54:00:12:34:56:78", MAC),
    "MAC of zeros": ("HOMELAB_MAC", "00:00:00:00:00:00", MAC),
    "group MAC": ("HOMELAB_MAC", "01:00:5e:00:00:01", MAC),
    "name as host": ("HOMELAB_HOST", "nas.lan", HOST),
    "scope ID": ("HOMELAB_HOST", "fe80::1%eth0", HOST),
    "link-local host": ("HOMELAB_HOST", "fe80::1", HOST),
    "IPv6 broadcast": ("HOMELAB_BROADCAST", "::1", "must be an IPv4 address"),
    "name with a bell": ("HOMELAB_NAME", "bell\a", NAME),
    "name of 65": ("HOMELAB_NAME", "x" * 65, NAME),
    "initrd port 0": ("INITRD_SSH_PORT", "0", PORT),
    "initrd port 65536": ("INITRD_SSH_PORT", "65536", PORT),
    "initrd port by name": ("INITRD_SSH_PORT", "ssh", PORT),
    "system port 0": ("SYSTEM_SSH_PORT", "0", PORT),
    "user with a space": ("SSH_USER", "two words", USER),
    "SSH key with a NUL": ("SSH_KEY", "a\0b", KEY_PATH),
    "SSH key is a folder": ("SSH_KEY", ".", "{0} is not a file; correct the path"),
    "SSH key is missing": ("SSH_KEY", "x", KEY_MISSING),
    "SSH key below a file": (
        "SSH_KEY",
        "ssh_key/x",
        "{0}: Not a directory; correct the path",
    ),
    "fingerprint": ("SSH_HOST_KEY", FINGERPRINT, KEYS),
    "key without type": ("SSH_HOST_KEY", BLOB, KEYS),
    "revoked key": ("SSH_HOST_KEY", f"@revoked {KEY}", KEYS),
    "key cut at the end": ("SSH_HOST_KEY", KEY[:-4], KEYS),
    "key with an asterisk": ("SSH_HOST_KEY", f"{KEY}*", KEYS),
    "key of half a blob": ("SSH_HOST_KEY", f"ssh-ed25519 {BLOB[:20]}", KEYS),
    "key of another type": ("SSH_HOST_KEY", f"ecdsa-sha2-nistp384 {NISTP256}", KEYS),
    # Nothing that looks like a second key passes as a comment on the first.
    "two keys without comma": ("SSH_HOST_KEY", f"{KEY} {KEY}", KEYS),
    "second key after a comment": ("SSH_HOST_KEY", f"{KEY} root@box {KEY}", KEYS),
    "comma after the key": ("SSH_HOST_KEY", f"{KEY},", KEYS),
    "revoked second key": ("SSH_HOST_KEY", f"{KEY} x,@revoked a,b {KEY}", KEYS),
    "word as second key": ("SSH_HOST_KEY", f"{KEY},x", KEYS),
    "second key cut": ("SSH_HOST_KEY", f"{KEY},{KEY[:-4]}", KEYS),
    "key in the comment": ("SSH_HOST_KEY", f"{KEY} replaces {KEY}", KEYS),
    "old key as comment": ("SSH_HOST_KEY", f"# old: {KEY},{KEY}", KEYS),
    "second is an authority": (
        "SSH_HOST_KEY",
        f"{KEY} x,@cert-authority a,b {KEY}",
        KEYS,
    ),
    "listen without address": ("LISTEN", "8080", LISTEN),
    "listen on IPv6 without brackets": ("LISTEN", "::1:80", LISTEN),
    "listen on three octets": ("LISTEN", "1.2.3:80", LISTEN),
    "listen on port 65536": ("LISTEN", "1.2.3.4:65536", LISTEN),
    "proxy by name": ("TRUSTED_PROXY", "nginx", PROXIES),
    "certificate with a NUL": ("TLS_CERT", "a\0b", CERT_PATH),
    "TLS key with a NUL": ("TLS_KEY", "a\0b", TLS_KEY_PATH),
}


@pytest.mark.parametrize(("name", "value", "words"), WRONG.values(), ids=[*WRONG])
def test_a_wrong_value_is_refused_with_the_remedy(
    good: dict[str, str], tmp_path: Path, name: str, value: str, words: str
) -> None:
    fault = f"WAKER_{name} {words.format(tmp_path / value)}"
    assert faults(good | {f"WAKER_{name}": value}, tmp_path) == [fault]


PUTTY = "is in PuTTY's format; run puttygen {0} -O private-openssh -o {0}.new"
DROPBEAR = "is in dropbear's format; run dropbearconvert dropbear openssh {0} {0}.new"
OPEN = "is open to others; chmod 600 {}"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (KEY, 0o644, "is a public key; name the private one, without .pub"),
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", 0o644, PUTTY),
        ("\0\0\0\x0bssh-ed25519\0\0\0@", 0o600, DROPBEAR),
        ("rubbish", 0o644, "must be an Ed25519, ECDSA or RSA private key"),
        (PEM, 0o604, OPEN),
        (PEM, 0o602, OPEN),
    ],
    ids=["public", "PuTTY", "dropbear", "rubbish", "readable", "writable"],
)
def test_a_useless_private_key_is_refused_with_the_remedy(
    good: dict[str, str], tmp_path: Path, content: str, mode: int, words: str
) -> None:
    path = tmp_path / "ssh_key"
    path.write_text(content)
    path.chmod(mode)
    assert faults(good, tmp_path) == [f"WAKER_SSH_KEY {path} {words.format(path)}"]


def test_a_tls_key_is_private_and_its_certificate_is_not(
    good: dict[str, str], tmp_path: Path
) -> None:
    tls = {"WAKER_TLS_CERT": "cert.pem", "WAKER_TLS_KEY": "key.pem"}
    for name in tls.values():
        (tmp_path / name).write_text(PEM)
        (tmp_path / name).chmod(0o644)
    key = tmp_path / "key.pem"
    assert faults(good | tls, tmp_path) == [f"WAKER_TLS_KEY {key} {OPEN.format(key)}"]


def test_a_credential_that_is_missing_is_sought_where_the_user_put_it(
    good: dict[str, str], tmp_path: Path
) -> None:
    """waker.service passes a single newline instead."""
    folder = tmp_path / "credentials/waker.service"
    folder.mkdir(parents=True)
    for name in ("waker.env", "ssh_key"):
        (folder / name).write_text("\n")
    remedy = waker.MAKE_KEY.format("/etc/waker/ssh_key")
    missing = f"WAKER_SSH_KEY /etc/waker/ssh_key is missing; {remedy}"
    assert faults(good, folder) == [missing]
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(folder / "waker.env")
    remedy = "copy waker.env.example there and edit it"
    assert str(error.value) == f"/etc/waker/waker.env is missing; {remedy}"


def test_a_pin_has_up_to_128_characters() -> None:
    assert waker.Pin("x" * 128).matches("x" * 128)


IPV6 = {"WAKER_HOMELAB_HOST": "2001:db8::1"}
TLS = "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (IPV6, "WAKER_HOMELAB_BROADCAST must be set: WAKER_HOMELAB_HOST is IPv6"),
        ({"WAKER_TLS_CERT": "ssh_key"}, TLS),
        ({"WAKER_TLS_KEY": "ssh_key"}, TLS),
    ],
    ids=["IPv6", "certificate alone", "TLS key alone"],
)
def test_settings_that_contradict_each_other_are_refused(
    good: dict[str, str], tmp_path: Path, values: dict[str, str], fault: str
) -> None:
    assert faults(good | values, tmp_path) == [fault]


def test_a_file_is_read_as_people_and_editors_write_it(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    text = (
        "# a comment\n;WAKER_PIN=x\n\n  WAKER_PIN=plain#stays \r\n"
        "WAKER_SSH_USER='single # q'\n"
        'WAKER_TLS_CERT="it\'s "so""\n'
        'WAKER_HOMELAB_NAME = " double q"\r\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
        "http_proxy=x # y\n"
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
WAKER_HOMELAB_MAC= # secret
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
    ("content", "expected"),
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
    ids=["lines", "encoding"],
)
def test_a_file_that_could_be_misread_is_refused_without_quoting_it(
    tmp_path: Path, content: bytes, expected: list[str]
) -> None:
    file = tmp_path / "waker.env"
    file.write_bytes(content)
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(file)
    assert str(error.value).splitlines() == [f"{file}{fault}" for fault in expected]


def test_the_environment_wins_and_all_mistakes_are_reported_without_values(
    tmp_path: Path,
) -> None:
    file = tmp_path / "waker.env"
    file.write_text("WAKER_PIN=s3crt\nWAKER_SSH_USER=s3 crt\nwaker_x=s3crt\n")
    settings = MACHINE | {"WAKER_SSH_USER": "root", "WAKER_X": "s3crt"}
    settings["WAKER_HOMELAB_BROADCAST"] = MACHINE["WAKER_HOMELAB_HOST"]
    ended = run_waker("--env-file", str(file), settings=settings)
    names = [line.split()[0] for line in ended.stderr.splitlines()]
    assert names == ["WAKER_X", "waker_x", "WAKER_PIN", "WAKER_HOMELAB_HOST"]
    assert "s3crt" not in ended.stderr
    assert ended.returncode == 78


def test_without_any_setting_the_usual_file_is_read(tmp_path: Path) -> None:
    """In a mount namespace, where a folder of the test replaces /etc."""
    need_root()
    (tmp_path / "waker").mkdir()
    (tmp_path / "waker/waker.env").write_text("WAKER_INITRD_SSH_PORT=two words\n")
    script = 'mount --bind "$0" /etc && "$@" state; WAKER_SSH_USER=x "$@" state'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(tmp_path), *MODULE],
        cwd=CHECKOUT,
        env=environment({}),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    names = [line.split()[0] for line in ended.stderr.splitlines()]
    assert names == [
        "WAKER_HOMELAB_HOST",
        "WAKER_INITRD_SSH_PORT",
        "WAKER_HOMELAB_HOST",
    ]
