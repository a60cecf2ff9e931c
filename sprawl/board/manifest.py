"""Manifests: the commit record of one policy version. A version exists when its manifest does."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sprawl.board.signing import Signature, Signer, Trust
from sprawl.errors import BoardError, IntegrityError

FORMAT = 1
KEYFRAME = "keyframe"
DELTA = "delta"
FILE = "file"


class BlobEntry(BaseModel):
    """One immutable object of a version. Role: keyframe | delta | file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: str = Field(description="blake3 of the bytes; also the last part of the key.")
    size: int = Field(ge=0, description="Bytes.")
    role: str


class TensorEntry(BaseModel):
    """A tensor of the new state. In deltas dtype and shape appear only where they differ from the base's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: str = Field(
        description="blake3 over dtype, shape and bytes. Deltas carry its first 16 digits, enough to name a damaged "
        "tensor: what vouches for the state is the root digest."
    )
    dtype: str | None = None
    shape: list[int] | None = None


class Manifest(BaseModel):
    """manifests/<version>.json, created exclusively.

    Every version but a run's first, and those of adapters, holds a delta against `base_version`. Keyframes also hold
    the whole state, so that followers step over a keyframe at the price of a delta, and the chain can be checked
    against the keyframe. With several writers a role occurs once a writer; no tensor is in the blobs of two of them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int = FORMAT
    run_id: str
    version: int = Field(ge=0)
    base_version: int | None = Field(
        description="version - 1; None for a run's first version and for one published whole."
    )
    keyframe_version: int = Field(ge=0, description="Newest keyframe at or below this version.")
    kind: Literal["keyframe", "delta"]
    step: int = Field(description="Optimizer step that made this version.")
    dtype: str = Field(description="Dtype of the served view's floating tensors.")
    tensors: dict[str, TensorEntry] = Field(description="All tensors of a keyframe; the changed ones of a delta.")
    removed: list[str] = Field(default_factory=list, description="Tensors of the base that are gone; deleted on apply.")
    blobs: list[BlobEntry]
    root_digest: str = Field(description="Of the whole state of this version.")
    base_root_digest: str | None = Field(description="Of the state the delta must be applied to.")
    nonce: str = Field(description="Random: tells a lost reply of ours from another writer.")
    writer: str
    epoch: int = Field(description="Fencing epoch of the writer; 0 without fencing.")
    created_at: float = Field(description="Unix seconds.")
    changed_share: float = Field(description="Share of served elements whose bits changed; 1 for version 0.")
    full_bytes: int = Field(description="Bytes of the served view uncompressed.")
    sent_bytes: int = Field(description="Bytes of all blobs of this version.")
    files: dict[str, str] = Field(default_factory=dict, description="On keyframes: config.json ... -> digest.")
    extra: dict[str, Any] = Field(default_factory=dict)
    writers: list[str] = Field(default_factory=list, description="Who wrote the parts, when several did.")
    signature: Signature | None = None

    def to_bytes(self) -> bytes:
        """Canonical bytes: sorted keys, no white space; absent optional fields left out of tensor entries, no signature
        and no list of writers where there is none."""
        return json.dumps(self._data(), sort_keys=True, separators=(",", ":")).encode()

    def signed(self, signer: Signer | None) -> Manifest:
        """With a signature over everything else; as it is without a signer."""
        return self if signer is None else self.model_copy(update={"signature": signer.sign(self._data())})

    def _data(self) -> dict[str, Any]:
        data = self.model_dump(mode="json")
        data["tensors"] = {name: entry.model_dump(exclude_none=True) for name, entry in self.tensors.items()}
        return {name: value for name, value in data.items() if value or name not in ("signature", "writers")}

    @classmethod
    def from_bytes(cls, data: bytes, key: str, trust: Trust | None = None) -> Manifest:
        """Parse the object at `key`. Unknown fields are ignored, unknown formats refused; with `trust`, so is whatever
        none of its keys signed.

        Raises IntegrityError (not a manifest, or not vouched for) or BoardError (format of a newer release).
        """
        try:
            parsed = json.loads(data)
            found = parsed["format"]
        except (ValueError, KeyError, TypeError):
            raise IntegrityError(f"{key} is not a manifest") from None
        if found != FORMAT:
            raise BoardError(f"{key} has manifest format {found}, this release knows {FORMAT}", "upgrade sprawl")
        if trust is not None:
            trust.check(parsed, key)
        try:
            return cls.model_validate(parsed)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise IntegrityError(f"{key} is not a valid manifest: {where}: {first['msg']}") from None

    def parts(self, role: str) -> list[BlobEntry]:
        """The blobs of a role: one a writer."""
        return [blob for blob in self.blobs if blob.role == role]

    def file_blobs(self) -> dict[str, BlobEntry]:
        """The blob of every file of a keyframe. Raises IntegrityError when one has a name that leads elsewhere."""
        entries = {blob.digest: blob for blob in self.blobs if blob.role == FILE}
        for name, digest in self.files.items():
            if name != name.rpartition("/")[2].lstrip(".") or not name:
                raise IntegrityError(f"version {self.version} names {name!r}, which is not the name of a file")
            if digest not in entries:
                raise IntegrityError(f"version {self.version} names {name!r}, but has no blob of it")
        return {name: entries[digest] for name, digest in self.files.items()}

    def bytes_of(self, role: str) -> int:
        """Bytes of all blobs of a role."""
        return sum(blob.size for blob in self.parts(role))

    def blob(self, role: str) -> BlobEntry | None:
        """The blob of a role that one writer wrote (keyframe, delta)."""
        return next((blob for blob in self.blobs if blob.role == role), None)
