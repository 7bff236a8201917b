"""Sites whose samples are several arrays: whole runs with a plan, equal to the loop engine."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from tests.flower.grid import QUICK, MemoryGrid
from torch import nn
from torch.utils import data as td

from equifed.data.federation import Federation
from equifed.data.fields import Layout, Padding
from equifed.data.split import DataError
from equifed.engines.loop import LoopClients
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings, read_layout
from equifed.flower.client import make_client_app
from equifed.flower.handshake import StartError, describe_difference
from equifed.flower.participant import to_federation
from equifed.flower.rehearsal import make_plan, sign_run
from equifed.flower.task import Schema
from equifed.privacy.ledger import Bounds
from equifed.privacy.site import Unanswered
from equifed.runs.load import load_predictor
from equifed.runs.schema import ConfigError
from equifed.training.history import History
from equifed.training.keys import make_key
from equifed.training.loop import train

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "samples.md"
LONGEST, WORDS, SIZES = 6, 9, {"east": 8, "north": 13, "south": 5, "west": 10}
HERE = "tests.flower.test_several_arrays"


class Reader(nn.Module):
    """Mean of embeddings beside an amount, with dropout, and an answer as transformers give it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(WORDS, 4), nn.Dropout(0.2), nn.Linear(5, 3)

    def forward(self, age: Any, mask: Any, tokens: Any) -> dict[str, Any]:
        mean = (self.words(tokens) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.head(self.drop(torch.cat([mean, age.reshape(-1, 1)], 1)))}


def make_reader(input_shape: tuple[int, ...], outputs: int) -> Reader:
    assert input_shape == (1 + 2 * LONGEST,) and outputs == 3
    torch.manual_seed(0)
    return Reader()


def draw(name: str, split: str = "train") -> tuple[dict[str, Any], Any]:
    """Return a site's samples as sequences of unequal length; none has the agreed length."""
    rng = np.random.default_rng([len(split), *name.encode()])
    lengths = rng.integers(1, LONGEST, SIZES[name])
    tokens = [rng.integers(1, WORDS, n).tolist() for n in lengths]
    age = rng.standard_normal(len(tokens)).astype("float32")
    return {"tokens": tokens, "age": age}, np.arange(len(tokens)) % 3


def fill(x: dict[str, Any]) -> dict[str, Any]:
    """Return samples filled up to the agreed length by hand."""
    rows = [row + [7] * (LONGEST - len(row)) for row in x["tokens"]]
    mask = [[1] * len(row) + [0] * (LONGEST - len(row)) for row in x["tokens"]]
    return {"age": x["age"], "mask": np.array(mask), "tokens": np.array(rows)}


class Items(td.Dataset[Any]):
    """A data set whose items have names, among which are others, too."""

    def __init__(self, x: dict[str, Any], y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> dict[str, Any]:
        tensors = {name: torch.as_tensor(values[k]) for name, values in self.x.items()}
        return {**tensors, "text": "...", "label": int(self.y[k])}


WIDTH = f"int {LONGEST}"
NAMED = {"tokens": WIDTH, "age": "float", "mask": WIDTH}
PADDED = {"classes": 3, "arrays": NAMED, "pad": {"tokens": 7}, "mask": "mask"}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Any]]] = {
    "padded": (PADDED, lambda x, y: (x, y)),
    "data set": (PADDED, Items),
    "dict": ({"classes": 3, "arrays": NAMED}, lambda x, y: (fill(x), y)),
    "tuple": (
        {"classes": 3, "arrays": ["float", WIDTH, WIDTH]},
        lambda x, y: (tuple(fill(x).values()), y),
    ),
}


def configure(data: dict[str, Any], **more: Any) -> AppConfig:
    model = {"name": f"{HERE}:make_reader", "l2": 0.01, **more}
    local = {"lr": 0.1, "steps": 3, "batch_size": 4}
    algorithm = {"name": "scaffold", "local": local}
    table = {"rounds": 3, "data": data, "model": model, "algorithm": algorithm, "guard": "off"}
    return AppConfig.from_dict({**table, "evaluate": {"every": 1}})


def make_grid(config: AppConfig, folder: Path, load: Callable[[str], Any]) -> MemoryGrid:
    names = {7 * k % 5 + 100: name for k, name in enumerate(SIZES)}

    def load_data(context: Context) -> Any:
        return load(str(context.node_config["name"]))

    apps = {
        node: make_client_app(
            load_data, config.build_task(), classes=config.classes, memory=folder / "memory"
        )
        for node in names
    }
    told = {n: {"name": name, "results": str(folder / name)} for n, name in names.items()}
    return MemoryGrid(apps, told)


