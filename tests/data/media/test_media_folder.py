# SPDX-License-Identifier: Apache-2.0
"""The folder of decoded frames under many processes, its bound, and crashes."""

import hashlib
import multiprocessing
import os
import pickle
import signal
import time
import uuid
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from verl.data.media.cache import Entry, MediaFolder

FORK = multiprocessing.get_context("fork")


def key_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()[:40]


def path_of(cache, number):
    return cache.directory / key_of(number)[:2] / f"{key_of(number)[2:]}.safetensors"


def entry(value, size=1000):
    return Entry({"frames": torch.full((size,), value, dtype=torch.uint8)}, {"value": value})


def refuse():
    raise AssertionError("the entry is there already")


def use_keys(directory, seed, results):
    """Ask for 20 entries in an order of its own."""
    cache = MediaFolder(directory)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    found = [(number, cache.get_or_make(key_of(number), lambda n=number: entry(n))) for number in order]
    results.put(all((e.tensors["frames"] == number).all() for number, e in found))


def write_for_ever(directory, ready):
    cache = MediaFolder(directory)
    for number in range(10**6):
        cache.get_or_make(key_of(number), lambda n=number: entry(n % 256, 100_000))
        if number == 20:
            ready.set()


def test_an_entry_is_made_once_and_found_by_every_later_user(tmp_path):
    made = MediaFolder(tmp_path / "new" / "folder").get_or_make(key_of(7), lambda: entry(7))

    found = MediaFolder(str(tmp_path / "new" / "folder")).get_or_make(key_of(7), refuse)

    assert torch.equal(found.tensors["frames"], made.tensors["frames"]) and found.meta == {"value": 7}


def test_an_entry_without_tensors_keeps_its_values_exactly(tmp_path):
    values = {"info": [86_400, 30_000 / 1001, 1920, 1080]}
    MediaFolder(tmp_path).get_or_make(key_of(1), lambda: Entry({}, values))

    assert MediaFolder(tmp_path).get_or_make(key_of(1), refuse) == Entry({}, values)


def test_a_pickled_cache_opens_the_same_folder(tmp_path):
    cache = MediaFolder(tmp_path)
    cache.get_or_make(key_of(1), lambda: entry(1))

    assert pickle.loads(pickle.dumps(cache)).get_or_make(key_of(1), refuse).meta == {"value": 1}


def test_entries_unread_for_longest_are_removed_first(tmp_path):
    # 20 entries of 1,088 bytes are 21,760; the bound leaves 15/16 of 16,000 bytes to the older ones.
    cache = MediaFolder(tmp_path, max_bytes=16_000)
    opened = cache.get_or_make(key_of(0), lambda: entry(0))
    for number in range(1, 20):
        cache.get_or_make(key_of(number), lambda n=number: entry(n))
        os.utime(path_of(cache, number), (number, number))
        os.utime(path_of(cache, 0), (0, 0))
        cache.get_or_make(key_of(0), refuse)  # reading renews it

    left = [number for number in range(20) if path_of(cache, number).exists()]
    size = sum(path_of(cache, number).stat().st_size for number in left)

    assert left[0] == 0 and left[1:] == list(range(left[1], 20)) and len(left) > 8
    assert size <= 16_000 * 17 / 16 and (opened.tensors["frames"] == 0).all()


def test_without_a_bound_entries_stay_while_the_disk_has_room(tmp_path):
    cache = MediaFolder(tmp_path)
    for number in range(30):
        cache.get_or_make(key_of(number), lambda n=number: entry(n))

    assert all(path_of(cache, number).exists() for number in range(30))


@pytest.mark.parametrize("content", [b"", b"x" * 5, b"\0" * 4000])
def test_a_damaged_file_is_replaced(content, tmp_path):
    cache = MediaFolder(tmp_path)
    cache.get_or_make(key_of(3), lambda: entry(3))
    path_of(cache, 3).write_bytes(content)

    assert cache.get_or_make(key_of(3), lambda: entry(4)).meta == {"value": 4}
    assert cache.get_or_make(key_of(3), refuse).meta == {"value": 4}


