"""Messages between a process and its workers: plain data of known kinds, from the same versions."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import json
import math
import pickle
import random
import struct

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.execute import backend_registry
from lazyviz.execute.microbatch import message_framing, message_types, pickle_free_encoding, worker
from lazyviz.execute.microbatch.message_types import Done, Drawing, Failed, OpName, PassWork, PieceWork
from lazyviz.execute.microbatch.pickle_free_encoding import Codec, MessageError
from lazyviz.execute.microbatch.tensor_serialization import Packed, View, pack, unpack
from lazyviz.plan.batch.batch_placement import Piece

from .in_process_cluster import Here


def back(item):
    """``item`` after a journey."""
    settings = message_framing.loads(
        message_framing.dumps(PassWork([], Packed([], {}), {}, {"x": item})), PassWork
    ).settings
    return settings["x"]


def same_bits(ours, theirs):
    return struct.pack("<d", ours) == struct.pack("<d", theirs)


@pytest.mark.parametrize(
    "item",
    [None, True, 0, -(2**63), 2**64, "x", "\ud800\x00", b"", b"\x00y", bytearray(b"z"), [], (), {},
     (1, [2.5, (3,)]), {1: "a", "1": {(2, None): [0.1, 5e-324]}}, 3 - 0.5j, torch.float16, torch.qint8,
     torch.channels_last, torch.sparse_csr, torch.per_tensor_affine, torch.device("cuda", 1),
     torch.device("cpu"), torch.Size([2, 3])],
)  # fmt: skip
def test_plain_data_and_what_pytorch_names_travel(item):
    received = back(item)
    assert received == item and type(received) is type(item)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -math.nan, -0.0, 0.1, 1e308])
def test_floats_keep_their_bits(number):
    assert same_bits(back(number), number)
    assert same_bits(back(complex(number, 1)).real, number)


def test_tensors_travel_as_bytes():
    x = torch.randn(3, 4)
    done = message_framing.loads(
        message_framing.dumps(Done("", 0, 1, pack({1: x, 2: x[1:, ::2]}), [0.5])), Done
    )
    received = unpack(done.collected, lambda device: device)
    assert torch.equal(received[1], x) and received[2].stride() == x[1:, ::2].stride()
    assert x.numpy().tobytes() in message_framing.dumps(Done("", 0, 1, pack({1: x}), []))


class OwnError(ValueError):
    """A user's; a sender does not know it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("no"), ValueError("no")), (KeyError("k"), KeyError("k")),
     (OSError(2, "gone"), OSError(2, "gone")), (ValueError(print), ValueError(str(print))),
     (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError("no memory")),
     (torch.linalg.LinAlgError("singular"), torch.linalg.LinAlgError("singular")),
     (OwnError("mine"), ValueError("OwnError: mine")), (OwnError(2, 3), ValueError("OwnError: (2, 3)")),
     (KeyError((1, 2)), LookupError("KeyError: (1, 2)")),
     (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), None)],
)  # fmt: skip
def test_errors_travel_as_the_nearest_class_that_everybody_has(error, expected):
    received = message_framing.loads(message_framing.dumps(Failed(3, error, False)), Failed).error
    if expected is None:
        assert isinstance(received, ValueError) and str(error) in str(received)
    else:
        assert type(received) is type(expected) and received.args == expected.args


@pytest.mark.parametrize("item", [object(), {1, 2}, print, type, torch.ones(2), torch.add, slice(1, 2)])
def test_what_is_no_plain_data_is_not_sent(item):
    with pytest.raises(TypeError, match="cannot be sent to (or from )?a worker"):
        back(item)


# --- hostile and damaged messages -----------------------------------------------------------------


def message(text, *buffers):
    """A message of this version that says ``text``."""
    chunks = [text if isinstance(text, bytes) else json.dumps(text).encode(), *buffers]
    return message_framing._head() + b"".join(len(chunk).to_bytes(8, "little") + chunk for chunk in chunks)


