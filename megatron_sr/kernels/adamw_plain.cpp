// Without any instruction set beyond the compiler's default target.
#include "adamw_core.h"

static const AdamWLevel kLevel = level(nullptr);
const AdamWLevel* const msr_adamw_plain = &kLevel;
