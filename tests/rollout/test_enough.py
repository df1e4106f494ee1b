"""Over-sampling with an early stop: what comes out depends on what was drawn, never on who was fast."""

import asyncio
import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from tests.rollout.scripted import EOS, TASKS, TOKENIZER, Echo, Judge, N, V, Y, plan, player

from gropius.errors import RunFolderError
from gropius.rollout.enough import play_until_enough
from gropius.rollout.select import SelectionRule, collect_selected, state_of
from gropius.rollout.waiting import as_json, from_json
from gropius.types import Bound, EnvironmentStep, Request, Sampling, Task

MANY = [Task(f"t{i:02d}", f"{i}?", "y") for i in range(40)]
LONG = Sampling(30, stop_token_ids=(EOS,))


def rambling(prompt_ids, drawn_ids):
    """Right or wrong at the first token, then on and on, with a chance of a fifth to stop after each."""
    logits = np.full(V, -np.inf)
    if not drawn_ids and prompt_ids[-1] not in (Y, N):  # else the prompt holds the beginning of this very answer
        logits[[Y, N]] = 0.0
    else:
        logits[[N, EOS]] = np.log([0.8, 0.2])
    return logits


class Right(Judge):
    """Raw 1 where the reply begins with "y"; slow by a random number of loop turns where asked."""

    def __init__(self, delays=None, unit="episode"):
        super().__init__(unit)
        self.delays = random.Random(delays) if delays is not None else None

    async def score(self, episodes):
        if self.delays is not None:
            for _ in range(self.delays.randrange(90)):
                await asyncio.sleep(0)
        verdicts = await super().score(episodes)
        return [
            type(v)(v.outcome, v.parts, float(e.completion.startswith("y")))
            for v, e in zip(verdicts, episodes, strict=True)
        ]


def select(rule, prompts=4, waiting=(), the_player=None, order=None, **changes):
    order = itertools.count() if order is None else order
    the_player = the_player or player(rambling, scorer=Right())
    the_plan = plan(**{"sampling": LONG, **changes})

    def draw(n):
        return [MANY[i % len(MANY)] for i in itertools.islice(order, n)]

    return asyncio.run(collect_selected(draw, prompts, the_plan, the_player, rule, waiting))


def shown(selected):
    return (
        [
            [(g.group_id, e.member, e.response_ids.tolist(), e.finish_reason) for e in g.episodes]
            for g in selected.groups
        ],
        [g.group_id for g in selected.dropped],
        [as_json(group) for group in selected.waiting],
        selected.budget,
    )


@pytest.mark.parametrize(
    ("cut", "dead", "unit"),
    [("abort", "keep", "group"), ("resume", "drop", "episode"), ("resume", "refill", "episode")],
)
def test_the_outcome_does_not_depend_on_how_long_anyone_took(cut, dead, unit):
    rule = SelectionRule(dead, oversample=2.0, cut=cut)
    told = [shown(select(rule, the_player=player(rambling, scorer=Right(seed, unit)))) for seed in (None, 1, 2)]
    assert told[0] == told[1] == told[2]
    assert len(told[0][0]) == 4 and told[0][3].begun == 8


def test_the_batch_is_full_at_the_fewest_tokens_by_which_enough_groups_are_complete():
    everything = select(SelectionRule("keep"), prompts=8).groups
    length = {g.group_id: max(len(e.response_ids) for e in g.episodes) for g in everything}
    early = select(SelectionRule("keep", oversample=2.0), prompts=4)
    assert {g.group_id for g in early.groups} == set(sorted(length, key=lambda name: (length[name], name))[:4])
    at = sorted(length.values())[3]
    cut = [g for g in everything if g.group_id not in {g.group_id for g in early.groups}]
    tokens = sum(min(at, len(e.response_ids)) for g in cut for e in g.episodes)
    assert early.budget.aborted == 12 and early.budget.aborted_tokens == tokens and not early.waiting
    assert [g.group_id for g in early.groups] == sorted(g.group_id for g in early.groups)