def run(config: AppConfig, folder: Path, load: Callable[[str], Any], **more: Any) -> History:
    settings = FederationSettings(len(SIZES), deadlines=QUICK, **more)
    return run_federation(make_grid(config, folder, load), config, settings)


def simulate(**more: Any) -> History:
    federation = make_federation()
    module = make_reader(federation.input_shape, 3)
    clients = LoopClients(federation, module, "cross_entropy", l2=0.01, **more)
    algorithm = configure(PADDED).build_algorithm(list(SIZES.values()))
    return train(algorithm, clients, rounds=3, evaluate=("train", "test"), progress=False)


DRAWN = [{name: draw(name, split) for name in SIZES} for split in ("train", "test")]


def load_form(form: str) -> Callable[[str], Any]:
    make = FORMS[form][1]
    return lambda name: {"train": make(*DRAWN[0][name]), "test": make(*DRAWN[1][name])}


def differ(found: History, wanted: History) -> float:
    assert found.parameters is not None and wanted.parameters is not None
    pairs = [(value, wanted.parameters[name]) for name, value in found.parameters.items()]
    assert pairs
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("own", [None, "head"])
@pytest.mark.parametrize("form", FORMS)
def test_a_federation_is_the_loop_engine_to_the_bit(
    form: str, own: str | None, tmp_path: Path
) -> None:
    more = {} if own is None else {"own": own}
    found = run(configure(FORMS[form][0], **more), tmp_path, load_form(form))
    steps = {} if own is None else {"own": own, "own_steps": "joint"}
    wanted = simulate(**steps)
    assert differ(found, wanted) == 0.0
    told = {(m.round, m.split, m.metric): m.values for m in wanted.metrics}
    assert any(split == "test" for _, split, _ in told)
    for one in found.metrics:
        np.testing.assert_array_equal(one.values, told[one.round, one.split, one.metric])


def make_federation() -> Federation:
    """Return all sites at once, for an app that is tried out."""
    train_on, test_on = ({n: (fill(x), y) for n, (x, y) in part.items()} for part in DRAWN)
    return Federation.from_clients(train_on, test=test_on, classes=3)


def test_a_named_data_set_needs_no_description(tmp_path: Path) -> None:
    config = configure({"name": f"{HERE}:make_federation"})
    places = {name: k for k, name in enumerate(SIZES)}
    found = run(config, tmp_path, lambda name: config.load_site({"partition-id": places[name]}))
    assert differ(found, simulate()) == 0.0


def test_hidden_sums_of_several_arrays_agree_to_rounding(tmp_path: Path) -> None:
    """In fixed point, so not to the bit: single precision has steps of 1e-7."""
    found = run(configure(PADDED), tmp_path, load_form("padded"), privacy="secure")
    assert 0.0 < differ(found, simulate()) < 1e-6


@pytest.mark.parametrize("own", [None, "head"])
def test_sites_predict_with_what_is_delivered(own: str | None, tmp_path: Path) -> None:
    more = {} if own is None else {"own": own}
    run(configure(PADDED, **more), tmp_path, load_form("padded"), deliver=True)
    wanted = simulate(**more, **({"own_steps": "joint"} if own else {})).predictor()
    for name, (x, _) in DRAWN[1].items():
        (folder,) = {path.parent for path in (tmp_path / name).rglob("*.pt2")}
        found = load_predictor(folder, trust=True).decision_function(x)
        same = (wanted if own is None else wanted.for_client(name)).decision_function(fill(x))
        np.testing.assert_allclose(found, same, rtol=1e-4, atol=1e-5)


# -- the boundary ---------------------------------------------------------------------------------

X, Y = DRAWN[0]["south"]
ODD: dict[str, Any] = {
    r"X has no 'mask', \[data\] of the app has mask": {"age": X["age"]},
    r"X has more .*, \[data\] of the app has no 'more'": {**X, "more": X["age"]},
    rf"has tokens \(4, whole .* of the app has tokens \({LONGEST}, whole": None,
    r"has age \(one, whole numbers\), .* age \(one, real": {**X, "age": [1] * len(Y)},
    rf"X\['tokens'\] has sequences that are longer: .* at most {LONGEST}; cut it": {
        **X, "tokens": [[1] * (LONGEST + 1)] * len(Y),
    },
    r"give a mapping of these arrays, got ndarray": np.ones((len(Y), 1 + 2 * LONGEST)),
}  # fmt: skip


