# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Compiled recorder: the fast path of an ordinary op.

It does the same as :meth:`lazyviz.record.recorder.Recorder.record` for an op whose answer is in the shape
cache, call by call, on the same objects. The classes are still those of Python, whose slots are read and
written at the offsets of their member descriptors. Anything that is not ordinary (an unknown shape, a draw, a
sync point, the kernels of an absent GPU, ...) is detected before anything has been changed, and is left to
the Python recorder. lazyviz works the same without this module; the tests run both ways.
"""

from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_AsTuple
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcmp, memcpy, memmove, memset
from operator import attrgetter
from time import perf_counter


cdef extern from *:
    """
    /* Errors show the user's frames, none of a module that has no source beside it. */
    #ifndef LAZYVIZ_FULL_TRACEBACK
    #define PyTraceBack_Here(frame) ((void) (frame))
    #endif
    #ifdef __GNUC__ /* Code for errors is kept apart from that which runs for every op. */
    static void __Pyx_AddTraceback(const char *, int, int, const char *) __attribute__((cold));
    #endif
    """

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX
    # No key here has a hash or comparison that fails; the other function keeps an error that is set.
    PyObject *PyDict_GetItem "PyDict_GetItemWithError"(object mapping, object key)
    object PyObject_GenericGetDict(object item, void *unused)
    Py_ssize_t PyUnicode_Tailmatch(object text, object part, Py_ssize_t start, Py_ssize_t end, int direction) except -1
    int PyGC_Disable()
    int PyGC_Enable()

    ctypedef struct PyMemberDef:
        Py_ssize_t offset

    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

    ctypedef struct PyTypeObject:
        PyObject *tp_dict
        PyObject *(*tp_new)(PyTypeObject *, PyObject *, PyObject *) except NULL

    ctypedef struct PyThreadState:
        pass

    ctypedef struct PyFrameObject:
        pass

    ctypedef struct PyCodeObject:
        pass

    PyThreadState *PyThreadState_Get()
    PyFrameObject *PyThreadState_GetFrame(PyThreadState *)
    PyFrameObject *PyFrame_GetBack(PyFrameObject *)
    PyCodeObject *PyFrame_GetCode(PyFrameObject *)
    void PyObject_GC_UnTrack(void *)
    void PyObject_GC_Track(void *)
    int PyObject_GC_IsTracked(PyObject *)
    long long PyLong_AsLongLongAndOverflow(object, int *)
    unsigned long PyThread_get_thread_ident()
    void PyType_Modified(PyTypeObject *)


cdef extern from *:
    """
    #include <frameobject.h>
    #include <string.h>

    /* An instance with empty slots that the garbage collector does not see. */
    static PyObject *new_hidden(PyTypeObject *cls) {
        PyObject *made = PyObject_GC_New(PyObject, cls);
        if (made != NULL) memset(made + 1, 0, cls->tp_basicsize - sizeof(PyObject));
        return made;
    }

    /* Whether a weak reference is to this object. */
    static inline int refers_to(PyObject *reference, PyObject *object) {
    #if PY_VERSION_HEX >= 0x030D0000
        PyObject *found = NULL;
        int is_same = PyWeakref_GetRef(reference, &found) > 0 && found == object;
        Py_XDECREF(found);
        return is_same;
    #else
        return PyWeakref_GET_OBJECT(reference) == object;
    #endif
    }

    #if PY_VERSION_HEX >= 0x030B0000
    #define instruction_of(frame) PyFrame_GetLasti(frame)
    #else
    #define instruction_of(frame) ((frame)->f_lasti)
    #endif
    """
    PyObject *new_hidden(PyTypeObject *) except NULL
    bint refers_to(object, object) noexcept
    int instruction_of(PyFrameObject *)


# Same layout as in `dispatch.cpp`, which documents the fields.
ctypedef struct Quick:
    PyObject *(*make_wrapper)(PyObject *, PyObject *, PyObject *, int64_t, PyObject *, PyObject *) except NULL
    size_t (*implementation)(PyObject *) noexcept
    size_t (*storage_address)(PyObject *) noexcept
    int (*is_inference)(PyObject *) noexcept
    int64_t (*fixed_nbytes)(PyObject *) noexcept
    int (*calling_node)(uint64_t *) noexcept
    uint64_t (*next_sequence)() noexcept
    int (*grad_mode)() noexcept
    int (*inference_mode)() noexcept
    PyObject *(*default_dtype)() except NULL
    PyObject *(*alias)(PyObject *) except NULL
    int (*is_given)(PyObject *) noexcept
    int (*has_layout)(PyObject *, PyObject *, PyObject *, int64_t, PyObject *) noexcept
    PyObject *(*number)(PyObject *) except NULL
    int (*add_number)(PyObject *, PyObject *) except 0
    PyObject *(*copy_number)(PyObject *, int64_t) except NULL
    int (*plain_memory)(PyObject *) noexcept

SOURCE = ""  # set by the build: a digest of this file, by which a stale build is detected

cdef object MISS = object()
cdef object AGAIN = object()  # something has changed while a call was being recorded


# --- objects with slots -------------------------------------------------------------


cdef inline object taken(PyObject *raw):
    """An object that C returned as a new reference."""
    made = <object> raw
    Py_XDECREF(raw)  # Cython holds its own reference
    return made


cdef inline object get(object item, Py_ssize_t at):
    """The content of a slot, which must not be empty."""
    return <object> (<PyObject **> (<char *> <void *> item + at))[0]


cdef inline PyObject *raw_slot(object item, Py_ssize_t at) noexcept:
    """The content of a slot, to be compared."""
    return (<PyObject **> (<char *> <void *> item + at))[0]


cdef object ZERO = 0  # there is one object for it


cdef inline bint is_set(object item, Py_ssize_t at) except -1:
    """Whether the content of a slot, most often a number, is true."""
    cdef PyObject *content = raw_slot(item, at)
    if content == <PyObject *> ZERO:
        return False
    return type(<object> content) is int or <bint> bool(<object> content)


cdef inline void put(object item, Py_ssize_t at, object content) noexcept:
    cdef PyObject **place = <PyObject **> (<char *> <void *> item + at)
    cdef PyObject *before = place[0]
    Py_INCREF(content)
    place[0] = <PyObject *> content
    Py_XDECREF(before)


cdef Py_ssize_t offset(type cls, str name) except -1:
    """The offset of the slot ``name`` in instances of ``cls``."""
    for base in cls.__mro__:
        member = base.__dict__.get(name)
        if type(member).__name__ == "member_descriptor":
            return (<PyMemberDescrObject *> <void *> member).d_member.offset
    raise ImportError(f"{cls.__name__} has no slot {name}")


cdef inline object of_class(type cls, str name):
    """The class's own attribute ``name``."""
    cdef PyObject *found = PyDict_GetItem(<object> (<PyTypeObject *> cls).tp_dict, name)
    if found is NULL:
        raise AttributeError(name)
    return <object> found


# --- visibility to the garbage collector ----------------------------------------------


# Recorded objects exist until their graph is freed, and there are many of them, so the collector would
# traverse them several times for nothing. Therefore they are hidden from the collector until the graph's
# owner is gone (`show`). Objects that refer to them are visible, and they refer to no user objects that the
# graph does not keep alive anyway. Weak references with a callback must be visible, because the collector
# removes them from its lists without checking whether they are in one.


cdef inline object hidden(object item):
    PyObject_GC_UnTrack(<void *> item)
    return item


cdef inline void show_one(object item) noexcept:
    if not PyObject_GC_IsTracked(<PyObject *> item):
        PyObject_GC_Track(<void *> item)


cdef void show_list(object item):
    if type(item) is list:
        show_one(item)


cdef void show_value(object value):
    show_one(value)
    storage = get(value, V_storage)
    show_one(storage)
    show_list(get(storage, S_readers))


cdef void show_node(object node):
    show_one(node)
    args = get(node, N_args)
    if type(args) is tuple and len(<tuple> args) > 0:
        show_one(args)
    show_list(get(node, N_inputs))
    show_list(get(node, N_outputs))
    show_list(get(node, N_after))
    show_list(get(node, N_writes))


def show(graph):
    """Show the recorded objects of ``graph`` to the garbage collector: the graph has no owner any more."""
    for node in <list> get(graph, G_nodes):
        show_node(node)
        for value in get(node, N_inputs):
            show_value(value)
        for value in get(node, N_outputs):
            show_value(value)
    for value in <list> get(graph, G_inputs):
        show_value(value)
    for storage in <list> get(graph, G_storages):
        show_one(storage)
        show_list(get(storage, S_readers))


cdef class Maker:
    """Creates instances of a class with slots, in the state after ``__init__``, by copying a template.

    The garbage collector does not see them.
    """

    cdef type cls
    cdef object template
    cdef Py_ssize_t[64] offsets
    cdef int count

    def __init__(self, template):
        self.cls = type(template)
        self.template = template
        names = {name for base in self.cls.__mro__ for name in getattr(base, "__slots__", ())}
        for name in names - {"__weakref__"}:
            getattr(template, name)  # no slot is empty
            if self.count == 64:
                raise ImportError(f"{self.cls.__name__} has more than 64 slots")
            self.offsets[self.count] = offset(self.cls, name)
            self.count += 1

    cdef inline object make(self):
        cdef PyObject *raw = new_hidden(<PyTypeObject *> self.cls)
        cdef PyObject *content
        cdef char *template = <char *> <void *> self.template
        cdef int number
        for number in range(self.count):
            content = (<PyObject **> (template + self.offsets[number]))[0]
            Py_INCREF(<object> content)
            (<PyObject **> (<char *> raw + self.offsets[number]))[0] = content
        return taken(raw)


# --- objects of other lazyviz modules; filled by :func:`connect` ------------------------

cdef object slow, Unexamined, LazyTensor, LazyParameter, Tensor, Parameter, OpOverload, TensorRef, weak, stand_ins, wrap, storage_address
cdef object dispatch_depth, default_dtype, grad_enabled, inference_enabled, engine_node, sequence_number, is_of_python
cdef object make_wrapper, strided, is_zero, written_tensors, count_writes, sharing, extent, note_death, tape, recorder, scopes, sources, shapes, overlapped
cdef object Deferred, complete, generators, TrackedStorage, Unreachable, cpu, alias, memory_of, is_ordinary, is_given, add_, increment_version, forward_mode_active, symbolic
cdef object learn, info_of, engine_is_sole_owner, slow_record, take, is_calling, default_generator, TrackedValue, Dtype, Layout, MemoryFormat
cdef object recording_state, table, runs, external, is_in_op, collection_level
cdef dict infos, entries, above, pending_nodes, held
cdef long hit_count = 0
cdef Maker nodes, values_, storages_
cdef object node_numbers, value_numbers, storage_numbers
cdef object Shadow, ENTRY, MISSING, ref_cls, can_run_without, nowhere, known_number, number_of_one_op, raise_from_read, number_in
cdef object gradient_check, is_made_of_others, shape_only, is_reader, run_inside
cdef object slow_sync, slow_release_unused, SyncPoint, OtherRanks, ADDRESSES, with_earlier_backward, is_small_update
cdef object slow_before_step, slow_after_step
cdef Py_ssize_t few, small
cdef object sequence_number_of = attrgetter("sequence")
cdef int MOST_FRAMES
cdef uint64_t NO_SEQUENCE
cdef uint64_t snapshot_key, autocast_keys
cdef Quick in_python
cdef const Quick *quick
cdef Py_ssize_t key_set_offset

# Slots, by class and name.
cdef Py_ssize_t N_index, N_op, N_args, N_kwargs, N_graph, N_sequence, N_inputs, N_outputs, N_entry, N_after, N_writes
cdef Py_ssize_t N_module, N_root, N_source, N_callers, N_grad, N_inference, N_phase, N_forward, N_state
cdef Py_ssize_t N_folded, N_missed, N_draws, N_error
cdef Py_ssize_t V_id, V_meta, V_storage, V_node, V_index, V_symbolic, V_tensor, V_real, V_uses, V_name, V_given
cdef Py_ssize_t S_id, S_nbytes, S_device, S_created, S_graph, S_writer, S_readers, S_live, S_uses, S_foreign
cdef Py_ssize_t S_replaced, S_address, S_dropped, S_dropped_in, S_external, S_role, S_name, S_shadow
cdef Py_ssize_t M_shape, M_stride, M_offset, M_dtype, M_device, M_flags
cdef Py_ssize_t O_meta, O_source, O_itself, O_fresh, O_nbytes
cdef Py_ssize_t I_container, I_outputs, I_on_meta, I_special, I_to_cpu, I_restructured, I_dtype
cdef Py_ssize_t most_tensors, L_line, R_value, R_next, G_nodes, G_storages, G_inputs, G_calls, G_lost, RS_held_bytes_limit
cdef Py_ssize_t RS_graph, RS_pauses, RS_absent, RS_busy, RS_appending, RS_last_change, RS_viewed, RS_explicit_detach, RS_owner, RS_summing, RS_batch, PR_active_thread, T_outside, T_storages, T_computed, T_exported, T_arrivals
cdef Py_ssize_t C_root, C_module, C_callers, C_entered, C_by_sequence, C_phase, C_parameters, C_roots, C_paths
cdef Py_ssize_t C_known_roots, C_learnt, C_met, F_block
cdef enum: FIELDS = 7
cdef Py_ssize_t[FIELDS] P_fields  # of a sync point, in the order of its constructor's arguments
cdef object OutputSpec, new_object = object.__new__


