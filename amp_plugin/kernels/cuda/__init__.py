"""The CUDA kernels: sources, their compiler, their launcher and the ops built on them.

``*.cu`` and ``*.cuh`` are compiled on the user's machine by NVRTC (:mod:`.compile`), at the
first op that needs them. :mod:`.launcher` puts them on torch's streams, :mod:`.tensor_table`
tells them where the tensors are, :mod:`.operations` is what the dispatcher calls, and
:mod:`.register` decides between them and plain torch. Nothing here is imported, and CUDA is
not touched, before the first CUDA tensor arrives.
"""
