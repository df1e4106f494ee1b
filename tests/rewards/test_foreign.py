"""Laws of foreign signatures: detected by name, called as their own library calls them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import RecipeError, RewardError
from gropius.rewards import load_scorer
from gropius.rewards.base import InProcessScorer, RewardPart
from gropius.rewards.foreign import adapt, detect
from gropius.types import Episode, Message, Task, Turn, Verdict

CHAT: tuple[Message, ...] = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})


def episode(reply: str, prompt: Any = "p", answer: str | None = "42", **metadata: Any) -> Episode:
    task = Task("t:1", prompt, answer, metadata)
    turn = Turn("model", np.arange(len(reply)), reply)
    return Episode(task, "000001-0000", 0, np.zeros(2, np.int64), (turn,), task.messages(), "stop")


def run(function: Any, episodes: list[Episode]) -> list[Verdict]:
    signature, adapted = adapt("f", function)
    return asyncio.run(InProcessScorer([RewardPart("f", 1.0, adapted, None, signature)]).score(episodes))


def trl(prompts: Any, completions: Any, **kwargs: Any) -> Any: ...
def trl_keywords(*, completions: Any, level: Any) -> Any: ...
def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any: ...
def openrlhf(queries: Any, prompts: Any, labels: Any) -> Any: ...
def ours(episode: Any) -> Any: ...
def ours_with_options(e: Any, size: float = 1.0) -> Any: ...


class Judge:
    def __call__(self, episode: Episode) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (trl, "TRL"),
        (trl_keywords, "TRL"),
        (verl, "verl"),
        (openrlhf, "OpenRLHF"),
        (ours, "episode"),
        (ours_with_options, "episode"),
        (Judge(), "episode"),
        (lambda e: 1.0, "episode"),
    ],
)
def test_signatures_are_told_by_their_names(function: Any, signature: str) -> None:
    assert detect("f", function) == signature


@pytest.mark.parametrize("function", [lambda: 1, lambda a, b: 1, lambda **k: 1, lambda *a: 1, lambda *, a: 1])
def test_an_unknown_signature_is_refused_with_the_four_that_are_taken(function: Any) -> None:
    with pytest.raises(RecipeError, match=r"f\(episode\).*TRL.*verl.*OpenRLHF"):
        detect("f", function)


def test_trl_gets_keyword_lists_with_every_column() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, None]

    verdicts = run(reward, [episode("a", level=1, nums=[1]), episode("bc", "q", level=2)])
    assert seen == {
        "prompts": ["p", "q"],
        "completions": ["a", "bc"],
        "completion_ids": [[0], [0, 1]],
        "level": [1, 2],
        "nums": [[1], None],
        "answer": ["42", "42"],
    }
    assert [v.outcome.status for v in verdicts] == ["scored", "void"]


def test_trl_completions_are_messages_when_prompts_are() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: Any, prompts: Any) -> list[float]:
        seen.update(completions=completions, prompts=prompts)
        return [1.0]

    run(reward, [episode("a", CHAT)])
    assert seen == {"completions": [[{"role": "assistant", "content": "a"}]], "prompts": [list(CHAT)]}


def test_trl_completions_of_several_turns_are_the_whole_conversation() -> None:
    one = episode("a", CHAT)
    turns = (one.turns[0], Turn("environment", np.arange(2), "higher"), Turn("model", np.arange(1), "9"))
    several = Episode(one.task, "g", 0, one.prompt_ids, turns, (), "stop")
    seen: list[Any] = []
    run(lambda completions: seen.extend(completions) or [1.0], [several])
    assert [m["role"] for m in seen[0]] == ["assistant", "user", "assistant"]
    assert seen[0][1]["content"] == "higher"


def test_trl_functions_without_kwargs_get_only_what_they_name() -> None:
    assert (
        run(lambda completions, level: [float(x) for x in level], [episode("a", level=3, other=1)])[0].outcome.value
        == 3
    )
    with pytest.raises(RewardError, match="wants lvl, but the rows have no such column; found: level"):
        run(lambda completions, lvl: [1.0], [episode("a", level=3)])


def test_columns_are_copies() -> None:
    one = episode("a", nums=[1, 2])

    def greedy(completions: Any, nums: Any) -> list[float]:
        nums[0].clear()
        return [1.0]

    run(greedy, [one])
    assert one.task.metadata["nums"] == [1, 2]


def test_verl_gets_its_four_arguments() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.update(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        return {"score": 0.5, "acc": True}

    verdict = run(compute_score, [episode("a", data_source="math", extra_info={"split": "train"})])[0]
    assert seen == {"data_source": "math", "solution_str": "a", "ground_truth": "42", "extra_info": {"split": "train"}}
    assert verdict.outcome.value == 0.5
    with pytest.raises(RewardError, match='without "score"; found: acc'):
        run(lambda solution_str, ground_truth: {"acc": 1}, [episode("a")])


class TensorLike:
    """What a CPU tensor looks like to NumPy."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self.values is None:
            raise TypeError("can't convert a device tensor to numpy")
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("wrap", [list, np.array, TensorLike, lambda v: {"rewards": TensorLike(v)}])
def test_openrlhf_gets_whole_texts_and_gives_a_vector(wrap: Any) -> None:
    seen: dict[str, Any] = {}

    def reward_func(queries: Any, prompts: Any, labels: Any) -> Any:
        seen.update(queries=queries, prompts=prompts, labels=labels)
        return wrap([0.5, 1.0])

    verdicts = run(reward_func, [episode("a"), episode("b", CHAT)])
    assert seen == {"queries": ["pa", "s\nub"], "prompts": ["p", "s\nu"], "labels": ["42", "42"]}
    assert [v.outcome.value for v in verdicts] == [0.5, 1.0]


@pytest.mark.parametrize("returned", [TensorLike([[1.0]]), TensorLike(None), 1.0, {"scores": [1.0]}, "a", [1.0, 2.0]])
def test_openrlhf_results_of_another_shape_halt(returned: Any) -> None:
    with pytest.raises(RewardError, match="reward f"):
        run(lambda queries, prompts, labels: returned, [episode("a")])


def test_openrlhf_refuses_a_matrix_by_its_shape() -> None:
    with pytest.raises(RewardError, match=r"shape \(1, 1\)"):
        run(lambda queries, prompts, labels: TensorLike([[1.0]]), [episode("a")])


def test_describe_shows_what_was_detected(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(
        "def a(prompts, completions, **k):\n    return [0.0] * len(prompts)\n"
        "def b(data_source, solution_str, ground_truth):\n    return 0.0\n"
    )
    config = [{"name": "sub/mine.py:a"}, {"name": "sub.mine:b", "weight": 0.5}, {"name": "exact"}]
    assert load_scorer(config, tmp_path).describe() == (
        "a: weight 1, signature TRL, from sub/mine.py:a",
        "b: weight 0.5, signature verl, from sub.mine:b",
        "exact: weight 1, signature built-in, in [0, 1], task metric",
    )
