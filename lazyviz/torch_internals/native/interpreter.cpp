// Interpreter for a subgraph as a program of operator calls, which execute/replay/native_codegen.py creates and
// program_cache.py runs.
//
// It does the same as the Python code of execute/replay/python_codegen.py, in the same order. An operator is called
// through the dispatcher with its arguments on a stack, as in `torch.ops`. Arguments that are the same in each run are
// converted once, tensors stay in slots, and the Python interpreter is only needed for what is noted after each node.

#include <torch/csrc/python_headers.h>

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr int32_t NONE = -1;
PyObject* Refused = nullptr;  // raised for what cannot be represented here
PyTypeObject* Memory = nullptr;

struct Names {  // interned
  PyObject *tensor, *memory, *next, *value, *of_class, *is_parameter, *running, *active_thread, *generator, *state;
} names;

struct Classes {  // set by `connect`
  PyObject *tensor = nullptr, *parameter = nullptr;
  PyObject* class_setter = nullptr;  // the descriptor `object.__class__`
  PyObject* stand_ins = nullptr;  // a dictionary that is not empty once a block was recorded for an absent GPU
  c10::DispatchKeySet above, lazy;  // the keys above kernels, and those that kernels see
} classes;

// The Python interpreter (GIL), which this thread releases while kernels run, until Python objects are needed.
class Interpreter {
 public:
  Interpreter() = default;
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  ~Interpreter() { take(); }

  bool is_ours() const { return state == nullptr; }
  void take() {
    if (state != nullptr) PyEval_RestoreThread(std::exchange(state, nullptr));
  }
  void leave() {
    if (state == nullptr) state = PyEval_SaveThread();
  }

 private:
  PyThreadState* state = nullptr;
};

using Clock = std::chrono::steady_clock;
constexpr auto PATIENCE = std::chrono::milliseconds(1);  // between two checks for signals

enum class Kind : uint8_t {
  Constant,
  Copy,  // a list that an operator might keep or change
  Number,   // in place of a tensor
  Slot,     // a tensor
  Slots,    // a list of them
  Entries,  // a list in which some may be None
  Scalar,   // differs from run to run
};

template <typename Item>
struct Part {  // a part of a list for all nodes, stored contiguously because a run reads it from beginning to end
  const Item *first, *last;
  const Item* begin() const { return first; }
  const Item* end() const { return last; }
};

template <typename Item>
struct Range {
  int32_t start = 0, stop = 0;
  Part<Item> of(const std::vector<Item>& items) const { return {items.data() + start, items.data() + stop}; }
};

template <typename Item>
Range<Item> added(std::vector<Item>& items, std::vector<Item>&& more) {
  auto start = static_cast<int32_t>(items.size());
  for (Item& item : more) items.push_back(std::move(item));
  return {start, static_cast<int32_t>(items.size())};
}

struct Argument {
  Kind kind = Kind::Constant;
  bool optional = false;  // None for a tensor that a kernel has omitted
  int32_t number = NONE;  // number of a slot, or among the scalars
  Range<int32_t> slots;
  IValue constant;
};

struct Result {
  int32_t index, slot, user, later;
};

struct Node {
  explicit Node(c10::OperatorHandle op) : op(op) {}
  c10::OperatorHandle op;
  int32_t draw = NONE;
  int32_t generator = NONE;  // the position of the argument that is a generator
  std::optional<c10::OperatorHandle> with_generator;  // the overload with that argument, if `op` has none
  int8_t grad_mode = NONE;
  bool list = false;  // its results are in one list
  bool refused = false;  // its writes cannot be rolled back if it fails
  Range<Argument> arguments;
  Range<Result> results;
  Range<int32_t> gone;  // slots that are not needed after it
  Range<int32_t> copied;  // slots that are restored if it fails
};

struct Lines {
  std::vector<int32_t> given;  // slots of the outside tensors
  std::vector<Node> nodes;
  std::vector<Argument> arguments;
  std::vector<Result> results;
  std::vector<int32_t> slots;  // slots of tensor lists, and of freed tensors
};

struct Program {
  PyObject_HEAD
  PyObject *give, *state_of;  // functions
  size_t size;  // slots
  Lines* lines;
};

// ---- Creating a program

[[noreturn]] void refuse(const std::string& why) {
  PyErr_SetString(Refused, why);
  throw python_error();
}

int32_t number(PyObject* item) {
  long result = PyLong_AsLong(item);
  if (result == -1 && PyErr_Occurred()) throw python_error();
  if (result != static_cast<int32_t>(result)) refuse("a number that is too large");
  return static_cast<int32_t>(result);
}

PyObject* entry(PyObject* tuple, Py_ssize_t at) {
  PyObject* item = PyTuple_GetItem(tuple, at);
  if (item == nullptr) throw python_error();
  return item;
}

std::vector<int32_t> numbers(PyObject* tuple) {
  std::vector<int32_t> result;
  for (Py_ssize_t at = 0; at < PyTuple_Size(tuple); at++) result.push_back(number(entry(tuple, at)));
  return result;
}

c10::TypePtr without_optional(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type;
}

bool is_tensor(const c10::Type& type) { return type.kind() == c10::TypeKind::TensorType; }

IValue converted(const c10::FunctionSchema& schema, size_t position, PyObject* item) {
  torch::jit::ToIValueAllowNumbersAsTensors numbers_too(true);
  return torch::jit::argumentToIValue(schema, position, item);
}

// The same for a value that is usually a float.
IValue converted_number(const c10::FunctionSchema& schema, size_t position, PyObject* item) {
  if (PyFloat_CheckExact(item)) {
    double value = PyFloat_AS_DOUBLE(item);
    switch (schema.arguments()[position].real_type()->kind()) {
      case c10::TypeKind::NumberType:
      case c10::TypeKind::FloatType:
        return value;
      case c10::TypeKind::TensorType: {
        at::Tensor tensor = at::scalar_to_tensor(value);
        tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
        return tensor;
      }
      default:
        break;
    }
  }
  return converted(schema, position, item);
}

// Whether no result shares the memory of the argument at `position`, which is a number.
bool is_only_read(const c10::OperatorHandle& op, size_t position) {
  return position > 0 && op.hasTag(at::Tag::pointwise) &&
      op.schema().arguments()[position].alias_info() == nullptr;
}

void set_constant(const c10::OperatorHandle& op, size_t position, PyObject* item, Argument& into) {
  const auto& schema = op.schema();
  into.constant = converted(schema, position, item);
  if (into.constant.isTensor() && into.constant.toTensor().defined()) {
    if (THPVariable_Check(item)) refuse("a tensor that is a constant");
    if (!is_only_read(op, position)) into.kind = Kind::Number;
  } else if (into.constant.isList()) {
    for (const IValue& inside : into.constant.toListRef()) {
      if (inside.isTensor() && inside.toTensor().defined()) refuse("a list of tensors that are constants");
    }
    if (schema.operator_name().getNamespace() != std::optional<std::string_view>("aten")) into.kind = Kind::Copy;
  }
}

void set_slots(const c10::Argument& declared, PyObject* given, Argument& into, Lines& lines) {
  auto list = without_optional(declared)->cast<c10::ListType>();
  if (!list) refuse("tensors in something that is no list");
  const auto& element = list->getElementType();
  auto optional = element->cast<c10::OptionalType>();
  if (!is_tensor(optional ? *optional->getElementType() : *element)) refuse("tensors in a list of others");
  into.kind = optional ? Kind::Entries : Kind::Slots;
  into.slots = added(lines.slots, numbers(given));
  for (int32_t slot : into.slots.of(lines.slots)) {
    if (slot == NONE && !optional) refuse("None in a list of tensors");
  }
}

