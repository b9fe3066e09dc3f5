# SPDX-License-Identifier: Apache-2.0
"""The processor of VILA models: their tokenizer, the settings of their images, and their chat template."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import cached_file

from verl.models.vila.config import LLM, TOKENS, TOWER, VilaConfig
from verl.models.vila.tiles import ImageOptions

SETTINGS = "preprocessor_config.json"
CUTTING = ("image_aspect_ratio", "min_tiles", "max_tiles", "s2_scales")  # options of the model's config
# Before the tokenizer's own template, which reads texts: media become their tokens, as in VILA.
FLATTEN = """{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set whole = namespace(text='') -%}
{%- if message.content is string -%}{%- set whole.text = message.content -%}
{%- else -%}{%- for part in message.content or [] -%}
{%- set whole.text = whole.text + (part.text if part.type == 'text' else MEDIA[part.type]) -%}
{%- endfor -%}{%- endif -%}
{%- set flat.messages = flat.messages + [dict(message, content=whole.text | trim)] -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
""".replace("MEDIA", str({name.partition("_")[0]: token for name, token in TOKENS.items()}))


class ImageSettings:
    """The settings of the tower's image processor, as its file has them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.size = values, values["size"]

    def to_json_string(self) -> str:
        """Return the settings as JSON; media are cached under them."""
        return json.dumps(self.values, indent=2, sort_keys=True)


class VilaProcessor:
    """Holds what turns a row into a prompt."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any], config: VilaConfig) -> None:
        cuts = {name: value for name in CUTTING if (value := getattr(config, name)) is not None}
        tile = config.scales[0]
        self.tokenizer, self.config = tokenizer, config
        self.image_processor = ImageSettings(settings | cuts | {"size": {"height": tile, "width": tile}})
        self.image_options = ImageOptions.of(self.image_processor.values)
        self.image_token_id, self.video_token_id = config.image_token_id, config.video_token_id
        self.chat_template = FLATTEN + tokenizer.chat_template if tokenizer.chat_template else None

    @classmethod
    def from_pretrained(cls, name: Any, **kwargs: Any) -> "VilaProcessor":
        """Load tokenizer, settings and config from a folder or hub model."""
        options = {key: kwargs[key] for key in ("cache_dir", "token", "revision") if key in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(name, subfolder=LLM, **options)
        file = cached_file(name, SETTINGS, subfolder=TOWER, **options)
        assert file is not None, "a missing file is an OSError"
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(tokenizer, settings, VilaConfig.from_pretrained(name, **options))

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write the tokenizer and the settings into their folders."""
        folder = Path(save_directory)
        self.tokenizer.save_pretrained(folder / LLM)
        (folder / TOWER).mkdir(parents=True, exist_ok=True)
        (folder / TOWER / SETTINGS).write_text(self.image_processor.to_json_string() + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text around features."""
        return self.tokenizer.encode(text, add_special_tokens=False)


class VilaTokenizer:
    """The place of the tokenizer among the folders, for `AutoTokenizer`."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the tokenizer of the language model."""
        return AutoTokenizer.from_pretrained(name, *args, subfolder=LLM, **kwargs)
