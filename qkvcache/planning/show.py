"""Plans and recommendations as rich tables."""

from __future__ import annotations

from rich.table import Column, Table

from .plan import Plan, in_words
from .recommend import Recommendation


def table(plans: list[Plan]) -> Table:
    """A row for each plan; all have the same model, context and memory."""
    first = plans[0]
    grid = Table(title=f"{first.model}, {first.context:,} tokens a request, {first.dtype}", caption=_caption(first))
    budget = first.gpu_memory is not None
    mixed = first.batching is not None
    fits = ("pages", "requests of the mix") if mixed else ("requests", "longest context")
    for header in ("cache", "bytes a token", "MB a request", "smaller", *(fits if budget else ())):
        grid.add_column(header, justify="left" if header == "cache" else "right", no_wrap=header == "cache")
    for plan in plans:
        cells = [plan.name, f"{plan.bytes_per_token:,.0f}", f"{plan.bytes_per_request / 1e6:,.1f}", f"{plan.ratio:.2f}x"]
        if plan.batching is not None:
            cells += [f"{plan.batching.pages:,}", f"{plan.batching.requests:,}"]
        elif budget:
            cells += [f"{plan.requests:,}", "any" if plan.unbounded else f"{plan.longest_context:,}"]
        grid.add_row(*cells)
    return grid


def parts(plan: Plan) -> Table:
    """The bytes of one request by role."""
    grid = Table("part", Column("MB", justify="right"), title=f"one request in {plan.name}")
    for name in ("codes", "scales", "exact", "bookkeeping"):
        grid.add_row(name, f"{getattr(plan.request, name) / 1e6:,.2f}")
    grid.add_row("all", f"{plan.bytes_per_request / 1e6:,.2f}")
    return grid


def recommended(recommendation: Recommendation) -> Table:
    """A recommendation and its reason."""
    grid = Table(Column(), Column(overflow="fold"), show_header=False, title="recommended")
    for name, text in (
        ("cache", recommendation.call),
        ("because", recommendation.reason),
        ("usual guide", recommendation.guide),
        ("vLLM", recommendation.vllm),
        ("SGLang", recommendation.sglang),
    ):
        grid.add_row(name, text)
    return grid


def _caption(plan: Plan) -> str | None:
    words = list(plan.notes)
    if plan.gpu_memory is not None and plan.weights_memory is not None:
        memory = f"{plan.tensor_parallel} x {in_words(plan.gpu_memory)} less {in_words(plan.weights_memory)} of weights"
        words.insert(0, f"{memory}, no activations, no headroom; longest context of {plan.batch} at once.")
    if plan.at_most:
        words.insert(0, "Bytes are at most these: how many pages heads take that share a budget depends on the text.")
    return " ".join(words) or None