// `arguments`: one tuple each of (position or name, kind, content).
void set_arguments(PyObject* given, Node& node, Lines& lines) {
  const auto& schema = node.op.schema();
  const auto& declared = schema.arguments();
  std::vector<bool> is_given(declared.size());
  std::vector<Argument> arguments(declared.size());
  for (Py_ssize_t at = 0; at < PyTuple_Size(given); at++) {
    PyObject* triple = entry(given, at);
    PyObject *place = entry(triple, 0), *item = entry(triple, 2);
    size_t position;
    if (PyUnicode_Check(place)) {
      auto found = schema.argumentIndexWithName(THPUtils_unpackString(place));
      if (!found) refuse("an argument that the operator does not have");
      position = *found;
    } else {
      position = number(place);
      if (position >= declared.size()) refuse("more arguments than the operator has");
    }
    Argument& argument = arguments[position];
    is_given[position] = true;
    switch (number(entry(triple, 1))) {
      case 0:
        set_constant(node.op, position, item, argument);
        break;
      case 1:
        if (!is_tensor(*without_optional(declared[position]))) refuse("a tensor in place of something else");
        argument.kind = Kind::Slot;
        argument.optional = !is_tensor(*declared[position].real_type());
        argument.number = number(item);
        break;
      case 2:
        set_slots(declared[position], item, argument, lines);
        break;
      default:
        argument.kind = Kind::Scalar;
        argument.number = number(item);
    }
  }
  for (size_t position = 0; position < declared.size(); position++) {
    if (is_given[position]) continue;
    if (!declared[position].default_value()) refuse("an argument is missing");
    arguments[position].constant = *declared[position].default_value();
  }
  node.arguments = added(lines.arguments, std::move(arguments));
}

// `results`: one tuple each of (index, slot, number among the users, number among those for later).
void set_results(PyObject* described, Node& node, Lines& lines) {
  const auto& returns = node.op.schema().returns();
  std::vector<Result> results;
  if (PyTuple_Size(described) && returns.size() == 1) {
    if (auto list = returns[0].real_type()->cast<c10::ListType>()) {
      if (!is_tensor(*list->getElementType())) refuse("a list of something else than tensors");
      node.list = true;
    }
  }
  for (Py_ssize_t at = 0; at < PyTuple_Size(described); at++) {
    auto given = numbers(entry(described, at));
    if (given.size() != 4) refuse("internal error: not what a result is described by");
    if (!node.list) {
      if (given[0] < 0 || static_cast<size_t>(given[0]) >= returns.size()) refuse("a result that is not there");
      if (!is_tensor(*without_optional(returns[given[0]]))) refuse("a result that is no tensor");
    }
    results.push_back({given[0], given[1], given[2], given[3]});
  }
  node.results = added(lines.results, std::move(results));
}

int32_t generator_position(const c10::FunctionSchema& schema) {
  const auto& declared = schema.arguments();
  for (size_t at = 0; at < declared.size(); at++) {
    if (without_optional(declared[at])->kind() == c10::TypeKind::GeneratorType) return static_cast<int32_t>(at);
  }
  return NONE;
}

// The position of the operator's generator argument, or the overload that has one with otherwise the same arguments.
void find_generator(Node& node) {
  node.generator = generator_position(node.op.schema());
  if (node.generator != NONE) return;
  const auto& own = node.op.schema().arguments();
  std::string overload = node.op.schema().overload_name();
  for (const std::string& name : {overload.empty() ? "generator" : overload + "_generator", std::string("low_generator_dtype")}) {
    auto other = c10::Dispatcher::singleton().findSchema({node.op.schema().name(), name});
    int32_t position = other ? generator_position(other->schema()) : NONE;
    if (position == NONE || other->schema().arguments().size() != own.size() + 1) continue;
    bool is_alike = true;
    for (size_t at = 0; at < own.size(); at++) {
      const auto& its = other->schema().arguments()[at + (at >= static_cast<size_t>(position))];
      is_alike = is_alike && its.name() == own[at].name() && *its.real_type() == *own[at].real_type();
    }
    if (!is_alike) continue;
    node.generator = position;
    node.with_generator = other;
    return;
  }
}

// `described`: (name, name of the overload, grad mode to set, number of the draw, arguments, results, gone,
// copied, refused).
Node node_of(PyObject* described, Lines& lines) {
  auto text = [&](Py_ssize_t at) { return THPUtils_unpackString(entry(described, at)); };
  auto op = c10::Dispatcher::singleton().findSchema({text(0), text(1)});
  if (!op) refuse("an operator that the dispatcher does not have");
  Node node(*op);
  node.grad_mode = static_cast<int8_t>(number(entry(described, 2)));
  node.draw = number(entry(described, 3));
  if (node.draw != NONE) find_generator(node);
  set_arguments(entry(described, 4), node, lines);
  set_results(entry(described, 5), node, lines);
  node.gone = added(lines.slots, numbers(entry(described, 6)));
  node.copied = added(lines.slots, numbers(entry(described, 7)));
  node.refused = number(entry(described, 8)) != 0;
  return node;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t size;
  PyObject *given, *nodes, *give, *state_of;
  if (!PyArg_ParseTuple(
          args, "nO!O!OO", &size, &PyTuple_Type, &given, &PyList_Type, &nodes, &give, &state_of)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  auto lines = std::make_unique<Lines>();
  lines->given = numbers(given);
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(nodes); at++) {
    try {
      lines->nodes.push_back(node_of(PyList_GET_ITEM(nodes, at), *lines));
    } catch (const torch::jit::schema_match_error& error) {
      refuse(error.what());
    }
  }
  auto* self = reinterpret_cast<Program*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->give = Py_NewRef(give);
  self->state_of = Py_NewRef(state_of);
  self->size = static_cast<size_t>(size);
  self->lines = lines.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Program*>(object);
  PyTypeObject* type = Py_TYPE(object);
  delete self->lines;
  Py_XDECREF(self->give);
  Py_XDECREF(self->state_of);
  type->tp_free(object);
  Py_DECREF(type);
}

// ---- Making the user's tensors real

struct MemoryRef {  // as _torch.MemoryRef
  PyObject_HEAD
  c10::weak_intrusive_ptr<c10::StorageImpl>* memory;
};

PyObject* memory_of(const at::Tensor& tensor) {
  auto* self = reinterpret_cast<MemoryRef*>(Memory->tp_alloc(Memory, 0));
  if (self == nullptr) return nullptr;
  self->memory = new c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl());
  return reinterpret_cast<PyObject*>(self);
}

