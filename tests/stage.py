"""What a person does with the page, and every state that it can be in."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from conftest import PASSPHRASE, PIN, Client
from playwright.sync_api import Page, Route, expect

from waker import Outcome, Result


@dataclass
class Phone:
    """A browser's page, what a person does with it, and what answers it.

    That is the daemon, unless a test answers in its place: so the page can be seen in
    states that take a real machine minutes. What answers last counts.
    """

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    held: list[Route] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

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
        """Have the page ask now, as when it comes to the front."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        return self

    def buttons(self) -> list[str]:
        return self.page.locator("button.second:visible").all_inner_texts()

    def focus(self) -> str:
        return str(self.page.evaluate("document.activeElement.id"))

    def answer(self, path: str, status: int, told: object, **fields: str) -> "Phone":
        """Answer all further requests for a path."""
        self.page.route(
            f"**/api/{path}",
            lambda route: route.fulfill(status=status, json=told, headers=fields),
        )
        return self

    def tell(
        self,
        state: str,
        phase: str = "",
        outcome: str = "",
        message: str = "",
        seconds: int = 9,
    ) -> "Phone":
        """Have the page see a state of the machine, and of a start."""
        start = {"phase": phase, "outcome": outcome or None, "message": message}
        status = {
            "name": "my machine",
            "state": state,
            "reachable": state not in {"off", "unknown"},
            "initrd_ssh_open": state == "locked",
            "system_ssh_open": state == "up",
            "start": start | {"seconds": seconds} if phase else None,
        }
        return self.answer("status", 200, status).look()

    def hold(self, path: str) -> "Phone":
        """Hold the next request for a path until it is released."""

        def keep(route: Route) -> None:
            self.held.append(route)

        self.page.route(f"**/api/{path}", keep, times=1)
        return self

    def release(self, status: int, told: object) -> "Phone":
        """Answer what is held."""
        self.held.pop().fulfill(status=status, json=told)
        return self

    def lose_connection(self) -> "Phone":
        self.page.route("**/api/status", lambda route: route.abort())
        return self.look()

    def expire(self) -> "Phone":
        """Let the token's 15 minutes pass."""
        return self.answer("{status,start,unlock}", 401, {"error": "Expired"}).look()


def told(outcome: Outcome, detail: str = "cryptroot", *, sent: bool = True) -> str:
    return Result.of(outcome, detail, sent=sent).message


UNLOCKED = told(Outcome.UNLOCKED)
LATE = told(Outcome.NOT_CONFIRMED, "the connection was lost")
KEYS = "pinned SHA256:" + "x" * 43 + ", shown SHA256:" + "y" * 43
CANCELLED = "Cancelled. The passphrase was not sent."
NOT_AWAKE = "The server did not wake: check power, network cable and Wake-on-LAN."
PACKET = "Magic packet sent to 52:54:00:12:34:56 from 192.168.1.2"
EARLY = "Failed to unlock: " + told(Outcome.TOO_EARLY, sent=False)


def fail(phone: Phone, outcome: Outcome, detail: str = "", *, sent: bool) -> None:
    """Show a start, and how it failed."""
    phone.tell("locked", "unlocking").sees("running")
    message = told(outcome, detail, sent=sent)
    phone.tell("locked", "failed", outcome.value[0], message).sees("ready")


# Each goes through some states, from the page's address on, and names them.


def before_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.open(client).sees("pin")
    yield "PIN"
    phone.open(client, "waker.lan").reads("This page came over plain HTTP")
    yield "PIN, plain HTTP"
    phone.hold("auth").give_pin().reads("Checking…")
    yield "PIN, being checked"
    phone.release(401, {"error": "Wrong PIN"}).reads("Wrong PIN")
    yield "PIN, wrong"
    phone.answer("auth", 429, {"error": "Too many"}, **{"Retry-After": "42"})
    phone.press("Continue").reads("Try again in 4")
    yield "PIN, too many"
    phone.page.unroute("**/api/auth")
    phone.tell("off").open(client).give_pin().sees("ready")
    yield "off"
    phone.open_details("One step at a time").reads("Wake only")
    yield "off, one step at a time"
    phone.hold("wol").press("Wake only").reads("Waking…")
    yield "off, packet being sent"
    phone.release(409, []).reads("Something on the way answered 409")
    yield "off, answered by something else"
    phone.answer("wol", 200, {"message": PACKET}).press("Wake only").reads(PACKET)
    yield "off, packet sent"
    phone.tell("up").sees("up").tell("off").sees("ready")
    expect(phone.page.locator("#message")).to_be_hidden()
    phone.tell("booting").reads("Awake, starting up")
    yield "awake"
    phone.tell("unknown").reads("Not known: waker could not look")
    yield "not known"
    phone.tell("locked").reads("Waiting for the passphrase")
    yield "asks"
    phone.type_passphrase().press("Show").reads("Hide")
    yield "asks, passphrase shown"
    phone.hold("unlock").press("Unlock only").reads("Unlocking…")
    yield "asks, being unlocked"
    phone.release(500, {"error": EARLY}).reads("not ready yet")
    yield "asks, not unlocked"
    phone.answer("unlock", 200, {"message": UNLOCKED}).press("Unlock only")
    phone.sees("sent").reads(UNLOCKED)
    yield "unlocked, nothing watched"