def test_a_truncated_file_is_replaced(tmp_path):
    cache = MediaFolder(tmp_path)
    cache.get_or_make(key_of(3), lambda: entry(3))
    path_of(cache, 3).write_bytes(path_of(cache, 3).read_bytes()[:-1])

    assert cache.get_or_make(key_of(3), lambda: entry(4)).meta == {"value": 4}


FRAMES = {
    "bytes": torch.arange(1000).to(torch.uint8),
    "pixels": torch.arange(12.0).reshape(3, 4),
    "features": torch.arange(6.0).to(torch.bfloat16).reshape(2, 3),
    "count": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
}


@pytest.mark.parametrize("change", ["a bit of a tensor", "a shape", "a value", "another program's file"])
def test_a_file_that_was_overwritten_at_the_same_length_is_replaced(change, tmp_path, caplog):
    cache = MediaFolder(tmp_path)
    cache.get_or_make(key_of(3), lambda: Entry(FRAMES, {"value": 3}))
    path = path_of(cache, 3)
    content = bytearray(path.read_bytes())
    found = cache.get(key_of(3))
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in FRAMES.items())
    if change == "a bit of a tensor":
        content[-30] ^= 1
    elif change == "another program's file":
        content = safetensors.torch.save({"frames": torch.zeros(3)})
    else:
        old, new = {"a shape": (b"[3,4]", b"[4,3]"), "a value": (b": 3}", b": 5}")}[change]
        assert content.count(old) == 1
        content = content.replace(old, new)
    path.write_bytes(content)

    assert cache.get_or_make(key_of(3), lambda: Entry(FRAMES, {"value": 4})).meta == {"value": 4}
    assert caplog.text.count("a damaged file of the media cache is replaced") == 1
    assert cache.get_or_make(key_of(3), refuse).meta == {"value": 4}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_warning_for_all_files(tmp_path, monkeypatch, caplog):
    cache = MediaFolder(tmp_path)
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="e" * 32))
    for number in range(5):
        path_of(cache, number).parent.mkdir()
        (path_of(cache, number).parent / ("e" * 32 + ".tmp")).symlink_to("/dev/full")

        assert cache.get_or_make(key_of(number), lambda n=number: entry(n)).meta == {"value": number}

    assert caplog.text.count("no room to cache media") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_an_error_while_making_an_entry_leaves_nothing_behind(tmp_path):
    cache = MediaFolder(tmp_path)

    def fail():
        raise ValueError("corrupt")

    with pytest.raises(ValueError, match="corrupt"):
        cache.get_or_make(key_of(1), fail)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_concurrent_processes_read_every_entry_correctly(tmp_path):
    results = FORK.Queue()
    processes = [FORK.Process(target=use_keys, args=(tmp_path, seed, results)) for seed in range(4)]
    for process in processes:
        process.start()
    right = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()

    assert all(right) and len(list(tmp_path.rglob("*.safetensors"))) == 20
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_process_killed_while_writing_leaves_only_whole_entries(tmp_path):
    ready = FORK.Event()
    process = FORK.Process(target=write_for_ever, args=(tmp_path, ready))
    process.start()
    assert ready.wait(240)
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    cache = MediaFolder(tmp_path)
    for number in range(len(list(tmp_path.rglob("*.safetensors")))):
        assert cache.get_or_make(key_of(number), refuse).tensors["frames"].numel() == 100_000


def test_partial_files_of_killed_processes_expire_and_other_files_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    folder = tmp_path / "ab"
    folder.mkdir()
    for name in ("readme.md", "f" * 32 + ".tmp", "e" * 32 + ".tmp"):
        (folder / name).write_bytes(b"x" * 900)
    hours_ago = time.time() - 7200
    os.utime(folder / ("f" * 32 + ".tmp"), (hours_ago, hours_ago))
    cache = MediaFolder(tmp_path, max_bytes=1500)

    for number in range(3):
        cache.get_or_make(key_of(number), lambda n=number: entry(n))

    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {"notes.txt", "readme.md", "e" * 32 + ".tmp"} <= names and "f" * 32 + ".tmp" not in names
