"""The table and the picture of quality.py."""

from __future__ import annotations

from pathlib import Path

from error_bars import paired, percent, recalled, share_error, with_error
from harness import Table, picture
from palette import family, format_color, policy_color

FEW = 50
"""Facts below which a share of them decides nothing: an error of 7 points."""


def name_of(row: dict) -> str:
    if row["policy"] is None:
        return row["format"] or "DynamicCache"
    return f"{row['format']} + {row['policy']} {row['budget']:.0%}"


def label_of(row: dict) -> str:
    return name_of(row).split(" + ")[-1]


def front(rows: list[dict]) -> set[int]:
    """Indices of the rows that no other row beats in bytes and in divergence at once."""
    found, least = set(), float("inf")
    for index in sorted(range(len(rows)), key=lambda i: (rows[i]["bytes_per_token"], rows[i]["kl"])):
        if rows[index]["kl"] < least:
            found.add(index)
            least = rows[index]["kl"]
    return found


def columns(rows: list[dict]) -> tuple[str, ...]:
    facts = (f"recall in {int(tokens):,}: unseen / seen" for tokens in rows[0]["recall"])
    quality = ("KL", "difference to the row above", "same top token", "perplexity ratio")
    return ("cache", "exact", "bytes/token", "smaller", *quality, *facts)


def by_kl(rows: list[dict]) -> list[dict]:
    """The dense row, formats by their exact tokens, and policies by format and what they keep: the closest first in each."""
    return sorted(rows, key=lambda row: (group(row), row["kl"]))


def group(row: dict) -> tuple:
    dense, policy = row["format"] is None, row["policy"]
    return (not dense, policy is not None, row["exact"], row["format"] if policy else "", -row.get("budget", 0))


def all_right(row: dict) -> int:
    return sum(right for both in row["recall"].values() for right in both)


def cells(rows: list[dict]) -> list[tuple[str, ...]]:
    """Of rows that `by_kl` has put in order. What is on the Pareto front of all has an asterisk behind its name."""
    best, found = front(rows), []
    for index, row in enumerate(rows):
        top = percent(row["same_top"], row["same_top_error"] if row["format"] else None)
        above = rows[index - 1] if index and group(rows[index - 1]) == group(row) else None
        facts = (" / ".join(recalled(right, row["cases"]).removesuffix(" %") for right in both) + " %" for both in row["recall"].values())
        found.append((
            name_of(row) + " *" * (index in best), row["exact"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x",
            with_error(row["kl"], row["kl_error"]), with_error(*paired(row["kls"], above["kls"])) if above else "",
            top, with_error(row["perplexity_ratio"], row["perplexity_ratio_error"]), *facts,
        ))  # fmt: skip
    return found


def caption(rows: list[dict]) -> str:
    first = rows[0]
    passages, read_on = first["read_on"]
    return (
        f"{first['model']} in {first['dtype'].removeprefix('torch.')} on {first['device']}: {passages} x {read_on - 1} tokens of "
        f"{first['text']} read on after {first['context']:,}; {first['cases']} facts ({first['facts']}) in each. KL in nats; errors: "
        "standard errors over the passages, of shares of facts binomial. difference to the row above: of KL, on the same passages. "
        "recall: of all facts; the uncompressed run's is in the first row. bytes and smaller: in 16 bit. exact: first + last "
        f"tokens that are not compressed. *: nothing smaller is as close.{too_few(2 * len(first['recall']) * first['cases'])}"
    )


def too_few(facts: int) -> str:
    """Says which differences these few facts cannot show."""
    most = percent(share_error(facts / 2, facts))
    return f" {facts} facts decide nothing: a share of them has an error of up to {most}." if facts < FEW else ""


def table(rows: list[dict]) -> Table:
    rows = by_kl(rows)
    return Table(columns(rows), cells(rows), caption=caption(rows), rule=(" --- ",))


def series(row: dict) -> tuple[str, dict]:
    """What a point is called in the legend, and how it is drawn: formats by family, what evicts by policy."""
    if row["policy"]:
        return f"{row['policy']}, {row['format']}", {"color": policy_color(row["policy"]), "marker": "s"}
    center = not row["format"].endswith("_uncentered")
    drawn = {"color": format_color(row["format"]), "marker": "o", "fillstyle": "full" if center else "none"}
    return family(row["format"]) + ("" if center else ", no mean of keys"), drawn


DRAWN = ("snapkv", "h2o", "tova", "keydiff", "sink_window", "random")
"""The policies of a picture. `sliding_window`, without sinks, has a KL of 1, and `knorm` lies on `keydiff`."""


def is_drawn(row: dict) -> bool:
    """Formats with exact tokens; and a few policies, in codes."""
    return row["policy"] in DRAWN and row["format"] != "identity" if row["policy"] else bool(row["format"]) and name_of(row) != "identity"


def plot(rows: list[dict], path: Path) -> None:
    """Divergence and recall against bytes with their errors, the Pareto front drawn through the points that lie on it."""
    from matplotlib import ticker

    first = rows[0]
    points = [row for row in by_kl(rows) if is_drawn(row) and row["exact"] == "4 + 64"]
    facts = len(first["recall"]) * 2 * first["cases"]
    with picture(path, 1, 2, dpi=90, figsize=(12, 6), layout="constrained") as (figure, ((left, right),)):
        for row in points:
            label, drawn = series(row)
            drawn |= {"markersize": 5, "elinewidth": 0.8, "linestyle": "none", "alpha": 0.8}
            left.errorbar(row["ratio"], row["kl"], row["kl_error"], label=label, **drawn)
            right.errorbar(row["ratio"], all_right(row) / facts, share_error(all_right(row), facts), **drawn)
        on = [points[i] for i in sorted(front(points), key=lambda i: points[i]["ratio"])]
        left.plot([row["ratio"] for row in on], [row["kl"] for row in on], color="black", linewidth=0.8, label="the best", zorder=0)
        last, steps = 0.0, 0
        for row in on:  # of points that lie together, one is named
            if row["ratio"] > 1.04 * last:
                at = {"xytext": (5, -2), "textcoords": "offset points", "fontsize": 7, "va": "top", "rotation": -20}
                left.annotate(label_of(row), (row["ratio"], row["kl"]), **at)
                if not row["policy"]:
                    name, height = label_of(row).removeprefix("hadaquant_").removeprefix("turboquant_"), 0.06 + 0.06 * (steps % 2)
                    right.annotate(name, (row["ratio"], height), fontsize=8, ha="center")
                    steps += 1
                last = row["ratio"]
        right.axhline(all_right(first) / facts, color="black", linestyle=":", linewidth=1, label="dense")
        left.set(yscale="log", ylabel="KL divergence from the uncompressed run, nats (lower is better)")
        right.set(ylim=(-0.03, 1.05), ylabel=f"share of {facts} facts recalled (higher is better)")
        for axes in (left, right):
            axes.set(xscale="log", xlabel="times smaller than DynamicCache in 16 bit (right is better)")
            axes.set_xlim(right=2 * max(row["ratio"] for row in points))  # room for names
            axes.xaxis.set_major_locator(ticker.FixedLocator([1, 2, 3, 4, 5, 6, 8, 12, 16, 24]))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid(alpha=0.25)
        named = {label: mark for axes in (left, right) for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, fontsize=8)
        passages, read_on = first["read_on"]
        figure.suptitle(f"{first['model']}: {passages} x {read_on - 1} tokens after {first['context']:,}, standard errors over the texts")
