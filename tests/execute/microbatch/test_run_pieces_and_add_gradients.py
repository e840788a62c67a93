"""Split runs have the same results and gradients as the whole batch."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

from ...splits import same_in_pieces

B, D, C = 14, 16, 5


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, C))


def data(dtype):
    torch.manual_seed(2)
    x, y = torch.randn(B, D, dtype=dtype), torch.randint(0, C, (B,))
    y[3] = -100
    return x, y, torch.randn(B, C, dtype=dtype)


def contrastive(o, other):
    similar = F.normalize(o, dim=1) @ F.normalize(other, dim=1).t() / 0.1
    return F.cross_entropy(similar, torch.arange(len(o)))


def clip(o, other):
    similar = F.normalize(o, dim=1) @ F.normalize(other, dim=1).t() / 0.1
    each = torch.arange(len(o))
    return (F.cross_entropy(similar, each) + F.cross_entropy(similar.t(), each)) / 2


def ntxent(o, other):
    z = F.normalize(torch.cat([o, other]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    return F.cross_entropy((z @ z.t()).masked_fill(itself, -1e9), torch.arange(len(z)).roll(len(o)))


def ctc(o, y):
    scores = o.unsqueeze(0).repeat(6, 1, 1).log_softmax(-1)
    words = y.clamp_min(1).unsqueeze(1).repeat(1, 2)
    return F.ctc_loss(scores, words, torch.full((len(o),), 6), torch.arange(len(o)) % 2 + 1)


def ctc_of_lengths_in_the_batch(o, y):
    scores = o.unsqueeze(0).repeat(6, 1, 1).log_softmax(-1)
    lengths = y.clamp(1, 2)
    return F.ctc_loss(scores, lengths.unsqueeze(1).repeat(1, 2), torch.full((len(o),), 6), lengths)


WEIGHT = torch.tensor([0.1, 0.7, 1.3, 0.4, 2.0], dtype=torch.float64)
LOSSES = {
    "sum": lambda m, o, x, y, z: o.sum(),
    "mean": lambda m, o, x, y, z: o.mean(),
    "cross-entropy, ignoring some": lambda m, o, x, y, z: F.cross_entropy(o, y),
    "cross-entropy, summed": lambda m, o, x, y, z: F.cross_entropy(o, y, reduction="sum"),
    "cross-entropy, each": lambda m, o, x, y, z: F.cross_entropy(o, y, reduction="none").pow(2).sum(),
    "weighted": lambda m, o, x, y, z: F.cross_entropy(o, y, weight=WEIGHT.to(o.dtype)),
    "smoothed": lambda m, o, x, y, z: F.cross_entropy(o, y, label_smoothing=0.1),
    "weighted and smoothed": lambda m, o, x, y, z: F.cross_entropy(
        o, y, weight=WEIGHT.to(o.dtype), label_smoothing=0.1
    ),
    "soft targets": lambda m, o, x, y, z: F.cross_entropy(o, z.softmax(1)),
    "squares over a moved batch": lambda m, o, x, y, z: F.mse_loss(o.t(), z.t()),
    "squares by hand": lambda m, o, x, y, z: ((o - z) ** 2).mean(),
    "masked mean by hand": lambda m, o, x, y, z: (o.logsumexp(1) * (y != 1)).sum() / (y != 1).sum(),
    "divergence": lambda m, o, x, y, z: F.kl_div(o.log_softmax(1), z.softmax(1), reduction="batchmean"),
    "connectionist": lambda m, o, x, y, z: ctc(o, y),
    "connectionist, of lengths in the batch": lambda m, o, x, y, z: ctc_of_lengths_in_the_batch(o, y),
    "contrastive": lambda m, o, x, y, z: contrastive(o, m(x * 2)),
    "contrastive, both ways": lambda m, o, x, y, z: clip(o, m(x * 2)),
    "contrastive, joined": lambda m, o, x, y, z: ntxent(o, m(x * 2)),
    "two added": lambda m, o, x, y, z: F.cross_entropy(o, y) + 0.3 * o.pow(2).mean(),
    "with weight decay": lambda m, o, x, y, z: (
        F.cross_entropy(o, y) + 1e-2 * sum(p.pow(2).sum() for p in m.parameters())
    ),
    "normalized by a statistic": lambda m, o, x, y, z: (o.pow(2).sum(1) / o.pow(2).mean()).sin().sum(),
    "about the mean": lambda m, o, x, y, z: ((o - o.mean(0)) ** 2).sum(1).sqrt().mean(),
    "by index": lambda m, o, x, y, z: -o.log_softmax(1)[torch.arange(len(o)), y.clamp_min(0)].mean(),
    "gathered": lambda m, o, x, y, z: -o.log_softmax(-1).gather(1, y.clamp_min(0)[:, None]).mean(),
    "binary": lambda m, o, x, y, z: F.binary_cross_entropy_with_logits(o, (z > 0).to(o.dtype)),
    "binary, of chances": lambda m, o, x, y, z: F.binary_cross_entropy(o.sigmoid(), (z > 0).to(o.dtype)),
    "huber": lambda m, o, x, y, z: F.huber_loss(o, z),
    "smooth l1": lambda m, o, x, y, z: F.smooth_l1_loss(o, z),
    "l1": lambda m, o, x, y, z: F.l1_loss(o, z),
    "cosine": lambda m, o, x, y, z: F.cosine_embedding_loss(o, z, torch.ones(len(o))),
    "triplet": lambda m, o, x, y, z: F.triplet_margin_loss(o, m(x + 1), m(x * 3)),
    "margin": lambda m, o, x, y, z: F.multi_margin_loss(o, y.clamp_min(0)),
    "poisson": lambda m, o, x, y, z: F.poisson_nll_loss(o, z.abs()),
    "gaussian": lambda m, o, x, y, z: F.gaussian_nll_loss(o, z, o.exp()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_pieces_are_those_of_the_whole(name, dtype):
    loss = LOSSES[name]

    def step(model, x, y, z):
        result = loss(model, model(x), x, y, z)
        result.backward()
        return result.detach()

    for pieces in (2, 3, 7, B):
        report = same_in_pieces(perceptron().to(dtype), data(dtype), step, pieces, dtype=dtype)
        assert report.pieces == pieces


class Everything(nn.Module):
    """Merged, moved, padded, repeated dimensions; embeddings; attention; dropout; norms."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, D)
        self.places = nn.Embedding(12, D)
        self.attend = nn.MultiheadAttention(D, 4, dropout=0.1)
        self.norm = nn.LayerNorm(D)
        self.drop = nn.Dropout(0.3)
        self.recur = nn.GRU(D, D)
        self.convolve = nn.Conv1d(D, D, 3, padding=1)
        self.groups = nn.GroupNorm(4, D)
        self.out = nn.Linear(D, C)

    def forward(self, tokens):
        steps, count = tokens.shape  # (T, B): the batch is in the second dimension
        h = self.words(tokens) + self.places(torch.arange(steps))[:, None]
        h = self.norm(h + self.drop(self.attend(h, h, h, need_weights=False)[0]))
        h, _ = self.recur(h, torch.zeros(1, count, D))
        h = h.permute(1, 2, 0)
        h = self.groups(F.relu(self.convolve(F.pad(h, (1, 1)))))[:, :, 1:-1]
        h = torch.cat([h, h.roll(1, dims=2)], dim=2).chunk(2, dim=2)[0]
        return self.out(h.permute(2, 0, 1).reshape(steps * count, D))


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_a_batch_that_moves_through_every_dimension(pieces):
    torch.manual_seed(3)
    tokens, target = torch.randint(0, 50, (9, 7)), torch.randint(0, C, (9, 7))

    def step(model, tokens, target):
        scores = model(tokens)
        loss = F.cross_entropy(scores, target.flatten())
        loss.backward()
        return loss.detach(), scores.detach()

    same_in_pieces(Everything(), (tokens, target), step, pieces, dims=(1, 1))


