// A direct path from PyTorch's dispatcher to the recorder, without PyTorch's path through Python.
//
// An op that a dispatch mode sees normally passes much Python code: its types are collected, the mode is looked up and
// called as a method, and general code converts arguments and result. For an op that the compiled recorder
// (`recorder.pyx`) handles, a kernel at the mode's own dispatch key does only what is needed. If the recorder does not
// handle the op, or no recorder is active, the op continues as if this kernel did not exist.
//
// Compiled for the installed PyTorch; lazyviz works the same without it.

#include <torch/csrc/python_headers.h>

#include <algorithm>
#include <ATen/EmptyTensor.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__GNUC__) && !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;
using torch::jit::Stack;

// From the compiled recorder: whether it is recording, and the handler of a call (`MISSED`: it does not handle it).
using Ready = int (*)();
using Record = PyObject* (*)(PyObject* op, PyObject* args, PyObject* kwargs);
// Whether no block is open, and whether pending ops use a tensor or the storage at this address.
using Outside = int (*)();
using Used = int (*)(PyObject* tensor, size_t storage, int is_foreign);
// Removes the mode if nothing is recorded or pending; whether it may have been removed, or -1 with an exception.
using Retire = int (*)();

Ready ready = nullptr;
Record record = nullptr;
Outside outside = nullptr;
Used used = nullptr;
Retire retire = nullptr;
PyObject* MISSED = nullptr;
PyTypeObject* mode_type = nullptr;
bool active = false;

constexpr DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
// Dispatch keys above the mode's key must not be visited again, as in PyTorch's own kernel for it.
constexpr DispatchKeySet ABOVE = DispatchKeySet(DispatchKeySet::FULL) ^ (BELOW | DispatchKeySet(DispatchKey::Python));
constexpr DispatchKeySet AFTER_SNAPSHOT(DispatchKeySet::FULL_AFTER, DispatchKey::PythonTLSSnapshot);

// Our kernels; never freed, since they outlive the interpreter's modules.
torch::Library& library(const char* space, DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
}

// Whether the recorder's mode is the only active mode.
bool is_ours() {
  return active && TorchDispatchModeTLS::stack_len() == 1 &&
      Py_TYPE(TorchDispatchModeTLS::get_stack_at(0)->ptr(getPyInterpreter())) == mode_type;
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

// No garbage collections while an op is recorded: finalizers would run at the op's dispatch level, where their own ops see
// neither autograd nor the recorder. Needs the GIL.
struct CollectorPause {
  const int was_enabled = PyGC_Disable();
  ~CollectorPause() {
    if (was_enabled) PyGC_Enable();
  }
};

[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

PyObject* checked(PyObject* object) {
  if (object == nullptr) raise();
  return object;
}

// The object that an integer stands for.
enum class Kind { number, dtype, layout, memory_format };

Kind kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return Kind::dtype;
    case c10::TypeKind::LayoutType: return Kind::layout;
    case c10::TypeKind::MemoryFormatType: return Kind::memory_format;
    default: return Kind::number;
  }
}

PyObject* reference(void* object) {
  return Py_NewRef(static_cast<PyObject*>(object));
}

PyObject* of_integer(int64_t value, Kind kind) {
  switch (kind) {
    case Kind::dtype: return reference(torch::getTHPDtype(static_cast<c10::ScalarType>(value)));
    case Kind::layout: return reference(torch::getTHPLayout(static_cast<c10::Layout>(value)));
    case Kind::memory_format:
      return reference(torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value)));
    default: return PyLong_FromLongLong(value);
  }
}

// For a tracer's tensor with unknown sizes: reading a size would fix it from then on.
bool is_symbolic(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

// Whether no Python object has been made for a tensor; the slot's method depends on the version of PyTorch.
template <typename Slot>
bool is_free(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj() == nullptr;
  } else {
    return !slot.check_pyobj().has_value();
  }
}

// The number in a tensor that PyTorch has made of a Python number; null if it may stand for another object.
// PyTorch's own code makes a Python tensor first, to look for an attribute of it that a new one cannot have.
PyObject* of_wrapped_number(const at::Tensor& tensor) {
  const c10::TensorImpl* implementation = tensor.unsafeGetTensorImpl();
  if (!is_free(*implementation->pyobj_slot()) || !tensor.has_storage() || !tensor.is_cpu() || is_symbolic(tensor)) {
    return nullptr;
  }
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double: return PyFloat_FromDouble(*tensor.const_data_ptr<double>());
    case c10::ScalarType::Long: return PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>());
    case c10::ScalarType::Bool: return PyBool_FromLong(*tensor.const_data_ptr<bool>());
    default: return nullptr;
  }
}

