// AVX-512 (F, BW, DQ, VL); setup.py gives this file its own flags.
#include "cpu_core.h"

#ifdef __AVX512F__
RoundRun msr_run_avx512 = round_run_any;
#else
RoundRun msr_run_avx512 = nullptr;
#endif
