"""From responses to a batch; which versions a step asks for; seeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from sprawl.board.keys import rollouts
from sprawl.board.store import MemoryStore
from sprawl.errors import IntegrityError
from sprawl.problems import Problem, load_problem_set
from sprawl.rollout.trajectories import Sampled, Span, from_bytes, to_bytes
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams, VersionSpan
from sprawl.run.collector import Collector, SamplingJob, make_batch, prompt_numbers, sample_seed, version_policy
from tests.train.helpers import make_batch as training_batch
from tests.train.helpers import make_config


def sample(ids: list[int], *versions: int) -> Sample:
    spans = [VersionSpan(version=version, start=i, end=i + 1) for i, version in enumerate(versions)]
    return Sample(token_ids=ids, logprobs=[-0.5 * i for i in range(len(ids))], finish_reason="stop", spans=spans)


def test_batch_lays_out_prompt_and_response_per_sample() -> None:
    problems = [Problem(7, "a", "b", {}), Problem(8, "c", "d", {})]
    requests = [
        GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(n=2, seeds=[10, 11])),
        GenerateRequest(input_ids=[3], sampling_params=SamplingParams(n=2, seeds=[12, 13])),
    ]
    samples = [[sample([5], 4), sample([6, 7, 8], 4, 5, 5)], [sample([9, 1], 5, 5), sample([2], 5)]]
    responses = [
        GenerateResponse(samples=group, weight_version_start=4, weight_version_end=5, island_id=f"island-{i}")
        for i, group in enumerate(samples)
    ]
    batch = make_batch(6, problems, requests, responses, [[1.0, 0.0], [0.0, 1.0]])
    assert batch.tokens.tolist() == [[1, 2, 5, 0, 0], [1, 2, 6, 7, 8], [3, 9, 1, 0, 0], [3, 2, 0, 0, 0]]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.response_lengths.tolist() == [1, 3, 2, 1]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch.groups.tolist() == [7, 7, 8, 8]
    assert batch.seeds.tolist() == [10, 11, 12, 13]
    assert batch.version_start.tolist() == [4, 4, 5, 5]
    assert batch.version_end.tolist() == [4, 5, 5, 5]
    assert batch.islands == ("island-0", "island-1")
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False] * 4
    assert batch.loss_mask is None
    assert batch.spans_of(1) == [Span(4, 0, 1, "island-0"), Span(5, 1, 2, "island-0"), Span(5, 2, 3, "island-0")]
    assert batch.flat_logprobs(torch.tensor([1, 3])).tolist() == [0.0, -0.5, -1.0, 0.0]


def test_trajectories_round_trip_and_damage_is_found() -> None:
    batch = training_batch()
    data = to_bytes(batch)
    assert to_bytes(batch) == data
    again = from_bytes(data, "here")
    assert torch.equal(again.tokens, batch.tokens)
    assert again.islands == batch.islands
    assert (again.truncated, again.draws) == (None, None)
    finish = (2 * (torch.arange(batch.samples) == 1)).to(torch.uint8)
    more = replace(batch, finish=finish, draws=Sampled(7, 0.25))
    full = from_bytes(to_bytes(more), "here")
    assert full.draws == Sampled(7, 0.25)
    assert full.truncated is not None
    assert full.truncated.tolist() == [row == 1 for row in range(batch.samples)]
    for damaged in (data[:-1], data[:20], b"", data.replace(b"sprawl-rollouts-2", b"sprawl-rollouts-9")):
        with pytest.raises(IntegrityError, match="here"):
            from_bytes(damaged, "here")


def test_versions_a_step_accepts() -> None:
    pinned = {"deterministic": True, "anchor": {"enabled": False}, "rollout": {"follow": "demand", "max_staleness": 1}}
    assert [version_policy(make_config(**pinned), step).exact_version for step in (1, 2, 3)] == [0, 0, 1]
    loose = version_policy(make_config(rollout={"max_staleness": 2}), 6)
    assert (loose.min_version, loose.max_version, loose.exact_version) == (3, None, None)


def test_seeds_are_distinct_and_fit_an_int64() -> None:
    seeds = {sample_seed(7, problem, s, step) for problem in range(50) for s in range(16) for step in (1, 2)}
    assert len(seeds) == 50 * 16 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 3, 5, 9) == sample_seed(7, 3, 5, 9)


def test_no_round_of_any_step_draws_another_ones_prompts() -> None:
    config = make_config(rollout={"prompts": 3}, grpo={"refill_rounds": 2})
    drawn = [number for step in (1, 2, 3, 4) for round_ in (0, 1, 2) for number in prompt_numbers(config, step, round_)]
    assert len(drawn) == len(set(drawn)) == 4 * 3 * 3
    plain = make_config(rollout={"prompts": 3})
    assert [list(prompt_numbers(plain, step, 0)) for step in (1, 2)] == [[0, 1, 2], [3, 4, 5]]


class Tokens:
    """A tokenizer of digits and signs, a character a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Answers:
    """A client whose samples are right, wrong, or half of them right, as the next letter of `script` says."""

    def __init__(self, script: str, answer: str) -> None:
        self.script = list(script)
        self.answer = answer
        self.asked: list[int] = []

    async def generate_many(self, requests: list[GenerateRequest]) -> list[GenerateResponse]:
        self.asked.append(len(requests))
        return [self._respond(self.script.pop(0), request.sampling_params.n) for request in requests]

    def _respond(self, letter: str, count: int) -> GenerateResponse:
        right = {"r": count, "w": 0, "h": count // 2}[letter]
        samples = [sample([ord("r" if i < right else "w")], 0) for i in range(count)]
        return GenerateResponse(samples=samples, weight_version_start=0, weight_version_end=0, island_id="island-0")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("script", "rounds", "asked", "kept", "groups"),
    [
        ("hhh", 2, [3], "hhh", None),
        ("hrw", 0, [3], "hrw", None),
        ("hrwhh", 2, [3, 2], "hhh", 5),
        ("rwhrhh", 2, [3, 2, 1], "hhh", 6),
        ("rwwrwrwhw", 2, [3, 3, 3], "rwh", 9),  # bounded: what has no advantage fills up
    ],
)
def test_dynamic_sampling_replaces_groups_without_an_advantage(
    monkeypatch: pytest.MonkeyPatch, script: str, rounds: int, asked: list[int], kept: str, groups: int | None
) -> None:
    client = Answers(script, "r")

    async def opened(self: Collector) -> Answers:
        return client

    monkeypatch.setattr(Collector, "_open_client", opened)
    monkeypatch.setattr("sprawl.run.groups.response_text", lambda tokenizer, ids: tokenizer.decode(ids))
    problems = load_problem_set("addition", 0, {"digits": 1})
    monkeypatch.setattr(type(problems), "score", lambda self, problem, text: float(text == "r"))
    config = make_config(rollout={"prompts": 3, "samples": 2}, grpo={"refill_rounds": rounds})
    store = MemoryStore()
    collector = Collector(SamplingJob(config, store, "r", Tokens(), problems, [], list))  # type: ignore[arg-type]
    try:
        batch = collector.wait(2).batch
    finally:
        collector.close()
    assert client.asked == asked
    scores = batch.rewards.view(-1, 2).mean(1).tolist()
    assert scores == [{"h": 0.5, "r": 1.0, "w": 0.0}[letter] for letter in kept]
    assert len(set(batch.groups.tolist())) == 3
    if groups is None:
        assert batch.draws is None
    else:
        everything = [{"h": 0.5, "r": 1.0, "w": 0.0}[letter] for letter in script]
        assert batch.draws is not None
        assert batch.draws.groups == groups
        assert batch.draws.reward == pytest.approx(sum(everything) / groups)
    assert store.exists(rollouts("r", 2))


