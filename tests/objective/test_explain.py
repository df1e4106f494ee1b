"""`explain`: design.md 4.2 exactly, both forms; every refusal names its place."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from drawn import close
from entries import batch, entry

import gropius
from gropius import explain, explain_rewards
from gropius.errors import ObjectiveError
from gropius.objective.presets import PRESETS

NO_KL = {"kl.estimator": "none"}


def pair(**first: Any) -> dict[str, Any]:
    """Two siblings with every array; `first` changes the first."""
    one = {
        "reward": 1.0, "length": 3, "policy": [-1.1, -0.28, -2.0], "anchor": [-1.2, -0.5, -2.3],
        "sampler": [-1.21, -0.47, -3.1], "reference": [-1.15, -0.08, -2.3], "mask": [1, 1, 1], "truncated": False,
        "status": "scored",
    }  # fmt: skip
    other = {"reward": 0.0, "policy": [-1.2], "anchor": [-0.9], "sampler": [-0.9], "reference": [-1.3]}
    return {"groups": [{"id": "q1", "responses": [one | first, other]}]}


def without(*names: str, **first: Any) -> dict[str, Any]:
    """The pair without some arrays."""
    made = pair(**first)
    for item in made["groups"][0]["responses"]:
        for name in names:
            item.pop(name, None)
    return made


def cells(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [t for g in answer["groups"] for r in g["responses"] for t in r["tokens"]]


# --- the structure ------------------------------------------------------------------------------------------------


def test_the_example_of_the_design() -> None:
    """The shared batch under grpo: loss 0.1715…, 8 responses, 18 tokens, clip fraction 0.278, the first token's row."""
    inputs, _ = entry("loss_grpo_deepseekmath")
    answer = explain(batch(inputs))
    assert list(answer)[:6] == ["objective", "formula", "loss", "denominator", "groups", "metrics"]
    close(answer["loss"], 0.1715, atol=1e-4)
    assert answer["denominator"] == {"responses": 8, "tokens": 18, "prompts": 2}
    close(answer["metrics"]["clip_fraction"], 0.278, atol=5e-4)
    group = answer["groups"][0]
    assert (group["id"], group["mean"], group["std"], group["state"]) == ("0", 0.5, 0.5, "informative")
    first = group["responses"][0]
    assert first["advantage"] == 1.0 and first["skipped"] is False
    wanted = {
        "weight": 0.0417,
        "ratio": 1.105,
        "surrogate": 1.105,
        "kl": 0.0012,
        "contribution": -0.046,
        "gradient": -0.046,
    }
    for key, value in wanted.items():
        close(first["tokens"][0][key], value, atol=5e-4)
    assert first["tokens"][0]["clipped"] is False
    assert first["tokens"][1]["clipped"] is True


def test_the_answer_is_strict_json_and_says_every_field() -> None:
    answer = explain(pair())
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer["objective"] == PRESETS["grpo"].objective.as_dict()
    assert answer["formula"].startswith("loss = Σ_t 1/(n·L_i)")
    assert set(cells(answer)[0]) == {"weight", "ratio", "clipped", "surrogate", "kl", "contribution", "gradient"}


@pytest.mark.parametrize("name", PRESETS)
def test_contributions_add_up_to_the_loss_and_gradients_are_its_derivatives(name: str) -> None:
    given = pair()
    for item in given["groups"][0]["responses"]:
        extra = ("values", "energy", "policy_entropy", "entropy")
        item |= {array: [0.1 + 0.2 * t for t in range(len(item["policy"]))] for array in extra}
    answer = explain(given, name)
    close(math.fsum(t["contribution"] for t in cells(answer)), answer["loss"])
    if PRESETS[name].objective.surrogate.kind in ("capped", "divergence_mask", "gamma_gate"):
        return  # the detached ratio makes the value's derivative another number, by design
    if PRESETS[name].objective.ratio.level == "sequence_token":
        return
    step = 1e-6
    gradients = [[t["gradient"] for t in r["tokens"]] for r in answer["groups"][0]["responses"]]
    anchored = copy.deepcopy(given)
    for i, row in enumerate(gradients):
        for t, slope in enumerate(row):
            losses = []
            for sign in (1, -1):
                moved = copy.deepcopy(anchored)
                moved["groups"][0]["responses"][i]["policy"][t] += sign * step
                losses.append(explain(moved, name)["loss"])
            close((losses[0] - losses[1]) / (2 * step), slope, rtol=1e-5, atol=1e-8)


