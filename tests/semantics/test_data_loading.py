"""A DataLoader returns the same batches in the same order, with the same generator states as eager."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

import lazyviz

from ..bit_equality import difference

DATA = torch.arange(24.0).reshape(8, 3)
LABELS = torch.arange(8)


class Drawing(Dataset):
    """Draws from each of the three generators, as augmentation does."""

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return DATA[at] + torch.rand(3), random.random(), np.random.rand()


class Counting(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for at in range(start, 7, step):
            yield DATA[at] * 2


class Scaled(Dataset):
    def __init__(self, scale):
        self.scale = scale

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return DATA[at] * self.scale


def _collate(items):
    return torch.stack(items).sum(0), len(items)


def _generator():
    return torch.Generator().manual_seed(7)


def loader(dataset=None, **options):
    return DataLoader(TensorDataset(DATA, LABELS) if dataset is None else dataset, batch_size=3, **options)


LOADERS = {
    "in order": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "shuffled by a generator": lambda: loader(shuffle=True, generator=_generator()),
    "without the last": lambda: loader(shuffle=True, drop_last=True),
    "a random sampler": lambda: loader(sampler=RandomSampler(DATA, replacement=True, num_samples=5)),
    "a weighted sampler": lambda: loader(sampler=WeightedRandomSampler(torch.arange(8.0), 6)),
    "a batch sampler": lambda: DataLoader(
        TensorDataset(DATA), batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)
    ),
    "no batches": lambda: DataLoader(TensorDataset(DATA, LABELS), batch_size=None, shuffle=True),
    "a collate function": lambda: loader(list(DATA), collate_fn=_collate),
    "augmentation": lambda: loader(Drawing(), shuffle=True),
    "an iterable": lambda: loader(Counting()),
    "a subset": lambda: loader(Subset(TensorDataset(DATA), [5, 1, 3])),
    "a concatenation": lambda: loader(ConcatDataset([list(DATA), list(DATA + 1)]), shuffle=True),
    "a split": lambda: loader(random_split(list(DATA), [5, 3])[0], shuffle=True),
    "worker processes": lambda: loader(shuffle=True, num_workers=2),
    "worker processes that draw": lambda: loader(Drawing(), shuffle=True, num_workers=2),
    "worker processes of an iterable": lambda: loader(Counting(), num_workers=2),
    "workers that persist": lambda: loader(shuffle=True, num_workers=2, persistent_workers=True),
}


def seeded():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def _states():
    return torch.get_rng_state(), random.random(), float(np.random.rand())


def epochs(load, use):
    results = []
    for _ in range(2):
        results.append(torch.rand(2))  # a draw that is pending when the loader draws its seed
        results += [use(batch) for batch in load]
    return [*results, torch.rand(2)]


def use(batch):
    first = batch[0] if isinstance(batch, (list, tuple)) else batch
    return batch, first * 2 + torch.rand(1)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("where", ["inside", "between"])
def test_batches_and_generators_are_eagers(name, where):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process that has threads
        seeded()
        expected = epochs(LOADERS[name](), use)
        after = _states()
        seeded()
        if where == "inside":
            with lazyviz.lazy() as graph:
                actual = epochs(LOADERS[name](), use)
            assert graph.pending
        else:

            def lazily(batch):
                with lazyviz.lazy():
                    return use(batch)

            actual = epochs(LOADERS[name](), lazily)
        assert difference(after, _states()) is None
        lazyviz.sync()
    assert difference(expected, actual) is None


def test_batches_themselves_are_ordinary_tensors():
    with lazyviz.lazy() as graph:
        for batch, labels in loader(shuffle=True):
            assert type(batch) is torch.Tensor and type(labels) is torch.Tensor
            assert not lazyviz.is_lazy(batch)
            assert lazyviz.is_lazy(batch * 2)
    assert not graph.sync_points


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_dataset_of_pending_tensors(workers):
    expected = [batch * 1 for batch in loader(Scaled(torch.tensor(3.0) * 2), num_workers=workers)]
    with lazyviz.lazy() as graph:
        scale = DATA.sum() / DATA.sum() * 6
        actual = [batch * 1 for batch in loader(Scaled(scale), num_workers=workers)]
    assert graph.sync_points
    lazyviz.sync()
    assert difference(expected, actual) is None


def test_a_dataset_of_pending_rows():
    with lazyviz.lazy():
        rows = DATA * 2
        batches = [batch for (batch,) in loader(TensorDataset(rows))]
    assert difference(list((DATA * 2).split(3)), batches) is None


def test_collating_pending_tensors_by_hand():
    with lazyviz.lazy() as graph:
        batch = default_collate([{"x": row * 2, "y": at} for at, row in enumerate(DATA)])
    assert not graph.sync_points
    graph.evaluate()
    assert difference(DATA * 2, batch["x"]) is None and batch["y"].tolist() == list(range(8))


def test_a_buffer_that_the_loader_fills_again_and_again():
    class Refilled(IterableDataset):
        def __iter__(self):
            buffer = np.zeros(3, dtype=np.float32)
            for at in range(4):
                buffer[:] = at
                yield torch.from_numpy(buffer)

    with lazyviz.lazy():
        results = [batch + 1 for batch in DataLoader(Refilled(), batch_size=None)]
    assert [result.tolist() for result in results] == [[at + 1] * 3 for at in range(4)]


def test_a_loader_begun_in_one_block_goes_on_in_the_next():
    seeded()
    expected = [batch * 2 for batch, _ in loader(shuffle=True)]
    seeded()
    batches = iter(loader(shuffle=True))
    actual = []
    for _ in range(3):
        with lazyviz.lazy():
            actual.append(next(batches)[0] * 2)
    assert difference(expected, [lazyviz.to_eager(tensor) for tensor in actual]) is None


def test_training_on_a_shuffling_loader_needs_no_sync():
    def train():
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            for batch, _ in loader(shuffle=True, generator=_generator()):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return model.state_dict()

    expected = train()
    with lazyviz.lazy() as graph:
        actual = train()
    assert not graph.sync_points
    graph.evaluate()
    assert difference(expected, actual) is None
