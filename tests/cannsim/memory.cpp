// Device and host memory: allocation, the table of device addresses, copies.
//
// Device memory is one piece of shared memory that is mapped twice. The address handed out lies in a mapping without any
// access, so that host code that dereferences it dies as with hardware; the simulator works on the other mapping, found
// through a table.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace cannsim {
namespace {

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // 64 KiB on some Arm machines
constexpr size_t poisoned_at_most = size_t{64} << 20;

size_t round_up(size_t bytes) { return (bytes + page - 1) / page * page; }

// Reserves address space, not memory. Anonymous rather than a memfd, which RLIMIT_FSIZE would limit. The caller holds
// memory_mutex.
bool map_window(State &s) {
  if (s.window != nullptr) return true;
  const size_t bytes = s.settings.visible.size() * s.settings.hbm_bytes;
  void *const backing =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (backing == MAP_FAILED) return false;
  // With an old size of 0 a shared mapping is not moved but mapped once more.
  void *const window = mremap(backing, 0, bytes, MREMAP_MAYMOVE);
  if (window == MAP_FAILED || mprotect(window, bytes, PROT_NONE) != 0) {
    if (window != MAP_FAILED) munmap(window, bytes);
    munmap(backing, bytes);
    return false;
  }
  // A forked child has no business with its parent's device.
  madvise(window, bytes, MADV_DONTFORK);
  madvise(backing, bytes, MADV_DONTFORK);
  s.window = static_cast<unsigned char *>(window);
  s.backing = static_cast<unsigned char *>(backing);
  s.window_bytes = bytes;
  for (size_t device = 0; device < s.free_space.size(); ++device) {
    s.free_space[device] = {{device * s.settings.hbm_bytes, s.settings.hbm_bytes}};
  }
  return true;
}

// First fit. The caller holds memory_mutex.
bool take(std::map<size_t, size_t> &space, size_t extent, size_t *offset) {
  for (auto entry = space.begin(); entry != space.end(); ++entry) {
    if (entry->second < extent) continue;
    *offset = entry->first;
    const size_t rest = entry->second - extent;
    space.erase(entry);
    if (rest > 0) space[*offset + extent] = rest;
    return true;
  }
  return false;
}

void give_back(std::map<size_t, size_t> &space, size_t offset, size_t extent) {
  auto next = space.lower_bound(offset);
  if (next != space.end() && offset + extent == next->first) {
    extent += next->second;
    next = space.erase(next);
  }
  if (next != space.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += extent;
      return;
    }
  }
  space[offset] = extent;
}

void drop(State &s, std::map<uintptr_t, Block>::iterator entry) {
  const Block block = entry->second;
  s.blocks.erase(entry);
  const size_t device = static_cast<size_t>(block.device);
  s.used_bytes[device] -= block.extent;
  give_back(s.free_space[device], block.offset, block.extent);
  madvise(s.backing + block.offset, block.extent, MADV_REMOVE);
}

int allocate(void **address, size_t bytes) {
  if (address == nullptr || bytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "allocation of 0 bytes or to nullptr");
  const Context *const context = need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  State &s = state();
  const size_t device = static_cast<size_t>(context->device);
  Block block;
  {
    const std::lock_guard<std::mutex> lock(s.memory_mutex);
    if (!map_window(s)) {
      return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, std::string("cannot map device memory: ") + std::strerror(errno));
    }
    if (bytes > s.settings.hbm_bytes || !take(s.free_space[device], round_up(bytes), &block.offset)) {
      return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                  "out of device memory: " + std::to_string(bytes) + " bytes asked for, " +
                      std::to_string(s.settings.hbm_bytes - s.used_bytes[device]) + " free in pieces");
    }
    block.bytes = bytes;
    block.extent = round_up(bytes);
    block.device = context->device;
    s.used_bytes[device] += block.extent;
    *address = s.window + block.offset;
    s.blocks[reinterpret_cast<uintptr_t>(*address)] = block;
  }
  // Fresh memory is not zero on hardware either: NaN as a float, -1 as an integer.
  std::memset(s.backing + block.offset, 0xff, std::min(block.extent, poisoned_at_most));
  registry_show_memory(context->device);
  return 0;
}

