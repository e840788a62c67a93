// What a backward pass is about to call, without an object in Python for each node of autograd.
//
// `autograd_nodes.py` says what is found, and finds the same in Python.

#include <torch/csrc/python_headers.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using NodePointer = decltype(Edge::function);  // which pointer it is depends on the version

struct EdgeHash {
  size_t operator()(const std::pair<Node*, uint32_t>& edge) const {
    return std::hash<Node*>()(edge.first) * 31 + edge.second;
  }
};

// Of a class of C++, whose nodes all have the same; made once, since a node makes it anew each time.
PyObject* name_of(const NodePointer& node) {
  static std::unordered_map<std::type_index, PyObject*> names;
  const std::type_info& type = typeid(*node);
  // That of all classes of Python; what describes it is not exported.
  if (std::string_view(type.name()).find("PyNode") != std::string_view::npos) {
    return PyUnicode_FromString(node->name().c_str());
  }
  PyObject*& name = names[std::type_index(type)];
  if (name == nullptr) name = PyUnicode_FromString(node->name().c_str());
  return Py_XNewRef(name);
}

PyObject* below(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *outputs, *names;
  if (!PyArg_ParseTuple(args, "OO!", &outputs, &PyFrozenSet_Type, &names)) return nullptr;
  THPObjectPtr sequence(PySequence_Fast(outputs, "outputs are a sequence"));
  THPObjectPtr asking(PyList_New(0)), adding(PyList_New(0));
  if (!sequence || !asking || !adding) return nullptr;

  std::vector<NodePointer> stack;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(sequence.get()); ++at) {
    PyObject* output = PySequence_Fast_GET_ITEM(sequence.get(), at);
    if (!THPVariable_Check(output)) Py_RETURN_NONE;
    stack.push_back(THPVariable_Unpack(output).grad_fn());
  }
  std::unordered_set<Node*> seen, sums;
  std::unordered_map<std::pair<Node*, uint32_t>, NodePointer, EdgeHash> maker;  // the first, by edge
  const auto add = [&](const NodePointer& node) {
    if (!sums.insert(node.get()).second) return true;
    THPObjectPtr object(torch::autograd::functionToPyObject(node));
    return object && PyList_Append(adding.get(), object.get()) == 0;
  };
  while (!stack.empty()) {
    const NodePointer node = std::move(stack.back());
    stack.pop_back();
    if (!node || !seen.insert(node.get()).second) continue;
    THPObjectPtr name(name_of(node));
    if (!name) return nullptr;
    const int contained = PySet_Contains(names, name.get());
    if (contained < 0) return nullptr;
    if (contained) {
      THPObjectPtr object(torch::autograd::functionToPyObject(node));
      if (!object || PyList_Append(asking.get(), object.get())) return nullptr;
    }
    for (const Edge& edge : node->next_edges()) {
      if (!edge.function) continue;
      const auto [first, is_new] = maker.try_emplace({edge.function.get(), edge.input_nr}, node);
      if (is_new) {
        stack.push_back(edge.function);
      } else if (!add(first->second) || !add(node)) {
        return nullptr;
      }
    }
  }
  return PyTuple_Pack(2, asking.get(), adding.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"below", below, METH_VARARGS,
     "below(outputs, names): as in autograd_nodes.py; None where an output is no tensor."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.record._engine", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit__engine() {
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