def test_overrides_and_the_top_level_name_are_the_documented_call() -> None:
    wide = gropius.explain(pair(), objective="grpo", overrides={"surrogate.high": 0.28})
    assert wide["objective"]["surrogate"]["high"] == 0.28
    assert cells(wide)[1]["clipped"] is False
    assert cells(explain(pair()))[1]["clipped"] is True


def test_on_policy_when_the_anchor_is_absent() -> None:
    answer = explain(without("anchor"), overrides=NO_KL)
    assert [t["ratio"] for t in cells(answer)] == [1.0] * 4
    close(answer["loss"], 0.0)
    assert all(t["gradient"] != 0 for t in cells(answer))


def test_without_log_probabilities_there_are_advantages_and_weights_only() -> None:
    rows = [{"reward": r, "length": n} for r, n in ((1, 2), (0, 1))]
    answer = explain({"groups": [{"id": "q", "responses": rows}]})
    assert answer["loss"] is None and answer["metrics"] == {} and answer["notes"] == []
    assert [r["advantage"] for r in answer["groups"][0]["responses"]] == [1.0, -1.0]
    assert [t["weight"] for t in cells(answer)] == [0.25, 0.25, 0.5]
    assert set(cells(answer)[0]) == {"weight"}


@pytest.mark.parametrize(
    ("preset", "overrides", "note"),
    [
        ("rloo", {}, "the KL in the reward is left out: no log-probabilities were given"),
        ("dapo", {"selection.entropy_top": 0.2}, "the entropy mask is left out: no entropies were given"),
        (
            "grpo",
            {"ratio.correction": "mask", "ratio.correction_high": 2.0, "aggregate.count_corrected": False},
            "tokens that the correction would mask are counted: no log-probabilities were given",
        ),
    ],
)
def test_a_note_says_what_cannot_be_had_without_log_probabilities(
    preset: str, overrides: dict[str, Any], note: str
) -> None:
    rows: list[dict[str, Any]] = [{"reward": r, "length": 1} for r in (1, 0)]
    answer = explain({"groups": [{"id": "q", "responses": rows}]}, preset, overrides)
    assert answer["notes"] == [note]
    rows[0] |= {"sampler": [-1.0]}  # one array of one response is not enough either
    assert explain({"groups": [{"id": "q", "responses": rows}]}, preset, overrides)["notes"] == [note]


def test_without_sampler_numbers_the_sampler_is_the_anchor_and_a_note_says_so() -> None:
    given = without("sampler", "reference")
    answer = explain(given, "dppo")
    assert answer["notes"] == ["no sampler log-probabilities were given: the sampler is taken to be the anchor"]
    close(cells(answer)[0]["ratio"], math.exp(0.1))
    on_policy = explain(without("sampler", "anchor", "reference"), "scalerl")
    assert [t["ratio"] for t in cells(on_policy)] == [1.0] * 4


# --- rows ---------------------------------------------------------------------------------------------------------


def test_masked_tokens_are_marked_and_hold_anything() -> None:
    garbage = pair(mask=[1, 0, 1], policy=[-1.1, math.nan, -2.0], anchor=[-1.2, None, -2.3], reference=[-1.15, "x", -2])
    answer = explain(garbage)
    token = cells(answer)[1]
    assert token["masked"] is True
    assert all(token[key] == 0 for key in ("weight", "ratio", "surrogate", "kl", "contribution", "gradient"))
    assert answer["denominator"]["tokens"] == 3
    json.dumps(answer, allow_nan=False)


