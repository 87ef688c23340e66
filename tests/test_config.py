"""The configuration: what passes, what is a fault, and how faults are told."""

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import CHECKOUT, MODULE, PIN, environment, need, need_root, run_waker
from homelab import Homelab, new_key, public_line

import waker


@pytest.fixture
def good(lab: Homelab) -> dict[str, str]:
    return {"WAKER_PIN": PIN} | lab.settings()


def faults(values: dict[str, str], folder: Path) -> list[str]:
    with pytest.raises(waker.ConfigError) as told:
        waker.read_config(values, folder)
    return str(told.value).splitlines()


@pytest.mark.parametrize("text", ["52:54:00:ab:CD:ef", "52-54-00-AB-cd-EF"])
def test_a_mac_address_is_six_hex_pairs(text: str) -> None:
    assert waker.parse_mac(text) == bytes.fromhex("525400abcdef")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AABBCCDDEE  ",
        "AABBCCDDEEFF",
        "52:54:00:ab:cd",
        "52:54:00:ab:cd:ef:01",
        "52:54:00-ab-cd-ef",
        "52:54:00:ab:cd:ef ",
        " 52:54:00:ab:cd:ef",
        "52:54:00:ab:cd:ef\n",
        "52:54:00:ab:cd:eg",
        "5:54:00:ab:cd:ef",
        "52:54:00:ab:cd:٣٣",
        "52::54:00:ab:cd:ef",
        "52.54.00.ab.cd.ef",
        "00:00:00:00:00:00",
        "01:00:5e:00:00:01",
        "ff:ff:ff:ff:ff:ff",
    ],
)
def test_nothing_else_is_a_mac_address(text: str) -> None:
    with pytest.raises(ValueError):
        waker.parse_mac(text)


def test_the_defaults_are_those_of_the_interface(
    good: dict[str, str], tmp_path: Path
) -> None:
    optional = ("BROADCAST", "INITRD_SSH_PORT", "SYSTEM_SSH_PORT", "SSH_KEY")
    values = {n: v for n, v in good.items() if not n.endswith(optional)}
    config = waker.read_config(values, tmp_path)
    assert str(config.broadcast) == "255.255.255.255"
    assert config.packet_port == 9
    assert config.unlock_seconds == 90
    assert config.name == config.machine.host == "127.0.0.1"
    assert (config.machine.initrd_port, config.machine.system_port) == (2222, 22)
    assert config.machine.user == "root"
    assert config.machine.dialect.name == "cryptroot"
    assert config.machine.key == tmp_path / "ssh_key"
    assert config.listen == ("::", 8080)


def test_all_faults_are_told_together_with_the_remedy(tmp_path: Path) -> None:
    values = {
        "WAKER_PIN": "1234567",
        "WAKER_HOMELAB_MAC": "AABBCCDDEE  ",
        "WAKER_HOMELAB_BROADCAST": "192.168.1.256",
        "WAKER_INITRD": "mandos",
        "WAKER_INITRD_SSH_PORT": "0",
        "WAKER_SYSTEM_SSH_PORT": "65536",
        "WAKER_SSH_USER": "two words",
        "WAKER_SSH_HOST_KEY": "ssh-ed25519 AAAA",
        "WAKER_LISTEN": "8080",
        "WAKER_HOMELAB_NAME": "bell\a",
        "WAKER_HOMELAB_BRODCAST": "1.2.3.4",
    }
    assert faults(values, tmp_path) == [
        "WAKER_HOMELAB_BRODCAST is not a setting; see `waker --help`",
        "WAKER_HOMELAB_HOST is not set; it must be an IP address such as 192.168.1.20",
        "WAKER_INITRD must be cryptroot or systemd",
        "WAKER_INITRD_SSH_PORT must be a port, 1 to 65535",
        "WAKER_SYSTEM_SSH_PORT must be a port, 1 to 65535",
        "WAKER_SSH_USER must be a user's name",
        "WAKER_SSH_HOST_KEY must be a line such as ssh-ed25519 AAAA...",
        "WAKER_HOMELAB_MAC must be a MAC address such as 52:54:00:12:34:56",
        "WAKER_HOMELAB_BROADCAST must be an IPv4 address",
        "WAKER_HOMELAB_NAME must be a name of at most 64 characters",
        "WAKER_PIN must be 8 to 128 characters",
        "WAKER_LISTEN must be ADDRESS:PORT such as 127.0.0.1:8080",
        f"WAKER_SSH_KEY {tmp_path}/ssh_key is missing or empty",
    ]


