// The kernel without any instruction set beyond the compiler's default target.
#include "cpu_core.h"

RoundRun msr_run_plain = round_run_any;
