"""Who is asked about this machine, and what becomes of odd answers: against a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from infra.skypilot.metadata import AWS, GCP, NOWHERE, of_machine

INFO = "SKYPILOT_CLUSTER_INFO"


class LinkLocal:
    """What answers at the link-local address: `answer(method, path, headers)` gives status, headers and text."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[str, str, dict[str, str]], tuple[int, dict[str, str], str]] = aws()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(f"{self.command} {self.path}")
                sent = {name.lower(): value for name, value in self.headers.items()}
                status, headers, text = outer.answer(self.command, self.path, sent)
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_PUT = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def aws(
    values: dict[str, str] | None = None, tokens: tuple[str, ...] = ("t1",)
) -> Callable[[str, str, dict[str, str]], tuple[int, dict[str, str], str]]:
    """AWS with IMDSv2; every new token makes the one before invalid."""
    left = list(tokens)

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
        if method == "PUT":
            assert headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
            return 200, {}, left[0] if len(left) == 1 else left.pop(0)
        if headers.get("x-aws-ec2-metadata-token") != left[0]:
            return 401, {}, ""
        text = (values or {}).get(path)
        return (404, {}, "") if text is None else (200, {}, text)

    return answer


def gcp(preempted: str) -> Callable[[str, str, dict[str, str]], tuple[int, dict[str, str], str]]:
    """GCP, whose server answers the PUT for a token of AWS too."""

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
        mine = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM by Google"}
        if method == "PUT":
            return 200, mine, ""
        assert headers["metadata-flavor"] == "Google"
        return 200, mine, preempted if path.endswith("/preempted") else "7"

    return answer


@pytest.fixture
def link_local() -> Iterator[LinkLocal]:
    answering = LinkLocal()
    yield answering
    answering.server.shutdown()
    answering.server.server_close()


@pytest.mark.parametrize(
    ("info", "asked"),
    [
        (None, True),
        ("", True),
        ("{}", True),
        ('{"cloud": null}', True),
        ('{"cloud": "AWS"}', True),
        ('{"cloud": "GCP"}', True),
        ('{"cloud": "Kubernetes"}', True),
        ("not json", True),
        ("[1]", True),
        ("null", True),
        ('{"cloud": "Slurm"}', False),
        ('{"cloud": "Lambda"}', False),
        ('{"cloud": 3}', False),
    ],
)
def test_only_where_the_address_can_be_a_clouds_is_it_asked(
    info: str | None, asked: bool, link_local: LinkLocal
) -> None:
    metadata = of_machine({} if info is None else {INFO: info})
    assert metadata.base == "http://169.254.169.254"
    metadata.base = link_local.url
    assert metadata.cloud == (AWS if asked else NOWHERE)
    assert metadata.preempted() is None
    assert bool(link_local.asked) == asked


def test_the_cloud_is_found_once(link_local: LinkLocal) -> None:
    link_local.answer = gcp("FALSE")
    metadata = of_machine({INFO: json.dumps({"cloud": "gcp"})})
    metadata.base = link_local.url
    assert [metadata.cloud, metadata.cloud] == [GCP, GCP]
    assert link_local.asked == ["PUT /latest/api/token", "GET /computeMetadata/v1/instance/id"]
    assert metadata.preempted() is None
    link_local.answer = gcp("TRUE")
    assert metadata.preempted() == "preempted"


def test_a_token_that_ran_out_is_renewed(link_local: LinkLocal) -> None:
    notice = {"/latest/meta-data/spot/instance-action": "no json at all"}
    link_local.answer = aws(notice, tokens=("old", "older", "new"))
    metadata = of_machine({})
    metadata.base = link_local.url
    assert metadata.cloud == AWS
    link_local.answer = aws(notice, tokens=("new",))
    assert metadata.preempted() == "no json at all"
    assert link_local.asked.count("PUT /latest/api/token") == 2


def test_a_server_that_fails_is_not_a_machine_that_is_safe(link_local: LinkLocal) -> None:
    metadata = of_machine({})
    metadata.base = link_local.url
    assert metadata.cloud == AWS
    link_local.answer = lambda method, path, headers: (500, {}, "")
    with pytest.raises(httpx.HTTPStatusError):
        metadata.preempted()


@pytest.mark.parametrize("status", [403, 404, 500])
def test_somebody_elses_server_is_no_cloud(status: int, link_local: LinkLocal) -> None:
    link_local.answer = lambda method, path, headers: (status, {}, "")
    metadata = of_machine({})
    metadata.base = link_local.url
    assert metadata.cloud == NOWHERE
    assert metadata.preempted() is None
