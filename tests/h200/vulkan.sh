# Sourced: Vulkan and EGL natively, with the loaders of the folder $1 where the machine has none.
nvidia=/usr/local/nvidia
if ! ldconfig -p | grep -q libvulkan.so.1; then
  for package in "$1"/*.deb; do dpkg -x "$package" /; done
  ldconfig
fi
if [ -d $nvidia ]; then
  export LD_LIBRARY_PATH=$nvidia/lib64
  export VK_DRIVER_FILES=$nvidia/share/vulkan/icd.d/nvidia_icd.json
  export __EGL_VENDOR_LIBRARY_FILENAMES=$nvidia/share/glvnd/egl_vendor.d/10_nvidia.json
fi
