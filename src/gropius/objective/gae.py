"""Generalised advantage estimation over the tokens of one response. NumPy float64, no torch.

    δ_t = r_t + γ V_{t+1} − V_t        A_t = Σ_l (γλ)^l δ_{t+l}        return_t = A_t(λ_critic) + V_t

V is 0 after the last token, whatever ended the response. Returns are formed before advantages are whitened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gropius.objective.spec import Advantage

Array = NDArray[np.float64]


def gae(rewards: Array, values: Array, discount: float, lam: float) -> Array:
    """[L] advantages. rewards, values [L]: of the response's own tokens, V_t before token t. Empty gives empty.

    λ = 1: return minus value; λ = 0: the one-step difference. Source: PPO 1707.06347 eqs. 11-12.

    >>> gae(np.array([0.0, 1.0]), np.array([0.5, 0.5]), 1.0, 1.0).tolist()
    [0.5, 0.5]
    """
    following = np.append(values[1:], 0.0)
    deltas = rewards + discount * following - values
    out, running = np.zeros(len(deltas)), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + discount * lam * running
        out[t] = running
    return out


def length_adaptive(alpha: float, length_tokens: int) -> float:
    """λ = 1 − 1/(α L), kept in [0, 1]: the formula is negative below 1/α tokens. Source: VAPO 2504.05118.

    >>> [length_adaptive(0.05, n) for n in (10, 20, 100)]
    [0.0, 0.0, 0.8]
    """
    return min(1.0, max(0.0, 1.0 - 1.0 / (alpha * length_tokens))) if length_tokens else 1.0


def policy_lambda(axis: Advantage, length_tokens: int) -> float:
    """The λ of the policy's advantage for a response of so many tokens."""
    return length_adaptive(axis.gae_alpha, length_tokens) if axis.gae_alpha else axis.gae_lambda


def advantage_and_return(axis: Advantage, rewards: Array, values: Array) -> tuple[Array, Array]:
    """([L] advantages with the policy's λ, [L] returns with the critic's), as the fields of the axis say."""
    own = gae(rewards, values, axis.discount, policy_lambda(axis, len(rewards)))
    return own, gae(rewards, values, axis.discount, axis.gae_lambda_critic) + values
