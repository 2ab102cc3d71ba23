// AVX-512 (F, BW, DQ, VL); setup.py gives this file its own flags.
#include "adamw_core.h"

#ifdef __AVX512BW__
const AdamWLevel* const msr_adamw_avx512 = &kLevel;
#else
const AdamWLevel* const msr_adamw_avx512 = nullptr;
#endif