def connect(**parts):
    """Connect the module; ``parts`` are the objects for the names above.

    Returns the function to dispatch to.

    Raises:
        ImportError: a class has not the slots that this module was written for.
    """
    global slow, Unexamined, LazyTensor, LazyParameter, Tensor, Parameter, OpOverload, TensorRef, weak, stand_ins, wrap, storage_address
    global dispatch_depth, default_dtype, grad_enabled, inference_enabled, engine_node, sequence_number, is_of_python
    global make_wrapper, strided, is_zero, written_tensors, count_writes, sharing, extent, note_death, tape, recorder, scopes, sources, shapes, overlapped
    global cpu, alias, memory_of, is_ordinary, is_given, add_, increment_version, forward_mode_active, engine_is_sole_owner, symbolic
    global slow_sync, slow_release_unused, SyncPoint, OtherRanks, ADDRESSES, with_earlier_backward, few, small, is_small_update
    global slow_before_step, slow_after_step, run_inside, Shadow, can_run_without, nowhere, known_number, number_of_one_op, raise_from_read, number_in, gradient_check, is_made_of_others, shape_only, is_reader
    global Deferred, complete, generators, slow_record, NO_SEQUENCE, take, quick, is_calling, default_generator, TrackedValue, Dtype, Layout, MemoryFormat
    global recording_state, table, runs, external, pending_nodes, recorder, is_in_op
    global learn, info_of, TrackedStorage, Unreachable, infos, entries, above, entered_frames, nodes, values_, storages_
    global held, most_tensors, node_numbers, value_numbers, storage_numbers, ENTRY, MISSING, MOST_FRAMES, ref_cls, snapshot_key, autocast_keys, key_set_offset, OutputSpec
    slow, Unexamined = parts["slow"], parts["Unexamined"]
    can_run_without, nowhere = parts["can_run_without"], parts["NOWHERE"]
    Shadow, run_inside = parts["Shadow"], parts["run_inside"]
    slow_sync, sync_points = parts["slow_sync"], parts["sync_points"]
    SyncPoint, OtherRanks, ADDRESSES = sync_points.SyncPoint, sync_points.OtherRanks, sync_points.ADDRESSES
    few, small = sync_points.FEW, sync_points.SMALL
    with_earlier_backward, is_small_update = sync_points.with_earlier_backward, sync_points.is_small_update
    slow_before_step, slow_after_step = parts["slow_before_step"], parts["slow_after_step"]
    slow_release_unused, folding = parts["slow_release_unused"], parts["constant_folding"]
    is_reader, known_number, number_of_one_op = parts["is_reader"], folding.number, folding.number_of_one_op
    gradient_check, shape_only = folding.CHECK_GRADIENTS, folding.SHAPE_ONLY
    raise_from_read, number_in = parts["raise_from_read"], parts["number_in"]
    LazyTensor, LazyParameter = parts["LazyTensor"], parts["LazyParameter"]
    Tensor, Parameter = parts["Tensor"], parts["Parameter"]
    OpOverload, OutputSpec = parts["OpOverload"], parts["OutputSpec"]
    TensorRef, TrackedStorage, Unreachable = parts["TensorRef"], parts["TrackedStorage"], parts["Unreachable"]
    ref_cls, most_tensors = TensorRef.__base__, parts["MOST_TENSORS"]
    stand_ins, wrap, storage_address = parts["cuda"].STAND_INS, parts["wrap"], parts["storage_address"]
    dispatch_depth, default_dtype = parts["dispatch_depth"], parts["default_dtype"]
    grad_enabled, inference_enabled = parts["grad_enabled"], parts["inference_enabled"]
    engine_node, sequence_number = parts["engine_node"], parts["sequence_number"]
    is_of_python = parts["is_of_python"]
    make_wrapper, strided, is_zero = parts["make_wrapper"], parts["strided"], parts["is_zero"]
    written_tensors, count_writes = parts["written_tensors"], parts["count_writes"]
    sharing, extent, note_death = parts["sharing"], parts["extent"], parts["note_death"]
    add_, increment_version = parts["add_"], parts["increment_version"]
    forward_mode_active, engine_is_sole_owner = parts["forward_mode_active"], parts["engine_is_sole_owner"]
    cpu, alias, memory_of, is_given = parts["cpu"], parts["alias"], parts["memory_of"], parts["is_given"]
    is_ordinary, symbolic = parts["is_ordinary"], parts["symbolic"]
    TrackedValue, Dtype, Layout, MemoryFormat = type(parts["value"]), parts["dtype"], parts["layout"], parts["memory_format"]
    is_calling, default_generator = parts["is_calling"], parts["default_generator"]
    is_in_op = parts["is_in_op"]
    tape, recorder, Deferred = parts["tape"], parts["recorder"], parts["Deferred"]
    complete = parts["complete"]
    generators = tape.generators
    recording_state, table, runs, external = tape.recording, tape.tensors, tape.runs, tape.external
    pending_nodes = tape.pending
    scopes, shapes = tape.scopes, tape.shapes
    overlapped = tape.memory_holders.overlapped
    sources = scopes.sources
    above, entered_frames = sources._above, ~<uint64_t> 0
    slow_record = recorder.record
    infos, entries = shapes.infos, shapes.entries
    learn, info_of = shapes.learn, shapes.info
    ENTRY, MISSING = parts["ENTRY"], parts["MISSING"]
    MOST_FRAMES, NO_SEQUENCE = parts["MOST_FRAMES"], parts["NO_SEQUENCE"]
    snapshot_key, key_set_offset = parts["snapshot_key"], parts["key_set_offset"]
    autocast_keys, is_made_of_others = parts["cuda"].AUTOCAST_KEYS, parts["cuda"].is_made_of_others
    take, quick = None, &in_python
    if parts["dispatcher"] is not None:
        take = parts["take"]
        quick = <const Quick *> PyCapsule_GetPointer(
            parts["dispatcher"].connect(
                PyCapsule_New(<void *> is_recording, "lazyviz.ready", NULL),
                PyCapsule_New(<void *> record_call, "lazyviz.record", NULL),
                PyCapsule_New(<void *> is_outside, "lazyviz.outside", NULL),
                PyCapsule_New(<void *> is_used, "lazyviz.used", NULL),
                PyCapsule_New(<void *> retire, "lazyviz.retire", NULL),
                MISS,
                parts["mode"],
            ),
            "lazyviz.quick",
        )
    _find_slots(parts)
    nodes, values_, storages_ = Maker(parts["node"]), Maker(parts["value"]), Maker(parts["storage"])
    node_numbers, value_numbers = type(parts["node"])._sequence, type(parts["value"])._ids
    storage_numbers, held = TrackedStorage._ids, TrackedStorage.held
    return dispatch


def _find_slots(parts):
    global N_index, N_op, N_args, N_kwargs, N_graph, N_sequence, N_inputs, N_outputs, N_entry, N_after, N_writes
    global N_module, N_root, N_source, N_callers, N_grad, N_inference, N_phase, N_forward, N_state
    global N_folded, N_missed, N_draws, N_error, S_shadow
    global V_id, V_meta, V_storage, V_node, V_index, V_symbolic, V_tensor, V_real, V_uses
    global S_id, S_nbytes, S_device, S_created, S_graph, S_writer, S_readers, S_live, S_uses, S_foreign
    global S_replaced, S_address, S_dropped, S_dropped_in, S_external, S_role, S_name, V_name, V_given
    global M_shape, M_stride, M_offset, M_dtype, M_device, M_flags
    global O_meta, O_source, O_itself, O_fresh, O_nbytes, I_container, I_outputs, I_on_meta, I_special, R_value, R_next, L_line
    global I_to_cpu, I_restructured, I_dtype, G_nodes, G_storages, G_inputs, G_calls, G_lost, RS_held_bytes_limit
    global RS_graph, RS_pauses, RS_absent, RS_busy, RS_appending, RS_last_change, RS_viewed, RS_explicit_detach, RS_owner, RS_summing, RS_batch, PR_active_thread, T_outside, T_storages, T_computed, T_exported, T_arrivals
    global C_root, C_module, C_callers, C_entered, C_by_sequence, C_phase, C_parameters, C_roots, C_paths
    global C_known_roots, C_learnt, C_met, F_block
    node = type(parts["node"])
    N_index, N_op, N_args = offset(node, "index"), offset(node, "op"), offset(node, "args")
    N_kwargs, N_graph, N_sequence = offset(node, "kwargs"), offset(node, "graph"), offset(node, "sequence")
    N_inputs, N_outputs, N_entry = offset(node, "inputs"), offset(node, "outputs"), offset(node, "entry")
    N_after, N_writes, N_module = offset(node, "after"), offset(node, "writes"), offset(node, "module")
    N_root, N_source, N_callers = offset(node, "root"), offset(node, "source"), offset(node, "callers")
    N_grad, N_inference = offset(node, "grad_mode"), offset(node, "inference_mode")
    N_phase, N_forward, N_state = offset(node, "phase"), offset(node, "forward"), offset(node, "state")
    N_folded, N_missed, N_draws = offset(node, "folded"), offset(node, "missed"), offset(node, "draws")
    N_error = offset(node, "error")
    value = type(parts["value"])
    V_id, V_meta, V_storage = offset(value, "id"), offset(value, "meta"), offset(value, "storage")
    V_node, V_index, V_symbolic = offset(value, "node"), offset(value, "index"), offset(value, "symbolic_shape")
    V_tensor, V_real, V_uses = offset(value, "tensor"), offset(value, "real"), offset(value, "uses")
    V_name, V_given = offset(value, "name"), offset(value, "given")
    storage = TrackedStorage
    S_id, S_nbytes, S_device = offset(storage, "id"), offset(storage, "nbytes"), offset(storage, "device")
    S_created, S_graph = offset(storage, "created"), offset(storage, "graph")
    S_writer, S_readers, S_live = offset(storage, "writer"), offset(storage, "readers"), offset(storage, "live")
    S_uses, S_foreign = offset(storage, "uses"), offset(storage, "foreign")
    S_replaced, S_address = offset(storage, "replaced_by"), offset(storage, "address")
    S_dropped, S_dropped_in = offset(storage, "dropped"), offset(storage, "dropped_in")
    S_external, S_role, S_name = offset(storage, "external"), offset(storage, "role"), offset(storage, "name")
    S_shadow = offset(storage, "shadow")
    meta = parts["TensorMeta"]
    M_shape, M_stride, M_offset = offset(meta, "shape"), offset(meta, "stride"), offset(meta, "offset")
    M_dtype, M_device, M_flags = offset(meta, "dtype"), offset(meta, "device"), offset(meta, "flags")
    spec = OutputSpec
    O_meta, O_source, O_itself = offset(spec, "meta"), offset(spec, "source"), offset(spec, "itself")
    O_fresh, O_nbytes = offset(spec, "fresh"), offset(spec, "nbytes")
    inferred = parts["Inferred"]
    I_container, I_outputs = offset(inferred, "container"), offset(inferred, "outputs")
    I_on_meta, I_special = offset(inferred, "on_meta"), offset(inferred, "special")
    I_to_cpu, I_dtype = offset(inferred, "to_cpu"), offset(inferred, "dtype")
    I_restructured = offset(inferred, "restructured")
    R_value, R_next = offset(TensorRef, "value"), offset(TensorRef, "next")
    L_line = offset(parts["SourceLine"], "line")
    graph = parts["Graph"]
    G_nodes, G_storages, G_inputs = offset(graph, "nodes"), offset(graph, "storages"), offset(graph, "inputs")
    G_calls, G_lost = offset(graph, "calls"), offset(graph, "lost")
    state = type(recording_state)
    RS_graph, RS_pauses, RS_absent = offset(state, "graph"), offset(state, "pauses"), offset(state, "absent")
    RS_explicit_detach = offset(state, "explicit_detach")
    RS_busy, RS_appending = offset(state, "busy"), offset(state, "appending")
    RS_last_change = offset(state, "last_change")
    RS_viewed, RS_owner, RS_summing = offset(state, "viewed"), offset(state, "owner"), offset(state, "summing")
    RS_batch, RS_held_bytes_limit = offset(state, "batch"), offset(state, "held_bytes_limit")
    PR_active_thread = offset(type(runs), "active_thread")
    known = type(table)
    T_outside, T_storages = offset(known, "outside"), offset(known, "storages")
    T_computed, T_exported = offset(known, "computed"), offset(known, "exported")
    T_arrivals = offset(known, "arrivals")
    scope = type(scopes)
    C_root, C_module, C_callers = offset(scope, "root"), offset(scope, "module"), offset(scope, "_callers")
    C_entered, C_by_sequence = offset(scope, "_entered"), offset(scope, "by_sequence")
    C_phase, C_parameters = offset(scope, "phase"), offset(scope, "_parameters")
    C_roots, C_paths = offset(scope, "_roots"), offset(scope, "_paths")
    C_known_roots, C_learnt, C_met = offset(scope, "roots"), offset(scope, "_learnt"), offset(scope, "met")
    F_block = offset(type(sources), "block")
    find_fields_of_sync_points()


# --- positions in graphs --------------------------------------------------------------


cdef object last_position = 0
cdef Py_ssize_t last_count = 0


cdef object position_of(Py_ssize_t count):
    """``count`` as an object that all share which are made at this position of a graph."""
    global last_position, last_count
    if count != last_count:
        last_position, last_count = count, count
    return last_position


