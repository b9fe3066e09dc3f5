# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with tokenizer and processor, for tests, demos and benchmarks.

`save_tiny_model` writes a folder that transformers and vLLM load like a hub checkpoint, in a fraction of a
second and without a network. Text models are listed here, others in the files of their families.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from verl.models.auto import AutoConfig
from verl.models.families.registry import all_families, family_of, trained_part, wholes
from verl.models.families.tiny_sizes import MOE, TEXT, TinyModel
from verl.models.hub_names import auto_class, correct_conversions
from verl.utils.quiet import no_weight_bars
from verl.utils.weight_files import by_folder, save_weights, share_weights

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip

WEIGHTS = "model.safetensors"

TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja")

ROLES = ("system", "user", "assistant")  # in the chat template

CORPUS = [
    "system user assistant You are a helpful assistant. What colour is the shape in the image? How many?",
    "red green blue yellow black white circle square triangle The answer is one two three four five six",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 + - * / = ( ) { }",
    "\\boxed <think> </think> <answer> </answer>",
    "Let me think step by step. First, we add the numbers; then we subtract. Therefore the result is",
    *("red", "green", "blue", "yellow", "one", "two", "three", "four"),  # answers of one token
]

# Of tokenizers with chosen words: a model learns to answer with one token in a few steps, not with several.
MAX_WORDS = 1024  # of a tokenizer; the most frequent ones, as rare ones cannot be learned either
MAX_ANSWER_WORDS = 3  # in a text that is one token as a whole
MAX_ANSWER_CHARS = 32
PART = r"\p{L}[\p{L}\p{M}]*|\p{N}+|[^\s\p{L}\p{N}]+|\s+"  # of a text: word, number, signs or space
WORD = re.compile(r"[^\W\d_]+|\d+")

TEXT_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama", TEXT),
    "mistral": TinyModel("mistral", TEXT | {"sliding_window": 16}),
    "gemma2": TinyModel("gemma2", TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3": TinyModel("gemma3_text", TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "qwen2": TinyModel("qwen2", TEXT, keeps_words=False),
    "deepseek": TinyModel("qwen2", TEXT | {"tie_word_embeddings": False}, keeps_words=False),
    "qwen3": TinyModel("qwen3", TEXT),
    "qwen3_moe": TinyModel("qwen3_moe", TEXT | MOE),
}
TINY_MODELS = TEXT_MODELS | {name: tiny for family in all_families() for name, tiny in family.tiny.items()}
PLAIN = TEXT_MODELS["llama"]  # without tokens of its own


def train_tokenizer(
    vocab_size: int = 512, *, words: Sequence[str] = (), recipe: TinyModel = PLAIN
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen's special tokens on a few sentences; deterministic.

    With `words` these are its tokens, in addition to the special ones and single bytes; nothing is trained.
    A recipe adds the special tokens of its model.
    """
    special_tokens = [*SPECIAL_TOKENS, *recipe.special_tokens]
    if words:
        return _with_template(word_tokenizer([*words, *ROLES], special_tokens), special_tokens, recipe)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_template(tokenizer, special_tokens, recipe)


def _with_template(
    tokenizer: Tokenizer, special_tokens: list[str], recipe: TinyModel
) -> PreTrainedTokenizerFast:
    named = {"extra_special_tokens": dict(recipe.named_tokens)} if recipe.named_tokens else {}
    template = TEMPLATE.read_text(encoding="utf-8")
    for mark, text in (("IMAGE", recipe.image), ("VIDEO", recipe.video), ("AUDIO", recipe.sound)):
        template = template.replace(mark, text)
    tokenizer.add_tokens(list(recipe.added_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special_tokens,
        chat_template=template,
        **named,
    )


def find_words(texts: Iterable[str]) -> list[str]:
    """Return what deserves a token, the most frequent first: short texts as a whole, and all words."""
    counts: Counter[str] = Counter()
    for text in texts:
        text = text.strip()
        if text and len(text) <= MAX_ANSWER_CHARS and len(text.split()) <= MAX_ANSWER_WORDS:
            counts[text] += 1
        counts.update(word for word in WORD.findall(text) if word != text)
    return [word for word, _ in counts.most_common(MAX_WORDS)]


def texts_of(value: Any) -> list[str]:
    """Return the texts and numbers in a cell of a table, and in its lists and mappings, such as messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [f"{value:g}" if isinstance(value, float) else str(value)]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in texts_of(item)]
    return []