BAGS = {
    "rows": lambda bag, x: bag(x),
    "offsets": lambda bag, x: bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1])),
    "two bags a sample": lambda bag, x: bag(x.view(-1, 3)).view(len(x), -1)[:, :D],
    "without a gradient": lambda bag, x: bag(x).detach(),
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", BAGS)
def test_bags_of_embeddings(form, mode):
    torch.manual_seed(3)
    model = nn.ModuleList([nn.EmbeddingBag(50, D, mode=mode, padding_idx=1), perceptron()])

    def step(model, x, y):
        loss = F.cross_entropy(model[1](BAGS[form](model[0], x)), y)
        loss.backward()
        return loss.detach()

    same_in_pieces(model, (torch.randint(0, 50, (B, 6)), data(torch.float32)[1]), step, 4)


def test_bags_of_weighted_embeddings():
    torch.manual_seed(3)
    model = nn.ModuleList([nn.EmbeddingBag(50, D, mode="sum"), perceptron()])

    def step(model, x, weights, y):
        scaled = model[1][0].weight.mean() * weights
        loss = F.cross_entropy(model[1](model[0](x, per_sample_weights=scaled)), y)
        loss.backward()
        return loss.detach()

    batch = torch.randint(0, 50, (B, 6)), torch.rand(B, 6), data(torch.float32)[1]
    same_in_pieces(model, batch, step, 4)