const char *direction(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST: return "h2h";
    case ACL_MEMCPY_HOST_TO_DEVICE: return "h2d";
    case ACL_MEMCPY_DEVICE_TO_HOST: return "d2h";
    case ACL_MEMCPY_DEVICE_TO_DEVICE: return "d2d";
    case ACL_MEMCPY_DEFAULT: return "default";
    default: return "unknown";
  }
}

std::string copy_detail(size_t bytes, aclrtMemcpyKind kind) {
  return "\"bytes\":" + std::to_string(bytes) + ",\"direction\":\"" + direction(kind) + "\"";
}

// The pointer that the simulator may use for one side of a copy, or nullptr after fail().
void *resolve(const void *address, size_t bytes, bool on_device, const char *side) {
  if (address == nullptr) {
    fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy: ") + side + " is nullptr");
    return nullptr;
  }
  if (on_device) {
    void *const usable = alias(address, bytes);
    if (usable == nullptr) {
      fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy: ") + side + " is not " + std::to_string(bytes) +
                                           " bytes of live device memory");
    }
    return usable;
  }
  if (in_device_window(address)) {
    fail(ACL_ERROR_RT_PARAM_INVALID, std::string("copy: ") + side + " is a device address where a host one belongs");
    return nullptr;
  }
  return const_cast<void *>(address);
}

struct Copy {
  void *to = nullptr;
  void *from = nullptr;
};

int check_copy(void *to, size_t most, const void *from, size_t bytes, aclrtMemcpyKind kind, Copy *copy) {
  if (bytes == 0 || bytes > most) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "copy of " + std::to_string(bytes) + " bytes into room for " + std::to_string(most));
  }
  bool to_device = false;
  bool from_device = false;
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST: break;
    case ACL_MEMCPY_HOST_TO_DEVICE: to_device = true; break;
    case ACL_MEMCPY_DEVICE_TO_HOST: from_device = true; break;
    case ACL_MEMCPY_DEVICE_TO_DEVICE: to_device = from_device = true; break;
    case ACL_MEMCPY_DEFAULT:
      to_device = in_device_window(to);
      from_device = in_device_window(from);
      break;
    default: return fail(ACL_ERROR_RT_PARAM_INVALID, "copy: unknown kind " + std::to_string(static_cast<int>(kind)));
  }
  copy->to = resolve(to, bytes, to_device, "the destination");
  if (copy->to == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  copy->from = resolve(from, bytes, from_device, "the source");
  return copy->from == nullptr ? ACL_ERROR_RT_PARAM_INVALID : 0;
}

void transfer(const Copy &copy, size_t bytes, Corruption corruption) {
  const auto move = [&copy, bytes] { std::memmove(copy.to, copy.from, bytes); };
  if (corruption == Corruption::none) {
    move();
  } else {
    deliver(corruption, copied_to(copy.to, bytes), move);
  }
}

// Whether this is memory of aclrtMallocHost.
bool is_pinned(const void *address, size_t bytes) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  const uintptr_t where = reinterpret_cast<uintptr_t>(address);
  auto entry = s.host_blocks.upper_bound(where);
  if (entry == s.host_blocks.begin()) return false;
  --entry;
  const size_t into = where - entry->first;
  return into < entry->second && bytes <= entry->second - into;
}

bool is_on_host_and_pageable(const void *address, size_t bytes) {
  return !in_device_window(address) && !is_pinned(address, bytes);
}

// A graph goes to the same memory again and again: that must be locked. Elsewhere CANN makes such a copy a synchronous
// one, which is as unsafe while something is captured.
int refuse_pageable_copy(const void *to, const void *from, size_t bytes, aclrtStream handle) {
  if (!state().capturing) return 0;
  if (!is_on_host_and_pageable(to, bytes) && !is_on_host_and_pageable(from, bytes)) return 0;
  Stream *const stream = need_stream(handle);
  if (stream == nullptr) return thread().last_error;
  if (is_captured(stream)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy from or to pageable host memory cannot be captured");
  }
  return refuse_unsafe("an asynchronous copy from or to pageable host memory", kCaptureBlocksAsync);
}

