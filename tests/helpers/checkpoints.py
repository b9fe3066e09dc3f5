# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of single models, written synchronously."""

from verl.checkpoint.sharded import take_snapshot, write_snapshot


def save_shards(path, model, optimizer=None, scheduler=None, extra=None):
    """Take a snapshot and write it; every rank calls it."""
    write_snapshot(path, take_snapshot(model, optimizer, scheduler, extra))
