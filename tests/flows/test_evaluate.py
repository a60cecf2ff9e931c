"""Which versions an evaluation flow evaluates: the one asked for, and those that a lost event left out."""

from __future__ import annotations

from flows.evaluate import due


def test_only_the_version_asked_for_without_an_interval() -> None:
    assert due(47, None, {}) == [47]
    assert due(47, None, {47}) == []


def test_versions_that_were_missed_are_made_up_for_in_order() -> None:
    assert due(100, 20, {20, 60}) == [40, 80, 100]
    assert due(100, 20, {20, 40, 60, 80, 100}) == []
    assert due(47, 20, {20}) == [40, 47]
