// Frees a recorded graph that nothing refers to any more; see record/free_graph_with_owner.py.
//
// This is detected as in the garbage collector: the references to the record's objects that come from inside the record
// are counted. An object cannot have fewer references than these, so if the sums are equal, there are no others.
// References that are not counted, such as those of an unknown object, count as references from outside.

#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <new>
#include <vector>

namespace {

// A class that has many instances in a record, with the slots in which these refer to each other.
struct Kind {
  const char* marked;  // a slot that refers to no such instance, used to mark visited objects
  std::vector<const char*> early;  // slots that are cleared before user code can run
  std::vector<const char*> circular;  // slots that are cleared before the object is released
  std::vector<const char*> others;
  PyTypeObject* type = nullptr;
  Py_ssize_t mark = 0;  // its offset
  std::vector<Py_ssize_t> early_cuts, cuts, slots;  // offsets: of `early`, of `circular`, of all

  bool connect(PyObject* cls) {
    type = reinterpret_cast<PyTypeObject*>(cls);
    slots.clear();
    if (!add({marked})) return false;
    mark = slots.back();
    slots.clear();
    if (!add(early) || !add(circular) || !add(others)) return false;
    early_cuts.assign(slots.begin(), slots.begin() + early.size());
    cuts.assign(slots.begin() + early.size(), slots.begin() + early.size() + circular.size());
    Py_INCREF(cls);
    return true;
  }

