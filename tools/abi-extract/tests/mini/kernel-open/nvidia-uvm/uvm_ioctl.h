#include "nvtypes.h"
#define UVM_TOY 25
typedef struct { NvU8 uuid[16]; int rmCtrlFd; NvU32 rmStatus; } UVM_TOY_PARAMS;
