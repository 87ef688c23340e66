"""What people do with the page, and every state that it can be in."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field

from conftest import PASSPHRASE, PIN, Client
from playwright.sync_api import Page, Route, expect

from waker import Event, Outcome, Result

PHASES = ("waking", "unlocking", "booting", "done")
SENT = ("unlocked", "not_confirmed", "wrong_passphrase", "gave_up", "up")


@dataclass
class Phone:
    """A browser's page, what a person does with it, and the answers that it gets.

    The daemon answers, unless a test does: some states would take a real machine
    minutes. The newest answer for a path replaces the older ones.
    """

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    held: list[Route] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def stop_clock(self) -> "Phone":
        """Let time pass only when a test says so, by `page.clock.run_for`."""
        noon = dt.datetime(2030, 1, 1, 12, tzinfo=dt.UTC)
        self.page.clock.install(time=noon)  # this clock would still tick
        self.page.clock.pause_at(noon + dt.timedelta(hours=1))
        return self

    def open(self, client: Client, host: str = "127.0.0.1") -> "Phone":
        self.page.goto(f"http://{host}:{client.port}/")
        return self

    def give_pin(self, pin: str = PIN) -> "Phone":
        self.page.get_by_label("PIN").fill(pin)
        return self.press("Continue")

    def log_in_again(self) -> "Phone":
        self.page.reload()
        return self.give_pin()

    def type_passphrase(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.page.locator("#passphrase").fill(passphrase)
        return self

    def start(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.type_passphrase(passphrase).page.locator("#start").click()
        return self

    def press(self, button: str) -> "Phone":
        self.page.get_by_role("button", name=button).click()
        return self

    def open_details(self, summary: str) -> "Phone":
        self.page.get_by_text(summary, exact=True).click()
        return self

    def sees(self, view: str) -> "Phone":
        expect(self.page.locator("main")).to_have_attribute("data-view", view)
        return self

    def reads(self, text: str) -> "Phone":
        seen = self.page.locator("main")
        expect(seen).to_contain_text(text, use_inner_text=True, ignore_case=True)
        return self

    def look(self) -> "Phone":
        """Make the page poll now, as when it comes to the front."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        return self

    def buttons(self) -> list[str]:
        return self.page.locator("#buttons button:visible").all_inner_texts()

    def focus(self) -> str:
        return str(self.page.evaluate("document.activeElement.id"))

    def answer(self, path: str, status: int, body: object, **fields: str) -> "Phone":
        """Answer all further requests for a path."""
        self.page.route(
            f"**/api/{path}",
            lambda route: route.fulfill(status=status, json=body, headers=fields),
        )
        return self

    def tell(  # noqa: PLR0913 - most tests want one or two of them
        self,
        state: str,
        phase: str = "",
        outcome: str = "",
        message: str = "",
        *times: int,
        sent: bool = False,
        hint: str | None = None,
    ) -> "Phone":
        """Show the page a state of the server, and a start.

        `times` are seconds: when each phase began, and how long the start has run.
        """
        *begun, seconds = times or (0, 9)
        start = {
            "phase": phase,
            "outcome": outcome or None,
            "message": message,
            "hint": hint,
            "seconds": seconds,
            "sent": sent or outcome in SENT,
            "times": dict(zip(PHASES, begun, strict=False)),
        }
        status = {
            "name": "Home server",
            "state": state,
            "reachable": state not in {"off", "unknown"},
            "initrd_ssh_open": state == "locked",
            "system_ssh_open": state == "up",
            "usual_seconds": None,
            "start": start if phase else None,
        }
        return self.answer("status", 200, status).look()

    def hold(self, path: str) -> "Phone":
        """Hold the next request for a path until it is released."""

        def keep(route: Route) -> None:
            self.held.append(route)

        self.page.route(f"**/api/{path}", keep, times=1)
        return self

    def release(self, status: int, body: object) -> "Phone":
        """Answer the request that is held."""
        self.take_held().fulfill(status=status, json=body)
        return self

    def take_held(self) -> Route:
        """Wait until a request is held: the page may not have sent it yet."""
        while not self.held:
            self.page.wait_for_timeout(10)  # ms, in which Playwright can hold it
        return self.held.pop()

    def lose_connection(self) -> "Phone":
        self.page.route("**/api/status", lambda route: route.abort())
        return self.look()

    def expire(self) -> "Phone":
        """Let the token's 15 minutes pass."""
        return self.answer("{status,start}", 401, {"error": "Expired"}).look()


