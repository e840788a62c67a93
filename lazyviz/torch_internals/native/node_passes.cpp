// Passes over all nodes of a subgraph that read or update them; see execute/replay/node_passes.py, which does the same.
//
// The objects have classes with slots, which are read and written directly here.

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
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

  bool fits(PyObject* object) const { return PyObject_TypeCheck(object, type); }

  PyObject** address(PyObject* object) const {  // `object` must be of the right class
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }

  PyObject** place(PyObject* object) const {
    if (fits(object)) return address(object);
    PyErr_Format(PyExc_TypeError, "internal error: a %s instead of a %s", Py_TYPE(object)->tp_name, type->tp_name);
    return nullptr;
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

Slot is_rematerialized{"is_rematerialized"}, error{"error"}, inference_mode{"inference_mode"}, entry{"entry"}, phase{"phase"}, graph{"graph"},
    given_args{"args"}, given_kwargs{"kwargs"}, outputs{"outputs"}, inputs{"inputs"}, state{"state"},
    seconds{"measured_seconds"}, after{"after"}, writes{"writes"}, folded{"folded"};
Slot maker{"node"}, tensor{"tensor"}, storage{"storage"}, uses_of_value{"uses"}, meta{"meta"}, real{"real"};
Slot live{"live"}, role{"role"}, dropped{"dropped"}, external{"external"}, uses_of_storage{"uses"},
    continues{"continues"}, known_origin{"_origin"}, shadow{"shadow"}, nbytes_of_storage{"nbytes"};
Slot special_step{"special"}, draws_of_step{"draws"}, args_of_step{"args"},
    kwargs_of_step{"kwargs"};

PyObject* connect(PyObject*, PyObject* args) {
  PyObject *node, *value, *memory, *step;
  if (!PyArg_ParseTuple(
          args, "O!O!O!O!", &PyType_Type, &node, &PyType_Type, &value, &PyType_Type, &memory, &PyType_Type, &step)) {
    return nullptr;
  }
  for (Slot* slot : {&is_rematerialized, &error, &inference_mode, &entry, &phase, &graph, &given_args, &given_kwargs, &outputs,
                     &inputs, &state, &seconds, &after, &writes, &folded}) {
    if (!slot->find(node)) return nullptr;
  }
  for (Slot* slot : {&maker, &tensor, &storage, &uses_of_value, &meta, &real}) {
    if (!slot->find(value)) return nullptr;
  }
  for (Slot* slot :
       {&live, &role, &dropped, &external, &uses_of_storage, &continues, &known_origin, &shadow, &nbytes_of_storage}) {
    if (!slot->find(memory)) return nullptr;
  }
  for (Slot* slot : {&special_step, &draws_of_step, &args_of_step, &kwargs_of_step}) {
    if (!slot->find(step)) return nullptr;
  }
  Py_RETURN_NONE;
}

// Calls `visit` with each item of any iterable, which is kept alive meanwhile.
template <typename Visit>
bool each(PyObject* items, Visit visit) {
  bool is_fast = PyList_CheckExact(items) || PyTuple_CheckExact(items);
  Reference held(is_fast ? Py_NewRef(items) : PySequence_Fast(items, "internal error: not a sequence"));
  if (!held) return false;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(held.object); at++) {
    if (!visit(PySequence_Fast_GET_ITEM(held.object, at))) return false;
  }
  return true;
}

void ask_for(const void* place) {
#if defined(__GNUC__)
  __builtin_prefetch(place);
#endif
}

