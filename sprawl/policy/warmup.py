"""Makes the small base model of `configs/tiny.yaml`: `python -m sprawl.policy.warmup --out configs/base/tiny`.

Supervised next-token training on a mixture of two answer styles: a share of the targets in the wanted format
(`12+34=046`), the rest with the digits reversed (`640`). The result can add, and samples either style, so that RL
has something to elicit, as RLVR does in large models. Held-out problems are never trained on.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from sprawl.policy.architecture import Architecture
from sprawl.policy.checkpoint import save_checkpoint
from sprawl.policy.decoder import Decoder
from sprawl.problems import ProblemSet, load_problem_set

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+=-"
EOS = 1
BATCH = 128
LEARNING_RATE = 1e-3


def build_files() -> dict[str, bytes]:
    """config.json, generation_config.json and tokenizer.json of a 16-token character-level Qwen2 model."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(vocabulary),
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        "eos_token_id": EOS,
    }
    generation = {"eos_token_id": EOS, "pad_token_id": 0}
    return {
        "config.json": json.dumps(config, indent=2).encode() + b"\n",
        "generation_config.json": json.dumps(generation, indent=2).encode() + b"\n",
        "tokenizer.json": tokenizer.to_str(pretty=True).encode() + b"\n",
    }


def initialise(decoder: Decoder, generator: torch.Generator) -> None:
    """N(0, 0.02) for matrices, zero for biases; residual outputs scaled down by sqrt(2 * layers) as in GPT-2."""
    for name, parameter in decoder.named_parameters():
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                scale = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale /= math.sqrt(2 * decoder.arch.layers)
                parameter.normal_(0.0, scale, generator=generator)


def make_batch(
    problems: ProblemSet, first: int, wanted: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """BATCH sequences `prompt answer <eos>` as ids [B, T], and where the loss counts (answer and EOS)."""
    rows, starts = [], []
    index = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
    for offset in range(BATCH):
        problem = problems.train(first + offset)
        answer = problem.answer if rng.random() < wanted else problem.answer[::-1]
        rows.append([*(index[c] for c in problem.prompt + answer), EOS])
        starts.append(len(problem.prompt))
    ids = torch.tensor(rows)
    return ids, torch.arange(ids.shape[1])[None, :] >= torch.tensor(starts)[:, None]


@torch.no_grad()
def greedy_share(decoder: Decoder, problems: ProblemSet, count: int) -> dict[str, float]:
    """Share of held-out problems answered greedily in the wanted style, and in either style."""
    index = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
    inverse = {i: c for c, i in index.items()}
    heldout = problems.heldout(count)
    ids = torch.tensor([[index[c] for c in p.prompt] for p in heldout])
    for _ in range(len(heldout[0].answer)):
        ids = torch.cat((ids, decoder(ids)[:, -1].argmax(-1, keepdim=True)), dim=1)
    answers = ["".join(inverse.get(int(i), "?") for i in row[-len(heldout[0].answer) :]) for row in ids]
    wanted = sum(a == p.answer for a, p in zip(answers, heldout, strict=True))
    either = sum(a in (p.answer, p.answer[::-1]) for a, p in zip(answers, heldout, strict=True))
    return {"wanted": wanted / len(heldout), "either": either / len(heldout)}


CARD = """# Base model of configs/tiny.yaml

A {parameters:,}-parameter character-level decoder (Qwen2 architecture, H = 128, 8 layers, 16 tokens), bf16.

Made by `python -m sprawl.policy.warmup --out {out} --steps {steps} --seed {seed} --wanted {wanted}`: supervised
training on two-digit addition with {wanted:.0%} of the answers in the wanted format (`12+34=046`) and the rest with
the digits reversed (`12+34=640`), AdamW {lr}, cosine, batch {batch}. Held-out problems were never trained on.

Greedy on {heldout} held-out problems: {greedy[wanted]:.3f} in the wanted format, {greedy[either]:.3f} in either.
Trained in {seconds:.0f} s of one CPU core with torch {torch}. Licence: Apache-2.0, as the project.
"""


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option("--steps", default=3000, show_default=True, help="Optimizer steps.")
@click.option("--seed", default=0, show_default=True)
@click.option("--wanted", default=0.35, show_default=True, help="Share of targets in the wanted format.")
def main(out: Path, steps: int, seed: int, wanted: float) -> None:
    """Train the small base model and write it as a HF safetensors directory with a card."""
    torch.set_num_threads(1)
    files = build_files()
    decoder = Decoder(Architecture.from_hf(json.loads(files["config.json"])))
    initialise(decoder, torch.Generator().manual_seed(seed))
    problems = load_problem_set("addition", seed, {})
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    started = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 50)
            group["lr"] = LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        ids, counted = make_batch(problems, step * BATCH, wanted, rng)
        logits = decoder(ids[:, :-1])
        loss = F.cross_entropy(logits[counted[:, 1:]], ids[:, 1:][counted[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss.item():.4f}, greedy {greedy_share(decoder, problems, 200)}")
    decoder.to(torch.bfloat16)
    state = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    decoder.to(torch.float32)
    card = CARD.format(
        parameters=sum(t.numel() for t in state.values()),
        out=out,
        steps=steps,
        seed=seed,
        wanted=wanted,
        lr=LEARNING_RATE,
        batch=BATCH,
        heldout=400,
        greedy=greedy_share(decoder, problems, 400),
        seconds=time.process_time() - started,
        torch=torch.__version__.split("+")[0],
    )
    save_checkpoint(out, state, {**files, "README.md": card.encode()})
    click.echo(card)


if __name__ == "__main__":
    main()
