"""Planners: one plan a step, used by every layer."""

from .device import DevicePlan, DevicePlanner
from .host import HostPlanner
from .plan import Plan, PlanArrays
from .policy import POLICIES, Deadline, Policy, fold_budget, get_policy
from .predicate import must_fold

__all__ = [
    "POLICIES",
    "Deadline",
    "DevicePlan",
    "DevicePlanner",
    "HostPlanner",
    "Plan",
    "PlanArrays",
    "Policy",
    "fold_budget",
    "get_policy",
    "must_fold",
]
