# SPDX-License-Identifier: Apache-2.0
"""The media cache under concurrent processes, eviction, and the death of its users."""

import hashlib
import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch

from verl.data.media import cache as media_cache
from verl.data.media.cache import Entry, MediaCache, encode_entry, read_entry, remove_stale_directories

FORK = multiprocessing.get_context("fork")


def entry(value, size=1000):
    return Entry({"x": torch.full((size,), value, dtype=torch.uint8)}, {"value": value})


def key_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()[:40]


def path_of(cache, number):
    return cache.directory / key_of(number)[:2] / f"{key_of(number)[2:]}.safetensors"


def refuse():
    raise AssertionError("the entry is there already")


def entries_in(cache):
    return list(cache.directory.rglob("*.safetensors"))


def use_keys(pickled_cache, seed, results):
    """Ask for 20 keys in an order of its own, counting how often this process had to make one."""
    cache, made = pickle.loads(pickled_cache), 0

    def make(key):
        nonlocal made
        made += 1
        time.sleep(0.002)
        return entry(key)

    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    found = {key: cache.get_or_make(key_of(key), lambda key=key: make(key)).tensors["x"] for key in order}
    right = all((value == key).all() for key, value in found.items())
    results.put((made, right))


def hold_until_killed(root, ready):
    cache = MediaCache("dead", root=root)
    cache.get_or_make(key_of(0), lambda: entry(1))
    ready.set()
    time.sleep(60)


def test_an_entry_is_made_once_and_read_back_as_it_was(tmp_path):
    first = MediaCache("r", owner=True, root=tmp_path)
    second = pickle.loads(pickle.dumps(first))

    made = first.get_or_make(key_of(0), lambda: entry(7))
    read = second.get_or_make(key_of(0), refuse)

    assert torch.equal(made.tensors["x"], read.tensors["x"]) and read.meta == {"value": 7}
    first.close()


def test_writing_into_a_read_entry_does_not_change_the_cache(tmp_path):
    cache = MediaCache("r", owner=True, root=tmp_path)
    cache.get_or_make(key_of(0), lambda: entry(7))
    MediaCache("r", root=tmp_path).get_or_make(key_of(0), refuse).tensors["x"].zero_()

    assert (MediaCache("r", root=tmp_path).get_or_make(key_of(0), refuse).tensors["x"] == 7).all()
    cache.close()


def test_concurrent_processes_make_each_entry_once_and_read_it_correctly(tmp_path):
    cache = MediaCache("r", owner=True, root=tmp_path)
    results = FORK.Queue()
    pickled = pickle.dumps(cache)
    processes = [FORK.Process(target=use_keys, args=(pickled, seed, results)) for seed in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()

    assert sum(made for made, _ in found) == 20 and all(right for _, right in found)
    assert len(entries_in(cache)) == 20
    assert not list(cache.directory.rglob("*.lock")) and not list(cache.directory.rglob("*.tmp"))
    cache.close()
    assert not list(tmp_path.iterdir())


def test_the_oldest_entries_are_removed_at_the_bound_and_open_ones_stay_readable(tmp_path):
    cache = MediaCache("r", owner=True, root=tmp_path, max_bytes=20_000, local_bytes=1)
    for number in range(40):
        made = cache.get_or_make(key_of(number), lambda number=number: entry(number))
        if number == 0:
            first = made
        os.utime(path_of(cache, number), (number, number))

    left = {number for number in range(40) if path_of(cache, number).exists()}
    size = sum(file.stat().st_size for file in entries_in(cache))

    assert size <= 20_000 * 17 / 16 and 39 in left and left == set(range(min(left), 40))
    assert (first.tensors["x"] == 0).all()
    assert (cache.get_or_make(key_of(0), lambda: entry(5)).tensors["x"] == 5).all()
    cache.close()


def test_an_entry_removed_while_it_is_opened_is_still_read(tmp_path, monkeypatch):
    path = tmp_path / "key.safetensors"
    path.write_bytes(encode_entry(Entry({"pixels": torch.arange(3)}, {"frames": 1})))
    safe_open = media_cache.safe_open

    def open_after_another_process_made_room(name, **options):
        path.unlink()
        return safe_open(name, **options)

    monkeypatch.setattr(media_cache, "safe_open", open_after_another_process_made_room)

    entry = read_entry(path)

    assert entry.tensors["pixels"].tolist() == [0, 1, 2] and entry.meta == {"frames": 1}
    assert read_entry(path) is None


def test_a_process_keeps_a_bounded_number_of_bytes_open(tmp_path):
    cache = MediaCache(None, local_bytes=3500)
    for number in range(10):
        cache.get_or_make(key_of(number), lambda number=number: entry(number))

    for number in (7, 8, 9):
        cache.get_or_make(key_of(number), refuse)
    with pytest.raises(AssertionError):
        cache.get_or_make(key_of(6), refuse)


def test_an_entry_that_two_threads_made_at_once_has_its_bytes_once():
    cache = MediaCache(None, local_bytes=3500)
    made_first = cache.get_or_make
    cache.get_or_make(key_of(0), lambda: made_first(key_of(0), lambda: entry(0)))
    for number in (1, 2):
        cache.get_or_make(key_of(number), lambda number=number: entry(number))

    for number in (0, 1, 2):
        cache.get_or_make(key_of(number), refuse)


def test_an_error_while_making_an_entry_leaves_nothing_behind(tmp_path):
    cache = MediaCache("r", owner=True, root=tmp_path)

    def fail():
        raise ValueError("corrupt")

    with pytest.raises(ValueError, match="corrupt"):
        cache.get_or_make(key_of(0), fail)
    assert [file.name for file in cache.directory.iterdir()] == ["alive"]
    assert cache.get_or_make(key_of(0), lambda: entry(1)).meta == {"value": 1}
    cache.close()


def test_the_owner_removes_the_directory_and_others_continue_without_it(tmp_path):
    owner, other = MediaCache("r", owner=True, root=tmp_path), MediaCache("r", root=tmp_path)

    owner.close()
    owner.close()

    assert not list(tmp_path.iterdir())
    assert other.get_or_make(key_of(0), lambda: entry(1)).meta == {"value": 1}
    other.close()


def test_without_an_owner_the_last_user_removes_the_directory(tmp_path):
    first, second = MediaCache("r", root=tmp_path), MediaCache("r", root=tmp_path)

    first.close()
    assert list(tmp_path.iterdir())
    second.close()
    assert not list(tmp_path.iterdir())


def test_the_next_run_removes_the_directory_of_a_killed_run_only(tmp_path):
    ready = FORK.Event()
    process = FORK.Process(target=hold_until_killed, args=(tmp_path, ready))
    cache = MediaCache("living", owner=True, root=tmp_path)
    process.start()
    assert ready.wait(240)
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    assert len(list(tmp_path.iterdir())) == 2

    remove_stale_directories(tmp_path)

    assert list(tmp_path.iterdir()) == [cache.directory]
    cache.close()
