"""In-place writes: through views, into ``out=``, under ``.data``, with autograd's version counters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ...lazy_equals_eager import both


def grid():
    return torch.arange(24.0).reshape(4, 6)


def leaf():
    return torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()


VIEWS = {
    "slice": lambda x: x[1:3],
    "step": lambda x: x[::2, 1::3],
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 3),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: x.select(1, 2),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split([1, 3])[1],
    "unbind": lambda x: x.unbind(1)[4],
    "squeeze": lambda x: x[:, 2:3].squeeze(1),
    "expand": lambda x: x[:, :1].expand(4, 6)[:, 0],
    "as_strided": lambda x: x.as_strided((3, 2), (6, 2), 1),
    "as_strided of as_strided": lambda x: x.as_strided((4, 3), (6, 2), 0).as_strided((2, 2), (12, 2), 2),
    "as_strided beyond a view": lambda x: x[2:, 3:].as_strided((2, 2), (6, 1), 0),
    "view as dtype": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(-1)[3:7],
    "movedim": lambda x: x.movedim(0, 1)[2],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "swapaxes of slice": lambda x: x[1:].swapaxes(0, 1)[::2],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("pending", [False, True], ids=["of a real tensor", "of a pending tensor"])
def test_a_write_through_a_view_reaches_its_base_and_the_other_views(name, pending):
    def program(x):
        base = x * 1 if pending else x
        before = base[1] + 0
        view, other = VIEWS[name](base), base[::3]
        view.mul_(2)
        view.add_(1)
        after = base.sum(0)
        base.sub_(1)
        return before, view, other, after, base

    both(program, grid)


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("view as dtype", "expand")])
def test_a_write_through_a_view_has_eagers_gradient(name):
    def program(weight):
        base = weight * 2
        view = VIEWS[name](base)
        view.mul_(3)
        out = (base * base).sum()
        out.backward()
        return base, view, out

    both(program, lambda: grid().requires_grad_())


def test_a_write_to_the_base_gives_a_view_with_history_a_new_autograd_node():
    def program(weight):
        base = weight * 2
        view = base[1:].t()
        base.mul_(weight)
        (view**2).sum().backward()
        return base, view

    both(program, leaf)


def test_gradients_of_views_that_overlap_themselves_are_summed_in_eagers_order():
    def program(x):
        base = x * 2
        windows = base.unfold(2, 3, 1).unfold(3, 3, 1)
        base.mul_(1.5)
        (windows * torch.randn_like(windows)).sum().backward()
        return windows

    both(program, lambda: torch.randn(2, 3, 8, 8, requires_grad=True))


def test_a_view_of_a_base_that_was_transposed_in_place_since():
    def program(w):
        base = w * 2
        view = base.view(-1)
        base.t_()
        view.mul_(2)
        (base * base).sum().backward()
        return base, view

    both(program, leaf)


def test_views_of_views_written_in_turns():
    def program(x):
        rows, columns = x[1:], x[:, 2:]
        corner = rows[:, 2:]
        seen = []
        for step in range(4):
            [rows, columns, corner, x][step].add_(step + 1)
            seen.append(corner.clone())
        return rows, columns, corner, seen

    both(program, grid)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((slice(1, 3), 2), 7.0),
        lambda x: x.__setitem__(slice(0, 2), x[2:4]),
        lambda x: x.__setitem__(torch.tensor([0, 2]), torch.ones(2, 6)),
        lambda x: x.index_put_((torch.tensor([1, 1]), torch.tensor([2, 3])), torch.ones(2), accumulate=True),
        lambda x: x.index_add_(0, torch.tensor([0, 0, 3]), torch.ones(3, 6)),
        lambda x: x.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 5.0),
        lambda x: x.index_copy_(1, torch.tensor([5]), torch.zeros(4, 1)),
        lambda x: x.index_fill_(1, torch.tensor([0, 4]), -1.0),
        lambda x: x.masked_fill_(torch.eye(4, 6, dtype=torch.bool), 9.0),
        lambda x: x.masked_scatter_(torch.eye(4, 6, dtype=torch.bool), torch.arange(4.0)),
        lambda x: x[1:3].copy_(torch.arange(6)),
        lambda x: x.t()[1:3].fill_(4),
        lambda x: x.fill_diagonal_(3),
        lambda x: x.put_(torch.tensor([2, 23]), torch.tensor([1.0, 2.0])),
        lambda x: x.addmm_(torch.ones(4, 2), torch.ones(2, 6), beta=0.5),
        lambda x: x.addcmul_(x, x, value=0.5),
        lambda x: x.transpose_(0, 1).mul_(2),
        lambda x: x.squeeze_().unsqueeze_(0).add_(1),
        lambda x: x.swapdims_(0, 1).t_(),
        lambda x: x.clamp_(min=2).relu_().neg_().abs_().sqrt_(),
        lambda x: x.lerp_(torch.ones(4, 6), 0.25),
        lambda x: x.copy_(x.clone().flip(0)),
        lambda x: torch.nn.functional.relu(x.sub_(5), inplace=True),
        lambda x: torch._foreach_add_([x[0], x[1]], [x[2], x[3]]),
    ],
)
def test_writes_of_every_kind(write):
    def program(x):
        y = x * 1
        write(y)
        return y, y.sum()

    both(program, grid)


def test_in_place_ops_that_restructure_a_real_tensor_do_so_at_once():
    both(lambda x: x.t_() + 1, lambda: grid())


OUT = {
    "fresh": lambda: torch.zeros(4, 6),
    "empty": lambda: torch.empty(0),
    "view": lambda: torch.zeros(6, 4).t(),
    "row of a larger one": lambda: torch.zeros(2, 4, 6)[1],
    "strided view": lambda: torch.zeros(4, 12)[:, ::2],
}


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize("pending", [False, True], ids=["real", "pending"])
def test_out_is_written_where_it_is(name, pending):
    def program(x, out):
        if pending:
            out = OUT[name]()
        result = torch.add(x, 1, out=out)
        torch.mul(x, 2, out=out)
        assert result is out
        base = out._base if out._base is not None else out
        return out, base + 0

    graph = both(program, lambda: (grid(), OUT[name]()), syncs=None)
    assert bool(graph.sync_points) == (name == "empty" and not pending)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_shape_is_resized():
    both(lambda x, out: torch.add(x, 1, out=out), lambda: (grid(), torch.empty(3)), syncs=None)
    both(lambda x: torch.add(x, 1, out=torch.empty(3)), grid, syncs=None)


def test_out_of_the_input_itself_and_of_several():
    def program(x):
        torch.exp(x, out=x)
        values, indices = torch.empty(4), torch.empty(4, dtype=torch.int64)
        torch.max(x, 1, out=(values, indices))
        torch.cat([x[:1], x[:1]], out=x[2:])
        return values, indices

    both(program, grid)


@pytest.mark.parametrize(
    "out",
    [
        lambda: torch.zeros(4, 6, dtype=torch.int64),
        lambda: torch.zeros(4, 6, requires_grad=True),
        lambda: torch.zeros(4, 6, dtype=torch.float16),
        lambda: torch.zeros(1, 6).expand(4, 6),
    ],
)
def test_an_out_that_cannot_be_written_is_eagers_error(out):
    both(lambda x, out: torch.div(x, 3, out=out), lambda: (grid(), out()))
    both(lambda x: torch.div(x, 3, out=out()), grid)


# --- .data ------------------------------------------------------------------------------


def test_data_shares_memory_and_has_a_version_counter_of_its_own():
    def program(weight):
        y = weight.exp()
        y.data.mul_(2)
        weight.data[0] += 1
        loss = (y * y).sum()
        loss.backward()
        return y, y.data, weight.data._version, y._version

    both(program, leaf)


def test_data_assignments_of_every_kind():
    def program(weight, x):
        old = weight.data
        y = weight * 2
        weight.data = x  # real to real
        z = weight * 2
        weight.data = x + 1  # pending to real
        u = weight * 2
        weight.data = weight.data.double()  # another dtype
        v = weight * 2
        y.data = torch.zeros(5)  # another shape of a pending one
        return old, y, z, u, v, weight

    both(program, lambda: (nn.Parameter(torch.ones(3)), torch.arange(3.0)))


def test_data_assignment_shares_the_memory_of_what_it_is_given():
    def program(weight):
        source = torch.zeros(3)
        weight.data = source
        source.add_(2)
        with torch.no_grad():
            weight.mul_(3)
        return source, weight

    both(program, lambda: nn.Parameter(torch.ones(3)))


def test_a_view_keeps_the_old_memory_when_data_is_assigned():
    def program(x):
        view = x[1:]
        x.data = torch.ones(4)
        x.add_(1)
        return view, x

    both(program, lambda: torch.zeros(4))
    both(lambda: program(torch.zeros(4)))


def test_data_of_another_kind_is_eagers_error():
    def program(weight):
        weight.data = torch.ones(3, dtype=torch.int64)

    both(program, lambda: nn.Parameter(torch.ones(3)))

    def with_something_else(weight):
        weight.data = 3

    both(with_something_else, lambda: nn.Parameter(torch.ones(3)))


# --- memory that is exchanged -------------------------------------------------------------


def test_set_takes_the_memory_of_another_tensor():
    def program(x, y):
        y = y * 2
        x.set_(y)
        x.add_(1)
        z = torch.zeros(3)
        z.set_(x)
        return y, z

    both(program, lambda: (torch.zeros(2), torch.ones(4)), syncs=["set_", "set_ exchanges memory"])


def test_set_with_a_storage_offset_and_strides():
    def program(x):
        y = x * 2
        z = torch.empty(0)
        z.set_(y.untyped_storage(), 2, (2, 3), (6, 1))
        z.add_(1)
        return y, z

    both(program, grid, syncs=["storage access"])  # the tensor that is set has no values to wait for


@pytest.mark.parametrize("size", [(2,), (4,), (3, 5)])
def test_resize_in_place(size):
    def program(x):
        y = x * 2
        z = y[:2]
        y.resize_(size)
        y.fill_(3)
        x.resize_(size).fill_(1)
        return y, z

    both(program, lambda: torch.ones(4), syncs=None)


def test_resize_as():
    both(lambda x: (x * 2).resize_as_(torch.empty(2, 2)), lambda: torch.ones(4), syncs=None)


def test_swapping_tensors():
    def program(x, y):
        a, b = x * 2, y + 1
        torch.utils.swap_tensors(a, b)
        a.add_(10)
        torch.utils.swap_tensors(x, y)
        x.mul_(5)
        return a, b, x + 0, y + 0

    both(program, lambda: (torch.ones(2), torch.zeros(3)), syncs=None)


def test_swapping_a_real_with_a_pending_tensor():
    def program(x):
        a = x * 2
        torch.utils.swap_tensors(a, x)
        x.add_(1)
        return a, x + 1

    both(program, lambda: torch.ones(2), syncs=None)


# --- operands that overlap, versions, and autograd's own checks -------------------------


OVERLAPS = {
    "expanded": lambda x: x[:1].expand(4, 6).add_(1),
    "shifted slices": lambda x: x[1:].add_(x[:-1]),
    "copy of shifted slices": lambda x: x[1:].copy_(x[:-1]),
    "itself transposed": lambda x: x[:, :4].add_(x[:, :4].t()),
    "window": lambda x: x.as_strided((3, 3), (1, 1)).mul_(2),
    "out is a part of the input": lambda x: torch.add(x[1:], x[:-1], out=x[1:]),
    "out overlaps": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "index of itself": lambda x: x.index_add_(0, torch.tensor([0, 1]), x[:2]),
    "scatter from itself": lambda x: x[0].scatter_(0, torch.tensor([0, 1]), x[0]),
    "cumsum": lambda x: torch.cumsum(x[:, 1:], 1, out=x[:, :-1]),
    "matmul out": lambda x: torch.mm(x[:, :4], x[:, :4], out=x[:, :4]),
    "cat out": lambda x: torch.cat([x[:2], x[2:]], out=x),
    "copy into expanded": lambda x: x[:1].expand(4, 6).copy_(x),
    "fill of expanded": lambda x: x[:1].expand(4, 6).fill_(2.0),
    "random into expanded": lambda x: x[:1].expand(4, 6).normal_(),
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("pending", [False, True], ids=["real", "pending"])
def test_overlapping_operands_fail_while_recording_as_in_eager(name, pending):
    def program(x):
        x = x * 1 if pending else x
        return OVERLAPS[name](x), x

    both(program, grid)


def test_version_counters_count_as_in_eager():
    def program(x):
        versions = []
        y = x * 2
        view = y[0]
        for write in (lambda: y.add_(1), lambda: view.mul_(2), lambda: y.data.add_(1), y.zero_, y.t_):
            write()
            versions.append((y._version, view._version))
        detached = y.detach()
        detached.add_(1)
        versions.append((y._version, detached._version))
        return versions

    both(program, grid)


def test_gradients_count_their_versions():
    def program(weight):
        versions = []
        for _ in range(3):
            (weight * 2).sum().backward()
            versions.append(weight.grad._version)
        weight.grad.zero_()
        versions.append(weight.grad._version)
        return versions

    both(program, leaf)


@pytest.mark.parametrize(
    "program",
    [
        lambda w: [y := w.exp(), y.add_(1), y.sum().backward()],
        lambda w: [y := w * 2, z := y * y, y[0].zero_(), z.sum().backward()],
        lambda w: [y := w.sigmoid(), y.detach().zero_(), y.sum().backward()],
        lambda w: w.add_(1),
        lambda w: w[0].add_(1),
        lambda w: w.view(-1).mul_(2),
        lambda w: [y := (w * 2).split(1)[0], y.add_(1)],
        lambda w: [y := (w * 2).unbind(0), y[0].mul_(2)],
        lambda w: w.resize_(2),
        lambda w: (w * 2).resize_(2),
        lambda w: [x := torch.zeros(3, 4), x.copy_(w), w.sum().backward(), x.sum().backward()],
        lambda w: [x := torch.zeros(3, 4), y := w * x, x.add_(1), y.sum().backward()],
        lambda w: [w.sum().backward(), w.sum().backward(), (y := w.exp().sum()).backward(), y.backward()],
        lambda w: (w * 2).backward(),
        lambda w: torch.ones(3).sum().backward(),
        lambda w: [w.exp().sum().backward(torch.ones(2))],
        lambda w: w.int().requires_grad_(),
        lambda w: (w * 2).requires_grad_(False),
        lambda w: setattr(w, "grad", torch.ones(2)),
        lambda w: setattr(w, "grad", torch.ones(3, 4, dtype=torch.float64)),
        lambda w: setattr(w, "grad", 3),
        lambda w: setattr(w, "grad", w * 2),
        lambda w: (w * 2).numpy(),
        lambda w: torch.autograd.grad((w * 2).sum(), torch.ones(2, requires_grad=True)),
        lambda w: torch.autograd.grad((w * 2).sum(), w * 2),
    ],
)
def test_autograd_refuses_at_the_same_line_with_the_same_message(program):
    both(lambda w: (program(w), None)[1], leaf, syncs=None, versions=False)


@pytest.mark.parametrize("evaluated", [False, True])
def test_tensors_may_be_swapped_after_a_block(evaluated):
    import lazyviz

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with lazyviz.lazy() as graph:
        y = model(x)
        z = y + 1
    expected = (torch.nn.functional.linear(x, *[p.detach().clone() for p in model.parameters()])) + 1
    if evaluated:
        graph.evaluate()
    weight = torch.zeros(2, 2)
    torch.utils.swap_tensors(y, weight)
    model.weight, model.bias  # known to the graph by name
    torch.utils.swap_tensors(model.bias, other := nn.Parameter(torch.full((2,), 7.0)))
    assert torch.equal(z, expected)
    assert y.tolist() == [[0, 0], [0, 0]] and torch.equal(weight + 1, expected)
    assert model.bias.tolist() == [7, 7] and torch.equal(
        torch.nn.functional.linear(x, model.weight, other), weight
    )


def test_looking_at_a_view_renews_its_history_as_it_does_in_eager_mode():
    """PyTorch refuses to write to such a view as "a leaf" unless something asked for its history before."""

    def program():
        base = torch.arange(3.0)
        view = base.view_as(base)
        torch._foreach_mul_([base], [torch.ones(3, requires_grad=True)])
        repr(view)
        view.zero_()
        return [view, base, view.requires_grad]

    both(program)
