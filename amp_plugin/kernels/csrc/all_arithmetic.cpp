// What computes on elements.
#include "scaling_cpu.cpp"
#include "scaling_ranks.cpp"
#include "scaling_update.cpp"
#include "step_adam.cpp"
#include "step_rows.cpp"
#include "step_sgd.cpp"
#include "weight_storage.cpp"
