"""The CUDA kernels: sources, which NVRTC compiles on the user's machine, and who serves a device."""
