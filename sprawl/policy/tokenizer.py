"""Tokenizer from the files of a Hugging Face checkpoint, through the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from sprawl.errors import ConfigError


class Tokenizer:
    """Text <-> token ids, plus the ids that end a response."""

    def __init__(self, fast: FastTokenizer, eos_ids: tuple[int, ...], chat_template: str | None = None) -> None:
        self._fast = fast
        self.eos_ids = eos_ids
        self.chat_template = chat_template

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """From tokenizer.json (required) and the end-of-text ids of generation_config.json or config.json."""
        if "tokenizer.json" not in files:
            raise ConfigError("the base model has no tokenizer.json", "save it with transformers' fast tokenizer")
        eos: Any = None
        for name in ("generation_config.json", "config.json"):
            if name in files and eos is None:
                eos = json.loads(files[name]).get("eos_token_id")
        if eos is None:
            raise ConfigError("the base model names no eos_token_id", "add it to generation_config.json")
        ids = eos if isinstance(eos, list) else [eos]
        template = None
        if "tokenizer_config.json" in files:
            template = json.loads(files["tokenizer_config.json"]).get("chat_template")
        if template is None and "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode()
        fast = FastTokenizer.from_str(files["tokenizer.json"].decode())
        return cls(fast, tuple(int(i) for i in ids), template)

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens added."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens show: a response with a <pad> inside is not the response without it."""
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def ids_containing(self, text: str) -> list[int]:
        """Every token whose text contains `text`: the stop ids for a stop string such as a newline."""
        size = self._fast.get_vocab_size()
        pieces = self._fast.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
        return [i for i, piece in enumerate(pieces) if text in piece]
