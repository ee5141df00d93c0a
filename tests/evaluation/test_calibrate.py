"""Calibration: what bits cost, the choice under a budget, the file, the command."""

import itertools
import json

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, calibrate, demo
from qkvcache.evaluation.calibrate import choose
from qkvcache.evaluation.quality import Passages, divergence
from qkvcache.formats import FormatByLayer, resolve
from tests.command import refuses, run
from tests.matrix import MODELS, by_layer, model

SMALL = {"context": 90, "windows": 2, "read_on": 20}
IDS = torch.arange(400) * 37 % 97 + 3


def best(costs, shapes, room):
    """Of all choices, the least sum of costs in `room` bits times channels."""
    sides = [
        (heads * dim, cost) for (heads, *dims), layer in zip(shapes, costs, strict=True) for dim, cost in zip(dims, layer, strict=True)
    ]
    sums = []
    for bits in itertools.product((2, 3, 4), repeat=len(sides)):
        if sum(size * b for (size, _), b in zip(sides, bits, strict=True)) <= room:
            sums.append(sum(cost[b - 2] for (_, cost), b in zip(sides, bits, strict=True)))
    return min(sums)


@pytest.mark.parametrize("shapes", [[(2, 64, 64)] * 4, [(2, 64, 64), (1, 128, 128), (2, 64, 32), (4, 16, 16)]], ids=["alike", "apart"])
@pytest.mark.parametrize("bits", [2, 2.3, 3, 3.49, 4])
def test_the_choice_is_the_best_of_all(shapes, bits):
    generator = torch.Generator().manual_seed(int(100 * bits))
    costs = (torch.rand(4, 2, 3, generator=generator) ** 3).tolist()  # some rise with more bits, as noise has it
    chosen = choose(costs, shapes, bits)
    found = sum(costs[i][side][b - 2] for i, both in enumerate(chosen) for side, b in enumerate(both))
    channels = sum(heads * (key + value) for heads, key, value in shapes)
    assert found == pytest.approx(best(costs, shapes, bits * channels + 1e-6))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n"])
def test_what_a_layer_costs_is_what_a_cache_with_it_alone_loses(name):
    """Tokens that are read on stay exact here; in the cache they are in the residual."""
    network = model(name)
    found = calibrate(network, IDS, **SMALL)
    full = len(by_layer(network.config))
    assert len(found.costs) == len(found.bits) == len(found.shapes) == full and found.shapes[0][:2] == (2, 32)
    rows = torch.stack([IDS[:110], IDS[200:310]])
    passages = Passages.read(network, rows, 90)
    formats = ["hadaquant_k2v2", *["identity"] * (full - 1)]
    kl = divergence(network, passages, lambda: CompressedCache(network.config, format=formats)).kl
    assert sum(of_side[0] for of_side in found.costs[0]) == pytest.approx(kl, rel=0.5)
    assert found.kl_uniform[2] > found.kl_uniform[3] > found.kl_uniform[4] > 0 and found.kl < found.kl_uniform[2]


def test_a_file_is_a_format_and_says_where_it_comes_from(tmp_path):
    network, path, seen = model("llama"), tmp_path / "llama.json", []
    found = calibrate(network, IDS, bits=2.5, progress=lambda *counts: seen.append(counts), **SMALL)
    assert seen == [(n, 23) for n in range(1, 24)]
    found.save(path)
    assert resolve(path) == found.format and type(found.format) is FormatByLayer
    content = json.loads(path.read_text())
    assert content["model_type"] == "llama" and content["context"] == 90 and content["kl_uniform"]["3"] == found.kl_uniform[3]
    assert content["costs"] == json.loads(json.dumps(found.costs)) and {"date", "commit", "torch", "transformers"} <= content.keys()
    assert found.bytes_per_token <= 2 * (2.5 * 4 + 2)
    assert DynamicCache(config=network.config).layers and CompressedCache(network.config, format=path).format == found.format


@pytest.mark.parametrize(
    ("text", "options", "error", "says"),
    [
        (IDS, {"bits": 5}, ValueError, "bits=5: must be 2 to 4"),
        (IDS, {"bits": "3"}, TypeError, "bits must be a number"),
        (IDS, {"windows": 0}, ValueError, "windows"),
        (IDS, {"residual_length": 0}, ValueError, "residual_length"),
        (IDS, {"context": 68}, ValueError, r"context=68: must be more than num_sink_tokens \+ residual_length = 68"),
        (IDS[:200], {}, ValueError, "2 windows of 110 tokens need a longer text than 200 tokens"),
        ("a text", {}, TypeError, "token ids .* or a tokenizer, got str"),
        (IDS.float(), {}, TypeError, "torch.float32"),
    ],
)
def test_what_is_refused(text, options, error, says):
    with pytest.raises(error, match=says):
        calibrate(model("llama"), text, **SMALL | options)


def test_models_with_an_encoder_or_no_full_layer_are_refused():
    with pytest.raises(ValueError, match="no layer of mistral has full attention"):
        calibrate(model("mistral"), IDS, **SMALL)
    with pytest.raises(NotImplementedError, match="t5 is an encoder-decoder"):
        calibrate(model("t5"), IDS, **SMALL)
    assert "t5" not in MODELS


def test_the_command(tmp_path):
    path = tmp_path / "demo.json"
    options = ("--context", "100", "--windows", "1", "--read-on", "16", "--device", "cpu")
    text = tmp_path / "text.txt"
    text.write_text(demo.text()[:4000])
    found = json.loads(run("calibrate", "demo", "--bits", "2.5", "--text", str(text), "--out", str(path), "--json", *options).stdout)
    assert found["model"] == "demo" and found["text"] == "text.txt" and found["bytes_per_token"] <= 84
    assert [format.name for format in resolve(path).formats] == found["formats"]
    planned = json.loads(run("plan", "demo", "--context", "4000", "--format", str(path), "--json").stdout)[0]
    assert planned["format"] == resolve(path).name
    shown = run("calibrate", "demo", "--out", str(path), *options)
    assert "bits of keys" in shown.stdout and "100 bytes a token and head" in shown.stdout, shown.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "x.txt"), "must end with .json"),
        (("--out", "no/such/x.json"), "is no folder"),
        (("--out", "x.json", "--bits", "5"), "--bits"),
        (("--out", "x.json", "--text", "nowhere"), "nowhere"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    refuses(says, "calibrate", "demo", *arguments)
