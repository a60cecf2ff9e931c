"""`sprawl board keygen`, `import`, `export`: keys, and boards from and for other projects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sprawl.commands.options import signing_key, size, trusted_keys

if TYPE_CHECKING:
    from sprawl.interop.layout import Encoding


@click.command()
@click.argument("path", type=click.Path(dir_okay=False))
@click.option("--comment", default="", help="Whose key it is: written behind the public key.")
def keygen(path: str, comment: str) -> None:
    """Make an ed25519 key pair: PATH signs versions, PATH.pub lets readers check them.

    Give the trainer SPRAWL_SIGNING_KEY=PATH. Readers take a file of public keys, one a line: --trusted or
    SPRAWL_TRUSTED_KEYS; they refuse whatever none of these keys signed.

    \b
    Examples:
      sprawl board keygen trainer.key --comment "trainer, cluster A"
      cat *.pub > trusted.keys
      sprawl board verify runs latest --trusted trusted.keys
    """
    from sprawl.board.signing import generate

    public, key_id = generate(path, comment)
    click.echo(f"key {key_id}: private {path}, public {public}")


@click.command("import")
@click.argument("source")
@click.argument("url", metavar="BOARD")
@click.option("--run-id", help="Run to create or continue.  [default: the one the layout names]")
@click.option("--base", type=click.Path(exists=True, path_type=Path), help="Checkpoint the trainer started from.")
@click.option("--keyframe-every", type=click.IntRange(min=1), default=20, show_default=True)
@signing_key
def import_command(
    source: str, url: str, run_id: str | None, base: Path | None, keyframe_every: int, key: str | None
) -> None:
    """Publish the versions of a slime, miles or stitch disk layout on a board.

    SOURCE is the folder (or fsspec URL) with the file `latest`. Versions keep their numbers. XOR and overwrite deltas,
    zstd, and the checksums xxh3-128, blake3 and adler32 are read; every version is verified. Run it again to catch up.

    \b
    Examples:
      sprawl board import /shared/updates runs --base ./Qwen2.5-1.5B
      sprawl board import s3://bucket/updates s3://bucket/runs --run-id slime-7
    """
    from sprawl.board.signing import signer_from
    from sprawl.board.store import open_store
    from sprawl.interop.convert import import_layout

    board = open_store(url, create=True, probe=True)
    result = import_layout(
        open_store(source),
        board,
        run_id=run_id,
        base=base,
        keyframe_every=keyframe_every,
        signer=signer_from(key),
        progress=_tell,
    )
    click.echo(f"{result.run_id}: {len(result.versions)} versions imported, {size(result.bytes)} on board {board.url}")


@click.command("export")
@click.argument("url", metavar="BOARD")
@click.argument("run_id")
@click.argument("target")
@click.option("--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", show_default=True)
@click.option("--checksum", type=click.Choice(["xxh3-128", "blake3", "adler32"]), default="xxh3-128", show_default=True)
@click.option("--from", "first", type=click.IntRange(min=0), help="First version, in full.  [default: the oldest]")
@click.option("--to", "last", type=click.IntRange(min=0), help="Last version.  [default: the newest]")
@click.option("--full-every", type=click.IntRange(min=1), help="Every how many versions one is full.  [default: none]")
@click.option("--folder", help="Folder of the versions in TARGET.  [default: the run id; `updates` is common too]")
@trusted_keys
def export_command(
    url: str,
    run_id: str,
    target: str,
    encoding: Encoding,
    checksum: str,
    first: int | None,
    last: int | None,
    full_every: int | None,
    folder: str | None,
    trusted: str | None,
) -> None:
    """Write a run's versions as a slime, miles or stitch disk layout.

    TARGET is a folder or fsspec URL. Deltas are as large as that format makes them; the first version, and those whose
    tensors change their form, are written in full. Run it again to go on after the version that `latest` names.

    \b
    Examples:
      sprawl board export runs latest /shared/updates
      sprawl board export runs tiny-0412 s3://bucket/updates --encoding overwrite --checksum adler32
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.reader import VersionReader
    from sprawl.board.signing import trust_from
    from sprawl.board.store import open_store
    from sprawl.interop.convert import export_run

    store = open_store(url)
    run_id = resolve_run(store, run_id) if run_id == "latest" else run_id
    layout = open_store(target, create=True)
    result = export_run(
        VersionReader(store, run_id, trust=trust_from(trusted)),
        layout,
        encoding=encoding,
        checksum=checksum,
        first=first,
        last=last,
        full_every=full_every,
        folder=folder,
        progress=_tell,
    )
    click.echo(f"{result.run_id}: {len(result.versions)} versions exported, {size(result.bytes)} at {layout.url}")


def _tell(version: int, count: int) -> None:
    click.echo(f"version {version}: {size(count)}", err=True)