void forget_memory(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<MemoryRef*>(object)->memory;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* storage_of(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto found = reinterpret_cast<MemoryRef*>(self)->memory->lock();
  if (!found) Py_RETURN_NONE;
  return THPStorage_Wrap(c10::Storage(std::move(found)));
  END_HANDLE_TH_ERRORS
}

bool drop(PyObject* dictionary, PyObject* name) {
  int is_there = PyDict_Contains(dictionary, name);
  return is_there == 0 || (is_there > 0 && PyDict_DelItem(dictionary, name) == 0);
}

// The class that the pending `tensor` will have; borrowed. See `lazy_tensor.make_real`.
PyObject* class_of(const at::Tensor& tensor, PyObject* attributes) {
  PyObject* kept = PyDict_GetItemWithError(attributes, names.of_class);
  if (kept != nullptr || PyErr_Occurred()) return kept;
  int is_marked = PyDict_Contains(attributes, names.is_parameter);
  if (is_marked < 0) return nullptr;
  return is_marked && tensor.is_leaf() ? classes.parameter : classes.tensor;
}

// The same as `lazy_tensor.make_real`, for tensors that are pending in the usual way.
bool become_real(PyObject* object, PyObject* attributes, const at::Tensor& tensor, const at::Tensor& real) {
  PyObject* cls = class_of(tensor, attributes);
  if (cls == nullptr) return false;
  THPObjectPtr held(Py_NewRef(cls));
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_python_dispatch(false);
  try {
    tensor.set_data(real);
  } catch (...) {  // it did not change
    impl->set_python_dispatch(true);
    throw;
  }
  // Without the setter of pending tensors, for which it is the class that they will have.
  if (Py_TYPE(classes.class_setter)->tp_descr_set(classes.class_setter, object, cls) != 0) return false;
  if (!drop(attributes, names.value) || !drop(attributes, names.of_class)) return false;
  int is_parameter = PyObject_IsSubclass(cls, classes.parameter);
  return is_parameter == 0 || (is_parameter > 0 && drop(attributes, names.is_parameter));
}

// The same as `eager_backend.store_result` for the tensor of one reference; 2 if it is real now.
int give_one(PyObject* ref, const at::Tensor& real) {
  THPObjectPtr object(PyObject_CallNoArgs(ref));
  if (!object) return -1;
  if (object.get() == Py_None) return 1;
  THPObjectPtr attributes(PyObject_GenericGetDict(object.get(), nullptr));
  int is_pending = attributes ? PyDict_Contains(attributes.get(), names.value) : -1;
  if (is_pending <= 0) return is_pending < 0 ? -1 : 1;
  const at::Tensor& tensor = THPVariable_Unpack(object.get());
  if (!tensor.device().is_cpu() && PyDict_GET_SIZE(classes.stand_ins) != 0) return 0;  // it may only be planned
  if (tensor.is_conj() || tensor.is_neg() || real.is_conj() || real.is_neg()) return 0;
  return become_real(object.get(), attributes.get(), tensor, real) ? 2 : -1;
}

// The same as `eager_backend.store_result`; 0 if the Python function must be called, -1 with an exception.
int give(PyObject* value, const at::Tensor& real) {
  if (!real.defined()) return 1;
  if (real.layout() != at::kStrided) return 0;
  THPObjectPtr ref(PyObject_GetAttr(value, names.tensor));
  if (!ref) return -1;
  bool is_held = false;
  while (ref.get() != Py_None) {
    THPObjectPtr next(PyObject_GetAttr(ref.get(), names.next));
    if (!next) return -1;
    int given = give_one(ref.get(), real);
    if (given <= 0) return given;
    is_held = is_held || given == 2;
    ref = std::move(next);
  }
  if (!is_held) return 1;
  THPObjectPtr memory(memory_of(real));
  return memory && PyObject_SetAttr(value, names.memory, memory.get()) == 0 ? 1 : -1;
}

PyObject* store_one(PyObject*, PyObject* args) {
  PyObject *value, *real;
  if (!PyArg_ParseTuple(args, "OO", &value, &real)) return nullptr;
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(real)) Py_RETURN_FALSE;
  int given = give(value, THPVariable_Unpack(real));
  return given < 0 ? nullptr : PyBool_FromLong(given);
  END_HANDLE_TH_ERRORS
}

PyObject* connect(PyObject*, PyObject* args) {
  Classes given;
  unsigned long long above, lazy;
  if (!PyArg_ParseTuple(
          args, "OOO!KK", &given.tensor, &given.parameter, &PyDict_Type, &given.stand_ins, &above, &lazy)) {
    return nullptr;
  }
  given.above = c10::DispatchKeySet(c10::DispatchKeySet::RAW, above);
  given.lazy = c10::DispatchKeySet(c10::DispatchKeySet::RAW, lazy);
  THPObjectPtr of_objects(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyBaseObject_Type), "__dict__"));
  if (!of_objects) return nullptr;
  given.class_setter = PyMapping_GetItemString(of_objects, "__class__");
  if (given.class_setter == nullptr) return nullptr;
  for (PyObject* item : {given.tensor, given.parameter, given.stand_ins}) Py_INCREF(item);
  classes = given;
  Py_RETURN_NONE;
}

// ---- The level of kernels

struct Level {  // the thread-local state that `private_api.kernels_only` sets
  c10::impl::TorchDispatchModeTLS modes = c10::impl::TorchDispatchModeTLS::get_state();
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  at::impl::TorchFunctionDisabledState functions = at::impl::PythonTorchFunctionTLS::get_disabled_state();