def test_several_steps_with_clipping_and_schedule_in_pieces():
    x, y, _ = data(torch.float32)

    def step(model, x, y):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(F.dropout(x, 0.2)), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        return *losses, *(p.detach() for p in model.parameters())

    for pieces in (2, 5):
        same_in_pieces(perceptron(), (x, y), step, pieces)


def test_what_is_per_sample_is_put_together_in_order():
    x, *_ = data(torch.float32)

    def step(model, x):
        with torch.no_grad():
            scores = model(x)
            joined = torch.cat([scores, scores * 2]).t()
            return scores, scores.argmax(1), joined, scores.t()[1:3], scores.softmax(1).max(), x.sum(0)

    def without_maximum(model, x):
        results = step(model, x)
        return results[:4] + results[5:]

    same_in_pieces(perceptron(), (x,), without_maximum, 4)


def test_an_input_that_needs_a_gradient_gets_it_in_order():
    x, y, _ = data(torch.float32)
    inputs = x.clone().requires_grad_()
    other = x.clone().requires_grad_()
    model = perceptron()
    F.cross_entropy(model(other), y).backward()
    with lazyviz.lazy(batch=[inputs, y], split=5) as graph:
        F.cross_entropy(model(inputs), y).backward()
    graph.evaluate()
    torch.testing.assert_close(inputs.grad, other.grad)


def test_gradients_add_up_over_backward_passes():
    x, y, _ = data(torch.float32)

    def step(model, x, y):
        for factor in (1.0, 0.5):
            (F.cross_entropy(model(x * factor), y) / 2).backward()
        return y

    same_in_pieces(perceptron(), (x, y), step, 3)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("first", [False, True])
def test_recurrent_layers_in_pieces(layer, first):
    torch.manual_seed(4)
    model = layer(6, 8, num_layers=2, bidirectional=True, batch_first=first)
    x = torch.randn(5, 6, 6)

    def step(model, x):
        result, state = model(x)
        last = state[0] if isinstance(state, tuple) else state
        (result.square().sum() + last.sum()).backward()
        return result.detach(), last.detach()

    same_in_pieces(model, (x,), step, 3, dims=(0 if first else 1,))


def test_batch_norm_in_evaluation_and_instance_norm_are_split():
    torch.manual_seed(4)
    normed = [nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval()]
    model = nn.Sequential(*normed, nn.ReLU(), nn.Flatten())
    images = torch.randn(6, 3, 8, 8)

    def step(model, images):
        result = model(images)
        (result * torch.linspace(-1, 1, result.shape[1])).sum().backward()
        return result.detach()

    same_in_pieces(model, (images,), step, 4)


@pytest.mark.parametrize("layer", [nn.LeakyReLU, nn.CELU, nn.ELU, nn.SELU, nn.Hardtanh, nn.Hardsigmoid])
@pytest.mark.parametrize("inplace", [False, True])
def test_activations_are_split(layer, inplace):
    def step(model, x, y, weights):
        scores = model(x)
        (scores * weights).sum().backward()
        return scores.detach()

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(D, C), layer(inplace=inplace))
    same_in_pieces(model, data(torch.float32), step, 3)