// A value as a Python object; rare types are converted by PyTorch's own code.
PyObject* to_python(const c10::IValue& value, Kind kind) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) {
      if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return THPVariable_Wrap(tensor);
      if (PyObject* number = of_wrapped_number(tensor)) return number;
    }
  } else if (value.isNone()) {
    return Py_NewRef(Py_None);
  } else if (value.isInt()) {
    return of_integer(value.toInt(), kind);
  } else if (value.isBool()) {
    return PyBool_FromLong(value.toBool());
  } else if (value.isDouble()) {
    return PyFloat_FromDouble(value.toDouble());
  } else if (value.isIntList()) {
    const c10::List<int64_t> numbers = value.toIntList();
    PyObject* list = checked(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t at = 0; at < numbers.size(); ++at) PyList_SET_ITEM(list, at, PyLong_FromLongLong(numbers.get(at)));
    return list;
  }
  return torch::jit::toPyObject(value).release().ptr();
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The bytes of a strided tensor's storage; -1 if it has none, or needs more than its kernel because of a bit or layout.
int64_t plain_nbytes(const at::Tensor& tensor) {
  constexpr DispatchKeySet SPECIAL({
      DispatchKey::Conjugate,
      DispatchKey::Negative,
      DispatchKey::ZeroTensor,
      DispatchKey::Quantized,
      DispatchKey::NestedTensor,
  });
  if (tensor.layout() != c10::kStrided || !tensor.has_storage()) return -1;
  if (is_symbolic(tensor) || tensor.key_set().has_any(SPECIAL)) return -1;
  return storage_of(tensor)->sym_nbytes().maybe_as_int().value_or(-1);
}

// Whether only its kernel needs to see the tensor.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.key_set().has(DispatchKey::Python) && (tensor.is_cpu() || tensor.is_cuda()) && plain_nbytes(tensor) >= 0;
}

// Whether other storages may overlap the tensor's memory: its allocator has not made it.
bool is_foreign(const at::Tensor& tensor) {
  if (plain_nbytes(tensor) == 0) return false;
  const c10::Allocator* allocator = storage_of(tensor)->allocator();
  return allocator == nullptr || storage_of(tensor)->data_ptr().get_deleter() != allocator->raw_deleter();
}

// Whether `test` is true of each tensor in an argument.
template <typename Test>
bool all_tensors(const c10::IValue& value, const Test& test) {
  if (value.isTensor()) return !value.toTensor().defined() || test(value.toTensor());
  if (value.isTensorList()) {
    const c10::List<at::Tensor> tensors = value.toTensorList();
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& item) { return !item.defined() || test(item); });
  }
  if (!value.isList()) return true;
  const c10::List<c10::IValue> items = value.toList();
  return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) {
    return !item.isTensor() || !item.toTensor().defined() || test(item.toTensor());
  });
}

// The kernel of one operator.
class Kernel final : public c10::OperatorKernel {
 public:
  // `passes`: where nothing is recorded, its calls concern pending ops only through the memory of their tensors.
  Kernel(const c10::FunctionSchema& schema, PyObject* op, bool records = true, bool passes = false)
      : op_(Py_NewRef(op)), records_(records), passes_(passes) {
    for (const c10::Argument& argument : schema.arguments()) {
      arguments_.push_back({
          kind_of(argument),
          argument.default_value(),
          checked(PyUnicode_InternFromString(argument.name().c_str())),
      });
      if (!argument.kwarg_only()) positional_ = arguments_.size();
    }
    for (const c10::Argument& result : schema.returns()) types_.push_back(result.real_type());
  }

  // Release the objects that it refers to: for a kernel that is removed.
  void release() {
    if (!Py_IsInitialized()) return;
    Gil gil;
    Py_CLEAR(op_);
    for (Argument& argument : arguments_) Py_CLEAR(argument.name);
  }

