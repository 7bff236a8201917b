"""Data sets of items become what the same samples as arrays become, or are refused by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.utils import data as td

import equifed as ef
from equifed.data import DataError, Federation, items

DRAW = np.random.default_rng(0)
ARRAYS = {
    name: (DRAW.standard_normal((n, 2, 3)).astype("float32"), np.arange(n) % 3)
    for name, n in {"north": 9, "south": 300, "west": 5}.items()
}


class Pairs(td.Dataset):
    """A map-style data set as users write them: numpy in, a tensor and an int out."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        if not 0 <= k < len(self.y):
            raise IndexError(k)
        return torch.from_numpy(self.x[k]), int(self.y[k])


class Columns(Pairs):
    """A data set whose items are dicts."""

    def __getitem__(self, k):
        return {"pixels": self.x[k], "age": float(k), "dose": k, "label": int(self.y[k])}


def pairs(x=None, y=None):
    return Pairs(*ARRAYS["north"]) if x is None else Pairs(x, y)


def tensors(x, y):
    return td.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def shuffled_subset(x, y):
    """The samples, wanted as a Subset of a larger data set in another order."""
    order = np.random.default_rng(1).permutation(len(y))
    back = np.argsort(order)
    return td.Subset(Pairs(x[order], y[order]), back.tolist())


def loader(x, y):
    return td.DataLoader(Pairs(x, y), batch_size=4, shuffle=True)


def sampled(x, y):
    twice = Pairs(np.concatenate([x, x + 1]), np.concatenate([y, y]))
    return td.DataLoader(twice, sampler=td.SubsetRandomSampler(range(len(y))))


def negate(batch):
    return torch.stack([-x for x, _ in batch]), torch.tensor([y for _, y in batch])


def collated(x, y):
    return td.DataLoader(Pairs(-x, y), batch_size=2, collate_fn=negate)


FORMS = [Pairs, tensors, shuffled_subset, loader, sampled, collated]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_data_set_is_its_samples(form):
    wanted = Federation.from_clients(ARRAYS)
    found = Federation.from_clients({c: form(*p) for c, p in ARRAYS.items()})
    assert found.checksum() == wanted.checksum()
    mixed = {**ARRAYS, "south": form(*ARRAYS["south"])}
    assert Federation.from_clients(mixed, test=mixed).test.inputs.tobytes() == (
        wanted.train.inputs.tobytes()
    )


@pytest.mark.parametrize("form", [lambda x, y: (x, y), Pairs], ids=["arrays", "data sets"])
def test_fractions_are_those_of_split(form):
    whole = Federation.from_clients(ARRAYS)
    wanted = whole.split(validation=0.2, test=0.25, seed=3)
    clients = {c: form(*pair) for c, pair in ARRAYS.items()}
    found = Federation.from_clients(clients, validation=0.2, test=0.25, seed=3)
    assert found.checksum() == wanted.checksum()
    kept = Federation.from_clients(clients, validation=clients, test=0.25, seed=3)
    assert (
        kept.validation.inputs.tobytes() == Federation.from_clients(ARRAYS).train.inputs.tobytes()
    )
    assert kept.test.sizes.tolist() == wanted.test.sizes.tolist()


@pytest.mark.parametrize("shares", [{}, {"test": 0.25, "validation": 0.1}])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_large_features_lie_in_a_file_and_are_the_same(monkeypatch, shares, dtype):
    clients = {c: Pairs(*pair) for c, pair in ARRAYS.items()}
    wanted = Federation.from_clients(clients, dtype=dtype, **shares)
    monkeypatch.setattr(items, "MEMORY", 100)
    found = Federation.from_clients(clients, dtype=dtype, **shares)
    assert all(isinstance(split.inputs, np.memmap) for split in found.splits().values())
    assert not any(isinstance(split.inputs, np.memmap) for split in wanted.splits().values())
    assert found.checksum() == wanted.checksum()
    ends = [
        ef.train(
            ef.FedAvg(local=ef.LocalSGD(steps=3, lr=0.1, batch_size=4)),
            ef.simulate(held, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))),
            rounds=1,
            evaluate=["train"],
            progress=False,
        ).per_client()
        for held in (wanted, found)
        if dtype is None and torch.manual_seed(0)
    ]
    assert ends[:1] == ends[1:]


