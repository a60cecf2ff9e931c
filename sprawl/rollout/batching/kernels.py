"""Compiled loops of the embedded engine. Every row is computed from its own data alone, one addition after the other
in a fixed order (no `fastmath`), so its bits cannot depend on the rows around it.

Only loops over independent elements (positions of a page, channels of a head) are side by side in vector registers.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from sprawl.rollout.batching.pages import PAGE

# exp(x) = 2**n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. ln 2 in two parts and the polynomial for exp(r) are
# those of expf in the Cephes library (S. Moshier): within 1 ulp, and it runs in vector registers where a call does not.
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_LOWEST = np.float32(-87.0)  # exp of less is taken for exp of this, 1.6e-38: no denormal numbers


@njit(cache=True, nogil=True)
def exponentials(row, top, bits, powers):
    """row <- exp(row - top) in place, fp32 [n] with no element above `top`; returns the fp64 sum.
    `bits` int32 and `powers` fp32, [n] both, are one scratch array seen in two ways."""
    for j in range(row.size):
        x = max(row[j] - top, _LOWEST)
        n = np.floor(x * _LOG2_E + _HALF)
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        y = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1
        row[j] = y * r * r + r + _ONE
        bits[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for j in range(row.size):
        row[j] *= powers[j]
    total = 0.0
    for j in range(row.size):
        total += row[j]
    return total


@njit(cache=True, nogil=True)
def _turn(source, cos, sin, target):
    """Rotary embedding of one head, fp32 [head_dim] all."""
    half = source.size // 2
    for d in range(half):
        target[d] = source[d] * cos[d] - source[d + half] * sin[d]
        target[d + half] = source[d + half] * cos[d + half] + source[d] * sin[d + half]


@njit(cache=True, nogil=True)
def _page_scores(query, keys, out):
    """Dot products of one query, fp32 [head_dim], with the keys of a page, [head_dim, PAGE]: [PAGE].
    Four channels a pass, so that a sum is loaded and stored once for four additions."""
    dim = query.size
    for j in range(PAGE):
        out[j] = np.float32(0.0)
    for d in range(0, dim - 3, 4):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for j in range(PAGE):
            total = out[j] + q0 * k0[j]
            total += q1 * k1[j]
            total += q2 * k2[j]
            out[j] = total + q3 * k3[j]
    for d in range(dim - dim % 4, dim):
        for j in range(PAGE):
            out[j] += query[d] * keys[d, j]


@njit(cache=True, nogil=True)
def _page_values(weights, values, part, out):
    """out += weights @ values, fp32 [n], [>= n, head_dim], [head_dim]; `part` is scratch like `out`."""
    n, dim = weights.size, out.size
    for d in range(dim):
        part[d] = np.float32(0.0)
    for j in range(0, n - 3, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for d in range(dim):
            total = part[d] + w0 * v0[d]
            total += w1 * v1[d]
            total += w2 * v2[d]
            part[d] = total + w3 * v3[d]
    for j in range(n - n % 4, n):
        for d in range(dim):
            part[d] += weights[j] * values[j, d]
    for d in range(dim):
        out[d] += part[d]


@njit(cache=True, nogil=True)
def attend(query, key, value, cos, sin, positions, table, starts, rows, layer, keys, values, scores, out):
    """Store the keys and values of `rows` rows in their pages, then attend from every row to all positions of its
    sequence up to its own. Heads may be grouped.

    query, out fp32 [>= rows, heads, head_dim]; key, value fp32 [>= rows, kv_heads, head_dim], all before the rotary
    embedding; cos, sin fp32 [positions, head_dim]; positions int64 [rows]; keys, values: of a `PagePool`; scores fp32
    scratch [>= longest sequence in whole pages]. `table` int32: the page numbers of all sequences, one after the other;
    those of row r begin at `starts[r]`. Sums of probabilities are fp64.
    """
    heads, dim = query.shape[1], query.shape[2]
    kv_heads = keys.shape[2]
    scale = np.float32(1.0 / math.sqrt(dim))
    turned = np.empty(dim, np.float32)
    part = np.empty(dim, np.float32)
    bits = np.empty(scores.size, np.int32)
    powers = bits.view(np.float32)
    for r in range(rows):
        at = positions[r]
        page, lane = table[starts[r] + at // PAGE], at % PAGE
        for g in range(kv_heads):
            _turn(key[r, g], cos[at], sin[at], turned)
            for d in range(dim):
                keys[page, layer, g, d, lane] = turned[d]
                values[page, layer, g, lane, d] = value[r, g, d]
    for r in range(rows):
        at = positions[r]
        count = at + 1
        for h in range(heads):
            g = h * kv_heads // heads
            _turn(query[r, h], cos[at], sin[at], turned)
            for d in range(dim):
                turned[d] *= scale
            for p in range(at // PAGE + 1):
                _page_scores(turned, keys[table[starts[r] + p], layer, g], scores[p * PAGE : p * PAGE + PAGE])
            top = scores[0]
            for j in range(1, count):
                top = max(top, scores[j])
            norm = np.float32(1.0 / exponentials(scores[:count], top, bits, powers))
            for d in range(dim):
                out[r, h, d] = np.float32(0.0)
            for p in range(at // PAGE + 1):
                weights = scores[p * PAGE : min(p * PAGE + PAGE, count)]
                _page_values(weights, values[table[starts[r] + p], layer, g], part, out[r, h])
            for d in range(dim):
                out[r, h, d] *= norm


@njit(cache=True, nogil=True)
def draw(logits, temperatures, numbers, tokens, logprobs):
    """One token a row by inverting the cumulative sum of softmax(logits / temperature); the first largest logit at
    temperature 0.

    logits fp32 [rows, vocab], temperatures and numbers fp64 [rows], numbers in [0, 1). Writes tokens int64 [rows] and
    their log-probs fp32 [rows] (nats, at the sampling temperature, at 1.0 for temperature 0). A row with a logit that
    is not finite gets token -1 and NaN.
    """
    rows, vocab = logits.shape
    weights = np.empty(vocab, np.float64)
    for r in range(rows):
        best, finite = 0, True
        for i in range(vocab):
            finite &= math.isfinite(logits[r, i])
            if logits[r, i] > logits[r, best]:
                best = i
        if not finite:
            tokens[r], logprobs[r] = -1, np.nan
            continue
        scale = temperatures[r] if temperatures[r] > 0.0 else 1.0
        top = np.float64(logits[r, best]) / scale
        total = 0.0
        for i in range(vocab):
            weights[i] = math.exp(np.float64(logits[r, i]) / scale - top)
            total += weights[i]
        token = best
        if temperatures[r] > 0.0:
            # Below the total, so that rounding can never select past the last token that has any probability.
            target = min(numbers[r] * total, np.nextafter(total, 0.0))
            reached = 0.0
            for i in range(vocab):
                reached += weights[i]
                if reached > target:
                    token = i
                    break
        tokens[r] = token
        logprobs[r] = np.float32(np.float64(logits[r, token]) / scale - top - math.log(total))