  void operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    if (is_ours()) {
      switch (handled(stack)) {
        case Way::recorded: return;
        case Way::passed: {
          torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;  // for the ops that the kernel calls
          handle.redispatchBoxed(keys & BELOW, stack);
          return;
        }
        case Way::retired: handle.redispatchBoxed(keys & BELOW, stack); return;
        case Way::python: break;
      }
    }
    {
      c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
      if (!dispatched(handle, stack)) handle.redispatchBoxed(keys & BELOW, stack);
    }
    retired();
  }

  // Remove the mode after an op outside of blocks that has evaluated all that was pending: in the handler of the op it is
  // off the stack, to which PyTorch returns it afterwards. The autograd engine restores the modes of its caller itself.
  bool retired() {
    if (!is_ours() || torch::autograd::get_current_node()) return false;
    Gil gil;
    CollectorPause pause;
    const int may_be = retire();
    if (may_be < 0) raise();
    return may_be > 0 && !is_ours();
  }

  // PyTorch's own path to Python; false: there is no handler, because another thread has made the pending tensor real
  // meanwhile.
  bool dispatched(const c10::OperatorHandle& handle, Stack* stack) {
    Gil gil;
    CollectorPause pause;
    if (!c10::impl::TorchDispatchModeTLS::any_modes_set() && !any_pending(stack)) return false;
    (*getPyInterpreter())->dispatch(handle, stack);
    return true;
  }

  // Record the call whose arguments are on the stack, and push its results; false: the recorder does not handle it.
  bool recorded(Stack* stack) {
    Gil gil;
    if (!ready()) return false;
    CollectorPause pause;
    return recorded_now(stack);
  }

  // The same, where the recorder is known to be ready.
  bool recorded_now(Stack* stack) {
    const c10::IValue* values = arguments_on(stack);
    THPObjectPtr args(positional(values, nullptr)), kwargs(named(values));
    PyObject* answer;
    {
      torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;  // it is off in its own handler
      answer = record(op_, args.get(), kwargs.get() == nullptr ? Py_None : kwargs.get());
    }
    THPObjectPtr result(checked(answer));
    if (result.get() == MISSED) return false;
    replace(stack, result.get());
    return true;
  }

  // Call the function registered for the operator with the call's dispatch keys and its arguments.
  void call(DispatchKeySet keys, Stack* stack) {
    Gil gil;
    const c10::IValue* values = arguments_on(stack);
    THPObjectPtr first(checked(PyLong_FromUnsignedLongLong(keys.raw_repr())));
    THPObjectPtr args(positional(values, first.get())), kwargs(named(values));
    THPObjectPtr result(checked(PyObject_Call(op_, args.get(), kwargs.get())));
    replace(stack, result.get());
  }

 private:
  // What becomes of a call: it is recorded; it runs as if there were no mode, or the mode is gone; Python decides.
  enum class Way { recorded, passed, retired, python };

  Way handled(Stack* stack) {
    Gil gil;
    CollectorPause pause;
    if (ready()) {
      c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
      return records_ && recorded_now(stack) ? Way::recorded : Way::python;
    }
    if (!passes_ || !outside()) return Way::python;
    if (retired()) return Way::retired;
    return concerns_nothing(stack) ? Way::passed : Way::python;
  }

  // Whether no pending op uses the memory of the call's tensors.
  bool concerns_nothing(Stack* stack) const {
    const c10::IValue* values = arguments_on(stack);
    const auto is_unused = [](const at::Tensor& tensor) {
      if (!is_plain(tensor)) return false;
      THPObjectPtr object(checked(THPVariable_Wrap(tensor)));
      return !used(object.get(), reinterpret_cast<size_t>(storage_of(tensor)), is_foreign(tensor));
    };
    return std::all_of(values, values + arguments_.size(), [&](const c10::IValue& value) {
      return all_tensors(value, is_unused);
    });
  }

  struct Argument {
    Kind kind;
    std::optional<c10::IValue> default_value;
    PyObject* name;

    bool is_default(const c10::IValue& value) const { return default_value && *default_value == value; }
  };

  bool any_pending(Stack* stack) const {
    const c10::IValue* values = arguments_on(stack);
    const auto is_real = [](const at::Tensor& tensor) { return !tensor.key_set().has(DispatchKey::Python); };
    return !std::all_of(values, values + arguments_.size(), [&](const c10::IValue& value) {
      return all_tensors(value, is_real);
    });
  }

  const c10::IValue* arguments_on(Stack* stack) const { return stack->data() + (stack->size() - arguments_.size()); }

  PyObject* positional(const c10::IValue* values, PyObject* first) {
    size_t given = positional_;
    while (given && arguments_[given - 1].is_default(values[given - 1])) --given;
    const size_t before = first == nullptr ? 0 : 1;
    THPObjectPtr args(checked(PyTuple_New(static_cast<Py_ssize_t>(before + given))));
    if (before) PyTuple_SET_ITEM(args.get(), 0, Py_NewRef(first));
    for (size_t at = 0; at < given; ++at) {
      PyTuple_SET_ITEM(args.get(), before + at, checked(to_python(values[at], arguments_[at].kind)));
    }
    return args.release();
  }

  // A dictionary, or null if it would be empty.
  PyObject* named(const c10::IValue* values) {
    THPObjectPtr kwargs;
    for (size_t at = positional_; at < arguments_.size(); ++at) {
      if (arguments_[at].is_default(values[at])) continue;
      if (kwargs.get() == nullptr) kwargs = checked(PyDict_New());
      THPObjectPtr item(checked(to_python(values[at], arguments_[at].kind)));
      if (PyDict_SetItem(kwargs.get(), arguments_[at].name, item.get())) raise();
    }
    return kwargs.release();
  }

  void replace(Stack* stack, PyObject* result) {
    torch::jit::drop(*stack, arguments_.size());
    if (types_.size() == 1) {
      push(stack, result, 0);
    } else if (types_.size() > 1) {
      for (size_t at = 0; at < types_.size(); ++at) {
        THPObjectPtr item(checked(PySequence_GetItem(result, static_cast<Py_ssize_t>(at))));
        push(stack, item.get(), at);
      }
    }
  }

  // `isinstance`, which calls the metaclass first.
  static bool is_tensor(PyObject* object) {
    auto* cls = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    return Py_TYPE(object) == cls || PyType_IsSubtype(Py_TYPE(object), cls);
  }

  void push(Stack* stack, PyObject* result, size_t at) {
    if (is_tensor(result)) {
      stack->emplace_back(THPVariable_Unpack(result));
    } else {
      stack->push_back(torch::jit::toIValue(result, types_[at]));
    }
  }

  PyObject* op_;
  bool records_, passes_;
  size_t positional_ = 0;
  std::vector<Argument> arguments_;
  std::vector<c10::TypePtr> types_;
};

