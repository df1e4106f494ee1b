"""The comparison of sampler and trainer: it passes rounding, stops at a real difference, and names each cause."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from gropius.errors import MismatchError
from gropius.train.mismatch import Expected, compare, require_agreement
from gropius.types import Episode, Sampling, Task, Turn

RNG = np.random.default_rng(5)
TRUE = [np.log(RNG.uniform(0.05, 0.9, 40)) for _ in range(6)]


def episodes(sampler: Sequence[NDArray[np.floating]], digest: str = "d1") -> list[Episode]:
    made = []
    for member, values in enumerate(sampler):
        ids, logprobs = np.arange(len(values)), np.asarray(values, np.float32)
        turn = Turn("model", ids, "", logprobs, logprobs, "stop")
        made.append(Episode(Task("t", "p"), "g", member, np.arange(3), (turn,), (), "stop", weight_digest=digest))
    return made


def at(temperature: float) -> list[NDArray[np.floating]]:
    """What a trainer would give at a temperature: its own numbers at 1, sharper or flatter ones elsewhere."""
    return [values / temperature for values in TRUE]


def expected(bound: float = 0.01, digest: str = "d1", **sampling: float) -> Expected:
    return Expected(bound, Sampling(40, **sampling), digest)  # type: ignore[arg-type]


def test_equal_numbers_agree_and_the_difference_is_zero() -> None:
    found = require_agreement(episodes(TRUE), at(1.0), expected(), at)
    assert found.largest < 1e-6 and found.tokens == 240


def test_one_wide_token_of_rounding_passes_and_a_shift_of_every_token_does_not() -> None:
    noisy = [values.copy() for values in TRUE]
    noisy[2][7] += 0.9
    require_agreement(episodes(noisy), at(1.0), expected(bound=1.0), at)
    with pytest.raises(MismatchError):
        require_agreement(episodes([values + 0.2 for values in TRUE]), at(1.0), expected(bound=1.0), at)


def test_a_number_that_is_not_finite_is_infinitely_far() -> None:
    broken = [values.copy() for values in TRUE]
    broken[1][3] = np.nan
    assert compare(episodes(TRUE), broken).worst == (1, 3)


@pytest.mark.parametrize(
    ("sampler", "options", "cause"),
    [
        ([values / 1.0 for values in TRUE], {"temperature": 0.5}, "temperature"),
        ([values * 0.97 - 0.02 for values in TRUE], {"digest": "d2"}, "stale weights"),
        ([values + 0.1 for values in TRUE], {"top_p": 0.9}, "truncated sampling"),
        ([values + RNG.normal(0, 0.05, 40) for values in TRUE], {}, "dtype"),
        ([np.concatenate([values[:5], values[5:] - 3]) for values in TRUE], {}, "template"),
        ([values - 3 for values in TRUE], {}, "another one"),
    ],
)
def test_each_cause_is_named(sampler: list[NDArray[np.floating]], options: dict[str, object], cause: str) -> None:
    temperature = float(options.get("temperature", 1.0))  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=f"Likely cause: .*{cause}") as stopped:
        require_agreement(episodes(sampler), at(temperature), expected(**options), at)  # type: ignore[arg-type]
    assert "group g, member" in str(stopped.value) and "token" in str(stopped.value)
