"""What a pack is: every live sequence once, every shared prefix once, nothing seen that is not an ancestor."""

from __future__ import annotations

import numpy as np
import pytest
from batches import batch, row
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.train.pack import ancestors, pack

ids = st.integers(1, 3)  # few different tokens, so that prefixes are shared everywhere
rows_of = st.lists(
    st.tuples(st.integers(0, 2), st.lists(ids, min_size=1, max_size=9), st.booleans()), min_size=1, max_size=12
)


def made(drawn):
    prompts = [[1], [1, 2, 3], [2, 2]]
    return [
        row(prompts[g], response, group=f"g{g}", member=n, skipped=skipped)
        for n, (g, response, skipped) in enumerate(drawn)
    ]


@given(rows_of, st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_live_sequence_can_be_read_back_from_exactly_one_pack(drawn, budget, share):
    rows = made(drawn)
    packs = pack(rows, budget_tokens=budget, share=share)
    seen = [i for one in packs for i in one.index]
    assert sorted(seen) == [i for i, s in enumerate(rows) if not s.skipped]
    for one in packs:
        start = 0
        for sequence, i, path in zip(one.sequences, one.index, one.paths, strict=True):
            assert sequence is rows[i]
            assert one.ids[path].tolist() == sequence.run_ids.tolist()
            assert one.positions[path].tolist() == list(range(len(path)))
            size = len(sequence.loss_positions)
            assert one.targets[start : start + size].tolist() == sequence.response_ids.tolist()
            everything = np.concatenate([sequence.prompt_ids, sequence.response_ids])
            predicted_from = one.positions[one.source[start : start + size]]
            assert everything[predicted_from + 1].tolist() == sequence.response_ids.tolist()
            start += size
        assert start == len(one.source) == len(one.owner)


@given(rows_of, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_ancestors_of_a_token_are_its_own_prefix(drawn, share):
    for one in pack(made(drawn), budget_tokens=1000, share=share):
        for path in one.paths:
            for depth, token in enumerate(path.tolist()):
                assert ancestors(token, one).tolist() == path[:depth].tolist()


@given(rows_of, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_pack_keeps_its_budget_unless_it_holds_one_sequence(drawn, budget):
    for one in pack(made(drawn), budget_tokens=budget):
        assert one.run_tokens <= budget or len(one.sequences) == 1


@given(rows_of, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_in_one_pack_every_distinct_prefix_is_run_once_whatever_the_order(drawn, random):
    rows = made(drawn)
    prefixes = {tuple(s.run_ids[:n]) for s in rows if not s.skipped for n in range(1, len(s.run_ids) + 1)}
    random.shuffle(rows)
    packs = pack(rows, budget_tokens=1000)
    assert sum(one.run_tokens for one in packs) == len(prefixes)


def test_siblings_share_their_prompt_and_it_is_counted():
    prompt = list(range(1, 51))
    rows = [row(prompt, [60 + m, 61, 62], member=m) for m in range(8)]
    (one,) = pack(rows, budget_tokens=1000)
    assert (one.run_tokens, one.row_tokens) == (50 + 8 * 2, 8 * 53)
    (plain,) = pack(rows, budget_tokens=1000, share=False)
    assert plain.run_tokens == 8 * 52


def test_a_group_larger_than_the_budget_repeats_its_prompt():
    rows = [row([1, 2, 3, 4], [10 + m, 20, 30], member=m) for m in range(6)]
    packs = pack(rows, budget_tokens=8)
    assert [one.run_tokens for one in packs] == [8, 8, 8]
    assert all((one.ids[:4] == [1, 2, 3, 4]).all() for one in packs)


def test_packs_are_even():
    rows = [row([n + 1], [5] * 9, group=str(n), member=n) for n in range(9)]
    assert [one.run_tokens for one in pack(rows, budget_tokens=40)] == [27, 27, 27]


def test_rows_without_a_loss_token_and_tokens_after_the_last_one_are_not_run():
    rows = [row([1, 2], [3, 4, 5, 6], mask=[1, 0, 0, 0]), row([1, 2], [3, 4], mask=[0, 0]), row([1, 2], [])]
    (one,) = pack(rows, budget_tokens=100)
    assert one.index == (0,) and one.ids.tolist() == [1, 2] and one.source.tolist() == [1]
    assert pack(rows[1:], budget_tokens=100) == []


def test_the_same_rows_give_the_same_packs():
    first, second = (pack(batch(seed=3), budget_tokens=50) for _ in range(2))
    assert [one.index for one in first] == [one.index for one in second]
    assert all((a.ids == b.ids).all() for a, b in zip(first, second, strict=True))


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pack(batch(), budget_tokens=0)


def test_turns_of_one_conversation_that_were_cut_apart_share_their_growing_history():
    history = list(range(1, 7))
    turns = [[20, 21, 22], [30, 31], [40, 41, 42, 43]]
    rows, prompt = [], history
    for n, turn in enumerate(turns):  # each row's prompt is all that came before, the environment's words (90) included
        rows.append(row(prompt, turn, member=n))
        prompt = [*prompt, *turn, 90]
    (one,) = pack(rows, budget_tokens=1000)
    last = rows[-1].run_ids
    assert one.run_tokens == len(last) and one.ids[one.paths[2]].tolist() == last.tolist()
    assert sum(len(r.run_ids) for r in rows) > 2 * one.run_tokens
    assert one.targets.tolist() == [t for turn in turns for t in turn]
    order = [2, 0, 1]
    assert pack([rows[i] for i in order], budget_tokens=1000)[0].run_tokens == one.run_tokens


def test_packs_are_balanced_by_cost_and_not_by_number_of_rows():
    long = [row([n + 1] * 2, [5] * size, group=f"l{n}", member=n) for n, size in enumerate((400, 300))]
    short = [row([n + 50] * 2, [6] * 10, group=f"s{n}", member=2 + n) for n in range(20)]
    packs = pack(long + short, budget_tokens=600)
    costs = [one.cost for one in packs]
    assert max(costs) <= 1.1 * min(costs)
    assert len({len(one.sequences) for one in packs}) > 1
    for one in packs:
        pairs = sum(len(path) * (len(path) + 1) / 2 for path in one.paths)
        assert one.cost == pytest.approx(one.run_tokens + pairs / 8192)
