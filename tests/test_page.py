"""The page in a real browser, against the real daemon and the homelab."""

import contextlib
import ctypes.util
import itertools
import math
import re
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from conftest import MAC, PASSPHRASE, PIN, Client, need, running, wait_for
from cryptroot_unlock import Disks
from homelab import Homelab, new_key, public_line
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Playwright,
    expect,
    sync_playwright,
)
from ssh_servers import paramiko_server
from stage import STATES, Phone, Stage

import waker

SOURCE = Path(waker.__file__).with_name("ui.html").read_text()
REFUSED = re.compile(r"Failed to load resource: .* (40[019]|429|500) ")  # of a fetch
LOST = re.compile(r"Failed to load resource: net::ERR_")
SMALL = {"width": 320, "height": 640}
PHONE = {"has_touch": True, "is_mobile": True}
expect.set_options(timeout=20_000)


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
    return new_phone(viewport=SMALL, **PHONE)


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


@pytest.fixture
def stage(api: Client) -> Iterator[Stage]:
    """Before a daemon whose machine is off."""
    with contextlib.closing(Stage(api)) as made:
        yield made


@pytest.fixture
def slow_stage(slow: Client) -> Iterator[Stage]:
    """Before the daemon of the machine that takes its time."""
    with contextlib.closing(Stage(slow)) as made:
        yield made


def test_two_secrets_and_two_enters_bring_the_machine_up(
    slow: Client, phone: Phone
) -> None:
    keyboard = phone.open(slow).page.keyboard
    keyboard.type(PIN)
    keyboard.press("Enter")
    phone.sees("ready").reads("Off: nothing answers")
    expect(phone.page.locator("#blocked")).to_have_count(0)
    keyboard.type(PASSPHRASE)
    keyboard.press("Enter")
    phone.sees("running")
    here = phone.page.locator("[aria-current=step]")
    for step in ("Waiting for the disk prompt", "Booting"):
        expect(here).to_have_text(step)
        expect(phone.page).to_have_title(re.compile(f"^{step} . my machine$"))
        expect(phone.page.locator("#state")).to_be_hidden()
    phone.sees("started").reads("Up and running").reads("Started in 0:")
    phone.reads("Unlocked: cryptroot. The system is up.")
    expect(phone.page).to_have_title(re.compile("^Up and running . my machine$"))
    expect(phone.page.locator("li.past")).to_have_count(5)
    took = phone.page.evaluate(
        "[...document.querySelectorAll('li')].map(took)".replace(
            "took", "(li) => li.dataset.took ?? ''"
        )
    )
    assert [bool(text) for text in took] == [True, True, bool(took[2]), True, False]
    assert 2 <= int(took[3].removeprefix("0:")) <= 6  # the pace of the machine
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(
    slow: Client, phone: Phone
) -> None:
    keyboard = phone.open(slow).page.keyboard
    assert phone.focus() == "pin"
    keyboard.type(PIN)
    keyboard.press("Enter")
    phone.sees("ready")
    assert phone.focus() == "passphrase"
    for kind, label in (("text", "Hide passphrase"), ("password", "Show passphrase")):
        keyboard.press("Tab")
        assert phone.focus() == "show"
        keyboard.press("Enter")
        assert phone.page.locator("#passphrase").get_attribute("type") == kind
        assert phone.page.locator("#show").get_attribute("aria-label") == label
        keyboard.press("Shift+Tab")
    for key in ("Tab", "Tab", "Tab", "Enter", "Tab", "Enter"):  # to Wake only
        keyboard.press(key)
    expect(phone.page.locator("#wake")).to_be_hidden()  # the machine is awake
    assert phone.focus() == "name"
    keyboard.press("Tab")
    keyboard.type(PASSPHRASE)
    keyboard.press("Enter")
    phone.sees("running")
    assert phone.focus() == "going"
    keyboard.press("Tab")
    assert phone.focus() == "cancel"
    phone.sees("started")
    assert phone.focus() == "going"


def test_the_keyboard_of_a_phone_stays_open_after_the_pin(
    api: Client, phone: Phone
) -> None:
    phone.open(api)
    phone.page.evaluate(
        """() => {
            window.focused = [];
            addEventListener("focusin", (event) => focused.push(event.target.id));
        }"""
    )
    phone.page.get_by_label("PIN").fill(PIN)
    phone.page.locator("#continue").tap()
    phone.sees("ready")
    assert phone.page.evaluate("focused") == ["passphrase"]


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
    phone.give_pin().sees("ready").start().sees("started")
    told = phone.page.evaluate("told")
    assert [text for text, _ in itertools.groupby(told)] == told
    assert told[:2] == ["Checking…", "Off: nothing answers"]
    assert "Booting" in told
    assert re.fullmatch(r"Started in 0:\d\d Up and running", told[-1])


