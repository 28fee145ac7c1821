/* SPDX-License-Identifier: BSD-3-Clause OR GPL-2.0 */
/*
 * The nvguest wire: what the guest module and the backend say to each other.
 *
 * Little-endian, naturally aligned, never packed. Every reserved field is sent
 * zero and checked zero, so that it can become a field later. The Rust half is
 * backend/src/wire.rs; a test compiles this header and compares every size and
 * offset.
 */
#ifndef VIRTIO_NVGUEST_H
#define VIRTIO_NVGUEST_H

#ifdef __KERNEL__
#include <linux/types.h>
#else
#include <stdint.h>
#ifndef NVG_WIRE_TYPES
#define NVG_WIRE_TYPES
typedef uint8_t __u8;
typedef uint16_t __le16;
typedef uint32_t __le32;
typedef uint64_t __le64;
#endif
#endif

/* Unregistered: a name in stock QEMU's table that no Linux driver claims. */
#define NVG_VIRTIO_ID		38
#define NVG_MAGIC		0x5447564eU	/* "NVGT" */
#define NVG_VERSION		1

#define NVG_QUEUE_CONTROL	0
#define NVG_QUEUE_EVENTS	1
#define NVG_QUEUE_SLOT(k)	(2 + 2 * (k))	/* control; events follow */
#define NVG_MAX_SLOTS		31
#define NVG_NO_SLOT		0xffffffffU

/* Virtio shared-memory region of the window. */
#define NVG_SHM_WINDOW		1

/* Device configuration: 64 bytes, read once at probe. */
struct nvg_config {
	__le32 magic;
	__le16 version;
	__le16 slots;		/* worker slots the backend would serve */
	__le64 window_size;	/* bytes; 0: nothing can be mapped */
	__le32 reserved[12];
};

enum nvg_type {
	NVG_HELLO	= 1,
	NVG_NODES	= 2,
	NVG_SCHEMA	= 3,
	NVG_OPEN	= 4,
	NVG_CLOSE	= 5,
	NVG_IOCTL	= 6,
	NVG_MAP		= 7,
	NVG_UNMAP	= 8,
	NVG_ARM		= 9,
	NVG_CLOCK	= 10,
};

/* Who asks: the thread group that made the call. */
struct nvg_caller {
	__le32 tgid;		/* in the guest's initial pid namespace */
	__le32 euid;		/* in its initial user namespace */
	__le64 start_ns;	/* the group leader's start time */
};

/* Every request begins with this; `len` counts the whole request. */
struct nvg_req {
	__le32 type;
	__le32 file;		/* the file it speaks of, or 0 */
	__le32 len;
	__le32 reserved;
	struct nvg_caller caller;
};

/*
 * Every reply begins with this. `status` is 0 or a positive Linux errno; `len`
 * counts the whole reply. A failed IOCTL may still carry its argument: the
 * driver copies it back too.
 */
struct nvg_resp {
	__le32 status;
	__le32 len;
};

#define NVG_HELLO_FRESH		(1U << 0)	/* close what my predecessor held */

struct nvg_hello {
	struct nvg_req req;
	__le32 version;
	__le32 flags;
};

#define NVG_CAP_UTILITY		(1U << 0)
#define NVG_CAP_GRAPHICS	(1U << 1)
#define NVG_CAP_VIDEO		(1U << 2)
#define NVG_CAP_COMPUTE		(1U << 3)
#define NVG_CAP_DISPLAY		(1U << 4)

struct nvg_hello_resp {
	struct nvg_resp resp;
	__le32 version;
	__le32 caps;
	__u8 driver[32];	/* the host's release, NUL-padded */
	__u8 profile[32];	/* the profile that serves it */
	__le64 window_size;
	__le32 max_request;	/* bytes of one request, header included */
	__le32 max_response;
	__le32 max_segments;
	__le32 max_files;
	__le32 max_placements;
	__le32 nodes_len;
	__le32 schema_len;
	__le32 epoch;
};

/* NODES and SCHEMA: a chunk of the blob; the reply is a header and the bytes. */
struct nvg_read {
	struct nvg_req req;
	__le32 offset;
	__le32 size;
};

struct nvg_open {
	struct nvg_req req;
	__le32 node;		/* position of its record among all of NODES */
	__le32 flags;		/* O_ACCMODE and O_NONBLOCK of the guest's open */
};