def test_a_fault_ends_the_program_with_78_and_no_secret_in_its_words() -> None:
    ended = run_waker(settings={"WAKER_PIN": "s3crt", "WAKER_HOMELAB_MAC": "s3crt2"})
    assert ended.returncode == 78
    assert {line.split()[0] for line in ended.stderr.splitlines()} == {
        "WAKER_PIN",
        "WAKER_HOMELAB_MAC",
        "WAKER_HOMELAB_HOST",
    }
    assert "s3crt" not in ended.stderr


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        f"{KEY} root@box",
        f"{KEY} a comment with blanks",
        f"192.168.1.20 {KEY}",
        f"[192.168.1.20]:2222 {KEY}",
        f"|1|salt=|hash= {KEY}",
        f"  {KEY}\t",
    ],
)
def test_a_host_key_can_be_pasted_from_where_it_is_printed(text: str) -> None:
    (key,) = waker.HostKey.parse_all(text)
    assert str(key) == KEY


def test_several_host_keys_are_separated_by_commas() -> None:
    other = public_line(new_key())
    assert [str(key) for key in waker.HostKey.parse_all(f"{KEY},{other}")] == [
        KEY,
        other,
    ]


@pytest.mark.parametrize(
    "text",
    [
        KEY[:-4],
        KEY + "AAAA",
        KEY.replace("ssh-ed25519", "ssh-rsa"),
        KEY.replace(" ", ""),
        KEY.split()[1],
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5",
        f"@revoked {KEY}",
        f"@cert-authority * {KEY}",
        f"two words {KEY}",
        f"{KEY},",
        f"{KEY} a comment, and a comma",
        "SHA256:lRP+ktIkxmN4gKSMSbjP/2lvAkF9hQyQ5hYuQdUNJZk",
    ],
)
def test_what_is_not_a_whole_host_key_is_a_fault(
    good: dict[str, str], tmp_path: Path, text: str
) -> None:
    (fault,) = faults(good | {"WAKER_SSH_HOST_KEY": text}, tmp_path)
    assert fault == "WAKER_SSH_HOST_KEY must be a line such as ssh-ed25519 AAAA..."


