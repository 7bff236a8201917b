"""A module or loss that clients cannot share gives one clear error, when it is handed over."""

import functools
import warnings

import numpy as np
import pytest
import torch
from tests.problems import classification, regression
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from equifed.contract.streams import Stream
from equifed.data import Federation
from equifed.engines.simulate import simulate
from equifed.models.losses import cross_entropy, squared

ENGINES = ("loop", "stacked", "auto")


class Returning(nn.Linear):
    """A linear layer that returns something else than its outputs."""

    def __init__(self, change) -> None:
        super().__init__(3, 3)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


class Mixing(nn.Linear):
    """Subtracts the mean of the batch, without keeping any statistics."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def do_as_before(change) -> nn.Module:
    """Return what torch made of a layer before it had parametrisations and export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return change(nn.Linear(3, 3))


MODULES = {
    "dict": (Returning(lambda o: {"scores": o, "loss": 0}), "scores, loss, and no .logits.; call"),
    "tuple": (Returning(lambda o: (o, o)), "returns a tuple of 2; wrap it"),
    "whole numbers": (Returning(lambda o: o.argmax(1)), "int64 outputs"),
    "one number": (Returning(lambda o: o.mean()), r"outputs of shape \(\)"),
    "no sample axis": (Returning(lambda o: o.sum(0)[:2]), r"3 samples to .* of shape \(2,\)"),
    "outputs": (nn.Linear(3, 2), r"shape \(2,\) per sample, the data 3 classes; .* 3 outputs"),
    "more outputs": (nn.Linear(3, 4), r"shape \(4,\) per sample, the data 3 classes"),
    "one output": (nn.Linear(3, 1), r"shape \(1,\) per sample, the data 3 classes"),
    "inputs": (
        nn.Sequential(nn.Linear(5, 3)),
        r"samples of shape \(3,\).*stopped at Linear\(in_features=5.*given \(3, 3\)",
    ),
    "convolution": (nn.Conv2d(1, 3, 3), r"samples of shape \(3,\).*stopped at Conv2d\(1, 3"),
    "tokens": (nn.Embedding(7, 3), r"samples of shape \(3,\) .torch.float32.*at Embedding\(7, 3"),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), r"'0' \(LazyLinear\) is lazy .* call the model once"),
    "meta": (nn.Linear(3, 3, device="meta"), "meta device"),
    "batch": (Mixing(3, 3), "depend on the other samples of the batch"),
    "no module": (lambda x: x, "must be a torch.nn.Module or a name, got function"),
    "weight norm": (do_as_before(nn.utils.weight_norm), "cannot be copied.*remove_weight_norm"),
    "pruned": (prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5), "copied.*prune.remove"),
    "script": (do_as_before(torch.jit.script), "TorchScript"),
    "statistics": (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False)),
        r"'1' \(BatchNorm1d\) keeps running statistics.*equifed.features",
    ),
    "extra attention": (
        nn.MultiheadAttention(4, 2, dropout=0.1, add_zero_attn=True),
        r"\(MultiheadAttention\) has dropout besides .* set dropout=0.0",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("module", "message"), MODULES.values(), ids=MODULES)
def test_modules_that_do_not_fit_are_refused(module, message, engine):
    with pytest.raises(ValueError, match=message):
        simulate(classification(dtype=np.float32), module, "cross_entropy", engine=engine)


