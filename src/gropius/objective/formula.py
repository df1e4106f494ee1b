"""The objective in words that a person can check: one line of formula, one line an axis. No torch."""

from __future__ import annotations

import math

from gropius.objective.spec import Advantage, Aggregate, Kl, Objective, Ratio, Selection, Surrogate

_BASELINE = {
    "none": "R_i",
    "batch_mean": "R_i − mean_batch(R)",
    "group_mean": "R_i − mean_group(R)",
    "leave_one_out": "R_i − mean_{j≠i}(R_j)",
    "length_weighted": "R_i − Σ L_j R_j / Σ L_j",
    "greedy": "R_i − R_greedy",
    "critic": "GAE(r, V)",
    "optimal_token": "R_i − Σ_j R_j·W_jt / Σ_j W_jt",
    "runner_up": "R_i − max_{j≠i}(R_j) where R_i is the best, else 0",
    "subset": "R_i − E[best of k−1 others]",
}
_ESTIMATOR = {"k1": "x", "k2": "x²/2", "k3": "(e^−x − 1 + x)", "abs": "|x|"}
_WEIGHT = {
    "response_mean": "1/(n·L_i)",
    "token_mean": "1/N",
    "prompt_mean": "1/(P·N_q)",
    "response_sum": "1/n",
    "constant_length": "1/(n·C)",
}
_LEVEL = {
    "none": "",
    "token": "r_t = π/π_anchor",
    "sequence": "r = exp(mean_t log π/π_anchor)",
    "sequence_token": "r_t = sg(exp(mean_t log π/π_anchor))·π/sg(π)",
    "sequence_product": "r = Π_t π/π_anchor",
}


def formula(objective: Objective) -> str:
    """One line for the loss, then one for each symbol in it.

    >>> print(formula(Objective()).splitlines()[0])
    loss = Σ_t 1/(n·L_i) · [ −min(r_t·A, clip(r_t, 0.8, 1.2)·A) + 0.04·(e^−x − 1 + x) ]
    """
    o = objective
    kl = "" if not o.kl_in_loss else f" + {o.kl.coefficient:g}·{_kl_body(o.kl)}"
    factor = "w_t·" if o.ratio.correction != "none" else ""
    body = f"−{factor}{surrogate(o.surrogate, o.ratio)}{kl}{_beside(o)}"
    imitation = f" − {o.terms.imitation:g}·mean_t(log π) over right responses" if o.terms.imitation else ""
    lines = [f"loss = Σ_t {_WEIGHT[o.aggregate.kind]} · [ {body} ]{imitation}"]
    if o.surrogate.kind == "classify":
        lines = [_CLASSIFY.replace("τ", f"{o.surrogate.tau:g}")]
    lines.append("A = " + advantage(o.advantage, o.kl))
    lines += positions(o.advantage)
    if o.ratio.level != "none":
        anchor = "the policy before the batch's first update" if o.ratio.anchor == "snapshot" else "the sampler"
        lines.append(f"{_LEVEL[o.ratio.level]}, π_anchor: {anchor}")
    if o.ratio.correction != "none":
        lines.append("w_t = " + correction(o.ratio))
    if o.kl.estimator != "none":
        x = "x = log π − log π_ref" if o.kl_in_loss else "x = log π_anchor − log π_ref"
        lines.append(x + (f", kept in [−{o.kl.clamp:g}, {o.kl.clamp:g}]" if o.kl.clamp else ""))
        if o.kl_in_loss and o.kl.gradient in ("score", "weighted") and o.ratio.level != "token":
            lines.append("r_t = π/π_anchor in the KL term")
    lines.append(aggregate(o.aggregate))
    lines += selection(o.selection) + terms(o)
    return "\n".join(lines)


