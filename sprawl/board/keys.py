"""Keys of a run on the board, relative to `<board>/`. The only place that spells them."""

from __future__ import annotations

LATEST = "latest.json"


MIRRORS = ".mirrors/"  # of the board, not of a run; the dot keeps it out of listings of runs


def mirror(region: str, mirror_id: str) -> str:
    return f"{MIRRORS}{region}/{mirror_id}.json"


def run(run_id: str) -> str:
    return f"{run_id}/run.json"


def manifest(run_id: str, version: int) -> str:
    return f"{run_id}/manifests/{version:08d}.json"


def manifests(run_id: str) -> str:
    return f"{run_id}/manifests/"


def blob(run_id: str, version: int, digest: str) -> str:
    return f"{run_id}/blobs/{version}/{digest}"


def blobs(run_id: str, version: int) -> str:
    return f"{run_id}/blobs/{version}/"


def blob_root(run_id: str) -> str:
    return f"{run_id}/blobs/"


def merged(run_id: str, base: int, version: int) -> str:
    """Commit record of a merged delta: what turns version `base` into `version` in one step."""
    return f"{run_id}/merged/{base:08d}-{version:08d}.json"


def merged_root(run_id: str) -> str:
    return f"{run_id}/merged/"


def merged_blob(run_id: str, base: int, version: int, digest: str) -> str:
    return f"{run_id}/merged/{base:08d}-{version:08d}/{digest}"


def latest(run_id: str) -> str:
    return f"{run_id}/{LATEST}"


def islands(run_id: str) -> str:
    return f"{run_id}/islands/"


def island(run_id: str, island_id: str) -> str:
    return f"{run_id}/islands/{island_id}.json"


def fleet_record(run_id: str, number: int) -> str:
    """What the fleet of a run is meant to be, as of its `number`-th decision: immutable, the highest one counts."""
    return f"{run_id}/fleet/{number:08d}.json"


def fleet_records(run_id: str) -> str:
    return f"{run_id}/fleet/"


def rollouts(run_id: str, step: int) -> str:
    """Trajectories that step `step` trains on (safetensors)."""
    return f"{run_id}/rollouts/{step:08d}.safetensors"


def step(run_id: str, step: int) -> str:
    """Ledger record of optimizer step `step`."""
    return f"{run_id}/metrics/steps/{step:08d}.json"


def steps(run_id: str) -> str:
    return f"{run_id}/metrics/steps/"


def evaluation(run_id: str, version: int) -> str:
    return f"{run_id}/metrics/evaluations/{version:08d}.json"


def evaluations(run_id: str) -> str:
    return f"{run_id}/metrics/evaluations/"


def parquet(run_id: str) -> str:
    """The steps as one parquet file: derived from the ledger, overwritten as the run goes on."""
    return f"{run_id}/metrics/steps.parquet"


def tensorboard(run_id: str) -> str:
    """TensorBoard event files: derived from the ledger, each of a fixed range of steps."""
    return f"{run_id}/metrics/tensorboard/"


def event(run_id: str, name: str) -> str:
    """One-off facts of a run (start, resume, violation): immutable, named by the writer."""
    return f"{run_id}/metrics/events/{name}.json"


def events(run_id: str) -> str:
    return f"{run_id}/metrics/events/"


def promotion(run_id: str, version: int) -> str:
    """What a person decided about a version."""
    return f"{run_id}/promotions/{version:08d}.json"


def promotions(run_id: str) -> str:
    return f"{run_id}/promotions/"


def fire(run_id: str, step: int) -> str:
    """Commit record of the anchor fire due at optimizer step `step`."""
    return f"{run_id}/anchor/fires/{step:08d}.json"


def fires(run_id: str) -> str:
    return f"{run_id}/anchor/fires/"


def fire_request(run_id: str, step: int) -> str:
    """A fire asked for between the regular ones."""
    return f"{run_id}/anchor/requests/{step:08d}.json"


def fire_requests(run_id: str) -> str:
    return f"{run_id}/anchor/requests/"


def sign_map(run_id: str, step: int, digest: str) -> str:
    return f"{run_id}/anchor/signs/{step:08d}-{digest}"


def sign_maps(run_id: str) -> str:
    return f"{run_id}/anchor/signs/"


def bases(run_id: str, step: int, digest: str) -> str:
    """Boundary bases of the subspace codec after the fire at `step` (fp32 safetensors)."""
    return f"{run_id}/anchor/bases/{step:08d}-{digest}"


def all_bases(run_id: str) -> str:
    return f"{run_id}/anchor/bases/"


def anchor_state(run_id: str, step: int, digest: str | None = None) -> str:
    """The anchor's own durable moving average M after the fire at `step` (fp32 safetensors). With `digest` the name
    says what is in it, so that no anchor can replace what another one has committed; without, the name that older
    releases used."""
    ending = "" if digest is None else f"-{digest}"
    return f"{run_id}/anchor/state/{step:08d}{ending}.safetensors"


def anchor_states(run_id: str) -> str:
    return f"{run_id}/anchor/state/"


def checkpoint(run_id: str, step: int) -> str:
    """Commit record of the checkpoint written after optimizer step `step`."""
    return f"{run_id}/checkpoints/{step:08d}.json"


def checkpoints(run_id: str) -> str:
    return f"{run_id}/checkpoints/"


def checkpoint_blob(run_id: str, step: int, name: str, digest: str | None = None) -> str:
    """With `digest` the name says what is in it, so that no writer can replace what another one has committed;
    without, the name that older releases used."""
    ending = "" if digest is None else f".{digest}"
    return f"{checkpoint_blobs(run_id, step)}{name}{ending}.safetensors"


def checkpoint_blobs(run_id: str, step: int) -> str:
    return f"{run_id}/checkpoints/{step:08d}/"


def epoch(run_id: str, epoch: int) -> str:
    """Fencing: the highest epoch is the one trainer that may write."""
    return f"{run_id}/epochs/{epoch:06d}.json"


def epochs(run_id: str) -> str:
    return f"{run_id}/epochs/"