def text_of(outcome: Outcome, detail: str = "", *, sent: bool = True) -> str:
    return Result(outcome, detail, sent=sent).message


UNLOCKED = text_of(Outcome.UNLOCKED, "cryptroot")
UP = f"{UNLOCKED} The system is up."
LATE = text_of(Outcome.NOT_CONFIRMED, "the connection was lost")
KEYS = "pinned SHA256:" + "x" * 43 + ", shown SHA256:" + "y" * 43
CANCELLED = "Cancelled. The passphrase was not sent."
NOT_AWAKE = "The server did not wake or is silent: check power."
PACKET = "Magic packet sent to 52:54:00:12:34:56 from 192.168.1.2"


def fail(phone: Phone, outcome: Outcome, detail: str = "", *, sent: bool) -> None:
    """Show a start that fails."""
    phone.tell("locked", "unlocking", "", "", 0, 38, 40).sees("starting")
    message = text_of(outcome, detail, sent=sent)
    phone.tell("locked", "failed", outcome.word, message)


# Each opens the page, goes through some states, and yields their names.


def before_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.open(client).sees("pin")
    yield "PIN"
    phone.open(client, "waker.lan").reads("Not encrypted")
    yield "PIN, not encrypted"
    phone.hold("auth").give_pin().reads("Checking…")
    yield "PIN, being checked"
    phone.release(401, {"error": "Wrong PIN"}).reads("Wrong PIN")
    yield "PIN, wrong"
    phone.answer("auth", 429, {"error": "Too many"}, **{"Retry-After": "42"})
    phone.press("Continue").reads("Try again in 4")
    yield "PIN, too many"
    phone.page.unroute("**/api/auth")
    phone.tell("off").open(client).give_pin().sees("off")
    yield "off"
    phone.hold("wol").press("Wake only").reads("Waking…")
    yield "off, packet being sent"
    phone.release(409, []).reads("Unexpected answer (409), perhaps from a proxy.")
    yield "off, answered by something else"
    phone.answer("wol", 200, {"message": PACKET}).press("Wake only")
    phone.reads("The wake-up signal was sent.").open_details("Details").reads(PACKET)
    yield "off, packet sent"
    phone.open_details("Details").tell("booting").reads("Starting up")
    yield "starting up"
    phone.tell("locked").reads("Waiting for the passphrase")
    yield "asks"
    phone.type_passphrase().press("Show").reads("Hide")
    yield "asks, passphrase shown"
    phone.hold("start").press("Unlock").reads("Starting…")
    yield "asks, being started"
    phone.release(409, {"error": "Another unlock is running"}).reads("Another unlock")
    yield "asks, refused"
    phone.tell("unknown").log_in_again().reads("Status unknown")
    yield "unknown"
    phone.press("Try anyway").reads("Disk passphrase")
    yield "unknown, anyway"


