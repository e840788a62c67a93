"""Shared memory always shows eager's values; writes to private memory are recorded."""

from __future__ import annotations

import array
import gc
import mmap
import weakref
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load, load_file, save, save_file

import lazyviz
from lazyviz.record import native_recorder
from lazyviz.record.interception import observers_of_deferred_writes

from ...bit_equality import difference


def four():
    return torch.arange(4.0)


def parameter_of(tensor):
    return torch.nn.Parameter(tensor)


def saved(tensor, file):
    torch.save({"a": tensor}, file)
    return file


class Program:
    """What a program has seen: the content of arrays and tensors at the moments at which it looked."""

    def __init__(self, folder):
        self.seen = []
        self.folder = folder

    def look(self, *items):
        for item in items:
            if isinstance(item, (torch.Tensor, np.ndarray)):
                item = item.tolist()
            elif not isinstance(item, list):
                item = bytes(item)
            self.seen.append(item)

    def path(self, name):
        return str(self.folder / name)


# Each is a generator: up to `yield` it runs eagerly, then in a block.
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def an_array_made_before(p):
    t = four()
    a = t.numpy()
    yield
    t.add_(1)
    p.look(a)
    t.mul_(2)
    p.look(a)
    u, a[0] = t * 3, 50
    p.look(u, t + 1)


@program
def an_array_of_a_detached_parameter(p):
    w = parameter_of(four())
    a = w.detach().numpy()
    yield
    with torch.no_grad():
        w.add_(1)
        p.look(a)
        w.mul_(2)
        p.look(a)
    y = (w * 2).sum()
    a[0] = 9
    y.backward()
    p.look(w.grad, y)


@program
def a_part_of_an_array(p):
    t = four()
    a = t.numpy()[2:]
    yield
    t.add_(1)
    p.look(a)


@program
def an_array_in_lists(p):
    t = four()
    kept = [[t.numpy()]]
    yield
    t.add_(1)
    p.look(kept[0][0])


@program
def an_array_in_an_array_of_objects(p):
    t = four()
    kept = np.empty(1, dtype=object)
    kept[0] = t.numpy()
    yield
    t.add_(1)
    p.look(kept[0])


@program
def a_memoryview_of_an_array(p):
    t = four()
    kept = memoryview(t.numpy())
    yield
    t.add_(1)
    p.look(kept.tolist())


@program
def an_array_that_a_generator_has(p):
    t = four()

    def kept():
        a = t.numpy()
        yield
        p.look(a)
        yield

    it = kept()
    next(it)
    yield
    t.add_(1)
    next(it)


@program
def an_array_that_a_closure_has(p):
    t = four()
    a = t.numpy()
    yield
    t.add_(1)
    (lambda: p.look(a))()


@program
def arrays_made_in_the_block(p):
    t = four()
    yield
    u = t + 1
    a = t.numpy()
    t.add_(1)
    p.look(a)
    b = u.numpy()
    u.mul_(3)
    p.look(b)
    del b
    u.add_(1)
    t.add_(1)
    p.look(a, u)


@program
def an_array_that_is_dropped_and_made_again(p):
    t = four()
    yield
    a = np.asarray(t)
    t.add_(1)
    p.look(a)
    del a
    t.add_(1)
    a = np.asarray(t)
    t.add_(5)
    p.look(a)


@program
def an_array_by_force(p):
    t = four().requires_grad_()
    yield
    a = t.numpy(force=True)
    with torch.no_grad():
        t.add_(1)
    p.look(a)


@program
def an_array_of_a_pending_tensor(p):
    yield
    t = torch.ones(3) * 2
    a = t.numpy()
    t.mul_(4)
    p.look(a)


@program
def a_tensor_of_an_array(p):
    a = np.arange(4.0)
    t = torch.from_numpy(a)
    yield
    t.add_(1)
    p.look(a)
    y, a[:] = t * 2, 0
    p.look(y, t)


@program
def a_tensor_of_a_part_of_an_array(p):
    a = np.arange(8.0)
    t = torch.from_numpy(a[2:6])
    yield
    t.add_(1)
    p.look(a)


