"""Sequences of unequal length become those that were filled up by hand."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data as td

import equifed as ef
from equifed.data import DataError, Federation

DRAW = np.random.default_rng(0)
LENGTHS = {"north": [3, 7, 1, 4], "south": [2, 9, 5]}
TOKENS = {c: [DRAW.integers(1, 9, n).tolist() for n in lengths] for c, lengths in LENGTHS.items()}
MASKS = {c: [[1] * n for n in lengths] for c, lengths in LENGTHS.items()}
Y = {c: np.arange(len(lengths)) % 2 for c, lengths in LENGTHS.items()}


def fill(rows, value):
    return np.array([row + [value] * (9 - len(row)) for row in rows])


def by_hand(value):
    return Federation.from_clients(
        {
            c: ({"input_ids": fill(TOKENS[c], value), "attention_mask": fill(MASKS[c], 0)}, Y[c])
            for c in TOKENS
        }
    )


class Items(td.Dataset):
    def __init__(self, client, mask):
        self.client, self.mask = client, mask

    def __len__(self):
        return len(Y[self.client])

    def __getitem__(self, k):
        held = {"input_ids": torch.tensor(TOKENS[self.client][k]), "labels": int(Y[self.client][k])}
        return held | ({"attention_mask": MASKS[self.client][k]} if self.mask else {})


def collate(batch):
    """Fill up a batch to its own longest sequence, as collators of transformers do."""
    longest = max(len(item["input_ids"]) for item in batch)
    rows = {
        k: [list(item[k]) + [0] * (longest - len(item[k])) for item in batch]
        for k in ("input_ids", "attention_mask")
    }
    return {k: torch.tensor(v) for k, v in rows.items()} | {
        "labels": torch.tensor([item["labels"] for item in batch])
    }


@pytest.mark.parametrize("value", [0, 5])
def test_the_longest_of_all_clients_counts(value):
    wanted = by_hand(value)
    given = {c: ({"input_ids": TOKENS[c], "attention_mask": MASKS[c]}, Y[c]) for c in TOKENS}
    made = {c: ({"input_ids": TOKENS[c]}, Y[c]) for c in TOKENS}
    tensors = {c: ({"input_ids": [*map(torch.tensor, TOKENS[c])]}, Y[c]) for c in TOKENS}
    named = {"input_ids": value, "attention_mask": 0}
    forms = [
        Federation.from_clients(given, pad=value),
        Federation.from_clients(given, pad=named),
        Federation.from_clients(made, pad=value, mask="attention_mask"),
        Federation.from_clients(tensors, pad=value, mask="attention_mask"),
        Federation.from_clients({c: Items(c, True) for c in TOKENS}, pad=value),
        Federation.from_clients(
            {c: Items(c, False) for c in TOKENS}, features=["input_ids"], pad=value,
            mask="attention_mask",
        ),
    ]  # fmt: skip
    if value == 0:
        loaders = {c: td.DataLoader(Items(c, True), collate_fn=collate) for c in TOKENS}
        forms.append(Federation.from_clients(loaders, pad=0))
    for found in forms:
        assert found.checksum() == wanted.checksum()
    divided = Federation.from_clients({c: Items(c, True) for c in TOKENS}, pad=0, test=0.3)
    assert divided.checksum() == by_hand(0).split(test=0.3).checksum()


def test_unnamed_sequences_are_a_tuple():
    single = Federation.from_clients({c: (TOKENS[c], Y[c]) for c in TOKENS}, pad=0)
    assert single.layout.unpack(torch.as_tensor(single.train.inputs))["0"].tolist() == (
        np.concatenate([fill(rows, 0) for rows in TOKENS.values()]).tolist()
    )
    both = Federation.from_clients({c: (TOKENS[c], Y[c]) for c in TOKENS}, pad=0, mask="mask")
    given = {c: ((TOKENS[c], MASKS[c]), Y[c]) for c in TOKENS}
    assert both.checksum() == Federation.from_clients(given, pad=0).checksum()


class Counting(nn.Module):
    """Mean of embeddings; the mask says of how many."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        return self.head((self.words(input_ids) * weights.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("how", [{"mask": "attention_mask"}, {}], ids=["made", "given"])
def test_new_rows_are_filled_up_likewise(how, tmp_path):
    def take(client, rows=slice(None)):
        masks = {} if how else {"attention_mask": MASKS[client][rows]}
        return {"input_ids": TOKENS[client][rows]} | masks

    data = Federation.from_clients({c: (take(c), Y[c]) for c in TOKENS}, pad=0, **how)
    torch.manual_seed(0)
    clients = ef.simulate(data, Counting())
    history = ef.train(
        ef.FedAvg(local=ef.LocalSGD(steps=2, lr=0.1)), clients, rounds=1, progress=False
    )
    predictor = history.predictor()
    whole = predictor.decision_function(take("south"))
    for k in range(3):  # alone a sequence needs no filling up, and does not change
        alone = predictor.decision_function(take("south", slice(k, k + 1)))
        np.testing.assert_allclose(alone, whole[k : k + 1], rtol=1e-6)
    history.save(tmp_path / "run")
    again = ef.load_predictor(tmp_path / "run", model=Counting())
    np.testing.assert_array_equal(again.decision_function(take("south")), whole)
    with pytest.raises(DataError, match=r"X\['\w+'\], item 1 has 10 values, .* at most 9; cut"):
        predictor.predict({"input_ids": [[1], [1] * 10], "attention_mask": [[1], [1] * 10]})


REFUSED = {
    r"'a': train X\['x'\], item 1 holds \['word'\], which is not a number": (
        {"x": [[1], ["word"]]}, {"pad": 0}
    ),
    r"item 0 is not an array \(.*rows of unequal length": ({"x": [[[1], [1, 2]], [1]]}, {"pad": 0}),
    r"pad names 'z', which is not a sequence of the samples; there are x": (
        {"x": [[1], [1, 2]]}, {"pad": {"z": 0}}
    ),
    r"mask='m' cannot be made: x and z have different lengths": (
        {"x": [[1], [1, 2]], "z": [[1], [1]]}, {"pad": 0, "mask": "m"}
    ),
    r"mask='x' cannot be made: there is one already": (
        {"x": [[1], [1, 2]]}, {"pad": 0, "mask": "x"}
    ),
    r"mask='m' cannot be made: no sequence": ({"x": [1, 2]}, {"pad": 0, "mask": "m"}),
    r"mask='m' says where sequences were filled up; give pad=0": ({"x": [1, 2]}, {"mask": "m"}),
    r"rows of unequal length must be padded": ({"x": [[1], [1, 2]]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_filled_up_is_refused(message):
    x, how = REFUSED[message]
    with pytest.raises(DataError, match=message):
        Federation.from_clients({"a": (x, [0, 1])}, **how)
