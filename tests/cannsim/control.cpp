// Settings, the trace, fault injection and error reporting.
#include "runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <sstream>

extern char **environ;

namespace cannsim {
namespace {

std::atomic<State *> current{nullptr};
std::mutex creation_mutex;

// Around fork, so that the child finds the state whole.
void before_fork() {
  creation_mutex.lock();
  if (State *const s = current.load()) s->mutex.lock();
}

void after_fork() {
  if (State *const s = current.load()) s->mutex.unlock();
  creation_mutex.unlock();
}

void in_child() {
  State *const parent = current.exchange(nullptr);
  if (parent != nullptr) {
    // The parent's locks on its registry files must end with the parent, not with this child.
    for (const auto &entry : parent->contexts) close(entry.second->registry_fd);
    if (parent->trace_fd >= 0) close(parent->trace_fd);
  }
  creation_mutex.unlock();
}

std::string variable(const char *name, const char *fallback) {
  const char *const value = std::getenv(name);
  return value != nullptr ? value : fallback;
}

bool parse_number(const std::string &text, uint64_t least, uint64_t most, uint64_t *number) {
  if (text.empty() || text.size() > 12) return false;
  uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  if (value < least || value > most) return false;
  *number = value;
  return true;
}

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool is_identifier(const std::string &text) {
  if (text.empty()) return false;
  for (const char c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') return false;
  }
  return true;
}

bool starts_with(const std::string &text, const std::string &prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// NAME[:NTH[:CODE]],... where NAME may begin with "exec:" and be "*".
bool parse_injections(const std::string &text, bool with_code, std::vector<Injection> *injections) {
  for (const std::string &item : split(text, ',')) {
    Injection injection;
    std::string rest = item;
    if (starts_with(rest, "exec:")) {
      injection.name = "exec:";
      rest.erase(0, 5);
    }
    const std::vector<std::string> fields = split(rest, ':');
    uint64_t number = 0;
    if (fields.size() > (with_code ? 3u : 2u)) return false;
    if (fields[0] != "*" && !is_identifier(fields[0])) return false;
    injection.name += fields[0];
    if (fields.size() > 1) {
      if (!parse_number(fields[1], 1, UINT64_MAX, &injection.nth)) return false;
    }
    if (fields.size() > 2) {
      if (!parse_number(fields[2], 1, INT_MAX, &number)) return false;
      injection.code = static_cast<int>(number);
    }
    injections->push_back(injection);
  }
  return true;
}

bool parse_corruption(const std::string &text, Corruption *corruption) {
  static const std::map<std::string, Corruption> kinds = {{"bit", Corruption::bit},
                                                          {"zero", Corruption::zero},
                                                          {"stale", Corruption::stale},
                                                          {"swap", Corruption::swap}};
  const auto kind = kinds.find(text);
  if (kind == kinds.end()) return false;
  *corruption = kind->second;
  return true;
}

// NAME[:NTH[:KIND]],... where NAME is exec:KERNEL, exec:*, aclrtMemcpy, aclrtMemcpyAsync or copy:*, and NTH may be "*".
bool parse_corruptions(const std::string &text, std::vector<Injection> *corruptions) {
  for (const std::string &item : split(text, ',')) {
    std::vector<std::string> fields = split(item, ':');
    Injection corruption;
    corruption.corruption = Corruption::bit;
    corruption.name = fields[0];
    if (fields[0] == "exec" || fields[0] == "copy") {
      if (fields.size() < 2) return false;
      if (fields[1] != "*" && (fields[0] == "copy" || !is_identifier(fields[1]))) return false;
      corruption.name += ":" + fields[1];
      fields.erase(fields.begin());
    } else if (fields[0] != "aclrtMemcpy" && fields[0] != "aclrtMemcpyAsync") {
      return false;
    }
    if (fields.size() > 3) return false;
    if (fields.size() > 1) {
      if (fields[1] == "*") {
        corruption.nth = 0;
      } else if (!parse_number(fields[1], 1, UINT64_MAX, &corruption.nth)) {
        return false;
      }
    }
    if (fields.size() > 2 && !parse_corruption(fields[2], &corruption.corruption)) return false;
    corruptions->push_back(corruption);
  }
  return true;
}

// As CANN does, a list that is empty, starts with a non-digit, repeats an id, descends or names a device that does not
// exist leaves no device at all.
bool parse_visible(const std::string &text, uint64_t devices, std::vector<int> *visible) {
  for (const std::string &item : split(text, ',')) {
    uint64_t id = 0;
    if (devices == 0 || !parse_number(item, 0, devices - 1, &id)) return false;
    if (!visible->empty() && static_cast<int>(id) <= visible->back()) return false;
    visible->push_back(static_cast<int>(id));
  }
  return true;
}

bool known_smi_mode(const std::string &mode) {
  for (const char *const known : {"25", "26", "none", "container", "error", "hang"}) {
    if (mode == known) return true;
  }
  return mode.size() > 5 && mode.compare(0, 5, "file:") == 0;
}

int default_code(const std::string &name) {
  const auto starts = [&name](const char *prefix) { return starts_with(name, prefix); };
  const auto ends = [&name](const std::string &suffix) {
    return name.size() >= suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
  };
  if (starts("exec:")) return ACL_ERROR_RT_AICORE_EXCEPTION;
  if (starts("aclrtMalloc")) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  if (starts("aclrtCreateStream")) return ACL_ERROR_RT_NO_STREAM_RESOURCE;
  if (starts("aclrtCreateEvent")) return ACL_ERROR_RT_NO_EVENT_RESOURCE;
  if (name == "aclrtSetDevice") return ACL_ERROR_RT_DEV_SETUP_ERROR;
  if (name == "aclInit") return ACL_ERROR_FAILURE;
  if (starts("aclnn")) return ends("GetWorkspaceSize") ? 161002 : 361001;  // ACLNN_ERR_PARAM_INVALID, _RUNTIME_ERROR
  return ACL_ERROR_RT_DRV_INTERNAL_ERROR;
}

std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() % 1000000;
  std::tm local{};
  localtime_r(&seconds, &local);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d-%H:%M:%S", &local);
  char text[64];
  std::snprintf(text, sizeof text, "%s.%03d.%03d", date, static_cast<int>(micros / 1000), static_cast<int>(micros % 1000));
  return text;
}

}  // namespace

Settings::Settings() {
  const auto malformed = [this](const std::string &name, const std::string &value, const char *expected) {
    if (error.empty()) error = name + "=" + value + " is malformed: " + expected;
  };
  for (char **entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name.compare(0, 8, "CANNSIM_") != 0) continue;
    bool known = false;
    for (const char *const candidate : {"CANNSIM_TRACE", "CANNSIM_FAIL", "CANNSIM_HANG", "CANNSIM_CORRUPT",
                                        "CANNSIM_DEVICES", "CANNSIM_HBM_MB", "CANNSIM_SOC", "CANNSIM_CANN_VERSION",
                                        "CANNSIM_NPU_SMI"}) {
      known = known || name == candidate;
    }
    if (!known) malformed(name, "...", "there is no such variable");
  }