@program
def two_tensors_of_one_array_that_is_gone(p):
    a = np.arange(4.0)
    t, u = torch.from_numpy(a), torch.from_numpy(a[1:])
    del a
    yield
    t.add_(1)
    p.look(u)
    u.mul_(2)
    p.look(t)


@program
def a_tensor_of_an_array_of_a_tensor(p):
    t = four()
    u = torch.from_numpy(t.numpy())
    yield
    t.add_(1)
    p.look(u)
    u.mul_(2)
    p.look(t)


@program
def an_array_that_a_weak_reference_finds(p):
    a = np.arange(4.0)
    t, found = torch.from_numpy(a), weakref.ref(a)
    del a
    yield
    t.add_(1)
    a = found()
    p.look(a if a is not None else t)


@program
def a_bytearray(p):
    buffer = bytearray(16)
    t = torch.frombuffer(buffer, dtype=torch.float32)
    yield
    t.add_(1)
    p.look(buffer)
    y = t * 2
    buffer[:4] = bytes(4)
    p.look(y, t)


@program
def a_memoryview_of_a_bytearray(p):
    buffer = bytearray(16)
    t = torch.frombuffer(memoryview(buffer)[4:12], dtype=torch.float32)
    yield
    t.add_(1)
    p.look(buffer)


@program
def an_array_of_the_standard_library(p):
    buffer = array.array("f", [1, 2, 3])
    t = torch.frombuffer(buffer, dtype=torch.float32)
    yield
    t.add_(1)
    p.look(buffer.tolist())


@program
def anonymous_mapped_memory(p):
    buffer = mmap.mmap(-1, 16)
    t = torch.frombuffer(buffer, dtype=torch.float32)
    yield
    t.add_(1)
    p.look(buffer[:16])


@program
def memory_shared_with_other_processes(p):
    memory = shared_memory.SharedMemory(create=True, size=16)
    t = torch.frombuffer(memory.buf, dtype=torch.float32, count=4)
    t.zero_()
    yield
    t.add_(1)
    p.look(bytes(memory.buf[:16]))
    del t
    gc.collect()
    memory.close()
    memory.unlink()


@program
def another_tensor_on_shared_memory(p):
    t = four().share_memory_()
    storage = torch.UntypedStorage._new_shared_fd_cpu(*t.untyped_storage()._share_fd_cpu_())
    u = torch.empty(0).set_(storage)
    yield
    t.add_(1)
    p.look(u)


@program
def memory_that_is_shared_in_the_block(p):
    t = four()
    yield
    t.add_(1)
    t.share_memory_()
    storage = torch.UntypedStorage._new_shared_fd_cpu(*t.untyped_storage()._share_fd_cpu_())
    u = torch.empty(0).set_(storage)
    t.add_(1)
    p.look(u)


@program
def a_dlpack_export(p):
    t = four()
    a = np.from_dlpack(t)
    yield
    t.add_(1)
    p.look(a)


@program
def a_dlpack_export_in_the_block(p):
    t = four()
    yield
    a = np.from_dlpack(t)
    t.add_(1)
    p.look(a)
    del a
    t.add_(1)
    p.look(t)


@program
def a_capsule_that_is_used_later(p):
    t = four().reshape(4, 1)[:, :1]
    capsule = torch.utils.dlpack.to_dlpack(t)
    u = torch.utils.dlpack.from_dlpack(capsule)
    yield
    t.add_(1)
    p.look(u)


@program
def a_tensor_that_pytorch_has_exported_to_itself(p):
    t = four()
    yield
    u = torch.from_dlpack(t)
    t.add_(1)
    p.look(u)
    u.mul_(2)
    p.look(t)


@program
def a_shared_file(p):
    file = p.path("shared")
    with open(file, "wb") as out:
        out.write(bytes(16))
    t = torch.from_file(file, shared=True, size=4)
    yield
    t.add_(1)
    with open(file, "rb") as written:
        p.look(written.read())


@program
def a_memory_map_of_numpy(p):
    file = p.path("mapped")
    with open(file, "wb") as out:
        out.write(bytes(16))
    a = np.memmap(file, dtype=np.float32, mode="r+")
    t = torch.from_numpy(a)
    yield
    t.add_(1)
    p.look(a)


