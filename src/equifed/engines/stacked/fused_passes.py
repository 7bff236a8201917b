"""Triton programs of :mod:`equifed.engines.stacked.fused`: losses and gradients on all samples.

Two reads of the samples: one up to the losses and down to the first layer's outputs, one for the
derivative by its weights. A client of many samples is divided where there are few clients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from equifed.engines.stacked.fused_kernels import (
    _chain,
    _dot,
    _places,
    _read_inputs,
    _read_upper,
    _rise,
    _slope,
)


@triton.jit(do_not_specialize=["splits"])
def go_up(
    inputs, targets, starts, sizes, x, high, low, losses, right, correct, deltas, parts,
    width, stride, splits,
    LAYERS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LOSS: tl.constexpr, CLASSES: tl.constexpr, TARGETS: tl.constexpr, TANH: tl.constexpr,
    BIAS: tl.constexpr, GRADIENT: tl.constexpr, HITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add up the losses of a part of a client's samples at x, which is high + low.

    With GRADIENT also write their mean's derivatives by the first layer's outputs, (units, samples)
    if EXACT, else the other way round, and by the parameters above its weights; a client's parts
    follow each other. With HITS also which samples are answered correctly, and how many.
    """
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size = tl.load(starts + client), tl.load(sizes + client).to(tl.int32)
    inputs += start * D
    targets += start * TARGETS
    correct += start
    deltas += client * HB * width
    parts += (client * splits + part) * stride
    r, rh, rk, rc = tl.arange(0, ROWS), tl.arange(0, HB), tl.arange(0, BLOCK), tl.arange(0, CB)
    at1, mh, at2, ok2, atg, mg, at3, ok3, atc, mc = _places(LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    share = 1.0 / size.to(tl.float32)
    b1, w2, b2, w3, b3 = _read_upper(x, LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    total, hits, of_b1 = 0.0, 0.0, tl.zeros((HB,), tl.float32)
    if LAYERS == 3:
        of_w2, of_b2 = tl.zeros((HB, GB), tl.float32), tl.zeros((GB,), tl.float32)
    if LAYERS > 1:
        of_w3, of_b3 = tl.zeros((GB, CB), tl.float32), tl.zeros((CB,), tl.float32)
    for first in range(part * ROWS, size, splits * ROWS):
        rows = first + r
        there = rows < size
        rows = tl.where(there, rows, 0)
        acc = tl.zeros((ROWS, HB), tl.float32)
        for k in range(0, D, BLOCK):
            at, ok = rh[:, None] * D + (k + rk)[None, :], mh[:, None] & (k + rk < D)[None, :]
            a = _read_inputs(inputs, rows, there, k + rk, D)
            w = tl.load(high + at, mask=ok, other=0.0)
            if EXACT:
                main = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                rest = tl.load(low + at, mask=ok, other=0.0)
                acc = tl.dot(main, tl.trans(rest), acc, input_precision="tf32")
                acc = tl.dot(a - main, tl.trans(w), acc, input_precision="tf32")
                a = main
            acc = tl.dot(a, tl.trans(w), acc, input_precision="tf32")
        h, g, out = _rise(acc, b1, w2, b2, w3, b3, LAYERS, TANH, EXACT)
        if LAYERS == 1:
            full = there[:, None] & mh[None, :]
            each, delta = _slope(out, targets, rows, share, rh, full, C, LOSS, CLASSES)
        else:
            full = there[:, None] & mc[None, :]
            each, above = _slope(out, targets, rows, share, rc, full, C, LOSS, CLASSES)
        total += tl.sum(each)
        if HITS:
            answers = tl.where((rh if LAYERS == 1 else rc)[None, :] < C, out, -float("inf"))
            hit = (tl.argmax(answers, 1) == tl.load(targets + rows)) & there
            tl.store(correct + rows, hit, mask=there)
            hits += tl.sum(hit.to(tl.float32))
        if GRADIENT:
            if LAYERS > 1:
                of_w3 += _dot(tl.trans(g), above, None, EXACT)
                of_b3 += tl.sum(above, 0)
                delta = _chain(_dot(above, tl.trans(w3), None, EXACT), g, TANH)
            if LAYERS == 3:
                of_w2 += _dot(tl.trans(h), delta, None, EXACT)
                of_b2 += tl.sum(delta, 0)
                delta = _chain(_dot(delta, tl.trans(w2), None, EXACT), h, TANH)
            of_b1 += tl.sum(delta, 0)
            if EXACT:
                places = rh[:, None] * width + rows[None, :]
                tl.store(deltas + places, tl.trans(delta), mask=there[None, :])
            else:
                tl.store(deltas + rows[:, None] * HB + rh[None, :], delta, mask=there[:, None])
    if HITS:
        tl.store(right + client * splits + part, hits)
    tl.store(losses + client * splits + part, total * share)
    if GRADIENT:
        if BIAS:
            tl.store(parts + at1, of_b1, mask=mh)
        if LAYERS == 3:
            tl.store(parts + at2, of_w2, mask=ok2)
            if BIAS:
                tl.store(parts + atg, of_b2, mask=mg)
        if LAYERS > 1:
            tl.store(parts + at3, of_w3, mask=ok3)
            if BIAS:
                tl.store(parts + atc, of_b3, mask=mc)


@triton.jit(do_not_specialize=["splits"])
def go_down(
    inputs, starts, sizes, deltas, parts, width, stride, splits, one,
    D: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Write the derivative by BLOCK columns of the first layer's weights, of a client's part."""
    row = tl.program_id(0).to(tl.int64)
    client, part = row // splits, (row % splits).to(tl.int32)
    start, size = tl.load(starts + client), tl.load(sizes + client).to(tl.int32)
    inputs += start * D
    deltas += client * HB * width
    r, rh = tl.arange(0, ROWS), tl.arange(0, HB)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mk, total = k < D, tl.zeros((BLOCK, HB), tl.float32)
    for first in range(part * ROWS, size, splits * ROWS):
        rows = first + r
        there = rows < size
        a = tl.load(
            inputs + rows[None, :] * D + k[:, None], mask=there[None, :] & mk[:, None], other=0.0
        )
        if EXACT:
            places = rh[:, None] * width + rows[None, :]
            d = tl.trans(tl.load(deltas + places, mask=there[None, :], other=0.0))
        else:  # what is not computed on would be read in pieces of four bytes
            d = tl.load(deltas + rows[:, None] * HB + rh[None, :], mask=there[:, None], other=0.0)
            a, d = one * a, one * d
        total = _dot(a, d, total, EXACT)
    ok = (rh < H)[None, :] & mk[:, None]
    tl.store(parts + row * stride + rh[None, :] * D + k[:, None], total, mask=ok)
