# SPDX-License-Identifier: Apache-2.0
"""Tiny models of families that no file of `verl/models/families` describes, by the type of their config."""

import re
from typing import Any

import transformers

from tests.architecture.source import ROOT
from verl.models.families.tiny_sizes import TEXT, TinyModel

library: Any = transformers  # whose processors take more options than their types say

CLIP: dict[str, Any] = dict(
    model_type="clip_vision_model", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, image_size=28, patch_size=14, projection_dim=64,
)  # fmt: skip
SIGLIP: dict[str, Any] = dict(
    model_type="siglip_vision_model", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, image_size=56, patch_size=14, vision_use_head=False,
)  # fmt: skip
PATCHES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
IMAGE: dict[str, Any] = dict(
    special_tokens=("<image>",), named_tokens={"image_token": "<image>"}, image="<image>"
)
IMAGE_INDEX: dict[str, Any] = IMAGE | dict(token_ids={"image_token_index": "<image>"})
IMAGE_ID: dict[str, Any] = IMAGE | dict(token_ids={"image_token_id": "<image>"})
PAD_ID: dict[str, Any] = dict(
    token_ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    named_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
)
IDEFICS: dict[str, Any] = dict(
    special_tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    image="<image>", token_ids={"image_token_id": "<image>"},
)  # fmt: skip
COHERE_TEXT: dict[str, Any] = TEXT | {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEPSEEK: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "head_dim"} | dict(
    model_type="deepseek_v3", first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, moe_intermediate_size=64, q_lora_rank=32, kv_lora_rank=32,
    qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, num_key_value_heads=4,
)  # fmt: skip


def square(edge: int) -> dict[str, int]:
    return {"height": edge, "width": edge}


def llava(tokenizer: Any) -> Any:
    return library.LlavaProcessor(
        image_processor=library.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=square(28)),
        tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def llava_next(tokenizer: Any) -> Any:
    return library.LlavaNextProcessor(
        image_processor=library.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size=square(28), image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]


def idefics3(tokenizer: Any) -> Any:
    images = library.Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return library.Idefics3Processor(images, tokenizer, image_seq_len=4)


def aya_vision(tokenizer: Any) -> Any:
    images = library.GotOcr2ImageProcessor(
        size=square(56), crop_to_patches=True, min_patches=1, max_patches=4
    )
    return library.AyaVisionProcessor(images, tokenizer, patch_size=14, img_size=56, downsample_factor=2)


def cohere2_vision(tokenizer: Any) -> Any:
    images = library.Cohere2VisionImageProcessor(size=square(56), patch_size=2, min_patches=1, max_patches=4)
    return library.Cohere2VisionProcessor(images, tokenizer)


def ovis2(tokenizer: Any) -> Any:
    images = library.Ovis2ImageProcessor(size=square(56), crop_to_patches=True, max_patches=4)
    return library.Ovis2Processor(images, tokenizer, image_seq_length=4)


def paligemma(tokenizer: Any) -> Any:
    images = library.SiglipImageProcessor(size=square(56))
    images.image_seq_length = 16
    tokenizer.bos_token = "<|im_start|>"
    return library.PaliGemmaProcessor(images, tokenizer)


def video_llama_3(tokenizer: Any) -> Any:
    limits = dict(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64)
    return library.VideoLlama3Processor(
        library.VideoLlama3ImageProcessor(**limits, patch_size=14, merge_size=1),
        tokenizer,
        library.VideoLlama3VideoProcessor(patch_size=14, merge_size=2),
    )


def lfm2_vl(tokenizer: Any) -> Any:
    images = library.Lfm2VlImageProcessor(
        encoder_patch_size=16, downsample_factor=2, tile_size=64, min_tiles=2, max_tiles=4,
        min_image_tokens=1, max_image_tokens=4, max_num_patches=64, do_image_splitting=True,
    )  # fmt: skip
    return library.Lfm2VlProcessor(images, tokenizer)


def kimi_k25(tokenizer: Any) -> Any:
    return library.Kimi_K25Processor(
        library.Kimi_K25ImageProcessor(patch_size=14, merge_kernel_size=[2, 2]),
        tokenizer,
        library.Kimi_K25VideoProcessor(patch_size=14, merge_kernel_size=[2, 2]),
    )


def deepseek_vl(tokenizer: Any) -> Any:
    images = library.DeepseekVLImageProcessor(size=square(56), min_size=14)
    return library.DeepseekVLProcessor(images, tokenizer, num_image_tokens=16)


def llama4(tokenizer: Any) -> Any:
    images = library.Llama4ImageProcessor(size=square(56), max_patches=4)
    return library.Llama4Processor(images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)