// Calls `visit` with each node, which will read these slots of it, including those in `lists`, and its results. The
// objects are scattered in memory, and waiting for it takes longer than processing them, so they are prefetched some
// nodes ahead.
template <typename Visit>
bool each_node(
    PyObject* nodes, std::initializer_list<const Slot*> slots, std::initializer_list<const Slot*> lists, Visit visit) {
  Reference held(PySequence_Fast(nodes, "internal error: not a sequence"));
  if (!held) return false;
  Py_ssize_t size = PySequence_Fast_GET_SIZE(held.object);
  PyObject** all = PySequence_Fast_ITEMS(held.object);
  auto list = [&](Py_ssize_t at, const Slot& slot) {
    PyObject* found = at < size && slot.fits(all[at]) ? *slot.address(all[at]) : nullptr;
    return found != nullptr && PyList_CheckExact(found) ? reinterpret_cast<PyListObject*>(found) : nullptr;
  };
  for (Py_ssize_t at = 0; at < size; at++) {
    if (at + 16 < size) {
      for (const Slot* slot : slots) ask_for(slot->address(all[at + 16]));
    }
    for (const Slot* slot : lists) {
      if (auto* later = list(at + 12, *slot)) ask_for(&later->ob_item);
      if (auto* later = list(at + 8, *slot)) ask_for(later->ob_item);
    }
    auto* made = list(at + 4, outputs);
    if (made != nullptr && Py_SIZE(made) != 0) {
      for (const Slot* slot : {&maker, &tensor}) ask_for(slot->address(made->ob_item[0]));
    }
    if (!visit(all[at])) return false;
  }
  return true;
}

// Objects, numbered in order of first appearance; borrowed.
class Numbers {
 public:
  explicit Numbers(Py_ssize_t expected) {
    while (static_cast<Py_ssize_t>(table.size()) < 2 * expected) table.resize(2 * table.size());
    objects.reserve(expected);
  }

  // The number of `object`, and whether it is new.
  std::pair<int, bool> of(PyObject* object) {
    Entry* entry = find(object);
    if (entry->object != nullptr) return {entry->number, false};
    *entry = {object, static_cast<int>(objects.size())};
    objects.push_back(object);
    if (2 * objects.size() > table.size()) grow();
    return {static_cast<int>(objects.size()) - 1, true};
  }

  const std::vector<PyObject*>& all() const { return objects; }

 private:
  struct Entry {
    PyObject* object = nullptr;
    int number = 0;
  };

  Entry* find(PyObject* object) {
    size_t at = reinterpret_cast<uintptr_t>(object) / alignof(std::max_align_t) * 0x9E3779B97F4A7C15u >> 20;
    while (true) {
      Entry& entry = table[at++ & (table.size() - 1)];
      if (entry.object == object || entry.object == nullptr) return &entry;
    }
  }

  void grow() {
    table.assign(2 * table.size(), Entry());
    for (size_t number = 0; number < objects.size(); number++) {
      *find(objects[number]) = {objects[number], static_cast<int>(number)};
    }
  }

  std::vector<Entry> table = std::vector<Entry>(16);  // a power of two; at most half of the entries are used
  std::vector<PyObject*> objects;
};

PyObject* list_of(const std::vector<PyObject*>& objects) {
  PyObject* list = PyList_New(objects.size());
  for (size_t at = 0; list != nullptr && at < objects.size(); at++) PyList_SET_ITEM(list, at, Py_NewRef(objects[at]));
  return list;
}

PyObject* tuple_of(const std::vector<PyObject*>& objects) {
  PyObject* tuple = PyTuple_New(objects.size());
  for (size_t at = 0; tuple != nullptr && at < objects.size(); at++) {
    PyTuple_SET_ITEM(tuple, at, Py_NewRef(objects[at]));
  }
  return tuple;
}

PyObject* bytes_of(const std::vector<int>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int));
}

PyObject* tuple_of(const std::vector<int>& numbers) {
  Reference tuple(PyTuple_New(numbers.size()));
  for (size_t at = 0; tuple && at < numbers.size(); at++) {
    PyObject* number = PyLong_FromLong(numbers[at]);
    if (number == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.object, at, number);
  }
  return tuple ? Py_NewRef(tuple.object) : nullptr;
}

// The structure of nodes that may be a subgraph.
struct Survey {
  PyObject* known;  // steps, by the shape cache's answer
  Survey(PyObject* known, Py_ssize_t nodes) : known(known), numbers(2 * nodes) {
    for (auto* list : {&steps, &phases}) list->reserve(nodes);
    wiring.reserve(3 * nodes);
  }
  Numbers numbers;
  std::vector<PyObject*> steps, phases, graphs;
  std::vector<int> users, wiring, draws;
  Reference scalars{PyList_New(0)};
  PyObject* mode = nullptr;  // of the nodes before
  bool is_odd = false;

