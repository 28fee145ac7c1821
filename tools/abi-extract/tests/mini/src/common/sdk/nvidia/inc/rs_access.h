typedef struct { NvU32 limbs[1]; } RS_ACCESS_MASK;
