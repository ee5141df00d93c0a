"""Snapshots in one block of host memory, whose pages CUDA locks and unlocks."""

import ctypes
import threading

import pytest
import torch
from transformers import DynamicCache

from qkvcache.prefix import PrefixStore, disk, match, snapshot_file
from qkvcache.prefix.entry import Entry
from qkvcache.prefix.host_memory import Blocks, on_host
from qkvcache.prefix.snapshot import Snapshot
from qkvcache.prefix.template import CacheTemplate
from tests.prefix.made import fill, held, model, random_ids, same

LAYERS, TOKENS = 32, 40
GPU = torch.device("cuda", 0)


class Cudart:
    def __init__(self):
        self.locked: dict[int, int] = {}
        self.count = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.locked
        self.locked[address] = nbytes
        self.count += 1
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


class LateCopy:
    """The end of a copy from locked memory to a GPU that takes place as late as it may: when it is waited for. It keeps neither
    tensors nor the memory alive."""

    def __init__(self, layer: Snapshot):
        self.address = min(x.data_ptr() for x in layer.tensors.values())
        self.expected = b"".join(x.numpy().tobytes() for x in layer.tensors.values())
        self.copied: bytes | None = None

    def synchronize(self) -> None:
        if self.copied is None:
            self.copied = ctypes.string_at(self.address, len(self.expected))


def used(layer: Snapshot, device: torch.device = GPU) -> LateCopy:
    """A copy of `layer` to `device` that was queued."""
    copy = layer.memory.copies[device] = LateCopy(layer)
    return copy


