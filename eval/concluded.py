"""Tables and pictures of studies that are concluded: the pages say what they found, their rows are in eval/results.

    python eval/concluded.py keys | calibrated | frozen | zones | long_answers | peers | prompt_steps       the table, as markdown
    python eval/concluded.py formats | calibrated | sinks | budgets | combined | long_answers --plot        the picture

The scripts that measured them are in the history: `git show fe5230e:eval/keys.py`, and likewise calibrated.py, formats.py, eviction.py,
zones.py, long_answers.py and peers.py. Each row has its command and commit.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path

from error_bars import number, percent, recalled, with_error
from harness import RESULTS, Table, picture, pivot, read_rows
from palette import format_color, line_styles, policy_color

ZONES = {(4, 64): "4 + 64 exact", (0, 0): "no exact tokens"}
NAMES = {"smollm2": "SmolLM2-135M", "biased": "biased keys", "normed": "normed keys", "demo": "embedded"}


def rows_of(name: str, begins: str = "") -> list[dict]:
    return [row for row in read_rows(RESULTS / f"{name}.jsonl") if row["what"].startswith(begins)]


def zones_of(row: dict) -> tuple[int, int]:
    return row["num_sink_tokens"], row["residual_length"]


def kl(row: dict) -> str:
    return with_error(row["kl"], row["kl_error"])


def by_model(rows: list[dict]) -> dict[str, list[dict]]:
    return {model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(row["model"] for row in rows)}


def keys() -> Iterator[Table]:
    """Where the divergence comes from, and bits of keys against bits of values: KL of each trial by model."""
    for study in ("where", "bits"):
        found = pivot(rows_of("keys", f"keys_{study}"), lambda row: row["label"], lambda row: row["model"], kl)
        yield Table([study, *found.headers[1:]], found.lines, rule=("---",))


def calibrated() -> Iterator[Table]:
    """Bits by layer, a table for each model: the largest format first, of the same bytes the calibrated one last."""
    for model, rows in by_model(rows_of("calibrated", "calibrated")).items():
        sizes = {row["label"]: (-row["size_at_128"], row["label"].startswith("calibrated")) for row in rows}
        places = sorted({(zones_of(row), row["context"]) for row in rows}, key=lambda place: (-place[0][1], place[1]))
        at = {(row["label"], zones_of(row), row["context"]): kl(row) for row in rows}
        lines = [
            [label, f"{-sizes[label][0]:g}", *(at.get((label, *place), "") for place in places)] for label in sorted(sizes, key=sizes.get)
        ]
        first, *others = {row["device"]: row for row in rows}.values()
        said = f"KL in nats, on {first['windows']} x {first['read_on']:,} tokens of {first['text']}, on {first['device']}"
        said += "".join(f"; prompt {row['context']:,} on {row['device']}" for row in others)
        headers = [NAMES[model], "bytes", *(f"{ZONES[zones]}, prompt {context:,}" for zones, context in places)]
        yield Table(headers, lines, caption=f"{said}.", rule=("---",))


def prompt_steps() -> Iterator[Table]:
    """Where the time of a step with prompts goes, and tokens of prompts a second."""
    rows = rows_of("prompt_steps", "prompt step")
    names = ("step_ms", "linear_ms", "attention_ms", "elementwise_ms", "pages_ms", "launch_ms")
    lines = [[row["case"], row["layers_are"], *(f"{row[name]:.1f}" for name in names)] for row in rows]
    headers = ["tokens", "layers", "step", "linear", "attention", "norms, rotations, activations", "pages", "host"]
    yield Table(
        headers,
        lines,
        "Milliseconds of a step of 8 layers, of the GPU by kind, and of the host until all is launched:",
        rule=("---", "---"),
    )
    lines = [
        [row["case"], f"`{row['cache']}`", row["layers_are"], f"{row['tokens_s_32_layers']:,}"]
        for row in rows_of("prompt_steps", "prompt tokens")
    ]
    yield Table(
        ["prompts", "cache", "layers", "tokens/s"],
        lines,
        "Tokens of prompts a second, a quarter of those of 8 layers:",
        rule=("---", "---", "---"),
    )


def frozen() -> Iterator[Table]:
    """KL with exact zones, a column for each origin of the means."""
    rows = [row for row in rows_of("formats", "formats_frozen") if row["residual_length"]]
    found = pivot(rows, lambda row: f"{row['model']} | `{row['format']}`", lambda row: row["source"], kl)
    said = (
        f"KL on {rows[0]['device']}: {rows[0]['windows']} x {rows[0]['read_on']} tokens of {rows[0]['text']} after {rows[0]['context']:,}; "
        "4 sink tokens and 64 recent ones exact; standard errors over the texts."
    )
    yield Table(["model | format", *found.headers[1:]], found.lines, caption=said, rule=("---|---", "---"))


def zones() -> Iterator[Table]:
    """KL by the number of exact tokens."""
    rows = [row | {"zones": "{} + {}".format(*zones_of(row))} for row in rows_of("zones")]
    found = pivot(rows, lambda row: f"`{row['format']}`", lambda row: row["zones"], lambda row: number(row["kl"]))
    yield Table(["first + last exact tokens", *found.headers[1:]], found.lines, rule=(" --- ",))


MARKS = (64, 128, 256, 512, 1000)
"""Tokens of an answer after which it may still be the dense run's."""


