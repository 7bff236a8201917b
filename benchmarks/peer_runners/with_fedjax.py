"""FedAvg with fedjax: ``fedjax.algorithms.fed_avg`` on its ``jit`` or its ``pmap`` backend."""
# ruff: noqa: E402  (settings come before the imports that read them)

from __future__ import annotations

import os
import sys

from shared import BATCH, LR, Turn, given

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
    hidden = batch["x"]
    for i, (weight, bias) in enumerate(params):
        hidden = (jax.nn.relu(hidden) if i else hidden) @ weight + bias
    chosen = jnp.take_along_axis(jax.nn.log_softmax(hidden), batch["y"][:, None], axis=1)
    return -chosen.mean()


work = given()
fedjax.set_for_each_client_backend(BACKEND)
clients = [fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}) for x, y in work.batches]
algorithm = fed_avg.federated_averaging(
    jax.grad(loss),
    client_optimizer=fedjax.optimizers.sgd(LR),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
)
state = algorithm.init([(jnp.asarray(w.T), jnp.asarray(b)) for w, b in work.layers])
key = jax.random.PRNGKey(0)
for _ in range(work.rounds):
    turn = Turn()
    key, use = jax.random.split(key)
    keys = jax.random.split(use, len(clients))
    state, _ = algorithm.apply(state, list(zip(range(len(clients)), clients, keys, strict=True)))
    jax.block_until_ready(state.params)
    turn.stop()
    turn.answer(work, [(np.asarray(w).T, np.asarray(b)) for w, b in state.params])
