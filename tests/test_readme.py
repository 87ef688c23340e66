"""What readers copy from README and docs: run as it is written there."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import (
    CHECKOUT,
    MACHINE,
    PASSPHRASE,
    PIN,
    Client,
    blocks,
    daemon,
    need,
)
from machine import Machine

import waker

FILES = [CHECKOUT / "README.md", *CHECKOUT.glob("docs/*.md")]
PAGES = {path: path.read_text() for path in FILES}
README, API = PAGES[FILES[0]], PAGES[CHECKOUT / "docs/api.md"]
INTEGRATIONS = "docs/integrations.md"


def test_it_is_short_and_says_about_how_much_there_is_to_read() -> None:
    assert len(README.splitlines()) <= 160
    (counts,) = re.findall(r"both files, about ([\d,]+) and ([\d,]+) lines", README)
    for name, count in zip(("waker.py", "ui.html"), counts, strict=True):
        length = len(CHECKOUT.joinpath(name).read_text().splitlines())
        assert int(count.replace(",", "")) == pytest.approx(length, rel=0.05)


def mistakes(file: Path) -> list[str]:
    """Return the names of the settings in a file that are wrong or missing."""
    with pytest.raises(waker.ConfigError) as error:
        waker.read_config(waker.read_env_file(file), file.parent)
    return re.findall("(?m)^WAKER_[A-Z_]+", str(error.value))


def test_the_settings_filled_in_by_hand_are_valid(machine: Machine) -> None:
    machine.make_keys()
    file = machine.folder / "waker.env"
    file.write_text(blocks("docs/server.md", "## By hand")[0])
    assert mistakes(file) == ["WAKER_SSH_HOST_KEY", "WAKER_PIN"]  # to be filled in
    lines = file.read_text().replace("ssh-ed25519 AAAA…", machine.host_key)
    file.write_text(lines.replace("WAKER_PIN=…", f"WAKER_PIN={PIN}"))
    assert waker.read_config(waker.read_env_file(file), file.parent).host_key


def test_the_table_and_the_example_show_every_default() -> None:
    table = PAGES[CHECKOUT / "docs/settings.md"]
    defaults = dict(re.findall(r"(?m)^\| `(WAKER.*?)` \| (.*?) \| .+ \|$", table))
    example = CHECKOUT / "waker.env.example"
    shown = dict(re.findall("(?m)^#?(WAKER_[A-Z_]+)=(.*)", example.read_text()))
    named = set(re.findall(r"WAKER_[A-Z_]*[A-Z]", "".join(PAGES.values())))
    assert defaults.keys() == shown.keys() == named == waker.SETTINGS.keys()
    for name, (_, default, *_) in waker.SETTINGS.items():
        if default:
            assert (defaults[name], shown[name]) == (f"`{default}`", default)
    required = ["WAKER_HOMELAB_HOST", "WAKER_HOMELAB_MAC", "WAKER_PIN"]
    assert mistakes(example) == required
    assert sorted(waker.read_env_file(example)) == required  # the rest is commented out


def test_each_link_leads_somewhere() -> None:
    for page, text in PAGES.items():
        for link in re.findall(r"(?:\]\((?!https:)|src=\")(.*?)[)\"]", text):
            path, _, anchor = link.partition("#")
            target = page.parent.joinpath(path).resolve() if path else page
            assert target.exists(), link
            headings = re.findall(r"(?m)^#+ (.*)", PAGES[target]) if anchor else [""]
            anchors = [re.sub(r"[^\w -]", "", line.lower()) for line in headings]
            assert anchor in [line.replace(" ", "-") for line in anchors], link


def test_the_messages_they_explain_are_in_the_program() -> None:
    section = README.split("## When it does not work")[1].split("\n## ")[0]
    rows = section + PAGES[CHECKOUT / "docs/troubleshooting.md"]
    messages = re.findall(r"(?<!\*)\*([^*]+)\*", rows)
    assert len(messages) > 6
    sources = [CHECKOUT / name for name in ("waker.py", "box/check.py")]
    text = "".join(path.read_text() for path in sources)
    program = re.sub(r'"\n +f?"', "", text)
    assert [message for message in messages if message not in program] == []
    page = CHECKOUT.joinpath("ui.html").read_text()
    assert [text for text in re.findall('"(.*?)"', rows) if text not in page] == []
    words = set(re.findall("`([a-z_]+)`", API.split("`start` has")[1].split("## ")[0]))
    described = yaml.safe_load(CHECKOUT.joinpath("docs/openapi.yaml").read_text())
    start = described["components"]["schemas"]["Start"]["properties"]
    assert {*start["phase"]["enum"], *filter(None, start["outcome"]["enum"])} <= words


def run_in_bash(script: str, port: int) -> str:
    """Run a script for the API, which reads both secrets; returns what it printed."""
    need("curl")
    need("jq")
    script = script.replace("ADDRESS-OF-THE-BOX:8080", f"127.0.0.1:{port}")
    given = f"{PIN}\n{PASSPHRASE}\n"
    command = [need("bash"), "-ec", script]
    return subprocess.check_output(command, input=given, text=True, timeout=60)


def test_the_curl_lines_do_what_they_say(machine: Machine) -> None:
    script = "\n".join(blocks("docs/api.md", "## A session"))
    with machine.waker() as started:
        printed = run_in_bash(script, started.client.port)
    assert re.search('(?s)"Started.*"waking.*"Cancelling.*"Magic packet', printed)


def test_the_loop_waits_until_the_server_is_up(api: Client) -> None:
    """It signs in again when the token has expired."""
    script = "\n".join(blocks("docs/api.md", "## A session")[:2])  # up to the start
    (loop,) = blocks("docs/api.md", "## Wait until")
    script += "T=expired\n" + loop.replace("sleep 3", "sleep 0.1")
    printed = run_in_bash(script, api.port)
    assert printed.endswith("\nThe system is up. Unlocked: cryptroot.\n")


def test_home_assistant_wakes_and_shows_the_state(machine: Machine) -> None:
    secret, configuration, card = blocks(INTEGRATIONS, "## Home Assistant")
    login = secret.replace("…", PIN).removeprefix("waker_login: ")
    configuration = configuration.replace("!secret waker_login\n", login)
    token = ""
    with machine.waker() as started:
        for name in ("waker_login", "waker_wake", "waker_status"):
            config = yaml.safe_load(configuration.replace("{{ token }}", token))
            command = config["rest_command"][name]
            method = command.get("method", "get").upper()
            path = command["url"].removeprefix("http://PI:8080")
            payload = command.get("payload", "").encode() or None
            client = Client(started.client.port)  # without a token of its own
            answer = client.call(method, path, payload, command.get("headers"))
            assert answer.status == 200
            token = token or answer.json["token"]
    assert machine.packets()
    assert answer.json["state"] == "off"
    # A second key `script` or `template` would replace the user's own.
    assert config.keys() == {"rest_command", "script waker", "template waker"}
    (script,) = config["script waker"]
    assert yaml.safe_load(card)["entity"] == f"script.{script}"


def test_fail2ban_finds_who_guesses_pins_and_nobody_else(tmp_path: Path) -> None:
    """Least of all a trusted proxy: its ban would shut out everybody behind it."""
    bait = "ip=203.0.113.66 refused POST /api/auth: 401 Wrong PIN"
    path = bait.replace(" ", "%20").encode()
    by = {"X-Forwarded-For": "192.0.2.1"}
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        client = started.client
        assert client.attempt(PIN, by).status == 200
        for _ in range(9):
            assert client.attempt(bait, by).status == 401
        assert client.attempt(PIN, by).status == 429
        assert client.attempt("wrong PIN").status == 401
        client.raw(b"POST /api/auth:%b HTTP/1.1\r\nX-Forwarded-For: ::1\r\n\r\n" % path)
        client.raw(b"POST /api/auth HTTP/1.1\r\nX: \n%b\r\n\r\n" % bait.encode())
        assert started.stop() == 0
    assert not any("ip=127.0.0.1" in line for line in started.log)
    lines = [f"Nov 21 23:59:59 box waker[99]: {line}\n" for line in started.log]
    log, rule = tmp_path / "log", tmp_path / "waker.conf"
    log.write_text("".join(lines))
    rule.write_text(blocks(INTEGRATIONS, "## fail2ban")[1])
    command = [need("fail2ban-regex"), "--out", "ip", str(log), str(rule)]
    assert subprocess.check_output(command, text=True).split() == ["192.0.2.1"] * 10
