"""Run under a Python that has TRL: its own trainer's advantages, loss and gradient on given batches. Not a test.

Reads [{"config": GRPOConfig keywords, "use_vllm": bool, "rows": [...]}] as JSON on stdin, writes
[{"loss": …, "gradient": [[…]]}] or {"error": …} on stdout. The trainer is real; only sampling, rewards and the model's
log-probabilities are given, so that the loss is a function of a leaf of log-probabilities.
"""

import json
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

PAD, EOS, WORD, FIRST_ROW = 0, 1, 2, 8
KEYS = ("policy", "anchor", "sampler", "reference", "entropy")


def tokenizer():
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(WORD, 128)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def model():
    shape = LlamaConfig(
        vocab_size=128, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def padded(rows, key, width):
    return torch.tensor([row[key] + [0.0] * (width - len(row[key])) for row in rows])


class Given:
    """Log-probabilities by row; the row is written in the prompt's only token."""

    def __init__(self, trainer, rows):
        width = max(len(row["policy"]) for row in rows)
        self.tables = {key: padded(rows, key, width) for key in KEYS}
        self.leaf = self.tables["policy"].requires_grad_(True)
        self.trainer = trainer

    def __call__(self, model, input_ids, attention_mask, logits_to_keep, **options):
        index = input_ids[:, 0] - FIRST_ROW
        if torch.is_grad_enabled():
            return self.leaf[index][:, :logits_to_keep], self.tables["entropy"][index][:, :logits_to_keep], None
        name = "reference" if model is self.trainer.ref_model else "anchor"
        return self.tables[name][index][:, :logits_to_keep], None, None


def evaluate(case):
    rows = case["rows"]
    funcs = len(rows[0]["rewards"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, report_to="none", use_cpu=True, bf16=False, **case["config"])
        rewards = [lambda completions, **_: [0.0] * len(completions) for _ in range(funcs)]
        for i, function in enumerate(rewards):
            function.__name__ = f"f{i}"
        model().save_pretrained(folder)  # a folder, because the trainer loads its reference model by name
        trainer = GRPOTrainer(
            folder,
            rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "w9"}] * 64),
            processing_class=tokenizer(),
        )
    trainer.use_vllm = case["use_vllm"]
    trainer.model.train()
    given = Given(trainer, rows)
    trainer._get_per_token_logps_and_entropies = given
    ids = [[WORD] * (len(r["policy"]) - 1) + [WORD if r["truncated"] else EOS] for r in rows]
    masks = [[int(m) for m in r["mask"]] for r in rows] if any(0 in r["mask"] for r in rows) else None
    sampler = [r["sampler"] for r in rows] if case["use_vllm"] else None
    prompts = [[FIRST_ROW + i] for i in range(len(rows))]
    trainer._generate = lambda _: (prompts, ids, masks, ["w3"] * len(rows), sampler, {}, None, None)
    trainer._calculate_rewards = lambda *_: torch.tensor([r["rewards"] for r in rows])
    batch = trainer._generate_and_score_completions([{"prompt": "w9"} for _ in rows])
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    slices = split_tensor_dict(batch, config.steps_per_generation)
    loss = sum(trainer._compute_loss(trainer.model, s) for s in slices[: config.gradient_accumulation_steps])
    loss.backward()
    gradient = [given.leaf.grad[i, : len(r["policy"])].tolist() for i, r in enumerate(rows)]
    return {"loss": loss.item(), "gradient": gradient}


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # the trainer prints; stdout carries the answer only
    torch.set_default_dtype(torch.float64)
    answer = []
    for item in json.load(sys.stdin):
        try:
            answer.append(evaluate(item))
        except (ValueError, RuntimeError, TypeError, AttributeError) as failure:
            answer.append({"error": f"{type(failure).__name__}: {failure}"})
    json.dump(answer, stdout)