def during_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.tell("off").open(client).give_pin().sees("off")
    phone.tell("off", "waking", "", PACKET, 0, 3).reads("Starting 0:03")
    yield "waking"
    phone.tell("booting", "waking", "", "The server is awake", 0, 25)
    phone.reads("Waiting for the passphrase prompt")
    yield "waiting"
    phone.tell("locked", "unlocking", "", "Connecting", 0, 38, 40).reads(
        "Starting 0:40"
    )
    yield "unlocking"
    phone.tell("booting", "booting", "unlocked", UNLOCKED, 0, 38, 42, 44)
    phone.reads("Stop watching (the server keeps booting)")
    yield "booting"
    phone.tell("up", "done", "up", UP, 0, 38, 42, 62, 62).reads("It took 1:02.")
    yield "up after a start"
    phone.open_details("Details").reads(
        "0:38 to the passphrase prompt, 0:04 to unlock, 0:20 to boot."
    )
    yield "up, details"
    phone.open_details("Details").tell("off").sees("off")
    phone.tell("off", "waking", "", PACKET, 0, 2).reads("Usually up within 1:02.")
    yield "waking as usual"
    phone.tell("off", "booting", "unlocked", UNLOCKED, 0, 36, 41, 48).reads("0:48")
    yield "booting as usual"
    phone.tell("off", "booting", "not_confirmed", LATE, 0, 36, 41, 99)
    phone.reads("Longer than usual.")
    yield "overdue"
    phone.tell("locked", "booting", "not_confirmed", LATE, 0, 36, 41, 99)
    phone.sees("doubtful").reads("Not confirmed")
    yield "not confirmed"
    phone.press("Try another passphrase").reads("Disk passphrase")
    yield "not confirmed, another passphrase"
    phone.lose_connection().reads("Can't reach waker. Retrying…")
    yield "not confirmed, connection lost"
    phone.tell("off", "booting", "unlocked", UNLOCKED, 0, 36, 41, 48).sees("starting")
    phone.lose_connection().reads("Can't reach waker. Retrying…")
    yield "start, connection lost"
    phone.expire().sees("pin").reads("Last seen starting, at 0:48.")
    yield "start, PIN again"
    phone.tell("booting", "waking", "", PACKET, 0, 9).give_pin().sees("starting")
    phone.hold("start").press("Cancel").reads("Stopping…")
    yield "start, being cancelled"
    phone.tell("booting", "cancelled", "cancelled", CANCELLED)
    phone.release(200, {}).sees("booting").reads(CANCELLED)
    yield "cancelled"
    phone.tell("booting", "cancelled", "unlocked", UNLOCKED).reads("keeps booting")
    yield "unlocked, not watched"
    phone.tell("off", "cancelled", "not_confirmed", LATE).reads("didn't confirm it")
    yield "sent, not watched"


def after_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.page.clock.install()  # it ticks: axe would wait for a stopped one for ever
    phone.tell("off").open(client).give_pin().sees("off")
    fail(phone, Outcome.WRONG_PASSPHRASE, "cryptroot", sent=True)
    phone.reads("Wrong passphrase. Try again.")
    yield "wrong passphrase"
    fail(phone, Outcome.HOST_KEY_DIFFERS, KEYS, sent=False)
    phone.sees("foreign")
    yield "another host key"
    phone.open_details("Details").reads(KEYS)
    yield "another host key, details"
    phone.press("Try anyway").open_details("Details").reads("Disk passphrase")
    yield "another host key, anyway"
    fail(phone, Outcome.KEY_REFUSED, "SHA256:" + "z" * 43, sent=False)
    phone.reads("The server refused waker's SSH key")
    yield "key refused"
    fail(phone, Outcome.NOT_ASKED, Event.ENDED.words, sent=False)
    phone.reads("wasn't ready for the passphrase")
    yield "nothing asks"
    fail(phone, Outcome.GAVE_UP, sent=True)
    phone.sees("stuck")
    yield "given up"
    phone.tell("off", "failed", "not_awake", NOT_AWAKE).reads(NOT_AWAKE)
    yield "not awake"
    phone.tell("off", "failed", "not_up", "No answer.").reads("a few more minutes")
    yield "not up"
    phone.tell("locked", "unlocking").sees("starting").tell("off")
    phone.reads("waker restarted and stopped this start.")
    yield "restarted"
    phone.type_passphrase().expire().reads("Signed out after 15 minutes.")
    yield "typing, signed out"
    phone.press("Wake and unlock").sees("pin").reads("Your session has ended.")
    yield "PIN again"
    early = text_of(Outcome.NOT_ASKED, Event.TOO_EARLY.words, sent=False)
    phone.tell("locked", "failed", "not_asked", early)
    phone.log_in_again().reads("Last time: The server wasn't ready")
    yield "failed last time"
    phone.page.route("**/api/status", lambda _: None)  # no request is answered
    phone.page.clock.run_for(10_000)
    phone.reads("s ago. Retrying…")
    yield "waker is slow"
    phone.tell("up", "failed", "host_key_differs", KEYS).log_in_again().sees("up")
    yield "up, after another host key"
    phone.tell("up").reads("Up")
    yield "up"
    phone.lose_connection().reads("Can't reach waker. Retrying…")
    yield "up, connection lost"