def test_a_sequence_that_comes_second_is_refused():
    """Attention over (samples, length, features) with batch_first=False mixes samples."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="batch_first=True"):
        simulate(classification(shape=(2, 4)), module)


LOSSES = {
    "mean": (nn.CrossEntropyLoss(), r"CrossEntropyLoss has reduction='mean'.*\(reduction='none'\)"),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), r"has reduction='sum'.*reduction='none'"),
    "function": (
        F.cross_entropy,
        r"cross_entropy gives shape \(\) .*reduction='none'",
    ),
    "partial": (functools.partial(F.cross_entropy, reduction="sum"), r"gives shape \(\)"),
    "expanded": (lambda o, t: F.cross_entropy(o, t)[None], r"gives shape \(1,\) for 3 samples"),
    "matrix": (lambda o, t: (o - F.one_hot(t, 3)) ** 2, r"shape \(3, 3\).* average over all axes"),
    "class": (nn.CrossEntropyLoss, "cannot compare|gives CrossEntropyLoss"),
    "number": (lambda o, t: 1.0, "gives float"),
    "repeated": (lambda o, t: F.cross_entropy(o, t).expand(len(o)), "other samples are beside it"),
    "divided": (lambda o, t: cross_entropy(o, t) / len(o), "other samples are beside it"),
    "centred": (lambda o, t: cross_entropy(o - o.mean(0), t), "other samples are beside it"),
    "counts": (lambda o, t: (o.argmax(1) != t).long(), "int64 numbers without a derivative"),
    "errors": (lambda o, t: (o.argmax(1) != t).to(o), "float64 numbers without a derivative"),
    "kind": (nn.BCEWithLogitsLoss(reduction="none"), r"cannot compare .*\(3, 3\).* \(3,\)"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("loss", "message"), LOSSES.values(), ids=LOSSES)
def test_losses_that_are_not_one_number_per_sample_are_refused(loss, message, engine):
    with pytest.raises(ValueError, match=message):
        simulate(classification(), nn.Linear(3, 3), loss, engine=engine, dtype=torch.float64)


@pytest.mark.parametrize("targets", [1, 2])
def test_a_loss_that_broadcasts_is_refused(targets):
    """Outputs (m, 1) minus targets (m,) make (m, m): a number for every pair."""
    federation = regression(outputs=targets)
    with pytest.raises(ValueError, match=r"shape \(3, [23]\) for 3 samples"):
        simulate(federation, nn.Linear(3, targets), nn.MSELoss(reduction="none"))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_losses_of_torch_without_reduction_are_taken(engine):
    """Agreement with our own loss, also for clients of one sample."""
    given = {"engine": engine, "dtype": torch.float64}
    one = simulate(classification(sizes=(1,)), nn.Linear(3, 3), **given, init="fresh")
    assert one.model.size == 12
    module = nn.Linear(3, 3)
    ours, theirs = (
        simulate(classification(), module, loss, **given)
        for loss in (cross_entropy, nn.CrossEntropyLoss(reduction="none"))
    )
    x = ours.initial(None)
    np.testing.assert_allclose(ours.losses(x, None), theirs.losses(x, None))


def test_one_output_tells_two_classes_apart_by_its_sign_only():
    two = classification(classes=2)
    assert simulate(two, nn.Linear(3, 1), "logistic").model.size == 4
    for loss in (cross_entropy, squared):  # the sign says nothing about targets 0 and 1
        with pytest.raises(ValueError, match=r"shape \(1,\) per sample, the data 2 classes"):
            simulate(two, nn.Linear(3, 1), loss)


@pytest.mark.parametrize("engine", ENGINES)
def test_devices_that_are_not_there(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda', but torch .* finds no CUDA device here"):
        simulate(classification(), "linear", engine=engine, device="cuda")
    with pytest.raises(ValueError, match="Unknown device 'gpu'; use 'cpu' or 'cuda'"):
        simulate(classification(), "linear", engine=engine, device="gpu")
    with pytest.raises(ValueError, match="'meta' cannot compute here"):
        simulate(classification(), "linear", engine=engine, device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="only 1 CUDA devices"):
        simulate(classification(), "linear", engine=engine, device="cuda:1")


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_that_a_model_cannot_compute_with(engine):
    wrong = nn.Linear(3, 3)
    nn.init.constant_(wrong.bias, np.nan)
    with pytest.raises(ValueError, match="parameter 'bias' has numbers that are not finite"):
        simulate(classification(), wrong, engine=engine).initial(Stream(0))
    for dtype in (torch.int64, "float64"):
        with pytest.raises(ValueError, match=r"dtype must be torch.float32.*got"):
            simulate(classification(), "linear", engine=engine, dtype=dtype)
    X, y = np.random.default_rng(0).normal(size=(4, 3)), np.array([0.0, 1.5, 2.5, 1.0])
    for bad in ((1e300 * X, y), (X, 1e300 * y)):
        data = Federation.from_clients({"north": (X, y), "south": bad})
        with pytest.raises(ValueError, match=r"Client south: .*largest of torch.float32; rescale"):
            simulate(data, "linear", engine=engine)
        assert simulate(data, "linear", engine=engine, dtype=torch.float64).model.size == 4


def test_more_classes_than_present_need_as_many_outputs():
    clients = {"a": (np.ones((3, 2)), [0, 1, 1])}
    federation = Federation.from_clients(clients, classes=5)
    with pytest.raises(ValueError, match="the data 5 classes"):
        simulate(federation, nn.Linear(2, 2))
    assert simulate(federation, nn.Linear(2, 5)).model.size == 15
