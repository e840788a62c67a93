// The way from PyTorch's dispatcher to the recorder, past PyTorch's own way into Python.
//
// An op that a dispatch mode is to see goes through a good deal of Python on its way there: its types are
// collected, the mode is looked up and called as a method, arguments and result are converted by general
// code.  For an op that the compiled recorder (`_accelerator.pyx`) takes, a kernel at the mode's own
// dispatch key does what is needed of that.  Whatever the recorder does not take goes on as if the kernel was
// not there; so does every op while no recorder is active.
//
// Compiled against the installed PyTorch; lazyviz works the same without it.

#include <torch/csrc/python_headers.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torch/library.h>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;
using torch::jit::Stack;

// Of the compiled recorder: whether it records now, and an op call (`MISSED`: it is not for it).
using Ready = int (*)();
using Record = PyObject* (*)(PyObject* op, PyObject* args, PyObject* kwargs);

Ready ready = nullptr;
Record record = nullptr;
PyObject* MISSED = nullptr;
PyTypeObject* mode_type = nullptr;
bool active = false;
torch::Library* library = nullptr;  // never freed: kernels outlive the interpreter's modules

// What stands above the mode's key is not to be passed again, as in PyTorch's own kernel for it.
constexpr DispatchKeySet ABOVE = DispatchKeySet(DispatchKeySet::FULL) ^
    (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) | DispatchKeySet(DispatchKey::Python));

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct Reference {
  PyObject* held = nullptr;
  explicit Reference(PyObject* object) : held(object) {}
  ~Reference() { Py_XDECREF(held); }
  Reference(const Reference&) = delete;
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

// What an integer stands for.
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

// A value as Python sees it; what is not frequent by PyTorch's own conversion.
PyObject* to_python(const c10::IValue& value, Kind kind) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) return THPVariable_Wrap(tensor);
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

// The kernel of one operator.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const c10::FunctionSchema& schema, PyObject* op) : op_(Py_NewRef(op)), returns_(schema.returns().size()) {
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

  void operator()(const c10::OperatorHandle& handle, DispatchKeySet, Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    if (!active || TorchDispatchModeTLS::stack_len() != 1 || !recorded(stack)) {
      (*getPyInterpreter())->dispatch(handle, stack);
    }
  }

 private:
  struct Argument {
    Kind kind;
    std::optional<c10::IValue> default_value;
    PyObject* name;

    bool is_default(const c10::IValue& value) const { return default_value && *default_value == value; }
  };

  bool recorded(Stack* stack) {
    Gil gil;
    if (Py_TYPE(TorchDispatchModeTLS::get_stack_at(0)->ptr(getPyInterpreter())) != mode_type || !ready()) return false;
    const size_t count = arguments_.size();
    const c10::IValue* values = stack->data() + (stack->size() - count);
    size_t given = positional_;
    while (given && arguments_[given - 1].is_default(values[given - 1])) --given;
    Reference args(checked(PyTuple_New(static_cast<Py_ssize_t>(given))));
    for (size_t at = 0; at < given; ++at) {
      PyTuple_SET_ITEM(args.held, at, checked(to_python(values[at], arguments_[at].kind)));
    }
    Reference kwargs(nullptr);
    for (size_t at = positional_; at < count; ++at) {
      if (arguments_[at].is_default(values[at])) continue;
      if (kwargs.held == nullptr) kwargs.held = checked(PyDict_New());
      Reference item(checked(to_python(values[at], arguments_[at].kind)));
      if (PyDict_SetItem(kwargs.held, arguments_[at].name, item.held)) raise();
    }
    PyObject* answer;
    {
      torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;  // it is off in its own handler
      answer = record(op_, args.held, kwargs.held == nullptr ? Py_None : kwargs.held);
    }
    Reference result(checked(answer));
    if (result.held == MISSED) return false;
    torch::jit::drop(*stack, count);
    if (returns_ == 1) {
      push(stack, result.held, 0);
    } else if (returns_ > 1) {
      for (size_t at = 0; at < returns_; ++at) {
        Reference item(checked(PySequence_GetItem(result.held, static_cast<Py_ssize_t>(at))));
        push(stack, item.held, at);
      }
    }
    return true;
  }

  void push(Stack* stack, PyObject* result, size_t at) {
    if (THPVariable_Check(result)) {
      stack->emplace_back(THPVariable_Unpack(result));
    } else {
      stack->push_back(torch::jit::toIValue(result, types_[at]));
    }
  }

  PyObject* op_;
  size_t returns_;
  size_t positional_ = 0;
  std::vector<Argument> arguments_;
  std::vector<c10::TypePtr> types_;
};

// --- tensors without memory ------------------------------------------------------------

bool sizes(PyObject* tuple, c10::SmallVector<int64_t, 8>& into) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  for (Py_ssize_t at = 0; at < count; ++at) {
    const int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, at));
    if (size == -1 && PyErr_Occurred()) return false;
    into.push_back(size);
  }
  return true;
}

// `torch.Tensor._make_wrapper_subclass` for strided tensors: the same tensor, without a look at its arguments.
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
  at::Tensor tensor;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(options.computeDispatchKey()), type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  }
  PyObject* made = THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(cls));
  if (made != nullptr) tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  return made;
  END_HANDLE_TH_ERRORS
}

// --- for Python --------------------------------------------------------------------------

constexpr const char* READY = "lazyviz.ready";
constexpr const char* RECORD = "lazyviz.record";
constexpr const char* MAKE_WRAPPER = "lazyviz.make_wrapper";

PyObject* connect(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *ready_capsule, *record_capsule, *missed, *type;
  if (!PyArg_ParseTuple(args, "OOOO!", &ready_capsule, &record_capsule, &missed, &PyType_Type, &type)) return nullptr;
  void* is_ready = PyCapsule_GetPointer(ready_capsule, READY);
  void* function = PyCapsule_GetPointer(record_capsule, RECORD);
  if (is_ready == nullptr || function == nullptr) return nullptr;
  ready = reinterpret_cast<Ready>(is_ready);
  record = reinterpret_cast<Record>(function);
  MISSED = Py_NewRef(missed);
  mode_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::Python, __FILE__, __LINE__);
  return PyCapsule_New(reinterpret_cast<void*>(&make_wrapper), MAKE_WRAPPER, nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* take(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject* op;
  if (!PyArg_ParseTuple(args, "ssO", &name, &overload, &op)) return nullptr;
  const c10::OperatorHandle handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  library->impl(
      c10::toString(handle.operator_name()).c_str(),
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(handle.schema(), op)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* use(PyObject*, PyObject* on) {
  active = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"connect", connect, METH_VARARGS,
     "connect(ready, record, missed, mode_type): the compiled recorder's functions; returns make_wrapper for it."},
    {"take", take, METH_VARARGS, "take(name, overload_name, op): calls of this ATen operator are offered to the recorder."},
    {"use", use, METH_O, "use(on): whether ops are offered at all."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.record._dispatch", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit__dispatch() {
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
