# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the files of a checkpoint: it is read, or refused with the file's name and a remedy."""

import json

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from verl.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from verl.checkpoint.storage import load_metadata
from verl.checkpoint.tracker import (
    TRACKER,
    CheckpointRecord,
    CheckpointTracker,
    checkpoint_to_resume,
    find_last_checkpoint,
    read_record,
)
from verl.config.trainer import RunConfig

names = st.sampled_from(
    [
        "last_global_step",
        "last_actor_path",
        "best_global_step",
        "best_actor_path",
        "best_val_reward_score",
        "files",
        "bytes",
        "sha256",
        "shard",
        "../shard",
        "/etc/passwd",
        "",
        ".",
        "a\0",
        "é" * 300,
        "x",
    ]
)
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -1, 0, 4, 1e308, 10**17, 10**18])
values = st.recursive(
    st.none() | st.booleans() | numbers | names | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
)
contents = st.one_of(
    st.binary(max_size=100),
    values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"[" * 100_000, b'{"last_global_step": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"", b"NaN"]
    ),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one whole checkpoint."""
    root = tmp_path_factory.mktemp("run")
    tracker = CheckpointTracker(root)
    folder = tracker.begin(4)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_bytes(b"weights")
    write_manifest(folder / "actor", {})
    write_manifest(folder, {})
    tracker.publish(4, 0.5)
    return root


def damaged(original, data):
    """The bytes of a real file, cut off or with one bit turned."""
    if data.draw(st.booleans()):
        return original[: data.draw(st.integers(0, len(original) - 1))]
    at, bit = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 7))
    return original[:at] + bytes([original[at] ^ 1 << bit]) + original[at + 1 :]


def check_reads_or_names(read, file, remedies):
    """Return what was read; None after an error of the right kind that names the file and what to do."""
    try:
        return read()
    except (ValueError, FileNotFoundError) as error:
        assert str(file) in str(error), str(error)
        assert any(remedy in str(error) for remedy in remedies), str(error)
        return None


REMEDIES = ["resume from another step with", "start over"]
TRACKER_REMEDIES = ["remove it and set `trainer.load_checkpoint_path`", *REMEDIES]


@given(contents | st.dictionaries(names, values).map(lambda content: json.dumps(content).encode()))
@example(b'{"last_global_step": "../../etc"}')
@example(b'{"last_global_step": -4}')
@example(b'{"last_global_step": true}')
@example(b'{"last_global_step": 1' + b"0" * 300 + b"}")
@example(b'{"last_global_step": 4, "best_val_reward_score": NaN}')
@example(b'{"last_global_step": 4, "best_val_reward_score": "high"}')
def test_any_tracker_file_gives_a_checkpoint_of_this_run_or_an_error_with_a_remedy(tmp_path, content):
    (tmp_path / TRACKER).write_bytes(content)

    record = check_reads_or_names(lambda: read_record(tmp_path), tmp_path / TRACKER, TRACKER_REMEDIES)
    assert record is None or isinstance(record, CheckpointRecord)
    check_reads_or_names(lambda: find_last_checkpoint(tmp_path), tmp_path / TRACKER, TRACKER_REMEDIES)


@given(st.data())
def test_a_damaged_tracker_file_leads_to_a_complete_checkpoint_or_an_error_with_a_remedy(run, data):
    original = (run / TRACKER).read_bytes()
    (run / TRACKER).write_bytes(damaged(original, data))

    try:
        found = check_reads_or_names(
            lambda: checkpoint_to_resume(RunConfig(save_checkpoint_path=str(run))),
            run / TRACKER,
            TRACKER_REMEDIES,
        )
    finally:
        (run / TRACKER).write_bytes(original)

    assert found in (None, run / "global_step_4")


@given(contents)
def test_any_manifest_names_complete_files_of_its_folder_or_is_an_error_with_a_remedy(run, content):
    folder = run / "global_step_4" / "actor"
    original = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(content)

    try:
        read = check_reads_or_names(lambda: read_manifest(folder), folder, REMEDIES)
    finally:
        (folder / MANIFEST).write_bytes(original)

    assert read is None or all((folder / name).is_file() for name in read["files"])


@given(st.data())
def test_a_damaged_manifest_is_read_or_refused_with_its_path(run, data):
    file = data.draw(st.sampled_from(["manifest.json", "actor/manifest.json"]))
    path = run / "global_step_4" / file
    original = path.read_bytes()
    path.write_bytes(damaged(original, data))

    try:
        check_reads_or_names(
            lambda: checkpoint_to_resume(RunConfig(save_checkpoint_path=str(run))),
            run / "global_step_4",
            REMEDIES,
        )
    finally:
        path.write_bytes(original)


@given(st.binary(max_size=200) | st.just(b"\x80\x04cos\nsystem\n(S'true'\ntR."))
def test_any_bytes_as_the_metadata_of_shards_are_refused_with_their_path(tmp_path, content):
    path = tmp_path / ".metadata"
    path.write_bytes(content)

    with path.open("rb") as file:
        read = check_reads_or_names(lambda: load_metadata(file, path), path, REMEDIES)

    assert read is None or isinstance(read, Metadata)


@given(st.data())
def test_damaged_metadata_of_shards_are_read_or_refused_with_their_path(real_metadata, tmp_path, data):
    path = tmp_path / ".metadata"
    path.write_bytes(damaged(real_metadata, data))

    with path.open("rb") as file:
        read = check_reads_or_names(lambda: load_metadata(file, path), path, REMEDIES)

    assert read is None or isinstance(read, Metadata)


@pytest.fixture(scope="module")
def real_metadata(tmp_path_factory):
    """The bytes that torch writes for two small tensors."""
    folder = tmp_path_factory.mktemp("shards")
    tensors = {"weight": torch.zeros(2, 3), "bias": torch.ones(3)}
    torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()
