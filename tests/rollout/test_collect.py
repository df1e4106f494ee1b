"""Turn-taking on scripted policies: what was drawn is what is kept, what the environment said is masked."""

import asyncio

import numpy as np
import pytest
from tests.rollout.scripted import EOS, TASKS, TOKENIZER, Echo, Judge, N, V, Y, coin, plan, player, run

from gropius.errors import DataError, EngineError
from gropius.rollout.collect import collect
from gropius.rollout.engine import pass_rate_policy
from gropius.types import EnvironmentStep, Sampling


def test_groups_come_in_the_order_of_tasks_with_explicit_identity():
    groups = run(TASKS, plan(first_index=5), player(coin()))
    assert [g.group_id for g in groups] == [f"000012-{i:04d}" for i in range(5, 9)]
    assert [g.task.key for g in groups] == [t.key for t in TASKS]
    assert all([e.member for e in g.episodes] == [0, 1, 2] for g in groups)
    assert all(e.verdict is not None and e.finish_reason == "stop" for g in groups for e in g.episodes)


def test_an_episode_holds_what_was_drawn_the_stop_token_included():
    the_player = player(coin())
    for group in run(TASKS, plan(), the_player):
        for episode in group.episodes:
            assert episode.prompt_ids.tolist() == list(the_player.chat.prompt_ids(group.task.messages()))
            assert episode.response_ids.tolist() in ([Y, EOS], [N, EOS])
            assert episode.loss_mask.all() and episode.completion in ("y", "n")
            assert episode.sampler_logprobs[0] == pytest.approx(np.log(0.5)) and episode.sampler_logprobs[1] == 0


def test_the_same_plan_draws_the_same_episodes_and_a_group_does_not_depend_on_its_company():
    def responses(groups):
        return [[e.response_ids.tolist() for e in g.episodes] for g in groups]

    everything = responses(run(TASKS, plan(group_size=8), player(coin())))
    assert everything == responses(run(TASKS, plan(group_size=8), player(coin())))
    assert everything[2:] == responses(run(TASKS[2:], plan(group_size=8, first_index=2), player(coin())))
    assert everything != responses(run(TASKS, plan(group_size=8, step=13), player(coin())))
    assert len({str(group) for group in everything}) > 1


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_environment_text_is_in_the_ids_and_masked_and_never_encoded_with_the_models_words(style):
    the_player = player(coin(0.0), Echo, style=style)
    (group,) = run(TASKS[:1], plan(max_turns=5, group_size=2), the_player)
    for episode in group.episodes:
        assert [t.role for t in episode.turns] == ["model", "environment", "model", "environment", "model"]
        ids, mask = episode.response_ids.tolist(), episode.loss_mask.tolist()
        assert [i for i, m in zip(ids, mask, strict=True) if m] == [N, EOS] * 3
        masked = TOKENIZER.decode([i for i, m in zip(ids, mask, strict=True) if not m])
        assert masked.count("again") == 2
        assert (episode.sampler_logprobs[~episode.loss_mask] == 0).all()
        assert episode.finish_reason == "environment_end"
        assert episode.outcome_step.parts == {"ok": 1.0} and episode.outcome_step.raw == 1.0
        if style == "chat":
            assert TOKENIZER.decode(episode.prompt_ids) + TOKENIZER.decode(ids) == (
                "<bos><user>0?<eos><assistant>n<eos><user>again<eos><assistant>n<eos><user>again<eos><assistant>n<eos>"
            )
        assert [m["role"] for m in episode.messages] == ["user"] + ["assistant", "user"] * 3


