"""Branches leave their trunk where the rule says, take over exactly what stands before, and say who drew what."""

from collections import Counter

import numpy as np
import pytest
from tests.rollout.scripted import EOS, SAMPLING, TASKS, TOKENIZER, Echo, N, V, Y, coin, plan, player, run

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.rollout.branch import Branching, choose, demonstrated, origin_of
from gropius.rollout.course import Course, Limits, Said
from gropius.rollout.fitting import fitting
from gropius.tasks.base import TaskSet
from gropius.types import EnvironmentStep, Task

LIMITS = Limits(SAMPLING, 9, 0, None)


def said(ids, logprobs=None, reason="stop"):
    values = np.array(logprobs if logprobs is not None else [-1.0] * len(ids), np.float32)
    return Said(np.array(ids, np.int64), values, values, np.zeros(len(ids), np.int64), reason)


def trunk(*turns, reason="stop"):
    return Course((1, 2), [], LIMITS, said=list(turns), reason=reason)


def left_at(course, rule, member):
    """(whole turns, tokens of the next) that a branch takes over."""
    taken = choose(course, rule, (0, 1, 2, member))
    whole = [turn for turn in taken if turn.finish_reason is not None]
    assert all(turn is course.said[i] for i, turn in enumerate(whole)) and len(taken) - len(whole) <= 1
    if len(taken) > len(whole):
        begun, of = taken[-1], course.said[len(whole)]
        assert begun.token_ids.tolist() == of.token_ids[: len(begun)].tolist() and 0 < len(begun) < len(of)
    return len(whole), len(taken[-1]) if len(taken) > len(whole) else 0


def test_a_random_branch_leaves_at_every_later_place_alike_and_never_at_the_beginning():
    course, branches = trunk(said([5, 6]), said([7]), said([8, 9, EOS])), 3000
    places = {
        "turn": [(1, 0), (2, 0)],
        "token": [(0, 1), (1, 0), (2, 0), (2, 1), (2, 2)],
    }
    for at, possible in places.items():
        found = Counter(left_at(course, Branching(2, at), member) for member in range(branches))
        assert set(found) == set(possible)
        expected = branches / len(possible)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in found.values())
        again = [left_at(course, Branching(2, at), member) for member in range(9)]
        assert again == [left_at(course, Branching(2, at), member) for member in range(9)]


def test_a_surprising_branch_leaves_where_the_trunk_drew_what_was_least_likely_the_first_of_equals():
    course = trunk(said([5, 6], [-9.0, -1.0]), said([7, 8], [-2.0, -3.0]), said([9, EOS], [-2.0, -3.0]))
    assert left_at(course, Branching(2, "token", "surprising"), 1) == (1, 1)
    assert left_at(course, Branching(2, "turn", "surprising"), 1) == (1, 0)
    empty = trunk(said([5]), said([], []), said([6], [-0.5]))
    assert left_at(empty, Branching(2, "turn", "surprising"), 1) == (2, 0)


def test_a_trunk_without_a_later_place_or_one_that_failed_has_no_branches():
    for at, short in (("turn", trunk(said([5, 6, EOS]))), ("token", trunk(said([EOS])))):
        assert choose(short, Branching(2, at), (0,)) == ()
    for reason in ("error", "cancelled"):
        assert choose(trunk(said([5]), said([6]), reason=reason), Branching(2), (0,)) == ()
    assert Branching.of(1, "turn", "random") is None and Branching.of(2, "turn", "random") == Branching(2)


def second_coin(prompt_ids, drawn_ids):
    """A letter of chance, then the end of the turn."""
    logits = np.full(V, -np.inf)
    logits[[EOS] if drawn_ids else [Y, N]] = 0.0
    return logits


class Long(Echo):
    """Four replies, whatever they are."""

    def step(self, reply):
        self.heard.append(reply)
        message = {"role": "user", "content": f"heard {len(self.heard)}"}
        return EnvironmentStep((message,), len(self.heard) == 4, {"ok": 1.0}, 1.0)