  void set() const {
    c10::impl::TorchDispatchModeTLS::set_state(modes);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(functions);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
};

void to_kernels() {
  c10::impl::TorchDispatchModeTLS::set_state({});
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::ALL_DISABLED);
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = (keys.excluded_ - classes.lazy) | classes.above;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

struct KernelsOnly {
  PyObject_HEAD
  Level* outside;
};

// Does nothing if already entered or left: after an interruption in between, the caller repeats it.
PyObject* enter_level(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& outside = reinterpret_cast<KernelsOnly*>(self)->outside;
  if (outside != nullptr) Py_RETURN_NONE;
  outside = new Level();
  to_kernels();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* leave_level(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  std::unique_ptr<Level> outside(std::exchange(reinterpret_cast<KernelsOnly*>(self)->outside, nullptr));
  if (outside != nullptr) outside->set();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void forget_level(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<KernelsOnly*>(object)->outside;
  type->tp_free(object);
  Py_DECREF(type);
}

// ---- Running it

// The arguments of a program's call; see native_codegen.generate.
struct Given {
  PyObject *tensors = nullptr, *scalars = nullptr, *draws = nullptr, *users = nullptr, *later = nullptr;
  PyObject *arrived = nullptr, *times = nullptr, *done = nullptr;
  bool in_one_go = false;  // without checks for signals, or for threads that wait for the interpreter

  bool parse(PyObject* args) {
    return PyArg_ParseTuple(
        args, "O!O!O!O!O!O!OO", &PyList_Type, &tensors, &PyList_Type, &scalars, &PyList_Type, &draws, &PyList_Type,
        &users, &PyList_Type, &later, &PyList_Type, &arrived, &times, &done);
  }
};

class Run {
 public:
  Run(const Program& program, const Given& given)
      : program(program), lines(*program.lines), slots(program.size), tensors(given.tensors), scalars(given.scalars),
        draws(given.draws), users(given.users), later(given.later), arrived(given.arrived), times(given.times),
        done(given.done), in_one_go(given.in_one_go) {}

  // Whether all nodes have run; if not, an exception is set.
  bool all() {
    if (!take_tensors() || !begin()) return false;
    convert_scalars();
    bool is_whole = each_node();
    interpreter.take();
    return is_whole;
  }

  // --- On a thread that never has the Python interpreter

  // Everything that needs the interpreter, done beforehand; false with an exception, or without one if it cannot run
  // this way.
  bool prepare() {
    if (!take_generators() || !take_tensors() || !begin()) return false;
    held = slots;
    convert_scalars();
    for (const IValue& number : numbers) {
      if (number.isNone()) return false;
    }
    handed.reserve(lines.results.size());
    return true;
  }

  // Each draw has its own generator, because the program may use its generators meanwhile.
  bool take_generators() {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(draws); at++) {
      PyObject* generator = PyList_GET_ITEM(draws, at);
      if (!THPGenerator_Check(generator)) {
        PyErr_SetString(PyExc_TypeError, "internal error: a draw without a generator");
        return false;
      }
      generators.push_back(THPGenerator_Unwrap(generator));
    }
    for (const Node& node : lines.nodes) {
      if (node.draw != NONE && (node.generator == NONE || static_cast<size_t>(node.draw) >= generators.size())) {
        return false;
      }
    }
    return true;
  }

  // Runs the nodes until one fails or `stop` is set; results for others are kept in `handed`. Calls `ran` with the
  // number of nodes that have run after each: what they have added to `handed` and `ends`, which have their final
  // capacity, may be read on another thread from then on.
  template <typename Ran>
  void run_alone(const std::atomic<bool>& stop, const Ran& ran) {
    for (const Node& node : lines.nodes) {
      if (stop.load(std::memory_order_relaxed)) return;
      if (node.grad_mode != NONE) c10::GradMode::set_enabled(node.grad_mode != 0);
      at::Tensor before;  // the state of its generator
      try {
        if (node.draw != NONE) before = generators[node.draw].get_state();
        execute(node);
      } catch (...) {
        failure = std::current_exception();
        if (before.defined()) generators[node.draw].set_state(before);
        return;
      }
      for (const Result& result : node.results.of(lines.results)) {
        if (result.user != NONE || result.later != NONE) handed.emplace_back(&result, slots[result.slot]);
      }
      ends.push_back(since + seconds(Clock::now()));
      for (int32_t slot : node.gone.of(lines.slots)) slots[slot].reset();
      ran(ends.size());
    }
  }

  bool is_whole() const { return ends.size() == lines.nodes.size(); }

  // The owners of its results, and where times are noted.
  void give_to(PyObject* users_now, PyObject* later_now, PyObject* times_now) {
    users = users_now;
    later = later_now;
    times = times_now;
  }

  // Releases the objects of the run, which may be Python objects; call it only while holding the interpreter.
  void clear() {
    slots.clear();
    held.clear();
    handed.clear();
    stack.clear();
  }

  // False with an exception if a result could not be handed over; the next call continues with the others.
  bool hand_over_all() {
    while (given_over < handed.size()) {
      const auto& [result, real] = handed[given_over++];
      if (!hand_over(*result, real, true)) return false;
    }
    return true;
  }

  // Hands over the results of the first `count` nodes, while later ones may be running; false with an exception.
  bool hand_over_first(size_t count) {
    size_t most = 0;
    for (size_t at = 0; at < count; at++) {
      for (const Result& result : lines.nodes[at].results.of(lines.results)) {
        if (result.user != NONE || result.later != NONE) most++;
      }
    }
    for (; given_over < most; given_over++) {
      const auto& [result, real] = handed[given_over];
      at::Tensor own;  // the running nodes may use `real`, so that others get another tensor on its memory
      if (real.defined()) {
        own = at::Tensor(real.unsafeGetTensorImpl()->shallow_copy_and_detach(
            c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
      }
      if (!hand_over(*result, own, true)) return false;
    }
    return true;
  }

  // Adds the end times of the nodes up to `count`, all of which have run on another thread.
  bool note_times_until(size_t count) {
    if (count <= noted) return true;
    THPObjectPtr bytes(PyBytes_FromStringAndSize(
        reinterpret_cast<const char*>(ends.data() + noted), (count - noted) * sizeof(double)));
    if (!bytes || !THPObjectPtr(PyObject_CallMethod(times, "frombytes", "O", bytes.get()))) return false;
    noted = count;
    return true;
  }
  bool note_all_times() { return note_times_until(ends.size()); }

  // Sets the exception of the kernel that has failed, if any.
  void raise_failure() {
    if (!failure) return;
    auto raise = [&]() -> PyObject* {
      HANDLE_TH_ERRORS
      std::rethrow_exception(std::exchange(failure, nullptr));
      END_HANDLE_TH_ERRORS
    };
    raise();
  }

  // Adds the end times of the nodes that have run.
  bool note_times() {
    if (ends.empty()) return true;
    THPObjectPtr bytes(
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(ends.data()), ends.size() * sizeof(double)));
    ends.clear();
    return bytes && THPObjectPtr(PyObject_CallMethod(times, "frombytes", "O", bytes.get()));
  }

  // Whether the kernel of the current node has run, though its results have not been noted yet.
  bool has_run = false;
  // Whether it had started a write that cannot be rolled back.
  bool is_midway = false;

  // The existing values, by the names that they have in the Python code.
  PyObject* variables() const {
    PyObject* result = PyDict_New();
    for (size_t slot = 0; result != nullptr && slot < slots.size(); slot++) {
      if (!slots[slot].defined()) continue;
      THPObjectPtr name(PyUnicode_FromFormat("v%zu", slot)), tensor(THPVariable_Wrap(slots[slot]));
      if (!name || !tensor || PyDict_SetItem(result, name.get(), tensor.get()) != 0) Py_CLEAR(result);
    }
    return result;
  }

 private:
  bool begin() {
    THPObjectPtr start(PySequence_GetItem(times, 0));
    if (!start) return false;
    looked = Clock::now();
    since = PyFloat_AsDouble(start.get()) - seconds(looked);
    ends.reserve(lines.nodes.size());
    return !PyErr_Occurred();
  }

  Py_ssize_t count() const {  // of the nodes that have run
    return PySequence_Size(times) - 1 + static_cast<Py_ssize_t>(ends.size());
  }

  static double seconds(Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  }

  bool each_node() {
    Clock::time_point now = looked;
    for (const Node& node : lines.nodes) {
      if (is_stopped(now)) return false;
      if (node.grad_mode != NONE) c10::GradMode::set_enabled(node.grad_mode != 0);
      if (!one(node)) return false;
      now = Clock::now();
      ends.push_back(since + seconds(now));
      has_run = false;
      for (int32_t slot : node.gone.of(lines.slots)) slots[slot].reset();
      if (done != Py_None && !tell()) return false;
    }
    return true;
  }

  bool is_stopped(Clock::time_point now) {
    if (in_one_go) return false;
    if (interpreter.is_ours() || now - looked >= PATIENCE) {
      interpreter.take();
      looked = now;
      if (PyErr_CheckSignals() != 0) return true;
    }
    if (PyList_GET_SIZE(arrived) == 0) return false;  // a word that other threads write only once
    interpreter.take();
    THPObjectPtr where(PyUnicode_FromFormat("after %zd of %zu ops", count(), lines.nodes.size()));
    return !where || !THPObjectPtr(PyObject_CallMethod(arrived, "handle", "O", where.get()));
  }

  bool take_tensors() {
    const auto& given = lines.given;
    if (static_cast<size_t>(PyList_GET_SIZE(tensors)) != given.size()) {
      PyErr_SetString(PyExc_ValueError, "internal error: not as many tensors as the program takes");
      return false;
    }
    for (size_t at = 0; at < given.size(); at++) {
      PyObject* tensor = PyList_GET_ITEM(tensors, at);
      if (!THPVariable_Check(tensor)) {
        PyErr_SetString(PyExc_TypeError, "internal error: a program takes tensors");
        return false;
      }
      slots[given[at]] = THPVariable_Unpack(tensor);
    }
    return PyList_SetSlice(tensors, 0, PyList_GET_SIZE(tensors), nullptr) == 0;
  }

  // Convert the numbers that differ between runs, while we hold the interpreter anyway. A number that cannot be
  // converted is left to its node, which raises the error.
  void convert_scalars() {
    numbers.resize(PyList_GET_SIZE(scalars));
    if (numbers.empty()) return;
    for (const Node& node : lines.nodes) {
      size_t position = 0;
      for (const Argument& argument : node.arguments.of(lines.arguments)) {
        if (argument.kind == Kind::Scalar && static_cast<size_t>(argument.number) < numbers.size()) {
          try {
            PyObject* item = PyList_GET_ITEM(scalars, argument.number);
            numbers[argument.number] = converted_number(node.op.schema(), position, item);
          } catch (const std::exception&) {
            PyErr_Clear();
          }
        }
        position++;
      }
    }
  }

  bool one(const Node& node) {
    PyObject* draw = nullptr;
    if (node.draw != NONE) {
      interpreter.take();
      draw = PyList_GetItem(draws, node.draw);
      if (draw == nullptr || !(in_one_go ? set_state_directly(draw) : set_state(draw))) return false;
    }
    if (!call(node)) return false;
    if (draw != nullptr && in_one_go && !note_state_directly(draw)) return false;
    has_run = true;
    if (draw != nullptr && !in_one_go) {
      interpreter.take();
      if (!note_state(draw)) return false;
    }
    for (const Result& result : node.results.of(lines.results)) {
      if (!hand_over(result, slots[result.slot], false)) return false;
    }
    return true;
  }

  bool call(const Node& node) {
    if (in_one_go) {  // `run_in_one_go` collects its warnings
      try {
        execute(node);
        return true;
      } catch (...) {
        torch::translate_exception_to_python(std::current_exception());
        return false;
      }
    }
    HANDLE_TH_ERRORS
    try {
      execute(node);
    } catch (...) {
      interpreter.take();  // to name it in the error
      throw;
    }
    return true;
    END_HANDLE_TH_ERRORS_RET(false)
  }

  void execute(const Node& node) {
    for (const Argument& argument : node.arguments.of(lines.arguments)) push(argument, node);
    const c10::OperatorHandle& op = node.with_generator && !generators.empty() ? *node.with_generator : node.op;
    if (node.draw != NONE && !generators.empty()) {
      if (node.with_generator) stack.insert(stack.begin() + node.generator, IValue());
      stack[node.generator] = generators[node.draw];
    }
    if (!in_one_go) interpreter.leave();
    if (node.copied.start == node.copied.stop) {
      is_midway = node.refused;
      op.callBoxed(stack);
      is_midway = false;
    } else {
      call_guarded(node, op);
    }
    keep(node);
    stack.clear();
  }

  // The same as `write_rollback.guarded`.
  void call_guarded(const Node& node, const c10::OperatorHandle& op) {
    std::vector<std::pair<at::Tensor, at::Tensor>> before;
    for (int32_t slot : node.copied.of(lines.slots)) {
      if (slots[slot].defined()) before.emplace_back(slots[slot], slots[slot].clone());
    }
    try {
      op.callBoxed(stack);
    } catch (...) {
      for (auto& [tensor, content] : before) tensor.copy_(content);
      throw;
    }
  }

  void push(const Argument& argument, const Node& node) {
    switch (argument.kind) {
      case Kind::Constant:
        stack.push_back(argument.constant);
        return;
      case Kind::Copy:
        stack.push_back(argument.constant.deepcopy());
        return;
      case Kind::Number: {
        at::Tensor tensor = at::scalar_to_tensor(argument.constant.toTensor().item());
        tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
        stack.emplace_back(std::move(tensor));
        return;
      }
      case Kind::Slot: {
        const at::Tensor& tensor = slots[argument.number];
        if (argument.optional && !tensor.defined()) {
          stack.emplace_back();
        } else {
          stack.emplace_back(tensor);
        }
        return;
      }
      case Kind::Slots: {
        c10::List<at::Tensor> list;
        list.reserve(argument.slots.stop - argument.slots.start);
        for (int32_t slot : argument.slots.of(lines.slots)) list.push_back(slots[slot]);
        stack.emplace_back(std::move(list));
        return;
      }
      case Kind::Entries: {
        c10::List<std::optional<at::Tensor>> list;
        list.reserve(argument.slots.stop - argument.slots.start);
        for (int32_t slot : argument.slots.of(lines.slots)) {
          bool is_there = slot != NONE && slots[slot].defined();
          list.push_back(is_there ? std::optional<at::Tensor>(slots[slot]) : std::nullopt);
        }
        stack.emplace_back(std::move(list));
        return;
      }
      case Kind::Scalar: {
        size_t at = argument.number;
        if (at < numbers.size() && !numbers[at].isNone()) {
          stack.push_back(std::exchange(numbers[at], IValue()));
          return;
        }
        interpreter.take();
        PyObject* item = PyList_GetItem(scalars, argument.number);
        if (item == nullptr) throw python_error();
        stack.push_back(converted(node.op.schema(), stack.size(), item));  // each argument is on the stack
      }
    }
  }

  // Puts results into their slots.
  void keep(const Node& node) {
    auto results = node.results.of(lines.results);
    if (results.begin() == results.end()) return;
    if (node.list) {
      auto list = stack.at(0).toListRef();
      for (const Result& result : results) {
        TORCH_CHECK_INDEX(static_cast<size_t>(result.index) < list.size(), "list index out of range");
        slots[result.slot] = list[result.index].toTensor();
      }
      return;
    }
    for (const Result& result : results) {
      const IValue& item = stack.at(result.index);
      slots[result.slot] = item.isNone() ? at::Tensor() : item.toTensor();
    }
  }

  // `keeps`: nodes that were recorded since the run began may need the user's tensors as well.
  bool hand_over(const Result& result, const at::Tensor& real, bool keeps) {
    if (result.user == NONE && result.later == NONE) return true;
    interpreter.take();
    HANDLE_TH_ERRORS
    if (result.later != NONE && !note_real(PyList_GetItem(later, result.later), real)) return false;
    if (result.user == NONE) return true;
    PyObject* value = PyList_GetItem(users, result.user);
    if (value == nullptr || (keeps && result.later == NONE && !note_real(value, real))) return false;
    if (int given = give(value, real)) return given > 0;
    THPObjectPtr tensor(THPVariable_Wrap(real));
    return tensor && THPObjectPtr(PyObject_CallFunctionObjArgs(program.give, value, tensor.get(), nullptr));
    END_HANDLE_TH_ERRORS_RET(false)
  }

  static bool note_real(PyObject* value, const at::Tensor& real) {
    THPObjectPtr tensor(value != nullptr ? THPVariable_Wrap(real) : nullptr);
    return tensor && PyObject_SetAttrString(value, "real", tensor.get()) == 0;
  }

  static bool set_state(PyObject* draw) {
    THPObjectPtr generator(PyObject_GetAttrString(draw, "generator"));
    THPObjectPtr state(generator ? PyObject_GetAttrString(draw, "state") : nullptr);
    return state && THPObjectPtr(PyObject_CallMethod(generator.get(), "set_state", "O", state.get()));
  }

  bool note_state(PyObject* draw) {
    THPObjectPtr generator(PyObject_GetAttrString(draw, "generator"));
    THPObjectPtr state(generator ? PyObject_CallOneArg(program.state_of, generator.get()) : nullptr);
    return state && PyObject_SetAttrString(draw, "state", state.get()) == 0;
  }

  // The same without methods of Python's, in which a signal handler could run. Their sequence awaits nothing.
  static at::Generator generator_of(PyObject* draw) {
    THPObjectPtr generator(PyObject_GetAttr(draw, names.generator));
    if (!generator) throw python_error();
    TORCH_CHECK(THPGenerator_Check(generator.get()), "internal error: a draw without a generator");
    return THPGenerator_Unwrap(generator.get());
  }

  static bool set_state_directly(PyObject* draw) {
    HANDLE_TH_ERRORS
    THPObjectPtr state(PyObject_GetAttr(draw, names.state));
    if (!state) return false;
    TORCH_CHECK(THPVariable_Check(state.get()), "internal error: a draw without a state");
    at::Generator generator = generator_of(draw);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(THPVariable_Unpack(state.get()));
    return true;
    END_HANDLE_TH_ERRORS_RET(false)
  }

  static bool note_state_directly(PyObject* draw) {
    HANDLE_TH_ERRORS
    at::Generator generator = generator_of(draw);
    at::Tensor found;
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      found = generator.get_state();
    }
    THPObjectPtr state(THPVariable_Wrap(found));
    return state && PyObject_SetAttr(draw, names.state, state.get()) == 0;
    END_HANDLE_TH_ERRORS_RET(false)
  }

  bool tell() {
    interpreter.take();
    return note_times() && THPObjectPtr(PyObject_CallNoArgs(done));
  }

  const Program& program;
  const Lines& lines;
  std::vector<at::Tensor> slots;
  std::vector<IValue> numbers;  // the converted scalars; None after they have been used
  Stack stack;
  PyObject *tensors, *scalars, *draws, *users, *later, *arrived, *times, *done;
  bool in_one_go;
  std::vector<double> ends;  // of nodes, in seconds; those that are not in `times` yet
  double since = 0;  // offset to our clock
  Clock::time_point looked;  // for signals
  // For a run without the interpreter: the generator of each draw; the outside tensors, so that none of them loses its
  // last reference there; results for others, and how many of them have been handed over; the error of a kernel.
  std::vector<at::Generator> generators;
  std::vector<at::Tensor> held;
  std::vector<std::pair<const Result*, at::Tensor>> handed;
  size_t given_over = 0;
  size_t noted = 0;  // end times that are in `times`
  std::exception_ptr failure;
  Interpreter interpreter;  // last, so that the interpreter is held again before other members are destroyed
};

PyObject* raised() {  // the current exception, as an object; cleared
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

// The outcome of a run: None, or what stopped it; null with an exception if nothing was run.
PyObject* outcome(Run& run) {
  bool is_whole = run.all();
  THPObjectPtr error(PyErr_Occurred() ? raised() : Py_NewRef(Py_None));
  if (!error || !run.note_times()) return nullptr;
  if (is_whole) Py_RETURN_NONE;
  THPObjectPtr variables(run.variables());
  if (!variables) return nullptr;
  PyObject *has_run = run.has_run ? Py_True : Py_False, *midway = run.is_midway ? Py_True : Py_False;
  return PyTuple_Pack(4, error.get(), variables.get(), has_run, midway);
}

// Calls `function`; its warnings have been passed to Python when this returns. If a warning becomes an error, that
// error is set in addition to the result: what has run stays run.
template <typename Function>
PyObject* with_warnings(const Function& function) {
  PyObject* result = nullptr;
  auto call = [&]() -> PyObject* {
    HANDLE_TH_ERRORS
    result = function();
    return result;
    END_HANDLE_TH_ERRORS
  };
  call();
  return result;
}

// The result of `with_warnings`, with the error that a warning has become, which follows after the nodes have run.
PyObject* settled(PyObject* result) {
  if (result == nullptr || !PyErr_Occurred()) return result;
  THPObjectPtr error(raised()), kept(result);
  if (result != Py_None) return kept.release();  // there is one already
  THPObjectPtr nothing(PyDict_New());
  return nothing ? PyTuple_Pack(4, error.get(), nothing.get(), Py_False, Py_False) : nullptr;
}

PyObject* run(PyObject* self, PyObject* args, PyObject*) {
  Given given;
  if (!given.parse(args)) return nullptr;
  return settled(with_warnings([&] {
    Run run(*reinterpret_cast<Program*>(self), given);
    return outcome(run);
  }));
}

// ---- Uninterrupted runs

// The level of kernels in C++, and the surrounding gradient mode.
class AtKernels {
 public:
  AtKernels() { to_kernels(); }
  AtKernels(const AtKernels&) = delete;
  AtKernels& operator=(const AtKernels&) = delete;
  ~AtKernels() {
    outside.set();
    c10::GradMode::set_enabled(grad_mode);
  }

 private:
  Level outside;
  bool grad_mode = c10::GradMode::is_enabled();
};

// Whether PyTorch's own modes are active below ours: they may call Python, or anything else.
bool sees_modes() {
  auto usual = c10::default_included_set | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  return !(c10::impl::tls_local_dispatch_key_set().included_ - usual).empty();
}

// Runs the program and notes that it has run, without running Python code in between, so that a signal handler never
// sees one without the other. Arguments: the tape's runs and the thread's number; a function that takes the tensors (or
// returns None if the nodes have run already); the lists and the times as above; functions that note the run; and a
// list that the result of `run` is appended to. Nothing else is noted for a run that was stopped: the caller does that,
// and the tape's runs meanwhile show a run under way. NotImplemented: it cannot run this way here.
// Warnings of kernels, which are passed to Python after their run.
class Warnings : public c10::WarningHandler {
 public:
  std::vector<c10::Warning> all;

  void process(const c10::Warning& warning) override { all.push_back(warning); }

  // A function that passes them to Python; None if there are none.
  PyObject* function() {
    if (all.empty()) Py_RETURN_NONE;
    auto kept = std::make_unique<std::vector<c10::Warning>>(std::move(all));
    THPObjectPtr capsule(PyCapsule_New(kept.get(), nullptr, [](PyObject* capsule) { delete kept_in(capsule); }));
    if (!capsule) return nullptr;
    kept.release();
    return PyCFunction_New(&definition, capsule.get());
  }

 private:
  static std::vector<c10::Warning>* kept_in(PyObject* capsule) {
    return static_cast<std::vector<c10::Warning>*>(PyCapsule_GetPointer(capsule, nullptr));
  }

  static PyObject* show(PyObject* capsule, PyObject*) {
    HANDLE_TH_ERRORS
    for (const c10::Warning& warning : *kept_in(capsule)) c10::warn(warning);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
  }

  inline static PyMethodDef definition{"show_warnings", show, METH_NOARGS, nullptr};
};

// Returns a function that shows the warnings of its kernels, None if there are none, or NotImplemented if it cannot
// run here.
PyObject* run_in_one_go(PyObject* self, PyObject* args) {
  Given given;
  PyObject *runs, *thread, *take, *notes, *ran;
  if (!PyArg_ParseTuple(
          args, "OOOO!O!O!O!OO!O!", &runs, &thread, &take, &PyList_Type, &given.scalars, &PyList_Type, &given.draws,
          &PyList_Type, &given.users, &PyList_Type, &given.later, &given.times, &PyTuple_Type, &notes, &PyList_Type,
          &ran)) {
    return nullptr;
  }
  if (sees_modes()) Py_RETURN_NOTIMPLEMENTED;
  THPObjectPtr empty(PyList_New(0)), nobody(PyLong_FromLong(0));
  if (!empty || !nobody) return nullptr;
  given.arrived = empty.get();
  given.done = Py_None;
  given.in_one_go = true;
  THPObjectPtr tensors(PyObject_CallNoArgs(take));
  if (!tensors) return nullptr;
  if (!PyList_Check(tensors.get())) Py_RETURN_NOTIMPLEMENTED;
  given.tensors = tensors.get();
  auto note = [&](PyObject* name, PyObject* who) { return PyObject_SetAttr(runs, name, who) == 0; };
  if (!note(names.active_thread, thread) || !note(names.running, thread)) return nullptr;
  Warnings warnings;
  auto each = [&]() -> bool {
    THPObjectPtr found;
    try {
      c10::WarningUtils::WarningHandlerGuard collecting(&warnings);
      AtKernels level;
      Run run(*reinterpret_cast<Program*>(self), given);
      found = THPObjectPtr(outcome(run));
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
      return false;
    }
    if (!found || !note(names.running, nobody.get())) return false;
    if (found.get() == Py_None) {
      for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(notes); at++) {
        if (!THPObjectPtr(PyObject_CallNoArgs(PyTuple_GET_ITEM(notes, at)))) return false;
      }
      if (!note(names.active_thread, nobody.get())) return false;
    }
    return PyList_Append(ran, found.get()) == 0;
  };
  return each() ? warnings.function() : nullptr;
}

// ---- Runs on a separate thread

// The single thread on which programs run while the interpreter continues; it waits for the next run.
class Worker {
 public:
  static Worker& get() {
    if (worker == nullptr || worker->process != getpid()) worker = new Worker();  // a fork does not copy threads
    return *worker;
  }

  // Ends the thread after its current run; the next run starts another one.
  static void end() {
    if (worker == nullptr || worker->process != getpid()) return;
    {
      std::lock_guard lock(worker->mutex);
      worker->ends = true;
    }
    worker->arrives.notify_one();
    worker->thread.join();
    delete std::exchange(worker, nullptr);
  }

  template <typename Job>
  void submit(Job&& work) {
    {
      std::lock_guard lock(mutex);
      job = std::forward<Job>(work);
    }
    arrives.notify_one();
  }

 private:
  void serve() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        arrives.wait(lock, [this] { return ends || job != nullptr; });
        if (job == nullptr) return;
        work = std::exchange(job, nullptr);
      }
      work();
    }
  }

  static inline Worker* worker = nullptr;
  pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable arrives;
  std::function<void()> job;
  bool ends = false;
  std::thread thread{[this] { serve(); }};  // last, because it uses the others
};

