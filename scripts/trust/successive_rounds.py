"""What successive rounds give away: a client that is missing next time, seen from outside.

    python scripts/trust/successive_rounds.py

Hidden sums hide the terms of one sum. But a client that leaves shows in the difference of two
rounds: near convergence the model hardly moves, so the sum of all in one round minus the sum
without the client in the next one is nearly that client's gradient, whatever the protocol. Six
clients train a softmax regression by full gradients; after so many rounds one of them is missing.
Prints the relative error with which a server then knows its gradient.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.flower.grid import convex, loop_clients, task

from equifed.contract.streams import Stream

CLIENTS, LOST, LENGTH = 6, 2, 0.1
ROUNDS = (1, 3, 10, 30, 100, 300, 1000)


def measure(rounds: tuple[int, ...] = ROUNDS) -> dict[int, tuple[float, float]]:
    """Return, by round, the error of the difference and the length of the sum of all."""
    clients, stream = loop_clients(convex(CLIENTS, d=20), task()), Stream(0)
    fewer = clients.subset(np.delete(np.arange(CLIENTS), LOST))
    share = np.full(CLIENTS, 1 / CLIENTS)
    x, found = clients.initial(stream), {}
    for r in range(1, max(rounds) + 1):
        _, gradients = clients.value_and_gradient(x, stream)
        total = gradients.weighted_sum(share)
        after = x - LENGTH * total
        if r in rounds:
            truth = gradients.dense()[LOST] / CLIENTS
            _, others = fewer.value_and_gradient(after, stream)
            guess = total - others.weighted_sum(share[1:])
            error = float((guess - truth).norm() / truth.norm())
            found[r] = error, float(torch.linalg.vector_norm(total))
        x = after
    return found


def main() -> int:
    """Print the table."""
    print("| rounds before it was missing | error of its gradient | length of the sum of all |")
    print("|---|---|---|")
    for r, (error, length) in measure().items():
        print(f"| {r} | {100 * error:.2g} % | {length:.2g} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
