// The most bytes that calls hold on the CPU, from the events of PyTorch's allocator.

#include <torch/csrc/python_headers.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

// The allocator reports to what is in the place of a profiler's state. PyTorch takes whatever is there for such a state,
// so it is one: that of a profiler that is disabled.
const auto PLACE = c10::DebugInfoKind::PROFILER_STATE;

// Allocations and frees of the threads that have it: this one, and those that PyTorch passes its state on to.
class Events final : public ProfilerStateBase {
 public:
  Events() : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)) {}

  void reportMemoryUsage(void*, int64_t nbytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard<std::mutex> guard(lock_);
    now_ += nbytes;
    peak_ = std::max(peak_, now_);
  }

  bool memoryProfilingEnabled() const override { return true; }

  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }

  int64_t peak() {
    const std::lock_guard<std::mutex> guard(lock_);
    return peak_;
  }

 private:
  std::mutex lock_;
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

Events* current() { return dynamic_cast<Events*>(c10::ThreadLocalDebugInfo::get(PLACE)); }

// The bytes held at most, after which nothing is noted any more.
int64_t stop(Events* events) {
  const int64_t peak = events->peak();
  c10::ThreadLocalDebugInfo::_pop(PLACE);
  return peak;
}

// False if a profiler is active. What an interrupted `begin` has left is replaced.
bool start() {
  if (Events* left = current()) stop(left);
  if (c10::ThreadLocalDebugInfo::get(PLACE) != nullptr) return false;
  c10::ThreadLocalDebugInfo::_push(PLACE, std::make_shared<Events>());
  return true;
}

PyObject* begin(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(start());
  END_HANDLE_TH_ERRORS
}

PyObject* end(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Events* events = current();
  if (events == nullptr) Py_RETURN_NONE;
  return PyLong_FromLongLong(stop(events));
  END_HANDLE_TH_ERRORS
}

// No signal handler can come between the call and the end of its measurement. HANDLE_TH_ERRORS would give the warnings
// of the kernel to our caller; without it, the PyTorch function that the user has called gives them to the user's line.
PyObject* measured(PyObject*, PyObject* given) try {
  PyObject *function, *args, *kwargs;
  if (!PyArg_ParseTuple(given, "OO!O!", &function, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) return nullptr;
  if (!start()) {
    PyObject* result = PyObject_Call(function, args, kwargs);
    return result == nullptr ? nullptr : Py_BuildValue("(NO)", result, Py_None);
  }
  PyObject* result = PyObject_Call(function, args, kwargs);
  Events* events = current();
  const int64_t peak = events == nullptr ? -1 : stop(events);
  if (result == nullptr) return nullptr;
  if (peak < 0) return Py_BuildValue("(NO)", result, Py_None);
  return Py_BuildValue("(NL)", result, static_cast<long long>(peak));
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

PyMethodDef METHODS[] = {
    {"begin", begin, METH_NOARGS, "begin(): note this thread's allocations; False if a profiler is active."},
    {"end", end, METH_NOARGS, "end(): the bytes that were held at most since begin(); None if nothing was noted."},
    {"measured", measured, METH_VARARGS, "measured(function, args, kwargs): its result, and the bytes or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "lazyviz.torch_internals.native.allocations", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_allocations() {
  PyObject* module = PyModule_Create(&MODULE);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "SOURCE", LAZYVIZ_SOURCE);
  PyModule_AddStringConstant(module, "TORCH", LAZYVIZ_TORCH);
  return module;
}