@pytest.mark.parametrize("message", ODD)
def test_a_site_with_other_arrays_is_refused_by_name(message: str, tmp_path: Path) -> None:
    form, odd = "padded", (ODD[message], Y)
    if ODD[message] is None:
        form, short = "dict", fill(X)
        odd = {**short, "tokens": short["tokens"][:, :4]}, Y
    usual = load_form(form)
    with pytest.raises(StartError, match=rf"south: data: .*{message}") as refusal:
        run(configure(FORMS[form][0]), tmp_path, lambda n: odd if n == "south" else usual(n))
    if form == "dict":  # the page quotes it
        (quoted,) = re.findall(r"^`(south: .*)`$", PAGE.read_text("utf-8"), re.M)
        assert quoted in str(refusal.value)


def test_no_value_of_a_row_is_told_to_the_server(tmp_path: Path) -> None:
    odd = {**X, "age": X["age"] * np.nan}, Y
    with pytest.raises(StartError, match="south: data: DataError while loading the data; see the"):
        run(configure(PADDED), tmp_path, lambda n: odd if n == "south" else DRAWN[0][n])


def test_a_federation_of_ones_own_must_be_what_was_agreed() -> None:
    layout = configure(FORMS["dict"][0]).samples
    made = Federation.from_clients({"south": (fill(X), Y)}, classes=3)
    assert to_federation(made, "south", 3, layout) is made
    plain = Federation.from_clients({"south": (np.ones((3, 2)), [0, 1, 2])})
    with pytest.raises(DataError, match=r"its X has one array, .* of the app has age \(one"):
        to_federation(plain, "south", 3, layout)
    with pytest.raises(DataError, match=r"its X has the rule None, .* has the rule Padding"):
        to_federation(made, "south", 3, configure(PADDED).samples)


def test_data_sets_loaders_and_tokens_are_filled_up_alike() -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    samples, (x, y) = configure(PADDED).samples, DRAWN[0]["north"]

    def collate(items: list[Any]) -> Any:  # to the longest of the batch, as collators do
        rows = [item["tokens"].tolist() for item in items]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [7] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        age = torch.stack([item["age"] for item in items])
        held = {"tokens": tokens, "mask": mask, "age": age}
        return held, torch.tensor([item["label"] for item in items])

    table = {"note": ["..."] * len(y), **x, "label": y.tolist()}
    features = {name: datasets.Value("string") for name in ("note",)}
    features |= {"tokens": datasets.List(datasets.Value("int64")), "age": datasets.Value("float32")}
    features["label"] = datasets.ClassLabel(names=["low", "middle", "high"])
    wanted = Federation.from_clients({"north": (fill(x), y)}, classes=3).train
    whole = read_layout(NAMED, Padding({"tokens": 7, "mask": 0}))
    made = datasets.Dataset.from_dict(table, datasets.Features(features))
    for given, layout in (
        ((x, y), samples),
        (Items(x, y), samples),
        (made, samples),
        (datasets.DatasetDict({"train": made, "test": made}), samples),
        (td.DataLoader(Items(x, y), batch_size=3, collate_fn=collate), whole),
    ):
        found = to_federation(given, "north", 3, layout)
        np.testing.assert_array_equal(found.train.inputs, wanted.inputs)
        np.testing.assert_array_equal(found.train.targets, wanted.targets)
    assert to_federation(made, "north", None, samples).class_names == ("low", "middle", "high")


def test_a_site_with_a_budget_refuses_several_arrays() -> None:
    data = to_federation(DRAWN[0]["north"], "north", 3, configure(PADDED).samples)
    bounds = Bounds(epsilon=2.0, rows=1.0, loss=2.0, rounds=5)
    with pytest.raises(Unanswered, match="samples must be single arrays"):
        configure(PADDED).build_task().build_private(data, bounds)


def test_what_a_site_says_of_its_arrays_is_read_back_and_compared() -> None:
    def hello(name: str, data: Federation) -> Any:
        return type("Hello", (), {"name": name, "schema": Schema.of(data), "model": "m"})()

    samples = configure(PADDED).samples
    one, other = (to_federation(DRAWN[0][n], n, 3, samples) for n in ("north", "south"))
    assert describe_difference(hello("north", one), hello("south", other)) == ""
    again = Schema.from_dict(Schema.of(one).to_dict())
    assert again == Schema.of(one) and again.layout is not None
    assert again.layout.padding == one.layout.padding  # type: ignore[union-attr]
    plain = Federation.from_clients({"south": (np.ones((3, 2)), [0, 1, 2])})
    told = describe_difference(hello("north", one), hello("south", plain))
    assert told.startswith("south: a sample has one array, north: a sample has age (one, real")
    double = {**fill(X), "age": X["age"].astype(float)}
    precise = Federation.from_clients({"south": (double, Y)}, classes=3)
    rounded = Federation.from_clients({"north": (fill(X), Y)}, classes=3)
    told = describe_difference(hello("north", rounded), hello("south", precise))
    assert "input_dtype is float32 and float64" in told