  bool visit_result(PyObject* node, PyObject* value) {
    PyObject* by = maker.of(value);
    if (by != node) return by != nullptr;
    PyObject* shown = tensor.of(value);
    if (shown == nullptr) return false;
    auto [number, is_new] = numbers.of(value);
    if (is_new && shown != Py_None) users.push_back(number);
    return true;
  }

  // Notes the node's own scalars and draws.
  bool visit_special(PyObject* node, PyObject* step) {
    PyObject *draw = draws_of_step.of(step), *positions = args_of_step.of(step), *names = kwargs_of_step.of(step);
    PyObject *given = given_args.of(node), *named = given_kwargs.of(node);
    if (!draw || !positions || !names || !given || !named) return false;
    if (draw == Py_True) draws.push_back(static_cast<int>(steps.size()));
    return each(positions, [&](PyObject* position) {
      Reference scalar(PyObject_GetItem(given, position));
      return scalar && PyList_Append(scalars.object, scalar.object) == 0;
    }) && each(names, [&](PyObject* name) {
      Reference scalar(PyObject_GetItem(named, name));
      return scalar && PyList_Append(scalars.object, scalar.object) == 0;
    });
  }

  bool visit_step(PyObject* node, PyObject* answer) {
    PyObject* step = PyDict_GetItemWithError(known, answer);
    if (step == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, answer);
      return false;
    }
    PyObject* is_special = special_step.of(step);
    if (is_special == nullptr) return false;
    if (is_special == Py_True && !visit_special(node, step)) return false;
    steps.push_back(step);
    return true;
  }

  bool visit(PyObject* node) {
    PyObject *repeats = is_rematerialized.of(node), *failed = error.of(node), *own = inference_mode.of(node);
    PyObject *answer = entry.of(node), *during = phase.of(node), *whose = graph.of(node), *made = outputs.of(node);
    if (!repeats || !failed || !own || !answer || !during || !whose || !made) return false;
    if (mode == nullptr) mode = own;
    int will_repeat = PyObject_IsTrue(repeats);
    if (will_repeat < 0) return false;
    is_odd = will_repeat || failed != Py_None || own != mode;
    if (is_odd || !visit_step(node, answer)) return false;
    phases.push_back(during);
    if (std::find(graphs.rbegin(), graphs.rend(), whose) == graphs.rend()) graphs.push_back(whose);
    return each(made, [&](PyObject* value) { return visit_result(node, value); });
  }

  bool visit_inputs(PyObject* node) {
    PyObject* given = inputs.of(node);
    return given != nullptr && each(given, [&](PyObject* value) {
      wiring.push_back(numbers.of(value).first);
      return true;
    });
  }

  PyObject* found(Py_ssize_t made) const {
    Reference steps(tuple_of(this->steps)), values(list_of(numbers.all())), count(PyLong_FromSsize_t(made)),
        users(tuple_of(this->users)), wiring(bytes_of(this->wiring)), phases(tuple_of(this->phases)),
        graphs(list_of(this->graphs)), draws(tuple_of(this->draws));
    if (!steps || !values || !count || !users || !wiring || !phases || !graphs || !draws) return nullptr;
    return PyTuple_Pack(
        9, steps.object, values.object, count.object, users.object, wiring.object, phases.object, graphs.object,
        scalars.object, draws.object);
  }
};

PyObject* survey(PyObject*, PyObject* args) {
  PyObject *given, *known;
  if (!PyArg_ParseTuple(args, "OO!", &given, &PyDict_Type, &known)) return nullptr;
  Reference nodes(PySequence_Fast(given, "internal error: not a sequence"));
  if (!nodes) return nullptr;
  Survey all(known, PySequence_Fast_GET_SIZE(nodes.object));
  if (!all.scalars) return nullptr;
  auto first = [&](PyObject* node) { return all.visit(node); };
  if (!each_node(nodes.object, {&is_rematerialized, &error, &phase, &entry, &outputs, &inputs}, {&outputs, &inputs}, first)) {
    if (all.is_odd) Py_RETURN_NONE;
    return nullptr;
  }
  auto made = static_cast<Py_ssize_t>(all.numbers.all().size());
  return each(nodes.object, [&](PyObject* node) { return all.visit_inputs(node); }) ? all.found(made) : nullptr;
}

// The properties of the storages of values.
struct Storages {
  explicit Storages(Py_ssize_t values) : places(values) {}
  Numbers places;
  std::vector<int> told, alive;
  std::vector<PyObject*> roles, continued;

