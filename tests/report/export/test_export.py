"""Metrics for other tools: every step once, whatever was interrupted; read back with the tools' own readers."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import ControlRecord, GradientViews
from sprawl.board.store import MemoryStore, open_store
from sprawl.cli import cli
from sprawl.errors import SprawlError
from sprawl.report.data import RunData
from sprawl.report.export import board, parquet, tensorboard
from sprawl.report.export.board import export_to_board
from sprawl.report.export.rows import FLAT, curves, row
from sprawl.run import export as during_run
from sprawl.run.export import MetricsExport
from tests.report.plausible import make_evaluation, make_feed, make_run, make_run_record, make_step, put

RUN = "tiny-0001"


def on_board(store: MemoryStore) -> pyarrow.Table:
    return pyarrow.parquet.read_table(io.BytesIO(store.get(keys.parquet(RUN))))


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard's own reader sees a folder of event files."""
    seen = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    seen.Reload()
    return [(event.step, event.value) for event in seen.Scalars(tag)]


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    put(store, make_run(steps=45))
    return store


# -- rows


def test_a_row_has_every_number_of_a_step() -> None:
    gradient = GradientViews(cosine=0.2, norm_ratio=3.0, sign_agreement=0.6, corrected_cosine=0.5)
    feed, control = make_feed(3, 4, discarded=2), ControlRecord(level=2, lr_scale=0.5, fire=12, symptoms={"kl": "fast"})
    record = make_step(7, gradient=gradient, groups_sampled=20, probe_bytes=5, feed=feed, control=control)
    entry = row(record, make_evaluation(7, 0.5))
    assert list(entry)[: len(FLAT)] == list(FLAT)
    assert (entry["entropy/codec"], entry["bytes/boundary"], entry["bytes/delta_dense"]) == (1.3, 470_000, 4202006)
    assert (entry["gradient/cosine"], entry["gradient/dense_sign_agreement"]) == (0.2, None)
    assert (entry["evaluation/accuracy"], entry["seconds/train"], entry["islands/island-0"]) == (0.5, 1.0, 8)
    assert (entry["bytes/probe"], entry["bytes/boundary_padding"], entry["bytes/basis"]) == (5, 0, 0)
    known = {"format", "entropy", "kl", "mismatch", "mismatch_dense", "boundary", "delta", "sign", "gradient"}
    assert (entry["feed/discarded"], entry["control/level"], entry["control/lr_scale"]) == (2, 2, 0.5)
    assert entry["control/fire"] == 12
    assert "control/fire" not in curves(entry)
    known |= {"feed", "control", "seconds", "islands", "boundary_padding", "probe_bytes", "basis_bytes"}
    missing = set(type(record).model_fields) - known - set(entry)
    assert not missing, "a new field of StepRecord belongs in a row"
    assert all(name in FLAT or name.startswith(("seconds/", "islands/")) for name in entry)


def test_curves_leave_out_what_is_no_measurement() -> None:
    drawn = curves(row(make_step(7, applied=False, loss=math.nan)))
    assert not {"step", "version", "finished_at", "kind", "sign_agreement"} & set(drawn)
    assert drawn["applied"] == 0.0
    assert math.isnan(drawn["loss"])


# -- parquet


def test_the_file_on_the_board_has_each_step_once_however_often_it_is_written(store: MemoryStore) -> None:
    for head in (20, 20, 31, 45, 45):
        export_to_board(store, RUN, head, rest=head == 45)
        assert on_board(store).column("step").to_pylist() == list(range(1, head + 1))
    table, steps = on_board(store), Ledger(store, RUN).steps()
    assert table.column("reward").to_pylist() == [record.reward for record in steps]
    assert table.column("entropy/dense").to_pylist() == [record.entropy.dense for record in steps]
    assert table.column("kind").to_pylist() == [record.kind for record in steps]


def test_only_new_steps_are_read_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_parquet(store, RUN, 40)
    read: list[int] = []
    once = Ledger.step
    monkeypatch.setattr(Ledger, "step", lambda self, step: (read.append(step), once(self, step))[1])
    parquet.write_parquet(store, RUN, 45)
    assert read == [41, 42, 43, 44, 45]


def test_an_evaluation_that_comes_late_is_entered(store: MemoryStore) -> None:
    parquet.write_parquet(store, RUN, 30)
    Ledger(store, RUN).write_evaluation(make_evaluation(7, 0.25))
    assert parquet.write_parquet(store, RUN, 45).column("evaluation/accuracy").to_pylist()[6] == 0.25


@pytest.mark.parametrize("wrong", ["damaged", "another run", "a gap", "another release"])
def test_a_file_that_is_not_ours_is_made_anew(store: MemoryStore, wrong: str) -> None:
    whole = parquet.write_parquet(store, RUN, 30)
    other = {
        "damaged": b"PAR1 and then nothing",
        "another run": parquet.encode(whole.replace_schema_metadata({parquet.RUN: b"other"})),
        "a gap": parquet.encode(whole.slice(3)),
        "another release": parquet.encode(whole.drop_columns(["reward"])),
    }[wrong]
    store.put(keys.parquet(RUN), other)
    parquet.write_parquet(store, RUN, 45)
    assert on_board(store).column("step").to_pylist() == list(range(1, 46))
    assert None not in on_board(store).column("reward").to_pylist()