struct nvg_open_resp {
	struct nvg_resp resp;
	__le32 file;		/* 31 bits: worker << 16 | number, never 0 */
	__le32 slot;		/* of the process's worker, or NVG_NO_SLOT */
};

/* Bits 30:16 of a file name its worker; an event with number 0 means all. */
#define NVG_FILE_WORKER(file)	((file) >> 16)
#define NVG_FILE_NUMBER(file)	((file) & 0xffffU)

/*
 * Memory of the caller's own that a call registers: a segment of its own kind.
 * It lists runs of guest-physical pages and comes back as its head alone. The
 * guest unpins them when a reply does not bring it back held, or when
 * RELEASED comes for a registration that is, which may be before the reply.
 */
struct nvg_pages {
	__le32 registration;	/* 1 to MAX_REGISTRATIONS, none that is in use */
	__le32 error;		/* no runs follow: the errno that pinning gave */
	__le32 held;		/* in a reply: 1 if the host has them now */
	__le32 reserved;
};

/* Whole pages; the first run begins with the page at the caller's address. */
struct nvg_run {
	__le64 address;
	__le64 length;
};

#define NVG_MAX_REGISTRATIONS	4096	/* of a guest, at a time */

/*
 * IOCTL. After the header, in this order, each padded to 8 bytes:
 *   __le32 seg_len[nsegs]      one for each buffer the rules reach, depth first
 *   struct nvg_fd fds[nfds]    one for each descriptor the rules reach
 *   the argument               arg_len bytes as the caller passed them
 *   each IN segment's bytes; of pages, struct nvg_pages and its runs
 * A null pointer makes no segment. The reply, after its header: the argument,
 * then each OUT segment's bytes, each padded to 8.
 */
struct nvg_ioctl {
	struct nvg_req req;
	__le32 cmd;
	__le32 arg_len;
	__le16 nsegs;
	__le16 nfds;
	__le32 reserved;
};

struct nvg_fd {
	__le16 segment;		/* 0: the argument; n: the nth segment */
	__le16 offset;		/* within it */
	__le32 file;		/* or 0: the caller passed "none" */
};

struct nvg_ioctl_resp {
	struct nvg_resp resp;
	__le32 ret;		/* what the driver's ioctl returned, if status 0 */
	__le32 arg_len;
};

#define NVG_PROT_READ		(1U << 0)
#define NVG_PROT_WRITE		(1U << 1)

struct nvg_map {
	struct nvg_req req;
	__le64 offset;
	__le64 length;
	__le32 prot;
	__le32 reserved;
};

enum nvg_cache {
	NVG_CACHE_WB	= 0,
	NVG_CACHE_WC	= 1,
	NVG_CACHE_UC	= 2,
};

#define NVG_MAP_READ_ONLY	(1U << 0)

struct nvg_map_resp {
	struct nvg_resp resp;
	__le64 window_offset;
	__le64 length;		/* whole pages placed */
	__le32 placement;
	__u8 cache;
	__u8 flags;
	__le16 reserved;
};

/* One for each MAP that succeeded, once no page table reaches it any more. */
struct nvg_unmap {
	struct nvg_req req;
	__le32 placement;
	__le32 reserved;
};

struct nvg_clock_resp {
	struct nvg_resp resp;
	__le64 monotonic_ns;
	__le64 realtime_ns;
	__le64 raw_ns;
};

/* CLOSE, ARM and CLOCK are a bare nvg_req; CLOSE, UNMAP, ARM answer nvg_resp. */

enum nvg_event_kind {
	NVG_EVENT_READY	= 1,	/* mask: poll bits that turned up */
	NVG_EVENT_LOST	= 2,	/* file, or all of a worker: fail with ENODEV */
	NVG_EVENT_RELEASED = 3,	/* worker << 16 | registration: unpin it */
};

struct nvg_event {
	__le32 kind;
	__le32 file;
	__le32 mask;
	__le32 more;		/* READY: this many more without another ARM */
};

/*
 * NODES: what to create, one record after another. A record is this header,
 * then the name and the data, each padded to 8 bytes.
 */
