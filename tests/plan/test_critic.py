"""What a critic costs: counted from parameters, and as the plan of a model says it."""

from __future__ import annotations

import pytest

from gropius.plan.cost import ModelShape
from gropius.plan.critic import critic_parameters, ratio_without_critic, states

TINY = ModelShape(2, 16, 2, 2, 8, 32, 50)


def test_a_critic_of_its_own_doubles_what_is_trained_and_a_shared_trunk_adds_a_row() -> None:
    size = TINY.parameters
    assert critic_parameters(TINY) == size + 17
    assert critic_parameters(ModelShape(2, 16, 2, 2, 8, 32, 50, tied=False)) == size + 17  # no second head
    assert critic_parameters(TINY, shared=True) == 17
    alone, both = states(size), states(size, critic=size)
    assert (both.weights, both.gradients, both.moments) == tuple(
        2 * n for n in (alone.weights, alone.gradients, alone.moments)
    )


@pytest.mark.parametrize(("reference", "kept"), [(False, 1 / 2), (True, 5 / 9)])
def test_dropping_the_critic_halves_the_states_unless_a_reference_stays(reference: bool, kept: float) -> None:
    assert ratio_without_critic(1000, 1000, reference=reference) == pytest.approx(kept)
