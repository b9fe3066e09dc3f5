# SPDX-License-Identifier: Apache-2.0
"""Published shapes of diffusion models: the configs of their folders. Imports no torch.

Sources: `transformer/config.json` and the like of stabilityai/stable-diffusion-3.5-medium and of
Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
"""

import json
from pathlib import Path
from typing import Any

T5 = dict(
    d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
)  # fmt: skip
CLIP = dict(vocab_size=49408, max_position_embeddings=77, bos_token_id=0, eos_token_id=2, pad_token_id=1)
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {  # of each model's parts
    "sd3.5-medium": {
        "model_index": {
            "_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0.31.0",
            "transformer": ["diffusers", "SD3Transformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
            "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
            "text_encoder_3": ["transformers", "T5EncoderModel"],
        },
        "transformer": dict(
            _class_name="SD3Transformer2DModel", attention_head_dim=64, caption_projection_dim=1536,
            dual_attention_layers=list(range(13)), in_channels=16, joint_attention_dim=4096,
            num_attention_heads=24, num_layers=24, out_channels=16, patch_size=2, pooled_projection_dim=2048,
            pos_embed_max_size=384, qk_norm="rms_norm", sample_size=128,
        ),
        "vae": dict(
            _class_name="AutoencoderKL", block_out_channels=[128, 256, 512, 512],
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            latent_channels=16, layers_per_block=2, sample_size=1024, scaling_factor=1.5305,
            shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
        ),
        "text_encoder": CLIP | dict(
            model_type="clip_text_model", hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
            num_attention_heads=12, projection_dim=768, hidden_act="quick_gelu",
        ),
        "text_encoder_2": CLIP | dict(
            model_type="clip_text_model", hidden_size=1280, intermediate_size=5120, num_hidden_layers=32,
            num_attention_heads=20, projection_dim=1280, hidden_act="gelu",
        ),
        "text_encoder_3": T5 | dict(model_type="t5", vocab_size=32128),
        "scheduler": FLOW,
    },
    "wan2.1-1.3b": {
        "model_index": {
            "_class_name": "WanPipeline", "_diffusers_version": "0.33.0",
            "transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
        },
        "transformer": dict(
            _class_name="WanTransformer3DModel", attention_head_dim=128, cross_attn_norm=True, eps=1e-6,
            ffn_dim=8960, freq_dim=256, in_channels=16, num_attention_heads=12, num_layers=30,
            out_channels=16, patch_size=[1, 2, 2], qk_norm="rms_norm_across_heads", rope_max_seq_len=1024,
            text_dim=4096,
        ),
        "vae": dict(
            _class_name="AutoencoderKLWan", base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
            attn_scales=[], temperal_downsample=[False, True, True],
        ),
        "text_encoder": T5 | dict(model_type="umt5", vocab_size=256384),
        "scheduler": FLOW,
    },
}  # fmt: skip


def write_pipeline(folder: Path, shape: str, layers: int | None = None) -> None:
    """Write the configs of a diffusers folder; `layers` leaves so many of the transformer's."""
    configs = CONFIGS[shape]
    if layers is not None:
        configs = configs | {"transformer": _fewer_layers(configs["transformer"], layers)}
    for name, config in configs.items():
        path = folder / f"{name}.json" if name == "model_index" else folder / name / _file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config), encoding="utf-8")


def _fewer_layers(transformer: dict[str, Any], layers: int) -> dict[str, Any]:
    fewer = transformer | {"num_layers": layers}
    if "dual_attention_layers" in transformer:  # 13 of 24 layers
        fewer["dual_attention_layers"] = list(range(layers // 2))
    return fewer


def _file(part: str) -> str:
    return "scheduler_config.json" if part == "scheduler" else "config.json"
