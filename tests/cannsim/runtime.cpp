// Initialisation, devices, contexts, versions and properties.
#include "runtime.h"

#include <acl/acl_op_compiler.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

namespace cannsim {
namespace {

// The caller holds state().mutex. Returns nullptr after fail().
Context *activate(int device) {
  State &s = state();
  if (device < 0 || static_cast<size_t>(device) >= s.settings.visible.size()) {
    fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(device) + ", only " +
                                            std::to_string(s.settings.visible.size()) + " are visible");
    return nullptr;
  }
  const auto existing = s.contexts.find(device);
  if (existing != s.contexts.end()) return existing->second;
  Context *const context = new Context;
  context->device = device;
  context->physical = s.settings.visible[static_cast<size_t>(device)];
  std::string problem;
  if (!registry_add(context, &problem)) {
    fail(ACL_ERROR_RT_DEV_SETUP_ERROR, "the process cannot be made known to npu-smi: " + problem);
    return nullptr;
  }
  s.contexts[device] = context;
  return context;
}

// Ends the context of a device: its streams and its memory go with it.
void reset(Context *context) {
  State &s = state();
  std::vector<Stream *> streams;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    streams.assign(context->streams.begin(), context->streams.end());
    s.contexts.erase(context->device);
    context->alive = false;
    registry_remove(context);
  }
  for (Stream *const stream : streams) destroy_stream(stream);
  release_device_memory(context->device);
}

int uninitialised() { return fail(ACL_ERROR_UNINITIALIZE, "aclInit has not been called"); }

const std::string &package_version(const std::string &package) {
  return package == "driver" ? state().settings.driver_version : state().settings.cann_version;
}

constexpr int kLastCompileOption = 16;  // ACL_OP_DEBUG_OPTION, which older headers do not have

void copy_text(char *to, size_t room, const std::string &text) {
  std::memset(to, 0, room);
  std::memcpy(to, text.data(), std::min(text.size(), room - 1));
}

}  // namespace

Context *need_context() {
  State &s = state();
  Thread &t = thread();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (t.context != nullptr && t.context->alive) return t.context;
  if (!s.initialised) {
    uninitialised();
    t.last_error = ACL_ERROR_RT_CONTEXT_NULL;
    return nullptr;
  }
  if (t.context == nullptr && s.default_device >= 0) {
    t.context = activate(s.default_device);
    return t.context;
  }
  fail(ACL_ERROR_RT_CONTEXT_NULL, "no device has been set in this thread");
  return nullptr;
}

}  // namespace cannsim

using cannsim::Context;
using cannsim::fail;
using cannsim::State;
using cannsim::state;
using cannsim::thread;

extern "C" {

aclError aclInit(const char *configPath) {
  CANNSIM_ENTER();
  State &s = state();
  int default_device = -1;
  if (configPath != nullptr && *configPath != '\0') {
    std::ifstream file(configPath);
    if (!file) return fail(ACL_ERROR_INVALID_FILE, std::string("aclInit: cannot read ") + configPath);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const std::string key = "\"default_device\"";
    const size_t found = text.find(key);
    unsigned device = 0;
    if (found != std::string::npos && std::sscanf(text.c_str() + found + key.size(), " : \"%4u\"", &device) == 1) {
      default_device = static_cast<int>(device);
    }
  }
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.initialised) return fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
  if (default_device >= static_cast<int>(s.settings.visible.size())) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclInit: default_device " + std::to_string(default_device) +
                                                   " does not exist");
  }
  s.initialised = true;
  s.default_device = default_device;
  return 0;
}

aclError aclFinalize() {
  CANNSIM_ENTER();
  State &s = state();
  std::map<int, Context *> contexts;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.initialised) return cannsim::uninitialised();
    contexts = s.contexts;
  }
  cannsim::stop_compiler();
  for (const auto &entry : contexts) cannsim::reset(entry.second);
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.initialised = false;
  s.default_device = -1;
  return 0;
}

aclError aclrtGetDeviceCount(uint32_t *count) {
  CANNSIM_ENTER();
  if (count == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetDeviceCount to nullptr");
  *count = static_cast<uint32_t>(state().settings.visible.size());
  if (state().settings.visible_is_invalid) {
    return fail(ACL_ERROR_RT_NO_DEVICE, "no device is visible: set ASCEND_RT_VISIBLE_DEVICES to ascending device ids");
  }
  return 0;
}

aclError aclrtSetDevice(int32_t deviceId) {
  CANNSIM_ENTER("\"device\":" + std::to_string(deviceId));
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.initialised) return cannsim::uninitialised();
  Context *const context = cannsim::activate(deviceId);
  if (context == nullptr) return thread().last_error;
  thread().context = context;
  return 0;
}