class Forward:
    """An island as a client sees it: it goes on to whatever version is asked for, never back, and takes its time."""

    def __init__(self) -> None:
        self.served = 0

    async def generate_many(self, requests: list[GenerateRequest]) -> list[GenerateResponse]:
        return [await self._generate(request, place) for place, request in enumerate(requests)]

    async def _generate(self, request: GenerateRequest, place: int) -> GenerateResponse:
        await asyncio.sleep(0.01 * place)
        version = request.weight_version.exact_version
        assert version is not None
        assert version >= self.served, f"version {version} was already passed: this island serves {self.served}"
        self.served = version
        samples = [sample([ord("r")], version) for _ in range(request.sampling_params.n)]
        return GenerateResponse(
            samples=samples, weight_version_start=version, weight_version_end=version, island_id="island-0"
        )

    async def close(self) -> None:
        pass


def test_pinned_versions_are_sampled_in_the_order_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Forward()

    async def opened(self: Collector) -> Forward:
        return client

    monkeypatch.setattr(Collector, "_open_client", opened)
    monkeypatch.setattr("sprawl.run.groups.response_text", lambda tokenizer, ids: tokenizer.decode(ids))
    config = make_config(
        deterministic=True,
        anchor={"enabled": False},
        rollout={"prompts": 3, "samples": 2, "max_staleness": 4, "follow": "demand"},
    )
    problems = load_problem_set("addition", 0, {"digits": 1})
    collector = Collector(SamplingJob(config, MemoryStore(), "r", Tokens(), problems, [], list))  # type: ignore[arg-type]
    try:
        for step in range(4, 11):  # many at once, as after a resume
            collector.request(step)
        versions = [int(collector.wait(step).batch.version_end.max()) for step in range(4, 11)]
    finally:
        collector.close()
    assert versions == [0, 0, 1, 2, 3, 4, 5]
