// One translation unit: the sources that compute on the elements of tensors.
#include "pieces.cpp"
#include "scaling_cpu.cpp"
#include "step.cpp"
#include "step_rows.cpp"
#include "step_rules.cpp"
#include "weight_storage.cpp"