// The kernel of an operator that is not part of the user's program: a mark in a profiler's trace.
struct Mark final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    if (is_ours()) {
      handle.redispatchBoxed(keys & BELOW, stack);
    } else {
      (*getPyInterpreter())->dispatch(handle, stack);
    }
  }
};

// A composite operator, which records what eager mode would run with a Python kernel if `is_special` says so; otherwise
// PyTorch's own kernel is next, without a check in Python.
class Composite final : public c10::OperatorKernel {
 public:
  using Test = bool (*)(const c10::IValue* arguments);

  Composite(const c10::FunctionSchema& schema, Test is_special, PyObject* kernel)
      : caller_(schema, kernel), is_special_(is_special) {}
  ~Composite() override { caller_.release(); }

  void operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    if (is_special_(stack->data() + (stack->size() - handle.schema().arguments().size()))) {
      caller_.call(keys, stack);
      return;
    }
    at::impl::MaybeSetTLSOnEntryGuard guard;
    handle.redispatchBoxed(keys & AFTER_SNAPSHOT, stack);
  }

 private:
  Kernel caller_;
  Test is_special_;
};

bool adds_a_bias_in_place(const c10::IValue* arguments) {
  const at::Tensor& image = arguments[0].toTensor();
  return !is_symbolic(image) && !arguments[2].isNone() && arguments[2].toTensor().defined() &&
      image.layout() == c10::kStrided && image.dim() != 2 && !image.is_contiguous();
}

bool has_one_matrix_for_a_batch(const c10::IValue* arguments) {
  const at::Tensor &left = arguments[0].toTensor(), &right = arguments[1].toTensor();
  return !is_symbolic(left) && !is_symbolic(right) && left.dim() == 3 && right.dim() == 3 && right.size(0) == 1;
}

