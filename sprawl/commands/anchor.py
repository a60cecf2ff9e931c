"""`sprawl anchor`: the anchor circuit of a run, as its own process."""

from __future__ import annotations

import os

import click

from sprawl.commands.options import FiniteRange, board_option


@click.command()
@click.argument("run", required=False)
@board_option
@click.option("--run-id", help="Run to serve, as RUN.")
@click.option("--wait", "wait_s", type=FiniteRange(min=0), default=0.0, help="Seconds the run may take to appear.")
@click.option("--exit-with-parent", is_flag=True, help="End when the process that started this one is gone.")
def anchor(run: str | None, board: str, run_id: str | None, wait_s: float, exit_with_parent: bool) -> None:
    """Serve the anchor circuit of RUN (default: latest, the newest run on the board).

    Every c optimizer steps it replays a batch densely at weights K steps old (or their forecast), folds the gradient
    into M and publishes sign(M), one bit a parameter. It meets the trainer only at the board, so it can run on
    another machine. A killed anchor continues where it was; it ends when the run needs no further fire.

    \b
    Example:
      sprawl anchor tiny-20260801-101500 --board s3://bucket/prefix
    """
    if run is not None and run_id is not None and run != run_id:
        raise click.UsageError(f"RUN is {run}, --run-id is {run_id}: give one of them")
    import torch

    from sprawl.anchor.service import AnchorService, serve
    from sprawl.board.ledger import wait_for_run
    from sprawl.board.store import open_store

    parent = os.getppid()
    service = AnchorService(board, wait_for_run(open_store(board), run or run_id or "latest", wait_s))
    torch.set_num_threads(service.config.threads.anchor)
    click.echo(f"anchor of {service.run_id}: every {service.config.anchor.every} steps, K={service.config.anchor.lag}")

    def fire(step: int):
        record = service.fire(step)
        click.echo(
            f"fire {step}: weights of steps {record.checkpoints}, rollouts of step {record.replayed_step}, "
            f"gradient norm {record.grad_norm:.3g}, {record.seconds:.1f} s"
        )
        return record

    serve(service, fire, should_stop=lambda: exit_with_parent and os.getppid() != parent)
