"""A worker that is not vLLM: the same wire, weights and stamps, with full forward passes of transformers in between.

As vLLM it starts with weights of noise, keeps a packed copy of the head, and may forget to renew it (`stale`).
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gropius.rollout.sampler import Rules, draw
from gropius.rollout.streams import stream_key, uniforms
from gropius.rollout.vllm.worker import Tokens
from gropius.types import Sampling


class Imitation:
    """Draws for all requests, one token a step, each from a forward pass over everything it has so far."""

    stale = False
    can_sleep = True

    def __init__(self, start):
        config = dict(start["config"])
        architecture = config.pop("model_type")
        with torch.random.fork_rng(devices=[]):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config)).eval()
        self.head = self.model.lm_head.weight.detach().clone()
        self.rows, self.events = {}, ["started"]
        self.facts = {"name": "imitation", "dtype": start["options"]["dtype"], "can_sleep": self.can_sleep}

    def add(self, key, request):
        if len(request["prompt"]) + request["limit"] > self.model.config.max_position_embeddings:
            raise ValueError("longer than the context")
        self.rows[key] = (request, [])

    def drop(self, keys):
        for key in keys:
            del self.rows[key]

    @torch.no_grad()
    def step(self):
        assert "asleep" not in self.events[-1:], "asked to draw while asleep"
        rows = list(self.rows.items())
        seen = [[*request["prompt"], *drawn] for _, (request, drawn) in rows]
        ids = torch.zeros(len(seen), max(map(len, seen)), dtype=torch.int64)
        for row, one in enumerate(seen):
            ids[row, : len(one)] = torch.tensor(one)
        last = torch.tensor([len(one) - 1 for one in seen])
        hidden = self.model.model(ids).last_hidden_state[torch.arange(len(seen)), last]
        keys = np.stack([stream_key(request["stream"]) for _, (request, _) in rows])
        positions = np.array([request["offset"] + len(drawn) for _, (request, drawn) in rows])
        rules = Rules.of([Sampling(request["limit"], *request["rules"]) for _, (request, _) in rows])
        found = draw(hidden @ self.head.T, rules, uniforms(keys, positions))
        values = zip(found.ids.tolist(), found.logprobs.tolist(), found.drawn_logprobs.tolist(), strict=True)
        return [self._token(key, *row, *value) for (key, row), value in zip(rows, values, strict=True)]

    def _token(self, key, request, drawn, token, logprob, drawn_logprob):
        drawn.append(token)
        reason = "stop" if token in request["stop"] else "length" if len(drawn) == request["limit"] else ""
        if reason:
            del self.rows[key]
        return Tokens(key, [token], [logprob], [drawn_logprob], reason)

    @torch.no_grad()
    def load(self, tensors):
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors:
            parameters[name].copy_(tensor)
        self.base = {name: parameter.clone() for name, parameter in parameters.items()}
        if not self.stale:
            self.head = self.model.lm_head.weight.detach().clone()
        self.events.append("loaded")

    @torch.no_grad()
    def adapt(self, tensors):
        parts = dict(tensors)
        for name in parts:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if name.endswith("A.weight"):
                delta = parts[name.replace("lora_A", "lora_B")] @ parts[name]
                self.model.get_submodule(layer).weight.copy_(self.base[f"{layer}.weight"] + delta)
        self.events.append("adapted")

    def sleep(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.events.append("asleep")

    def close(self):
        with contextlib.suppress(AttributeError):
            del self.model


if __name__ == "__main__":
    from gropius.rollout.vllm.program import serve

    serve(Imitation)
