// The state behind libascendcl.so, shared by its source files.
//
// One State per process: made at the first call, made anew in a forked child (a process that has imported torch_npu but
// not touched a device can be forked), and never destroyed, because stream threads outlive static destructors.
#pragma once

#include "cannsim.h"

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
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
struct Stream;

// Memory that a task writes, as the simulator sees it.
struct Region {
  std::byte *start = nullptr;
  size_t bytes = 0;
  aclDataType dtype = ACL_DT_UNDEFINED;  // undefined: bytes of which nobody knows what they are
  std::vector<size_t> elements;          // where each begins, in bytes from the start
};

struct Graph;

struct Task {
  const char *name;                       // nullptr for a control task
  std::function<void()> run;              // skipped once the stream has failed
  std::function<int(int error)> control;  // events: runs even then, and is told the stream's error
  std::function<std::vector<Region>()> written = nullptr;  // asked only where CANNSIM_CORRUPT hits
  std::shared_ptr<const Graph> graph = nullptr;            // a replay: all tasks of a graph, one after the other
};

// What a capture has recorded, in the order of the calls: on one stream after the other that is a right order too.
struct Graph {
  Graph(Context *owner, uint32_t number) : context(owner), id(number) {}

  Context *const context;
  const uint32_t id;
  bool complete = false;  // the capture has ended well
  std::vector<Task> tasks;
};

// How far each stream of a capture has come: its number of tasks.
using Progress = std::map<Stream *, uint64_t>;

struct Capture {
  std::shared_ptr<Graph> graph;
  Stream *origin = nullptr;
  aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  pid_t thread = 0;    // that began it
  bool valid = true;
  bool active = true;  // has not ended
  Progress recorded;                    // of each stream that takes part
  std::map<Stream *, Progress> behind;  // what each of them runs after
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

  std::shared_ptr<Capture> capture;  // guarded by State::capture_mutex
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

  std::shared_ptr<Capture> capture;  // that recorded it last; guarded by State::capture_mutex
  Progress behind;                   // what had been recorded by then
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

  std::mutex capture_mutex;  // guards these, and what streams and events know of captures; taken after `mutex`
  std::vector<std::shared_ptr<Capture>> captures;  // that are active
  std::map<void *, std::shared_ptr<Graph>> graphs;  // by handle
  uint32_t next_graph_id = 1;
  std::atomic<bool> capturing{false};  // whether there is an active one: mostly there is none, and nobody locks

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
  aclmdlRICaptureMode capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;  // of aclmdlRICaptureThreadExchangeMode
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

// Names that the headers of older wheels do not have.
constexpr int kCaptureWrongThread = 107038;  // ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD
constexpr int kCaptureBlocksAsync = 107041;  // ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC
constexpr auto kCacheOpInfo = static_cast<aclrtStreamAttr>(4);  // ACL_STREAM_ATTR_CACHE_OP_INFO

// Graph capture. `refuse_` functions return 0 or, after fail(), why the call is not allowed while something is captured.
bool record(Stream *stream, Task *task);  // true: the stream is captured and the task was taken
bool is_captured(Stream *stream);
int refuse_on_captured(Stream *stream, const char *what);
int refuse_event_of_capture(Event *event, const char *what);
int refuse_where_captured(const Context *context, const char *what);
int refuse_unsafe(const char *what, int code = ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
bool record_event(Event *event, Stream *stream);                // true: done, nothing is to be posted
bool wait_for_event(Stream *stream, Event *event, int *code);  // true: done, with *code
void spoil_capture(Stream *stream);  // one of its tasks could not be submitted

// The operator compiler. Both do nothing where it has been started, or has not.
void start_compiler();
void stop_compiler();

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