def test_a_tensor_made_by_hand_and_filled_by_the_batch():
    x, y, _ = data(torch.float32)

    def step(model, x, y):
        scores = model(x)
        once = torch.zeros(len(x), C).scatter_(1, y.clamp_min(0)[:, None], 1.0)
        both = torch.empty(len(x), 2 * C)
        both[:, :C] = scores
        both[:, C:] = once
        loss = both.square().mean()
        loss.backward()
        return loss.detach(), both.detach()

    same_in_pieces(perceptron(), (x, y), step, 3)


def test_half_precision_sums_lose_nothing_to_the_number_of_pieces():
    torch.manual_seed(5)
    model = nn.Linear(8, 4).bfloat16()
    x = torch.randn(256, 8, dtype=torch.bfloat16)
    exact = nn.Linear(8, 4)
    exact.load_state_dict(model.state_dict())
    exact(x.float()).sum().backward()
    with lazyviz.lazy(batch=x, split=256) as graph:
        model(x).sum().backward()
    graph.evaluate()
    assert model.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight.grad.float(), exact.weight.grad, rtol=1e-2, atol=0.1)


# --- memory -------------------------------------------------------------------------------


def test_the_peak_falls_to_a_piece_and_what_stays():
    torch.manual_seed(6)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(2048, 64)
    with lazyviz.lazy(batch=x) as graph:
        model(x).square().mean().backward()
    stays = x.nbytes + 2 * sum(p.nbytes for p in model.parameters())
    whole, planned = graph.plan().peak_bytes, graph.plan(split=8)
    report = graph.evaluate(split=8)
    assert report.peak_bytes - stays <= 1.1 * (whole - stays) / 8
    assert report.projected_bytes == planned.peak_bytes
    assert abs(report.peak_bytes - report.projected_bytes) <= 0.01 * report.peak_bytes


def recorded_in_seven():
    """A model with pending gradients, one with eager's, and the graph."""
    x, y, _ = data(torch.float32)
    model, whole = perceptron(), perceptron()
    F.cross_entropy(whole(x), y).backward()
    with lazyviz.lazy(batch=[x, y], split=7) as graph:
        F.cross_entropy(model(x), y).backward()
    return model, whole, graph


def test_sums_of_gradients_take_their_memory_once_and_as_long_as_they_are_needed():
    torch.manual_seed(0)

    def network(given, result):
        layers = [nn.Linear(given, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2)]
        return nn.Sequential(*layers, nn.Linear(256, result))

    def loss(scores, label):
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))

    generator, critic = network(64, 784), network(784, 1)
    makes = torch.optim.SGD(generator.parameters(), 0.1)
    judges = torch.optim.SGD(critic.parameters(), 0.1)
    real, noise = torch.randn(512, 784), torch.randn(512, 64)
    with lazyviz.lazy(batch=[real, noise], split=8) as graph:
        fake = generator(noise)
        judges.zero_grad()
        (loss(critic(real), 1.0) + loss(critic(fake.detach()), 0.0)).backward()
        judges.step()
        makes.zero_grad()
        loss(critic(fake), 1.0).backward()  # these gradients of the critic are added to the first ones
        makes.step()
    planned = graph.plan()
    report = graph.evaluate()
    assert report.peak_bytes == planned.tensor_peak_bytes
    held, expected = dict(report.timeline), dict(planned.timeline)
    end = [node.index for node in graph.nodes if node.phase == "optimizer"][-6:]
    assert [held[index] for index in end] == [expected[index] for index in end]


def test_an_interrupted_run_goes_on_between_pieces():
    model, whole, graph = recorded_in_seven()
    seen = itertools.count()

    def interrupt(progress):
        if next(seen) in (9, 25):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            graph.evaluate(progress=interrupt)
        assert graph.pending
    report = graph.evaluate(split="off")  # it goes on as it was begun
    assert report.pieces == 7
    for one, other in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_value_read_in_the_midst_of_an_interrupted_run_ends_it():
    model, whole, graph = recorded_in_seven()
    seen = itertools.count()

    def interrupt(progress):
        if next(seen) == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graph.evaluate(progress=interrupt)
    torch.testing.assert_close(model[0].weight.grad * 1, whole[0].weight.grad)
    assert graph.pending == 0