def refused(data, match, kind=PassWork):
    with pytest.raises(MessageError, match=match) as caught:
        message_framing.loads(data, kind)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x05N.", b"lazyviz work", b"x" * 10_000, pickle.dumps(None), b"\n" * 300]
)
def test_what_is_no_message_is_refused(data):
    refused(data, "not a message between")


@pytest.mark.parametrize(
    "text",
    [{"print": []}, {"os.system": ["true"]}, {"error": ["SystemExit", []]}, {"error": ["os.system", ["x"]]},
     {"error": ["ValueError", [{"bytes": 0}]]}, {"torch": "load"}, {"torch": "__dict__"}, {"torch": []},
     {"device": "x" * 9999}, {"device": 3}, {"tuple": 5}, {"dict": [[{"dict": []}, 1]]}, {"dict": [[1]]}, {},
     {"bytes": 0}, {"a": 1, "b": 2}, {"float": "zz"}, {"complex": "00"}, {"Piece": [0, 1, 2]},
     {"Piece": [0, 1, 2, "x"]}, {"Piece": [0, 1, 2, True]}, {"__class__": []},
     {"PassWork": [[], {"Packed": [[], {"dict": []}]}, {"dict": []}, 1]},
     {"Done": [{"Packed": [[[1]], {"dict": []}]}, []]}, b"", b"{", b"NaN", b"\xff", b"[" * 100_000,
     b"1" * 5000, b'{"Piece"'],
)  # fmt: skip
def test_a_message_that_names_something_else_or_is_damaged_is_refused(text):
    refused(message(text), "damaged message|unexpected contents")


def test_bytes_are_referred_to_once():
    assert back(b"xy") == b"xy"
    packed = {"Packed": [[], {"dict": []}]}
    work = {"PassWork": [[], packed, {"dict": []}, {"dict": [["a", {"bytes": 0}], ["b", {"bytes": 0}]]}]}
    refused(message(work, b"xy"), "damaged message")
    refused(message({"PassWork": [[], packed, {"dict": []}, {"dict": []}]}, b"xy"), "unreferenced bytes")


def test_a_message_of_another_kind_than_expected_is_refused():
    data = message_framing.dumps(Failed(None, ValueError("x"), False))
    refused(data, "unexpected contents: expected PassWork, got Failed")
    assert isinstance(message_framing.answer(data, Done), Failed)


def test_a_message_that_is_cut_off_or_goes_on_is_refused():
    data = message_framing.dumps(Done("", 0, 1, pack({1: torch.ones(3)}), [1.0]))
    for length in range(len(data)):
        refused(data[:length], "not a message|truncated|damaged", Done)
    refused(data + b"x", "truncated", Done)
    refused(data + bytes(8), "unreferenced bytes", Done)
    refused(message_framing._head() + b"\xff" * 8, "truncated", Done)


@pytest.mark.parametrize("bound", ["MOST_BYTES", "MOST_TEXT"])
def test_a_message_that_is_too_long_is_neither_read_nor_written(bound, monkeypatch):
    data = message_framing.dumps(Drawing(False))
    monkeypatch.setattr(message_framing, bound, 10)
    refused(data, "longer than 10", Drawing)
    with pytest.raises(MessageError, match="longer than 10"):
        message_framing.dumps(Drawing(False))


@pytest.mark.parametrize("what", ["torch", "protocol", "lazyviz", "byte order"])
def test_another_version_is_one_sentence(what, monkeypatch):
    data = message_framing.dumps(Drawing(False))
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.0.0")
    elif what == "protocol":
        monkeypatch.setattr(message_framing, "PROTOCOL", 1)
    elif what == "lazyviz":
        monkeypatch.setattr(message_framing, "_own_version", lambda: "9.9")
    else:
        monkeypatch.setattr(message_framing.sys, "byteorder", "big")
    with pytest.raises(
        message_framing.MismatchError,
        match=r"^sender and worker have different versions: .*PyTorch.*expected .*$",
    ):
        message_framing.loads(data, Drawing)


