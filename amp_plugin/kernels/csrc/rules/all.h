// All rules. Include csrc/step_arithmetic.h or cuda/arithmetic.cuh first.
#pragma once

#include "adadelta.h"
#include "adagrad.h"
#include "adam.h"
#include "adam_kin.h"
#include "lion.h"
#include "muon.h"
#include "rmsprop.h"
#include "schedule_free.h"
#include "sgd.h"

// Calls RULE(name, type) for each rule, with its name in the op and its struct.
#define AMP_PLUGIN_RULES(RULE)                           \
  RULE(adam, Adam<false>)                                \
  RULE(adam_amsgrad, Adam<true>)                         \
  RULE(sgd, Sgd)                                         \
  RULE(sgd_momentum, SgdMomentum)                        \
  RULE(lion, Lion)                                       \
  RULE(rmsprop, Rmsprop<false>)                          \
  RULE(rmsprop_momentum, RmspropMomentum<false>)         \
  RULE(rmsprop_centered, Rmsprop<true>)                  \
  RULE(rmsprop_centered_momentum, RmspropMomentum<true>) \
  RULE(adagrad, Adagrad)                                 \
  RULE(adadelta, Adadelta)                               \
  RULE(nadam, Nadam)                                     \
  RULE(radam, Radam)                                     \
  RULE(adamax, Adamax)                                   \
  RULE(schedule_free, ScheduleFree)                      \
  RULE(muon_momentum, MuonMomentum)                      \
  RULE(muon_update, MuonUpdate)
