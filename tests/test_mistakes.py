"""Mistakes that tired people make, and what `check` or `serve` says about each."""

import ast
import contextlib
import datetime as dt
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from certificate import new_certificate
from conftest import (
    CHECKOUT,
    MACHINE,
    MODULE,
    PIN,
    PROGRAM,
    environment,
    need,
    need_root,
    run_waker,
)
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from homelab import DROPBEAR, OPENSSH, SshServer, bind, new_key, public_line
from ssh_servers import free_port

WRONG_SETTING = 78
HOST_KEY = new_key()
SERVER_KEY = public_line(HOST_KEY)
RIGHT = MACHINE | {
    "WAKER_PIN": PIN,
    "WAKER_LISTEN": "127.0.0.1:0",
    "WAKER_INITRD_SSH_PORT": str(free_port()),
    "WAKER_SYSTEM_SSH_PORT": str(free_port()),
    "WAKER_SSH_KEY": "ssh_key",
    "WAKER_SSH_HOST_KEY": SERVER_KEY,
}


@dataclass
class Mistake:
    """How a setup differs from a right one, and the message that it must cause."""

    words: str
    settings: dict[str, str] = field(default_factory=dict)
    lines: str = ""  # to add to waker.env
    files: dict[str, bytes] = field(default_factory=dict)  # to write beside it
    banner: str = ""  # of a server at {taken}
    status: int = WRONG_SETTING
    command: str = "check"


