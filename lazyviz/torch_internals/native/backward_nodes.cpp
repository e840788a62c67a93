// Autograd nodes that a backward pass is about to call, found without a Python object for each node.
//
// `record/backward_nodes.py` documents the results, and computes the same in Python.

#include <torch/csrc/python_headers.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace {

using torch::autograd::Edge;
using torch::autograd::FunctionPostHook;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // the pointer type depends on the version

// The name of a C++ class, whose nodes all have the same name; cached, since a node creates it anew each time.
PyObject* name_of(const Node& node) {
  // Null: a Python node, whose classes share one type.
  static std::unordered_map<const std::type_info*, PyObject*> names;
  const std::type_info& type = typeid(node);
  const auto [found, is_new] = names.try_emplace(&type, nullptr);
  // The type of Python nodes is not exported.
  if (is_new && std::string_view(type.name()).find("PyNode") == std::string_view::npos) {
    found->second = PyUnicode_FromString(node.name().c_str());
  }
  return found->second != nullptr ? Py_NewRef(found->second) : PyUnicode_FromString(node.name().c_str());
}

// ---- Nodes whose results the engine adds to those of other nodes

// Calls `note` with the address of its node after the node has computed its gradients.
class Note final : public FunctionPostHook {
 public:
  Note(const Node* node, PyObject* note) : node_(node), note_(Py_NewRef(note)) {}
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;
  ~Note() override {
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(note_);
  }

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr mark(PyLong_FromVoidPtr(const_cast<Node*>(node_)));
    if (!mark || !THPObjectPtr(PyObject_CallOneArg(note_, mark.get()))) throw python_error();
    return outputs;
  }

  // Compiled autograd needs no information about it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const Node* node_;
  PyObject* note_;
};

struct Sums {  // `backward_nodes.Sums`
  PyObject_HEAD
  std::vector<NodePointer>* nodes;
  std::vector<const FunctionPostHook*>* notes;  // of the nodes, once they are watched
};

PyTypeObject* SumsType = nullptr;

PyObject* nodes_of(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  THPObjectPtr list(PyList_New(0));
  for (const NodePointer& node : *reinterpret_cast<Sums*>(self)->nodes) {
    THPObjectPtr object(torch::autograd::functionToPyObject(node));
    if (!list || !object || PyList_Append(list.get(), object.get()) != 0) return nullptr;
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

PyObject* watch(PyObject* self, PyObject* note) {
  HANDLE_TH_ERRORS
  auto* sums = reinterpret_cast<Sums*>(self);
  TORCH_CHECK(sums->notes->empty(), "internal error: watched already");
  for (const NodePointer& node : *sums->nodes) {
    auto hook = std::make_unique<Note>(node.get(), note);
    sums->notes->push_back(hook.get());
    node->add_post_hook(std::move(hook));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void take_out(Sums* sums) {
  for (size_t at = 0; at < sums->notes->size(); ++at) {
    auto& hooks = (*sums->nodes)[at]->post_hooks();
    const auto found = std::find_if(
        hooks.begin(), hooks.end(), [&](const auto& hook) { return hook.get() == (*sums->notes)[at]; });
    if (found != hooks.end()) hooks.erase(found);
  }
  sums->notes->clear();
}

PyObject* release(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  take_out(reinterpret_cast<Sums*>(self));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void forget(PyObject* self) {
  auto* sums = reinterpret_cast<Sums*>(self);
  PyTypeObject* type = Py_TYPE(self);
  take_out(sums);
  delete sums->nodes;
  delete sums->notes;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* is_calling(PyObject*, PyObject* mark) {
  HANDLE_TH_ERRORS
  const void* address = PyLong_AsVoidPtr(mark);
  if (address == nullptr && PyErr_Occurred()) return nullptr;
  const auto node = torch::autograd::get_current_node();
  return PyBool_FromLong(node && node.get() == address);
  END_HANDLE_TH_ERRORS
}

// ---- Nodes below some tensors

PyObject* below(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *outputs, *names;
  if (!PyArg_ParseTuple(args, "OO!", &outputs, &PyFrozenSet_Type, &names)) return nullptr;
  THPObjectPtr sequence(PySequence_Fast(outputs, "outputs are a sequence"));
  THPObjectPtr asking(PyList_New(0)), adding(SumsType->tp_alloc(SumsType, 0));
  if (!sequence || !asking || !adding) return nullptr;
  auto* all = reinterpret_cast<Sums*>(adding.get());
  all->nodes = new std::vector<NodePointer>();
  all->notes = new std::vector<const FunctionPostHook*>();

  // The graph keeps its nodes alive meanwhile, and with them the pointers that point to them.
  struct Met {
    bool is_seen = false, adds = false;
    // For each of its inputs, the first node that computes a part of the gradient.
    std::vector<const NodePointer*> makers;
  };
  std::vector<NodePointer> roots;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(sequence.get()); ++at) {
    PyObject* output = PySequence_Fast_GET_ITEM(sequence.get(), at);
    if (!THPVariable_Check(output)) Py_RETURN_NONE;
    roots.push_back(THPVariable_Unpack(output).grad_fn());
  }
  std::vector<const NodePointer*> stack;
  for (const NodePointer& root : roots) {
    if (root) stack.push_back(&root);
  }
  std::unordered_map<const Node*, Met> met;
  met.reserve(32);
  const auto add = [&](const NodePointer& node) {
    if (!std::exchange(met[node.get()].adds, true)) all->nodes->push_back(node);
  };
  while (!stack.empty()) {
    const NodePointer& node = *stack.back();
    stack.pop_back();
    if (std::exchange(met[node.get()].is_seen, true)) continue;
    THPObjectPtr name(name_of(*node));
    if (!name) return nullptr;
    const int contained = PySet_Contains(names, name.get());
    if (contained < 0) return nullptr;
    if (contained) {
      THPObjectPtr object(torch::autograd::functionToPyObject(node));
      if (!object || PyList_Append(asking.get(), object.get())) return nullptr;
    }
    for (const Edge& edge : node->next_edges()) {
      if (!edge.function) continue;
      auto& makers = met[edge.function.get()].makers;
      if (makers.size() <= edge.input_nr) makers.resize(edge.input_nr + 1);
      if (makers[edge.input_nr] == nullptr) {
        makers[edge.input_nr] = &node;
        stack.push_back(&edge.function);
      } else {
        const NodePointer& first = *makers[edge.input_nr];
        add(first);
        add(node);
      }
    }
  }
  return PyTuple_Pack(2, asking.get(), adding.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS_OF_SUMS[] = {
    {"nodes", nodes_of, METH_NOARGS, "See autograd_nodes.Sums."},
    {"watch", watch, METH_O, "See autograd_nodes.Sums."},
    {"release", release, METH_NOARGS, "See autograd_nodes.Sums."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS_OF_SUMS[] = {
    {Py_tp_doc, const_cast<char*>("See autograd_nodes.Sums.")},
    {Py_tp_methods, METHODS_OF_SUMS},
    {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
    {0, nullptr},
};
PyType_Spec SUMS = {
    "lazyviz.torch_internals.native.backward_nodes.Sums", sizeof(Sums), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    SLOTS_OF_SUMS};

PyMethodDef METHODS[] = {
    {"is_calling", is_calling, METH_O, "is_calling(mark): as in record/backward_nodes.py."},
    {"below", below, METH_VARARGS,
     "below(outputs, names): as in record/backward_nodes.py; None where an output is no tensor."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.backward_nodes", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_backward_nodes() {
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  SumsType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&SUMS));
  if (SumsType == nullptr) {
    Py_DECREF(module);
    return nullptr;
  }
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
