// The same text for AVX2: the compiler vectorises it (setup.py gives this file its own flags).
#include "cpu_core.h"

#ifdef __AVX2__
RoundRun msr_run_avx2 = round_run_any;
#else
RoundRun msr_run_avx2 = nullptr;
#endif
