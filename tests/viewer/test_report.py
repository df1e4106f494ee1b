"""Reports, pictures, notebooks and the console: whole without a network, and foreign text inert in all of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import HOSTILE

import gropius
from gropius.errors import GropiusError, RunFolderError
from gropius.objective.presets import resolve
from gropius.viewer.markup import text
from gropius.viewer.notebook import RunView
from gropius.viewer.report import report, write_pictures
from gropius.viewer.store import RunStore

pytest.importorskip("matplotlib", reason="pictures need gropius[view]")
HOSTILE_GROUPS = [f"00000{step}-0001" for step in range(1, 5)]
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "div", "figure", "figcaption",
    "img", "table", "thead", "tbody", "tr", "th", "td", "pre", "span", "strong", "code", "details", "summary", "br",
}  # fmt: skip


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= set(attrs)


def check_inert(document: str) -> None:
    reader = Reader()
    reader.feed(document)
    assert reader.tags <= ALLOWED
    for name, value in reader.attributes:
        assert not name.startswith("on") and name != "href"
        assert name != "src" or (value or "").startswith("data:image/svg+xml;base64,")
    assert not re.search("[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]", document)


def test_a_report_is_one_inert_file(run_folder: Path) -> None:
    document = report(RunStore("a", run_folder), HOSTILE_GROUPS)
    check_inert(document)
    assert "default-src 'none'" in document
    assert "http" not in re.sub(r"http-equiv|http://evil|//evil", "", document.split("<main")[1])
    for hostile in HOSTILE:
        assert text(hostile) in document
    assert "loss = Σ_t" in document and "dead_groups" in document


def test_a_report_chooses_groups_of_every_state(run_folder: Path) -> None:
    document = report(RunStore("a", run_folder))
    assert "000003-0003" in document and "000012-" in document


def test_a_group_that_is_not_there_is_named(run_folder: Path) -> None:
    with pytest.raises(RunFolderError, match="no group 000099-0000"):
        report(RunStore("a", run_folder), ["000099-0000"])


def test_pictures_are_png_files(run_folder: Path, tmp_path: Path) -> None:
    paths = write_pictures(RunStore("a", run_folder), tmp_path / "png")
    assert len(paths) >= 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_report_is_the_same_twice(run_folder: Path) -> None:
    assert report(RunStore("a", run_folder)) == report(RunStore("a", run_folder))


def test_notebooks_show_runs_groups_and_objectives(run_folder: Path) -> None:
    view = RunView(run_folder)
    for document in (view._repr_html_(), view.group("000003-0001")._repr_html_(), view.objective._repr_html_()):
        check_inert(document)
        assert document.startswith("<style>")


def test_what_a_user_of_a_notebook_holds_shows_itself(run_folder: Path) -> None:
    run = gropius.open_run(run_folder)
    groups = run.groups(3)
    assert "000003-0003" in groups._repr_html_() and "all failed" in groups._repr_html_()
    check_inert(groups._repr_html_())
    assert run.groups().step == 12 and groups.rows[1]["size"] == 8
    with pytest.raises(RunFolderError, match="no responses of step 99"):
        run.groups(99)
    assert "min(r_t·A" in resolve("grpo")._repr_html_() and "π_anchor" in resolve("gspo")._repr_html_()


def test_the_console_prints_parts_and_how_the_advantage_came_about(run_folder: Path) -> None:
    found = run_verb("show", str(run_folder), "--group", "000003-0001").stdout
    assert "advantage = (R_i − mean_group(R)) / (std_group), population std of group" in found
    head = next(line for line in found.splitlines() if line.startswith("sibling"))
    assert head.split() == ["sibling", "status", "ended", "exact", "reward", "baseline", "centred", "scale",
                            "advantage", "tokens", "loss"]  # fmt: skip


def run_verb(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from gropius.cli.main import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_the_console_obeys_nothing_that_a_model_wrote(run_folder: Path) -> None:
    for group in HOSTILE_GROUPS:
        found = run_verb("show", str(run_folder), "--group", group)
        assert found.returncode == 0, found.stderr
        assert not re.search("[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]", found.stdout)
    assert "no number in the answer" in found.stdout and "advantage" in found.stdout


def test_the_console_names_what_is_not_there(run_folder: Path, tmp_path: Path) -> None:
    run, none = str(run_folder), str(tmp_path / "none")
    for words in ("show", run, "--group", "x"), ("show", run, "--step", "77"), ("report", none), ("view", none):
        found = run_verb(*words)
        assert found.returncode == 2 and found.stderr.startswith("gropius: ") and "Traceback" not in found.stderr


def test_a_folder_that_cannot_be_written_is_said(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GropiusError, match="cannot be written"):
        write_pictures(RunStore("a", run_folder), tmp_path / "file")


def test_view_serves_what_it_prints_and_ends_when_asked(run_folder: Path) -> None:
    code = "import sys; from gropius.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "view", str(run_folder), "--group", "000003-0001", "--no-cache"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            shape = r"(http://127\.0\.0\.1:\d+)(/runs/synthetic/steps/3/groups/000003-0001)\?token=(\S+)"
            place = re.fullmatch(shape, address)
            assert place, address
            request = urllib.request.Request(f"{place[1]}/api/about", headers={"authorization": f"Bearer {place[3]}"})
            assert json.loads(_ask(request))["runs"][0]["id"] == "synthetic"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                _ask(urllib.request.Request(f"{place[1]}/api/about"))
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) in (0, 130)


def _ask(request: urllib.request.Request) -> bytes:
    for _ in range(200):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server never answered")
