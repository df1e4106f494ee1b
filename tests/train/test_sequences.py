"""From episodes to what the objective sees and to trainable rows."""

from __future__ import annotations

import numpy as np
import pytest

from gropius.objective.presets import resolve
from gropius.objective.selection import assign
from gropius.train.sequences import cut, to_responses
from gropius.types import Episode, Group, Outcome, Task, Turn, Verdict, rejected, scored, void

TASK = Task("t1", "2+2=", "4")


def turn(role, *ids):
    size = len(ids)
    given = np.full(size, -0.5, np.float32) if role == "model" else None
    return Turn(role, np.array(ids, np.int64), "x" * size, given, given, "stop" if role == "model" else None)


def episode(member, *turns, verdict=None, finish="stop", prompt=(1, 2, 3)):
    return Episode(TASK, "000001-0000", member, np.array(prompt, np.int64), turns, (), finish, verdict=verdict)


def group(*episodes, baseline=None):
    return Group("000001-0000", TASK, episodes, baseline)


def good(value, raw=None, **parts: Outcome):
    return Verdict(scored(value), parts, raw)


def test_the_verdict_becomes_reward_status_and_raw():
    members = group(
        episode(0, turn("model", 7, 8), verdict=good(1.5, raw=1.0)),
        episode(1, turn("model", 7), verdict=Verdict(rejected("unparsable", -0.5)), finish="length"),
        episode(2, turn("model", 9), verdict=Verdict(void("the verifier crashed"))),
        episode(3, verdict=None),
        baseline=episode(9, turn("model", 7), verdict=good(0.25)),
    )
    first, second, third, fourth = to_responses([members])
    assert (first.reward, first.status, first.raw, first.truncated) == (1.5, "scored", 1.0, False)
    assert (second.reward, second.status, second.truncated) == (-0.5, "rejected", True)
    assert (third.reward, third.status, fourth.reward, fourth.status) == (None, "void", None, "void")
    assert len(fourth.mask) == 0
    assert {r.greedy_reward for r in (first, second, third, fourth)} == {0.25}
    assert {r.group for r in (first, second)} == {"000001-0000"}


def test_with_part_weights_the_reward_is_its_parts():
    weights = {"answer": 1.0, "format": 0.5}
    members = group(
        episode(0, turn("model", 7), verdict=good(1.5, answer=scored(1), format=scored(1))),
        episode(1, turn("model", 7), verdict=good(1.0, answer=scored(1), format=void("it crashed"))),
        episode(2, turn("model", 7), verdict=Verdict(rejected("late", 3.0))),
    )
    rewards = [r.reward for r in to_responses([members], weights)]
    assert rewards == [{"answer": 1.0, "format": 1.0}, {"answer": 1.0, "format": 0.0}, {"answer": 2.0, "format": 2.0}]
    assert sum(weights[name] * value for name, value in rewards[2].items()) == 3.0


def test_a_multi_turn_episode_is_one_row_and_only_the_models_own_tokens_are_trained():
    one = episode(0, turn("model", 10, 11), turn("environment", 20, 21, 22), turn("model", 12), verdict=good(1))
    (row,) = cut([group(one)])
    assert row.response_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert row.mask.tolist() == [True, True, False, False, False, True]
    assert row.sampler_logprobs.tolist() == [-0.5, -0.5, 0, 0, 0, -0.5]
    assert row.run_ids.tolist() == [1, 2, 3, 10, 11, 20, 21, 22]
    assert row.length_tokens == 9


def test_cut_follows_the_flat_order_and_takes_the_objectives_answer():
    groups = [
        Group(f"g{n}", TASK, tuple(
            Episode(TASK, f"g{n}", m, np.array([1]), (turn("model", 5, 6),), (), "stop", verdict=good(float(m == n)))
            for m in range(2)
        ))
        for n in range(2)
    ]  # fmt: skip
    assignment = assign(resolve("grpo", {}), to_responses(groups))
    rows = cut(groups, assignment)
    assert [(r.group_id, r.member, r.episode) for r in rows] == [("g0", 0, 0), ("g0", 1, 1), ("g1", 0, 2), ("g1", 1, 3)]
    assert [r.advantage[0] for r in rows] == [1.0, -1.0, -1.0, 1.0]
    assert all((r.weight == a.weight).all() for r, a in zip(rows, assignment.responses, strict=True))


def test_dead_rows_are_skipped_and_void_rows_too():
    members = [episode(m, turn("model", 5), verdict=good(1.0)) for m in range(3)]
    members.append(episode(3, turn("model", 5), verdict=Verdict(void("broken"))))
    objective = resolve("grpo", {"kl.estimator": "none", "kl.coefficient": 0.0})
    rows = cut([group(*members)], assign(objective, to_responses([group(*members)])))
    assert [r.skipped for r in rows] == [True] * 4


def test_an_episode_without_a_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match="group 000001-0000, member 4"):
        cut([group(episode(4, turn("model", 5), prompt=()))])
