"""`sprawl island` and `sprawl sidecar`: serve the policy versions of a run over HTTP."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

from sprawl.commands.options import FiniteRange, board_option

EXIT_S = 10.0

_OPTIONS = [
    board_option,
    click.option("--run-id", default=None, help="Run to serve; default: the newest on the board."),
    click.option("--island-id", default=None, help="Name in responses and on the board; default: a random one."),
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="Address to listen on. Outside loopback SPRAWL_TOKEN must be set; if set, requests need it."),
    click.option("--insecure", is_flag=True,
                 help="Listen outside loopback without a token: anyone who reaches the port can use the model."),
    click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True,
                 help="Port to listen on; 0 takes a free one and prints it."),
    click.option("--advertise-url", default=None,
                 help="URL others reach it at, where that is not http://HOST:PORT (containers, proxies)."),
    click.option("--follow", type=click.Choice(["demand", "eager"]), default=None,
                 help="demand: advance when a request needs it; eager: as soon as there is one. Default: the run's."),
    click.option("--commit-mode", type=click.Choice(["in_place", "quiesce"]), default="in_place", show_default=True,
                 help="in_place: requests in flight continue with the new weights; quiesce: they finish first."),
    click.option("--max-wait", "max_wait_s", type=FiniteRange(min=0), default=30.0, show_default=True,
                 help="Seconds a request may wait for its version before it gets a 409."),
    click.option("--max-requests", type=click.IntRange(min=1), default=256, show_default=True,
                 help="Requests held at once, waiting ones included; more get a 503 with Retry-After."),
    click.option("--engine", default=None,
                 help="torch: in this process; vllm, sglang: a server of its own. Default: the run's rollout.engine."),
    click.option("--engine-args", default="", metavar="ARGS",
                 help='More of the engine\'s own command line, for example "--tensor-parallel-size 2".'),
    click.option("--cache", type=click.Path(file_okay=False), default=None, envvar="SPRAWL_CACHE", show_envvar=True,
                 help="Directory where the island keeps the checkpoint it serves and finds it after a restart, below "
                      "its --island-id if it has one; needs room for twice the checkpoint. Default: in memory; for an "
                      "engine that reads files .sprawl/islands/RUN/ID with --island-id, else a temporary one."),
    click.option("--follow-latest-run", is_flag=True,
                 help="Go over to a newer run on the board as soon as it has a version."),
    click.option("--threads", type=click.IntRange(min=1), default=None,
                 help="Threads of the engine. Default: the run's threads.island."),
    click.option("--compute-dtype", type=click.Choice(["float32", "bfloat16"]), default=None,
                 help="Matmul dtype. Default: the run's rollout.compute_dtype."),
    click.option("--tls-cert", default=None, metavar="FILE", help="Certificate (PEM): serve https."),
    click.option("--tls-key", default=None, metavar="FILE", help="Its private key (PEM)."),
    click.option("--region", default=None, envvar="SPRAWL_REGION", show_envvar=True,
                 help="Read versions through the mirrors of this region (sprawl mirror); default: from the board."),
    click.option("--wait-for-run", "wait_for_run_s", type=FiniteRange(min=0), default=0.0, metavar="SECONDS",
                 help="How long the run may take to appear on the board. Default: it has to be there."),
    click.option("--obey-fleet", is_flag=True,
                 help="Drain and end when the run's fleet (sprawl fleet) needs this island no more, or is closed."),
    click.option("--exit-when-idle", type=FiniteRange(min=1), default=None, metavar="SECONDS",
                 help="Drain and end after so long without a request or a new version."),
    click.option("--exit-with-parent", is_flag=True, help="Stop when the process that started this one ends."),
]  # fmt: skip


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_options
def island(**options: Any) -> None:
    """Serve a run's versions and register in its fleet.

    The trainer finds the island by its heartbeat on the board, sends it prompts, and every version that is published
    is applied here, checked bit for bit against the digest in its manifest. SIGTERM drains, then exits with 0; an
    island that cannot vouch for its weights exits with 3.

    \b
    One more island for the newest run under ./runs:
      sprawl island
    On another machine, against a board in object storage:
      SPRAWL_TOKEN=... sprawl island --board s3://bucket/runs --run-id RUN --host 10.0.0.7 --port 8300
    With vLLM as its engine:
      sprawl island --engine vllm --engine-args "--max-num-seqs 64"
    What it serves:
      sprawl sidecar --help
    """
    _run(options, registered=True)


@click.command()
@_options
def sidecar(**options: Any) -> None:
    """Serve a run's versions over HTTP without joining its fleet.

    OpenAI-compatible, and version-aware: a request may say which versions it accepts and is told which version
    generated every token.

    \b
    Serve the newest run under ./runs on port 8300, then ask:
      sprawl sidecar --port 8300
      curl -s localhost:8300/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "12+34=", "max_tokens": 8, "temperature": 0}'
    Ask for a version or newer (waits up to --max-wait, else 409):
      curl -s localhost:8300/generate -H 'Content-Type: application/json' \\
        -d '{"text": "12+34=", "sampling_params": {"n": 4}, "weight_version": {"min_version": 10}}'
    The same as a stream, each token with its version:
      curl -sN localhost:8300/generate -H 'Content-Type: application/json' \\
        -d '{"text": "12+34=", "stream": true}'
    With the openai package:
      OpenAI(base_url="http://localhost:8300/v1", api_key=TOKEN).completions.create(
          model="any", prompt="12+34=", extra_body={"weight_version": {"exact_version": 10}})
    Look inside:
      curl -s localhost:8300/server_info
      curl -s localhost:8300/metrics
    For other machines (requests then need `Authorization: Bearer $SPRAWL_TOKEN`):
      SPRAWL_TOKEN=... sprawl sidecar --host 10.0.0.7 --port 8300 --tls-cert cert.pem --tls-key key.pem
    """
    _run(options, registered=False)


def _run(options: dict[str, Any], *, registered: bool) -> None:
    from sprawl.rollout.listen import IslandSettings, bind

    parent = os.getppid()
    settings = IslandSettings(registered=registered, token=os.environ.get("SPRAWL_TOKEN") or None, **options)
    listener = bind(settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # Before torch is imported: idle OpenMP threads that spin would starve the other processes of this machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from sprawl.rollout.island import run_island

    sys.exit(run_island(settings, listener, parent, click.echo, _leave_soon))


def _leave_soon(code: int) -> None:
    """End this process in a while, whatever its threads are doing: a download of many gigabytes would hold a machine
    that is about to be taken. What it leaves half done is made for that."""
    end = threading.Timer(EXIT_S, os._exit, (code,))
    end.daemon = True
    end.start()
