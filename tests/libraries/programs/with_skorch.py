"""skorch: PyTorch with scikit-learn's interface."""

from __future__ import annotations

from typing import Any

import numpy
import skorch
import torch
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from ..catalog import LOADING, program


class Network(nn.Module):
    """Scores of two classes."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.layers(X)


def data() -> tuple[numpy.ndarray, numpy.ndarray]:
    inputs = numpy.random.randn(60, 6).astype("float32")
    return inputs, (inputs.sum(1) > 0).astype("int64")


def classifier(**options: Any) -> skorch.NeuralNetClassifier:
    return skorch.NeuralNetClassifier(
        Network, criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.1, batch_size=16, verbose=0, **options
    )


def learned(net: skorch.NeuralNet) -> Any:
    return net.module_, [(row["train_loss"], row.get("valid_loss")) for row in net.history]


@program(
    {
        "random_": LOADING,
        "item": "the loss of each batch is kept as a number",
        "numpy": "predictions are arrays",
    }
)
def a_classifier_fits_and_predicts() -> Any:
    inputs, labels = data()
    net = classifier(optimizer=torch.optim.Adam).fit(inputs, labels)
    return learned(net), net.predict_proba(inputs), net.score(inputs, labels)


@program(
    {
        "random_": LOADING,
        "item": "the loss of each batch is kept as a number",
        "numpy": "predictions are arrays",
    }
)
def a_regressor_with_a_schedule_and_early_stopping() -> Any:
    inputs, _ = data()
    net = skorch.NeuralNetRegressor(
        Network,
        max_epochs=4,
        lr=0.05,
        batch_size=16,
        verbose=0,
        callbacks=[
            skorch.callbacks.EarlyStopping(patience=2),
            skorch.callbacks.LRScheduler("StepLR", step_size=2),
            skorch.callbacks.GradientNormClipping(1.0),
        ],
    )
    net.fit(inputs, inputs[:, :2].copy())
    return learned(net), net.predict(inputs)


@program(
    {
        "random_": LOADING,
        "item": "the loss of each batch is kept as a number",
        "numpy": "predictions are arrays",
    }
)
def a_search_over_widths() -> Any:
    inputs, labels = data()
    search = GridSearchCV(classifier(train_split=False), {"module__width": [4, 8]}, cv=2, scoring="accuracy")
    search.fit(inputs, labels)
    return search.best_params_, search.cv_results_["mean_test_score"], learned(search.best_estimator_)[0]


@program(
    {
        "random_": LOADING,
        "item": "the loss of each batch is kept as a number",
        "numpy": "predictions are arrays",
    }
)
def a_pipeline_is_cross_validated() -> Any:
    inputs, labels = data()
    return cross_val_predict(make_pipeline(StandardScaler(), classifier()), inputs, labels, cv=3)