def test_only_groups_that_carry_signal_make_a_batch_full():
    selected = select(SelectionRule("refill", oversample=3.0), prompts=3)
    assert [state_of(g) for g in selected.groups] == ["informative"] * 3
    assert all(state_of(g) != "informative" for g in selected.dropped)
    budget = selected.budget
    assert budget.begun * 3 == budget.responses + budget.aborted and budget.begun == 9


def test_without_enough_signal_nothing_is_cut_and_refill_goes_on():
    selected = select(
        SelectionRule("refill", refill_attempts=2, oversample=1.5), the_player=player(lambda p, d: never_right(d))
    )
    assert selected.budget.begun == 18 and selected.budget.aborted == 0 and len(selected.dropped) == 18
    assert selected.shortfall is not None and selected.shortfall.pass_rates["0"] == 18


def never_right(drawn_ids):
    logits = np.full(V, -np.inf)
    logits[EOS if drawn_ids else N] = 0.0
    return logits


def test_the_engine_stops_drawing_soon_after_the_batch_is_full():
    asked = {"n": 0}

    def counted(prompt_ids, drawn_ids):
        asked["n"] += 1
        logits = np.full(V, -np.inf)
        long = TOKENIZER.decode(list(prompt_ids)).count("<user>0?")
        logits[EOS if drawn_ids and not long else Y] = 0.0
        return logits

    select(SelectionRule("keep", oversample=1.5), prompts=2, the_player=player(counted))
    assert asked["n"] < 3 * 30 / 2  # three siblings of the long group would have drawn 30 tokens each


def test_a_resumed_group_goes_on_where_it_was_cut_in_its_own_streams():
    whole = {g.group_id: g for g in select(SelectionRule("keep"), prompts=8).groups}
    order = itertools.count()
    rule = SelectionRule("keep", oversample=2.0, cut="resume")
    first = select(rule, order=order)
    assert len(first.waiting) == 4 and first.budget.waiting == 12
    stored = json.loads(json.dumps([as_json(group) for group in first.waiting], allow_nan=False))
    tasks = player(rambling).tasks
    assert len(tasks.train) == len(TASKS)

    class Set:
        train = MANY

    second = select(rule, waiting=from_json(stored, Set), order=order, step=13)
    assert second.budget.resumed == 12 and second.budget.resumed_tokens == first.budget.waiting_tokens
    assert second.budget.begun == 4
    resumed = [g for g in second.groups if g.group_id in whole]
    assert resumed
    for group in resumed:
        for episode, same in zip(group.episodes, whole[group.group_id].episodes, strict=True):
            assert episode.response_ids.tolist() == same.response_ids.tolist()
            assert np.array_equal(episode.sampler_logprobs, same.sampler_logprobs)
            assert episode.finish_reason == same.finish_reason and episode.verdict is not None


def test_every_token_of_a_resumed_episode_carries_the_version_that_drew_it():
    rule = SelectionRule("keep", oversample=2.0, cut="resume")
    the_player = player(rambling, scorer=Right())
    the_player.engine.set_policy(7, "old")
    order = itertools.count()
    first = select(rule, the_player=the_player, order=order)
    the_player.engine.set_policy(9, "new")
    second = select(rule, the_player=the_player, order=order, waiting=first.waiting, step=13)
    begun = {(g.step, g.index): g for g in first.waiting}
    several = 0
    for group in second.groups:
        old = begun.get((12, int(group.group_id[-4:]))) if group.group_id.startswith("000012") else None
        for episode in group.episodes:
            if old is None:
                assert episode.token_versions is None and episode.policy_version == 9
                continue
            drawn = sum(len(turn) for turn in old.said[episode.member])
            assert episode.token_versions.tolist() == [7] * drawn + [9] * (len(episode.response_ids) - drawn)
            several += len(set(episode.token_versions.tolist())) == 2
    assert several


