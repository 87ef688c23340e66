"""Real browsers besides Chromium, each driven in its own way, with one interface.

WebKit by WebDriver, Firefox by WebDriver BiDi, and old Chromiums by QtWebEngine, which
`make test-browsers` puts into environments of their own.
"""

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from conftest import CHECKOUT, need, wait_for
from ssh_servers import free_port
from websockets.sync.client import ClientConnection, connect

WINDOWS = CHECKOUT / "tests/support/browsers"
# As WebDriver names them.
KEYS = {"Enter": "\ue007", "Tab": "\ue004"}


def strokes(text: str) -> dict[str, Any]:
    """Make the actions of WebDriver's keyboard that type a text."""
    kinds = ("keyDown", "keyUp")
    keys = [{"type": kind, "value": char} for char in text for kind in kinds]
    return {"type": "key", "id": "keyboard", "actions": keys}


class Engine(Protocol):
    """A browser with one page. `press` and `type_text` act as a real keyboard."""

    def open(self, url: str) -> None: ...
    def run(self, expression: str) -> Any: ...
    def press(self, key: str) -> None: ...
    def type_text(self, text: str) -> None: ...
    def picture(self, path: Path) -> None: ...
    def console(self) -> list[str]: ...


@contextlib.contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the block ends."""
    with subprocess.Popen(command, text=True, **options) as running:
        try:
            yield running
        finally:
            running.terminate()


@contextlib.contextmanager
def screen(folder: Path) -> Iterator[dict[str, str]]:
    """Start an X server with a window manager; yields the environment for its clients.

    Without a window manager no window has the focus, and keys go nowhere.
    """
    xvfb = [need("Xvfb"), "-displayfd", "1", "-nolisten", "tcp"]
    xvfb += ["-screen", "0", "400x700x24"]
    openbox = need("openbox")
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    home = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(runtime)}
    quiet = {"stderr": subprocess.DEVNULL}
    with process(xvfb, stdout=subprocess.PIPE, **quiet) as server:
        assert server.stdout
        display = {"DISPLAY": f":{server.stdout.readline().strip()}"}
        env = os.environ | home | display | {"LIBGL_ALWAYS_SOFTWARE": "1"}
        with process([openbox], env=env, **quiet):
            yield env


def answers(port: int) -> bool:
    """Return whether a program listens on a port of this machine."""
    with socket.socket() as tcp:
        return tcp.connect_ex(("127.0.0.1", port)) == 0


class WebKit:
    """WebKitGTK, through WebKitWebDriver."""

    def __init__(self, port: int, env: dict[str, str], log: Path) -> None:
        self._server = f"http://127.0.0.1:{port}/session"
        self._env = env
        self._log = log
        options = {"binary": str(WINDOWS / "webkit_window.py"), "args": []}
        wanted = {"alwaysMatch": {"webkitgtk:browserOptions": options}}
        answer = self._call("", {"capabilities": wanted})
        self._server += f"/{answer['sessionId']}"

    def _call(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._server + path, data, kind)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def open(self, url: str) -> None:
        self._call("/url", {"url": url})

    def run(self, expression: str) -> Any:
        script = {"script": f"return {expression}", "args": []}
        return self._call("/execute/sync", script)

    def press(self, key: str) -> None:
        self.type_text(KEYS[key])

    def type_text(self, text: str) -> None:
        self._call("/actions", {"actions": [strokes(text)]})

    def picture(self, path: Path) -> None:
        """Take the screen's: the driver's own screenshots hang."""
        command = [need("import"), "-window", "root", str(path)]
        subprocess.run(command, env=self._env, check=True)

    def console(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@contextlib.contextmanager
def drive(driver: str, env: dict[str, str], log: Path) -> Iterator[WebKit]:
    port = free_port()
    command = ["stdbuf", "-oL", driver, f"--port={port}"]
    with process(command, env=env, stderr=subprocess.DEVNULL):
        wait_for(lambda: answers(port))
        yield WebKit(port, env, log)


@contextlib.contextmanager
def webkit(folder: Path, *, dark: bool = False) -> Iterator[Engine]:
    driver = need("WebKitWebDriver")
    if not Path("/usr/lib/python3/dist-packages/gi").exists():
        pytest.skip("need gi (package python3-gi gir1.2-webkit2-4.1)")
    log = folder / "console"
    with screen(folder) as env:
        env |= {
            "CONSOLE": str(log),
            "SCHEME": "dark" if dark else "light",
            "WEBKIT_DISABLE_SANDBOX_THIS_IS_DANGEROUS": "1",
        }
        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(drive(driver, env, log))
            except TimeoutError:  # sometimes it never reaches its window
                engine = stack.enter_context(drive(driver, env, log))
            yield engine


class Firefox:
    """Firefox, through WebDriver BiDi."""

    def __init__(self, connection: ClientConnection) -> None:
        self._socket = connection
        self._count = 0
        self._console: list[str] = []
        self._call("session.new", capabilities={})
        self._call("session.subscribe", events=["log.entryAdded"])
        (context,) = self._call("browsingContext.getTree")["contexts"]
        self._context = {"context": context["context"]}
        size = {"width": 390, "height": 640}
        self._call("browsingContext.setViewport", viewport=size, **self._context)

    def _call(self, method: str, **params: Any) -> Any:
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        self._socket.send(json.dumps(command))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("method") == "log.entryAdded":
                self._console.append(answer["params"]["text"])
            if answer.get("id") == self._count:
                assert answer["type"] == "success", answer
                return answer["result"]

    def open(self, url: str) -> None:
        wait = {"url": url, "wait": "complete"}
        self._call("browsingContext.navigate", **wait, **self._context)

    def run(self, expression: str) -> Any:
        text = f"JSON.stringify({expression})"
        options = {"target": self._context, "awaitPromise": False}
        answer = self._call("script.evaluate", expression=text, **options)
        assert answer["type"] == "success", answer
        return json.loads(answer["result"].get("value", "null"))

    def press(self, key: str) -> None:
        self.type_text(KEYS[key])

    def type_text(self, text: str) -> None:
        self._call("input.performActions", actions=[strokes(text)], **self._context)

    def picture(self, path: Path) -> None:
        taken = self._call("browsingContext.captureScreenshot", **self._context)
        path.write_bytes(base64.b64decode(taken["data"]))

    def console(self) -> list[str]:
        self.run("0")  # by its answer, older messages have arrived
        return self._console


@contextlib.contextmanager
def firefox(folder: Path, *, dark: bool = False) -> Iterator[Engine]:
    command = [need("firefox-esr"), "--no-remote"]
    click = [need("xdotool"), "mousemove", "200", "600", "click", "1"]
    profile = folder / "profile"
    profile.mkdir()
    values = {
        "ui.systemUsesDarkTheme": int(dark),
        "layout.css.prefers-color-scheme.content-override": int(not dark),
    }
    lines = [f'user_pref("{name}", {value});\n' for name, value in values.items()]
    profile.joinpath("user.js").write_text("".join(lines))
    command += ["--profile", str(profile), "--remote-debugging-port=0"]
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(screen(folder))
        browser = process(command, stderr=subprocess.PIPE, env=env)
        messages = stack.enter_context(browser).stderr
        assert messages
        found = (re.search(r"ws://\S+", line) for line in messages)
        address = next(each[0] for each in found if each)
        url = f"{address}/session"
        connection = stack.enter_context(connect(url, origin=None, max_size=None))
        engine = Firefox(connection)
        # Until someone clicks into the page, the address bar has the focus.
        subprocess.run(click, env=env, check=True)
        wait_for(lambda: engine.run("document.hasFocus()"))
        yield engine


class Qt:
    """An old Chromium, through a program that runs in its own environment."""

    def __init__(self, window: subprocess.Popen[str]) -> None:
        self._window = window

    def _do(self, command: str, value: str = "") -> Any:
        assert self._window.stdin
        assert self._window.stdout
        self._window.stdin.write(json.dumps([command, value]) + "\n")
        self._window.stdin.flush()
        return json.loads(self._window.stdout.readline())

    def open(self, url: str) -> None:
        self._do("open", url)

    def run(self, expression: str) -> Any:
        return json.loads(self._do("run", f"JSON.stringify({expression})") or "null")

    def press(self, key: str) -> None:
        self._do("press", key)

    def type_text(self, text: str) -> None:
        self._do("type", text)

    def picture(self, path: Path) -> None:
        assert self._do("picture", str(path))

    def console(self) -> list[str]:
        return [str(text) for text in self._do("console")]


@contextlib.contextmanager
def qt(version: str, script: str = "") -> Iterator[Engine]:
    """Start a Chromium; `script` runs before the page's."""
    python = CHECKOUT / f".venv-qt{version}/bin/python"
    if not python.exists():
        pytest.skip(f"make test-browsers: QtWebEngine {version} is missing")
    own = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    command = [str(python), str(WINDOWS / "qt_window.py"), script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    quiet = {"stderr": subprocess.DEVNULL}
    with process(command, env=os.environ | own, **pipes, **quiet) as window:
        yield Qt(window)