def test_a_phase_or_an_island_that_appears_later_is_a_column_from_then_on() -> None:
    store = MemoryStore()
    first = [make_step(i, islands={"a": 16}) for i in (1, 2)]
    later = make_step(3, islands={"b": 16}, seconds={"total": 1.0, "checkpoint": 0.5})
    put(store, RunData.of(make_run_record(), [*first, later]))
    parquet.write_parquet(store, RUN, 2)
    table = parquet.write_parquet(store, RUN, 3)
    assert table.column("islands/a").to_pylist() == [16, 16, None]
    assert table.column("islands/b").to_pylist() == [None, None, 16]
    assert table.column("seconds/checkpoint").to_pylist() == [None, None, 0.5]


def test_refused_steps_keep_their_not_a_numbers() -> None:
    store = MemoryStore()
    put(store, RunData.of(make_run_record(), [make_step(1, applied=False, grad_norm=math.inf, loss=math.nan)]))
    table = parquet.write_parquet(store, RUN, 1)
    assert table.column("grad_norm").to_pylist() == [math.inf]
    assert math.isnan(table.column("loss").to_pylist()[0])


# -- TensorBoard


def test_tensorboard_reads_each_step_once_after_every_interruption(tmp_path: Path) -> None:
    store, data = open_store(str(tmp_path), create=True), make_run(steps=45)
    put(store, data)
    folder = tmp_path / keys.tensorboard(RUN)
    for head in (19, 20, 43, 43):
        export_to_board(store, RUN, head, rest=False)
    assert [step for step, _ in scalars(folder, "reward")] == list(range(1, 41))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / f"{tensorboard.PREFIX}00000021-00000040.steps").unlink()  # killed before it was written
    export_to_board(store, RUN, 45, rest=True)
    found = scalars(folder, "reward")
    assert found == [(record.step, pytest.approx(record.reward)) for record in data.steps]
    assert {name: (folder / name).read_bytes() for name in before} == before  # the same bytes, not just the same steps
    accuracy = [(record.step, pytest.approx(record.accuracy)) for record in data.evaluations]
    assert scalars(folder, "evaluation/accuracy") == accuracy
    assert len(scalars(folder, "entropy/dense")) == 9  # sparse: only where it was probed


def test_a_short_last_file_gives_way_to_a_longer_one(tmp_path: Path) -> None:
    rows = {step: row(make_step(step)) for step in range(1, 61)}
    target = open_store(str(tmp_path), create=True)

    def export(head: int) -> list[str]:
        return tensorboard.sync(target, "", head, lambda a, b: [rows[i] for i in range(a, b + 1)], [], rest=True)

    assert len(export(47)) == 3
    assert export(47) == []
    assert [step for step, _ in scalars(tmp_path, "reward")] == list(range(1, 48))
    assert export(60) == [f"{tensorboard.PREFIX}00000041-00000060.steps"]
    assert [step for step, _ in scalars(tmp_path, "reward")] == list(range(1, 61))


# -- during a run


def test_a_run_exports_every_twenty_steps_and_at_its_end(store: MemoryStore) -> None:
    export = MetricsExport(store, RUN)
    for step in range(1, 46):
        export.step(step)
    export.finish(45)
    assert on_board(store).num_rows == 45
    names = store.children(keys.tensorboard(RUN))
    assert sum(name.endswith(".steps") for name in names) == 3


def test_a_board_that_refuses_is_complained_about_once_and_fails_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str, data: bytes) -> None:
        raise OSError("disk full")

    said: list[str] = []
    monkeypatch.setattr(store, "put", refuse)
    monkeypatch.setattr(during_run.log, "warning", lambda text, *values: said.append(text % values))
    export = MetricsExport(store, RUN)
    export.finish(45)
    export.finish(45)
    (complaint,) = said
    assert complaint.startswith("metrics for other tools not written (disk full)")


def test_without_the_extra_a_run_writes_nothing_and_the_command_says_what_to_install(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "installed", lambda: False)
    MetricsExport(store, RUN).finish(45)
    assert not store.exists(keys.parquet(RUN))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(SprawlError, match=r"pip install 'sprawl-rl\[metrics\]'"):
        parquet.arrow()


# -- the command


def test_the_command_writes_files_for_notebooks_and_tensorboard(tmp_path: Path) -> None:
    put(open_store(str(tmp_path / "runs"), create=True), make_run(steps=25))
    out = tmp_path / "out" / "steps.parquet"
    arguments = ["metrics", "export", RUN, "--board", str(tmp_path / "runs")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sprawl.board.reader.VersionReader.head", lambda self: 25)  # the ledger alone has no versions
        result = CliRunner().invoke(cli, [*arguments, "--parquet", str(out), "--tensorboard", str(tmp_path / "tb")])
        assert result.exit_code == 0, result.output
        assert "25 steps" in result.output
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert pyarrow.parquet.read_table(out).num_rows == 25
    assert len(scalars(tmp_path / "tb" / RUN, "reward")) == 25
    assert (tmp_path / "runs" / keys.parquet(RUN)).exists()
