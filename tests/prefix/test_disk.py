"""Entries as files: whole or not there, whatever happens to the process or to the file."""

import errno
import os
import random
import shutil
import signal
import time
import warnings

import pytest
import torch
from safetensors.torch import save_file

from qkvcache import CompressedCache, PrefixStore, files
from qkvcache.prefix import disk, snapshot_file
from qkvcache.releases import passing
from tests.prefix.made import FORK, ZONES, compressed, failing_open, flipped, held, model, random_ids, received, rewrite, same
from tests.seeds import SEED


def store(directory, **options) -> PrefixStore:
    return PrefixStore(model(), **{"max_bytes": 2**26, "directory": directory} | ZONES | options)


def test_an_entry_that_is_on_disk_is_not_written_again(tmp_path):
    """Neither one that can be cut to any tokens nor one that cannot."""
    ids = random_ids(100)
    for policy in (None, "sink_window"):
        cache = CompressedCache(model().config, format="int8", policy=policy, **ZONES)
        with torch.no_grad():
            model()(ids[None], **passing(cache))
        kept = store(tmp_path / str(policy))
        assert kept.store(ids, cache)
        (path,) = kept._disk.directory.iterdir()
        number = path.stat().st_ino
        kept.trim(0)
        assert kept.store(ids, cache) and kept.stats.covered == 1 and len(kept) == 1
        assert kept.save() == 0 and path.stat().st_ino == number


def test_a_damaged_file_is_replaced_by_its_tokens(two):
    path, first, _ = two
    kept = store(path.parent)
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.warns(UserWarning, match="changed"):
        assert kept.store(first, compressed(first)) and kept.stats.stored == 1
    assert store(path.parent).fetch(first).kind == "exact"


@pytest.fixture
def two(tmp_path):
    """A directory of two entries: the path of the first, its ids, and the ids of the second."""
    first, second = random_ids(3000), random_ids(200, 1)
    kept = store(tmp_path)
    kept.store(first, compressed(first))
    (path,) = tmp_path.iterdir()
    kept.store(second, compressed(second))
    return path, first, second


