"""The models and data sets that a plan can name, to be read without importing any of them."""

from __future__ import annotations

MODELS = ("mlp", "lenet", "cnn", "lstm", "sklearn-sgd", "sklearn-mlp")
ESTIMATORS = ("sklearn-sgd", "sklearn-mlp")
"""Those of scikit-learn. `sklearn-sgd`: one-against-rest logistic regression, steps of one sample,
no momentum. `sklearn-mlp`: as mlp, momentum SGD in the plan's batches; biases do not decay."""
TEXT_MODELS = ("lstm",)
"""Those that take token ids; the others take numbers."""
CUSTOM = "custom"
"""The model of a plan whose peers name a factory themselves."""

DATA_SETS = {"digits": 1297, "fashion-mnist": 60_000, "mnist": 60_000, "cifar10": 50_000}
"""Numbers of training samples by name."""
OWN = "own"
"""The data of a plan whose peers name theirs themselves."""
