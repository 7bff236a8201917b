"""Triton programs of :mod:`equifed.engines.stacked.fused`: one client each, all its local steps.

A pass over the first layer's weights updates a block of them for step s and multiplies it, while it
is there, with the inputs of step s + 1. Layers above stay in registers for the whole walk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(state, word):
    """Hash states with a word, as :func:`equifed.contract.streams.mix` does."""
    z = (state ^ word) + -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _key(state, slots, size):
    """Return the shuffle keys of places, the largest number behind a client's last."""
    drawn = _mix(state, slots) & 0x7FFFFFFFFFFFFFFF
    return tl.where(slots < size, drawn, 0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["salt", "passes"])
def draw_keys(keys, ids, sizes, salt, passes, width: tl.constexpr, BLOCK: tl.constexpr):
    """Write the shuffle keys of every pass of every client."""
    row = tl.program_id(0).to(tl.int64)
    client, number = row // passes, row % passes
    state = _mix(_mix(tl.load(ids + client), salt), number)
    slots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    drawn = _key(state, slots, tl.load(sizes + client))
    tl.store(keys + row * width + slots, drawn, mask=slots < width)


@triton.jit(do_not_specialize=["salt", "passes"])
def draw_orders(
    orders, ids, sizes, salt, passes, width: tl.constexpr, MINE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write every pass's shuffled samples: each sample at the number of keys below its own."""
    row = tl.program_id(0).to(tl.int64)
    client, number = row // passes, row % passes
    state, size = _mix(_mix(tl.load(ids + client), salt), number), tl.load(sizes + client)
    mine = tl.program_id(1) * MINE + tl.arange(0, MINE).to(tl.int64)
    own = _key(state, mine, size)
    place = tl.zeros((MINE,), tl.int64)
    for first in range(0, width, BLOCK):
        slots = first + tl.arange(0, BLOCK).to(tl.int64)
        keys = _key(state, slots, size)
        earlier = (keys[None, :] == own[:, None]) & (slots[None, :] < mine[:, None])
        below = ((keys[None, :] < own[:, None]) | earlier) & (slots < width)[None, :]
        place += tl.sum(below.to(tl.int32), 1)
    tl.store(orders + row * width + place, mine, mask=mine < width)


@triton.jit
def _activate(pre, TANH: tl.constexpr):
    """Return ReLU or tanh; the latter by a series near zero, where differences would cancel."""
    if TANH:
        square = pre * pre
        near = pre * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (
            -17 / 315 + square * (62 / 2835)))))  # fmt: skip
        power = tl.exp(-2.0 * tl.abs(pre))
        far = (1.0 - power) / (1.0 + power)
        return tl.where(square < 0.06, near, tl.where(pre < 0, -far, far))
    else:
        return tl.maximum(pre, 0.0)


@triton.jit
def _chain(delta, h, TANH: tl.constexpr):
    """Return the derivative by an activation's input, given that by its output h."""
    if TANH:
        return delta * (1.0 - h * h)
    else:
        return tl.where(h > 0, delta, 0.0)


