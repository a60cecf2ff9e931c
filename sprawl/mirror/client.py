"""One mirror as a reader sees it: asked over HTTP, believed in nothing. What it sends is checked here, and every way in
which it can be of no use is a `MirrorProblem`."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

import httpx
from blake3 import blake3

from sprawl.errors import BoardError
from sprawl.mirror.objects import ROUTE, BlobKey, ManifestKey

T = TypeVar("T")

CONNECT_S = 3.0
PATIENCE_S = 30.0  # for an object of no size
STALL_S = 15.0  # longest silence while an object is sent
FETCH_WAIT_S = 10.0  # a mirror that is still fetching is asked again after this
ASK_AGAIN_S = 0.2
LOOK_AFTER_S = 10.0  # the pace of a transfer is judged over this long
MAX_MANIFEST_BYTES = 256 << 20

REST_S = 5.0  # an unreachable mirror, doubled up to
MAX_REST_S = 60.0
WRONG_REST_S = 600.0  # one that sent wrong bytes twice


class MirrorProblem(BoardError):
    """This mirror is of no use now. `rest_s`: for how long it should be left alone; None: it did nothing wrong."""

    def __init__(self, url: str, what: str, rest_s: float | None = REST_S) -> None:
        super().__init__(f"mirror {url}: {what}")
        self.rest_s = rest_s


class WrongBytes(MirrorProblem):
    """What it sent is not what was asked for."""


def http_client(token: str | None) -> httpx.Client:
    """A client for all mirrors of a board: no redirects, nothing decoded, quick to give up connecting."""
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    timeout = httpx.Timeout(STALL_S, connect=CONNECT_S)
    return httpx.Client(headers=headers, timeout=timeout, limits=httpx.Limits(max_keepalive_connections=4))


class Mirror:
    """A mirror at a URL. Thread-safe. `slowest` in bytes per second: a transfer below it is given up."""

    def __init__(self, client: httpx.Client, mirror_id: str, url: str, *, slowest: float) -> None:
        self.mirror_id = mirror_id
        self.url = url.rstrip("/")
        self._client = client
        self._slowest = slowest

    def manifest(self, key: ManifestKey, wait_s: float = 0.0) -> bytes | None:
        """A manifest's bytes, unchecked; None when the mirror says that it is not there (after `wait_s`)."""
        return self._within(PATIENCE_S + wait_s, lambda: self._ask_manifest(key, wait_s))

    def _ask_manifest(self, key: ManifestKey, wait_s: float) -> bytes | None:
        headers = {"Prefer": f"wait={wait_s:g}"} if wait_s else {}
        timeout = httpx.Timeout(STALL_S + wait_s, connect=CONNECT_S)
        try:
            with self._client.stream("GET", self._url(key.key), headers=headers, timeout=timeout) as answer:
                if answer.status_code == 404:
                    return None
                size = self._announced(answer)
                if size > MAX_MANIFEST_BYTES:
                    raise WrongBytes(self.url, f"a manifest of {size} bytes", WRONG_REST_S)
                return self._body(answer, size)[0]
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
            raise self._trouble(error) from None

    def blob(self, key: BlobKey, size: int) -> bytes:
        """A blob of `size` bytes with the digest in its key. Raises MirrorProblem.

        When the bytes are wrong the mirror is asked once to look at what it has on disk and to send them again.
        """

        def fetch() -> bytes:
            try:
                return self._fetch(key, size, {})
            except WrongBytes:
                return self._fetch(key, size, {"Cache-Control": "no-cache"})

        return self._within(2 * (PATIENCE_S + size / self._slowest), fetch)

    def _fetch(self, key: BlobKey, size: int, headers: dict[str, str]) -> bytes:
        patience = time.monotonic() + PATIENCE_S + size / self._slowest
        while True:
            # Not longer than the timeout of a silent connection.
            asking = {"Prefer": f"wait={FETCH_WAIT_S:g}", **headers}
            try:
                with self._client.stream("GET", self._url(key.key), headers=asking) as answer:
                    if answer.status_code == 503 and "Retry-After" in answer.headers:
                        if time.monotonic() > patience:
                            raise MirrorProblem(self.url, f"still fetches {key.key}")
                        time.sleep(ASK_AGAIN_S)
                        continue
                    if answer.status_code == 404:
                        raise MirrorProblem(self.url, f"does not have {key.key}", None)
                    announced = self._announced(answer)
                    if announced != size:
                        raise WrongBytes(self.url, f"{key.key} has {announced} bytes, not {size}", WRONG_REST_S)
                    data, digest = self._body(answer, size)
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
                raise self._trouble(error) from None
            if digest != key.digest:
                raise WrongBytes(self.url, f"what it sent as {key.key} has digest {digest}", WRONG_REST_S)
            return data

    def _url(self, key: str) -> str:
        return f"{self.url}{ROUTE}{quote(key)}"

    def _announced(self, answer: httpx.Response) -> int:
        """Content-Length of a 200. Everything else is a problem."""
        if answer.status_code != 200:
            raise MirrorProblem(self.url, f"answers {answer.status_code}")
        length = answer.headers.get("Content-Length", "")
        if not length.isdecimal() or "Content-Encoding" in answer.headers:
            raise WrongBytes(self.url, "does not say how much it sends", WRONG_REST_S)
        return int(length)

    def _body(self, answer: httpx.Response, size: int) -> tuple[bytes, str]:
        """Exactly `size` bytes and their blake3; given up when they come too slowly."""
        hasher, buffer = blake3(), io.BytesIO()
        checkpoint, received = time.monotonic(), 0
        for chunk in answer.iter_raw():
            hasher.update(chunk)
            buffer.write(chunk)
            received += len(chunk)
            elapsed = time.monotonic() - checkpoint
            if elapsed > LOOK_AFTER_S:
                if received < self._slowest * elapsed:
                    raise MirrorProblem(self.url, f"sends {received / elapsed / 1e3:.0f} kB/s", MAX_REST_S)
                checkpoint, received = time.monotonic(), 0
        if buffer.tell() != size:
            raise WrongBytes(self.url, f"sent {buffer.tell()} bytes of {size}")
        return buffer.getvalue(), hasher.hexdigest()

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """`call`, given up after that long: timeouts of the connection do not end a mirror that sends a byte now and
        then. What is given up runs out in its own thread."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"mirror {self.mirror_id}", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise MirrorProblem(self.url, f"did not finish within {seconds:.0f} s", WRONG_REST_S)
        if errors:
            raise errors[0]
        return results[0]

    def _trouble(self, error: Exception) -> MirrorProblem:
        return MirrorProblem(self.url, f"{type(error).__name__}: {error}".rstrip(": "))