// Whether tensors may have forward-mode derivatives: PyTorch has one level of them.
bool may_have_tangents(const c10::IValue*) {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

const std::unordered_map<std::string, Composite::Test> TESTS = {
    {"linear", adds_a_bias_in_place},
    {"matmul", has_one_matrix_for_a_batch},
    {"_batch_norm_with_update", may_have_tangents},
    {"_native_batch_norm_legit", may_have_tangents},
    {"native_batch_norm", may_have_tangents},
    {"native_group_norm", may_have_tangents},
    {"native_layer_norm", may_have_tangents},
    {"prod", may_have_tangents},
    {"prod.dim_int", may_have_tangents},
};

// --- tensors without memory ------------------------------------------------------------

Kernel* detach = nullptr;

// Called with a pending tensor whose memory is about to be read or written without the dispatcher.
PyObject* before_access = nullptr;
thread_local bool at_access = false;

// Whether a profiler is on; up to PyTorch 2.13, one function checks both this thread and all threads.
template <typename State>
auto is_profiling(int) -> decltype(State::getTLS() != nullptr) {
  return State::getTLS() != nullptr || State::getGlobal() != nullptr;
}

template <typename State>
bool is_profiling(long) {
  return State::get() != nullptr;
}

// Whether a profiler asks, judged by the return address: during the call of an op, it notes the addresses of the op's
// arguments, but does not access the memory.
bool is_profiler(const void* place) {
#if defined(__GNUC__) && !defined(_WIN32)
  if (!is_profiling<torch::profiler::impl::ProfilerStateBase>(0)) return false;
  thread_local std::unordered_map<const void*, bool> known;
  const auto [found, is_new] = known.emplace(place, false);
  Dl_info where{};
  if (is_new && dladdr(place, &where) != 0 && where.dli_sname != nullptr) {
    found->second = std::strstr(where.dli_sname, "RawTensorMetadata") != nullptr;
  }
  return found->second;
#else
  return false;
#endif
}

#if defined(__GNUC__)
#define ASKED_FROM __builtin_return_address(0)
#else
#define ASKED_FROM nullptr
#endif

// A pending tensor. Autograd detaches the results that it saves with this method, without the dispatcher.
struct Pending final : c10::TensorImpl {
  using c10::TensorImpl::TensorImpl;

  // C++ code calls this before it takes a tensor's address, and rarely otherwise: a pending tensor becomes real now.
  bool has_storage() const override {
    // A tensor on an absent GPU (to C++, a meta tensor) has no address.
    if (C10_UNLIKELY(before_access != nullptr && numel_ != 0 && key_set_.has(DispatchKey::Python) && !at_access && !is_meta())) {
      if (!is_profiler(ASKED_FROM)) make_real();
    }
    return static_cast<bool>(storage_);
  }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_metadata_change) const override {
    auto made = recorded(version, allow_metadata_change);
    return made ? made : c10::TensorImpl::shallow_copy_and_detach(version, allow_metadata_change);
  }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_metadata_change) const override {
    auto made = recorded(version, allow_metadata_change);
    return made ? made : c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
  }

 private:
  void make_real() const {
    struct Entered {
      Entered() { at_access = true; }
      ~Entered() { at_access = false; }
    } entered;
    Gil gil;
    THPObjectPtr tensor(checked(THPVariable_Wrap(self())));
    THPObjectPtr nothing(checked(PyObject_CallOneArg(before_access, tensor.get())));
  }

  at::Tensor self() const {
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(const_cast<Pending*>(this)));
  }

  c10::intrusive_ptr<c10::TensorImpl> recorded(const c10::VariableVersion& version, bool allow_metadata_change) const {
    if (detach == nullptr || !is_ours() || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python)) return {};
    Stack stack{self()};
    if (!detach->recorded(&stack)) return {};
    auto made = stack[0].toTensor().getIntrusivePtr();
    if (!made->is_inference()) {
      made->set_version_counter(version);
      made->set_allow_tensor_metadata_change(allow_metadata_change);
    }
    return made;
  }
};

bool sizes(PyObject* tuple, c10::SmallVector<int64_t, 8>& into) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  for (Py_ssize_t at = 0; at < count; ++at) {
    const int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, at));
    if (size == -1 && PyErr_Occurred()) return false;
    into.push_back(size);
  }
  return true;
}

// `torch.Tensor._make_wrapper_subclass` for strided tensors: the same tensor, without parsing arguments.
PyObject* make_wrapper(PyObject* cls, PyObject* shape, PyObject* stride, int64_t offset, PyObject* dtype, PyObject* device) {
  HANDLE_TH_ERRORS
  c10::SmallVector<int64_t, 8> size, strides;
  if (!sizes(shape, size) || !sizes(stride, strides)) return nullptr;
  const c10::Device place = reinterpret_cast<THPDevice*>(device)->device;
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
  const c10::TensorOptions options = c10::TensorOptions().dtype(type).device(place).layout(c10::kStrided);
  const size_t nbytes = at::detail::computeStorageNbytes(size, strides, type.itemsize(), offset);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, nbytes, c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  storage.set_data_ptr_noswap(at::DataPtr{nullptr, place});
  // If it cannot become real (forgotten, or on an absent GPU), taking the address raises an error, instead of
  // returning null.
  storage.unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
  at::Tensor tensor;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    tensor = at::detail::make_tensor<Pending>(
        std::move(storage), DispatchKeySet(options.computeDispatchKey()), type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  }
  PyObject* made = THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(cls));
  if (made != nullptr) tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  return made;
  END_HANDLE_TH_ERRORS
}

// --- PyTorch calls of the recorder --------------------------------------------------------

// These do not call Python; the argument must be a tensor. `recorder.pyx` has the same structure.
struct Quick {
  PyObject* (*make_wrapper)(PyObject*, PyObject*, PyObject*, int64_t, PyObject*, PyObject*);
  size_t (*implementation)(PyObject*);
  size_t (*storage_address)(PyObject*);
  int (*is_inference)(PyObject*);
  int64_t (*fixed_nbytes)(PyObject*);
  int (*calling_node)(uint64_t*);
  uint64_t (*next_sequence)();
  int (*grad_mode)();
  int (*inference_mode)();
  PyObject* (*default_dtype)();
  PyObject* (*alias)(PyObject*);
  int (*is_given)(PyObject*);
  int (*has_layout)(PyObject*, PyObject*, PyObject*, int64_t, PyObject*);
  PyObject* (*number)(PyObject*);
  int (*add_number)(PyObject*, PyObject*);
  PyObject* (*copy_number)(PyObject*, int64_t);
  int (*plain_memory)(PyObject*);
};

