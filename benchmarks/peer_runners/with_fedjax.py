"""FedAvg with fedjax: ``fedjax.algorithms.fed_avg`` on its ``jit`` or its ``pmap`` backend."""
# ruff: noqa: E402  (settings come before the imports that read them)

from __future__ import annotations

import os
import sys

from shared import LR, Turn, given

BACKEND = sys.argv[4] if len(sys.argv) > 4 else "jit"
if BACKEND == "pmap":  # one device a core, one client a device
    count = os.environ["OMP_NUM_THREADS"]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"

import jax

jax.tree_map = jax.tree_util.tree_map  # the older name, which fedjax still uses

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg


def loss(params, batch, rng):
    """Return the mean cross entropy of a batch."""
    scores = (read_sequences if work.model == "lstm" else go_through)(batch["x"], params)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], axis=1)
    return -chosen.mean()


def go_through(hidden, params):
    """Return the scores of linear maps with ReLU between, after convolutions with pooling."""
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        if weight.ndim == 4:
            hidden = jax.lax.conv(hidden, weight, (1, 1), "SAME") + bias[:, None, None]
            two = (1, 1, 2, 2)
            hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, two, two, "VALID")
            hidden = jax.nn.relu(hidden)
            continue
        hidden = hidden.reshape(len(hidden), -1) @ weight + bias
        hidden = hidden if weight is params[-2] else jax.nn.relu(hidden)
    return hidden


def read_sequences(tokens, params):
    """Return the scores of an LSTM's last state."""
    embedding, of_input, of_state, bias, more, weight, offset = params
    entering = embedding[tokens] @ of_input + bias + more  # all steps in one product

    def step(carried, gates):
        state, cell = carried
        enter, keep, new, show = jnp.split(gates + state @ of_state, 4, axis=1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        return (jax.nn.sigmoid(show) * jnp.tanh(cell), cell), None

    start = jnp.zeros((len(tokens), len(of_state)))
    (state, _), _ = jax.lax.scan(step, (start, start), entering.transpose(1, 0, 2))
    return state @ weight + offset


def turned(parameters):
    """Return matrices as [in, out] where they were [out, in], and back; an embedding stays."""
    first = 1 if work.model == "lstm" else 0
    return [p.T if p.ndim == 2 and k >= first else p for k, p in enumerate(parameters)]


work = given()
fedjax.set_for_each_client_backend(BACKEND)
clients = [fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}) for x, y in work.batches]
algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(LR),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1),
)
state = algorithm.init([jnp.asarray(p) for p in turned(work.parameters)])
key = jax.random.PRNGKey(0)
for _ in range(work.rounds):
    turn = Turn()
    key, use = jax.random.split(key)
    keys = jax.random.split(use, len(clients))
    state, _ = algorithm.apply(state, list(zip(range(len(clients)), clients, keys, strict=True)))
    jax.block_until_ready(state.params)
    turn.stop()
    turn.answer(work, turned([np.asarray(p) for p in state.params]))