def test_a_token_without_an_embedding_is_told_without_its_value(tmp_path: Path) -> None:
    odd = {**X, "tokens": [*X["tokens"][:-1], [WORDS + 33]]}, Y
    with pytest.raises(StartError, match="train tokens hold numbers that the model has no") as one:
        run(configure(PADDED), tmp_path, lambda n: odd if n == "south" else DRAWN[0][n])
    assert "south: data:" in str(one.value) and str(WORDS + 33) not in str(one.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"input_shape": [3]},
        {"input_dtype": "int64"},
        {"layout": {"fields": [], "named": True, "padding": None}},
        {"layout": {"fields": 7, "named": True, "padding": None}},
        {"layout": {"fields": [{"name": "a", "shape": [13], "kind": "x"}], "padding": None}},
        {"layout": []},
    ],
)
def test_a_hello_with_impossible_arrays_is_none(damage: dict[str, Any]) -> None:
    told = Schema.of(Federation.from_clients({"south": (fill(X), Y)}, classes=3)).to_dict()
    with pytest.raises((ValueError, KeyError, TypeError)):
        Schema.from_dict({**told, **damage})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"arrays": {"a": "int64 3"}}, "data.arrays.a is 'int64 3'; write bool, int or float"),
        ({"arrays": {"a": "int 0"}}, "data.arrays.a is 'int 0'"),
        ({"arrays": "int 3"}, "data.arrays must be a table or an array of texts, got 'int 3'"),
        ({"arrays": {}}, "data.arrays must be a table"),
        ({"pad": 0}, "data.pad: goes with 'arrays'"),
        ({"arrays": {"a": "int 3"}, "mask": "m"}, "data.mask: goes with 'pad'"),
        ({"arrays": {"a": "int 3"}, "pad": 0, "mask": "m"}, "'m' is none of the arrays"),
        ({"arrays": {"a": "int 3"}, "pad": {"b": 0}}, "'b' is none of the arrays"),
        ({"arrays": {"a": "int 3"}, "pad": {"a": "x"}}, "data.pad must be a number, .* got 'x'"),
        ({"arrays": {"a": "int 3"}, "pad": True}, "data.pad must be a number, .* got True"),
    ],
)
def test_a_description_that_cannot_be_names_the_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(data)


def test_a_file_names_the_arrays(tmp_path: Path) -> None:
    x, path = fill(X), tmp_path / "own.npz"
    np.savez(path, **{f"X_train.{name}": values for name, values in x.items()}, y_train=Y)
    config = configure(FORMS["dict"][0])
    read = to_federation(config.load_site({"data": str(path)}), "south", 3, config.samples)
    wanted = Federation.from_clients({"south": (x, Y)}, classes=3)
    np.testing.assert_array_equal(read.train.inputs, wanted.train.inputs)


def test_an_operator_signs_the_plan_of_an_app_with_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites and server import the app; so must whoever rehearses its plan."""
    monkeypatch.setattr("sys.path", list(sys.path))
    (package := tmp_path / "reading_app").mkdir()
    (package / "net.py").write_text(f"from {HERE} import make_reader\n")
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config]\nclients = 4\n")
    kinds = ", ".join(f'{name} = "{kind}"' for name, kind in NAMED.items())
    (package / "equifed.toml").write_text(
        f'rounds = 1\nalgorithm = "fedavg"\nmodel = "reading_app.net:make_reader"\n'
        f"data = {{ classes = 3, arrays = {{ {kinds} }} }}\n"
    )
    make_key(tmp_path, "anna")
    _, told = sign_run(tmp_path, [], tmp_path / "anna.key", None)
    assert any("model reading_app.net:make_reader" in line for line in told)


def test_the_description_on_the_page_is_read() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    layout = configure(tomllib.loads(block)["data"]).samples
    assert isinstance(layout, Layout) and layout.width == 257 and layout.padding == Padding(0)


def test_a_plan_says_what_a_sample_must_be() -> None:
    words = "\n".join(make_plan(configure(PADDED), FederationSettings(4)).describe())
    assert f"'tokens': '{WIDTH}'" in words and "'pad': {'tokens': 7}" in words
