/* Every construct that a layout can be made of, written for abi-extract's tests. */
typedef unsigned char NvU8;
typedef unsigned int NvU32;
typedef unsigned long long NvU64;
typedef NvU64 NvP64;

typedef struct { NvU32 x; NvU8 y; } Inner;
typedef Inner Renamed;

typedef struct {
	NvU8 first;
	NvU64 aligned __attribute__((aligned(8)));
	Inner nested;
	union { NvU32 word; NvU8 bytes[4]; } choice;
	union { NvU32 anonymous_word; struct { NvU8 low; NvU8 high; }; };
	NvU32 matrix[2][3];
	Renamed many[4];
	NvU32 flag : 1, number : 5;
	NvP64 p64 __attribute__((aligned(8)));
	void *pointer;
	const volatile NvU32 qualified;
} Everything;
