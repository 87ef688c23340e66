"""What a reader copies out of README: it is taken from there, and run."""

import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from conftest import PASSPHRASE, PIN, PROGRAM, Client, daemon, need
from homelab import Homelab

import waker

README = Path(PROGRAM).with_name("README.md").read_text()


def blocks(start: str) -> list[str]:
    """Take the indented blocks out of what begins with these words."""
    text = README[README.index(start) :].split("\n## ")[0]
    found = re.findall(r"(?m)(?:^ {4}.*\n|^\n(?= {4}))+", text)
    return [re.sub(r"(?m)^ {4}", "", block).strip("\n") + "\n" for block in found]


def test_each_setting_and_its_default_is_in_the_table() -> None:
    rows = re.findall(r"(?m)^\| (`WAKER.*?) \| (.*?) \| .+ \|$", README)
    told = {name: default for names, default in rows for name in names.split(", ")}
    for name, default, _, _ in waker.SETTINGS:
        assert f"`{name}`" in told
        assert not default or told[f"`{name}`"] == (f"`{default}`")
    assert len(told) == len(waker.SETTINGS)


def test_there_is_no_other_setting_in_it() -> None:
    names = set(re.findall(r"WAKER_[A-Z_]*[A-Z]", README))
    assert names == {setting[0] for setting in waker.SETTINGS}


def test_the_messages_that_it_explains_are_those_of_the_program() -> None:
    rows = README.split("| what you see |")[1].split("\n\n")[0]
    messages = re.findall(r"(?m)^\| .*?\*([^*]+)\*", rows)
    assert len(messages) > 5
    program = re.sub(r'"\n +f?"', "", Path(PROGRAM).read_text())
    for message in messages:
        assert message in program


def test_the_curl_lines_wake_tell_and_unlock(
    lab: Homelab, config: waker.Config
) -> None:
    lines = blocks("## API")[0].splitlines()
    starts = ["T=$(curl", "curl", "curl", "systemd-ask-password", "curl"]
    assert [line.split()[0] for line in lines] == starts
    for program in ("bash", "curl", "jq"):
        need(program)
    waker.wake(config)
    lab.wait_for("locked")
    with daemon(lab.settings()) as started:
        script = "\n".join(lines).replace("PI:8080", f"127.0.0.1:{started.client.port}")
        script = script.replace("choose-your-own", PIN)
        script = script.replace("systemd-ask-password 'Passphrase: '", "cat")
        ended = subprocess.run(
            ["bash", "-ec", script],
            input=PASSPHRASE,
            capture_output=True,
            text=True,
            check=True,
        )
    assert '"state": "locked"' in ended.stdout
    assert '"message": "Magic packet sent to ' in ended.stdout
    assert '"message": "Unlocked: cryptroot."' in ended.stdout


def request(client: Client, source: str, head: Sequence[str], body: str = "") -> None:
    """Send a request from an address of this host."""
    lines = [*head, "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "", body]
    with socket.create_connection(
        (client.host, client.port), source_address=(source, 0)
    ) as tcp:
        tcp.sendall("\r\n".join(lines).encode())
        assert tcp.recv(65536).startswith(b"HTTP/1.1 ")


def test_fail2ban_finds_those_who_guess_and_nobody_else(
    lab: Homelab, tmp_path: Path
) -> None:
    filter_file = tmp_path / "waker.conf"
    filter_file.write_text(blocks("**fail2ban**")[0])
    innocent = "203.0.113.66"
    auth, wrong = ["POST /api/auth HTTP/1.1"], '{"pin": "135791"}'
    with daemon(lab.settings()) as started:
        client = started.client
        for source, count in (("127.0.0.2", 1), ("127.0.0.3", 12)):
            for _ in range(count):
                request(client, source, auth, wrong)
        request(client, "127.0.0.4", auth, f'{{"pin": "{PIN}"}}')
        for text in (
            f"ip={innocent}",
            f"ip={innocent} refused POST /api/auth: 401 Wrong PIN",
        ):
            path = text.replace(" ", "%20")
            request(client, "127.0.0.4", [f"GET /{path} HTTP/1.1"])
            request(client, "127.0.0.4", [f"POST /api/auth:{path} HTTP/1.1"])
            request(client, "127.0.0.4", [f"{text} HTTP/1.1"])
            request(client, "127.0.0.4", [*auth, f"X-Forwarded-For: {text}"], "{")
            request(client, "127.0.0.4", auth, f'{{"pin": "{text}"}}')
            request(client, "127.0.0.4", [*auth, f"X: {text}\n{text}\r{text}"], "{")
        assert started.stop() == 0
    log = tmp_path / "log"
    journal = "Nov 21 23:59:59 box waker[99]: "
    log.write_text("".join(f"{journal}{line.strip()}\n" for line in started.log))
    found = subprocess.run(
        [need("fail2ban-regex"), "--out", "ip", str(log), str(filter_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    wrong_ones = ["127.0.0.2"] + ["127.0.0.3"] * 12 + ["127.0.0.4"] * 2
    assert sorted(found.stdout.split()) == wrong_ones