  bool visit(PyObject* memory) {
    auto [place, is_new] = places.of(memory);
    if (!is_new) return true;
    PyObject *users = live.of(memory), *part = role.of(memory), *end = dropped.of(memory), *out = external.of(memory);
    PyObject* before = continues.of(memory);
    if (!users || !part || !end || !out || !before) return false;
    int is_alive = PyObject_IsTrue(users), is_out = PyObject_IsTrue(out);
    if (is_alive < 0 || is_out < 0) return false;
    if (!is_alive && part == Py_None && end != Py_None && !is_out) return true;
    if (is_alive) alive.push_back(place);
    if (is_out && before != Py_None) continued.push_back(memory);
    told.insert(told.end(), {place, is_alive, end == Py_None});
    roles.push_back(part);
    return true;
  }
};

// Whether more nodes need `object` than `count`; -1 with an exception.
int is_needed_beyond(const Slot& uses, PyObject* object, long count) {
  PyObject* number = uses.of(object);
  if (number == nullptr) return -1;
  long all = PyLong_AsLong(number);
  return all == -1 && PyErr_Occurred() ? -1 : all > count;
}

// The numbers of those `objects` that more nodes need than the given counts.
bool needed_beyond(
    const Slot& uses, const std::vector<PyObject*>& objects, const std::vector<long>& counts, std::vector<int>& found) {
  for (size_t number = 0; number < objects.size(); number++) {
    int is_needed = is_needed_beyond(uses, objects[number], counts[number]);
    if (is_needed < 0) return false;
    if (is_needed) found.push_back(static_cast<int>(number));
  }
  return true;
}

// The storages of a subgraph's values, by number, and which of them are needed outside of it.
struct Memory : Storages {
  explicit Memory(Py_ssize_t values) : Storages(values) { place_of_value.reserve(values); }
  std::vector<int> place_of_value, outside, later, beyond;

  bool visit_all(const std::vector<PyObject*>& values, size_t made, const int* wiring, size_t uses) {
    for (PyObject* value : values) {
      PyObject* memory = storage.of(value);
      if (memory == nullptr || !visit(memory)) return false;
      if (place_of_value.size() >= made) outside.push_back(places.of(memory).first);
      place_of_value.push_back(places.of(memory).first);
    }
    std::vector<long> counts(values.size()), counts_of_storages(places.all().size());
    for (size_t each = 0; each < uses; each++) {
      counts.at(wiring[each])++;
      counts_of_storages[place_of_value[wiring[each]]]++;
    }
    return needed_beyond(uses_of_value, values, counts, later) &&
        needed_beyond(uses_of_storage, places.all(), counts_of_storages, beyond);
  }
};

PyObject* storages_of(PyObject*, PyObject* args) {
  PyObject *values, *wiring;
  Py_ssize_t made;
  if (!PyArg_ParseTuple(args, "O!nS", &PyList_Type, &values, &made, &wiring)) return nullptr;
  std::vector<PyObject*> items(PySequence_Fast_ITEMS(values), PySequence_Fast_ITEMS(values) + PyList_GET_SIZE(values));
  Memory all(items.size());
  auto* numbers = reinterpret_cast<const int*>(PyBytes_AS_STRING(wiring));
  if (!all.visit_all(items, made, numbers, PyBytes_GET_SIZE(wiring) / sizeof(int))) return nullptr;
  Reference storages(list_of(all.places.all())), places(tuple_of(all.outside)), told(bytes_of(all.told)),
      roles(tuple_of(all.roles)), alive(tuple_of(all.alive)), continued(list_of(all.continued)),
      needed(tuple_of(all.later)), kept(tuple_of(all.beyond));
  if (!storages || !places || !told || !roles || !alive || !continued || !needed || !kept) return nullptr;
  return PyTuple_Pack(
      8, storages.object, places.object, told.object, roles.object, alive.object, continued.object, needed.object,
      kept.object);
}

// The content of a subgraph's key, as numbers and addresses.
struct Words {
  std::vector<int64_t> all;

