"""The pages in a real browser: no console error, keys, deep links, live update, inert text, access, golden figures.

Skipped with a message where chromium, its driver or selenium is absent.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from conftest import TOKEN
from synthetic import make_run, write_step

from gropius.objective.presets import PRESETS, resolve
from gropius.viewer.library import Library
from gropius.viewer.server import application

webdriver = pytest.importorskip("selenium.webdriver", reason="no browser tests: selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = Path(os.environ.get("GROPIUS_AXE", ROOT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
if not CHROMIUM or not DRIVER:
    pytest.skip("no browser tests: chromium and chromedriver are not installed", allow_module_level=True)

GROUP = "/runs/synthetic/steps/4/groups/000004-0001"
PAGES = {
    "runs": ("/", "h1"),
    "run": ("/runs/synthetic", ".chart .main-svg"),
    "groups": ("/runs/synthetic/groups?step=4", "a.group-row"),
    "every group": ("/runs/synthetic/groups", "a.group-row"),
    "group": (GROUP, ".siblings .sibling"),
    "response": (f"{GROUP}/responses/7", ".token"),
    "imported run": ("/runs/foreign", "details.notes"),
    "imported group": ("/runs/foreign/steps/3/groups/000003-0000", ".siblings .sibling"),
    "imported response": ("/runs/foreign/steps/3/groups/000003-0000/responses/1", ".adds span"),
    "compare": ("/compare?runs=synthetic,other", ".chart .main-svg"),
    "bench group": ("/bench/group", ".replay tbody tr:nth-child(5)"),
    "bench weights": ("/bench/weights", ".shares .share"),
    "bench ratio": ("/bench/ratio", "#worked-objective"),
    "bench kl": ("/bench/kl", ".stage table"),
    "bench budget": ("/bench/budget", ".stage table"),
}


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("library")
    shutil.copytree(run_folder, folder / "synthetic")
    make_run(folder / "other", steps=3, objective=resolve("dr_grpo")).close()
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = runpy.run_path(str(ROOT / "tests" / "doctor" / "test_foreign.py"), run_name="logs")["trl"]
    folder = tmp_path_factory.mktemp("logs") / "foreign"
    folder.mkdir()
    write(folder)
    return folder


@pytest.fixture(scope="module")
def site(runs: Path, foreign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(Library([runs, foreign]), TOKEN, port), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}", "--window-size=1280,900", "--lang=en",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        site = Site(browser, port)
        still = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": still})
        site.open(f"/?token={TOKEN}")
        site.run("localStorage.setItem('language', 'en'); localStorage.setItem('theme', 'light')")
        yield site
    finally:
        browser.quit()
        server.should_exit = True
        thread.join(timeout=10)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_complaint_and_is_accessible(site: Site, name: str) -> None:
    path, seen = PAGES[name]
    site.complaints()
    site.open(path, seen)
    assert site.path().split("?")[0] == path.split("?")[0] and "token" not in site.path()
    assert site.all("h1") and not site.all(".problem")
    assert not re.search(r"\b(finish|state|status|baseline|scale|diagnosis|replay|question)\.[a-z]", site.words("main"))
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert site.run(wide) <= 0
    for theme in ("light", "dark"):
        site.run("document.documentElement.dataset.theme = arguments[0]", theme)
        check_accessible(site, f"{name}, {theme}")
    assert site.complaints() == []


def check_accessible(site: Site, where: str) -> None:
    if not AXE.is_file():
        return
    site.run(AXE.read_text(encoding="utf-8"))
    found = site.browser.execute_async_script(
        "const done = arguments[0]; axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        ".then(r => done(r.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html).join(' | '))))"
    )
    assert found == [], where


def test_axe_is_there_or_said_to_be_absent() -> None:
    if not AXE.is_file():
        pytest.skip(f"no accessibility check: {AXE.name} is not installed (npm install axe-core, or GROPIUS_AXE=FILE)")


@pytest.mark.parametrize("width", [400, 640])
def test_narrow_windows_and_double_zoom_need_no_sideways_scrolling(site: Site, width: int) -> None:
    site.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        for name, (path, seen) in PAGES.items():
            site.open(path, seen)
            sideways = site.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert sideways <= 0, name
    finally:
        site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_text_is_shown_and_does_nothing(site: Site) -> None:
    for step in range(1, 5):
        group = f"/runs/synthetic/steps/{step}/groups/{step:06d}-0001"
        for path, seen in ((group, ".sibling"), (f"{group}/responses/7", ".token")):
            site.complaints()
            site.open(path, seen)
            assert site.run("return window.pwned") is None
            assert site.run("return document.querySelectorAll('main script, main iframe, main img').length") == 0
            hrefs = site.run("return [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
            assert all(href.startswith(("/", "#")) for href in hrefs)
            raw = site.run(
                r"return /[\u0000-\u0008\u000b-\u001f\u202a-\u202e\u2066-\u2069]/.test(document.body.textContent)"
            )
            assert raw is False
            assert site.complaints() == []
    site.open("/runs/synthetic/steps/4/groups/000004-0001", ".sibling")
    assert "<script>window.pwned = 1</script>" in site.text()
    site.open("/runs/synthetic/steps/2/groups/000002-0001", ".sibling")
    assert "U+202E" in site.text() and "U+001B" in site.text()


def test_a_row_a_sibling_and_a_token_are_reached_by_keys_alone(site: Site) -> None:
    site.open("/runs/synthetic/groups?step=4", "a.group-row")
    site.press("j")
    site.press("j")
    assert site.run("return document.activeElement.dataset.at") == "1"
    site.press("k")
    assert site.run("return document.activeElement.dataset.at") == "0"
    site.press(Keys.ENTER)
    site.until(lambda: site.path() == "/runs/synthetic/steps/4/groups/000004-0000", "the group")
    site.find(".sibling")
    site.press("]")
    site.until(lambda: site.path().endswith("000004-0001"), "the next group")
    site.until(lambda: "000004-0001" in site.words("h1"), "its heading")
    site.find(".sibling a.open").send_keys(Keys.ENTER)
    site.until(lambda: "/responses/0" in site.path(), "the response")
    site.find(".tokens").send_keys(Keys.ARROW_RIGHT)
    site.press(Keys.ARROW_RIGHT)
    site.until(lambda: "token=1" in site.path(), "the second token in the address")
    assert "token 1" in site.words(".token-facts")
    site.press("]")
    site.until(lambda: "/responses/1" in site.path(), "the next sibling")
    site.find(".token")
    site.press("u")
    site.until(lambda: site.path().endswith("000004-0001"), "one level up")
    site.press("?")
    assert site.run("return document.getElementById('help').open") is True
    site.press(Keys.ESCAPE)


def test_a_deep_link_opens_the_token_with_its_arithmetic(site: Site) -> None:
    site.open(f"{GROUP}/responses/0?token=3&shade=ratio", ".token.at")
    assert site.find(".token.at").get_attribute("data-i") == "3"
    assert site.run("return document.querySelector('.response select').value") == "ratio"
    site.until(lambda: "Gradient in log π" in site.text(), "the arithmetic")
    site.until(lambda: "add up to the logged loss" in site.text(), "the balance")
    site.browser.back()
    site.open(f"{GROUP}?diff=1,7", ".diff del, .diff ins")
    assert [site.run("return document.querySelectorAll('.compare select')[arguments[0]].value", i) for i in (0, 1)] == [
        "1",
        "7",
    ]


def test_pointing_at_a_token_shows_its_arithmetic_and_leaving_shows_the_chosen_one(site: Site) -> None:
    site.open(f"{GROUP}/responses/0?token=3", ".token.at")
    site.until(lambda: "Gradient in log π" in site.words(".token-facts"), "the arithmetic")
    chosen = site.words(".token-facts")
    webdriver.ActionChains(site.browser).move_to_element(site.find("#token-5")).perform()
    site.until(lambda: "token 5," in site.words(".token-facts"), "the token under the pointer")
    assert "Gradient in log π" in site.words(".token-facts") and "token=3" in site.path()
    webdriver.ActionChains(site.browser).move_to_element(site.find("h1")).perform()
    site.until(lambda: site.words(".token-facts") == chosen, "the chosen token again")


def test_turns_and_tool_calls_are_told_apart(site: Site) -> None:
    site.open("/runs/synthetic/steps/3/groups/000003-0005/responses/7?token=4", ".token.at")
    assert len(site.texts(".segment.model")) == 2 and len(site.texts(".segment.environment")) == 1
    assert "not trained" in site.words(".token-facts")
    site.run("document.querySelector('details.recipe').open = true")
    assert '"name": "add"' in site.words(".tool-call") and site.run("return window.pwned") is None


def test_queues_filter_and_text_search_narrow_the_list(site: Site) -> None:
    site.open("/runs/synthetic/groups?step=3", "a.group-row")
    assert len(site.all("a.group-row")) == 8
    site.click("button.queue", "Suspected")
    site.until(lambda: len(site.all("a.group-row")) == 1, "one suspected group")
    assert "queue=suspected" in site.path()
    site.open("/runs/synthetic/groups?step=3", "a.group-row")
    site.press("/")
    site.press("think step", Keys.ENTER)
    site.until(lambda: len(site.all("a.group-row")) == 1, "one group with the text")


def test_a_list_taller_than_a_browser_allows_reaches_its_last_row(site: Site) -> None:
    """The answers of the server are stretched to a million groups, far beyond the tallest element there is."""
    stretched = """
        const real = window.fetch;
        window.fetch = async (url, ...rest) => {
          const asked = new URL(url, location.href);
          if (!asked.pathname.endsWith('/groups') || !asked.searchParams.has('offset')) return real(url, ...rest);
          const offset = Number(asked.searchParams.get('offset'));
          window.asked = (window.asked || 0) + 1;
          asked.searchParams.set('offset', 0);
          const body = await (await real(asked, ...rest)).json();
          const rows = Array.from({length: Math.min(100, 1e6 - offset)}, (_, i) =>
            ({...body.rows[i % body.rows.length], group_id: `g${offset + i}`}));
          return new Response(JSON.stringify({...body, rows, total: 1e6}));
        };"""
    added = site.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": stretched})
    rows = "return [...document.querySelectorAll('a.group-row[data-at]')].map(e => [+e.dataset.at, e.innerText])"
    last = "return document.querySelector('[data-at=\"999999\"]')?.getBoundingClientRect().bottom <= innerHeight"
    move = "scrollTo(0, arguments[0] * (document.documentElement.scrollHeight - innerHeight))"
    try:
        site.open("/runs/synthetic/groups", "a.group-row[data-at]")
        assert site.run("return document.querySelector('.row').getAttribute('aria-setsize')") == "1000000"
        for share, near in ((0.5, 500_000), (0.123, 123_000), (1, 999_999), (0, 0)):
            site.run(move, share)
            site.until(lambda n=near: any(abs(at - n) < 100 for at, _ in site.run(rows)), f"{near}")  # type: ignore[misc]
            assert all(text.startswith(f"g{at}") for at, text in site.run(rows))
        site.run(move, 1)
        site.until(lambda: site.run(last), "the last row, whole")
        for _ in range(40):
            site.run("scrollBy(0, -20000)")
        site.run(move, 0.25)
        site.until(lambda: any(abs(at - 250_000) < 100 for at, _ in site.run(rows)), "where the dragging ended")
        assert site.run("return window.asked") < 60
    finally:
        site.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_run_being_written_is_followed(site: Site, runs: Path) -> None:
    objective = resolve("grpo")
    writer = make_run(runs / "live", steps=2)
    try:
        site.open("/runs/live", ".status .live")
        assert "2 of 2 steps" in site.words(".status")
        write_step(writer, objective, 3, (3, 8, 8))
        site.until(lambda: "3 of 2 steps" in site.words(".status"), "the third step")
        writer.write_findings([{"name": "found_later", "severity": "warning", "step": 3, "message": "now"}])
        site.until(lambda: "found_later" in site.words(".findings"), "a finding that came while the page was open")
    finally:
        writer.close()
    site.until(lambda: "finished" in site.words(".status"), "the end")


def test_language_and_theme_change_and_are_kept(site: Site) -> None:
    site.open("/bench/group", ".replay")
    site.click("button.tool", "中文")
    site.until(lambda: "一个组，一步一步" in site.text(), "Chinese")
    assert site.run("return document.documentElement.lang") == "zh-Hans"
    site.open("/bench/kl", ".stage table")
    assert "同一个 KL 的三个估计量" in site.text()
    site.click("button.tool", "English")
    site.until(lambda: "Three estimators" in site.text(), "English")
    before = site.run("return document.documentElement.dataset.theme")
    site.click("button[aria-label='Light or dark']")
    after = site.run("return document.documentElement.dataset.theme")
    site.open("/bench/kl")
    assert before != after == site.run("return document.documentElement.dataset.theme")
    site.click("button[aria-label='Light or dark']")


@pytest.mark.parametrize("case", GOLDEN["group"], ids=lambda case: case["name"])
def test_the_page_shows_the_golden_numbers(site: Site, case: dict[str, Any]) -> None:
    query = "&".join(
        [f"rewards={','.join(map(str, case['body']['rewards']))}", f"preset={case['body'].get('preset', 'grpo')}"]
        + [f"{key}={value}" for key, value in case["body"].get("overrides", {}).items()]
    )
    site.open(f"/bench/group?{query}", ".replay .strong td")
    for row, key in ((3, "centred"), (5, "advantages")):
        shown = site.texts(f".replay tbody tr:nth-child({row}) td")
        values = [float(text.replace("−", "-").replace("+", "")) for text in shown]
        assert values == pytest.approx(case[key], rel=5e-4, abs=1e-12)


def test_the_worked_batch_on_the_page_is_the_lesson_s(site: Site) -> None:
    site.open("/bench/ratio", "#worked-objective")
    assert site.words("#worked-task") == "0.0125"
    assert float(site.words("#worked-objective")) == pytest.approx(0.010086, abs=1e-6)
    cell = next(text for text in site.texts(".worked td") if "0.1375" in text)
    assert "+0.1313" in cell
    assert any("+1.080685 with KL" in text for text in site.texts(".worked td"))
    site.click("button.small", "4 and 0.25")
    inputs = ".worked table tbody tr:first-child input"
    values = site.run("return [...document.querySelectorAll(arguments[0])].map(e => e.value)", inputs)
    assert values[1:3] == ["4", "0.25"]
    first = ".worked table:not(:has(input)) tbody tr:first-child td"
    site.until(lambda: [site.texts(first)[i].split()[0] for i in (0, 3)] == ["+1", "+1"], "a ratio of 1 by sequence")


def test_what_a_log_does_not_hold_is_said_where_it_would_stand(site: Site) -> None:
    site.open("/runs/foreign", "details.notes")
    assert "not in this log" in site.text() and "Not recorded here" in site.text()
    assert "a log of trl, followed as it grows" in site.words(".status")
    site.open("/runs/foreign/steps/3/groups/000003-0000", ".sibling")
    assert "the folder does not say which objective" in site.text()
    site.open("/runs/foreign/steps/3/groups/000003-0000/responses/1", ".adds span")
    assert "answer 0 1 3" in site.text() and "no numbers of single tokens" in site.words(".adds")


def test_every_share_of_a_mixture_moves_with_any_slider(site: Site) -> None:
    move = (
        "const e = document.querySelectorAll('input[type=range]')[0]; e.value = arguments[0];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    for path, value, shown in (("/bench/kl", 10, ["0.667", "0.2", "0.133"]), ("/bench/budget", 0.9, ["75 %", "25 %"])):
        site.open(path, ".stage table")
        site.run(move, value)
        selector = (
            "fieldset:first-of-type .slide output" if path == "/bench/kl" else ".component .slide:nth-of-type(1) output"
        )
        site.until(lambda s=selector, w=shown: site.texts(s)[: len(w)] == w, f"{shown} on {path}")  # type: ignore[misc]
    said = site.run("return document.querySelectorAll('input[type=range]')[0].getAttribute('aria-valuetext')")
    assert said == "75 %"


def test_a_transformed_reward_is_a_step_of_its_own(site: Site) -> None:
    preset = next(name for name, p in PRESETS.items() if p.objective.advantage.transform != "none")
    site.open(f"/bench/group?preset={preset}&rewards=1,1,0,0,0,0,0,0", ".replay .strong td")
    rows = site.texts(".replay tbody th")
    assert len(rows) == 6 and rows[1].startswith("Transformed") and rows[-1].startswith("Advantage")


def test_one_reward_changed_moves_every_advantage_and_steps_go_back_and_forward(site: Site) -> None:
    advantages, rows = ".replay .strong td", ".replay tbody tr"
    site.open("/bench/group", advantages)
    site.run("document.querySelectorAll('button.switch')[1].click()")
    site.until(lambda: site.texts(advantages) == ["+1.732", "−0.5774", "−0.5774", "−0.5774"], "the rarer outcome")
    site.click("#back")
    site.until(lambda: len(site.texts(rows)) == 4, "four rows")
    site.click("#forward")
    site.until(lambda: len(site.texts(rows)) == 5, "five rows")
    site.click(".tick input")
    site.until(lambda: len(site.texts(rows)) == 1, "only the rewards")
    site.click("#forward")
    site.find("#guess").send_keys("0.5", Keys.ENTER)
    site.until(lambda: "You said 0.5; it is 0.25." in site.text(), "the answer to a guess")


def test_a_report_opens_from_a_file_without_a_complaint(site: Site, run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need gropius[view]")
    from gropius.viewer.report import report
    from gropius.viewer.store import RunStore

    path = tmp_path / "report.html"
    path.write_text(report(RunStore("a", run_folder), ["000004-0001", "000002-0001"]), encoding="utf-8")
    site.complaints()
    site.browser.get(path.as_uri())
    assert site.words("h1") == "synthetic" and site.run("return window.pwned") is None
    assert all(site.run("return [...document.images].map(i => i.complete && i.naturalWidth > 0)"))
    check_accessible(site, "report")
    assert site.complaints() == []
