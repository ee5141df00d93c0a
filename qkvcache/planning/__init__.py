"""Bytes and requests before anything is allocated, and which cache to take."""

from .plan import Plan, plan, plan_all
from .recommend import Recommendation, recommend

__all__ = ["Plan", "Recommendation", "plan", "plan_all", "recommend"]
