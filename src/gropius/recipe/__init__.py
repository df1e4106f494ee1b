"""What a person wrote (Recipe) and what is run (Resolved). No torch.

resolved = resolve("recipe.toml", ["train.steps=10"])
resolved.train.steps, resolved.objective, resolved.derived.responses_per_step, resolved.sha256
"""

from gropius.recipe.load import load
from gropius.recipe.resolve import Derived, Resolved, canonical_json, code_digests, refuse_user_code, resolve
from gropius.recipe.schema import Recipe
from gropius.recipe.stored import from_dict

__all__ = [
    "Derived",
    "Recipe",
    "Resolved",
    "canonical_json",
    "code_digests",
    "from_dict",
    "load",
    "refuse_user_code",
    "resolve",
]
