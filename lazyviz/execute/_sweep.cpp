// What is asked of all nodes of a stretch at once, and noted on them; see sweeps.py, which does the same.
//
// The objects are of classes with slots, which are read and written here without a look-up.

#include <Python.h>
#include <structmember.h>

#include <initializer_list>
#include <utility>
#include <vector>

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
    outputs{"outputs"}, inputs{"inputs"}, state{"state"}, seconds{"seconds"}, after{"after"}, writes{"writes"},
    folded{"folded"};
Slot maker{"node"}, tensor{"tensor"}, storage{"storage"}, uses_of_value{"uses"};
Slot live{"live"}, role{"role"}, dropped{"dropped"}, external{"external"}, uses_of_storage{"uses"},
    continues{"continues"}, shadow{"shadow"};
Slot special_step{"special"}, results_of_step{"results"};

PyObject* connect(PyObject*, PyObject* args) {
  PyObject *node, *value, *memory, *step;
  if (!PyArg_ParseTuple(
          args, "O!O!O!O!", &PyType_Type, &node, &PyType_Type, &value, &PyType_Type, &memory, &PyType_Type, &step)) {
    return nullptr;
  }
  for (Slot* slot : {&again, &error, &inference_mode, &entry, &phase, &graph, &outputs, &inputs, &state, &seconds,
                     &after, &writes, &folded}) {
    if (!slot->find(node)) return nullptr;
  }
  for (Slot* slot : {&maker, &tensor, &storage, &uses_of_value}) {
    if (!slot->find(value)) return nullptr;
  }
  for (Slot* slot : {&live, &role, &dropped, &external, &uses_of_storage, &continues, &shadow}) {
    if (!slot->find(memory)) return nullptr;
  }
  for (Slot* slot : {&special_step, &results_of_step}) {
    if (!slot->find(step)) return nullptr;
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

// What is found of nodes that may be a stretch.
struct Survey {
  PyObject* known;  // steps, by the shape cache's answer
  explicit Survey(PyObject* known) : known(known) {}
  Reference steps{PyList_New(0)}, numbers{PyDict_New()}, outside{PyList_New(0)}, users{PyList_New(0)},
      phases{PyList_New(0)}, graphs{PyDict_New()}, special{PyList_New(0)};
  std::vector<int> wiring;
  PyObject *mode = nullptr, *latest = nullptr;  // of the node before
  Py_ssize_t at = 0, results = 0, expected = 0;
  PyObject* next = nullptr;  // number, owned
  bool is_odd = false;

  ~Survey() { Py_XDECREF(next); }

  bool is_whole() const {
    return steps && numbers && outside && users && phases && graphs && special;
  }

  // The number of `value`, borrowed, and whether it is a new one.
  std::pair<PyObject*, bool> number(PyObject* value) {
    if (next == nullptr) next = PyLong_FromSsize_t(PyDict_GET_SIZE(numbers.object));
    PyObject* found = next != nullptr ? PyDict_SetDefault(numbers.object, value, next) : nullptr;
    if (found == nullptr || found != next) return {found, false};
    Py_CLEAR(next);
    return {found, true};
  }

  bool look_at_result(PyObject* node, PyObject* value) {
    results++;
    PyObject* by = maker.of(value);
    if (by != node) return by != nullptr;
    auto [found, is_new] = number(value);
    PyObject* shown = found != nullptr ? tensor.of(value) : nullptr;
    if (shown == nullptr) return false;
    return !is_new || shown == Py_None || PyList_Append(users.object, value) == 0;
  }

  bool look_at_step(PyObject* answer) {
    PyObject* step = PyDict_GetItemWithError(known, answer);
    if (step == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, answer);
      return false;
    }
    PyObject *given = results_of_step.of(step), *is_special = special_step.of(step);
    if (given == nullptr || is_special == nullptr || PyList_Append(steps.object, step) != 0) return false;
    expected += PyList_GET_SIZE(given);
    if (is_special != Py_True) return true;
    Reference position(PyLong_FromSsize_t(at));
    return position && PyList_Append(special.object, position.object) == 0;
  }

  bool look_at(PyObject* node) {
    PyObject *repeats = again.of(node), *failed = error.of(node), *own = inference_mode.of(node);
    PyObject *answer = entry.of(node), *during = phase.of(node), *whose = graph.of(node), *made = outputs.of(node);
    if (!repeats || !failed || !own || !answer || !during || !whose || !made) return false;
    if (mode == nullptr) mode = own;
    int is_again = PyObject_IsTrue(repeats);
    if (is_again < 0) return false;
    is_odd = is_again || failed != Py_None || own != mode;
    if (is_odd || !look_at_step(answer) || PyList_Append(phases.object, during) != 0) return false;
    if (whose != latest && PyDict_SetItem(graphs.object, whose, Py_None) != 0) return false;
    latest = whose;
    at++;
    return each(made, [&](PyObject* value) { return look_at_result(node, value); });
  }

  bool look_at_inputs(PyObject* node) {
    PyObject* given = inputs.of(node);
    return given != nullptr && each(given, [&](PyObject* value) {
      auto [found, is_new] = number(value);
      if (found == nullptr) return false;
      wiring.push_back(static_cast<int>(PyLong_AsLong(found)));
      return !is_new || PyList_Append(outside.object, value) == 0;
    });
  }
};

PyObject* survey(PyObject*, PyObject* args) {
  PyObject *nodes, *known;
  if (!PyArg_ParseTuple(args, "OO!", &nodes, &PyDict_Type, &known)) return nullptr;
  Survey all{known};
  if (!all.is_whole()) return nullptr;
  bool is_done = each(nodes, [&](PyObject* node) { return all.look_at(node); }) &&
      each(nodes, [&](PyObject* node) { return all.look_at_inputs(node); });
  if (!is_done) {
    if (all.is_odd) Py_RETURN_NONE;
    return nullptr;
  }
  const char* bytes = reinterpret_cast<const char*>(all.wiring.data());
  Reference steps(PyList_AsTuple(all.steps.object)), phases(PyList_AsTuple(all.phases.object)),
      wiring(PyBytes_FromStringAndSize(bytes, all.wiring.size() * sizeof(int))),
      graphs(PyDict_Keys(all.graphs.object));
  if (!steps || !wiring || !phases || !graphs) return nullptr;
  return PyTuple_Pack(
      9, steps.object, all.numbers.object, all.outside.object, all.users.object, wiring.object, phases.object,
      graphs.object, all.special.object, all.results == all.expected ? Py_False : Py_True);
}

PyObject* storages_of(PyObject*, PyObject* values) {
  Reference places(PyDict_New()), told(PyList_New(0)), kept(PyList_New(0)), continued(PyList_New(0));
  if (!places || !told || !kept || !continued) return nullptr;
  bool is_done = each(values, [&](PyObject* value) {
    PyObject* memory = storage.of(value);
    if (memory == nullptr) return false;
    int known = PyDict_Contains(places.object, memory);
    if (known != 0) return known > 0;
    Reference place(PyLong_FromSsize_t(PyDict_GET_SIZE(places.object)));
    if (!place || PyDict_SetItem(places.object, memory, place.object) != 0) return false;
    PyObject *alive = live.of(memory), *part = role.of(memory), *end = dropped.of(memory), *out = external.of(memory);
    PyObject* before = continues.of(memory);
    if (!alive || !part || !end || !out || !before) return false;
    int is_alive = PyObject_IsTrue(alive), is_out = PyObject_IsTrue(out);
    if (is_alive < 0 || is_out < 0) return false;
    if (!is_alive && part == Py_None && end != Py_None && !is_out) return true;
    if (is_alive && PyList_Append(kept.object, place.object) != 0) return false;
    if (is_out && before != Py_None && PyList_Append(continued.object, memory) != 0) return false;
    return PyList_Append(told.object, place.object) == 0 &&
        PyList_Append(told.object, is_alive ? Py_True : Py_False) == 0 && PyList_Append(told.object, part) == 0 &&
        PyList_Append(told.object, end == Py_None ? Py_True : Py_False) == 0;
  });
  if (!is_done) return nullptr;
  return PyTuple_Pack(4, places.object, told.object, kept.object, continued.object);
}

// Forgets what `node` has written of what shadows would hold.
bool forget_shadows(PyObject* node) {
  PyObject *written = writes.of(node), *is_folded = folded.of(node);
  if (written == nullptr || is_folded == nullptr) return false;
  if (is_folded == Py_True) return true;
  return each(written, [](PyObject* memory) { return shadow.set(memory, Py_None); });
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
    return waits >= 0 && (!waits || after.set(node, none.object)) && forget_shadows(node);
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

PyObject* begin(PyObject*, PyObject* nodes) {
  Reference errors(PyDict_New()), graphs(PyDict_New());
  if (!errors || !graphs) return nullptr;
  PyObject* latest = nullptr;
  bool is_done = each(nodes, [&](PyObject* node) {
    PyObject *failed = error.of(node), *whose = graph.of(node);
    if (failed == nullptr || whose == nullptr) return false;
    if (failed != Py_None && PyDict_SetItem(errors.object, failed, Py_None) != 0) return false;
    if (whose != latest && PyDict_SetItem(graphs.object, whose, Py_None) != 0) return false;
    latest = whose;
    return true;
  });
  Reference failed(is_done ? PyDict_Keys(errors.object) : nullptr);
  Reference whose(failed ? PyDict_Keys(graphs.object) : nullptr);
  return whose ? PyTuple_Pack(2, failed.object, whose.object) : nullptr;
}

PyObject* unfinished(PyObject*, PyObject* nodes) {
  Reference left(PyList_New(0));
  if (!left) return nullptr;
  bool is_done = each(nodes, [&](PyObject* node) {
    PyObject* now = state.of(node);
    if (now == nullptr) return false;
    int is_over = now == done ? 1 : PyObject_RichCompareBool(now, done, Py_EQ);
    return is_over >= 0 && (is_over || PyList_Append(left.object, node) == 0);
  });
  return is_done ? Py_NewRef(left.object) : nullptr;
}

PyObject* unlink_tensors(PyObject*, PyObject* args) {
  PyObject *nodes, *given;
  if (!PyArg_ParseTuple(args, "OO", &nodes, &given)) return nullptr;
  auto one = [](PyObject* value) {
    PyObject* link = tensor.of(value);
    return link != nullptr && (link == Py_None || tensor.set(value, Py_None));
  };
  bool is_done = each(given, one) && each(nodes, [&](PyObject* node) {
    PyObject* made = outputs.of(node);
    return made != nullptr && each(made, one);
  });
  if (!is_done) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "The classes of nodes, values, storages and steps."},
    {"unfinished", unfinished, METH_O, "See sweeps.unfinished."},
    {"begin", begin, METH_O, "See sweeps.begin."},
    {"survey", survey, METH_VARARGS, "See sweeps.survey."},
    {"storages_of", storages_of, METH_O, "See sweeps.storages_of."},
    {"note_done", note_done, METH_VARARGS, "See sweeps.note_done."},
    {"note_unused", note_unused, METH_VARARGS, "See sweeps.note_unused."},
    {"unlink_tensors", unlink_tensors, METH_VARARGS, "See pending.unlink_tensors."},
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