def lighton_ocr(tokenizer: Any) -> Any:
    images = library.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=square(28))
    return library.LightOnOcrProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def idefics2(tokenizer: Any) -> Any:
    images = library.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56})
    return library.Idefics2Processor(images, tokenizer, image_seq_len=4)


def aria(tokenizer: Any) -> Any:
    images = library.AriaImageProcessor()
    return library.AriaProcessor(images, tokenizer, size_conversion={980: 4})


def hyperclovax(tokenizer: Any) -> Any:
    options: Any = dict(patch_size=14, size=dict(shortest_edge=4 * 28 * 28, longest_edge=64 * 28 * 28))
    return library.HyperCLOVAXVisionV2Processor(
        library.Qwen2VLImageProcessor(**options), tokenizer,
        library.Qwen2VLVideoProcessor(**options),
    )  # fmt: skip


LLAMA4_TOKENS = (
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)  # fmt: skip

UNNAMED: dict[str, TinyModel] = {
    "llava": TinyModel("llava", TEXT, CLIP, processor=llava, **IMAGE_INDEX),
    "vipllava": TinyModel(
        "vipllava", TEXT, CLIP, {"vision_feature_layers": [-1, -2]}, processor=llava, **IMAGE_INDEX
    ),
    "llava_next": TinyModel(
        "llava_next", TEXT, CLIP, {"image_grid_pinpoints": PINPOINTS}, processor=llava_next, **IMAGE_INDEX
    ),
    "idefics3": TinyModel(
        "idefics3", TEXT, PATCHES | dict(image_size=56, patch_size=14), processor=idefics3, **IDEFICS
    ),
    "aya_vision": TinyModel(
        "aya_vision", COHERE_TEXT, SIGLIP, {"downsample_factor": 2}, processor=aya_vision,
        special_tokens=(
            "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>",
            *(f"TILE_{tile}" for tile in range(1, 9)), "TILE_GLOBAL",
        ),
        token_ids={"image_token_index": "<|IMG_PATCH|>"}, image="<image>",
    ),
    "cohere2_vision": TinyModel(
        "cohere2_vision", COHERE_TEXT, SIGLIP, {"downsample_factor": 2, "alignment_intermediate_size": 128},
        processor=cohere2_vision,
        special_tokens=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
        named_tokens={
            "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        token_ids={"image_token_id": "<|IMG_PATCH|>"}, image="<|IMG_PATCH|>",
    ),
    "ovis2": TinyModel(
        "ovis2", TEXT | {"model_type": "qwen2"},
        PATCHES | dict(image_size=56, patch_size=14, vocab_size=64, hidden_stride=2),
        {"hidden_size": 128, "visual_indicator_token_ids": [10, 11, 12, 13, 14]}, processor=ovis2,
        special_tokens=(
            "<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"
        ),
        named_tokens={"image_token": "<IMG_ATOM>"},
        token_ids={"image_token_id": "<IMG_ATOM>"}, image="<image>",
    ),
    "paligemma": TinyModel(
        "paligemma", TEXT | {"model_type": "gemma"}, SIGLIP | {"projection_dim": 128},
        {"hidden_size": 128, "projection_dim": 128}, processor=paligemma, **IMAGE_INDEX
    ),
    "video_llama_3": TinyModel(
        "video_llama_3", TEXT | {"model_type": "qwen2"}, PATCHES | dict(patch_size=14),
        processor=video_llama_3, **PAD_ID
    ),
    "lfm2_vl": TinyModel(
        "lfm2_vl", TEXT | {"full_attn_idxs": [1], "block_ff_dim": 256},
        PATCHES | dict(
            model_type="siglip2_vision_model", patch_size=16, num_patches=16, vision_use_head=False
        ),
        {"projector_hidden_size": 64}, processor=lfm2_vl,
        special_tokens=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        token_ids={"image_token_id": "<image>"}, image="<image>",
    ),
    "kimi_k25": TinyModel(
        "kimi_k25", DEEPSEEK,
        PATCHES | dict(patch_size=14, pos_emb_height=8, pos_emb_width=8),
        {"projection_hidden_size": 64}, processor=kimi_k25, **PAD_ID
    ),
    "deepseek_vl": TinyModel(
        "deepseek_vl", TEXT, SIGLIP, processor=deepseek_vl, **IMAGE_ID
    ),
    "lighton_ocr": TinyModel(
        "lighton_ocr", TEXT | {"model_type": "qwen3"},
        PATCHES | dict(model_type="pixtral", image_size=112, patch_size=14, head_dim=16),
        processor=lighton_ocr, special_tokens=("<image>", "<break>", "<end>"),
        named_tokens={
            "image_token": "<image>", "image_break_token": "<break>", "image_end_token": "<end>",
        },
        token_ids={"image_token_id": "<image>"}, image="<image>",
    ),
    "idefics2": TinyModel(
        "idefics2", TEXT | {"model_type": "mistral"}, PATCHES | dict(image_size=56, patch_size=14),
        {"perceiver_config": dict(
            hidden_size=128, resampler_n_latents=4, resampler_depth=2, resampler_n_heads=2,
            resampler_head_dim=32, num_key_value_heads=1,
        )},
        processor=idefics2, **IDEFICS
    ),
    "aria": TinyModel(
        "aria",
        TEXT | dict(
            model_type="aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1,
            intermediate_size=64,
        ),
        PATCHES | dict(model_type="idefics3_vision", image_size=980, patch_size=70),
        {"projector_patch_to_query_dict": {"196": 4}}, processor=aria, **IMAGE_INDEX
    ),
    "hyperclovax_vision_v2": TinyModel(
        "hyperclovax_vision_v2", TEXT,
        dict(
            model_type="qwen2_5_vl_vision", depth=2, num_heads=4, hidden_size=64, intermediate_size=128,
            out_hidden_size=128, window_size=56, fullatt_block_indexes=[1], patch_size=14,
        ),
        processor=hyperclovax, **PAD_ID
    ),
    "llama4": TinyModel(
        "llama4",
        TEXT | dict(num_local_experts=2, intermediate_size_mlp=256, attention_chunk_size=64),
        PATCHES | dict(
            image_size=56, patch_size=14, vision_output_dim=64, projector_input_dim=64,
            projector_output_dim=64, intermediate_size=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        processor=llama4, special_tokens=LLAMA4_TOKENS,
        token_ids={
            "image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        image="<|image|>",
    ),
}  # fmt: skip

# Families that train without a file.
SERVED = (
    "llava", "vipllava", "llava_next", "idefics3", "aya_vision", "cohere2_vision", "video_llama_3",
    "deepseek_vl", "lfm2_vl", "lighton_ocr", "hyperclovax_vision_v2", "aria",
)  # fmt: skip
# Reasons for which the others are refused, and what the message says.
REFUSED: dict[str, tuple[str, str]] = {
    "idefics2": (
        "two images in a row have other tokens than each alone",
        r"makes other tokens for two images than for each alone",
    ),
    "kimi_k25": (
        "its weights cannot be converted to hub names layer by layer",
        r"cannot be converted to hub names layer by layer",
    ),
    "llama4": (
        "`get_image_features` leaves out the projector: [a file of ten lines](extensions.md#a-model-family)",
        r"returns 0 features for images with \d+ tokens",
    ),
    "ovis2": (
        "its own features of tiles' borders: log-probs differ by 0.1",
        r"log-probabilities differ by 0\.\d+ from its own forward, at most 0\.001",
    ),
    "paligemma": (
        "tokens depend on the rest of the prompt, all of which see each other",
        r"makes other tokens for two images than for each alone",
    ),
}
MROPE = ("ernie4_5_vl_moe", "glm_ocr", "paddleocr_vl")  # refused by their configs
NO_FEATURES = {"mllama": "has no `get_image_features`", "phi4_multimodal": "is not an image-text model"}

# In vLLM 0.32 on a CPU: whether log-probs after images equal the trainer's.
VLLM: dict[str, bool] = {
    "llava": True, "llava_next": True, "idefics3": True, "video_llama_3": True,
    "lighton_ocr": True, "vipllava": True, "aya_vision": True,
    "cohere2_vision": True, "deepseek_vl": True,
}  # fmt: skip
PAGE = ROOT / "docs" / "models.md"
TABLE = re.compile(r"(?<=<!-- without a file -->\n).*?(?=<!-- end of those -->)", re.DOTALL)


def table() -> str:
    """Return the table of docs/models.md; `python -m tests.helpers.unnamed_families` writes it."""
    served = {name: ("yes", ("yes" if VLLM[name] else "no") if name in VLLM else "", "") for name in SERVED}
    refused = {name: reason for name, (reason, _) in REFUSED.items()}
    refused |= dict.fromkeys(MROPE, "M-RoPE") | NO_FEATURES
    rows = served | {name: ("no", "", reason) for name, reason in refused.items()}
    lines = [f"| {name} | {' | '.join(rows[name])} |" for name in sorted(rows)]
    return "\n".join(["| `model_type` | trains | vLLM | reason |", "|---|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