def test_a_wrong_pin_is_told_and_can_be_typed_again(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin("12345678").reads("Wrong PIN")
    assert phone.focus() == "pin"
    expect(phone.page.locator("#pin")).to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.type(PIN)  # what is there is selected, so this takes its place
    phone.page.keyboard.press("Enter")
    phone.sees("ready")


def test_too_many_attempts_are_counted_down(api: Client, phone: Phone) -> None:
    for _ in range(10):
        api.call("POST", "/api/auth", {"pin": "wrong!"})
    phone.page.clock.install()
    phone.open(api).give_pin().reads("Too many attempts. Try again in")
    told = phone.page.locator("#text")
    first = int(re.findall(r"\d+", told.inner_text())[0])
    assert 50 < first <= 60
    phone.page.clock.run_for(5000)
    expect(told).to_have_text(f"Too many attempts. Try again in {first - 5} s.")
    button = phone.page.locator("#continue")
    expect(button).to_have_attribute("aria-disabled", "true")
    phone.page.keyboard.press("Enter")
    assert len([url for url in phone.requests if url.endswith("auth")]) == 1
    phone.page.clock.run_for(first * 1000)
    expect(told).to_be_empty()
    expect(button).not_to_have_attribute("aria-disabled", "true")


def test_a_wrong_passphrase_is_asked_for_again(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start("wrong").sees("running").sees("ready")
    phone.reads("Wrong passphrase for disk cryptroot. Type it once more.")
    assert phone.focus() == "passphrase"
    field = phone.page.locator("#passphrase")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(phone.page.locator("#start")).to_have_text("Unlock")
    phone.page.keyboard.type(PASSPHRASE)  # the wrong one is selected
    expect(field).not_to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.press("Enter")
    phone.sees("started")


def test_a_token_that_expires_during_a_start_is_asked_for_again(
    slow_stage: Stage, phone: Phone
) -> None:
    phone.open(slow_stage).give_pin().start().sees("running")
    slow_stage.expire()
    phone.sees("pin").reads("Your PIN again, please").reads("Last seen 0:0")
    phone.give_pin().sees("running").sees("started")


def test_who_is_typing_when_the_token_expires_goes_on(
    slow_stage: Stage, phone: Phone
) -> None:
    phone.open(slow_stage).give_pin().sees("ready").type_passphrase()
    slow_stage.expire()
    phone.reads("Your 15 minutes are over").sees("ready")
    phone.press("Wake and unlock").sees("pin").reads("Your PIN again, please")
    phone.give_pin().sees("ready").press("Wake and unlock").sees("running")


def test_a_token_that_expires_while_nothing_is_typed_is_asked_for(
    stage: Stage, phone: Phone
) -> None:
    phone.open(stage).give_pin().sees("ready")
    stage.expire()
    phone.sees("pin").give_pin().sees("ready")


def test_an_unlock_goes_on_while_the_token_expires(
    owner: Client, lab: Homelab, phone: Phone
) -> None:
    owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    Disks({"cryptroot": PASSPHRASE}, slow=2).save(lab.state)
    with contextlib.closing(Stage(owner)) as stage:
        phone.open(stage).give_pin().reads("Waiting for the passphrase")
        phone.page.get_by_text("One step at a time").click()
        phone.type_passphrase("wrong").press("Unlock only")
        wait_for(lambda: Disks.load(lab.state).received)
        stage.expire()
        phone.reads("Your 15 minutes are over")
        phone.reads("Wrong passphrase for disk cryptroot.").sees("ready").start()
        phone.sees("pin").give_pin().start().reads("Up and running")


def test_a_start_whose_answer_is_lost_is_shown_all_the_same(
    slow_stage: Stage, phone: Phone
) -> None:
    slow_stage.answers["api/start"] = None
    phone.open(slow_stage).give_pin().sees("ready").start()
    phone.sees("running")  # though nobody told so
    expect(phone.page.locator("#message")).to_be_hidden()
    slow_stage.answers.clear()
    phone.press("Cancel").sees("ready").reads("Cancelled.")


def test_a_connection_that_is_lost_in_mid_start_stops_the_clock(
    slow_stage: Stage, phone: Phone
) -> None:
    phone.open(slow_stage).give_pin().start().sees("running")
    phone.reads("Waiting for the disk prompt").reads("0:01")
    assert phone.page.evaluate("document.getAnimations().length") == 1
    slow_stage.answers["api/status"] = None
    phone.reads("waker does not answer. Trying again…").reads("Last seen 0:0")
    phone.reads(", waiting for the disk prompt")
    assert phone.page.evaluate("document.getAnimations().length") == 0
    assert phone.page.locator("#time").inner_text() == ""
    slow_stage.answers.clear()
    phone.sees("started")


def test_an_error_of_something_on_the_way_is_told(stage: Stage, phone: Phone) -> None:
    stage.answers["api/wol"] = 409, []
    phone.open(stage).give_pin().sees("ready")
    phone.page.get_by_text("One step at a time").click()
    for _ in range(2):
        phone.press("Wake only").reads("Something on the way answered 409")


def test_a_reload_shows_the_start_that_is_going_on(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("running")
    phone.page.reload()
    phone.sees("pin").give_pin().sees("running").sees("started")


def test_a_daemon_that_is_restarted_is_found_again(
    slow_lab: Homelab, tmp_path: Path, phone: Phone
) -> None:
    config = configure(slow_lab, tmp_path)._replace(mac=waker.Mac(b"\0" * 6))
    with running(config) as client:
        phone.open(client).give_pin().start().sees("running")
    phone.reads("waker does not answer. Trying again…")
    with running(configure(slow_lab, tmp_path), port=client.port):
        phone.sees("pin").give_pin().sees("ready")
        phone.reads("waker was restarted, so this start has ended.")
        phone.start().sees("started")


def test_a_network_that_is_lost_is_told_and_recovers_by_itself(
    api: Client, phone: Phone
) -> None:
    phone.open(api).page.context.set_offline(True)
    phone.give_pin().reads("waker did not answer. Try again.").sees("pin")
    phone.page.context.set_offline(False)
    phone.press("Continue").reads("Off: nothing answers")
    phone.page.context.set_offline(True)
    phone.reads("waker does not answer. Trying again…").start()
    phone.reads("waker did not answer, but may have got the passphrase.")
    assert phone.page.locator("#passphrase").input_value() == PASSPHRASE
    phone.page.context.set_offline(False)
    phone.reads("Off: nothing answers")


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
    phone.give_pin().reads("Checking…").sees("ready").start()
    button = phone.page.locator("#start")
    expect(button).to_have_attribute("aria-disabled", "true")
    wait_for(lambda: slow.log_in().call("GET", "/api/status").json["start"])
    button.click(force=True)  # the first one has not been answered yet
    phone.sees("running")
    assert len([url for url in phone.requests if url.endswith("/start")]) == 1
    phone.press("Cancel").sees("ready").reads("Cancelled.")


def test_a_network_that_takes_very_long_is_told(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin().sees("ready")
    slow_down(phone, 7000)
    phone.reads("Waiting for waker to answer…").reads("Off: nothing answers")


def test_an_answer_that_hangs_does_not_hold_back_the_next(
    stage: Stage, phone: Phone
) -> None:
    stage.show("off")
    phone.open(stage).give_pin().sees("ready")
    stage.answers["api/status"] = threading.Event()
    with phone.page.expect_request("**/api/status"):
        phone.look()
    stage.show("up")
    up = phone.look().page.locator("main[data-view=up]")
    expect(up).to_be_visible(timeout=10_000)  # the first one hangs for twenty seconds


def test_an_old_failure_is_told_as_an_old_one(stage: Stage, phone: Phone) -> None:
    stage.show("locked", "failed", "wrong_passphrase", message="Wrong passphrase.")
    phone.open(stage).give_pin()
    phone.reads("Last time: Wrong passphrase. Type it once more.")


def test_a_machine_that_is_up_is_left_in_peace(stage: Stage, phone: Phone) -> None:
    stage.show("up")
    phone.page.clock.install()
    phone.open(stage).give_pin().sees("up").reads("Up and running")
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)
    count = len(phone.requests)
    phone.page.clock.run_for(9000)
    assert len(phone.requests) == count
    with phone.page.expect_request("**/api/status"):
        phone.page.clock.run_for(1500)


def test_another_host_key_is_told_with_a_warning(
    config: waker.Config, phone: Phone
) -> None:
    other = waker.HostKey.parse(public_line(new_key()))
    machine = config.machine._replace(host_keys=(other,))
    with running(config._replace(machine=machine)) as client:
        phone.open(client).give_pin().start().sees("running").sees("ready")
    told = phone.page.locator("#message")
    expect(told.locator("#text")).to_have_text(
        "This is not the machine you pinned. The passphrase was not sent."
    )
    assert phone.focus() == "message"
    assert "Unlock" in phone.buttons()
    expect(told.locator("#rest")).to_be_hidden()
    told.get_by_text("Details").click()
    expect(told.locator("#rest")).to_contain_text("he host key differs: pinned SHA256:")
    expect(told.locator("#rest")).to_contain_text("before you know why.")


def test_a_start_can_be_cancelled(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("running").press("Cancel")
    phone.sees("ready").reads("Cancelled. The passphrase was not sent.")
    assert phone.focus() == "passphrase"
    assert phone.page.locator("#passphrase").input_value() == ""


def test_what_was_sent_is_not_cancelled_but_no_longer_watched(
    slow: Client, phone: Phone
) -> None:
    phone.open(slow).give_pin().start().reads("Unlocked: cryptroot.")
    phone.press("Stop watching").sees("sent").reads("Unlocked; still booting")
    assert phone.buttons() == ["Enter the passphrase again"]
    phone.page.reload()
    phone.give_pin().sees("sent").reads("Unlocked; still booting").sees("up")


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("unlocked", "Unlocked; still booting"),
        ("not_confirmed", "Passphrase sent, not confirmed"),
    ],
)
def test_after_a_cancel_the_form_waits_for_the_machine_to_ask(
    stage: Stage, phone: Phone, outcome: str, told: str
) -> None:
    stage.show("locked", "booting", outcome)
    phone.open(stage).give_pin().sees("running")
    stage.show("locked", "cancelled", outcome)  # the initrd is about to go
    phone.look().sees("sent" if outcome == "unlocked" else "ready")
    stage.show("booting", "cancelled", outcome)
    expect(phone.look().page.locator("main[data-state=booting]")).to_be_visible()
    phone.sees("sent").reads(told)
    stage.show("locked", "cancelled", outcome)  # it is another boot
    phone.look().sees("ready")
    stage.show("off", "cancelled", outcome)
    phone.look().sees("sent").press("Enter the passphrase again").sees("ready")
    assert phone.focus() == "passphrase"


def test_waking_and_unlocking_are_there_one_by_one(
    owner: Client, lab: Homelab, phone: Phone
) -> None:
    phone.open(owner).give_pin().sees("ready")
    phone.page.get_by_text("One step at a time").click()
    assert phone.buttons() == ["Wake only"]
    phone.press("Wake only").reads("Waiting for the passphrase")
    assert phone.buttons() == ["Unlock only"]
    expect(phone.page.locator("#message")).to_be_hidden()  # of the packet
    for passphrase in ("wrong", PASSPHRASE):
        phone.type_passphrase(passphrase).press("Unlock only")
        if passphrase == "wrong":
            phone.reads("Wrong passphrase for disk cryptroot.")
            assert phone.focus() == "passphrase"
    phone.sees("up").reads("Up and running")


def test_two_browsers_show_the_same_within_two_seconds(
    slow: Client, new_phone: NewPhone
) -> None:
    one, other = (new_phone().open(slow).give_pin().sees("ready") for _ in range(2))
    one.start()
    for view in ("running", "started"):
        one.sees(view)
        seen = time.monotonic()
        other.sees(view)
        assert time.monotonic() - seen < 2
    assert one.page.inner_text("main") == other.page.inner_text("main")


def test_nothing_is_asked_for_elsewhere(slow: Client, phone: Phone) -> None:
    phone.open(slow).give_pin().start().sees("started")
    origin = f"http://127.0.0.1:{slow.port}/"
    assert {url.partition("?")[0].removeprefix(origin) for url in phone.requests} <= {
        "",
        "api/auth",
        "api/status",
        "api/start",
    } | {url for url in phone.requests if url.startswith("data:")}
    assert len(SOURCE.encode()) <= 26_000


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
    with contextlib.closing(Stage(api, "/at/home/")) as outside:
        phone.page.goto(f"http://127.0.0.1:{outside.port}/at/home/")
        icon = phone.page.evaluate(
            "document.querySelector('link[rel=apple-touch-icon]').href"
        )
        assert phone.page.request.get(icon).status == 200
        phone.give_pin().sees("ready")


@pytest.mark.parametrize("script", ["off", "too new"])
def test_without_its_script_there_is_one_sentence(
    api: Client, new_phone: NewPhone, script: str
) -> None:
    phone = new_phone(java_script_enabled=script != "off")
    if script == "off":
        phone.open(api)
    else:
        phone.page.set_content(SOURCE.replace("const STATES", "konst STATES"))
        assert "Unexpected identifier" in phone.console.pop()
    text = phone.page.inner_text("main").split("\n")
    sentence = "Loading… If this stays, JavaScript did not run: reload the page, or try"
    assert list(filter(None, text)) == ["waker", f"{sentence} another browser."]


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
    slow: Client, slow_stage: Stage, phone: Phone
) -> None:
    phone.open(slow_stage).give_pin().start().sees("running")
    progress = phone.page.locator("progress")
    expect(progress).to_be_hidden()
    expect(phone.page.locator("#usual")).to_be_empty()
    phone.sees("started")
    took = int(phone.page.inner_text("#going").removeprefix("Started in 0:"))
    slow_stage.show("off", "waking", seconds=took)
    phone.look().sees("running").reads(f"usually 0:{took:02}")
    expect(progress).to_have_js_property("value", took)
    expect(progress).to_have_js_property("max", took)
    slow_stage.show("off", "waking", seconds=took + 1)  # overdue
    expect(progress).to_have_js_property("position", -1)


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
    phone.open(slow).give_pin().start().sees("started")
    kept = phone.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    names = {"digits", "warned", "seconds"}
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


# A field must have room for seven characters; other text must not be cut.
CUT = """() => [...document.querySelectorAll("label, button, input, summary, h1, p")]
    .filter((e) => e.checkVisibility() && e.id !== "live")
    .filter((e) => e.tagName !== "INPUT" ? e.scrollWidth > e.clientWidth
        : e.clientWidth < 7 * parseFloat(getComputedStyle(e).fontSize))
    .map((e) => e.id || e.textContent)"""
LOW = """() => [...document.querySelectorAll("button, input, summary")]
    .filter((e) => e.checkVisibility()).filter((e) => {
        const { width, height } = e.getBoundingClientRect();
        return width < 44 || height < 44;
    }).map((e) => e.id)"""


@pytest.mark.parametrize("width", [320, 390])
def test_every_state_is_accessible_and_fits_a_small_screen(
    stage: Stage, new_phone: NewPhone, width: int
) -> None:
    phone = new_phone(viewport={"width": width, "height": 640}, **PHONE)
    page = phone.page
    for name, go in STATES.items():
        go(phone, stage)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page)
            assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        assert page.evaluate(LOW) == [], name
        for size in ("100%", "200%"):
            page.evaluate(f"document.documentElement.style.fontSize = '{size}'")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(CUT) == [], (name, size)
        page.evaluate("document.documentElement.style.fontSize = ''")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground))) < 64  # it was the dark scheme


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_for_who_does_not_want_it(
    slow: Client, new_phone: NewPhone, motion: Any
) -> None:
    phone = new_phone(reduced_motion=motion).open(slow)
    phone.give_pin().start().sees("running")
    moving = phone.page.evaluate("document.getAnimations().length")
    assert (moving > 0) == (motion == "no-preference")


