# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Compiled passes of planning over all nodes and storages of a graph, which may be millions.

Each function does the same as the Python code that calls it (``liveness/lifetimes.py``,
``liveness/live_set_and_categories.py`` and ``allocator/simulate_events.py`` of :mod:`lazyviz.plan`), on the same
objects, whose slots are read at the offsets of their member descriptors. Sizes are 64-bit integers here, so functions that add sizes return ``None`` for those
that might overflow, and for anything else that is not ordinary; Python takes over then.
"""

from cpython.dict cimport PyDict_GetItem
from cpython.list cimport PyList_GET_ITEM, PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memmove, memset


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
    ctypedef struct PyMemberDef:
        Py_ssize_t offset

    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

    ctypedef struct PyTypeObject:
        pass

    PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t) except NULL
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1


SOURCE = ""  # set by the build: a digest of this file, by which a stale build is detected

cdef enum:
    # The fields of a lifetime.
    STORAGE = 0
    START = 1
    EAGER_START = 2
    EAGER_STOP = 3
    LAZY_STOP = 4
    MAKER = 5
    FIRST_USE = 6
    LAST_USE = 7
    IN_BACKWARD = 8
    KEPT = 9
    OF = 10
    RAN = 11
    FIELDS = 12

cdef int64_t MOST = 2**61  # of all sizes together

cdef object Lifetime
cdef Py_ssize_t N_index, N_op, N_inputs, N_outputs, N_writes, N_phase
cdef Py_ssize_t V_storage
cdef Py_ssize_t S_nbytes, S_device, S_external, S_created, S_dropped, S_continues, S_role, S_arrived, S_resized, S_is_data


cdef Py_ssize_t offset(type cls, str name) except -1:
    """The offset of the slot ``name`` in instances of ``cls`` and its subclasses."""
    member = cls.__dict__.get(name)
    if type(member).__name__ != "member_descriptor":
        raise ImportError(f"{cls.__name__} has no slot {name}")
    return (<PyMemberDescrObject *> <void *> member).d_member.offset


def connect(lifetime, node, value, storage):
    """Connect the module with these classes.

    Raises:
        ImportError: a class has not the slots or fields that this module was written for.
    """
    global Lifetime, N_index, N_op, N_inputs, N_outputs, N_writes, N_phase, V_storage
    global S_nbytes, S_device, S_external, S_created, S_dropped, S_continues, S_role, S_arrived, S_resized, S_is_data
    fields = ("storage", "start", "eager_start", "eager_stop", "lazy_stop", "maker", "first_use", "last_use",
              "in_backward", "kept", "of", "ran")
    if lifetime._fields != fields:
        raise ImportError(f"{lifetime.__name__} has other fields than {', '.join(fields)}")
    Lifetime = lifetime
    N_index, N_op, N_phase = offset(node, "index"), offset(node, "op"), offset(node, "phase")
    N_inputs, N_outputs, N_writes = offset(node, "inputs"), offset(node, "outputs"), offset(node, "writes")
    V_storage = offset(value, "storage")
    S_nbytes, S_device, S_external = offset(storage, "nbytes"), offset(storage, "device"), offset(storage, "external")
    S_created, S_dropped = offset(storage, "created"), offset(storage, "dropped")
    S_continues, S_role = offset(storage, "continues"), offset(storage, "role")
    S_arrived, S_resized = offset(storage, "arrived"), offset(storage, "resized")
    S_is_data = offset(storage, "is_data")


cdef inline object get(object item, Py_ssize_t at):
    """The content of a slot, which must not be empty."""
    return <object> (<PyObject **> (<char *> <void *> item + at))[0]


cdef inline object part(object span, Py_ssize_t field):
    return <object> PyTuple_GET_ITEM(span, field)


cdef inline void fill(PyObject *made, Py_ssize_t field, object content):
    Py_INCREF(content)
    PyTuple_SET_ITEM(<object> made, field, content)


cdef object made_span(object storage, object start, object eager_start, object eager_stop, object lazy_stop,
                      object maker, object first_use, object last_use, object in_backward, object kept,
                      object of, object ran):
    cdef PyObject *made = PyType_GenericAlloc(<PyTypeObject *> <void *> Lifetime, FIELDS)
    fill(made, STORAGE, storage)
    fill(made, START, start)
    fill(made, EAGER_START, eager_start)
    fill(made, EAGER_STOP, eager_stop)
    fill(made, LAZY_STOP, lazy_stop)
    fill(made, MAKER, maker)
    fill(made, FIRST_USE, first_use)
    fill(made, LAST_USE, last_use)
    fill(made, IN_BACKWARD, in_backward)
    fill(made, KEPT, kept)
    fill(made, OF, of)
    fill(made, RAN, ran)
    result = <object> made
    Py_XDECREF(made)  # Cython holds its own reference
    return result


# --- lifetimes ------------------------------------------------------------------------


cdef inline int note_use(dict first, dict last, object storage, object node) except -1:
    if PyDict_GetItem(last, storage) is NULL:
        first[storage] = node
    last[storage] = node
    return 0


def uses(nodes):
    """The first and the last node that uses each storage, and the storages that the backward pass reads.

    See ``lifetimes._uses``.
    """
    cdef dict first = {}
    cdef dict last = {}
    cdef set backward = set()
    for node in nodes:
        inputs = get(node, N_inputs)
        for value in inputs:
            note_use(first, last, get(value, V_storage), node)
        if get(node, N_phase) == "backward":
            for value in inputs:
                backward.add(get(value, V_storage))
        for value in get(node, N_outputs):
            storage = get(value, V_storage)
            if PyDict_GetItem(last, storage) is NULL and get(storage, S_created) != get(node, N_index):
                first[storage] = node
            last[storage] = node
        for storage in get(node, N_writes):
            note_use(first, last, storage, node)
    return first, last, backward


def spans_of(list nodes, storages, bint foreign, bint as_recorded, dict first, dict last, set backward, inside):
    """The lifetimes of some storages, the last use of each of which is removed from ``last``.

    See ``lifetimes._spans_of``; ``foreign`` storages are those of other graphs. Returns the lifetimes, whether
    a storage continues another one, whether one was resized, and the places of those that have arrived.
    """
    cdef Py_ssize_t count = len(nodes)
    cdef int64_t start, eager_start, eager_stop, lazy_stop, earliest, dropped
    cdef bint ran = bool(inside.ran)
    cdef bint continued = False
    cdef bint resized = False
    cdef list result = []
    cdef list arrived = []
    cdef object total = count  # one object for all lifetimes that end there
    cdef object from_start
    for storage in storages:
        last_use = last.pop(storage, None)
        continued = continued or get(storage, S_continues) is not None
        resized = resized or bool(get(storage, S_resized))
        if <int64_t> get(storage, S_arrived) >= 0:
            arrived.append(len(result))
        start = -1 if foreign or get(storage, S_external) else get(storage, S_created)
        maker = <object> PyList_GET_ITEM(nodes, start) if 0 <= start < count else None
        earliest = start + 1
        eager_start = start
        found = PyDict_GetItem(first, storage)
        first_use = <object> found if found is not NULL else None
        if first_use is None and last_use is not None:
            first_use = nodes[<object> get(storage, S_created)]
        drop = get(storage, S_dropped)
        if drop is None:
            kept, eager_stop, lazy_stop = True, count, count
        else:
            dropped = drop
            if as_recorded and dropped >= count and not foreign:
                kept, eager_stop, lazy_stop = True, count, count
            else:
                kept = False
                lazy_stop = max(<int64_t> get(last_use, N_index) + 1 if last_use is not None else earliest, earliest)
                eager_stop = lazy_stop if foreign else max(dropped, earliest)
                if ran:
                    lazy_stop = max(lazy_stop, <int64_t> inside.last_need(maker, storage))
                    if maker is not None:
                        lazy_stop = max(lazy_stop, <int64_t> inside.last_with(maker, storage, drop))
                if start < 0 and first_use is not None and get(storage, S_role) is None:
                    eager_start = get(first_use, N_index)
                    eager_stop = max(eager_stop, eager_start + 1)
                    if not foreign:
                        start = inside.end_before(eager_start)
        from_start = start
        result.append(made_span(
            storage, from_start, from_start if eager_start == start else eager_start,
            total if eager_stop == count else eager_stop, total if lazy_stop == count else lazy_stop,
            maker, first_use, last_use, storage in backward, kept, "lazyviz", None,
        ))
    return result, continued, resized, arrived


def of_eager(spans):
    """``lifetimes.of_eager`` of each of ``spans``."""
    cdef list result = []
    for span in spans:
        start, stop = part(span, EAGER_START), part(span, EAGER_STOP)
        result.append(made_span(
            part(span, STORAGE), start, start, stop, stop, part(span, MAKER), part(span, FIRST_USE),
            part(span, LAST_USE), part(span, IN_BACKWARD), part(span, KEPT), "eager", part(span, RAN),
        ))
    return result


def alive(spans, int64_t position):
    """Those of ``spans`` that our run holds during the node at ``position``."""
    return [
        span for span in spans
        if <int64_t> part(span, START) <= position < <int64_t> part(span, LAZY_STOP)
    ]


def alike(spans):
    """Lists of ``spans`` that agree in everything that ``live_set_and_categories.categorize`` reads."""
    cdef dict found = {}
    cdef PyObject *group
    for span in spans:
        maker, first_use = part(span, MAKER), part(span, FIRST_USE)
        key = (
            get(maker, N_phase) if maker is not None else None,
            get(first_use, N_phase) if first_use is not None else None,
            part(span, IN_BACKWARD),
            part(span, KEPT),
            part(span, OF),
            get(part(span, STORAGE), S_role),
            get(part(span, STORAGE), S_is_data),
        )
        group = PyDict_GetItem(found, key)
        if group is NULL:
            found[key] = [span]
        else:
            (<list> <object> group).append(span)
    return list(found.values())


def by_device(spans):
    """``lifetimes.by_device``."""
    cdef dict found = {}
    cdef list own = []
    cdef object device = None
    for span in spans:
        there = get(part(span, STORAGE), S_device)
        if there is not device:  # nearly always the same object
            device = there
            own = found.setdefault(device, [])
        own.append(span)
    return found


def nodes_with(nodes, is_wanted):
    """The nodes whose operator is wanted, which is asked once for each operator."""
    cdef dict known = {}  # by address: an operator's own hash is a Python function
    cdef PyObject *answer
    cdef PyObject *before = NULL
    cdef PyObject *op
    cdef bint wanted = False
    cdef list result = []
    for node in nodes:
        op = (<PyObject **> (<char *> <void *> node + N_op))[0]
        if op is not before:
            address = <size_t> op
            answer = PyDict_GetItem(known, address)
            if answer is NULL:
                wanted = known[address] = bool(is_wanted(<object> op))
            else:
                wanted = <object> answer is True
            before = op
        if wanted:
            result.append(node)
    return result


# --- sizes over time ------------------------------------------------------------------


cdef inline int64_t nbytes_of(object span, int *overflow) except? -1:
    return PyLong_AsLongLongAndOverflow(get(part(span, STORAGE), S_nbytes), overflow)


cdef object sums(const int64_t *changes, Py_ssize_t count):
    cdef list result = PyList_New(count)
    cdef int64_t total = 0
    cdef Py_ssize_t position
    cdef object shared = 0  # equal sums in a row are one object
    for position in range(count):
        if changes[position] or not position:
            total += changes[position]
            shared = total
        Py_INCREF(shared)
        PyList_SET_ITEM(result, position, shared)
    return result


def allocated(spans, Py_ssize_t count, bint eager):
    """``lifetimes.allocated``; ``None`` if sizes might overflow, or a lifetime is not within the program."""
    cdef int64_t *changes = <int64_t *> PyMem_Malloc((count + 1) * sizeof(int64_t))
    cdef Py_ssize_t first = EAGER_START if eager else START
    cdef Py_ssize_t last = EAGER_STOP if eager else LAZY_STOP
    cdef int64_t nbytes, start, stop
    cdef int64_t total = 0
    cdef int overflow = 0
    if changes is NULL:
        raise MemoryError
    memset(changes, 0, (count + 1) * sizeof(int64_t))
    try:
        for span in spans:
            nbytes = nbytes_of(span, &overflow)
            start, stop = part(span, first), part(span, last)
            if overflow or nbytes < 0 or nbytes > MOST - total or start > count or not 0 <= stop <= count:
                return None
            total += nbytes
            changes[start if start > 0 else 0] += nbytes
            changes[stop] -= nbytes
        return sums(changes, count)
    finally:
        PyMem_Free(changes)


# --- the caching allocator ------------------------------------------------------------


cdef int64_t GRAIN = 512  # of `plan/allocator/alloc_conf_and_rounding.py`, whose names are longer
cdef int64_t SMALL = 1 << 20
cdef int64_t SMALL_SEGMENT = 2 << 20
cdef int64_t MIDDLE = 10 << 20
cdef int64_t LARGE_GRAIN = 2 << 20

cdef struct Block:
    int64_t address
    int64_t size
    int32_t before
    int32_t after
    bint used
    bint small

cdef struct Free:
    int64_t size
    int64_t address
    int32_t block

cdef struct Pool:
    Free *items
    Py_ssize_t count
    Py_ssize_t room


cdef class Allocator:
    """``CachingAllocator`` on one stream, from an empty state, without the options that are off by default."""

    cdef Block *blocks
    cdef Py_ssize_t block_count, block_room
    cdef int32_t spare  # the first block that is free for reuse; they are linked by `after`
    cdef Pool[2] pools  # large, small
    cdef int64_t capacity, allowed, large_segment, next_address
    cdef int64_t reserved, reserved_peak, allocated, allocated_peak
    cdef Py_ssize_t retries

    def __cinit__(self, int64_t capacity, int64_t allowed, int64_t large_segment):
        self.capacity, self.allowed, self.large_segment = capacity, allowed, large_segment
        self.spare = -1

    def __dealloc__(self):
        PyMem_Free(self.blocks)
        PyMem_Free(self.pools[0].items)
        PyMem_Free(self.pools[1].items)

    cdef int32_t new_block(self, int64_t address, int64_t size, bint small) except -1:
        cdef int32_t made = self.spare
        cdef void *grown
        if made >= 0:
            self.spare = self.blocks[made].after
        else:
            if self.block_count == self.block_room:
                self.block_room = max(1024, 2 * self.block_room)
                grown = PyMem_Realloc(self.blocks, self.block_room * sizeof(Block))
                if grown is NULL:
                    raise MemoryError
                self.blocks = <Block *> grown
            made = <int32_t> self.block_count
            self.block_count += 1
        self.blocks[made] = Block(address, size, -1, -1, False, small)
        return made

    cdef inline void recycle(self, int32_t block) noexcept:
        self.blocks[block].after = self.spare
        self.spare = block

    cdef Py_ssize_t place(self, Pool *pool, int64_t size, int64_t address) noexcept:
        """The number of free blocks before (size, address)."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = pool.count
        cdef Py_ssize_t middle
        while low < high:
            middle = (low + high) // 2
            if pool.items[middle].size < size or (
                pool.items[middle].size == size and pool.items[middle].address < address
            ):
                low = middle + 1
            else:
                high = middle
        return low

    cdef int put(self, int32_t block) except -1:
        cdef Block *item = &self.blocks[block]
        cdef Pool *pool = &self.pools[item.small]
        cdef Py_ssize_t at
        cdef void *grown
        if pool.count == pool.room:
            pool.room = max(1024, 2 * pool.room)
            grown = PyMem_Realloc(pool.items, pool.room * sizeof(Free))
            if grown is NULL:
                raise MemoryError
            pool.items = <Free *> grown
        at = self.place(pool, item.size, item.address)
        memmove(&pool.items[at + 1], &pool.items[at], (pool.count - at) * sizeof(Free))
        pool.items[at] = Free(item.size, item.address, block)
        pool.count += 1
        return 0

    cdef void remove(self, Pool *pool, Py_ssize_t at) noexcept:
        pool.count -= 1
        memmove(&pool.items[at], &pool.items[at + 1], (pool.count - at) * sizeof(Free))

    cdef void take(self, int32_t block) noexcept:
        cdef Block *item = &self.blocks[block]
        cdef Pool *pool = &self.pools[item.small]
        self.remove(pool, self.place(pool, item.size, item.address))

    cdef int64_t segment(self, int64_t size) noexcept:
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < MIDDLE:
            return self.large_segment
        return (size + LARGE_GRAIN - 1) // LARGE_GRAIN * LARGE_GRAIN

    cdef bint is_whole(self, int32_t block) noexcept:
        return self.blocks[block].before < 0 and self.blocks[block].after < 0

    cdef void empty_cache(self) noexcept:
        cdef Pool *pool
        cdef Py_ssize_t at, kept
        cdef int number
        for number in range(2):
            pool = &self.pools[number]
            kept = 0
            for at in range(pool.count):
                if self.is_whole(pool.items[at].block):
                    self.reserved -= pool.items[at].size
                    self.recycle(pool.items[at].block)
                else:
                    pool.items[kept] = pool.items[at]
                    kept += 1
            pool.count = kept

    cdef int32_t grow(self, int64_t size, int64_t segment) except -2:
        cdef int32_t made
        if self.reserved + segment > self.allowed or self.reserved + segment > self.capacity:
            return -1
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        made = self.new_block(self.next_address, segment, size <= SMALL)
        self.next_address += segment
        return made

    cdef int32_t allocate(self, int64_t nbytes) except -2:
        """The block for ``nbytes``; -1 if there is no memory for it."""
        cdef int64_t size = (nbytes + GRAIN - 1) // GRAIN * GRAIN
        cdef bint small = size <= SMALL
        cdef Pool *pool = &self.pools[small]
        cdef Py_ssize_t at = self.place(pool, size, -1)
        cdef int32_t block, rest
        cdef int64_t left, segment
        if at < pool.count:
            block = pool.items[at].block
            self.remove(pool, at)
        else:
            segment = self.segment(size)
            block = self.grow(size, segment)
            if block < 0:
                self.empty_cache()
                self.retries += 1
                block = self.grow(size, segment)
                if block < 0:
                    return -1
        left = self.blocks[block].size - size
        if left and (left >= GRAIN if small else left > SMALL):
            rest = self.new_block(self.blocks[block].address + size, left, small)
            self.blocks[rest].before = block
            self.blocks[rest].after = self.blocks[block].after
            if self.blocks[rest].after >= 0:
                self.blocks[self.blocks[rest].after].before = rest
            self.blocks[block].after = rest
            self.blocks[block].size = size
            self.put(rest)
        self.blocks[block].used = True
        self.allocated += self.blocks[block].size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    cdef int free(self, int32_t block) except -1:
        cdef Block *item = &self.blocks[block]
        cdef Block *other
        cdef int32_t beside = item.before
        self.allocated -= item.size
        item.used = False
        if beside >= 0 and not self.blocks[beside].used:
            other = &self.blocks[beside]
            self.take(beside)
            item.address = other.address
            item.size += other.size
            item.before = other.before
            if other.before >= 0:
                self.blocks[other.before].after = block
            self.recycle(beside)
        beside = item.after
        if beside >= 0 and not self.blocks[beside].used:
            other = &self.blocks[beside]
            self.take(beside)
            item.size += other.size
            item.after = other.after
            if other.after >= 0:
                self.blocks[other.after].before = block
            self.recycle(beside)
        return self.put(block)

    cdef int64_t largest_free(self) noexcept:
        cdef int64_t found = 0
        cdef int number
        for number in range(2):
            if self.pools[number].count:
                found = max(found, self.pools[number].items[self.pools[number].count - 1].size)
        return found


