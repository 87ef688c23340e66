"""A window of an old Chromium, QtWebEngine, that is driven by Chromium's own protocol.

It runs in an environment of its own, which has PyQt6-WebEngine and nothing else.
"""

from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

application = QApplication(["window", "--no-sandbox", "--disable-gpu"])
view = QWebEngineView()
view.resize(390, 640)
view.setHtml("")
view.show()
application.exec()