def word_tokenizer(words: Sequence[str], special_tokens: Sequence[str]) -> Tokenizer:
    """Build a tokenizer of words, special tokens and single bytes, which decodes to exactly what it encoded.

    Spaces are tokens of their own, so a word is the same token at every position.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [as_bytes.pre_tokenize_str(word)[0][0] for word in words]
    tokens = dict.fromkeys([*special_tokens, *alphabet, *spelled])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # A part that is in the vocabulary becomes one token; without merges all others fall into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = [_whole(word) for word in sorted(words, key=len, reverse=True)]
    split = pre_tokenizers.Split(Regex("|".join([*whole, PART])), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def _whole(word: str) -> str:
    """A pattern for a word that is not a part of a longer one."""
    start = r"(?<![\p{L}\p{N}])" if word[0].isalnum() else ""
    end = r"(?![\p{L}\p{N}])" if word[-1].isalnum() else ""
    return start + re.sub(r"([^\w\s]|_)", r"\\\1", word) + end


def build_config(recipe: TinyModel, tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Any:
    """Build the transformers config of a recipe; `overrides` change options of the language model."""
    special = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    tied = overrides.pop("tie_word_embeddings", recipe.text.get("tie_word_embeddings", True))
    text = {**recipe.text, **special, **overrides, "tie_word_embeddings": tied}
    if not recipe.encoders:
        return AutoConfig.for_model(recipe.model_type, **text)
    ids = {name: tokenizer.vocab[token] for name, token in recipe.token_ids.items()}
    encoders = {name: dict(options) for name, options in recipe.encoders.items()}
    config = {"text_config": text, **encoders, "tie_word_embeddings": tied, **recipe.options, **ids}
    part = wholes().get(recipe.model_type)
    return AutoConfig.for_model(
        recipe.model_type, **(config if part is None else {part: config, **recipe.whole})
    )


@torch.no_grad()
def _fill_constants(model: torch.nn.Module, recipe: TinyModel) -> None:
    # Gemma 3 starts with a projector of zeros, behind which images could not be told apart.
    for weight in model.parameters():
        if weight.ndim > 1 and bool(weight.min() == weight.max()):
            weight.normal_(std=weight.shape[-1] ** -0.5)
    for name, tensor in model.state_dict().items():
        for end, value in recipe.filled.items():
            if name.endswith(end):
                tensor.fill_(value)


def write_model(model: Any, config: Any, directory: Path) -> None:
    """Write a model as the hub has it; `config` is its config, or that of a model of which it is a part."""
    correct_conversions(model)
    with no_weight_bars():
        model.save_pretrained(directory)
    share_weights(directory)
    family, file = family_of(model.config), directory / WEIGHTS
    if trained_part(config) is not config:
        save_weights({family.hub_prefix + name: tensor for name, tensor in load_file(file).items()}, file)
        config.save_pretrained(directory)
    if family.folders:
        tensors = sorted(load_file(file).items())
        file.unlink()
        for folder, part in by_folder(tensors, family.folders):
            save_weights(dict(part), directory / folder / WEIGHTS)


def save_tiny_model(
    directory: Path | str,
    family: str = "qwen2",
    *,
    seed: int = 0,
    words: Sequence[str] = (),
    added_tokens: Sequence[str] = (),
    **overrides: Any,
) -> Path:
    """Write the tiny random model of that name in `TINY_MODELS`, with tokenizer and processor.

    `words` become single tokens; without any, the tokenizer has a few that tests and demos use.
    `added_tokens` are texts of any length that become single tokens in addition.
    `overrides` are options of the language model's config, for example `num_hidden_layers=4`.
    """
    chosen = TINY_MODELS[family]
    chosen = replace(chosen, added_tokens=(*chosen.added_tokens, *added_tokens))
    if words and not chosen.keeps_words:
        raise ValueError(f"a tiny {family} model cannot have words of its own; qwen3 can")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(words=words, recipe=chosen)
    if words:  # each token is a text: none of the padding that 64-wide vocabularies have is sampled
        overrides = {"vocab_size": len(tokenizer)} | overrides
    config = build_config(chosen, tokenizer, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part = trained_part(config)
        model = auto_class(part).from_config(part, dtype=torch.float32)
        _fill_constants(model, chosen)
    media = [*SPECIAL_TOKENS[SPECIAL_TOKENS.index("<|vision_start|>") :], *chosen.special_tokens]
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        # As rollouts do. Random weights may prefer media placeholder tokens.
        suppress_tokens=None if not chosen.encoders else [tokenizer.vocab[token] for token in media],
    )
    write_model(model, config, directory)
    if not family_of(part).folders:  # else the processor writes it into one of them
        tokenizer.save_pretrained(directory)
    if chosen.processor:
        processor = chosen.processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.save_pretrained(directory)
    return directory
