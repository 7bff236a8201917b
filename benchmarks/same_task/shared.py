"""Preparation for the tools that leave it to their users: one site's rows to arrays.

Scales and categories are of all training rows: in a real federation somebody has to agree on them.
"""

import numpy as np
import pandas as pd

NUMBERS = ["age", "creatinine", "platelets", "lactate"]
WORDS = ["sex", "ward", "smoker"]


def arrays(train: pd.DataFrame, test: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    middle, scale = train[NUMBERS].mean(), train[NUMBERS].std()
    categories = {word: sorted(train[word].dropna().unique(), key=str) for word in WORDS}
    made = []
    for table in (train, test):
        columns = [((table[NUMBERS] - middle) / scale).fillna(0.0).to_numpy()]
        for word, values in categories.items():
            columns += [(table[[word]] == value).to_numpy() for value in values]
        truth = (table["outcome"] == "died").to_numpy().astype(np.int64)
        made.append((np.concatenate(columns, axis=1).astype(np.float32), truth))
    return made