int check_set(void *address, size_t most, size_t bytes, void **usable) {
  if (bytes == 0 || bytes > most) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "memset of " + std::to_string(bytes) + " bytes in room for " + std::to_string(most));
  }
  *usable = resolve(address, bytes, true, "the destination");
  return *usable == nullptr ? ACL_ERROR_RT_PARAM_INVALID : 0;
}

}  // namespace

bool in_device_window(const void *address) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  const unsigned char *const byte = static_cast<const unsigned char *>(address);
  return s.window != nullptr && byte >= s.window && byte < s.window + s.window_bytes;
}

const Block *find_block(const void *address, size_t bytes) {
  State &s = state();
  const uintptr_t where = reinterpret_cast<uintptr_t>(address);
  auto entry = s.blocks.upper_bound(where);
  if (entry == s.blocks.begin()) return nullptr;
  --entry;
  const size_t into = where - entry->first;
  if (into > entry->second.bytes || bytes > entry->second.bytes - into) return nullptr;
  return &entry->second;
}

void *alias(const void *device_address, size_t bytes) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  const Block *const block = find_block(device_address, bytes);
  if (block == nullptr) return nullptr;
  const size_t into = static_cast<const unsigned char *>(device_address) - (s.window + block->offset);
  return s.backing + block->offset + into;
}

void release_device_memory(int device) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  for (auto entry = s.blocks.begin(); entry != s.blocks.end();) {
    const auto here = entry++;
    if (here->second.device == device) drop(s, here);
  }
}

uint64_t used_memory(int device) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  return s.used_bytes[static_cast<size_t>(device)];
}

}  // namespace cannsim

using cannsim::Copy;
using cannsim::fail;
using cannsim::State;
using cannsim::state;

extern "C" {

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy) {
  CANNSIM_ENTER("\"bytes\":" + std::to_string(size));
  return cannsim::allocate(devPtr, size);
}

aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy) {
  CANNSIM_ENTER("\"bytes\":" + std::to_string(size));
  return cannsim::allocate(devPtr, size);
}

aclError aclrtFree(void *devPtr) {
  CANNSIM_ENTER();
  State &s = state();
  int device = 0;
  {
    const std::lock_guard<std::mutex> lock(s.memory_mutex);
    const auto entry = s.blocks.find(reinterpret_cast<uintptr_t>(devPtr));
    if (entry == s.blocks.end()) {
      return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of an address that aclrtMalloc did not hand out");
    }
    device = entry->second.device;
    cannsim::drop(s, entry);
  }
  cannsim::registry_show_memory(device);
  return 0;
}

