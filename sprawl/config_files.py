"""From a YAML file to a pydantic model. Whatever is wrong is one line that names the file, the field and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sprawl.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def read_yaml(path: str | Path, what: str, fix: str) -> Any:
    """The content of a YAML file. `what` it holds and where to find one (`fix`) are for the errors.

    Raises ConfigError: the file is missing, cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"no {what} at {path}", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"cannot read {path}: {why}", f"give a YAML file; {fix}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def validated(model: type[M], data: Any, source: str, what: str) -> M:
    """`data` as a model. Raises ConfigError: no mapping (of `what`), or with every wrong field named."""
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{source}: expected a mapping of {what}, got {got}", "write lines of `name: value`")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, model, source)) from None


def apply_overrides(data: dict[str, Any], overrides: list[str], option: str = "--set") -> dict[str, Any]:
    """Apply `section.field=value` (value is YAML) to a config mapping, returning a new mapping.

    Raises ConfigError when an override has no `=` or a value that is no YAML; wrong field names are found by
    validation. `option` is how the user gave them.
    """
    result = yaml.safe_load(yaml.safe_dump(data))
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator or not path:
            raise ConfigError(f"{option} {override!r} is not of the form section.field=value")
        target = result
        *parents, last = path.split(".")
        for part in parents:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{option} {override!r}: {part!r} is not a section")
        try:
            target[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            problem = " ".join(str(getattr(error, "problem", None) or error).split())
            raise ConfigError(f"{option} {override!r}: the value is not valid YAML: {problem}", "quote it") from None
    return result


def describe_validation_error(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """One line a field: `source: section.field: what is wrong (did you mean ...?)`."""
    lines = []
    for item in error.errors():
        location = tuple(item["loc"])
        field = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown key {field!r}{_hint(str(location[-1]), _known_fields(model, location))}")
        elif item["type"] == "missing":
            lines.append(f"{source}: {field!r} is required")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{source}: {field!r}: {message}" if location else f"{source}: {message}")
    return "; ".join(lines)


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    return f" (there are {', '.join(known)})" if known else ""


def _known_fields(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in location[:-1]:
        field = getattr(current, "model_fields", {}).get(part)
        current = field.annotation if field is not None else None
        if current is None:
            return []
    return list(getattr(current, "model_fields", {}))