  void add(int64_t number) { all.push_back(number); }
  void add(PyObject* object) { all.push_back(reinterpret_cast<int64_t>(object)); }
  template <typename Item>
  void add(const std::vector<Item>& items) {
    add(static_cast<int64_t>(items.size()));
    for (Item item : items) add(item);
  }
};

// The same as `Storage.origin`; borrowed.
PyObject* origin_of(PyObject* one) {
  PyObject* before = continues.of(one);
  if (before == nullptr || before == Py_None) return before == nullptr ? nullptr : one;
  PyObject* found = known_origin.of(one);
  if (found != Py_None) return found;
  // A loop that reads its loss adds a storage per parameter in each iteration: follow the chain once.
  for (found = before; found != nullptr;) {
    PyObject *known = known_origin.of(found), *earlier = continues.of(found);
    if (known == nullptr || earlier == nullptr) return nullptr;
    if (known == Py_None && earlier != Py_None) {
      found = earlier;
      continue;
    }
    if (known != Py_None) found = known;
    break;
  }
  return known_origin.set(one, found) ? found : nullptr;
}

// Which outside storages are the memory of others.
bool add_continued(Words& words, const Memory& memory) {
  if (memory.continued.empty()) return true;
  Reference origins(PyDict_New());  // the number of the first storage with each origin
  if (!origins) return false;
  for (size_t place = 0; place < memory.places.all().size(); place++) {
    PyObject *one = memory.places.all()[place], *is_out = external.of(one), *before = continues.of(one);
    if (!is_out || !before) return false;
    if (is_out != Py_True) continue;
    Reference number(PyLong_FromSize_t(place));
    PyObject* origin = origin_of(one);
    PyObject* first = origin && number ? PyDict_SetDefault(origins.object, origin, number.object) : nullptr;
    if (first == nullptr) return false;
    if (first != number.object || before != Py_None) {
      words.add(static_cast<int64_t>(place));
      words.add(static_cast<int64_t>(PyLong_AsLong(first)));
    }
  }
  return true;
}

// Adds the words of the outside values; 0 if a form is unknown, -1 with an exception.
int add_outside(Words& words, const std::vector<PyObject*>& values, size_t made, const Memory& memory, PyObject* forms) {
  for (size_t number = made; number < values.size(); number++) {
    PyObject *its = meta.of(values[number]), *on = storage.of(values[number]);
    PyObject* size = its && on ? nbytes_of_storage.of(on) : nullptr;
    if (size == nullptr) return -1;
    PyObject* form = PyDict_GetItemWithError(forms, its);
    if (form == nullptr) return PyErr_Occurred() ? -1 : 0;
    words.add(form);
    words.add(static_cast<int64_t>(PyLong_AsLongLong(size)));
  }
  words.add(memory.outside);
  return PyErr_Occurred() ? -1 : 1;
}

