#include <drm/drm.h>
struct toy_drm_params { uint32_t handle; uint64_t offset; };
#define DRM_IOCTL_NVIDIA_TOY DRM_IOWR((DRM_COMMAND_BASE + 0x0a), struct toy_drm_params)
#define DRM_IOCTL_NVIDIA_SUPPORTED DRM_IO(DRM_COMMAND_BASE + 0x04)
