"""The trainer's count of bytes against the kernel's, and the benchmark that prints both."""

from __future__ import annotations

import json

import pytest

from benchmarks import links, train

linked = pytest.mark.skipif(links.missing() is not None, reason=f"no links here: {links.missing()}")


@linked
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_counted_payloads_are_what_the_kernel_sent() -> None:
    """Three stages in network namespaces. Everything that a step sends is counted by the kernel at their devices:
    payloads, TCP and IP headers, acknowledgements, and what the processes settle (norms, a few hundred numbers)."""
    results = {result.codec: result for result in train.measure(3, [None], 1)}
    for result in results.values():
        assert result.payload_bytes <= result.kernel_bytes <= 1.1 * result.payload_bytes + 150_000, result
        assert result.padding_bytes == 0  # prompts and answers of one length
    ratio = results["prf"].payload_bytes / results["dense"].payload_bytes
    assert ratio == 6 / 128
    assert results["quantized-prf"].payload_bytes == results["prf"].payload_bytes
    # The headers and settlements do not depend on the codec, so the kernel's difference is the payloads' difference.
    saved = results["dense"].kernel_bytes - results["prf"].kernel_bytes
    assert saved == pytest.approx(results["dense"].payload_bytes - results["prf"].payload_bytes, rel=0.1)


def test_a_machine_without_links_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "missing", lambda: "network namespaces need root")
    assert train.main(["--quick"]) == 0
    assert "skipped: network namespaces need root" in capsys.readouterr().err


def test_results_print_as_a_table_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        train.Measured("dense", 80.0, 4, 2.0, 1_000_000, 0, 1_100_000, 0.11, 0.5),
        train.Measured("prf", 80.0, 4, 0.5, 50_000, 10, 60_000, 0.006, 0.5),
    ]
    monkeypatch.setattr(train, "missing", lambda: None)
    monkeypatch.setattr(train, "measure", lambda *_: results)
    assert train.main(["--quick"]) == 0
    assert "| 80 Mbit/s | prf | 0.50 | 4.0 x | 1.0 x | 0.01 s | 0.05 MB | 0.06 MB | +20.0% |" in capsys.readouterr().out
    assert train.main(["--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][1]["codec"] == "prf"