def test_turns_and_environments_are_gone_through_again_not_drawn_again():
    class Thrice(Echo):
        def step(self, reply):
            self.heard.append(reply)
            return EnvironmentStep(({"role": "user", "content": "again"},), len(self.heard) == 3, {}, 1.0)

    settings = {"max_turns": 5}
    whole = select(SelectionRule("keep"), prompts=8, the_player=player(rambling, Thrice), **settings).groups
    same = {g.group_id: g for g in whole}
    rule = SelectionRule("keep", oversample=2.0, cut="resume")
    waiting, order, seen = (), itertools.count(), set()
    for step in range(12, 15):
        found = select(rule, the_player=player(rambling, Thrice), order=order, waiting=waiting, step=step, **settings)
        waiting = found.waiting
        for group in found.groups:
            if group.group_id in same:
                seen.add(group.group_id)
                for episode, other in zip(group.episodes, same[group.group_id].episodes, strict=True):
                    assert episode.response_ids.tolist() == other.response_ids.tolist()
                    assert episode.loss_mask.tolist() == other.loss_mask.tolist()
                    assert episode.messages == other.messages
                    assert episode.finish_reason == "environment_end" == other.finish_reason
    assert len(seen) > 3


def test_a_waiting_group_of_a_task_that_is_gone_is_refused():
    waiting = select(SelectionRule("keep", oversample=2.0, cut="resume")).waiting
    rows = [as_json(group) for group in waiting]

    class Set:
        train = MANY[:1]

    with pytest.raises(RunFolderError, match="no such task"):
        from_json(rows, Set)
    assert from_json([], Set) == []


def test_a_bound_ends_a_response_as_cancelled_and_leaves_what_was_drawn():
    bound = Bound()

    async def course():
        engine = player(lambda p, d: np.where(np.arange(V) == Y, 0.0, -np.inf)).engine
        request = Request((2,), Sampling(50), (1, 2, 3, 4), bound=bound, spent=3)
        job = asyncio.create_task(engine.complete(request))
        for _ in range(8):
            await asyncio.sleep(0)
        bound.limit = 10
        return await job

    completion = asyncio.run(course())
    assert completion.finish_reason == "cancelled" and len(completion.token_ids) == 7


def longest(group):
    return max(len(episode.response_ids) for episode in group.episodes)


def test_what_is_cut_has_drawn_exactly_as_many_tokens_as_the_last_group_that_was_needed():
    whole = {group.task.key: group for group in select(SelectionRule(), prompts=8).groups}
    rule = SelectionRule(oversample=2.0, cut="resume")
    chosen = select(rule, prompts=4)
    assert len(chosen.groups) == len(chosen.waiting) == 4
    at = max(map(longest, chosen.groups))
    for begun in chosen.waiting:
        drawn = [sum(map(len, member)) for member in begun.said]
        full = [len(episode.response_ids) for episode in whole[begun.task.key].episodes]
        assert drawn == [min(at, length) for length in full] and max(full) >= at
    later = select(rule, prompts=4, waiting=chosen.waiting, order=itertools.count(8), step=13)
    assert len(later.groups) == len(later.waiting) == 4  # what waited takes seats as fresh tasks do


def test_of_groups_that_do_not_count_those_are_complete_that_ended_by_then_and_no_seat_is_lost():
    tasks, the_plan = MANY[:12], plan(sampling=LONG)
    spent = {group.task.key: longest(group) for group in select(SelectionRule(), prompts=12).groups}
    at = next(n for n, count in Counter(sorted(spent.values())).items() if count > 1 and n > min(spent.values()))
    last, tied, *_ = (key for key, n in spent.items() if n == at)
    counting = {last, *(key for key, n in spent.items() if n < at)} - {min(spent, key=spent.get)}
    seating = (tasks, the_plan, player(rambling, scorer=Right()), ())
    found, cut = asyncio.run(play_until_enough(seating, len(counting), lambda group: group.task.key in counting))
    complete = {group.task.key for group in found}
    assert complete == {key for key, n in spent.items() if n < at or key in counting or n == at}
    assert tied in complete and complete | {begun.task.key for begun in cut} == set(spent)
    assert not complete & {begun.task.key for begun in cut}
