// What is asked of all nodes of a stretch at once, and noted on them; see sweeps.py, which does the same.
//
// The objects are of classes with slots, which are read and written here without a look-up.

#include <Python.h>
#include <structmember.h>

#include <initializer_list>

namespace {

PyObject* done = nullptr;  // "done"
PyObject* zero = nullptr;

struct Reference {  // an owned one
  PyObject* object;
  explicit Reference(PyObject* object) : object(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object); }
  explicit operator bool() const { return object != nullptr; }
};

struct Slot {
  const char* name;
  PyTypeObject* type = nullptr;
  Py_ssize_t offset = 0;

  bool find(PyObject* of) {
    Reference member(PyObject_GetAttrString(of, name));
    if (!member) return false;
    if (Py_TYPE(member.object) != &PyMemberDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%s is no slot", name);
      return false;
    }
    type = reinterpret_cast<PyTypeObject*>(of);
    offset = reinterpret_cast<PyMemberDescrObject*>(member.object)->d_member->offset;
    return true;
  }

  PyObject** place(PyObject* object) const {
    if (!PyObject_TypeCheck(object, type)) {
      PyErr_Format(PyExc_TypeError, "internal error: a %s instead of a %s", Py_TYPE(object)->tp_name, type->tp_name);
      return nullptr;
    }
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }

  PyObject* of(PyObject* object) const {  // borrowed; nullptr with an exception if there is none
    PyObject** found = place(object);
    if (found == nullptr) return nullptr;
    if (*found == nullptr) PyErr_SetString(PyExc_AttributeError, name);
    return *found;
  }

  bool set(PyObject* object, PyObject* item) const {
    PyObject** found = place(object);
    if (found == nullptr) return false;
    PyObject* before = *found;
    *found = Py_NewRef(item);
    Py_XDECREF(before);
    return true;
  }
};

Slot again{"again"}, error{"error"}, inference_mode{"inference_mode"}, entry{"entry"}, phase{"phase"}, graph{"graph"},
    outputs{"outputs"}, inputs{"inputs"}, state{"state"}, seconds{"seconds"}, after{"after"};
Slot maker{"node"}, tensor{"tensor"}, storage{"storage"}, uses_of_value{"uses"};
Slot live{"live"}, role{"role"}, dropped{"dropped"}, external{"external"}, uses_of_storage{"uses"};

PyObject* connect(PyObject*, PyObject* args) {
  PyObject *node, *value, *memory;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyType_Type, &node, &PyType_Type, &value, &PyType_Type, &memory)) {
    return nullptr;
  }
  for (Slot* slot : {&again, &error, &inference_mode, &entry, &phase, &graph, &outputs, &inputs, &state, &seconds,
                     &after}) {
    if (!slot->find(node)) return nullptr;
  }
  for (Slot* slot : {&maker, &tensor, &storage, &uses_of_value}) {
    if (!slot->find(value)) return nullptr;
  }
  for (Slot* slot : {&live, &role, &dropped, &external, &uses_of_storage}) {
    if (!slot->find(memory)) return nullptr;
  }
  Py_RETURN_NONE;
}

// Calls `visit` with each item of what may be any iterable, which is held meanwhile.
template <typename Visit>
bool each(PyObject* items, Visit visit) {
  Reference held(PySequence_Fast(items, "internal error: not a sequence"));
  if (!held) return false;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(held.object); at++) {
    if (!visit(PySequence_Fast_GET_ITEM(held.object, at))) return false;
  }
  return true;
}

PyObject* survey(PyObject*, PyObject* nodes) {
  Reference entries(PyList_New(0)), made(PyList_New(0)), read(PyList_New(0)), users(PyList_New(0)),
      phases(PyList_New(0)), graphs(PyDict_New());
  if (!entries || !made || !read || !users || !phases || !graphs) return nullptr;
  Py_ssize_t count = 0;
  PyObject *mode = nullptr, *latest = nullptr;
  bool is_odd = false;

  auto result_of = [&](PyObject* node, PyObject* value) {
    count++;
    PyObject* by = maker.of(value);
    if (by != node) return by != nullptr;
    PyObject* shown = tensor.of(value);
    if (shown == nullptr || PyList_Append(made.object, value) != 0) return false;
    return shown == Py_None || PyList_Append(users.object, value) == 0;
  };
  auto one = [&](PyObject* node) {
    PyObject *repeats = again.of(node), *failed = error.of(node), *own = inference_mode.of(node);
    PyObject *answer = entry.of(node), *during = phase.of(node), *whose = graph.of(node);
    PyObject *results = outputs.of(node), *given = inputs.of(node);
    if (!repeats || !failed || !own || !answer || !during || !whose || !results || !given) return false;
    if (mode == nullptr) mode = own;
    int is_again = PyObject_IsTrue(repeats);
    if (is_again < 0) return false;
    is_odd = is_again || failed != Py_None || own != mode;
    if (is_odd) return false;
    if (PyList_Append(entries.object, answer) != 0 || PyList_Append(phases.object, during) != 0) return false;
    if (whose != latest && PyDict_SetItem(graphs.object, whose, Py_None) != 0) return false;
    latest = whose;
    return each(results, [&](PyObject* value) { return result_of(node, value); }) &&
        each(given, [&](PyObject* value) { return PyList_Append(read.object, value) == 0; });
  };
  if (!each(nodes, one)) {
    if (is_odd) Py_RETURN_NONE;
    return nullptr;
  }
  Reference in_order(PyDict_Keys(graphs.object)), during(PyList_AsTuple(phases.object));
  if (!in_order || !during) return nullptr;
  return Py_BuildValue(
      "OOOOOOn", entries.object, made.object, read.object, users.object, during.object, in_order.object, count);
}

