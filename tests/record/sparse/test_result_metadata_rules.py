"""Rules of sparse kernels, against the kernels themselves; what they record, against eager mode."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import lazyviz
from lazyviz.record.sparse import record_on_components, result_metadata_rules
from lazyviz.record.sparse.components import parts_of

from ...lazy_equals_eager import both

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # which PyTorch warns of once


def repeated():
    """Not coalesced: an index occurs twice."""
    indices = torch.tensor([[0, 1, 1, 0], [2, 0, 0, 1]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, -3.0, 4.0]), (3, 3))


def coalesced():
    return repeated().coalesce()


def hybrid():
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.randn(3, 4), (3, 4))


def batch():
    indices = torch.tensor([[0, 1, 1], [2, 0, 0], [1, 1, 0]])
    return torch.sparse_coo_tensor(indices, torch.randn(3), (2, 3, 3))


def csr():
    return coalesced().to_sparse_csr()


def csc():
    return coalesced().to_sparse_csc()


def empty():
    return torch.zeros(3, 3).to_sparse()


def without_columns():
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.zeros(2, 0), (2 + 1, 0), is_coalesced=True)


def one_number():
    return torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), torch.tensor([2.0]), ())


def one_row_of_indices():
    """Their strides are those of a part of a matrix."""
    return torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.randn(3, 3), (3, 3)).coalesce()


def transposed_indices():
    indices = torch.tensor([[0, 2], [1, 0], [1, 1]]).t()
    return torch.sparse_coo_tensor(indices, torch.randn(3), (3, 3))


def strided_values():
    return torch.sparse_coo_tensor(torch.tensor([[1], [2]]), torch.randn(1, 2)[:, 0], (3, 3))


def tensors():
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2, 3, 3), (3, 3, 3), is_coalesced=True)


def large_batch():
    indices = torch.tensor([[0, 1, 1], [2, 0, 2], [1, 1, 0]])
    return torch.sparse_coo_tensor(indices, torch.randn(3), (3, 3, 3), is_coalesced=True)


def short_indices():
    parts = [part.int() for part in parts_of(csr())[:2]]
    return torch.sparse_csr_tensor(*parts, torch.randn(3), (3, 3))


def half_rows():
    return csr().half()


def half():
    return coalesced().half()


def truth():
    return coalesced().bool()


KINDS = {each.__name__: each for each in (repeated, coalesced, hybrid, batch, csr, csc)}
ODD_KINDS = {
    each.__name__: each
    for each in (
        empty, without_columns, one_number, one_row_of_indices, transposed_indices, strided_values, tensors,
        large_batch, short_indices, half_rows, half, truth,
    )
}  # fmt: skip


def like(tensor, *shape):
    return torch.randn(shape or tuple(tensor.shape)).to(tensor.dtype)


CALLS = {
    **{
        name: lambda s, name=name: getattr(torch, name)(s)
        for name in (
            each.removeprefix("aten::")
            for each in (f"aten::{one}" for one in result_metadata_rules._ELEMENTWISE)
        )
    },
    "neg": torch.neg,
    "mul by a number": lambda s: s * 2,
    "mul by a float": lambda s: s * 0.5,
    "number mul": lambda s: 3 * s,
    "mul by a tensor": lambda s: s * torch.tensor(0.1),
    "mul by a double": lambda s: s * torch.tensor(0.1, dtype=torch.float64),
    "tensor mul": lambda s: torch.tensor(0.1) * s,
    "mul by a strided tensor": lambda s: s * like(s),
    "strided mul": lambda s: like(s) * s,
    "div by a number": lambda s: s / 3,
    "div by a tensor": lambda s: s / torch.tensor(3.0),
    "strided add": lambda s: like(s) + s,
    "strided add of a double": lambda s: like(s).double() + s,
    "strided add with alpha": lambda s: torch.add(like(s), s, alpha=-0.5),
    "transposed add": lambda s: like(s, *s.shape[::-1]).permute(*reversed(range(s.dim()))) + s,
    "strided sub": lambda s: like(s) - s,
    "strided add_": lambda s: like(s).add_(s, alpha=0.1),
    "strided sub_": lambda s: like(s).sub_(s),
    "mm": lambda s: torch.mm(s, like(s, s.shape[-1], 5)),
    "mm of a transpose": lambda s: s @ like(s, 5, s.shape[-1]).t(),
    "sparse.mm": lambda s: torch.sparse.mm(s, like(s, s.shape[-1], 5)),
    "mean of products": lambda s: torch.sparse.mm(s, like(s, s.shape[-1], 5), "mean"),
    "largest product": lambda s: torch.sparse.mm(s, like(s, s.shape[-1], 5), "amax"),
    "strided mm": lambda s: like(s, 5, s.shape[0]) @ s,
    "mv": lambda s: s @ like(s, s.shape[-1]),
    "addmm": lambda s: torch.addmm(like(s, s.shape[0], 5), s, like(s, s.shape[-1], 5), beta=0.5, alpha=2),
    "addmm of a row": lambda s: torch.addmm(like(s, 5), s, like(s, s.shape[-1], 5)),
    "sparse.addmm": lambda s: torch.sparse.addmm(like(s, s.shape[0], 5), s, like(s, s.shape[-1], 5)),
    "bmm": lambda s: torch.bmm(s, like(s, s.shape[0], s.shape[-1], 5)),
    "addmm with a truth value": lambda s: torch.addmm(like(s), s, like(s), alpha=True),
    "addmm with a complex number": lambda s: torch.addmm(like(s), s, like(s), beta=2j),
    "add with a truth value": lambda s: torch.add(like(s), s, alpha=True),
    "transposed mul": lambda s: s * like(s).transpose(-1, -2),
    "transposed mask": lambda s: like(s).transpose(-1, -2).sparse_mask(s),
    "mask of the same indices": lambda s: s.sparse_mask(s),
    "mul by a huge number": lambda s: s * 10**20,
    "norm of order inf": lambda s: s.norm(float("inf")),
    "permute later dimensions": lambda s: s.permute(0, 2, 1),
    "to_dense of a dtype": lambda s: s.to_dense(dtype=s.dtype),
    "softmax backward": lambda s: torch.ops.aten._sparse_softmax_backward_data(s, s, 9, s),
    "sampled_addmm": lambda s: torch.sparse.sampled_addmm(s, like(s, 3, 4), like(s, 4, 3), beta=0.5),
    "to_dense": lambda s: s.to_dense(),
    "sum": torch.sum,
    "sparse.sum": lambda s: torch.sparse.sum(s),
    "sum in double": lambda s: torch.sum(s, dtype=torch.float64),
    "norm": lambda s: torch.norm(s),
    "norm of order 1": lambda s: s.norm(1),
    "sparse_mask": lambda s: like(s).sparse_mask(s),
    "sparse_mask of itself": lambda s: (s * 2).sparse_mask(s),
    "sparse_mask of another": lambda s: coalesced().sparse_mask(s),
    "sparse_mask by another": lambda s: s.sparse_mask(coalesced()),
    "sparse_mask by more": lambda s: s.sparse_mask(repeated()),
    "to a layout": lambda s: s.to_sparse(layout=torch.sparse_csr),
    "to dimensions": lambda s: s.to_sparse(2),
    "softmax": lambda s: torch.sparse.softmax(s, 1),
    "log_softmax": lambda s: torch.sparse.log_softmax(s, -1),
    "clone": torch.clone,
    "detach": lambda s: s.detach(),
    "double": lambda s: s.double(),
    "half": lambda s: s.half(),
    "copy": lambda s: torch.ops.aten._to_copy(s),
    "t": lambda s: s.t(),
    "transpose": lambda s: s.transpose(0, 1),
    "transpose of itself": lambda s: s.transpose(0, 0),
    "permute": lambda s: s.permute(tuple(reversed(range(s.dim())))),
    "permute nothing": lambda s: s.permute(tuple(range(s.dim()))),
    "to_sparse_csr": lambda s: s.to_sparse_csr(),
    "to_sparse_csc": lambda s: s.to_sparse_csc(),
    "to_sparse": lambda s: s.to_sparse(),
    "coalesce": lambda s: s.coalesce(),
    "add": lambda s: s + s,
    "mul": lambda s: s * s,
    "pow": lambda s: s**2,
    "cat": lambda s: torch.cat([s, s]),
    "index_select": lambda s: s.index_select(0, torch.tensor([0, 2])),
    "select": lambda s: s[0],
    "sum over a dimension": lambda s: torch.sparse.sum(s, 0),
    "unsqueeze": lambda s: s.unsqueeze(0),
    "mul in place": lambda s: s.mul_(2),
    "zeros_like": torch.zeros_like,
    "values": lambda s: s.values() * 2,
    "_values": lambda s: s._values() * 2,
    "_indices": lambda s: s._indices() + 1,
    "crow_indices": lambda s: s.crow_indices() + 1,
    "facts": lambda s: (s._nnz(), s.sparse_dim(), s.dense_dim(), s.is_sparse, s.layout, s.requires_grad),
    "is_coalesced": lambda s: s.is_coalesced(),
    "wrong mm": lambda s: s @ like(s, 7, 7),
    "wrong dtype": lambda s: s @ like(s, s.shape[-1], 5).double(),
    "wrong add": lambda s: like(s, 2, 2) + s,
    "wrong transpose": lambda s: s.transpose(0, 5),
}


def pending(kind):
    """A sparse tensor whose values are pending in a block."""
    example = KINDS[kind]()
    *indices, values = [part * 1 for part in parts_of(example)]
    if example.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            *indices, values, example.shape, is_coalesced=example.is_coalesced(), check_invariants=False
        )
    return torch.sparse_compressed_tensor(*indices, values, example.shape, layout=example.layout)


def called(name, *operands, calls=CALLS):
    try:
        return calls[name](*operands)
    except NotImplementedError as error:  # with a list of all kernels that there are, ours included
        raise NotImplementedError(str(error).partition(". This could be")[0]) from error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_pending_sparse_tensors(name, kind):
    both(lambda: called(name, pending(kind)), syncs=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_real_sparse_tensors(name, kind):
    both(lambda sparse: called(name, sparse), KINDS[kind], syncs=None)


@pytest.mark.parametrize("kind", ODD_KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_odd_sparse_tensors(name, kind):
    both(lambda sparse: called(name, sparse), ODD_KINDS[kind], syncs=None, orders=["by reading"])


@pytest.mark.parametrize("kind", [*KINDS, *ODD_KINDS])
@pytest.mark.parametrize("name", CALLS)
def test_a_rule_foretells_what_the_kernel_returns(name, kind, monkeypatch):
    """Which components are new, how large these and the result are, and their strides."""
    foretold = []

    def applied(op, arguments):
        outcome = recording_rule(op, arguments)
        if outcome is not None:
            foretold.append((op, [a.made() if hasattr(a, "made") else a for a in arguments], outcome))
        return outcome

    recording_rule = record_on_components.apply_rule
    monkeypatch.setattr(record_on_components, "apply_rule", applied)
    with lazyviz.lazy() as graph:
        try:
            CALLS[name]((KINDS | ODD_KINDS)[kind]())
        except Exception:
            return
    graph.evaluate()
    for op, arguments, outcome in foretold:
        given = [part for a in arguments if isinstance(a, torch.Tensor) for part in parts_of(a) or [a]]
        shared = {part.untyped_storage().data_ptr() for part in given}
        count = sum(not argument.kwarg_only for argument in op._schema.arguments)
        names = [argument.name for argument in op._schema.arguments][count:]
        result = op(*arguments[:count], **dict(zip(names, arguments[count:])))
        if isinstance(outcome, tuple):
            assert [tuple(each.shape) for each in result] == [each.shape for each in outcome]
            continue
        assert tuple(result.shape) == getattr(outcome, "shape", tuple(result.shape))
        if isinstance(outcome, result_metadata_rules.Made):
            assert result.layout == outcome.layout
            if result.layout == torch.sparse_coo:
                assert result.is_coalesced() == outcome.is_coalesced or result._nnz() < 2
            for part, expected in zip(parts_of(result), outcome.parts, strict=True):
                is_new = part.untyped_storage().data_ptr() not in shared
                assert is_new == isinstance(expected, result_metadata_rules.New)
                if not isinstance(expected, result_metadata_rules.Row):
                    assert (tuple(part.shape), part.dtype) == (tuple(expected.shape), expected.dtype)
                if isinstance(expected, result_metadata_rules.New):
                    assert part.stride() == expected.empty().stride()


GRADIENTS = {
    "product": lambda s, x: torch.sparse.mm(s, x),
    "matmul": lambda s, x: s @ x,
    "transposed product": lambda s, x: s.t() @ x,
    "vector": lambda s, x: s @ x[:, 0],
    "dense": lambda s, x: s.to_dense() @ x,
    "scaled": lambda s, x: (s * 2).to_dense() * 3,
    "divided": lambda s, x: (s / 3).to_dense(),
    "negated": lambda s, x: (-s).to_dense(),
    "softmax": lambda s, x: torch.sparse.softmax(s, 1).to_dense() @ x,
    "log_softmax": lambda s, x: torch.sparse.log_softmax(s, 1).to_dense() @ x,
    "sum": lambda s, x: torch.sparse.sum(s),
    "values": lambda s, x: s.values() * 2,
    "coalesced values": lambda s, x: s.coalesce().values() * 2,
    "added": lambda s, x: torch.ones(3, 3) + s,
    "addmm": lambda s, x: torch.sparse.addmm(torch.ones(3, 4), s, x, beta=0.5, alpha=2),
    "relu": lambda s, x: torch.relu(s.coalesce() if s.layout == torch.sparse_coo else s).to_dense(),
    "sampled_addmm": lambda s, x: torch.sparse.sampled_addmm(s, x, x.t()).to_dense(),
    "masked": lambda s, x: (x @ x.t()).sparse_mask(s).to_dense(),
    "compressed": lambda s, x: s.to_sparse_csr() @ x,
    "twice": lambda s, x: s @ (s @ x),
    "mean of products": lambda s, x: torch.sparse.mm(s, x, "mean"),
    "largest product": lambda s, x: torch.sparse.mm(s, x, "amax"),
}


@pytest.mark.parametrize("kind", ["repeated", "coalesced", "csr"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_values_and_of_operands(name, kind):
    """Of edge weights and features of a graph, for example."""

    def program(values, features):
        like = KINDS[kind]()
        *indices, _ = parts_of(like)
        if like.layout == torch.sparse_coo:
            more = {"is_coalesced": like.is_coalesced(), "check_invariants": False}
            sparse = torch.sparse_coo_tensor(*indices, values * 2, like.shape, **more)
        else:
            sparse = torch.sparse_csr_tensor(*indices, values * 2, like.shape)
        out = called(name, sparse, features * 1, calls=GRADIENTS)
        (out * out).sum().backward()
        return out

    def make():
        count = parts_of(KINDS[kind]())[-1].shape[0]
        return torch.randn(count, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    both(program, make, syncs=None, versions=False)


@pytest.mark.parametrize("kind", ["coalesced", "csr"])
@pytest.mark.parametrize(
    "name",
    [
        *result_metadata_rules._ELEMENTWISE,
        "neg",
        "mm",
        "to_dense",
        "clone",
        "t",
        "strided add",
        "mul by a number",
    ],
)
def test_these_calls_need_no_sync_point(name, kind):
    if (name, kind) in {("strided add", "csr")}:
        return
    with lazyviz.lazy() as graph:
        kept = CALLS[name](pending(kind))
    assert not graph.sync_points and graph.pending
    del kept


def nothing():
    return torch.sparse_coo_tensor(size=(3, 3))


def integers():
    indices = torch.tensor([[0, 1], [2, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([3, -4]), (3, 3), is_coalesced=True)


def complexes():
    indices = torch.tensor([[0, 1], [2, 0]])
    return torch.sparse_coo_tensor(indices, torch.randn(2, dtype=torch.cfloat), (3, 3), is_coalesced=True)


def doubles():
    return coalesced().double()


def narrow():
    return torch.sparse_coo_tensor(torch.tensor([[0, 4]]), torch.randn(2), (5,))


def complex_halves():
    return complexes().to(torch.complex32)


OTHER_KINDS = {
    each.__name__: each for each in (nothing, integers, complexes, complex_halves, doubles, narrow)
}


@pytest.mark.filterwarnings("ignore:Casting complex", "ignore:ComplexHalf support")  # once
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_other_dtypes_and_sizes(name, kind):
    both(lambda sparse: called(name, sparse), OTHER_KINDS[kind], syncs=None)


INTEGER_CALLS = {
    "add": lambda s: torch.ones(3, 3, dtype=torch.int64) + s,
    "add to floats": lambda s: torch.ones(3, 3) + s,
    "add with a factor": lambda s: torch.add(torch.ones(3, 3, dtype=torch.int64), s, alpha=2),
    "mul by a float": lambda s: s * 0.5,
    "mul by a bool": lambda s: s * True,
    "mul": lambda s: s * 3,
    "div": lambda s: s / 2,
    "product": lambda s: s @ torch.ones(3, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("name", INTEGER_CALLS)
def test_calls_of_integers(name):
    both(lambda sparse: INTEGER_CALLS[name](sparse), integers, syncs=None)


@pytest.mark.parametrize("kind", ["repeated", "coalesced", "csr"])
def test_in_inference_mode_and_without_gradients(kind):
    for mode in (torch.inference_mode, torch.no_grad):

        def program(mode=mode):
            with mode():
                sparse = pending(kind)
                return sparse @ torch.randn(3, 4), (sparse * 2).to_dense(), parts_of(sparse)[-1] + 0

        both(program, syncs=None)


def test_a_pending_sparse_tensor_tells_that_it_is_pending():
    with lazyviz.lazy() as graph:
        sparse, compressed = pending("coalesced"), pending("csr")
        assert repr(sparse) == "lazy[3, 3] float32 cpu, sparse_coo, nnz=3, pending"
        assert repr([compressed]) == "[lazy[3, 3] float32 cpu, sparse_csr, nnz=3, pending]"
        assert lazyviz.is_lazy(sparse) and lazyviz.is_lazy(compressed)
        recorded = len(graph.nodes)
    assert lazyviz.is_lazy(sparse) and len(graph.nodes) == recorded and not graph.sync_points
    lazyviz.evaluate(sparse)
    assert not lazyviz.is_lazy(sparse) and lazyviz.is_lazy(compressed)
    assert "nnz=3, layout=torch.sparse_coo" in repr(sparse)
    assert compressed.to_dense().equal(sparse.to_dense()) and not graph.pending


def test_deepcopy_of_a_pending_sparse_tensor_is_recorded():
    def program():
        sparse = pending("repeated")
        copied = copy.deepcopy(sparse)
        return sparse, copied, copied.is_coalesced()

    both(program)


def test_training_a_graph_network_is_one_run():
    def make():
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([torch.nn.Embedding(3, 4, sparse=True), torch.nn.Linear(4, 2)])
        return layers, coalesced()

    def program(layers, edges):
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            out = torch.sparse.mm(edges, layers[1](edges @ layers[0](torch.arange(3))))
            out.pow(2).sum().backward()
            optimizer.step()
        return out

    both(program, make, versions=False)


def test_the_components_of_a_variable_have_its_name():
    edges = repeated()
    with lazyviz.lazy() as graph:
        scaled = edges * 2
        kept = edges @ torch.ones(3, 2), scaled @ torch.ones(3, 2)
    names = {value.name for node in graph.nodes for value in (*node.inputs, *node.outputs)}
    assert {"edges.indices", "edges.values", "scaled.values"} <= names
    del kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["copy", "pickle", "save"])
def test_copies_and_files_of_pending_sparse_tensors(how, kind):
    """A library's function receives the tensor, or a container of it."""

    def program():
        sparse = pending(kind)
        if how == "copy":
            return copy.copy(sparse)
        if how == "pickle":
            return pickle.loads(pickle.dumps([sparse, sparse * 2]))
        file = io.BytesIO()
        torch.save({"sparse": sparse, "scaled": sparse * 2, "strided": torch.ones(3) * 2}, file)
        file.seek(0)
        return torch.load(file)

    both(program, syncs=None, versions=False)


