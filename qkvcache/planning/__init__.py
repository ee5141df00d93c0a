"""Bytes of a cache before it is allocated, requests that fit, and which cache to choose."""

from .batching import BatchingPlan
from .plan import Plan, plan, plan_all
from .recommend import Recommendation, recommend

__all__ = ["BatchingPlan", "Plan", "Recommendation", "plan", "plan_all", "recommend"]
