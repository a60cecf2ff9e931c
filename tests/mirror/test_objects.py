"""What is relayed, read off the key."""

import pytest

from sprawl.board import keys
from sprawl.commands.mirror import address, byte_count
from sprawl.errors import SprawlError
from sprawl.mirror.objects import BlobKey, ManifestKey, blob_sizes, is_hint, is_merged_record, parse, wait_of
from sprawl.mirror.registry import check_name

DIGEST = "0123456789abcdef" * 4


def test_blobs_and_manifests_are_relayed() -> None:
    assert parse(keys.blob("run", 7, DIGEST)) == BlobKey(f"run/blobs/7/{DIGEST}", DIGEST)
    assert parse(keys.merged_blob("run", 3, 9, DIGEST)) == BlobKey(f"run/merged/00000003-00000009/{DIGEST}", DIGEST)
    found = parse(keys.manifest("run", 12))
    assert isinstance(found, ManifestKey)
    assert found == ManifestKey("run/manifests/00000012.json", "run", 12)
    assert found.following.key == keys.manifest("run", 13)
    assert parse(keys.manifest("run", 123456789)) == ManifestKey("run/manifests/123456789.json", "run", 123456789)


@pytest.mark.parametrize(
    "key",
    [
        keys.run("run"),
        keys.latest("run"),
        keys.island("run", "a"),
        keys.epoch("run", 1),
        keys.rollouts("run", 1),
        keys.checkpoint_blob("run", 1, "masters"),
        keys.merged("run", 0, 4),
        keys.mirror("east", "a"),
        f"run/blobs/7/{DIGEST}0",
        f"run/blobs/7/{DIGEST.upper()}",
        f"run/blobs/../blobs/7/{DIGEST}",
        f"../blobs/7/{DIGEST}",
        f".hidden/blobs/7/{DIGEST}",
        f"/blobs/7/{DIGEST}",
        "run/manifests/12.json",
        "run/manifests/000000012.json",
        "run/manifests/00000012.json\n",
        "",
    ],
)
def test_nothing_else_is(key: str) -> None:
    assert parse(key) is None


def test_other_kinds_of_keys() -> None:
    assert is_hint(keys.latest("run"))
    assert not is_hint(keys.run("run"))
    assert is_merged_record(keys.merged("run", 0, 4))
    assert not is_merged_record(keys.merged_blob("run", 0, 4, DIGEST))


def test_sizes_of_a_record() -> None:
    assert dict(blob_sizes(b'{"blobs": [{"digest": "a", "size": 3}, {"digest": "b", "size": 4}]}')) == {"a": 3, "b": 4}
    for nonsense in (b"", b"[]", b"{}", b'{"blobs": 3}', b'{"blobs": [3]}', b"\xff"):
        assert list(blob_sizes(nonsense)) == []


def test_prefer() -> None:
    assert wait_of("wait=20") == 20
    assert wait_of("respond-async, wait=2.5") == 2.5
    assert wait_of("wait=900") == 30
    for nothing in ("", "wait", "wait=-1", "wait=inf", "wait=1e9", "waits=3"):
        assert wait_of(nothing) is None


def test_options() -> None:
    assert address("10.0.0.5:8400") == ("10.0.0.5", 8400)
    assert address("[::1]:0") == ("::1", 0)
    assert address("8400") == ("127.0.0.1", 8400)
    for wrong in ("", "host", "host:", "host:x", "host:70000", "::1:80"):
        with pytest.raises(SprawlError, match="--listen"):
            address(wrong)
    assert [byte_count(text, "--cache-size") for text in ("7", "500MB", "1.5 gb", "2T")] == [
        7,
        500_000_000,
        1_500_000_000,
        2_000_000_000_000,
    ]
    for wrong in ("", "0", "-3", "many", "3PB"):
        with pytest.raises(SprawlError, match="--cache-size"):
            byte_count(wrong, "--cache-size")
    assert check_name("eu-west-1", "--region") == "eu-west-1"
    for wrong in ("", ".x", "a/b", "a b", "x" * 64):
        with pytest.raises(SprawlError, match="--region"):
            check_name(wrong, "--region")
