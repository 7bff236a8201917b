"""The one way to clients in this process, and which engine is the fastest for a model here.

Modules that are not fully connected have no best engine: batching over clients wins on a GPU and
for many small operations, a core for each client wins for convolutions on a CPU. So a few gradients
are measured. What was found holds for all federations of the same kind in this process, so that
seeds and comparisons compute the same way; a run folder names the engine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from equifed.contract import OwnL2, OwnSteps, Stream, Traffic
from equifed.data.federation import Federation
from equifed.engines.in_process import resolve_model
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import NotBatched, StackedClients
from equifed.engines.threads import Precision
from equifed.models.architectures import Init, choose_init
from equifed.models.flat import Penalise
from equifed.models.losses import ClassWeights, SampleLoss, weigh_classes

Simulated = StackedClients | LoopClients


BATCH, TURNS = 20, 3
MOST_CLIENTS = {"cpu": 16, "cuda": 256}
MOST_NUMBERS = 1 << 26
"""Of all gradients that are measured at once: a few hundred megabytes."""

BETTER = 0.97
"""The loop must take less than this share of the stacked engine's time to be chosen."""

HOPELESS = 4.0
"""A way whose first gradients take so many times another's is not measured again."""

_KNOWN: dict[str, tuple[str, str]] = {}
"""Engine and sentence by what the choice depends on."""


def simulate(
    data: Federation,
    model: nn.Module | str,
    loss: SampleLoss | str = "auto",
    *,
    engine: Literal["auto", "stacked", "loop"] = "auto",
    class_weights: ClassWeights | None = None,
    l2: float = 0.0,
    penalise: Penalise = "all",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    init: Init | None = None,
    memory: int | None = None,
    chunk: int | None = None,
    fast: bool = True,
    compiled: bool | Literal["auto"] = "auto",
    precision: Precision = "full",
    own: str | Sequence[str] | None = None,
    own_l2: OwnL2 | None = None,
    own_steps: OwnSteps = "auto",
    privacy: Any = None,
) -> Simulated:
    """Simulate the clients of a federation in this process.

    Parameters
    ----------
    data : Federation
        The clients' data; training uses its ``train`` split.
    model : torch.nn.Module or str
        A module, or the name of one (``equifed list models``). Parameters with
        ``requires_grad=False`` stay as they are and are not sent. Where a sample consists of
        several arrays, ``forward`` gets them by name or in order.
    loss : callable or str
        Per-sample loss of (outputs, targets), or its name (``equifed list losses``); ``"auto"`` is
        cross-entropy for classes and squared for numbers. Outputs are the tensor that the module
        returns, or ``logits`` of a dict or an object.
    engine : {"auto", "stacked", "loop"}
        ``"stacked"`` moves many clients at once, ``"loop"`` gives each of them a core; ``"auto"``
        is stacked for fully connected models and else whichever takes less time for a few
        gradients here (``choice`` tells).
    class_weights : {"balanced"} or mapping of class to weight, optional
        Weights of the classes in the loss; see :func:`equifed.models.losses.weigh_classes`.
    l2 : float
        Strength of the penalty ``l2 / 2 |x|^2`` in every client's loss.
    penalise : {"all", "weights"}
        Of which parameters: all that are trained, or all but biases, as scikit-learn does. With
        free biases a classifier's losses are not strongly convex and there is no certificate.
    dtype : torch.dtype
        Precision of the model and of real-valued data.
    device : str or torch.device
        Where to compute.
    init : {"given", "fresh"}, optional
        Start from the parameters that the module has, or draw them anew; by default the first for a
        module that is handed over, the second for one that is named.
    memory : int, optional
        Bound in bytes on the client vectors that are kept; beyond it they are made again when
        needed. As much may stay at hand for those of the next round. By default 1 GiB, on a GPU an
        eighth of its memory. This and what follows is about the stacked engine; the loop needs none
        of it.
    chunk : int, optional
        Clients per chunk; chosen from the model's and the samples' sizes if not given.
    fast : bool
        Use hand-written gradients for fully connected models; False takes every model through
        ``torch.func``.
    compiled : {"auto", True, False}
        Compile what goes through ``torch.func``: a minute at the start, then faster steps.
        ``"auto"`` does so on a GPU where the rounds to come take long enough to gain by it, and
        keeps it if it is faster; an event says so.
    precision : {"full", "tf32", "bf16"}
        Of the matrix products in gradients on a GPU.
    own : {"bias", "head", "norm"} or sequence of str, optional
        Parameters that every client keeps for itself: the bias of the last layer, its weight and
        bias, scales and shifts of normalisation layers, or names and patterns (``"3.*"``). They are
        not part of the model vector and are never sent.
    own_l2 : float or str, optional
        Strength of the penalty that draws own parameters to zero. ``"3/n"`` is 3 divided by the
        client's number of training samples, at most 1: few samples move its own part little, many
        as far as they want. ``"1/n"`` is the default of an own bias of classes in local steps, and
        ``l2`` that of other own parameters. Profile losses take a number: 1e-3 for classes, since
        the own bias of a client that lacks a class would grow without end, 0 for squared losses.
    own_steps : {"auto", "profile", "joint", "alternating"}
        How own parameters are found. ``"profile"``: those that are best for the shared model, on
        all samples (linear models with an own bias; certificates hold). ``"joint"``: by local
        steps together with the shared ones, kept from round to round. ``"alternating"``: as many
        local steps on the own ones, then on the shared ones (FedAlt). ``"auto"`` is profile where
        that is possible, else joint.
    privacy : Privacy, optional
        Differential privacy of the rows: every answer is clipped and gets noise at the client,
        which the ``"loop"`` engine does.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> clients.names
    ('T-shirt', 'pullover', 'shirt')
    """
    if engine not in ("auto", "stacked", "loop"):
        raise ValueError(f"engine must be auto, stacked or loop, got {engine!r}.")
    module, loss = resolve_model(data, model, loss)
    loss = weigh_classes(loss, class_weights, data)
    given: dict[str, Any] = {"l2": l2, "penalise": penalise, "dtype": dtype, "device": device}
    given |= {"init": choose_init(model, init), "own": own}
    given |= {"own_l2": own_l2, "own_steps": own_steps}
    tuning: dict[str, Any] = {"memory": memory, "chunk": chunk, "fast": fast}
    tuning |= {"compiled": compiled, "precision": precision}
    if privacy is not None:
        if engine == "stacked":
            raise ValueError("engine='stacked' adds no noise; privacy takes engine='loop'.")
        private: LoopClients = privacy.make_clients(data, module, loss, **given)
        private.model_name = model if isinstance(model, str) else None
        return private
    stacked: StackedClients | None = None
    if engine != "loop":
        try:
            stacked = StackedClients(data, module, loss, **given, **tuning)
        except NotBatched as error:
            if engine == "stacked":
                raise
            warnings.warn(f"{error} engine='auto' does so now.", UserWarning, stacklevel=2)
    tuned = engine == "stacked" or compiled is True or precision != "full" or chunk is not None
    if stacked is None:
        clients: Simulated = LoopClients(data, module, loss, **given)
    elif tuned or not stacked.worth_measuring():
        clients = stacked
    else:
        loop = LoopClients(data, module, loss, **given)
        clients = choose_faster(stacked, loop, stacked.flatten(module))
    clients.model_name = model if isinstance(model, str) else None  # to build it again
    return clients