def during_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.tell("off").open(client).give_pin().sees("ready")
    phone.tell("off", "waking", "", PACKET, 0).reads(PACKET)
    yield "waking"
    phone.tell("booting", "waking", "", "The server is awake", 2).reads("is awake")
    yield "waiting"
    phone.tell("locked", "unlocking", "", "Connecting", 4).reads("Connecting")
    yield "unlocking"
    phone.tell("booting", "booting", "unlocked", UNLOCKED, 6).reads(UNLOCKED)
    yield "booting"
    phone.tell("up", "done", "up", UNLOCKED, 8).reads("Started in 0:08")
    yield "started"
    phone.tell("off").sees("ready")
    yield "off again"
    phone.tell("off", "waking", "", PACKET, 2).reads("usually 0:08")
    yield "waking as usual"
    phone.tell("off", "booting", "unlocked", UNLOCKED, 6).reads(UNLOCKED)
    yield "booting as usual"
    phone.tell("off", "booting", "not_confirmed", LATE, 99).reads(LATE)
    yield "overdue"
    phone.lose_connection().reads("waker does not answer")
    yield "start, connection lost"
    phone.expire().sees("pin").reads("Last seen 1:39")
    yield "start, PIN again"
    phone.tell("booting", "waking").give_pin().sees("running")
    phone.hold("start").press("Cancel")
    expect(phone.page.locator("#cancel")).to_have_attribute("aria-disabled", "true")
    yield "start, being cancelled"
    phone.tell("booting", "cancelled", "cancelled", CANCELLED)
    phone.release(200, {}).sees("ready").reads(CANCELLED)
    yield "cancelled"
    phone.tell("booting", "cancelled", "unlocked").reads("Unlocked; still booting")
    yield "unlocked, not watched"
    phone.tell("off", "cancelled", "not_confirmed").reads("not confirmed")
    yield "sent, not watched"


def after_a_start(phone: Phone, client: Client) -> Iterator[str]:
    phone.page.clock.install()
    phone.tell("off").open(client).give_pin().sees("ready")
    fail(phone, Outcome.WRONG_PASSPHRASE, "disk cryptroot", sent=True)
    yield "wrong passphrase"
    fail(phone, Outcome.OTHER_HOST_KEY, KEYS, sent=False)
    yield "another host key"
    phone.open_details("Details").reads(KEYS)
    yield "another host key, details"
    fail(phone, Outcome.KEY_REFUSED, "SHA256:" + "z" * 43, sent=False)
    yield "key refused"
    fail(phone, Outcome.IDLE, sent=False)
    yield "nothing asks"
    fail(phone, Outcome.GAVE_UP, sent=True)
    yield "given up"
    phone.tell("off", "failed", "not_awake", NOT_AWAKE).reads(NOT_AWAKE)
    yield "not awake"
    phone.tell("off", "failed", "not_up", "No answer.").reads("Give it some more time")
    yield "not up"
    phone.tell("locked", "unlocking").sees("running").tell("off")
    phone.reads("waker was restarted, so this start has ended.")
    yield "restarted"
    phone.type_passphrase().expire().reads("Your 15 minutes are over")
    yield "typing, time over"
    phone.press("Wake and unlock").sees("pin").reads("Your PIN again, please")
    yield "PIN again"
    phone.tell("locked", "failed", "gave_up", told(Outcome.GAVE_UP))
    phone.log_in_again().reads("Last time: The initrd has given up")
    yield "failed last time"
    phone.lose_connection().reads("waker does not answer")
    yield "connection lost"
    phone.page.route("**/api/status", lambda _: None)  # no request is answered
    phone.look().page.clock.run_for(4000)
    phone.reads("Waiting for waker")
    yield "waker is slow"
    phone.tell("unknown", "done", "up", UNLOCKED).log_in_again().reads("It took 0:09.")
    yield "done, not known"
    phone.tell("up", "done", "up", UNLOCKED).sees("up").reads("It took 0:09.")
    yield "up, last start"
    phone.tell("up").reads("Up and running")
    yield "up"