def test_a_piece_for_which_memory_does_not_suffice_is_halved(monkeypatch):
    from lazyviz.execute.microbatch import run_pieces_and_add_gradients

    x, y, _ = data(torch.float32)
    model, whole = perceptron(), perceptron()
    torch.manual_seed(8)
    F.cross_entropy(F.dropout(whole(x), 0.4), y).backward()
    torch.manual_seed(8)
    with lazyviz.lazy(batch=[x, y], split=2) as graph:
        F.cross_entropy(F.dropout(model(x), 0.4), y).backward()
    run = run_pieces_and_add_gradients._PieceHere.run

    def short(self, number, step):
        if self.piece.samples > 4 and "mm" in str(step.op):  # some sums have been made by then
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(self, number, step)

    monkeypatch.setattr(run_pieces_and_add_gradients._PieceHere, "run", short)
    report = graph.evaluate()
    assert report.pieces == 4
    for one, other in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_loss_that_is_read_between_forward_and_backward_in_each_step_is_a_mean_in_every_run():
    def train(model, x, y, **options):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        with lazyviz.lazy(batch=[x, y], **options) if options else contextlib.nullcontext() as graph:
            for _ in range(3):
                loss = F.cross_entropy(model(x), y)
                losses.append(loss.item())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if graph is not None:
            graph.evaluate()
        return [torch.tensor(losses), *(parameter.detach() for parameter in model.parameters())]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    expected = train(copy.deepcopy(model), x, y)
    for result, known in zip(train(model, x, y, split=4), expected):
        torch.testing.assert_close(result, known, rtol=2e-5, atol=2e-6)


def test_a_sync_point_in_a_split_block_runs_all_that_is_pending_in_pieces():
    x, y, _ = data(torch.float32)
    model, whole = perceptron(), perceptron()
    mine = torch.optim.SGD(model.parameters(), 0.1)
    theirs = torch.optim.SGD(whole.parameters(), 0.1)
    losses, expected = [], []
    for _ in range(2):
        theirs.zero_grad()
        loss = F.cross_entropy(whole(x), y)
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    with lazyviz.lazy(batch="x,y", split=4) as graph:
        for _ in range(2):
            mine.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            mine.step()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)
    assert [point.cause for point in graph.sync_points] == ["item", "item"]
    assert graph.report.pieces == 4
    assert graph.pending == 0


def test_batches_of_a_loop_are_known_by_their_name():
    batches = [(torch.randn(6, D), torch.randint(0, C, (6,))) for _ in range(3)]
    model, whole = perceptron(), perceptron()
    for x, y in batches:
        F.cross_entropy(whole(x), y).backward()
    with lazyviz.lazy(batch="x,y", split=3) as graph:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
    assert graph.evaluate().pieces == 3
    for one, other in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("given", ["names", "tensors"])
def test_a_batch_that_an_earlier_pending_block_has_met_or_makes_is_known_again(given):
    net = perceptron()
    x, y, _ = data(torch.float32)
    with lazyviz.lazy() as earlier:
        made = x * 2
    graphs = []
    for _ in range(2):
        batch = "made,y" if given == "names" else [made, y]
        with lazyviz.lazy(batch=batch, split=3) as graph:
            loss = F.cross_entropy(net(made), y)
        graphs.append((graph, loss))
    for graph, _ in graphs:
        assert graph.plan().split.pieces == 3
    expected = F.cross_entropy(net(x * 2), y)
    for graph, loss in graphs:
        graph.evaluate()
        torch.testing.assert_close(loss, expected)
    assert not earlier.pending


def test_a_batch_made_in_the_block_is_known_by_its_name():
    model, whole = perceptron(), perceptron()
    torch.manual_seed(9)
    x = torch.randn(B, D)
    whole(x).square().mean().backward()
    torch.manual_seed(9)
    with lazyviz.lazy(batch="x", split=3) as graph:
        x = torch.randn(B, D)
        model(x).square().mean().backward()
    assert graph.evaluate().pieces == 3
    for one, other in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_kernels_that_draw_within_need_to_be_allowed(monkeypatch):
    x = torch.rand(6, 4)
    with lazyviz.lazy(batch=x, split=2) as graph:
        y = torch.bernoulli(x)
    with pytest.raises(lazyviz.SplitError, match="bernoulli.*draws random numbers inside its kernel"):
        graph.evaluate()
    assert graph.pending
    graph.evaluate(split="off")
    torch.manual_seed(1)
    with lazyviz.lazy(batch=x, split=2, independent_rng=True) as graph:
        y = torch.bernoulli(x)
    assert graph.evaluate().pieces == 2
    assert set(y.unique().tolist()) <= {0.0, 1.0}