# --- dispatch -----------------------------------------------------------------------


cdef class Op:
    """The properties that all calls of one operator share: the needed fields of its ``OpInfo``."""

    cdef object info, positions
    cdef Py_ssize_t last
    cdef frozenset by_type
    cdef bint reads_number, ordinary, adds, detaches, is_view, mutates, hidden, needs_storage, counts_writes, draws
    cdef bint draws_by_default, shape_only
    cdef Py_ssize_t generator
    cdef int made_of_others, begins_with_tensor  # -1: not determined yet

    def __init__(self, info):
        self.info = info
        self.made_of_others = self.begins_with_tensor = -1
        self.by_type = info.by_type
        self.adds = info.adds
        self.detaches = info.detaches
        self.ordinary = not (
            (info.special and not (info.adds or info.detaches or info.copies))
            or info.returns_numbers
            or (info.adds and (info.metadata_only or info.lifts or info.zeros or info.resizes or info.of_parts))
        )
        self.reads_number = info.name == "_local_scalar_dense"
        self.shape_only = info.op in shape_only
        self.is_view = info.is_view
        self.mutates = info.mutates
        self.positions = tuple(info.mutable_positions)
        self.last = max(self.positions, default=0)
        self.hidden = bool(info.hidden_writes)
        self.needs_storage = info.needs_storage
        self.counts_writes = info.counts_writes
        self.draws = info.draws
        self.draws_by_default = info.draws and info.draws_unless is None
        self.generator = MOST_WORDS if info.generator is None else info.generator


# --- replacements for PyTorch calls if `dispatch.cpp` is not available --------------------


cdef PyObject *make_wrapper_in_python(
    PyObject *cls, PyObject *shape, PyObject *stride, int64_t offset, PyObject *dtype, PyObject *device
) except NULL:
    made = make_wrapper(
        <object> cls, <object> shape, <object> stride, offset, <object> dtype, <object> device
    )
    Py_INCREF(made)
    return <PyObject *> made


cdef size_t implementation_in_python(PyObject *tensor) noexcept:
    return (<object> tensor)._cdata


cdef size_t storage_address_in_python(PyObject *tensor) noexcept:
    return storage_address(<object> tensor)


cdef int is_inference_in_python(PyObject *tensor) noexcept:
    return (<object> tensor).is_inference()


cdef int64_t fixed_nbytes_in_python(PyObject *asked) noexcept:
    tensor = <object> asked
    if tensor.layout is not strided or tensor.device != cpu or tensor.is_conj() or tensor.is_neg():
        return -1
    if is_zero(tensor) or tensor.is_quantized or tensor.is_nested:
        return -1
    nbytes = memory_of(tensor).nbytes()
    return nbytes if not nbytes or is_ordinary(tensor) else -1


cdef int calling_node_in_python(uint64_t *sequence) noexcept:
    node = engine_node()
    if node is None:
        return 0
    sequence[0] = node._sequence_nr()
    return 1


cdef uint64_t next_sequence_in_python() noexcept:
    return sequence_number()


cdef int grad_mode_in_python() noexcept:
    return grad_enabled()


cdef int inference_mode_in_python() noexcept:
    return inference_enabled()


cdef PyObject *default_dtype_in_python() except NULL:
    dtype = default_dtype()
    Py_INCREF(dtype)
    return <PyObject *> dtype


cdef PyObject *alias_in_python(PyObject *tensor) except NULL:
    made = alias(<object> tensor)
    Py_INCREF(made)
    return <PyObject *> made


cdef int is_given_in_python(PyObject *tensor) noexcept:
    return is_given(<object> tensor)


cdef int has_layout_in_python(
    PyObject *asked, PyObject *shape, PyObject *stride, int64_t offset, PyObject *dtype
) noexcept:
    tensor = <object> asked
    return (
        tensor.dtype is <object> dtype
        and tensor.shape == <object> shape
        and tensor.stride() == <object> stride
        and tensor.storage_offset() == offset
    )


cdef int plain_memory_in_python(PyObject *tensor) noexcept:
    return 0  # `slow` decides


cdef PyObject *number_in_python(PyObject *tensor) except NULL:
    Py_INCREF(None)
    return <PyObject *> None  # `number_in` decides


in_python.make_wrapper = make_wrapper_in_python
in_python.implementation = implementation_in_python
in_python.storage_address = storage_address_in_python
in_python.is_inference = is_inference_in_python
in_python.fixed_nbytes = fixed_nbytes_in_python
in_python.plain_memory = plain_memory_in_python
in_python.calling_node = calling_node_in_python
in_python.next_sequence = next_sequence_in_python
in_python.grad_mode = grad_mode_in_python
in_python.inference_mode = inference_mode_in_python
in_python.default_dtype = default_dtype_in_python
in_python.alias = alias_in_python
in_python.is_given = is_given_in_python
in_python.has_layout = has_layout_in_python
in_python.number = number_in_python
in_python.add_number = NULL  # and nobody asks for a copy


cdef dict no_kwargs = {}  # shared by all nodes that have none, since nothing writes to it
cdef dict ops = {}  # by id of the operator, which its OpInfo keeps alive


cdef struct Met:
    PyObject *func
    PyObject *op  # which `ops` has


cdef Met[256] met_ops  # the most recent ones, by address


cdef Op op_of(object func):
    cdef Op op, mine
    cdef Met *met = &met_ops[(<size_t> <void *> func >> 4) * <size_t> 0x9E3779B97F4A7C15 >> 56]
    if met.func == <PyObject *> func:
        return <Op> met.op
    cdef PyObject *found = PyDict_GetItem(ops, <size_t> <void *> func)
    if found is NULL:
        info = infos.get(<size_t> <void *> func) or info_of(func)
        mine = Op(info)
        op = <Op> ops.setdefault(<size_t> <void *> func, mine)
        if op is mine and take is not None:  # else another thread was first
            take(func, op.ordinary or op.reads_number)
    else:
        op = <Op> found
    met.func, met.op = <PyObject *> func, <PyObject *> op
    return op


# --- answers of the shape cache -----------------------------------------------------


# The key of the shape cache, a tuple of everything that an answer depends on, is slow to create and hash. So
# the most recent answers are also found by words: numbers, and the addresses of objects that are identical
# whenever they are equal (metadata, dtypes, classes, names). A call with any other argument is looked up by
# its key.
cdef enum:
    MOST_WORDS = 96
    ANSWERS = 4096


cdef struct Words:
    int count  # -1: the call cannot be expressed in words
    size_t[MOST_WORDS] items


cdef struct Answer:
    int count
    size_t *words
    PyObject *key  # keeps alive the objects whose addresses are in the words
    PyObject *inferred


cdef Answer[ANSWERS] answers


cdef inline void add(Words *words, size_t word) noexcept:
    if words.count == MOST_WORDS:
        words.count = -1
    elif words.count >= 0:
        words.items[words.count] = word
        words.count += 1


cdef inline void add_object(Words *words, object item) noexcept:
    add(words, <size_t> <void *> item)


cdef void add_number(Words *words, object number, type cls):
    cdef int overflow = 0
    cdef double real
    cdef size_t bits = 0
    if cls is float:
        real = number
        memcpy(&bits, &real, sizeof(real))
        add(words, bits)
    elif cls is bool:
        add_object(words, number)
    elif cls is int:
        add(words, <size_t> PyLong_AsLongLongAndOverflow(number, &overflow))
        if overflow:
            words.count = -1
    else:
        words.count = -1


cdef Answer *answer_to(Words *words) noexcept:
    """The entry for these words in the table; it has the answer if its words are equal."""
    cdef size_t hashed = words.count
    cdef int at
    for at in range(words.count):
        hashed = (hashed ^ words.items[at]) * <size_t> 0x9E3779B97F4A7C15
        hashed ^= hashed >> 29
    return &answers[hashed & (ANSWERS - 1)]


cdef inline bint is_for(Answer *answer, Words *words) noexcept:
    return answer.count == words.count and memcmp(answer.words, words.items, words.count * sizeof(size_t)) == 0


cdef object remember(Answer *answer, Words *words, object key, object inferred):
    cdef size_t *kept = <size_t *> PyMem_Realloc(answer.words, words.count * sizeof(size_t))
    if kept == NULL:
        raise MemoryError
    memcpy(kept, words.items, words.count * sizeof(size_t))
    cdef PyObject *key_before = answer.key
    cdef PyObject *inferred_before = answer.inferred
    Py_INCREF(key)
    Py_INCREF(inferred)
    answer.count, answer.words = words.count, kept
    answer.key, answer.inferred = <PyObject *> key, <PyObject *> inferred
    Py_XDECREF(key_before)
    Py_XDECREF(inferred_before)


cdef tuple key_of(Op op, object dtype, bint grad_mode, tuple args, dict kwargs, list values):
    """The shape cache's key of a call's translated arguments, as ``Recorder.record`` creates it."""
    cdef list key = [op.info, dtype, grad_mode]
    for item in args:
        add_to_key(key, item, op)
    for name, item in kwargs.items():
        key.append(name)
        add_to_key(key, item, op)
    if op.mutates and len(values) > 1:
        key.append(sharing(values))
    if op.needs_storage:
        for value in values:
            key.append(get(get(value, V_storage), S_nbytes))
    return PyList_AsTuple(key)


cdef object add_to_key(list key, object item, Op op):
    cdef type cls = type(item)
    if cls is TrackedValue:
        key.append(get(item, V_meta))
    elif cls is float or cls is int or cls is bool or cls is complex:
        key.append(cls)
        if cls not in op.by_type:
            key.append(item)
        elif cls is complex or not -127 <= item <= 127:  # LARGEST_COMMON
            key.append(extent(item))
    elif cls is list or cls is tuple:
        key.append(len(item))
        for entry in item:
            add_to_key(key, entry, op)
    else:
        key.append(item)


cdef object inferred_for(Op op, bint grad_mode, tuple args, dict kwargs, list values, Words *words):
    """The known answer for the call, or None."""
    cdef Answer *answer = NULL
    cdef PyObject *found
    cdef Py_ssize_t number, before
    if op.mutates and len(values) > 1:
        for number in range(len(values)):
            storage = get(values[number], V_storage)
            before = 0
            while get(values[before], V_storage) is not storage:
                before += 1
            add(words, before)
    if op.needs_storage:
        for value in values:
            add(words, <size_t> get(get(value, V_storage), S_nbytes))
    dtype = taken(quick.default_dtype())
    add_object(words, dtype)
    if words.count >= 0:
        answer = answer_to(words)
        if is_for(answer, words):
            return <object> answer.inferred
    key = key_of(op, dtype, grad_mode, args, kwargs, values)
    found = PyDict_GetItem(entries, key)
    if found is NULL:
        inferred = learn(op.info, args, kwargs, values, key)
        if inferred is None:
            return None
        global hit_count
        hit_count -= 1  # it will be used as one
    else:
        inferred = <object> found
    if answer is not NULL:
        remember(answer, words, key, inferred)
    return inferred


# --- recording ----------------------------------------------------------------------


def hits():
    """The number of shape cache hits in this module."""
    return hit_count


cdef inline object value_of(object tensor):
    """The value of a pending tensor."""
    cdef PyObject *found = PyDict_GetItem(PyObject_GenericGetDict(tensor, NULL), "_lazyviz")
    if found is NULL:
        raise AttributeError("_lazyviz")
    return <object> found


cdef inline bint is_pending(object tensor):
    """Whether it has no value yet, and no user-defined class."""
    return type(tensor) is LazyTensor or type(tensor) is LazyParameter


def around_collection(phase, info):
    """An entry of ``gc.callbacks``: finalizers that are called within an op run at the level of the user's code.

    There is one collection at a time.
    """
    global collection_level
    if phase == "start":
        if is_in_op():
            level = tape.user_level()
            level.__enter__()
            collection_level = level
    elif collection_level is not None:
        level, collection_level = collection_level, None
        complete(lambda: level.__exit__(None, None, None))  # whatever a signal's handler raises meanwhile


def dispatch(mode, func, types, args=(), kwargs=None):
    """``RecorderMode.__torch_dispatch__``."""
    cdef bint collects = PyGC_Disable()
    try:
        return dispatched(mode, func, types, args, kwargs)
    finally:
        if collects:
            PyGC_Enable()


cdef object dispatched(object mode, object func, object types, object args, object kwargs):
    for cls in types:
        if cls is not LazyTensor and cls is not LazyParameter and cls is not Tensor:
            return slow(mode, func, types, args, kwargs)
    result = MISS
    if type(func) is OpOverload and type(args) is tuple and is_recording() and not dispatch_depth():
        result = record(func, args, kwargs)
    if result is MISS:
        if type(func) is OpOverload and type(args) is tuple and take is not None and is_outside():
            result = passed(op_of(func), args)
        if result is MISS:
            return slow(mode, func, types, args, kwargs)
    return result


cdef object passed(Op op, tuple args):
    """A call outside of blocks that does not come from `dispatch.cpp`: autograd detaches what it saves."""
    if not op.detaches or len(args) != 1 or dispatch_depth():
        return MISS
    tensor = args[0]
    cdef int memory = quick.plain_memory(<PyObject *> tensor)
    if not memory or is_used(tensor, quick.storage_address(<PyObject *> tensor), memory == 2):
        return MISS
    return taken(quick.alias(<PyObject *> tensor))


