"""The stream's bookkeeping, played through by hand and by chance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.rollout.feed import FeedState
from sprawl.run.pool import Choice, Pool, PoolLimits


def pool(wanted: int = 2, max_staleness: int = 1, in_flight: int = 4, drops: int = 0, steps: int = 100) -> Pool[int]:
    return Pool(PoolLimits(wanted, max_staleness, in_flight, drops, steps))


def ask_all(of: Pool[int]) -> list[int]:
    asked = []
    while (one := of.ask(0.0)) is not None:
        asked.append(one.number)
    return asked


def finish(of: Pool[int], *numbers: int, oldest: int = 0, informative: bool = True) -> None:
    for number in numbers:
        of.finish(number, number, oldest=oldest, informative=informative, score=0.5, now=1.0)


def take(of: Pool[int]) -> list[int]:
    choice = of.choose(3.0)
    assert choice is not None
    of.commit(choice)
    return list(choice.feed.prompts)


def test_what_is_sampled_while_a_step_trains_is_what_the_next_steps_can_use() -> None:
    for max_staleness in (1, 3):
        stream = pool(max_staleness=max_staleness, in_flight=2 * (1 + max_staleness))
        asked = ask_all(stream)
        assert len(asked) == 2 * max_staleness  # as long as the trainer does not wait
        finish(stream, *asked)
        assert take(stream) == asked[:2]
        assert ask_all(stream) == [asked[-1] + 1, asked[-1] + 2]
        assert stream.choose(3.0) is not None or max_staleness == 1


def test_a_waiting_trainer_has_spare_groups_asked_for_up_to_the_bound() -> None:
    stream = pool(in_flight=5)
    assert ask_all(stream) == [0, 1]
    assert stream.choose(0.0) is None
    assert ask_all(stream) == [2, 3, 4]
    finish(stream, 1, 3)
    assert take(stream) == [1, 3]
    assert ask_all(stream) == []  # three in flight, and two are enough for the next step


def test_stragglers_are_no_supply() -> None:
    stream = pool(in_flight=5)
    stream.choose(0.0)
    ask_all(stream)
    finish(stream, 3, 4)
    assert take(stream) == [3, 4]
    stream.published(1)
    assert ask_all(stream) == []  # 0, 1 and 2 may still come in time
    stream.choose(0.0)
    assert ask_all(stream) == [5, 6]
    finish(stream, 5, 6, oldest=1)
    assert take(stream) == [5, 6]  # step 2: what version 0 began is too old from now on
    assert ask_all(stream) == [7, 8]
    assert stream.outstanding == 5
    stream.published(2)
    finish(stream, 0, 7, oldest=1)  # asked for early, started late
    assert take(stream) == [0, 7]


def test_too_old_groups_are_given_up_when_they_come_and_while_they_wait() -> None:
    stream = pool(max_staleness=1, in_flight=6)
    stream.choose(0.0)
    assert ask_all(stream) == [0, 1, 2, 3, 4, 5]
    finish(stream, 0, 1, 2)
    assert take(stream) == [0, 1]
    finish(stream, 3, oldest=1)
    stream.published(1)
    assert take(stream) == [2, 3]  # step 2 trains version 1
    stream.published(2)
    finish(stream, 4, oldest=0)
    assert stream.choose(0.0) is None
    asked = ask_all(stream)
    assert asked[0] == 6
    finish(stream, 5, oldest=1)
    finish(stream, 6, oldest=2)
    choice = stream.choose(3.0)
    assert choice is not None
    assert choice.feed.discarded == 1
    assert choice.feed.prompts == (5, 6)
    assert (choice.feed.queue_seconds, choice.feed.queue_seconds_max) == (2.0, 2.0)


def test_a_request_names_the_oldest_version_that_the_next_step_accepts_and_waits_for_it() -> None:
    stream = pool(max_staleness=0, in_flight=2)
    first = stream.ask(0.0)
    assert first is not None
    assert first.min_version == 0
    stream.ask(0.0)
    finish(stream, 0, 1)
    take(stream)
    assert stream.ask(0.0) is None  # step 2 needs version 1
    stream.published(1)
    second = stream.ask(0.0)
    assert second is not None
    assert second.min_version == 1


def test_groups_without_an_advantage_are_left_out_within_the_budget_of_a_step() -> None:
    stream = pool(in_flight=4, drops=2)
    stream.choose(0.0)
    ask_all(stream)
    finish(stream, 0, 1, 2, informative=False)  # the third fills up
    assert ask_all(stream) == [4, 5]
    finish(stream, 3)
    choice = stream.choose(0.0)
    assert choice is not None
    assert choice.feed.prompts == (2, 3)
    assert (choice.dropped, choice.dropped_score) == (2, 1.0)
    stream.commit(choice)
    finish(stream, 4, informative=False)  # a new step, a new budget
    finish(stream, 5)
    assert stream.choose(0.0) is None


def test_a_failed_request_is_repeated_first_and_the_last_steps_ask_for_no_more_than_they_need() -> None:
    stream = pool(steps=2)
    assert ask_all(stream) == [0, 1]
    assert stream.fail(0) == 1
    assert ask_all(stream) == [0]
    finish(stream, 0, 1)
    take(stream)
    assert ask_all(stream) == [2, 3]
    finish(stream, 2, 3)
    take(stream)
    assert stream.complete
    assert ask_all(stream) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_groups_are_young_enough_and_trained_once(data: st.DataObject) -> None:
    """Islands that are slow, fast and behind, a trainer that is killed and resumed at any moment."""
    draw = data.draw
    wanted, max_staleness = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    in_flight = draw(st.integers(wanted, wanted * (2 + max_staleness)))
    limits = PoolLimits(wanted, max_staleness, in_flight, drops=draw(st.integers(0, 2)) * wanted, steps=8)
    stream: Pool[int] = Pool(limits)
    flying: dict[int, int] = {}  # number -> the version that its first token will have
    durable: list[FeedState] = []
    chosen: Choice[int] | None = None
    published = left_out = 0
    for _ in range(draw(st.integers(10, 80))):
        match draw(st.sampled_from(["ask", "finish", "finish", "fail", "take", "commit", "publish", "kill"])):
            case "ask":
                if (asked := stream.ask(0.0)) is not None:
                    assert asked.number not in flying
                    flying[asked.number] = draw(st.integers(asked.min_version, published))
            case "finish" if flying:
                number = draw(st.sampled_from(sorted(flying)))
                stream.finish(
                    number,
                    number,
                    oldest=flying.pop(number),
                    informative=draw(st.booleans()),
                    score=0.0,
                    now=0.0,
                )
            case "fail" if flying:
                number = draw(st.sampled_from(sorted(flying)))
                del flying[number]
                stream.fail(number)
            case "take" if published == stream.step and not stream.complete:
                chosen = stream.choose(0.0)
                if chosen is not None:
                    assert all(group.oldest >= stream.step - max_staleness for group in chosen.groups)
                    assert len(chosen.groups) == wanted
            case "commit" if chosen is not None:
                durable.append(chosen.feed)
                left_out += chosen.dropped
                stream.commit(chosen)
                chosen = None
            case "publish" if published < stream.step:
                published += 1
                stream.published(published)
            case "kill":
                stream = Pool(limits, len(durable), durable[-1] if durable else None)
                stream.published(published)
                flying, chosen = {}, None
        assert stream.outstanding <= in_flight
        trained = [number for state in durable for number in state.prompts]
        assert len(trained) == len(set(trained))
        if durable:
            assert not set(durable[-1].under_way) & set(trained)
            gone = set(range(durable[-1].next_prompt)) - set(durable[-1].under_way) - set(trained)
            assert len(gone) == sum(state.discarded for state in durable) + left_out  # none passed over uncounted


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_a_trainer_that_waits_always_gets_its_batch(max_staleness, wanted, spare, random) -> None:
    """Whatever was under way before has grown too old by then: what the bound on age refuses is sampled anew."""
    stream: Pool[int] = Pool(PoolLimits(wanted, max_staleness, wanted + spare, drops=wanted, steps=12))
    flying: list[tuple[int, int]] = []
    for step in range(12):
        for _ in range(200):
            choice = stream.choose(0.0)
            if choice is not None:
                break
            while (asked := stream.ask(0.0)) is not None:
                # Served by the oldest version that it accepts: the worst island there is.
                flying.append((asked.number, asked.min_version))
            number, oldest = flying.pop(random.randrange(len(flying)))
            stream.finish(number, number, oldest=oldest, informative=random.random() < 0.2, score=0.0, now=0.0)
        assert choice is not None, f"no batch for step {step + 1}"
        stream.commit(choice)
        stream.published(step + 1)
