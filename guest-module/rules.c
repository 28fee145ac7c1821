// SPDX-License-Identifier: GPL-2.0-only
/*
 * The tables of the schema: whether they are sound, and which rules hold for a
 * call. They come from the backend, and are checked once.
 */
#include "schema.h"

static bool nvg_in_table(__le32 first, __le32 count, u32 total)
{
	u32 f = le32_to_cpu(first);
	u32 n = le32_to_cpu(count);

	return f <= total && n <= total - f;
}

/* A rule on its own; the rules for the block it gathers are another matter. */
static bool nvg_rule_sound(const struct nvg_rules *rules,
			   const struct nvg_schema_rule *rule)
{
	const u8 direction = NVG_RULE_IN | NVG_RULE_OUT;
	const u8 none = NVG_RULE_NEGATIVE_NONE | NVG_RULE_ZERO_NONE |
			NVG_RULE_FOREIGN_OK;

	if (!nvg_in_table(rule->first_sub, rule->nsubs, rules->nrules))
		return false;

	switch (rule->op) {
	case NVG_RULE_BUFFER:
		if (rule->flags & ~(direction | NVG_RULE_NULL_OK))
			return false;
		return le16_to_cpu(rule->count_off) == NVG_NO_OFFSET ||
		       rule->count_width == 1 || rule->count_width == 2 ||
		       rule->count_width == 4 || rule->count_width == 8;
	case NVG_RULE_FD:
		return !(rule->flags & ~none) && !rule->nsubs &&
		       (rule->fd_width == 4 || rule->fd_width == 8);
	case NVG_RULE_PAGES:
		return !rule->flags && !rule->nsubs && rule->count_width == 8;
	default:
		return false;
	}
}

/* Rules for an argument: theirs may have rules too, but those none. */
static bool nvg_rules_nest(const struct nvg_rules *rules, __le32 first,
			   __le32 count)
{
	const struct nvg_schema_rule *rule, *sub;
	u32 i, j;

	if (!nvg_in_table(first, count, rules->nrules))
		return false;

	rule = rules->rules + le32_to_cpu(first);
	for (i = 0; i < le32_to_cpu(count); i++, rule++) {
		sub = rules->rules + le32_to_cpu(rule->first_sub);
		for (j = 0; j < le32_to_cpu(rule->nsubs); j++, sub++)
			if (sub->nsubs || sub->op == NVG_RULE_PAGES)
				return false;
	}
	return true;
}

static int nvg_ioctl_order(const struct nvg_schema_ioctl *entry, u8 kind,
			   u32 nr, u32 size)
{
	if (entry->kind != kind)
		return entry->kind < kind ? -1 : 1;
	if (le32_to_cpu(entry->nr) != nr)
		return le32_to_cpu(entry->nr) < nr ? -1 : 1;
	if (le32_to_cpu(entry->size) != size)
		return le32_to_cpu(entry->size) < size ? -1 : 1;
	return 0;
}

static bool nvg_ioctl_sound(const struct nvg_rules *rules,
			    const struct nvg_schema_ioctl *entry)
{
	const struct nvg_schema_case *c;
	u32 i;

	if (entry->kind >= NVG_FILE_KINDS ||
	    entry->flags & ~(NVG_IOCTL_BY_NR | NVG_IOCTL_INDIRECT) ||
	    le32_to_cpu(entry->size) > NVG_MAX_ARG)
		return false;
	if (entry->flags & NVG_IOCTL_INDIRECT && le32_to_cpu(entry->size) != 16)
		return false;
	if (!nvg_in_table(entry->first_case, entry->ncases, rules->ncases) ||
	    !nvg_rules_nest(rules, entry->first_rule, entry->nrules))
		return false;

	c = rules->cases + le32_to_cpu(entry->first_case);
	for (i = 0; i < le32_to_cpu(entry->ncases); i++, c++) {
		if (i && le32_to_cpu(c[-1].key) >= le32_to_cpu(c->key))
			return false;
		if (!nvg_rules_nest(rules, c->first_rule, c->nrules))
			return false;
	}
	return true;
}

/**
 * nvg_rules_init() - check a schema and find its tables
 * @rules: filled if it is sound
 * @blob: the schema, 4-byte aligned; it must outlive @rules
 * @len: its length
 *
 * Return: 0, or -EPROTO.
 */
