// Graph capture: what is launched on a captured stream is recorded, and run whenever the graph is executed.
//
// What CANN refuses meanwhile: to synchronise or query the stream, its events or the device; unsafe calls, which would
// run at once (synchronous copies), unless the mode or the thread allows them; copies from and to pageable host memory.
// Allocating and freeing memory is allowed. That the memory a graph works on stays there is the caller's business: a
// replay that does not find it fails on the device.
#include "runtime.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace cannsim {
namespace {

pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

// The caller of these holds capture_mutex.

Capture *active(const std::shared_ptr<Capture> &capture) {
  return capture != nullptr && capture->active ? capture.get() : nullptr;
}

void merge(Progress *into, const Progress &other) {
  for (const auto &entry : other) {
    uint64_t &known = (*into)[entry.first];
    known = std::max(known, entry.second);
  }
}

void end(Capture *capture) {
  capture->active = false;
  for (const auto &member : capture->recorded) member.first->capture = nullptr;
  State &s = state();
  const auto ended = [capture](const std::shared_ptr<Capture> &entry) { return entry.get() == capture; };
  s.captures.erase(std::remove_if(s.captures.begin(), s.captures.end(), ended), s.captures.end());
  s.capturing = !s.captures.empty();
}

// Whether every task of every other stream comes before the end of the original one.
bool joined(const Capture &capture) {
  const auto found = capture.behind.find(capture.origin);
  for (const auto &member : capture.recorded) {
    if (member.first == capture.origin || member.second == 0) continue;
    if (found == capture.behind.end()) return false;
    const auto known = found->second.find(member.first);
    if (known == found->second.end() || known->second < member.second) return false;
  }
  return true;
}

std::string name_of(aclmdlRICaptureMode mode) {
  switch (mode) {
    case ACL_MODEL_RI_CAPTURE_MODE_GLOBAL: return "global";
    case ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL: return "thread_local";
    case ACL_MODEL_RI_CAPTURE_MODE_RELAXED: return "relaxed";
  }
  return "unknown";
}

bool known_mode(aclmdlRICaptureMode mode) {
  return mode >= ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && mode <= ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
}

std::string of_stream(const Stream &stream) { return "stream " + std::to_string(stream.id); }

int begin(Stream *stream, aclmdlRICaptureMode mode) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  if (active(stream->capture) != nullptr) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, of_stream(*stream) + " is captured already");
  }
  const auto capture = std::make_shared<Capture>();
  capture->graph = std::make_shared<Graph>(stream->context, s.next_graph_id++);
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = thread_id();
  capture->recorded[stream] = 0;
  s.graphs[capture->graph.get()] = capture->graph;
  s.captures.push_back(capture);
  s.capturing = true;
  stream->capture = capture;
  return 0;
}

int finish(Stream *stream, aclmdlRI *model) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (active(capture) == nullptr) {
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, of_stream(*stream) + " is not captured");
  }
  if (capture->origin != stream) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on " + of_stream(*stream));
  }
  end(capture.get());
  int code = 0;
  std::string why;
  if (capture->thread != thread_id()) {
    code = kCaptureWrongThread;
    why = "the capture was begun by another thread";
  } else if (!capture->valid) {
    code = ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
    why = "the capture is not valid: an error occurred in it";
  } else if (!joined(*capture)) {
    code = ACL_ERROR_RT_STREAM_UNJOINED;
    why = "a stream that takes part in the capture was not joined to the one it began on";
  }
  if (code != 0) {
    s.graphs.erase(capture->graph.get());
    return fail(code, "aclmdlRICaptureEnd: " + why);
  }
  capture->graph->complete = true;
  *model = capture->graph.get();
  return 0;
}

// The graph behind a handle, or nullptr after fail().
std::shared_ptr<Graph> need_graph(aclmdlRI model, const char *what) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  const auto found = s.graphs.find(model);
  if (found == s.graphs.end()) {
    fail(ACL_ERROR_RT_PARAM_INVALID, std::string(what) + " of a model that does not exist or was destroyed");
    return nullptr;
  }
  if (!found->second->complete) {
    fail(ACL_ERROR_RT_MODEL_CAPTURED, std::string(what) + " of a model that is still captured");
    return nullptr;
  }
  return found->second;
}

}  // namespace

bool record(Stream *stream, Task *task) {
  State &s = state();
  if (!s.capturing) return false;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  Capture *const capture = active(stream->capture);
  if (capture == nullptr) return false;
  capture->graph->tasks.push_back(std::move(*task));
  capture->recorded[stream]++;
  return true;
}

bool is_captured(Stream *stream) {
  State &s = state();
  if (!s.capturing) return false;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  return active(stream->capture) != nullptr;
}

int refuse_on_captured(Stream *stream, const char *what) {
  if (!is_captured(stream)) return 0;
  return fail(ACL_ERROR_RT_STREAM_CAPTURED, std::string(what) + " is not allowed: " + of_stream(*stream) + " is captured");
}

int refuse_where_captured(const Context *context, const char *what) {
  State &s = state();
  if (!s.capturing) return 0;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  for (const std::shared_ptr<Capture> &capture : s.captures) {
    if (capture->graph->context != context) continue;
    return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                std::string(what) + " is not allowed: " + of_stream(*capture->origin) + " is captured");
  }
  return 0;
}

int refuse_event_of_capture(Event *event, const char *what) {
  State &s = state();
  if (!s.capturing) return 0;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  if (active(event->capture) == nullptr) return 0;
  return fail(ACL_ERROR_RT_EVENT_CAPTURED, std::string(what) + " is not allowed: it is captured");
}

