// The old way to run an operator, by its graph name. torch_npu takes it where an aclnn kernel is missing; here it starts
// the operator compiler, as with CANN, and ends in an error that names the operator. The descriptors exist so that torch_npu gets as far as that error.
#include "runtime.h"

#include <acl/acl_op_compiler.h>

struct aclTensorDesc {
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_ND;
  std::vector<int64_t> dims;
};

struct aclDataBuffer {
  void *data = nullptr;
  size_t size = 0;
};

struct aclopAttr {};

using cannsim::fail;

namespace {

int refuse(const char *type) {
  cannsim::start_compiler();
  return fail(ACL_ERROR_OP_NOT_FOUND, std::string("operator ") + (type != nullptr ? type : "(null)") +
                                          " is not simulated: it has no aclnn kernel here");
}

}  // namespace

extern "C" {

aclTensorDesc *aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t *dims, aclFormat format) {
  if (cannsim::enter(__func__) || numDims < 0 || (numDims > 0 && dims == nullptr)) return nullptr;
  aclTensorDesc *const desc = new aclTensorDesc;
  desc->dtype = dataType;
  desc->format = format;
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

aclError aclSetTensorFormat(aclTensorDesc *, aclFormat) {
  CANNSIM_ENTER();
  return 0;
}

aclError aclSetTensorShape(aclTensorDesc *, int, const int64_t *) {
  CANNSIM_ENTER();
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

aclError aclopCompileAndExecute(const char *opType, int, const aclTensorDesc *const[], const aclDataBuffer *const[],
                                int, const aclTensorDesc *const[], aclDataBuffer *const[], const aclopAttr *,
                                aclopEngineType, aclopCompileType, const char *, aclrtStream) {
  CANNSIM_ENTER("\"operator\":\"" + cannsim::json_escape(opType != nullptr ? opType : "") + "\"");
  return refuse(opType);
}

aclError aclopCompileAndExecuteV2(const char *opType, int, aclTensorDesc *[], aclDataBuffer *[], int, aclTensorDesc *[],
                                  aclDataBuffer *[], aclopAttr *, aclopEngineType, aclopCompileType, const char *,
                                  aclrtStream) {
  CANNSIM_ENTER("\"operator\":\"" + cannsim::json_escape(opType != nullptr ? opType : "") + "\"");
  return refuse(opType);
}

}  // extern "C"
