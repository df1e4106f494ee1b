"""Log-probabilities in chunks are the plain ones, in value and gradient, and need no logits of all positions."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from gropius.errors import ModelError
from gropius.models import logprobs as module
from gropius.models.load import load_model
from gropius.models.logprobs import Head, backbone, token_logprobs
from gropius.models.tiny import TinyShape


def plain(hidden, head, targets, temperature):
    z = hidden @ head.weight.t()
    if head.bias is not None:
        z = z + head.bias
    if head.softcap:
        z = head.softcap * torch.tanh(z / head.softcap)
    logp = torch.log_softmax(z * head.scale / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def case(rows, width, vocabulary, dtype, bias=False, softcap=0.0, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype, requires_grad=True)
    b = torch.randn(vocabulary, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden, Head(weight, b, softcap, scale), targets


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [{}, {"bias": True}, {"softcap": 3.0}, {"bias": True, "softcap": 3.0, "scale": 0.25}])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_value_and_gradient_equal_the_plain_computation(monkeypatch, temperature, shape, with_entropy):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 1)  # 16 rows a chunk: the seams between chunks are exercised
    hidden, head, targets = case(50, 8, 30, torch.float64, **shape)
    inputs = [t for t in (hidden, head.weight, head.bias) if t is not None]
    g = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, entropy = token_logprobs(hidden, head, targets, temperature=temperature, entropy=with_entropy)
    theirs, plain_entropy = plain(hidden, head, targets, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours_total, theirs_total = (ours * g).sum(), (theirs * g).sum()
    if with_entropy:
        torch.testing.assert_close(entropy, plain_entropy, rtol=1e-12, atol=1e-12)
        ours_total, theirs_total = ours_total + (entropy * g).sum(), theirs_total + (plain_entropy * g).sum()
    for a, b in zip(torch.autograd.grad(ours_total, inputs), torch.autograd.grad(theirs_total, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("held", [0, 16, 39, 50])
def test_in_16_bits_the_gradient_does_not_depend_on_how_many_chunks_are_held_for_one_product(monkeypatch, held):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 1)  # 16 rows a chunk, the last one of 2
    monkeypatch.setattr(module, "GATHERED_NUMBERS", held * 30)
    hidden, head, targets = case(50, 8, 30, torch.float32)
    exact = torch.autograd.grad(plain(hidden, head, targets, 1.0)[0].sum(), (hidden, head.weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = token_logprobs(hidden, head, targets)[0]
    for a, b in zip(torch.autograd.grad(ours.sum(), (hidden, head.weight)), exact, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.01


def test_a_vocabulary_of_150_000_agrees_to_a_millionth_in_float32():
    hidden, head, targets = case(70, 4, 150_000, torch.float32)
    ours, entropy = token_logprobs(hidden, head, targets, entropy=True)
    double = plain(hidden.double(), Head(head.weight.double()), targets, 1.0)
    torch.testing.assert_close(ours.double(), double[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), double[1], rtol=2e-6, atol=0)
    ours_grad = torch.autograd.grad(ours.sum(), hidden)[0]
    theirs_grad = torch.autograd.grad(double[0].sum(), hidden)[0]
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=1e-5)


def test_the_logits_of_all_positions_never_exist(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 16 * 1000)
    rows_seen = []
    original = module._scaled_logits

    def spy(rows, *rest):
        rows_seen.append(len(rows))
        return original(rows, *rest)

    monkeypatch.setattr(module, "_scaled_logits", spy)
    hidden, head, targets = case(100, 4, 1000, torch.float32)
    token_logprobs(hidden, head, targets)[0].sum().backward()
    assert max(rows_seen) == 16 and sum(rows_seen) == 200


def test_autocast_computes_the_head_in_bfloat16_unless_float32_is_asked_for():
    hidden, head, targets = case(20, 64, 50, torch.float32)
    exact = plain(hidden, head, targets, 1.0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = token_logprobs(hidden, head, targets)[0]
        fine = token_logprobs(hidden, head, targets, float32_head=True)[0]
    assert rough.dtype == fine.dtype == torch.float32
    torch.testing.assert_close(fine, exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rough, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.2)


def test_no_position_gives_empty_tensors():
    hidden, head, targets = case(0, 4, 10, torch.float32)
    ours, entropy = token_logprobs(hidden, head, targets, entropy=True)
    assert ours.shape == entropy.shape == (0,)


def test_a_temperature_of_zero_is_refused():
    hidden, head, targets = case(2, 4, 10, torch.float32)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, head, targets, temperature=0.0)


def test_the_head_of_a_model_gives_the_models_own_logits_softcap_included():
    config = Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.05, query_pre_attn_scalar=8,
    )  # fmt: skip
    for model in (Gemma2ForCausalLM(config), load_model("tiny", tiny=TinyShape(hidden=32, layers=1)).model):
        head = Head.of(model.eval())
        ids = torch.arange(12)[None] % 40
        hidden = backbone(model)(input_ids=ids).last_hidden_state
        torch.testing.assert_close(head.logits(hidden), model(ids).logits, rtol=1e-5, atol=1e-6)
    assert Head.of(Gemma2ForCausalLM(config)).softcap == 0.05


def test_an_architecture_that_does_more_to_its_logits_is_refused():
    class Doubled(type(load_model("tiny", tiny=TinyShape(hidden=32, layers=1)).model)):
        def forward(self, **inputs):
            answer = super().forward(**inputs)
            answer.logits = answer.logits * 2 + 1
            return answer

    model = load_model("tiny", tiny=TinyShape(hidden=32, layers=1)).model
    with pytest.raises(ModelError, match="Doubled does more"):
        Head.of(Doubled(model.config))


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_of_150_000_has_the_gradient_of_the_plain_computation_to_a_millionth(tied):
    """Of a whole model, the embedding included: tied, it gets both gradients in one tensor."""
    shape = {"vocab_size": 150_000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1, tie_word_embeddings=tied)).double()
    ids = torch.randint(0, 150_000, (1, 40))
    targets = torch.randint(0, 150_000, (40,))
    gradients = []
    for ours in (True, False):
        model.zero_grad()
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        if ours:  # float32, as training computes it, against float64
            head = Head(model.lm_head.weight.float())
            logprobs, entropy = token_logprobs(hidden.float(), head, targets, temperature=0.9, entropy=True)
        else:
            logprobs, entropy = plain(hidden, Head(model.lm_head.weight), targets, 0.9)
        (logprobs.double().sum() + entropy.double().sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    whole = torch.cat([g.flatten() for g in gradients[1]]).norm()
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= 1e-6 * whole


def test_a_loss_of_the_entropy_alone_has_its_gradient_and_no_other():
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    head = Head(torch.randn(11, 8, dtype=torch.float64))
    _, entropy = token_logprobs(hidden, head, torch.zeros(5, dtype=torch.int64), entropy=True)
    (found,) = torch.autograd.grad(entropy.sum(), hidden)
    p = torch.softmax(hidden @ head.weight.T, -1)
    (expected,) = torch.autograd.grad(-(p * p.log()).sum(), hidden)
    assert torch.allclose(found, expected, atol=1e-12)
