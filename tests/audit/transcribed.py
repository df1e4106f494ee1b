"""The losses of verl (1dda039b9, 0.10.0.dev) and OpenRLHF (3c3be623, 0.11.0), written anew from their formulas.

Independent of the objective room: padded matrices, plain loops for the group statistics, autograd for the gradient.
Every function takes the rows of `batches.rows` and the upstream settings by their upstream names.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.audit.batches import Row


class Padded:
    """[B, T] matrices of a table of rows; `policy` is the leaf."""

    def __init__(self, table: list[Row]):
        self.width = max(len(r["policy"]) for r in table)
        self.lengths = [len(r["policy"]) for r in table]
        self.mask = self._fill([r["mask"] for r in table])
        for name in ("anchor", "sampler", "reference"):
            setattr(self, name, self._fill([r[name] for r in table]))
        self.policy = self._fill([r["policy"] for r in table]).requires_grad_(True)
        self.reward = [r["rewards"][0] for r in table]
        self.uid = [r["group"] for r in table]

    def _fill(self, lists: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*x, *[0.0] * (self.width - len(x))] for x in lists], dtype=torch.float64)

    def answer(self, loss: torch.Tensor) -> tuple[float, list[float]]:
        """Loss and the gradient of every token, row after row."""
        loss.backward()
        assert self.policy.grad is not None
        flat = [x for row, n in zip(self.policy.grad.tolist(), self.lengths, strict=True) for x in row[:n]]
        return loss.item(), flat


def estimate(name: str, x: torch.Tensor) -> torch.Tensor:
    """A KL estimate of x = log π − log reference, unclamped."""
    if name == "k1":
        return x
    if name == "k2":
        return x**2 / 2
    return torch.exp(-x) - 1 + x if name == "k3" else x.abs()


def whitened(values: torch.Tensor, mask: torch.Tensor, bessel: bool) -> torch.Tensor:
    """(v − mean) / √(var + 1e-8) over unmasked tokens."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean) ** 2 * mask).sum() / (count - 1 if bessel else count)
    return (values - mean) / torch.sqrt(variance + 1e-8) * mask


def to_go(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Σ_{s ≥ t} of the unmasked entries."""
    masked = per_token * mask
    return masked.sum(-1, keepdim=True) - masked.cumsum(-1) + masked


def last_token(mask: torch.Tensor) -> list[int]:
    """Index of the last unmasked token of every row."""
    return [max(t for t, m in enumerate(row) if m) for row in mask.tolist()]


def verl(table: list[Row], s: dict[str, Any]) -> tuple[float, list[float]]:
    """Advantage, policy loss, KL and aggregation of verl's engine worker, one mini-batch."""
    p = Padded(table)
    at_end = torch.zeros_like(p.mask)
    for i, t in enumerate(last_token(p.mask)):
        at_end[i, t] = p.reward[i]
    if s.get("use_kl_in_reward"):
        at_end = at_end - s["kl_coef"] * estimate(s.get("kl_penalty", "k1"), p.anchor - p.reference) * p.mask
    advantage = verl_advantage(s, p, at_end)
    old = p.sampler if s.get("bypass_mode") else p.anchor
    mask = p.mask
    weight = torch.ones_like(mask)
    log_w = (p.anchor - p.sampler) * mask
    if s.get("rollout_is") == "token":
        weight = log_w.exp().clamp(max=s["threshold"])
    elif s.get("rollout_is") == "sequence":
        weight = log_w.sum(-1, keepdim=True).exp().clamp(max=s["threshold"]).expand_as(mask)
    elif s.get("rollout_is") == "icepop":
        raw = log_w.exp()
        weight = raw * ((raw >= s["low"]) & (raw <= s["high"]))
    if s.get("rollout_rs") == "seq_mean_k1":
        inverse = torch.exp(-log_w.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True))
        mask = mask * ((inverse >= s["low"]) & (inverse <= s["high"]))
    loss = aggregated(verl_policy(s, p.policy, old, advantage, mask) * weight, mask, s)
    if s.get("use_kl_loss"):
        name = s["kl_loss_type"]
        x = p.policy - p.reference
        value = estimate(name.rstrip("+"), x)
        if name.endswith("+"):
            value = value.detach() + estimate("k2", x) - estimate("k2", x).detach()
        loss = loss + s["kl_loss_coef"] * aggregated(value, mask, s)
    return p.answer(loss)