def mean_with_error(values: list[float]) -> str:
    return with_error(statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan"))


def long_answers() -> Iterator[Table]:
    """Answers beside the dense run's: where they differ first, how many are the same, KL along the dense answer, mistakes by task."""
    rows = rows_of("long_answers")
    first, buckets = rows[0], list(rows[-1]["kls"])
    marks = sorted({min(mark, first["tokens"]) for mark in MARKS})
    kinds = dict.fromkeys(answer["kind"] for answer in first["answers"] if "words" in answer)
    lines = []
    for row in rows:
        at = [answer["first_difference"] for answer in row["answers"]]
        low, middle, high = statistics.quantiles(at, n=4, method="inclusive")
        same = (recalled(sum(x >= mark for x in at), len(at)) for mark in marks)
        far = (mean_with_error(row["kls"][name]) if name in row["kls"] else "" for name in buckets)
        ends = (ended([answer for answer in row["answers"] if answer["kind"] == kind]) for kind in kinds)
        lines.append([row["cache"], f"{middle:.0f} ({low:.0f} to {high:.0f})", *same, *far, *ends])
    headers = [
        "cache",
        "first difference",
        *(f"same after {mark:,}" for mark in marks),
        *(f"KL, tokens {name}" for name in buckets),
        *kinds,
    ]
    said = (
        f"{first['model']} in {first['dtype'].removeprefix('torch.')} on {first['device']}: {first['prompts']} answers of "
        f"{first['tokens']:,} tokens after {first['context']:,} ({first['text']}), greedy. first difference: token, median and quartiles; "
        f"{first['tokens']:,}: none. KL: nats, along the dense run's answer, with the standard error over the answers. The last columns: "
        "answers without a mistake, share of words before the first one, likeness of the whole."
    )
    yield Table(headers, lines, caption=said, rule=(" --- ",))


def ended(answers: list[dict]) -> str:
    """Answers without a mistake, words before the first one, and how alike the whole is."""
    whole = sum(answer["before_mistake"] == answer["words"] for answer in answers)
    before = sum(answer["before_mistake"] for answer in answers) / max(sum(answer["words"] for answer in answers), 1)
    return f"{whole} of {len(answers)}, {percent(before)}, {percent(statistics.mean(answer['similarity'] for answer in answers))}"


BASE = "turboquant_4bit_nc"


def peers() -> Iterator[Table]:
    """transformers' QuantizedCache and ours on the same text, the largest first."""
    rows = [row for row in rows_of("peers") if row["text"] == "pydoc"]
    base = next(row["kls"] for row in rows if row["format"] == BASE)
    headers = ("cache", "exact", "bytes/token", "smaller", "texts", "KL", f"times `{BASE}`'s", "same top token", "perplexity x")
    lines = [
        (
            name_of_cache(row), row["exact"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", str(len(row["kls"])),
            kl(row), times(row["kls"], base), percent(row["same_top"], row["same_top_error"]),
            with_error(row["perplexity_ratio"], row["perplexity_ratio_error"]),
        ) for row in sorted(rows, key=lambda row: (row["ratio"], row["kl"]))
    ]  # fmt: skip
    yield Table(headers, lines, rule=(" --- ",))


def name_of_cache(row: dict) -> str:
    if "peer" not in row:
        return f"`{row['format']}`"
    backend, bits = row["format"].split("_int")
    return f'`QuantizedCache("{backend}", nbits={bits})`' + ("" if row["grouping"] == "default" else f", {row['grouping']}")


def times(kls: list[float], base: list[float]) -> str:
    """The ratio of the means over the texts that both have read."""
    both = list(zip(kls, base, strict=False))
    ratio = sum(kl for kl, _ in both) / sum(kl for _, kl in both)
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


TABLES: dict[str, Callable[[], Iterator[Table]]] = {
    "keys": keys, "calibrated": calibrated, "frozen": frozen, "zones": zones, "long_answers": long_answers, "peers": peers,
    "prompt_steps": prompt_steps,
}  # fmt: skip


def draw_calibrated(path: Path) -> None:
    """KL against bytes after the longest prompts, a panel a model: bits by layer against one format for all."""
    models = by_model(rows_of("calibrated", "calibrated"))
    with picture(path, 1, len(models), figsize=(4.6 * len(models), 4.4), margins=(0, 0.09, 1, 1)) as (figure, grid):
        for axes, (model, rows) in zip(grid[0], models.items(), strict=True):
            longest = max(row["context"] for row in rows)
            for place, style in (((4, 64), "-"), ((0, 0), ":")):
                at = [row for row in rows if row["context"] == longest and zones_of(row) == place]
                for family, name in (
                    ("calibrated", "bits by layer"),
                    ("hadaquant", "HadaQuant, one for all"),
                    ("turboquant", "turboquant_4bit_nc"),
                ):
                    some = sorted((row["size_at_128"], row["kl"], row["kl_error"]) for row in at if row["label"].startswith(family))
                    if some:
                        line = {"color": format_color(family), "linestyle": style, "marker": "o", "markersize": 3, "capsize": 2}
                        axes.errorbar(*zip(*some, strict=True), **line, label=f"{name}, {ZONES[place]}")
            axes.set(title=NAMES[model], xlabel="bytes of a token and head (left is better)", yscale="log")
        grid[0][0].set_ylabel("KL from the dense run, nats (lower is better)")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=9, frameon=False)


NAMED = {"hadaquant": (-4, -9), "turboquant": (3, 4)}
"""Families whose points have names, and where those stand, in points; the others lie too close together."""
CROWDED = "4bit_nc"
"""Lies among points of other families: its color in the legend names it."""
TITLES = {"demo": "embedded", "qwen2": "biased keys", "qwen3": "normed keys"}


def draw_formats(path: Path) -> None:
    """Quality against bytes, a panel a model."""
    models = by_model(rows_of("formats", "formats_quality"))
    with picture(path, 1, len(models), figsize=(6 * len(models), 5.2), dpi=130) as (_, grid):
        for axes, (model, rows) in zip(grid[0], models.items(), strict=True):
            for recent, fill in ((0, "none"), (64, "full")):
                for family in ("hadaquant", "turboquant", "nvfp4", "int4", "int8", "fp8"):
                    some = sorted(
                        (row["bytes"], row["kl"], row["label"])
                        for row in rows
                        if row["residual_length"] == recent and row["label"].startswith(family)
                    )
                    line = "-" if family == "hadaquant" else "none"
                    style = {"color": format_color(family), "marker": "o", "fillstyle": fill, "linestyle": line}
                    axes.plot([size for size, _, _ in some], [kl for _, kl, _ in some], label=family if recent else None, **style)
                    for size, kl, label in some if recent == 0 and family in NAMED else ():
                        name = label.removeprefix(f"{family}_").removesuffix("_uncentered").replace(CROWDED, "")
                        place = {"xytext": NAMED[family], "textcoords": "offset points", "ha": "right" if NAMED[family][0] < 0 else "left"}
                        axes.annotate(name, (size, kl), fontsize=8, color=style["color"], **place)
            axes.set(
                title=f"{TITLES[model]}: hollow, no exact tokens; filled, 4 + 64",
                xlabel="bytes of a token and head (left is better)",
                yscale="log",
                xscale="log",
            )
            axes.set_xticks([68, 84, 100, 116, 132, 144, 198, 264], [68, 84, 100, 116, 132, 144, 198, 264], fontsize=7)
            axes.set_xlim(left=58)  # room for names
            axes.minorticks_off()
        grid[0][0].set_ylabel("KL divergence from the dense run, nats (lower is better)")
        grid[0][0].legend(fontsize=8, loc="lower left")


def draw_sinks(path: Path) -> None:
    """Perplexity of streams by the number of sinks, within the trained context and beyond it."""
    dense, *others = rows_of("eviction", "eviction_sinks")
    counts = list(dict.fromkeys(row["parameters"]["num_sink_tokens"] for row in others))
    trained = dense["tokens"]  # it ends there
    titles = {
        "within": f"tokens {trained // 2:,} to {trained:,}: within the trained context",
        "beyond": f"tokens after {trained:,}: beyond it",
    }
    with picture(path, 1, 2, figsize=(10, 4.2), sharey=True, dpi=130) as (_, (grid,)):
        for axes, (span, title) in zip(grid, titles.items(), strict=True):
            for window, strength in ((256, 0.45), (1020, 1)):
                for positions, style in (("original", "--"), ("cache", "-")):
                    found = {}
                    for row in others:
                        options = row["parameters"]
                        if options["window"] == window and (options["positions"] == positions or not options["num_sink_tokens"]):
                            found[counts.index(options["num_sink_tokens"])] = row[f"perplexity_{span}"]
                    line = {"linestyle": style, "color": policy_color("sink_window"), "alpha": strength, "marker": "o"}
                    axes.plot(*zip(*found.items(), strict=True), label=f'window {window:,}, positions="{positions}"', **line)
            axes.axhline(dense["perplexity_within"], color="gray", linewidth=1, label=f"dense, tokens {trained // 2:,} to {trained:,}")
            axes.set(title=title, xlabel="sinks", xticks=range(len(counts)), xticklabels=counts, yscale="log")
        grid[0].set_ylabel("perplexity (lower is better)")
        grid[1].legend(fontsize=8)


def draw_budgets(path: Path) -> None:
    """KL and recall against the budget, a line a policy."""
    rows = [row for row in rows_of("eviction", "eviction_budgets") if row["share"] < 1]
    panels = {
        "kl": ("a text read on", "KL divergence, nats (lower is better)", 1),
        "recall_unseen": ("question unseen at eviction", "facts recalled, % (higher is better)", 100),
        "recall_seen": ("question seen at eviction", "facts recalled, % (higher is better)", 100),
    }
    styles = line_styles(dict.fromkeys(row["name"] for row in rows), policy_color)
    with picture(path, 1, 3, figsize=(14, 5), dpi=110, layout="constrained") as (figure, (grid,)):
        for axes, (value, (title, label, scale)) in zip(grid, panels.items(), strict=True):
            for name, style in styles.items():
                found = [row for row in rows if row["name"] == name]
                axes.plot([100 * row["share"] for row in found], [scale * row[value] for row in found], markersize=4, label=name, **style)
            axes.set(title=title, xlabel=f"tokens kept, % of {rows[0]['context']:,} (left is smaller)", ylabel=label)
            axes.grid(alpha=0.3)
        grid[0].set_yscale("log")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=9, fontsize=9)


