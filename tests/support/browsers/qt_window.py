"""A window of an old Chromium, QtWebEngine, that is driven by lines of JSON.

    python qt_window.py [SCRIPT]

It runs in an environment of its own, which has PyQt6-WebEngine and nothing else. SCRIPT
runs in each document before any other. Each line of standard input is [COMMAND, VALUE];
the answer is one line on standard output.
"""

import json
import os
import sys
from threading import Thread

from PyQt6.QtCore import QEvent, QObject, Qt, QUrl, pyqtSignal
from PyQt6.QtGui import QKeyEvent
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineScript
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

KEYS = {"Enter": Qt.Key.Key_Return, "Tab": Qt.Key.Key_Tab}


class Page(QWebEnginePage):
    """A page that keeps its console."""

    def __init__(self, profile, parent):
        super().__init__(profile, parent)
        self.console = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.console.append(message)


class Window(QObject):
    """What the commands do."""

    given = pyqtSignal(list)

    def __init__(self, script):
        super().__init__()
        self.profile = QWebEngineProfile()
        self.view = QWebEngineView()
        self.page = Page(self.profile, self.view)
        self.view.setPage(self.page)
        self.view.resize(390, 640)
        if script:
            injected = QWebEngineScript()
            injected.setSourceCode(script)
            point = QWebEngineScript.InjectionPoint.DocumentCreation
            injected.setInjectionPoint(point)
            injected.setWorldId(QWebEngineScript.ScriptWorldId.MainWorld)
            self.page.scripts().insert(injected)
        self.given.connect(self.obey)
        self.view.show()

    def answer(self, value=None):
        print(json.dumps(value), flush=True)

    def obey(self, command):
        name, value = command
        if name == "open":
            self.page.load(QUrl(value))
            self.view.setFocus()
            self.answer()
        elif name == "run":
            self.page.runJavaScript(value, self.answer)
        elif name == "press":
            self.press(KEYS.get(value, 0), "\r" if value == "Enter" else "")
            self.answer()
        elif name == "type":
            for character in value:
                self.press(0, character)
            self.answer()
        elif name == "picture":
            self.answer(self.view.grab().save(value))
        elif name == "console":
            self.answer(self.page.console)

    def press(self, key, text):
        for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
            event = QKeyEvent(kind, key, Qt.KeyboardModifier.NoModifier, text)
            QApplication.postEvent(self.view.focusProxy(), event)


def read(window):
    for line in sys.stdin:
        window.given.emit(json.loads(line))
    os._exit(0)


application = QApplication(["window", "--no-sandbox", "--disable-gpu"])
window = Window("".join(sys.argv[1:]))
Thread(target=read, args=(window,), daemon=True).start()
application.exec()
