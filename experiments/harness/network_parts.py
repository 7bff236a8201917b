"""What definitions name by address: data, networks, steps of SCAFF-PD and a DRFA.

Everything here is given as ``experiments.harness.network_parts:Name``, as a user's own code is. The
address is part of what identifies the stored runs of a network table, so this file keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import equifed as ef
from equifed import DRFA, Federation, load
from equifed.contract import Clients, Info, Stream, Vector
from equifed.data import DataError, standardise
from equifed.runs import RunConfig, build_run

Rows = NDArray[np.int64]


# -- data -----------------------------------------------------------------------------------------


def folded_femnist(
    fold: int = 0,
    folds: int = 4,
    kept: float = 0.1,
    validation: bool = False,
    writers: int | None = None,
    copies: int = 0,
    strength: float = 1.0,
    seed: int = 0,
) -> Federation:
    """Return FEMNIST's writers with all their images pooled; one fold of each is for testing.

    A share ``kept`` of every writer's images is never tested: it is for validation if that is
    wanted, else for training. The others are tested once over all folds, which differ in size by
    at most one image. Ink is 1 and paper 0, so that the padding of a convolution is paper. Every
    training image is also there in so many distorted ``copies``.
    """
    if not 0 <= fold < folds:
        raise DataError(f"fold is one of 0..{folds - 1}, got {fold}.")
    if not 0 <= kept < 1:
        raise DataError(f"kept is a share in [0, 1), got {kept}.")
    data = load("femnist", writers=writers, seed=seed)
    assert data.test is not None
    parts: dict[str, dict[str, Any]] = {"train": {}, "validation": {}, "test": {}}
    for i, name in enumerate(data.names):
        pairs = zip(data.train.client(i), data.test.client(i), strict=True)
        x, y = (np.concatenate(both) for both in pairs)
        order = Stream(seed).at("folds", name).generator().permutation(len(y))
        first = round(kept * len(y))
        part = np.full(len(y), "train", dtype="U10")
        part[order[first:][fold::folds]] = "test"
        part[order[:first]] = "validation" if validation else "train"
        for split, held in parts.items():
            held[name] = (1 - x[part == split], y[part == split])
        if copies:
            held, stream = parts["train"], Stream(seed).at("copies", name)
            held[name] = with_copies(*held[name], copies, strength, stream)
    given = {"test": parts["test"], "classes": 62, "name": f"femnist, fold {fold} of {folds}"}
    if validation:
        given["validation"] = parts["validation"]
    return Federation.from_clients(parts["train"], **given)  # type: ignore[arg-type]


def with_copies(
    images: NDArray[Any], labels: Rows, copies: int, strength: float, stream: Stream
) -> tuple[NDArray[Any], Rows]:
    """Return images followed by distorted copies of all of them, with their labels.

    A copy is turned by up to 12 degrees, slanted and stretched (both ways by itself) by up to a
    seventh and shifted by up to 2 of 28 pixels, times ``strength``, drawn uniformly. What comes in
    from outside is 0, paper.
    """
    draw, n = stream.generator(), copies * len(labels)
    turn, slant, wide, high, right, down = strength * (2 * draw.random((6, n)) - 1)
    angle, slant, wide, high = 0.21 * turn, slant / 7, 1 + wide / 7, 1 + high / 7
    maps = np.empty((n, 2, 3), dtype=np.float32)
    maps[:, 0] = np.stack([wide * np.cos(angle), slant - np.sin(angle), right / 7], axis=1)
    maps[:, 1] = np.stack([np.sin(angle), high * np.cos(angle), down / 7], axis=1)
    plain = torch.as_tensor(images).repeat(copies, 1, 1, 1)
    grid = F.affine_grid(torch.as_tensor(maps), list(plain.shape), align_corners=False)
    moved = F.grid_sample(plain, grid, align_corners=False).numpy()
    return np.concatenate([images, moved]), np.tile(labels, copies + 1)


def shards(
    images: str, clients: int = 100, per_client: int = 2, seed: int = 0, samples: int | None = None
) -> Federation:
    """Return a pool of images sorted by class, cut into equal shards, and dealt to the clients.

    Test images are cut into as many shards and follow the same hands, so that a client is tested
    on the classes it has, with as many images as all others. Colours are standardised by the
    training images. ``images = "synthetic"`` are noise around one pattern per class, to try the
    code without files.
    """
    draw, total = Stream(seed).at("shards").generator(), clients * per_client
    hands = draw.permutation(total).reshape(clients, per_client)
    parts: list[dict[str, Any]] = []
    for x, y in image_pool(images, samples):
        shuffled = draw.permutation(len(y))
        pieces = np.array_split(shuffled[np.argsort(y[shuffled], kind="stable")], total)
        owned = [np.concatenate([pieces[s] for s in hand]) for hand in hands]
        parts.append({f"client {i:02d}": (x[rows], y[rows]) for i, rows in enumerate(owned)})
    return Federation.from_clients(
        parts[0], test=parts[1], classes=10, name=f"{images}, {per_client} shards a client"
    )


@lru_cache(maxsize=1)
def image_pool(images: str, samples: int | None = None) -> list[tuple[NDArray[Any], Rows]]:
    """Return standardised training and test images with their classes; read once per process."""
    if images == "synthetic":
        draw, count = np.random.default_rng(0), samples or 1000
        patterns = draw.standard_normal((10, 3, 32, 32))
        classes = [np.arange(n) % 10 for n in (count, count // 2)]
        noisy = [patterns[y] + draw.standard_normal((len(y), 3, 32, 32)) for y in classes]
        return [(x.astype(np.float32), y) for x, y in zip(noisy, classes, strict=True)]
    given = {} if samples is None else {"samples": samples}
    whole = load(images, partition={"name": "iid", "clients": 1}, **given)
    assert whole.test is not None
    axes, x = (0, *range(2, whole.train.inputs.ndim)), whole.train.inputs
    mean = x.mean(axes, dtype=np.float64, keepdims=True).astype(np.float32)
    deviation = x.std(axes, dtype=np.float64, keepdims=True).astype(np.float32)
    return [((one.inputs - mean) / deviation, one.targets) for one in (whole.train, whole.test)]


# -- networks -------------------------------------------------------------------------------------


def image_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: Sequence[int] = (64, 64),
    kernel: int = 5,
    padding: int = 0,
    hidden: Sequence[int] = (384, 192),
    dropout: Sequence[float] = (0.2, 0.5),
    patches: bool = False,
) -> nn.Module:
    """Convolutions that each are followed by a ReLU and halve the image, then hidden layers.

    The defaults are FedMDFG's network for CIFAR-10 (``CNN_CIFAR10_FedAvg`` of its authors' code:
    dropout before the ReLU of both hidden layers). With ``patches`` convolutions are products of
    patches and matrices, which batch over clients as plain products; the function is the same.
    """
    layers: list[nn.Module] = []
    kind = PatchConv2d if patches else nn.Conv2d
    for fan_in, fan_out in pairwise([input_shape[0], *channels]):
        layers += [kind(fan_in, fan_out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    with torch.no_grad():
        width = nn.Sequential(*layers)(torch.zeros(1, *input_shape)).numel()
    layers.append(nn.Flatten())
    for (fan_in, fan_out), drop in zip(pairwise([width, *hidden]), dropout, strict=True):
        layers += [nn.Linear(fan_in, fan_out), nn.Dropout(drop), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear([width, *hidden][-1], outputs))


class PatchConv2d(nn.Conv2d):
    """``nn.Conv2d`` of stride 1 as one product of a matrix and all patches of all images."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the images' convolutions."""
        (p, q), (k, m) = self.padding, self.kernel_size
        padded = F.pad(inputs, (q, q, p, p)) if p or q else inputs  # type: ignore[operator]
        high, wide = padded.shape[2] - k + 1, padded.shape[3] - m + 1
        seen = torch.stack([padded[:, :, i : i + high] for i in range(k)], dim=2)
        seen = torch.stack([seen[..., j : j + wide] for j in range(m)], dim=3)  # (B, C, k, m, H, W)
        shape = (len(inputs), high, wide)
        rows = seen.movedim(0, 3).flatten(3).flatten(0, 2)  # (C k m, B H W)
        out = self.weight.flatten(1) @ rows
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.unflatten(1, shape).transpose(0, 1)


