"""A step of the fast circuit."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from sprawl.anchor.replay import replay
from sprawl.train import grpo
from sprawl.train.codecs import PrfCodec
from sprawl.train.correction import correct_gradients
from sprawl.train.pipeline import StagedPolicy, pack, pack_rows
from sprawl.train.probe import compare_gradients
from sprawl.train.trainer import Trainer
from tests.train.helpers import make_batch, make_config, make_decoder


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}


def test_logprobs_select_the_response_tokens() -> None:
    """Against a loop that scores every sample by itself."""
    decoder, batch = make_decoder(), make_batch()
    policy = StagedPolicy(decoder, decoder.arch.split(1), torch.float32)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, torch.arange(batch.samples))
    result = policy.token_stats(packed, codec=None, step=1).logprobs
    expected = []
    for row in range(batch.samples):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = batch.tokens[row, : prompt + response].long()[None]
        scores = F.log_softmax(decoder(ids)[0], dim=-1)
        expected += [scores[position - 1, ids[0, position]] for position in range(prompt, prompt + response)]
    assert torch.allclose(result, torch.stack(expected), atol=1e-5)


def test_ratio_is_exactly_one_on_the_first_inner_epoch() -> None:
    trainer = Trainer(make_decoder(), make_decoder(), make_config())
    assert trainer.step(1, make_batch(), None).ratio_max_error == 0.0
    epochs = Trainer(make_decoder(), make_decoder(), make_config(grpo={"microbatch_rows": 4, "epochs": 2}))
    assert epochs.step(1, make_batch(), None).ratio_max_error == 0.0


def test_microbatches_give_the_gradient_of_the_whole_batch() -> None:
    steps = []
    for rows in (3, 100):
        trainer = Trainer(make_decoder(), make_decoder(), make_config(grpo={"microbatch_rows": rows}))
        stats = trainer.step(1, make_batch(), None)
        steps.append((stats.grad_norm, stats.mismatch, stats.entropy, stats.loss))
    for one, other in zip(*steps, strict=True):
        assert abs(one - other) < 1e-4


def test_the_same_step_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        trainer = Trainer(make_decoder(), make_decoder(), make_config())
        for step in (1, 2, 3):
            trainer.step(step, make_batch(step), None)
        results.append(weights(trainer))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(make_decoder(), make_decoder(), make_config())
    before = weights(trainer)
    batch = make_batch()
    batch.rewards[5] = float("nan")
    stats = trainer.step(1, batch, None)
    assert not stats.applied
    assert all(torch.equal(before[name], after) for name, after in weights(trainer).items())
    assert trainer.step(2, make_batch(), None).applied


def test_probe_reads_the_dense_view_on_its_steps_only() -> None:
    trainer = Trainer(make_decoder(), make_decoder(), make_config(probe={"every": 3, "rows": 3}))
    dense = [trainer.step(step, make_batch(step), None).kl_dense for step in (1, 2, 3, 4)]
    assert [value is not None for value in dense] == [True, False, True, False]
    assert dense[0] == 0.0  # nothing has moved yet: policy and reference are the same weights


def test_kl_term_uses_the_reference_through_the_same_mask() -> None:
    """With policy == reference the KL term has no gradient; a different mask would give it one."""
    plain = Trainer(make_decoder(), make_decoder(), make_config())
    with_kl = Trainer(make_decoder(), make_decoder(), make_config(grpo={"microbatch_rows": 4, "kl_coef": 10.0}))
    assert abs(plain.step(1, make_batch(), None).grad_norm - with_kl.step(1, make_batch(), None).grad_norm) < 1e-4


def test_compressed_gradient_is_that_of_the_masked_network() -> None:
    """Against a forward pass that multiplies by a dense 0-or-H/k mask."""
    decoder, batch = make_decoder(), make_batch()
    codec = PrfCodec(seed=9, ratio=0.25)
    rows = torch.arange(batch.samples)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, rows)
    staged = StagedPolicy(decoder, decoder.arch.split(4), torch.float32)
    staged.token_stats(packed, codec=codec, step=2).logprobs.sum().backward()
    compressed = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    x = decoder.embed(packed.ids)
    rotary = decoder.rotary(0, packed.ids.shape[1], x.dtype)
    for layer in range(4):
        x = decoder.run_layers(x, range(layer, layer + 1), rotary)
        if layer < 3:
            mask = torch.zeros(x.shape[0] * x.shape[1], 32)
            kept = codec.channels(32, layer, 2, packed.tokens)
            mask[packed.tokens.index] = torch.zeros(len(kept), 32).scatter(1, kept, 4.0)
            x = x * mask.view(x.shape)
    scores = F.log_softmax(decoder.head(x.reshape(-1, 32)[packed.select]), dim=-1)
    scores.gather(1, packed.targets[:, None]).sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, compressed[name], rtol=1e-4, atol=1e-5), name


def test_sign_correction_is_the_formula_and_leaves_unsigned_parameters_alone() -> None:
    first = torch.nn.Parameter(torch.zeros(4))
    second = torch.nn.Parameter(torch.zeros(2))
    first.grad, second.grad = torch.tensor([2.0, -2.0, 0.0, 4.0]), torch.tensor([1.0, -1.0])
    positive = torch.tensor([True, True, True, False])
    agreement = correct_gradients({"a": first, "b": second}, {"a": positive}, 0.25)
    assert first.grad.tolist() == [2.0, 1.0, 0.0, -2.0]  # 0.25 g + 0.75 |g| s
    assert second.grad.tolist() == [1.0, -1.0]
    assert agreement == 1 / 3


def test_group_without_signal_gives_no_gradient() -> None:
    batch = make_batch(groups=1)
    assert grpo.zero_advantage_groups(batch.rewards, batch.groups) == 1
    trainer = Trainer(make_decoder(), make_decoder(), make_config())
    before = weights(trainer)
    assert trainer.step(1, batch, None).grad_norm == 0.0
    assert all(torch.equal(before[name], after) for name, after in weights(trainer).items())


def settings(**grpo: object) -> Trainer:
    return Trainer(make_decoder(), make_decoder(), make_config(grpo={"microbatch_rows": 4, **grpo}))


def test_gradient_probe_compares_with_the_dense_gradient_and_changes_nothing() -> None:
    """Against the anchor's replay, which is that gradient by another way."""
    config = make_config(probe={"every": 2, "rows": 3, "gradient_every": 2})
    trainer, silent = (
        Trainer(make_decoder(), make_decoder(), config),
        Trainer(make_decoder(), make_decoder(), make_config(probe={"every": 2, "rows": 3, "gradient_every": 0})),
    )
    dense = replay(make_decoder(), make_batch(), config)
    signs = {name: gradient >= 0 for name, gradient in dense.gradients.items()}
    stats = trainer.step(1, make_batch(), signs)
    assert stats.gradient is not None
    assert abs(stats.gradient.cosine) < 1
    assert abs(stats.gradient.norm_ratio - stats.grad_norm / dense.grad_norm) < 1e-3 * stats.gradient.norm_ratio
    assert stats.gradient.dense_sign_agreement == 1.0  # M is the dense gradient itself
    assert stats.gradient.corrected_cosine > stats.gradient.cosine
    assert stats.probe_bytes > 0
    quiet = silent.step(1, make_batch(), signs)
    assert quiet.gradient is None
    assert quiet.wire == stats.wire  # the probe's bytes are counted apart
    expected = weights(silent)
    assert all(torch.equal(value, expected[name]) for name, value in weights(trainer).items())
    assert trainer.step(2, make_batch(2), None).gradient is not None
    assert trainer.step(3, make_batch(3), None).gradient is None


