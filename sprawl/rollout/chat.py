"""Chat messages to a prompt, through the checkpoint's own Jinja template, sandboxed: it comes from a model file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sprawl.rollout.refusals import BadRequest


def render_chat(template: object, files: Mapping[str, bytes], messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt text for `messages`, ending where the assistant's turn begins.

    `template` is `Tokenizer.chat_template`; `files` the checkpoint's files, for the special tokens a template names.
    Raises BadRequest when the model has no template or the template refuses the messages.
    """
    if isinstance(template, list):  # named templates: [{"name": "default", "template": ...}, ...]
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise BadRequest("messages", "this model has no chat template; use /v1/completions with a prompt")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, **_special_tokens(files)
        )
    except TemplateError as error:
        raise BadRequest("messages", f"the chat template cannot render them: {error}") from None


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        tokens[name] = value if isinstance(value, str) else ""
    return tokens


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