PyObject* end_worker(PyObject*, PyObject*) {
  Interpreter interpreter;
  interpreter.leave();
  Worker::end();
  interpreter.take();
  Py_RETURN_NONE;
}

// A run on the worker thread. Between `start` and `is_over`, only that thread accesses the run, except for what the
// nodes that have run have left for others.
class AsyncRun {
 public:
  AsyncRun(const Program& program, const Given& given) : run(program, given) {}

  bool prepare() { return run.prepare(); }

  // The job keeps `self` alive until it has ended. One at a time.
  static void start(const std::shared_ptr<AsyncRun>& self) {
    std::fenv_t environment;
    std::fegetenv(&environment);  // including how denormal numbers are handled
    int threads = at::get_num_threads();
    Worker::get().submit([self, environment, threads] {
      std::fesetenv(&environment);
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      to_kernels();
      c10::WarningUtils::WarningHandlerGuard guard(&self->warnings);
      self->run.run_alone(self->stop, [&self](size_t count) { self->note_ran(count); });
      std::lock_guard lock(self->mutex);
      self->over = true;
      self->ends.notify_all();
    });
  }

  // Waits for that long, without the interpreter; returns whether the run is over.
  bool wait(std::chrono::milliseconds most) {
    Interpreter interpreter;
    interpreter.leave();
    std::unique_lock lock(mutex);
    return ends.wait_for(lock, most, [this] { return over; });
  }

