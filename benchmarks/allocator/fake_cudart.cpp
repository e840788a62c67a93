// A CUDA runtime without a GPU: enough of it for the allocator in PyTorch's c10_cuda library.
//
// Memory is only counted.  Addresses rise and are never given twice, as in the simulator.
// FAKE_TOTAL is the device's memory in bytes, FAKE_CAPACITY what of it can be allocated.
// Functions that the library names and nobody calls here, or whose work is to wait, are added by
// benchmarks/allocator_traces.py: they return 0.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

namespace {
size_t number(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}
const size_t kPage = size_t(2) << 20;
const size_t total = number("FAKE_TOTAL", size_t(80) << 30);
const size_t capacity = number("FAKE_CAPACITY", total);
size_t used = 0;
size_t next_address = size_t(1) << 40;
size_t next_range = size_t(1) << 44;
unsigned long long next_handle = 1;
std::map<size_t, size_t> segments, handles;

CUresult address_reserve(CUdeviceptr* at, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *at = next_range;
  next_range += (size + kPage - 1) / kPage * kPage + kPage;
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop, unsigned long long) {
  if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_PERMITTED;
  if (used + size > capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  handles[next_handle] = size;
  *handle = next_handle++;
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  used -= found->second;
  handles.erase(found);
  return CUDA_SUCCESS;
}
CUresult device_attribute(int* value, CUdevice_attribute, CUdevice) { *value = 0; return CUDA_SUCCESS; }
CUresult device_get(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
CUresult granularity(size_t* value, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *value = kPage; return CUDA_SUCCESS; }
CUresult error_string(CUresult, const char** text) { *text = "stub driver error"; return CUDA_SUCCESS; }
CUresult nothing(...) { return CUDA_SUCCESS; }
}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** p, size_t size) {
  size_t real = (size + kPage - 1) / kPage * kPage;
  if (used + real > capacity) return cudaErrorMemoryAllocation;
  used += real;
  segments[next_address] = real;
  *p = reinterpret_cast<void*>(next_address);
  next_address += real;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  auto found = segments.find(reinterpret_cast<size_t>(p));
  if (!p) return cudaSuccess;
  if (found == segments.end()) return cudaErrorInvalidValue;
  used -= found->second;
  segments.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { *f = capacity - used; *t = total; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int) {
  std::memset(prop, 0, sizeof *prop);
  prop->totalGlobalMem = total;
  prop->major = 9;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string_view, void*> own = {
      {"cuMemAddressReserve", (void*)address_reserve}, {"cuMemCreate", (void*)create},
      {"cuMemRelease", (void*)release}, {"cuDeviceGetAttribute", (void*)device_attribute},
      {"cuDeviceGet", (void*)device_get}, {"cuMemGetAllocationGranularity", (void*)granularity},
      {"cuGetErrorString", (void*)error_string}};
  auto found = own.find(name);
  *f = found == own.end() ? (void*)nothing : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "stub"; }
const char* cudaGetErrorString(cudaError_t) { return "stub error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) { *s = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) { *a = 0; *b = -5; return cudaSuccess; }
}