def test_later_turns_go_on_in_the_episodes_stream():
    def second_coin(prompt_ids, drawn_ids):
        logits = np.full(V, -np.inf)
        logits[[Y, N]] = 0.0
        if drawn_ids:
            logits[:] = -np.inf
            logits[EOS] = 0.0
        return logits

    class Never(Echo):
        def step(self, reply):
            self.heard.append(reply)
            return EnvironmentStep(({"role": "user", "content": "go"},), len(self.heard) == 40)

    (group,) = run(TASKS[:1], plan(max_turns=40, group_size=1), player(second_coin, Never))
    said = [t.text for t in group.episodes[0].turns if t.role == "model"]
    assert len(said) == 40 and 8 < said.count("y") < 32


def test_each_limit_ends_an_episode_with_its_own_reason():
    def babble(prompt_ids, drawn_ids):
        logits = np.full(V, -np.inf)
        logits[Y] = 0.0
        return logits

    def reason(policy, environment=None, the_plan=None, **settings):
        (group,) = run(TASKS[:1], the_plan or plan(group_size=1), player(policy, environment, **settings))
        return group.episodes[0]

    assert reason(babble).finish_reason == "length" and reason(babble).truncated
    cut = reason(babble, Echo, plan(group_size=1, max_turns=9))
    assert cut.finish_reason == "length" and cut.outcome_step is not None and len(cut.turns) == 1
    assert reason(coin(0.0), Echo, plan(group_size=1, max_turns=2)).finish_reason == "tool_limit"
    assert reason(coin(1.0), Echo, plan(group_size=1, max_turns=2)).finish_reason == "environment_end"
    short = reason(coin(0.0), Echo, plan(group_size=1, max_turns=9, max_episode_tokens=12))
    assert short.finish_reason == "length" and len(short.response_ids) <= 12 and short.turns[-1].role == "model"
    one = reason(babble, None, plan(group_size=1, max_episode_tokens=3))
    assert one.finish_reason == "length" and len(one.response_ids) == 3
    full = reason(coin(0.0), Echo, plan(group_size=1, max_turns=9), context_length=12)
    assert full.finish_reason == "length" and full.turns[-1].role == "model"


@pytest.mark.parametrize("budget", range(1, 30))
def test_no_episode_passes_its_token_budget_whatever_the_budget(budget):
    the_plan = plan(group_size=1, max_turns=9, max_episode_tokens=budget)
    (group,) = run(TASKS[:1], the_plan, player(coin(0.0), lambda task: Echo(task, turns=9)))
    episode = group.episodes[0]
    assert len(episode.response_ids) <= budget
    assert episode.turns[-1].role == "model" and len(episode.turns[-1].token_ids) > 0


@pytest.mark.parametrize("bound", ["budget", "context"])
def test_an_episode_goes_on_as_long_as_a_token_fits_behind_the_environments_words(bound):
    def episode(most=0, **settings):
        alone = plan(group_size=1, max_turns=9, max_episode_tokens=most)
        return run(TASKS[:1], alone, player(coin(0.0), lambda task: Echo(task, turns=9), **settings))[0].episodes[0]

    free = episode()
    sizes = [len(turn.token_ids) for turn in free.turns]
    before = len(free.prompt_ids)
    for most in range(1, sum(sizes) + 3):
        expected = 0
        for place, size in enumerate(sizes):
            if place % 2 and size >= most - expected:
                break
            expected += min(size, most - expected) if bound == "budget" else size
            if bound == "budget" and expected == most:
                break
        found = episode(most) if bound == "budget" else episode(context_length=before + most)
        assert len(found.response_ids) == expected, most


def test_an_environment_that_raises_voids_its_own_episode_only():
    made = []

    def environment(task):
        made.append(Echo(task, fails=len(made) == 1))
        return made[-1]

    (group,) = run(TASKS[:1], plan(max_turns=5), player(coin(), environment))
    reasons = [e.finish_reason for e in group.episodes]
    assert reasons.count("error") == 1 and "KeyError" in next(e.error for e in group.episodes if e.error)


