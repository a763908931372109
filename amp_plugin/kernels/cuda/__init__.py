"""The CUDA kernels: sources, their compiler, and who serves a device.

``*.cu`` and ``*.cuh`` are compiled on the user's machine by NVRTC (:mod:`.compile`), at the
first op that needs them. :mod:`.register` decides between them and plain torch. They are
launched by C++ (``csrc/cuda_*.cpp``), which calls Python to compile and for nothing else.
Nothing here touches CUDA before the first CUDA tensor arrives.
"""
