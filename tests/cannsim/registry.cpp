// How npu-smi finds this process: one empty, locked file PID.DEVICE for each context, in a directory of this user's
// alone. The lock ends with the process, however that dies. The memory in use, in MiB, is the file's modification time:
// nothing is written, because a full disk or a limit on file sizes must not look like a broken device.
#include "runtime.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace cannsim {
namespace {

// Where a foreigner could plant a file, no answer of npu-smi would mean anything.
bool find_directory(std::string *path, std::string *problem) {
  const char *const runtime_dir = std::getenv("XDG_RUNTIME_DIR");
  std::string base = runtime_dir != nullptr && *runtime_dir != '\0' ? runtime_dir : "/dev/shm";
  if (access(base.c_str(), W_OK | X_OK) != 0) base = "/tmp";
  *path = base + "/cannsim-" + std::to_string(geteuid());
  if (mkdir(path->c_str(), 0700) != 0 && errno != EEXIST) {
    *problem = *path + ": " + std::strerror(errno);
    return false;
  }
  struct stat info{};
  if (lstat(path->c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() ||
      (info.st_mode & 077) != 0) {
    *problem = *path + " is not a directory that belongs to this user alone";
    return false;
  }
  return true;
}

void show(const Context &context) {
  const time_t mebibytes = static_cast<time_t>((used_memory(context.device) + (1 << 20) - 1) >> 20);
  const timespec times[2] = {{mebibytes, 0}, {mebibytes, 0}};
  futimens(context.registry_fd, times);
}

}  // namespace

bool registry_add(Context *context, std::string *problem) {
  std::string directory;
  if (!find_directory(&directory, problem)) return false;
  const std::string path = directory + "/" + std::to_string(getpid()) + "." + std::to_string(context->physical);
  const std::string draft = path + ".new";
  unlink(draft.c_str());
  context->registry_fd = open(draft.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (context->registry_fd >= 0) {
    // Locked and filled in before it gets its name: npu-smi takes an unlocked file for that of a dead process.
    show(*context);
    if (flock(context->registry_fd, LOCK_EX | LOCK_NB) == 0 && rename(draft.c_str(), path.c_str()) == 0) {
      context->registry_path = path;
      return true;
    }
  }
  *problem = path + ": " + std::strerror(errno);
  if (context->registry_fd >= 0) close(context->registry_fd);
  context->registry_fd = -1;
  return false;
}

void registry_remove(Context *context) {
  unlink(context->registry_path.c_str());
  close(context->registry_fd);
  context->registry_fd = -1;
}

void registry_show_memory(int device) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto entry = s.contexts.find(device);
  if (entry != s.contexts.end()) show(*entry->second);
}

}  // namespace cannsim