def surrogate(axis: Surrogate, ratio: Ratio) -> str:
    """The policy term as printed in its paper."""
    r = "r_t" if ratio.level in ("token", "sequence_token") else "r"
    if axis.kind == "clip":
        text = f"min({r}·A, clip({r}, {1 - axis.low:.6g}, {1 + axis.high:.6g})·A)"
        if axis.ceiling:
            text = f"min(min({r}, {axis.ceiling:g})·A, clip({r}, {1 - axis.low:.6g}, {1 + axis.high:.6g})·A)"
        return f"max({text}, {axis.dual:g}·A if A<0)" if axis.dual else text
    plain = "A·log π" if ratio.level == "none" else f"{r}·A"
    return {
        "none": plain,
        "capped": f"sg(clip({r}, {axis.cap_low:g}, {axis.cap:g}))·A·log π",
        "clip_masked": f"sg({r})·A·log π where {r} is in ({1 - axis.low:g}, {1 + axis.high:g}) or A pulls back",
        "soft_gate": f"(4/τ)·σ(τ·({r} − 1))·A, τ = {axis.tau_positive:g} for A>0 else {axis.tau_negative:g}",
        "log_clip": f"exp(mean_t clipped log r_t)·A, log r_t ≤ {axis.high:g} for A>0, ≥ −{axis.low:g} for A<0",
        "gamma_gate": f"sg(e^λ·{r}^k·e^(−λ{r}))·A·log π, "
        f"(k, λ) = ({axis.k_positive:g}, {axis.lambda_positive:g}) for A>0 "
        f"else ({axis.k_negative:g}, {axis.lambda_negative:g})",
        "classify": "",
        "divergence_mask": f"M_t·r_t·A, M_t = 0 where {axis.divergence} > {axis.threshold:g} and A pushes away"
        + (f", weight ≤ {axis.cap:g}" if axis.cap else ""),
    }[axis.kind]


def advantage(axis: Advantage, kl: Kl) -> str:
    """How A is made from the rewards of a group."""
    body = _BASELINE[axis.baseline]
    if axis.transform != "none":
        times = f"{axis.k}·" if axis.transform == "pkpo" else ""
        body = body.replace("R_i", f"{times}E[best of {axis.k} with i]").replace("mean_group(R)", "their mean")
        body = body.replace("k−1", str(axis.k - 1))
    eps = f" + {axis.epsilon:g}" if axis.epsilon else ""
    which = "population" if axis.ddof == 0 else "sample"
    if axis.scale == "group_mean":
        body = f"({body}) / (mean_group(R){eps})"
    elif axis.scale == "subset_std":
        body = f"({body}) / (std of the best of {axis.k}{eps})"
    elif axis.scale != "none":
        over = {"group_std": "group", "batch_std": f"batch, of {axis.scale_of}"}[axis.scale]
        body = f"({body}) / (std_{over.split(',')[0]}{eps}), {which} std of {over}"
    if axis.combine == "normalise_then_sum":
        body += ", each reward part on its own, then the weighted sum"
    if axis.rescale_live:
        body += "; times B/(B − M), M responses in groups of equal rewards"
    if kl.estimator != "none" and kl.place == "reward":
        penalty = f"{kl.coefficient:g}·{_ESTIMATOR[kl.estimator]}"
        if kl.reward_form == "sequence":
            body += f"; R_i = reward − Σ_t {penalty}"
        elif kl.reward_form == "token":
            body += f"; r_t less {penalty}"
        else:
            body += f"; then A_t = A − Σ_{{s≥t}} {penalty}"
    if axis.whiten != "none":
        body += f"; then whitened over the batch's {axis.whiten} ({which} std{eps})"
    return body


def positions(axis: Advantage) -> list[str]:
    """Where a token's advantage differs from its response's, in words; nothing for a plain outcome."""
    lines = []
    if axis.baseline == "critic":
        lam = f"1 − 1/({axis.gae_alpha:g}·L_i), kept in [0, 1]" if axis.gae_alpha else f"{axis.gae_lambda:g}"
        lines.append(
            f"GAE: A_t = Σ_l (γλ)^l·(r + γ·V' − V)_{{t+l}}, γ = {axis.discount:g}, λ = {lam}; the critic learns "
            f"A_t + V with λ = {axis.gae_lambda_critic:g}"
        )
        where = {"outcome": "the last token", "step": "the step's last token", "turn": "the turn's last token"}
        lines.append(f"r_t: rewards at {where[axis.credit]}")
        return lines
    if axis.baseline == "optimal_token":
        lines.append("W_jt = Σ_{s≤t} (1 − 2π + Σ_v π_v²): a baseline of its own for every token")
    if axis.credit == "outcome":
        return lines
    which = "population" if axis.ddof == 0 else "sample"
    scale = f" / ({which} std + {axis.epsilon:g})" if axis.scale == "group_std" else ""
    base = {"none": "", "group_mean": " − mean", "leave_one_out": " − mean of the others"}[axis.baseline]
    final = f"R_i: the reward without a position, its A times {axis.final_weight:g}"
    if axis.final == "in_return":
        final = "the reward without a position falls at the last token"
    if axis.credit == "step":
        lines.append(
            f"A_t: Σ over steps that end at or after t of (score{base}){scale}, pooled over the group; {final}"
        )
    else:
        pool = "the same turn of the siblings" if axis.pool == "turn_index" else "all turns of the group"
        lines.append(
            f"A_t: (G{base}){scale} over {pool}, G = Σ_{{l≥k}} {axis.discount:g}^(l−k)·r_l of the token's turn k; "
            + final
        )
    return lines


