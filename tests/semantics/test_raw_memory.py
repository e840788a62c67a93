"""Memory access that bypasses the dispatcher: DLPack, storages, constructors from lists, C++ code."""

from __future__ import annotations

import copy
import ctypes
import io
import operator
import pickle
import tempfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import (
    FloatTensor,
    distributions,
    nn,
)  # before lazyviz can know of them
from torch.utils.dlpack import from_dlpack, to_dlpack

import lazyviz
from lazyviz.record import native_recorder

from ..bit_equality import difference
from ..lazy_equals_eager import assert_same_as_eager, both

PROGRAMS = []
compiled = pytest.mark.skipif("not native_recorder.watches_access()", reason="of the compiled modules")


def program(function):
    PROGRAMS.append(function)
    return function


# Errors that show a tensor's numbers, which is pending still where the compiled modules are missing.
IN_CPP = set()


def in_cpp(function):
    IN_CPP.add(function)
    return program(function)


def reals():
    return torch.randn(3, dtype=torch.double) * 2


def evens():
    return torch.arange(4) * 2


# --- capsules and arrays -----------------------------------------------------------------


@program
def a_capsule():
    return str(from_dlpack(to_dlpack(torch.randn(3) * 2)))


@program
def a_copy_of_a_capsule():
    return torch.asarray(to_dlpack(torch.randn(3) * 2), copy=True)


@program
def a_capsule_that_is_written():
    t = reals()
    u = t + 1
    from_dlpack(to_dlpack(t)).add_(1)
    return t * 1, u


@program
def a_capsule_of_a_view():
    return torch.from_dlpack(torch.randn(3, 4).t()[1:, ::2])


@program
def capsules_of_all_kinds():
    kinds = (torch.int8, torch.int16, torch.uint8, torch.bfloat16, torch.half, torch.bool, torch.cfloat)
    return [torch.from_dlpack(torch.arange(3).to(kind)) for kind in kinds]


@program
def an_empty_capsule():
    return torch.from_dlpack(torch.randn(0, 3) * 1)


@program
def a_capsule_of_what_requires_a_gradient():
    return torch.from_dlpack(reals().requires_grad_())


@program
def a_capsule_of_a_conjugate():
    return torch.from_dlpack(torch.randn(3, dtype=torch.cfloat).conj())


@program
def the_device_of_a_capsule():
    return reals().__dlpack_device__()


@program
def numpy_of_a_capsule():
    return np.from_dlpack(reals()).tolist()


@program
def functions_of_numpy():
    t = reals()
    total = np.add(t, np.ones(3)), np.ones(3) + t, np.stack([t, t]), np.asarray(t), np.array([t[0], t[1]])
    return [torch.as_tensor(item) for item in total]


@program
def an_array_that_is_written():
    array = np.zeros(3)
    t = torch.from_numpy(array)
    t.add_(1)
    before = array.copy()
    u = t * 2
    array[0] = 9
    return before.tolist(), u, t * 1


@program
def a_buffer():
    memory = bytearray(24)
    t = torch.frombuffer(memory, dtype=torch.double)
    t.add_(1)
    return list(memory), t * 2


@program
def a_memoryview_of_an_array():
    t = reals()
    view = memoryview(t.numpy())
    t.add_(1)
    return list(view), t


@program
def an_address():
    t = reals()
    t.data_ptr()
    t.add_(1)
    return list((ctypes.c_double * 3).from_address(t.data_ptr()))


@program
def indices_into_an_array():
    z, array = evens(), np.arange(10)
    return array[z[1]].item(), array[z].tolist(), array[z[0] : z[1]].tolist()


# --- storages ----------------------------------------------------------------------------


@program
def the_bytes_of_a_copied_storage_swapped():
    t = reals()
    copied = t.untyped_storage().__copy__()
    copied.byteswap(torch.float64)
    return copied.tolist(), t


@program
def bytes_swapped():
    t = reals()
    t.untyped_storage().byteswap(torch.float64)
    return t, t * 2


@program
def a_storage_filled():
    t = reals()
    storage = t.untyped_storage()
    u = t + 1
    t.add_(1)
    storage.fill_(0)
    return t * 1, u


@program
def a_clone_of_a_storage_filled():
    t = reals()
    clone = t.untyped_storage().clone()
    clone.fill_(0)
    return clone.tolist(), t


@program
def a_storage_copied_into_another():
    t, u = reals(), reals()
    target, source = t.untyped_storage(), u.untyped_storage()
    u.add_(1)
    w = t * 3
    target.copy_(source)
    return t * 1, u, w