const at::Tensor& unpack(PyObject* tensor) { return THPVariable_Unpack(tensor); }

size_t implementation(PyObject* tensor) { return reinterpret_cast<size_t>(unpack(tensor).unsafeGetTensorImpl()); }

// 0 if it has none.
size_t storage_address(PyObject* tensor) {
  const at::Tensor& asked = unpack(tensor);
  if (!asked.has_storage()) return 0;
  return reinterpret_cast<size_t>(asked.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

int is_inference(PyObject* tensor) { return unpack(tensor).is_inference(); }

// The bytes of the storage, if the tensor is a strided tensor that owns plain CPU memory, without conjugate or negative
// bit; -1 otherwise.
int64_t fixed_nbytes(PyObject* tensor) {
  const at::Tensor& asked = unpack(tensor);
  const int64_t nbytes = asked.device().is_cpu() ? plain_nbytes(asked) : -1;
  if (nbytes <= 0) return nbytes;
  const c10::StorageImpl* storage = storage_of(asked);
  const bool own = storage->resizable() && storage->data_ptr().get_deleter() == c10::GetAllocator(c10::kCPU)->raw_deleter();
  return own ? nbytes : -1;
}

// Whether an autograd node is calling, and its sequence number.
int calling_node(uint64_t* sequence) {
  const auto node = torch::autograd::get_current_node();  // the pointer type depends on the version
  if (!node) return 0;
  *sequence = node->sequence_nr();
  return 1;
}

// The sequence number of the next node.
uint64_t next_sequence() { return at::sequence_number::peek(); }

int grad_mode() { return c10::GradMode::is_enabled(); }

int inference_mode() { return c10::InferenceMode::is_enabled(); }

PyObject* default_dtype() { return reference(torch::getTHPDtype(c10::get_default_dtype_as_scalartype())); }

// `private_api.alias`.
PyObject* alias(PyObject* tensor) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(unpack(tensor).variable_data());
  END_HANDLE_TH_ERRORS
}

// `constant_folding.is_given`.
int is_given(PyObject* tensor) {
  const at::Tensor& asked = unpack(tensor);
  return asked.device().is_cpu() && !asked.requires_grad() &&
      (asked.numel() <= 1 || !(asked.is_floating_point() || asked.is_complex()));
}

bool are(c10::IntArrayRef numbers, PyObject* tuple) {
  if (PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(numbers.size())) return false;
  for (size_t at = 0; at < numbers.size(); ++at) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, at)) != numbers[at]) return false;
  }
  return true;
}

// Whether a strided tensor has this shape, these strides (in elements), offset and dtype.
int has_layout(PyObject* tensor, PyObject* shape, PyObject* stride, int64_t offset, PyObject* dtype) {
  const at::Tensor& asked = unpack(tensor);
  return asked.scalar_type() == reinterpret_cast<THPDtype*>(dtype)->scalar_type && asked.storage_offset() == offset &&
      are(asked.sizes(), shape) && are(asked.strides(), stride);
}

