"""Error, bytes and seconds of hidden sums without a network.

Run: python -m benchmarks.flower.hidden_sums

All clients' work runs one after the other in this process, so the seconds are those of the
arithmetic and the cryptography, for all clients together.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from equifed.flower.secure.session import (
    Epoch,
    from_fixed,
    majority,
    make_pair_mask,
    make_public_key,
    open_sum,
    to_fixed,
    worst_error,
)

SLOTS = 16


def pairs(vectors: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    n, d = vectors.shape
    secrets = {i: os.urandom(32) for i in range(n)}
    publics = {i: make_public_key(secret) for i, secret in secrets.items()}
    began, total = time.perf_counter(), np.zeros(d, dtype=np.uint64)
    for i in range(n):
        words = to_fixed(weights[i] * vectors[i], n)
        total = total + words + make_pair_mask(secrets[i], i, publics, "sum", d)
    return from_fixed(total), time.perf_counter() - began


def secure(vectors: np.ndarray, weights: np.ndarray, gone: int) -> tuple[np.ndarray, dict]:
    """Return the sum with ``gone`` clients lost between masking and unmasking, and the seconds."""
    n = len(vectors)
    clock = time.perf_counter
    epochs = {i: Epoch("bench", i, os.urandom(32), SLOTS) for i in range(n)}
    began = clock()
    published = {i: epoch.publish() for i, epoch in epochs.items()}
    boxes = {i: epoch.share(published)[0] for i, epoch in epochs.items()}
    prepared = clock()
    masked = {
        i: epochs[i].mask(to_fixed(weights[i] * vectors[i], n), 0, published) for i in range(n)
    }
    sent = clock()
    answers = {
        i: epochs[i].unmask(0, published, {j: boxes[j][i][0] for j in range(n) if j != i})
        for i in range(gone, n)
    }
    total = from_fixed(open_sum(masked, answers, 0, published))
    ended = clock()
    seconds = {
        "prepare_16_sums": prepared - began,
        "mask": sent - prepared,
        "unmask": ended - sent,
    }
    share_bytes = sum(len(b[0]) for one in boxes.values() for b in one.values())
    return total, {**{k: round(v, 3) for k, v in seconds.items()}, "share_bytes": share_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--size", type=int, nargs="+", default=[1_000, 1_000_000])
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    for n in chosen.clients:
        for d in chosen.size:
            vectors, weights = rng.normal(size=(n, d)), rng.dirichlet(np.ones(n))
            began = time.perf_counter()
            exact = weights @ vectors
            plain = time.perf_counter() - began
            simple, seconds = pairs(vectors, weights)
            gone = n - majority(n)
            double, table = secure(vectors, weights, gone)
            print(
                json.dumps(
                    {
                        "clients": n,
                        "size": d,
                        "vanished_before_unmasking": gone,
                        "bound": worst_error(n),
                        "error_pairs": float(np.abs(simple - exact).max()),
                        "error_secure": float(np.abs(double - exact).max()),
                        "plain_s": round(plain, 4),
                        "pairs_s": round(seconds, 3),
                        "secure_s": table,
                        "bytes_up_a_client": {"float32": 4 * d, "float64": 8 * d, "hidden": 8 * d},
                    }
                )
            )


if __name__ == "__main__":
    main()
