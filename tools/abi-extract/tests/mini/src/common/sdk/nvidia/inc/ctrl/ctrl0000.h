#include "nvtypes.h"
#define NV0000_CTRL_CMD_TOY_GET (0x0201U)
typedef struct { NvU32 a; NvU64 b NV_ALIGN_BYTES(8); NvU8 c[3]; } NV0000_CTRL_TOY_GET_PARAMS;
#define NV0000_CTRL_CMD_TOY_LIST (0x0202U)
typedef struct { NvU32 count; NV_DECLARE_ALIGNED(NvP64 list, 8); } NV0000_CTRL_TOY_LIST_PARAMS;
typedef struct { NvU32 index; NvU32 data; } NV0000_CTRL_TOY_ITEM;
typedef struct { NvU32 listSize; NV_DECLARE_ALIGNED(NvP64 list, 8); } NV0000_CTRL_TOY_OLD_PARAMS;
#define NV0000_CTRL_CMD_TOY_OLD (0x0203U)
#define NV0000_CTRL_CMD_TOY_OLD_V2 (0x0204U)
typedef struct { NvU32 listSize; NV0000_CTRL_TOY_ITEM list[4]; } NV0000_CTRL_TOY_OLD_V2_PARAMS;
#define NV0000_CTRL_CMD_TOY_STRAY (0x0205U)
typedef struct { NvU32 n; struct { NvP64 pWhere NV_ALIGN_BYTES(8); } each[2]; } NV0000_CTRL_TOY_STRAY_PARAMS;
#define NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD (0x3d05U)
typedef struct { NvU32 type; NvU32 rest[3]; int fd; NvU32 flags; } NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS;
