// What the two halves of the simulated CANN runtime share.
//
// libascendcl.so (runtime.cpp) owns devices, memory, streams, the trace and fault injection and exports the functions
// below; libopapi.so (opapi.cpp) owns the aclnn operators and reaches all of that through this header only.
// The C ABI that torch_npu sees is that of the ACL headers in the wheel (torch_npu/include/third_party/acl/inc).
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// CANN hands these out as opaque pointers; the simulator decides what is behind them.
struct aclTensor {
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_ND;
  std::vector<int64_t> shape;    // view shape
  std::vector<int64_t> strides;  // in elements, one per dimension of `shape`
  int64_t offset = 0;            // of the first element, in elements from `data`
  std::vector<int64_t> storage;  // storage shape
  void *data = nullptr;          // device address: never dereferenced, see cannsim::alias
};

struct aclScalar {
  aclDataType dtype = ACL_DT_UNDEFINED;
  unsigned char bytes[16] = {0};
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclBoolArray {
  std::vector<bool> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclTensorList {
  std::vector<const aclTensor *> tensors;
};

// Made by aclnnXGetWorkspaceSize, consumed (and freed, as in CANN) by aclnnX. `run` owns copies of every descriptor it
// needs: torch_npu destroys its aclTensors as soon as the launch returns, long before the stream gets to the kernel.
struct aclOpExecutor {
  const char *name;           // "aclnnAddmm"
  std::function<void()> run;  // executed by the stream's thread; what it throws is a sticky error of the stream
  std::vector<aclTensor> outputs;  // what `run` writes; filled in only where something may be corrupted
};

namespace cannsim {

// False when nothing is traced, corrupted, made to fail or made to hang: then nobody asks which calls are made.
bool watched();

// True where CANNSIM_CORRUPT is set: then operators must say what they write.
bool corrupts();

// How a copy or a kernel delivers wrong data. Stale: what was in the memory before stays there.
enum class Corruption { none, bit, zero, stale, swap };

// Every exported call begins with it unless nothing is watched: counts the call, writes the trace line, hangs or
// returns the injected error code where CANNSIM_HANG or CANNSIM_FAIL says so. 0: go on. `detail` is appended to the
// trace line as JSON members, for instance "\"bytes\":16,\"direction\":\"h2d\"". `corruption`, for what can be
// corrupted, is set as CANNSIM_CORRUPT says.
int enter(const char *name, const std::string &detail = "", Corruption *corruption = nullptr);

// Records the message that aclGetRecentErrMsg returns and the code that aclrtPeekAtLastError returns; returns `code`.
int fail(int code, const std::string &message);

// The simulator's own view of `bytes` bytes at a device address, or nullptr unless they lie wholly inside one live
// allocation. The device address itself is PROT_NONE.
void *alias(const void *device_address, size_t bytes);

// Appends a task to an in-order stream (nullptr: the default stream of the current context). `name`, a literal, is what
// the trace and CANNSIM_FAIL=exec:NAME call it, `outputs` what it writes. A task fails by throwing a std::exception.
// Once a task of the stream has failed, later ones are dropped and the error surfaces at the next synchronise. Returns
// an ACL error when the stream is unknown.
int enqueue(aclrtStream stream, const char *name, std::function<void()> task, std::vector<aclTensor> outputs = {});

// A launch on that stream has failed: if it is captured, the capture is not valid any more.
void launch_failed(aclrtStream stream);

}  // namespace cannsim
