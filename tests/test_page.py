"""The page in a real browser, against the real daemon and the homelab."""

import contextlib
import ctypes.util
import http.client
import http.server
import itertools
import re
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from conftest import PASSPHRASE, PIN, Client, need, running
from cryptroot_unlock import Disks
from homelab import Homelab, new_key, public_line
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    Playwright,
    expect,
    sync_playwright,
)
from ssh_servers import paramiko_server
from test_daemon import MAC, wait_for

import waker

SOURCE = Path(waker.__file__).with_name("ui.html").read_text()
REFUSED = re.compile(r"Failed to load resource: .* (40[019]|429) ")  # of a fetch
LOST = re.compile(r"Failed to load resource: net::ERR_")
SMALL = {"width": 320, "height": 640}
expect.set_options(timeout=20_000)


@dataclass
class Phone:
    """A browser's page, and what a person does with it."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, client: Client, host: str = "127.0.0.1") -> "Phone":
        self.page.goto(f"http://{host}:{client.port}/")
        return self

    def give_pin(self, pin: str = PIN) -> "Phone":
        self.page.get_by_label("PIN").fill(pin)
        self.page.get_by_role("button", name="Continue").click()
        return self

    def start(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.page.get_by_label("Passphrase of the disk").fill(passphrase)
        self.page.locator("#start").click()
        return self

    def sees(self, view: str) -> "Phone":
        expect(self.page.locator("main")).to_have_attribute("data-view", view)
        return self

    def reads(self, text: str) -> "Phone":
        expect(self.page.locator("main")).to_contain_text(text)
        return self

    def focus(self) -> str:
        return str(self.page.evaluate("document.activeElement.id"))


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if not ctypes.util.find_library("atomic"):
        pytest.skip("libatomic1 is not installed: Playwright's Node.js needs it")
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(
        executable_path=need("chromium"),
        args=["--no-sandbox", "--host-resolver-rules=MAP waker.lan 127.0.0.1"],
    )
    with contextlib.closing(browser):
        yield browser


NewPhone = Callable[..., Phone]


@pytest.fixture
def new_phone(chromium: Browser) -> Iterator[NewPhone]:
    """Makes phones; at the end their consoles must be empty."""
    phones: list[Phone] = []
    contexts: list[BrowserContext] = []

    def make(**options: Any) -> Phone:
        contexts.append(chromium.new_context(**options))
        phones.append(Phone(contexts[-1].new_page()))
        return phones[-1]

    yield make
    for context in contexts:
        context.close()
    for phone in phones:
        odd = [
            text
            for text in phone.console
            if not REFUSED.match(text) and not LOST.match(text)
        ]
        assert odd == []


@pytest.fixture
def phone(new_phone: NewPhone) -> Phone:
    return new_phone(has_touch=True, is_mobile=True, viewport=SMALL)


@pytest.fixture
def slow_lab(tmp_path: Path) -> Iterator[Homelab]:
    """A machine that takes its time to boot."""
    folder = tmp_path / "slow"
    folder.mkdir()
    lab = Homelab(folder, disks=Disks({"cryptroot": PASSPHRASE}), pace=3)
    with contextlib.closing(lab):
        yield lab


def configure(lab: Homelab, folder: Path) -> waker.Config:
    settings = {"WAKER_PIN": PIN, "WAKER_HOMELAB_NAME": "my machine"} | lab.settings()
    config = waker.read_config(settings, folder)
    return config._replace(packet_port=lab.packet_port)


@pytest.fixture
def slow(slow_lab: Homelab, tmp_path: Path) -> Iterator[Client]:
    """The daemon for it."""
    with running(configure(slow_lab, tmp_path)) as client:
        yield client


def expire(client: Client) -> None:
    """Let 15 minutes pass for every token."""
    assert client.app
    for digest in client.app.gate._ends:
        client.app.gate._ends[digest] = 0


@contextlib.contextmanager
def proxy(
    client: Client, prefix: str, lost: Sequence[str] = (), foreign: Sequence[str] = ()
) -> Iterator[Client]:
    """Forward what is below a path, as a reverse proxy does.

    It loses the answers of some paths, and gives others of its own.
    """

    class Forward(http.server.BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            length = int(self.headers.get("Content-Length", 0))
            connection = http.client.HTTPConnection(client.host, client.port)
            path = self.path.removeprefix(prefix)
            body = self.rfile.read(length)
            connection.request(self.command, f"/{path}", body, dict(self.headers))
            answer = connection.getresponse()
            if path in lost:
                return
            if path in foreign:
                self.send_response(409)
                self.end_headers()
                self.wfile.write(b"[]")
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())

        do_GET = do_POST = do_DELETE = forward  # noqa: N815 - names of the base class

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forward) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Client(server.server_port)
        server.shutdown()


def test_pin_passphrase_and_one_tap_bring_the_machine_up(
    slow: Client, phone: Phone
) -> None:
    phone.open(slow).give_pin().reads("Off: nothing answers").start()
    phone.sees("running").reads("Waking")
    here = phone.page.locator("[aria-current=step]")
    for step in ("Waiting for the disk prompt", "Booting"):
        expect(here).to_have_text(step)
    phone.sees("up").reads("Up and running")
    phone.reads("Unlocked: cryptroot. The system is up. It took 0:")
    expect(phone.page).to_have_title(re.compile("^Up and running . my machine$"))


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(
    slow: Client, phone: Phone
) -> None:
    phone.open(slow)
    keyboard = phone.page.keyboard
    assert phone.focus() == "pin"
    keyboard.type(PIN)
    keyboard.press("Enter")
    phone.sees("ready")
    assert phone.focus() == "passphrase"
    keyboard.press("Tab")
    assert phone.focus() == "show"
    keyboard.press("Enter")
    assert phone.page.locator("#passphrase").get_attribute("type") == "text"
    keyboard.press("Shift+Tab")
    keyboard.type(PASSPHRASE)
    keyboard.press("Enter")
    phone.sees("running")
    assert phone.page.locator("#passphrase").get_attribute("type") == "password"
    assert phone.focus() == "going"
    phone.sees("up")
    assert phone.focus() == "name"


def test_what_happens_is_announced(slow: Client, phone: Phone) -> None:
    phone.open(slow)
    phone.page.evaluate(
        """() => {
            window.told = [];
            const live = document.querySelector("[role=status]");
            new MutationObserver(() => told.push(live.textContent))
                .observe(live, {childList: true, characterData: true, subtree: true});
        }"""
    )
    phone.give_pin().sees("ready").start().sees("up").reads("It took")
    told = phone.page.evaluate("told")
    assert [text for text, _ in itertools.groupby(told)] == told
    assert told[:3] == ["Checking…", "Looking…", "Off: nothing answers"]
    assert "Booting" in told
    assert told[-1].startswith("Unlocked: cryptroot. The system is up. It took 0:")
    assert told[-1].endswith(" Up and running")


def test_a_wrong_pin_is_told_and_can_be_typed_again(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin("12345678").reads("Wrong PIN")
    assert phone.focus() == "pin"
    phone.page.keyboard.type(PIN)  # what is there is selected, so this takes its place
    phone.page.keyboard.press("Enter")
    phone.sees("ready")


def test_too_many_attempts_are_told(api: Client, phone: Phone) -> None:
    for _ in range(10):
        api.call("POST", "/api/auth", {"pin": "wrong!"})
    phone.open(api).give_pin().reads("Too many attempts; try again in")
    phone.sees("pin")


def test_a_wrong_passphrase_is_asked_for_again(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start("wrong").sees("running").sees("ready")
    phone.reads("Wrong passphrase for disk cryptroot. Type it once more.")
    assert phone.focus() == "passphrase"
    expect(phone.page.locator("#start")).to_have_text("Unlock")
    phone.start().sees("up")


def test_a_token_that_expires_during_a_start_is_asked_for_again(
    slow: Client, phone: Phone
) -> None:
    phone.open(slow).give_pin().start().sees("running")
    expire(slow)
    phone.sees("pin").reads("Your PIN again, please")
    phone.give_pin().sees("running").sees("up")


def test_a_token_that_has_expired_when_it_is_needed_loses_nothing(
    owner: Client, phone: Phone
) -> None:
    phone.open(owner).give_pin().sees("ready")
    phone.page.get_by_label("Passphrase of the disk").fill(PASSPHRASE)
    expire(owner)
    phone.reads("Your 15 minutes are over").sees("ready")
    phone.page.locator("#start").click()
    phone.sees("pin").reads("Your PIN again, please")
    phone.give_pin().sees("up")


def test_a_token_that_expires_while_nothing_is_typed_is_asked_for(
    owner: Client, phone: Phone
) -> None:
    phone.open(owner).give_pin().sees("ready")
    expire(owner)
    phone.sees("pin").give_pin().sees("ready")


@pytest.mark.parametrize("passphrase", ["wrong", PASSPHRASE])
def test_an_unlock_goes_on_while_the_token_expires(
    owner: Client, lab: Homelab, phone: Phone, passphrase: str
) -> None:
    owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    Disks({"cryptroot": PASSPHRASE}, slow=2).save(lab.state)
    phone.open(owner).give_pin().reads("Waiting for the passphrase")
    phone.page.get_by_text("One step at a time").click()
    phone.page.get_by_label("Passphrase of the disk").fill(passphrase)
    phone.page.get_by_role("button", name="Unlock only").click()
    wait_for(lambda: Disks.load(lab.state).received)
    expire(owner)
    phone.reads("Your 15 minutes are over")
    if passphrase == "wrong":  # it stays in the field, and waits for another tap
        phone.reads("Wrong passphrase for disk cryptroot.").start()
    phone.sees("pin").give_pin().sees("up")


def test_a_start_is_shown_from_the_moment_it_is_accepted(
    slow: Client, phone: Phone
) -> None:
    lost: list[str] = []
    with proxy(slow, "/", lost) as outside:
        phone.open(outside).give_pin().start("wrong").sees("running").sees("ready")
        phone.reads("Wrong passphrase")
        lost.append("api/status")
        phone.start().sees("running").reads("waker does not answer")
        expect(phone.page.locator("#message")).to_be_empty()
        lost.clear()
        phone.sees("up")
        phone.page.goto("about:blank")


def test_an_error_of_something_on_the_way_is_told(
    api: Client, new_phone: NewPhone
) -> None:
    phone = new_phone()
    with proxy(api, "/", foreign=["api/wol"]) as outside:
        phone.open(outside).give_pin().sees("ready")
        phone.page.get_by_text("One step at a time").click()
        for _ in range(2):
            phone.page.get_by_role("button", name="Wake only").click()
            phone.reads("Something on the way answered 409")
        phone.page.goto("about:blank")


def test_a_reload_shows_the_start_that_is_going_on(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("running")
    phone.page.reload()
    phone.sees("pin").give_pin().sees("running").sees("up")


def test_a_daemon_that_is_restarted_is_found_again(
    slow_lab: Homelab, tmp_path: Path, phone: Phone
) -> None:
    config = configure(slow_lab, tmp_path)._replace(mac=waker.Mac(b"\0" * 6))
    with running(config) as client:
        phone.open(client).give_pin().start().sees("running")
    phone.reads("waker does not answer. Trying again…")
    with running(configure(slow_lab, tmp_path), port=client.port):
        phone.sees("pin").give_pin().sees("ready")
        phone.reads("Waker knows no more of the start: it was restarted")
        phone.start().sees("up")


def test_a_network_that_is_lost_is_told_and_recovers_by_itself(
    owner: Client, phone: Phone
) -> None:
    phone.open(owner).give_pin().reads("Off: nothing answers")
    phone.page.context.set_offline(True)
    phone.reads("waker does not answer. Trying again…").start()
    phone.reads("it may have got the passphrase all the same")
    assert phone.page.locator("#passphrase").input_value() == PASSPHRASE
    phone.page.context.set_offline(False)
    phone.reads("Off: nothing answers")


def test_a_network_that_is_lost_at_the_pin_is_told_and_looked_for(
    api: Client, phone: Phone
) -> None:
    phone.open(api).sees("pin").page.context.set_offline(True)
    phone.give_pin().reads("Waker does not answer. Trying again…")
    phone.page.context.set_offline(False)
    phone.reads("waker answers again.").give_pin().sees("ready")
    assert len(api.attempts()) == 1  # what did not arrive is no attempt


def slow_down(phone: Phone, milliseconds: int) -> None:
    """Let everything take that long on its way to the phone."""
    cdp = phone.page.context.new_cdp_session(phone.page)
    cdp.send("Network.enable")
    conditions = {"downloadThroughput": -1, "uploadThroughput": -1, "offline": False}
    conditions["latency"] = milliseconds
    cdp.send("Network.emulateNetworkConditions", conditions)


def test_on_a_slow_network_what_is_done_is_shown_until_it_is_seen(
    slow: Client, phone: Phone
) -> None:
    phone.open(slow)
    slow_down(phone, 1500)
    phone.give_pin().sees("looking").reads("Looking…").sees("ready").start()
    button = phone.page.locator("#start")
    expect(button).to_have_attribute("aria-disabled", "true")
    wait_for(lambda: slow.app and slow.app.starter.members(0))  # it has arrived
    phone.reads("Starting…")
    button.click(force=True)  # once more: that does nothing
    expect(button).to_have_attribute("aria-disabled", "true")
    phone.sees("running")
    assert [url for url in phone.requests if url.endswith("/start")][1:] == []
    phone.page.get_by_role("button", name="Cancel").click()
    phone.sees("ready").reads("Cancelled.")


def test_a_network_that_takes_very_long_is_told(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin().sees("ready")
    slow_down(phone, 7000)
    phone.reads("waker is slow to answer…").reads("Off: nothing answers")


def test_an_answer_that_is_lost_does_not_lose_the_start(
    slow: Client, phone: Phone
) -> None:
    lost: list[str] = ["api/start"]
    with proxy(slow, "/", lost) as outside:
        phone.open(outside).give_pin().sees("ready").start()
        phone.sees("running")  # though nobody told so
        expect(phone.page.locator("#message")).to_be_empty()
        lost.clear()
        phone.page.get_by_role("button", name="Cancel").click()
        phone.sees("ready").reads("Cancelled.")
        phone.page.goto("about:blank")


def test_an_old_failure_is_told_as_an_old_one(slow: Client, phone: Phone) -> None:
    slow.log_in().call("POST", "/api/start", {"passphrase": "wrong"})
    wait_for(lambda: slow.call("GET", "/api/status").json["start"]["phase"] == "failed")
    phone.open(slow).give_pin()
    phone.reads("Last time: Wrong passphrase for disk cryptroot. Type it once more.")


def test_a_machine_that_is_up_needs_nothing(
    owner: Client, lab: Homelab, phone: Phone
) -> None:
    owner.call("POST", "/api/start", {"passphrase": PASSPHRASE})
    lab.wait_for("up")
    phone.open(owner).give_pin().sees("up").reads("Up and running")
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)


def test_another_host_key_is_told_with_a_warning(
    config: waker.Config, phone: Phone
) -> None:
    other = waker.HostKey.parse(public_line(new_key()))
    machine = config.machine._replace(host_keys=(other,))
    with running(config._replace(machine=machine)) as client:
        phone.open(client).give_pin().start()
        phone.reads("The host key differs: pinned SHA256:")
        phone.reads(
            "The passphrase was not sent. Do not try again before you know why."
        )


def test_a_start_can_be_cancelled(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("running")
    phone.page.get_by_role("button", name="Cancel").click()
    phone.sees("ready").reads("Cancelled. The passphrase was not sent.")
    assert phone.focus() == "passphrase"
    assert phone.page.locator("#passphrase").input_value() == ""


def test_waking_and_unlocking_are_there_one_by_one(
    owner: Client, lab: Homelab, phone: Phone
) -> None:
    phone.open(owner).give_pin().sees("ready")
    phone.page.get_by_text("One step at a time").click()
    phone.page.get_by_role("button", name="Wake only").click()
    phone.reads(f"Magic packet sent to {lab.mac}").reads("Waiting for the passphrase")
    for passphrase in ("wrong", PASSPHRASE):
        phone.page.get_by_label("Passphrase of the disk").fill(passphrase)
        phone.page.get_by_role("button", name="Unlock only").click()
        if passphrase == "wrong":
            phone.reads("Wrong passphrase for disk cryptroot. Type it once more.")
            assert phone.focus() == "passphrase"
    phone.sees("up").reads("Up and running")


def test_two_browsers_show_the_same_within_two_seconds(
    slow: Client, new_phone: NewPhone
) -> None:
    one, other = (new_phone().open(slow).give_pin().sees("ready") for _ in range(2))
    one.start()
    for view in ("running", "up"):
        one.sees(view)
        seen = time.monotonic()
        other.sees(view)
        assert time.monotonic() - seen < 2
    assert one.page.inner_text("main") == other.page.inner_text("main")


def test_nothing_is_asked_for_elsewhere(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("up")
    origin = f"http://127.0.0.1:{slow.port}/"
    assert {url.partition("?")[0].removeprefix(origin) for url in phone.requests} <= {
        "",
        "api/auth",
        "api/status",
        "api/start",
    } | {url for url in phone.requests if url.startswith("data:")}
    assert len(SOURCE.encode()) < 40_000


def test_a_page_that_is_not_seen_asks_for_nothing(
    api: Client, tmp_path: Path, playwright: Playwright
) -> None:
    """In a browser without Playwright's defaults, by which a page is always seen."""
    command = [need("chromium"), "--headless", "--no-sandbox"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path}/profile"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stderr
        (address,) = itertools.islice(
            (line.split()[-1] for line in process.stderr if "ws://" in line), 1
        )
        browser = playwright.chromium.connect_over_cdp(address, no_defaults=True)
        phone = Phone(browser.contexts[0].pages[0])
        phone.open(api).give_pin().sees("ready")
        other = browser.contexts[0].new_page()
        other.bring_to_front()
        other.wait_for_timeout(1500)  # for a poll that is under way
        count = len(phone.requests)
        other.wait_for_timeout(2500)
        assert len(phone.requests) == count
        phone.page.bring_to_front()
        phone.page.wait_for_event("request")