def test_a_void_response_leaves_loss_and_baseline_and_needs_no_numbers() -> None:
    given = pair()
    alone = explain(given)
    given["groups"][0]["responses"].append({"reward": None, "status": "void", "length": 2})
    given["groups"][0]["responses"].append({"reward": None, "status": "void", "policy": [math.nan]})
    answer = explain(given)
    assert answer["loss"] == alone["loss"] and answer["denominator"] == alone["denominator"]
    assert answer["groups"][0]["mean"] == 0.5
    for void in answer["groups"][0]["responses"][2:]:
        assert (void["status"], void["reward"], void["advantage"], void["skipped"]) == ("void", None, 0.0, True)
        assert all(t["weight"] == 0 and t["contribution"] == 0 for t in void["tokens"])
    json.dumps(answer, allow_nan=False)


def test_a_rejected_response_counts_with_its_reward() -> None:
    assert explain(pair(status="rejected"))["loss"] == explain(pair())["loss"]


def test_an_advantage_may_be_a_number_or_one_per_token() -> None:
    number = explain(pair(advantage=0.5), overrides=NO_KL)
    assert number["groups"][0]["responses"][0]["advantage"] == 0.5
    close(cells(number)[0]["surrogate"], 0.5 * math.exp(0.1))
    each = explain(pair(advantage=[0.5, -0.2, 0.9]), overrides=NO_KL)
    assert each["groups"][0]["responses"][0]["advantage"] == [0.5, -0.2, 0.9]
    close(cells(each)[1]["surrogate"], -0.2 * math.exp(0.22))
    same = explain(pair(advantage=[0.5, 0.5, 0.5]), overrides=NO_KL)
    assert cells(same) == cells(number)


def test_named_reward_parts_are_weighted_and_summed() -> None:
    rows = [{"reward": {"right": r, "form": f}, "length": 1} for r, f in ((1, 0), (0, 1))]
    answer = explain({"groups": [{"id": "q", "responses": rows}], "weights": {"form": 0.5}}, "dr_grpo")
    assert [r["reward"] for r in answer["groups"][0]["responses"]] == [1.0, 0.5]
    assert [r["advantage"] for r in answer["groups"][0]["responses"]] == [0.25, -0.25]


@pytest.mark.parametrize(
    ("rewards", "state"),
    [
        ([1, 0], "informative"),
        ([0, 0], "all_failed"),
        ([1, 1], "all_solved"),
        ([0.5, 0.5], "all_equal"),
        ([1], "singleton"),
        ([1, None], "too_few_valid"),
    ],
)
def test_the_six_states_of_a_group(rewards: list[float | None], state: str) -> None:
    rows = [{"reward": r, "length": 1, "status": "void" if r is None else "scored"} for r in rewards]
    assert explain({"groups": [{"id": "q", "responses": rows}]})["groups"][0]["state"] == state


def test_a_greedy_reward_belongs_to_its_group() -> None:
    rows = [{"reward": r, "length": 1} for r in (1, 0)]
    given = {"groups": [{"id": "q", "responses": rows, "greedy_reward": 0.25}]}
    answer = explain(given, "reinforce", {"advantage.baseline": "greedy"})
    assert [r["advantage"] for r in answer["groups"][0]["responses"]] == [0.75, -0.25]
    with pytest.raises(ObjectiveError, match="needs the reward of a greedy response"):
        explain({"groups": [{"id": "q", "responses": rows}]}, "reinforce", {"advantage.baseline": "greedy"})


def test_numpy_arrays_are_lists() -> None:
    arrays = {name: np.array(pair()["groups"][0]["responses"][0][name]) for name in ("policy", "anchor", "reference")}
    assert explain(pair(**arrays, mask=np.ones(3, bool), reward=np.float32(1)))["loss"] == explain(pair())["loss"]


