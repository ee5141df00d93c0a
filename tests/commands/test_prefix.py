"""`qkvcache prefix`: what it measures, lists and checks."""

import json

import pytest
import torch

from qkvcache import CompressedCache, PrefixStore
from qkvcache.links import links
from qkvcache.policies import Custom
from qkvcache.prefix.template import CacheTemplate
from tests import command
from tests.evict.matrix import KeyNorm
from tests.matrix import MODELS
from tests.prefix.made import fill, flipped, model, random_ids


def run(*arguments):
    return command.run("prefix", *arguments)


@pytest.fixture
def directory(tmp_path):
    kept = PrefixStore(model(), max_bytes=2**26, directory=tmp_path, format="nvfp4")
    for seed, tokens in enumerate((300, 1500)):
        ids = random_ids(tokens, seed)
        kept.store(ids, fill(CompressedCache(model().config, format="nvfp4"), ids))
    return tmp_path


def test_ls_lists_what_is_there(directory):
    rows = json.loads(run("ls", directory, "--json").stdout)
    assert sorted(row["tokens"] for row in rows) == [300, 1500]
    assert all(row["model"] == "llama" and "nvfp4" in row["cache"] and not row["problem"] for row in rows)
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in directory.iterdir())
    table = run("ls", directory).stdout
    assert "1,500" in table and rows[0]["file"][:12] in table and "2 files" in table
    assert table.count(" nvfp4 ") == 2 and "NVFP4(" not in table


def test_ls_lists_pages(tmp_path):
    kept = PrefixStore(model(), max_bytes=2**20, directory=tmp_path).pages("int8", "layout", 4)
    names = links(range(12), 4)
    for index, name in enumerate(names):
        kept.write(name, kept.keep(name, torch.zeros(1000, dtype=torch.uint8)), 10**18, index)
    rows = json.loads(run("ls", tmp_path, "--verify", "--json").stdout)
    assert [row["cache"] for row in rows] == [f"page {index} in int8" for index in range(3)]
    assert all(row["tokens"] == 4 and row["model"] == "llama" and not row["problem"] for row in rows)
    path = tmp_path / rows[1]["file"]
    path.write_bytes(path.read_bytes()[:-1] + b"1")
    assert run("ls", tmp_path, "--verify").exit_code == 1 and run("ls", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "int8"}, "int8"),
        ({"format": "int8", "residual_length": 16}, "int8, exact 4 + 16"),
        ({"format": "int8", "skip_layers": [0]}, "DynamicLayer; int8"),
        ({"policy": KeyNorm(budget=[50, 60])}, "identity, KeyNorm"),
        ({"format": "fp8", "policy": Custom(function=max), "residual_length": 0}, "fp8, Custom, exact 4 + 0"),
    ],
)
def test_caches_in_short(options, says):
    assert CacheTemplate(CompressedCache(model().config, **options), model().config).text == says


def test_verify_finds_what_is_damaged(directory):
    assert run("ls", directory, "--verify").exit_code == 0
    path = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    path.write_bytes(flipped(path.read_bytes(), -1000))
    (directory / "other.safetensors").write_bytes(b"no")
    result = run("ls", directory, "--verify")
    assert result.exit_code == 1 and "were changed" in " ".join(result.stdout.split()) and "3 files, 2 damaged" in result.stdout
    problems = [row["problem"] for row in json.loads(run("ls", directory, "--verify", "--json").stdout)]
    assert sum(map(bool, problems)) == 2
    assert run("ls", directory).exit_code == 0  # headers alone


def test_bench_measures_what_a_store_holds():
    rows = json.loads(run("bench", "--format", "int8", "--contexts", "300,600", "--json").stdout)
    assert [row["tokens"] for row in rows] == [300, 600]
    sizes = [row["bytes"] for row in rows]
    per_token = 5 * 2 * 264  # layers, heads, int8 at head_dim 128
    assert sizes[1] - sizes[0] == 300 * per_token + 300 * 4
    assert rows[1]["ratio"] == pytest.approx(600 * 5 * 2 * 512 / sizes[1])
    for row in rows:
        assert all(row[name] > 0 for name in ("store_ms", "fetch_ms", "fetch_half_ms"))
    assert "us/token" in run("bench", "--contexts", "300", "--dtype", "float16").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "--contexts", "1"), "2 or more"),
        (("bench", "--contexts", "many"), "many"),
        (("bench", "--format", "int9"), "int9"),
        (("bench", "--dtype", "int8"), "bfloat16"),
        (("bench", "--model", "/nowhere"), "'/nowhere' does not exist"),
        (("ls", "/nowhere"), "does not exist"),
    ],
)
def test_wrong_input_is_explained(arguments, says):
    command.refuses(says, "prefix", *arguments)


def test_bench_refuses_what_it_cannot_make(tmp_path):
    MODELS["qwen3_next"]().save_pretrained(tmp_path)
    command.refuses("LinearAttentionLayer", "prefix", "bench", "--model", tmp_path, "--contexts", "300")
    assert torch.is_grad_enabled()
