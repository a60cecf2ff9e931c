"""config.json, tokenizer.json ... beside a checkpoint on this machine's disk."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from sprawl.board.local import replace_durably
from sprawl.board.local_copy import is_reserved
from sprawl.board.manifest import Manifest
from sprawl.board.reader import VersionReader
from sprawl.errors import IntegrityError, file_failure


def fetch_files(reader: VersionReader, directory: str | Path, manifest: Manifest) -> dict[str, bytes]:
    """The files that go with a version, put into `directory`. Those there that are intact are not fetched.

    Raises as `VersionReader.files_of`, SprawlError when they cannot be written.
    """
    directory = Path(directory)
    keyframe = reader.require(manifest.keyframe_version)
    files = {}
    for name, entry in keyframe.file_blobs().items():
        if is_reserved(name):
            raise IntegrityError(f"version {manifest.version} names {name!r} among its files, which it cannot replace")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            data = (directory / name).read_bytes() if (directory / name).exists() else None
            if data is None or blake3(data).hexdigest() != entry.digest:
                data = reader.blob(keyframe.version, entry)
                replace_durably(directory / name, data)
        except OSError as error:
            raise file_failure("write", directory / name, error) from None
        files[name] = data
    return files
