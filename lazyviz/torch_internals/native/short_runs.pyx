# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Compiled runs of short cached subgraphs, for programs that read a value after every op.

Such a run does the same as :func:`lazyviz.session.evaluate_at_sync_point.run_for_values`, without the steps around
generated code: signals need not be deferred, because no Python code runs between a kernel and its bookkeeping
(``Program.in_one_go`` of ``interpreter.cpp``). Anything that is not ordinary is detected before anything has
been changed, and is left to Python.
"""

import sys
from array import array as new_array
from functools import partial
from time import perf_counter

from cpython cimport array


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
    unsigned long PyThread_get_thread_ident()


SOURCE = ""  # set by the build: a digest of this file, by which a stale build is detected

cdef array.array TIMES = new_array("d", [0.0])
cdef object running_on = 0  # the thread that is in such a run

cdef object tape, replays, node_passes, evaluation, RunHistory
cdef object is_on_gpu, stand_ins, OtherRanks, needs_absent, at_users_line, complete, can_run_in_one_go
cdef object graph_of, note_elsewhere, note_failure, raise_stopped, finish_stopped
cdef object refuse, run_counted, counter_of, of_read, numbers
# Parts of the tape and of `evaluation`, which are never replaced.
cdef object pending_runs, recording_state, tensors, generators, pending_ops, forbidden, metrics, graphs
cdef dict pending_nodes
cdef unsigned long main_thread
cdef double longest


def connect(**parts):
    """The objects of lazyviz that are used here, by name."""
    global tape, replays, node_passes, evaluation, RunHistory, is_on_gpu, stand_ins, OtherRanks, needs_absent
    global at_users_line, complete, can_run_in_one_go, note_elsewhere, note_failure, raise_stopped
    global graph_of, finish_stopped, main_thread, longest, refuse, run_counted, counter_of, of_read, numbers
    global pending_runs, recording_state, tensors, generators, pending_ops, forbidden, metrics, graphs
    global pending_nodes
    tape, replays, node_passes = parts["tape"], parts["replays"], parts["node_passes"]
    pending_runs, recording_state, tensors = tape.runs, tape.recording, tape.tensors
    generators, pending_ops, pending_nodes = tape.generators, tape.pending_ops, tape.pending
    evaluation, RunHistory = parts["evaluation"], parts["RunHistory"]
    forbidden, metrics, graphs = evaluation.forbidden, evaluation.metrics, evaluation.graphs
    is_on_gpu, stand_ins, OtherRanks = parts["is_on_gpu"], parts["stand_ins"], parts["OtherRanks"]
    needs_absent, at_users_line, complete = parts["needs_absent"], parts["at_users_line"], parts["complete"]
    can_run_in_one_go, note_elsewhere = parts["can_run_in_one_go"], parts["note_elsewhere"]
    graph_of, refuse, run_counted = parts["graph_of"], parts["refuse"], parts["run_counted"]
    counter_of, of_read, numbers = parts["counter_of"], parts["of_read"], parts["numbers"]
    note_failure, raise_stopped = parts["note_failure"], parts["raise_stopped"]
    finish_stopped, main_thread, longest = parts["finish_stopped"], parts["main_thread"], parts["longest"]


def is_running():
    """Whether this thread is in such a run."""
    return running_on == PyThread_get_thread_ident()


cdef bint runs_plainly(lazy, recorded) except -1:
    """Whether reads of a graph only need their nodes to run, while ``recorded`` is being recorded."""
    if RunHistory.with_split_runs.data:  # without Python
        return False
    if lazy is not None:
        choices = lazy.choices
        if saves_memory(choices) or choices.summaries or lazy.runs._listeners:
            return False
        if lazy.ir is recorded:
            return True
    other = None if recorded is None else lazy_graph_of(recorded)
    return other is None or not saves_memory(other.choices)


cdef bint saves_memory(choices) except -1:
    """``GraphOptions.saves_memory``; no Python code is called for the default."""
    return not (choices.split == "off" and choices.recompute == "off") and choices.saves_memory


cdef object lazy_graph_of(graph):
    """``graphs.get(id(graph))``."""
    ref = (<dict> graphs.data).get(id(graph))
    return None if ref is None else ref()


cdef bint is_suited(subgraph, known, graph) except -1:
    """Whether the subgraph is short and simple enough to run without interruption."""
    seconds = known.seconds
    if seconds is None or seconds > longest:
        return False
    if known.in_one_go is None:
        known.in_one_go = can_run_in_one_go(subgraph, known)
    for value in <list> subgraph.outside:
        node = value.node
        if node is not None and node.graph is not graph:
            return False
    return known.in_one_go


def run_for_sync(nodes, str cause):
    """``lazyviz.session.evaluate_at_sync_point.run_for_sync``."""
    if forbidden.get():
        refuse(nodes, cause)
    if pending_runs.background is not None and pending_runs.finish_first(nodes):
        nodes = node_passes.unfinished(nodes)
    counters = metrics.counters
    counters["syncs"] += 1
    counters[counter_of(cause)] += 1
    if nodes and not run_in_one_go(nodes, cause):
        run_counted(nodes, cause)


def run_in_one_go(nodes, str cause):
    """Run ``nodes`` of one graph if they are a short cached subgraph; returns False for others."""
    if pending_runs.active_thread or pending_runs.running or recording_state.appending:
        return False
    if PyThread_get_thread_ident() != main_thread:
        return False
    recorded, graph = recording_state.graph, graph_of(nodes)
    if graph is None or (recorded is not None and recording_state.owner != main_thread):
        return False
    if (is_on_gpu is not None and is_on_gpu()) or ((stand_ins or OtherRanks.ranks) and needs_absent(nodes)):
        return False
    lazy = lazy_graph_of(graph)
    if not runs_plainly(lazy, recorded):
        return False
    cdef ShortRun run = ShortRun.__new__(ShortRun)
    subgraph = run.find(nodes)
    known = run.known
    if subgraph is None or not is_suited(subgraph, known, graph) or not run.prepare():
        return False
    start = perf_counter()
    try:
        if not run.go():
            return False
    except BaseException as error:
        note_failure(subgraph, known, error, perf_counter() - start, cause)
        raise
    replays.hits += 1
    note(subgraph, lazy, recorded, known.levels, perf_counter() - start, cause)
    return True


cdef object note(subgraph, lazy, recorded, levels, seconds, str cause):
    """Values were read: update the metrics and the graph."""
    nodes = subgraph.nodes
    done = len(nodes)
    evaluation.last_run = cause, done, seconds
    timing = (<dict> metrics._timings).get("evaluate")
    if timing is None:
        metrics.add("evaluate", seconds)
    else:  # as `Metrics.add` does
        timing.recent.append(seconds)
        timing.count += 1
        timing.total += seconds
    metrics.counters["ops run"] += done
    if recorded is None or lazy is None or lazy.ir is not recorded:
        note_elsewhere(lazy, nodes, seconds, levels, cause)
        return
    runs = lazy.runs  # its report and timeline are created on demand
    runs.error = runs.live = runs.state = None
    runs._report = nodes, seconds, levels, cause
    (<list> runs._timelines).append(of_read((nodes, levels.marks)))


cdef class ShortRun:
    """A run of a short cached subgraph."""

    cdef object subgraph, known, times, saved, draws, notes, take
    cdef list ran, stage

    cdef object find(self, nodes):
        """The cached subgraph of ``nodes``, if it has code and is found by its fingerprint."""
        steps = replays.steps
        fields = node_passes.fingerprint(nodes, steps._known, steps._forms, False, len(pending_nodes))
        self.known = known = None if fields is None else (<dict> replays._by_fingerprint).get(fields[0])
        if known is None or known.code is None:
            return None
        self.subgraph = subgraph = steps.subgraph_of(nodes, fields)
        if subgraph is not None:
            subgraph.key, known.found = known.key, True
        return subgraph

    cdef bint prepare(self) except -1:
        """Whether it can run here; what is called between its kernels and the return to Python is chosen."""
        subgraph = self.subgraph
        nodes, outside, later = subgraph.nodes, subgraph.outside, subgraph.later
        self.saved, self.draws = (), []
        self.ran, self.stage = [], []
        self.times = times = array.clone(TIMES, 1, False)
        (<array.array> times).data.as_doubles[0] = perf_counter()
        drawn_from = ()
        if subgraph.draws:  # most reads draw nothing
            drawing = [nodes[at] for at in subgraph.draws]
            drawn_from = generators.drawn_whole(drawing)
            if drawn_from is None:
                return False
            self.saved, self.draws = generators.save(drawing), [node.draws for node in drawing]
        done = partial(node_passes.note_done, nodes, times)
        if subgraph.whole and not later:
            unused = partial(node_passes.note_unused, subgraph.values, subgraph.storages)
            self.notes = done, unused, pending_nodes.clear
        else:
            release = partial(node_passes.release_inputs, nodes, outside, later, pending_nodes)
            self.notes = done, partial(node_passes.note_used, nodes), release
        if drawn_from:  # its state is already the one after the last draw
            self.notes += generators.forgetting(drawn_from)
        # A signal handler may have run them meanwhile.
        self.take = partial(node_passes.take, outside, subgraph.kept, nodes)
        return True

    cdef bint go(self) except -1:
        """Run it; False if a mode of the user's must see its ops. Raises a kernel's errors."""
        global running_on
        subgraph = self.subgraph
        recording_state.last_change = next(numbers)  # `RecordingState.changed`
        running_on = main_thread
        try:
            warn = self.known.code.in_one_go(
                pending_runs,
                main_thread,
                self.take,
                subgraph.scalars,
                self.draws,
                subgraph.users,
                subgraph.later,
                self.times,
                self.notes,
                self.ran,
            )
            if warn is NotImplemented:
                return False
            self.end()
        except BaseException:
            complete(self.end)
            raise
        finally:
            running_on = 0
        stopped = self.ran.pop()
        if stopped is not None:
            raise_stopped(subgraph, self.known, self.times, stopped, warn)
        elif warn is not None:
            at_users_line(tape.scopes.sources, sys._getframe(), warn)
        return True

    def end(self):
        """It has run, or was stopped; may be called again."""
        nodes, known = self.subgraph.nodes, self.known
        is_stopped = bool(self.ran) and self.ran[0] is not None
        has_run = nodes[len(nodes) - 1].state == "done"
        if is_stopped:
            finish_stopped(self.subgraph, known, self.times, self.ran, self.stage)
        elif has_run:
            known.seconds = self.times[len(self.times) - 1] - self.times[0]
            if recording_state.graph is not None:
                tensors.made_real(self.subgraph.users)
        if self.saved and (is_stopped or not has_run):
            generators.restore(self.saved)
        pending_runs.running = pending_runs.active_thread = 0
        pending_ops.release_unused(nodes)
