"""Buffer sizes of cuDNN's recurrent kernels (weights, reserve, workspace), from metadata alone.

PyTorch calls these kernels in ``aten/src/ATen/native/cudnn/RNN.cpp``, and gets the sizes of buffers from
cuDNN (``cudnnGetRNNTempSpaceSizes``).  Without cuDNN, the sizes are estimates with a range, derived here from
the minimum that the backward pass needs; they have not been measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}

# Numbers that the backward pass needs for each cell and step, by the cell's equations, in hidden sizes: at
# least, best estimate, at most.
#
# tanh, relu: its result, which the caller keeps for the last layer; at most also the sums before it.
#
# LSTM: the four gates and the cell's state; in the best estimate also its result, as the next layer's input;
# at most also tanh of the state, and the sums before the gates.
#
# GRU: the three gates and the hidden part of the new gate, which cannot be derived from them; in the best
# estimate also its result (ATen's own `_thnn_fused_gru_cell` keeps these five); at most also the sums before.
_KEPT = {RELU: (0, 1, 3), TANH: (0, 1, 3), LSTM: (5, 6, 11), GRU: (4, 5, 9)}
# `promote_rnn_math_type`: half precision is computed in float32, and may be stored in it.
_LEAST_MATH_ITEMSIZE = 4
_PADDING = 2**20  # at most, for alignment and counters


class Estimate(NamedTuple):
    """Bytes: best estimate, at least, at most."""

    nbytes: int
    low: int
    high: int


# `get_dropout_state`: "slightly over 2MB"; one state per thread, so it grows with the number of
# multiprocessors.
DROPOUT_STATE = Estimate(2 * 2**20 + 2**16, 2**20, 8 * 2**20)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One call: ``steps`` of at most ``batch`` sequences each, ``rows`` in all.

    ``outside`` is the size of the input, ``result`` that of a step's output.
    """

    mode: int
    outside: int
    hidden: int
    projection: int
    layers: int
    directions: int
    steps: int
    batch: int
    rows: int
    itemsize: int
    dropout: bool

    @property
    def result(self) -> int:
        return self.projection or self.hidden

    @property
    def reserve(self) -> Estimate:
        """The bytes that the forward pass keeps for the backward pass in training."""
        cells = self.layers * self.directions * self.hidden
        low, best, high = (kept * cells for kept in _KEPT[self.mode])
        between = (self.layers - 1) * self.directions * self.result  # inputs of the layers after the first
        dropped = between if self.dropout else 0
        wide = max(self.itemsize, _LEAST_MATH_ITEMSIZE)
        padded = self.steps * self.batch
        return Estimate(
            nbytes=self.rows * (best + dropped) * self.itemsize,
            low=self.rows * max(low, between) * self.itemsize,
            high=padded * (high + between + dropped) * wide + _PADDING,
        )

    @property
    def gates(self) -> int:
        """Bytes of one layer's sums before its gates, for all steps, because inputs times weights are one
        product.
        """
        return self.rows * self.directions * GATES[self.mode] * self.hidden * self.itemsize

    def workspace(self, train: bool) -> Estimate:
        """The bytes that a pass uses while it runs.

        In training, the sums (and in the backward pass their gradients) may be stored in the reserve's memory
        for the gates, so none is needed. Without a reserve, it is one layer's sums at a time. At most, it is
        those of all layers, in float32.
        """
        wide = max(self.itemsize, _LEAST_MATH_ITEMSIZE) // self.itemsize
        padded = -(-self.steps * self.batch // max(self.rows, 1))
        most = self.layers * self.gates * wide * padded + _PADDING
        return Estimate(0 if train else self.gates, 0, most)


def of_call(
    inputs: Sequence[int],
    itemsize: int,
    mode: int,
    hidden: int,
    projection: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    bidirectional: bool,
    batch_sizes: Sequence[int],
) -> Recurrence:
    """The call of ``_cudnn_rnn`` on an input of the shape ``inputs``."""
    if batch_sizes:
        steps, batch, rows = len(batch_sizes), batch_sizes[0], inputs[0]
    else:
        batch, steps = (inputs[0], inputs[1]) if batch_first else (inputs[1], inputs[0])
        rows = steps * batch
    return Recurrence(
        mode=mode,
        outside=inputs[-1],
        hidden=hidden,
        projection=projection,
        layers=layers,
        directions=2 if bidirectional else 1,
        steps=steps,
        batch=batch,
        rows=rows,
        itemsize=itemsize,
        dropout=dropout > 0 and layers > 1,
    )


class Parameters(NamedTuple):
    """The flat buffer of a layer's parameters: ``elements`` of it, and ``places``, the offset and shape of
    each parameter in ``nn.RNNBase``'s order.
    """

    elements: int
    places: Sequence[tuple[int, tuple[int, ...]]]


def parameters(
    mode: int, outside: int, hidden: int, projection: int, layers: int, directions: int, biases: bool
) -> Parameters:
    """``cudnnGetRNNWeightSpaceSize``: all matrices, then two biases of each cell, whether used or not.

    PyTorch always requests both biases (``CUDNN_RNN_DOUBLE_BIAS``, ATen/cudnn/Descriptors.h). The order
    within the buffer is internal to cuDNN; the order here serves to tell parts apart.
    """
    rows = GATES[mode] * hidden
    result = projection or hidden
    cells = []
    at = 0

    def place(*shape: int) -> tuple[int, tuple[int, ...]]:
        nonlocal at
        start = at
        at += math.prod(shape)
        return start, shape

    for layer in range(layers):
        for _ in range(directions):
            matrices = [place(rows, outside if layer == 0 else result * directions), place(rows, result)]
            last = [place(projection, hidden)] if projection else []
            cells.append((matrices, last))
    places = []
    for matrices, last in cells:
        both = [place(rows), place(rows)]
        places += [*matrices, *(both if biases else []), *last]
    return Parameters(at, places)
