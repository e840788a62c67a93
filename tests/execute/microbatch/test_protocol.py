"""Messages between a process and its workers: data of known kinds, from a sender of the same versions."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.execute.microbatch import protocol
from lazyviz.execute.microbatch.serialization import pack, unpack

from .clusters import Here


def test_plain_data_dtypes_devices_and_errors_travel():
    item = [1, 2.5, 3j, "x", b"y", bytearray(b"z"), None, (True, {"a": {1}}), slice(1, 2), torch.float16]
    item += [torch.device("cuda", 1), torch.Size([2, 3]), torch.channels_last, torch.strided]
    assert protocol.loads(protocol.dumps(item)) == item
    error = protocol.loads(protocol.dumps(torch.OutOfMemoryError("no memory")))
    assert isinstance(error, torch.OutOfMemoryError)


def test_tensors_travel_as_bytes():
    x = torch.randn(3, 4)
    back = unpack(protocol.loads(protocol.dumps(pack({"x": x, "part": x[1:, ::2]}))), lambda device: device)
    assert torch.equal(back["x"], x)
    assert back["part"].stride() == x[1:, ::2].stride()


class Hostile:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "call",
    [(os.system, "true"), (eval, "1"), (getattr, "a", "upper"), (exec, ""), (__import__, "os"), (sum, [1]),
     (torch.load, "x"), (torch.ones, 3), (lazyviz.reset,), (open, os.devnull), (type, "x", (), {})],
)  # fmt: skip
def test_a_message_can_name_no_function(call):
    with pytest.raises(pickle.UnpicklingError, match="may not name"):
        protocol.loads(protocol.dumps(Hostile(*call)))


@pytest.mark.parametrize("data", [b"", b"\x80\x05N.", b"lazyviz work", b"x" * 10_000, pickle.dumps(None)])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(pickle.UnpicklingError, match="not a message"):
        protocol.loads(data)


@pytest.mark.parametrize("what", ["__version__", "PROTOCOL"])
def test_another_version_is_one_sentence(what, monkeypatch):
    data = protocol.dumps(None)
    monkeypatch.setattr(*((torch, what, "2.0.0") if what == "__version__" else (protocol, what, 2)))
    with pytest.raises(protocol.MismatchError, match=r"^sender and worker differ: .*PyTorch.*this is .*$"):
        protocol.loads(data)


def test_a_message_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(protocol, "MOST_BYTES", 10)
    with pytest.raises(pickle.UnpicklingError, match="longer than"):
        protocol.loads(protocol.dumps(None))


class Hanging(Here):
    """Worker 0 never answers once it has a piece."""

    patience = 0.2

    def submit(self, name, function, *arguments):
        job = super().submit(name, function, *arguments)
        if name == 0 and function.__name__ == "run_piece":
            self.results[job] = None
        return job

    def finished(self, jobs, seconds):
        return [job for job in jobs if self.results[job] is not None]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_hangs_is_given_up_after_the_stated_time(workers):
    cluster = Hanging(workers)
    lazyviz.register_backend("hanging", cluster)
    model, batch = nn.Linear(4, 2), torch.randn(8, 4)
    expected = model(batch).sum()
    with lazyviz.lazy(batch=[batch], split=4, backend="hanging") as graph:
        total = model(batch).sum()
    if workers == 1:
        with pytest.raises(lazyviz.NoWorkersError, match=r"no answer within 0\.2 seconds"):
            graph.evaluate()
        graph.evaluate(backend="eager")
    else:
        graph.evaluate()
    assert torch.allclose(total, expected)