def test_a_correction_is_shown_on_its_token() -> None:
    overrides = {**NO_KL, "ratio.correction": "truncate", "ratio.correction_high": 2.0}
    tokens = cells(explain(pair(), overrides=overrides))
    close(tokens[0]["correction"], math.exp(0.01))
    assert tokens[2]["correction"] == 2.0
    assert "correction" not in tokens[3]


# --- refusals -----------------------------------------------------------------------------------------------------

ONE = "group q1, response 0"
MALFORMED: list[tuple[dict[str, Any], str]] = [
    (pair(policy=[-1.1, math.nan, -2.0]), f"{ONE}, token 1: policy is nan; write a finite number"),
    (pair(anchor=[-1.1, -1.0, -math.inf]), f"{ONE}, token 2: anchor is -inf; write a finite number"),
    (pair(reference=[math.inf, -1.0, -1.0]), f"{ONE}, token 0: reference is inf; write a finite number"),
    (pair(sampler=["x", -1.0, -1.0]), f"{ONE}, token 0: sampler is 'x'; write a finite number"),
    (pair(policy=[True, -1.0, -1.0]), f"{ONE}, token 0: policy is True; write a finite number"),
    (pair(advantage=[0.1, math.nan, 0.1]), f"{ONE}, token 1: advantage is nan; write a finite number"),
    (pair(advantage=math.inf), f"{ONE}: advantage is inf; write a finite number"),
    (pair(advantage={"a": 1}), f"{ONE}: advantage is {{'a': 1}}; write a finite number"),
    (pair(advantage=[0.1]), f"{ONE}: advantage has 1 numbers for 3 tokens"),
    (pair(reward=math.nan), f"{ONE}: reward is nan; write a finite number"),
    (pair(reward=10**400), f"{ONE}: reward is 1000"),
    (pair(reward=True), f"{ONE}: reward is True; write a finite number"),
    (pair(reward="1"), f"{ONE}: reward is '1'; write a finite number"),
    (pair(reward={"right": math.inf}), f"{ONE}: reward 'right' is inf; write a finite number"),
    (pair(reward={}), f"{ONE}: reward has no parts; write at least one, or a number"),
    (pair(reward=None), f'{ONE}: reward is null; write a number, or "status": "void"'),
    (pair(raw="yes"), f"{ONE}: raw is 'yes'; write a finite number"),
    (pair(truncated="no"), f"{ONE}: truncated is 'no'; write true or false"),
    (pair(status="failed"), f"{ONE}: status 'failed' is unknown; "),
    (pair(mask=[1, 2, 1]), f"{ONE}, token 1: mask is 2; write 0 or 1"),
    (pair(mask="111"), f"{ONE}: mask must be a list of 0 and 1, one a token"),
    (pair(mask=[1, 1]), f"{ONE}: lengths differ: policy 3, anchor 3, sampler 3, reference 3, mask 2, length 3"),
    (pair(length=2.5), f"{ONE}: length 2.5 is not a number of tokens"),
    (pair(policy=-1.0), f"{ONE}: policy must be a list of numbers, one a token"),
    (pair(refernce=[1]), f"{ONE}: unknown key 'refernce'; did you mean \"reference\"?"),
    ({"groups": [{"id": "q1", "responses": [{"reward": 1}]}]}, f"{ONE}: neither length nor any per-token array"),
    ({"groups": [{"id": "q1", "responses": [1]}]}, f"{ONE}: a response is an object with at least a reward"),
    ({"groups": [{"id": "q1", "responses": []}]}, "group q1: empty; a group needs at least one response"),
    ({"groups": [{"id": "q1"}]}, 'group 0: write {"id": ..., "responses": [...]}'),
    ({"groups": [{"id": "q1", "responses": [], "reponses": []}]}, "group q1: unknown key 'reponses'; did you mean"),
    ({"groups": pair()["groups"] * 2}, "group q1: the id appears twice"),
    ({"groups": []}, "batch: no groups; write at least one"),
    ({"rewards": [1, 0]}, 'a batch is {"groups": [{"id": ..., "responses": [...]}]}'),
    ([], 'a batch is {"groups": [{"id": ..., "responses": [...]}]}'),  # type: ignore[list-item]
    (pair() | {"weigths": {}}, "batch: unknown key 'weigths'; did you mean \"weights\"?"),
    (pair() | {"weights": {"form": 1}}, "batch: weights names 'form', which no reward has; the rewards are plain"),
    (pair(reward={"right": 1}) | {"weights": {"rihgt": 1}}, "batch: weights names 'rihgt', which no reward has; did"),
    (pair(reward={"right": 1}) | {"weights": {"right": "x"}}, "batch: the weight of 'right' is 'x'; write a finite"),
    (pair() | {"weights": [1]}, 'batch: weights is {"part": weight}'),
    (
        {"groups": [{"id": "q1", "responses": [{"reward": 1, "length": 1}], "greedy_reward": "x"}]},
        "group q1: greedy_reward is 'x'; write a finite number",
    ),
]


