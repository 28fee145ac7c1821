// What RM does with registered memory, and with its own, asked natively: evidence for
// docs/arena.md.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
typedef uint32_t u32;
typedef uint64_t u64;
#define IOW(nr, sz) ((3u << 30) | ((sz) << 16) | ('F' << 8) | (nr))
#define W(b, o) (*(u32 *)((char *)(b) + (o)))
#define Q(b, o) (*(u64 *)((char *)(b) + (o)))
static int ctl, mf;
static u32 hc;
static char *base;
static u64 top;
static u32 next = 0x5000;
static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
static u32 client_on(int fd) {
	char a[48] = {0};
	W(a, 0xc) = 0x41;
	ioctl(fd, IOW(0x2b, 48), a);
	return W(a, 8);
}
static u32 alloc_of(int fd, u32 c, u32 parent, u32 h, u32 cls, void *p, u32 n) {
	char a[48] = {0};
	W(a, 0) = c;
	W(a, 4) = parent;
	W(a, 8) = h;
	W(a, 0xc) = cls;
	Q(a, 0x10) = (u64)p;
	W(a, 0x20) = n;
	int r = ioctl(fd, IOW(0x2b, 48), a);
	return r ? 0xe0000000 | errno : W(a, 0x28);
}
static u32 alloc(u32 parent, u32 h, u32 cls, void *p, u32 n) {
	return alloc_of(ctl, hc, parent, h, cls, p, n);
}
static u32 freeobj(u32 h) {
	char a[16] = {0};
	W(a, 0) = hc;
	W(a, 4) = 0xd0;
	W(a, 8) = h;
	ioctl(ctl, IOW(0x29, 16), a);
	return W(a, 12);
}
static u32 control(u32 obj, u32 cmd, void *p, u32 n) {
	char a[32] = {0};
	W(a, 0) = hc;
	W(a, 4) = obj;
	W(a, 8) = cmd;
	Q(a, 0x10) = (u64)p;
	W(a, 0x18) = n;
	int r = ioctl(ctl, IOW(0x2a, 32), a);
	return r ? 0xe0000000 | errno : W(a, 0x1c);
}
static u32 map_of(int on, u32 c, u32 dev, u32 h, u64 len, u32 *flags, int *out) {
	int fd = open("/dev/nvidiactl", O_RDWR);
	char a[56] = {0};
	W(a, 0) = c;
	W(a, 4) = dev;
	W(a, 8) = h;
	Q(a, 0x18) = len;
	W(a, 0x30) = fd;
	int r = ioctl(on, IOW(0x4e, 56), a);
	if (flags)
		*flags = W(a, 0x2c);
	if (out)
		*out = fd;
	else
		close(fd);
	return r ? 0xe0000000 | errno : W(a, 0x28);
}
static void device(int fd, u32 c, u32 dev, u32 sub) {
	char p[56] = {0};
	u32 s = 0;
	u32 x = alloc_of(fd, c, c, dev, 0x80, p, 56), y = alloc_of(fd, c, dev, sub, 0x2080, &s, 4);
	if (x || y)
		printf("device %x subdevice %x\n", x, y);
}
static void diff(const char *what, const char *a, const char *b, int n) {
	printf("%s", what);
	for (int i = 0; i < n; i += 4)
		if (W(a, i) != W(b, i))
			printf(" %02x:%x->%x", i, W(a, i), W(b, i));
	printf("\n");
}
// function 2
static u32 heap(u32 attr, u32 attr2, u32 flags, u32 type, u64 size, u64 align, int say) {
	char a[184] = {0}, b[184];
	u32 h = next++;
	W(a, 0) = hc;
	W(a, 4) = 0xd0;
	W(a, 8) = 2;
	W(a, 0x28) = hc;
	W(a, 0x2c) = h;
	W(a, 0x30) = type;
	W(a, 0x34) = flags | 0x4000;
	W(a, 0x38) = attr;
	W(a, 0x90) = attr2;
	Q(a, 0x58) = size;
	Q(a, 0x60) = align;
	memcpy(b, a, 184);
	int r = ioctl(ctl, IOW(0x4a, 184), b);
	if (say) {
		char s[128];
		snprintf(
		    s, 128,
		    "alloc-size attr=%x attr2=%x flags=%x type=%x size=%lx align=%lx: ret=%d st=%x",
		    attr, attr2, flags, type, size, align, r, W(b, 0x14));
		diff(s, a, b, 184);
	}
	return W(b, 0x14) ? 0 : h;
}
// function 27
static u32 reg(u32 attr, u32 attr2, u32 flags, u32 type, u64 size, u32 *st, int say) {
	char a[184] = {0}, b[184];
	u32 h = next++;
	u64 al = size >= (2u << 20) ? 2u << 20 : 65536;
	top = (top + al - 1) & ~(al - 1);
	W(a, 0) = hc;
	W(a, 4) = 0xd0;
	W(a, 8) = 27;
	W(a, 0x28) = h;
	W(a, 0x2c) = type;
	W(a, 0x30) = flags | 0x4000;
	W(a, 0x34) = attr;
	W(a, 0x38) = attr2;
	Q(a, 0x40) = (u64)(base + top);
	Q(a, 0x48) = size - 1;
	memcpy(b, a, 184);
	int r = ioctl(ctl, IOW(0x4a, 184), b);
	top += size;
	*st = W(b, 0x14);
	if (say) {
		char s[128];
		snprintf(s, 128,
			 "os-descriptor attr=%x attr2=%x flags=%x type=%x size=%lx: ret=%d st=%x",
			 attr, attr2, flags, type, size, r, *st);
		W(a, 0x40) = W(b, 0x40) = 0;
		W(a, 0x44) = W(b, 0x44) = 0;
		diff(s, a, b, 184);
	}
	return *st || r ? 0 : h;
}
static u32 dupe(int fd, u32 c, u32 parent, u32 h, u32 sc, u32 src) {
	char a[28] = {0};
	W(a, 0) = c;
	W(a, 4) = parent;
	W(a, 8) = h;
	W(a, 12) = sc;
	W(a, 16) = src;
	int r = ioctl(fd, IOW(0x34, 28), a);
	return r ? 0xe0000000 | errno : W(a, 0x18);
}
static void over(const char *what, u32 h, u64 size) {
	char p[64];
	memset(p, 0, 64);
	W(p, 4) = 0;
	W(p, 8) = h;
	Q(p, 0x10) = 0;
	Q(p, 0x18) = size - 1;
	u32 d = next++;
	u32 s = alloc(0xd0, d, 2, p, 32);
	printf("  context-dma over %s: st=%x\n", what, s);
	if (!s)
		freeobj(d);
	memset(p, 0, 64);
	W(p, 0) = h;
	W(p, 4) = h;
	u32 x = next++;
	s = alloc(0xd1, x, 0xda, p, 16);
	printf("  semaphore-surface over %s: st=%x\n", what, s);
	if (!s)
		freeobj(x);
	memset(p, 0, 64);
	W(p, 0) = h;
	u32 y = next++;
	s = alloc(0xd1, y, 0xda, p, 16);
	printf("  semaphore-surface (no max) over %s: st=%x\n", what, s);
	if (!s)
		freeobj(y);
	char e[24] = {0};
	int fd = open("/dev/nvidiactl", O_RDWR);
	W(e, 0) = 1;
	W(e, 4) = 0xd0;
	W(e, 8) = 0xd0;
	W(e, 0xc) = h;
	W(e, 0x10) = fd;
	s = control(hc, 0x3d05, e, 24);
	printf("  export of %s: st=%x\n", what, s);
	if (!s) {
		char i[20] = {0};
		u32 z = next++;
		W(i, 0) = fd;
		W(i, 4) = 1;
		W(i, 8) = 0xd0;
		W(i, 0xc) = 0xd0;
		W(i, 0x10) = z;
		s = control(hc, 0x3d06, i, 20);
		printf("  import of it: st=%x map st=%x\n", s,
		       s ? 0 : map_of(ctl, hc, 0xd1, z, size, 0, 0));
		if (!s)
			freeobj(z);
	}
	close(fd);
	u32 q = next++;
	s = dupe(ctl, hc, 0xd0, q, hc, h);
	printf("  duplicate of %s, same client: st=%x map st=%x\n", what, s,
	       s ? 0 : map_of(ctl, hc, 0xd1, q, size, 0, 0));
	if (!s)
		freeobj(q);
	int f2 = open("/dev/nvidiactl", O_RDWR);
	u32 c2 = client_on(f2);
	device(f2, c2, 0xe0, 0xe1);
	s = dupe(f2, c2, 0xe0, 0xe5, hc, h);
	printf("  duplicate, other client: st=%x map st=%x\n", s,
	       s ? 0 : map_of(f2, c2, 0xe1, 0xe5, size, 0, 0));
	fflush(stdout);
	pid_t k = fork();
	if (!k) {
		int f3 = open("/dev/nvidiactl", O_RDWR);
		u32 c3 = client_on(f3);
		device(f3, c3, 0xe0, 0xe1);
		u32 t = dupe(f3, c3, 0xe0, 0xe5, hc, h);
		printf("  duplicate, other process: st=%x map st=%x\n", t,
		       t ? 0 : map_of(f3, c3, 0xe1, 0xe5, size, 0, 0));
		fflush(stdout);
		_exit(0);
	}
	waitpid(k, 0, 0);
	close(f2);
	// GPU address: NV01_MEMORY_VIRTUAL over a new FERMI_VASPACE_A, MAP_MEMORY_DMA
	char v[64] = {0};
	u32 vs = next++, vm = next++;
	s = alloc(0xd0, vs, 0x90f1, v, 48);
	char m[32] = {0};
	Q(m, 0) = 0;
	Q(m, 8) = 0;
	W(m, 16) = vs;
	u32 s2 = alloc(0xd0, vm, 0x70, m, 24);
	char g[80] = {0};
	W(g, 0) = hc;
	W(g, 4) = 0xd0;
	W(g, 8) = vm;
	W(g, 12) = h;
	Q(g, 0x10) = 0;
	Q(g, 0x18) = size;
	W(g, 0x20) = 0;
	int r = ioctl(ctl, IOW(0x57, 64), g);
	printf("  GPU address of %s: vaspace %x virtual %x map-dma ret=%d st=%x at %lx\n", what, s,
	       s2, r, W(g, 0x38), Q(g, 0x30));
	freeobj(vm);
	freeobj(vs);
}
int main(void) {
	ctl = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	char ver[72] = {0};
	W(ver, 0) = '2';
	ioctl(ctl, IOW(0xd2, 72), ver);
	hc = client_on(ctl);
	int g = open("/dev/nvidia0", O_RDWR | O_CLOEXEC);
	int c = ctl;
	ioctl(g, IOW(0xc9, 4), &c);
	u32 ids[32] = {0};
	control(hc, 0x201, ids, 128);
	printf("driver %s client %x gpu %x\n", ver + 8, hc, ids[0]);
	device(ctl, hc, 0xd0, 0xd1);
	mf = memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (ftruncate(mf, 4ull << 30))
		return 1;
	printf("seals %d\n", fcntl(mf, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	base = mmap(0, 4ull << 30, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, mf, 0);
	printf("\n# RM's own: which words of the argument change\n");
	for (u32 coh = 0; coh < 6; coh++) {
		u32 h = heap(1u << 25 | coh << 29, 0, 0, 0, 65536, 0, 1);
		if (h)
			freeobj(h);
	}
	for (u32 ph = 1; ph < 4; ph++) {
		u32 h = heap(1u << 25 | ph << 27 | 1u << 29, 0, 0, 0, 65536, 0, 1);
		if (h)
			freeobj(h);
	}
	for (u64 size = 4096; size <= (64u << 20); size *= 8) {
		u32 h = heap(1u << 25 | 2u << 29, 0, 0, 0, size - 100, 0x1000, 1);
		if (h)
			freeobj(h);
	}
	for (u32 pg = 1; pg < 4; pg++) {
		u32 h = heap(1u << 25 | 1u << 29 | pg << 23, 0, 0, 0, 4u << 20, 0, 1);
		if (h)
			freeobj(h);
	}
	for (u32 a2 = 1; a2 < 16; a2++) {
		u32 h = heap(1u << 25 | 1u << 29, a2, 0, 0, 65536, 0, 1);
		if (h)
			freeobj(h);
	}
	for (u32 loc = 2; loc < 4; loc++) {
		u32 h = heap(loc << 25 | 1u << 29, 0, 0, 0, 65536, 0, 1);
		if (h)
			freeobj(h);
	}
	printf("\n# registered\n");
	u32 st;
	for (u32 coh = 0; coh < 6; coh++) {
		u32 h = reg(1u << 25 | 1u << 27 | coh << 29, 0, 0, 0, 65536, &st, 1);
		if (h)
			freeobj(h);
	}
	for (u32 ph = 0; ph < 4; ph++) {
		u32 h = reg(1u << 25 | ph << 27 | 5u << 29, 0, 0, 0, 65536, &st, 1);
		if (h)
			freeobj(h);
	}
	for (u32 pg = 1; pg < 4; pg++) {
		u32 h = reg(1u << 25 | 1u << 27 | 5u << 29 | pg << 23, 0, 0, 0, 4u << 20, &st, 1);
		if (h)
			freeobj(h);
	}
	for (u32 a2 = 1; a2 < 16; a2++) {
		u32 h = reg(1u << 25 | 1u << 27 | 5u << 29, a2, 0, 0, 65536, &st, 1);
		if (h)
			freeobj(h);
	}
	for (u64 size = 4096; size <= (256u << 20); size *= 8) {
		u32 h = reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, size, &st, 1);
		if (h)
			freeobj(h);
	}
	printf("\n# class 0x3e: which words of the parameters change\n");
	for (u32 coh = 0; coh < 3; coh++) {
		char a[128] = {0}, b[128];
		W(a, 0) = hc;
		W(a, 0x18) = 1u << 25 | coh << 29;
		Q(a, 0x40) = 100000;
		memcpy(b, a, 128);
		u32 h = next++;
		u32 s = alloc(0xd0, h, 0x3e, b, 128);
		char t[64];
		snprintf(t, 64, "coherency %u: st=%x", coh, s);
		diff(t, a, b, 128);
		u32 fl = 0;
		int fd;
		s = map_of(ctl, hc, 0xd1, h, 65536, &fl, &fd);
		printf("  map st=%x flags=%x\n", s, fl);
		close(fd);
		freeobj(h);
	}
	printf("\n# caching that RM answers for maps of function 2\n");
	for (u32 coh = 0; coh < 6; coh++) {
		u32 h = heap(1u << 25 | coh << 29, 0, 0, 0, 65536, 0, 0);
		u32 fl = 0;
		if (h) {
			u32 s = map_of(ctl, hc, 0xd1, h, 65536, &fl, 0);
			printf("coherency %u: st=%x flags=%x\n", coh, s, fl);
			freeobj(h);
		}
	}
	printf("\n# what is made over it\n");
	struct {
		const char *n;
		u32 h;
		u64 s;
	} k[6] = {
	    {"own 4K cached", heap(1u << 25 | 1u << 29, 0, 0, 0, 4096, 0, 0), 4096},
	    {"own 64K cached", heap(1u << 25 | 1u << 29, 0, 0, 0, 65536, 0, 0), 65536},
	    {"own 64K write-combined", heap(1u << 25 | 2u << 29, 0, 0, 0, 65536, 0, 0), 65536},
	    {"registered 4K", reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, 4096, &st, 0), 4096},
	    {"registered 64K", reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, 65536, &st, 0), 65536},
	    {"registered 2M", reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, 2u << 20, &st, 0),
	     2u << 20}};
	for (int i = 0; i < 6; i++) {
		printf("%s (%x), map st=%x\n", k[i].n, k[i].h,
		       map_of(ctl, hc, 0xd1, k[i].h, k[i].s, 0, 0));
		if (k[i].h)
			over(k[i].n, k[i].h, k[i].s);
	}
	printf("\n# bounds of a map of RM's own 64K: status\n");
	{
		u32 h = k[1].h;
		u64 t[][2] = {
		    {65536, 4096}, {0, 65537}, {4096, 65536}, {0, 0}, {~0ull - 4095, 4096}};
		for (int i = 0; i < 5; i++) {
			int fd = open("/dev/nvidiactl", O_RDWR);
			char a[56] = {0};
			W(a, 0) = hc;
			W(a, 4) = 0xd1;
			W(a, 8) = h;
			Q(a, 0x10) = t[i][0];
			Q(a, 0x18) = t[i][1];
			W(a, 0x30) = fd;
			int r = ioctl(ctl, IOW(0x4e, 56), a);
			printf("offset %lx length %lx: ret=%d st=%x\n", t[i][0], t[i][1], r,
			       W(a, 0x28));
			close(fd);
		}
	}
	printf("\n# free while a duplicate lives, then the pages\n");
	{
		u32 h = reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, 65536, &st, 0);
		u64 at = top - 65536;
		memset(base + at, 7, 65536);
		u32 q = next++;
		u32 s = dupe(ctl, hc, 0xd0, q, hc, h);
		u32 f = freeobj(h);
		printf("dup st=%x free original st=%x contents %x ", s, f, base[at]);
		f = freeobj(q);
		printf("free duplicate st=%x ", f);
		int r = fallocate(mf, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, 65536);
		printf("punch %d now %x\n", r, base[at]);
	}
	{
		u32 h = reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, 65536, &st, 0);
		u64 at = top - 65536;
		memset(base + at, 9, 65536);
		int r = fallocate(mf, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, 65536);
		printf("punch while registered %d now %x ", r, base[at]);
		u32 f = freeobj(h);
		printf("free st=%x then %x\n", f, base[at]);
	}
	printf("\n# time in us, of 20: RM's own allocate+free, registered+free+punch\n");
	for (u64 size = 8192; size <= (64u << 20); size *= 8) {
		double t = now();
		for (int i = 0; i < 20; i++) {
			u32 h = heap(1u << 25 | 2u << 29, 0, 0, 0, size, 0, 0);
			freeobj(h);
		}
		double a = (now() - t) / 20;
		t = now();
		for (int i = 0; i < 20; i++) {
			u64 keep = top;
			u32 h = reg(1u << 25 | 1u << 27 | 5u << 29, 0, 0, 0, size, &st, 0);
			freeobj(h);
			fallocate(mf, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, top - size, size);
			top = keep;
		}
		double b = (now() - t) / 20;
		printf("%8lu KiB: %9.1f %9.1f\n", size >> 10, a, b);
	}
	return 0;
}
