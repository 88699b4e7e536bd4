// Streams and events: each stream is a thread that runs its tasks in order.
#include "runtime.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <exception>
#include <thread>

namespace cannsim {
namespace {

using Clock = std::chrono::steady_clock;

// Runs one task outside the stream's lock. A failure's message is left in this thread's error record.
int run(const Stream &stream, const Task &task, bool replayed) {
  const std::string name(task.name);
  Corruption corruption = Corruption::none;
  if (watched()) {
    const std::string detail =
        "\"stream\":" + std::to_string(stream.id) + (replayed ? ",\"replayed\":true" : "");
    if (const int code = enter(("exec:" + name).c_str(), detail, &corruption)) return code;
  }
  try {
    if (corruption == Corruption::none) {
      task.run();
    } else {
      deliver(corruption, task.written ? task.written() : std::vector<Region>(), task.run);
    }
    return 0;
  } catch (const std::exception &problem) {
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, name + ": " + problem.what());
  } catch (...) {
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, name + ": unknown exception");
  }
}

int replay(const Stream &stream, const Graph &graph) {
  for (const Task &task : graph.tasks) {
    if (const int code = run(stream, task, true)) return code;
  }
  return 0;
}

void work(Stream *stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    // A device does not fall asleep between two launches; nor does its thread, for a moment.
    for (int turn = 0; turn < 200 && stream->tasks.empty() && stream->alive; turn++) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
    stream->asleep = true;
    stream->work.wait(lock, [stream] { return !stream->tasks.empty() || !stream->alive; });
    stream->asleep = false;
    if (stream->tasks.empty()) return;
    const Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->busy = true;
    const int error = stream->error;
    lock.unlock();
    int code = 0;
    thread().message.clear();
    if (task.control) {
      code = task.control(error);
    } else if (error == 0) {
      code = task.graph ? replay(*stream, *task.graph) : run(*stream, task, false);
    }
    lock.lock();
    stream->busy = false;
    if (code != 0 && stream->error == 0) {
      stream->error = code;
      stream->message = thread().message;
    }
    if (stream->tasks.empty()) stream->idle.notify_all();
  }
}

// Python's signal handlers belong to its main thread: a stream's thread takes no signal.
void start_thread(Stream *stream) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(work, stream).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Event *need_event(aclrtEvent handle) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.events.count(handle) == 0) {
    fail(ACL_ERROR_RT_PARAM_INVALID, "use of an event that does not exist or was destroyed");
    return nullptr;
  }
  return static_cast<Event *>(handle);
}

// Posts what an event does on a stream; `number` says for which recording of the event.
template <typename F>
int post_event(aclrtEvent event, aclrtStream stream, bool records, F control) {
  Event *const live = need_event(event);
  if (live == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  Stream *const on = need_stream(stream);
  if (on == nullptr) return thread().last_error;
  int code = 0;
  if (records ? record_event(live, on) : wait_for_event(on, live, &code)) return code;
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(live->mutex);
    if (records) live->recorded++;
    number = live->recorded;
  }
  post(on, Task{nullptr, nullptr, [live, number, control](int error) { return control(live, number, error); }});
  return 0;
}

int create_event(aclrtEvent *event) {
  if (event == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "event to nullptr");
  if (need_context() == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  *event = new Event;
  s.events.insert(*event);
  return 0;
}

int create(aclrtStream *stream) {
  if (stream == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "stream to nullptr");
  Context *const context = need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  *stream = create_stream(context);
  return 0;
}

int destroy(aclrtStream handle, bool force) {
  if (handle == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "the default stream cannot be destroyed");
  Stream *const stream = need_stream(handle);
  if (stream == nullptr) return thread().last_error;
  if (const int code = refuse_on_captured(stream, "destroying the stream")) return code;
  if (!force) wait_for(stream, -1);
  destroy_stream(stream);
  return 0;
}

int synchronise(aclrtStream handle, int timeout_ms) {
  Stream *const stream = need_stream(handle);
  if (stream == nullptr) return thread().last_error;
  if (const int code = refuse_on_captured(stream, "synchronising the stream")) return code;
  return wait_for(stream, timeout_ms);
}

int synchronise_context(int timeout_ms) {
  Context *const context = need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (const int code = refuse_where_captured(context, "synchronising the device")) return code;
  std::vector<Stream *> streams;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    streams.assign(context->streams.begin(), context->streams.end());
  }
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  int first = 0;
  for (Stream *const stream : streams) {
    int left = -1;
    if (timeout_ms >= 0) {
      const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      left = rest > 0 ? static_cast<int>(rest) : 0;
    }
    const int code = wait_for(stream, left);
    if (first == 0) first = code;
  }
  return first;
}

}  // namespace

