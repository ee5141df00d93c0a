"""The tables of eviction.py."""

from __future__ import annotations

import math
from collections.abc import Callable

from error_bars import percent, short, with_error
from rich.console import Console
from rich.table import Table


def _kl(row: dict) -> str:
    """Rows of older runs have no errors."""
    return with_error(row["kl"], row["kl_error"]) if "kl_error" in row else short(row["kl"], 4)


def _perplexity(row: dict) -> str:
    """In times the dense run's."""
    times = row.get("perplexity_ratio", row["perplexity"] / row["dense_perplexity"])
    return with_error(times, row.get("perplexity_ratio_error", math.nan))


def show(rows: list[dict], study: str) -> None:
    if rows:
        console = Console(width=140)
        for table in TABLES[study](rows):
            console.print(table)


def sinks(rows: list[dict]) -> list[Table]:
    first = rows[0]
    trained = first["tokens"]  # the dense run ends there
    found = Table(
        title=f"perplexity of {first['streams']} streams",
        caption=f"within: tokens {trained // 2:,} to {trained:,} of the stream; beyond: all after, "
        "which are further on than the model was trained for",
    )
    columns = list(dict.fromkeys((row["parameters"]["window"], row["parameters"]["positions"]) for row in rows[1:]))
    found.add_column("sinks", justify="right")
    for window, positions in columns:
        found.add_column(f"{window:,}, {positions}\nwithin / beyond", justify="right")
    found.add_row("dense", f"{first['perplexity_within']:.1f} / -")
    cells = {tuple(row["parameters"].values()): f"{row['perplexity_within']:.1f} / {row['perplexity_beyond']:.1f}" for row in rows[1:]}
    for count in dict.fromkeys(row["parameters"]["num_sink_tokens"] for row in rows[1:]):
        found.add_row(str(count), *(cells.get((window, count, positions), "-") for window, positions in columns))
    return [found]


def by_share(rows: list[dict]) -> list[Table]:
    shares = list(dict.fromkeys(row["share"] for row in rows))
    dense = rows[0]["dense_perplexity"]
    forms: dict[str, Callable[[dict], str]] = {
        "kl": _kl,
        "perplexity": lambda row: f"{row['perplexity']:.1f}",
        "recall_unseen": lambda row: percent(row["recall_unseen"]),
        "recall_seen": lambda row: percent(row["recall_seen"]),
        "ratio": lambda row: f"{row['ratio']:.2f}",
    }
    found = []
    for value, form in forms.items():
        beside = f" (dense {dense:.1f})" if value == "perplexity" else ""
        table = Table(title=f"{value} by share of the {rows[0]['context']:,} tokens{beside}")
        table.add_column("policy")
        for share in shares:
            table.add_column(f"{share:.0%}", justify="right")
        cells = {(row["name"], row["share"]): form(row) for row in rows}
        for name in dict.fromkeys(row["name"] for row in rows):
            table.add_row(name, *(cells.get((name, share), "-") for share in shares))
        found.append(table)
    return found


def combined(rows: list[dict]) -> list[Table]:
    found = Table(
        title=f"{rows[0]['context']:,} tokens of context, {rows[0]['dtype']}; Llama 70B at 131,072 tokens by arithmetic",
        caption="bytes/token: measured, of all tokens seen. GB and requests: 8 x 80 GB less 141.2 GB of bf16 weights leave 498.8 GB for "
        "caches; 80 layers of 8 KV heads of 128 channels; exact tokens in bf16; a position and a score of 4 bytes each for a token and "
        "head that a policy keeps; no activations, no headroom.",
    )
    for header in ("cache", "bytes/token", "smaller", "KL", "perplexity x", "recall unseen", "seen", "GB a request", "requests"):
        found.add_column(header, justify="left" if header == "cache" else "right")
    for row in rows:
        found.add_row(
            row["name"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", _kl(row),
            _perplexity(row), f"{row['recall_unseen']:.0%}", f"{row['recall_seen']:.0%}",
            f"{row['request_bytes'] / 1e9:.2f}", f"{row['requests']:,}",
        )  # fmt: skip
    return [found]


def choices(rows: list[dict]) -> list[Table]:
    found = Table(title=f"what recommend names: {rows[0]['context']:,} tokens of context, {rows[0]['dtype']}")
    for header in ("cache", "smaller", "KL", "recall unseen", "seen"):
        found.add_column(header, justify="left" if header == "cache" else "right")
    for row in rows:
        recalls = (f"{row[f'recall_{kind}']:.0%}" for kind in ("unseen", "seen"))
        found.add_row(row["name"], f"{row['ratio']:.2f}x", _kl(row), *recalls)
    return [found]


TABLES = {"sinks": sinks, "budgets": by_share, "defaults": by_share, "combined": combined, "choices": choices}