def test_below_a_path_of_a_reverse_proxy_it_works_as_well(
    api: Client, phone: Phone
) -> None:
    with proxy(api, "/at/home/") as outside:
        phone.page.goto(f"http://127.0.0.1:{outside.port}/at/home/")
        icon = phone.page.evaluate(
            "document.querySelector('link[rel=apple-touch-icon]').href"
        )
        assert phone.page.request.get(icon).status == 200
        phone.give_pin().start().sees("up")
        phone.page.goto("about:blank")


def test_without_javascript_there_is_one_sentence(
    api: Client, new_phone: NewPhone
) -> None:
    phone = new_phone(java_script_enabled=False).open(api)
    text = phone.page.inner_text("main").split("\n")
    assert list(filter(None, text)) == [
        "waker",
        "This page needs JavaScript to talk to your waker.",
    ]


def test_plain_http_is_noticed_once(api: Client, phone: Phone) -> None:
    notice = phone.page.get_by_text("This page came over plain HTTP")
    phone.open(api, "waker.lan")
    expect(notice).to_be_visible()
    phone.give_pin().sees("ready")
    phone.open(api, "waker.lan").sees("pin")
    expect(notice).to_be_hidden()


def test_this_very_machine_is_not_noticed(api: Client, phone: Phone) -> None:
    phone.open(api).sees("pin")
    expect(phone.page.get_by_text("This page came over plain HTTP")).to_be_hidden()


