// All rules. Include csrc/step_arithmetic.h or cuda/arithmetic.cuh before.
#pragma once

#include "adam.h"
#include "lion.h"
#include "sgd.h"

// Calls RULE(name, type) for each: the name that the op takes, and the struct.
#define AMP_PLUGIN_RULES(RULE)   \
  RULE(adam, Adam<false>)        \
  RULE(adam_amsgrad, Adam<true>) \
  RULE(sgd, Sgd<false>)          \
  RULE(sgd_momentum, Sgd<true>)  \
  RULE(lion, Lion)