def test_a_saved_dictionary_of_sparse_tensors_is_evaluated_at_once():
    with lazyviz.lazy() as graph:
        torch.save({"sparse": pending("coalesced") * 2, "other": pending("csr") * 2}, io.BytesIO())
    assert len(graph.sync_points) == 1


@pytest.mark.parametrize("kind", ["coalesced", "csr"])
def test_products_under_autocast(kind):
    """The kernel of ``torch.sparse.mm`` calls an op that autocast casts for."""

    def program(sparse, dense):
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.sparse.mm(sparse, dense * 2)
            mixed = torch.sparse.mm(sparse.detach(), (dense @ dense))
        out.sin().sum().backward()
        return out, mixed

    def make():
        return KINDS[kind]().requires_grad_(), torch.randn(3, 3)

    both(program, make, syncs=None, versions=False)


@pytest.mark.parametrize("kind", ["coalesced", "csr"])
def test_autocast_where_products_are_read_changes_nothing(kind):
    sparse, dense = KINDS[kind](), torch.randn(3, 3)
    with lazyviz.lazy():
        results = torch.sparse.mm(sparse, dense * 2), sparse @ dense
    with torch.autocast("cpu", torch.bfloat16):
        sums = [result.sum().item() for result in results]
    expected = torch.sparse.mm(sparse, dense * 2), sparse @ dense
    assert sums == [result.sum().item() for result in expected]