def draw_combined(path: Path) -> None:
    """Requests that fit, by arithmetic, with what eviction and formats together cost."""
    rows = rows_of("eviction", "eviction_combined")
    exact = {"dense": format_color("DynamicCache"), "H2O": policy_color("h2o"), "sinks": policy_color("sink_window")}
    firsts = [row["name"].split(" ")[0] for row in rows]
    colors = [exact.get(first) or format_color(first) for first in firsts]
    panels = {
        "requests": (
            "requests of 131,072 tokens, by `plan`\n(right is better; hatched bars are cut)",
            "{:,}",
            1,
        ),
        "kl": ("KL, nats, keys without their mean\n(left is better)", "{:.3f}", 1),
        "recall_unseen": ("facts recalled, question unseen, %\n(right is better)", "{:.0f} %", 100),
    }
    names = [
        row["name"].replace("_uncentered", "").replace(" + sinks 4 + recent 64 + H2O 30 %", " + sinks, recent, H2O 30 %") for row in rows
    ]
    with picture(path, 1, 3, figsize=(13, 5), dpi=110, sharey=True, layout="constrained") as (_, (grid,)):
        for axes, (value, (title, note, scale)) in zip(grid, panels.items(), strict=True):
            values = [scale * row[value] for row in rows]
            most = 150 if value == "requests" else max(values)
            for y, (size, color) in enumerate(zip(values, colors, strict=True)):
                axes.barh(y, min(size, most), color=color, hatch="//" if size > most else "", edgecolor="white")
                axes.annotate(note.format(size), (min(size, most), y), (4, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set(xlabel=title, xlim=(0, 1.25 * most))
        grid[0].set(yticks=range(len(rows)), yticklabels=names)
        grid[0].invert_yaxis()


def draw_long_answers(path: Path) -> None:
    """How many answers are still the same, and how far the next token is from the dense run's, by tokens of the answer."""
    from matplotlib import ticker

    first, *rows = rows_of("long_answers")
    with picture(path, 1, 2, dpi=90, figsize=(12, 5), layout="constrained") as (figure, ((left, right),)):
        styles = line_styles(row["cache"] for row in rows)
        for row in rows:
            style = styles[row["cache"]]
            at = sorted(answer["first_difference"] for answer in row["answers"])
            same = [(1, 1.0), *((x, 1 - (i + 1) / len(at)) for i, x in enumerate(at) if x < row["tokens"])]
            ends, shares = [x for x, _ in same] + [row["tokens"]], [y for _, y in same] + [same[-1][1]]
            left.step(ends, shares, where="post", label=row["cache"], **style | {"marker": ""})
            middles = [sum(map(int, name.split("-"))) / 2 for name in row["kls"]]
            kls = [statistics.mean(kl) for kl in row["kls"].values()]
            if max(kls) > 1e-6:  # less is the order of sums
                right.plot(middles, kls, **style)
        left.set(ylabel="share of answers equal to the dense run's\n(higher is better)", ylim=(-0.02, 1.02), xscale="log")
        right.set(ylabel="KL along the dense run's answer, nats\n(lower is better)", xlim=(16, 1400), xscale="log", yscale="log")
        for axes in (left, right):
            axes.xaxis.set_major_locator(ticker.FixedLocator([1, 4, 16, 32, 64, 128, 256, 512, 1024]))
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.set_xlabel("token of the answer")
        figure.legend(loc="outside lower center", ncols=6, fontsize=8)
        figure.suptitle(f"{first['model']}, {first['prompts']} answers after {first['context']:,} tokens")


PICTURES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "calibrated": ("calibrated", draw_calibrated), "formats": ("formats", draw_formats), "sinks": ("eviction_sinks", draw_sinks),
    "budgets": ("eviction_budgets", draw_budgets), "combined": ("eviction_combined", draw_combined),
    "long_answers": ("long_answers_smollm2", draw_long_answers),
}  # fmt: skip
"""Names of files and what draws them."""


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    every = list(dict.fromkeys([*TABLES, *PICTURES]))
    parser.add_argument("studies", nargs="+", choices=every, metavar="STUDY", help=" ".join(every))
    parser.add_argument("--plot", action="store_true", help="the pictures in place of the tables")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where pictures go")
    args = parser.parse_args(arguments)
    if wrong := set(args.studies) - (PICTURES if args.plot else TABLES).keys():
        parser.error(f"{sorted(wrong)} has no {'picture' if args.plot else 'table'}")
    for study in args.studies:
        if args.plot:
            name, draw = PICTURES[study]
            draw(args.folder / f"{name}.png")
        else:
            print("\n\n".join(table.markdown() for table in TABLES[study]()))


if __name__ == "__main__":
    main()