def test_a_fingerprint_is_written_as_openssh_writes_it() -> None:
    (key,) = waker.HostKey.parse_all(KEY)
    printed = subprocess.run(
        [need("ssh-keygen"), "-lf", "-"],
        input=KEY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split()[1] == waker.fingerprint(key.blob)


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_private_key_is_a_fault(
    good: dict[str, str], tmp_path: Path, content: bytes
) -> None:
    """The unit hands over the line end in place of a file that is missing."""
    (tmp_path / "ssh_key").write_bytes(content)
    (fault,) = faults(good, tmp_path)
    copied = "systemd copies it from /etc/waker/ssh_key"
    assert fault == f"WAKER_SSH_KEY {tmp_path}/ssh_key is missing or empty ({copied})"


def test_a_private_key_after_empty_lines_is_one_all_the_same(
    good: dict[str, str], tmp_path: Path
) -> None:
    key = (tmp_path / "ssh_key").read_bytes()
    (tmp_path / "ssh_key").write_bytes(b"\n\n" + key)
    waker.read_config(good, tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_private_key_that_is_no_file_is_a_fault(
    good: dict[str, str], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / kind
    (path.mkdir if kind == "folder" else partial(os.mkfifo, path))()
    (fault,) = faults(good | {"WAKER_SSH_KEY": kind}, tmp_path)
    assert fault == f"WAKER_SSH_KEY {path} is not a file; correct the path"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o666])
def test_a_private_key_that_others_can_use_is_a_fault(
    good: dict[str, str], tmp_path: Path, mode: int
) -> None:
    (tmp_path / "ssh_key").chmod(mode)
    (fault,) = faults(good, tmp_path)
    assert fault.endswith(f"is open to others; chmod 600 {tmp_path}/ssh_key")


def test_a_private_key_of_a_group_is_none(good: dict[str, str], tmp_path: Path) -> None:
    """As systemd's credentials are, and a key of TLS that several services share."""
    (tmp_path / "ssh_key").chmod(0o440)
    waker.read_config(good, tmp_path)


def test_without_a_pinned_host_key_no_private_key_is_needed(
    good: dict[str, str], tmp_path: Path
) -> None:
    good |= {"WAKER_SSH_HOST_KEY": "", "WAKER_SSH_KEY": "nowhere"}
    assert waker.read_config(good, tmp_path).machine.host_keys == ()


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("2001:DB8::9", "2001:db8::9"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
    ],
)
def test_the_machine_is_named_by_its_address(
    good: dict[str, str], tmp_path: Path, text: str, host: str
) -> None:
    good["WAKER_HOMELAB_HOST"] = text
    config = waker.read_config(good, tmp_path)
    assert config.machine.host == host


@pytest.mark.parametrize(
    "text", ["a b", "-x", "http://box", "10.0.0.256", "10.0.0.9/24", "fe80::1%eth0"]
)
def test_nothing_else_is_an_address(
    good: dict[str, str], tmp_path: Path, text: str
) -> None:
    (fault,) = faults(good | {"WAKER_HOMELAB_HOST": text}, tmp_path)
    assert fault.startswith("WAKER_HOMELAB_HOST must be an IP address")