enum nvg_node_kind {
	NVG_NODE_CDEV	= 1,	/* name below /dev; data: the major's name */
	NVG_NODE_PROC	= 2,	/* name below /proc; data: its content */
	NVG_NODE_MODULE	= 3,	/* a /sys/module gate; data: its version */
	NVG_NODE_PCI	= 4,	/* dddd:bb:dd.f; data: configuration space */
};

struct nvg_node {
	__le16 kind;
	__le16 mode;
	__u8 file_kind;		/* CDEV: enum nvg_file_kind */
	__u8 reserved[3];
	__le32 major;		/* CDEV: fixed, or 0 for one the kernel picks */
	__le32 minor;
	__le32 name_len;
	__le32 data_len;
};

enum nvg_file_kind {
	NVG_FILE_CTL	= 0,	/* nvidiactl */
	NVG_FILE_GPU	= 1,	/* nvidia0.. */
	NVG_FILE_UVM	= 2,	/* nvidia-uvm */
	NVG_FILE_MODESET = 3,	/* nvidia-modeset */
	NVG_FILE_CAP	= 4,	/* nvidia-caps: opened and passed, no ioctl */
	NVG_FILE_KINDS	= 5,
};

/*
 * SCHEMA: how to gather what an ioctl's argument reaches. A header, then the
 * three tables in this order. All of it comes from the backend; the guest
 * checks that every index lies in its table and nests no deeper than two.
 */
#define NVG_SCHEMA_MAGIC	0x4347564eU	/* "NVGC" */
#define NVG_NO_OFFSET		0xffffU

struct nvg_schema {
	__le32 magic;
	__le32 version;
	__le32 nioctls;
	__le32 ncases;
	__le32 nrules;
	__le32 reserved[3];
};

/* Match the number's low 8 bits alone, as nvidia.ko does; else all of it. */
#define NVG_IOCTL_BY_NR		(1U << 0)
/* The argument is {u32 nr, u32 size, u64 pointer}: follow it, then look again. */
#define NVG_IOCTL_INDIRECT	(1U << 1)

/* Sorted by (kind, nr, size). Rules of the case that `select` names, else own. */
struct nvg_schema_ioctl {
	__u8 kind;		/* enum nvg_file_kind */
	__u8 flags;
	__le16 select;		/* offset of a u32 in the argument, or NO_OFFSET */
	__le32 nr;
	__le32 size;		/* of the argument; 0: as the number says, any */
	__le32 first_case;
	__le32 ncases;
	__le32 first_rule;
	__le32 nrules;
};

/* Sorted by key within one ioctl. */
struct nvg_schema_case {
	__le32 key;
	__le32 first_rule;
	__le32 nrules;
};

enum nvg_rule_op {
	NVG_RULE_BUFFER	= 1,
	NVG_RULE_FD	= 2,
	NVG_RULE_PAGES	= 3,
};

#define NVG_RULE_IN		(1U << 0)	/* BUFFER: read from the caller */
#define NVG_RULE_OUT		(1U << 1)	/* BUFFER: written back */
#define NVG_RULE_NULL_OK	(1U << 2)	/* BUFFER: null makes no segment; else EFAULT */
#define NVG_RULE_NEGATIVE_NONE	(1U << 3)	/* FD: any negative value is "none" */
#define NVG_RULE_ZERO_NONE	(1U << 4)	/* FD: 0 is "none" */
#define NVG_RULE_FOREIGN_OK	(1U << 5)	/* FD: one that is not ours is "none" too */

/*
 * Length of a BUFFER = field at count_off (count_width bytes, unsigned) * elem
 * + add; over max the call fails with EINVAL. Without count_off: add alone.
 * PAGES registers field at count_off + add bytes of the caller's memory, max
 * pages of it at most. What is wrong with them is told in the segment.
 */
struct nvg_schema_rule {
	__u8 op;
	__u8 flags;
	__le16 offset;		/* of the pointer (8 bytes) or descriptor */
	__le16 count_off;	/* in the same block as the pointer */
	__u8 count_width;	/* 1, 2, 4 or 8 */
	__u8 fd_width;		/* FD: 4 or 8 */
	__le32 elem;
	__le32 add;
	__le32 max;
	__le32 first_sub;	/* BUFFER: rules for the block it gathers */
	__le32 nsubs;
	__le32 fd_kinds;	/* FD: bit per enum nvg_file_kind */
};

#endif
