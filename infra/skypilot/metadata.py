"""The metadata servers of AWS and GCP, as far as an island needs them: its public address and notices of preemption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

AWS, GCP, NOWHERE = "aws", "gcp", "nowhere"
TIMEOUT_S = 2.0
_TOKEN_S = 21600


@dataclass
class Metadata:
    """Finds out by itself which cloud's it is. `base` is the link-local server that both clouds have."""

    base: str = "http://169.254.169.254"
    _cloud: str | None = None
    _headers: dict[str, str] = field(default_factory=dict)

    @property
    def cloud(self) -> str:
        """aws, gcp, or nowhere when no such server answers. Asked once."""
        if self._cloud is None:
            self._cloud = self._find()
        return self._cloud

    def get(self, path: str) -> str | None:
        """A value below the cloud's root; None when there is none (404). Raises httpx.HTTPError."""
        root = "/latest/" if self.cloud == AWS else "/computeMetadata/v1/"
        answer = httpx.get(f"{self.base}{root}{path}", headers=self._headers, timeout=TIMEOUT_S)
        if answer.status_code == 401 and self.cloud == AWS:  # the token ran out
            self._cloud = self._find()
            answer = httpx.get(f"{self.base}{root}{path}", headers=self._headers, timeout=TIMEOUT_S)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.text.strip()

    def preempted(self) -> str | None:
        """What the cloud says about taking this machine, None while it says nothing. Raises httpx.HTTPError."""
        if self.cloud == AWS:
            notice = self.get("meta-data/spot/instance-action")
            return None if notice is None else _aws_notice(notice)
        if self.cloud == GCP:
            return "preempted" if self.get("instance/preempted") == "TRUE" else None
        return None

    def _find(self) -> str:
        try:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            answer = httpx.put(f"{self.base}/latest/api/token", headers=wanted, timeout=TIMEOUT_S)
            if answer.status_code == 200 and "google" not in answer.headers.get("server", "").lower():
                self._headers = {"X-aws-ec2-metadata-token": answer.text.strip()}
                return AWS
            flavour = {"Metadata-Flavor": "Google"}
            answer = httpx.get(f"{self.base}/computeMetadata/v1/instance/id", headers=flavour, timeout=TIMEOUT_S)
            if answer.status_code == 200 and answer.headers.get("metadata-flavor") == "Google":
                self._headers = flavour
                return GCP
        except httpx.HTTPError:
            pass
        return NOWHERE


def of_machine(environment: Mapping[str, str]) -> Metadata:
    """The metadata server of this machine. Where SkyPilot says that it runs on something else (Slurm, another cloud),
    nobody is asked: the link-local address may be anybody's there. Kubernetes can be on top of either."""
    try:
        cloud = str(json.loads(environment.get("SKYPILOT_CLUSTER_INFO") or "{}").get("cloud") or "")
    except (ValueError, AttributeError):
        cloud = ""
    return Metadata() if cloud.lower() in ("", "aws", "gcp", "kubernetes") else Metadata(_cloud=NOWHERE)


def _aws_notice(text: str) -> str:
    """`terminate at 2026-11-30T08:22:00Z`, from the notice's JSON."""
    try:
        notice = json.loads(text)
        return f"{notice['action']} at {notice['time']}"
    except (ValueError, KeyError, TypeError):
        return text