  bool is_over() {
    std::lock_guard lock(mutex);
    return over;
  }

  // Waits for that long, without the interpreter, until `count` nodes have run or no other will.
  void wait_for(size_t count, std::chrono::milliseconds most) {
    awaited = count;
    if (ran >= count) return;
    Interpreter interpreter;
    interpreter.leave();
    std::unique_lock lock(mutex);
    ends.wait_for(lock, most, [this, count] { return over || ran >= count; });
  }

  size_t have_run() const { return ran; }

  Run run;
  const pid_t process = getpid();
  std::atomic<bool> stop = false;  // between two nodes
  bool is_joined = false;
  Warnings warnings;

 private:
  void note_ran(size_t count) {
    ran = count;
    if (count != awaited) return;
    std::lock_guard lock(mutex);
    ends.notify_all();
  }

  std::atomic<size_t> ran = 0, awaited = 0;  // numbers of nodes; written before the other one is read
  std::mutex mutex;
  std::condition_variable ends;
  bool over = false;
};

struct AsyncRunObject {
  PyObject_HEAD
  PyObject* program;
  PyObject* cancelled;  // the exception that its results raise if it was stopped, or null
  std::shared_ptr<AsyncRun>* async_run;
};
PyTypeObject* AsyncRunType = nullptr;

