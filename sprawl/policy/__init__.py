"""The policy: a decoder-only language model in Hugging Face layout, its tokenizer and its files."""

from sprawl.policy.architecture import Architecture
from sprawl.policy.decoder import Decoder
from sprawl.policy.tokenizer import Tokenizer

__all__ = ["Architecture", "Decoder", "Tokenizer"]
