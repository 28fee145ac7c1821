/* SPDX-License-Identifier: GPL-2.0-only */
/* What a test's program says of its cases. */
#ifndef NVG_CHECK_H
#define NVG_CHECK_H

#include <stdio.h>

static int failures;

#define CHECK(cond) do {						\
	if (!(cond)) {							\
		printf("%s:%d: %s\n", __func__, __LINE__, #cond);	\
		failures++;						\
	}								\
} while (0)

/* The program's exit status. */
static inline int verdict(const char *subject)
{
	if (failures)
		printf("%s: %d failed\n", subject, failures);
	else
		printf("%s: all passed\n", subject);
	return !!failures;
}

#endif
