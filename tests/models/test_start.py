"""Where training starts, what stays fixed on the way, and what comes back."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.cases import CASES
from tests.problems import classification, regression
from torch import nn

from equifed.algorithms import FedAvg
from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.models.flat import FlatModel
from equifed.models.losses import cross_entropy
from equifed.training.loop import train

pytestmark = pytest.mark.long

ENGINES = ("loop", "stacked")
DOUBLE = torch.float64


def with_backbone(frozen: bool = True) -> nn.Module:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    module[0].requires_grad_(not frozen)
    return module


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# -- what is frozen --------------------------------------------------------------------------------


def whole_and_head(engine):
    """Return clients with a frozen backbone, and with its features in place of their samples."""
    federation, module = classification(), with_backbone()
    with torch.no_grad():
        features = module[:2](torch.as_tensor(federation.train.inputs)).numpy()
    given = {"engine": engine, "dtype": DOUBLE, "l2": 1e-2}
    whole = simulate(federation, module, cross_entropy, **given)
    head = simulate(federation.with_inputs({"train": features}), module[2], cross_entropy, **given)
    assert whole.model.size == head.model.size == 15
    return module, whole, head


@pytest.mark.parametrize("engine", ENGINES)
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch_size=st.sampled_from([None, 3]),
    work=st.sampled_from([
        LocalWork(0.1, steps=3, batch_size=3, snapshot=2, average=True),
        LocalWork(0.1, epochs=1, batch_size=3, mean_gradient=True, correction=0.5),
        LocalWork(0.1, steps=2, proximal=0.3, multiplier=True),
        LocalWork(0.1, steps=3, radius=0.8, hinge=SmoothedHinge(1.0, 0.5)),
    ]),
)  # fmt: skip
def test_the_verbs_see_a_frozen_backbone_as_features(engine, seed, batch_size, work):
    """Algorithms know the four verbs alone: what holds for these holds for all of them."""
    _, *both = whole_and_head(engine)
    draw, n = np.random.default_rng(seed), len(both[0].names)
    (x, target), weights = torch.as_tensor(draw.normal(size=(2, 15))), draw.normal(size=n)
    answers = []
    for clients in both:
        stream = Stream(seed)
        losses, gradients = clients.value_and_gradient(x, stream, batch_size)
        corrected = work.correction < 1 or work.multiplier
        more = {"control": gradients, "target": target} if corrected else {}
        more |= {"slopes": np.abs(weights)} if work.hinge else {}
        moved = clients.local_steps(x, work, stream, **more)
        vectors = [gradients, *(getattr(moved, kind) for kind in work.results)]
        found = [losses, clients.losses(x, stream, batch_size), moved.steps, moved.thresholds]
        found += [v.weighted_sum(weights) for v in vectors]
        answers.append([np.asarray(one) for one in found if one is not None])
    for got, expected in zip(*answers, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-10)
    for ours, theirs in zip(*((c.traffic.up, c.traffic.down) for c in both), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg/sampled", "drfa/full", "scaff-pd/relative"])
def test_training_a_head_is_training_it_on_the_features_of_the_backbone(name, engine):
    module, whole, head = whole_and_head(engine)
    got, expected = (
        train(CASES[name], c, rounds=3, seed=1, give_out="last").parameters for c in (whole, head)
    )
    for key, value in bits(module).items():
        if key.startswith("0."):
            assert torch.equal(got[key], value)  # to the bit
        else:
            torch.testing.assert_close(got[key], expected[key[2:]], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [("0.weight",), ("0.bias", "2.weight"), ("2.bias",), ()])
def test_fedavg_is_a_loop_of_torch(engine, frozen):
    """An ordinary loop with torch.optim.SGD, which leaves alone what needs no gradient."""
    federation, module = classification(), with_backbone(frozen=False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    clients = simulate(federation, module, cross_entropy, engine=engine, dtype=DOUBLE)
    algorithm = FedAvg(LocalSGD(lr=0.2, steps=4))
    got = train(algorithm, clients, rounds=3).parameters
    sizes, model = federation.train.sizes, copy.deepcopy(module)
    for _ in range(3):
        states = []
        for i in range(len(federation)):
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), lr=0.2)
            x, y = (torch.as_tensor(v) for v in federation.train.client(i))
            for _ in range(4):
                optimiser.zero_grad()
                nn.functional.cross_entropy(local(x), y).backward()
                optimiser.step()
            states.append(local.state_dict())
        shares = sizes / sizes.sum() if algorithm.weighting == "size" else 1 / len(sizes)
        shares = np.broadcast_to(shares, sizes.shape)
        mean = {k: sum(w * s[k] for w, s in zip(shares, states, strict=True)) for k in states[0]}
        model.load_state_dict(mean)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)
        if name in frozen:
            assert torch.equal(got[name], bits(module)[name])


class Untouchable(torch.autograd.Function):
    """The identity, which may not be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *slopes):
        raise AssertionError("differentiated")