# -- steps of SCAFF-PD ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DecayingSteps:
    """Steps of SCAFF-PD as FedAvg's: eta and tau = J eta, both decaying as with ``Paced``.

    Parameters
    ----------
    lr : float
        eta of the first round.
    local_steps : int
        J.
    dual, extrapolation : float
        sigma and theta, the same in every round.
    decay, every
        Factor per round, and rounds between two changes by it.
    """

    lr: float
    local_steps: int
    dual: float
    extrapolation: float = 1.0
    decay: float = 1.0
    every: int = 1

    def start(self, problem: Any = None) -> Any:
        """Return the step sizes of the first round."""
        from equifed.steps import ConstantSteps

        given = (self.lr * self.local_steps, self.dual, self.extrapolation, self.lr)
        return ConstantSteps(*given).start()

    def next(self, sizes: Any, turned: Any = None) -> Any:
        """Return the step sizes of the next round."""
        t = sizes.round + 1
        factor = self.decay**self.every if t % self.every == 0 else 1.0
        return replace(sizes, primal=factor * sizes.primal, local=factor * sizes.local, round=t)


# -- published test samples, pooled and split anew -------------------------------------------------


def split_again(
    data: str,
    validation: float = 0.2,
    test: float = 0.3,
    seed: int = 0,
    scaled: int = 0,
    clients: str | None = None,
) -> Federation:
    """Return a data set whose clients' samples are pooled and split again.

    The first ``scaled`` columns are standardised again, with the new training samples. ``clients``
    is for data sets that ask who the clients are.
    """
    pooled = pool(data, clients)
    split = pooled.split(validation=validation, test=test, seed=seed)
    return standardise(split, range(scaled)) if scaled else split


