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

struct Driver {
  Status (*cuLaunchKernel)(
      Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared_bytes, Handle stream, void** parameters, void** extra);
  Status (*cuDeviceGet)(int* device, int ordinal);
  Status (*cuCtxGetDevice)(int* device);
  Status (*cuCtxGetCurrent)(Handle* context);
  Status (*cuCtxSetCurrent)(Handle context);
  Status (*cuDevicePrimaryCtxRetain)(Handle* context, int device);
  Status (*cuLibraryLoadData)(
      Handle* library, const void* code, void*, void*, unsigned, void*, void*, unsigned);
  Status (*cuLibraryGetKernel)(Handle* kernel, Handle library, const char* name);
  Status (*cuKernelGetFunction)(Handle* function, Handle kernel);
  Status (*cuMemAlloc)(Address* address, size_t bytes);
  Status (*cuMemcpyHtoDAsync)(Address target, const void* source, size_t bytes, Handle stream);
  Status (*cuStreamCreate)(Handle* stream, unsigned flags);
  Status (*cuStreamSynchronize)(Handle stream);
  Status (*cuStreamIsCapturing)(Handle stream, int* status);
  Status (*cuStreamGetCaptureInfo)(
      Handle stream, int* status, uint64_t* id, Handle* graph, const Handle** dependencies, size_t* count);
  Status (*cuThreadExchangeStreamCaptureMode)(int* mode);
  Status (*cuUserObjectCreate)(
      Handle* object, void* data, void (*destroy)(void* data), unsigned references, unsigned flags);
  Status (*cuUserObjectRelease)(Handle object, unsigned references);
  Status (*cuGraphRetainUserObject)(Handle graph, Handle object, unsigned references, unsigned flags);
  Status (*cuGetErrorName)(Status status, const char** name);
  Status (*cuGetErrorString)(Status status, const char** text);
};

// Returns the loaded functions. Raises RuntimeError if there is no driver, or if it lacks one of the
// functions.
const Driver& driver();

// The name and description of a driver error.
std::string told(Status status);

// Raises RuntimeError "`what`: ..." if the status is an error.
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
