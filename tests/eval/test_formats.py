"""The study of formats reads all at once what a cache would hand back token by token."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from reference import assert_close
from tolerance import of_model

from qkvcache import CompressedCache
from qkvcache.formats import REGISTRY

EVAL = Path(__file__).parents[2] / "eval"


@pytest.mark.parametrize(("name", "zones"), [("hadaquant_k3v3", (0, 0)), ("turboquant_4bit_nc", (4, 16))])
def test_one_pass_is_token_by_token(name, zones, monkeypatch):
    monkeypatch.syspath_prepend(str(EVAL))
    spec = importlib.util.spec_from_file_location("formats_study", EVAL / "formats.py")  # tests have a package `formats`
    study = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, study)  # where dataclasses look
    spec.loader.exec_module(study)
    for size, count in (("CONTEXT", 150), ("WINDOWS", 2), ("READ_ON", 10)):
        monkeypatch.setattr(study, size, count)
    bench = study.Bench("llama", None)
    format = REGISTRY[name]
    bench.codecs, bench.zones = lambda layer: (format.key, format.value), zones
    together = bench._read()
    bench.model.set_attn_implementation(bench.stock)
    cache = CompressedCache(bench.model.config, format=format, exact_first=zones[0], exact_recent=zones[1], max_length=256)
    with torch.no_grad():
        for i, (key, value) in enumerate(bench.past):
            cache.update(key, value, i)
        steps = [bench.model(token, past_key_values=cache).logits.log_softmax(-1) for token in bench.rest.split(1, dim=1)]
    assert_close(torch.cat(steps, 1), together, of_model(bench.model, 256))
    assert (together - bench.dense).abs().max() > 0.05
