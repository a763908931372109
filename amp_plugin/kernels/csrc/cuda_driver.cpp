#include "cuda_driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace amp_plugin::cuda {
namespace {

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

}  // namespace

void* address_of_function(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  TORCH_CHECK(
      library != nullptr, "the CUDA driver cannot be loaded (", dlerror(), "); check it with nvidia-smi");
  void* address = dlsym(library, name);
  TORCH_CHECK(address != nullptr, "the CUDA driver has no ", name, "; update it to CUDA 12 or newer");
  return address;
}

const Driver& driver() {
  static const Driver found;
  return found;
}

std::string told(Status status) {
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(status, &name);
  driver().cuGetErrorString(status, &text);
  return c10::str(
      name == nullptr ? "an unknown error" : name, " ", status, ", ", text == nullptr ? "" : text);
}

void check(Status status, const char* what) {
  TORCH_CHECK(status == 0, "the CUDA driver cannot ", what, ": ", told(status));
}

OutsideCapture::OutsideCapture() : mode_(kRelaxed) {
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "change the capture mode of the thread");
}

OutsideCapture::~OutsideCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace amp_plugin::cuda