@program
def parts_of_a_file_that_overlap(p):
    file = p.path("parts")
    with open(file, "wb") as out:
        out.write(bytes(40))
    storage = torch.UntypedStorage.from_file(file, False, 40)
    t, u = torch.empty(0).set_(storage[0:24]), torch.empty(0).set_(storage[8:32])
    storage = None
    yield
    t.add_(1)
    p.look(u)
    u.mul_(2)
    p.look(t)


@program
def the_whole_of_a_file_and_a_part(p):
    file = p.path("whole")
    with open(file, "wb") as out:
        out.write(bytes(40))
    storage = torch.UntypedStorage.from_file(file, False, 40)
    w = parameter_of(torch.empty(0).set_(storage[0:24]))
    yield
    with torch.no_grad():
        w.add_(1)
    u = torch.empty(0).set_(storage)
    p.look(u + 0)
    with torch.no_grad():
        w.add_(1)
        p.look(u + 0)
        u.mul_(2)
    p.look(w)


@program
def a_weight_that_was_frozen_when_its_array_was_made(p):
    w = torch.nn.Parameter(four(), requires_grad=False)
    a = w.numpy()
    w.requires_grad_(True)
    yield
    with torch.no_grad():
        w.add_(1)
    p.look(a)


@program
def a_loaded_dictionary_that_became_arrays(p):
    loaded = torch.load(saved(four(), p.path("state")))
    w = parameter_of(loaded["a"])
    arrays = {key: tensor.numpy() for key, tensor in loaded.items()}
    del loaded
    yield
    with torch.no_grad():
        w.add_(1)
    p.look(arrays["a"])


@program
def a_method_that_was_looked_up_before(p):
    w = torch.load(saved(four(), p.path("state")))["a"]
    a, add = w.numpy(), w.add_
    yield
    add(1)
    p.look(a)


@program
def an_optimizer_with_an_array_of_a_weight(p):
    model = torch.nn.Linear(3, 2)
    a = model.weight.detach().numpy()
    optimizer = torch.optim.AdamW(model.parameters())
    yield
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        p.look(a, model.weight.detach())


@program
def an_optimizer_with_a_closure_that_looks(p):
    model = torch.nn.Linear(3, 2)
    a = model.weight.detach().numpy()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        p.look(a)
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    yield
    optimizer.step(closure)
    p.look(a)