def test_an_operator_may_run_on_the_whole_batch_if_the_user_says_so():
    x, *_ = data(torch.float32)

    def step(model, x):
        result = model(x).cumsum(0).sin()
        result.sum().backward()
        return result.detach()

    report = same_in_pieces(perceptron(), (x,), step, 3, whole=["cumsum", "flip"])
    assert report.pieces == 3


def _adds_what_it_made(x, w):
    a = x * 2
    made = a.new_ones(B, 4, 6)
    a.add_(made * 3)
    return a


def _fills_zeros_of_its_size(x, w):
    a = x * 2
    a.add_(a.new_zeros(B, 4, 6) + a)
    return a


# What random programs have found.
FOUND = {
    "a sum times itself": lambda x, w: (lambda s: s * s)((x @ w).sum(0)),
    "a mean times itself": lambda x, w: (lambda s: s * s)((x @ w).mean(0)),
    "a tensor written after one of its shape was made": _adds_what_it_made,
    "a tensor added to zeros of its shape": _fills_zeros_of_its_size,
    "a product that is kept": lambda x, w: x.flatten(0, 1) @ w,
    "attention that nobody reads": lambda x, w: (
        F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        F.dropout(x @ w, 0.4),
    )[1],
}


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_were_wrong_once(name, leaf):
    results = []
    for pieces in ("off", 4):
        torch.manual_seed(10)
        x = torch.randn(B, 4, 6, dtype=torch.float64, requires_grad=leaf)
        w = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
        with lazyviz.lazy(batch=x, split=pieces) as graph:
            result = FOUND[name](x, w)
            (result + x.sum() * w.sum()).square().sum().backward()
        assert graph.evaluate().pieces == (1 if pieces == "off" else 4)
        results.append((result.detach(), w.grad, x.grad if leaf else w.grad))
    for whole, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gather", "index_select"])
def test_the_gradient_of_a_batch_that_is_indexed(name):
    grads = []
    for pieces in ("off", 5):
        torch.manual_seed(10)
        x = torch.randn(B, 4, 6, requires_grad=True)
        places = torch.tensor([1, 1, 0, 2])
        with lazyviz.lazy(batch=x, split=pieces) as graph:
            picked = (
                x.index_select(1, places)
                if name == "index_select"
                else x.gather(1, places[None, :, None].expand(B, 4, 6))
            )
            (picked + x).square().mean().backward()
        graph.evaluate()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_batch_of_one_sample_or_none_runs_as_a_whole(samples):
    x = torch.randn(samples, 4, 6)
    with lazyviz.lazy(batch=x, split=2) as graph:
        y = x.reshape(-1, 6) * 2
    assert graph.evaluate().pieces == 1
    assert torch.equal(y, x.reshape(-1, 6) * 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.bucketize(
            x[:, 0].contiguous(), torch.linspace(-1, 1, B)
        ),  # as many bounds as samples
        lambda x: x.sum(0).view(torch.int32),
        lambda x: x.sum(0).to(torch.bfloat16),
        lambda x: F.unfold(x.view(B, 4, 4), 2),  # the samples are its channels
    ],
    ids=["buckets", "bits of a sum", "a sum rounded", "windows of channels"],
)
def test_what_is_like_a_batch_and_is_none(function):
    torch.manual_seed(14)
    x = torch.randn(B, 16)
    expected = function(x)
    with lazyviz.lazy(batch=x, split=4) as graph:
        result = function(x)
    try:
        graph.evaluate()
    except lazyviz.SplitError:
        graph.evaluate(split="off")
    if result.dtype == torch.int32:  # of sums in another order
        result, expected = result.view(torch.float32), expected.view(torch.float32)
    torch.testing.assert_close(result, expected)


def test_renorm_takes_its_norms_over_the_batch():
    x = torch.randn(B, 4)
    with lazyviz.lazy(batch=x, split=4) as graph:
        result = x.renorm(2, 1, 0.5)
    try:
        graph.evaluate()
    except lazyviz.SplitError:
        graph.evaluate(split="off")
    torch.testing.assert_close(result, x.renorm(2, 1, 0.5))