int nvg_rules_init(struct nvg_rules *rules, const void *blob, size_t len)
{
	const struct nvg_schema *head = blob;
	const struct nvg_schema_ioctl *entry;
	u64 need;
	u32 i;

	if (len < sizeof(*head) ||
	    le32_to_cpu(head->magic) != NVG_SCHEMA_MAGIC ||
	    le32_to_cpu(head->version) != NVG_VERSION ||
	    head->reserved[0] || head->reserved[1] || head->reserved[2])
		return -EPROTO;

	rules->nioctls = le32_to_cpu(head->nioctls);
	rules->ncases = le32_to_cpu(head->ncases);
	rules->nrules = le32_to_cpu(head->nrules);
	need = sizeof(*head) + (u64)rules->nioctls * sizeof(*rules->ioctls) +
	       (u64)rules->ncases * sizeof(*rules->cases) +
	       (u64)rules->nrules * sizeof(*rules->rules);
	if (need != len)
		return -EPROTO;

	rules->ioctls = (const void *)(head + 1);
	rules->cases = (const void *)(rules->ioctls + rules->nioctls);
	rules->rules = (const void *)(rules->cases + rules->ncases);

	for (i = 0; i < rules->nrules; i++)
		if (!nvg_rule_sound(rules, rules->rules + i))
			return -EPROTO;

	for (i = 0; i < rules->nioctls; i++) {
		entry = rules->ioctls + i;
		if (!nvg_ioctl_sound(rules, entry))
			return -EPROTO;
		if (i && nvg_ioctl_order(entry - 1, entry->kind,
					 le32_to_cpu(entry->nr),
					 le32_to_cpu(entry->size)) >= 0)
			return -EPROTO;
	}
	return 0;
}

/* The first entry that is not before (kind, nr, size), or the end. */
static u32 nvg_lower_bound(const struct nvg_rules *rules, u8 kind, u32 nr,
			   u32 size)
{
	u32 low = 0, high = rules->nioctls, mid;

	while (low < high) {
		mid = low + (high - low) / 2;
		if (nvg_ioctl_order(rules->ioctls + mid, kind, nr, size) < 0)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

static const struct nvg_schema_ioctl *nvg_find_by_nr(const struct nvg_rules *rules,
						     u8 kind, u32 nr, u32 size)
{
	u32 i = nvg_lower_bound(rules, kind, nr, size);
	const struct nvg_schema_ioctl *entry = rules->ioctls + i;

	if (i == rules->nioctls || !(entry->flags & NVG_IOCTL_BY_NR) ||
	    nvg_ioctl_order(entry, kind, nr, size))
		return NULL;
	return entry;
}

/*
 * The entry of a call: by the number's low 8 bits and its size, or by the whole
 * number, which then need not tell the size.
 */
const struct nvg_schema_ioctl *nvg_rules_find(const struct nvg_rules *rules,
					      u8 kind, u32 cmd, u32 size)
{
	const struct nvg_schema_ioctl *entry;
	u32 i;

	entry = nvg_find_by_nr(rules, kind, cmd & 0xff, size);
	if (!entry)
		entry = nvg_find_by_nr(rules, kind, cmd & 0xff, 0);
	if (entry)
		return entry;

	for (i = nvg_lower_bound(rules, kind, cmd, 0); i < rules->nioctls; i++) {
		entry = rules->ioctls + i;
		if (entry->kind != kind || le32_to_cpu(entry->nr) != cmd)
			break;
		if (!(entry->flags & NVG_IOCTL_BY_NR))
			return entry;
	}
	return NULL;
}

/* The rules that hold for an argument: those of its case, else the ioctl's. */
u32 nvg_rules_select(const struct nvg_rules *rules,
		     const struct nvg_schema_ioctl *entry, const u8 *arg,
		     u32 len, const struct nvg_schema_rule **first)
{
	u32 select = le16_to_cpu(entry->select);
	u32 low = 0, high = le32_to_cpu(entry->ncases), mid, key;
	const struct nvg_schema_case *c;

	*first = rules->rules + le32_to_cpu(entry->first_rule);
	if (select == NVG_NO_OFFSET || !nvg_in_block(select, 4, len))
		return le32_to_cpu(entry->nrules);

	key = get_unaligned_le32(arg + select);
	c = rules->cases + le32_to_cpu(entry->first_case);
	while (low < high) {
		mid = low + (high - low) / 2;
		if (le32_to_cpu(c[mid].key) < key)
			low = mid + 1;
		else
			high = mid;
	}
	if (low == le32_to_cpu(entry->ncases) || le32_to_cpu(c[low].key) != key)
		return le32_to_cpu(entry->nrules);

	*first = rules->rules + le32_to_cpu(c[low].first_rule);
	return le32_to_cpu(c[low].nrules);
}
