"""A reward behind HTTP: a judge model, a grading service, another team's verifier. No torch.

Request (POST, JSON): {"task", "prompt", "completion", "reply", "answer", "metadata", "group", "member"}.
Answer: {"score": number} or {"status": "scored" | "rejected" | "void", "score": number, "reason": text}.
The text of the model is data in a field of its own: a judge must fence it, and only numbers come back.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gropius.errors import RecipeError, RewardError
from gropius.types import Episode, Outcome, rejected, scored, void

MAX_ANSWER_BYTES = 1 << 20
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
OURS = (400, 401, 403, 404, 405, 410)  # a wrong address, key or request: it will not get better


@dataclass(frozen=True)
class _Service:
    """How to ask."""

    url: str
    timeout_s: float
    retries: int
    backoff_s: float
    token: str


def remote(
    *,
    url: str,
    timeout_s: float = 30.0,
    retries: int = 3,
    backoff_s: float = 0.5,
    concurrency: int = 8,
    token_env: str = "",
) -> Callable[[Episode], Any]:
    """What a service says of an episode. Prompts, answers and replies are sent to `url`, in the clear for http://.

    timeout_s: of one attempt, once it starts. retries: further attempts after a failure that may pass (connection,
    time, status 408, 425, 429, 5xx), waiting backoff_s, then twice that, and so on; when all fail the outcome is void.
    concurrency: requests at once. token_env: the environment variable that holds a bearer token; the token itself is
    never stored. Another 4xx status, a redirect or an answer of another form is an error of the service: RewardError.
    """
    if not url.startswith(("http://", "https://")):
        raise RecipeError(f'reward remote: url = "{url}"; write http://… or https://…')
    if timeout_s <= 0 or retries < 0 or backoff_s < 0 or concurrency < 1:
        raise RecipeError("reward remote: timeout_s above 0, retries and backoff_s from 0, concurrency from 1")
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise RecipeError(f"reward remote: the environment variable {token_env} (token_env) is not set")
    service = _Service(url, timeout_s, retries, backoff_s, token)
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="gropius-remote-reward")

    async def _score(episode: Episode) -> Outcome:
        return await asyncio.get_running_loop().run_in_executor(threads, _judged, service, episode)

    return _score


def question_of(episode: Episode) -> dict[str, Any]:
    """What is sent about an episode."""
    return {
        "task": episode.task.key,
        "prompt": [dict(message) for message in episode.task.messages()],
        "completion": episode.completion,
        "reply": episode.last_reply,
        "answer": episode.task.answer,
        "metadata": dict(episode.task.metadata),
        "group": episode.group_id,
        "member": episode.member,
    }


def outcome_of(answer: Any) -> Outcome:
    """An answer as an outcome, checked by kind and value. Raises RewardError saying what is wrong with it."""
    if not isinstance(answer, dict):
        raise RewardError(f"reward remote: the service answered a {type(answer).__name__}; it must answer an object")
    status, score, reason = answer.get("status", "scored"), answer.get("score"), str(answer.get("reason", ""))[:2000]
    if status == "void":
        return void(reason or "the service could not judge")
    if status == "rejected" and score is None:
        return rejected(reason or "rejected by the service")
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise RewardError(f'reward remote: the service answered "score": {ascii(score)[:60]}; it must be a number')
    if not math.isfinite(score):
        return void(f"the service answered {score}")
    if status not in ("scored", "rejected"):
        raise RewardError(f'reward remote: the service answered "status": {ascii(status)[:60]}')
    return Outcome(status, float(score), reason) if status == "rejected" else scored(float(score), reason)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """A redirect would carry the token elsewhere."""
        return


def _judged(service: _Service, episode: Episode) -> Outcome:
    body = json.dumps(question_of(episode), default=str).encode()
    problem = ""
    for attempt in range(service.retries + 1):
        if attempt:
            time.sleep(service.backoff_s * 2 ** (attempt - 1))
        try:
            return outcome_of(_ask(service, body))
        except urllib.error.HTTPError as fault:  # the boundary: somebody else's server
            problem = f"status {fault.code}"
            fault.close()
            if fault.code in OURS or 300 <= fault.code < 400:
                raise RewardError(f"reward remote ({service.url}): {problem}; check url and token_env") from None
            if fault.code not in TRANSIENT:
                break
        except (OSError, ValueError) as fault:  # the boundary: connection, time, text that is no JSON
            problem = f"{type(fault).__name__}: {fault}"
    return void(f"the service at {service.url} did not judge after {service.retries + 1} attempts: {problem}"[:500])


def _ask(service: _Service, body: bytes) -> Any:
    headers = {"Content-Type": "application/json"}
    if service.token:
        headers["Authorization"] = f"Bearer {service.token}"
    opener = urllib.request.build_opener(_NoRedirect())
    request = urllib.request.Request(service.url, body, headers, method="POST")
    with opener.open(request, timeout=service.timeout_s) as response:
        data = response.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise RewardError(f"reward remote ({service.url}): an answer of more than {MAX_ANSWER_BYTES} bytes")
    return json.loads(data)
