"""`sprawl board pull`, `merge`: versions on this machine's disk, and short cuts for late joiners."""

from __future__ import annotations

import click

from sprawl.commands.options import signing_key, size, trusted_keys


@click.command()
@click.argument("url", metavar="BOARD")
@click.argument("run_id")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--version", type=click.IntRange(min=0), help="Which version.  [default: the newest]")
@trusted_keys
def pull(url: str, run_id: str, directory: str, version: int | None, trusted: str | None) -> None:
    """Fetch a version as a Hugging Face checkpoint, or bring DIRECTORY to it.

    What DIRECTORY already holds is patched in place, by the cheapest way there is: deltas, a merged delta or a
    keyframe. Killed at any moment, the same command goes on. Every byte is checked.

    \b
    Examples:
      sprawl board pull runs latest ./model
      sprawl board pull s3://bucket/runs tiny-0412 ./model --version 40
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.local_copy import pull as bring
    from sprawl.board.local_files import fetch_files
    from sprawl.board.reader import VersionReader
    from sprawl.board.signing import trust_from
    from sprawl.board.store import open_store

    store = open_store(url)
    run_id = resolve_run(store, run_id) if run_id == "latest" else run_id
    reader = VersionReader(store, run_id, trust=trust_from(trusted))
    version = reader.require_head() if version is None else version
    copy, manifest, discarded = bring(reader, directory, version)
    fetch_files(reader, copy.directory, manifest)
    if discarded is not None:
        click.echo(f"thrown away: {discarded}", err=True)
    click.echo(f"{directory}: version {version} of {run_id}, root digest {manifest.root_digest}")
    click.echo(f"{size(reader.bytes_read)} read of {size(manifest.full_bytes)}")


@click.command()
@click.argument("url", metavar="BOARD")
@click.argument("run_id")
@click.option("--from", "base", type=click.IntRange(min=0), default=0, show_default=True, help="Where it starts.")
@click.option("--to", "version", type=click.IntRange(min=1), help="Where it leads.  [default: the newest version]")
@signing_key
@trusted_keys
def merge(url: str, run_id: str, base: int, version: int | None, key: str | None, trusted: str | None) -> None:
    """Put several deltas of a run on the board as one, for islands that join late.

    An island that holds version FROM (the base model, by default: it may be part of its image) then fetches one object
    instead of a chain or a keyframe. Readers find it by themselves. Needs memory for one state.

    \b
    Examples:
      sprawl board merge runs latest
      sprawl board merge s3://bucket/runs tiny-0412 --from 20 --to 60
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.merged import merge as compose
    from sprawl.board.reader import VersionReader
    from sprawl.board.signing import signer_from, trust_from
    from sprawl.board.store import open_store

    store = open_store(url)
    run_id = resolve_run(store, run_id) if run_id == "latest" else run_id
    reader = VersionReader(store, run_id, trust=trust_from(trusted))
    version = reader.require_head() if version is None else version
    record = compose(reader, base, version, signer_from(key))
    click.echo(
        f"{run_id}: version {base} to {version} in {size(record.bytes)}, the chain has {size(record.chain_bytes)}, "
        f"the state {size(reader.require(version).full_bytes)}"
    )
