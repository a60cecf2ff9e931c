"""The base model of a small run and samples of it, without a fleet: what benchmarks of the trainer train on."""

from __future__ import annotations

from pathlib import Path

import torch

from sprawl.config import RunConfig
from sprawl.policy import Decoder, Tokenizer
from sprawl.policy.checkpoint import drop_tied_head, load_auxiliary, load_weights, read_architecture
from sprawl.problems import load_problem_set, response_text
from sprawl.rollout.trajectories import RolloutBatch


def tiny_model(config: RunConfig) -> tuple[Decoder, Tokenizer]:
    """The run's base model with fp32 masters."""
    base = Path(config.policy.base)
    files = load_auxiliary(base)
    arch = read_architecture(files)
    decoder = Decoder(arch)
    decoder.load_served(drop_tied_head(load_weights(base), arch), torch.float32)
    return decoder, Tokenizer.from_files(files)


@torch.no_grad()
def sample_batch(config: RunConfig, decoder: Decoder, tokenizer: Tokenizer, step: int) -> RolloutBatch:
    """What an island would sample for a step: prompts of one length, the model's own answers, verified."""
    problems = load_problem_set(config.problems.name, config.seed, config.problems.params)
    stops = {i for text in problems.stop for i in tokenizer.ids_containing(text)}
    rollout, generator = config.rollout, torch.Generator().manual_seed(step)
    chosen = [problems.train(step * rollout.prompts + i) for i in range(rollout.prompts)]
    prompts = torch.tensor([tokenizer.encode(problem.prompt) for problem in chosen]).repeat_interleave(
        rollout.samples, 0
    )
    ids, start = prompts, prompts.shape[1]
    taken = []
    for _ in range(rollout.max_new_tokens):
        logprobs = torch.log_softmax(decoder(ids)[:, -1] / rollout.temperature, -1)
        following = torch.multinomial(logprobs.exp(), 1, generator=generator)
        taken.append(logprobs.gather(1, following))
        ids = torch.cat((ids, following), 1)
    responses = ids[:, start:]
    ended = torch.zeros_like(responses, dtype=torch.bool)
    for stop in stops:
        ended |= responses == stop
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, rollout.max_new_tokens)
    scores = [
        problems.score(chosen[row // rollout.samples], response_text(tokenizer, responses[row, :length].tolist()))
        for row, length in enumerate(lengths.tolist())
    ]
    count, present = len(scores), torch.arange(responses.shape[1])[None] < lengths[:, None]
    tokens = torch.cat((prompts, responses.masked_fill(~present, 0)), 1)
    return RolloutBatch(
        step=step,
        tokens=tokens.int(),
        prompt_lengths=torch.full((count,), start, dtype=torch.int32),
        response_lengths=lengths.int(),
        logprobs=torch.cat(taken, 1).masked_fill(~present, 0.0),
        rewards=torch.tensor(scores, dtype=torch.float32),
        groups=(torch.arange(count) // rollout.samples).int(),
        seeds=torch.arange(count),
        version_start=torch.zeros(count, dtype=torch.int32),
        version_end=torch.zeros(count, dtype=torch.int32),
        islands=("here",) * rollout.prompts,
    )
