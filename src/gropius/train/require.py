"""What must hold of a batch before it is trained on: which weights drew it, its verdicts, both sides' numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gropius.errors import EngineError, RunHalted
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.rollout.select import Selected
from gropius.train import keep, mismatch
from gropius.train.sequences import cut
from gropius.train.step import Learner
from gropius.types import Completion, Request, Sampling, Verdict

if TYPE_CHECKING:
    from gropius.train.loop import Run


def sampling_of(plan: Resolved, loaded: LoadedModel) -> Sampling:
    """How training responses are drawn: what the recipe says, and the model's own stop tokens."""
    r = plan.rollout
    stops = loaded.stop_token_ids
    return Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k, r.min_p, stops, r.stop_strings)


def require_verdicts(run: Run, batch: Selected, step: int) -> None:
    """Halt, saved as it was before this step, when more responses are void than `void_limit` allows.

    A void verdict is our fault (verifier, sandbox, gold answer): training on the rest would hide it.
    """
    verdicts, reasons = _verdicts(batch), voids_of(batch)
    voids, limit = sum(reasons.values()), run.plan.void_limit
    if voids and voids == len(verdicts) and limit >= 1:
        run.progress.note(f"step {step}: every verdict is void: the weights stay as they are. {_commonest(reasons)}")
    if not too_void(batch, limit):
        return
    keep.now(run)
    raise RunHalted(
        f"step {step}: {voids} of {len(verdicts)} verdicts are void, more than void_limit = {limit:g} allows. "
        f"{_commonest(reasons)}. The weights are those after step {run.state.step}; mend the "
        f"cause, then: gropius resume {run.writer.folder}"
    )


def too_void(batch: Selected, limit: float) -> bool:
    """Are more than a share `limit` of the verdicts void?"""
    return sum(voids_of(batch).values()) > limit * len(_verdicts(batch))


def voids_of(batch: Selected) -> Counter[str]:
    """Void verdicts by their reason."""
    return Counter(verdict.outcome.reason for verdict in _verdicts(batch) if verdict.outcome.status == "void")


def _verdicts(batch: Selected) -> list[Verdict]:
    every = [episode.verdict for group in (*batch.groups, *batch.dropped) for episode in group.episodes]
    return [verdict for verdict in every if verdict is not None]


def _commonest(reasons: Counter[str]) -> str:
    cause, count = reasons.most_common(1)[0]
    return f"Most often ({count} times): {cause[:500]}"


def require_own_weights(run: Run, batch: Selected) -> None:
    """Halt when a response was drawn from other weights than the policy's: its log-probabilities belong to no one.

    What an earlier step drew of a response carries the versions of its tokens; the rest must be the policy's own.
    """
    for group in (*batch.groups, *batch.dropped):
        for episode in group.episodes:
            if episode.weight_digest and episode.weight_digest != run.digest:
                whose = f"group {episode.group_id}, member {episode.member}"
                raise _not_ours(run, whose, episode.policy_version, episode.weight_digest)


def require_policy(run: Run, asked: Request, drawn: Completion) -> None:
    """The same of one completion."""
    if drawn.weight_digest and drawn.weight_digest != run.digest:
        _, step, index, member = asked.stream
        whose = f"group {step:06d}-{index:04d}, member {member}"
        raise _not_ours(run, whose, drawn.policy_version, drawn.weight_digest)


def _not_ours(run: Run, whose: str, version: int, digest: str) -> EngineError:
    return EngineError(
        f"{whose}: drawn from weights {digest[:12]} (version {version}), and the policy is {run.digest[:12]} "
        f"(version {run.learner.optimiser.steps}): the engine did not take the weights over. Nothing was trained on "
        f"them; `gropius resume {run.writer.folder}` goes on"
    )


def require_agreement(run: Run, batch: Selected, logprobs: Sequence[Any]) -> None:
    """Stop the run when trainer and sampler give one token two log-probabilities, and say why."""
    every = [episode for group in batch.groups for episode in group.episodes]
    fresh = [i for i, episode in enumerate(every) if episode.token_versions is None]
    if run.plan.train.stream != "off":  # there a response may be of older weights as a whole
        fresh = [i for i in fresh if every[i].weight_digest == run.digest]
    if not fresh:
        return
    episodes, rows = [every[i] for i in fresh], [cut(batch.groups)[i] for i in fresh]
    logprobs = [logprobs[i] for i in fresh]

    def rescore(temperature: float) -> Sequence[Any]:
        learner = run.learner
        settings = dataclasses.replace(learner.settings, temperature=temperature)
        other = Learner(learner.forward, learner.objective, learner.optimiser, settings, learner.team)
        return other.score(rows).logprobs

    sampling, digest = sampling_of(run.plan, run.loaded), run.digest
    found = mismatch.require_agreement(
        episodes, logprobs, mismatch.Expected(run.plan.train.mismatch_bound, sampling, digest), rescore
    )
    run.state.agreed = True
    run.progress.note(
        f"sampler and trainer agree: |difference| mean {found.mean:.2g}, largest {found.largest:.2g} nats over "
        f"{found.tokens} tokens (bound {run.plan.train.mismatch_bound:g})"
    )