@program
def an_optimizer_of_the_users_own_that_looks(p):
    model = torch.nn.Linear(3, 2)
    a = model.weight.detach().numpy()

    class Descent(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for w in group["params"]:
                    w.sub_(w.grad * group["lr"])
                    p.look(a)

    optimizer = Descent(model.parameters(), {"lr": 0.5})
    yield
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@program
def an_array_of_an_optimizers_state(p):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    a = optimizer.state[model.weight]["exp_avg"].numpy()
    yield
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    p.look(a)


@program
def descent_by_hand_with_an_array(p):
    model = torch.nn.Linear(3, 2)
    a = model.weight.detach().numpy()
    yield
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            for w in model.parameters():
                w -= 0.1 * w.grad
        p.look(a)


@program
def an_array_of_a_running_mean(p):
    norm = torch.nn.BatchNorm1d(3)
    a, x = norm.running_mean.numpy(), torch.randn(5, 3)
    yield
    norm(x)
    p.look(a)
    norm(x * 2)
    p.look(a)


@program
def an_array_made_in_an_earlier_block(p):
    t = four()
    with lazyviz.lazy():
        t.add_(1)
        a = t.numpy()
    yield
    t.add_(1)
    p.look(a)


@program
def an_array_made_between_two_blocks(p):
    w = parameter_of(torch.load(saved(four(), p.path("state")))["a"])
    with lazyviz.lazy(), torch.no_grad():
        w.add_(1)
    a = w.detach().numpy()
    yield
    with torch.no_grad():
        w.add_(1)
    p.look(a)


@program
def an_array_of_the_tensor_itself_made_between_two_blocks(p):
    t = torch.load(saved(four(), p.path("state")))["a"]
    with lazyviz.lazy():
        t.add_(1)
    t.tolist()
    a = t.numpy()
    yield
    t.add_(1)
    p.look(a)


@program
def a_state_dict_loaded_into_shown_weights(p):
    model = torch.nn.Linear(3, 2)
    a = model.weight.detach().numpy()
    state = {key: tensor * 0 + 2 for key, tensor in model.state_dict().items()}
    yield
    model.load_state_dict(state)
    p.look(a)


@program
def views_of_a_shown_tensor(p):
    t = torch.arange(6.0).reshape(2, 3)
    a, v = t.numpy(), t[0]
    yield
    v.add_(1)
    p.look(a)
    t.t().mul_(2)
    p.look(a)
    w = t[1]
    w += 1
    p.look(a)


@program
def an_argument_called_out(p):
    t = four()
    a = t.numpy()
    yield
    torch.add(torch.ones(4), 1, out=t)
    p.look(a)


@program
def bytes_that_somebody_has(p):
    kept = four().numpy().tobytes()
    t = load_from(kept)
    yield
    t.add_(1)
    p.look(kept)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("name", PROGRAMS)
def test_who_shows_memory_sees_what_eager_would_show(name, tmp_path):
    def run(block):
        torch.manual_seed(0)
        noted = Program(tmp_path)
        steps = PROGRAMS[name](noted)
        next(steps)
        if block:
            with lazyviz.lazy():
                assert next(steps, None) is None
        else:
            assert next(steps, None) is None
        return noted.seen

    expected = run(block=False)
    assert expected and run(block=True) == expected


def load_from(memory):
    return torch.frombuffer(memory, dtype=torch.float32)


# --- what nobody else has ---------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def assigned(state):
    with torch.device("meta"):
        model = network()
    model.load_state_dict(state, assign=True)
    return model


def keeping(model, *kept):
    model.kept = kept
    return model


def file_of(folder):
    """A new one each time: a file that is mapped is not to be written again."""
    file = folder / f"state{len(list(folder.iterdir()))}.pt"
    torch.save(network().state_dict(), file)
    return file


def whole(folder):
    torch.save(network(), folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


def from_safetensors(folder):
    save_file(network().state_dict(), folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def after_a_histogram(folder):
    model = network()
    for parameter in model.parameters():
        np.histogram(parameter.detach().numpy())
        np.asarray(parameter.data).mean()
    for buffer in model.buffers():
        buffer.numpy().mean()
    return model


OWN = {
    "a whole model that was loaded": whole,
    "a mapped file that was assigned": lambda f: assigned(torch.load(file_of(f), mmap=True)),
    "a mapped file whose dictionary is kept": lambda f: (lambda state: keeping(assigned(state), state))(
        torch.load(file_of(f), mmap=True)
    ),
    "a file that was assigned": lambda f: assigned(torch.load(file_of(f))),
    "safetensors that were assigned": lambda f: assigned(from_safetensors(f)),
    "safetensors whose dictionary is kept": lambda f: (lambda state: keeping(assigned(state), state))(
        from_safetensors(f)
    ),
    "safetensors from bytes": lambda f: assigned(load(save(network().state_dict()))),
    "safetensors by way of NumPy": lambda f: assigned(
        {name: torch.from_numpy(item) for name, item in load_arrays(saved_arrays(f)).items()}
    ),
    "arrays over bytes": lambda f: assigned(
        {name: over_bytes(item.numpy()) for name, item in network().state_dict().items()}
    ),
    "weights that NumPy has read": after_a_histogram,
    "weights that were copied": lambda f: (
        lambda model: (model.load_state_dict(torch.load(file_of(f))), model)[1]
    )(network()),
}


def saved_arrays(folder):
    save_file(network().state_dict(), folder / "arrays.safetensors")
    return folder / "arrays.safetensors"


def over_bytes(content):
    """A tensor of what ``content``, an array, holds."""
    return torch.from_numpy(np.frombuffer(bytearray(content.tobytes()), content.dtype).reshape(content.shape))


def three_steps(model, optimizer):
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    return [*model.state_dict().values(), *[dict(state) for state in optimizer.state.values()]]


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_weights_without_another_holder_are_recorded_like_any_others(make, tmp_path):
    def run(block):
        model = make(tmp_path)
        optimizer = torch.optim.AdamW(model.parameters())
        if not block:
            three_steps(model, optimizer)
            return state_of(model, optimizer)
        with lazyviz.lazy() as graph:
            three_steps(model, optimizer)
        assert graph.sync_points == []
        assert graph.pending == len(graph.nodes)
        return state_of(model, optimizer)

    assert difference(run(block=False), run(block=True)) is None


@pytest.mark.parametrize("mapped", [False, True])
def test_a_loaded_optimizer_state_is_recorded_like_any_other(mapped, tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    three_steps(model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")

    def run(block):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        state, of_optimizer = torch.load(tmp_path / "checkpoint.pt", mmap=mapped)
        model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)
        if not block:
            three_steps(model, optimizer)
            return state_of(model, optimizer)
        with lazyviz.lazy() as graph:
            three_steps(model, optimizer)
        assert graph.sync_points == []
        assert graph.pending == len(graph.nodes)
        return state_of(model, optimizer)

    assert difference(run(block=False), run(block=True)) is None


def test_a_plain_tensor_that_was_loaded_is_written_later(tmp_path):
    loaded = torch.load(saved(four(), tmp_path / "state"))["a"]
    with lazyviz.lazy() as graph:
        loaded.mul_(2)
        loaded.add_(1)
    assert graph.sync_points == [] and graph.pending == 2
    assert loaded.tolist() == [1, 3, 5, 7]


def test_a_tensor_of_an_array_that_is_gone_is_written_later():
    tensor = torch.from_numpy(np.arange(4.0))
    with lazyviz.lazy() as graph:
        tensor.mul_(2)
    assert graph.sync_points == [] and graph.pending == 1
    assert tensor.tolist() == [0, 2, 4, 6]


BUFFERS = {
    "bytes": lambda: bytes(range(48)),
    "a bytearray": lambda: bytearray(range(48)),
    "an array": lambda: array.array("b", range(48)),
    "a view": lambda: memoryview(bytearray(range(48))),
    "a part of a view": lambda: memoryview(bytearray(range(96)))[16:64],
}
SHOWN = {
    "as it is": lambda buffer: np.frombuffer(buffer, "b"),
    "of other numbers": lambda buffer: np.frombuffer(buffer, "f"),
    "in another shape": lambda buffer: np.frombuffer(buffer, "h").reshape(4, 6),
    "a part": lambda buffer: np.frombuffer(buffer, "i")[2:9:2],
    "made of it": lambda buffer: np.ndarray((3, 2), "d", buffer),
    "as an array": lambda buffer: np.asarray(memoryview(buffer)),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_a_tensor_of_a_buffer_that_is_gone_is_written_later(buffer, show):
    expected, before = (torch.from_numpy(show(buffer())) for _ in range(2))
    expected.add_(1)
    with lazyviz.lazy() as graph:
        within = torch.from_numpy(show(buffer()))
        within.add_(1)
        before.add_(1)
    assert graph.sync_points == [] and graph.pending == 2
    assert difference([within, before], [expected, expected]) is None


@pytest.mark.parametrize("write", ["add_", "uniform_"])
def test_a_look_that_cannot_tell_is_a_sync_point(monkeypatch, write):
    monkeypatch.setattr(observers_of_deferred_writes, "_may_be_shared", lambda tensor, address: False)
    tensor = torch.from_numpy(np.frombuffer(bytearray(16), "f"))
    torch.manual_seed(0)
    with lazyviz.lazy() as graph:
        tensor.add_(1) if write == "add_" else tensor.uniform_()
    assert len(graph.sync_points) == 1 and graph.pending == 0
    torch.manual_seed(0)
    expected = torch.ones(4) if write == "add_" else torch.empty(4).uniform_()
    assert difference(tensor, expected) is None


def test_a_tensor_once_read_by_numpy_is_written_later():
    tensor = four()
    tensor.numpy().sum()
    with lazyviz.lazy() as graph:
        tensor.mul_(2)
        np.asarray(tensor).sum()
        tensor.mul_(2)
    assert [point.cause for point in graph.sync_points] == ["numpy"]
    assert graph.pending == 1
    assert tensor.tolist() == [0, 4, 8, 12]


def test_an_array_that_is_dropped_leaves_the_next_step_to_be_recorded():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    shown = model[0].weight.detach().numpy()
    with lazyviz.lazy() as graph:
        three_steps(model, optimizer)
        before = len(graph.sync_points)
        assert before == 3
        del shown
        three_steps(model, optimizer)
        assert len(graph.sync_points) == before
    assert graph.pending > 100


def test_a_step_with_arrays_of_all_weights_is_one_sync_point():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters())
    shown = [parameter.detach().numpy() for parameter in model.parameters()]
    with lazyviz.lazy() as graph:
        three_steps(model, optimizer)
    assert len(graph.sync_points) == 3 and len(shown) == 20


def test_the_sync_point_names_the_tensor_its_memory_holder_and_the_workaround():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = model[2].weight.detach().numpy()
    with lazyviz.lazy() as graph:
        three_steps(model, optimizer)
    assert {point.cause for point in graph.sync_points} == {
        "write to 2.weight, whose memory a NumPy array shares; "
        "drop the array, or give it a copy (.numpy().copy())"
    }
    assert shown.shape == (2, 8)


class Weights:
    def __init__(self, tensor):
        self.tensor = tensor


def test_the_sync_point_names_a_tensor_of_no_module_as_the_code_does():
    x, items, state = torch.zeros(4), [torch.zeros(4)], Weights(torch.zeros(4))
    arrays = [tensor.numpy() for tensor in (x, items[0], state.tensor)]
    with lazyviz.lazy() as graph:
        x.add_(1)
        x[1:] = 3
        items[0].mul_(2)
        state.tensor.detach().fill_(1)
    names = [point.cause.split()[2] for point in graph.sync_points]
    assert names == ["x,", "x,", "items[0],", "state.tensor,"]
    assert arrays[0].tolist() == [1, 3, 3, 3]


def test_memory_made_in_a_step_that_ran_at_once_is_in_the_record():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shown = model[0].weight.detach().numpy()
    with lazyviz.lazy() as graph:
        three_steps(model, optimizer)
    made = next(node for node in graph.nodes if node.at_once)
    # The first weight's was recorded before the write that could not wait.
    others = list(model.parameters())[1:]
    assert [value.nbytes for value in made.outputs] == [4 * other.numel() for other in others]
    assert len(shown) == 8


def test_a_step_that_fails_leaves_the_next_to_be_recorded():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = [model[0].weight.detach().numpy()]
    model(torch.ones(2, 4)).sum().backward()
    fails = [True]

    class Failing(torch.optim.SGD):
        def step(self):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
                if fails:
                    raise ValueError(fails.pop())

    optimizer = Failing(model.parameters(), lr=0.1)
    with lazyviz.lazy() as graph:
        with pytest.raises(ValueError):
            optimizer.step()
        assert graph.pending == 0
        shown.clear()
        optimizer.step()
        y = torch.ones(2) + 1
    assert graph.pending == 6 + 2 and lazyviz.is_lazy(y)


def test_nothing_of_pytorch_is_replaced_after_what_was_known_is_gone(tmp_path):
    with lazyviz.lazy():  # after which what tests before this one still hold is watched
        pass
    before = torch.Tensor.numpy
    loaded = torch.load(saved(four(), tmp_path / "state"))["a"]
    with lazyviz.lazy():
        loaded.mul_(2)
    assert loaded.tolist() == [0, 2, 4, 6]
    assert loaded.numpy().tolist() == [0, 2, 4, 6]
    del loaded
    with lazyviz.lazy() as graph:
        torch.ones(2) + 1
    graph.evaluate()
    assert torch.Tensor.numpy is before


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_that_only_pytorch_has_had_is_ordinary(compiled):
    before = native_recorder.active
    native_recorder.use(compiled)
    try:
        ordinary = observers_of_deferred_writes.MemoryHolders.are_ordinary
        plain = [four(), parameter_of(four()), four()[1:], four().t(), torch.empty(0)]
        assert ordinary([]) and ordinary(plain)
        exposed = four()
        exposed.numpy()
        others = [
            exposed,
            torch.from_numpy(np.zeros(4)),
            four().share_memory_(),
            torch.ones(2).to_sparse(),
            torch.ones(2, device="meta"),
            parameter_of(torch.from_numpy(np.zeros(4, np.float32))),
        ]
        for other in others:
            assert not ordinary([*plain, other])
    finally:
        native_recorder.use(before)
