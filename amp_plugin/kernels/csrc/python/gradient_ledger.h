// GradientLedger: the gradients of a list of parameters, looked up without Python code.
#pragma once

#include <Python.h>

// Adds the type to the extension's module; false with a Python error set if it cannot.
bool add_gradient_ledger(PyObject* module);
