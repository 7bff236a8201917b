"""Every cell of the table of forms in the reference, done."""

import re
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.flower.grid import flower_clients, memory_grid
from tests.models.test_several_arrays import (
    CLIENTS,
    ByHand,
    InOrder,
    Reader,
    join_rows,
    make,
    take,
)
from torch.nn import functional as F
from torch.utils import data as td

import equifed as ef
from equifed.data import Federation
from equifed.engines.distributed import DistributedClients
from equifed.flower.task import Task
from equifed.models.export import export

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "samples.md"
LINES = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
HEAD, _, *ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]


class Items(td.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        held = {name: torch.as_tensor(values[k]) for name, values in self.x.items()}
        return held, int(self.y[k])


def collate(items):
    names = items[0][0]
    x = {name: torch.stack([held[name] for held, _ in items]) for name in names}
    return x, torch.tensor([y for _, y in items])


class Branching(ByHand):
    def forward(self, rows):
        return super().forward(rows) if bool(rows.sum() > -1e9) else rows


class Tokens(Reader):
    """Named as the models of transformers name them."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def list_sequences():
    ends = {c: x["mask"].sum(1).clip(1) for c, (x, _) in CLIENTS.items()}
    return {
        c: ({"tokens": [t[:n].tolist() for t, n in zip(x["tokens"], ends[c], strict=True)]}, y)
        for c, (x, y) in CLIENTS.items()
    }


def open_tokens():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    rows = [
        {"text": "...", "site": c, "input_ids": x["tokens"][k].tolist(), "label": int(y[k]),
         "attention_mask": [1] * 5}
        for c, (x, y) in CLIENTS.items()
        for k in range(len(y))
    ]  # fmt: skip
    return datasets.Dataset.from_list(rows)


@cache
def set_up(form):
    """Return federation, module, further arguments and new rows."""
    x, (sequences, _) = CLIENTS["north"][0], list_sequences()["north"]
    arrays = Federation.from_clients(take())
    rows, joined = Federation.from_clients(take(join=join_rows)), join_rows(take()["north"][0])
    tokens = {"input_ids": x["tokens"], "attention_mask": np.ones_like(x["tokens"])}
    sets = {c: Items(*pair) for c, pair in take().items()}
    loaders = {c: td.DataLoader(part, collate_fn=collate) for c, part in sets.items()}
    return {
        "one array": lambda: (rows, ByHand, {}, joined),
        "dict of arrays": lambda: (arrays, Reader, {}, x),
        "tuple of arrays": lambda: (
            Federation.from_clients(take(join=lambda x: tuple(x.values()))), InOrder, {},
            tuple(take()["north"][0].values()),
        ),
        "sequences, `pad=`": lambda: (
            Federation.from_clients(list_sequences(), pad=0, mask="mask"), Reader, {}, sequences,
        ),
        "data set of dicts": lambda: (Federation.from_clients(sets), Reader, {}, x),
        "`DataLoader` with `collate_fn`": lambda: (
            Federation.from_clients(loaders), Reader, {}, x,
        ),
        "Hugging Face tokens": lambda: (
            Federation.from_clients(open_tokens(), client="site"), Tokens, {}, tokens,
        ),
        "model that returns `logits`": lambda: (rows, lambda: ByHand("object"), {}, joined),
        "your own loss": lambda: (rows, ByHand, {"loss": smooth}, joined),
        "model that branches on values": lambda: (rows, Branching, {}, joined),
    }[form]()  # fmt: skip


def learn(clients):
    local = ef.LocalSGD(steps=2, lr=0.1, batch_size=2)
    return ef.train(ef.FedAvg(local=local), clients, rounds=1, progress=False)


def parameters(clients):
    return torch.cat([p.flatten() for p in learn(clients).parameters.values()])


@cache
def trained(form, own=None):
    data, kind, more, _ = set_up(form)
    return learn(ef.simulate(data, make(kind), engine="loop", own=own, **more))


def simulate(form, engine):
    data, kind, more, _ = set_up(form)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        clients = ef.simulate(data, make(kind), engine=engine, **more)
    wanted = torch.cat([p.flatten() for p in trained(form).parameters.values()])
    torch.testing.assert_close(parameters(clients), wanted, rtol=1e-4, atol=1e-5)
    return "loop instead" if any("does so now" in str(w.message) for w in told) else "works"


def distribute(form, _):
    data, kind, more, _ = set_up(form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = parameters(DistributedClients(data, make(kind), more.get("loss", "auto")))
    wanted = torch.cat([p.flatten() for p in trained(form).parameters.values()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def keep_own(form, _):
    history = trained(form, "head")
    assert {part.shape[0] for part in history.own.values()} == {3}
    scores = [history.predictor().for_client(c).answer(rows(form)) for c in ("north", "south")]
    assert not np.allclose(*scores)


def rows(form):
    """Return the new rows as one array."""
    data, *_, given = set_up(form)
    return given if data.layout is None else data.layout.pack(given)


def predict(form, _):
    data, *_, given = set_up(form)
    predictor = trained(form).predictor()
    assert np.array_equal(predictor.predict(given), predictor.predict(rows(form)))
    alone, i = predictor.answer(data.train.client(0)[0]), data.names.index("north")
    assert i == 0 and len(alone) == len(predictor.predict(given)) == 9


def keep(form, folder):
    _, kind, _, given = set_up(form)
    trained(form).save(folder / "run")
    again = ef.load_predictor(folder / "run", model=make(kind))
    wanted = trained(form).predictor().decision_function(given)
    np.testing.assert_array_equal(again.decision_function(given), wanted)


def write(form, folder):
    given, predictor = set_up(form)[3], trained(form).predictor()
    export(predictor, folder, program=True)
    again = ef.load_predictor(folder, trust=True).decision_function(given)
    np.testing.assert_allclose(again, predictor.decision_function(given), rtol=1e-4, atol=1e-5)


def take_features(form, _):
    data, kind, *_ = set_up(form)
    module = make(kind)
    made = ef.features(module, data, layer="norm")
    assert made.input_shape == (5,) and made.layout is None


def send(form, folder):
    data, kind, more, _ = set_up(form)
    address = f"{__name__}:smooth" if "loss" in more else "cross_entropy"
    the_task = Task(lambda *_: make(kind), address, init="given")
    found = parameters(flower_clients(memory_grid(data, the_task, folder), the_task))
    wanted = torch.cat([p.flatten() for p in trained(form).parameters.values()])
    assert torch.equal(found, wanted)


WAYS = {
    "loop": lambda form, _: simulate(form, "loop"),
    "stacked": lambda form, _: simulate(form, "stacked"),
    "auto": lambda form, _: simulate(form, "auto"),
    "distributed": distribute,
    "own part": keep_own,
    "prediction": predict,
    "run folder": keep,
    "export": write,
    "`ef.features`": take_features,
    "Flower": send,
}
CURES = re.compile(r"use the loop engine|torch.export cannot")


def test_the_table_has_all_ways():
    assert HEAD[1:] == list(WAYS)


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0])
def test_a_row_of_the_table(cells, tmp_path):
    form, *wanted = cells
    for way, what in zip(WAYS, wanted, strict=True):
        folder = tmp_path / way
        folder.mkdir()
        try:
            found = WAYS[way](form, folder) or "works"
        except ValueError as error:
            assert CURES.search(str(error)), error
            found = "refused"
        assert found == what, way
