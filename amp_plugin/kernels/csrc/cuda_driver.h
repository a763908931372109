// The functions of the CUDA driver that we call. They are looked up in libcuda at run time, so compiling
// needs nothing from CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace amp_plugin::cuda {

using Status = int;
using Address = uint64_t;  // an address in device memory
// status of a stream that is being captured; 2 means that the capture has failed
constexpr int kCaptured = 1;
using Handle = void*;  // a context, stream, graph, library, kernel or function of the driver

// Finds a function in libcuda. Raises RuntimeError if there is no driver, or if it lacks the function.
void* address_of_function(const char* name);

// The name of a function. It converts to a pointer to that function, whatever the function's type.
struct Symbol {
  const char* name;

  template <typename Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(address_of_function(name));
  }
};

// The names are those of the driver's ABI. Functions without the suffix _ptsz take 0 for the legacy default
// stream, as torch does.
struct Driver {
  Status (*cuLaunchKernel)(
      Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared_bytes, Handle stream, void** parameters,
      void** extra) = Symbol{"cuLaunchKernel"};
  Status (*cuDeviceGet)(int* device, int ordinal) = Symbol{"cuDeviceGet"};
  Status (*cuCtxGetDevice)(int* device) = Symbol{"cuCtxGetDevice"};
  Status (*cuCtxGetCurrent)(Handle* context) = Symbol{"cuCtxGetCurrent"};
  Status (*cuCtxSetCurrent)(Handle context) = Symbol{"cuCtxSetCurrent"};
  Status (*cuDevicePrimaryCtxRetain)(Handle* context, int device) = Symbol{"cuDevicePrimaryCtxRetain"};
  Status (*cuLibraryLoadData)(
      Handle* library, const void* code, void*, void*, unsigned, void*, void*,
      unsigned) = Symbol{"cuLibraryLoadData"};
  Status (*cuLibraryGetKernel)(Handle* kernel, Handle library, const char* name) = Symbol{
      "cuLibraryGetKernel"};
  Status (*cuKernelGetFunction)(Handle* function, Handle kernel) = Symbol{"cuKernelGetFunction"};
  Status (*cuMemAlloc)(Address* address, size_t bytes) = Symbol{"cuMemAlloc_v2"};
  Status (*cuMemcpyHtoDAsync)(Address target, const void* source, size_t bytes, Handle stream) = Symbol{
      "cuMemcpyHtoDAsync_v2"};
  Status (*cuStreamCreate)(Handle* stream, unsigned flags) = Symbol{"cuStreamCreate"};
  Status (*cuStreamSynchronize)(Handle stream) = Symbol{"cuStreamSynchronize"};
  Status (*cuStreamIsCapturing)(Handle stream, int* status) = Symbol{"cuStreamIsCapturing"};
  Status (*cuStreamGetCaptureInfo)(
      Handle stream, int* status, uint64_t* id, Handle* graph, const Handle** dependencies,
      size_t* count) = Symbol{"cuStreamGetCaptureInfo_v2"};
  Status (*cuThreadExchangeStreamCaptureMode)(int* mode) = Symbol{"cuThreadExchangeStreamCaptureMode"};
  Status (*cuUserObjectCreate)(
      Handle* object, void* data, void (*destroy)(void* data), unsigned references,
      unsigned flags) = Symbol{"cuUserObjectCreate"};
  Status (*cuUserObjectRelease)(Handle object, unsigned references) = Symbol{"cuUserObjectRelease"};
  Status (*cuGraphRetainUserObject)(Handle graph, Handle object, unsigned references, unsigned flags) =
      Symbol{"cuGraphRetainUserObject"};
  Status (*cuGetErrorName)(Status status, const char** name) = Symbol{"cuGetErrorName"};
  Status (*cuGetErrorString)(Status status, const char** text) = Symbol{"cuGetErrorString"};
};

// Returns the functions, which are looked up at the first call.
const Driver& driver();

// The name and description of a driver error.
std::string told(Status status);

// Raises RuntimeError "the CUDA driver cannot `what`: ..." if the status is an error.
void check(Status status, const char* what);

// During the lifetime of this object, the thread may allocate memory and load code although one of its
// streams is being captured. Neither of these becomes part of the captured graph.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_;
};

}  // namespace amp_plugin::cuda
