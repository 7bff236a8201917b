"""Flower: FedAvg among six simulated sites, evaluated at each."""

import json
import sys
from collections import OrderedDict

import flwr
import pandas as pd
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from shared import arrays

train, test = (pd.read_csv(path) for path in sys.argv[1:3])
names = sorted(train["hospital"].unique())
(x, y), (x_test, y_test) = arrays(train, test)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(x.shape[1], 2)


def parameters(model: torch.nn.Module) -> list:
    return [value.detach().numpy() for value in model.state_dict().values()]


def load(model: torch.nn.Module, values: list) -> None:
    pairs = zip(model.state_dict(), map(torch.tensor, values), strict=True)
    model.load_state_dict(OrderedDict(pairs))


class Site(NumPyClient):
    def __init__(self, name: str) -> None:
        mine, held = (train["hospital"] == name).to_numpy(), (test["hospital"] == name).to_numpy()
        self.name, self.model = name, build()
        self.train = torch.tensor(x[mine]), torch.tensor(y[mine])
        self.test = torch.tensor(x_test[held]), torch.tensor(y_test[held])

    def fit(self, values: list, config: dict) -> tuple:
        load(self.model, values)
        steps = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(10):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.train[0]), self.train[1]).backward()
            steps.step()
        return parameters(self.model), len(self.train[1]), {}

    def evaluate(self, values: list, config: dict) -> tuple:
        load(self.model, values)
        out = self.model(self.test[0])
        loss = torch.nn.functional.cross_entropy(out, self.test[1]).item()
        accuracy = (out.argmax(1) == self.test[1]).float().mean().item()
        return loss, len(self.test[1]), {"accuracy": accuracy, "name": self.name}


def client_fn(context: Context) -> flwr.client.Client:
    return Site(names[int(context.node_config["partition-id"])]).to_client()


def gather(metrics: list) -> dict:
    return {str(m["name"]): float(m["accuracy"]) for _, m in metrics}


latest: dict = {}


def server_fn(context: Context) -> ServerAppComponents:
    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=1.0,
        min_available_clients=len(names),
        initial_parameters=ndarrays_to_parameters(parameters(build())),
        evaluate_metrics_aggregation_fn=lambda metrics: latest.update(gather(metrics)) or {},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=30))


run_simulation(
    server_app=ServerApp(server_fn=server_fn),
    client_app=ClientApp(client_fn=client_fn),
    num_supernodes=len(names),
)
print(json.dumps(latest))
