// The CUDA driver of the host device, under the name libcuda.so.1. It has the functions that the package
// calls. The "machine code" of a kernel is the path of a shared object compiled for the CPU; see
// tests/host_device/emulation.
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
  const size_t* sizes;  // sizes of the parameters, then a 0
  uint64_t (*barriers)();  // the barriers that its blocks have met since the last call
  bool is_function = false;  // true for the CUfunction of one context, false for the CUkernel of all
};

std::atomic<int64_t> user_objects{0};  // how many exist

struct UserObject {
  void* data;
  void (*destroy)(void* data);
  ~UserObject() {
    destroy(data);
    --user_objects;
  }
};

// The arguments of a launch, which copies them as the driver does.
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
std::vector<std::string> calls;  // calls that launch kernels or change contexts
std::atomic<int64_t> failures{0};  // calls that returned an error
std::atomic<int64_t> streams_made{0};
thread_local int capture_mode = 0;

int note(const char* call) {
  std::lock_guard lock(mutex);
  calls.emplace_back(call);
  return 0;
}

int failed(int status) { return ++failures, status; }

// Lets a test block a call while other threads go on: a launch that waits for room in the driver's queue, or
// an allocation that waits for the device.
class Hold {
 public:
  void next(bool on) { state_ = on ? kNext : kNone; }
  bool holds() const { return state_ == kHeld; }
  void wait() {
    State next = kNext;
    if (!state_.compare_exchange_strong(next, kHeld)) return;
    while (state_ == kHeld) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  enum State { kNone, kNext, kHeld };
  std::atomic<State> state_{kNone};
};
Hold launch, allocation;

// Return true if HOST_DEVICE_FAULT asks for this fault. Tests of the host device plant faults and check that
// they are found.
bool planted(const char* fault) {
  const char* asked = std::getenv("HOST_DEVICE_FAULT");
  return asked != nullptr && std::strcmp(asked, fault) == 0;
}
thread_local uintptr_t context = 0;
constexpr uintptr_t kContexts = 0xC0;  // plus the index of the device
constexpr int kDeviceNumbers = 7;  // the driver's number of a device minus its index

int capture_status() {
  if (!capturing()) return 0;
  return planted("the capture has failed") ? 2 : 1;
}

void run(const Kernel& kernel, unsigned blocks, unsigned threads, Arguments& arguments) {
  static std::mutex one_at_a_time;  // an emulated kernel keeps its threads in global variables
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
  library.def("hold_next_launch(bool on) -> ()", [](bool on) { launch.next(on); });
  library.def("launch_is_held() -> bool", [] { return launch.holds(); });
  library.def("hold_next_allocation(bool on) -> ()", [](bool on) { allocation.next(on); });
  library.def("allocation_is_held() -> bool", [] { return allocation.holds(); });
  library.def("failures() -> int", [] { return failures.load(); });
  library.def("streams_made() -> int", [] { return streams_made.load(); });
  library.def("user_objects() -> int", [] { return user_objects.load(); });
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

int capture_mode_of_this_thread() { return capture_mode; }

}  // namespace host_device

using namespace host_device;

extern "C" {

int cuDeviceGet(int* device, int index) {
  return *device = index + kDeviceNumbers, index < 0 || index >= kDevices ? failed(101) : 0;
}
int cuCtxGetDevice(int* device) {
  return *device = int(context - kContexts) + kDeviceNumbers, context == 0 ? failed(201) : 0;
}
int cuCtxGetCurrent(uintptr_t* current) { return *current = context, 0; }
int cuCtxSetCurrent(uintptr_t current) { return context = current, note("cuCtxSetCurrent"); }
int cuCtxPushCurrent_v2(uintptr_t) { return note("cuCtxPushCurrent"); }
int cuCtxPopCurrent_v2(uintptr_t* popped) { return *popped = context, note("cuCtxPopCurrent"); }
int cuDevicePrimaryCtxRetain(uintptr_t* made, int device) {
  const int index = device - kDeviceNumbers;
  if (index < 0 || index >= kDevices) return failed(101);
  return *made = kContexts + index, note("cuDevicePrimaryCtxRetain");
}

int cuLibraryLoadData(void** library, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  *library = dlopen(code, RTLD_NOW | RTLD_LOCAL);
  return *library == nullptr ? 200 : 0;
}
int cuLibraryGetKernel(Kernel** kernel, void* library, const char* name) {
  if (planted("step is missing") && std::strcmp(name, "step") == 0) return 500;
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
  allocation.wait();
  if (card_is_full) return failed(2);
  driver_bytes += int64_t(bytes);
  void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(memory, 0xAB, bytes);
  return *address = reinterpret_cast<uint64_t>(memory), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(target), source, bytes), 0;
}
int cuStreamCreate(void** stream, unsigned) {
  return ++streams_made, *stream = reinterpret_cast<void*>(999), 0;
}
int cuStreamSynchronize(void*) { return 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = capture_status(), 0; }
int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t* id, void** graph, const void***, size_t*) {
  return *status = capture_status(), *id = 1, *graph = nullptr, 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), 0; }
int cuUserObjectCreate(void** object, void* data, void (*destroy)(void*), unsigned, unsigned) {
  if (planted("no user objects")) return failed(2);
  return ++user_objects, *object = new UserObject{data, destroy}, 0;
}
int cuUserObjectRelease(void* object, unsigned) { return delete static_cast<UserObject*>(object), 0; }
int cuGraphRetainUserObject(void*, void* object, unsigned, unsigned) {
  if (planted("graphs take no user object")) return failed(400);
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
  launch.wait();
  auto arguments = std::make_shared<Arguments>(kernel->sizes, given);
  auto work = [=] { run(*kernel, blocks, threads, *arguments); };
  const auto device = c10::DeviceIndex(context - kContexts);
  capturing() ? record(work) : submit({device, reinterpret_cast<int64_t>(stream)}, work);
  return 0;
}

}  // extern "C"
