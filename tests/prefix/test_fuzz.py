"""Mutated files: a fetch finds the tokens that were stored, or nothing and a warning that names the file. No other error, no code, and no
allocation of a size that the file claims."""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load, save
from transformers.cache_utils import LinearAttentionLayer

from qkvcache import CompressedCache, PrefixStore, policies
from qkvcache.prefix import snapshot_file
from qkvcache.prefix.snapshot import Snapshot, check, snapshot
from qkvcache.releases import passing
from tests import matrix
from tests.prefix.made import WORDS, begin_of, model
from tests.seeds import SEED

MUTATIONS = 400 if matrix.ALL else 150
"""For each kind of entry."""
ROOM = 2**29
"""Bytes of address space that a fetch may take."""
NAMES = [
    "__class__", "__dict__", "policy", "load", "key", "", "0", "-1.key.sinks", "1_0.key.sinks", "9" * 30 + ".key.sinks", "0.key.sinks.x",
    "0.metadata.__class__", "0.metadata.policy", "0.metadata.load", "0.metadata._residual.__class__", "0.metadata.statistics.__class__",
    "0.metadata.__dict__.budget", "0.metadata.row_lengths", "0.metadata.head_weights", "0.metadata.pages.length", "0.key.region.__class__",
    "0.key.statistics.x", "0.pages.table", "0.pages.lengths", "0.keys", "1.keys", "1.conv_states.0", "0.forward.__globals__",
]  # fmt: skip
VALUES = [
    -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, 1e300, float("inf"), float("nan"), True, None, "", "x", "__class__", [], [1], {}, {"a": 1},
]  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
KINDS = {
    "quantized": ("llama", {"format": "turboquant_4bit_nc"}),
    "scores": ("llama", {"format": "int8", "policy": policies.H2O(budget=24, recent=4)}),
    "statistics": ("llama", {"format": "hadaquant_k4v3", "policy": policies.ExpectedAttention(budget=24, recent=4, n_future_positions=8)}),
    "pages": ("llama", {"format": "int8", "policy": policies.AdaKV(policies.SnapKV(budget=24, interval=1, window_size=4, recent=3))}),
    "sliding": ("gemma3", {"format": "int8"}),
    "checkpoint": ("falcon_h1", {"format": "int8", "checkpoint_interval": 32}),
}  # fmt: skip


class Stored(NamedTuple):
    """A store, whose directory is empty but for the file of a prompt; the file's content, and what a fetch of the prompt holds."""

    store: PrefixStore
    prompt: torch.Tensor
    path: Path
    content: bytes
    length: int
    expected: list[Snapshot]


@pytest.fixture(params=KINDS)
def stored(request, tmp_path) -> Stored:
    name, options = KINDS[request.param]
    config = matrix.MODELS[name]()
    if config.num_hidden_layers > 2:
        config.num_hidden_layers = 2
        config.layer_types = config.layer_types[:2] if getattr(config, "layer_types", None) else None
    network = model() if name == "llama" else type(matrix.model(name))(config).eval()
    options = options | {"num_sink_tokens": 2, "residual_length": 4}
    prompt = torch.randint(3, WORDS, (60,), generator=torch.Generator().manual_seed(SEED))
    kept, length = PrefixStore(network, max_bytes=2**26, directory=tmp_path, **options), options.pop("checkpoint_interval", 59)
    if length < 59:
        with kept.reuse(prompt):
            prompt = torch.cat([prompt[:40], prompt[:20]])
    else:
        cache = CompressedCache(network.config, **options)
        with torch.no_grad():
            network(prompt[None, :-1], **passing(cache))
        assert kept.store(prompt[:-1], cache)
    kept.trim(0)
    (path,) = tmp_path.iterdir()
    found = kept.fetch(prompt)
    assert (found.source, found.length) == ("disk", length)
    return Stored(kept, prompt, path, path.read_bytes(), length, held(found.cache))


def held(cache) -> list[Snapshot]:
    return [snapshot(layer) for layer in cache.layers]


