"""The self-test of the sandbox, and what happens where there is no isolation."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator

import pytest
import typer

from gropius.cli import sandbox as verb
from gropius.sandbox import tiers
from gropius.sandbox.base import Limits, SandboxUnavailable
from gropius.sandbox.check import report_text, self_test
from gropius.sandbox.grade import FunctionTests, grade
from gropius.sandbox.tiers import Launch, Sandbox, open_sandbox

TESTS = FunctionTests("f", ("assert f(1) == 2",))


@pytest.fixture
def no_isolation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiers, "bubblewrap", lambda: None)
    monkeypatch.setattr(tiers, "landlock_version", lambda: 0)
    monkeypatch.setattr(tiers, "_WORKING", set())
    yield


def test_every_attack_of_the_self_test_is_held_by_the_tier(sandbox: Sandbox) -> None:
    report = self_test(sandbox.tier)
    assert [check for check in report["checks"] if not check["held"]] == []
    assert report["holds"]
    assert "everything held" in report_text(report)
    json.dumps(report, allow_nan=False)


@pytest.mark.usefixtures("no_isolation")
def test_without_isolation_nothing_runs_and_the_message_says_what_to_install() -> None:
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        open_sandbox()
    report = self_test()
    assert (report["tier"], report["holds"], report["checks"]) == (None, False, [])
    assert "bubblewrap" in report_text(report)


@pytest.mark.usefixtures("no_isolation")
def test_the_verb_answers_with_exit_code_3_without_isolation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as leaving:
        verb.command(as_json=True)
    assert leaving.value.exit_code == 3
    assert json.loads(capsys.readouterr().out)["tier"] is None


@pytest.mark.usefixtures("no_isolation")
def test_an_unsafe_run_is_possible_only_when_it_is_asked_for() -> None:
    box = open_sandbox("none")
    assert box.tier == "none"
    result = grade(box, "def f(x):\n    return x + 1", TESTS)
    assert (result.status, result.tier) == ("passed", "none")


def test_a_stronger_minimum_is_never_met_by_a_weaker_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "bubblewrap", lambda: None)
    monkeypatch.setattr(tiers, "_WORKING", set())
    with pytest.raises(SandboxUnavailable):
        open_sandbox("bubblewrap")


@pytest.mark.skipif(bool(tiers.probe("landlock")), reason="this kernel has no Landlock")
def test_where_bubblewrap_is_forbidden_landlock_takes_its_place_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "bubblewrap", lambda: None)
    monkeypatch.setattr(tiers, "_WORKING", set())
    box = open_sandbox("landlock", Limits(wall_s=10.0))
    assert box.tier == "landlock"
    look = "import os\ndef f(x):\n    try: return len(os.listdir('/etc'))\n    except OSError: return 2"
    result = grade(box, look, TESTS)
    assert (result.status, result.tier) == ("passed", "landlock")


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_machine_out_of_processes_is_unavailable_and_never_a_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr("gropius.sandbox.session.subprocess.Popen", refuse)
    result = grade(Sandbox("none", Limits(wall_s=1.0), slots=1), "def f(x):\n    return x + 1", TESTS)
    assert result.status == "unavailable" and os.strerror(fault) in result.reason


@pytest.mark.parametrize("command", [("/nonexistent/bwrap",), ("/bin/false",), ("/bin/cat",), ("/bin/sleep", "0")])
def test_a_sandbox_that_does_not_start_is_unavailable_and_never_a_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(tiers._LAUNCHERS, "landlock", lambda uid, folder, limits: Launch(command, folder=folder))
    result = grade(Sandbox("landlock", Limits(wall_s=1.0), slots=1), "def f(x):\n    return x + 1", TESTS)
    assert result.status == "unavailable"