// The number in a CPU tensor, as its kernel reads it; a new reference.
PyObject* number(PyObject* tensor) {
  HANDLE_TH_ERRORS
  constexpr DispatchKeySet SPECIAL({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
  const at::Tensor& asked = unpack(tensor);
  if (!asked.device().is_cpu() || asked.key_set().has_any(SPECIAL)) return Py_NewRef(Py_None);
  at::AutoDispatchBelowADInplaceOrView guard;
  return torch::jit::toPyObject(at::_local_scalar_dense(asked)).release().ptr();
  END_HANDLE_TH_ERRORS
}

// Adds an int or a float to a tensor in place, below autograd, like `tensor.add_(number)`; 0 with an exception.
int add_number(PyObject* tensor, PyObject* number) {
  HANDLE_TH_ERRORS
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor changed = unpack(tensor);
  changed.add_(torch::jit::toIValue(number, c10::NumberType::get()).toScalar());
  return 1;
  END_HANDLE_TH_ERRORS_RET(0)
}

// A copy of a tensor with one element that is all of its storage of `nbytes`, past autograd; None of any other.
PyObject* copy_number(PyObject* tensor, int64_t nbytes) {
  HANDLE_TH_ERRORS
  const at::Tensor& asked = unpack(tensor);
  if (asked.numel() != 1 || static_cast<int64_t>(asked.itemsize()) != nbytes) return Py_NewRef(Py_None);
  at::AutoDispatchBelowADInplaceOrView guard;
  return THPVariable_Wrap(asked.clone());
  END_HANDLE_TH_ERRORS
}

// 0 for a tensor that needs more than its kernel; 1, or 2 if other storages may overlap its memory.
int plain_memory(PyObject* tensor) {
  const at::Tensor& asked = unpack(tensor);
  return is_plain(asked) ? 1 + is_foreign(asked) : 0;
}

const Quick QUICK = {
    make_wrapper,
    implementation,
    storage_address,
    is_inference,
    fixed_nbytes,
    calling_node,
    next_sequence,
    grad_mode,
    inference_mode,
    default_dtype,
    alias,
    is_given,
    has_layout,
    number,
    add_number,
    copy_number,
    plain_memory,
};

// --- functions that read memory -------------------------------------------------------------

constexpr size_t MOST_FUNCTIONS = 8;
constexpr int KINDS = METH_VARARGS | METH_KEYWORDS | METH_FASTCALL | METH_NOARGS | METH_O;

// Called with the number of the function, its positional arguments, and its keyword arguments (or None).
PyObject* before_call = nullptr;
std::vector<std::pair<PyMethodDef*, PyCFunctionWithKeywords>> watched_functions;
std::vector<PyTypeObject*> watched_types;
newfunc original_new = nullptr;

bool announced(size_t number, PyObject* args, PyObject* kwargs) {
  THPObjectPtr nothing(
      PyObject_CallFunction(before_call, "nOO", static_cast<Py_ssize_t>(number), args, kwargs == nullptr ? Py_None : kwargs));
  return nothing.get() != nullptr;
}

template <size_t N>
PyObject* call_watched(PyObject* self, PyObject* args, PyObject* kwargs) {
  const PyCFunctionWithKeywords original = watched_functions[N].second;
  return announced(N, args, kwargs) ? original(self, args, kwargs) : nullptr;
}

template <size_t... N>
std::array<PyCFunctionWithKeywords, sizeof...(N)> watchers(std::index_sequence<N...>) {
  return {call_watched<N>...};
}

PyObject* new_watched(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  const newfunc original = original_new;
  return announced(MOST_FUNCTIONS, args, kwargs) ? original(type, args, kwargs) : nullptr;
}

PyObject* watch_calls(PyObject*, PyObject* args) {
  static const auto CALLED = watchers(std::make_index_sequence<MOST_FUNCTIONS>());
  PyObject *functions, *types, *before;
  if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &functions, &PyTuple_Type, &types, &before)) return nullptr;
  for (const auto& [definition, original] : watched_functions) {
    definition->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(original));
  }
  for (PyTypeObject* type : watched_types) type->tp_new = original_new;
  watched_types.clear();
  Py_CLEAR(before_call);
  if (before == Py_None) Py_RETURN_NONE;
  before_call = Py_NewRef(before);
  watched_functions.clear();
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(functions); ++at) {
    PyObject* function = PyTuple_GET_ITEM(functions, at);
    if (!PyCFunction_Check(function) || watched_functions.size() == MOST_FUNCTIONS) continue;
    PyMethodDef* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    if ((definition->ml_flags & KINDS) != (METH_VARARGS | METH_KEYWORDS)) continue;
    const PyCFunctionWithKeywords called = CALLED[watched_functions.size()];
    watched_functions.emplace_back(
        definition, reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(definition->ml_meth)));
    definition->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called));
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(types); ++at) {
    auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, at));
    if (original_new == nullptr) original_new = type->tp_new;
    if (type->tp_new != original_new) continue;  // shared by all of them
    type->tp_new = new_watched;
    watched_types.push_back(type);
  }
  Py_RETURN_NONE;
}

// --- Python interface ----------------------------------------------------------------------

constexpr const char* READY = "lazyviz.ready";
constexpr const char* RECORD = "lazyviz.record";
constexpr const char* OUTSIDE = "lazyviz.outside";
constexpr const char* USED = "lazyviz.used";
constexpr const char* RETIRE = "lazyviz.retire";
constexpr const char* QUICKLY = "lazyviz.quick";
constexpr const char* OVERRIDE = "lazyviz.override";

