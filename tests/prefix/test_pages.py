"""Pages of continuous batching in a store's memory and directory."""

import errno
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from qkvcache.prefix import disk
from qkvcache.prefix.disk import DiskStore
from qkvcache.prefix.memory import MemoryStore
from qkvcache.prefix.pages import StoredPages, links
from tests.prefix.made import DAMAGES, FORK, failing_open, received
from tests.seeds import SEED

BYTES, SIZE = 4096, 4
TOKENS = list(range(40))


def pages(
    directory: Path | None,
    layout="layout",
    identity=bytes(16),
    max_bytes=2**20,
    max_disk_bytes=2**22,
    statistics=b"",
    time_to_live=None,
) -> StoredPages:
    where = None if directory is None else DiskStore(directory, max_disk_bytes, "llama", time_to_live)
    found = StoredPages(MemoryStore(max_bytes, time_to_live), where, identity, "int8", layout, SIZE, lock=False)
    found.begin(statistics)
    return found


def content(number: int) -> torch.Tensor:
    return torch.randint(256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED + number))


def write(kept: StoredPages, names: list[bytes], first: int = 0) -> None:
    for index, name in enumerate(names[first:], first):
        assert kept.write(name, kept.keep(name, content(index)), time.time_ns(), index) is None


def held(kept: StoredPages, names: list[bytes]) -> list[bool]:
    """Which pages are found; all that are have their content."""
    found = [kept.find(name) for name in names]
    assert all(page is None or torch.equal(page.tensors["page"], content(index)) for index, page in enumerate(found))
    return [page is not None for page in found]


def test_a_link_is_that_of_all_tokens_up_to_its_page_and_a_salt():
    found = links(TOKENS, SIZE)
    assert len(set(found)) == 10 and links(TOKENS[:-1], SIZE) == found[:9] and links(TOKENS, SIZE, known=found[:3]) == found
    for other in (links([1, *TOKENS[1:]], SIZE), links(TOKENS, SIZE, b"salt"), links(TOKENS, SIZE, found[0])):
        assert len(other) == 10 and not set(other) & set(found)


@pytest.mark.parametrize(
    "other", [{"layout": "other"}, {"identity": bytes([1] * 16)}, {"statistics": b"other"}], ids=lambda x: next(iter(x))
)
def test_pages_of_another_kind_are_not_found(tmp_path, other):
    """Not in memory either, which stores of one model share."""
    kept, names = pages(tmp_path), links(TOKENS, SIZE)
    write(kept, names)
    assert not any(held(pages(tmp_path, **other), names))
    found = pages(None, **other)
    found.memory = kept.memory
    assert not any(held(found, names)) and held(kept, names) == [True] * 10


def test_pages_come_back_from_memory_and_from_disk(tmp_path):
    kept = pages(tmp_path, max_bytes=3 * BYTES)
    names = links(TOKENS, SIZE)
    write(kept, names)
    assert kept.memory.nbytes == 3 * BYTES and held(kept, names) == [True] * 10
    assert held(pages(tmp_path), names) == [True] * 10 and not any(held(pages(tmp_path, layout="other"), names))
    memory = pages(None, max_bytes=3 * BYTES)
    for index, name in enumerate(names):
        memory.keep(name, content(index))
    assert held(memory, names) == [False] * 7 + [True] * 3


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_page_is_removed(tmp_path, damage):
    kept = pages(tmp_path)
    names = links(TOKENS, SIZE)
    write(kept, names)
    path = next(path for path in tmp_path.iterdir() if names[4].hex() in path.name)
    path.write_bytes(damage(path.read_bytes()))
    again = pages(tmp_path)
    with pytest.warns(UserWarning, match=f"{path.name} is removed"):
        assert held(again, names) == [True] * 4 + [False] + [True] * 5
    write(again, names[:5], 4)
    assert held(pages(tmp_path), names) == [True] * 10


def test_the_page_of_another_name_is_not_taken(tmp_path):
    kept = pages(tmp_path)
    names = links(TOKENS, SIZE)
    write(kept, names)
    one, other = (next(path for path in tmp_path.iterdir() if name.hex() in path.name) for name in names[:2])
    one.write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match="belongs to another file"):
        assert held(pages(tmp_path), names) == [False] + [True] * 9


def test_the_last_pages_used_longest_ago_go_first(tmp_path):
    """Of two prompts, the one that was used before loses its end; what is left is of use, and fits."""
    kept = pages(tmp_path, max_bytes=0, max_disk_bytes=70_000)
    first, second = links(TOKENS, SIZE), links(TOKENS[::-1], SIZE)
    write(kept, first)
    size = next(tmp_path.iterdir()).stat().st_size
    now = time.time_ns()
    for index in reversed(range(10)):
        assert kept.touch(first[index], now, index)
    write(kept, second)
    found = held(pages(tmp_path), first)
    assert found == sorted(found, reverse=True) and 0 < sum(found) < 10 and held(pages(tmp_path), second) == [True] * 10
    assert 0.9 * 70_000 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 70_000 and size < 1.2 * BYTES


