"""How what a model wrote is kept from this machine in a run: the tiers demanded and found, as the run is stamped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gropius.rewards import CONFINED
from gropius.sandbox.base import TIERS, SandboxUnavailable
from gropius.sandbox.confine import landlock_version
from gropius.sandbox.remote import open_remote, service_of
from gropius.sandbox.tiers import open_sandbox

FORK = "landlock fork"


def isolation(parts: Sequence[Mapping[str, Any]], environment: str = "") -> dict[str, Any] | None:
    """The stamp of a run: {"minimum", "tier", "unsafe"} of programs, "scorers" {part: tier} of libraries that evaluate.

    parts: the `[[reward]]` tables. environment: the weakest tier that the tasks' environment takes, "" when it runs no
    programs. None when nothing a model wrote is run. Raises SandboxUnavailable (exit 3) when this machine cannot
    isolate as demanded.
    """
    programs = [part.get("options") or {} for part in parts if part["name"] == "code"]
    services = [service_of(options["remote"]) for options in programs if options.get("remote") is not None]
    demands = [options.get("minimum", "landlock") for options in programs if options.get("remote") is None]
    demands += [environment] if environment else []
    names = [part["name"] for part in parts if part["name"] in CONFINED]
    names += ["math_verify" for part in parts if (part.get("options") or {}).get("second") and part["name"] == "math"]
    stamp: dict[str, Any] = {}
    if demands:
        minimum = min((tier for tier in TIERS if tier in demands), key=TIERS.index)
        tier = open_sandbox(minimum).tier
        stamp = {"minimum": minimum, "tier": tier, "unsafe": tier == "none"}
    for service in dict.fromkeys(services):
        found = open_remote(service).tier
        stamp = {**stamp, "remote": found} if stamp else {"minimum": found, "tier": found, "unsafe": False}
    if names:
        if landlock_version() < 1:
            raise SandboxUnavailable(
                f"reward {names[0]} lets a library evaluate what a model wrote, and this kernel has no Landlock to "
                "confine it with; take another reward, or a kernel with Landlock"
            )
        stamp["scorers"] = dict.fromkeys(names, FORK)
    return stamp or None


def described(stamp: Mapping[str, Any] | None) -> list[str]:
    """A stamp in words, for whoever starts the run."""
    lines = []
    if stamp and "tier" in stamp:
        unsafe = "; UNSAFE: they run with your rights" if stamp["unsafe"] else ""
        lines.append(f"programs of the model run in: {stamp['tier']}{unsafe}")
    for name, tier in (stamp or {}).get("scorers", {}).items():
        lines.append(f"what {name} evaluates runs in: {tier}")
    return lines


def restamped(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The stamp of a run that goes on: what holds now, with what held before under "before"; unsafe once is unsafe.

    >>> restamped({"tier": "none", "unsafe": True}, {"tier": "bubblewrap", "unsafe": False})["unsafe"]
    True
    """
    if now is None or before is None:
        return dict(now) if now is not None else dict(before) if before is not None else None
    earlier = [*before.get("before", ()), {key: value for key, value in before.items() if key != "before"}]
    if all(before.get(key) == value for key, value in now.items() if key != "unsafe"):
        return dict(before)
    unsafe = bool(now.get("unsafe") or any(one.get("unsafe") for one in earlier))
    return {**now, "before": earlier, "unsafe": unsafe}