PyObject* connect(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *ready_capsule, *record_capsule, *outside_capsule, *used_capsule, *retire_capsule, *missed, *type;
  if (!PyArg_ParseTuple(args, "OOOOOOO!", &ready_capsule, &record_capsule, &outside_capsule, &used_capsule, &retire_capsule,
                        &missed, &PyType_Type, &type)) {
    return nullptr;
  }
  void* is_ready = PyCapsule_GetPointer(ready_capsule, READY);
  void* function = PyCapsule_GetPointer(record_capsule, RECORD);
  void* is_outside = PyCapsule_GetPointer(outside_capsule, OUTSIDE);
  void* is_used = PyCapsule_GetPointer(used_capsule, USED);
  void* to_retire = PyCapsule_GetPointer(retire_capsule, RETIRE);
  for (void* pointer : {is_ready, function, is_outside, is_used, to_retire}) {
    if (pointer == nullptr) return nullptr;
  }
  ready = reinterpret_cast<Ready>(is_ready);
  record = reinterpret_cast<Record>(function);
  outside = reinterpret_cast<Outside>(is_outside);
  used = reinterpret_cast<Used>(is_used);
  retire = reinterpret_cast<Retire>(to_retire);
  MISSED = Py_NewRef(missed);
  mode_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  return PyCapsule_New(const_cast<Quick*>(&QUICK), QUICKLY, nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* take(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject* op;
  int records, passes;
  if (!PyArg_ParseTuple(args, "ssOpp", &name, &overload, &op, &records, &passes)) return nullptr;
  static torch::Library& at_the_mode = library("aten", DispatchKey::Python);
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const std::string full = c10::toString(handle.operator_name());
  auto kernel = std::make_unique<Kernel>(handle.schema(), op, records, passes);
  if (full == "aten::detach") detach = kernel.get();
  at_the_mode.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* pass_marks(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  if (!PyArg_ParseTuple(args, "ss", &name, &overload)) return nullptr;
  static torch::Library& marks = library("profiler", DispatchKey::Python);
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  marks.impl(c10::toString(handle.operator_name()).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Mark>()));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* override_composite(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name;
  PyObject* kernel;
  if (!PyArg_ParseTuple(args, "sO", &name, &kernel)) return nullptr;
  const auto test = TESTS.find(name);
  if (test == TESTS.end()) Py_RETURN_NONE;
  const char* overload = std::strchr(name, '.');
  const std::string base = std::string("aten::") + (overload == nullptr ? name : std::string(name, overload));
  const c10::OperatorHandle handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(base.c_str(), overload == nullptr ? "" : overload + 1);
  auto* made = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PythonTLSSnapshot, __FILE__, __LINE__);
  made->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Composite>(handle.schema(), test->second, kernel)));
  return PyCapsule_New(made, OVERRIDE, [](PyObject* capsule) {
    delete static_cast<torch::Library*>(PyCapsule_GetPointer(capsule, OVERRIDE));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* make_wrapper(PyObject*, PyObject* args) {
  PyObject *cls, *shape, *stride, *dtype, *device;
  Py_ssize_t offset;
  if (!PyArg_ParseTuple(args, "O!O!O!nOO", &PyType_Type, &cls, &PyTuple_Type, &shape, &PyTuple_Type, &stride, &offset, &dtype, &device)) {
    return nullptr;
  }
  return make_wrapper(cls, shape, stride, offset, dtype, device);
}

PyObject* watch_access(PyObject*, PyObject* function) {
  PyObject* old = before_access;
  before_access = function == Py_None ? nullptr : Py_NewRef(function);
  Py_XDECREF(old);
  Py_RETURN_NONE;
}

PyObject* use(PyObject*, PyObject* on) {
  active = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"connect", connect, METH_VARARGS,
     "connect(ready, record, outside, used, retire, missed, mode_type): the compiled recorder's functions; returns what it "
     "asks of tensors."},
    {"take", take, METH_VARARGS,
     "take(name, overload_name, op, records, passes): calls of this ATen operator are offered to the recorder, and outside "
     "of blocks go directly to their kernel where no pending op uses their tensors."},
    {"pass_marks", pass_marks, METH_VARARGS, "pass_marks(name, overload_name): calls of this operator are none of the recorder's."},
    {"override_composite", override_composite, METH_VARARGS,
     "override_composite(name, kernel): `kernel(keys, ...)` is called for the calls of the composite that are special, "
     "as long as what is returned exists; None: nothing is known of it."},
    {"make_wrapper", static_cast<PyCFunction>(make_wrapper), METH_VARARGS,
     "make_wrapper(cls, shape, stride, offset, dtype, device): a strided pending tensor of class `cls`."},
    {"watch_access", watch_access, METH_O,
     "watch_access(function): called with each pending tensor whose memory C++ code is about to use; None: nobody is."},
    {"watch_calls", watch_calls, METH_VARARGS,
     "watch_calls(functions, types, before): `before(number, args, kwargs)` is called before these builtin functions of "
     "PyTorch, and its legacy types, whoever holds them; None: as they were."},
    {"use", use, METH_O, "use(on): whether ops are offered at all."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.dispatch", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_dispatch() {
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