def test_a_file_that_does_not_fit_on_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr(items, "MEMORY", 100)
    monkeypatch.setattr(items.shutil, "disk_usage", lambda _: type("U", (), {"free": 50})())
    with pytest.raises(DataError, match=r"set TMPDIR to a folder on a larger disk"):
        Federation.from_clients({"a": pairs()})
    monkeypatch.undo()
    monkeypatch.setattr(items, "MEMORY", 100)
    wide = Pairs(ARRAYS["north"][0].astype("float64"), ARRAYS["north"][1])
    with pytest.raises(DataError, match=r"Client 'b': train X is float64 .* float32 .* dtype="):
        Federation.from_clients({"a": pairs(), "b": wide})


def test_columns_are_chosen_by_name():
    clients = {c: Columns(*pair) for c, pair in ARRAYS.items()}
    found = Federation.from_clients(clients, features="pixels")
    assert found.checksum() == Federation.from_clients(ARRAYS).checksum()
    several = Federation.from_clients(clients, features=["age", "dose"], target="label")
    np.testing.assert_array_equal(several.train.client(2)[0], [[k, k] for k in range(5)])
    values = Federation.from_clients(clients, features=["dose"], target="age")
    assert values.classes is None and values.train.client(2)[1].tolist() == [0, 1, 2, 3, 4]


class Fields(td.Dataset):
    """A data set of several arrays per sample, in the form that is wanted."""

    def __init__(self, x, y, form):
        self.x, self.y, self.form = x, y, form

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        if not 0 <= k < len(self.y):
            raise IndexError(k)
        held = {name: torch.as_tensor(values[k]) for name, values in self.x.items()}
        y = int(self.y[k])
        return {
            "mapping and target": (held, y),
            "tuple and target": (tuple(held.values()), y),
            "columns": {**held, "labels": y},
            "lists": {**{name: part.tolist() for name, part in held.items()}, "label": y},
        }[self.form]


def several(n):
    draw = np.random.default_rng(n)
    x = {"input_ids": draw.integers(0, 9, (n, 4)), "attention_mask": draw.integers(0, 2, (n, 4))}
    return x, np.arange(n) % 3


SEVERAL = {"north": several(9), "south": several(300)}


def collate(batch):
    """What a collator of transformers does: tensors by name, with ``labels``."""
    joined = {k: torch.stack([item[k] for item in batch]) for k in SEVERAL["north"][0]}
    return {**joined, "labels": torch.tensor([item["labels"] for item in batch])}


@pytest.mark.parametrize("memory", [items.MEMORY, 100])
@pytest.mark.parametrize("form", ["mapping and target", "tuple and target", "columns", "lists"])
def test_items_of_several_arrays_are_those_of_the_arrays(form, memory, monkeypatch):
    arrays = SEVERAL
    if form == "tuple and target":
        arrays = {c: (tuple(x.values()), y) for c, (x, y) in SEVERAL.items()}
    wanted = Federation.from_clients(arrays, test=0.25)
    monkeypatch.setattr(items, "MEMORY", memory)
    clients = {c: Fields(x, y, form) for c, (x, y) in SEVERAL.items()}
    found = Federation.from_clients(clients, test=0.25)
    assert found.checksum() == wanted.checksum() and found.layout == wanted.layout
    assert isinstance(found.train.inputs, np.memmap) == (memory == 100)
    if form == "columns":
        for how in ({}, {"collate_fn": collate}):
            loaders = {c: td.DataLoader(part, batch_size=4, **how) for c, part in clients.items()}
            assert Federation.from_clients(loaders, test=0.25).checksum() == wanted.checksum()
        one = Federation.from_clients(clients, features=["input_ids"])
        assert [field.name for field in one.layout.fields] == ["input_ids"]
        more = {c: Fields({**x, "row": x["input_ids"]}, y, form) for c, (x, y) in SEVERAL.items()}
        assert Federation.from_clients(more, test=0.25).layout == wanted.layout


class Streamed(td.IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


class Odd(Pairs):
    """A data set whose items are whatever is wanted."""

    def __init__(self, *answers):
        self.answers = answers

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, k):
        if isinstance(self.answers[k], Exception):
            raise self.answers[k]
        return self.answers[k]