def test_a_name_is_refused_with_the_address_that_it_has(
    good: dict[str, str], tmp_path: Path
) -> None:
    (fault,) = faults(good | {"WAKER_HOMELAB_HOST": "localhost"}, tmp_path)
    assert fault in {
        f"WAKER_HOMELAB_HOST must be an IP address: localhost is {address} now; use"
        " this IP and reserve it in your router's DHCP"
        for address in ("127.0.0.1", "::1")
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"WAKER_INITRD": "systemd", "WAKER_INITRD_SSH_PORT": "22"}, "must differ"),
        ({"WAKER_HOMELAB_HOST": "2001:db8::1"}, "WAKER_HOMELAB_BROADCAST must be set"),
        ({"WAKER_TLS_CERT": "cert.pem"}, "must both be set"),
        ({"WAKER_TLS_KEY": "key.pem"}, "must both be set"),
    ],
)
def test_settings_that_are_right_alone_may_be_wrong_together(
    good: dict[str, str], tmp_path: Path, values: dict[str, str], words: str
) -> None:
    same = {"WAKER_SYSTEM_SSH_PORT": "22", "WAKER_HOMELAB_BROADCAST": ""}
    assert words in faults(good | same | values, tmp_path)[0]
    right = {
        "WAKER_SYSTEM_SSH_PORT": "2222",
        "WAKER_HOMELAB_BROADCAST": "192.168.1.255",
    }
    if "WAKER_TLS" not in "".join(values):
        waker.read_config(good | values | right, tmp_path)


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("[::]:8080", ("::", 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_an_address_and_port_to_listen_on(text: str, listen: tuple[str, int]) -> None:
    assert waker.parse_listen(text) == listen


def test_an_ipv4_address_that_is_written_as_ipv6_is_that_of_ipv4() -> None:
    assert waker.parse_listen("[::ffff:127.0.0.1]:80") == ("127.0.0.1", 80)


@pytest.mark.parametrize(
    "text",
    ["8080", ":8080", "::8080", "box:80", "1.2.3.4", "1.2.3.4:65536", "[]:1", ":"],
)
def test_nothing_else_can_be_listened_on(text: str) -> None:
    with pytest.raises(ValueError):
        waker.parse_listen(text)


def test_the_file_is_read_and_the_environment_wins(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text(
        "\ufeff# a comment\n\n  WAKER_PIN=plain#stays \nWAKER_SSH_USER='single # q'\n"
        'WAKER_HOMELAB_NAME= " double q"\nWAKER_HOMELAB_HOST= \nTZ=UTC # here\n'
    )
    assert waker.read_env_file(file) == {
        "WAKER_PIN": "plain#stays",
        "WAKER_SSH_USER": "single # q",
        "WAKER_HOMELAB_NAME": " double q",
        "WAKER_HOMELAB_HOST": "",
    }
    ended = run_waker(
        "--env-file",
        str(file),
        settings={"WAKER_SSH_USER": "root", "WAKER_INITRD": "x"},
    )
    told = [line.split()[0] for line in ended.stderr.splitlines()]
    assert told == ["WAKER_HOMELAB_HOST", "WAKER_INITRD", "WAKER_HOMELAB_MAC"]
    assert ended.returncode == 78


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("WAKER_PIN=24681012\nWAKER_PIN=secret-pin\n", "line 2 sets WAKER_PIN again;"),
        ("WAKER_PIN=246810 # my pin\n", "line 1 has a # in it;"),
        ("WAKER_SSH_USER=\nWAKER_PIN=246810\t#my pin\n", "line 2 has a # in it;"),
        ("WAKER_PIN= # my pin is long\n", "line 1 has a # in it;"),
    ],
)
def test_a_line_that_could_be_misread_is_a_fault(
    tmp_path: Path, content: str, fault: str
) -> None:
    file = tmp_path / "waker.env"
    file.write_text(content)
    ended = run_waker("--env-file", str(file))
    assert ended.returncode == 78
    assert ended.stderr.startswith(f"{file}, {fault}")
    assert "pin" not in ended.stderr.partition(",")[2]


@pytest.mark.parametrize("name", ["WAKER_SSH_KEY", "WAKER_TLS_CERT", "WAKER_TLS_KEY"])
def test_a_path_with_a_nul_is_a_fault(tmp_path: Path, name: str) -> None:
    file = tmp_path / "waker.env"
    file.write_text(f"{name}=a\0b\n")
    ended = run_waker("--env-file", str(file))
    assert ended.returncode == 78
    assert f"\n{name} must be the path of" in ended.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"WAKER_PIN=1\nsecret words\n = \n'WAKER_PIN=x'\n", [2, 3, 4]),
        (b"WAKER_PIN='unbalanced\nWAKER_PIN=\"x'\n", [1, 2]),
    ],
)
def test_a_line_that_is_no_setting_is_told_by_its_number_only(
    tmp_path: Path, content: bytes, told: list[int]
) -> None:
    file = tmp_path / "waker.env"
    file.write_bytes(content)
    with pytest.raises(waker.ConfigError) as error:
        waker.read_env_file(file)
    assert str(error.value).splitlines() == [
        f"{file}, line {number} must be NAME=value" for number in told
    ]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    told = run_waker("--env-file", str(file))
    assert (told.returncode, told.stderr) == (78, f"{file} is missing or empty\n")
    file.touch()
    copied = "systemd copies it from /etc/waker/waker.env"
    told = run_waker("--env-file", str(file))
    assert told.stderr == f"{file} is missing or empty ({copied})\n"
    file.write_bytes(b"WAKER_PIN=\xe4\xe4\xe4\xe4\xe4\xe4\n")
    told = run_waker("--env-file", str(file))
    assert told.stderr == f"{file} must be UTF-8\n"


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


def test_a_pin_that_is_not_utf8_is_a_fault(
    good: dict[str, str], tmp_path: Path
) -> None:
    good["WAKER_PIN"] = os.fsdecode(b"\xff" * 8)
    (fault,) = faults(good, tmp_path)
    assert fault.startswith("WAKER_PIN must be")
