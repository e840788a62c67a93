"""Tensors that are saved together are evaluated together; loading in a block evaluates nothing."""

from __future__ import annotations

import dataclasses
import io
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save, save_file, save_model
from torch import nn

import lazyviz
from lazyviz.record.interception import torch_save


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
        optimizer.step()
    return model, optimizer


def everything(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": [(model[0].weight,)]}


WAYS = {
    "torch.save": lambda m, o, f: torch.save(m.state_dict(), f),
    "torch.save of all": lambda m, o, f: torch.save(everything(m, o), f),
    "torch.save of a module": lambda m, o, f: torch.save(m, f),
    "the older format": lambda m, o, f: torch.save(everything(m, o), f, _use_new_zipfile_serialization=False),
    "safetensors": lambda m, o, f: save_file(m.state_dict(), f),
    "safetensors in memory": lambda m, o, f: f.write_bytes(save(m.state_dict())),
    "safetensors of a module": lambda m, o, f: save_model(m, f),
    "NumPy": lambda m, o, f: numpy.savez(f, **m.state_dict()),
    "shared memory": lambda m, o, f: m.share_memory(),
    "pickle": lambda m, o, f: f.write_bytes(pickle.dumps(everything(m, o))),
    "pickle of a module": lambda m, o, f: pickle.dump(m, f.open("wb")),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_together_is_one_sync_point(way, tmp_path):
    model, optimizer = trained()
    WAYS[way](model, optimizer, tmp_path / "eager")
    with lazyviz.lazy() as graph:
        pending, its = trained()
        WAYS[way](pending, its, tmp_path / "lazy")
    assert len(graph.sync_points) == 1
    if way == "NumPy":
        eager, lazy = (numpy.load(tmp_path / f"{name}.npz") for name in ("eager", "lazy"))
        assert all((eager[name] == lazy[name]).all() for name in eager)
    elif way.startswith("safetensors"):
        assert (tmp_path / "eager").read_bytes() == (tmp_path / "lazy").read_bytes()
    for one, other in zip(model.state_dict().values(), pending.state_dict().values()):
        assert torch.equal(one, other)


class Slotted:
    __slots__ = ("empty", "first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


@dataclasses.dataclass
class State:
    """What a user's training loop keeps together."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Slotted
    steps: int = 2

    @classmethod
    def begun(cls):
        model, optimizer = trained()
        return cls(model, optimizer, Slotted(torch.rand(4) * 2, torch.rand(3) * 2))


class Chosen(State):
    """An object that decides itself what is saved."""

    def __getstate__(self):
        return {"model": self.model}


@pytest.mark.parametrize("way", [(torch, "save"), (pickle, "dump")])
@pytest.mark.parametrize("nested", [True, False])
def test_an_object_of_the_users_class_is_saved_in_one_go(way, nested):
    def saved():
        state, file = State.begun(), io.BytesIO()
        getattr(*way)({"runs": [state, state]} if nested else state, file)
        file.seek(0)
        found = torch.load(file, weights_only=False) if way[0] is torch else pickle.load(file)
        return found["runs"][1] if nested else found

    def content(state):
        weights = state.model.state_dict().values()
        return [each.tolist() for each in (*weights, state.average.first, state.average.second)]

    with lazyviz.lazy() as graph:
        lazy = saved()
    assert len(graph.sync_points) == 1
    assert content(lazy) == content(saved())


def test_what_an_object_does_not_save_is_not_evaluated():
    with lazyviz.lazy() as graph:
        state = Chosen.begun()
        torch.save(state, io.BytesIO())
    assert graph.sync_points and lazyviz.is_lazy(state.average.first)


LIBRARY = """
class Trainer:
    def __init__(self, model, batch):
        self.model, self.batch = model, batch

    def save(self, file):
        torch.save(self.model.state_dict(), file)
"""


def test_what_the_users_trainer_does_not_save_is_not_evaluated():
    names = {"torch": torch}
    exec(compile(LIBRARY, torch.__file__, "exec"), names)

    class OwnTrainer(names["Trainer"]):
        """A user's subclass of a library's class, in whose method the model is saved."""

    with lazyviz.lazy() as graph:
        trainer = OwnTrainer(trained()[0], torch.rand(4) * 2)
        trainer.save(io.BytesIO())
    assert len(graph.sync_points) == 1
    assert lazyviz.is_lazy(trainer.batch)


def test_weights_that_are_tied_are_saved_in_one_go(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
    )

    def saved(folder):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        return (folder / "model.safetensors").read_bytes()

    with lazyviz.lazy() as graph:
        lazy = saved(tmp_path / "lazy")
    assert len(graph.sync_points) == 1
    assert lazy == saved(tmp_path / "eager")


def test_where_the_memory_of_a_view_lies_is_known_when_that_of_its_base_is():
    real = torch.arange(6.0)
    with lazyviz.lazy(allow_sync=False) as graph:
        assert real.view(2, 3)[1].data_ptr() == real.data_ptr() + 12
        with pytest.raises(lazyviz.SyncError):
            (real + 1)[1:].data_ptr()
        with pytest.raises(lazyviz.SyncError):
            real[2].item()
    assert not graph.sync_points


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float32])
@pytest.mark.parametrize("weights_only", [True, False])
def test_loading_is_no_sync_point_whatever_the_dtype(tmp_path, dtype, weights_only):
    whole = torch.arange(6).to(dtype)
    torch.save({"whole": whole, "part": whole[2:]}, tmp_path / "file.pt")
    with lazyviz.lazy() as graph:
        found = torch.load(tmp_path / "file.pt", weights_only=weights_only)
        found["whole"].fill_(7)
    assert not graph.sync_points
    assert found["part"].tolist() == [7] * 4 and found["part"].dtype == dtype


def test_what_a_function_of_the_user_is_given_is_not_evaluated_with_what_it_saves():
    def note(model, more):
        torch.save(model.state_dict(), io.BytesIO())

    with lazyviz.lazy() as graph:
        model, _ = trained()
        more = [torch.randn(3) * 2]
        note(model, more)
    assert lazyviz.is_lazy(more[0]) and len(graph.sync_points) == 1


def test_an_op_that_has_failed_does_not_keep_others_from_being_saved():
    with lazyviz.lazy():
        broken = torch.zeros(3)[torch.tensor([7])]
    with pytest.raises(IndexError):
        lazyviz.evaluate(broken)
    with lazyviz.lazy() as graph:
        fine = torch.randn(3) * 2
        arrays = {"fine": fine, "broken": broken}
        with pytest.raises(IndexError):
            save(arrays)
    assert not lazyviz.is_lazy(fine) and torch.isfinite(fine).all()
    assert [point.cause for point in graph.sync_points] == ["storage access"]
    lazyviz.reset()


def trained_further(path, mapped):
    found = torch.load(path / "all", mmap=mapped)
    model, optimizer = trained()
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    other, _ = trained()
    other.load_state_dict(load_file(path / "weights"), assign=mapped)
    (model(torch.ones(2, 4)).sum() * other(torch.ones(2, 4)).sum()).backward()
    optimizer.step()
    return [*model.state_dict().values(), *other.parameters(), *(p.grad for p in other.parameters())]


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_loaded_in_a_block_is_no_sync_point(tmp_path, mapped):
    model, optimizer = trained()
    torch.save(everything(model, optimizer), tmp_path / "all")
    save_file(model.state_dict(), tmp_path / "weights")
    expected = trained_further(tmp_path, mapped)
    with lazyviz.lazy() as graph:
        noise = torch.randn(3) * 2
        found = trained_further(tmp_path, mapped)
    assert graph.sync_points == [] and lazyviz.is_lazy(noise)
    graph.evaluate()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_number_of_a_storage_is_read_after_its_pending_writes():
    with lazyviz.lazy():
        x = torch.zeros(4, dtype=torch.uint8)
        memory = x.untyped_storage()
        x += 3
        assert memory[1] == 3 and list(memory) == [3] * 4


def test_reads_in_the_users_code_examine_no_callers(monkeypatch):
    examined = []
    arguments = torch_save._arguments

    def noted(frame, pickles):
        examined.append(frame.f_code.co_name)
        return arguments(frame, pickles)

    monkeypatch.setattr(torch_save, "_arguments", noted)
    with lazyviz.lazy() as graph:
        doubled = torch.arange(3.0) * 2
        other = torch.ones(2) + 1
        assert doubled.numpy().tolist() == [0, 2, 4]
        assert examined == []
        assert graph.pending
        torch.save([other, doubled], io.BytesIO())
    assert "save" in examined