def test_compared_gradients_are_the_formulas() -> None:
    compressed = {"a": torch.tensor([3.0, 0.0, -4.0]), "b": torch.tensor([[1.0]])}
    dense = {"a": torch.tensor([3.0, 1.0, 4.0]), "b": torch.tensor([[2.0]])}
    probe = compare_gradients(compressed, dense)
    assert abs(probe.cosine - (9 - 16 + 2) / (26 * 30) ** 0.5) < 1e-9
    assert abs(probe.norm_ratio - (26 / 30) ** 0.5) < 1e-9
    assert probe.sign_agreement == 2 / 3
    same = probe.views(dense, {"a": torch.tensor([True, False, True])})
    assert abs(same.corrected_cosine - 1) < 1e-12
    assert same.dense_sign_agreement == 2 / 3


def test_a_probe_of_the_dense_codec_itself_is_left_out() -> None:
    config = make_config(boundary={"codec": "dense"}, probe={"every": 1, "rows": 3, "gradient_every": 1})
    stats = Trainer(make_decoder(), make_decoder(), config).step(1, make_batch(), None)
    assert stats.gradient is None
    assert stats.dense_step


def test_dense_injection_is_the_step_of_a_dense_run() -> None:
    """Every third step crosses dense, the others do not; the dense ones equal those of the dense codec."""
    mixed = make_config(boundary={"codec": "prf", "ratio": 0.25, "dense_every": 3})
    trainer = Trainer(make_decoder(), make_decoder(), mixed)
    shares = []
    for step in (1, 2, 3):
        stats = trainer.step(step, make_batch(step), None)
        shares.append(stats.wire.sent / stats.wire.dense)
        assert stats.dense_step == (step == 3)
    assert shares == [0.25, 0.25, 1.0]
    dense = Trainer(make_decoder(), make_decoder(), make_config(boundary={"codec": "dense"}))
    other = Trainer(make_decoder(), make_decoder(), mixed)
    first, second = dense.step(3, make_batch(), None), other.step(3, make_batch(), None)
    assert first.loss == second.loss
    expected = weights(dense)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())