  trace_path = variable("CANNSIM_TRACE", "");
  const std::string fail_text = variable("CANNSIM_FAIL", "");
  if (!fail_text.empty() && !parse_injections(fail_text, true, &failures)) {
    malformed("CANNSIM_FAIL", fail_text, "expected NAME[:NTH[:CODE]],...");
  }
  const std::string hang_text = variable("CANNSIM_HANG", "");
  if (!hang_text.empty() && !parse_injections(hang_text, false, &hangs)) {
    malformed("CANNSIM_HANG", hang_text, "expected NAME[:NTH],...");
  }
  const std::string corrupt_text = variable("CANNSIM_CORRUPT", "");
  if (!corrupt_text.empty() && !parse_corruptions(corrupt_text, &corruptions)) {
    malformed("CANNSIM_CORRUPT", corrupt_text,
              "expected NAME[:NTH[:KIND]],... with exec:KERNEL, aclrtMemcpy, aclrtMemcpyAsync or copy:* as NAME");
  }
  const std::string devices_text = variable("CANNSIM_DEVICES", "1");
  uint64_t devices = 0;
  if (!parse_number(devices_text, 0, 64, &devices)) {
    malformed("CANNSIM_DEVICES", devices_text, "expected a number from 0 to 64");
  }
  const std::string hbm_text = variable("CANNSIM_HBM_MB", "32768");
  uint64_t megabytes = 1;
  if (!parse_number(hbm_text, 1, 1 << 20, &megabytes)) {
    malformed("CANNSIM_HBM_MB", hbm_text, "expected a number of MiB from 1 to 1048576");
  }
  hbm_bytes = megabytes << 20;
  soc = variable("CANNSIM_SOC", "Ascend910B4-1");
  for (const char c : soc) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-') soc.clear();
  }
  if (soc.empty()) malformed("CANNSIM_SOC", variable("CANNSIM_SOC", ""), "expected a name such as Ascend910B4-1");
  cann_version = variable("CANNSIM_CANN_VERSION", "8.5.1");
  if (cann_version.empty() || cann_version.size() >= ACL_PKG_VERSION_MAX_SIZE ||
      !std::isdigit(static_cast<unsigned char>(cann_version[0])) || split(cann_version, '.').size() < 3) {
    malformed("CANNSIM_CANN_VERSION", cann_version, "expected a version such as 8.5.1 or 8.1.RC1");
  }
  const std::string smi_mode = variable("CANNSIM_NPU_SMI", "25");
  if (!known_smi_mode(smi_mode)) {
    malformed("CANNSIM_NPU_SMI", smi_mode, "expected 25, 26, none, container, error, hang or file:PATH");
  }
  driver_version = smi_mode == "26" || smi_mode == "container" ? "26.0.rc1" : "25.5.1";

  const char *const list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (uint64_t id = 0; id < devices; ++id) visible.push_back(static_cast<int>(id));
  } else if (!parse_visible(list, devices, &visible)) {
    visible.clear();
    visible_is_invalid = true;
  }
}

