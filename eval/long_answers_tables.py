"""The table and the picture of long_answers.py."""

from __future__ import annotations

import statistics
from pathlib import Path

from error_bars import percent, recalled, with_error
from harness import Table, picture
from palette import line_styles

BUCKETS = ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024))
MARKS = (64, 128, 256, 512, 1000)


def mean_with_error(values: list[float]) -> str:
    return with_error(statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan"))


def marks(rows: list[dict]) -> list[int]:
    """Lengths of answers that were reached, the whole among them."""
    return sorted({min(mark, rows[0]["tokens"]) for mark in MARKS})


def columns(rows: list[dict]) -> list[str]:
    kls = list(dict.fromkeys(bucket for row in rows for bucket in row["kls"]))
    kinds = dict.fromkeys(answer["kind"] for answer in rows[0]["answers"] if "words" in answer)
    return ["cache", "first difference", *(f"same after {mark:,}" for mark in marks(rows)), *(f"KL, tokens {name}" for name in kls), *kinds]


def cells(rows: list[dict]) -> list[list[str]]:
    found = []
    kls = list(dict.fromkeys(bucket for row in rows for bucket in row["kls"]))
    for row in rows:
        at = [answer["first_difference"] for answer in row["answers"]]
        low, middle, high = statistics.quantiles(at, n=4, method="inclusive") if len(at) > 1 else at * 3
        same = (recalled(sum(x >= mark for x in at), len(at)) for mark in marks(rows))
        far = (mean_with_error(row["kls"][name]) if name in row["kls"] else "" for name in kls)
        kinds: dict[str, list[dict]] = {}
        for answer in row["answers"]:
            if "words" in answer:
                kinds.setdefault(answer["kind"], []).append(answer)
        found.append([row["cache"], f"{middle:.0f} ({low:.0f} to {high:.0f})", *same, *far, *map(_ended, kinds.values())])
    return found


def _ended(answers: list[dict]) -> str:
    """Answers without a mistake, words before the first one, and how alike the whole is."""
    whole = sum(answer["before_mistake"] == answer["words"] for answer in answers)
    before = sum(answer["before_mistake"] for answer in answers) / max(sum(answer["words"] for answer in answers), 1)
    return f"{whole} of {len(answers)}, {percent(before)}, {percent(statistics.mean(answer['similarity'] for answer in answers))}"


def caption(rows: list[dict]) -> str:
    first = rows[0]
    return (
        f"{first['model']} in {first['dtype'].removeprefix('torch.')} on {first['device']}: {first['prompts']} answers of "
        f"{first['tokens']:,} tokens after {first['context']:,} ({first['text']}), greedy. first difference: token, median and quartiles; "
        f"{first['tokens']:,}: none. KL: nats, along the dense run's answer, with the standard error over the answers. The last columns: "
        "answers without a mistake, share of words before the first one, likeness of the whole."
    )


def table(rows: list[dict]) -> Table:
    return Table(columns(rows), cells(rows), caption=caption(rows), rule=(" --- ",))


def plot(rows: list[dict], path: Path) -> None:
    """How many answers are still the same, and how far the next token is from the dense run's, by tokens of the answer."""
    from matplotlib import ticker

    first = rows[0]
    with picture(path, 1, 2, dpi=90, figsize=(12, 5), layout="constrained") as (figure, ((left, right),)):
        styles = line_styles(row["cache"] for row in rows[1:])
        for row in rows[1:]:
            style = styles[row["cache"]]
            at = sorted(answer["first_difference"] for answer in row["answers"])
            same = [(1, 1.0), *((x, 1 - (i + 1) / len(at)) for i, x in enumerate(at) if x < row["tokens"])]
            ends, shares = [x for x, _ in same] + [row["tokens"]], [y for _, y in same] + [same[-1][1]]
            left.step(ends, shares, where="post", label=row["cache"], **style | {"marker": ""})
            middles = [sum(map(int, name.split("-"))) / 2 for name in row["kls"]]
            kls = [statistics.mean(kl) for kl in row["kls"].values()]
            if max(kls) > 1e-6:  # less is the order of sums
                right.plot(middles, kls, **style)
        left.set(title="share of answers that are still the dense run's (higher is better)", ylim=(-0.02, 1.02), xscale="log")
        right.set(title="KL divergence along the dense run's answer, nats (lower is better)", xscale="log", yscale="log")
        for axes in (left, right):
            axes.xaxis.set_major_locator(ticker.FixedLocator([1, 4, 16, 64, 256, 1024]))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        figure.legend(loc="outside lower center", ncols=6, fontsize=8)
        figure.suptitle(f"{first['model']}, {first['prompts']} answers after {first['context']:,} tokens")