def openssh_key(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def certificate(key: Ed25519PrivateKey, first: int, last: int) -> bytes:
    """Make one that is valid from the first year to the last, in January."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "waker")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1)
    builder = builder.not_valid_before(dt.datetime(first, 1, 31, tzinfo=UTC))
    builder = builder.not_valid_after(dt.datetime(last, 1, 31, tzinfo=UTC))
    return builder.sign(key, None).public_bytes(Encoding.PEM)


UTC = dt.UTC
OWN = Ed25519PrivateKey.generate()
PUBLIC = OWN.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
PKCS8 = OWN.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
UNPINNED = {"WAKER_SSH_HOST_KEY": ""}
LOCKED = OWN.private_bytes(  # one round: each process of pytest makes this key
    Encoding.PEM,
    PrivateFormat.OpenSSH,
    PrivateFormat.OpenSSH.encryption_builder().kdf_rounds(1).build(b"secret"),
)
HALVES = SERVER_KEY[:40], SERVER_KEY[40:]
TLS = {"WAKER_TLS_CERT": "cert.pem", "WAKER_TLS_KEY": "key.pem"}
OWN_ADDRESS = "WAKER_HOMELAB_HOST must be the server's own IP address"
GROUP = "WAKER_HOMELAB_MAC must be a MAC address.* not a group address"
WHOLE_PATH = "must be the path of .*; write the full path, without ~"
PIN_UNSET = (
    r"WAKER_PIN is not set \(names without WAKER_ are ignored\); add a line `WAKER_PIN"
)
JOIN = "write NAME=value, without `export` or `Environment`; or join it to the line"
KEYGEN = "ssh-keygen -t ed25519 -N '' -f {folder}/none"
ALL_CAUSES = (
    "WRONG .* refused waker's SSH key .* add it to the initrd's authorized_keys and"
    " rebuild the initrd, or correct WAKER_SSH_USER, or install that user's shell"
)
MISTAKES = {
    "own key as host key": Mistake(
        "WAKER_SSH_HOST_KEY is waker's own key; paste the server's host key",
        {"WAKER_SSH_HOST_KEY": PUBLIC.decode()},
    ),
    "own key beside the right one": Mistake(
        "WAKER_SSH_HOST_KEY is waker's own key; paste the server's host key",
        {"WAKER_SSH_HOST_KEY": f"{SERVER_KEY},{PUBLIC.decode()}"},
    ),
    "expired certificate": Mistake(
        "- +certificate +expired on 2025-01-31; browsers will warn",
        TLS,
        files={"cert.pem": certificate(OWN, 2024, 2025), "key.pem": PKCS8},
        status=0,
    ),
    "certificate of the future": Mistake(
        "- +certificate +not valid before 2090-01-31; is this box's clock right?",
        TLS,
        files={"cert.pem": certificate(OWN, 2090, 2091), "key.pem": PKCS8},
        status=0,
    ),
    "key of another certificate": Mistake(
        "WAKER_TLS_CERT and WAKER_TLS_KEY do not match; waker's own certificate must"
        " come first in its file",
        TLS,
        files={
            "cert.pem": certificate(Ed25519PrivateKey.generate(), 2024, 2090),
            "key.pem": PKCS8,
        },
    ),
    "certificate's key with a passphrase": Mistake(  # nobody is asked for it
        r"\AWAKER_TLS_CERT and WAKER_TLS_KEY must be a certificate and its private key,"
        r" both PEM, not encrypted\n\Z",
        TLS,
        files={
            "cert.pem": certificate(OWN, 2024, 2090),
            "key.pem": OWN.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
            ),
        },
        command="serve",
    ),
    "whole network as proxy": Mistake(
        "- +proxy +any host in 192.168.1.0/24 could evade the limit on PIN attempts",
        {"WAKER_TRUSTED_PROXY": "192.168.1.0/24"},
        status=0,
    ),
    "key with a passphrase": Mistake(
        "WRONG +SSH key .* has a passphrase; remove it with: ssh-keygen -p -N '' -f"
        " {folder}/ssh_key",
        files={"ssh_key": LOCKED},
        status=1,
    ),
    "swapped ports": Mistake(
        "- +system's port .*dropbear.*; are the two ports swapped?",
        {"WAKER_SYSTEM_SSH_PORT": "{taken}"},
        banner=DROPBEAR,
        status=0,
    ),
    "any address": Mistake(OWN_ADDRESS, {"WAKER_HOMELAB_HOST": "0.0.0.0"}),
    "any IPv6 address": Mistake(OWN_ADDRESS, {"WAKER_HOMELAB_HOST": "::"}),
    "multicast address": Mistake(OWN_ADDRESS, {"WAKER_HOMELAB_HOST": "224.0.0.1"}),
    "limited broadcast": Mistake(
        OWN_ADDRESS, {"WAKER_HOMELAB_HOST": "255.255.255.255"}
    ),
    "broadcast as the server": Mistake(
        "WAKER_HOMELAB_HOST and WAKER_HOMELAB_BROADCAST must differ",
        {
            "WAKER_HOMELAB_HOST": "192.168.1.255",
            "WAKER_HOMELAB_BROADCAST": "192.168.1.255",
        },
    ),
    "host key over two lines": Mistake(
        f"line 9: {JOIN}",
        {"WAKER_SSH_HOST_KEY": HALVES[0]},
        HALVES[1],
    ),
    "host key over two lines, of letters": Mistake(
        f"line 9: {JOIN}",
        {"WAKER_SSH_HOST_KEY": HALVES[0]},
        "BueUWCs1ZRqRXRwBtd3cw1dEtxYCrDzfJF9HTPqgNPhJsDjy8H2eVCALxqSF9M1DjKg=",
    ),
    "three lines of dropbearkey": Mistake(
        f"line 9, 11: {JOIN}",
        {"WAKER_SSH_HOST_KEY": ""},
        f"Public key portion is:\nWAKER_SSH_HOST_KEY={SERVER_KEY}\nFingerprint: SHA256",
    ),
    "Ed25519 key in PKCS#8": Mistake(
        "ssh_key is in PKCS#8 format; convert it with: ssh-keygen -p -N '' -f"
        r" {folder}/ssh_key \(for Ed25519, OpenSSH 9.6 or later\)",
        files={"ssh_key": PKCS8},
    ),
    "missing SSH key": Mistake(
        "WAKER_SSH_KEY {folder}/none is missing; correct the path, or make it with: "
        f"{KEYGEN}$",
        {"WAKER_SSH_KEY": "none"},
    ),
    "key file of one line end": Mistake(
        "WAKER_SSH_KEY {folder}/ssh_key is empty; make it with: ssh-keygen .*/ssh_key$",
        files={"ssh_key": b"\n"},
    ),
    "waker.env of one line end": Mistake(
        "^{folder}/waker.env is empty; copy waker.env.example there and edit it$",
        files={"waker.env": b"\n"},
    ),
    "encrypted key in PKCS#8": Mistake(
        "ssh_key is in PKCS#8 format; convert it with: ssh-keygen -p",
        files={
            "ssh_key": OWN.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
            )
        },
    ),
    "missing certificate": Mistake(
        "WAKER_TLS_CERT {folder}/cert.pem is missing; correct the path, or make"
        " certificate and key with: openssl req .*",
        TLS,
    ),
    "tilde in a path": Mistake(WHOLE_PATH, {"WAKER_SSH_KEY": "~/.ssh/id_ed25519"}),
    "tilde in a certificate's path": Mistake(WHOLE_PATH, {"WAKER_TLS_CERT": "~/x.pem"}),
    "empty waker.env": Mistake(
        "^{folder}/waker.env is empty; copy waker.env.example there and edit it$",
        files={"waker.env": b""},
    ),
    "MAC address of a group": Mistake(
        GROUP, {"WAKER_HOMELAB_MAC": "01:00:5e:00:00:01"}
    ),
    "damaged SSH key": Mistake(
        "WRONG +SSH key .* is damaged, or not an Ed25519, ECDSA or RSA key",
        files={"ssh_key": openssh_key(OWN)[:150]},
        status=1,
    ),
    "PIN without a prefix": Mistake(PIN_UNSET, {"WAKER_PIN": ""}, "PIN=24681012"),
    "lines of a unit": Mistake(
        f"line 9: {JOIN}", {"WAKER_PIN": ""}, 'Environment="WAKER_PIN=24681012"'
    ),
    "serve at a port in use": Mistake(
        "^WAKER_LISTEN: port {taken} is in use; waker may be running already",
        {"WAKER_LISTEN": "127.0.0.1:{taken}"},
        banner=OPENSSH,
        status=1,
        command="serve",
    ),
    "check at a port in use": Mistake(
        "- +web port +port {taken} is in use; waker may be running already",
        {"WAKER_LISTEN": "127.0.0.1:{taken}"},
        banner=OPENSSH,
        status=0,
    ),
    "serve at another's address": Mistake(
        "^WAKER_LISTEN: 203.0.113.9 is not an address of this box",
        {"WAKER_LISTEN": "203.0.113.9:8080"},
        status=1,
        command="serve",
    ),
    "network with host bits": Mistake(
        "WAKER_TRUSTED_PROXY must be .*; the host part of a network must be zero",
        {"WAKER_TRUSTED_PROXY": "192.168.1.1/24"},
    ),
    "key refused": Mistake(
        ALL_CAUSES,
        {"WAKER_INITRD_SSH_PORT": "{taken}", "WAKER_SSH_USER": "nobody"},
        banner=DROPBEAR,
        status=1,
    ),
    "tilde in one of two TLS paths": Mistake(
        r"\AWAKER_TLS_CERT must be the path .*\n\Z",
        TLS | {"WAKER_TLS_CERT": "~/cert.pem"},
        files={"key.pem": PKCS8},
    ),
}


@contextlib.contextmanager
def server(banner: str) -> Iterator[str]:
    """Serve SSH with the pinned host key at a port; without a banner, serve nothing."""
    listener = bind("127.0.0.1", 0)
    port = str(listener.getsockname()[1])
    if not banner:
        listener.close()
        yield port
        return
    with contextlib.closing(SshServer(listener, HOST_KEY, banner, PUBLIC.decode())):
        yield port


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=[*MISTAKES])
def test_a_mistake_is_named_with_its_remedy(mistake: Mistake, tmp_path: Path) -> None:
    with server(mistake.banner) as taken:
        settings = RIGHT | mistake.settings
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        env_file = (text + mistake.lines).replace("{taken}", taken).encode()
        own_key = openssh_key(OWN)
        files = {"waker.env": env_file, "ssh_key": own_key} | mistake.files
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
            (tmp_path / name).chmod(0o600)
        file = str(tmp_path / "waker.env")
        ended = run_waker("--env-file", file, mistake.command)
    said = ended.stdout + ended.stderr
    words = mistake.words.replace("{taken}", taken).replace("{folder}", str(tmp_path))
    assert re.search(words, said, re.MULTILINE), said
    assert ended.returncode == mistake.status
    assert "Traceback" not in said


def test_a_right_setup_has_no_mistake(tmp_path: Path) -> None:
    """Otherwise the table above would prove little."""
    files = new_certificate(tmp_path).settings()
    key = tmp_path / "ssh_key"
    key.write_bytes(openssh_key(OWN))
    key.chmod(0o600)
    files["WAKER_SSH_KEY"] = str(key)
    ended = run_waker("check", settings=RIGHT | files)
    wrong = [line for line in ended.stdout.splitlines() if "WRONG" in line]
    assert wrong == []
    tomorrow = f"{dt.datetime.now(UTC) + dt.timedelta(1):%Y-%m-%d}"
    assert f"valid until {tomorrow}" in ended.stdout
    assert (ended.returncode, ended.stderr) == (0, "")


def test_serve_reports_a_port_that_only_root_may_use() -> None:
    need_root()  # the command below loses its right to such a port
    ended = subprocess.run(
        [need("setpriv"), "--bounding-set=-net_bind_service", *MODULE, "serve"],
        cwd=CHECKOUT,
        env=environment(RIGHT | UNPINNED | {"WAKER_LISTEN": "127.0.0.1:1023"}),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    words = "port 1023 is for root only; set WAKER_LISTEN to a port above 1023"
    assert ended.stderr == f"WAKER_LISTEN: {words}\n"
    assert ended.returncode == 1


def test_whoever_forgets_sudo_is_told(tmp_path: Path) -> None:
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
    advice = "use sudo; for the service, keep the file in /etc/waker"
    assert ended.stderr == f"{file} cannot be read; {advice}\n"
    assert (ended.returncode, ended.stdout) == (WRONG_SETTING, "")


def test_an_old_python_is_reported_before_anything_else() -> None:
    source = Path(PROGRAM).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    assert ast.unparse(tree.body[1]) == "import sys"
    check = tree.body[2]
    assert isinstance(check, ast.If)
    assert ast.unparse(check.test) == "sys.version_info < (3, 11)"
    assert "needs Python 3.11 or later" in ast.unparse(check.body[0])
