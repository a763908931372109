// The CUDA driver of the device, under its name: what the package asks of libcuda.so.1. Machine code is the
// path of a kernel that was compiled for the CPU; see tests/cuda_emulation.
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "host_device.h"

namespace host_device {
namespace {

struct Kernel {
  std::string name;
  const char* (*run)(unsigned blocks, unsigned threads, void** arguments, int descending);
  const size_t* sizes;  // of the parameters, with 0 behind the last
  uint64_t (*barriers)();  // that its blocks have met since it was asked last
  bool is_function = false;  // the CUfunction of one context, not the CUkernel of all
};

struct UserObject {
  void* data;
  void (*destroy)(void* data);
  ~UserObject() { destroy(data); }
};

// A launch keeps its arguments, as the driver does.
struct Arguments {
  struct alignas(16) Sixteen {
    char bytes[16];
  };
  std::vector<std::vector<Sixteen>> values;

  Arguments(const size_t* sizes, void** given) {
    for (size_t i = 0; sizes[i] > 0; ++i) {
      values.emplace_back((sizes[i] + 15) / 16);
      std::memcpy(values.back().data(), given[i], sizes[i]);
    }
  }
};

std::atomic<bool> descending{false};
std::atomic<bool> launches_do_nothing{false};
std::mutex mutex;
std::vector<std::string> launched;
std::atomic<uint64_t> barriers{0};
std::atomic<int64_t> driver_bytes{0};
std::vector<std::string> calls;  // that launch, or change contexts
enum Hold : int64_t { kNone, kNext, kHeld };
std::atomic<int64_t> hold{kNone};

int note(const char* call) {
  std::lock_guard lock(mutex);
  calls.emplace_back(call);
  return 0;
}

// A launch may wait for room in the driver's queue, while other threads go on.
void wait_while_held() {
  int64_t next = kNext;
  if (!hold.compare_exchange_strong(next, kHeld)) return;
  while (hold == kHeld) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// HOST_DEVICE_FAULT plants what a test of the device is to find.
bool planted(const char* fault) {
  const char* asked = std::getenv("HOST_DEVICE_FAULT");
  return asked != nullptr && std::strcmp(asked, fault) == 0;
}
thread_local uintptr_t context = 0;
constexpr uintptr_t kContexts = 0xC0;  // + device

void run(const Kernel& kernel, unsigned blocks, unsigned threads, Arguments& arguments) {
  static std::mutex one_at_a_time;  // an emulated kernel keeps its threads in globals
  std::lock_guard lock(one_at_a_time);
  std::vector<void*> pointers;
  for (auto& value : arguments.values) pointers.push_back(value.data());
  const char* error = kernel.run(blocks, threads, pointers.data(), descending);
  barriers += kernel.barriers();
  TORCH_CHECK(error == nullptr, kernel.name, ": ", error);
}

TORCH_LIBRARY_FRAGMENT(host_device, library) {
  library.def("descending(bool on) -> ()", [](bool on) { descending = on; });
  library.def("launches_do_nothing(bool on) -> ()", [](bool on) { launches_do_nothing = on; });
  library.def("driver_bytes() -> int", [] { return driver_bytes.load(); });
  library.def("barriers() -> int", [] { return static_cast<int64_t>(barriers.exchange(0)); });
  library.def("hold_next_launch(bool on) -> ()", [](bool on) { hold = on ? kNext : kNone; });
  library.def("launch_is_held() -> bool", [] { return hold == kHeld; });
  library.def("context_calls() -> str[]", [] {
    std::lock_guard lock(mutex);
    return std::exchange(calls, {});
  });
  library.def("launched() -> str[]", [] {
    std::lock_guard lock(mutex);
    return std::exchange(launched, {});
  });
}

}  // namespace
}  // namespace host_device

using namespace host_device;

extern "C" {

int cuCtxGetDevice(int* device) { return *device = int(context - kContexts), context == 0 ? 201 : 0; }
int cuCtxGetCurrent(uintptr_t* current) { return *current = context, 0; }
int cuCtxSetCurrent(uintptr_t current) { return context = current, note("cuCtxSetCurrent"); }
int cuCtxPushCurrent_v2(uintptr_t) { return note("cuCtxPushCurrent"); }
int cuCtxPopCurrent_v2(uintptr_t* popped) { return *popped = context, note("cuCtxPopCurrent"); }
int cuDevicePrimaryCtxRetain(uintptr_t* made, int device) {
  return *made = kContexts + device, note("cuDevicePrimaryCtxRetain");
}

int cuLibraryLoadData(void** library, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  *library = dlopen(code, RTLD_NOW | RTLD_LOCAL);
  return *library == nullptr ? 200 : 0;
}
int cuLibraryGetKernel(Kernel** kernel, void* library, const char* name) {
  if (planted("adam is missing") && std::strcmp(name, "adam") == 0) return 500;
  auto sizes = reinterpret_cast<const size_t* (*)()>(dlsym(library, "parameter_sizes"));
  *kernel = new Kernel{
      name, reinterpret_cast<decltype(Kernel::run)>(dlsym(library, "emulate")), sizes(),
      reinterpret_cast<uint64_t (*)()>(dlsym(library, "barriers_met"))};
  return 0;
}
int cuKernelGetFunction(Kernel** function, const Kernel* kernel) {
  *function = new Kernel(*kernel);
  return (*function)->is_function = true, 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (card_is_full) return 2;
  driver_bytes += int64_t(bytes);
  void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(memory, 0xAB, bytes);
  return *address = reinterpret_cast<uint64_t>(memory), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(target), source, bytes), 0;
}
int cuStreamCreate(void** stream, unsigned) { return *stream = reinterpret_cast<void*>(999), 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = capturing(), 0; }
int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t* id, void** graph, const void***, size_t*) {
  return *status = capturing(), *id = 1, *graph = nullptr, 0;
}
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuUserObjectCreate(void** object, void* data, void (*destroy)(void*), unsigned, unsigned) {
  return *object = new UserObject{data, destroy}, 0;
}
int cuGraphRetainUserObject(void*, void* object, unsigned, unsigned) {
  if (planted("graphs leak")) return 0;
  if (planted("tables are given back early")) return delete static_cast<UserObject*>(object), 0;
  return keep_with_graph(std::shared_ptr<void>(static_cast<UserObject*>(object))), 0;
}
int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_OF_THE_HOST_DEVICE", 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the host device", 0; }

int cuLaunchKernel(
    const Kernel* kernel, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
    void* stream, void** given, void**) {
  if (launches_do_nothing) return 0;
  note(kernel->is_function ? "cuLaunchKernel of a CUfunction" : "cuLaunchKernel of a CUkernel");
  {
    std::lock_guard lock(host_device::mutex);
    launched.push_back(kernel->name);
  }
  wait_while_held();
  auto arguments = std::make_shared<Arguments>(kernel->sizes, given);
  auto work = [=] { run(*kernel, blocks, threads, *arguments); };
  const auto device = c10::DeviceIndex(context - kContexts);
  capturing() ? record(work) : submit({device, reinterpret_cast<int64_t>(stream)}, work);
  return 0;
}

}  // extern "C"
