#include "cuda_driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace amp_plugin::cuda {
namespace {

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

template <typename Function>
void find(void* library, Function& function, const char* symbol) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  TORCH_CHECK(function != nullptr, "the CUDA driver has no ", symbol, "; update it to CUDA 12 or newer");
}

// The names are those of the driver's ABI. Functions without the suffix _ptsz take 0 for the legacy default
// stream, as torch does.
Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  TORCH_CHECK(
      library != nullptr, "the CUDA driver cannot be loaded (", dlerror(), "); check it with nvidia-smi");
  Driver found;
  find(library, found.cuLaunchKernel, "cuLaunchKernel");
  find(library, found.cuDeviceGet, "cuDeviceGet");
  find(library, found.cuCtxGetDevice, "cuCtxGetDevice");
  find(library, found.cuCtxGetCurrent, "cuCtxGetCurrent");
  find(library, found.cuCtxSetCurrent, "cuCtxSetCurrent");
  find(library, found.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(library, found.cuLibraryLoadData, "cuLibraryLoadData");
  find(library, found.cuLibraryGetKernel, "cuLibraryGetKernel");
  find(library, found.cuKernelGetFunction, "cuKernelGetFunction");
  find(library, found.cuMemAlloc, "cuMemAlloc_v2");
  find(library, found.cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  find(library, found.cuStreamCreate, "cuStreamCreate");
  find(library, found.cuStreamSynchronize, "cuStreamSynchronize");
  find(library, found.cuStreamIsCapturing, "cuStreamIsCapturing");
  find(library, found.cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2");
  find(library, found.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  find(library, found.cuUserObjectCreate, "cuUserObjectCreate");
  find(library, found.cuUserObjectRelease, "cuUserObjectRelease");
  find(library, found.cuGraphRetainUserObject, "cuGraphRetainUserObject");
  find(library, found.cuGetErrorName, "cuGetErrorName");
  find(library, found.cuGetErrorString, "cuGetErrorString");
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = load();
  return found;
}

std::string told(Status status) {
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(status, &name);
  driver().cuGetErrorString(status, &text);
  return c10::str(
      name == nullptr ? "an unknown error" : name, " ", status, ", ", text == nullptr ? "" : text);
}

void check(Status status, const char* what) { TORCH_CHECK(status == 0, what, ": ", told(status)); }

OutsideCapture::OutsideCapture() : mode_(kRelaxed) {
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "the CUDA driver keeps its capture mode");
}

OutsideCapture::~OutsideCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace amp_plugin::cuda