State::State() {
  if (settings.error.empty() && !settings.trace_path.empty()) {
    trace_fd = open(settings.trace_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (trace_fd < 0) {
      settings.error = "CANNSIM_TRACE=" + settings.trace_path + " cannot be opened: " + std::strerror(errno);
    }
  }
  free_space.resize(settings.visible.size());
  used_bytes.resize(settings.visible.size());
  if (!settings.error.empty()) std::fprintf(stderr, "cannsim: %s\n", settings.error.c_str());
  watched = trace_fd >= 0 || !settings.failures.empty() || !settings.hangs.empty() || !settings.corruptions.empty() ||
            !settings.error.empty();
}

State &state() {
  State *existing = current.load(std::memory_order_acquire);
  if (existing == nullptr) {
    const std::lock_guard<std::mutex> lock(creation_mutex);
    existing = current.load(std::memory_order_acquire);
    if (existing == nullptr) {
      static const int registered = pthread_atfork(before_fork, after_fork, in_child);
      (void)registered;
      existing = new State;
      current.store(existing, std::memory_order_release);
    }
  }
  return *existing;
}

Thread &thread() {
  // Leaked rather than thread_local by value: exit handlers of other libraries still call in.
  static thread_local Thread *mine = nullptr;
  if (mine == nullptr) mine = new Thread;
  State *const now = &state();
  if (mine->owner != now) {
    *mine = Thread{};
    mine->owner = now;
  }
  return *mine;
}

void hang_forever() {
  for (;;) pause();
}

std::string json_escape(const std::string &text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      escaped += '\\';
      escaped += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      escaped += code;
    } else {
      escaped += c;
    }
  }
  return escaped;
}

bool watched() { return state().watched; }

bool corrupts() { return !state().settings.corruptions.empty(); }