@pytest.fixture
def cudart(monkeypatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(disk, "AHEAD", 3)
    monkeypatch.setattr(snapshot_file, "CHUNK", 16)
    return made


@pytest.fixture
def layers() -> list[Snapshot]:
    """Every fourth is larger."""
    shapes = [(1, 2, TOKENS, 16 if i % 4 == 3 else 8) for i in range(LAYERS)]
    return [Snapshot("dense", {name: torch.randn(shape) for name in ("keys", "values")}) for shape in shapes]


@pytest.fixture
def file(tmp_path, layers) -> disk.File:
    kept, key = disk.DiskStore(tmp_path, 2**30, "llama"), match.encode(bytes(match.NAME), torch.arange(TOKENS))
    kept.write(Entry(key, CacheTemplate(DynamicCache(config=model().config), model().config), layers))
    return kept.file(key)


def given() -> Snapshot:
    wide = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    tensors = {"keys": wide[:, :, :5], "values": wide.float()[:, :, 4:].transpose(2, 3), "step": torch.tensor(7), "none": wide[:, :, :0]}
    return Snapshot("dense", tensors, {"seen": 5})


@pytest.mark.parametrize("lock", [False, True])
def test_a_block_holds_every_tensor(lock, cudart):
    stored = given()
    found = on_host(stored, lock)
    assert (found.memory is not None) == lock
    for name, x in stored.tensors.items():
        assert torch.equal(found.tensors[name], x) and found.tensors[name].is_contiguous()
        assert found.tensors[name].dtype is x.dtype and found.tensors[name].data_ptr() % x.itemsize == 0
    assert found.kind == "dense" and found.numbers == {"seen": 5}
    assert found.nbytes >= sum(x.nbytes for x in stored.tensors.values()) and len(cudart.locked) == lock


def test_pages_are_locked_while_a_view_of_them_is_alive(cudart):
    found = on_host(given(), lock=True)
    keys = found.tensors["keys"][:, :, :2]
    expected = keys.clone()
    del found
    assert len(cudart.locked) == 1 and torch.equal(keys, expected)
    del keys
    assert not cudart.locked


@pytest.mark.parametrize("tokens", [TOKENS, 37, 16, 5])
def test_blocks_are_used_again_when_their_copies_have_ended(tokens, cudart, file, layers):
    """Each thread and the consumer has a block; a thread that has handed in its layer may keep that for a moment longer."""
    copies, most = [], 0
    for layer, expected in zip(disk.read(file, tokens, Blocks()), layers, strict=True):
        assert all(torch.equal(layer.tensors[name], x[:, :, :tokens]) for name, x in expected.tensors.items())
        copies.append(used(layer))
        most = max(most, len(cudart.locked))
    del layer
    assert not cudart.locked and all(copy.copied == copy.expected for copy in copies)
    in_use = 2 * disk.AHEAD + 1
    assert most <= in_use and cudart.count <= 2 * in_use < LAYERS  # twice: the first ones may be too small for a larger layer


def test_a_block_waits_for_every_gpu_and_not_for_other_blocks(cudart, layers):
    blocks = Blocks()
    first, second = map(blocks, layers[3:5])
    ends, other, memory = [used(first, torch.device("cuda", i)) for i in range(2)], used(second), first.memory
    view = first.tensors["keys"][:, :, :1]
    del first
    third = blocks(layers[5])
    assert third.memory is not memory  # a view of it is in use
    del view
    fourth = blocks(layers[6])
    assert fourth.memory is memory
    assert all(end.copied == end.expected for end in ends) and other.copied is None


def test_a_slow_layer_does_not_stop_those_that_are_read_with_it(cudart, file, layers, monkeypatch):
    """Nor does a consumer that keeps all layers."""
    others, digests = threading.Semaphore(0), snapshot_file._sums

    def slow(layer: Snapshot, chunks: int | None) -> list[str]:
        found = digests(layer, chunks)
        if found == file.parts["0"]["sums"]:
            assert all(others.acquire(timeout=60) for _ in range(disk.AHEAD - 1)), "the layers after it wait for it"
        others.release()
        return found

    monkeypatch.setattr(snapshot_file, "_sums", slow)
    kept = list(disk.read(file, TOKENS, Blocks()))
    assert all(torch.equal(x.tensors["keys"], y.tensors["keys"]) for x, y in zip(kept, layers, strict=True))
    assert len(cudart.locked) == LAYERS


@pytest.mark.parametrize("damaged", [0, 1, 9, LAYERS - 1])
def test_a_damaged_layer_ends_a_read_into_blocks(damaged, cudart, file, layers):
    content = bytearray(file.path.read_bytes())
    content[content.index(layers[damaged].tensors["keys"].numpy().tobytes())] ^= 1
    file.path.write_bytes(content)
    copies = []
    with pytest.raises(disk.Damaged, match=f"layer {damaged} were changed"):
        for layer in disk.read(file, 5, Blocks()):
            copies.append(used(layer))
            del layer
    assert len(copies) == damaged and all(copy.copied == copy.expected for copy in copies) and not cudart.locked


def test_a_read_that_is_given_up_unlocks_its_blocks(cudart, file):
    reading = disk.read(file, TOKENS, Blocks())
    next(reading)
    reading.close()
    assert cudart.count and not cudart.locked


def test_a_fetch_locks_blocks_for_a_while_and_a_load_keeps_them(cudart, tmp_path, monkeypatch):
    """Into a cache in host memory, as the layers of a model are that is spread over GPUs and the host."""
    ids = random_ids(300)
    kept = PrefixStore(model(), max_bytes=2**24, directory=tmp_path)
    cache = fill(DynamicCache(config=model().config), ids)
    assert kept.store(ids, cache) and not cudart.count
    expected = held(kept.fetch(ids).cache)
    kept.trim(0)
    monkeypatch.setattr(PrefixStore, "_on_gpu", True)
    for tokens in (299, 100):
        found = kept.fetch(ids[: tokens + 1])
        assert found.source == "disk" and found.length == tokens and same(found.cache, expected, tokens)
    assert cudart.count == 4 and not cudart.locked
    assert kept.load() == 1 and len(cudart.locked) == 2 and kept.fetch(ids).source == "memory"
    kept.trim(0)
    assert not cudart.locked
