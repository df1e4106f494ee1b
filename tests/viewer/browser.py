"""A served library and a real browser that looks at it. Tests of it are skipped where there is no browser."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gropius.viewer.library import Library
from gropius.viewer.server import application

webdriver = pytest.importorskip("selenium.webdriver", reason="no browser tests: selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys as Keys  # noqa: E402

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = Path(os.environ.get("GROPIUS_AXE", ROOT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
if not CHROMIUM or not DRIVER:
    pytest.skip("no browser tests: chromium and chromedriver are not installed", allow_module_level=True)


class Site:
    """A served library and a browser that looks at it."""

    def __init__(self, browser: Any, port: int) -> None:
        self.browser, self.base = browser, f"http://127.0.0.1:{port}"

    def open(self, path: str, wait_for: str = "h1") -> None:
        self.browser.get(self.base + path)
        self.find(wait_for)

    def find(self, selector: str) -> Any:
        return self.until(lambda: self.browser.find_elements(By.CSS_SELECTOR, selector) or None, selector)[0]

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def until(self, holds: Callable[[], Any], what: str = "") -> Any:
        for _ in range(2400):  # patience for a busy machine, not a bound on anything
            if found := holds():
                return found
            time.sleep(0.025)
        raise AssertionError(f"not seen: {what}; the page says {self.text()[:500]!r}; {self.complaints()}")

    def text(self) -> str:
        return str(self.browser.find_element(By.TAG_NAME, "body").text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()

    def words(self, selector: str) -> str:
        """The text of an element that may be replaced at any moment; empty when it is not there."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of all such elements at one moment."""
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def click(self, selector: str, words: str = "") -> None:
        """Click the first such element that begins with the words."""
        script = (
            "const all = [...document.querySelectorAll(arguments[0])];"
            "const e = all.find(e => e.innerText.trim().startsWith(arguments[1]));"
            "if (e) e.click(); return Boolean(e)"
        )
        self.until(lambda: self.run(script, selector, words), f"{selector} {words}")

    def path(self) -> str:
        return str(self.run("return location.pathname + location.search"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


def check_accessible(site: Site, where: str) -> None:
    if not AXE.is_file():
        return
    site.run(AXE.read_text(encoding="utf-8"))
    found = site.browser.execute_async_script(
        "const done = arguments[0]; axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        ".then(r => done(r.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html).join(' | '))))"
    )
    assert found == [], where


def serve(folders: list[Path], token: str, profile: Path) -> Iterator[Site]:
    """The site of these folders, until the generator is closed."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(Library(folders), token, port), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--window-size=1280,900", "--lang=en",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        site = Site(browser, port)
        still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": still})
        site.open(f"/?token={token}")
        site.run("localStorage.setItem('language', 'en'); localStorage.setItem('theme', 'light')")
        yield site
    finally:
        browser.quit()
        server.should_exit = True
        thread.join(timeout=10)
