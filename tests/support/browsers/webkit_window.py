#!/usr/bin/python3
"""A small WebKitGTK window, as wide as a phone, that WebKitWebDriver drives.

WebKitGTK's own MiniBrowser is never narrower than 447 px. This needs Debian's
gir1.2-webkit2-4.1 and python3-gi, so it runs with the system's Python. The console goes
to standard output, which the driver throws away, so it is sent to the file CONSOLE.
"""

import os
import sys

import gi

gi.require_version("Gtk", "3.0")
gi.require_version("WebKit2", "4.1")
from gi.repository import Gtk, WebKit2  # noqa: E402 - after the versions are chosen

console = os.open(os.environ["CONSOLE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(console, 1)
Gtk.init(sys.argv)
context = WebKit2.WebContext()
context.set_automation_allowed(True)


def begin(_, session):
    def make_view(_):
        view = WebKit2.WebView(web_context=context, is_controlled_by_automation=True)
        view.get_settings().set_enable_write_console_messages_to_stdout(True)
        window = Gtk.Window()
        window.set_decorated(False)
        window.set_default_size(390, 640)
        window.add(view)
        window.show_all()
        window.present()
        return view

    info = WebKit2.ApplicationInfo()
    info.set_name("waker-test")
    session.set_application_info(info)
    session.connect("create-web-view", make_view)


context.connect("automation-started", begin)
Gtk.main()