PyObject* storages_of(PyObject*, PyObject* values) {
  Reference met(PyDict_New()), told(PyList_New(0));
  if (!met || !told) return nullptr;
  bool is_done = each(values, [&](PyObject* value) {
    PyObject* memory = storage.of(value);
    if (memory == nullptr) return false;
    int known = PyDict_Contains(met.object, memory);
    if (known != 0) return known > 0;
    if (PyDict_SetItem(met.object, memory, Py_None) != 0) return false;
    PyObject *alive = live.of(memory), *part = role.of(memory), *end = dropped.of(memory), *out = external.of(memory);
    if (!alive || !part || !end || !out) return false;
    int is_alive = PyObject_IsTrue(alive), is_out = PyObject_IsTrue(out);
    if (is_alive < 0 || is_out < 0) return false;
    bool tells = is_alive || part != Py_None || end == Py_None || is_out;
    return !tells || PyList_Append(told.object, memory) == 0;
  });
  Reference storages(is_done ? PyDict_Keys(met.object) : nullptr);
  return storages ? PyTuple_Pack(2, storages.object, told.object) : nullptr;
}

PyObject* note_done(PyObject*, PyObject* args) {
  PyObject *nodes, *times;
  if (!PyArg_ParseTuple(args, "OO", &nodes, &times)) return nullptr;
  bool is_timed = times != Py_None;
  if (is_timed && !PyList_Check(times)) {
    PyErr_SetString(PyExc_TypeError, "internal error: times are a list");
    return nullptr;
  }
  Reference none(PyTuple_New(0));
  if (!none) return nullptr;
  Py_ssize_t at = 0;
  bool is_done = each(nodes, [&](PyObject* node) {
    if (!state.set(node, done)) return false;
    if (is_timed) {
      PyObject *begin = PyList_GetItem(times, at), *end = PyList_GetItem(times, at + 1);
      if (begin == nullptr || end == nullptr) return false;
      Reference time(PyFloat_FromDouble(PyFloat_AsDouble(end) - PyFloat_AsDouble(begin)));
      if (!time || PyErr_Occurred() || !seconds.set(node, time.object)) return false;
      at++;
    }
    PyObject* before = after.of(node);
    int waits = before == nullptr ? -1 : PyObject_IsTrue(before);
    return waits >= 0 && (!waits || after.set(node, none.object));
  });
  if (!is_done) return nullptr;
  Py_RETURN_NONE;
}

PyObject* note_unused(PyObject*, PyObject* args) {
  PyObject *values, *storages;
  if (!PyArg_ParseTuple(args, "OO", &values, &storages)) return nullptr;
  bool is_done = each(values, [](PyObject* value) { return uses_of_value.set(value, zero); }) &&
      each(storages, [](PyObject* memory) { return uses_of_storage.set(memory, zero); });
  if (!is_done) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "The classes of nodes, values and storages."},
    {"survey", survey, METH_O, "See sweeps.survey."},
    {"storages_of", storages_of, METH_O, "See sweeps.storages_of."},
    {"note_done", note_done, METH_VARARGS, "See sweeps.note_done."},
    {"note_unused", note_unused, METH_VARARGS, "See sweeps.note_unused."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sweep", "Sweeps over nodes in C++; see sweeps.py.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__sweep() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  done = PyUnicode_InternFromString("done");
  zero = PyLong_FromLong(0);
  PyObject* source = PyUnicode_FromString(LAZYVIZ_SOURCE);
  if (done == nullptr || zero == nullptr || source == nullptr || PyModule_AddObject(module, "SOURCE", source) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