class Backbone(nn.Linear):
    def forward(self, x):
        return Untouchable.apply(super().forward(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_backbone_is_not_differentiated(engine):
    backbone, head = Backbone(3, 4), nn.Linear(4, 3)
    with pytest.raises(AssertionError, match="differentiated"):  # the test can fail
        clients = simulate(classification(), nn.Sequential(backbone, head), engine=engine)
        train(FedAvg(LocalSGD(lr=0.1, steps=1)), clients, rounds=1)
    backbone.requires_grad_(False)
    clients = simulate(classification(), nn.Sequential(backbone, head), engine=engine)
    train(FedAvg(LocalSGD(lr=0.1, steps=1)), clients, rounds=1)


def test_a_model_that_is_all_frozen_is_refused():
    with pytest.raises(ValueError, match=r"no parameters to train; requires_grad_\(True\)"):
        simulate(classification(), nn.Linear(3, 3).requires_grad_(False))


# -- what is handed over ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_starts_from_its_own_weights_and_a_name_from_its_address(engine):
    module, stream = with_backbone(frozen=False), Stream(3)
    given = {"engine": engine, "dtype": DOUBLE}
    own = simulate(classification(), module, cross_entropy, **given)
    for name, value in own.parameters(own.initial(stream)).items():
        assert torch.equal(value, bits(module)[name])
    fresh = simulate(classification(), module, cross_entropy, **given, init="fresh")
    assert not torch.equal(fresh.initial(stream), own.initial(stream))
    assert not torch.equal(fresh.initial(stream), fresh.initial(Stream(4)))
    named = simulate(classification(), "mlp", **given)
    assert not torch.equal(named.initial(stream), named.initial(Stream(4)))
    with pytest.raises(ValueError, match="init must be 'given' or 'fresh', got 'zero'"):
        simulate(classification(), module, init="zero")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_happens_to_a_module_afterwards_changes_nothing(engine):
    """Neither start, frozen part nor predictor: all are those of the module as it was given."""
    module = with_backbone()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    clients = simulate(classification(), module, cross_entropy, engine=engine, dtype=DOUBLE)
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(7.0)
    module.register_forward_hook(lambda part, given, out: 0 * out)
    x = clients.initial(Stream(0))
    for name, value in clients.parameters(x).items():
        torch.testing.assert_close(value, before[name].to(value))
    outputs = clients.predictor(x).module(torch.randn(4, 3, dtype=DOUBLE))
    assert outputs.abs().max() > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_trained_loads_back_and_is_the_same_function(engine):
    federation = classification()
    clients = simulate(federation, with_backbone(), cross_entropy, engine=engine, dtype=DOUBLE)
    history = train(FedAvg(LocalSGD(lr=0.2, steps=2)), clients, rounds=2)
    module = with_backbone()
    module.load_state_dict(history.parameters)  # strict: every name, no other
    inputs = torch.as_tensor(federation.train.inputs)
    x = clients.model.flatten_any(history.parameters)
    torch.testing.assert_close(clients.model.outputs(x, inputs), module(inputs))


class Tied(nn.Module):
    """The same matrix on the way in and on the way out, a buffer, and layers with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.dropout = self.again = nn.Dropout(0.5)
        self.twin = self.outer
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.outer(self.again(self.dropout(torch.tanh(self.inner(x))) * self.scale))


@pytest.mark.parametrize("engine", ENGINES)
def test_tied_weights_are_counted_once_and_load_back(engine):
    module = Tied()
    clients = simulate(classification(), module, engine=engine, dtype=DOUBLE)
    assert clients.model.size == 12
    parameters = train(FedAvg(LocalSGD(lr=0.2, steps=2)), clients, rounds=2).parameters
    assert torch.equal(parameters["inner.weight"], parameters["outer.weight"])
    assert not torch.equal(parameters["inner.weight"], module.inner.weight.detach().double())
    other = Tied().double()
    other.load_state_dict(parameters)
    assert set(parameters) == set(other.state_dict())
    x = clients.model.flatten_any(other)
    assert torch.equal(x, clients.model.flatten_any(parameters))
    up = clients.traffic.up[0]
    assert up == 2 * 12 * 8  # one vector per round


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(["0.weight", "0.bias", "2.bias"])))
def test_vector_module_and_state_are_the_same_start(seed, frozen):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model = FlatModel(module, cross_entropy, torch.zeros(2, 3))
    x = model.flatten_any(module)
    assert x.shape == (model.size,)
    state = model.state(x)
    assert {k: v.tolist() for k, v in state.items()} == {
        k: v.tolist() for k, v in module.state_dict().items()
    }
    for other in (x, x.numpy(), state, module.state_dict(), model.unflatten(x)):
        assert torch.equal(model.flatten_any(other), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"3.weight": torch.zeros(1)}, "no parameter '3.weight'; it trains 2.weight"),
        (lambda s: s | {"2.bias": torch.zeros(4)}, r"'2.bias' has shape \(4,\), .* needs \(3,\)"),
        (lambda s: {"2.bias": s["2.bias"]}, "lacks the parameter '2.weight'"),
        (lambda s: s | {"0.bias": s["0.bias"] + 1}, "'0.bias' is fixed or tied in the model"),
        (lambda s: s | {"2.bias": s["2.bias"] * torch.nan}, "all finite"),
        (lambda s: torch.zeros(14), r"the 15 trained parameters, .* got shape \(14,\)"),
        (lambda s: "path", "a vector, a module or a state dict, got str"),
    ],
)
def test_other_starts_are_refused(change, message):
    module = with_backbone()
    model = FlatModel(module, cross_entropy, torch.zeros(2, 3, dtype=DOUBLE), dtype=DOUBLE)
    with pytest.raises(ValueError, match=message):
        model.flatten_any(change(bits(module)))


def test_tied_weights_that_differ_are_refused():
    model = FlatModel(Tied(), cross_entropy, torch.zeros(2, 3))
    state = dict(Tied().state_dict())
    state["outer.weight"] = state["outer.weight"] + 1
    with pytest.raises(ValueError, match=r"'outer.weight' is fixed or tied"):
        model.flatten_any(state)


def test_regression_has_no_classes_to_fit():
    assert simulate(regression(), nn.Linear(3, 1), "squared").model.size == 4
