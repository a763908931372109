// A CUDA driver that only takes notes: what cuda-core and cuda-bindings need of libcuda.so.1 to load code
// and to launch it. Each call is a line on standard output. FAKE_LOAD_ERROR is what loading code returns.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

extern "C" {

static thread_local uintptr_t current_context = 0;
static const int unbuffered = std::setvbuf(stdout, nullptr, _IONBF, 0);  // in order with what Python prints
constexpr uintptr_t kContexts = 0xC0;  // + device

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) { return *context = kContexts + device, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxGetCurrent(uintptr_t* context) { return *context = current_context, 0; }
int cuCtxSetCurrent(uintptr_t context) {
  current_context = context;
  std::printf("context %d\n", int(context - kContexts));
  return 0;
}

int cuLibraryLoadData(void** library, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  std::printf("library %s\n", std::memcmp(code, "\177ELF", 4) == 0 ? "of machine code" : "of something else");
  *library = &current_context;
  const char* error = std::getenv("FAKE_LOAD_ERROR");
  return error == nullptr ? 0 : std::atoi(error);
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(char** kernel, void*, const char* name) { return *kernel = strdup(name), 0; }
int cuKernelGetLibrary(void** library, void*) { return *library = &current_context, 0; }
int cuKernelGetFunction(char** function, char* kernel) { return *function = kernel, 0; }

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::printf("capture mode %d\n", *mode);
  return *mode = 0, 0;
}

int cuLaunchKernel(
    const char* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y,
    unsigned z, unsigned shared, uintptr_t stream, void** arguments, void** extra) {
  uint64_t first = 0;
  float second = 0;
  std::memcpy(&first, arguments[0], sizeof(first));
  std::memcpy(&second, arguments[1], sizeof(second));
  std::printf(
      "launch %s <<<%u %u %u, %u %u %u, %u, %d>>> on %d: %llu %g%s\n", function, grid_x, grid_y, grid_z, x, y,
      z, shared, int(stream), int(current_context - kContexts), static_cast<unsigned long long>(first),
      second, extra == nullptr ? "" : " and more");
  return 0;
}

int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_OF_A_TEST", 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of a test", 0; }

static int not_here() {
  std::printf("a call this driver does not know\n");
  return 999;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  *function = dlsym(self, symbol);
  if (*function == nullptr) *function = dlsym(self, (std::string(symbol) + "_v2").c_str());
  if (*function == nullptr) *function = reinterpret_cast<void*>(&not_here);
  if (status != nullptr) *status = 0;
  return 0;
}
int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

}  // extern "C"
