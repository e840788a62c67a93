// The stream of operator calls that a thread makes in eager mode, compared with an earlier one.
//
// PyTorch calls a RecordFunction callback for each call that passes the dispatcher, as for its profiler; nothing else
// about the call changes. A stream keeps each call's name, and a hash of the shapes and dtypes of its tensors, but for reads
// of numbers.
//
// Compiled for the installed PyTorch; lazyviz works the same without it.

#include <torch/csrc/python_headers.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace {

struct Call {
  std::string name;
  uint64_t tensors;  // 0 in a stream of names
};

using Stream = std::vector<Call>;

struct Observation {
  unsigned long thread;
  std::shared_ptr<Stream> stream;
  bool compares;  // with the stream; otherwise, it is written
  bool tensors;
  size_t at = 0;
  bool same = true;
};

// Threads of the autograd engine inherit the callbacks of the thread that calls `backward`. No code of others runs while
// the lock is held, and none of Python's.
std::mutex lock;
Observation* current = nullptr;  // not freed at exit, when threads may still be calling
std::atomic<bool> wanted{false};  // whether there is an observation that further calls may change

// The callback of this thread. It stays here, and does nothing, if the observation ended on another thread.
thread_local at::CallbackHandle installed = 0;

void uninstall() {
  if (const at::CallbackHandle handle = std::exchange(installed, 0)) at::removeCallback(handle);
}

// Calls that read a number: a loop that logs its loss now and then makes the same ops in each iteration.
bool reads_a_number(const char* name) {
  return !std::strcmp(name, "aten::item") || !std::strcmp(name, "aten::_local_scalar_dense") ||
         !std::strcmp(name, "aten::is_nonzero");
}

uint64_t mixed(uint64_t hash, uint64_t value) {
  return hash ^ (value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2));
}

uint64_t with_tensor(uint64_t hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return mixed(hash, 1);
  const c10::TensorImpl* implementation = tensor.unsafeGetTensorImpl();
  hash = mixed(hash, static_cast<uint64_t>(tensor.scalar_type()) + 2);
  // Others have no sizes, or sizes that must not be read: those of a subclass may be computed by code of the user.
  constexpr c10::DispatchKeySet UNREAD({c10::DispatchKey::Python, c10::DispatchKey::NestedTensor});
  if (implementation->key_set().has_any(UNREAD) || implementation->layout() != c10::kStrided ||
      implementation->has_symbolic_sizes_strides()) {
    return hash;
  }
  for (const int64_t size : tensor.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
  return mixed(hash, static_cast<uint64_t>(tensor.dim()));
}

uint64_t hash_of(c10::ArrayRef<const c10::IValue> inputs) {
  uint64_t hash = inputs.size();
  for (const c10::IValue& value : inputs) {
    if (value.isTensor()) {
      hash = with_tensor(hash, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) hash = with_tensor(hash, tensor);
    }
  }
  return hash;
}

// Takes the next call. The lock is held. Names are compared as text, since they may be temporary strings.
template <bool TENSORS>
void add(Observation& seen, const at::RecordFunction& call) {
  const char* name = call.name();
  const uint64_t tensors = TENSORS ? hash_of(call.inputs()) : 0;
  Stream& calls = *seen.stream;
  if (seen.compares && seen.at < calls.size() && calls[seen.at].name == name &&
      (!TENSORS || calls[seen.at].tensors == tensors)) {
    ++seen.at;
  } else if (reads_a_number(name)) {
    return;
  } else if (!seen.compares) {
    calls.push_back({name, tensors});
  } else {
    seen.same = false;
    wanted = false;
  }
}

template <bool TENSORS>
std::unique_ptr<at::ObserverContext> called(const at::RecordFunction& call) {
  if (!wanted) return nullptr;
  const std::lock_guard<std::mutex> guard(lock);
  if (current != nullptr && current->same && current->tensors == TENSORS) add<TENSORS>(*current, call);
  return nullptr;
}

// --- Python interface ----------------------------------------------------------------------

constexpr const char* STREAM = "lazyviz.op_stream";

std::shared_ptr<Stream>* stream_in(PyObject* capsule) {
  return static_cast<std::shared_ptr<Stream>*>(PyCapsule_GetPointer(capsule, STREAM));
}

PyObject* begin(PyObject*, PyObject* args) {
  PyObject* expected;
  int tensors;
  if (!PyArg_ParseTuple(args, "Op", &expected, &tensors)) return nullptr;
  auto made = std::make_unique<Observation>();
  made->thread = PyThread_get_thread_ident();
  made->compares = expected != Py_None;
  made->tensors = tensors != 0;
  if (made->compares) {
    const std::shared_ptr<Stream>* stream = stream_in(expected);
    if (stream == nullptr) return nullptr;
    made->stream = *stream;
  } else {
    made->stream = std::make_shared<Stream>();
  }
  {
    const std::lock_guard<std::mutex> guard(lock);
    if (current != nullptr) Py_RETURN_FALSE;
    current = made.release();
    wanted = true;
  }
  uninstall();
  at::RecordFunctionCallback callback(tensors ? &called<true> : &called<false>);
  installed = at::addThreadLocalCallback(callback.needsInputs(tensors != 0).scopes({at::RecordScope::FUNCTION}));
  Py_RETURN_TRUE;
}

PyObject* end(PyObject*, PyObject*) {
  std::unique_ptr<Observation> ended;
  {
    const std::lock_guard<std::mutex> guard(lock);
    ended.reset(std::exchange(current, nullptr));
    wanted = false;
  }
  uninstall();
  if (ended == nullptr) Py_RETURN_NONE;
  if (ended->compares) return PyBool_FromLong(ended->same && ended->at == ended->stream->size());
  return PyCapsule_New(new std::shared_ptr<Stream>(ended->stream), STREAM, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Stream>*>(PyCapsule_GetPointer(capsule, STREAM));
  });
}

PyObject* thread(PyObject*, PyObject*) {
  const std::lock_guard<std::mutex> guard(lock);
  return PyLong_FromUnsignedLong(current == nullptr ? 0 : current->thread);
}

PyObject* names(PyObject*, PyObject* capsule) {
  const std::shared_ptr<Stream>* stream = stream_in(capsule);
  if (stream == nullptr) return nullptr;
  const Stream& calls = **stream;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(calls.size()));
  if (list == nullptr) return nullptr;
  for (size_t at = 0; at < calls.size(); ++at) {
    const std::string& text = calls[at].name;
    PyObject* name = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    if (name == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), name);
  }
  return list;
}

PyMethodDef METHODS[] = {
    {"begin", begin, METH_VARARGS,
     "begin(stream, tensors): observe this thread's calls; compare them with `stream`, by name and, if `tensors`, by the "
     "shapes and dtypes of their tensors; None: write a new stream. False if calls are being observed already."},
    {"end", end, METH_NOARGS,
     "end(): the new stream, or whether the calls were those of the given stream; None if nothing was observed."},
    {"thread", thread, METH_NOARGS, "thread(): the thread whose calls are being observed, or 0."},
    {"names", names, METH_O, "names(stream): the names of its calls, such as \"aten::addmm\"."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.op_stream", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_op_stream() {
#ifndef _WIN32
  // A child would wait forever for a lock that another thread of its parent held.
  static const int failed = pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
  if (failed) return PyErr_NoMemory();
#endif
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
