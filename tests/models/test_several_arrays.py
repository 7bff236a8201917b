"""Samples of several arrays give what the same model makes of rows that were joined by hand."""

import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import equifed as ef
from equifed.contract.streams import Stream
from equifed.data import DataError, Federation
from equifed.models.export import export

LENGTH, WORDS = 5, 12
DRAW = np.random.default_rng(0)


def make_client(samples):
    tokens = DRAW.integers(1, WORDS, (samples, LENGTH))
    mask = np.arange(LENGTH) < DRAW.integers(2, LENGTH + 1, (samples, 1))
    age = DRAW.standard_normal(samples).astype("float32")
    return {"tokens": tokens, "mask": mask, "age": age}, tokens[:, 0] % 3


CLIENTS = {name: make_client(n) for name, n in {"north": 9, "south": 4, "west": 7}.items()}
for _, y in CLIENTS.values():
    y[:3] = 0, 1, 2


class Reader(nn.Module):
    """Mean of embeddings and an amount; answers in the form that is wanted."""

    def __init__(self, form="tensor"):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, 4), nn.LayerNorm(5)
        self.drop, self.head, self.form = nn.Dropout(0.2), nn.Linear(5, 3), form

    def forward(self, tokens, mask=None, age=None, labels=None):
        counts = torch.ones_like(tokens) if mask is None else mask
        mean = (self.words(tokens) * counts.unsqueeze(-1)).sum(1)
        age = torch.zeros_like(mean[:, :1]) if age is None else age.reshape(-1, 1)
        scores = self.head(self.drop(self.norm(torch.cat([mean, age], 1))))
        forms = {"dict": {"loss": None, "logits": scores}, "tensor": scores}
        return forms.get(self.form, SimpleNamespace(logits=scores, attentions=None))


class ByHand(Reader):
    """The same model for rows in which the arrays are joined: age, mask and tokens."""

    def forward(self, rows):
        tokens, mask = rows[:, -LENGTH:].long(), rows[:, -2 * LENGTH : -LENGTH]
        return super().forward(tokens, mask, rows[:, 0] if rows.shape[1] > 2 * LENGTH else None)


class InOrder(Reader):
    def forward(self, age, mask, tokens):
        return super().forward(tokens, mask, age)


class OneArgument(Reader):
    def forward(self, batch):
        held = batch if isinstance(batch, dict) else dict(zip(NAMES, batch, strict=True))
        return super().forward(**held)


NAMES = ("age", "mask", "tokens")


def make(kind, *args):
    torch.manual_seed(0)
    return kind(*args)


def take(names=NAMES, join=None):
    """Return the clients with some of their arrays, joined by a function."""
    held = {c: ({n: x[n] for n in names}, y) for c, (x, y) in CLIENTS.items()}
    return held if join is None else {c: (join(x), y) for c, (x, y) in held.items()}


def join_rows(x):
    flat = [np.reshape(v, (len(v), -1)) for v in x.values()]
    return np.concatenate(flat, axis=1).astype("float32" if "age" in x else "int64")


def learn(data, model, **how):
    local = ef.LocalSGD(steps=3, lr=0.3, batch_size=how.pop("batch_size", 2))
    clients = ef.simulate(data, model, **{"engine": "loop", **how})
    return ef.train(ef.FedAvg(local=local), clients, rounds=2, progress=False)


FORMS = {
    "dict": (Reader, None),
    "tuple": (InOrder, lambda x: tuple(x.values())),
    "dict in one argument": (OneArgument, None),
    "tuple in one argument": (OneArgument, lambda x: tuple(x.values())),
}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("own", [None, "head", "norm"])
def test_engines_learn_what_joined_rows_teach(engine, own):
    for names in (NAMES, ("mask", "tokens")):
        rows = Federation.from_clients(take(names, join_rows), tokens=len(names) == 2)
        data = Federation.from_clients(take(names))
        assert data.train.inputs.tobytes() == rows.train.inputs.tobytes()
        assert data.train.inputs.dtype == rows.train.inputs.dtype
        wanted = learn(rows, make(ByHand), engine=engine, own=own)
        found = learn(data, make(Reader), engine=engine, own=own)
        for name, value in wanted.parameters.items():
            assert torch.equal(found.parameters[name], value), name
        assert found.per_client() == wanted.per_client()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("returned", ["tensor", "dict", "object"])