@program
def bytes_set_and_sliced():
    t = torch.zeros(4, dtype=torch.uint8) + 1
    storage = t.untyped_storage()
    storage[1] = 7
    t.add_(1)
    return t * 1, storage[1], storage[0:2].tolist()


@program
def elements_of_a_typed_storage():
    t = reals()
    storage = t.storage()
    storage[0] = 5.0
    u = t * 2
    storage[1] = 6.0
    t.mul_(2)
    return storage.tolist(), storage[0], u, t


@program
def a_typed_storage_in_other_types():
    t = reals()
    storage = t.storage()
    t.add_(1)
    clone = storage.clone()
    clone.fill_(0)
    t.add_(1)
    return storage.float().tolist(), storage.int().tolist(), list(storage), clone.tolist()


@program
def a_storage_in_a_file():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    with tempfile.TemporaryFile() as file:
        storage._write_file(file, False, True, 8)
        file.seek(0)
        return list(file.read())


@program
def a_pickled_storage():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    return pickle.loads(pickle.dumps(storage)).tolist()


@program
def a_saved_storage():
    t = reals()
    storage = t.storage()
    t.add_(1)
    file = io.BytesIO()
    torch.save(storage, file)
    file.seek(0)
    return torch.load(file, weights_only=False).tolist()


@program
def copies_of_a_storage():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    deep = copy.deepcopy(storage)
    t.add_(1)
    shallow = copy.copy(storage)
    t.add_(1)
    return deep.tolist(), shallow.tolist(), storage.tolist()


@program
def a_storage_resized():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    storage.resize_(48)
    return t * 1, storage.nbytes(), storage.tolist()[:24]


@program
def a_storage_shared():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    storage.share_memory_()
    t.add_(1)
    return t * 1, storage.is_shared()


@program
def the_address_of_a_storage():
    t = reals()
    storage = t.untyped_storage()
    t.add_(1)
    return list((ctypes.c_double * 3).from_address(storage.data_ptr()))


@program
def a_tensor_set_to_a_storage():
    t = reals()
    u = torch.tensor([], dtype=torch.double)
    u.set_(t.storage(), 1, (2,), (1,))
    u.add_(1)
    t.mul_(2)
    return t * 1, u * 1


@program
def a_tensor_of_a_storage():
    storage = torch.DoubleStorage([1.0, 2.0, 3.0])
    t = torch.DoubleTensor(storage)
    u = t * 2
    storage.copy_(torch.DoubleStorage([4.0, 5.0, 6.0]))
    return t * 1, u


# --- constructors, indices and sizes -----------------------------------------------------


@program
def a_legacy_constructor():
    return torch.IntTensor([evens()[2], 3])


@program
def legacy_constructors():
    z = evens()
    return (
        torch.FloatTensor([z[2], 3.5]),
        torch.LongTensor([[z[1], z[2]], [z[0], 3]]),
        torch.Tensor([z[2], 3]),
        torch.BoolTensor([z[0], 1]),
        torch.HalfTensor([z[1], 1]),
        torch.FloatTensor(z.float()),
    )


@program
def a_legacy_constructor_of_another_type():
    return torch.IntTensor(evens())


@program
def new_like_another():
    z, x = evens(), torch.randn(2)
    return x.new([z[2], z[0] + 3]), x.new_tensor([z[1], 2])


@program
def nested_lists():
    z = evens()
    return (
        torch.tensor([[z[0], 1.0], [z[1] * 1.0, 2.0]]),
        torch.as_tensor([z[1], 1.5]),
        torch.asarray([z[0], 3]),
    )


@program
def a_list_of_what_is_no_number():
    return torch.tensor([evens(), evens()])


@program
def a_list_in_itself():
    items = [torch.randn(2) * 2]
    items.append(items)
    return torch.tensor(items)


@program
def a_list_in_itself_as_an_index():
    items = [torch.tensor(1) * 2]
    items.append(items)
    return torch.randn(3)[items]


@program
def a_list_in_itself_to_stack():
    items = [torch.randn(2) * 2]
    items.append(items)
    return torch.stack(items)


@program
def data_that_is_deleted():
    x = torch.randn(3) * 2
    del x.data


@program
def indices():
    z, x = evens(), torch.randn(8, 3)
    return x[[z[0], 1]], x[z[1]], x[z[0] : z[1]], x[z[1], z[0] :], x[[z[0], z[1]], [z[1], 0]], x[:: z[1]]