int enter(const char *name, const std::string &detail, Corruption *corruption) {
  State &s = state();
  if (!s.watched) return 0;
  if (!s.settings.error.empty()) return fail(ACL_ERROR_INVALID_PARAM, s.settings.error);

  const std::string call(name);
  const bool on_device = starts_with(call, "exec:");
  const bool copies = call == "aclrtMemcpy" || call == "exec:aclrtMemcpyAsync";
  int code = 0;
  bool hangs = false;
  {
    const std::lock_guard<std::mutex> lock(s.call_mutex);
    const uint64_t total = ++s.calls;
    const uint64_t by_name = ++s.calls_by_name[call];
    const uint64_t executions = on_device ? ++s.calls_by_name["exec:*"] : 0;
    const uint64_t nth_copy = copies ? ++s.calls_by_name["copy:*"] : 0;
    const auto applies = [&](const Injection &injection) {
      uint64_t number = injection.name == call ? by_name : 0;
      if (injection.name == "*") number = total;
      if (injection.name == "exec:*") number = executions;
      if (injection.name == "copy:*") number = nth_copy;
      return number != 0 && (injection.nth == 0 || injection.nth == number);
    };
    for (const Injection &injection : s.settings.failures) {
      if (code == 0 && applies(injection)) code = injection.code != 0 ? injection.code : default_code(call);
    }
    for (const Injection &injection : s.settings.hangs) hangs = hangs || applies(injection);
    if (corruption != nullptr && code == 0 && !hangs) {
      for (const Injection &injection : s.settings.corruptions) {
        if (*corruption == Corruption::none && applies(injection)) *corruption = injection.corruption;
      }
    }

    if (s.trace_fd >= 0) {
      std::ostringstream line;
      line << "{\"seq\":" << total << ",\"pid\":" << getpid() << ",\"thread\":" << syscall(SYS_gettid) << ",\"name\":\""
           << json_escape(call) << '"';
      if (!detail.empty()) line << ',' << detail;
      if (hangs) line << ",\"injected\":\"hang\"";
      if (!hangs && code != 0) line << ",\"injected\":" << code;
      if (corruption != nullptr && *corruption != Corruption::none) line << ",\"injected\":\"corrupt\"";
      line << "}\n";
      const std::string text = line.str();
      // One write to an O_APPEND descriptor: neither threads nor a kill tear a line.
      if (write(s.trace_fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
        std::fprintf(stderr, "cannsim: CANNSIM_TRACE=%s cannot be written: %s\n", s.settings.trace_path.c_str(),
                     std::strerror(errno));
        code = ACL_ERROR_WRITE_FILE;
      }
    }
  }
  if (hangs) hang_forever();
  if (code != 0) return fail(code, "failure of " + call + " injected by CANNSIM_FAIL");
  return 0;
}

int fail(int code, const std::string &message) {
  Thread &t = thread();
  t.last_error = code;
  const char *const kind = code == ACL_ERROR_RT_MEMORY_ALLOCATION ? "EL0004" : "EE1001";
  t.message += std::string(kind) + ": [PID: " + std::to_string(getpid()) + "] " + timestamp() + " cannsim: " + message +
               " (error code " + std::to_string(code) + ")\n";
  return code;
}

}  // namespace cannsim

using cannsim::fail;
using cannsim::state;
using cannsim::thread;

extern "C" {

const char *cannsim_version() { return "1"; }

// Called by the stubs that build.sh generates for every other symbol of the wheel.
int cannsim_unimplemented(const char *name) {
  if (const int injected = cannsim::enter(name)) return injected;
  std::fprintf(stderr, "cannsim: %s is not simulated\n", name);
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, std::string(name) + " is not simulated");
}

// Called by the operators that build.sh generates for those of the wheel that are not simulated: CANN's error where it
// finds no kernel.
int cannsim_refuse_operator(const char *name) {
  if (const int injected = cannsim::enter(name)) return injected;
  const int no_kernel = 561003;  // ACLNN_ERR_INNER_FIND_KERNEL_ERROR
  return fail(no_kernel, std::string(name) + ": this operator is not simulated, it has no kernel");
}

const char *aclGetRecentErrMsg() {
  if (cannsim::enter(__func__)) return nullptr;
  cannsim::Thread &t = thread();
  t.returned.swap(t.message);
  t.message.clear();
  return t.returned.empty() ? nullptr : t.returned.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level) {
  CANNSIM_ENTER();
  if (level != ACL_RT_THREAD_LEVEL) return fail(ACL_ERROR_RT_PARAM_INVALID, "unknown error level");
  return thread().last_error;
}

aclError aclrtGetLastError(aclrtLastErrLevel level) {
  CANNSIM_ENTER();
  if (level != ACL_RT_THREAD_LEVEL) return fail(ACL_ERROR_RT_PARAM_INVALID, "unknown error level");
  const int code = thread().last_error;
  thread().last_error = 0;
  return code;
}

}  // extern "C"
