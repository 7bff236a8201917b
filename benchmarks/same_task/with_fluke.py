"""fluke: FedAvg with one client per hospital."""

import json
import sys

import pandas as pd
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from shared import arrays

train, test = (pd.read_csv(path) for path in sys.argv[1:3])
names = sorted(train["hospital"].unique())
(x, y), (x_test, y_test) = arrays(train, test)


class Logistic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(x.shape[1], 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def loaders(table: pd.DataFrame, inputs: object, targets: object, batch: int) -> list:
    made = []
    for name in names:
        mine = (table["hospital"] == name).to_numpy()
        pair = torch.tensor(inputs[mine]), torch.tensor(targets[mine])
        made.append(FastDataLoader(*pair, num_labels=2, batch_size=batch, shuffle=True))
    return made


environment = FlukeENV()
environment.set_seed(0)
environment.set_device("cpu")
environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=2))
held = loaders(test, x_test, y_test, 0)
data = DummyDataContainer(loaders(train, x, y, 32), held, None)
splitter = DataSplitter(dataset=data, distribution="iid", client_split=0.0)
settings = DDict(
    model=Logistic(),
    client=DDict(
        batch_size=32, local_epochs=3, loss=torch.nn.CrossEntropyLoss,
        optimizer=DDict(name=torch.optim.SGD, lr=0.1), scheduler=DDict(gamma=1.0, step_size=1),
    ),
    server=DDict(weighted=True),
)  # fmt: skip
algorithm = FedAVG(len(names), splitter, settings)
algorithm.run(30, 1.0)
model = algorithm.server.model
found = {}
for name, loader in zip(names, held, strict=True):
    inputs, targets = loader.tensors
    found[name] = (model(inputs).argmax(1) == targets).float().mean().item()
print(json.dumps(found))