@program
def writes_at_indices():
    z, x = evens(), torch.randn(8, 3)
    x[[z[0], 1]] = 0
    x[z[2]] = 1
    x[z[1] : z[2]] = 2
    return x


@program
def an_index_out_of_range():
    return torch.randn(8, 3)[evens()[1] * 10]


@program
def an_index_that_is_no_integer():
    return torch.randn(8, 3)[evens()[1] * 1.0]


@program
def sizes():
    z, x = evens(), torch.randn(4, 6)
    made = list(range(z[1])), torch.arange(z[2]), torch.zeros(z[1]), torch.ones(z[1], z[2]), torch.eye(z[1])
    return made, x.view(z[1], -1), x.expand(z[1], 4, 6), x.narrow(0, z[0], z[1]), x.split(z[1])


@program
def sizes_of_pictures():
    z, x = evens() + 2, torch.randn(1, 1, 4, 4)
    return F.interpolate(x, size=(z[0], z[1])), F.pad(x, (z[0], 0)), F.adaptive_avg_pool2d(x, (z[0], 2))


@program
def numbers_of_python():
    z = evens()
    numbers = operator.index(z[2]), [10, 20, 30][z[1]], int(z[1]), float(z[1]), complex(z[1]), bool(z[1])
    return numbers, hex(z[3]), f"{z[2]:d}"


# --- code in C++ -------------------------------------------------------------------------


@program
def a_sparse_tensor_without_a_size():
    sparse = torch.sparse_coo_tensor(torch.randint(0, 3, (2, 4)), torch.randn(4))
    return sparse.to_dense(), sparse.shape


@program
def a_sparse_tensor_with_negative_indices():
    return torch.sparse_coo_tensor(torch.randint(-3, 0, (2, 4)), torch.randn(4))


@program
def sobol():
    engine = torch.quasirandom.SobolEngine(3)
    first = engine.draw(4)
    engine.fast_forward(2)
    second = engine.draw(3)
    engine.reset()
    return first, second, engine.draw(2)


@program
def scrambled_sobol():
    engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=1)
    return engine.draw(4), engine.draw_base2(2), engine.draw(1)


@program
def a_matrix_packed_for_fbgemm():
    packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.randn(4, 4) * 1)
    return torch.fbgemm_linear_fp16_weight(torch.randn(2, 4) * 1, packed, torch.randn(4) * 1)


@program
def parameters_of_quantization():
    x = torch.randn(8) * 2
    return torch.choose_qparams_optimized(x, 8, 200, 0.16, 8), torch._choose_qparams_per_tensor(x)


@program
def pruned_rows():
    return torch._rowwise_prune(torch.randn(4, 2) * 1, torch.rand(4) > 0.5, torch.int64)


@program
def packed_embeddings():
    weight = torch.randn(4, 4) * 1
    return torch.ops.quantized.embedding_bag_byte_prepack(weight)


@program
def mkldnn():
    return (torch.randn(5, 2) * 2).to_mkldnn().relu().to_dense()


