"""Planners: one plan a step, used by every layer."""

from .host import HostPlanner
from .plan import Plan, PlanArrays
from .policy import POLICIES, Policy, get_policy
from .predicate import must_fold

__all__ = ["POLICIES", "HostPlanner", "Plan", "PlanArrays", "Policy", "get_policy", "must_fold"]