def test_forms_of_samples_and_outputs_agree(form, returned):
    kind, join = FORMS[form]
    wanted = learn(Federation.from_clients(take(join=join_rows)), make(ByHand))
    clients = take(join=join)
    found = learn(Federation.from_clients(clients), make(kind, returned))
    assert all(torch.equal(found.parameters[n], v) for n, v in wanted.parameters.items())
    x, _ = clients["north"]
    scores = found.predictor().decision_function(x)
    rows = join_rows(take()["north"][0])
    np.testing.assert_array_equal(scores, wanted.predictor().decision_function(rows))


def test_logits_of_one_array_and_a_loss_of_ones_own():
    def smooth(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)

    rows = Federation.from_clients(take(join=join_rows))
    wanted, found = (
        learn(rows, make(ByHand, form), loss=smooth).predictor() for form in ("tensor", "object")
    )
    np.testing.assert_array_equal(
        *(p.decision_function(rows.train.inputs) for p in (wanted, found))
    )
    taken = ef.features(make(ByHand, "dict"), rows)
    np.testing.assert_array_equal(
        taken.train.inputs, ef.features(make(Reader), Federation.from_clients(take())).train.inputs
    )
    assert taken.layout is None


def test_own_arguments_still_reach_the_trained_module():
    trained = learn(Federation.from_clients(take()), make(Reader, "object")).predictor().module
    held = {k: torch.as_tensor(v) for k, v in CLIENTS["west"][0].items()}
    assert trained(**held).attentions is None and type(trained).__name__ == "Reader"
    make(Reader).load_state_dict(trained.state_dict())
    other = Federation.from_clients(take(("mask", "tokens")))  # a trained module goes on elsewhere
    again = pickle.loads(pickle.dumps(trained))
    rows = torch.as_tensor(Federation.from_clients(take()).train.inputs)
    assert torch.equal(again(rows), trained(rows)) and type(again) is type(trained)
    plain = make(Reader)
    plain.load_state_dict(trained.state_dict())
    ends = [learn(other, module).parameters for module in (trained, plain)]
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_every_whole_number_survives_and_other_precisions_are_refused():
    most = 2**63 - 1
    ids = np.array([[0, most], [2**24 + 1, 1]])
    data = Federation.from_clients({"a": ({"ids": ids}, [0, 1])})
    assert data.layout.unpack(torch.as_tensor(data.train.inputs))["ids"].tolist() == ids.tolist()
    near = Federation.from_clients({"a": ({"ids": [2**24, 3], "age": [0.5, 1]}, [0, 1])})
    parts = near.layout.unpack(torch.as_tensor(near.train.inputs).float())
    assert parts["ids"].tolist() == [2**24, 3] and parts["ids"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"torch.bfloat16 does not hold; use dtype=torch.float32"):
        ef.simulate(Federation.from_clients(take()), make(Reader), dtype=torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("join", [None, lambda x: tuple(x.values())], ids=["dict", "tuple"])
def test_exports_take_the_arrays(tmp_path, join):
    clients = take(join=join)
    kind = Reader if join is None else InOrder
    history = learn(Federation.from_clients(clients), make(kind, "object"), own="bias")
    predictor = history.predictor().for_client("north")
    export(predictor, tmp_path, program=True)
    again = ef.load_predictor(tmp_path, trust=True)
    x = clients["north"][0]
    np.testing.assert_allclose(
        again.decision_function(x), predictor.decision_function(x), rtol=1e-5, atol=1e-6
    )
    program = torch.export.load(tmp_path / "model.pt2").module()
    given = (
        {k: torch.as_tensor(v) for k, v in x.items()}
        if join is None
        else tuple(map(torch.as_tensor, x))
    )
    np.testing.assert_allclose(
        program(given).detach(), predictor.decision_function(x), rtol=1e-5, atol=1e-6
    )


def test_own_parts_fitted_afterwards_and_models_of_their_own():
    data = Federation.from_clients(take(), test=0.3)
    history = learn(data, make(Reader, "dict"), own="bias", batch_size=None)
    x, y = CLIENTS["west"]
    new = history.predictor().for_new_client(x, y.tolist(), client="east")
    assert new.predict(x, client="east").shape == y.shape
    how = {"algorithm": ef.FedAvg(local=ef.LocalSGD(steps=3, lr=0.3)), "rounds": 1}
    rows = Federation.from_clients(take(join=join_rows), test=0.3)
    pairs = ((data, make(Reader, "object")), (rows, make(ByHand)))
    found, wanted = (ef.alone(*pair, **how).losses for pair in pairs)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_run_folders_keep_what_a_sample_is(tmp_path):
    data = Federation.from_clients(take())
    clients = ef.simulate(data, make(Reader, "dict"), own="bias")
    history = ef.train(
        ef.FedAvg(local=ef.LocalSGD(steps=2, lr=0.1)), clients, rounds=1, progress=False
    )
    history.save(tmp_path / "run")
    again = ef.load_predictor(tmp_path / "run", model=make(Reader, "dict"))
    x = CLIENTS["south"][0]
    np.testing.assert_array_equal(
        again.predict(x, client="south"), history.predictor().predict(x, client="south")
    )


def test_a_module_that_cannot_be_batched_goes_to_the_loop():
    class Deciding(Reader):
        def forward(self, tokens, mask, age):
            if bool(mask.all()):  # a branch on values, as transformers have
                mask = None
            return super().forward(tokens, mask, age)

    data = Federation.from_clients(take())
    with pytest.warns(UserWarning, match="engine='auto' does so now"):
        clients = ef.simulate(data, make(Deciding, "object"))
    assert clients.engine == "loop"
    wanted = ef.simulate(data, make(Reader), engine="loop")
    x = wanted.initial(Stream(0))
    np.testing.assert_allclose(clients.losses(x, Stream(0)), wanted.losses(x, Stream(0)), rtol=1e-6)


X, Y = CLIENTS["north"]
OTHER = {
    "has no 'mask', Client 'a': train X has mask": {k: X[k] for k in ("age", "tokens")},
    r"has more \(one, real numbers\), Client 'a': train X has no 'more'": {**X, "more": X["age"]},
    r"has tokens \(4, whole numbers\), Client 'a': train X has tokens \(5, whole": {
        **X, "tokens": X["tokens"][:, :4],
    },
    r"has mask \(5, whole numbers\), Client 'a': train X has mask \(5, truth": {
        **X, "mask": X["mask"] * 1,
    },
    r"'b': train X has one array, Client 'a': train X has age": X["tokens"],
    r"'b': train X\['tokens'\] holds -\d+ in row .* whole numbers are tokens": {
        **X, "tokens": X["tokens"] - 100 * (X["tokens"] == X["tokens"].max()) - X["tokens"].max(),
    },
    r"X\['tokens'\] holds 16777217 in row .* beside real ones may reach 16777216": {
        **X, "tokens": X["tokens"] * 0 + 2**24 + 1,
    },
    r"X\['age'\] holds nan in row 0 \(9 row\(s\)": {**X, "age": X["age"] * np.nan},
    r"X\['tokens'\] is text; give numbers: what a tokenizer": {
        **X, "tokens": [["a"] * 5 for _ in Y],
    },
    r"X\['mask'\] has 8 rows, y has 9": {**X, "mask": X["mask"][:8]},
    r"rows of unequal length must be padded": {**X, "tokens": [[1] * (k + 1) for k in range(9)]},
    r"X is a dict without arrays": {},
}  # fmt: skip


@pytest.mark.parametrize("message", OTHER)
def test_unlike_clients_are_refused_by_name(message):
    with pytest.raises(DataError, match=message):
        Federation.from_clients({"a": (X, Y), "b": (OTHER[message], Y)}, classes=3)


def test_what_cannot_be_told_or_called_is_refused():
    with pytest.raises(DataError, match="tuple of 2 arrays of 2 rows each: give a mapping"):
        Federation.from_clients({"a": ((np.eye(2), np.eye(2)), [0, 1])})
    data = Federation.from_clients(take())
    with pytest.raises(
        ValueError, match=r"forward takes rows, tokens; .* it does not take age, mask"
    ):
        ef.simulate(data, _takes("rows, tokens"))
    with pytest.raises(ValueError, match=r"takes tokens, mask, age, place; .*it needs place"):
        ef.simulate(data, _takes("tokens, mask, age, place"))
    with pytest.raises(ValueError, match=r"The model 'logistic' takes one array, a sample is age"):
        ef.simulate(data, "logistic")
    with pytest.raises(DataError, match="fit takes samples of one array; these are age"):
        ef.fit(data)
    with pytest.raises(DataError, match="standardise its arrays before"):
        ef.data.standardise(data)
    with pytest.raises(ValueError, match=r"cannot take samples of shape \[age \(one, real"):
        ef.simulate(Federation.from_clients(_large()), make(Reader))
    predictor = learn(data, make(Reader)).predictor()
    with pytest.raises(DataError, match="give a mapping of these arrays, got tuple"):
        predictor.predict(tuple(X.values()))
    with pytest.raises(DataError, match="X has no 'age', the model's samples has age"):
        predictor.predict({"tokens": X["tokens"], "mask": X["mask"]})


def test_a_token_without_an_embedding_is_named_before_training():
    clients = take(("mask", "tokens"))
    held = {**clients["west"][0], "tokens": clients["west"][0]["tokens"].copy()}
    held["tokens"][5, 2] = WORDS + 30
    message = "Client west: {} tokens hold 42, which the model has no embedding for .*more rows"
    for engine in ("loop", "stacked"):
        with pytest.raises(ValueError, match=message.format("train")):
            odd = {**clients, "west": (held, clients["west"][1])}
            ef.simulate(Federation.from_clients(odd), make(Reader), engine=engine)
        with pytest.raises(ValueError, match=message.format("test")):
            test = {"west": (held, clients["west"][1])}
            ef.simulate(Federation.from_clients(clients, test=test), make(Reader), engine=engine)
    rows = {"west": (join_rows(held), clients["west"][1])}
    with pytest.raises(ValueError, match="Client west: train tokens hold 42, which"):
        ef.simulate(Federation.from_clients(rows, tokens=True), make(ByHand))


def _takes(arguments):
    names = {}
    exec(f"def forward(self, {arguments}): return None", names)
    return type("Odd", (Reader,), {"forward": names["forward"]})()


def _large():
    """Return clients with a token that the model has no embedding for."""
    return {c: ({**x, "tokens": x["tokens"] + WORDS}, y) for c, (x, y) in CLIENTS.items()}


# -- what a user of Hugging Face pastes -----------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "text.md"


SMALL = {"vocab_size": 40, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}


def save_pretrained(folder):
    """Save a tiny DistilBert and a tokenizer as Hugging Face does, in place of a download."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install transformers")
    words = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "fine", "poor"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = transformers.DistilBertConfig(**SMALL, max_position_embeddings=16)
    transformers.DistilBertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of the package datasets
def test_the_snippet_for_hugging_face_runs(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # where from_pretrained finds a folder of the model's name
    save_pretrained("distilbert-base-uncased")
    lines = [
        f"{'fine poor '[k % 2 * 5 :][:5] * (k % 7 + 1)},{k % 2},{'AB'[k % 3 > 0]}"
        for k in range(60)
    ]
    (tmp_path / "notes.csv").write_text("\n".join(["text,label,hospital", *lines]))
    (snippet,) = re.findall(r"^```py\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    assert sum(bool(line) and "import" not in line for line in snippet.splitlines()) <= 10
    known = {}
    with pytest.warns(UserWarning, match="engine='auto' does so now"):
        exec(compile(snippet, "text.md", "exec"), known)
    assert set(known["history"].per_client()) == {"A", "B"}
    assert known["clients"].model.own_shapes.keys() == {"classifier.weight", "classifier.bias"}
    row = {name: [values] for name, values in known["tokenizer"]("fine").items()}
    assert known["history"].predictor().predict(row, client="A").size == 1


@pytest.mark.long
def test_a_model_of_transformers_takes_the_step_of_plain_torch() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    config = transformers.DistilBertConfig(**SMALL, **off, max_position_embeddings=9, num_labels=2)
    model = transformers.DistilBertForSequenceClassification(config)
    draw = np.random.default_rng(0)
    rows = [
        {"site": "ab"[k % 2], "label": int(draw.integers(2)), "attention_mask": [1] * n,
         "input_ids": draw.integers(1, 40, n).tolist()}
        for k, n in enumerate(draw.integers(2, 9, 12))
    ]  # fmt: skip
    longest = max(len(row["input_ids"]) for row in rows)
    wanted = copy.deepcopy(model).train()
    filled = {
        name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    loss = wanted(**filled, labels=torch.tensor([row["label"] for row in rows])).loss
    loss.backward()  # both sites have six rows: the mean of means
    with torch.no_grad():
        for p in wanted.parameters():
            p -= 0.5 * p.grad

    data = Federation.from_clients(datasets.Dataset.from_list(rows), client="site", pad=0)
    clients = ef.simulate(data, model, engine="loop")
    history = ef.train(ef.FedAvg(ef.LocalSGD(lr=0.5, steps=1)), clients, rounds=1, progress=False)
    found = dict(history.model.named_parameters())
    for name, p in wanted.named_parameters():
        torch.testing.assert_close(found[name], p, atol=2e-6, rtol=1e-5)