def test_pages_end_with_their_time_to_live_unless_pinned(tmp_path):
    kept = pages(tmp_path, max_bytes=2**20, time_to_live=60)
    first, second = links(TOKENS, SIZE), links(TOKENS[::-1], SIZE)
    write(kept, first)
    write(kept, second)
    assert kept.pin(TOKENS[:15]) == 12
    kept.memory.trim(0)
    old = time.time_ns() - 61 * 10**9
    for index in range(10):
        for names in (first, second):
            os.utime(tmp_path / kept._file(names[index]), ns=(old, old))
    assert [kept.touch(name, time.time_ns(), index) for index, name in enumerate(first)] == [True] * 3 + [False] * 7
    assert held(kept, first[:3]) == [True] * 3
    assert len(list(tmp_path.glob("*.safetensors"))) == 13
    pages(tmp_path, time_to_live=60)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    kept.pin(TOKENS, False)
    assert not list(tmp_path.glob("*.pinned"))


def _write_until_killed(directory: Path, seed: int, done) -> None:
    kept = pages(directory, max_bytes=0, max_disk_bytes=2**30)
    names = links([seed, *TOKENS], SIZE)
    for index, name in enumerate(names):
        kept.write(name, kept.keep(name, content(index)), time.time_ns(), index)
        done.send(index)
    time.sleep(60)


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killing_a_writer_loses_no_page_that_was_written(tmp_path, kills):
    acknowledged = 0
    for seed in range(kills):
        receive, send = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_write_until_killed, args=(tmp_path, seed, send), daemon=True)
        child.start()
        send.close()
        for _ in range(seed % 5):
            receive.recv()
        time.sleep(0.0007 * (seed % 7))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        last = [seed % 5 - 1, *received(receive)][-1]
        kept = pages(tmp_path)
        found = held(kept, links([seed, *TOKENS], SIZE))
        assert found[: last + 1] == [True] * (last + 1) and sum(found) <= last + 2
        acknowledged += last + 1
    assert acknowledged >= kills
    assert all(disk.read_header(path).checked() for path in tmp_path.glob("*.safetensors"))


UNREADABLE = (errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE, errno.ENOMEM)


@pytest.mark.parametrize("code", UNREADABLE, ids=errno.errorcode.get)
def test_a_page_that_cannot_be_read_stays(tmp_path, monkeypatch, code):
    """Only a page that was read and is damaged is removed. Later, it is there."""
    kept = pages(tmp_path)
    names = links(TOKENS, SIZE)
    write(kept, names)
    files, again = set(tmp_path.iterdir()), pages(tmp_path)
    says = f"stays, and cannot be read: .*{os.strerror(code)}"
    with failing_open(monkeypatch, names[4].hex(), code), pytest.warns(UserWarning, match=says):
        assert held(again, names) == [True] * 4 + [False] + [True] * 5
    assert set(tmp_path.iterdir()) == files and held(again, names) == [True] * 10


def test_pages_stay_when_no_file_can_be_opened(tmp_path):
    """As by another client's idle connections."""
    kept = pages(tmp_path)
    names, (_, most) = links(TOKENS, SIZE), resource.getrlimit(resource.RLIMIT_NOFILE)
    write(kept, names)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), most))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.warns(UserWarning, match="Too many open files"):
            assert not any(held(pages(tmp_path), names))
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    assert held(pages(tmp_path), names) == [True] * 10


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    """A FIFO would be waited for, for ever."""
    kept = pages(tmp_path)
    names = links(TOKENS, SIZE)
    write(kept, names)
    for name, make in zip(names[:3], (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)), strict=True):
        (tmp_path / kept._file(name)).unlink()
        make(tmp_path / kept._file(name))
    with pytest.warns(UserWarning, match="it is no regular file"):
        assert held(pages(tmp_path), names) == [False] * 3 + [True] * 7
    assert all((tmp_path / kept._file(name)).exists() for name in names)


def test_the_directory_is_for_one_user(tmp_path):
    pages(tmp_path / "parent" / "made")
    assert (tmp_path / "parent" / "made").stat().st_mode & 0o777 == 0o700


def test_ages_are_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    """The clock of this host is 400 days ahead: no page is too old, nor is the folder of a running writer."""
    kept = pages(tmp_path, time_to_live=60)
    names = links(TOKENS, SIZE)
    write(kept, names)
    (tmp_path / "other.writing").mkdir()
    ahead = time.time() + 400 * 86400
    monkeypatch.setattr(time, "time", lambda: ahead)
    monkeypatch.setattr(time, "time_ns", lambda: int(ahead * 1e9))
    again = pages(tmp_path, time_to_live=60)
    now = again.now()
    assert [again.touch(name, now, index) for index, name in enumerate(names)] == [True] * 10
    assert held(again, names) == [True] * 10 and (tmp_path / "other.writing").exists()
