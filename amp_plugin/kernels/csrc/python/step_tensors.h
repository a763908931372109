// Adds the class StepTensors to the Python extension.
#pragma once

#include <Python.h>

// False with a Python error set if that fails.
bool add_step_tensors(PyObject* module);