def picture():
    from PIL import Image

    return Image.new("L", (2, 2))


X = np.zeros(2, "float32")
REFUSED = {
    r"'a': train is a Streamed, which has no length": lambda: Streamed(),
    r"train is a Streamed.*no length": lambda: td.DataLoader(Streamed()),
    r"WeightedRandomSampler may draw some items more often": lambda: td.DataLoader(
        pairs(), sampler=td.WeightedRandomSampler([1.0] * 9, 9)
    ),
    r"RandomSampler may draw some items": lambda: td.DataLoader(
        pairs(), sampler=td.RandomSampler(pairs(), replacement=True)
    ),
    r"DataLoader with batch_size=None": lambda: td.DataLoader(pairs(), batch_size=None),
    r"9 items did not become 9 rows of X and of y; the collate_fn": lambda: td.DataLoader(
        pairs(), collate_fn=lambda b: (torch.zeros(1, 2), torch.tensor([y for _, y in b]))
    ),
    r"an item is a Tensor; it must be a pair": lambda: torch.utils.data.ConcatDataset(
        [Odd(torch.zeros(2))]
    ),
    r"an item is a tuple of 3": lambda: Odd((X, 0, 0)),
    r"item 1 has the shape \(3,\), earlier ones \(2,\); pad": lambda: Odd((X, 0), (np.zeros(3), 1)),
    r"items 0 to 1 of the Odd cannot be read \(OSError: no file\)": lambda: Odd(
        (X, 0), OSError("no file")
    ),
    r"X\['tokens'\] holds {'ids': .* \(dict\) at \[0\], among others; give all numbers": lambda: (
        Odd(({"tokens": {"ids": X, "mask": X}}, 0))
    ),
    r"train: item 1 has no 'mask', earlier ones have": lambda: Odd(
        ({"tokens": X, "mask": X}, 0), ({"tokens": X}, 1)
    ),
    r"item 1 has the shape \(3,\), earlier ones \(2,\)": lambda: Odd(
        ((X, X), 0), ((X, np.zeros(3)), 1)
    ),
    r"X\['0'\]: item 256 has the shape \(3,\), earlier ones \(2,\)": lambda: Odd(
        *[((X, X), 0)] * items.BATCH, ((np.zeros(3), X), 1)
    ),
    r"item 0 is a picture \(Image\)": lambda: Odd((picture(), 0)),
    r"X has masked values, the first at \[0, 1\]; fill them": lambda: Odd(
        (np.ma.masked_equal([1.0, 2.0], 2.0), 0)
    ),
    r"which column is the target\? There are a, b": lambda: Odd({"a": X, "b": 0}),
    r"which columns are the features\? .* are a, b": lambda: Odd({"a": X, "b": 0, "y": 0}),
    r"holds None": lambda: Odd((X, None), (X, 1)),
    r"no training samples": lambda: Odd(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_data_set_of_pairs_is_refused(message):
    with pytest.raises(DataError, match=message):
        Federation.from_clients({"a": REFUSED[message]()})


@pytest.mark.parametrize(
    ("clients", "named", "message"),
    [
        (ARRAYS, {"target": "y"}, "name columns of data sets, and there is none"),
        ({"a": pairs()}, {"features": "x"}, "features= names a column, but the items are tuples"),
        ({"a": pairs()}, {"client": "x"}, "client= is for one data set with all clients"),
        (pairs(), {}, "train is one Pairs; give {name: data set}"),
        ({"a": Odd({"x": X, "y": 0})}, {"features": "z"}, "no column 'z'; there are x, y"),
    ],
)
def test_names_that_do_not_fit_are_refused(clients, named, message):
    with pytest.raises(DataError, match=re.escape(message)):
        Federation.from_clients(clients, **named)


# -- the real packages ----------------------------------------------------------------------------


def hugging_face():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    sites = [name for name, (_, y) in ARRAYS.items() for _ in y]
    features = datasets.Features(
        site=datasets.Value("string"),
        pixels=datasets.Array2D((2, 3), "float32"),
        label=datasets.ClassLabel(names=["cat", "dog", "owl"]),
    )
    held = {
        "site": sites,
        "pixels": np.concatenate([x for x, _ in ARRAYS.values()]),
        "label": np.concatenate([y for _, y in ARRAYS.values()]),
    }
    return datasets, datasets.Dataset.from_dict(held, features=features)


def test_hugging_face_data_sets():
    datasets, whole = hugging_face()
    wanted = Federation.from_clients(ARRAYS, class_names=("cat", "dog", "owl"))
    for form in (whole, whole.with_format("numpy"), whole.with_format("torch")):
        # Hugging Face hands out lists of numbers without a precision, which are float64 as always
        dtype = "float32" if form is whole else None
        found = Federation.from_clients(form, client="site", dtype=dtype)
        assert found.names == wanted.names and found.class_names == ("cat", "dog", "owl")
        np.testing.assert_array_equal(found.train.inputs, wanted.train.inputs)
        np.testing.assert_array_equal(found.train.targets, wanted.train.targets)
    ones = {c: whole.filter(lambda row, c=c: row["site"] == c) for c in ARRAYS}
    each = Federation.from_clients(ones, features="pixels", dtype="float32")
    divided = Federation.from_clients(form, client="site", test=0.25)
    assert each.checksum() == found.checksum()
    assert divided.checksum() == found.split(test=0.25).checksum()
    ages = whole.remove_columns("pixels").add_column("age", [k % 7 for k in range(len(whole))])
    table = Federation.from_table(ages, client="site", target="label", scale=None)
    assert table.names == wanted.names and table.train.inputs.sum() == sum(ages["age"])
    with pytest.raises(DataError, match="are splits and not clients; give one of them"):
        Federation.from_clients(datasets.DatasetDict(train=whole, test=whole))
    with pytest.raises(DataError, match="one of site, pixels, label"):
        Federation.from_clients(whole, client="hospital")
    streamed = whole.to_iterable_dataset()
    for given, how in (({"a": streamed}, {}), (streamed, {"client": "site"})):
        with pytest.raises(DataError, match="is a IterableDataset, which has no length"):
            Federation.from_clients(given, **how)
    other = whole.cast_column("label", datasets.ClassLabel(names=["dog", "cat", "owl"]))
    with pytest.raises(DataError, match="has the classes dog, cat, owl"):
        Federation.from_clients({**ones, "west": other}, features="pixels")


def test_token_columns_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    held = {k: np.concatenate([x[k] for x, _ in SEVERAL.values()]) for k in SEVERAL["north"][0]}
    labels = np.concatenate([y for _, y in SEVERAL.values()])
    sites = [name for name, (_, y) in SEVERAL.items() for _ in y]
    text = ["a text"] * len(sites)
    whole = datasets.Dataset.from_dict({"text": text, "site": sites, "labels": labels, **held})
    wanted = Federation.from_clients(SEVERAL, test=0.25)
    for form in (whole, whole.with_format("torch")):
        found = Federation.from_clients(form, client="site", test=0.25)
        assert found.checksum() == wanted.checksum()


def test_partitioners_of_flwr_datasets():
    _, whole = hugging_face()
    partitioner = pytest.importorskip("flwr_datasets.partitioner", reason="pip install it")
    natural = partitioner.NaturalIdPartitioner(partition_by="site")
    even = partitioner.IidPartitioner(num_partitions=4)
    natural.dataset = even.dataset = whole.with_format("numpy")
    found = Federation.from_clients(natural, features="pixels")
    assert set(found.names) == set(ARRAYS)
    for i, name in enumerate(found.names):
        np.testing.assert_array_equal(found.train.client(i)[0], ARRAYS[name][0])
    quarters = Federation.from_clients(even, features="pixels", test=0.5)
    assert quarters.names == ("0", "1", "2", "3")
    for k in range(4):
        mine = even.load_partition(k)["pixels"]
        assert quarters.train.sizes[k] + quarters.test.sizes[k] == len(mine)
        assert {x.tobytes() for x in mine[:]} == {
            x.tobytes() for s in (quarters.train, quarters.test) for x in s.client(k)[0]
        }
    with pytest.raises(DataError, match="gives no partitions"):
        Federation.from_clients(partitioner.IidPartitioner(num_partitions=2))
