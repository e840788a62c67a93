// Plays allocation events from stdin through PyTorch's own CUDA caching allocator.
//
//   a NAME BYTES STREAM   allocate          f NAME   free (nothing, if its allocation failed)
//   e                     empty the cache   s        snapshot
//
// Prints "FAILED ALLOCATED RESERVED" for each but a snapshot, and for that a line
// "S ADDRESS SIZE STREAM LARGE EXPANDABLE (SIZE:REQUESTED:USED)..." for every segment and a line
// "L NAME ADDRESS" for everything alive.  The last line is "E RETRIES" and the peaks of allocated,
// reserved and requested bytes.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <cstdlib>
#include <unordered_map>

namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::CUDAAllocatorConfig::set_expandable_segments_handle_type(
      allocator::Expandable_Segments_Handle_Type::POSIX_FD);
  allocator::init(1);
  if (const char* fraction = std::getenv("FAKE_FRACTION")) allocator::setMemoryFraction(std::atof(fraction), 0);
  std::unordered_map<long, void*> alive;
  char line[256];
  while (std::fgets(line, sizeof line, stdin)) {
    long id = 0;
    unsigned long long bytes = 0, stream = 0;
    bool failed = false;
    if (std::sscanf(line, "a %ld %llu %llu", &id, &bytes, &stream) >= 2) {
      try {
        alive[id] = allocator::raw_alloc_with_stream(bytes, reinterpret_cast<cudaStream_t>(stream));
      } catch (const c10::OutOfMemoryError&) {
        alive.erase(id);
        failed = true;
      }
    } else if (std::sscanf(line, "f %ld", &id) == 1) {
      auto found = alive.find(id);
      if (found != alive.end()) {
        allocator::raw_delete(found->second);
        alive.erase(found);
      }
    } else if (line[0] == 'e') {
      allocator::emptyCache();
    } else if (line[0] == 's') {
      for (const auto& segment : allocator::snapshot().segments) {
        std::printf("S %zu %zu %zu %d %d", segment.address, segment.total_size, (size_t)segment.stream,
                    (int)segment.is_large, (int)segment.is_expandable);
        for (const auto& block : segment.blocks)
          std::printf(" %zu:%zu:%d", block.size, block.requested_size, (int)block.allocated);
        std::printf("\n");
      }
      for (const auto& [name, address] : alive) std::printf("L %ld %zu\n", name, (size_t)address);
      continue;
    }
    auto stats = allocator::getDeviceStats(0);
    std::printf("%d %lld %lld\n", failed, (long long)stats.allocated_bytes[0].current,
                (long long)stats.reserved_bytes[0].current);
  }
  auto stats = allocator::getDeviceStats(0);
  std::printf("E %lld %lld %lld %lld\n", (long long)stats.num_alloc_retries, (long long)stats.allocated_bytes[0].peak,
              (long long)stats.reserved_bytes[0].peak, (long long)stats.requested_bytes[0].peak);
  std::fflush(stdout);
  std::_Exit(0);
}
