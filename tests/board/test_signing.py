import json
from pathlib import Path

import pytest

from sprawl.board import keys
from sprawl.board.merged import merge
from sprawl.board.reader import VersionReader
from sprawl.board.signing import SignatureProblem, Signer, Trust, generate, signer_from, trust_from
from sprawl.board.store import Store
from sprawl.board.verify import verify_board
from sprawl.errors import SprawlError
from tests.board.states import RUN, publisher, state_of

pytest.importorskip("cryptography")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate(tmp_path / "key", "trainer")
    return tmp_path / "key"


@pytest.fixture
def signer(key: Path) -> Signer:
    return Signer.load(key)


@pytest.fixture
def trust(key: Path) -> Trust:
    return Trust.load(f"{key}.pub")


@pytest.fixture
def signed(store: Store, signer: Signer) -> Store:
    writer = publisher(store, signer=signer)
    for version in range(6):
        writer.publish(version, version, state_of(version))
    return store


def test_signed_versions_are_read_with_and_without_trust(signed: Store, signer: Signer, trust: Trust) -> None:
    for reader in (VersionReader(signed, RUN, trust=trust), VersionReader(signed, RUN)):
        served = reader.materialise(0)
        reader.advance(served, 5)
        manifest = reader.require(5)
        assert manifest.signature is not None
        assert manifest.signature.key == signer.key_id
        assert manifest.to_bytes() == signed.get(keys.manifest(RUN, 5))
    assert verify_board(signed, RUN, trust=trust).ok


def test_the_private_key_is_private(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SprawlError, match="exists"):
        generate(key, "again")


def test_unsigned_and_foreign_records_are_refused(signed: Store, trust: Trust, tmp_path: Path) -> None:
    """Versions go on being served where they were: nothing is touched."""
    reader = VersionReader(signed, RUN, trust=trust)
    served = reader.materialise(4)
    unsigned = json.loads(signed.get(keys.manifest(RUN, 5)))
    del unsigned["signature"]
    signed.put(keys.manifest(RUN, 5), json.dumps(unsigned).encode())
    with pytest.raises(SignatureProblem, match=r"00000005\.json is not signed"):
        reader.advance(served, 5)
    assert served.version == 4
    assert not verify_board(signed, RUN, trust=trust).ok
    assert verify_board(signed, RUN).ok

    generate(tmp_path / "other", "")
    stranger = VersionReader(signed, RUN, trust=Trust.load(tmp_path / "other.pub"))
    with pytest.raises(SignatureProblem, match="not trusted here"):
        stranger.materialise(4)


@pytest.mark.parametrize("field", ["root_digest", "step", "blobs", "from_the_future"])
def test_a_changed_manifest_is_refused(signed: Store, trust: Trust, field: str) -> None:
    data = json.loads(signed.get(keys.manifest(RUN, 5)))
    match field:
        case "blobs":
            data["blobs"][0]["digest"] = "0" * 64
        case "step":
            data["step"] += 1
        case _:
            data[field] = "0" * 64
    signed.put(keys.manifest(RUN, 5), json.dumps(data).encode())
    with pytest.raises(SignatureProblem, match="was changed after key"):
        VersionReader(signed, RUN, trust=trust).manifest(5)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ({"algorithm": "rsa", "key": "k", "value": ""}, "'rsa'"),
        ({"algorithm": "ed25519"}, "malformed"),
        (None, "malformed"),
        ("x", "malformed"),
    ],
)
def test_malformed_signatures(signed: Store, trust: Trust, signature: object, message: str) -> None:
    data = json.loads(signed.get(keys.manifest(RUN, 5)))
    data["signature"] = signature
    signed.put(keys.manifest(RUN, 5), json.dumps(data).encode())
    with pytest.raises(SignatureProblem, match=message):
        VersionReader(signed, RUN, trust=trust).manifest(5)


def test_fields_of_a_newer_writer_are_signed_too(store: Store, signer: Signer, trust: Trust) -> None:
    publisher(store).publish(0, 0, state_of(0))
    data = json.loads(store.get(keys.manifest(RUN, 0)))
    data["from_the_future"] = {"b": 1.5, "a": "ä"}
    data["signature"] = signer.sign(data).model_dump()
    store.put(keys.manifest(RUN, 0), json.dumps(data, indent=1).encode())
    assert VersionReader(store, RUN, trust=trust).materialise(0).version == 0


def test_an_untrusted_merged_delta_is_not_used(signed: Store, trust: Trust, signer: Signer) -> None:
    reader = VersionReader(signed, RUN, trust=trust)
    merge(VersionReader(signed, RUN), 1, 5)
    served = reader.materialise(1)
    prepared = reader.prepare(served, 5)
    assert prepared.bytes == sum(reader.require(v).bytes_of("delta") for v in range(2, 6)), "took the chain"
    assert not verify_board(signed, RUN, trust=trust).ok
    signed.delete(keys.merged(RUN, 1, 5))
    record = merge(VersionReader(signed, RUN), 1, 5, signer)
    assert reader.prepare(served, 5).bytes == record.bytes
    assert verify_board(signed, RUN, trust=trust).merged == 1


@pytest.mark.parametrize("text", ["", "# only a comment\n", "ssh-ed25519 AAAA\n", "sprawl-ed25519 !!\n"])
def test_bad_key_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(SprawlError, match="f"):
        Trust.load(tmp_path / "f")
    with pytest.raises(SprawlError, match="not an unencrypted PEM key"):
        Signer.load(tmp_path / "f")
    with pytest.raises(SprawlError, match="cannot read the signing key"):
        Signer.load(tmp_path / "none")


def test_no_file_is_no_key() -> None:
    assert signer_from(None) is None
    assert trust_from("") is None
