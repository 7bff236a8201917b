"""scikit-learn and fairlearn: rows of all hospitals in one place, equal errors as a constraint."""

import sys

import pandas as pd
from fairlearn.metrics import MetricFrame
from fairlearn.reductions import ErrorRateParity, ExponentiatedGradient
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

NUMBERS = ["age", "creatinine", "platelets", "lactate"]
WORDS = ["sex", "ward", "smoker"]

train, test = (pd.read_csv(path) for path in sys.argv[1:3])
prepare = ColumnTransformer(
    [
        ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), NUMBERS),
        ("words", OneHotEncoder(handle_unknown="ignore"), WORDS),
    ],
    sparse_threshold=0,
)
x, y = prepare.fit_transform(train), (train["outcome"] == "died").astype(int)
fair = ExponentiatedGradient(LogisticRegression(max_iter=1000), ErrorRateParity())
fair.fit(x, y, sensitive_features=train["hospital"])
predicted = fair.predict(prepare.transform(test), random_state=0)
truth = (test["outcome"] == "died").astype(int)
frame = MetricFrame(
    metrics=accuracy_score, y_true=truth, y_pred=predicted, sensitive_features=test["hospital"]
)
print(frame.by_group.to_json())