PyObject* fingerprint(PyObject*, PyObject* args) {
  PyObject *given, *known, *forms, *purpose;
  Py_ssize_t pending;
  if (!PyArg_ParseTuple(args, "OO!O!On", &given, &PyDict_Type, &known, &PyDict_Type, &forms, &purpose, &pending)) {
    return nullptr;
  }
  Reference nodes(PySequence_Fast(given, "internal error: not a sequence"));
  if (!nodes) return nullptr;
  Survey all(known, PySequence_Fast_GET_SIZE(nodes.object));
  if (!all.scalars) return nullptr;
  if (!each(nodes.object, [&](PyObject* node) { return all.visit(node); })) {
    if (!all.is_odd && !PyErr_ExceptionMatches(PyExc_KeyError)) return nullptr;
    PyErr_Clear();  // of an unknown step
    Py_RETURN_NONE;
  }
  size_t made = all.numbers.all().size();
  if (!each(nodes.object, [&](PyObject* node) { return all.visit_inputs(node); })) return nullptr;
  const std::vector<PyObject*>& values = all.numbers.all();
  Memory memory(values.size());
  if (!memory.visit_all(values, made, all.wiring.data(), all.wiring.size())) return nullptr;
  bool is_whole = pending == PySequence_Fast_GET_SIZE(nodes.object);
  if (is_whole) {
    memory.later.clear();
    memory.beyond.clear();
  }
  Words words;
  words.all.reserve(64 + 3 * all.steps.size() + all.wiring.size() + 4 * values.size());
  words.add(purpose);
  words.add(all.mode);
  words.add(static_cast<int64_t>(is_whole));
  words.add(static_cast<int64_t>(made));
  words.add(all.steps);
  words.add(all.phases);
  words.add(all.wiring);
  words.add(all.users);
  words.add(memory.told);
  words.add(memory.roles);
  words.add(memory.later);
  words.add(memory.beyond);
  int is_known = add_outside(words, values, made, memory, forms);
  if (is_known < 0 || !add_continued(words, memory)) return nullptr;
  if (is_known == 0) Py_RETURN_NONE;
  words.add(static_cast<int64_t>(-1));
  if (all.graphs.size() > 1) {
    if (!each(nodes.object, [&](PyObject* node) {
          PyObject* whose = graph.of(node);
          words.add(static_cast<int64_t>(std::find(all.graphs.begin(), all.graphs.end(), whose) - all.graphs.begin()));
          return whose != nullptr;
        })) {
      return nullptr;
    }
  }
  std::vector<PyObject*> users, later;
  std::vector<int> kept;
  for (int number : all.users) users.push_back(values[number]);
  for (int number : memory.later) {
    if (static_cast<size_t>(number) < made) {
      later.push_back(values[number]);
    } else {
      kept.push_back(number - static_cast<int>(made));
    }
  }
  Reference print(PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(words.all.data()), words.all.size() * sizeof(int64_t))),
      items(list_of(values)), outside(list_of({values.begin() + made, values.end()})), graphs(list_of(all.graphs)),
      shown(list_of(users)), draws(tuple_of(all.draws)), storages(list_of(memory.places.all())),
      alive(tuple_of(memory.alive)), needed(list_of(later)), stay(tuple_of(kept));
  if (!print || !items || !outside || !graphs || !shown || !draws || !storages || !alive || !needed || !stay) {
    return nullptr;
  }
  return PyTuple_Pack(
      12, print.object, items.object, outside.object, graphs.object, shown.object, all.scalars.object, draws.object,
      storages.object, alive.object, needed.object, stay.object, is_whole ? Py_True : Py_False);
}

// Drops what `node` has written from the shadows.
bool forget_shadows(PyObject* node) {
  PyObject *written = writes.of(node), *is_folded = folded.of(node);
  if (written == nullptr || is_folded == nullptr) return false;
  if (is_folded == Py_True) return true;
  return each(written, [](PyObject* memory) { return shadow.set(memory, Py_None); });
}

struct Times {  // an array of doubles
  Py_buffer view{};

  Times() = default;
  Times(const Times&) = delete;
  Times& operator=(const Times&) = delete;
  ~Times() { PyBuffer_Release(&view); }

  bool take(PyObject* array) {
    if (PyObject_GetBuffer(array, &view, PyBUF_FORMAT) != 0) return false;
    if (std::string_view(view.format) == "d") return true;
    PyErr_SetString(PyExc_TypeError, "internal error: times are an array of doubles");
    return false;
  }
  Py_ssize_t count() const { return view.len / static_cast<Py_ssize_t>(sizeof(double)); }
  double operator[](Py_ssize_t at) const { return static_cast<const double*>(view.buf)[at]; }
};