cdef int is_outside() noexcept:
    """Whether no block is open, or its recording is paused, and no pending node has to be forgotten first."""
    if get(recording_state, RS_viewed) is not None:
        return False
    if get(recording_state, RS_graph) is None:
        return not Unreachable.possible
    return is_set(recording_state, RS_pauses)


cdef int retire() except -1:
    """Remove the mode if nothing is recorded or pending; whether it may have been removed."""
    if pending_nodes or get(recording_state, RS_graph) is not None:
        return False
    tape.retire()
    return True


cdef int is_used(object tensor, size_t address, int is_foreign) noexcept:
    """Whether a pending node reads or writes the tensor's storage, or has made the tensor.

    ``is_foreign``: or may use another storage on the same memory.
    """
    try:
        if address in <dict> get(table, T_storages) or "_lazyviz" in tensor.__dict__:
            return True
        return <bint> bool(is_foreign and overlapped(tensor))
    except Exception:  # of a class that has its own `__dict__`
        return True


cdef object owner_met = None
cdef unsigned long owner_ident = 0


cdef bint is_owner() noexcept:
    """Whether this thread records; the number of the last thread that did is kept."""
    global owner_met, owner_ident
    cdef PyObject *owner = raw_slot(recording_state, RS_owner)
    if owner != <PyObject *> owner_met:
        owner_met = <object> owner
        owner_ident = owner_met or 0
    return owner_ident == PyThread_get_thread_ident()


cdef int is_recording() noexcept:
    if raw_slot(recording_state, RS_graph) == <PyObject *> None or is_set(recording_state, RS_pauses):
        return False
    if not is_set(runs, PR_active_thread):
        return True
    return get(runs, PR_active_thread) == PyThread_get_thread_ident()  # Python's recorder waits for another one


cdef object record_call(object func, object args, object kwargs):
    """For ``dispatch.cpp``, which calls with the mode off the stack and no other mode on it."""
    return record(func, args, kwargs)


cdef void show_as_wrapper(object tensor, bint on) noexcept:
    cdef uint64_t *keys = <uint64_t *> (quick.implementation(<PyObject *> tensor) + key_set_offset)
    keys[0] = keys[0] | snapshot_key if on else keys[0] & ~snapshot_key


cdef object view_is_being_made(object tensor):
    """``lazyviz.record.lazy_tensor.view_is_being_made``."""
    show_as_wrapper(tensor, False)
    ref = get(value_of(tensor), V_tensor)
    while ref is not None and not refers_to(ref, tensor):  # another tensor may have this value as well
        ref = get(ref, R_next)
    put(recording_state, RS_viewed, ref)


cdef object detached(object tensor):
    """``lazyviz.record.lazy_tensor.detached``."""
    value = value_of(tensor)
    ref = get(value, V_tensor)
    cdef Py_ssize_t count = 0
    while ref is not None:
        ref = get(ref, R_next)
        count += 1
    if count >= most_tensors:
        return MISS
    made = tensor_of(value, get(value, V_meta), get(value, V_storage), tensor)
    view_is_being_made(tensor)
    return made


cdef object view_is_made():
    """``lazyviz.record.recording_state.RecordingState.view_is_made``."""
    tensor = get(recording_state, RS_viewed)()
    cls = type(tensor)
    if cls is not Tensor and cls is not Parameter and (is_pending(tensor) or isinstance(tensor, LazyTensor)):
        show_as_wrapper(tensor, True)
    put(recording_state, RS_viewed, None)


cdef object record(object func, tuple args, object kwargs):
    """Record a call, with a mark that lets a run that another thread begins wait for the end.

    Such a run may free what the new node is about to refer to.  Reads wait for a run themselves.
    """
    cdef Op op = op_of(func)
    if not op.ordinary or not is_owner():
        return record_op(op, func, args, kwargs)
    if not is_recording():  # a run has begun since the caller asked
        return MISS
    outer = get(recording_state, RS_busy)
    put(recording_state, RS_busy, True)
    try:
        return record_op(op, func, args, kwargs)
    finally:
        put(recording_state, RS_busy, outer)


cdef object record_op(Op op, object func, tuple args, object kwargs):
    """Record a call as often as code that Python calls in between (a signal handler, a finalizer) changes what
    is pending.  From the second time on, signals wait.
    """
    # Draws call Python anyway, and handlers are to be called at the level of the user's code.
    result = AGAIN if op.draws and not stand_ins else attempt(op, func, args, kwargs, False)
    while result is AGAIN:
        signals = Deferred(of_op=tape.user_level)
        try:
            with signals:
                result = attempt(op, func, args, kwargs, True) if is_recording() else MISS
        finally:
            signals.__exit__()  # another thread's exception may have stopped it
    return result


cdef object attempt(Op op, object func, tuple args, object kwargs, bint deferring):
    """Record a call.  Once ``last_change`` has been compared, no Python code runs until the node is in the
    graph, unless signals are deferred.
    """
    cdef list values, tensors
    cdef Words words
    cdef tuple new_args
    cdef Py_ssize_t number
    cdef dict new_kwargs
    cdef bint in_engine, grad_mode
    cdef uint64_t sequence = 0
    graph, last_change = get(recording_state, RS_graph), get(recording_state, RS_last_change)
    if not op.ordinary:
        return number_of(args[0]) if op.reads_number and len(args) == 1 and not kwargs else MISS
    if get(recording_state, RS_absent) is not None and concerns_absent_gpu(func, op, kwargs):
        if (kwargs := made_on_absent_gpu(op, args, kwargs)) is None:
            return MISS
    if args:
        cls = type(args[0])
        if (cls is float or cls is int or cls is bool or cls is complex) and begins_with_tensor(func, op):
            return MISS
    if get(recording_state, RS_viewed) is not None:
        view_is_made()
    in_engine = quick.calling_node(&sequence)
    if not is_owner() and (not in_engine or is_of_python()):
        return MISS
    if op.detaches and get(recording_state, RS_explicit_detach) is False and is_pending(args[0]):
        result = detached(args[0])
        if result is not MISS:
            if in_engine and sequence >= NO_SEQUENCE:
                mark_stored_gradient(value_of(args[0]), engine_node())
            return result
    grad_mode = quick.grad_mode()
    if op.adds:
        summing = get(recording_state, RS_summing)
        if summing is not None:
            if not is_calling(summing):
                put(recording_state, RS_summing, None)
            elif not grad_mode and sums_in_place(args):
                increment_version(args[0])
                result = record(add_, args, kwargs)
                return slow_record(add_, args, kwargs or {}) if result is MISS else result
    values, tensors = [], []
    words.count = 0
    add_object(&words, op)
    add(&words, grad_mode)
    new_args = PyTuple_New(len(args))
    for number in range(len(args)):
        item = translate(args[number], op, graph, deferring, values, tensors, &words)
        Py_INCREF(item)
        PyTuple_SET_ITEM(new_args, number, item)
        if item is MISS or item is AGAIN:
            return item
    new_kwargs = no_kwargs
    if kwargs:
        new_kwargs = {}
        for name, item in kwargs.items():
            add_object(&words, name)
            item = translate(item, op, graph, deferring, values, tensors, &words)
            if item is MISS or item is AGAIN:
                return item
            new_kwargs[name] = item
    cdef list written = None
    if op.mutates:
        written = []
        if not op.hidden and len(args) > op.last:
            for position in op.positions:
                item = args[position]
                if is_pending(item) or isinstance(item, Tensor):
                    written.append(storage_of(item))
                elif isinstance(item, (list, tuple)):
                    for entry in item:
                        if isinstance(entry, Tensor):
                            written.append(storage_of(entry))
        else:
            for item in written_tensors(op.info, args, kwargs or {}):
                written.append(storage_of(item))
        for storage in written:
            if storage is None:  # the tensor has become real
                return AGAIN
            if get(storage, S_foreign) is not False:
                return MISS
    inferred = inferred_for(op, grad_mode, new_args, new_kwargs, values, &words)
    if inferred is None:
        return MISS
    if get(inferred, I_on_meta) is True:
        return MISS
    if get(inferred, I_special) is True:
        if get(inferred, I_to_cpu) is True or <list> get(inferred, I_restructured):
            return MISS
        if new_kwargs.get("dtype") is None:
            new_kwargs = {**new_kwargs, "dtype": get(inferred, I_dtype)}
    if not deferring and needs_python(inferred, tensors):
        return AGAIN
    place = place_of(PyThreadState_GetFrame(PyThreadState_Get()), not get(scopes, C_root))
    generator = drawn = None
    if op.draws and not is_on_absent_gpu(inferred):  # where nothing is drawn
        if not deferring:
            return AGAIN
        if op.draws_by_default and len(args) <= op.generator and not kwargs and is_on_cpu(inferred):
            generator = default_generator
        else:
            generator = recorder._generator(op.info, args, kwargs or {}, inferred, values)
        if generator is not None:
            drawn = generators.continued(generator)
            if drawn is None and not deferring:
                return AGAIN
    if get(recording_state, RS_last_change) is not last_change:
        return AGAIN
    if is_set(recording_state, RS_appending):
        runs.refuse_nested()
    global hit_count
    hit_count += 1
    # From here on, state changes.
    cdef list recorded = get(graph, G_nodes)
    node = nodes.make()
    if is_owner():
        put(recording_state, RS_appending, get(recording_state, RS_owner))
    try:
        position = position_of(len(recorded))
        put(node, N_index, position)
        put(node, N_op, func)
        put(node, N_args, new_args)
        put(node, N_kwargs, new_kwargs)
        put(node, N_graph, graph)
        number_of_node = next(node_numbers)
        put(node, N_sequence, number_of_node)
        put(recording_state, RS_last_change, number_of_node)
        put(node, N_inputs, values)
        put(node, N_entry, inferred)
        order(node, values, written)
        is_located = locate(node, graph, place, in_engine, sequence, grad_mode, op.mutates)
        if drawn is not None:
            draw(node, <tuple> drawn)
        elif generator is not None:
            generators.record(node, generator)
        result = outputs(node, graph, position, inferred, values, tensors)
    except BaseException:
        # Objects that an exception keeps out of the graph would never be shown to the collector.
        show_node(node)
        raise
    finally:
        put(recording_state, RS_appending, NOBODY)
    recorded.append(node)
    if args:  # the empty tuple is shared
        hidden(new_args)
    hidden(values)
    hidden(get(node, N_outputs))
    pending_nodes[node] = None
    if op.is_view and is_pending(tensors[0]):
        view_is_being_made(tensors[0])
    # What follows may run Python code: the op is recorded.
    if not is_located:
        locate_gradient(node, sequence)
    if op.counts_writes:
        count_writes(op.info, args, kwargs or {})
    if held and TrackedStorage.held_bytes > get(recording_state, RS_held_bytes_limit):
        put(recording_state, RS_busy, False)  # the op is recorded, and the next line may wait for another run
        runs.sync("dropped inputs kept by the graph exceed the byte budget", list(pending_nodes))
    container = get(inferred, I_container)
    return result if container is None else container(result)


cdef object NOBODY = 0


cdef bint needs_python(object inferred, list tensors) except -1:
    """Whether Python code makes some of the results (`tensor_of`)."""
    for spec in <list> get(inferred, I_outputs):
        if type(spec) is OutputSpec and get(spec, O_itself) is not True:
            source = get(spec, O_source)
            if is_made_in_python(get(spec, O_meta), None if source is None else tensors[source]):
                return True
    return False


cdef bint is_made_in_python(object meta, object base) except -1:
    return is_set(meta, M_flags) or (
        base is not None and quick.is_inference(<PyObject *> base) != quick.inference_mode()
    )


cdef int draw(object node, tuple drawn) except -1:
    """``Generators.record``, for a sequence that continues."""
    sequence, before = drawn
    if before is not None:
        put(node, N_after, [*get(node, N_after), before])
    sequence.last = node
    put(node, N_draws, sequence)
    return 0


cdef bint concerns_absent_gpu(object func, Op op, object kwargs) except -1:
    """Whether an absent GPU affects the call: its device, or the kernels that it consists of."""
    if op.made_of_others < 0:
        op.made_of_others = is_made_of_others(func)
    return op.made_of_others or (bool(kwargs) and ("device" in kwargs or "pin_memory" in kwargs))


cdef object made_on_absent_gpu(Op op, tuple args, dict kwargs):
    """The keyword arguments of a call that only makes a tensor, with the number of its GPU, as in
    ``AbsentGpus.record``; None for other calls.
    """
    if op.made_of_others or kwargs.get("pin_memory"):
        return None
    device = kwargs.get("device")
    if type(device) is not type(cpu):
        return None
    for item in args:
        if isinstance(item, Tensor):
            return None
    return {**kwargs, "device": get(recording_state, RS_absent).device(device)}


cdef bint begins_with_tensor(object func, Op op) except -1:
    """Whether a number as the first argument stands for a tensor."""
    if op.begins_with_tensor < 0:
        arguments = func._schema.arguments
        op.begins_with_tensor = bool(arguments) and str(arguments[0].type) == "Tensor"
    return op.begins_with_tensor


