// A Vulkan program as small as can be: a device, memory of every host-visible kind, a fill and a
// copy by the card, what the host reads of it. Prints times; ends with 0 if every word is right.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <vulkan/vulkan.h>
#define OK(x)                                                                                      \
	do {                                                                                       \
		VkResult r_ = (x);                                                                 \
		if (r_) {                                                                          \
			printf("%s: %d\n", #x, r_);                                                \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static int cmp(const void *a, const void *b) {
	double x = *(double *)a, y = *(double *)b;
	return x < y ? -1 : x > y;
}
static unsigned maps(void) {
	FILE *f = fopen("/proc/self/maps", "r");
	char l[512];
	unsigned n = 0;
	while (f && fgets(l, 512, f))
		n += strstr(l, "/dev/nvidia") || strstr(l, "nvguest");
	if (f)
		fclose(f);
	return n;
}
int main(int argc, char **argv) {
	double t0 = now();
	VkInstance in;
	VkApplicationInfo ai = {
	    VK_STRUCTURE_TYPE_APPLICATION_INFO, 0, "vkfill", 1, 0, 0, VK_API_VERSION_1_1};
	VkInstanceCreateInfo ii = {VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &ai};
	OK(vkCreateInstance(&ii, 0, &in));
	double t1 = now();
	VkPhysicalDevice pd;
	unsigned n = 1;
	VkResult e = vkEnumeratePhysicalDevices(in, &n, &pd);
	if (e < 0 || !n) {
		printf("enumerate: %d, %u devices\n", e, n);
		return 1;
	}
	VkPhysicalDeviceProperties pp;
	vkGetPhysicalDeviceProperties(pd, &pp);
	float pr = 1;
	VkDeviceQueueCreateInfo qi = {VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1,
				      .pQueuePriorities = &pr};
	VkDeviceCreateInfo di = {VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .queueCreateInfoCount = 1,
				 .pQueueCreateInfos = &qi};
	VkDevice d;
	OK(vkCreateDevice(pd, &di, 0, &d));
	double t2 = now();
	printf("%s: instance %.1f ms, device %.1f ms, maps %u\n", pp.deviceName, t1 - t0, t2 - t1,
	       maps());
	VkQueue q;
	vkGetDeviceQueue(d, 0, 0, &q);
	VkPhysicalDeviceMemoryProperties mp;
	vkGetPhysicalDeviceMemoryProperties(pd, &mp);
	VkCommandPoolCreateInfo ci = {VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
				      .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT};
	VkCommandPool cp;
	OK(vkCreateCommandPool(d, &ci, 0, &cp));
	VkCommandBufferAllocateInfo ca = {VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
					  .commandPool = cp, .commandBufferCount = 1};
	VkCommandBuffer cb;
	OK(vkAllocateCommandBuffers(d, &ca, &cb));
	VkFenceCreateInfo fi = {VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
	VkFence f;
	OK(vkCreateFence(d, &fi, 0, &f));
	int bad = 0;
	VkDeviceSize size = 4u << 20;
	for (unsigned m = 0; m < mp.memoryTypeCount; m++) {
		unsigned fl = mp.memoryTypes[m].propertyFlags;
		if (!(fl & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT))
			continue;
		VkBuffer b[2];
		VkDeviceMemory dm[2];
		unsigned *p[2];
		int skip = 0;
		for (int i = 0; i < 2; i++) {
			VkBufferCreateInfo bi = {VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = size,
						 .usage = VK_BUFFER_USAGE_TRANSFER_DST_BIT |
							  VK_BUFFER_USAGE_TRANSFER_SRC_BIT};
			OK(vkCreateBuffer(d, &bi, 0, &b[i]));
			VkMemoryRequirements mr;
			vkGetBufferMemoryRequirements(d, b[i], &mr);
			if (!(mr.memoryTypeBits >> m & 1)) {
				skip = 1;
				break;
			}
			VkMemoryAllocateInfo mi = {VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
						   .allocationSize = mr.size, .memoryTypeIndex = m};
			OK(vkAllocateMemory(d, &mi, 0, &dm[i]));
			OK(vkBindBufferMemory(d, b[i], dm[i], 0));
			OK(vkMapMemory(d, dm[i], 0, VK_WHOLE_SIZE, 0, (void **)&p[i]));
		}
		if (skip) {
			printf("type %u: no buffers\n", m);
			continue;
		}
		double t[200];
		unsigned wrong = 0;
		for (int k = 0; k < 200; k++) {
			unsigned v = 0xc0de0000u + m * 256 + k;
			for (unsigned w = 0; w < 1024; w++)
				p[1][w] = v ^ w;
			VkCommandBufferBeginInfo be = {VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
			OK(vkBeginCommandBuffer(cb, &be));
			vkCmdFillBuffer(cb, b[0], 4096, size - 4096, v);
			VkBufferCopy co = {0, 0, 4096};
			vkCmdCopyBuffer(cb, b[1], b[0], 1, &co);
			VkMemoryBarrier mb = {VK_STRUCTURE_TYPE_MEMORY_BARRIER, 0,
					      VK_ACCESS_TRANSFER_WRITE_BIT,
					      VK_ACCESS_HOST_READ_BIT};
			vkCmdPipelineBarrier(cb, VK_PIPELINE_STAGE_TRANSFER_BIT,
					     VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &mb, 0, 0, 0, 0);
			OK(vkEndCommandBuffer(cb));
			VkSubmitInfo su = {VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1,
					   .pCommandBuffers = &cb};
			double s = now();
			OK(vkQueueSubmit(q, 1, &su, f));
			OK(vkWaitForFences(d, 1, &f, 1, 5000000000ull));
			t[k] = now() - s;
			OK(vkResetFences(d, 1, &f));
			if (!(fl & VK_MEMORY_PROPERTY_HOST_COHERENT_BIT)) {
				VkMappedMemoryRange r = {VK_STRUCTURE_TYPE_MAPPED_MEMORY_RANGE, 0,
							 dm[0], 0, VK_WHOLE_SIZE};
				vkInvalidateMappedMemoryRanges(d, 1, &r);
			}
			for (unsigned w = 0; w < 1024; w++)
				wrong += p[0][w] != (v ^ w);
			for (unsigned w = 1024; w < size / 4; w += 511)
				wrong += p[0][w] != v;
		}
		qsort(t, 200, sizeof *t, cmp);
		printf("type %u flags %x: 200 fills and copies, %u words wrong, submit-and-wait "
		       "median %.1f us, maps %u\n",
		       m, fl, wrong, t[100] * 1e3, maps());
		bad += wrong != 0;
		for (int i = 0; i < 2; i++) {
			vkDestroyBuffer(d, b[i], 0);
			vkFreeMemory(d, dm[i], 0);
		}
	}
	double t3 = now();
	vkDestroyFence(d, f, 0);
	vkDestroyCommandPool(d, cp, 0);
	vkDestroyDevice(d, 0);
	vkDestroyInstance(in, 0);
	printf("%s; whole %.1f ms, end %.1f ms\n", bad ? "WRONG" : "right", now() - t0, now() - t3);
	return bad;
}
