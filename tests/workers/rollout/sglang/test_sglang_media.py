# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine on images and videos: expanded tokens, and features that a sync makes stale."""

import pytest
from transformers import AutoProcessor

from tests.workers.rollout.media import check_media_after_syncs
from tests.workers.rollout.reference import (
    load_model,
    needs_engine,
    rollout_config,
    setup_of,
)
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine

pytestmark = [pytest.mark.heavy, needs_engine("sglang")]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_log_probs_equal_the_models_after_each_sync_with_the_same_media(kind, tmp_path):
    path = save_tiny_model(tmp_path, kind)
    engine, model = build_rollout_engine(rollout_config(name="sglang"), setup_of(path)), load_model(path)
    processor = AutoProcessor.from_pretrained(path)

    check_media_after_syncs(engine, model, processor)

    engine.close()
