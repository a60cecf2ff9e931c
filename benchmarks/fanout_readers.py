"""Many readers of a board in one process, as light as can be: what they ask, and when, is what islands do.

Started by benchmarks.fanout with one JSON object on the command line; prints `ready`, then one JSON object.

Without a mirror a reader polls `manifests/<v+1>` on the object store and fetches the delta when it is there. With one
it holds one request for the manifest open at the mirror (as MirroredStore does: the store is asked every `check_s` all
the same), fetches the delta from the mirror, and, where manifests are not signed, the manifest from the store. Every
delta is checked against its digest.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp
import botocore.config
import botocore.session
import yarl
from blake3 import blake3

from sprawl.board import keys


@dataclass(frozen=True)
class Plan:
    """What the readers of one process do. `mirror`: its base URL, None without."""

    readers: int
    run_id: str
    bucket: str
    prefix: str
    endpoint: str
    first: int
    last: int
    poll_s: float
    check_s: float
    mirror: str | None
    signed: bool


@dataclass
class Seen:
    """What happened. Latencies in seconds from a manifest's `created_at` to the checked delta in hand."""

    latencies: list[float] = field(default_factory=list)
    store_requests: int = 0
    store_bytes: int = 0
    mirror_requests: int = 0
    mirror_bytes: int = 0
    errors: int = 0
    wrong: int = 0
    cpu_s: float = 0.0


class Signer:
    """URLs that the object store accepts without further signing, made once an object."""

    def __init__(self, plan: Plan) -> None:
        config = botocore.config.Config(signature_version="s3v4", s3={"addressing_style": "path"})
        self._client = botocore.session.get_session().create_client("s3", endpoint_url=plan.endpoint, config=config)
        self._plan = plan
        self._made: dict[str, str] = {}

    def url(self, key: str) -> str:
        if key not in self._made:
            parameters = {"Bucket": self._plan.bucket, "Key": f"{self._plan.prefix}/{key}"}
            self._made[key] = self._client.generate_presigned_url("get_object", parameters, ExpiresIn=86400)
        return self._made[key]


class Readers:
    def __init__(self, plan: Plan, http: aiohttp.ClientSession) -> None:
        self.plan = plan
        self.seen = Seen()
        self._http = http
        self._signer = Signer(plan)

    async def follow(self) -> None:
        """One reader, from the first version to the last."""
        plan = self.plan
        await asyncio.sleep(random.uniform(0, plan.poll_s))
        for version in range(plan.first, plan.last + 1):
            key = keys.manifest(plan.run_id, version)
            manifest = json.loads(await (self._polled(key) if plan.mirror is None else self._told(key)))
            (entry,) = (blob for blob in manifest["blobs"] if blob["role"] == "delta")
            blob_key = keys.blob(plan.run_id, version, entry["digest"])
            data = None
            while data is None:
                data = await (self._store(blob_key) if plan.mirror is None else self._mirror(blob_key))
            if blake3(data).hexdigest() != entry["digest"]:
                self.seen.wrong += 1
            self.seen.latencies.append(time.time() - manifest["created_at"])

    async def _polled(self, key: str) -> bytes:
        while (data := await self._store(key)) is None:
            await asyncio.sleep(self.plan.poll_s)
        return data

    async def _told(self, key: str) -> bytes:
        while True:
            data = await self._mirror(key, {"Prefer": f"wait={self.plan.check_s}"})
            if data is None or not self.plan.signed:
                data = await self._store(key)
            if data is not None:
                return data

    async def _store(self, key: str) -> bytes | None:
        self.seen.store_requests += 1
        data = await self._get(self._signer.url(key), {})
        self.seen.store_bytes += len(data or b"")
        return data

    async def _mirror(self, key: str, headers: dict[str, str] | None = None) -> bytes | None:
        self.seen.mirror_requests += 1
        data = await self._get(f"{self.plan.mirror}/v1/objects/{key}", headers or {})
        self.seen.mirror_bytes += len(data or b"")
        return data

    async def _get(self, url: str, headers: dict[str, str]) -> bytes | None:
        """None: not there, or an error, which is counted and tried again by the caller."""
        try:
            async with self._http.get(yarl.URL(url, encoded=True), headers=headers) as answer:
                if answer.status == 200:
                    return await answer.read()
                if answer.status != 404:
                    self.seen.errors += 1
                    await asyncio.sleep(0.1)
        except (aiohttp.ClientError, TimeoutError):
            self.seen.errors += 1
            await asyncio.sleep(0.1)
        return None


async def read(plan: Plan) -> Seen:
    """All readers of this process, to the last version."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=120)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
        readers = Readers(plan, http)
        print("ready", flush=True)
        await asyncio.gather(*(readers.follow() for _ in range(plan.readers)))
        readers.seen.cpu_s = time.process_time()
        return readers.seen


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * plan.readers + 256, hard), hard))
    print(json.dumps(asdict(asyncio.run(read(plan)))))


if __name__ == "__main__":
    main()