@program
def packed_sequences():
    x, lengths = torch.randn(3, 2, 4, requires_grad=True), torch.randint(1, 4, (2,))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    out, h = nn.GRU(4, 3, bidirectional=True)(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
    padded.sum().backward()
    return padded, lengths, h, x.grad


@program
def padded_sequences():
    items = [torch.randn(3, 2) * 2, torch.randn(2, 2)]
    return nn.utils.rnn.pad_sequence(items), nn.utils.rnn.pack_sequence(items).data


@program
def histograms():
    x = torch.randn(5, 2) * 2
    return torch.histogramdd(x, [2, 2]), torch.histc(x), torch.bincount((x > 0).long().flatten())


@program
def distances():
    x = torch.randn(5, 2) * 2
    return torch.cdist(x, x), torch.pdist(x)


@program
def validated_distributions():
    p = torch.rand(3) * 1
    categorical, normal = distributions.Categorical(probs=p), distributions.Normal(p * 1, p + 0.1)
    sample = categorical.sample((4,))
    return sample, categorical.log_prob(sample), normal.rsample(), distributions.Dirichlet(p).sample()


@program
def a_distribution_that_is_refused():
    distributions.Normal(torch.zeros(2) * 1, torch.rand(2) - 5)


@program
def probabilities_below_zero():
    return torch.multinomial(-torch.rand(3), 2)


@in_cpp
def a_grid_of_what_is_no_vector():
    return torch.meshgrid(torch.randn(2, 2) * 2)


@program
def a_grid():
    return torch.meshgrid(torch.randn(2) * 2, torch.randn(3), indexing="xy")


@program
def parts_at_indices():
    return torch.tensor_split(torch.randn(6) * 1, torch.tensor([1, 3]) * 1)


@program
def classes_as_vectors():
    return F.one_hot(evens()), torch.repeat_interleave(evens())


@program
def a_loss_of_lengths():
    log_p = (torch.randn(5, 1, 4) * 1).log_softmax(-1)
    return F.ctc_loss(log_p, torch.tensor([[1, 2]]) * 1, torch.tensor([5]) * 1, torch.tensor([2]) * 1)


@program
def attributes_that_can_be_read_only():
    x = torch.randn(3) * 2
    refusals = []
    names = ("device", "is_cuda", "is_meta", "shape", "dtype", "layout", "is_leaf", "grad_fn")
    for name in (*names, "__cuda_array_interface__"):
        for refused in (lambda name=name: setattr(x, name, 3), lambda name=name: delattr(x, name)):
            with pytest.raises(AttributeError) as caught:
                refused()
            refusals.append(str(caught.value))
    return refusals, x


def _floats(storage):
    return torch.frombuffer(bytearray(storage), dtype=torch.float32).tolist()


@program
def a_part_of_a_storage():
    z = torch.arange(6.0) * 2
    part = z.untyped_storage()[4:12]
    z.add_(1)
    seen = [_floats(part)]
    part.fill_(0)
    u = z * 2
    part[0:4] = 1
    z.mul_(3)
    return z, u, seen, _floats(part), _floats(part[0:4])


@program
def a_part_that_was_dropped():
    z = torch.arange(6.0) * 2
    part = z[2:].untyped_storage()[4:12]
    z.add_(1)
    seen = part.tolist()
    del part
    z.mul_(2)
    return z, seen


@program
def a_tensor_on_a_part_of_a_storage():
    z = torch.arange(6.0) * 2
    t = torch.empty(0).set_(z.untyped_storage()[4:12])
    z.mul_(2)
    seen = t.clone()
    t.add_(1)
    u = z.clone()
    z.sub_(3)
    return seen, u, t.tolist(), z, t


@program
def parts_of_an_array():
    z = torch.from_numpy(np.arange(24, dtype=np.float32))
    memory = z.untyped_storage()
    one, other = (torch.empty(0).set_(memory[start : start + 20]) for start in (0, 60))
    z.mul_(2)
    seen = other * 1
    other.add_(1)
    u = z * 1
    one.sub_(1)
    z.add_(1)
    return seen, u, z, one.tolist(), other, _floats(memory[8:16])


@program
def a_part_of_a_parameter():
    p = nn.Parameter(torch.arange(6.0))
    part = p.untyped_storage()[4:12]
    optimizer = torch.optim.Adam([p], 0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        (p**2).sum().backward()
        optimizer.step()
        seen += [_floats(part), _floats(p.grad.untyped_storage()[0:4])]
    return seen, p


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_on_raw_memory(program):
    if program in IN_CPP and not native_recorder.watches_access():
        with pytest.raises(RuntimeError, match="data is not allocated yet"), lazyviz.lazy():
            program()
    else:
        assert_same_as_eager(program)


def test_a_part_of_a_storage_from_before_the_block_sees_its_writes():
    z = torch.arange(6.0)
    part = z.untyped_storage()[4:12]
    with lazyviz.lazy():
        z.mul_(2)
        assert _floats(part) == [2, 4]
        z.add_(1)
        u = z * 1
        part.fill_(0)
    assert u.tolist() == [1, 3, 5, 7, 9, 11]
    assert z.tolist() == [1, 0, 0, 7, 9, 11]


@compiled
def test_a_capsule_after_the_block():
    with lazyviz.lazy():
        t = torch.arange(3.0) * 2
    assert from_dlpack(to_dlpack(t)).tolist() == [0, 2, 4]
    assert not lazyviz.is_lazy(t)


@compiled
def test_raw_access_is_a_named_sync_point():
    with lazyviz.lazy() as graph:
        torch.IntTensor([(torch.arange(3) * 2)[1], 3])
    assert "raw memory access" in {point.cause for point in graph.sync_points}


@compiled
def test_raw_access_where_sync_points_are_forbidden_is_an_error():
    with pytest.raises(lazyviz.SyncError, match="raw memory access needs 3 pending ops"):
        with lazyviz.lazy(allow_sync=False):
            torch.IntTensor([(torch.arange(3) * 2)[1], 3])


def test_a_forgotten_tensor_has_no_address():
    with lazyviz.lazy():
        t = torch.arange(3.0) * 2
    lazyviz.session.lazy_graph.reset()
    with pytest.raises(RuntimeError, match=r"forgotten|Cannot access data pointer"):
        to_dlpack(t)


READS = {
    "capsule": lambda x: from_dlpack(to_dlpack(x)).clone(),
    "legacy type": lambda x: FloatTensor([x, 2.0]),
    "tensor": lambda x: torch.tensor([x, 2.0]),
    "as_tensor": lambda x: torch.as_tensor([[x], [2.0]]),
    "asarray": lambda x: torch.asarray([x, 2.0]),
    "Tensor": lambda x: torch.Tensor([x, 2.0]),
    "new": lambda x: x.new([x, 2.0]),
    "storage": lambda x: x.untyped_storage()[0:4].tolist(),
}


@compiled
@pytest.mark.parametrize("name", READS)
def test_a_real_tensor_with_a_pending_write_is_read_after_it(name):
    x = torch.tensor(1.0)
    with lazyviz.lazy():
        x.add_(1)
        actual = READS[name](x)
    lazyviz.sync()
    assert difference(READS[name](torch.tensor(2.0)), actual) is None


@compiled
def test_what_reads_a_tensor_runs_before_a_capsule_is_written():
    x = torch.ones(3)
    with lazyviz.lazy():
        y = x * 2
        from_dlpack(to_dlpack(x)).add_(1)
    assert (y.tolist(), x.tolist()) == ([2, 2, 2], [2, 2, 2])


def test_taking_part_in_training_takes_no_address():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    with lazyviz.lazy() as graph:
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.randn(2, 1, 5, 5)).pow(2).sum().backward()
            optimizer.step()
    assert not graph.sync_points


@pytest.mark.parametrize("memory", [False, True])
def test_a_profiler_that_notes_shapes_reads_no_memory(memory):
    layer = torch.nn.LSTM(3, 4)

    def program(x):
        with torch.profiler.profile(record_shapes=True, profile_memory=memory, acc_events=True):
            p = torch.nn.Parameter(x * 2)
            y = layer(p.unsqueeze(1))[0].sum()
            y.backward()
        return p, y, p.grad

    both(program, lambda: torch.ones(2, 3), syncs=None if memory else (), versions=False)


def with_a_state():
    class State(torch.jit.ScriptModule):
        """Makes tensors where it is saved and where it is loaded."""

        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.ones(3) * 3)

        @torch.jit.script_method
        def __getstate__(self):
            return (self.w * 2, self.training)

        @torch.jit.script_method
        def __setstate__(self, state: tuple[torch.Tensor, bool]):
            self.w = state[0] + 1
            self.training = state[1]

        @torch.jit.script_method
        def forward(self, x):
            return x * self.w

    return State()


