// The old way to run an operator, by its graph name, which starts the operator compiler, as with CANN. torch_npu takes
// it where an aclnn kernel is missing, and that ends in an error that names the operator; and for Identity, the one by
// which it changes the format of a tensor.
#include "runtime.h"

#include <acl/acl_op_compiler.h>

#include <cstring>

struct aclTensorDesc {
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_ND;
  aclFormat storage_format = ACL_FORMAT_ND;  // how the elements lie in memory
  std::vector<int64_t> dims;
};

struct aclDataBuffer {
  void *data = nullptr;
  size_t size = 0;
};

struct aclopAttr {};

using cannsim::fail;

namespace {

// The elements lie one after the other, whatever the dimensions are called.
bool is_plain(aclFormat format) {
  return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NHWC ||
         format == ACL_FORMAT_NCDHW || format == ACL_FORMAT_NCL;
}

// The output gets the input's elements. Between plain formats that is a copy; the private ones are not simulated.
int identity(const aclTensorDesc &from, const aclDataBuffer &source, const aclTensorDesc &to,
             const aclDataBuffer &target, aclrtStream stream) {
  const auto wrong = [](const std::string &what) {
    return fail(ACL_ERROR_INVALID_PARAM, "operator Identity: " + what);
  };
  if (from.dtype != to.dtype) return wrong("input and output have different dtypes");
  if (!is_plain(from.storage_format) || !is_plain(to.storage_format))
    return wrong("from format " + std::to_string(from.storage_format) + " to " + std::to_string(to.storage_format) +
                 " is not simulated");
  if (source.size != target.size) return wrong("input and output have different sizes");
  aclTensor written;
  written.dtype = to.dtype;
  written.shape = written.storage = to.dims;
  written.strides.assign(to.dims.size(), 1);
  for (size_t d = to.dims.size(); d-- > 1;) written.strides[d - 1] = written.strides[d] * to.dims[d];
  written.data = target.data;
  const auto run = [source, target] {
    if (target.size == 0) return;
    const void *in = cannsim::alias(source.data, source.size);
    void *out = cannsim::alias(target.data, target.size);
    if (in == nullptr || out == nullptr) throw std::runtime_error("a buffer is outside of allocated device memory");
    std::memmove(out, in, target.size);
  };
  return cannsim::enqueue(stream, "Identity", run, {written});
}

int execute(const char *type, int inputs, const aclTensorDesc *const in[], const aclDataBuffer *const source[],
            int outputs, const aclTensorDesc *const out[], aclDataBuffer *const target[], aclrtStream stream) {
  cannsim::start_compiler();
  const std::string name = type != nullptr ? type : "(null)";
  if (name == "Identity" && inputs == 1 && outputs == 1)
    return identity(*in[0], *source[0], *out[0], *target[0], stream);
  return fail(ACL_ERROR_OP_NOT_FOUND, "operator " + name + " is not simulated: it has no aclnn kernel here");
}

}  // namespace

extern "C" {

aclTensorDesc *aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t *dims, aclFormat format) {
  if (cannsim::enter(__func__) || numDims < 0 || (numDims > 0 && dims == nullptr)) return nullptr;
  aclTensorDesc *const desc = new aclTensorDesc;
  desc->dtype = dataType;
  desc->format = desc->storage_format = format;
  desc->dims.assign(dims, dims + numDims);
  return desc;
}

void aclDestroyTensorDesc(const aclTensorDesc *desc) {
  cannsim::enter(__func__);
  delete desc;
}

aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->dtype; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return desc->dims.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *dimSize) {
  CANNSIM_ENTER();
  if (index >= desc->dims.size()) return fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: no such dimension");
  *dimSize = desc->dims[index];
  return 0;
}

void aclSetTensorDescName(aclTensorDesc *, const char *) { cannsim::enter(__func__); }

aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
  CANNSIM_ENTER();
  desc->storage_format = format;
  return 0;
}

aclError aclSetTensorShape(aclTensorDesc *desc, int numDims, const int64_t *dims) {
  CANNSIM_ENTER();
  if (numDims < 0 || (numDims > 0 && dims == nullptr))
    return fail(ACL_ERROR_INVALID_PARAM, "aclSetTensorShape: no dimensions");
  desc->dims.assign(dims, dims + numDims);
  return 0;
}

aclError aclSetTensorPlaceMent(aclTensorDesc *, aclMemType) {
  CANNSIM_ENTER();
  return 0;
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
  if (cannsim::enter(__func__)) return nullptr;
  aclDataBuffer *const buffer = new aclDataBuffer;
  buffer->data = data;
  buffer->size = size;
  return buffer;
}

aclError aclDestroyDataBuffer(const aclDataBuffer *dataBuffer) {
  CANNSIM_ENTER();
  delete dataBuffer;
  return 0;
}

aclopAttr *aclopCreateAttr() { return cannsim::enter(__func__) ? nullptr : new aclopAttr; }

void aclopDestroyAttr(const aclopAttr *attr) {
  cannsim::enter(__func__);
  delete attr;
}

#define CANNSIM_ATTRIBUTE(NAME, ...)                      \
  aclError NAME(aclopAttr *, const char *, __VA_ARGS__) { \
    CANNSIM_ENTER();                                      \
    return 0;                                             \
  }

CANNSIM_ATTRIBUTE(aclopSetAttrBool, uint8_t)
CANNSIM_ATTRIBUTE(aclopSetAttrInt, int64_t)
CANNSIM_ATTRIBUTE(aclopSetAttrFloat, float)
CANNSIM_ATTRIBUTE(aclopSetAttrString, const char *)
CANNSIM_ATTRIBUTE(aclopSetAttrDataType, aclDataType)
CANNSIM_ATTRIBUTE(aclopSetAttrListBool, int, const uint8_t *)
CANNSIM_ATTRIBUTE(aclopSetAttrListInt, int, const int64_t *)
CANNSIM_ATTRIBUTE(aclopSetAttrListFloat, int, const float *)
CANNSIM_ATTRIBUTE(aclopSetAttrListListInt, int, const int *, const int64_t *const[])

aclError aclopCompileAndExecute(const char *opType, int numInputs, const aclTensorDesc *const inputDesc[],
                                const aclDataBuffer *const inputs[], int numOutputs,
                                const aclTensorDesc *const outputDesc[], aclDataBuffer *const outputs[],
                                const aclopAttr *, aclopEngineType, aclopCompileType, const char *,
                                aclrtStream stream) {
  CANNSIM_ENTER("\"operator\":\"" + cannsim::json_escape(opType != nullptr ? opType : "") + "\"");
  return execute(opType, numInputs, inputDesc, inputs, numOutputs, outputDesc, outputs, stream);
}

aclError aclopCompileAndExecuteV2(const char *opType, int numInputs, aclTensorDesc *inputDesc[],
                                  aclDataBuffer *inputs[], int numOutputs, aclTensorDesc *outputDesc[],
                                  aclDataBuffer *outputs[], aclopAttr *, aclopEngineType, aclopCompileType,
                                  const char *, aclrtStream stream) {
  CANNSIM_ENTER("\"operator\":\"" + cannsim::json_escape(opType != nullptr ? opType : "") + "\"");
  return execute(opType, numInputs, inputDesc, inputs, numOutputs, outputDesc, outputs, stream);
}

}  // extern "C"