aclError aclrtGetDevice(int32_t *deviceId) {
  CANNSIM_ENTER();
  if (deviceId == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetDevice to nullptr");
  const std::lock_guard<std::mutex> lock(state().mutex);
  const Context *const context = thread().context;
  // A question, and torch_npu asks it often: it leaves no error message behind.
  if (context == nullptr || !context->alive) return ACL_ERROR_RT_CONTEXT_NULL;
  *deviceId = context->device;
  return 0;
}

aclError aclrtResetDevice(int32_t deviceId) {
  CANNSIM_ENTER("\"device\":" + std::to_string(deviceId));
  State &s = state();
  Context *context = nullptr;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto entry = s.contexts.find(deviceId);
    if (entry == s.contexts.end()) {
      return fail(ACL_ERROR_RT_INVALID_DEVICEID, "device " + std::to_string(deviceId) + " is not set");
    }
    context = entry->second;
  }
  cannsim::reset(context);
  return 0;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
  CANNSIM_ENTER();
  if (context == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetCurrentContext to nullptr");
  Context *const current = cannsim::need_context();
  if (current == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = current;
  return 0;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  CANNSIM_ENTER();
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto &entry : state().contexts) {
    if (entry.second == context) {
      thread().context = entry.second;
      return 0;
    }
  }
  return fail(ACL_ERROR_RT_CONTEXT_NULL, "use of a context that does not exist or was destroyed");
}

aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active) {
  CANNSIM_ENTER();
  State &s = state();
  if (deviceId < 0 || static_cast<size_t>(deviceId) >= s.settings.visible.size()) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(deviceId));
  }
  if (active == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetPrimaryCtxState to nullptr");
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (flags != nullptr) *flags = 0;
  *active = static_cast<int32_t>(s.contexts.count(deviceId));
  return 0;
}

const char *aclrtGetSocName() {
  if (cannsim::enter(__func__)) return nullptr;
  return state().settings.soc.c_str();
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
  CANNSIM_ENTER();
  if (version == nullptr || name < ACL_PKG_NAME_CANN || name > ACL_PKG_NAME_DRIVER) {
    return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetCANNVersion: unknown package or nullptr");
  }
  *version = aclCANNPackageVersion{};
  const std::string text = cannsim::package_version(name == ACL_PKG_NAME_DRIVER ? "driver" : "cann");
  cannsim::copy_text(version->version, sizeof version->version, text);
  char *const parts[] = {version->majorVersion, version->minorVersion, version->releaseVersion, version->patchVersion};
  size_t start = 0;
  for (char *const part : parts) {
    if (start > text.size()) break;
    const size_t end = std::min(text.find('.', start), text.size());
    cannsim::copy_text(part, sizeof version->majorVersion, text.substr(start, end - start));
    start = end + 1;
  }
  return 0;
}

aclError aclsysGetVersionStr(char *pkgName, char *versionStr) {
  CANNSIM_ENTER();
  if (pkgName == nullptr || versionStr == nullptr) {
    return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetVersionStr of or to nullptr");
  }
  static const char *const packages[] = {"runtime", "driver", "hccl", "opbase", "ops_math", "ops_nn", "ops_cv",
                                         "ops_legacy", "ops_transformer", "ge-compiler", "ge-executor", "metadef"};
  for (const char *const package : packages) {
    if (std::strcmp(pkgName, package) == 0) {
      cannsim::copy_text(versionStr, ACL_PKG_VERSION_MAX_SIZE, cannsim::package_version(package));
      return 0;
    }
  }
  return fail(ACL_ERROR_INVALID_FILE, std::string("aclsysGetVersionStr: no package ") + pkgName);
}

aclError aclGetCannAttribute(aclCannAttr cannAttr, int32_t *value) {
  CANNSIM_ENTER();
  if (value == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttribute to nullptr");
  switch (cannAttr) {
    case ACL_CANN_ATTR_INF_NAN:
    case ACL_CANN_ATTR_BF16:
    case ACL_CANN_ATTR_JIT_COMPILE: *value = 1; return 0;
    default: return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttribute: unknown attribute");
  }
}

aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value) {
  CANNSIM_ENTER();
  if (deviceId >= state().settings.visible.size()) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(deviceId));
  }
  if (value == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability to nullptr");
  switch (deviceInfo) {  // of an Ascend 910B4
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 20; return 0;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 40; return 0;
    case ACL_DEVICE_INFO_L2_SIZE: *value = int64_t{96} << 20; return 0;
    default: return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: unknown property");
  }
}

aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid) {
  CANNSIM_ENTER();
  State &s = state();
  if (deviceId < 0 || static_cast<size_t>(deviceId) >= s.settings.visible.size()) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(deviceId));
  }
  if (uuid == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDeviceGetUuid to nullptr");
  char text[sizeof uuid->bytes + 1];
  std::snprintf(text, sizeof text, "cannsim-npu-%04d", s.settings.visible[static_cast<size_t>(deviceId)]);
  std::memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return 0;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  CANNSIM_ENTER();
  if (cannsim::need_context() == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (mode != ACL_RT_OVERFLOW_MODE_INFNAN) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "only the INF/NaN overflow mode is simulated");
  }
  return 0;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  CANNSIM_ENTER();
  return 0;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actualTimeout) {
  CANNSIM_ENTER();
  if (actualTimeout == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetOpExecuteTimeOutV2 to nullptr");
  *actualTimeout = timeout;
  return 0;
}

aclError aclrtSetOpWaitTimeout(uint32_t) {
  CANNSIM_ENTER();
  return 0;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
  CANNSIM_ENTER();
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().system_parameters[opt] = value;
  return 0;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value) {
  CANNSIM_ENTER();
  if (value == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtGetSysParamOpt to nullptr");
  const std::lock_guard<std::mutex> lock(state().mutex);
  *value = state().system_parameters[opt];
  return 0;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
  CANNSIM_ENTER();
  Context *const context = cannsim::need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (opt < 0 || opt > 2) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtCtxSetSysParamOpt: no such option");
  const std::lock_guard<std::mutex> lock(state().mutex);
  context->parameters[opt] = value;
  return 0;
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t *value) {
  CANNSIM_ENTER();
  Context *const context = cannsim::need_context();
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  if (opt < 0 || opt > 2 || value == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtCtxGetSysParamOpt: no such option, or to nullptr");
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  *value = context->parameters[opt];
  return 0;
}

// Whatever the option is, this starts the compiler.
aclError aclSetCompileopt(aclCompileOpt opt, const char *value) {
  CANNSIM_ENTER("\"option\":" + std::to_string(opt));
  if (value == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "aclSetCompileopt of nullptr");
  if (opt == ACL_AUTO_TUNE_MODE) return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "aclSetCompileopt: auto tune is gone");
  if (opt < 0 || opt > cannsim::kLastCompileOption) {
    return fail(ACL_ERROR_INTERNAL_ERROR, "aclSetCompileopt: there is no option " + std::to_string(opt));
  }
  cannsim::start_compiler();
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().compile_options[opt] = value;
  return 0;
}

// Asking for the default of this one does not: torch_npu does so in every run.
size_t aclGetCompileoptSize(aclCompileOpt opt) {
  if (cannsim::enter(__func__)) return 0;
  if (opt == ACL_OP_JIT_COMPILE) return 256;
  cannsim::start_compiler();
  const std::lock_guard<std::mutex> lock(state().mutex);
  const std::string &value = state().compile_options[opt];
  return value.empty() ? 0 : value.size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length) {
  CANNSIM_ENTER();
  if (opt != ACL_OP_JIT_COMPILE) return fail(ACL_ERROR_API_NOT_SUPPORT, "aclGetCompileopt: of the JIT compiler only");
  const std::string text = "disable";  // on an Ascend 910B
  if (value == nullptr || length < text.size() + 1) {
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: too little room");
  }
  std::memcpy(value, text.c_str(), text.size() + 1);
  return 0;
}

// Of the collectives only this is called with one device: torch_npu looks it up, passes on every change of determinism,
// and fills stderr with warnings when it is absent.
int HcclSetConfig(int config, int value) {
  CANNSIM_ENTER();
  const int deterministic = 0;  // HCCL_DETERMINISTIC, the one that torch_npu sets
  if (config != deterministic || (value != 0 && value != 1)) {
    return fail(ACL_ERROR_INVALID_PARAM, "HcclSetConfig: no such setting");
  }
  return 0;
}

}  // extern "C"