aclError aclrtMallocHost(void **hostPtr, size_t size) {
  CANNSIM_ENTER("\"bytes\":" + std::to_string(size));
  if (hostPtr == nullptr || size == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "allocation of 0 bytes or to nullptr");
  if (cannsim::need_context() == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  void *const address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of host memory");
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  s.host_blocks[reinterpret_cast<uintptr_t>(address)] = size;
  *hostPtr = address;
  return 0;
}

aclError aclrtFreeHost(void *hostPtr) {
  CANNSIM_ENTER();
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  const auto entry = s.host_blocks.find(reinterpret_cast<uintptr_t>(hostPtr));
  if (entry == s.host_blocks.end()) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost of an address that aclrtMallocHost did not hand out");
  }
  munmap(hostPtr, entry->second);
  s.host_blocks.erase(entry);
  return 0;
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
  cannsim::Corruption corruption = cannsim::Corruption::none;
  if (cannsim::watched()) {
    if (const int code = cannsim::enter(__func__, cannsim::copy_detail(count, kind), &corruption)) return code;
  }
  if (cannsim::need_context() == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (const int code = cannsim::refuse_unsafe("a synchronous copy")) return code;
  Copy copy;
  if (const int code = cannsim::check_copy(dst, destMax, src, count, kind, &copy)) return code;
  cannsim::transfer(copy, count, corruption);
  return 0;
}

aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  cannsim::Corruption corruption = cannsim::Corruption::none;
  if (cannsim::watched()) {
    if (const int code = cannsim::enter(__func__, cannsim::copy_detail(count, kind), &corruption)) {
      cannsim::launch_failed(stream);
      return code;
    }
  }
  Copy copy;
  if (const int code = cannsim::check_copy(dst, destMax, src, count, kind, &copy)) return code;
  if (const int code = cannsim::refuse_pageable_copy(dst, src, count, stream)) return code;
  // Checked once more when it runs, which for a captured copy is long after this call and more than once.
  const bool locked[] = {cannsim::is_pinned(dst, count), cannsim::is_pinned(src, count)};
  const auto find = [=] {
    Copy now;
    const bool gone = (locked[0] && !cannsim::is_pinned(dst, count)) || (locked[1] && !cannsim::is_pinned(src, count));
    if (gone || cannsim::check_copy(dst, destMax, src, count, kind, &now) != 0) {
      throw std::runtime_error("memory was freed before the copy was made");
    }
    return now;
  };
  cannsim::Task task{"aclrtMemcpyAsync", [=] { cannsim::transfer(find(), count, corruption); }, nullptr};
  if (cannsim::corrupts()) task.written = [=] { return cannsim::copied_to(find().to, count); };
  return cannsim::enqueue(stream, std::move(task));
}

aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count) {
  CANNSIM_ENTER("\"bytes\":" + std::to_string(count));
  if (cannsim::need_context() == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (const int code = cannsim::refuse_unsafe("a synchronous memset")) return code;
  void *usable = nullptr;
  if (const int code = cannsim::check_set(devPtr, maxCount, count, &usable)) return code;
  std::memset(usable, value, count);
  return 0;
}

aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
  if (cannsim::watched()) {
    if (const int code = cannsim::enter(__func__, "\"bytes\":" + std::to_string(count))) {
      cannsim::launch_failed(stream);
      return code;
    }
  }
  void *usable = nullptr;
  if (const int code = cannsim::check_set(devPtr, maxCount, count, &usable)) return code;
  const auto find = [=] {
    void *now = nullptr;
    if (cannsim::check_set(devPtr, maxCount, count, &now) != 0) {
      throw std::runtime_error("memory was freed before it was set");
    }
    return now;
  };
  cannsim::Task task{"aclrtMemsetAsync", [=] { std::memset(find(), value, count); }, nullptr};
  if (cannsim::corrupts()) task.written = [=] { return cannsim::copied_to(find(), count); };
  return cannsim::enqueue(stream, std::move(task));
}

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total) {
  CANNSIM_ENTER();
  if (free == nullptr || total == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetMemInfo to nullptr");
  const cannsim::Context *const context = cannsim::need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  switch (attr) {
    case ACL_HBM_MEM:
    case ACL_HBM_MEM_HUGE:
    case ACL_HBM_MEM_NORMAL:
      *total = state().settings.hbm_bytes;
      *free = *total - cannsim::used_memory(context->device);
      return 0;
    default:
      return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                  "aclrtGetMemInfo: memory kind " + std::to_string(static_cast<int>(attr)) + " is not simulated");
  }
}

aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes) {
  CANNSIM_ENTER();
  if (ptr == nullptr || attributes == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtPointerGetAttributes of or to nullptr");
  }
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.memory_mutex);
  *attributes = aclrtPtrAttributes{};
  attributes->pageSize = static_cast<uint32_t>(cannsim::page);
  if (const cannsim::Block *const block = cannsim::find_block(ptr, 1)) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = static_cast<uint32_t>(block->device);
    return 0;
  }
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  const uintptr_t where = reinterpret_cast<uintptr_t>(ptr);
  const auto entry = s.host_blocks.upper_bound(where);
  if (entry != s.host_blocks.begin() && where - std::prev(entry)->first < std::prev(entry)->second) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  }
  return 0;
}

}  // extern "C"
