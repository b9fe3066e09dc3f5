# SPDX-License-Identifier: Apache-2.0
"""Tiny omni models that speak: a thinker, and the parts that training does not load."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from verl.models.tiny import save_tiny_model

ATTENTION = dict(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, hidden_size=32)
TALKER = ATTENTION | dict(intermediate_size=64, head_dim=16, vocab_size=64)
CONV = dict(enc_channels=[8, 8, 8, 8, 24], enc_attention_channels=4, enc_res2net_scale=2, enc_se_channels=4)
SPEAKING: dict[str, dict[str, Any]] = {  # options of the configs of these parts
    "qwen2_5_omni": {
        "talker_config": TALKER | dict(embedding_size=128, max_window_layers=1),
        "token2wav_config": {
            "dit_config": CONV
            | dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16, emb_dim=16)
            | dict(num_embeds=64, mel_dim=8, enc_emb_dim=8, enc_dim=8, look_ahead_layers=[0]),
            "bigvgan_config": dict(mel_dim=8, upsample_initial_channel=64),
        },
    },
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": TALKER
            | dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
            | dict(shared_expert_intermediate_size=16),
            "code_predictor_config": TALKER | dict(num_code_groups=2),
            "thinker_hidden_size": 128,
            "num_code_groups": 2,
            "spatial_merge_size": 2,
        },
        "code2wav_config": ATTENTION
        | dict(codebook_size=16, num_quantizers=2, intermediate_size=64, decoder_dim=64),
    },
}


GENERATOR = torch.Generator().manual_seed(0)


def save_speaking(folder: Path, kind: str) -> Path:
    """Write a tiny random omni model with the parts that speak."""
    save_tiny_model(folder, kind)
    options = AutoConfig.from_pretrained(folder).to_dict() | SPEAKING[kind] | {"enable_audio_output": True}
    config = AutoConfig.for_model(**options)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # transformers leaves some as the memory was
            weight.normal_(std=0.02, generator=GENERATOR)
    model.save_pretrained(folder)
    return folder