cdef class Calls:
    """The allocations and frees of a run in time order, as in ``reserved_memory.reserve_calls``.

    ``order`` has the numbers of what is allocated or freed: first spans, then workspaces. Those of one moment
    are together: frees before each position, then allocations, of which ``ends`` are the ends in ``order``.
    """

    cdef int64_t *sizes
    cdef int32_t *order
    cdef Py_ssize_t *ends
    cdef Py_ssize_t items, moments
    cdef readonly bint ordinary

    def __cinit__(self, list spans, Py_ssize_t count, bint eager, list workspaces):
        cdef Py_ssize_t first = EAGER_START if eager else START
        cdef Py_ssize_t last = EAGER_STOP if eager else LAZY_STOP
        cdef Py_ssize_t at, total, before, moment
        cdef int64_t nbytes, start, stop
        cdef int64_t sum_of_sizes = 0
        cdef int overflow = 0
        cdef int64_t *starts
        cdef int64_t *stops
        self.items, self.moments = len(spans) + len(workspaces), 2 * (count + 2)
        if self.items >= 2**30:
            return
        self.sizes = <int64_t *> PyMem_Malloc(max(self.items, 1) * sizeof(int64_t))
        self.order = <int32_t *> PyMem_Malloc((2 * self.items + 1) * sizeof(int32_t))
        self.ends = <Py_ssize_t *> PyMem_Malloc(self.moments * sizeof(Py_ssize_t))
        starts = <int64_t *> PyMem_Malloc((2 * self.items + 1) * sizeof(int64_t))
        stops = starts + self.items
        try:
            if self.sizes is NULL or self.order is NULL or self.ends is NULL or starts is NULL:
                raise MemoryError
            memset(self.ends, 0, self.moments * sizeof(Py_ssize_t))
            for at in range(self.items):
                if at < len(spans):
                    span = <object> PyList_GET_ITEM(spans, at)
                    nbytes = nbytes_of(span, &overflow)
                    start, stop = part(span, first), part(span, last)
                else:
                    start, nbytes = workspaces[at - len(spans)]
                    stop = count
                self.sizes[at] = nbytes
                if not nbytes:
                    continue
                if overflow or nbytes < 0 or nbytes > MOST - sum_of_sizes - LARGE_GRAIN:
                    return
                if not -1 <= start < stop <= count:
                    return
                sum_of_sizes += nbytes + LARGE_GRAIN
                starts[at], stops[at] = 2 * (start + 1) + 1, 2 * (stop + 1)
                self.ends[starts[at]] += 1
                if at < len(spans):
                    self.ends[stops[at]] += 1
            total = 0
            for moment in range(self.moments):  # where each moment begins, and below, where it ends
                before = self.ends[moment]
                self.ends[moment] = total
                total += before
            for at in range(self.items):
                if not self.sizes[at]:
                    continue
                self.order[self.ends[starts[at]]] = <int32_t> at
                self.ends[starts[at]] += 1
                if at < len(spans):
                    self.order[self.ends[stops[at]]] = <int32_t> at
                    self.ends[stops[at]] += 1
            self.ordinary = True
        finally:
            PyMem_Free(starts)

    def __dealloc__(self):
        PyMem_Free(self.sizes)
        PyMem_Free(self.order)
        PyMem_Free(self.ends)

    def played(self, int64_t capacity, int64_t allowed, int64_t large_segment):
        """The effect on an allocator: peak of reserved bytes, and its position; peak of allocated bytes,
        retries, and of the allocation that fails, if any: event, number, segment, bytes reserved and
        allocated then, and largest free block.
        """
        cdef Allocator allocator = Allocator(capacity, allowed, large_segment)
        cdef int32_t *live = <int32_t *> PyMem_Malloc(max(self.items, 1) * sizeof(int32_t))
        cdef Py_ssize_t moment
        cdef Py_ssize_t event = 0
        cdef Py_ssize_t position = -2
        cdef int64_t peak = 0
        cdef int32_t item
        failure = None
        if live is NULL:
            raise MemoryError
        try:
            for moment in range(self.moments):
                while event < self.ends[moment]:
                    item = self.order[event]
                    if moment % 2 == 0:
                        allocator.free(live[item])
                    else:
                        live[item] = allocator.allocate(self.sizes[item])
                        if live[item] < 0:
                            segment = allocator.segment((self.sizes[item] + GRAIN - 1) // GRAIN * GRAIN)
                            failure = (event, item, segment, allocator.reserved, allocator.allocated,
                                       allocator.largest_free())
                            break
                        if allocator.reserved_peak > peak:
                            peak, position = allocator.reserved_peak, moment // 2 - 1
                    event += 1
                if failure is not None:
                    break
        finally:
            PyMem_Free(live)
        return allocator.reserved_peak, position, allocator.allocated_peak, allocator.retries, failure