// The strictest mode of all captures of the context counts for every thread, unless that has a freer mode of its own.
int refuse_unsafe(const char *what, int code) {
  State &s = state();
  if (!s.capturing) return 0;
  const Thread &t = thread();
  const pid_t me = thread_id();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  bool global = false;  // some capture forbids it to all threads
  bool own = false;     // this thread captures, and not in relaxed mode
  for (const std::shared_ptr<Capture> &capture : s.captures) {
    if (capture->graph->context != t.context) continue;
    global |= capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    own |= capture->thread == me && capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
  }
  const bool refused = (t.capture_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && (global || own)) ||
                       (t.capture_mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL && own);
  if (!refused) return 0;
  return fail(code, std::string(what) + " is not allowed while a stream is captured, but in relaxed mode; the mode of " +
                        "this thread is " + name_of(t.capture_mode));
}

bool record_event(Event *event, Stream *stream) {
  State &s = state();
  if (!s.capturing) return false;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  event->capture = stream->capture;
  Capture *const capture = active(stream->capture);
  if (capture == nullptr) return false;
  event->behind = capture->behind[stream];
  event->behind[stream] = capture->recorded[stream];
  return true;
}

bool wait_for_event(Stream *stream, Event *event, int *code) {
  State &s = state();
  if (!s.capturing) return false;
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  Capture *const of_event = active(event->capture);
  Capture *const mine = active(stream->capture);
  if (of_event == nullptr) {
    if (mine == nullptr) return false;
    const std::lock_guard<std::mutex> event_lock(event->mutex);
    if (event->recorded > 0) {
      *code = fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream cannot wait for an event outside of the capture");
    }
    return true;
  }
  if (stream == stream->context->default_stream) {
    *code = fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    return true;
  }
  if (mine != nullptr && mine != of_event) {
    mine->valid = of_event->valid = false;
    *code = fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "a captured stream cannot wait for an event of another capture");
    return true;
  }
  if (mine == nullptr) {
    stream->capture = event->capture;
    of_event->recorded[stream] = 0;
  }
  merge(&of_event->behind[stream], event->behind);
  return true;
}

void spoil_capture(Stream *stream) {
  const std::lock_guard<std::mutex> lock(state().capture_mutex);
  if (Capture *const capture = active(stream->capture)) capture->valid = false;
}

}  // namespace cannsim

using cannsim::Capture;
using cannsim::fail;
using cannsim::Graph;
using cannsim::State;
using cannsim::state;
using cannsim::Stream;
using cannsim::Task;
using cannsim::thread;

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  CANNSIM_ENTER("\"mode\":" + std::to_string(mode));
  if (stream == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureBegin: the default stream");
  if (!cannsim::known_mode(mode)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureBegin: unknown mode");
  Stream *const live = cannsim::need_stream(stream);
  return live == nullptr ? thread().last_error : cannsim::begin(live, mode);
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI) {
  CANNSIM_ENTER();
  if (stream == nullptr || modelRI == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureEnd of or to nullptr");
  }
  *modelRI = nullptr;
  Stream *const live = cannsim::need_stream(stream);
  return live == nullptr ? thread().last_error : cannsim::finish(live, modelRI);
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI) {
  CANNSIM_ENTER();
  if (stream == nullptr || (status == nullptr && modelRI == nullptr)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureGetInfo of or to nullptr");
  }
  Stream *const live = cannsim::need_stream(stream);
  if (live == nullptr) return thread().last_error;
  const std::lock_guard<std::mutex> lock(state().capture_mutex);
  const Capture *const capture = cannsim::active(live->capture);
  if (status != nullptr) {
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (capture != nullptr) {
      *status = capture->valid ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
    }
  }
  if (modelRI != nullptr) *modelRI = capture != nullptr ? capture->graph.get() : nullptr;
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  CANNSIM_ENTER();
  if (mode == nullptr || !cannsim::known_mode(*mode)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRICaptureThreadExchangeMode: unknown mode or nullptr");
  }
  std::swap(thread().capture_mode, *mode);
  return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream) {
  const std::shared_ptr<Graph> graph = cannsim::need_graph(modelRI, "aclmdlRIExecuteAsync");
  CANNSIM_ENTER("\"tasks\":" + std::to_string(graph != nullptr ? graph->tasks.size() : 0));
  if (graph == nullptr) return thread().last_error;
  Stream *const live = cannsim::need_stream(stream);
  if (live == nullptr) return thread().last_error;
  if (live->context != graph->context) {
    return fail(ACL_ERROR_RT_MODEL_CONTEXT, "the model does not belong to the context of the stream");
  }
  if (const int code = cannsim::refuse_on_captured(live, "executing a model")) return code;
  Task task{"aclmdlRIExecuteAsync", nullptr, nullptr};
  task.graph = graph;
  cannsim::post(live, std::move(task));
  return 0;
}

aclError aclmdlRIDestroy(aclmdlRI modelRI) {
  CANNSIM_ENTER();
  const std::shared_ptr<Graph> graph = cannsim::need_graph(modelRI, "aclmdlRIDestroy");
  if (graph == nullptr) return thread().last_error;
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  s.graphs.erase(modelRI);  // a replay that still waits for its turn keeps it
  return 0;
}

aclError aclmdlRIGetId(aclmdlRI modelRI, uint32_t *modelRIId) {
  CANNSIM_ENTER();
  if (modelRIId == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIGetId to nullptr");
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.capture_mutex);
  const auto found = s.graphs.find(modelRI);
  if (found == s.graphs.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIGetId: there is no such model");
  *modelRIId = found->second->id;
  return 0;
}

}  // extern "C"