@lru_cache(maxsize=2)  # tries of one data set come one after another
def pool(data: str, clients: str | None = None) -> Federation:
    """Return a data set with all samples of every client for training.

    ``"fashion-three, all images"`` is :func:`fashion_three_whole`.
    """
    if data == "fashion-three, all images":
        whole = fashion_three_whole()
    else:
        whole = load(data) if clients is None else load(data, clients=clients)
    parts = list(whole.splits().values())
    samples = {
        name: tuple(np.concatenate(columns) for columns in
                    zip(*(part.client(i) for part in parts), strict=True))
        for i, name in enumerate(whole.names)
    }  # fmt: skip
    return Federation.from_clients(
        samples, name=whole.name, classes=whole.classes, class_names=whole.class_names,
        source=whole.source,
    )  # fmt: skip


def load_table(data: Mapping[str, Any]) -> Federation:
    """Return the federation of a table ``[data]``, holdout and all."""
    table: dict[str, Any] = {"data": dict(data), "rounds": 1}  # a configuration is about a run
    table |= {"model": {"name": "logistic"}, "algorithm": {"name": "fedavg"}}
    return build_run(RunConfig.from_dict(table)).federation


def with_constant(of: dict[str, Any]) -> Federation:
    """Return the data of another table with flat inputs and one more column, of ones.

    Its weight is a bias that all clients share, so that an own bias is the distance to it.
    """
    data = load_table(of)
    return data.with_inputs({
        k: np.hstack([s.inputs.reshape(len(s.inputs), -1), np.ones((len(s.inputs), 1), np.float32)])
        for k, s in data.splits().items()
    })  # fmt: skip


# -- three clients of Fashion-MNIST ----------------------------------------------------------------

CLIENTS = {"T-shirt": 0, "pullover": 2, "shirt": 6}
SMALL = 0.001
"""Added to a deviation by q-FFL's preparation, whose pixels are 0 to 255."""


def fashion_three_whole(
    *, scaling: Literal["pixels", "standardised"] = "pixels", samples: int | None = None
) -> Federation:
    """T-shirts, pullovers, shirts of Fashion-MNIST, all images: 3 clients, one class each.

    Parameters
    ----------
    scaling : {"pixels", "standardised"}
        Pixels in [0, 1], or each pixel less its mean over its deviation in the training images of
        all ten classes, as q-FFL's published preparation has it.
    samples : int, optional
        Take the first so many training images of all ten classes, and a sixth as many test images.
    """
    pool: Any = {} if samples is None else {"samples": samples}
    data = ef.load("fashion-mnist", partition={"name": "one-class", "clients": 10}, **pool)
    assert data.test is not None
    inputs = {"train": data.train.inputs, "test": data.test.inputs}
    if scaling == "standardised":
        mean, deviation = inputs["train"].mean(0), inputs["train"].std(0) + SMALL / 255
        inputs = {split: (one - mean) / deviation for split, one in inputs.items()}
    scaled = data.with_inputs(inputs)
    parts: dict[str, dict[str, Any]] = {}
    for split, part in scaled.splits().items():
        parts[split] = {}
        for label, (name, old) in enumerate(CLIENTS.items()):
            images, labels = part.client(old)
            assert (labels == old).all()
            parts[split][name] = (images, np.full(len(labels), label))
    return Federation.from_clients(
        parts["train"], test=parts["test"], name=f"fashion-three-whole ({scaling})",
        classes=len(CLIENTS), class_names=tuple(CLIENTS), source=data.source,
    )  # fmt: skip


# -- DRFA with a gamma that shrinks ----------------------------------------------------------------


@dataclass(frozen=True)
class Decaying:
    """DRFA whose gamma is multiplied by a factor before every round.

    Parameters
    ----------
    drfa : DRFA
        With the gamma before the first round.
    factor : float
        0.9 in MLOPTPSU/FedTorch, ``centered/drfa.py``.
    """

    drfa: DRFA = field(default_factory=DRFA)
    factor: float = 0.9

    def init(self, clients: Clients, x: Vector) -> Any:
        """Return the state before the first round."""
        return self.drfa.init(clients, x)

    def round(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        """Return the state after one round of DRFA with this round's gamma."""
        gamma = self.drfa.dual_step * self.factor ** (state.rounds + 1)
        return replace(self.drfa, dual_step=gamma).round(state, clients, stream)

    def model(self, state: Any) -> Vector:
        """Return DRFA's model."""
        return self.drfa.model(state)