cdef object number_of(object tensor):
    """The number in a tensor, if it is known immediately; otherwise the recorder has to find out."""
    cdef PyObject *found
    if not is_owner():
        return MISS
    if get(recording_state, RS_viewed) is not None:
        view_is_made()
    if is_pending(tensor):
        value = value_of(tensor)
    else:
        found = PyDict_GetItem(get(table, T_outside), <size_t> <void *> tensor)
        if found is NULL:
            return MISS
        value = <object> found
        ref = get(value, V_tensor)
        if ref is None or ref() is not tensor or get(value, V_real) is None:
            return MISS
        storage = get(value, V_storage)
        if get(storage, S_foreign) is not False:
            return MISS
        if <size_t> get(storage, S_address) != quick.storage_address(<PyObject *> tensor):
            return MISS
        found = PyDict_GetItem(get(table, T_storages), get(storage, S_address))
        if found != <PyObject *> storage:
            return MISS
    if get(get(value, V_storage), S_shadow) is not None:
        result = counted(value)
        if result is None:
            result = known_number(shapes, value)
        if result is not None:
            return result
    elif get(value, V_node) is None and get(get(value, V_storage), S_writer) is not None:
        result = counted_first(value)  # a step counter that is read for the first time
        if result is None:
            result = known_number(shapes, value)
        if result is not None:
            return result
    if get(recording_state, RS_absent) is not None:
        return MISS  # the user may have assumed it
    if not is_unknown_value(value):
        result = number_of_one_op(shapes, value)
        return MISS if result is None else result  # the Python code may find out
    evaluate_number(value)
    if is_pending(tensor):
        return MISS  # forgotten
    result = taken(quick.number(<PyObject *> tensor))
    return number_in(tensor) if result is None else result


cdef object evaluate_number(object value):
    """Evaluate the nodes that reading the number in ``value`` depends on."""
    cdef list needed = []  # as `needed_by` of ``lazyviz.record.item_and_bool_reads``
    made_by, writer = get(value, V_node), get(get(value, V_storage), S_writer)
    if made_by is not None and get(made_by, N_state) != "done":
        needed.append(made_by)
    if writer is not None and get(writer, N_state) != "done":
        needed.append(writer)
    if needed:
        try:
            sync(runs, "item", needed, get(value, V_meta).nbytes, a_number=True)
        except BaseException as error:
            raise_from_read(error)


cdef object counted(object value):
    """``lazyviz.record.constant_folding.number`` for a value with at most one added number, such as a step
    counter.
    """
    cdef PyObject *known
    storage = get(value, V_storage)
    shadow = get(storage, S_shadow)
    node = get(storage, S_writer)
    if quick.add_number is NULL or shadow.lost:
        return None
    known = PyDict_GetItem(shadow.tensors, value)
    if known is NULL:
        return None
    if node is not None and get(node, N_folded) is not True and get(node, N_state) != "done":
        if not adds_a_number(node, value):
            return None
        try:
            quick.add_number(known, <PyObject *> (<tuple> get(node, N_args))[1])
        except Exception:
            shadow.lost = True
            return None
        put(node, N_folded, True)
    return taken(quick.number(known))


cdef object counted_first(object value):
    """`counted`, of a real number that has no shadow yet: it gets one, as by ``constant_folding.number``."""
    storage = get(value, V_storage)
    node = get(storage, S_writer)
    if quick.add_number is NULL or get(node, N_folded) is True or not adds_a_number(node, value):
        return None
    if get(value, V_given) is not True or get(value, V_real) is None or get(get(value, V_meta), M_flags):
        return None
    shadow = Shadow()  # Python code: a signal handler may have run the node
    real = get(value, V_real)
    if real is None or get(storage, S_shadow) is not None or not adds_a_number(node, value):
        return None
    known = taken(quick.copy_number(<PyObject *> real, get(storage, S_nbytes)))
    if known is None:
        return None
    shadow.tensors[value] = known
    put(storage, S_shadow, shadow)
    return counted(value)


cdef bint adds_a_number(object node, object value) except -1:
    """Whether ``node`` only adds a number to ``value``, and all nodes before it have been folded."""
    cdef tuple args = get(node, N_args)
    cdef list inputs = get(node, N_inputs), outputs = get(node, N_outputs)
    if get(node, N_op) is not add_ or len(args) != 2 or type(args[1]) not in (int, float) or get(node, N_kwargs):
        return False
    if len(inputs) != 1 or len(outputs) != 1 or inputs[0] is not value or outputs[0] is not value:
        return False
    if get(node, N_state) != "pending" or get(node, N_missed) is True or get(node, N_draws) is not None:
        return False
    if get(value, V_node) is node or len(get(node, N_writes)) != 1:
        return False
    for other in get(node, N_after):
        if get(other, N_folded) is not True and get(other, N_state) != "done":
            return False
    return True


# Nodes that are visited to find out whether a value is known: nearly always, one of the first depends on
# data.
cdef enum:
    MOST_ASKED = 64


cdef bint is_unknown_value(object value) except -1:
    """Whether :class:`lazyviz.record.constant_folding._Walk` would certainly fail to reach all dependencies
    of ``value``.
    """
    cdef PyObject *stack[MOST_ASKED]  # nodes, which the record keeps alive
    cdef int count = 0, at = 0
    writer = get(get(value, V_storage), S_writer)
    if writer is not None:
        stack[0] = <PyObject *> writer
        count = 1
    if depends_on_data(value, stack, &count):
        return True
    while at < count:  # the nearest first
        node = <object> stack[at]
        at += 1
        if get(node, N_folded) is True or get(node, N_state) == "done" or get(node, N_op) is gradient_check:
            continue
        if get(node, N_missed) is True or get(node, N_draws) is not None:
            return True
        if op_of(get(node, N_op)).shape_only:
            continue
        for item in <list> get(node, N_inputs):
            if depends_on_data(item, stack, &count):
                return True
    return False


cdef bint depends_on_data(object value, PyObject **stack, int *count) except -1:
    shadow = get(get(value, V_storage), S_shadow)
    if shadow is not None:
        if shadow.lost:
            return True
        if value in shadow.tensors:
            return False
    node = get(value, V_node)
    if node is not None and get(node, N_state) != "done":
        if count[0] < MOST_ASKED:
            stack[count[0]] = <PyObject *> node
            count[0] += 1
        return False
    return not get(value, V_given) or get(value, V_real) is None or bool(get(get(value, V_meta), M_flags))


def is_unknown(values):
    """``lazyviz.record.constant_folding.Search.is_unknown``."""
    for value in values:
        if is_unknown_value(value):
            return True
    return False


cdef bint is_on_cpu(object inferred) except -1:
    """Whether the first result is one."""
    for spec in get(inferred, I_outputs):
        if type(spec) is OutputSpec:
            return get(get(spec, O_meta), M_device) == cpu
    return False


cdef bint is_on_absent_gpu(object inferred) except -1:
    """Whether the first result is one."""
    for spec in get(inferred, I_outputs):
        if type(spec) is OutputSpec:
            return bool(stand_ins) and get(get(spec, O_meta), M_device) in stand_ins
    return False


cdef bint sums_in_place(tuple args) except -1:
    """``lazyviz.record.parity.inplace_gradient_sums.accumulates_in_place``, once the engine's node is known
    to be the one that adds.

    No variable may hold the first argument, because its references are counted.
    """
    if len(args) != 2 or not is_pending(args[0]):
        return False
    value = value_of(args[0])
    meta = get(value, V_meta)
    return (
        get(get(value, V_storage), S_live) == 1
        and meta.dense
        and args[1].dtype is get(meta, M_dtype)
        and args[1].shape == get(meta, M_shape)
        and not is_zero(args[1])
        and not forward_mode_active()
        and engine_is_sole_owner(args)
    )


cdef object translate(
    object item, Op op, object graph, bint deferring, list values, list tensors, Words *words
):
    """The recorded form of one argument; collects tensors, and the words of the call."""
    cdef type cls = type(item)
    cdef Py_ssize_t before
    cdef list entries
    if cls is LazyTensor or cls is LazyParameter:
        value = value_of(item)
    elif cls is Tensor or cls is Parameter:
        value = outside(item, op, graph, deferring)
        if value is MISS or value is AGAIN:
            return value
    elif cls is float or cls is int or cls is bool or cls is complex:
        add_object(words, cls)
        if cls not in op.by_type:
            add_number(words, item, cls)
        elif cls is complex or not -127 <= item <= 127:
            add(words, <size_t> <int64_t> extent(item))
        return item
    elif cls is list or cls is tuple:
        add_object(words, list)
        add(words, len(item))
        before = len(values)
        entries = []
        for entry in item:
            entry = translate(entry, op, graph, deferring, values, tensors, words)
            if entry is MISS or entry is AGAIN:
                return entry
            entries.append(entry)
        if cls is tuple:
            return PyList_AsTuple(entries)
        return hidden(entries) if len(values) == before else entries  # for numbers, this is permanent
    elif item is not None and isinstance(item, Tensor):
        return MISS
    else:
        add_object(words, item)
        if item is not None and cls is not Dtype and cls is not Layout and cls is not MemoryFormat:
            if cls in symbolic:
                return MISS
            words.count = -1
        return item
    values.append(value)
    tensors.append(item)
    add_object(words, get(value, V_meta))
    return value


cdef object outside(object tensor, Op op, object graph, bint deferring):
    """The value of a real tensor whose memory nothing else writes."""
    cdef PyObject *found = PyDict_GetItem(get(table, T_outside), <size_t> <void *> tensor)
    if found is not NULL:
        value = <object> found
        ref = get(value, V_tensor)
        storage = get(value, V_storage)
        if (
            ref is not None
            and get(value, V_real) is not None
            and refers_to(ref, tensor)
            and get(storage, S_foreign) is False
            and <size_t> get(storage, S_address) == quick.storage_address(<PyObject *> tensor)
        ):
            return value
    cdef int64_t nbytes = quick.fixed_nbytes(<PyObject *> tensor)
    if nbytes < 0 and (
        tensor.layout is not strided or is_zero(tensor) or tensor.is_quantized or tensor.is_nested
    ):
        return MISS
    try:
        if op.is_view and found is not NULL and external.is_foreign(tensor):
            return MISS
        value = value_of_plain(tensor, graph, nbytes, deferring)
    except Unexamined:  # Python's recorder handles it
        return MISS
    if value is MISS or value is AGAIN or get(get(value, V_storage), S_foreign) is False:
        return value
    return MISS


cdef object new_outside(object graph, object address, int64_t nbytes, tuple role):
    """The storage of plain CPU memory that is new to the record; ``role`` has its role and name."""
    storage = storages_.make()
    put(storage, S_id, next(storage_numbers))
    put(storage, S_nbytes, nbytes)
    put(storage, S_device, cpu)
    put(storage, S_external, True)
    put(storage, S_created, -1)
    put(storage, S_graph, graph)
    put(storage, S_readers, hidden([]))
    put(storage, S_address, address)
    (<list> get(graph, G_storages)).append(storage)
    put(storage, S_role, role[0])
    put(storage, S_name, role[1])
    earlier = (<dict> get(table, T_computed)).get(address)
    if earlier is not None and earlier.live:
        storage.continues = earlier
    arrivals = get(table, T_arrivals)
    if arrivals.unused:
        arrivals.use(address, storage, graph)
    return storage


cdef object value_of_plain(object tensor, object graph, int64_t nbytes, bint deferring):
    """``lazyviz.record.preexisting_tensors.ExternalTensors.from_outside`` for plain memory on the CPU.

    ``nbytes``: see `fixed_nbytes` in `dispatch.cpp`.
    """
    cdef dict known = get(table, T_storages)
    meta, role = meta_of(tensor), role_of(tensor)  # first, because they may run Python code
    address = quick.storage_address(<PyObject *> tensor)
    cdef PyObject *found = PyDict_GetItem(known, address)
    if nbytes < 0 and found is NULL:  # the owner of the memory has to be determined
        return MISS
    if (
        nbytes < 0
        or get(recording_state, RS_batch) is not None
        or (found is not NULL and get(<object> found, S_foreign) is not False)
        or (found is NULL and address in <dict> get(table, T_exported))
    ):
        return external.from_outside(tensor) if deferring else AGAIN
    if found is not NULL:
        storage = <object> found
        if get(storage, S_nbytes) < nbytes:
            put(storage, S_nbytes, nbytes)
    else:
        storage = new_outside(graph, address, nbytes, role)
        known[address] = storage
    name = get(storage, S_name)
    value = values_.make()
    put(value, V_id, next(value_numbers))
    put(value, V_meta, meta)
    put(value, V_storage, storage)
    put(value, V_node, None)
    put(value, V_index, 0)
    put(value, V_symbolic, get(meta, M_shape))
    put(value, V_name, name)
    put(value, V_real, taken(quick.alias(<PyObject *> tensor)))
    refer(tensor, value, storage)
    (<list> get(graph, G_inputs)).append(value)
    (<dict> get(table, T_outside))[<size_t> <void *> tensor] = value
    put(value, V_given, True if quick.is_given(<PyObject *> tensor) else False)
    return value


# For CPU tensors, by address: the metadata of the last tensor there, or NULL.
cdef PyObject* last_metas[1024]


cdef object meta_of(object tensor):
    """``ShapeCache.meta_of`` for a tensor in plain CPU memory."""
    cdef PyObject *raw = <PyObject *> tensor
    cdef PyObject **place = &last_metas[(<size_t> raw >> 5) & 1023]
    if place[0] is not NULL:
        meta = <object> place[0]
        shape, stride, dtype = get(meta, M_shape), get(meta, M_stride), get(meta, M_dtype)
        if quick.has_layout(
            raw, <PyObject *> shape, <PyObject *> stride, get(meta, M_offset), <PyObject *> dtype
        ):
            return meta
    meta = shapes.meta_of(tensor, cpu)
    Py_INCREF(meta)
    Py_XDECREF(place[0])
    place[0] = <PyObject *> meta
    return meta


