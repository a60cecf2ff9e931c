"""Optional ed25519 signatures over commit records, so that who can write to the bucket cannot make up a version.

What is signed is the record's canonical JSON (sorted keys, no white space) without its `signature` member, behind a
domain prefix. A manifest names every blob by a cryptographic digest and the root digest of the state, so its signature
vouches for every byte of the version. Needs the `sign` extra (`cryptography`).
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from sprawl.errors import IntegrityError, SprawlError, file_failure

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM = "ed25519"
_DOMAIN = b"sprawl commit record 1\n"
_PUBLIC_PREFIX = "sprawl-ed25519"


class Signature(BaseModel):
    """Over a commit record. `key` is the id of the public key: 16 hex digits of its blake3."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    algorithm: str
    key: str
    value: str = Field(description="64 bytes, base64.")


class SignatureProblem(IntegrityError):
    """A record that none of the trusted keys vouches for."""


def canonical(record: dict[str, Any]) -> bytes:
    """The bytes a signature covers."""
    unsigned = {name: value for name, value in record.items() if name != "signature"}
    return _DOMAIN + json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def _key_id(public: bytes) -> str:
    return blake3(public).hexdigest()[:16]


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SprawlError("signatures need the package cryptography", "pip install 'sprawl-rl[sign]'") from None
    return ed25519


@dataclass(frozen=True)
class Signer:
    """Signs records with one private key."""

    key_id: str
    _private: Ed25519PrivateKey

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        """From a PEM file as `sprawl board keygen` writes it. Raises SprawlError naming the file."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        library = _library()
        data = _read(path, "signing key")
        try:
            private = load_pem_private_key(data, None)
        except (ValueError, TypeError):
            raise SprawlError(f"{path} is not an unencrypted PEM key", "make one with `sprawl board keygen`") from None
        if not isinstance(private, library.Ed25519PrivateKey):
            raise SprawlError(f"{path} is not an ed25519 key", "make one with `sprawl board keygen`")
        return cls(_key_id(private.public_key().public_bytes_raw()), private)

    def sign(self, record: dict[str, Any]) -> Signature:
        value = self._private.sign(canonical(record))
        return Signature(algorithm=ALGORITHM, key=self.key_id, value=base64.b64encode(value).decode())


@dataclass(frozen=True)
class Trust:
    """The public keys a reader accepts. With a Trust, unsigned records are refused."""

    keys: dict[str, Ed25519PublicKey]

    @classmethod
    def load(cls, path: str | Path) -> Trust:
        """From a text file: one `sprawl-ed25519 <base64> [comment]` a line, # starts a comment. Raises SprawlError."""
        library = _library()
        keys = {}
        for number, line in enumerate(_read(path, "trusted keys").decode(errors="replace").splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                if words[0] != _PUBLIC_PREFIX:
                    raise ValueError
                raw = base64.b64decode(words[1], validate=True)
                keys[_key_id(raw)] = library.Ed25519PublicKey.from_public_bytes(raw)
            except (ValueError, IndexError):
                raise SprawlError(
                    f"{path}: line {number} is not a public key", f"a line is `{_PUBLIC_PREFIX} <base64> [comment]`"
                ) from None
        if not keys:
            raise SprawlError(f"{path} holds no public key", "copy the .pub file of the writer there")
        return cls(keys)

    def check(self, record: dict[str, Any], name: str) -> None:
        """Raises SignatureProblem naming the record unless one of the trusted keys signed it."""
        from cryptography.exceptions import InvalidSignature

        try:
            signature = Signature.model_validate(record["signature"])
        except KeyError:
            raise SignatureProblem(f"{name} is not signed, and this reader trusts signed records only") from None
        except ValueError:
            raise SignatureProblem(f"{name} has a malformed signature") from None
        if signature.algorithm != ALGORITHM:
            raise SignatureProblem(f"{name} is signed with {signature.algorithm!r}, this release knows {ALGORITHM}")
        public = self.keys.get(signature.key)
        if public is None:
            raise SignatureProblem(
                f"{name} is signed by key {signature.key}, which is not trusted here",
                "add the writer's public key to the trusted keys, or find out who wrote this",
            )
        try:
            public.verify(base64.b64decode(signature.value), canonical(record))
        except (InvalidSignature, ValueError):
            raise SignatureProblem(f"{name} was changed after key {signature.key} signed it") from None


def generate(path: str | Path, comment: str) -> tuple[Path, str]:
    """Write a new key pair: `path` (private, mode 0600) and `path`.pub. Returns the .pub path and the key id.

    Raises SprawlError when a file is in the way or cannot be written.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = _library().Ed25519PrivateKey.generate()
    raw = private.public_key().public_bytes_raw()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = Path(path)
    public = path.with_name(f"{path.name}.pub")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
        with public.open("x") as text:
            text.write(f"{_PUBLIC_PREFIX} {base64.b64encode(raw).decode()} {comment}\n")
    except FileExistsError as error:
        raise SprawlError(f"{error.filename} exists, and keys are never overwritten", "choose another name") from None
    except OSError as error:
        raise file_failure("write", path, error) from None
    return public, _key_id(raw)


def signer_from(path: str | None) -> Signer | None:
    """The signer of a key file, or None without one: for options and environment variables that may be unset."""
    return Signer.load(path) if path else None


def environment_trust() -> Trust | None:
    """The trust of $SPRAWL_TRUSTED_KEYS: keys come by the environment, so that no config and no flow run shows them."""
    return trust_from(os.environ.get("SPRAWL_TRUSTED_KEYS"))


def environment_keys() -> tuple[Signer | None, Trust | None]:
    """What a run signs with ($SPRAWL_SIGNING_KEY) and trusts. Raises SprawlError if it would refuse its own."""
    signer, trust = signer_from(os.environ.get("SPRAWL_SIGNING_KEY")), environment_trust()
    if trust is not None and signer is None:
        raise SprawlError(
            "this run would publish unsigned versions and accept signed ones only",
            "set SPRAWL_SIGNING_KEY too, or unset SPRAWL_TRUSTED_KEYS",
        )
    if trust is not None and signer is not None and signer.key_id not in trust.keys:
        raise SprawlError(
            f"this run's versions would be signed by key {signer.key_id}, which is not trusted here",
            "add the .pub file of SPRAWL_SIGNING_KEY to SPRAWL_TRUSTED_KEYS",
        )
    return signer, trust


def trust_from(path: str | None) -> Trust | None:
    """The trust of a key list, or None without one."""
    return Trust.load(path) if path else None


def _read(path: str | Path, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise file_failure("read", f"the {what} {path}", error) from None
