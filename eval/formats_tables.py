"""The tables and the picture of formats.py."""

from __future__ import annotations

from pathlib import Path

from error_bars import percent, with_error
from palette import format_color
from rich.console import Console
from rich.table import Table


def _studied(rows: list[dict], study: str) -> dict[str, list[dict]]:
    """By model."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        if row["what"].startswith(f"formats_{study}_"):
            found.setdefault(row["model"], []).append(row)
    return found


def _cell(row: dict, fields: tuple[str, str]) -> str:
    first, second = (row[field] for field in fields)
    return with_error(first, second) if fields[1] == "kl_error" else f"{first:.0%} / {second:.0%}"


def _zones(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """By label, and there by the tokens of the exact recent zone."""
    found: dict[str, dict[int, dict]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[row["residual_length"]] = row
    return found


def markdown(rows: list[dict], model: str) -> str:
    """Of one model: KL, same top token and perplexity, exact zones off and at their defaults."""
    found = _zones(_studied(rows, "quality")[model])
    first = next(iter(found.values()))[0]
    lines = [
        "| format | D = 128 | KL, zones off | same top token | perplexity x | KL, 4 + 64 | same top token | perplexity x |",
        "|---" * 8 + "|",
    ]
    for label, at in found.items():
        cells = (
            f"{with_error(row['kl'], row['kl_error'])} | {percent(row['same_top'], row['same_top_error'])} | "
            f"{with_error(row['perplexity_ratio'], row['perplexity_ratio_error'])}"
            for row in (at[0], at[64])
            if row
        )
        lines.append(f"| `{label}` | {at[0]['bytes']} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"{first['model']} on {first['device']}: {first['windows']} x {first['read_on']} tokens of {first['text']} after "
         f"{first['context']:,}; standard errors over the texts."]
    )  # fmt: skip


def markdown_frozen(rows: list[dict]) -> str:
    """KL with exact zones at their defaults, a column for each origin of the statistics."""
    studied = _studied(rows, "frozen")
    first = next(iter(studied.values()))[0]
    sources = list(dict.fromkeys(row["source"] for held in studied.values() for row in held))
    lines = [f"| model | format | {' | '.join(sources)} |", "|---" * (2 + len(sources)) + "|"]
    for model, held in studied.items():
        for name in dict.fromkeys(row["format"] for row in held):
            found = {row["source"]: row for row in held if row["format"] == name and row["residual_length"]}
            cells = " | ".join(with_error(found[x]["kl"], found[x]["kl_error"]) for x in sources)
            lines.append(f"| {model} | `{name}` | {cells} |")
    lines += [
        "",
        f"KL on {first['device']}: {first['windows']} x {first['read_on']} tokens of {first['text']} after {first['context']:,}; "
        "4 sink tokens and 64 recent ones exact; standard errors over the texts.",
    ]
    return "\n".join(lines)


def show(rows: list[dict]) -> None:
    console = Console(width=150)
    quality = {model: _zones(held) for model, held in _studied(rows, "quality").items()}
    if quality:
        table = Table(title="KL from the dense run, exact zones off | 4 + 64")
        table.add_column("format")
        table.add_column("bytes", justify="right")
        for model in quality:
            table.add_column(model, justify="right")
        for label in dict.fromkeys(label for held in quality.values() for label in held):
            cells = [held.get(label, {}) for held in quality.values()]
            size = next(row["bytes"] for zones in cells for row in zones.values())
            table.add_row(
                label, str(size), *(" | ".join(with_error(row["kl"], row["kl_error"]) for _, row in sorted(at.items())) for at in cells)
            )
        console.print(table)
    for study, fields in (("ablation", ("kl", "kl_error")), ("frozen", ("kl", "kl_error")), ("recall", ("recall_unseen", "recall_seen"))):
        found = _studied(rows, study)
        if found:
            table = Table(title=f"{study}: {', '.join(fields)}")
            table.add_column("what")
            for model in found:
                table.add_column(model, justify="right")
            for label in dict.fromkeys(row["label"] for held in found.values() for row in held):
                rows_of = [[row for row in held if row["label"] == label] for held in found.values()]
                table.add_row(label, *("".join(_cell(row, fields) for row in held) for held in rows_of))
            console.print(table)


NAMED = {"hadaquant": (-3, -8), "turboquant": (3, 3)}
"""Families whose points have names, and where those stand, in points; the others lie too close together."""
TITLES = {"demo": "embedded", "qwen2": "biased keys", "qwen3": "normed keys"}


def plot(rows: list[dict], path: Path) -> None:
    """Quality against bytes, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = _studied(rows, "quality")
    figure, grid = pyplot.subplots(1, len(found), figsize=(6 * len(found), 5.2), squeeze=False)
    for axes, (model, held) in zip(grid[0], found.items(), strict=True):
        for recent, marker, fill in ((0, "o", "none"), (64, "o", "full")):
            for family in ("hadaquant", "turboquant", "nvfp4", "int4", "int8", "fp8"):
                some = sorted(
                    (r["bytes"], r["kl"], r["label"]) for r in held if r["residual_length"] == recent and r["label"].startswith(family)
                )
                line = "-" if family == "hadaquant" else "none"
                style = {"color": format_color(family), "marker": marker, "fillstyle": fill, "linestyle": line}
                axes.plot([b for b, _, _ in some], [kl for _, kl, _ in some], label=family if recent else None, **style)
                for size, kl, label in some if recent == 0 and family in NAMED else ():
                    name = label.removeprefix(f"{family}_").removesuffix("_uncentered")
                    place = {"xytext": NAMED[family], "textcoords": "offset points", "ha": "right" if NAMED[family][0] < 0 else "left"}
                    axes.annotate(name, (size, kl), fontsize=6, color=style["color"], **place)
        axes.set(
            title=f"{TITLES.get(model, model)}: hollow, no exact tokens; filled, 4 + 64",
            xlabel="bytes of a token and head (left is better)",
            yscale="log",
            xscale="log",
        )
        axes.set_xticks([68, 84, 100, 116, 132, 144, 198, 264], [68, 84, 100, 116, 132, 144, 198, 264], fontsize=7)
        axes.set_xlim(left=58)  # room for names
        axes.minorticks_off()
    grid[0][0].set_ylabel("KL divergence from the dense run, nats (lower is better)")
    grid[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)