def correction(axis: Ratio) -> str:
    """The weight for a sampler that is not the anchor."""
    high = "∞" if axis.correction_high == math.inf else f"{axis.correction_high:g}"
    band = f"[{axis.correction_low:g}, {high}]"
    source = {
        "truncate": f"clip(π_anchor/π_sampler, {band})",
        "mask": f"π_anchor/π_sampler inside {band}, else 0",
        "sequence_truncate": f"clip(Π_t π_anchor/π_sampler, {band})",
        "sequence_mask": f"Π_t π_anchor/π_sampler inside {band}, else 0",
        "geometric_mask": f"1 where exp(mean_t log π_anchor/π_sampler) is inside {band}, else 0",
    }
    return source[axis.correction] + " (detached)"


def aggregate(axis: Aggregate) -> str:
    """What the denominator counts."""
    what = {
        "response_mean": "n responses, L_i loss tokens of response i",
        "token_mean": "N loss tokens of the whole optimiser batch",
        "prompt_mean": "P prompts, N_q loss tokens of prompt q",
        "response_sum": "n responses",
        "constant_length": f"n responses, C = {axis.length}",
    }[axis.kind]
    notes = []
    if axis.count_masked:
        notes.append("masked responses and tokens counted")
    if axis.count_dead:
        notes.append("dropped dead groups counted")
    if axis.shared == "each":
        notes.append("a token that branches share weighs as many times as there are branches")
    if not axis.count_corrected:
        notes.append("tokens masked by the correction not counted")
    return ", ".join([what, *notes])


def selection(axis: Selection) -> list[str]:
    """One line for each part of the selection that is not the default."""
    lines = []
    if axis.dead != "keep":
        lines.append(f"groups of equal raw reward: {axis.dead}")
    if axis.truncated == "soft_penalty":
        lines.append(
            f"truncated responses: penalty from {axis.overlong_max - axis.overlong_cache} tokens to "
            f"−1 at {axis.overlong_max}"
        )
    elif axis.truncated != "keep":
        lines.append(f"truncated responses: {axis.truncated}")
    if axis.entropy_top < 1:
        of = "" if axis.entropy_over == "batch" else " of each response"
        lines.append(f"policy term only on the {axis.entropy_top:.0%} of tokens{of} with the highest entropy")
    if axis.covariance == "clip":
        lines.append(
            f"policy term dropped on {axis.covariance_share:g} of the tokens, among those whose covariance of log π "
            f"and A is in [{axis.covariance_low:g}, {axis.covariance_high:g}]"
        )
    if axis.covariance == "kl":
        lines.append(
            f"plus {axis.covariance_coefficient:g}·|log r_t| on the {axis.covariance_share:g} of tokens with the "
            "highest covariance of log π and A"
        )
    if axis.off_policy_mask:
        lines.append(f"policy term dropped where A<0 and mean_t(log π_anchor − log π) > {axis.off_policy_mask:g}")
    return lines


def terms(objective: Objective) -> list[str]:
    """One line for each term beside the policy term that needs one."""
    axis, lines = objective.terms, []
    if axis.entropy_target:
        lines.append(
            f"η: in force while the mean entropy is at most {axis.entropy_target:g}, moved by {axis.entropy_step:g} a "
            "step"
        )
    if objective.surrogate.demonstrations == "shaped":
        lines.append(f"tokens of a demonstration: π/(π + {objective.surrogate.gamma:g})·A in place of the policy term")
    if axis.imitation or objective.surrogate.kind == "classify":
        lines.append(f"right: raw metric at least {objective.selection.correct:g}")
    return lines


_CLASSIFY = (
    "loss = mean over groups of log(1 + Σ_right e^(−s_i/τ)) + log(1 + Σ_wrong e^(s_i/τ)), s_i = mean_t log π/π_anchor"
)


def _beside(objective: Objective) -> str:
    if not objective.entropy_in_loss:
        return ""
    return " − η·H_t" if objective.terms.entropy_target else f" − {objective.terms.entropy:g}·H_t"


def _kl_body(axis: Kl) -> str:
    estimate = _ESTIMATOR[axis.estimator]
    return {
        "direct": estimate,
        "score": f"r_t·{estimate}",
        "weighted": f"sg(r_t)·{estimate}",
        "straight_through": f"{estimate} (gradient of x²/2)",
    }[axis.gradient]
