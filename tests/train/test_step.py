"""The learner's step: what may change the gradient and what may not."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from batches import batch, build, row

from gropius.objective.explain import explain
from gropius.objective.loss import Tokens, loss
from gropius.objective.presets import resolve
from gropius.objective.selection import Response, assign
from gropius.train.checkpoint import weight_digest
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.sequences import assigned
from gropius.train.step import Learner, LearnerSettings

WITHOUT_KL = {"kl.estimator": "none", "kl.coefficient": 0.0}


def learner(model=None, objective=None, **settings) -> Learner:
    model = build("llama") if model is None else model
    objective = objective or resolve("grpo", WITHOUT_KL)
    optimiser = Optimiser(model, OptimiserSettings(learning_rate=1e-2, grad_clip=0.0))
    return Learner(Forward.of(model), objective, optimiser, LearnerSettings(**settings))


def gradient(made: Learner, rows, **given):
    """The accumulated gradient of one update, flat, and its report; no weight is moved."""
    kept = []
    made.optimiser.step = lambda: kept.append(flat_gradient(made)) or Taken()
    report = made.update(rows, **given)
    made.optimiser.zero()
    return kept[0], report


class Taken:
    grad_norm, learning_rate, taken = 1.0, 1.0, True


def flat_gradient(made: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in made.optimiser.parameters])


def near(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-9) -> bool:
    return float((a - b).norm()) <= bound * float(b.norm())


def anchors(rows, seed=5):
    stream = np.random.default_rng(seed)
    return [stream.normal(-4, 0.3, len(s.mask)) for s in rows]


OBJECTIVES = ["grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "gmpo", "sapo"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_neither_packs_nor_sharing_nor_budget_nor_order_change_the_gradient(name):
    objective = resolve(name, {})
    rows = batch(seed=2)
    given = {"anchor": anchors(rows), "reference": anchors(rows, 6)}
    expected, report = gradient(learner(objective=objective, share_prompts=False, pack_tokens=1), rows, **given)
    assert report.packs == report.live > 5
    order = np.random.default_rng(3).permutation(len(rows))
    shuffled = {key: [values[i] for i in order] for key, values in given.items()}
    variants = [
        gradient(learner(objective=objective), rows, **given),
        gradient(learner(objective=objective, pack_tokens=40), rows, **given),
        gradient(learner(objective=objective, share_prompts=False), rows, **given),
        gradient(learner(objective=objective), [rows[i] for i in order], **shuffled),
    ]
    assert variants[0][1].packs == 1 < variants[1][1].packs
    for found, other in variants:
        assert near(found, expected)
        assert other.loss == pytest.approx(report.loss, rel=1e-9)


def test_plain_padded_rows_give_the_gradient_of_the_pack():
    rows = batch(seed=4)
    model = build("qwen3")
    expected, _ = gradient(learner(model), rows)
    plain = Learner(
        Forward.of(model, packed=False),
        learner(model).objective,
        Optimiser(model, OptimiserSettings()),
        LearnerSettings(),
    )
    found, report = gradient(plain, rows)
    assert near(found, expected)
    assert report.packs == 1


def test_skipping_changes_nothing_but_the_work():
    rows = batch(seed=2)
    expected, whole = gradient(learner(skip=False), rows)
    found, report = gradient(learner(), rows)
    assert near(found, expected)
    assert report.live < whole.live and report.run_tokens < whole.run_tokens
    assert report.logprobs[[s.skipped for s in rows].index(True)] is None
    assert 0 < whole.skipped_compute < report.skipped_compute < 1


def test_what_a_masked_token_is_changes_only_what_the_policy_reads():
    rows = [row([1, 2, 3], [4, 5, 6, 7], mask=[1, 0, 0, 1])]
    found, report = gradient(learner(), rows)
    dirty = dataclasses.replace(
        rows[0],
        advantage=np.where(rows[0].mask, rows[0].advantage, np.nan),
        weight=np.where(rows[0].mask, rows[0].weight, np.inf),
        sampler_logprobs=np.array([0, np.nan, -np.inf, 0], np.float32),
    )
    again, _ = gradient(learner(), [dirty])
    assert torch.equal(found, again)
    assert report.logprobs[0][1] == report.logprobs[0][2] == 0


def test_the_loss_and_its_tokens_are_what_explain_says():
    stream = np.random.default_rng(8)
    rows = batch(seed=6, groups=3)
    responses = [Response(group=s.group_id, reward=float(stream.integers(0, 2)), mask=s.mask) for s in rows]
    objective = resolve("dapo", {})
    rows = assigned(rows, assign(objective, responses))
    anchor = anchors(rows)
    _, report = gradient(learner(objective=objective), rows, anchor=anchor)
    policy = learner(skip=False).score([dataclasses.replace(s, skipped=False) for s in rows]).logprobs
    groups: dict = {}
    for s, r, p, a in zip(rows, responses, policy, anchor, strict=True):
        p = np.zeros(len(a)) if p is None else p
        entry = {"reward": r.reward, "mask": s.mask.tolist(), "policy": p.tolist(), "anchor": a.tolist()}
        groups.setdefault(s.group_id, []).append(entry)
    told = explain({"groups": [{"id": g, "responses": members} for g, members in groups.items()]}, objective)
    assert report.loss == pytest.approx(told["loss"], rel=1e-6)
    assert report.loss == pytest.approx(sum(c.sum() for c in report.contributions if c is not None), rel=1e-5)
    told_flat = [[t["clipped"] for t in r["tokens"]] for g in told["groups"] for r in g["responses"]]
    for found, expected in zip(report.clipped, told_flat, strict=True):
        if found is not None:
            assert found.astype(bool).tolist() == expected


def test_without_an_anchor_the_policy_is_its_own():
    rows = batch(seed=2)
    made = learner()
    expected, _ = gradient(made, rows, anchor=made.score(rows).logprobs)
    found, report = gradient(made, rows)
    assert near(found, expected, 1e-6)
    assert report.metrics["ratio/min"] == report.metrics["ratio/max"] == 1.0


def test_two_updates_with_a_fixed_anchor_move_the_ratio_away_from_one():
    rows = batch(seed=2)
    made = learner()
    anchor = made.score(rows).logprobs
    first, second = made.update(rows, anchor), made.update(rows, anchor)
    assert first.metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert second.metrics["ratio/max"] > 1.0 + 1e-4
    assert (first.taken, second.taken, made.optimiser.steps) == (True, True, 2)


def test_no_live_sequence_means_no_step():
    made = learner()
    before = weight_digest(made.forward.model)
    report = made.update([dataclasses.replace(s, skipped=True) for s in batch()])
    assert (report.taken, report.refused, report.run_tokens, made.optimiser.steps) == (False, "no live sequence", 0, 0)
    assert report.all_tokens > 0 and report.skipped_compute == 1.0
    assert weight_digest(made.forward.model) == before


def test_a_loss_that_is_not_finite_names_its_rows_and_moves_nothing():
    rows = batch(seed=2)
    sick = [i for i, s in enumerate(rows) if not s.skipped and s.mask.sum() > 1][-1]
    assert any(s.skipped for s in rows[:sick])  # so that its place in the pack is not its place in the batch
    own = rows[sick].loss_positions[0]
    weight = rows[sick].weight.copy()
    weight[own] = np.inf
    rows[sick] = dataclasses.replace(rows[sick], weight=weight)
    made = learner()
    before = weight_digest(made.forward.model)
    report = made.update(rows)
    assert (report.taken, report.refused, report.culprits) == (False, "the loss is not finite", (sick,))
    assert weight_digest(made.forward.model) == before and made.optimiser.steps == 0
    assert all(p.grad is None for p in made.optimiser.parameters)


def test_a_gradient_that_is_not_finite_names_its_rows_and_moves_nothing():
    rows = batch(seed=2)
    sick = next(i for i, s in enumerate(rows) if not s.skipped and s.mask.sum() > 1)
    weight = np.where(rows[sick].mask, 1e37, 0.0)
    rows[sick] = dataclasses.replace(rows[sick], weight=weight, advantage=np.where(rows[sick].mask, 30.0, 0.0))
    made = learner(build("llama", torch.float32))
    before = weight_digest(made.forward.model)
    report = made.update(rows)
    assert (report.taken, report.refused, report.culprits) == (False, "the gradient is not finite", (sick,))
    assert weight_digest(made.forward.model) == before and made.optimiser.steps == 0


def test_an_update_is_the_same_bits_again():
    digests = set()
    for _ in range(2):
        made = learner(build("gemma3", torch.float32), pack_tokens=60)
        made.update(batch(seed=2))
        digests.add(weight_digest(made.forward.model))
    assert len(digests) == 1


def test_temperature_is_that_of_the_sampler():
    rows = batch(seed=2)
    model = build("llama")
    hot, cold = learner(model, temperature=2.0).score(rows).logprobs, learner(model).score(rows).logprobs
    halved = copy.deepcopy(model)
    with torch.no_grad():
        halved.lm_head.weight /= 2.0
    expected = learner(halved).score(rows).logprobs
    live = next(i for i, s in enumerate(rows) if cold[i] is not None and s.mask.any())
    np.testing.assert_allclose(hot[live], expected[live], rtol=1e-9)
    assert not np.allclose(hot[live], cold[live])


def test_an_anchor_without_a_live_row_is_refused():
    rows = batch(seed=2)
    with pytest.raises(ValueError, match="no log-probabilities"):
        learner().update(rows, [None] * len(rows))


def test_clip_shares_count_the_side_of_the_ratio_over_every_token_with_weight():
    rows = [
        row([1, 2], [3, 4], member=0, advantage=np.array([1.0, 1.0])),
        row([1, 2], [5, 6], member=1, advantage=np.array([-1.0, -1.0])),
        row([1, 2], [7, 8, 9, 10], member=2, advantage=np.zeros(4), skipped=True),
    ]
    made = learner(objective=resolve("dapo", {}))
    policy = [values if values is not None else np.zeros(4) for values in made.score(rows).logprobs]
    # the first row's tokens: ratio e and 1/e with A > 0; the second's the same with A < 0
    anchor = [policy[0] + np.array([-1.0, 1.0]), policy[1] + np.array([-1.0, 1.0]), policy[2]]
    _, report = gradient(made, rows, anchor=anchor)
    assert [c if c is None else c.astype(bool).tolist() for c in report.clipped] == [[True, False], [False, True], None]
    found = {name: report.metrics[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region")}
    assert found == {"low": 1 / 8, "high": 1 / 8, "region": 2 / 8}

    only_high = [dataclasses.replace(rows[0]), rows[2]]
    _, report = gradient(made, only_high, anchor=[anchor[0], anchor[2]])
    assert report.metrics["clip_ratio/high_mean"] == 1 / 6 and report.metrics["clip_ratio/low_mean"] == 0


def test_the_sampler_and_the_kept_tokens_reach_the_objective():
    stream = np.random.default_rng(4)
    given = {**WITHOUT_KL, "ratio.correction": "truncate", "ratio.correction_high": 2.0}
    objective = resolve("grpo", given)
    rows = [dataclasses.replace(s, keep=stream.random(len(s.mask)) < 0.5) for s in batch(seed=2) if not s.skipped]
    made, anchor = learner(objective=objective), anchors(rows)
    policy = made.score(rows).logprobs
    live = [i for i, values in enumerate(policy) if values is not None]

    def flat(pick):
        return torch.from_numpy(np.concatenate([np.asarray(pick(i)) for i in live]))

    tokens = Tokens(
        sequence=flat(lambda i: np.full(len(rows[i].mask), live.index(i))),
        mask=flat(lambda i: rows[i].mask),
        advantage=flat(lambda i: rows[i].advantage),
        weight=flat(lambda i: rows[i].weight),
        sequences=len(live),
        anchor=flat(lambda i: anchor[i]),
        sampler=flat(lambda i: rows[i].sampler_logprobs.astype(np.float64)),
        keep=flat(lambda i: rows[i].keep),
    )
    expected = float(loss(objective, flat(lambda i: policy[i]), tokens).loss)
    assert gradient(made, rows, anchor=anchor)[1].loss == pytest.approx(expected, rel=1e-9)