def test_addmm_and_sparse_addmm_are_two_operators():
    with lazyviz.lazy() as graph:
        kept = [
            function(torch.ones(3, 3), coalesced(), torch.ones(3, 3))
            for function in (torch.addmm, torch.sparse.addmm)
        ]
    names = {node.op.name() for node in graph.nodes if "addmm" in node.op.name()}
    assert len(names) == len(kept) == 2


class Wrapper(torch.Tensor):
    """A sparse tensor as a library may have it: only its class knows its components."""

    @staticmethod
    def __new__(cls, inner):
        options = {"dtype": inner.dtype, "layout": inner.layout}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [item.inner if isinstance(item, cls) else item for item in args]
        return func(*inner, **(kwargs or {}))

    def __repr__(self, **kwargs):
        return "Wrapper"


def test_a_subclass_with_a_sparse_layout_is_left_to_its_class():
    with lazyviz.lazy() as graph:
        wrapped = Wrapper(pending("coalesced"))
        assert not lazyviz.is_lazy(wrapped)
        product = wrapped @ torch.ones(3, 2)
        copied = [wrapped]
    assert repr(copied) == "[Wrapper]" and lazyviz.is_lazy(product) and not graph.sync_points
    assert product.equal(coalesced() @ torch.ones(3, 2))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_without_memory(layout):
    """They are on the device ``meta``, whose dispatch keys are spelled unlike the others."""
    with lazyviz.lazy() as graph:
        pending = torch.ones(2) + 1
        if layout == torch.sparse_coo:
            made = torch.sparse_coo_tensor(
                torch.ones(2, 1, dtype=torch.int64, device="meta"), torch.ones(1, device="meta"), (2, 2)
            )
        else:
            made = torch.empty((2, 2), layout=layout, device="meta")
        assert not lazyviz.is_lazy(made) and "device='meta'" in repr(made)
    assert graph.pending and pending.tolist() == [2, 2] and made.is_meta