def choose_faster(stacked: StackedClients, loop: LoopClients, x: Tensor) -> Simulated:
    """Return the engine whose gradients at x take less time; its ``choice`` says so."""
    model, device = stacked.model, stacked.model.device
    most = min(MOST_CLIENTS[device.type], MOST_NUMBERS // model.size)
    held = np.flatnonzero(stacked.sizes)[: max(1, most)]  # a process of a group has some of them
    count = len(held)
    shapes = [*model.all_shapes.items()], stacked._inputs.shape[1:]
    where = model.dtype, device, torch.get_num_threads(), count
    kind = repr((str(model.module), shapes, where))
    if kind not in _KNOWN:
        ways: dict[str, Callable[[], object]] = {}
        for clients in (stacked, loop):
            some = clients.subset(held)
            some.traffic = Traffic(len(clients.names))  # nothing of this is an exchange
            ways[clients.engine] = partial(some.value_and_gradient, x, Stream(0), BATCH)
        seconds = measure(ways, device)
        name = "loop" if seconds["loop"] < BETTER * seconds["stacked"] else "stacked"
        each = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in seconds.items())
        told = f"engine: {name}, measured on gradients of {count} clients ({each})."
        _KNOWN[kind] = name, told
    name, told = _KNOWN[kind]
    chosen: Simulated = loop if name == "loop" else stacked
    chosen.choice = told
    return chosen


def measure(ways: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the shortest time of each way; they take turns, hopeless ones only once."""
    best: dict[str, float] = {}
    for turn in range(1 + TURNS):
        for name, way in ways.items():
            if turn > 1 and best[name] > HOPELESS * min(best.values()):
                continue
            start = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            # The first turn pays for tracing and allocation.
            best[name] = seconds if turn <= 1 else min(best[name], seconds)
    return best
