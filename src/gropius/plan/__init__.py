"""Group size against number of prompts, and what a run costs. Pure functions over counts and shapes; no torch."""

from gropius.plan.beta import BetaMixture, Fit, fit
from gropius.plan.cost import CostReport, ModelShape, Workload, cost
from gropius.plan.counts import PassCounts, from_groups, read_counts
from gropius.plan.machines import Machine
from gropius.plan.split import Plan, plan_split

__all__ = [
    "BetaMixture",
    "CostReport",
    "Fit",
    "Machine",
    "ModelShape",
    "PassCounts",
    "Plan",
    "Workload",
    "cost",
    "fit",
    "from_groups",
    "plan_split",
    "read_counts",
]
