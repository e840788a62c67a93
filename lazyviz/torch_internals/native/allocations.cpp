// Bytes that calls hold on the CPU at most, from the events of PyTorch's allocator.

#include <torch/csrc/python_headers.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

namespace {

// Allocations and frees of the threads that have it: this one, and those that PyTorch passes its state on to.
class Events final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t nbytes, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard<std::mutex> guard(lock_);
    now_ += nbytes;
    peak_ = std::max(peak_, now_);
  }

  bool memoryProfilingEnabled() const override { return true; }

  int64_t peak() {
    const std::lock_guard<std::mutex> guard(lock_);
    return peak_;
  }

 private:
  std::mutex lock_;
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

// A profiler's state has this place, too.
const c10::DebugInfoKind& place() { return c10::DebugInfoKind::PROFILER_STATE; }

PyObject* begin(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  if (c10::ThreadLocalDebugInfo::get(place()) != nullptr) Py_RETURN_FALSE;
  c10::ThreadLocalDebugInfo::_push(place(), std::make_shared<Events>());
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* end(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto* events = dynamic_cast<Events*>(c10::ThreadLocalDebugInfo::get(place()));
  if (events == nullptr) Py_RETURN_NONE;
  const int64_t peak = events->peak();
  c10::ThreadLocalDebugInfo::_pop(place());
  return PyLong_FromLongLong(peak);
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"begin", begin, METH_NOARGS, "begin(): note this thread's allocations; False if a profiler is active."},
    {"end", end, METH_NOARGS, "end(): the bytes that were held at most since begin(); None if nothing was noted."},
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
