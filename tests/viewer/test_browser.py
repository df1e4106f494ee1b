"""The pages in a real browser: no console error, keys, deep links, live update, inert text, access.

Skipped with a message where chromium, its driver or selenium is absent.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import AXE, Keys, Site, check_accessible, webdriver
from synthetic import make_run, write_step

from gropius.objective.presets import resolve

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


def test_what_a_log_does_not_hold_is_said_where_it_would_stand(site: Site) -> None:
    site.open("/runs/foreign", "details.notes")
    assert "not in this log" in site.text() and "Not recorded here" in site.text()
    assert "a log of trl, followed as it grows" in site.words(".status")
    site.open("/runs/foreign/steps/3/groups/000003-0000", ".sibling")
    assert "the folder does not say which objective" in site.text()
    site.open("/runs/foreign/steps/3/groups/000003-0000/responses/1", ".adds span")
    assert "answer 0 1 3" in site.text() and "no numbers of single tokens" in site.words(".adds")


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