cdef tuple role_of(object tensor):
    """``Scopes.role_of``."""
    cdef PyObject *found = PyDict_GetItem(get(scopes, C_parameters), <size_t> <void *> tensor)
    if found is not NULL:
        reference, key, role, name = <tuple> found
        owner = reference()
        if owner is tensor:
            return role, name
        if owner is not None:
            held = owner.__dict__.get("_parameters" if role == "parameter" else "_buffers")
            if type(held) is dict and (<dict> held).get(key) is tensor:
                return role, name
    return scopes.role_of(tensor)


cdef object storage_of(object tensor):
    if is_pending(tensor):
        return get(value_of(tensor), V_storage)
    cdef PyObject *found = PyDict_GetItem(get(table, T_outside), <size_t> <void *> tensor)
    return None if found is NULL else get(<object> found, V_storage)


cdef void order(object node, list values, list written):
    """``lazyviz.record.dependency_closure.order``."""
    cdef list after = None, writes
    cdef Py_ssize_t count
    for value in values:
        put(value, V_uses, get(value, V_uses) + 1)
        storage = get(value, V_storage)
        put(storage, S_uses, get(storage, S_uses) + 1)
        writer = get(storage, S_writer)
        if writer is not None and writer is not get(value, V_node):
            if after is None:
                after = []
            after.append(writer)
        readers = <list> get(storage, S_readers)
        readers.append(node)
        count = len(readers)
        if count >= 8 and not count & (count - 1):
            put(storage, S_readers, hidden([reader for reader in readers if get(reader, N_state) != "done"]))
    if written:
        writes = []
        for storage in written:
            for reader in <list> get(storage, S_readers):
                if reader is not node:
                    if after is None:
                        after = []
                    after.append(reader)
            put(storage, S_writer, node)
            put(storage, S_readers, hidden([]))
            if storage not in writes:
                writes.append(storage)
        put(node, N_writes, hidden(writes))
    if after is not None:
        put(node, N_after, hidden(after))


# A set of objects that are kept alive elsewhere, in insertion order.
cdef struct Found:
    Py_ssize_t count, room  # a power of two
    PyObject **items
    PyObject **table  # twice the capacity; each item's position follows from its address


cdef int make_room(Found *found) except -1:
    cdef Py_ssize_t room = 2 * found.room if found.room else 64
    cdef PyObject **items = <PyObject **> PyMem_Realloc(found.items, 3 * room * sizeof(PyObject *))
    cdef Py_ssize_t at
    if items == NULL:
        raise MemoryError
    found.items, found.table, found.room = items, items + room, room
    memset(found.table, 0, 2 * room * sizeof(PyObject *))
    for at in range(found.count):
        place_in(found, items[at])[0] = items[at]
    return 0


cdef inline PyObject **place_in(Found *found, PyObject *item) noexcept:
    cdef size_t at = (<size_t> item >> 4) * <size_t> 0x9E3779B97F4A7C15 >> 20
    cdef size_t mask = 2 * found.room - 1
    while found.table[at & mask] is not NULL and found.table[at & mask] is not item:
        at += 1
    return &found.table[at & mask]


cdef int collect(Found *found, object item) except -1:
    cdef PyObject **place
    if found.count == found.room:
        make_room(found)
    place = place_in(found, <PyObject *> item)
    if place[0] is NULL:
        place[0] = found.items[found.count] = <PyObject *> item
        found.count += 1
    return 0


cdef struct Numbered:
    unsigned long long number
    PyObject *item


cdef int by_number(const void *left, const void *right) noexcept nogil:
    cdef unsigned long long one = (<Numbered *> left).number, other = (<Numbered *> right).number
    return (one > other) - (one < other)


cdef void sort(Numbered *items, Py_ssize_t count) noexcept nogil:
    """Sort ``items`` by number: by insertion if they are nearly sorted."""
    cdef Py_ssize_t at, place, moves = 0
    cdef Numbered item
    for at in range(1, count):
        item, place = items[at], at
        while place and items[place - 1].number > item.number:
            items[place] = items[place - 1]
            place -= 1
        items[place] = item
        moves += at - place
        if moves > 8 * count:
            qsort(items, count, sizeof(Numbered), by_number)
            return


def closure(targets):
    """``lazyviz.record.dependency_closure.closure``."""
    cdef Found found
    cdef Numbered *numbered = NULL
    cdef Py_ssize_t at = 0
    cdef list ordered
    targets = list(targets)
    memset(&found, 0, sizeof(found))
    try:
        for node in <list> targets:
            if get(node, N_state) != "done":
                collect(&found, node)
        while at < found.count:  # each visits the earlier ones, which the record keeps alive
            node = <object> found.items[at]
            at += 1
            for value in <list> get(node, N_inputs):
                other = get(value, V_node)
                if other is not None and needs(node, other):
                    collect(&found, other)
            for other in get(node, N_after):
                if needs(node, other):
                    collect(&found, other)
        numbered = <Numbered *> PyMem_Realloc(NULL, (found.count + 1) * sizeof(Numbered))
        if numbered == NULL:
            raise MemoryError
        for at in range(found.count):
            # Backward, because most were found from their users.
            numbered[at].item = found.items[found.count - 1 - at]
            numbered[at].number = get(<object> numbered[at].item, N_sequence)
        sort(numbered, found.count)
        ordered = []
        for at in range(found.count):
            ordered.append(<object> numbered[at].item)
        return ordered
    finally:
        PyMem_Free(found.items)
        PyMem_Free(numbered)


cdef str DONE = "done", PENDING = "pending"


cdef bint needs(object node, object other) except -1:
    """Whether ``other``, which comes before ``node``, has to run first."""
    state = get(other, N_state)
    if state is DONE:  # equal literals of all modules are one object
        return False
    if state is PENDING:
        return True
    return state != "done" and (state != "failed" or not can_run_without(other, node))


def graph_of(nodes):
    """``lazyviz.record.dependency_closure.Search.graph_of``."""
    graph = None
    for node in nodes:
        if get(node, N_error) is not None or (graph is not None and get(node, N_graph) is not graph):
            return None
        graph = get(node, N_graph)
    return graph


def made_real(_, values):
    """``lazyviz.record.tensor_table.TensorTable.made_real``."""
    cdef dict computed = get(table, T_computed)
    for value in values:
        ref = get(value, V_tensor)
        tensor = None if ref is None else ref()
        if tensor is not None:
            computed[quick.storage_address(<PyObject *> tensor)] = get(value, V_storage)


def release_after(_, ran):
    """``lazyviz.record.tensor_table.TensorTable.release_after``."""
    cdef bint recording = get(recording_state, RS_graph) is not None
    for node in ran:
        for value in <list> get(node, N_inputs):
            release_value(value, recording)
        for value in <list> get(node, N_outputs):
            release_value(value, recording)


def release_unused(pending_ops, ran=None):
    """``lazyviz.record.pending_ops.PendingOps.release_unused``."""
    if ran is None or pending_ops.views or TrackedStorage.unused or get(recording_state, RS_graph) is None:
        return slow_release_unused(pending_ops, ran)
    if pending_nodes:
        release_after(None, ran)
    else:
        release_all(None, recording=True)
    if len(<dict> get(table, T_outside)) > table._most_outside or len(table.results) > table._most_results:
        table.forget_dead()


def release_all(_, *, bint recording):
    """``lazyviz.record.tensor_table.TensorTable.release_all``."""
    cdef dict computed = get(table, T_computed), known = get(table, T_storages)
    if recording:
        for address, storage in list(known.items()):
            if get(storage, S_live):
                computed[address] = storage
    (<dict> get(table, T_outside)).clear()
    known.clear()
    held.clear()
    TrackedStorage.held_bytes = 0


def note_run(_, nodes, graph):
    """``lazyviz.record.sync_points.PendingRuns.note_run``."""
    cdef list ran = [], gone = []
    cdef object index = len(<list> get(graph, G_nodes))
    for node in nodes:
        if get(node, N_graph) is graph:
            ran.append(get(node, N_index))
            for value in <list> get(node, N_outputs):
                storage = get(value, V_storage)
                if get(storage, S_dropped) == index:
                    gone.append(storage)
    if ran:
        first, last = ran[0], ran[len(ran) - 1]  # in program order
        positions = range(first, last + 1) if last - first == len(ran) - 1 else tuple(ran)
        graph.runs_inside.append(run_inside((index, positions, gone)))


def sync(runs, str cause, needed, nbytes=0, *, bint a_number=False):
    """``lazyviz.record.sync_points.PendingRuns.sync``."""
    needed = list(needed)
    if stand_ins or OtherRanks.ranks or cause in ADDRESSES or not recording_state.allow_sync:
        return slow_sync(runs, cause, needed, nbytes, a_number=a_number)
    with runs.lock:
        nodes = closure(needed)
        line, reader = read_at(None, calling_frame())
        graph = get(recording_state, RS_graph)
        noted = graph is not None
        if noted and len(<list> nodes) > few:
            nodes = with_small_updates(nodes, graph)
            if may_leave_backward(nodes, graph):
                nodes = with_earlier_backward(nodes, graph)
        start = perf_counter()
        if nodes:
            known = runs._causes.get((cause, id(line), id(reader)))
            runs.evaluator(nodes, known[0] if known is not None else runs._located(cause, line, reader))
        graph = get(recording_state, RS_graph)
        if noted and graph is not None:
            seconds, index = perf_counter() - start, len(<list> get(graph, G_nodes))
            note_run(None, nodes, graph)
            point = sync_point((cause, line, len(nodes), seconds, nbytes, index, reader))
            (<list> graph.sync_points).append(point)


cdef object find_fields_of_sync_points():
    cdef Py_ssize_t at
    if len(SyncPoint.__slots__) != FIELDS:
        raise ImportError(f"SyncPoint has not {FIELDS} fields")
    for at in range(FIELDS):
        P_fields[at] = offset(SyncPoint, SyncPoint.__slots__[at])


cdef object sync_point(tuple content):
    """A ``SyncPoint`` with this content; its constructor is in Python."""
    cdef Py_ssize_t at
    point = new_object(SyncPoint)
    for at in range(FIELDS):
        put(point, P_fields[at], content[at])
    return point


cdef list with_small_updates(list nodes, object graph):
    """``lazyviz.record.sync_points.with_small_updates``; ``nodes`` are more than `few`."""
    cdef Py_ssize_t count = len(nodes), at, place = 0, following
    cdef list more, outputs, recorded = get(graph, G_nodes)
    first, last = nodes[0], nodes[count - 1]
    if get(first, N_graph) is not graph or get(last, N_graph) is not graph:
        return nodes
    cdef Py_ssize_t start = graph.considered_by_reads[0], end = get(last, N_index)
    if end - start + 1 <= count:
        return nodes
    more = None
    following = get(first, N_index)  # where the next of ``nodes`` is, which are in program order
    for at in range(start, min(end, len(recorded))):
        while following < at:
            place += 1
            following = get(nodes[place], N_index) if place < count else PY_SSIZE_T_MAX
        node = recorded[at]
        if (following == at and nodes[place] is node) or get(node, N_state) is not PENDING:
            continue
        outputs = get(node, N_outputs)
        if outputs and <Py_ssize_t> get(get(outputs[0], V_storage), S_nbytes) > small:
            continue
        if is_small_update(node):
            if more is None:
                more = []
            more.append(node)
    if more is None:
        return nodes
    chosen = set(nodes)
    found = [node for node in more if depends_only_on(node, chosen)]
    return sorted(chosen, key=sequence_number_of) if found else nodes


cdef bint depends_only_on(object node, set chosen) except -1:
    """Whether what ``node`` needs has run or is chosen; if so, it is chosen too."""
    for value in <list> get(node, N_inputs):
        other = get(value, V_node)
        if other is not None and get(other, N_state) != "done" and other not in chosen:
            return False
    for other in get(node, N_after):
        if get(other, N_state) != "done" and other not in chosen:
            return False
    chosen.add(node)
    return True


cdef bint may_leave_backward(list ran, object graph) except -1:
    """Whether ``with_earlier_backward`` has to look closer; otherwise this does what it would do."""
    cdef list recorded = get(graph, G_nodes)
    cdef Py_ssize_t first = get(ran[0], N_index), count = len(ran), last = get(ran[count - 1], N_index), at
    if get(ran[0], N_graph) is not graph or get(ran[count - 1], N_graph) is not graph:
        return True
    cdef Py_ssize_t stop = first if last - first + 1 == count else last
    start, before = graph.considered_by_reads
    for at in range(start, min(stop, len(recorded))):
        node = recorded[at]
        if get(node, N_state) is PENDING and get(node, N_phase) == "backward":
            return True
    graph.considered_by_reads = before, max(before, last)
    return False


cdef object calling_frame():
    """The frame of the Python function that calls this module."""
    cdef PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get())
    return None if frame is NULL else taken(<PyObject *> frame)


cdef object UNMET = 0  # the address of a storage that was never real; Python has one such object


