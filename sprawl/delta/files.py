"""Hugging Face safetensors on disk: a file, or a directory with one or several shards."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from sprawl.delta.state import State, clone_state
from sprawl.delta.whole import encode_whole
from sprawl.errors import SprawlError, file_failure

WEIGHTS = "model.safetensors"


def shards(path: str | Path) -> list[Path]:
    """The safetensors files of a model. Raises SprawlError when there are none."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SprawlError(f"no model at {path}", "give a safetensors file or a directory that holds some")
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise SprawlError(f"{path} holds no .safetensors files", "give the directory that holds the model's weights")
    return found


def load_state(path: str | Path) -> State:
    """All tensors of a model, CPU contiguous. Raises SprawlError naming the file that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: State = {}
    for file in shards(path):
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            what = f"{file} is not a readable safetensors file: {' '.join(str(error).split())}"
            raise SprawlError(what, "copy it again, or give another file") from None
        twice = sorted(set(state) & set(tensors))
        if twice:
            raise SprawlError(f"tensor {twice[0]!r} is in more than one shard of {path}", "remove left-over shards")
        state.update(clone_state(tensors))
    return state


def save_state(state: State, directory: str | Path, like: str | Path | None = None) -> Path:
    """Write `model.safetensors`, atomically, with the configuration files found beside the model `like`.

    Returns the file written. Raises SprawlError when the directory cannot be written or holds other shards.
    """
    directory = Path(directory)
    target = directory / WEIGHTS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = [file.name for file in directory.glob("[!.]*.safetensors*") if file.name != WEIGHTS]
        if others:
            raise SprawlError(f"{directory} already holds {others[0]}", "choose an empty directory")
        if like is not None and Path(like).is_dir() and not directory.samefile(like):
            for file in sorted(Path(like).iterdir()):
                if file.suffix in (".json", ".txt", ".jinja", ".model") and ".safetensors" not in file.name:
                    shutil.copy2(file, directory / file.name)
    except OSError as error:
        raise file_failure("write", directory, error) from None
    write_atomically(target, encode_whole(state))
    return target


def read_file(path: Path) -> bytes:
    """Raises SprawlError naming the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_failure("read", path, error) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, then rename. Raises SprawlError naming the file."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise file_failure("write", path, error) from None