Stream *need_stream(aclrtStream handle) {
  State &s = state();
  Context *const context = need_context();
  if (context == nullptr) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (handle != nullptr) {
      if (s.streams.count(handle) == 0) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "use of a stream that does not exist or was destroyed");
        return nullptr;
      }
      Stream *const stream = static_cast<Stream *>(handle);
      if (stream->context != context) {
        fail(ACL_ERROR_RT_STREAM_CONTEXT, "the stream does not belong to the current context");
        return nullptr;
      }
      return stream;
    }
    if (context->default_stream != nullptr) return context->default_stream;
  }
  Stream *const fresh = create_stream(context);
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (context->default_stream == nullptr) context->default_stream = fresh;
  return context->default_stream;
}

Stream *create_stream(Context *context) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  Stream *const stream = new Stream(context, s.next_stream_id++);
  s.streams.insert(stream);
  context->streams.insert(stream);
  return stream;
}

void destroy_stream(Stream *stream) {
  State &s = state();
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.streams.erase(stream);
    stream->context->streams.erase(stream);
    if (stream->context->default_stream == stream) stream->context->default_stream = nullptr;
  }
  std::deque<Task> dropped;
  const std::lock_guard<std::mutex> lock(stream->mutex);
  dropped.swap(stream->tasks);
  stream->alive = false;
  stream->work.notify_all();
  stream->idle.notify_all();
}

int wait_for(Stream *stream, int timeout_ms) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  const auto finished = [stream] { return (stream->tasks.empty() && !stream->busy) || !stream->alive; };
  if (timeout_ms < 0) {
    stream->idle.wait(lock, finished);
  } else if (!stream->idle.wait_for(lock, std::chrono::milliseconds(timeout_ms), finished)) {
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                "stream " + std::to_string(stream->id) + " is not done after " + std::to_string(timeout_ms) + " ms");
  }
  if (stream->error == 0) return 0;
  return fail(stream->error, "stream " + std::to_string(stream->id) + " has failed: " + stream->message);
}

void post(Stream *stream, Task task) {
  bool asleep = false;
  {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    if (!stream->alive) return;
    stream->tasks.push_back(std::move(task));
    if (!stream->started) {
      stream->started = true;
      start_thread(stream);
    }
    asleep = stream->asleep;
  }
  // Waking a thread that is awake costs a system call, and with the lock held it would only run into that.
  if (asleep) stream->work.notify_one();
}

int enqueue(aclrtStream handle, Task task) {
  Stream *const stream = need_stream(handle);
  if (stream == nullptr) return thread().last_error;
  if (!record(stream, &task)) post(stream, std::move(task));
  return 0;
}

void launch_failed(aclrtStream handle) {
  if (!state().capturing) return;
  if (Stream *const stream = need_stream(handle)) spoil_capture(stream);
}

int enqueue(aclrtStream handle, const char *name, std::function<void()> run, std::vector<aclTensor> outputs) {
  Task task{name, std::move(run), nullptr};
  if (corrupts()) task.written = [outputs = std::move(outputs)] { return regions_of(outputs); };
  return enqueue(handle, std::move(task));
}

}  // namespace cannsim

using cannsim::Event;
using cannsim::fail;
using cannsim::State;
using cannsim::state;
using cannsim::Stream;
using cannsim::Task;
using cannsim::thread;

extern "C" {

aclError aclrtCreateStream(aclrtStream *stream) {
  CANNSIM_ENTER();
  return cannsim::create(stream);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  CANNSIM_ENTER();
  return cannsim::create(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
  CANNSIM_ENTER();
  return cannsim::destroy(stream, false);
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  CANNSIM_ENTER();
  return cannsim::destroy(stream, true);
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  CANNSIM_ENTER();
  if (stream == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "the default stream has no failure mode");
  if (cannsim::need_stream(stream) == nullptr) return thread().last_error;
  if (mode != ACL_STOP_ON_FAILURE) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "only ACL_STOP_ON_FAILURE is simulated");
  }
  return 0;
}

aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
  CANNSIM_ENTER();
  if (value == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetStreamAttribute of nullptr");
  if (cannsim::need_stream(stream) == nullptr) return thread().last_error;
  // torch_npu switches the shapes of captured operators on and off for a profiler. They are always known here.
  if (attribute == cannsim::kCacheOpInfo) return 0;
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtSetStreamAttribute: attribute " + std::to_string(attribute) +
                                                    " is not simulated");
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId) {
  CANNSIM_ENTER();
  const Stream *const live = cannsim::need_stream(stream);
  if (live == nullptr) return thread().last_error;
  if (streamId == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamGetId to nullptr");
  *streamId = live->id;
  return 0;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  CANNSIM_ENTER();
  Stream *const live = cannsim::need_stream(stream);
  if (live == nullptr) return thread().last_error;
  if (status == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamQuery to nullptr");
  if (const int code = cannsim::refuse_on_captured(live, "querying the stream")) return code;
  const std::lock_guard<std::mutex> lock(live->mutex);
  if (live->error != 0) return fail(live->error, "the stream has failed: " + live->message);
  *status = live->tasks.empty() && !live->busy ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  CANNSIM_ENTER();
  return cannsim::synchronise(stream, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  CANNSIM_ENTER();
  if (timeout < -1) return fail(ACL_ERROR_RT_PARAM_INVALID, "a timeout below -1");
  return cannsim::synchronise(stream, timeout);
}

aclError aclrtSynchronizeDevice(void) {
  CANNSIM_ENTER();
  return cannsim::synchronise_context(-1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  CANNSIM_ENTER();
  if (timeout < -1) return fail(ACL_ERROR_RT_PARAM_INVALID, "a timeout below -1");
  return cannsim::synchronise_context(timeout);
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) {
  CANNSIM_ENTER();
  return cannsim::create_event(event);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) {
  CANNSIM_ENTER();
  return cannsim::create_event(event);
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  CANNSIM_ENTER();
  if (cannsim::need_event(event) == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.events.erase(event);  // the object stays: tasks of streams may still refer to it
  return 0;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  CANNSIM_ENTER();
  return cannsim::post_event(event, stream, true, [](Event *live, uint64_t number, int error) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const std::lock_guard<std::mutex> lock(live->mutex);
    live->done = std::max(live->done, number);
    live->error = error;
    live->nanoseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    live->completed.notify_all();
    return 0;
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  CANNSIM_ENTER();
  return cannsim::post_event(event, stream, false, [](Event *live, uint64_t number, int error) {
    if (error != 0) return 0;
    std::unique_lock<std::mutex> lock(live->mutex);
    live->completed.wait(lock, [&] { return live->done >= number; });
    if (live->error == 0) return 0;
    return fail(live->error, "the event waited for was recorded on a stream that has failed");
  });
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  CANNSIM_ENTER();
  if (cannsim::need_event(event) == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  return cannsim::need_stream(stream) == nullptr ? thread().last_error : 0;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  CANNSIM_ENTER();
  Event *const live = cannsim::need_event(event);
  if (live == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  if (const int code = cannsim::refuse_event_of_capture(live, "synchronising with the event")) return code;
  std::unique_lock<std::mutex> lock(live->mutex);
  const uint64_t number = live->recorded;
  live->completed.wait(lock, [&] { return live->done >= number; });
  if (live->error == 0) return 0;
  return fail(live->error, "the event was recorded on a stream that has failed");
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  CANNSIM_ENTER();
  Event *const live = cannsim::need_event(event);
  if (live == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  if (status == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtQueryEventStatus to nullptr");
  if (const int code = cannsim::refuse_event_of_capture(live, "querying the event")) return code;
  const std::lock_guard<std::mutex> lock(live->mutex);
  const bool complete = live->recorded > 0 && live->done == live->recorded;
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent) {
  CANNSIM_ENTER();
  Event *const start = cannsim::need_event(startEvent);
  Event *const end = cannsim::need_event(endEvent);
  if (start == nullptr || end == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  if (ms == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventElapsedTime to nullptr");
  uint64_t times[2] = {0, 0};
  Event *const both[2] = {start, end};
  for (int i = 0; i < 2; ++i) {
    if (const int code = cannsim::refuse_event_of_capture(both[i], "the time of the event")) return code;
    const std::lock_guard<std::mutex> lock(both[i]->mutex);
    if (both[i]->recorded == 0 || both[i]->done != both[i]->recorded) {
      return fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "aclrtEventElapsedTime of an event that is not complete");
    }
    times[i] = both[i]->nanoseconds;
  }
  if (times[1] < times[0]) return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL, "the end event is before the start event");
  *ms = static_cast<float>(times[1] - times[0]) / 1e6f;
  return 0;
}

}  // extern "C"