cdef object release_value(object value, bint recording):
    cdef dict known = get(table, T_storages)
    cdef PyObject *found
    storage = get(value, V_storage)
    real = get(value, V_real)
    if real is not None:
        if is_set(value, V_uses) and get(storage, S_foreign) is False:
            address = quick.storage_address(<PyObject *> real)
            if known.setdefault(address, storage) is storage:
                put(storage, S_address, address)
    elif get(value, V_node) is None:
        ref = get(value, V_tensor)
        tensor = None if ref is None else ref()
        if tensor is not None:
            found = PyDict_GetItem(get(table, T_outside), <size_t> <void *> tensor)
            if found == <PyObject *> value:
                del (<dict> get(table, T_outside))[<size_t> <void *> tensor]
    address = get(storage, S_address)
    if address is not UNMET and address is not nowhere and not is_set(storage, S_uses):
        drop_storage(storage, known, recording)
    if get(storage, S_external) is True and (held or not is_set(storage, S_live)):
        storage.count_held()


cdef object drop_storage(object storage, dict known, bint recording):
    """``lazyviz.record.tensor_table.TensorTable._drop_storage``."""
    address = get(storage, S_address)
    cdef PyObject *found = PyDict_GetItem(known, address)
    if found == <PyObject *> storage:
        del known[address]
        if recording and is_set(storage, S_live):
            (<dict> get(table, T_computed))[address] = storage
        put(storage, S_address, nowhere)


# --- provenance ---------------------------------------------------------------------


cdef bint locate(
    object node, object graph, object place, bint in_engine, uint64_t sequence, bint grad_mode, bint mutates
) except -1:
    """``lazyviz.record.provenance.module_calls_and_phases.Scopes.locate``, without Python code; ``sequence``
    is that of the calling autograd node.  Returns whether nothing is left to `locate_gradient`.
    """
    cdef PyObject *found
    root = get(scopes, C_root)
    put(node, N_module, get(scopes, C_module))
    put(node, N_root, root)
    put(node, N_source, (<tuple> place)[0])
    hint = (<tuple> place)[1]
    put(node, N_callers, (<tuple> place)[2] if not root else get(scopes, C_callers))
    entered = <list> get(scopes, C_entered)
    if entered:
        for call in entered:  # pairs of names
            hidden(call)
        (<dict> get(graph, G_calls))[get(node, N_index)] = hidden(PyList_AsTuple(entered))
        entered.clear()
    put(node, N_grad, grad_mode)
    put(node, N_inference, True if quick.inference_mode() else False)
    if in_engine:
        put(node, N_phase, "backward")
        found = PyDict_GetItem(get(scopes, C_by_sequence), sequence)
        if found is NULL:
            return False
        forward = <object> found
        put(node, N_forward, forward)
        if not get(scopes, C_module):
            put(node, N_module, get(forward, N_module))
            put(node, N_root, get(forward, N_root))
        return True
    phase = hint if hint is not None else get(scopes, C_phase)
    if hint is None and phase == "other" and get(node, N_inputs) and (grad_mode or not mutates):
        phase = "forward"
    put(node, N_phase, phase)
    (<dict> get(scopes, C_by_sequence)).setdefault(quick.next_sequence() - 1, node)
    return True


cdef object locate_gradient(object node, uint64_t sequence):
    """``Scopes.locate_gradient``, for a node without a known forward op."""
    if sequence < NO_SEQUENCE:
        scopes.locate_gradient(node, engine_node())
    else:
        locate_sum(node, engine_node())


cdef object locate_sum(object node, object engine):
    """``Scopes.locate_gradient``, if the engine adds to a parameter's gradient."""
    parameter = getattr(engine, "variable", None)
    if parameter is None:
        return
    _, name = role_of(parameter)
    put(node, N_root, (<dict> get(scopes, C_roots)).get(<size_t> <void *> parameter, "") if name else "")
    _, module, gradient = gradient_names_of(name)
    put(node, N_module, module)
    for value in <list> get(node, N_inputs):
        mark_gradient(get(value, V_storage), gradient)


cdef object mark_stored_gradient(object value, object engine):
    """``Scopes.mark_stored_gradient``, in an engine node that adds to a gradient or passes it on."""
    storage = get(value, V_storage)
    if get(storage, S_role) is not None:
        return
    parameter = getattr(engine, "variable", None)
    if parameter is not None:
        mark_gradient(storage, gradient_names_of(role_of(parameter)[1])[2])


cdef void mark_gradient(object storage, object name) noexcept:
    if get(storage, S_role) is None:
        put(storage, S_role, "gradient")
        put(storage, S_name, name)


cdef enum:
    MOST_NAMES = 20_000


# By id of a parameter's name: the name, its module's path, and its gradient's name.
cdef dict gradient_names = {}


cdef tuple gradient_names_of(object name):
    """What follows from a parameter's name: the same objects in every step."""
    cdef PyObject *found = PyDict_GetItem(gradient_names, <size_t> <void *> name)
    if found is not NULL:
        return <tuple> found
    if len(gradient_names) >= MOST_NAMES:
        gradient_names.clear()
    known = name, (<str> name).rpartition(".")[0], name + ".grad" if name else "grad"
    gradient_names[<size_t> <void *> name] = known
    return known


# For an instruction of a code object, which it keeps alive: the user's line, or the phase of library code. An
# entry with the same position in the table is replaced.
cdef struct Spot:
    PyObject *code
    int instruction
    PyObject *line
    PyObject *phase
    # The line, if a library may be reported as the reader of a value there; NULL: not determined yet.
    PyObject *reader
    bint outermost


cdef Spot[4096] spots


cdef Spot *spot_of(object frame) except NULL:
    cdef PyCodeObject *raw = PyFrame_GetCode(<PyFrameObject *> frame)
    code = <object> raw
    Py_XDECREF(<PyObject *> raw)  # Cython holds its own reference
    cdef int instruction = instruction_of(<PyFrameObject *> frame)
    cdef size_t hashed = ((<size_t> raw >> 4) + <size_t> instruction) * <size_t> 0x9E3779B97F4A7C15
    cdef Spot *spot = &spots[hashed >> 52]
    if spot.code == <PyObject *> raw and spot.instruction == instruction:
        return spot
    kind = sources._kinds.get(id(code))
    if kind is None:
        kind = sources._learn(code)
    line = sources._line(frame, code) if kind is True else None
    phase = kind if type(kind) is str and kind is not ENTRY else None
    for content in (code, line, phase):
        Py_INCREF(content)
    Py_XDECREF(spot.code)
    Py_XDECREF(spot.line)
    Py_XDECREF(spot.phase)
    Py_XDECREF(spot.reader)
    spot.code, spot.instruction, spot.reader = <PyObject *> code, instruction, NULL
    spot.line, spot.phase = <PyObject *> line, <PyObject *> phase
    # Not that of a library that is being imported.
    spot.outermost = kind is True and code.co_name == "<module>"
    return spot


# Running frames that called a module, each with its place at that time. ``above`` has other frames whose
# place was found when they were entered.
cdef PyFrameObject **calling = NULL
cdef list calling_from = []
cdef int most_calling = 0


cdef int begin_call(PyFrameObject *frame, tuple place) except -1:
    global calling, most_calling
    cdef PyFrameObject **larger
    cdef int count = len(calling_from)
    if count == most_calling:
        larger = <PyFrameObject **> PyMem_Realloc(calling, (2 * count + 64) * sizeof(PyFrameObject *))
        if larger == NULL:
            raise MemoryError
        calling, most_calling = larger, 2 * count + 64
    calling_from.append(place)
    calling[count] = frame
    return 0


cdef int end_call(PyFrameObject *frame) except -1:
    cdef int at = calls_at(frame)
    if at >= 0:  # a frame of another thread may have been added since
        del calling_from[at]
        memmove(&calling[at], &calling[at + 1], (len(calling_from) - at) * sizeof(PyFrameObject *))
    return 0


cdef inline int calls_at(PyFrameObject *frame) noexcept:
    cdef int at = len(calling_from) - 1
    while at >= 0 and calling[at] != frame:
        at -= 1
    return at


# The frames of which a place may be known, as bits that follow from their addresses.
cdef uint64_t entered_frames = 0


cdef inline uint64_t bit_of(void *frame) noexcept:
    return <uint64_t> 1 << ((<uint64_t> <size_t> frame >> 4) * <uint64_t> 0x9E3779B97F4A7C15 >> 58)


cdef inline PyObject *place_above(void *frame):
    """The place of a frame that was entered, or NULL."""
    if not entered_frames & bit_of(frame):
        return NULL
    return PyDict_GetItem(above, <size_t> frame)


cdef tuple place_of(PyFrameObject *raw, bint with_callers):
    """``SourceFinder.place``, or ``find`` if the callers are not needed; takes over the reference."""
    cdef Spot *spot
    cdef PyObject *entered
    cdef int count = 0, at
    cdef list callers = None
    line, phase = None, None
    block = get(sources, F_block) if with_callers else None
    while raw is not NULL:
        frame = <object> raw
        Py_XDECREF(<PyObject *> raw)  # Cython holds its own reference
        count += 1
        if with_callers and count > MOST_FRAMES:
            break
        at = calls_at(raw)
        entered = <PyObject *> calling_from[at] if at >= 0 else place_above(raw)
        if entered is not NULL:
            place = <tuple> entered
            if line is None:
                return place if place[1] is not None or phase is None else (place[0], phase, place[2])
            if callers is None:
                callers = []
            for here in (place[0], *place[2]) if place[0] is not None else place[2]:
                if here is not line and not is_among(here, callers):
                    callers.append(here)
            break
        spot = spot_of(frame)
        here = <object> spot.line
        if here is not None:
            if not with_callers:
                return here, phase, ()
            if line is None:
                line = here
            elif here is not line and (callers is None or not is_among(here, callers)):
                if callers is None:
                    callers = []
                callers.append(here)
        elif line is None and <object> spot.phase is not None:
            phase = <object> spot.phase
        if with_callers and (spot.outermost or <PyObject *> block == spot.code):
            break
        raw = PyFrame_GetBack(<PyFrameObject *> frame)
    return line, phase, () if callers is None else shared(callers)


def enter(_, frame):
    """``lazyviz.record.provenance.source_lines.SourceFinder.enter``."""
    global entered_frames
    place = place_of(PyFrame_GetBack(<PyFrameObject *> frame), True)
    entered_frames |= bit_of(<void *> frame)
    (<dict> above)[<size_t> <void *> frame] = place
    return place


def leave(_, frame):
    """``lazyviz.record.provenance.source_lines.SourceFinder.leave``."""
    global entered_frames
    (<dict> above).pop(<size_t> <void *> frame, None)
    if not above:
        entered_frames = 0


cdef object reader_at(object frame, Spot *spot):
    """The line of library code, if the library may be reported as the reader of a value there."""
    cdef int instruction = spot.instruction
    if spot.reader is not NULL:
        return <object> spot.reader
    code = frame.f_code
    line = sources._line(frame, code) if is_reader(code.co_filename) else None
    # Another thread may have taken the entry in the table meanwhile.
    if spot.code == <PyObject *> code and spot.instruction == instruction and spot.reader is NULL:
        Py_INCREF(line)
        spot.reader = <PyObject *> line
    return line


def read_at(_, frame):
    """``lazyviz.record.provenance.source_lines.SourceFinder.read_at``."""
    cdef Spot *spot
    cdef PyObject *entered
    reader = None
    while frame is not None:
        entered = place_above(<void *> frame)
        if entered is not NULL:
            return (<tuple> entered)[0], reader
        spot = spot_of(frame)
        if <object> spot.line is not None:
            return <object> spot.line, reader
        if reader is None:
            reader = reader_at(frame, spot)
        frame = frame.f_back
    return None, reader


def users(_, frame):
    """``lazyviz.record.provenance.source_lines.SourceFinder.users``."""
    cdef Spot *spot
    while frame is not None:
        spot = spot_of(frame)
        if <object> spot.line is not None:
            return frame, <object> spot.line
        frame = frame.f_back
    return None


def find(_, frame):
    """``lazyviz.record.provenance.source_lines.SourceFinder.find``."""
    cdef Spot *spot
    cdef PyObject *entered
    phase = None
    while frame is not None:
        entered = place_above(<void *> frame)
        if entered is not NULL:
            place = <tuple> entered
            return place[0], place[1] or phase
        spot = spot_of(frame)
        if <object> spot.line is not None:
            return <object> spot.line, phase
        if <object> spot.phase is not None:
            phase = <object> spot.phase
        frame = frame.f_back
    return None, phase


cdef bint is_among(object line, object lines) except -1:
    """``line in lines`` for user lines: equal lines have the same number, so few comparisons need Python."""
    for each in lines:
        if each is line:
            return True
    number = get(line, L_line)
    for each in lines:
        if get(each, L_line) == number and each == line:
            return True
    return False


cdef tuple latest = ()


cdef tuple shared(list callers):
    """The callers as a tuple; the tuple of the previous op, if it is equal, so that fewer tuples exist."""
    global latest
    cdef Py_ssize_t count = len(callers), at
    if len(latest) == count:
        for at in range(count):
            if callers[at] is not latest[at]:
                break
        else:
            return latest
    latest = PyList_AsTuple(callers)
    return latest


def content_of(modules):
    """``lazyviz.record.provenance.module_calls_and_phases.content_of``."""
    cdef list content = []
    for module in modules:
        if module is None:
            break
        attributes = module.__dict__
        for name in ("_modules", "_parameters", "_buffers"):
            held = (<dict> attributes).get(name) if type(attributes) is dict else None
            if type(held) is not dict:
                held = getattr(module, name)  # TorchScript modules have other containers
                content.append(len(held))
                content += held.keys()
                content += map(id, held.values())
                continue
            content.append(len(<dict> held))
            if <dict> held:
                content += (<dict> held).keys()
                for item in (<dict> held).values():
                    content.append(<size_t> <void *> item)
    return content


