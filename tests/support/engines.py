"""Real browsers besides today's Chromium, each driven in its own way.

WebKit by WebDriver, Firefox by WebDriver BiDi, and old Chromiums, which `make
test-browsers` puts into environments of their own, by the DevTools protocol. Each has
one page, and types as a real keyboard does.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Client, is_open, need, wait_for
from ssh_servers import free_port
from websockets.sync.client import ClientConnection, connect

WINDOWS = CHECKOUT / "tests/support/browsers"
ENTER, TAB, BACKSPACE = "\ue007", "\ue004", "\ue003"  # as WebDriver names these keys
QUIET = {"stderr": subprocess.DEVNULL}


def strokes(text: str) -> dict[str, Any]:
    """Make the actions of WebDriver's keyboard that type a text."""
    kinds = ("keyDown", "keyUp")
    keys = [{"type": kind, "value": char} for char in text for kind in kinds]
    return {"type": "key", "id": "keyboard", "actions": keys}


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the block ends."""
    with subprocess.Popen(command, text=True, **options) as program:
        try:
            yield program
        finally:
            program.terminate()


@contextlib.contextmanager
def screen(folder: Path) -> Iterator[dict[str, str]]:
    """Start an X server with a window manager; yields the environment for its clients.

    Without a window manager no window has the focus, and keys go nowhere.
    """
    xvfb = [need("Xvfb"), "-displayfd", "1", "-nolisten", "tcp"]
    xvfb += ["-screen", "0", "400x700x24"]
    home = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    with running(xvfb, stdout=subprocess.PIPE, **QUIET) as server:
        assert server.stdout
        display = {"DISPLAY": f":{server.stdout.readline().strip()}"}
        env = os.environ | home | display | {"LIBGL_ALWAYS_SOFTWARE": "1"}
        with running([need("openbox")], env=env, **QUIET):
            yield env


class WebKit:
    """WebKitGTK, through WebKitWebDriver."""

    def __init__(self, port: int, log: Path) -> None:
        self._client = Client(port)
        self._session = "/session"
        self._log = log
        options = {"binary": str(WINDOWS / "webkit_window.py"), "args": []}
        wanted = {"alwaysMatch": {"webkitgtk:browserOptions": options}}
        answer = self._call("", {"capabilities": wanted})
        self._session += f"/{answer['sessionId']}"

    def _call(self, path: str, body: object) -> Any:
        answer = self._client.call("POST", self._session + path, body)
        assert answer.status == 200, answer.body
        return answer.json["value"]

    def open(self, url: str) -> None:
        self._call("/url", {"url": url})

    def run(self, expression: str) -> Any:
        script = {"script": f"return {expression}", "args": []}
        return self._call("/execute/sync", script)

    def type_text(self, text: str) -> None:
        self._call("/actions", {"actions": [strokes(text)]})

    def console(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@contextlib.contextmanager
def drive(env: dict[str, str], log: Path) -> Iterator[WebKit]:
    port = free_port()
    command = ["stdbuf", "-oL", need("WebKitWebDriver"), f"--port={port}"]
    with running(command, env=env, **QUIET):
        wait_for(lambda: is_open(port))
        yield WebKit(port, log)


@contextlib.contextmanager
def webkit(folder: Path) -> Iterator[WebKit]:
    if not Path("/usr/lib/python3/dist-packages/gi").exists():
        pytest.skip("need gi (package python3-gi gir1.2-webkit2-4.1)")
    log = folder / "console"
    own = {"CONSOLE": str(log), "WEBKIT_DISABLE_SANDBOX_THIS_IS_DANGEROUS": "1"}
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(screen(folder)) | own
        try:
            engine = stack.enter_context(drive(env, log))
        except TimeoutError:  # sometimes it never reaches its window
            engine = stack.enter_context(drive(env, log))
        yield engine


class Remote:
    """A browser at the other end of a WebSocket, which also reports what happens."""

    def __init__(self, connection: ClientConnection) -> None:
        self._socket = connection
        self._count = 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        self._socket.send(json.dumps(command))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._count:
                assert "result" in answer, answer
                return answer["result"]
            self._events.append(answer)

    def events(self, method: str) -> list[dict[str, Any]]:
        return [each["params"] for each in self._events if each.get("method") == method]


@contextlib.contextmanager
def listening(command: list[str], **options: Any) -> Iterator[str]:
    """Run a browser; yields the address of its WebSocket."""
    with running(command, stderr=subprocess.PIPE, **options) as browser:
        assert browser.stderr
        found = (re.search(r"ws://\S+", line) for line in browser.stderr)
        yield next(each[0] for each in found if each)


class Firefox(Remote):
    """Firefox, through WebDriver BiDi."""

    def begin(self) -> "Firefox":
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded"])
        (context,) = self.call("browsingContext.getTree")["contexts"]
        self._context = {"context": context["context"]}
        size = {"width": 390, "height": 640}
        self.call("browsingContext.setViewport", viewport=size, **self._context)
        return self

    def open(self, url: str) -> None:
        wait = {"url": url, "wait": "complete"}
        self.call("browsingContext.navigate", **wait, **self._context)

    def run(self, expression: str) -> Any:
        text = f"JSON.stringify({expression})"
        options = {"target": self._context, "awaitPromise": False}
        answer = self.call("script.evaluate", expression=text, **options)
        assert answer["type"] == "success", answer
        return json.loads(answer["result"].get("value", "null"))

    def type_text(self, text: str) -> None:
        self.call("input.performActions", actions=[strokes(text)], **self._context)

    def console(self) -> list[str]:
        self.run("0")  # by its answer, older messages have arrived
        return [each["text"] for each in self.events("log.entryAdded")]


@contextlib.contextmanager
def firefox(folder: Path) -> Iterator[Firefox]:
    command = [need("firefox-esr"), "--no-remote", "--remote-debugging-port=0"]
    click = [need("xdotool"), "mousemove", "200", "600", "click", "1"]
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(screen(folder))
        profile = ["--profile", str(folder)]
        address = stack.enter_context(listening(command + profile, env=env))
        connection = connect(f"{address}/session", origin=None, max_size=None)
        engine = Firefox(stack.enter_context(connection)).begin()
        # Until someone clicks into the page, the address bar has the focus.
        subprocess.run(click, env=env, check=True)
        wait_for(lambda: engine.run("document.hasFocus()"))
        yield engine


class Qt(Remote):
    """An old Chromium, through the DevTools protocol."""

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        # Before that, what is typed may be lost.
        wait_for(lambda: self.run("performance.getEntriesByType('paint').length"))

    def run(self, expression: str) -> Any:
        text = f"JSON.stringify({expression})"
        answer = self.call("Runtime.evaluate", expression=text)
        return json.loads(answer["result"].get("value", "null"))

    def type_text(self, text: str) -> None:
        for char in text:
            names = {
                ENTER: ("Enter", 13, "\r"),
                TAB: ("Tab", 9, ""),
                BACKSPACE: ("Backspace", 8, ""),
            }
            key, code, typed = names.get(char, (char, 0, char))
            what = {"key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=typed, **what)
            self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    def console(self) -> list[str]:
        self.run("0")
        logged = [each["entry"]["text"] for each in self.events("Log.entryAdded")]
        thrown = map(str, self.events("Runtime.exceptionThrown"))
        return [*logged, *thrown, *map(str, self.events("Runtime.consoleAPICalled"))]


@contextlib.contextmanager
def qt(version: str, folder: Path, script: str = "") -> Iterator[Qt]:
    """Start a Chromium; `script` runs before the page's."""
    python = CHECKOUT / f".venv-qt{version}/bin/python"
    if not python.exists():
        pytest.skip(f"make test-browsers: QtWebEngine {version} is missing")
    port = free_port()
    env = os.environ | {
        "HOME": str(folder),
        "QTWEBENGINE_DISABLE_SANDBOX": "1",
        "QTWEBENGINE_REMOTE_DEBUGGING": f"127.0.0.1:{port}",
        "QT_QPA_PLATFORM": "offscreen",
    }
    with listening([str(python), str(WINDOWS / "qt_window.py")], env=env):
        (page,) = Client(port).call("GET", "/json/list").json
        with connect(page["webSocketDebuggerUrl"], max_size=None) as connection:
            engine = Qt(connection)
            for domain in ("Page", "Runtime", "Log"):
                engine.call(f"{domain}.enable")
            engine.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            yield engine


Engine = WebKit | Firefox | Qt
