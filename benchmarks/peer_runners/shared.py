"""What all runners share: the work, taking turns with the driver, and one judge of the models.

A runner gets the folder of the work, the name of the model and the number of rounds. For every line
on its standard input it does one round and answers with one line of JSON: the seconds of the round
and the mean loss after it. Only NumPy is imported: each runner has an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH, STEPS, LR = 50, 12, 0.05
Layers = list[tuple[np.ndarray, np.ndarray]]
"""Weights [out, in] and bias of every linear layer, with ReLU in between."""

# Peers print what they like: their standard output goes to the log, and answers to the driver.
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


@dataclass(frozen=True)
class Work:
    """The data of all clients, (n, m, d) and (n, m), and the initial model."""

    inputs: np.ndarray
    targets: np.ndarray
    layers: Layers
    rounds: int

    @property
    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The data of every client."""
        return list(zip(self.inputs, self.targets, strict=True))


def given() -> Work:
    """Read the work that the command line names."""
    folder, model, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with np.load(folder / f"{model}.npz") as saved:
        flat = [saved[key] for key in saved.files]
    inputs, targets = np.load(folder / "inputs.npy"), np.load(folder / "targets.npy")
    return Work(inputs, targets, list(zip(flat[::2], flat[1::2], strict=True)), rounds)


def mean_loss(work: Work, layers: Layers) -> float:
    """Return the mean cross entropy over all samples of all clients."""
    hidden = work.inputs.reshape(-1, work.inputs.shape[-1])
    for i, (weight, bias) in enumerate(layers):
        hidden = (np.maximum(hidden, 0) if i else hidden) @ weight.T + bias
    scores = hidden - hidden.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(scores, work.targets.reshape(-1, 1), axis=1)[:, 0]
    return float((np.log(np.exp(scores).sum(axis=1)) - chosen).mean())


class Turn:
    """One round: wait for the driver, do it, answer."""

    def __init__(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("The driver has left.")
        self.begun = time.perf_counter()

    def restart(self) -> None:
        """Start the clock again: what came before is no part of the round."""
        self.begun = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.begun

    def answer(self, work: Work, layers: Layers) -> None:
        """Tell the driver the seconds and the loss."""
        loss = mean_loss(work, layers)
        _answers.write(json.dumps({"seconds": self.seconds, "loss": loss}) + "\n")