@pytest.mark.parametrize("row", range(len(MALFORMED)))
def test_malformed_input_is_refused_by_its_place(row: int) -> None:
    given, message = MALFORMED[row]
    with pytest.raises(ObjectiveError) as refused:
        explain(given)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "preset", "overrides", "message"),
    [
        (without("reference"), "grpo", {}, f'{ONE}: no reference numbers, which the objective needs: kl'),
        (without("reference"), "rloo", {}, f'{ONE}: no reference numbers, which the objective needs: kl'),
        (
            without("sampler"),
            "grpo",
            {"ratio.correction": "truncate", "ratio.correction_high": 2.0},
            f'{ONE}: no sampler numbers, which the objective needs: ratio.correction = "truncate"; add them, or write '
            'ratio.correction = "none"',
        ),
        (pair(), "grpo", {"selection.entropy_top": 0.2}, f"{ONE}: no entropy numbers, which the objective needs: sel"),
        (pair(policy=None), "grpo", {}, f"{ONE}: policy is missing, while other responses have it"),
        (pair(anchor=None), "grpo", {}, f"{ONE}: anchor is missing, while other responses have it"),
        (pair(reference=None), "grpo", {}, f"{ONE}: reference is missing, while other responses have it"),
    ],
)  # fmt: skip
def test_missing_arrays_are_named_with_what_needs_them(
    given: dict[str, Any], preset: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ObjectiveError) as refused:
        explain(given, preset, overrides)
    assert str(refused.value).startswith(message)


def test_a_singleton_under_leave_one_out_is_refused_by_its_group() -> None:
    rows = {"groups": [{"id": "hard", "responses": [{"reward": 1, "length": 1}]}]}
    with pytest.raises(ObjectiveError, match="group hard: leave_one_out has no other response to compare with"):
        explain(rows, "rloo")


def test_a_mean_that_is_not_positive_cannot_be_a_scale() -> None:
    rows = {"groups": [{"id": "q", "responses": [{"reward": r, "length": 1} for r in (-2, 1)]}]}
    with pytest.raises(ObjectiveError, match=r"group q: .* needs rewards that are never negative"):
        explain(rows, "maxrl")


# --- explain --rewards --------------------------------------------------------------------------------------------