def test_an_environment_that_cannot_start_or_starts_siblings_differently_is_refused():
    class Broken(Echo):
        def start(self):
            raise RuntimeError("no board")

    with pytest.raises(DataError, match="no board"):
        run(TASKS[:1], plan(), player(coin(), Broken))
    count = []

    class Different(Echo):
        def start(self):
            count.append(1)
            return ({"role": "user", "content": str(len(count))},)

    with pytest.raises(DataError, match="siblings"):
        run(TASKS[:1], plan(), player(coin(), Different))


def test_an_episode_is_scored_while_others_still_decode():
    def uneven(prompt_ids, drawn_ids):
        logits = np.full(V, -np.inf)
        long = TOKENIZER.decode(list(prompt_ids)).count("0?")
        logits[EOS if drawn_ids and (not long or len(drawn_ids) > 40) else Y] = 0.0
        return logits

    judge = Judge()
    the_player = player(uneven, scorer=judge)
    judge.engine = the_player.engine
    run(TASKS, plan(sampling=Sampling(60, stop_token_ids=(EOS,)), group_size=1), the_player)
    assert judge.seen[-1] == [("000012-0000", 0)] and judge.drawing[0] >= 1 and judge.drawing[-1] == 0


def test_a_scorer_of_groups_gets_siblings_together_and_one_of_episodes_each_alone():
    together, alone = Judge("group"), Judge()
    run(TASKS, plan(), player(coin(), scorer=together))
    run(TASKS, plan(), player(coin(), scorer=alone))
    assert sorted(together.seen) == [[(f"000012-{i:04d}", m) for m in range(3)] for i in range(4)]
    assert sorted(len(call) for call in alone.seen) == [1] * 12


def test_a_greedy_baseline_is_one_more_episode_that_is_no_sibling():
    (group,) = run(TASKS[:1], plan(greedy_baseline=True), player(coin(0.3)))
    assert len(group.episodes) == 3
    assert group.baseline_episode.completion == "n" and group.baseline_episode.verdict.raw == 0.0
    assert group.baseline_episode.member == 3


def test_an_all_failed_group_grows_up_to_its_bound_and_the_others_do_not():
    def hard_zero(prompt_ids):
        return 0.0 if "0?" in TOKENIZER.decode(list(prompt_ids)) else 1.0

    the_player = player(pass_rate_policy(hard_zero, (Y, EOS), (N, EOS), V))
    groups = run(TASKS, plan(grow_limit=8), the_player)
    assert [len(g.episodes) for g in groups] == [8, 3, 3, 3]
    assert [e.member for e in groups[0].episodes] == list(range(8))


def test_a_group_stops_growing_when_one_sibling_succeeds():
    groups = run(TASKS * 16, plan(grow_limit=30), player(coin(0.2)))
    grown = [g for g in groups if len(g.episodes) > 3]
    assert grown
    for group in grown:
        raw = [e.verdict.raw for e in group.episodes]
        assert len(group.episodes) == 30 or any(raw[len(raw) - 3 :])
        assert not any(raw[: len(raw) - 3])


def test_a_dead_engine_ends_the_collection_as_itself_and_leaves_nothing_running():
    the_player = player(coin(), engine={"dies_after": 5, "last_words": "power cut"})
    with pytest.raises(EngineError, match="power cut"):
        run(TASKS, plan(), the_player)
    assert the_player.engine.active == 0


def test_cancelling_a_collection_leaves_nothing_running():
    def endless(prompt_ids, drawn_ids):
        return np.zeros(V)

    the_player = player(endless)

    async def cancelled():
        job = asyncio.create_task(collect(TASKS, plan(sampling=Sampling(10_000)), the_player))
        for _ in range(20):
            await asyncio.sleep(0)
        assert the_player.engine.active == 12
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(cancelled()) == []
    assert the_player.engine.active == 0


def test_a_plan_that_draws_nothing_is_refused():
    for change in ({"group_size": 0}, {"max_turns": 0}, {"sampling": Sampling(0)}):
        with pytest.raises(DataError):
            plan(**change)
