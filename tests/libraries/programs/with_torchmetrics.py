"""torchmetrics: measures over batches."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torchmetrics import functional, regression
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from ..catalog import program


def measured(metrics: dict[str, Any], batches: list[tuple[torch.Tensor, ...]]) -> Any:
    collection = torchmetrics.MetricCollection(metrics)
    each = [collection(*batch) for batch in batches]
    total = collection.compute()
    collection.reset()
    return each, total


@program(
    {
        "the result of aten.bincount.default depends on data": "counts of as many classes as there are",
        "the result of aten.nonzero.default depends on data": "where scores change, for a curve",
        "the result of aten.index.Tensor depends on data": "classes of which there is a value",
        "item": "whether scores are probabilities; whether there are positives and negatives",
    }
)
def classification_over_batches() -> Any:
    classes = 4
    metrics = {
        "accuracy": MulticlassAccuracy(classes),
        "f1": MulticlassF1Score(classes, average="weighted"),
        "auroc": MulticlassAUROC(classes),
        "precision": MulticlassAveragePrecision(classes, thresholds=5),
        "calibration": MulticlassCalibrationError(classes),
        "confusion": MulticlassConfusionMatrix(classes),
    }
    batches = [(torch.randn(20, classes).softmax(-1), torch.randint(0, classes, (20,))) for _ in range(3)]
    return measured(metrics, batches)


@program(
    {
        "the result of aten.bincount.default depends on data": "counts of as many classes as there are",
    }
)
def classification_without_validation() -> Any:
    classes = 4
    metrics = {
        "accuracy": MulticlassAccuracy(classes, validate_args=False),
        "f1": MulticlassF1Score(classes, validate_args=False),
        "confusion": MulticlassConfusionMatrix(classes, validate_args=False),
    }
    batches = [(torch.randn(20, classes).softmax(-1), torch.randint(0, classes, (20,))) for _ in range(3)]
    return measured(metrics, batches)


@program(
    {
        "item": "whether variances are tiny; a truth value as an index",
        "the result of aten._unique2.default depends on data": "ties among ranks",
    }
)
def regression_over_batches() -> Any:
    metrics = {
        "mse": regression.MeanSquaredError(),
        "mae": regression.MeanAbsoluteError(),
        "r2": regression.R2Score(),
        "pearson": regression.PearsonCorrCoef(),
        "spearman": regression.SpearmanCorrCoef(),
        "cosine": regression.ExplainedVariance(),
    }
    return measured(metrics, [(torch.randn(30), torch.randn(30)) for _ in range(3)])


@program(
    {
        "the result of aten._unique2.default depends on data": "ties among scores",
        "item": "a truth value as an index",
    }
)
def pictures_and_retrieval() -> Any:
    left, right = torch.rand(2, 3, 24, 24), torch.rand(2, 3, 24, 24)
    return (
        functional.image.structural_similarity_index_measure(left, right, data_range=1.0),
        functional.image.peak_signal_noise_ratio(left, right, data_range=1.0),
        functional.image.total_variation(left),
        functional.retrieval.retrieval_normalized_dcg(torch.rand(10), torch.randint(0, 2, (10,))),
        functional.pairwise_cosine_similarity(torch.randn(5, 3), torch.randn(4, 3)),
        functional.text.word_error_rate(["a b c"], ["a c c"]),
    )


@program(
    {
        "item": "whether any value is not a number",
    }
)
def aggregated_values() -> Any:
    mean, total, least = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), torchmetrics.MinMetric()
    for _ in range(5):
        value = torch.randn(4)
        mean.update(value)
        total.update(value)
        least.update(value)
    return mean.compute(), total.compute(), least.compute()
