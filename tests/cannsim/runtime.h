// The state behind libascendcl.so, shared by its source files.
//
// One State per process: made at the first call, made anew in a forked child (a process that has imported torch_npu but
// not touched a device can be forked), and never destroyed, because stream threads outlive static destructors.
#pragma once

#include "cannsim.h"

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

namespace cannsim {

// One entry of CANNSIM_FAIL, CANNSIM_HANG or CANNSIM_CORRUPT.
struct Injection {
  std::string name;  // an API, "aclnnX", "exec:aclnnX", "exec:*", "copy:*", or "*"
  uint64_t nth = 1;  // 0: every time
  int code = 0;      // 0: the default of this kind of call
  Corruption corruption = Corruption::none;
};

// The CANNSIM_* variables, read once. A malformed or unknown one is an error of every call, never ignored.
struct Settings {
  std::string trace_path;
  std::vector<Injection> failures;
  std::vector<Injection> hangs;
  std::vector<Injection> corruptions;
  std::vector<int> visible;        // physical id of each logical device
  bool visible_is_invalid = false;  // ASCEND_RT_VISIBLE_DEVICES names no usable list
  uint64_t hbm_bytes = 0;          // of each device
  std::string soc;
  std::string cann_version;
  std::string driver_version;      // of the driver whose npu-smi is imitated
  std::string error;               // what is malformed, or empty

  Settings();
};

struct Context;

// Memory that a task writes, as the simulator sees it.
struct Region {
  std::byte *start = nullptr;
  size_t bytes = 0;
  aclDataType dtype = ACL_DT_UNDEFINED;  // undefined: bytes of which nobody knows what they are
  std::vector<size_t> elements;          // where each begins, in bytes from the start
};

struct Task {
  const char *name;                       // nullptr for a control task
  std::function<void()> run;              // skipped once the stream has failed
  std::function<int(int error)> control;  // events: runs even then, and is told the stream's error
  std::function<std::vector<Region>()> written = nullptr;  // asked only where CANNSIM_CORRUPT hits
};

struct Stream {
  Stream(Context *owner, int number) : context(owner), id(number) {}

  Context *const context;
  const int id;

  std::mutex mutex;  // guards the rest
  std::condition_variable work;
  std::condition_variable idle;
  std::deque<Task> tasks;
  bool busy = false;
  bool asleep = false;  // its thread waits on `work`
  bool started = false;  // the thread is created by the first task
  bool alive = true;
  int error = 0;         // sticky: of the first task that failed
  std::string message;
};

struct Event {
  std::mutex mutex;
  std::condition_variable completed;
  uint64_t recorded = 0;  // how often aclrtRecordEvent was called
  uint64_t done = 0;      // the latest of these that the stream has reached
  int error = 0;          // of the stream that it was recorded on
  std::string message;
  uint64_t nanoseconds = 0;
  bool alive = true;
};

struct Context {
  int device = 0;    // logical id
  int physical = 0;
  bool alive = true;
  std::set<Stream *> streams;
  Stream *default_stream = nullptr;
  std::map<int, int64_t> parameters;  // of aclrtCtxSetSysParamOpt
  int registry_fd = -1;  // see registry.cpp
  std::string registry_path;
};

// A live allocation of device memory.
struct Block {
  size_t bytes = 0;   // as asked for
  size_t extent = 0;  // as reserved: whole pages
  size_t offset = 0;  // in the window
  int device = 0;
};

struct State {
  Settings settings;
  bool watched = false;  // see watched()

  std::mutex call_mutex;  // guards these; a line's number is its place in the file
  uint64_t calls = 0;
  std::map<std::string, uint64_t> calls_by_name;
  int trace_fd = -1;

  std::mutex mutex;  // guards these; taken before a stream's, never after it
  bool initialised = false;
  int default_device = -1;  // of aclInit's configuration: set implicitly where a thread needs a context
  std::map<int, Context *> contexts;
  std::unordered_set<void *> streams;  // live handles; objects are kept, so that a handle never comes back
  std::unordered_set<void *> events;
  int next_stream_id = 0;
  std::map<int, int64_t> system_parameters;
  std::map<int, std::string> compile_options;

  std::mutex memory_mutex;  // guards these; the innermost lock
  unsigned char *window = nullptr;   // PROT_NONE: what device addresses point into
  unsigned char *backing = nullptr;  // the same memory, readable: what the simulator works on
  size_t window_bytes = 0;
  std::map<uintptr_t, Block> blocks;                 // by device address
  std::vector<std::map<size_t, size_t>> free_space;  // per device: offset -> bytes
  std::vector<uint64_t> used_bytes;                  // per device
  std::map<uintptr_t, size_t> host_blocks;           // of aclrtMallocHost

  State();
};

// What a thread knows; starts afresh when the State does.
struct Thread {
  State *owner = nullptr;
  Context *context = nullptr;
  int last_error = 0;
  std::string message;   // since the last aclGetRecentErrMsg
  std::string returned;  // keeps what aclGetRecentErrMsg handed out
};

State &state();
Thread &thread();

[[noreturn]] void hang_forever();

// The current thread's context (set implicitly to aclInit's default device if there is one), or nullptr after fail().
Context *need_context();

// The live stream behind a handle (nullptr: the context's default stream), or nullptr after fail().
Stream *need_stream(aclrtStream handle);

Stream *create_stream(Context *context);
void destroy_stream(Stream *stream);
int wait_for(Stream *stream, int timeout_ms);  // negative: for ever
void post(Stream *stream, Task task);
int enqueue(aclrtStream stream, Task task);

bool in_device_window(const void *address);
// The live block that holds [address, address + bytes), or nullptr. The caller holds memory_mutex.
const Block *find_block(const void *address, size_t bytes);
void release_device_memory(int device);
uint64_t used_memory(int device);

// npu-smi lists a process while it holds a context. The caller of the first two holds state().mutex.
bool registry_add(Context *context, std::string *problem);
void registry_remove(Context *context);
void registry_show_memory(int device);

// What a copy of `bytes` bytes writes, and what a kernel writes to these tensors. Throws where that is not known.
std::vector<Region> copied_to(void *start, size_t bytes);
std::vector<Region> regions_of(const std::vector<aclTensor> &outputs);

// Runs `task`, which writes `regions`, and spoils the result.
void deliver(Corruption corruption, const std::vector<Region> &regions, const std::function<void()> &task);

std::string json_escape(const std::string &text);

}  // namespace cannsim

// Opens every exported function. The detail is made only where somebody reads it.
#define CANNSIM_ENTER(...)                                                             \
  if (cannsim::watched()) {                                                            \
    if (const int injected_ = cannsim::enter(__func__, {__VA_ARGS__})) return injected_; \
  }