def test_the_usual_duration_is_told_from_the_second_time_on(
    slow_lab: Homelab, lab: Homelab, tmp_path: Path, phone: Phone
) -> None:
    with running(configure(lab, tmp_path)) as client:
        phone.open(client).give_pin().start().sees("running")
        expect(phone.page.locator("#usual")).to_be_empty()
        phone.sees("up")
    with running(configure(slow_lab, tmp_path), port=client.port):
        phone.open(client).give_pin().start().sees("running")
        phone.reads("usually about 0:0")


def test_the_keypad_is_that_of_the_last_pin(api: Client, phone: Phone) -> None:
    phone.open(api).sees("pin")
    pin, keys = phone.page.locator("#pin"), phone.page.locator("#keys")
    expect(pin).to_have_attribute("inputmode", "numeric")
    keys.click()
    expect(pin).to_have_attribute("inputmode", "text")
    assert phone.focus() == "pin"
    phone.give_pin().sees("ready")  # it has letters
    phone.open(api).sees("pin")
    expect(pin).to_have_attribute("inputmode", "text")
    keys.click()
    expect(pin).to_have_attribute("inputmode", "numeric")


def test_the_browser_keeps_no_secret(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("up")
    kept = phone.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    names = {"digits", "warned", "fromOff", "seconds"}
    assert set(re.findall(r"waker / (\w+)", kept)) == names
    assert PIN not in kept
    assert PASSPHRASE not in kept
    values = "[...document.querySelectorAll('input:not([hidden])')].map((i) => i.value)"
    assert phone.page.evaluate(values) == ["", ""]


def test_password_managers_can_keep_the_two_secrets_apart(
    api: Client, phone: Phone
) -> None:
    phone.open(api)
    forms = phone.page.evaluate(
        """[...document.forms].map((form) =>
            [...form.elements].filter((e) => e.autocomplete)
                .map((e) => [e.type, e.autocomplete, e.hidden && e.value]))"""
    )
    assert forms == [
        [["text", "username", name], ["password", "current-password", False]]
        for name in ("waker", "luks")
    ]


def test_it_can_be_put_on_a_home_screen(api: Client, phone: Phone) -> None:
    phone.open(api)
    cdp = phone.page.context.new_cdp_session(phone.page)
    manifest = cdp.send("Page.getAppManifest")
    assert manifest["errors"] == []
    assert '"name":"waker"' in manifest["data"]
    errors = cdp.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [error["errorId"] for error in errors] == ["in-incognito"]  # as tests are
    icon = api.call("GET", "/apple-touch-icon.png")
    assert icon.headers["Content-Type"] == "image/png"
    assert icon.body.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">2I", icon.body[16:24]) == (180, 180)


