"""`gropius eval RECIPE|RUN`: mean@k, pass@k and maj@k on the held-out split, with 95 % intervals."""

from __future__ import annotations

from gropius.cli.console import Console, held_out_line
from gropius.cli.options import Json, Settings, Target, TrustCode
from gropius.cli.output import print_json, print_text
from gropius.cli.target import find


def command(
    target: Target,
    settings: Settings = [],  # noqa: B006
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Measure a recipe's model as it is, or a run's last checkpoint, on the held-out tasks. eval.samples is k."""
    found = find(target, settings, trust_code)
    from gropius import survey

    with Console() as console:
        held_out = survey.evaluate(found.resolved, console, found.model)
    if as_json:
        print_json({"model": found.label, "recipe": found.resolved.sha256, **held_out.metrics()})
    else:
        print_text(held_out_line(found.label, held_out))