// Starts the program on another thread. Arguments: the tensors (the list is emptied), the scalars and the times as for
// a run, and a separate generator for each draw. Returns a handle of the run, or None if it cannot run this way.
PyObject* start_async(PyObject* self, PyObject* args) {
  Given given;
  if (!PyArg_ParseTuple(
          args, "O!O!O!O", &PyList_Type, &given.tensors, &PyList_Type, &given.scalars, &PyList_Type, &given.draws,
          &given.times)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  if (sees_modes()) Py_RETURN_NONE;
  THPObjectPtr empty(PyList_New(0));
  if (!empty) return nullptr;
  given.users = given.later = given.arrived = empty.get();
  given.done = Py_None;
  given.in_one_go = true;
  auto async_run = std::make_shared<AsyncRun>(*reinterpret_cast<Program*>(self), given);
  if (!async_run->prepare()) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  auto* made = reinterpret_cast<AsyncRunObject*>(AsyncRunType->tp_alloc(AsyncRunType, 0));
  if (made == nullptr) return nullptr;
  made->program = Py_NewRef(self);
  made->async_run = new std::shared_ptr<AsyncRun>(async_run);
  AsyncRun::start(async_run);
  return reinterpret_cast<PyObject*>(made);
  END_HANDLE_TH_ERRORS
}

AsyncRun& async_run_of(PyObject* self) { return **reinterpret_cast<AsyncRunObject*>(self)->async_run; }

// Waits until it is over; if a signal handler raises, the run ends between two nodes. Returns the exception.
PyObject* wait_until_over(AsyncRun& async_run, PyObject* arrived) {
  PyObject* interrupt = nullptr;
  while (!async_run.wait(PATIENCE)) {
    if (interrupt != nullptr) continue;
    bool is_stopped = PyErr_CheckSignals() != 0;
    if (!is_stopped && PyList_GET_SIZE(arrived) != 0) {
      THPObjectPtr done(PyObject_CallMethod(arrived, "handle", "s", "while they run on another thread"));
      is_stopped = !done;
    }
    if (!is_stopped) continue;
    interrupt = raised();
    async_run.stop = true;
  }
  return interrupt;
}

// Hands over the results of a finished run; returns what stopped it, like `run`.
PyObject* results_of(AsyncRun& async_run, PyObject* states, PyObject* arrived, PyObject* interrupt) {
  Run& run = async_run.run;
  THPObjectPtr error;
  bool is_of_a_kernel = false;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(states); at++) {  // the current states of the generators
    PyObject* entry = PyList_GET_ITEM(states, at);
    THPObjectPtr state(PyObject_CallMethod(PyTuple_GET_ITEM(entry, 1), "get_state", nullptr));
    if (!state || PyObject_SetAttrString(PyTuple_GET_ITEM(entry, 0), "state", state.get()) != 0) return nullptr;
  }
  while (!run.hand_over_all()) {
    THPObjectPtr another(raised());
    if (!error) error = std::move(another);
  }
  if (!error && !run.is_whole()) {
    run.raise_failure();
    if (PyErr_Occurred()) {
      error = THPObjectPtr(raised());
      is_of_a_kernel = true;
    }
  }
  if (!error && interrupt != nullptr) error = THPObjectPtr(Py_NewRef(interrupt));
  if (error && !is_of_a_kernel && PyObject_SetAttrString(arrived, "raised", error.get()) != 0) return nullptr;
  if (!run.note_all_times()) return nullptr;
  if (!error) Py_RETURN_NONE;
  THPObjectPtr variables(run.variables());
  if (!variables) return nullptr;
  return PyTuple_Pack(4, error.get(), variables.get(), Py_False, run.is_midway ? Py_True : Py_False);
}

// Waits until it is over, and hands over its results. Arguments: `users`, `later`, `arrived` and the times, as for a
// run, preceded by one pair for each draw sequence and its generator; returns the same as `run`.
PyObject* join(PyObject* self, PyObject* args) {
  PyObject *states, *users, *later, *arrived, *times;
  if (!PyArg_ParseTuple(
          args, "O!O!O!O!O", &PyList_Type, &states, &PyList_Type, &users, &PyList_Type, &later, &PyList_Type, &arrived,
          &times)) {
    return nullptr;
  }
  AsyncRun& async_run = async_run_of(self);
  THPObjectPtr interrupt(wait_until_over(async_run, arrived));
  PyObject* cancelled = reinterpret_cast<AsyncRunObject*>(self)->cancelled;
  if (!interrupt && !async_run.run.is_whole() && cancelled != nullptr) interrupt = THPObjectPtr(Py_NewRef(cancelled));
  async_run.run.give_to(users, later, times);
  PyObject* result = settled(with_warnings([&]() -> PyObject* {
    for (const c10::Warning& warning : std::exchange(async_run.warnings.all, {})) c10::warn(warning);
    return results_of(async_run, states, arrived, interrupt.get());
  }));
  async_run.is_joined = result != nullptr;
  return result;
}

