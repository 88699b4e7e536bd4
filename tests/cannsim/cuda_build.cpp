// A CUDA build of torch in place of the CPU build that torch_npu asks for.
//
// On x86-64 the package index has no other. torch_npu 2.13 and later abort there while they are imported: libc10_cuda.so
// has registered names of allocator settings ("Duplicated key 'pinned_reserve_segment_size_mb'") that libtorch_npu.so
// registers as well. This library is initialised between the two, and takes CUDA's names out again: what is left is what
// a CPU build has. A real CANN does no such thing; there the CPU build is needed.
#include <dlfcn.h>

#include <string>
#include <unordered_set>

namespace {

using Names = std::unordered_set<std::string>;

// A library that is loaded already, or null.
void *loaded(const char *library) { return dlopen(library, RTLD_LAZY | RTLD_NOLOAD); }

__attribute__((constructor)) void forget_cuda() {
  void *const c10 = loaded("libc10.so");
  void *const cuda = loaded("libc10_cuda.so");
  if (c10 == nullptr || cuda == nullptr) return;
  // c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys() and, in
  // c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig, the static of getKeys(). Older releases have no such check.
  void *const all =
      dlsym(c10, "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev");
  void *const of_cuda =
      dlsym(cuda, "_ZZN3c104cuda20CUDACachingAllocator19CUDAAllocatorConfig7getKeysB5cxx11EvE4keys");
  if (all == nullptr || of_cuda == nullptr) return;
  Names &names = reinterpret_cast<Names &(*)()>(all)();
  for (const std::string &name : *static_cast<const Names *>(of_cuda)) names.erase(name);
}

}  // namespace