 private:
  bool add(const std::vector<const char*>& names) {
    for (const char* name : names) {
      PyObject* member = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
      if (member == nullptr) return false;
      bool is_slot = Py_TYPE(member) == &PyMemberDescr_Type;
      if (is_slot) {
        slots.push_back(reinterpret_cast<PyMemberDescrObject*>(member)->d_member->offset);
      } else {
        PyErr_Format(PyExc_TypeError, "%s is no slot", name);
      }
      Py_DECREF(member);
      if (!is_slot) return false;
    }
    return true;
  }
};

Kind nodes{"op", {"graph"}, {"after", "forward"}, {"args", "kwargs", "inputs", "outputs", "writes", "draws"}};
Kind values{"meta", {"tensor"}, {"node"}, {"storage"}};
Kind storages{"nbytes", {"graph"}, {"writer", "readers", "continues", "replaced_by", "shadow", "_origin"}, {}};
Kind draws{"generator", {}, {"last"}, {"_state"}};
PyTypeObject *shadow_type, *reference_type;

// Offsets of the slots above.
Py_ssize_t graph_of(const Kind& kind) { return kind.slots[0]; }  // of a node or a storage
Py_ssize_t tensor_of_value() { return values.slots[0]; }
Py_ssize_t node_of_value() { return values.slots[1]; }
Py_ssize_t storage_of_value() { return values.slots[2]; }

PyObject*& at(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

void cut(PyObject* object, Py_ssize_t offset) {
  PyObject* before = at(object, offset);
  at(object, offset) = Py_NewRef(Py_None);
  Py_XDECREF(before);
}

const Kind* kind_of(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  for (const Kind* kind : {&values, &storages, &nodes, &draws}) {
    if (type == kind->type) return kind;
  }
  return nullptr;
}

constexpr size_t AHEAD = 8;  // members
constexpr size_t LARGEST = 256, CACHE_LINE = 64;  // approximate bytes: of a member, and of one prefetch
constexpr int DEEPEST = 50;  // nesting depth of containers, such as lists in an operator's arguments

PyObject* const MET = reinterpret_cast<PyObject*>(&nodes);  // the mark: the address of no Python object

struct Member {
  PyObject* object;
  PyObject* unmarked;  // the original content of the slot that has the mark
};

class Record {
 public:
  explicit Record(PyObject* graph) : graph_(graph), from_outside_(Py_REFCNT(graph)) {}
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // Whether all references from outside are those of `holders`, without weak ones. From then on, its members are marked
  // until it is taken apart or spared; no Python code may run meanwhile.
  bool has_no_other_references(Py_ssize_t holders) {
    Py_TYPE(graph_)->tp_traverse(graph_, visit, this);
    for (size_t number = 0; number < members_.size() && is_free_; number++) {
      PyObject* member = members_[number].object;  // the vector grows meanwhile
      ask_ahead(number);
      for (Py_ssize_t slot : kind_of(member)->slots) {
        PyObject* object = at(member, slot);
        if (object != nullptr && visit(object, this) != 0) break;
      }
    }
    return is_free_ && from_outside_ == holders;
  }

  void spare() {
    for (const Member& member : members_) at(member.object, kind_of(member.object)->mark) = member.unmarked;
  }

  // Breaks the reference cycles, so that everything is freed; `holder` is the list that has the graph. Each pass over
  // the members waits for memory, so there are few passes.
  void take_apart(PyObject* holder) {
    for (size_t number = 0; number < members_.size(); number++) {
      ask_ahead(number);
      PyObject* member = Py_NewRef(members_[number].object);
      const Kind* kind = kind_of(member);
      at(member, kind->mark) = members_[number].unmarked;
      for (Py_ssize_t slot : kind->early_cuts) cut(member, slot);
    }
    // From here on, user code may run, such as the callback of a weak reference. Only the graph can have weak
    // references, so once it is gone, the rest is unreachable.
    PyList_SetSlice(holder, 0, PyList_GET_SIZE(holder), nullptr);
    // Later members are still referenced here, so freeing one never starts a long chain of deallocations.
    for (size_t number = 0; number < members_.size(); number++) {
      ask_ahead(number);
      PyObject* member = members_[number].object;
      for (Py_ssize_t slot : kind_of(member)->cuts) cut(member, slot);
      Py_DECREF(member);
    }
  }

 private:
  static int visit(PyObject* object, void* record) {
    try {
      return static_cast<Record*>(record)->meet(object);
    } catch (const std::bad_alloc&) {
      return static_cast<Record*>(record)->give_up();
    }
  }

  // Prefetches the memory of a later member: most of the time to visit a member is spent waiting for its memory.
  void ask_ahead([[maybe_unused]] size_t number) const {
#if defined(__GNUC__)
    if (number + AHEAD >= members_.size()) return;
    const char* object = reinterpret_cast<const char*>(members_[number + AHEAD].object);
    for (size_t line = 0; line < LARGEST; line += CACHE_LINE) __builtin_prefetch(object + line);
#endif
  }

  int give_up() {
    is_free_ = false;
    return 1;
  }

  int meet(PyObject* object) {
    if (object == graph_) {
      from_outside_--;
      return 0;
    }
    if (const Kind* kind = kind_of(object)) {
      if (!is_own(object, kind)) return 0;
      if (at(object, kind->mark) != MET) {
        if (kind == &values && !can_go(object)) return give_up();
        members_.push_back({object, at(object, kind->mark)});
        at(object, kind->mark) = MET;
        from_outside_ += Py_REFCNT(object);
      }
      from_outside_--;
      return 0;
    }
    PyTypeObject* type = Py_TYPE(object);
    bool holds = type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type || type == reference_type ||
        type == shadow_type;
    // A container that is referenced only from here belongs to the record, so its references count as inside.
    if (!holds || Py_REFCNT(object) != 1 || depth_ == DEEPEST) return 0;
    depth_++;
    int stopped = type->tp_traverse(object, visit, this);
    depth_--;
    return stopped;
  }

  bool is_own(PyObject* object, const Kind* kind) const {
    if (kind == &draws) return true;
    if (kind != &values) return at(object, graph_of(*kind)) == graph_;
    PyObject* maker = at(object, node_of_value());
    if (maker != nullptr && Py_TYPE(maker) == nodes.type) return at(maker, graph_of(nodes)) == graph_;
    return maker == Py_None && is_on_own_memory(object);
  }

  bool is_on_own_memory(PyObject* value) const {
    PyObject* memory = at(value, storage_of_value());
    return memory != nullptr && Py_TYPE(memory) == storages.type && at(memory, graph_of(storages)) == graph_;
  }

  // It has no weak references, and no other graph's memory is affected when its tensor dies.
  bool can_go(PyObject* value) const {
    return at(value, values.type->tp_weaklistoffset) == nullptr &&
        (at(value, tensor_of_value()) == Py_None || is_on_own_memory(value));
  }

  PyObject* graph_;
  Py_ssize_t from_outside_;  // references to the graph and the members, minus those that have been visited
  std::vector<Member> members_;  // the graph's nodes, values, storages and draw sequences
  bool is_free_ = true;
  int depth_ = 0;
};

PyObject* connect(PyObject*, PyObject* args) {
  PyObject *node, *value, *storage, *sequence, *shadow, *reference;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!", &PyType_Type, &node, &PyType_Type, &value, &PyType_Type, &storage,
                        &PyType_Type, &sequence, &PyType_Type, &shadow, &PyType_Type, &reference)) {
    return nullptr;
  }
  if (!nodes.connect(node) || !values.connect(value) || !storages.connect(storage) || !draws.connect(sequence)) {
    return nullptr;
  }
  shadow_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(shadow));
  reference_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(reference));
  Py_RETURN_NONE;
}

PyObject* release(PyObject*, PyObject* holder) {
  if (!PyList_CheckExact(holder) || PyList_GET_SIZE(holder) != 1) {
    PyErr_SetString(PyExc_TypeError, "internal error: not a list of one graph");
    return nullptr;
  }
  Record record(PyList_GET_ITEM(holder, 0));
  if (!record.has_no_other_references(1)) {
    record.spare();
    Py_RETURN_FALSE;
  }
  record.take_apart(holder);
  Py_RETURN_TRUE;
}

PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "The classes of nodes, values, storages, draws, shadows, references."},
    {"release", release, METH_O, "See ownership.release."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.graph_release", "Frees recorded graphs at once.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_graph_release() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* source = PyUnicode_FromString(LAZYVIZ_SOURCE);
  if (source == nullptr || PyModule_AddObject(module, "SOURCE", source) != 0) {
    Py_XDECREF(source);
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
