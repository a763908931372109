// What Python calls without the dispatcher.
#include "python/gradient_ledger.cpp"
#include "python/region_module.cpp"
#include "python/step_tensors.cpp"
