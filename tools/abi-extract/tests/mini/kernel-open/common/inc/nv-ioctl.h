#include "nvtypes.h"
typedef struct { NvU32 cmd; NvU32 size; NvP64 ptr NV_ALIGN_BYTES(8); } nv_ioctl_xfer_t;
typedef struct { int ctl_fd; } nv_ioctl_register_fd_t;
typedef struct { NvBool valid; struct { NvU32 domain; NvU8 bus; } pci_info; NvU32 gpu_id; } nv_ioctl_card_info_t;
