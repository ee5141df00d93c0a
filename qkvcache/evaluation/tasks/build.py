"""Functions that the task files name (`!function build...`): rows of the generated tasks, and scores."""

from __future__ import annotations

import difflib
import functools
import warnings

import datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qkvcache import models
from qkvcache.evaluation import long_context

DEFAULTS = {"context_tokens": 2000, "number": 20, "seed": 0}
FEW = 20
"""Cases of a task below which a share of them has an error of more than 11 points."""


@functools.cache
def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(models.folder(name))


def rows(task: str, *, tokenizer=None, pretrained=None, **options) -> dict[str, datasets.Dataset]:
    """Rows of a generated task; `context_tokens`, `number` and `seed` come from `--metadata`, the tokenizer from `--model_args`."""
    of = tokenizer or pretrained
    if not isinstance(of, str | PreTrainedTokenizerBase):
        raise ValueError('a generated task needs the tokenizer: pass --metadata \'{"tokenizer": "PATH"}\', or TaskManager(metadata=...)')
    for name in options.keys() - DEFAULTS.keys():
        if meant := difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.8):
            raise ValueError(f"--metadata has {name!r}: did you mean {meant[0]!r}?")
    size = {name: _whole(name, options.get(name, value)) for name, value in DEFAULTS.items()}
    if size["number"] < FEW:
        warnings.warn(
            f"number={size['number']}: so few cases of {task} decide nothing; give --metadata a number of 50 or more", stacklevel=2
        )
    drawn = long_context.cases(task, _tokenizer(of) if isinstance(of, str) else of, size["context_tokens"], size["number"], size["seed"])
    return {"test": datasets.Dataset.from_list([{"input": case.prompt, "outputs": list(case.answers)} for case in drawn])}


def _whole(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():  # 2e3 is a float
        raise ValueError(f"--metadata has {name}={value!r}: expected a whole number, such as {DEFAULTS[name]}")
    return int(value)


needle = functools.partial(rows, "needle")
needle_multikey = functools.partial(rows, "needle_multikey")
coreference = functools.partial(rows, "coreference")
variables = functools.partial(rows, "variables")
key_value = functools.partial(rows, "key_value")
aggregation = functools.partial(rows, "aggregation")


def local_json(*, path=None, **_) -> dict[str, datasets.Dataset]:
    """Rows of a JSON or JSON-lines file with `input` and `outputs` (a list of texts that the answer must contain)."""
    if not isinstance(path, str):
        raise ValueError('pass the file as --metadata \'{"path": "mine.jsonl"}\': rows with "input" and "outputs"')
    dataset = datasets.load_dataset("json", data_files=path, split="train")
    if missing := {"input", "outputs"} - set(dataset.column_names):
        raise ValueError(f"{path}: rows have no {' and no '.join(sorted(missing))}, only {', '.join(dataset.column_names)}")
    for row, outputs in enumerate(dataset["outputs"]):  # a string would be scored letter by letter; every answer contains an empty text
        if not (isinstance(outputs, list) and outputs and all(isinstance(one, str) and one for one in outputs)):
            raise ValueError(f'{path}: row {row} has outputs={outputs!r}: expected a list of one or more texts, such as ["zebra"]')
    return {"test": dataset}


def recall(doc: dict, results: list[str]) -> dict[str, float]:
    return {"recall": long_context.recalled(results[0], doc["outputs"])}


def similarity(doc: dict, results: list[str]) -> dict[str, float]:
    return {"similarity": long_context.similarity(results[0], doc["outputs"][0])}
