"""The optimiser: its schedule, what decays, what clipping reports, and how it goes on after a restart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gropius.errors import RecipeError
from gropius.train import optim
from gropius.train.optim import Optimiser, OptimiserSettings, learning_rate


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def run(model: nn.Module, optimiser: Optimiser, steps: range) -> list[float]:
    norms = []
    for n in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(n))
        (model(x) - x.sum(-1, keepdim=True)).square().sum().backward()
        norms.append(optimiser.step().grad_norm)
    return norms


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_schedule_warms_up_starts_at_the_top_and_ends_at_its_ratio(schedule):
    settings = OptimiserSettings(2.0, total_steps=20, warmup_steps=4, schedule=schedule, final_ratio=0.1)
    rates = [learning_rate(settings, n) for n in range(25)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    end = 2.0 if schedule == "constant" else 0.2
    assert rates[19] == pytest.approx(end) and rates[24] == pytest.approx(end)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_the_middle_of_the_cosine_is_half_way():
    settings = OptimiserSettings(1.0, total_steps=11, schedule="cosine")
    assert learning_rate(settings, 5) == pytest.approx(0.5)
    assert learning_rate(settings, 2) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.2)))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(RecipeError, match='did you mean "cosine"'):
        Optimiser(network(), OptimiserSettings(schedule="cosin"))


def test_it_is_adamw_with_decay_on_matrices_only():
    ours, theirs = network(), network()
    optimiser = Optimiser(ours, OptimiserSettings(0.05, weight_decay=0.3, grad_clip=0.0))
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
    )
    for n in range(3):
        run(ours, optimiser, range(n, n + 1))
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(n))
        (theirs(x) - x.sum(-1, keepdim=True)).square().sum().backward()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before_it():
    seen = []
    model = network()
    optimiser = Optimiser(model, OptimiserSettings(1e-3, grad_clip=0.5))
    adam = optimiser._adam.step
    optimiser._adam.step = lambda: (
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()),
        adam(),
    )
    (norm,) = run(model, optimiser, range(1))
    assert norm > 1.0
    assert float(seen[0]) == pytest.approx(0.5, rel=1e-4)


def test_a_norm_that_is_not_finite_moves_nothing():
    model = network()
    optimiser = Optimiser(model, OptimiserSettings(1e-3))
    before = flat(model)
    model[0].weight.grad = torch.full_like(model[0].weight, float("nan"))
    info = optimiser.step()
    assert not info.taken and optimiser.steps == 0 and torch.equal(flat(model), before)
    assert model[0].weight.grad is None and optimiser.tensors() == {}


def test_a_restored_optimiser_goes_on_with_the_same_bits():
    settings = OptimiserSettings(0.05, total_steps=9, warmup_steps=2, schedule="cosine", weight_decay=0.1)
    whole = network()
    run(whole, Optimiser(whole, settings), range(6))
    first = network()
    optimiser = Optimiser(first, settings)
    run(first, optimiser, range(3))
    second = network()
    second.load_state_dict(first.state_dict())
    again = Optimiser(second, settings)
    again.restore({key: value.clone() for key, value in optimiser.tensors().items()}, optimiser.steps)
    run(second, again, range(3, 6))
    assert torch.equal(flat(second), flat(whole))


def test_the_state_of_another_model_is_refused():
    optimiser = Optimiser(network(), OptimiserSettings())
    with pytest.raises(ValueError, match="another model"):
        optimiser.restore({"nobody.exp_avg": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match="does not fit"):
        optimiser.restore({"0.weight.exp_avg": torch.zeros(1)}, 1)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1100), nn.Tanh(), nn.Linear(1100, 1))  # one matrix of more than 4096 numbers


KINDS = {
    "adamw": OptimiserSettings(3e-3, weight_decay=0.1),
    "8 bits": OptimiserSettings(3e-3, weight_decay=0.1, kind="adamw_8bit"),
    "offloaded": OptimiserSettings(3e-3, weight_decay=0.1, offload=True),
    "8 bits, offloaded": OptimiserSettings(3e-3, weight_decay=0.1, kind="adamw_8bit", offload=True),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Paged moments fall back to plain ones on a CPU: the same code up to the buffers."""
    monkeypatch.setattr(optim, "_on_a_gpu", lambda parameters: True)


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_goes_on_with_the_same_bits_and_takes_no_other_kinds_state(name, as_on_a_gpu):
    straight, first, second = wide(), wide(), wide()
    run(straight, Optimiser(straight, KINDS[name]), range(6))
    before = Optimiser(first, KINDS[name])
    run(first, before, range(3))
    second.load_state_dict(first.state_dict())
    after = Optimiser(second, KINDS[name])
    after.restore({key: value.clone() for key, value in before.tensors().items()}, before.steps)
    run(second, after, range(3, 6))
    assert torch.equal(flat(straight), flat(second))
    other = Optimiser(wide(), KINDS["8 bits" if name == "adamw" else "adamw"])
    with pytest.raises(ValueError, match="of another model"):
        other.restore(before.tensors(), 3)


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize(("name", "bound"), [("offloaded", 1e-5), ("8 bits", 0.05), ("8 bits, offloaded", 0.05)])
def test_other_kinds_move_as_adamw_does(name, bound, as_on_a_gpu):
    plain, other, start = wide(), wide(), flat(wide())
    for model, kind in ((plain, "adamw"), (other, name)):
        run(model, Optimiser(model, KINDS[kind]), range(20))
    assert (flat(other) - flat(plain)).norm() <= bound * (flat(plain) - start).norm()
    assert not torch.equal(flat(other), flat(plain))


def test_moments_in_8_bits_take_a_quarter():
    sizes = {}
    for name in ("adamw", "8 bits"):
        model = nn.Linear(64, 256, bias=False)
        optimiser = Optimiser(model, KINDS[name])
        model(torch.ones(1, 64)).sum().backward()
        optimiser.step()
        tensors = optimiser.tensors()
        sizes[name] = sum(t.nbytes for key, t in tensors.items() if "qmap" not in key and not key.endswith("step"))
    assert sizes["8 bits"] <= 0.26 * sizes["adamw"]


def test_an_unknown_kind_a_missing_package_and_an_offload_from_the_cpu_are_refused(monkeypatch):
    with pytest.raises(RecipeError, match='did you mean "adamw_8bit"'):
        Optimiser(network(), OptimiserSettings(kind="adamw_8bits"))
    with pytest.raises(RecipeError, match="lies in the CPU's"):
        Optimiser(network(), OptimiserSettings(offload=True))
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'gropius\[optim\]'"):
        Optimiser(network(), KINDS["8 bits"])