// Hands over the results of the first nodes, which have run. Arguments: their number, `users`, `later` and the times.
PyObject* hand_over_first(PyObject* self, PyObject* args) {
  Py_ssize_t count;
  PyObject *users, *later, *times;
  if (!PyArg_ParseTuple(args, "nO!O!O", &count, &PyList_Type, &users, &PyList_Type, &later, &times)) return nullptr;
  AsyncRun& async_run = async_run_of(self);
  if (count < 0 || static_cast<size_t>(count) > async_run.have_run()) {
    PyErr_SetString(PyExc_ValueError, "internal error: these nodes have not run");
    return nullptr;
  }
  HANDLE_TH_ERRORS
  async_run.run.give_to(users, later, times);
  if (!async_run.run.hand_over_first(count) || !async_run.run.note_times_until(count)) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Waits for at most that many seconds until that many nodes have run, or no other will; returns how many have.
PyObject* wait_for_first(PyObject* self, PyObject* args) {
  Py_ssize_t count;
  double most;
  if (!PyArg_ParseTuple(args, "nd", &count, &most)) return nullptr;
  AsyncRun& async_run = async_run_of(self);
  async_run.wait_for(static_cast<size_t>(count), std::chrono::milliseconds(static_cast<int64_t>(1000 * most)));
  return PyLong_FromSize_t(async_run.have_run());
}

PyObject* is_joined(PyObject* self, PyObject*) { return PyBool_FromLong(async_run_of(self).is_joined); }

PyObject* is_over(PyObject* self, PyObject*) { return PyBool_FromLong(async_run_of(self).is_over()); }

// Waits for at most that many seconds; returns whether it is over.
PyObject* wait_for(PyObject* self, PyObject* seconds) {
  double most = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(async_run_of(self).wait(std::chrono::milliseconds(static_cast<int64_t>(1000 * most))));
}

PyObject* stop_async(PyObject* self, PyObject* error) {
  if (!PyExceptionInstance_Check(error)) {
    PyErr_SetString(PyExc_TypeError, "internal error: a run is stopped with an exception");
    return nullptr;
  }
  auto& cancelled = reinterpret_cast<AsyncRunObject*>(self)->cancelled;
  if (cancelled == nullptr) cancelled = Py_NewRef(error);
  async_run_of(self).stop = true;
  Py_RETURN_NONE;
}

void forget_async(PyObject* object) {
  auto* self = reinterpret_cast<AsyncRunObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  // In a forked child, the thread does not exist, so the objects that the run refers to are never released.
  if (self->async_run != nullptr && async_run_of(object).process == getpid()) {
    async_run_of(object).stop = true;
    while (!async_run_of(object).wait(std::chrono::seconds(1))) {  // it refers to Python objects
    }
    async_run_of(object).run.clear();
    delete self->async_run;
  }
  Py_XDECREF(self->program);
  Py_XDECREF(self->cancelled);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods_of_async[] = {
    {"join", join, METH_VARARGS, "Waits, and hands over the results; see execute/kernels_on_background_thread.py."},
    {"is_joined", is_joined, METH_NOARGS, "Whether its results have been handed over."},
    {"is_over", is_over, METH_NOARGS, "Whether it has ended."},
    {"wait", wait_for, METH_O, "Waits that many seconds at most; whether it has ended."},
    {"wait_for_first", wait_for_first, METH_VARARGS, "Waits for that many nodes, that many seconds at most."},
    {"hand_over_first", hand_over_first, METH_VARARGS, "Hands over the results of that many nodes."},
    {"stop", stop_async, METH_O, "Ends it between two nodes; joining it raises that."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots_of_async[] = {
    {Py_tp_doc, const_cast<char*>("A program that runs on a thread of its own.")},
    {Py_tp_methods, methods_of_async},
    {Py_tp_dealloc, reinterpret_cast<void*>(forget_async)},
    {0, nullptr},
};
PyType_Spec async_spec = {
    "lazyviz.torch_internals.native.interpreter.AsyncRun", sizeof(AsyncRunObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots_of_async};

// Whether each of its draws can use a generator that is passed to it.
PyObject* takes_generators(PyObject* self, PyObject*) {
  for (const Node& node : reinterpret_cast<Program*>(self)->lines->nodes) {
    if (node.draw != NONE && node.generator == NONE) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods_of_program[] = {
    {"takes_generators", takes_generators, METH_NOARGS, "Whether each draw can have a generator that it is given."},
    {"in_one_go", run_in_one_go, METH_VARARGS, "See execute/replay/native_short_runs.py."},
    {"start", start_async, METH_VARARGS, "See execute/kernels_on_background_thread.py."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots_of_type[] = {
    {Py_tp_methods, methods_of_program},
    {Py_tp_doc, const_cast<char*>("Runs a subgraph of nodes; see native_codegen.generate for what it is called with.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(run)},
    {0, nullptr},
};
PyType_Spec type_spec = {
    "lazyviz.torch_internals.native.interpreter.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, slots_of_type};

PyMethodDef methods_of_memory[] = {
    {"storage", storage_of, METH_NOARGS, "The memory, if somebody still has it."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots_of_memory[] = {
    {Py_tp_doc, const_cast<char*>("A weak reference to a tensor's memory.")},
    {Py_tp_methods, methods_of_memory},
    {Py_tp_dealloc, reinterpret_cast<void*>(forget_memory)},
    {0, nullptr},
};
PyType_Spec memory_spec = {
    "lazyviz.torch_internals.native.interpreter.MemoryRef", sizeof(MemoryRef), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots_of_memory};

PyMethodDef methods_of_level[] = {
    {"__enter__", enter_level, METH_NOARGS, nullptr},
    {"__exit__", leave_level, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots_of_level[] = {
    {Py_tp_doc, const_cast<char*>("See _torch.kernels_only.")},
    {Py_tp_methods, methods_of_level},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(forget_level)},
    {0, nullptr},
};
PyType_Spec level_spec = {
    "lazyviz.torch_internals.native.interpreter.KernelsOnly", sizeof(KernelsOnly), 0, Py_TPFLAGS_DEFAULT, slots_of_level};

PyMethodDef functions[] = {
    {"store_result", store_one, METH_VARARGS, "See native_codegen.store_result."},
    {"end_worker", end_worker, METH_NOARGS, "Ends the thread of asynchronous runs, once none is under way."},
    {"connect", connect, METH_VARARGS, "The classes of tensors, the stand-ins of absent GPUs, and dispatch keys."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.interpreter", "Runs programs of kernels.", -1, functions};

bool intern() {
  std::initializer_list<std::pair<PyObject**, const char*>> all = {
      {&names.tensor, "tensor"}, {&names.next, "next"}, {&names.memory, "memory"}, {&names.value, "_lazyviz"},
      {&names.of_class, "_lazyviz_class"}, {&names.is_parameter, "_is_param"},
      {&names.running, "running"}, {&names.active_thread, "active_thread"},
      {&names.generator, "generator"}, {&names.state, "_state"}};
  for (auto [place, text] : all) {
    if ((*place = PyUnicode_InternFromString(text)) == nullptr) return false;
  }
  return true;
}

bool add(PyObject* module, const char* name, PyObject* item) {
  return item != nullptr && PyModule_AddObject(module, name, item) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit_interpreter() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  Refused = PyErr_NewException("lazyviz.torch_internals.native.interpreter.Refused", nullptr, nullptr);
  Py_XINCREF(Refused);
  Memory = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&memory_spec));
  AsyncRunType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&async_spec));
  bool is_whole = Memory != nullptr && AsyncRunType != nullptr && intern() && add(module, "Refused", Refused) &&
      add(module, "Program", PyType_FromSpec(&type_spec)) &&
      add(module, "KernelsOnly", PyType_FromSpec(&level_spec)) &&
      add(module, "SOURCE", PyUnicode_FromString(LAZYVIZ_SOURCE)) &&
      add(module, "TORCH", PyUnicode_FromString(LAZYVIZ_TORCH));
  if (!is_whole) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
