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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LR = 0.05
BATCH = {"mlp": 50, "logistic": 50, "cnn": 20, "lstm": 20}
Parameters = list[np.ndarray]
"""Of the module, in torch's order: weights [out, in] before biases, layer after layer."""

# Peers print what they like: their standard output goes to the log, and answers to the driver.
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


@dataclass(frozen=True)
class Work:
    """The data of all clients, (n, m, ...) and (n, m), and the initial model."""

    model: str
    inputs: np.ndarray
    targets: np.ndarray
    parameters: Parameters
    rounds: int

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return BATCH[self.model]

    @property
    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The data of every client."""
        return list(zip(self.inputs, self.targets, strict=True))


def given() -> Work:
    """Read the work that the command line names."""
    folder, model, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with np.load(folder / f"{model}.npz") as saved:
        parameters = [saved[key] for key in saved.files]
    inputs, targets = np.load(folder / "inputs.npy"), np.load(folder / "targets.npy")
    return Work(model, inputs, targets, parameters, rounds)


def mean_loss(work: Work, parameters: Parameters) -> float:
    """Return the mean cross entropy over all samples of all clients."""
    inputs = work.inputs.reshape(-1, *work.inputs.shape[2:])
    scores = (read_sequences if work.model == "lstm" else go_through)(inputs, parameters)
    scores = scores - scores.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(scores, work.targets.reshape(-1, 1), axis=1)[:, 0]
    return float((np.log(np.exp(scores).sum(axis=1)) - chosen).mean())


def go_through(hidden: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Return the scores of linear maps with ReLU between, after convolutions with pooling."""
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        if weight.ndim == 4:
            hidden = convolve(hidden, weight, bias)
            continue
        hidden = hidden.reshape(len(hidden), -1) @ weight.T + bias
        if weight is not parameters[-2]:
            hidden = np.maximum(hidden, 0)
    return hidden


def convolve(images: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return a convolution of the same size, ReLU, and the largest of two by two."""
    side = weight.shape[-1] // 2
    padded = np.pad(images, ((0, 0), (0, 0), (side, side), (side, side)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    out = np.tensordot(patches, weight, axes=((1, 4, 5), (1, 2, 3))) + bias  # channels last
    n, high, wide, channels = out.shape
    pooled = out.reshape(n, high // 2, 2, wide // 2, 2, channels).max(axis=(2, 4))
    return np.maximum(pooled, 0).transpose(0, 3, 1, 2)


def read_sequences(tokens: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Return the scores of an LSTM's last state."""
    embedding, of_input, of_state, bias, more, weight, offset = parameters
    state = cell = np.zeros((len(tokens), of_state.shape[1]), dtype=embedding.dtype)
    for step in range(tokens.shape[1]):
        gates = embedding[tokens[:, step]] @ of_input.T + state @ of_state.T + bias + more
        enter, keep, new, show = np.split(gates, 4, axis=1)
        cell = sigmoid(keep) * cell + sigmoid(enter) * np.tanh(new)
        state = sigmoid(show) * np.tanh(cell)
    return state @ weight.T + offset


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-values))."""
    return 1 / (1 + np.exp(-values))


class Turn:
    """One round: wait for the driver, do it, answer."""

    def __init__(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("The driver has left.")
        self.restart()

    def restart(self) -> None:
        """Start the clock again: what came before is no part of the round."""
        self.begun = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop the clocks: seconds on the wall, and of the processor for this process."""
        ended = time.perf_counter(), time.process_time()
        self.seconds, self.processor = (b - a for a, b in zip(self.begun, ended, strict=True))

    def answer(self, work: Work, parameters: Iterable[np.ndarray]) -> None:
        """Tell the driver the seconds and the loss."""
        told = {"seconds": self.seconds, "processor": self.processor}
        told["loss"] = mean_loss(work, list(parameters))
        _answers.write(json.dumps(told) + "\n")
