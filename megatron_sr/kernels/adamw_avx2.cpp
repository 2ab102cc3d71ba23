// AVX2 and FMA; setup.py gives this file its own flags.
#include "adamw_core.h"

#if defined(__AVX2__) && defined(__FMA__)
static const AdamWLevel kLevel = level(nullptr);
const AdamWLevel* const msr_adamw_avx2 = &kLevel;
#else
const AdamWLevel* const msr_adamw_avx2 = nullptr;
#endif