def test_what_consists_of_other_functions_is_deferred_in_inference_mode():
    def program(indices, values):
        with torch.inference_mode():
            nodes = torch.randn(3, 4)
            edges = torch.sparse_coo_tensor(indices, values * 2, (3, 3), is_coalesced=True)
            return (
                edges @ nodes,
                torch.sparse.mm(edges, nodes),
                edges.to_dense(),
                edges.coalesce().values() * 2,
                torch.sparse.softmax(edges, 1).to_dense(),
                torch.sparse.addmm(torch.ones(3, 4), edges.t(), nodes),
                edges.to_sparse_csr() @ nodes,
            )

    both(program, lambda: (torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.randn(3)))


NUMBERS = [
    (rows, count, size, checks)
    for rows in (0, 1, 2)
    for count in (1, 2)
    for size in (None, (2,), ())
    for checks in (True, False)
    # PyTorch takes others without a word, and reads outside of memory later.
    if checks or size is None or (count == 1 and rows in (0, len(size)))
]


@pytest.mark.parametrize(("rows", "count", "size", "checks"), NUMBERS)
def test_a_number_is_the_value_of_one_element(rows, count, size, checks):
    def program(value):
        made = []
        for values in (value * 2, value, 3.0, True):
            try:
                indices = torch.arange(rows * count).view(rows, count) % 2
                made.append(torch.sparse_coo_tensor(indices, values, size, check_invariants=checks))
            except (RuntimeError, ValueError) as error:
                made.append(str(error))
                continue
            made += [made[-1].to_dense(), made[-1].coalesce().values(), made[-1].is_coalesced()]
            if count == 1 and made[-2].requires_grad:
                made[-2].sum().backward()
        return made

    both(program, lambda: torch.tensor(2.0, requires_grad=True), syncs=None, versions=False)