def equal(found: list[Snapshot], expected: list[Snapshot]) -> bool:
    return all(
        a.kind == b.kind and a.numbers | {"longest": 0} == b.numbers | {"longest": 0} and a.tensors.keys() == b.tensors.keys()
        and all(x.dtype is b.tensors[name].dtype and torch.equal(x, b.tensors[name]) for name, x in a.tensors.items())
        for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


@contextmanager
def bounded():
    """Less address space than sizes that files claim."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def bytes_changed(path: Path, content: bytes, chance: random.Random) -> bytes:
    """A bit, a cut, a gap or foreign bytes; in the header as often as in the tensors."""
    begin = begin_of(content)
    at = chance.randrange(begin) if chance.random() < 0.5 else chance.randrange(begin, len(content))
    how = chance.randrange(5)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + content[at + chance.randrange(1, 9) :]
    if how == 2:
        return content[:at] + chance.randbytes(chance.randrange(1, 9)) + content[at:]
    if how == 3:
        return struct.pack("<Q", chance.choice([0, 1, begin - 9, begin, len(content), 2**40, 2**63])) + content[8:]
    changed = bytearray(content)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def signed(path: Path, content: bytes, chance: random.Random) -> bytes:
    """The file with one part of its form changed, under digests that fit."""
    data = json.loads(content[8 : begin_of(content)])["__metadata__"]
    tensors, header = dict(sorted(load(content).items())), json.loads(data["header"])  # `load` has no order of its own
    forms = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    name = chance.choice(list(tensors))
    x = tensors[name]
    how = chance.randrange(9)
    if how == 0:
        tensors[chance.choice(NAMES)] = tensors.pop(name)
    elif how == 1:
        tensors[chance.choice(NAMES)] = x.clone()
    elif how == 2:
        del tensors[name]
    elif how == 3:
        tensors[name] = x.to(chance.choice([dtype for dtype in DTYPES if dtype is not x.dtype]))
    elif how == 4:
        tensors[name] = shaped(x, chance)
    elif how == 5:
        other = chance.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif how == 6:
        change(chance.choice([layer["numbers"] for layer in header["parts"].values()]), chance)
    elif how == 7:
        change(chance.choice([header, header["parts"], *header["parts"].values()]), chance)
    elif counts := [x for name, x in tensors.items() if name.rpartition(".")[2] in ("positions", "lengths")]:
        count = chance.choice(counts)
        if count.numel():
            count.view(-1)[chance.randrange(count.numel())] = chance.choice([-(2**31), -2, 10**6, 2**31 - 1])
    other_values = how in (0, 1, 5) and forms == {name: (x.shape, x.dtype) for name, x in tensors.items()}
    if not other_values and isinstance(header.get("parts"), dict):  # values of the right form are told by their digests alone
        for part, layer in header["parts"].items():
            own = {name.partition(".")[2]: x for name, x in tensors.items() if name.partition(".")[0] == part}
            if isinstance(layer, dict) and "sums" in layer:
                layer["sums"] = snapshot_file._sums(Snapshot("", own))
    text = json.dumps(header)
    digest = snapshot_file._digest(path.name, text)
    return save({name: x.contiguous() for name, x in tensors.items()}, data | {"header": text, "digest": digest})


def shaped(x: torch.Tensor, chance: random.Random) -> torch.Tensor:
    how = chance.randrange(4)
    if how == 0:
        return x[None]
    if how == 1:
        return x.flatten() if x.ndim > 1 else x[:, None]
    if how == 2:
        return x.new_empty(*[10**9] * max(x.ndim - 2, 0), 0)
    dim = chance.randrange(x.ndim - 1) if x.ndim > 1 else 0  # head_dim of layers that transformers stores is for the model to say
    return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim) if x.shape[dim] else x[None]


def change(node: dict, chance: random.Random) -> None:
    """Changes one value in a tree of JSON, or adds, removes or renames it."""
    how, key = chance.randrange(4), chance.choice([*node, "new"])
    if how == 0:
        node.pop(key, None)
    elif how == 1 and key in node:
        node[chance.choice(["__class__", "kind", "seen", "layers"])] = node.pop(key)
    else:
        node[key] = chance.choice(VALUES)


@pytest.mark.parametrize("mutate", [bytes_changed, signed])
def test_a_mutated_file_gives_its_tokens_or_a_warning(stored, mutate):
    chance = random.Random(SEED)
    refused = 0
    with bounded():
        for number in range(MUTATIONS // 2):
            stored.path.unlink(missing_ok=True)
            assert stored.store.fetch(stored.prompt).kind == "miss"
            stored.path.write_bytes(mutate(stored.path, stored.content, chance))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = stored.store.fetch(stored.prompt)
            if found.cache is None:
                refused += 1
                assert [str(stored.path) in str(warning.message) for warning in caught] == [True], number
            else:
                assert not caught and found.length == stored.length and equal(held(found.cache), stored.expected), number
    assert refused > MUTATIONS // 4


@pytest.mark.parametrize("name", ["state.conv_states.0", "state.conv_states.9", "state.update", "state.__class__"])
def test_a_count_is_no_state_and_no_other_attribute(name):
    layer = LinearAttentionLayer()
    known = snapshot(layer)
    check(layer, known, 4)
    with pytest.raises(ValueError, match=name):
        check(layer, Snapshot(known.kind, {}, known.numbers | {name: 1}), 4)