def verl_advantage(s: dict[str, Any], p: Padded, at_end: torch.Tensor) -> torch.Tensor:
    """[B, T] advantages of one estimator."""
    name, score = s["adv_estimator"], (at_end * p.mask).sum(-1).tolist()
    own: dict[int, list[int]] = {}
    for i, uid in enumerate(p.uid):
        own.setdefault(uid, []).append(i)
    if name == "reinforce_plus_plus":
        return whitened(to_go(at_end, p.mask), p.mask, bessel=True)
    flat = torch.zeros(len(score), dtype=torch.float64)
    for members in own.values():
        group = [score[i] for i in members]
        mean = sum(group) / len(group)
        std = (sum((g - mean) ** 2 for g in group) / (len(group) - 1)) ** 0.5
        lengths = [float(p.mask[i].sum()) for i in members]
        for i in members:
            others = [score[j] for j in members if j != i]
            flat[i] = {
                "grpo": (score[i] - mean) / (std + 1e-6) if s.get("norm", True) else score[i] - mean,
                "rloo": score[i] - sum(others) / len(others),
                "opo": score[i] - sum(n * g for n, g in zip(lengths, group, strict=True)) / sum(lengths),
                "reinforce_plus_plus_baseline": score[i] - mean,
            }[name]
    spread = flat[:, None] * p.mask
    return whitened(spread, p.mask, bessel=True) if name.startswith("reinforce") else spread


