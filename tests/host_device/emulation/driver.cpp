// A CUDA driver that only records calls: those that the package makes to libcuda.so.1 to load code. It prints
// one line per call to standard output. Loading code returns the status in FAKE_LOAD_ERROR.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {

static thread_local uintptr_t current_context = 0;
// keeps the order relative to Python's output
static const int unbuffered = std::setvbuf(stdout, nullptr, _IONBF, 0);
constexpr uintptr_t kContexts = 0xC0;  // plus the device number

int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) { return *context = kContexts + device, 0; }
int cuCtxGetDevice(int* device) {
  if (current_context == 0) std::printf("an error: no context is current\n");
  return *device = int(current_context - kContexts), current_context == 0 ? 201 : 0;
}
int cuCtxGetCurrent(uintptr_t* context) { return *context = current_context, 0; }
int cuCtxSetCurrent(uintptr_t context) {
  current_context = context;
  std::printf("context %d\n", context == 0 ? -1 : int(context - kContexts));
  return 0;
}

int cuLibraryLoadData(void** library, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  std::printf("library %s\n", std::memcmp(code, "\177ELF", 4) == 0 ? "of machine code" : "of something else");
  *library = &current_context;
  const char* error = std::getenv("FAKE_LOAD_ERROR");
  return error == nullptr ? 0 : std::atoi(error);
}
int cuLibraryGetKernel(char** kernel, void*, const char* name) { return *kernel = strdup(name), 0; }
int cuKernelGetFunction(char** function, char* kernel) {
  std::printf("function %s\n", kernel);
  return *function = kernel, 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int now = 0;
  std::printf("capture mode %d\n", *mode);
  const int before = now;
  now = *mode;
  return *mode = before, 0;
}

int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_OF_A_TEST", 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of a test", 0; }

// Launches are not emulated here; they are tested on the host device.
#ifndef WITHOUT_GRAPHS
int cuGraphRetainUserObject() { return 999; }
#endif
int cuLaunchKernel() { return 999; }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  std::printf("memory %zu\n", bytes);
  return *address = 4096, 0;
}
int cuMemcpyHtoDAsync_v2() { return 999; }
int cuStreamCreate() { return 999; }
int cuStreamSynchronize() { return 999; }
int cuStreamIsCapturing() { return 999; }
int cuStreamGetCaptureInfo_v2() { return 999; }
int cuUserObjectCreate() { return 999; }
int cuUserObjectRelease() { return 999; }

}  // extern "C"
