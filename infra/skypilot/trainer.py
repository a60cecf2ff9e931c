"""What `sky/scripts/trainer.sh` runs on every node: `fabric` checks the network, `run` starts this node's processes.

Reads the variables of sky/trainer.yaml and SkyPilot's own; replaces itself by what it starts, so that signals and exit
codes are those of the trainer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import click

from infra.skypilot.nodes import interface_of, probe_environment, processes_per_node, read_nodes, torchrun_argv
from sprawl.board.ledger import find_run
from sprawl.board.store import open_store
from sprawl.config import load_config, parse_config
from sprawl.errors import SprawlError


def run_command(environment: Mapping[str, str], driver: Sequence[str] = ()) -> list[str]:
    """The command that starts or resumes the run on this node. Raises SprawlError for a wrong config or board.

    `driver`: what drives the run in the place of `sprawl run`, for example the command of a Prefect flow run. The first
    process of the first node becomes it; all others serve its trainer.
    """
    board = required(environment, "SPRAWL_BOARD")
    run_id = environment.get("SPRAWL_RUN_ID", "")
    source = environment.get("SPRAWL_CONFIG") or "configs/tiny.yaml"
    overrides = environment.get("SPRAWL_SET", "").split()
    # A recovered job finds its own run: it goes on with that run's config, whatever the variables say now.
    record = find_run(open_store(board, create=True), run_id) if run_id else None
    if record is not None:
        config = parse_config(record.config, f"run.json of {run_id}")
        which = ["--resume", run_id]
    else:
        config = load_config(source, overrides)
        which = [*(word for override in overrides for word in ("--set", override))]
        which += ["--run-id", run_id] if run_id else []
    arguments = ["sprawl.cli", "run", source, *which, "--board", board, "--runner", "plain", "--fleet", "none"]
    nodes = read_nodes(environment)
    per_node = processes_per_node(config.policy.processes, nodes)
    if driver:
        arguments = ["infra.skypilot.rank", *driver]
    if config.policy.processes == 1:
        return [sys.executable, "-m", *arguments]
    return torchrun_argv(nodes, per_node, arguments)


def required(environment: Mapping[str, str], name: str) -> str:
    """Raises SprawlError when the variable is not set."""
    if not environment.get(name):
        raise SprawlError(f"{name} is not set", f"sky launch ... --env {name}=...")
    return environment[name]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("what", type=click.Choice(["fabric", "run"]))
@click.argument("driver", nargs=-1, type=click.UNPROCESSED)
def main(what: str, driver: tuple[str, ...]) -> None:
    """Check the network between the nodes, or start this node's trainer processes; DRIVER drives them."""
    nodes = read_nodes(os.environ)
    if (device := interface_of(nodes.ip)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
    if what == "run":
        argv = run_command(os.environ, driver)
        os.execv(argv[0], argv)
    mode = os.environ.get("SPRAWL_FABRIC") or "require"
    if mode not in ("require", "allow-tcp", "off"):
        raise SprawlError(f"SPRAWL_FABRIC={mode} is not known", "require, allow-tcp or off")
    if mode != "off":
        os.environ.update(probe_environment(nodes))
        os.execv(sys.executable, [sys.executable, "-m", "sprawl.cluster.probe", "--mode", mode])


if __name__ == "__main__":
    try:
        main.main(standalone_mode=False)
    except SprawlError as error:
        click.echo(f"trainer: {error}", err=True)
        sys.exit(2)