def loaded(save, x):
    buffer = io.BytesIO()
    save(buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)(x)


def scripted(x):
    module = torch.jit.script(torch.nn.Linear(3, 3))
    with torch.no_grad():
        module.weight.mul_(x)
    return loaded(lambda buffer: torch.jit.save(module, buffer), x)


def traced(x):
    layer = torch.nn.Linear(3, 3)
    module = torch.jit.trace(layer, x)
    with torch.no_grad():
        layer.weight.add_(1)
    return torch.jit.load(io.BytesIO(module.save_to_buffer()))(x)


SCRIPTS = {
    "state": lambda x: loaded(lambda buffer: torch.jit.save(with_a_state(), buffer), x),
    "script": scripted,
    "trace": traced,
    "pickled": lambda x: torch._C._pickle_load_obj(torch._C._pickle_save(x * 2)) * 3,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("program", SCRIPTS.values(), ids=SCRIPTS)
def test_torchscripts_files_hold_values(program):
    both(program, lambda: torch.arange(3.0), syncs=None, versions=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_loading_a_script_evaluates_nothing():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 3)), buffer)
    buffer.seek(0)
    with lazyviz.lazy() as graph:
        made = torch.ones(2, 3) * 2
        result = torch.jit.load(buffer)(made)
    assert not graph.sync_points
    assert graph.pending and lazyviz.is_lazy(result)
