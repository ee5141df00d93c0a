"""Metrics of requests and pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metrics:
    """Requests, pages and tokens at one moment.

    running           requests that have pages
    waiting           requests that wait for pages, or to be read
    pages_used        pages of running requests
    pages_cached      pages that no request reads, kept for prompts that begin with their tokens; freed when pages are needed
    pages_total       pages of the pool; 0 as long as there is none
    page_size         tokens of a page (of all layers)
    tokens_generated  since `continuous_batching` was entered
    preemptions       how often a running request lost its pages to others, to be continued later
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    page_size: int = 0
    tokens_generated: int = 0
    preemptions: int = 0


@dataclass
class Counters:
    """Counts that several managers add to."""

    tokens_generated: int = 0
    preemptions: int = 0
