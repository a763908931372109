// What is called of the CUDA driver. Found in libcuda at run time: nothing of CUDA is needed to compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace amp_plugin::cuda {

using Status = int;
using Address = uint64_t;  // of device memory
constexpr int kCaptured = 1;  // of a stream that is being captured; 2: the capture has failed
using Handle = void*;  // of a context, a stream, a graph, a library, a kernel or a function

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

// Raises RuntimeError if there is no driver, or one that lacks a function.
const Driver& driver();

// The name and the text of an error of the driver.
std::string told(Status status);

// Raises RuntimeError "`what`: ..." unless the driver was content.
void check(Status status, const char* what);

// While it lives, this thread may allocate and load code although a stream is being captured: nothing of
// that goes to the stream.
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