PyObject* note_done(PyObject*, PyObject* args) {
  PyObject *nodes, *given;
  if (!PyArg_ParseTuple(args, "OO", &nodes, &given)) return nullptr;
  Times times;
  if (given != Py_None && !times.take(given)) return nullptr;
  Reference none(PyTuple_New(0));
  if (!none) return nullptr;
  Py_ssize_t at = 0;
  bool is_done = each(nodes, [&](PyObject* node) {
    if (!state.set(node, done)) return false;
    if (given != Py_None) {
      if (at + 1 >= times.count()) {
        PyErr_SetString(PyExc_IndexError, "internal error: a time for each node");
        return false;
      }
      Reference time(PyFloat_FromDouble(times[at + 1] - times[at]));
      if (!time || !seconds.set(node, time.object)) return false;
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

bool count_down(const Slot& uses, PyObject* object) {
  PyObject* number = uses.of(object);
  if (number == nullptr) return false;
  long count = PyLong_AsLong(number);
  if (count == -1 && PyErr_Occurred()) return false;
  Reference less(PyLong_FromLong(count - 1));
  return less && uses.set(object, less.object);
}

PyObject* note_used(PyObject*, PyObject* nodes) {
  bool is_done = each(nodes, [](PyObject* node) {
    PyObject* given = inputs.of(node);
    return given != nullptr && each(given, [](PyObject* value) {
      if (!count_down(uses_of_value, value)) return false;
      PyObject* memory = storage.of(value);
      return memory != nullptr && count_down(uses_of_storage, memory);
    });
  });
  if (!is_done) return nullptr;
  Py_RETURN_NONE;
}

// Whether `node` has run; -1 with an exception.
int has_run(PyObject* node) {
  PyObject* now = state.of(node);
  if (now == nullptr) return -1;
  return now == done ? 1 : PyObject_RichCompareBool(now, done, Py_EQ);
}

PyObject* take(PyObject*, PyObject* args) {
  PyObject *values, *kept, *nodes = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!|O", &PyList_Type, &values, &PyTuple_Type, &kept, &nodes)) return nullptr;
  bool have_run = false;
  bool is_done = nodes == nullptr || each(nodes, [&](PyObject* node) {
    int is_over = has_run(node);
    have_run = have_run || is_over > 0;
    return is_over >= 0;
  });
  if (!is_done) return nullptr;
  if (have_run) Py_RETURN_NONE;
  Reference tensors(PyList_New(0));
  if (!tensors) return nullptr;
  is_done = each(values, [&](PyObject* value) {
    PyObject* there = real.of(value);
    if (there == Py_None) PyErr_SetString(PyExc_RuntimeError, "internal error: an input was freed before its last use");
    return there != nullptr && there != Py_None && PyList_Append(tensors.object, there) == 0;
  });
  if (!is_done) return nullptr;
  std::vector<bool> stays(PyList_GET_SIZE(values));
  is_done = each(kept, [&](PyObject* number) {
    stays.at(PyLong_AsSize_t(number)) = true;
    return true;
  });
  for (size_t at = 0; is_done && at < stays.size(); at++) {
    is_done = stays[at] || real.set(PyList_GET_ITEM(values, at), Py_None);
  }
  return is_done ? Py_NewRef(tensors.object) : nullptr;
}

PyObject* release_inputs(PyObject*, PyObject* args) {
  PyObject *nodes, *outside, *later, *pending;
  if (!PyArg_ParseTuple(
          args, "OO!O!O!", &nodes, &PyList_Type, &outside, &PyList_Type, &later, &PyDict_Type, &pending)) {
    return nullptr;
  }
  auto one = [](PyObject* value) {
    int is_needed = is_needed_beyond(uses_of_value, value, 0);
    return is_needed >= 0 && (is_needed || real.set(value, Py_None));
  };
  bool is_done = each(outside, one) && each(later, one) && each(nodes, [&](PyObject* node) {
    if (PyDict_DelItem(pending, node) == 0) return true;
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return false;
    PyErr_Clear();
    return true;
  });
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
    int is_over = has_run(node);
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
  bool is_done = each(given, one) && each_node(nodes, {&outputs}, {&outputs}, [&](PyObject* node) {
    PyObject* made = outputs.of(node);
    return made != nullptr && each(made, one);
  });
  if (!is_done) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "The classes of nodes, values, storages and steps."},
    {"unfinished", unfinished, METH_O, "See node_passes.unfinished."},
    {"begin", begin, METH_O, "See node_passes.begin."},
    {"survey", survey, METH_VARARGS, "See node_passes.survey."},
    {"fingerprint", fingerprint, METH_VARARGS, "See node_passes.fingerprint."},
    {"take", take, METH_VARARGS, "See node_passes.take."},
    {"release_inputs", release_inputs, METH_VARARGS, "See node_passes.py."},
    {"storages_of", storages_of, METH_VARARGS, "See node_passes.storages_of."},
    {"note_done", note_done, METH_VARARGS, "See node_passes.note_done."},
    {"note_unused", note_unused, METH_VARARGS, "See node_passes.note_unused."},
    {"note_used", note_used, METH_O, "See node_passes.note_used."},
    {"unlink_tensors", unlink_tensors, METH_VARARGS, "See pending.unlink_tensors."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.node_passes", "Passes over nodes.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_node_passes() {
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
