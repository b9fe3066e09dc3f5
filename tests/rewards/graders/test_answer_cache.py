# SPDX-License-Identifier: Apache-2.0
import hashlib
import os
import subprocess
import sys
import time

import pytest

from verl.rewards.graders.endpoint import AnswerCache


def name(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def age(cache, number, seconds):
    path = cache._path(name(number))
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_was_put_is_found_also_by_another_object(tmp_path):
    texts = ["Score: 7", "a\r\nb\n", "\u4f60\u597d \U0001f600", "\ud800 alone", " "]
    cache = AnswerCache(tmp_path / "new" / "folder")
    for number, text in enumerate(texts):
        assert cache.get(name(number)) is None
        cache.put(name(number), text)

    again = AnswerCache(tmp_path / "new" / "folder")

    assert [again.get(name(number)) for number in range(len(texts))] == texts


def test_the_last_text_put_under_a_name_counts(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.put(name(1), "first")
    cache.put(name(1), "second")

    assert cache.get(name(1)) == "second"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1  # nothing temporary is left


def test_an_entry_that_a_crash_left_empty_is_missing_and_can_be_put_again(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.put(name(1), "text")
    cache._path(name(1)).write_bytes(b"")

    assert cache.get(name(1)) is None
    cache.put(name(1), "text")
    assert cache.get(name(1)) == "text"


def test_beyond_the_bound_the_entries_unread_for_longest_go_first(tmp_path):
    # Each entry takes 4096 bytes. The bound is 64 KiB = 16 entries; room is made down to 15/16 of it.
    cache = AnswerCache(tmp_path, max_bytes=64 << 10)
    for number in range(15):
        cache.put(name(number), "text")
        age(cache, number, 1000 - number)
    assert cache.get(name(0)) == "text"  # renewed: now the youngest

    cache.put(name(15), "text")

    found = [number for number in range(16) if cache.get(name(number))]
    assert found == [0, *range(2, 16)]


def test_many_entries_never_exceed_the_bound_by_more_than_a_sixteenth(tmp_path):
    cache = AnswerCache(tmp_path, max_bytes=256 << 10)  # 64 entries
    most = 0
    for number in range(200):
        cache.put(name(number), "text")
        most = max(most, len(list(tmp_path.glob("??/*"))))

    assert 56 <= most <= 68
    assert cache.get(name(199)) == "text"


def test_files_that_are_not_the_caches_are_never_removed(tmp_path):
    for folder in (tmp_path, tmp_path / "ab", tmp_path / "thesis"):
        folder.mkdir(exist_ok=True)
        (folder / "chapter.txt").write_bytes(b"x" * 5000)
        os.utime(folder / "chapter.txt", (0, 0))

    cache = AnswerCache(tmp_path, max_bytes=4096)
    for number in range(5):
        cache.put(name(number), "text")

    assert len(list(tmp_path.rglob("chapter.txt"))) == 3


def test_what_a_killed_process_was_writing_is_removed_once_it_is_old(tmp_path):
    cache = AnswerCache(tmp_path, max_bytes=16 << 10)
    folder = tmp_path / "ab"
    folder.mkdir()
    old, young = (folder / f"{digit * 32}.tmp" for digit in "cd")
    for path in (old, young):
        path.write_bytes(b"x" * 4096 * 4)
    os.utime(old, (0, 0))

    cache.put(name(1), "text")

    assert not old.exists() and young.exists()


def test_a_directory_that_was_removed_is_made_again(tmp_path):
    cache = AnswerCache(tmp_path / "cache")
    (tmp_path / "cache").rmdir()

    assert cache.get(name(1)) is None
    cache.put(name(1), "text")
    assert cache.get(name(1)) == "text"


def test_a_disk_without_room_costs_the_entry_and_is_said_once(tmp_path, capfd):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    cache = AnswerCache(tmp_path)
    folder = cache._path(name(1)).parent
    folder.mkdir()
    code = (
        "import sys, uuid, os\n"
        "from verl.rewards.graders.endpoint import AnswerCache\n"
        "class Fixed:\n    hex = 'e' * 32\n"
        "uuid.uuid4 = lambda: Fixed\n"
        f"cache = AnswerCache({str(tmp_path)!r})\n"
        "for _ in range(3):\n"
        f"    os.symlink('/dev/full', {str(folder)!r} + '/' + 'e' * 32 + '.tmp')\n"
        f"    cache.put({name(1)!r}, 'text')\n"
        f"assert cache.get({name(1)!r}) is None\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("no room to store answers") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.nightly
def test_processes_that_write_and_read_the_same_entries_never_see_half_of_one(tmp_path):
    # Two processes write long texts under the same ten names while this one reads; a bound makes them evict.
    code = (
        "import sys, hashlib\nfrom verl.rewards.graders.endpoint import AnswerCache\n"
        f"cache = AnswerCache({str(tmp_path)!r}, max_bytes=1 << 20)\n"
        "for turn in range(60):\n"
        "    name = hashlib.sha256(str(turn % 10).encode()).hexdigest()\n"
        "    cache.put(name, sys.argv[1] * 200_000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, letter]) for letter in "ab"]
    cache = AnswerCache(tmp_path, max_bytes=1 << 20)
    seen = set()
    while any(writer.poll() is None for writer in writers):
        for number in range(10):
            text = cache.get(name(number))
            if text is not None:
                seen.add((len(text), frozenset(text)))

    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen and seen <= {(200_000, frozenset("a")), (200_000, frozenset("b"))}