@triton.jit
def _slope(
    out, targets, rows, share, rc, there,
    C: tl.constexpr, LOSS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Return the losses of samples and share times their derivatives by the outputs (b, k).

    Both are zero outside ``there``.
    """
    if LOSS == "cross_entropy":
        y = tl.load(targets + rows)
        out = tl.where(rc[None, :] < C, out, -float("inf"))
        most = tl.max(out, 1)
        power = tl.exp(out - most[:, None])
        total = tl.sum(power, 1)
        own = rc[None, :] == y[:, None]
        slope = power / total[:, None] - tl.where(own, 1.0, 0.0)
        each = tl.where(own, (tl.log(total) + most)[:, None] - out, 0.0)
    elif LOSS == "binary_logistic":
        y = tl.load(targets + rows)
        power = tl.exp(-tl.abs(out))
        chance = tl.where(out < 0, power, 1.0) / (1.0 + power)
        slope = chance - tl.where(y[:, None] > 0, 1.0, 0.0)
        each = tl.log(1.0 + power) + tl.maximum(tl.where(y[:, None] > 0, -out, out), 0.0)
    else:
        if CLASSES and C > 1:
            y = tl.load(targets + rows)
            off = out - tl.where(rc[None, :] == y[:, None], 1.0, 0.0)
        else:
            y = tl.load(targets + rows[:, None] * C + rc[None, :], mask=there, other=0)
            off = out - y.to(tl.float32)
        slope, each = 2.0 * off, off * off
    return tl.sum(tl.where(there, each, 0.0), 1), tl.where(there, slope * share, 0.0)


@triton.jit
def _dot(a, b, acc, EXACT: tl.constexpr):
    """Return acc + a b in one product of rounded factors, or in three of factors in two parts."""
    if EXACT:
        first_a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        first_b = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(a - first_a, first_b, acc, input_precision="tf32")
        acc = tl.dot(first_a, b - first_b, acc, input_precision="tf32")
        a, b = first_a, first_b
    return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def _read_inputs(inputs, rows, there, columns, D: tl.constexpr):
    """Return some columns of the samples that are there, zeros for others."""
    at, ok = rows[:, None] * D + columns[None, :], there[:, None] & (columns < D)[None, :]
    return tl.load(inputs + at, mask=ok, other=0.0)


@triton.jit
def _move(
    w, change, at, ok, s, snap, x, corrections, snapshots, totals, lr, keep, pull,
    CORRECTED: tl.constexpr, PROXIMAL: tl.constexpr, SNAPSHOT: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """Return parameters, which stand at ``at``, after step s: lr times their gradient.

    They are kept if the snapshot is then, and added to their sum.
    """
    w = keep * w - change
    if CORRECTED:
        w -= lr * tl.load(corrections + at, mask=ok, other=0.0)
    if PROXIMAL:
        w += pull * tl.load(x + at, mask=ok, other=0.0)
    if SNAPSHOT:
        tl.store(snapshots + at, w, mask=(ok & (s + 1 == snap)) != 0)
    if AVERAGE:
        total = tl.load(totals + at, mask=(ok & (s > 0)) != 0, other=0.0) + w
        tl.store(totals + at, total, mask=ok)
    return w


@triton.jit
def _finish(w, at, ok, x, u):
    """Write the displacement of parameters, and return its squared length."""
    moved = tl.where(ok, tl.load(x + at, mask=ok, other=0.0) - w, 0.0)
    tl.store(u + at, moved, mask=ok)
    return tl.sum(moved * moved)


@triton.jit
def _places(
    LAYERS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return where b1, w2, b2, w3 and b3 stand in a model, each with a mask of what there is."""
    rh, rg, rc = tl.arange(0, HB), tl.arange(0, GB), tl.arange(0, CB)
    mh, mg, mc = rh < H, rg < G, rc < C
    B1: tl.constexpr = H * D
    W2: tl.constexpr = B1 + BIAS * H
    B2: tl.constexpr = W2 + G * H
    W3: tl.constexpr = B2 + BIAS * G if LAYERS == 3 else W2
    B3: tl.constexpr = W3 + C * G
    at2, ok2 = W2 + rh[:, None] + rg[None, :] * H, mh[:, None] & mg[None, :]
    at3, ok3 = W3 + rg[:, None] + rc[None, :] * G, mg[:, None] & mc[None, :]
    return B1 + rh, mh, at2, ok2, B2 + rg, mg, at3, ok3, B3 + rc, mc


@triton.jit
def _read_upper(
    x, LAYERS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return a model's parameters but for the first layer's weights: b1, w2, b2, w3, b3."""
    at1, mh, at2, ok2, atg, mg, at3, ok3, atc, mc = _places(LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    w2, b2, w3, b3, b1 = 0.0, 0.0, 0.0, 0.0, tl.zeros((HB,), tl.float32)
    if BIAS:
        b1 = tl.load(x + at1, mask=mh, other=0.0)
    if LAYERS == 3:
        w2, b2 = tl.load(x + at2, mask=ok2, other=0.0), tl.zeros((GB,), tl.float32)
        if BIAS:
            b2 = tl.load(x + atg, mask=mg, other=0.0)
    if LAYERS > 1:
        w3, b3 = tl.load(x + at3, mask=ok3, other=0.0), tl.zeros((CB,), tl.float32)
        if BIAS:
            b3 = tl.load(x + atc, mask=mc, other=0.0)
    return b1, w2, b2, w3, b3


@triton.jit
def _rise(
    acc, b1, w2, b2, w3, b3, LAYERS: tl.constexpr, TANH: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Return units of the first and second layer and outputs, of which there may be fewer."""
    if LAYERS == 1:
        out = acc + b1[None, :]
        return out, out, out
    else:
        h = _activate(acc + b1[None, :], TANH)
        if LAYERS == 2:
            return h, h, _dot(h, w3, None, EXACT) + b3[None, :]
        else:
            g = _activate(_dot(h, w2, None, EXACT) + b2[None, :], TANH)
            return h, g, _dot(g, w3, None, EXACT) + b3[None, :]


@triton.jit
def _upper(
    acc, w2, b2, w3, b3, b1, targets, rows, there, s, count,
    x, corrections, snapshots, totals, snap, lr, keep, keep_bias, pull,
    LAYERS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, LOSS: tl.constexpr,
    CLASSES: tl.constexpr, TANH: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr,
    PROXIMAL: tl.constexpr, SNAPSHOT: tl.constexpr, AVERAGE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Go up through the layers above the first and down again, moving their parameters.

    Returns the derivative by the first layer's outputs, (units, samples), and the parameters.
    """
    at1, mh, at2, ok2, atg, mg, at3, ok3, atc, mc = _places(LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    share = 1.0 / count.to(tl.float32)
    h, g, out = _rise(acc, b1, w2, b2, w3, b3, LAYERS, TANH, EXACT)
    if LAYERS == 1:
        full = there[:, None] & mh[None, :]
        rh = tl.arange(0, HB)
        _, delta = _slope(out, targets, rows, share, rh, full, C, LOSS, CLASSES)
    else:
        full = there[:, None] & mc[None, :]
        rc = tl.arange(0, CB)
        _, above = _slope(out, targets, rows, share, rc, full, C, LOSS, CLASSES)
        if LAYERS == 3:
            middle = _chain(_dot(above, tl.trans(w3), None, EXACT), g, TANH)
            delta = _dot(middle, tl.trans(w2), None, EXACT)
            grown = _dot(tl.trans(g), above, None, EXACT)
            change = _dot(tl.trans(h), middle, None, EXACT)
            w2 = _move(
                w2, lr * change, at2, ok2, s, snap, x, corrections, snapshots, totals, lr, keep,
                pull, CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
            )  # fmt: skip
            if BIAS:
                b2 = _move(
                    b2, lr * tl.sum(middle, 0), atg, mg, s, snap, x, corrections, snapshots, totals,
                    lr, keep_bias, pull, CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
                )  # fmt: skip
        else:
            delta = _dot(above, tl.trans(w3), None, EXACT)
            grown = _dot(tl.trans(h), above, None, EXACT)
        delta = _chain(delta, h, TANH)
        w3 = _move(
            w3, lr * grown, at3, ok3, s, snap, x, corrections, snapshots, totals, lr, keep, pull,
            CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
        )  # fmt: skip
        if BIAS:
            b3 = _move(
                b3, lr * tl.sum(above, 0), atc, mc, s, snap, x, corrections, snapshots, totals, lr,
                keep_bias, pull, CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
            )  # fmt: skip
    if BIAS:
        b1 = _move(
            b1, lr * tl.sum(delta, 0), at1, mh, s, snap, x, corrections, snapshots, totals, lr,
            keep_bias, pull, CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
        )  # fmt: skip
    return tl.trans(delta), w2, b2, w3, b3, b1


@triton.jit(do_not_specialize=["order_width", "longest", "steps", "epochs", "snap"])
def walk(
    inputs, targets, orders, starts, sizes, x, u,
    corrections, snapshots, totals, squares,
    order_width, stride, correction_stride, snapshot_stride, total_stride,
    longest, steps, epochs, snap, lr, keep, keep_bias, pull,
    LAYERS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HB: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, LOSS: tl.constexpr, CLASSES: tl.constexpr, TARGETS: tl.constexpr,
    TANH: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr, PROXIMAL: tl.constexpr,
    SNAPSHOT: tl.constexpr, AVERAGE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Carry out the local steps of one client; H and G are the units below the C outputs.

    With one layer H is C; with two there is no G. Rows of the model's blocks are padded to HB, GB
    and CB, its inputs are taken BLOCK at a time, a batch's samples are padded to ROWS.
    """
    client = tl.program_id(0).to(tl.int64)
    start, size = tl.load(starts + client), tl.load(sizes + client).to(tl.int32)
    inputs += start * D
    targets += start * TARGETS
    orders += client * order_width
    u += client * stride
    corrections += client * correction_stride
    snapshots += client * snapshot_stride
    totals += client * total_stride
    turns = tl.cdiv(size, BATCH)
    if steps == 0:
        steps = epochs * turns
    snap = tl.minimum(snap, steps)
    r, rh, rk = tl.arange(0, ROWS), tl.arange(0, HB), tl.arange(0, BLOCK)
    at1, mh, at2, ok2, atg, mg, at3, ok3, atc, mc = _places(LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    b1, w2, b2, w3, b3 = _read_upper(x, LAYERS, D, H, G, C, HB, GB, CB, BIAS)
    # The first step's samples through the first layer; the model is copied on the way.
    there = r < tl.minimum(size, BATCH)
    rows = tl.load(orders + r, mask=there, other=0).to(tl.int32)
    acc = tl.zeros((ROWS, HB), tl.float32)
    for k in range(0, D, BLOCK):
        at, ok = rh[:, None] * D + (k + rk)[None, :], mh[:, None] & (k + rk < D)[None, :]
        w = tl.load(x + at, mask=ok, other=0.0)
        tl.store(u + at, w, mask=ok)
        a = _read_inputs(inputs, rows, there, k + rk, D)
        acc = _dot(a, tl.trans(w), acc, EXACT)
    tl.debug_barrier()
    for s in range(steps):
        delta, w2, b2, w3, b3, b1 = _upper(
            acc, w2, b2, w3, b3, b1, targets, rows, there, s,
            tl.minimum(size - (s % turns) * BATCH, BATCH),
            x, corrections, snapshots, totals, snap, lr, keep, keep_bias, pull, LAYERS, D, H, G, C,
            HB, GB, CB, LOSS, CLASSES, TANH, BIAS, CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE, EXACT,
        )  # fmt: skip
        turn = (s + 1) % turns
        after = ((r < tl.minimum(size - turn * BATCH, BATCH)) & (s + 1 < steps)) != 0
        place = ((s + 1) // turns) * longest + turn * BATCH
        coming = tl.load(orders + place + r, mask=after, other=0).to(tl.int32)
        acc = tl.zeros((ROWS, HB), tl.float32)
        for k in range(0, D, BLOCK):
            at, ok = rh[:, None] * D + (k + rk)[None, :], mh[:, None] & (k + rk < D)[None, :]
            w = tl.load(u + at, mask=ok, other=0.0)
            a = _read_inputs(inputs, rows, there, k + rk, D)
            b = _read_inputs(inputs, coming, after, k + rk, D)
            change = _dot(delta, lr * a, None, EXACT)  # not a alone: it would be read transposed
            w = _move(
                w, change, at, ok, s, snap, x, corrections, snapshots, totals, lr, keep, pull,
                CORRECTED, PROXIMAL, SNAPSHOT, AVERAGE,
            )  # fmt: skip
            tl.store(u + at, w, mask=ok)
            acc = _dot(b, tl.trans(w), acc, EXACT)
        rows, there = coming, after
        tl.debug_barrier()  # what one thread wrote of the model, others read in the next pass
    square = 0.0
    for k in range(0, D, BLOCK):
        at, ok = rh[:, None] * D + (k + rk)[None, :], mh[:, None] & (k + rk < D)[None, :]
        square += _finish(tl.load(u + at, mask=ok, other=0.0), at, ok, x, u)
    if LAYERS == 3:
        square += _finish(w2, at2, ok2, x, u)
        if BIAS:
            square += _finish(b2, atg, mg, x, u)
    if LAYERS > 1:
        square += _finish(w3, at3, ok3, x, u)
        if BIAS:
            square += _finish(b3, atc, mc, x, u)
    if BIAS:
        square += _finish(b1, at1, mh, x, u)
    tl.store(squares + client, square)
