"""The whole of GRPO in one file: `gropius.objective` for the formula, plain PyTorch for the rest.

A small transformer learns to write three digits backwards, from nothing but a score. Read it from top to bottom:
a policy, a task, sampling, scoring, and the loop. Runs in under a minute on a laptop:

    python examples/loop.py              # GRPO
    python examples/loop.py dr_grpo      # any preset of `gropius presets`
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from gropius.objective.formula import formula
from gropius.objective.loss import Tokens, loss
from gropius.objective.presets import resolve
from gropius.objective.selection import Response, assign

DIGITS, LENGTH = 10, 3
PROMPTS, GROUP_SIZE, STEPS = 48, 16, 60
BEGIN = 10  # the token that asks for the answer; digits are tokens 0..9


# --- 1. the policy: tokens in, a distribution over the next token out -------------------------------------------------


class Policy(nn.Module):
    """A two-layer causal transformer over 11 tokens: [_N, _T] ids → [_N, _T, 11] logits."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4):
        super().__init__()
        self.token = nn.Embedding(DIGITS + 1, width)
        self.place = nn.Embedding(2 * LENGTH + 1, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, ids: Tensor) -> Tensor:
        size = ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(size)
        hidden = self.token(ids) + self.place(torch.arange(size))
        return self.head(self.blocks(hidden, mask=causal, is_causal=True))


# --- 2. the task: a prompt, and a rule that scores an answer ----------------------------------------------------------


def split() -> tuple[Tensor, Tensor]:
    """All 1,000 prompts in a fixed random order: 800 to train on, 200 held out."""
    order = torch.randperm(DIGITS**LENGTH, generator=torch.Generator().manual_seed(0))
    digits = torch.stack([order // DIGITS**k % DIGITS for k in range(LENGTH)], dim=1)
    return digits[:800], digits[800:]


def score(prompts: Tensor, answers: Tensor) -> Tensor:
    """[_N] the share of digits in the right place of the reversed prompt."""
    return (answers == prompts.flip(1)).double().sum(1) / LENGTH


# --- 3. sampling: one random draw per token, its log-probability kept -------------------------------------------------


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, greedy: bool = False) -> Tensor:
    """[_N, 3] an answer to every prompt [_N, 3]."""
    ids = torch.cat([prompts, torch.full((len(prompts), 1), BEGIN)], dim=1)
    for _ in range(LENGTH):
        logits = policy(ids)[:, -1]
        drawn = logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()
        ids = torch.cat([ids, drawn[:, None]], dim=1)
    return ids[:, -LENGTH:]


def logprobs(policy: Policy, prompts: Tensor, answers: Tensor) -> Tensor:
    """[_N, 3] log π of every answer token, differentiable."""
    begin = torch.full((len(prompts), 1), BEGIN)
    ids = torch.cat([prompts, begin, answers[:, :-1]], dim=1)
    every = policy(ids)[:, LENGTH:].log_softmax(-1)
    return every.gather(2, answers[:, :, None])[:, :, 0]


# --- 4. the loop: sample groups, compare siblings, move the policy ----------------------------------------------------


def main(preset: str = "grpo") -> float:
    """Train, print the curve, and return the held-out share of fully right answers."""
    torch.manual_seed(0)
    # The reference of the KL term is the policy that training started from; this one started from noise, so no KL.
    without_kl = {"kl.estimator": "none"} if resolve(preset).needs_reference else {}
    objective = resolve(preset, without_kl)
    print(formula(objective), end="\n\n")
    policy = Policy()
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    train, held_out = split()
    for step in range(STEPS + 1):
        if step % 10 == 0:
            right = (score(held_out, sample(policy, held_out, greedy=True)) == 1).double().mean().item()
            print(f"step {step:4d}   held-out {right:.3f}")
        if step == STEPS:
            break

        # Every prompt is asked GROUP_SIZE times: siblings share everything but their random draws.
        chosen = train[torch.randint(len(train), (PROMPTS,))]
        prompts = chosen.repeat_interleave(GROUP_SIZE, dim=0)
        answers = sample(policy, prompts)
        rewards = score(prompts, answers)

        # Compare each answer with its siblings, and give every token its weight. NumPy, float64, no gradient.
        mask = torch.ones(LENGTH, dtype=torch.bool).numpy()
        responses = [
            Response(group=str(i // GROUP_SIZE), reward=reward, mask=mask) for i, reward in enumerate(rewards.tolist())
        ]
        assignment = assign(objective, responses)

        # An answer whose every weight × advantage is zero adds nothing to the gradient, so it is never run.
        live = [i for i, row in enumerate(assignment.responses) if not row.skipped]
        if not live:
            continue
        rows = [assignment.responses[i] for i in live]
        policy_logprobs = logprobs(policy, prompts[live], answers[live]).flatten()
        tokens = Tokens(
            sequence=torch.arange(len(live)).repeat_interleave(LENGTH),
            mask=torch.ones(len(live) * LENGTH, dtype=torch.bool),
            advantage=torch.cat([torch.from_numpy(row.advantage) for row in rows]).float(),
            weight=torch.cat([torch.from_numpy(row.weight) for row in rows]).float(),
            sequences=len(live),
            sampler=policy_logprobs.detach(),  # the same weights drew the answers
        )  # no anchor is given: one update a batch, so the anchor is the policy itself and every ratio is 1

        # loss = Σ weight · ( −surrogate + β·kl ): its value is 0 here, its gradient is not.
        out = loss(objective, policy_logprobs, tokens)
        optimiser.zero_grad()
        out.loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
    return right


if __name__ == "__main__":
    main(*sys.argv[1:2])