def test_in_a_group_the_beginning_is_the_trunks_and_the_rest_is_the_branchs_own():
    rule = plan(max_turns=9, group_size=8, branching=Branching(4))
    for group in run(TASKS, rule, player(second_coin, Long)):
        for episode in group.episodes:
            home = group.episodes[episode.member // 4 * 4]
            if episode is home:
                assert episode.origin is None
                continue
            shared = int((episode.origin == home.member).sum())
            assert (episode.origin[:shared] == home.member).all()
            assert (episode.origin[shared:] == episode.member).all()
            assert episode.response_ids[:shared].tolist() == home.response_ids[:shared].tolist()
            assert episode.response_ids[shared - 1] == EOS and episode.loss_mask[shared - 1]
            assert [len(t.token_ids) for t in episode.turns[::2]] == [2, 2, 2, 2]
    lone = [e for g in run(TASKS, plan(max_turns=9, group_size=8), player(second_coin, Long)) for e in g.episodes]
    assert all(episode.origin is None for episode in lone)


def test_a_branch_of_a_branched_trunk_keeps_who_drew_it_and_none_inherits_nothing():
    (group,) = run(TASKS[:1], plan(max_turns=9, group_size=2, branching=Branching(2)), player(second_coin, Long))
    first, second = group.episodes
    found = origin_of(second, second, 8)
    assert found.tolist()[: len(second.origin)] == second.origin.tolist()
    assert origin_of(first, first, 0) is None and origin_of(None, first, 3) is None


def test_an_environment_that_answers_the_same_replies_differently_cannot_be_branched():
    made = []

    class Fickle(Long):
        def step(self, reply):
            made.append(1)
            step = super().step(reply)
            return EnvironmentStep(({"role": "user", "content": f"call {len(made)}"},), step.done, step.parts, step.raw)

    with pytest.raises(DataError, match="answers the same replies differently"):
        run(TASKS[:1], plan(max_turns=9, group_size=8, branching=Branching(8)), player(second_coin, Fickle))


def taught(environment=None, solution="yn"):
    return TaskSet("t", TASKS, (), lambda task: solution, environment, (), None, (), "")


def test_a_demonstration_is_the_teachers_words_with_stop_tokens_and_the_environments_answers_masked():
    chat = ChatFormat(TOKENIZER, stop_token_ids=(EOS,))
    alone = demonstrated(TASKS[0], taught(), chat, ("g", 2))
    assert alone.response_ids.tolist() == [Y, N, EOS] and alone.loss_mask.all() and alone.demonstration
    assert (alone.member, alone.group_id, alone.finish_reason) == (2, "g", "stop")
    talk = tuple(
        {"role": role, "content": text} for role, text in (("assistant", "n"), ("user", "?"), ("assistant", "y"))
    )
    episode = demonstrated(TASKS[0], taught(Echo, talk), chat, ("g", 0))
    drawn = episode.response_ids[episode.loss_mask].tolist()
    assert drawn == [N, EOS, Y, EOS] and (episode.sampler_logprobs == 0).all()
    assert "again" in TOKENIZER.decode(episode.response_ids[~episode.loss_mask])  # the environment's own answer
    assert episode.finish_reason == "environment_end" and episode.outcome_step.raw == 1.0
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant", "user"]
    longer = (*talk, {"role": "user", "content": "?"}, {"role": "assistant", "content": "n"})
    assert len(demonstrated(TASKS[0], taught(Echo, longer), chat, ("g", 0)).response_ids) == len(episode.response_ids)


def test_the_last_siblings_of_a_group_are_demonstrations():
    the_player = player(coin(0.0))
    the_player.tasks = taught(solution="y")
    (group,) = run(TASKS[:1], plan(group_size=4, demonstrations=2), the_player)
    assert [e.demonstration for e in group.episodes] == [False, False, True, True]
    assert [e.completion for e in group.episodes] == ["n", "n", "y", "y"]


def test_prompts_that_leave_no_room_for_one_token_are_dropped_from_their_half_or_refused():
    chat = ChatFormat(TOKENIZER, stop_token_ids=(EOS,))
    tasks = [Task(f"t{size}", "x" * size) for size in (1, 5, 6, 9)]
    room = len(chat.prompt_ids(tasks[1].messages())) + 1
    found = TaskSet("t", tasks, [Task(f"h{i}", "x" * i) for i in (2, 7)], None, None, (), None, (), "")
    kept, notes = fitting(found, chat, room, "drop")
    assert [task.key for task in kept.train] == ["t1", "t5"] and [task.key for task in kept.held_out] == ["h2"]
    assert [note.split(":")[0] for note in notes] == ["2 train rows dropped", "1 held-out rows dropped"]
    whole, nothing = fitting(found, chat, room + 4, "refuse")
    assert (list(whole.train), list(whole.held_out), nothing) == (tasks, list(found.held_out), [])
    with pytest.raises(DataError, match=rf"t6: the prompt has {room} tokens .*context is {room}.*2 such train rows"):
        fitting(found, chat, room, "refuse")
