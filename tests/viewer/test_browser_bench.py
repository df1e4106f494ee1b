"""The workbench in a real browser: golden figures, steps back and forth, language and theme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Keys, Site

from gropius.objective.presets import PRESETS

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


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