@pytest.mark.parametrize(
    "name",
    ["aten::__class__", "aten::add.__class__", "load_library::__func__", "aten", "aten::", "::add",
     "aten::add::x", "aten::add.Tensor\n", "os.system", "aten::add.nothing", "nowhere::add",
     "import_module::default", "weight_alone ", "__dict__::keys", "aten::_dir"],
)  # fmt: skip
def test_a_name_leads_to_a_registered_operator_or_nowhere(name):
    with pytest.raises(LookupError, match="does not know the operator"):
        OpName(name).find()


def test_every_registered_operator_is_found_again():
    names = {"aten::add.Tensor", "aten::relu", "aten::native_dropout_backward", "aten::max.dim"}
    ops = [op for namespace in ("lazyviz", "prims") for op in operators(namespace)]
    ops += [op for op in operators("aten") if op.name() in names]
    assert len(ops) > len(names)
    assert all(OpName.of(op).find() is op for op in ops)
    assert OpName.of(message_types.weight_alone).find() is message_types.weight_alone


def operators(namespace):
    for name in dir(getattr(torch.ops, namespace)):
        packet = getattr(getattr(torch.ops, namespace), name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


@pytest.mark.parametrize(
    "view",
    [View(1, (2,), (1,), 0), View(-1, (2,), (1,), 0), View(0, (4,), (1,), 0), View(0, (2,), (1,), 2),
     View(0, (2,), (1, 1), 0), View(0, (-1,), (1,), 0), View(0, (2,), (-1,), 1), View(0, (2**70,), (1,), 0),
     View(0, (2,), (2**70,), 0), View(0, (0,), (1,), 4), View(0, (), (), -1)],
)  # fmt: skip
def test_a_view_beyond_its_buffer_is_rejected(view):
    packed = Packed([(bytearray(12), torch.float32, torch.device("cpu"))], {0: view})
    with pytest.raises(MessageError, match="extends beyond"):
        unpack(packed, lambda device: device)
    with pytest.raises(MessageError, match="not a whole number of elements"):
        unpack(Packed([(bytearray(7), torch.float32, torch.device("cpu"))], {}), lambda device: device)


def test_a_setting_that_is_none_is_refused():
    work = message_framing.dumps(PassWork([], Packed([], {}), {}, {"serialization.load": "x"}))
    failed = message_framing.loads(worker.prepare("token", "cpu", work), Failed)
    assert isinstance(failed.error, MessageError) and "may not set" in str(failed.error)
    assert "token" not in worker._passes


class Listening(Here):
    """Keeps what travels; ``changed`` changes answers before they are read."""

    def __init__(self, changed=None):
        super().__init__(1)
        self.sent, self.answers, self.changed = [], [], changed

    def submit(self, name, function, *arguments):
        self.sent.append((function.__name__, arguments))
        return super().submit(name, function, *arguments)

    @property
    def work(self):
        """The first pass: its token, and what was sent."""
        return next((arguments[0], arguments[2]) for name, arguments in self.sent if name == "prepare")

    def result(self, job):
        self.answers.append(super().result(job))
        return self.answers[-1] if self.changed is None else self.changed(self.answers[-1])


def step():
    """A recorded training step: random numbers, a loss's total weight, sizes that depend on pieces."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4))
    x, y = torch.randn(6, 6), torch.randint(4, (6,))
    with lazyviz.lazy(batch=[x, y]) as graph:
        loss = F.cross_entropy(model(x).reshape(x.shape[0], -1), y, ignore_index=3)
        loss.backward()
    return graph, loss


def evaluated(cluster, monkeypatch):
    monkeypatch.setitem(backend_registry._backends, "listening", cluster)
    graph, loss = step()
    graph.evaluate(backend="listening", split=2)
    return loss


@pytest.fixture
def heard(monkeypatch):
    cluster = Listening()
    evaluated(cluster, monkeypatch)
    return cluster


NUMBERS = [-1, 0, 2**63, 2**70, -(2**70), 1.5, True]
THINGS = [
    *NUMBERS,
    "x",
    None,
    [],
    {},
    [[]],
    {"tuple": []},
    {"bytes": 0},
    {"torch": "float64"},
    {"device": "meta"},
]


def places(item):
    """Everything in parsed JSON that can be replaced, as (container, key)."""
    pairs = list(enumerate(item)) if isinstance(item, list) else list(item.items())
    for key, entry in pairs:
        yield item, key
        if isinstance(entry, (list, dict)):
            yield from places(entry)


def damaged(data, rng):
    """``data`` with a few random bytes, or a few things that it says, replaced by others."""
    if rng.random() < 0.4:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    text, *buffers = message_framing._chunks(memoryview(data)[len(message_framing._head()) :])
    parsed = json.loads(bytes(text))
    for _ in range(rng.randint(1, 3)):
        where, key = rng.choice(list(places(parsed)))
        if isinstance(where, dict) and rng.random() < 0.3:
            where[rng.choice(["error", "Piece", "tuple", "x"])] = where.pop(key)
        else:
            where[key] = copy.deepcopy(rng.choice(THINGS))
    return message(parsed, *map(bytes, buffers))


def kind_of(data):
    """What a whole message is, if it is one of a run's."""
    for kind in (PassWork, PieceWork, Done):
        with contextlib.suppress(MessageError):
            return type(message_framing.loads(data, kind))
    return None


def test_damaged_messages_are_refused_in_one_sentence_or_read(heard):
    """Read they say something else of the same kind: a number of another size, say."""
    rng = random.Random(0)
    data = [argument for _, arguments in heard.sent for argument in arguments if isinstance(argument, bytes)]
    data += heard.answers
    kinds = {message: kind for message in data if (kind := kind_of(message)) is not None}
    outcomes = collections.Counter()
    for _ in range(2000):
        message = rng.choice(data)
        asked = rng.choice([PassWork, PieceWork, Done])
        kind = kinds.get(message, asked) if rng.random() < 0.5 else asked
        changed = damaged(message, rng)
        with contextlib.suppress(MessageError, message_framing.MismatchError):
            assert type(message_framing.loads(changed, kind)) is kind
            outcomes[kind] += 1
            continue
        with pytest.raises((MessageError, message_framing.MismatchError)) as caught:
            message_framing.loads(changed, kind)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
        outcomes[caught.type] += 1
    assert {MessageError, PassWork, PieceWork, Done} <= outcomes.keys(), outcomes


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_answers_damaged_work_with_its_failure(heard, seed):
    rng = random.Random(seed)
    state, settings = torch.get_rng_state(), worker.settings()
    token, work = heard.work
    pieces = [arguments[1] for _, arguments in heard.sent if arguments[0] == token and len(arguments) == 2]
    failures = 0
    for _ in range(150):
        # What the steps themselves say stays: they compute what they are told.
        assert isinstance(
            message_framing.answer(worker.prepare("whole", "cpu", work), message_types.Prepared),
            message_types.Prepared,
        )
        answer = message_framing.answer(worker.run_piece("whole", damaged(rng.choice(pieces), rng)), Done)
        failures += isinstance(answer, Failed)
        answer = message_framing.answer(
            worker.prepare("other", "cpu", damaged(work, rng)), message_types.Prepared
        )
        failures += isinstance(answer, Failed)
        worker.forget("whole")
        worker.forget("other")
    assert failures > 100 and not {"whole", "other"} & worker._passes.keys()
    assert torch.equal(torch.get_rng_state(), state) and worker.settings() == settings


@pytest.mark.parametrize("seed", range(30))
def test_after_a_damaged_answer_the_run_goes_on_elsewhere(seed, monkeypatch):
    rng = random.Random(seed)
    expected = evaluated(Listening(), monkeypatch)
    at, count = rng.randrange(3), iter(range(100))
    cut = Listening(lambda data: data[: rng.randrange(len(data))] if next(count) == at else data)
    monkeypatch.setitem(backend_registry._backends, "listening", cut)
    graph, loss = step()
    with pytest.raises(MessageError):
        graph.evaluate(backend="listening", split=2)
    graph.evaluate(backend="listening", split=2)
    assert torch.equal(loss, expected)


def test_an_answer_with_other_values_is_refused(monkeypatch):
    def changed(data):
        try:
            done = message_framing.loads(data, Done)
        except MessageError:
            return data
        return message_framing.dumps(dataclasses.replace(done, collected=Packed([], {})))

    with pytest.raises(MessageError, match="returned other values than"):
        evaluated(Listening(changed), monkeypatch)


def kind_of_answer(data):
    return type(message_framing.answer(data, object))


@pytest.mark.parametrize("whose", ["an earlier piece's", "an earlier pass's", "an earlier program's"])
def test_an_answer_to_another_message_is_refused(whose, monkeypatch):
    """One that comes late, twice, or to the wrong job."""
    kind = message_types.Prepared if whose == "an earlier program's" else Done
    earlier = Listening()
    if whose != "an earlier piece's":
        evaluated(earlier, monkeypatch)
    first = [answer for answer in earlier.answers if kind_of_answer(answer) is kind][:1]

    def replayed(data):
        if kind_of_answer(data) is not kind:
            return data
        first.append(data)
        return first[0]

    with pytest.raises(MessageError, match="the answer to another message"):
        evaluated(Listening(replayed), monkeypatch)


def test_a_pass_that_a_worker_does_not_know_is_one_sentence():
    work = message_framing.dumps(PieceWork(Piece(0, 0, 1, 1), Packed([], {}), {}))
    failed = message_framing.loads(worker.run_piece("unknown", work), Failed)
    assert isinstance(failed.error, LookupError) and "does not know this run" in str(failed.error)


def test_a_pass_whose_sender_is_gone_is_forgotten(heard, monkeypatch):
    _, work = heard.work
    worker.prepare("old", "cpu", work)
    monkeypatch.setattr(worker, "FORGOTTEN_AFTER", -1.0)
    worker.prepare("new", "cpu", work)
    assert "old" not in worker._passes and "new" in worker._passes
    worker.forget("new")


def test_records_are_of_the_types_that_they_declare():
    codec = Codec([View, Piece])
    text, _ = codec.encode(View(0, (1, 2), (2, 1), 0))
    assert codec.decode(text, []) == View(0, (1, 2), (2, 1), 0)
    for wrong in (
        b'{"View":[0,[1],{"tuple":[]},0]}',
        b'{"View":[0,{"tuple":[1.0]},{"tuple":[1]},0]}',
        b'{"Done":[]}',
    ):
        with pytest.raises(MessageError):
            codec.decode(wrong, [])
    assert pickle_free_encoding.MessageError is message_framing.MessageError


# --- workers that do not answer -------------------------------------------------------------------


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


@pytest.mark.parametrize("answer", [None, 3, "text", [1, 2], {}, b"", torch.ones(2)], ids=repr)
def test_an_answer_that_is_no_message_is_rejected_and_the_run_goes_on(answer, monkeypatch):
    cluster, model, x = Here(), nn.Linear(2, 2), torch.ones(4, 2)
    result, answers = cluster.result, [answer]

    def other_result(job):
        found = result(job)
        return answers.pop() if answers else found

    cluster.result = other_result
    monkeypatch.setitem(backend_registry._backends, "says_anything", cluster)
    with lazyviz.lazy(batch=[x], split=2, backend="says_anything") as graph:
        y = model(x)
    with pytest.raises(MessageError, match="not a message between lazyviz and its workers"):
        graph.evaluate()
    graph.evaluate()
    assert torch.allclose(y, model(x))