def refused(path, first, second, says: str) -> None:
    """A new store skips the file with one warning, keeps the other entry, and works."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = store(path.parent)
        for _ in range(2):
            assert kept.fetch(first).kind == "miss"
        assert kept.fetch(second).kind == "exact"
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert path.name in str(caught[0].message) and says in str(caught[0].message)
    assert sum(kept.stats.skipped.values()) == 1 and path.exists()
    assert kept.store(first, compressed(first))
    assert kept.fetch(first).kind == "exact"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_is_not_opened(two, kind):
    """A FIFO would wait for a writer, for ever, and a device may."""
    path, first, second = two
    path.unlink()
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    kept = store(path.parent)
    with pytest.warns(UserWarning, match="no regular file"):
        assert kept.fetch(first).kind == "miss"
    assert kept.fetch(second).kind == "exact"
    kept.trim(0, 0)
    with pytest.warns(UserWarning, match="no regular file"):
        assert kept._disk.read_page(path.name) is None


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(snapshot_file, "CHUNK", 1024)


def test_every_part_of_a_fetch_is_checked_and_no_other(small_chunks, two):
    """A flipped bit in the last tokens is no reason not to use the first ones."""
    path, first, _ = two

    def change(tensors, data) -> None:
        (name,) = [name for name in tensors if name.startswith("1.value.region.codes")]
        tensors[name][0, 1, -1, 0] ^= 1

    rewrite(path, change)
    kept = store(path.parent)
    assert kept.fetch(first[:1500]).source == "disk"
    with pytest.warns(UserWarning, match="layer 1 were changed"):
        assert kept.fetch(first).kind == "miss"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, data: data.update(qkvcache_prefix="99"), "upgrade"),
        (lambda tensors, data: data.pop("qkvcache_prefix"), "no prefix entry"),
        (lambda tensors, data: data.pop("digest"), "header was changed"),
        (lambda tensors, data: data.update(header=data["header"].replace("false", "true", 1)), "header was changed"),
        (lambda tensors, data: tensors["ids.ids"][5:6].add_(1), "contents of ids were changed"),
        (lambda tensors, data: tensors.pop("1.key.residual"), "damaged"),
        (lambda tensors, data: tensors.update({"1.key.sinks": tensors["1.key.sinks"] + 1}), "layer 1 were changed"),
        (lambda tensors, data: tensors.update({"1.key.region.spare": tensors["1.key.sinks"] + 1}), "layer 1: 'key.region.spare'"),
        (lambda tensors, data: tensors.update({"0.key.sinks": tensors["1.key.sinks"], "1.key.sinks": tensors["0.key.sinks"]}), "layer 0"),
        (lambda tensors, data: tensors.update({"9.key.sinks": tensors["1.key.sinks"].clone()}), "damaged"),
        (lambda tensors, data: tensors.pop("1.value.residual"), "layer 1: 'value.residual' is missing"),
        (lambda tensors, data: tensors.clear(), "contents of ids were changed"),
    ],
)
def test_a_tampered_file_is_skipped(two, change, says):
    rewrite(two[0], change)
    refused(*two, says)


def test_the_file_of_another_entry_is_not_taken_for_this_one(two):
    path, first, second = two
    (other,) = [p for p in path.parent.iterdir() if p != path]
    path.write_bytes(other.read_bytes())
    refused(*two, "its name belongs to another")


def test_foreign_files_are_let_alone(two):
    path, first, second = two
    foreign = path.with_name("model.safetensors")
    save_file({"weight": torch.zeros(3)}, foreign)
    path.with_name("notes.txt").write_text("mine")
    (path.parent / "folder").mkdir()
    with pytest.warns(UserWarning, match="model.safetensors is skipped: it is no prefix entry") as caught:
        kept = store(path.parent)
        assert kept.fetch(first).kind == kept.fetch(second).kind == "exact"
    assert len(caught) == 1
    kept.trim(0, 0)
    assert {p.name for p in path.parent.iterdir()} == {"model.safetensors", "notes.txt", "folder"}


def test_a_file_that_vanishes_is_a_miss(two):
    path, first, second = two
    kept = store(path.parent)
    assert kept.fetch(first[:1000]).source == "disk"
    path.unlink()
    assert kept.fetch(first[:1000]).kind == "miss" and kept.fetch(second).kind == "exact"
    kept._disk.scan = lambda *args: None  # as if it went between looking and reading
    next(path.parent.iterdir()).unlink()
    assert kept.fetch(second).kind == "miss"


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_a_miss_until_it_can(two, monkeypatch, code):
    path, first, _ = two
    kept, again = store(path.parent), store(path.parent)
    assert kept.fetch(first[:10]).kind == "miss"  # it has read the header
    for one in (kept, again):
        with (
            failing_open(monkeypatch, path.name, code),
            pytest.warns(UserWarning, match=f"stays, and cannot be read: .*{os.strerror(code)}"),
        ):
            assert one.fetch(first).kind == "miss"
        assert path.exists() and one.fetch(first).kind == "exact" and not one.stats.skipped


def test_a_directory_that_vanishes_is_empty(two):
    path, first, second = two
    kept = store(path.parent)
    shutil.rmtree(path.parent)
    assert kept.fetch(first).kind == "miss" and kept.stats.disk_bytes == 0
    assert kept.store(second, compressed(second)) and kept.fetch(second).source == "memory"
    assert not kept.stats.refused and store(path.parent).fetch(second).source == "disk"  # which is there again


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    kept = store(tmp_path)
    monkeypatch.setattr(files, "save_file", full)
    ids = random_ids(50)
    assert kept.store(ids, compressed(ids)) and kept.fetch(ids).source == "memory"
    assert any("No space left" in reason for reason in kept.stats.refused)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert kept.save() == 1 and kept.save() == 0
    assert store(tmp_path).fetch(ids).source == "disk"


def test_disk_is_bounded_and_what_was_used_longest_ago_goes(tmp_path):
    prompts = [random_ids(300, seed) for seed in range(4)]
    kept = store(tmp_path)
    kept.store(prompts[0], compressed(prompts[0]))
    size = kept.stats.disk_bytes
    assert size == sum(p.stat().st_size for p in tmp_path.iterdir())
    kept = store(tmp_path, max_disk_bytes=int(3.5 * size), max_bytes=2**26)
    for prompt in prompts[1:3]:
        kept.store(prompt, compressed(prompt))
    for i, path in enumerate(sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)):
        os.utime(path, (i, i))
    kept.trim(0)
    assert kept.fetch(prompts[0]).source == "disk"  # and now used last
    kept.store(prompts[3], compressed(prompts[3]))
    kept.trim(0)
    assert [kept.fetch(prompt).kind for prompt in prompts] == ["exact", "miss", "exact", "exact"]
    stats = kept.stats
    assert stats.files == 3 and stats.disk_bytes <= 3.5 * size and stats.evicted_files == 1
    long = random_ids(1500, 9)
    assert kept.store(long, compressed(long)) and kept.stats.files == 3
    assert any("larger than the whole budget on disk" in reason for reason in kept.stats.refused)
    kept.trim(2**26, 0)
    assert kept.stats.files == 0


def test_load_takes_what_fits_and_what_was_used_last(tmp_path):
    prompts = [random_ids(300, seed) for seed in range(4)]
    kept = store(tmp_path)
    for i, prompt in enumerate(prompts):
        kept.store(prompt, compressed(prompt))
        (path,) = [p for p in tmp_path.iterdir() if p.stat().st_mtime > 1e6]
        os.utime(path, (i, i))
    size = kept._memory.entries[0].nbytes
    again = store(tmp_path, max_bytes=2 * size)
    assert again.load() == 2 and again.stats.nbytes == 2 * size
    assert [again.fetch(prompt).source for prompt in prompts] == ["disk", "disk", "memory", "memory"]
    assert same(again.fetch(prompts[3]).cache, held(compressed(prompts[3])), 299)


def aged(directory, seconds):
    """Every file was used so many seconds earlier."""
    for path in directory.iterdir():
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))


def test_files_that_nobody_uses_for_their_time_to_live_go(tmp_path):
    prompts = [random_ids(300, seed) for seed in range(3)]
    kept = store(tmp_path, time_to_live=600)
    for prompt in prompts[:2]:
        kept.store(prompt, compressed(prompt))
    kept.trim(0)
    aged(tmp_path, 500)
    assert kept.fetch(prompts[0]).source == "disk"
    aged(tmp_path, 500)
    assert [kept.fetch(prompt).source for prompt in prompts[:2]] == ["disk", None] and kept.stats.files == 1
    aged(tmp_path, 700)
    kept.store(prompts[2], compressed(prompts[2]))  # makes room
    assert kept.stats.files == 1 and kept.stats.evicted_files == 2
    aged(tmp_path, 700)
    assert store(tmp_path).fetch(prompts[2]).source == "disk"  # another process keeps files for ever, and has used this one
    aged(tmp_path, 700)
    assert store(tmp_path, time_to_live=600).stats.files == 0


def test_pinned_files_stay_for_all_processes(tmp_path):
    system, others = random_ids(300), [random_ids(300, seed) for seed in (1, 2)]
    kept = store(tmp_path)
    chat = torch.cat([system, others[0]])
    kept.store(chat, compressed(chat))
    kept.trim(0)
    assert kept.pin(system) == 300 and kept.stats.files == 2  # cut from the file of a longer one
    aged(tmp_path, 10_000)
    again = store(tmp_path, time_to_live=600, max_disk_bytes=kept.stats.disk_bytes)
    assert again.stats.files == 1 and again.fetch(chat).length == 300
    longer = torch.cat([system, others[1]])
    again.store(longer, compressed(longer))  # takes the place of no pinned one
    again.trim(0, 0)
    assert again.stats.files == 1 and again.load() == 1
    again.trim(0)
    assert again.fetch(longer).source == "memory"
    again.unpin(system)
    again.trim(0, 0)
    assert not list(tmp_path.iterdir()) and again.fetch(longer).kind == "miss"


# Several processes.


def _write_until_killed(directory, seed, done):
    disk.LONGEST_WRITE = 3600  # this process must not remove the folder that it writes into; the test's own removes all
    kept = store(directory)
    for number in range(1000):
        ids = random_ids(400, 1000 * seed + number)
        kept.store(ids, compressed(ids))
        done.send(1000 * seed + number)


@pytest.mark.slow
def test_killing_a_writer_loses_at_most_the_entry_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LONGEST_WRITE", -1)
    kept = store(tmp_path)
    written: list[int] = []
    leftovers = 0
    for seed in range(24):
        receive, send = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_write_until_killed, args=(tmp_path, seed, send))
        child.start()
        send.close()
        written.append(receive.recv())  # it has begun
        time.sleep(0.0021 * seed)
        while seed % 2 and not list(tmp_path.glob("*.writing")):  # every other one while it writes
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        written += received(receive)
        leftovers += len(list(tmp_path.glob("*.writing")))
        kept.trim(0, kept.stats.disk_bytes)
        assert not list(tmp_path.glob("*.writing"))  # of a dead process
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in tmp_path.iterdir():
            list(disk.read(disk.read_header(path)))  # raises if it is damaged
        for number in written:
            assert kept.fetch(random_ids(400, number)).kind == "exact"
    assert kept.stats.files - 24 <= len(written) <= kept.stats.files
    assert leftovers, "no process was killed while it wrote: the test has lost its point"


def test_only_old_folders_of_writers_are_removed(tmp_path):
    kept = store(tmp_path)
    running, left = tmp_path / "1.writing", tmp_path / "2.writing"
    running.mkdir()
    left.mkdir()
    os.utime(left, (0, 0))
    kept.trim(0, 2**20)
    assert running.exists() and not left.exists()


def _store_and_fetch(directory, seed, most):
    warnings.simplefilter("error")
    kept = store(directory, max_bytes=100_000, max_disk_bytes=most)
    hits = 0
    chance = random.Random(SEED + seed)
    for _ in range(40):
        ids = random_ids(200, chance.randrange(12))
        found = kept.fetch(ids)
        if found.cache is not None:
            hits += 1
            if not same(found.cache, held(compressed(ids)), found.length):
                raise ValueError("wrong contents")
        kept.store(ids, compressed(ids))
    if hits < 5 or kept.stats.refused:
        raise ValueError(kept.stats)


def test_several_processes_share_a_directory(tmp_path):
    one = store(tmp_path)
    ids = random_ids(200)
    one.store(ids, compressed(ids))
    size = one.stats.disk_bytes
    most = 9 * size  # of twelve entries
    children = [FORK.Process(target=_store_and_fetch, args=(tmp_path, seed, most)) for seed in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert not list(tmp_path.glob("*.writing"))
    assert 0 < one.stats.disk_bytes <= most + 3 * size  # each of the others may have written one since it trimmed
    one.trim(0)
    assert sum(one.fetch(random_ids(200, seed)).kind == "exact" for seed in range(12)) == one.stats.files
