"""Reading through mirrors that die, lie, lag, stall and corrupt: what is read is what the board holds, every time."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sprawl.board import keys
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.signing import Signer, Trust, generate
from sprawl.board.store import MissingKey, Store, open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.mirror.objects import ManifestKey
from sprawl.mirror.store import MirroredStore, through_mirrors
from tests.board.states import RUN, publisher, state_of
from tests.mirror.support import Line, Reads, behind_a_line, metric, put_blob, running, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprawl.mirror.client.STALL_S", 3.0)
    monkeypatch.setattr("sprawl.mirror.client.FETCH_WAIT_S", 1.0)
    monkeypatch.setattr("sprawl.mirror.client.LOOK_AFTER_S", 2.0)


class Setting:
    """A board, a mirror behind a line, and a reader through it. `signed`: versions are, and the reader insists."""

    def __init__(self, place: str, tmp_path: Path, signed: bool) -> None:
        self.place = place
        self.tmp_path = tmp_path
        self.writer_board = open_store(place, create=True)
        self.reads = Reads(open_store(place))
        self.trust: Trust | None = None
        signer = None
        if signed:
            public, _ = generate(tmp_path / "key", "test")
            signer, self.trust = Signer.load(tmp_path / "key"), Trust.load(public)
        self.writer: Publisher = publisher(self.writer_board, signer=signer)
        self.stack = ExitStack()

    def publish(self, version: int) -> None:
        self.writer.publish(version, version, state_of(version))

    def start_mirror(self, *options: str) -> Line:
        self.process, self.line = self.stack.enter_context(
            behind_a_line(self.place, self.tmp_path / "cache", "--region", "east", *options)
        )
        return self.line

    def store(self, **options: Any) -> MirroredStore:
        store = MirroredStore(self.reads, "east", trust=self.trust, **options)  # type: ignore[arg-type]
        self.stack.callback(store.close)
        return store


@contextmanager
def setting(place: str, tmp_path: Path, *, signed: bool = False) -> Iterator[Setting]:
    made = Setting(place, tmp_path, signed)
    with made.stack:
        yield made


def followed(setting: Setting, store: Store, to: int) -> None:
    """Rebuild version 0 and step to `to`, through the store; every state has the published root."""
    reader = VersionReader(store, RUN, trust=setting.trust)
    served = reader.materialise(0)
    reader.advance(served, to)
    assert served.root == root_digest(tensor_digests(state_of(to)))


@pytest.mark.parametrize("signed", [False, True])
def test_versions_come_through_the_mirror(place: str, tmp_path: Path, signed: bool) -> None:
    with setting(place, tmp_path, signed=signed) as here:
        for version in range(6):
            here.publish(version)
        line = here.start_mirror()
        store = here.store()
        followed(here, store, 5)
        assert here.reads.of("/blobs/") == 0
        assert (here.reads.of("/manifests/") == 0) == signed
        assert metric(line.url, "sent_bytes_total") > 0
        assert verify_board(store, RUN, trust=here.trust).ok


@pytest.mark.parametrize("signed", [False, True])
def test_waiting_for_the_next_version_costs_the_board_nothing(place: str, tmp_path: Path, signed: bool) -> None:
    with setting(place, tmp_path, signed=signed) as here:
        here.publish(0)
        here.start_mirror()
        woken = threading.Event()
        store = here.store(notify=woken.set)
        reader = VersionReader(store, RUN, trust=here.trust)
        served = reader.materialise(0)
        assert reader.manifest(1) is None
        wait_for(lambda: metric(here.line.url, "waiting_readers") == 1)
        before = here.reads.reads.total()
        for _ in range(1000):
            assert reader.manifest(1) is None
        assert here.reads.reads.total() == before
        started = time.monotonic()
        here.publish(1)
        assert woken.wait(5)
        reader.advance(served, 1)
        assert time.monotonic() - started < 3
        assert served.root == root_digest(tensor_digests(state_of(1)))
        assert here.reads.reads.total() - before == (0 if signed else 1)  # the manifest of the new version
        if signed:  # and waiting for the one after has begun by itself
            wait_for(lambda: metric(here.line.url, "waiting_readers") == 1)
            assert reader.manifest(2) is None
            assert here.reads.reads.total() == before


@pytest.mark.parametrize("fault", ["killed", "truncated", "wrong", "slow", "silent"])
def test_a_blob_arrives_whatever_happens_on_the_way(place: str, tmp_path: Path, fault: str) -> None:
    data = bytes(range(256)) * 80_000  # 20 MB: longer than any buffer on the way
    with setting(place, tmp_path) as here:
        line = here.start_mirror()
        key = put_blob(here.writer_board, RUN, 0, data)
        store = here.store(slowest=30e6 if fault == "slow" else 1e6)
        told = f'{{"blobs": [{{"digest": "{key.rpartition("/")[2]}", "size": {len(data)}}}]}}'
        here.writer_board.put(keys.manifest(RUN, 0), told.encode())
        store.get(keys.manifest(RUN, 0))
        if fault == "killed":
            line.rate = 10e6

            def kill() -> None:
                wait_for(lambda: line.passed > 1_000_000)
                here.process.kill()

            threading.Thread(target=kill).start()
        line.cut_after = 3_000_000 if fault == "truncated" else None
        line.flip_after = 3_000_000 if fault == "wrong" else None
        if fault == "slow":
            line.rate = 100e3  # 200 s for the blob
        line.dead = fault == "silent"
        started = time.monotonic()
        assert store.get(key) == data
        assert time.monotonic() - started < 40
        assert here.reads.reads[key] == 1
        assert store.mirror_bytes == 0
        started = time.monotonic()
        assert store.get(key) == data  # the mirror is left alone for a while
        assert time.monotonic() - started < 2


def test_a_corrupted_cache_costs_one_more_try(place: str, tmp_path: Path) -> None:
    """A bit that the disk lost, in a file whose size and times say nothing."""
    with setting(place, tmp_path) as here:
        for version in range(2):
            here.publish(version)
        here.start_mirror()
        followed(here, here.store(), 1)
        for path in (tmp_path / "cache").glob("??/*"):
            before = path.stat()
            with path.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        store = here.store()
        before_blobs = here.reads.of("/blobs/")
        followed(here, store, 1)
        assert here.reads.of("/blobs/") == before_blobs  # the mirror noticed, and fetched again
        assert metric(here.line.url, "damaged_total") == 2


@pytest.mark.parametrize("signed", [False, True])
def test_a_mirror_that_keeps_versions_back_delays_them_a_little(place: str, tmp_path: Path, signed: bool) -> None:
    with setting(place, tmp_path, signed=signed) as here:
        here.publish(0)
        here.start_mirror()
        store = here.store(check_s=1.0)
        reader = VersionReader(store, RUN, trust=here.trust)
        served = reader.materialise(0)
        assert reader.manifest(1) is None
        wait_for(lambda: metric(here.line.url, "waiting_readers") == 1)
        here.line.dead = True  # from now on it says nothing
        for version in (1, 2, 3):
            here.publish(version)
            started = time.monotonic()
            wait_for(lambda version=version: reader.manifest(version) is not None, 20)
            assert time.monotonic() - started < (2.0 if not signed else 10.0)
            if not signed:
                reader.advance(served, version)


class _Liar:
    """A mirror of another board, registered on ours: whatever it says is well-formed, and none of it is true."""

    def __init__(self, here: Setting, tmp_path: Path, change: Callable[[Publisher], None]) -> None:
        board = str(tmp_path / "other")
        other = open_store(board, create=True)
        change(publisher(other))
        _, record = here.stack.enter_context(running(board, tmp_path / "lies", "--region", "east"))
        here.writer_board.put(keys.mirror("east", "liar"), record.model_dump_json().encode())
        self.url = record.url


@pytest.mark.parametrize("signed", [False, True])
def test_a_version_that_was_never_published_is_not_believed(place: str, tmp_path: Path, signed: bool) -> None:
    with setting(place, tmp_path, signed=signed) as here:
        here.publish(0)

        def forge(writer: Publisher) -> None:
            for version in range(5):
                writer.publish(version, version, state_of(version, seed=99))

        liar = _Liar(here, tmp_path, forge)
        store = here.store()
        reader = VersionReader(store, RUN, trust=here.trust)
        assert reader.head() == 0
        served = reader.materialise(0)
        assert served.root == root_digest(tensor_digests(state_of(0)))
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert reader.manifest(1) is None
            time.sleep(0.01)
        assert metric(liar.url, "responses_total") < 12  # it was asked a few times, and then no more
        here.publish(1)
        wait_for(lambda: reader.manifest(1) is not None, 20)
        reader.advance(served, 1)
        assert served.root == root_digest(tensor_digests(state_of(1)))


def test_a_signed_version_does_not_pass_for_another(place: str, tmp_path: Path) -> None:
    """A mirror could send an older manifest, or that of another run: signed by the right key, and still wrong."""
    with setting(place, tmp_path, signed=True) as here:
        for version in range(2):
            here.publish(version)
        store = here.store()
        old, new = (ManifestKey(keys.manifest(RUN, version), RUN, version) for version in range(2))
        data = here.writer_board.get(old.key)
        assert store._vouched(old, data)
        assert not store._vouched(new, data)
        assert not store._vouched(ManifestKey(keys.manifest("run-2", 0), "run-2", 0), data)
        assert not store._vouched(old, data.replace(b'"step":0', b'"step":1'))
        assert not store._vouched(old, b"{}")


def test_no_mirror_no_difference(place: str, tmp_path: Path) -> None:
    with setting(place, tmp_path) as here:
        for version in range(3):
            here.publish(version)
        store = here.store()
        followed(here, store, 2)
        assert store.mirror_bytes == 0
        store.put("k", b"1")
        assert store.create("k", b"2") is False
        assert (store.get("k"), store.exists("k"), store.list("k"), store.children("")) == (
            b"1",
            True,
            ["k"],
            ["k", RUN],
        )
        store.delete("k")
        with pytest.raises(MissingKey):
            store.get("k")
        assert through_mirrors(here.writer_board, None, None) is here.writer_board


def test_a_mirror_that_comes_back_is_used_again(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprawl.mirror.choice.LOOK_FOR_ANY_S", 0.5)
    with setting(place, tmp_path) as here:
        here.publish(0)
        store = here.store()
        with running(place, tmp_path / "cache", "--region", "east", "--mirror-id", "a") as (process, _):
            followed(here, store, 0)
            assert store.mirror_bytes > 0
            process.kill()
            process.wait()
            before = here.reads.of("/blobs/")
            followed(here, store, 0)
            assert here.reads.of("/blobs/") > before
        with running(place, tmp_path / "cache", "--region", "east", "--mirror-id", "a"):
            seen = store.mirror_bytes

            def again() -> bool:
                followed(here, store, 0)
                return store.mirror_bytes > seen

            wait_for(again, 20)


def test_tls_and_token(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    with setting(place, tmp_path) as here:
        here.publish(0)
        tls = ("--tls-cert", str(certificate), "--tls-key", str(key), "--region", "east")
        with running(place, tmp_path / "cache", *tls, SPRAWL_MIRROR_TOKEN="secret") as (_, record):
            assert record.url.startswith("https://")

            def through(token: str) -> int:
                monkeypatch.setenv("SPRAWL_MIRROR_TOKEN", token)
                store = through_mirrors(here.writer_board, "east", None)
                assert isinstance(store, MirroredStore)
                here.stack.callback(store.close)
                followed(here, store, 0)
                return store.mirror_bytes

            assert through("secret") == 0  # the certificate is nobody's we know
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            assert through("wrong") == 0
            assert through("secret") > 0


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mirror")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(private, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "tls.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
