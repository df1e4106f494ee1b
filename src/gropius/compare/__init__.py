"""Recipes against each other at equal sampled tokens: several seeds, paired by seed, with what is distinguishable."""

from gropius.compare.curves import Curve, curve
from gropius.compare.verdict import Comparison, Difference, Standing, compare

__all__ = ["Comparison", "Curve", "Difference", "Standing", "compare", "curve"]
