// What CANN's operator compiler leaves behind in a process once something has started it: eight idle worker processes,
// handlers of its own for SIGINT, SIGQUIT and SIGTERM, and a temporary directory below the current one. It compiles
// nothing here. Setting a compile option starts it, also where no operator is ever compiled.
#include "runtime.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>

namespace cannsim {
namespace {

constexpr int kSignals[] = {SIGINT, SIGQUIT, SIGTERM};
constexpr size_t kSignalCount = sizeof kSignals / sizeof *kSignals;
constexpr int kWorkers = 8;

// Of this process. A forked child has the handlers, as with CANN, but neither the workers nor the directory.
std::mutex mutex;  // guards these
pid_t started_in = 0;
std::vector<pid_t> workers;
char directory[PATH_MAX];
struct sigaction before[kSignalCount];
volatile sig_atomic_t registered[kSignalCount];

void remove_directory() {
  rmdir(directory);
  const std::string path(directory);
  rmdir(path.substr(0, path.rfind('/')).c_str());  // kernel_meta, unless others use it
}

// As CANN's: once, and whoever had the signal before gets it again.
void handle(int number) {
  for (size_t i = 0; i < kSignalCount; ++i) {
    if (kSignals[i] != number || !registered[i]) continue;
    registered[i] = 0;
    sigaction(number, &before[i], nullptr);
    raise(number);
  }
  if (getpid() == started_in) rmdir(directory);
}

void take_signals() {
  struct sigaction mine{};
  mine.sa_handler = handle;
  for (size_t i = 0; i < kSignalCount; ++i) {
    registered[i] = sigaction(kSignals[i], &mine, &before[i]) == 0;
  }
}

void give_signals_back() {
  for (size_t i = 0; i < kSignalCount; ++i) {
    if (registered[i]) sigaction(kSignals[i], &before[i], nullptr);
    registered[i] = 0;
  }
}

[[noreturn]] void idle(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int number : kSignals) signal(number, SIG_DFL);
  for (int fd = 0; fd < 1024; ++fd) close(fd);  // nobody must wait for this process to close a pipe
  while (getppid() == parent) pause();
  _exit(0);
}

// The parent of the workers is this thread: they get their signal when it ends, and it ends with the process.
void start_workers() {
  std::mutex done_mutex;
  std::condition_variable done;
  bool ready = false;
  std::thread([&] {
    const pid_t parent = getpid();
    std::vector<pid_t> mine;
    for (int i = 0; i < kWorkers; ++i) {
      const pid_t child = fork();
      if (child == 0) idle(parent);
      if (child > 0) mine.push_back(child);
    }
    {
      const std::lock_guard<std::mutex> lock(done_mutex);
      workers = mine;
      ready = true;
      done.notify_one();
    }
    for (const pid_t child : mine) waitpid(child, nullptr, 0);
  }).detach();
  std::unique_lock<std::mutex> lock(done_mutex);
  done.wait(lock, [&] { return ready; });
}

bool make_directory() {
  char here[PATH_MAX];
  if (getcwd(here, sizeof here) == nullptr) return false;
  const std::string parent = std::string(here) + "/kernel_meta";
  const std::string path = parent + "/kernel_meta_temp_" + std::to_string(getpid()) + std::to_string(time(nullptr));
  if (path.size() >= sizeof directory) return false;
  std::memcpy(directory, path.c_str(), path.size() + 1);
  if (mkdir(parent.c_str(), 0750) != 0 && errno != EEXIST) return false;
  return mkdir(directory, 0750) == 0 || errno == EEXIST;
}

}  // namespace

void start_compiler() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (started_in == getpid()) return;
  started_in = getpid();
  if (!make_directory()) {
    std::fprintf(stderr, "cannsim: the operator compiler cannot make kernel_meta: %s\n", std::strerror(errno));
  }
  start_workers();
  take_signals();
}

void stop_compiler() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (started_in != getpid()) return;
  started_in = 0;
  give_signals_back();
  for (const pid_t worker : workers) kill(worker, SIGKILL);
  workers.clear();
  remove_directory();
}

}  // namespace cannsim
