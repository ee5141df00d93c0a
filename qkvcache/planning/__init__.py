"""Bytes and requests before anything is allocated, and which cache to take."""

from .plan import Plan, plan, plan_all

__all__ = ["Plan", "plan", "plan_all"]