def test_the_replay_has_a_definition_for_each_step() -> None:
    replay = explain_rewards([1, 0, 0, 0])
    assert [s["name"] for s in replay["steps"]] == ["rewards", "baseline", "centred", "scale", "advantage"]
    assert all(s["definition"] and len(s["values"]) == 4 for s in replay["steps"])
    assert replay["steps"][3]["definition"] == "population std (ddof 0) of the group + epsilon 0"
    close(replay["advantages"], [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    assert (replay["state"], replay["dropped"], replay["notes"]) == ("informative", False, [])
    json.dumps(replay, allow_nan=False)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_replays_a_group_without_log_probabilities(name: str) -> None:
    replay = explain_rewards([1, 1, 0, 0], name)
    assert len(replay["advantages"]) == 4
    o = PRESETS[name].objective
    left_out = [
        o.kl.estimator != "none" and o.kl.place == "reward",
        o.advantage.baseline in ("critic", "optimal_token"),
        o.selection.entropy_top < 1,
        o.needs_fresh,
    ]
    assert bool(replay["notes"]) == any(left_out)


def test_the_replay_says_why_a_dead_group_carries_nothing() -> None:
    kept = explain_rewards([1, 1])
    assert kept["steps"][-1]["definition"].startswith("all_solved: equal rewards carry no signal")
    dropped = explain_rewards([0, 0, 0], "dapo")
    assert dropped["dropped"] is True
    assert dropped["steps"][-1]["definition"].endswith('the group is dropped (selection.dead = "refill")')
    solved = explain_rewards([1, 1], "dapo")
    assert solved["steps"][1]["values"] == [1.0, 1.0]  # replayed as if kept, so that the mean is seen
    assert explain_rewards([1.0])["steps"][-1]["definition"] == "one response alone has no sibling to compare with"
    raw = explain_rewards([1, 1], "reinforce")
    assert raw["advantages"] == [1.0, 1.0]
    assert raw["steps"][-1]["definition"] == "the centred reward"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "an empty group has no advantage; give at least one reward, e.g. --rewards 1,1,0,0"),
        ([1, math.nan], "group rewards, response 1: reward is nan; write a finite number"),
        ([1, "x"], "group rewards, response 1: reward is 'x'; write a finite number"),
    ],
)
def test_the_replay_refuses_what_has_no_advantage(rewards: list[Any], message: str) -> None:
    with pytest.raises(ObjectiveError) as refused:
        explain_rewards(rewards)
    assert str(refused.value) == message


def test_finite_input_whose_loss_overflows_is_refused_by_place() -> None:
    far = {"reward": 0, "length": 1, "policy": [-0.5], "anchor": [-1e5]}
    near = {"reward": 1, "length": 1, "policy": [-0.5], "anchor": [-0.5]}
    batch = {"groups": [{"id": "q", "responses": [near, far]}]}
    with pytest.raises(ObjectiveError, match="group q, response 1, token 0: the loss is not finite"):
        gropius.explain(batch, overrides={"kl.estimator": "none"})


def test_a_ratio_that_overflows_in_a_flat_branch_is_a_number() -> None:
    far = {"reward": 1, "length": 1, "policy": [-0.5], "anchor": [-1e5]}
    near = {"reward": 0, "length": 1, "policy": [-0.5], "anchor": [-0.5]}
    report = gropius.explain({"groups": [{"id": "q", "responses": [far, near]}]}, overrides={"kl.estimator": "none"})
    json.dumps(report, allow_nan=False)
    assert report["groups"][0]["responses"][0]["tokens"][0]["gradient"] == 0


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ({"reward": {"x": 1e308, "y": 1e308}, "length": 1}, "overflows"),
        ({"reward": 1, "length": 10**12}, "write the real length"),
        ({"reward": 1, "policy": [0.5]}, "above 0"),
    ],
)
def test_absurd_numbers_are_refused(response: dict[str, object], words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        gropius.explain({"groups": [{"id": "q", "responses": [response, response]}]}, "dapo")


@pytest.mark.parametrize("objective", [None, 3, ["grpo"], ""])
def test_an_objective_that_is_none_is_refused_in_words(objective: object) -> None:
    with pytest.raises(ObjectiveError):
        gropius.explain({"groups": []}, objective)  # type: ignore[arg-type]


@pytest.mark.parametrize("overrides", ["x", [("surrogate.high", 0.28)], {3: 1}, {"kl.coefficient": 10**400}])
def test_overrides_of_another_shape_are_refused_in_words(overrides: object) -> None:
    with pytest.raises(ObjectiveError):
        gropius.explain({"groups": []}, "grpo", overrides)  # type: ignore[arg-type]