def test_the_disc_is_seen_in_forced_colours(stage: Stage, new_phone: NewPhone) -> None:
    stage.show("locked")
    phone = new_phone(forced_colors="active").open(stage).give_pin().sees("ready")
    style = "getComputedStyle(document.getElementById('state'), '::before')"
    drawn = phone.page.evaluate(f"{style}.backgroundImage")
    assert drawn.startswith("conic-gradient(")
    assert "50%" in drawn


def test_a_system_that_does_not_come_up_is_told(tmp_path: Path, phone: Phone) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        config = waker.read_config(settings, tmp_path)
        with running(config._replace(start_seconds=2)) as client:
            phone.open(client).give_pin().start()
            phone.reads("Unlocked: d. The system has not answered yet. Give it some")


@pytest.mark.parametrize(
    ("call", "arguments", "result"),
    [
        ("clock", [0], "0:00"),
        ("clock", [61], "1:01"),
        ("clock", [3600], "60:00"),
        ("wait", [90], "90 s"),
        ("wait", [91], "2 minutes"),
        ("median", [[]], None),
        ("median", [[100, 9, 20]], 20),
        ("took", [[0, 2, 7], 0], "0:02"),
        ("took", [[0, math.nan, 7], 0], ""),
        ("took", [[0, 2], 1], ""),
    ],
)
def test_the_pure_functions(
    phone: Phone, call: str, arguments: list[Any], result: object
) -> None:
    pure = SOURCE.partition("// ---- Pure")[2].partition("// ---- API")[0]
    code = f"(values) => {{ // {pure}\nreturn {call}(...values); }}"
    assert phone.page.evaluate(code, arguments) == result
