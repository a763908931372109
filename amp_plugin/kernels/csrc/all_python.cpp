// One translation unit: the functions that Python calls directly, without the dispatcher.
#include "python/gradient_ledger.cpp"
#include "python/region_module.cpp"
#include "python/step_tensors.cpp"
