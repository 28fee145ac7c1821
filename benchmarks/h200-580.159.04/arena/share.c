// System memory exported by one process and imported by another, natively and as guests: the
// importer maps it, reads what the exporter wrote, and answers; also when the exporter has freed
// its object before. Prints "right" twice.
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
#include <unistd.h>
typedef uint32_t u32;
typedef uint64_t u64;
#define IOW(nr, sz) ((3u << 30) | ((sz) << 16) | ('F' << 8) | (nr))
#define W(b, o) (*(u32 *)((char *)(b) + (o)))
#define Q(b, o) (*(u64 *)((char *)(b) + (o)))
enum { SIZE = 65536 };
static int ctl;
static u32 hc;
static u32 alloc(u32 c, u32 parent, u32 h, u32 cls, void *p, u32 n) {
	char a[48] = {0};
	W(a, 0) = c;
	W(a, 4) = parent;
	W(a, 8) = h;
	W(a, 0xc) = cls;
	Q(a, 0x10) = (u64)p;
	W(a, 0x20) = n;
	int r = ioctl(ctl, IOW(0x2b, 48), a);
	if (r || W(a, 0x28)) {
		printf("alloc %x: %d %x\n", cls, r ? errno : 0, W(a, 0x28));
		exit(1);
	}
	return W(a, 8);
}
static u32 control(u32 cmd, void *p, u32 n) {
	char a[32] = {0};
	W(a, 0) = hc;
	W(a, 4) = hc;
	W(a, 8) = cmd;
	Q(a, 0x10) = (u64)p;
	W(a, 0x18) = n;
	int r = ioctl(ctl, IOW(0x2a, 32), a);
	return r ? 0xe0000000 | errno : W(a, 0x1c);
}
static void setup(void) {
	ctl = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	hc = alloc(0, 0, 0, 0x41, 0, 0);
	int g = open("/dev/nvidia0", O_RDWR | O_CLOEXEC), c = ctl;
	ioctl(g, IOW(0xc9, 4), &c);
	char d[56] = {0};
	u32 s = 0;
	alloc(hc, hc, 0xd0, 0x80, d, 56);
	alloc(hc, 0xd0, 0xd1, 0x2080, &s, 4);
}
static u32 *map(u32 h) {
	int fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	char a[56] = {0};
	W(a, 0) = hc;
	W(a, 4) = 0xd1;
	W(a, 8) = h;
	Q(a, 0x18) = SIZE;
	W(a, 0x30) = fd;
	int r = ioctl(ctl, IOW(0x4e, 56), a);
	if (r || W(a, 0x28)) {
		printf("map: %d %x\n", r ? errno : 0, W(a, 0x28));
		exit(1);
	}
	u32 *p = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	close(fd);
	return p;
}
int main(int argc, char **argv) {
	setup();
	if (argc > 1) {
		char i[20] = {0};
		W(i, 0) = atoi(argv[1]);
		W(i, 4) = 1;
		W(i, 8) = 0xd0;
		W(i, 0xc) = 0xd0;
		W(i, 0x10) = 0x77;
		u32 s = control(0x3d06, i, 20);
		if (s) {
			printf("import: %x\n", s);
			return 1;
		}
		u32 *p = map(0x77);
		int wrong = 0;
		for (u32 k = 1; k < SIZE / 4; k++)
			wrong += p[k] != (k ^ 0xa5a5a5a5);
		p[0] = 0xd0e;
		if (wrong)
			printf("%d words wrong\n", wrong);
		return wrong != 0;
	}
	for (int freed = 0; freed < 2; freed++) {
		char m[128] = {0};
		W(m, 0) = hc;
		W(m, 0x18) = 1u << 25 | 1u << 29;
		Q(m, 0x40) = SIZE;
		alloc(hc, 0xd0, 0x55, 0x3e, m, 128);
		u32 *p = map(0x55);
		for (u32 k = 0; k < SIZE / 4; k++)
			p[k] = k ^ 0xa5a5a5a5;
		int e = open("/dev/nvidiactl", O_RDWR);
		char x[24] = {0};
		W(x, 0) = 1;
		W(x, 4) = 0xd0;
		W(x, 8) = 0xd0;
		W(x, 0xc) = 0x55;
		W(x, 0x10) = e;
		u32 s = control(0x3d05, x, 24);
		if (s) {
			printf("export: %x\n", s);
			return 1;
		}
		char f[16] = {0};
		W(f, 0) = hc;
		W(f, 4) = 0xd0;
		W(f, 8) = 0x55;
		if (freed)
			ioctl(ctl, IOW(0x29, 16), f);
		fflush(stdout);
		pid_t k = fork();
		if (!k) {
			char t[16];
			sprintf(t, "%d", e);
			execl("/proc/self/exe", "share", t, (char *)0);
			_exit(9);
		}
		int st = 0;
		waitpid(k, &st, 0);
		printf("%s: %s (importer %x, answer %x)\n", freed ? "freed before" : "alive",
		       st == 0 && p[0] == 0xd0e ? "right" : "WRONG", st, p[0]);
		if (!freed)
			ioctl(ctl, IOW(0x29, 16), f);
		munmap(p, SIZE);
		close(e);
	}
	return 0;
}