def verl_policy(
    s: dict[str, Any], policy: torch.Tensor, old: torch.Tensor, a: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """[B, T] the policy loss of one loss_mode, before correction and aggregation."""
    mode, low, high = s.get("loss_mode", "vanilla"), s.get("low_clip", 0.2), s.get("high_clip", 0.2)
    log_r = policy - old
    ratio = log_r.clamp(-20, 20).exp()
    if mode == "gspo":
        mean = (log_r * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = (mean.detach() + policy - policy.detach()).clamp(max=10).exp()
    if mode in ("vanilla", "gspo"):
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        c = s.get("clip_ratio_c", 3.0)
        return loss if mode == "gspo" else torch.where(a < 0, torch.minimum(loss, -a * c), loss)
    if mode == "sapo":
        tau = torch.where(a > 0, torch.full_like(a, s.get("tau_pos", 1.0)), torch.full_like(a, s.get("tau_neg", 1.05)))
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if mode == "cispo":
        return -ratio.clamp(1 - low, 1 + high).detach() * a * policy
    if mode == "gpg":
        return -policy * a
    if mode == "geo_mean":
        sign = torch.sign(a)
        kept = sign * torch.minimum(sign * log_r, sign * log_r.clamp(-low, high))
        geometric = ((kept * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
        return (-a * geometric).expand_as(a)
    moved = policy.exp() - old.exp()
    keep = torch.where(a > 0, moved <= high, moved >= -low).detach()
    return -a * ratio.clamp(max=s.get("clip_ratio_c", 20.0)).detach() * policy * keep  # dppo_tv


def aggregated(loss: torch.Tensor, mask: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
    """verl's agg_loss with the numbers of the whole mini-batch; S is the configured size."""
    mode = (
        "seq-mean-token-mean"
        if s.get("loss_mode") in ("gspo", "sapo", "geo_mean")
        else s.get("loss_agg_mode", "token-mean")
    )
    if mode == "token-mean":
        return (loss * mask).sum() / mask.sum()
    sums, size = (loss * mask).sum(-1), len(mask)
    if mode == "seq-mean-token-mean":
        return (sums / (mask.sum(-1) + 1e-8)).sum() / size
    return sums.sum() / size / (s["loss_scale_factor"] if mode.endswith("norm") else 1)


def openrlhf(table: list[Row], s: dict[str, Any]) -> tuple[float, list[float]]:
    """Advantage, policy loss, KL and aggregation of OpenRLHF's actor, one optimiser step."""
    p = Padded(table)
    coefficient, name = s.get("kl", 0.01), s.get("kl_estimator", "k1")
    in_loss = s.get("kl_loss", False)
    score = openrlhf_scores(s["estimator"], p)
    reward = torch.zeros_like(p.mask)
    for i, t in enumerate(last_token(p.mask)):
        reward[i, t] = min(max(score[i], -10.0), 10.0)
    if not in_loss:
        reward = reward - coefficient * estimate(name, p.anchor - p.reference).clamp(-10, 10)
    advantage = to_go(reward, p.mask)
    if s["estimator"] in ("reinforce", "reinforce_baseline"):
        count = p.mask.sum()
        mean = (advantage * p.mask).sum() / count
        variance = ((advantage - mean) ** 2 * p.mask).sum() / count
        advantage = (advantage - mean) / variance.clamp(min=1e-8).sqrt()
    loss = openrlhf_policy(s, p, advantage)
    if s.get("gspo"):
        total = ((loss * p.mask).sum(-1) / (p.mask.sum(-1) + 1e-8)).sum() / len(p.mask)
    else:
        total = (loss * p.mask).sum() / p.mask.sum()
    if in_loss and coefficient:
        kl = estimate(name, p.policy - p.reference).clamp(-10, 10)
        total = total + coefficient * (kl * p.mask).sum() / p.mask.sum()
    return p.answer(total)


def openrlhf_scores(estimator: str, p: Padded) -> list[float]:
    """The reward after the group's baseline and scale."""
    out = []
    for i, uid in enumerate(p.uid):
        group = [r for r, u in zip(p.reward, p.uid, strict=True) if u == uid]
        mean, n = sum(group) / len(group), len(group)
        std = (sum((g - mean) ** 2 for g in group) / (n - 1)) ** 0.5
        out.append({
            "reinforce": p.reward[i],
            "rloo": p.reward[i] - (sum(group) - p.reward[i]) / (n - 1),
            "reinforce_baseline": p.reward[i] - mean,
            "dr_grpo": p.reward[i] - mean,
            "group_norm": (p.reward[i] - mean) / (std + 1e-9),
        }[estimator])  # fmt: skip
    return out


def openrlhf_policy(s: dict[str, Any], p: Padded, a: torch.Tensor) -> torch.Tensor:
    """[B, T] the policy loss with clip, dual clip and correction of the sampler's mismatch."""
    low, high = s.get("low_clip", 0.2), s.get("high_clip", 0.2)
    if s.get("gspo"):
        other = p.sampler if s.get("is_type") else p.anchor
        mean = ((p.policy - other) * p.mask).sum(-1, keepdim=True) / p.mask.sum(-1, keepdim=True)
        ratio = mean.exp().expand_as(a)
    else:
        ratio = (p.policy - p.anchor).clamp(-20, 20).exp()
    gain = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    if s.get("dual_clip"):
        gain = torch.where(a < 0, torch.maximum(gain, s["dual_clip"] * a), gain)
    loss = -gain
    if s.get("is_type") and not s.get("gspo"):
        w = (p.anchor - p.sampler).exp()
        low_is, high_is = s.get("is_band", (0.5, 5.0))
        loss = loss * (w * ((w >= low_is) & (w <= high_is)) if s["is_type"] == "icepop" else w.clamp(low_is, high_is))
    return loss
