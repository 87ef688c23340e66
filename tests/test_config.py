"""Settings beyond test_promises.py: pinned keys, the private key, and the file."""

import base64
import re
import subprocess
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    MACHINE,
    MODULE,
    PIN,
    environment,
    need,
    need_root,
    run_waker,
)

import waker

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"
KEY = f"ssh-ed25519 {BLOB}"
FINGERPRINT = "SHA256:c5CSjps6Y5OSk8aYpkchHhILDzS+dm64U2iAOxSq/1g"  # by ssh-keygen -l
NISTP256 = "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY="
PINNED = base64.b64decode(BLOB)
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


class Box:
    """The required settings, and a folder with a private key that a group may read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, folder / "ssh_key"
        self.key.write_text(f"\n\n{PEM}")
        self.key.chmod(0o640)
        self.settings = {**MACHINE, "WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}

    def read(self) -> waker.Config:
        return waker.read_config(self.settings, self.folder)

    def mistake(self, **others: str) -> str:
        """Return what is reported, which must be one line."""
        self.settings |= {f"WAKER_{name}": value for name, value in others.items()}
        with pytest.raises(waker.ConfigError, match=r"\A.+\Z") as error:
            self.read()
        return str(error.value)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


# ---- Values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (f"  {KEY} of the old box, in the cellar\t", [PINNED]),
        (f"[192.168.1.20]:2222 {KEY}", [PINNED]),
        (f"nas,10.0.0.2 {KEY} a, b,nas,10.0.0.2 {KEY}", [PINNED] * 2),
    ],
    ids=["comment", "port", "two"],
)
def test_host_keys_paste_as_whole_lines(text: str, keys: list[bytes]) -> None:
    assert [*waker.parse_host_keys(text)] == keys
    assert waker.fingerprint(keys[0]) == FINGERPRINT


def test_a_host_key_is_refused_wherever_it_was_cut(box: Box) -> None:
    """As when a mail program wraps it, so that the rest is another line."""
    for end in range(1, len(KEY)):
        mistake = box.mistake(SSH_HOST_KEY=KEY[:end])
        assert mistake.startswith("WAKER_SSH_HOST_KEY must be whole lines")


# Values of which each is one mistake. test_promises.py has more.
WRONG = {
    # No damaged, revoked or unknown key passes as a comment on a good one.
    "unknown type as second": ("SSH_HOST_KEY", f"{KEY},ssh-dss {BLOB}"),
    "two keys without comma": ("SSH_HOST_KEY", f"{KEY} replaces {KEY}"),
    "second key cut": ("SSH_HOST_KEY", f"{KEY},{KEY[:-4]}"),
    "revoked key as second": ("SSH_HOST_KEY", f"{KEY} x,@revoked a,b {KEY}"),
    "authority's key": ("SSH_HOST_KEY", f"@cert-authority * {KEY}"),
    "key of another type": ("SSH_HOST_KEY", f"ecdsa-sha2-nistp384 {NISTP256}"),
    "NUL in a comment": ("SSH_HOST_KEY", f"{KEY} old\0box"),
    "control character in a comment": ("SSH_HOST_KEY", f"{KEY} old\x1b[31mbox"),
    "SSH key with a tilde": ("SSH_KEY", "~/.ssh/id_ed25519"),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=[*WRONG])
def test_a_wrong_value_is_refused_with_its_form_and_not_quoted(
    box: Box, name: str, value: str
) -> None:
    mistake = box.mistake(**{name: value})
    assert re.match(f"WAKER_{name} must be .", mistake)
    assert value not in mistake


def test_a_setting_without_a_value_has_its_default(box: Box) -> None:
    optional = set(waker.SETTINGS) - box.settings.keys()
    usual = box.read()
    box.settings |= dict.fromkeys(optional, "")
    assert box.read()._replace(pin=usual.pin) == usual


def test_whoever_used_https_is_warned_before_it_starts_without(box: Box) -> None:
    words = "WAKER_TLS_CERT must be deleted.*forwarded port.*CHANGELOG"
    assert re.match(words, box.mistake(TLS_CERT="pem"))


# ---- The private key -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (KEY.encode(), 0o644, "not a private key; .*ssh-keygen"),
        (b"\0\x0bssh-ed25519\0@\xff", 0o600, "not a private key; .*ssh-keygen"),
        (PEM.encode(), 0o604, "open to others; run: chmod 600"),
    ],
    ids=["public", "dropbear's", "readable"],
)
def test_a_useless_private_key_is_refused_with_the_remedy(
    box: Box, content: bytes, mode: int, problem: str
) -> None:
    box.key.write_bytes(content)
    box.key.chmod(mode)
    assert re.match(f"WAKER_SSH_KEY {box.key} is {problem}", box.mistake())


def test_a_missing_credential_is_sought_where_the_user_put_it(box: Box) -> None:
    """waker.service passes a single newline instead.

    So it does if a drop-in of the container has emptied LoadCredential=. Then the file
    must not be replaced.
    """
    box.folder /= "credentials/waker.service"
    box.folder.mkdir(parents=True)
    for name in ("waker.env", "ssh_key"):
        (box.folder / name).write_text("\n")
    words = "is missing or empty, or .* not pass it on.*systemctl cat waker"
    mistake = box.mistake()
    assert re.match(f"WAKER_SSH_KEY /etc/waker/ssh_key {words}", mistake)
    assert "ssh-keygen" not in mistake
    with pytest.raises(waker.ConfigError, match=f"^/etc/waker/waker.env {words}") as it:
        waker.read_env_file(box.folder / "waker.env")
    assert "example" not in str(it.value)


def test_only_what_systemd_passes_is_sought_elsewhere(box: Box) -> None:
    """Not a file in a folder of one's own that has such a name."""
    box.folder /= "credentials/waker"
    mistake = box.mistake(SSH_KEY="ssh_key")
    assert mistake.startswith(f"WAKER_SSH_KEY {box.folder}/ssh_key is missing")


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


@pytest.mark.parametrize(
    "line",
    [
        'Environment="WAKER_PIN=secret"',
        "waker_pin=secret",
        "WAKER_LISTEN='secret' # mine",
        "WAKER_HOMELAB_HOST= “secret”",
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


def test_a_relative_path_starts_at_the_files_folder_even_if_the_file_is_a_link(
    tmp_path: Path,
) -> None:
    file, link = tmp_path / "settings", tmp_path / "etc/waker.env"
    values = MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}
    file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    link.parent.mkdir()
    link.symlink_to(file)
    ended = run_waker("check", "--env-file", str(link))
    assert ended.stderr.startswith(f"WAKER_SSH_KEY {link.parent}/ssh_key is missing")


def test_with_any_setting_the_usual_file_is_not_read() -> None:
    ended = run_waker("state", settings={"WAKER_SSH_USER": "x"})
    assert re.fullmatch("WAKER_HOMELAB_HOST is not set.*\n", ended.stderr)


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
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == f"{file} cannot be read; use sudo\n"
