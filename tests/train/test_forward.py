"""A pack computes what its sequences compute one at a time: values and parameter gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import ARCHITECTURES, SHAPE, VOCABULARY, batch, build
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gropius.errors import ModelError
from gropius.train.forward import Forward, score
from gropius.train.pack import pack

TEMPERATURE = 0.8


def alone(model, rows, probe):
    """Every row by itself through the untouched model: log-probabilities, and the gradient of their probed sum."""
    model.zero_grad()
    values = []
    for sequence, weights in zip(rows, probe, strict=True):
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE
        logp = torch.log_softmax(logits, -1)[len(sequence.prompt_ids) - 1 : -1]
        chosen = logp.gather(1, torch.from_numpy(sequence.response_ids)[:, None])[:, 0]
        own = torch.from_numpy(sequence.mask)
        (chosen[own] * torch.from_numpy(weights[sequence.mask]).to(chosen.dtype)).sum().backward()
        values.append(torch.where(own, chosen, 0.0).detach().numpy())
    return values, {n: p.grad.clone() for n, p in model.named_parameters()}


def packed(model, rows, probe, **options):
    model.zero_grad()
    forward = Forward.of(model, packed=options.pop("packed", True))
    values = [None] * len(rows)
    for one in pack(rows, **{"budget_tokens": 1 << 20, "skip": False, **options}):
        logprobs, _ = forward.logprobs(one, temperature=TEMPERATURE)
        weights = np.concatenate([probe[i][rows[i].mask] for i in one.index])
        (logprobs * torch.from_numpy(weights).to(logprobs.dtype)).sum().backward()
        start = 0
        for i in one.index:
            size = int(rows[i].mask.sum())
            values[i] = np.zeros(len(rows[i].mask))
            values[i][rows[i].mask] = logprobs[start : start + size].detach().numpy()
            start += size
    return values, {n: p.grad.clone() for n, p in model.named_parameters()}, forward


def compare(model, rows, bound, **options):
    stream = np.random.default_rng(1)
    probe = [stream.normal(size=len(s.mask)) for s in rows]
    expected, gradient = alone(model, rows, probe)
    found, ours, forward = packed(model, rows, probe, **options)
    for a, b, s in zip(expected, found, rows, strict=True):
        if s.mask.any():
            np.testing.assert_allclose(b, a, rtol=bound, atol=bound)
    whole = torch.cat([g.flatten() for g in gradient.values()]).norm()
    for name, g in gradient.items():
        assert (ours[name] - g).norm() <= bound * whole, name
    return forward


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pack_equals_one_sequence_at_a_time_in_float64(name):
    forward = compare(build(name), batch(), 1e-9)
    assert forward.packed and forward.note == ""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pack_equals_one_sequence_at_a_time_in_float32(name):
    compare(build(name, torch.float32), batch(seed=3), 1e-5)


@pytest.mark.parametrize("options", [{"budget_tokens": 30}, {"share": False}, {"packed": False}])
def test_budget_sharing_and_padding_change_nothing(options):
    forward = compare(build("gemma3"), batch(seed=5), 1e-9, **options)
    assert forward.packed is options.get("packed", True)


def test_an_architecture_that_cannot_be_packed_runs_padded_rows_and_says_so():
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, sliding_window=64, attn_logit_softcapping=20.0)
    forward = Forward.of(Gemma2ForCausalLM(config).eval())
    assert not forward.packed
    assert "Gemma2ForCausalLM" in forward.note and "softcap" in forward.note and "\n" not in forward.note


def test_a_layer_that_hides_its_window_is_found_out():
    """The few tokens of the check do not reach a long window, so the window itself must be handed over."""
    kinds = ["sliding_attention", "full_attention"]
    config = Qwen3Config(**SHAPE, head_dim=8, use_sliding_window=True, sliding_window=99, layer_types=kinds)
    model = Qwen3ForCausalLM(config).eval()
    assert Forward.of(model).packed
    model.model.layers[0].self_attn.sliding_window = None
    forward = Forward.of(model)
    assert not forward.packed and "which tokens they attend to" in forward.note


def test_the_models_own_attention_is_put_back():
    model = build("llama")
    before = model.config._attn_implementation
    Forward.of(model)
    assert model.config._attn_implementation == before


def test_score_gives_a_row_per_sequence_and_entropies_when_asked():
    rows = batch(seed=2)
    forward = Forward.of(build("qwen2"))
    scores = score(forward, pack(rows, budget_tokens=60), count=len(rows), temperature=TEMPERATURE, entropy=True)
    again = score(forward, pack(rows, budget_tokens=900), count=len(rows), temperature=TEMPERATURE)
    assert again.entropies == [None] * len(rows)
    for sequence, values, same, spread in zip(rows, scores.logprobs, again.logprobs, scores.entropies, strict=True):
        if sequence.skipped or not sequence.mask.any():
            assert values is None and spread is None
        else:
            assert (values[~sequence.mask] == 0).all() and (values[sequence.mask] < 0).all()
            assert (spread[sequence.mask] > 0).all() and (spread <= np.log(VOCABULARY) + 1e-9).all()
            np.testing.assert_allclose(values, same, rtol=1e-9)


def test_bfloat16_computes_near_float32_and_leaves_the_weights_alone():
    rows = batch(seed=2)
    model = build("llama", torch.float32)
    exact = Forward.of(model)
    rough = Forward.of(model, compute_dtype="bfloat16")
    (one,) = pack(rows, budget_tokens=900)
    expected, found = exact.logprobs(one)[0], rough.logprobs(one)[0]
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).detach().abs().max()) < 0.2
    found.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(ModelError, match="bfloat16"):
        Forward.of(build("llama"), compute_dtype="float8")


def test_recomputing_activations_changes_nothing():
    rows = batch(seed=2)
    (one,) = pack(rows, budget_tokens=900)
    gradients = []
    for recompute in (False, True):
        model = build("qwen3")
        forward = Forward.of(model, recompute=recompute)
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        with forward.running():
            forward.logprobs(one)[0].sum().backward()
        assert len(calls) == 1 + recompute
        assert not model.training
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_the_head_in_float32_on_request_is_the_head_in_float32_and_the_rest_stays_bfloat16():
    (one,) = pack(batch(seed=2), budget_tokens=900)
    model = build("llama", torch.float32)
    values = {}
    for name, kind, wide in (("exact", "float32", False), ("rough", "bfloat16", False), ("wide", "bfloat16", True)):
        seen = []
        hook = model.model.layers[0].mlp.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o.dtype))
        values[name] = Forward.of(model, compute_dtype=kind, float32_head=wide).logprobs(one)[0].detach()
        hook.remove()
        assert seen[-1] == (torch.float32 if name == "exact" else torch.bfloat16)
    off = {name: float((values[name] - values["exact"]).abs().mean()) for name in ("rough", "wide")}
    assert 0 < off["wide"] < off["rough"]


def test_the_keys_of_a_recipe_reach_the_forward_pass(tmp_path):
    from small import run_small

    from gropius import build as root

    made = []
    honest = root.learner_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "learner_for", lambda *given: made.append(honest(*given)) or made[-1])
        quick = ["train.steps=2", "eval.before=false", "eval.after=false"]
        settings = ["model.dtype=bfloat16", "model.head_dtype=float32", "train.recompute=true"]
        run_small(tmp_path, *quick, *settings, "name=a", "train.optimiser=adamw_8bit")
        run_small(tmp_path, *quick, "name=b")
    first, second = (learner.forward for learner in made)
    assert first.float32_head and first.recompute and first.compute_dtype == "bfloat16"
    assert not second.float32_head and not second.recompute
    assert [learner.optimiser.settings.kind for learner in made] == ["adamw_8bit", "adamw"]


def test_a_run_with_recomputed_activations_is_the_same_run_to_the_bit(tmp_path):
    from small import run_small

    from gropius.train.sameness import compare as same

    folders = [
        run_small(tmp_path / str(recompute), "train.steps=2", f"train.recompute={str(recompute).lower()}")[0]
        for recompute in (False, True)
    ]
    found = same(*folders)
    assert found.difference in ("", "state, tables.train.recompute: False and True"), found
    assert found.counts["weights"] > 0 and found.counts["tensors of optimiser"] > 0
