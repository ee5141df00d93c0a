"""The tables and the picture of calibrated.py."""

from __future__ import annotations

from pathlib import Path

from error_bars import with_error
from palette import format_color

ZONES = {(4, 64): "4 + 64 exact", (0, 0): "no exact tokens"}
NAMES = {"smollm2": "SmolLM2-135M", "biased": "biased keys", "normed": "normed keys", "demo": "embedded"}


def measured(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["what"] == "calibrated"]


def zones_of(row: dict) -> tuple[int, int]:
    return row["num_sink_tokens"], row["residual_length"]


def by_size(rows: list[dict]) -> list[str]:
    """Labels, the largest format first, and of the same bytes the calibrated one last."""
    sizes = {row["label"]: (-row["size_at_128"], row["label"].startswith("calibrated")) for row in rows}
    return sorted(sizes, key=sizes.__getitem__)


def markdown(rows: list[dict]) -> str:
    """A table for each model: KL by prompt length and zones."""
    rows = measured(rows)
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        places = sorted({(zones_of(row), row["context"]) for row in of}, key=lambda place: (-place[0][1], place[1]))
        head = [f"{ZONES.get(zones, zones)}, prompt {context:,}" for zones, context in places]
        lines = [f"| {NAMES.get(model, model)} | bytes | {' | '.join(head)} |", "|---" * (2 + len(head)) + "|"]
        at = {(row["label"], zones_of(row), row["context"]): row for row in of}
        for label in by_size(of):
            size = next(row["size_at_128"] for row in of if row["label"] == label)
            found = [at.get((label, *place)) for place in places]
            cells = [with_error(row["kl"], row["kl_error"]) if row else "" for row in found]
            lines.append(f"| {label} | {size:g} | {' | '.join(cells)} |")
        first, *others = {row["device"]: row for row in of}.values()
        said = f"KL in nats, on {first['windows']} x {first['read_on']:,} tokens of {first['text']}, on {first['device']}"
        said += "".join(f"; prompt {row['context']:,} on {row['device']}" for row in others)
        parts.append("\n".join([*lines, "", f"{said}."]))
    return "\n\n".join(parts)


def plot(rows: list[dict], path: Path) -> None:
    """KL against bytes after the longest prompts, a panel a model: bits by layer against one format for all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = measured(rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = pyplot.subplots(1, len(models), figsize=(4.6 * len(models), 4.4), squeeze=False)
    for axes, model in zip(grid[0], models, strict=True):
        longest = max(row["context"] for row in rows if row["model"] == model)
        for zones, style in (((4, 64), "-"), ((0, 0), ":")):
            at = [row for row in rows if row["model"] == model and row["context"] == longest and zones_of(row) == zones]
            for prefix, color, name in (
                ("calibrated", format_color("calibrated"), "bits by layer"),
                ("hadaquant", format_color("hadaquant"), "HadaQuant, one for all"),
                ("turboquant", format_color("turboquant"), "turboquant_4bit_nc"),
            ):
                some = sorted((row["size_at_128"], row["kl"], row["kl_error"]) for row in at if row["label"].startswith(prefix))
                if some:
                    sizes, kls, errors = zip(*some, strict=True)
                    label = f"{name}, {ZONES[zones]}"
                    axes.errorbar(sizes, kls, errors, color=color, linestyle=style, marker="o", markersize=3, capsize=2, label=label)
        axes.set(title=NAMES.get(model, model), xlabel="bytes of a token and head (left is better)", yscale="log")
    grid[0][0].set_ylabel("KL from the dense run, nats (lower is better)")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path, dpi=100)
    print(path)