STOPS: dict[str, Callable[[Phone], object]] = {
    "pin": lambda phone: phone.sees("pin"),
    "wrong PIN": lambda phone: phone.give_pin("12345678").reads("Wrong PIN"),
    "off": lambda phone: phone.give_pin().reads("Off: nothing answers"),
    "steps": lambda phone: phone.page.get_by_text("One step at a time").click(),
    "waking": lambda phone: phone.start("wrong").sees("running"),
    "wrong passphrase": lambda phone: phone.sees("ready").reads("Wrong passphrase"),
    "booting": lambda phone: phone.start().reads("Unlocked: cryptroot."),
    "up": lambda phone: phone.sees("up").reads("It took"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_state_is_accessible_and_fits_a_small_screen(
    slow: Client, new_phone: NewPhone, scheme: Any
) -> None:
    phone = new_phone(
        color_scheme=scheme, viewport=SMALL, has_touch=True, is_mobile=True
    ).open(slow)
    for name, go in STOPS.items():
        go(phone)
        found = Axe().run(phone.page)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 320, name
        low = phone.page.evaluate(
            """[...document.querySelectorAll("button, input, summary")]
                .filter((e) => e.checkVisibility())
                .filter((e) => e.getBoundingClientRect().height < 44
                    || e.getBoundingClientRect().width < 44).map((e) => e.id)"""
        )
        assert low == [], name
    ground = phone.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 64) == (scheme == "dark")


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_for_who_does_not_want_it(
    slow: Client, new_phone: NewPhone, motion: Any
) -> None:
    phone = new_phone(reduced_motion=motion).open(slow)
    phone.give_pin().start().sees("running")
    moving = phone.page.evaluate("document.getAnimations().length")
    assert (moving > 0) == (motion == "no-preference")


def test_a_system_that_does_not_come_up_is_told(tmp_path: Path, phone: Phone) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        config = waker.read_config(settings, tmp_path)
        with running(config._replace(start_seconds=2)) as client:
            phone.open(client).give_pin().start()
            phone.reads("Unlocked: d. The system has not answered yet. Give it some")


def status(phase: str = "", state: str = "off", message: str = "m") -> dict[str, Any]:
    start = {"phase": phase, "message": message, "seconds": 94} if phase else None
    return {"state": state, "reachable": state != "off", "start": start}


@pytest.mark.parametrize(
    ("call", "arguments", "result"),
    [
        ("clock", [0], "0:00"),
        ("clock", [61], "1:01"),
        ("clock", [3600], "60:00"),
        ("median", [[7]], 7),
        ("median", [[100, 9, 20]], 20),
        ("buttonText", [status()], "Wake and unlock"),
        ("buttonText", [status(state="booting")], "Wake and unlock"),
        ("buttonText", [status(state="locked")], "Unlock"),
        ("buttonText", [status(state="unknown")], "Wake and unlock"),
        ("viewOf", [None], "looking"),
        ("viewOf", [status()], "ready"),
        ("viewOf", [status(state="unknown")], "ready"),
        ("viewOf", [status(state="up")], "up"),
        ("viewOf", [status("waking")], "running"),
        ("viewOf", [status("booting", "up")], "running"),
        ("viewOf", [status("failed", "locked")], "ready"),
        ("viewOf", [status("done", "off")], "ready"),
        ("stepOf", [status("waking")], 0),
        ("stepOf", [status("waking", "booting")], 1),
        ("stepOf", [status("unlocking", "locked")], 2),
        ("stepOf", [status("booting", "off")], 3),
        ("bad", ["m"], {"kind": "bad", "text": "M"}),
        (
            "bad",
            ["Failed to unlock: the host key differs: x."],
            {
                "kind": "bad",
                "text": "Failed to unlock: the host key differs: x."
                " Do not try again before you know why.",
            },
        ),
        ("outcomeOf", [status(), True], {}),
        (
            "outcomeOf",
            [status("done", "up", "Done."), True],
            {"kind": "good", "text": "Done. It took 1:34."},
        ),
        ("outcomeOf", [status("done", "off"), True], {}),
        ("outcomeOf", [status("failed", "up"), True], {}),
        ("outcomeOf", [status("failed"), True], {"kind": "bad", "text": "M"}),
        (
            "outcomeOf",
            [status("failed"), False],
            {"kind": "bad", "text": "Last time: m"},
        ),
        ("outcomeOf", [status("cancelled"), True], {"text": "m"}),
        ("outcomeOf", [status("cancelled"), False], {"text": "Last time: m"}),
        ("outcomeOf", [status("cancelled", "up"), True], {}),
    ],
)
def test_the_pure_functions(
    phone: Phone, call: str, arguments: list[Any], result: object
) -> None:
    pure = SOURCE.partition("// ---- Pure")[2].partition("// ---- API")[0]
    code = f"(values) => {{ // {pure}\nreturn {call}(...values); }}"
    assert phone.page.evaluate(code, arguments) == result