def exchange(tuple changes, bint back):
    """``lazyviz.record.interception.attribute_patches.exchange``."""
    cdef PyObject *there
    cdef PyObject *missing = <PyObject *> MISSING
    cdef tuple entry
    if not back:
        for _, namespace, _, together, alone in changes:
            for rows in (together, alone):
                for row in <tuple> rows:
                    entry = row
                    there = PyDict_GetItem(namespace, entry[0])
                    if (missing if there is NULL else there) != <PyObject *> entry[1]:
                        return False
    for owner, namespace, is_class, together, alone in changes:
        for row in <tuple> together:
            entry = row
            value = entry[1] if back else entry[2]
            if value is MISSING:
                (<dict> namespace).pop(entry[0], None)
            else:
                PyDict_SetItem(namespace, entry[0], value)
        if is_class:
            PyType_Modified(<PyTypeObject *> owner)
        for row in <tuple> alone:
            entry = row
            value = entry[1] if back else entry[2]
            if value is MISSING:
                if PyDict_GetItem(namespace, entry[0]) is not NULL:
                    delattr(owner, entry[0])
            else:
                setattr(owner, entry[0], value)
    return True


def are_ordinary(tensors):
    """``lazyviz.record.interception.observers_of_deferred_writes.are_ordinary``; False also if Python has to
    find out.
    """
    for tensor in <list> tensors:
        if (type(tensor) is not Tensor and type(tensor) is not Parameter) or (
            quick.fixed_nbytes(<PyObject *> tensor) < 0
        ):
            return False
    return True


cdef bint holds_still(object known, object module) except -1:
    """``Root.holds``, without creating a list of its content."""
    cdef list references = known._modules, content = known._content
    cdef Py_ssize_t at = 0, count = len(content)
    if references[0]() is not module:
        return False
    for reference in references:
        part = reference()
        attributes = None if part is None else part.__dict__
        if type(attributes) is not dict:
            return known.holds(module)
        for name in ("_modules", "_parameters", "_buffers"):
            held = (<dict> attributes).get(name)
            if type(held) is not dict:
                return known.holds(module)
            if at == count or content[at] != len(<dict> held) or at + 2 * len(<dict> held) >= count:
                return False
            at += 1
            for key in <dict> held:
                if content[at] is not key and content[at] != key:
                    return False
                at += 1
            for item in (<dict> held).values():
                if <size_t> content[at] != <size_t> <void *> item:
                    return False
                at += 1
    return at == count


cdef bint enter_known_root(object scopes, object module, tuple led) except -1:
    """``Scopes.enter_root`` for a module that was outermost before in this block and has not changed
    since.
    """
    cdef PyObject *found = PyDict_GetItem(get(scopes, C_known_roots), <size_t> <void *> module)
    if found is NULL:
        return False
    root = <object> found
    reference, known = root.module, get(scopes, C_learnt)
    if reference is None or reference() is not module or known is None or not holds_still(known, module):
        return False
    if <size_t> <void *> module not in <set> get(scopes, C_met):
        return False
    put(scopes, C_root, root)
    put(scopes, C_paths, known.paths)
    put(scopes, C_callers, led)
    return True


# --- optimizer steps ----------------------------------------------------------------


def before_step(steps, optimizer, args, kwargs):
    """``OptimizerSteps.before_step``, with signals deferred only if it has to call Python code."""
    if steps.scopes is not scopes or not is_known(optimizer.state):
        return slow_before_step(steps, optimizer, args, kwargs)
    running = scopes.steps
    for other in <list> running:
        if other is optimizer:
            return slow_before_step(steps, optimizer, args, kwargs)
    (<list> steps._phases).append(get(scopes, C_phase))
    put(scopes, C_phase, "optimizer")
    (<list> running).append(optimizer)


def after_step(steps, optimizer, args, kwargs):
    """``OptimizerSteps.after_step``, with signals deferred only if it has to call Python code."""
    known = steps.scopes is scopes and is_known(optimizer.state)  # first: a finalizer may reset all
    running, phases = scopes.steps, steps._phases
    if not known or recording_state.immediate_step is not None or not running or not phases:
        return slow_after_step(steps, optimizer, args, kwargs)
    put(scopes, C_phase, (<list> phases).pop())
    (<list> running).pop()


cdef bint is_known(object states) except -1:
    """Whether an optimizer's state has its roles and names, which takes no Python code to find out: whether
    ``Scopes.learn_state`` would do nothing.
    """
    if not isinstance(states, dict):
        return False
    for parameter, state in (<dict> states).items():
        if not isinstance(state, dict):
            return False
        name = known_name_of(parameter)
        if name is None:
            return False
        for key, tensor in (<dict> state).items():
            if isinstance(tensor, Tensor) and (type(key) is not str or not is_known_as(tensor, name, key)):
                return False
    return True


cdef object known_name_of(object parameter):
    """The name that ``Scopes.role_of`` returns; None if it has to be found out in Python."""
    cdef PyObject *found = PyDict_GetItem(get(scopes, C_parameters), <size_t> <void *> parameter)
    if found is NULL:
        return ""
    reference, key, role, name = <tuple> found
    owner = reference()
    if owner is parameter:
        return name
    held = None if owner is None else owner.__dict__.get("_parameters" if role == "parameter" else "_buffers")
    return name if type(held) is dict and (<dict> held).get(key) is parameter else None


cdef bint is_known_as(object tensor, object name, object key) except -1:
    """Whether ``tensor`` is known as the state ``key`` of the parameter called ``name``."""
    cdef PyObject *found = PyDict_GetItem(get(scopes, C_parameters), <size_t> <void *> tensor)
    if found is not NULL and (<tuple> found)[0]() is tensor:
        return is_state_of((<tuple> found)[3], name, key)
    if is_pending(tensor):
        value = value_of(tensor)
    else:
        found = PyDict_GetItem(get(table, T_outside), <size_t> <void *> tensor)
        ref = None if found is NULL else get(<object> found, V_tensor)
        if ref is None or ref() is not tensor:
            return False
        value = <object> found
    storage = get(value, V_storage)
    return get(storage, S_role) == "optimizer" and is_state_of(get(storage, S_name), name, key)


cdef bint is_state_of(object full, object name, object key) except -1:
    """``lazyviz.record.provenance.module_calls_and_phases._is_parameter_of``."""
    cdef Py_ssize_t length = len(name) + 1 + len(key) if name else len(key)
    return (
        len(full) == length
        and PyUnicode_Tailmatch(full, name, 0, length, -1) == 1
        and PyUnicode_Tailmatch(full, key, 0, length, 1) == 1
    )


def module_call_of(scopes, original):
    """``nn.Module.__call__`` that announces its module, as ``ScopePatches`` does."""

    def __call__(module, *args, **kwargs):
        cdef PyFrameObject *raw = PyThreadState_GetFrame(PyThreadState_Get())
        cdef PyFrameObject *caller = raw
        root, before, phase = get(scopes, C_root), get(scopes, C_module), get(scopes, C_phase)
        callers = get(scopes, C_callers)
        try:
            line, hint, led = place = place_of(raw, not root) if raw is not NULL else (None, None, ())
            begin_call(caller, place)
            if not root and not enter_known_root(scopes, module, led):
                scopes.enter_root(module, led)
            if line is not None and not is_among(line, get(scopes, C_callers)):
                put(scopes, C_callers, (line, *get(scopes, C_callers)))
            path = (<dict> get(scopes, C_paths)).get(<size_t> <void *> module)
            if path is None:
                path = scopes.path_of_unnamed(module)
            put(scopes, C_module, path)
            (<list> get(scopes, C_entered)).append((get(scopes, C_root), path))
            if phase == "other":
                put(scopes, C_phase, "forward")
            return original(module, *args, **kwargs)
        finally:
            end_call(caller)
            put(scopes, C_module, before)
            put(scopes, C_root, root)
            put(scopes, C_phase, phase)
            put(scopes, C_callers, callers)

    return __call__


# --- results ------------------------------------------------------------------------


cdef inline list with_one_more(list made, object value):
    """``made`` with another item; nearly always, a list has one, and is as large as that needs."""
    if made is None:
        return [value]
    made.append(value)
    return made


cdef object outputs(object node, object graph, object index, object inferred, list values, list tensors):
    """``Recorder._outputs``, except for ops that change the metadata of their arguments; without the container
    of the results.
    """
    cdef list results = None, made = None, specs = get(inferred, I_outputs)
    cdef dict fresh = None
    result = None
    container = get(inferred, I_container)
    if container is not None or len(specs) != 1:
        results = []
    cdef Py_ssize_t position = 0
    for spec in specs:
        if type(spec) is not OutputSpec:
            if results is None:
                result = spec
            else:
                results.append(spec)
            position += 1
            continue
        source = get(spec, O_source)
        if get(spec, O_itself) is True:
            tensor = tensors[source]
            made = with_one_more(made, value_of(tensor) if is_pending(tensor) else values[source])
            if results is None:
                result = tensor
            else:
                results.append(tensor)
            position += 1
            continue
        base = None
        if source is not None:
            storage = get(values[source], V_storage)
            base = tensors[source]
        else:
            storage = None
            if len(specs) > 1:
                if fresh is None:
                    fresh = {}
                storage = fresh.get(get(spec, O_fresh))
            if storage is None:
                storage = storages_.make()
                put(storage, S_id, next(storage_numbers))
                put(storage, S_nbytes, get(spec, O_nbytes))
                put(storage, S_device, get(get(spec, O_meta), M_device))
                put(storage, S_created, index)
                put(storage, S_graph, graph)
                put(storage, S_readers, hidden([]))
                (<list> get(graph, G_storages)).append(storage)
                if fresh is not None:
                    fresh[get(spec, O_fresh)] = storage
        value = values_.make()
        meta = get(spec, O_meta)
        put(value, V_id, next(value_numbers))
        put(value, V_meta, meta)
        put(value, V_storage, storage)
        put(value, V_node, node)
        put(value, V_index, position)
        put(value, V_symbolic, get(meta, M_shape))
        made = with_one_more(made, value)
        result = tensor_of(value, meta, storage, base)
        if results is not None:
            results.append(result)
        position += 1
    put(node, N_outputs, [] if made is None else made)
    if results is None:
        return result
    if container is not None:
        return results
    return results[0] if results else None


cpdef object wrapper(object meta):
    """A LazyTensor with this metadata, without conjugate or negative bit, not yet tied to a value."""
    cdef uint64_t *keys
    shape, stride, dtype, device = get(meta, M_shape), get(meta, M_stride), get(meta, M_dtype), get(meta, M_device)
    below = stand_ins.get(device) if stand_ins else None
    made = taken(
        quick.make_wrapper(
            <PyObject *> LazyTensor,
            <PyObject *> shape,
            <PyObject *> stride,
            get(meta, M_offset),
            <PyObject *> dtype,
            <PyObject *> (device if below is None else below),
        )
    )
    if below is not None:  # `lazyviz.torch_internals.fake_cuda_devices.mark`
        keys = <uint64_t *> (quick.implementation(<PyObject *> made) + key_set_offset)
        keys[0] = keys[0] | autocast_keys
    return made


cdef object tensor_of(object value, object meta, object storage, object base):
    """``lazyviz.record.lazy_tensor.wrap``."""
    if is_made_in_python(meta, base):
        return wrap(value, base)
    tensor = wrapper(meta)
    PyDict_SetItem(PyObject_GenericGetDict(tensor, NULL), "_lazyviz", value)
    refer(tensor, value, storage)
    return tensor


cdef object refer(object tensor, object value, object storage):
    """``TensorRef(tensor, value)``."""
    call = (tensor, death)
    ref = taken((<PyTypeObject *> ref_cls).tp_new(<PyTypeObject *> TensorRef, <PyObject *> call, NULL))
    put(ref, R_value, value)
    put(ref, R_next, get(value, V_tensor))
    put(value, V_tensor, ref)
    put(storage, S_live, get(storage, S_live) + 1)
    put(storage, S_dropped, None)


def on_death(ref):
    """``lazyviz.record.tracked_storages.on_tensor_death`` in the simple case."""
    value = get(ref, R_value)
    storage = get(value, V_storage)
    graph = get(storage, S_graph)
    recording = of_class(<type> TrackedStorage, "recording")
    external = get(storage, S_external) is not False
    if (
        get(storage, S_replaced) is not None
        or is_set(graph, G_lost)
        or (recording is not None and recording is not graph)
    ):
        note_death(ref)
        return
    if external and get(value, V_real) is not None and not is_set(value, V_uses) and get(value, V_node) is None:
        TrackedStorage.unused.append(value)
    before = get(value, V_tensor)
    if before is ref:
        put(value, V_tensor, get(ref, R_next))
    else:
        while before is not None:
            following = get(before, R_next)
            if following is ref:
                put(before, R_next, get(ref, R_next))
                break
            before = following
    live = get(storage, S_live) - 1
    put(storage, S_live, live)
    if live == 0:
        if of_class(<type> Unreachable, "possible") is not True:
            Unreachable.possible = True
        put(storage, S_dropped, position_of(len(<list> get(graph, G_nodes))))
        put(storage, S_dropped_in, None)
        if external and is_set(storage, S_uses):
            storage.count_held()


cdef object death = on_death