def test_minibatches_and_epochs_make_as_many_updates_of_whole_groups() -> None:
    trainer = settings(minibatches=2, epochs=3, clip_high=0.28)
    stats = trainer.step(1, make_batch(groups=4), None)
    assert stats.updates == 6
    assert stats.ratio_max_error == 0.0  # of the first update
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}  # type: ignore[union-attr]
    assert steps == {6}
    plan = trainer.plan(make_batch(groups=3))
    assert [torch.cat([m.rows for m in update]).tolist() for update in plan] == [list(range(8)), list(range(8, 12))]


def test_an_update_that_is_not_finite_ends_the_step_and_says_what_stands() -> None:
    trainer, batch = settings(minibatches=3), make_batch()
    batch.rewards[9] = float("nan")  # in the third minibatch
    stats = trainer.step(1, batch, None)
    assert not stats.applied
    assert stats.updates == 2


def test_dropped_groups_do_not_dilute_the_loss() -> None:
    """A group without signal among three: the gradient is the one of the other two alone, up to the KL-free loss."""
    whole, kept = settings(), settings(zero_groups="drop")
    batch = make_batch()
    share = float(batch.response_lengths[4:].sum()) / batch.response_tokens
    first, second = whole.step(1, batch, None), kept.step(1, make_batch(), None)
    assert abs(first.grad_norm - share * second.grad_norm) < 1e-4 * second.grad_norm


def test_off_policy_correction_reads_the_samplers_log_probs() -> None:
    """Masked everywhere, there is nothing to learn; without mismatch it changes nothing."""
    dense = {"boundary": {"codec": "dense"}}
    off = {"kind": "icepop", "icepop_low": 1e8, "icepop_high": 1e9}
    masked = Trainer(
        make_decoder(), make_decoder(), make_config(grpo={"microbatch_rows": 4, "off_policy": off}, **dense)
    ).step(1, make_batch(), None)
    assert masked.grad_norm == 0.0
    assert masked.off_policy_cut == 1.0
    batch = make_batch()
    decoder = make_decoder()
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, torch.arange(batch.samples))
    taken = StagedPolicy(decoder, decoder.arch.split(1), torch.float32).token_stats(packed, codec=None, step=0).logprobs
    width = batch.logprobs.shape[1]
    batch.logprobs[torch.arange(width)[None] < batch.response_lengths[:, None]] = taken.detach()
    results = []
    for kind in ("none", "tis", "sequence_mask"):
        config = make_config(grpo={"microbatch_rows": 4, "off_policy": {"kind": kind}}, **dense)
        results.append(Trainer(make_decoder(), make_decoder(), config).step(1, batch, None))
    assert abs(results[1].grad_norm - results[0].grad_norm) < 1e-4
    assert abs(results[2].grad_norm - results[0].grad_norm) < 1e-4
    assert (results[0].off_policy_cut, results[1].off_policy_cut) == (None, 0.0)


def test_tokens_that_the_policy_did_not_sample_are_read_but_not_trained_on() -> None:
    batch = make_batch()
    mask = torch.arange(batch.logprobs.shape[1])[None].repeat(batch.samples, 1) != 1
    masked = dataclasses.replace(batch, loss_mask=mask)
    rows = torch.arange(batch.samples)
    whole, part = pack_rows(batch, rows), pack_rows(masked, rows)
    assert torch.equal(part.ids, whole.ids)
    kept = [
        (row, position)
        for row in range(batch.samples)
        for position in range(int(batch.response_lengths[row]))
        if position != 1
    ]
    expected = [int(batch.tokens[row, batch.prompt_lengths[row] + position]) for row, position in kept]
    assert part.targets.tolist() == expected
    assert len(expected) == masked.response_tokens < batch.response_tokens
    assert masked.flat_logprobs(rows).tolist() == [float(batch.logprobs[row, position]) for row, position in kept]

    config = make_config(boundary={"codec": "dense"})
    wild = batch.logprobs.masked_fill(~mask, -50.0)  # what stands where nothing was sampled must not matter
    results = []
    for given in (masked, dataclasses.replace(masked, logprobs=wild)):
        trainer = Trainer(make_decoder(), make_decoder(), config)
        stats = trainer.step(1, given, None)
        results.append((stats.loss, stats.mismatch, [p.detach().clone() for p in trainer.decoder.parameters()]))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))
