"""An outside judge of the verifier: the corpus of the package reward-doctor, where it is installed."""

from __future__ import annotations

import pytest

from gropius.rewards.math import verify

corpus = pytest.importorskip("reward_doctor.corpus", reason="the package reward-doctor is not installed")


def test_the_verifier_agrees_with_the_outside_corpus_case_by_case() -> None:
    cases = corpus.load()
    verdicts = {case.id: verify(case.completion, case.reference) for case in cases}
    assert len(cases) > 50
    assert [case.id for case in cases if (verdicts[case.id].value == 1.0) != case.expect] == []
    assert {outcome.status for outcome in verdicts.values()} <= {"scored", "rejected"}
