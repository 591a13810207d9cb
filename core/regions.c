/* The regions of a device, by key. A peer names keys, so a search is bounded: half of the slots are empty at least. */
#include "rdmacm_core.h"

#include <stdlib.h>

enum { LEAST_CAPACITY = 16 };

/* The slot of a key, or the empty one where it would be. */
static size_t find(const struct rdmacm_region *slots, size_t capacity, uint32_t key) {
    size_t at = rdmacm_home(key, capacity);
    while (slots[at].key && slots[at].key != key)
        at = (at + 1) & (capacity - 1);
    return at;
}

bool rdmacm_regions_add(struct rdmacm_regions *regions, const struct rdmacm_region *region) {
    if (!region->key)
        return false;
    if (2 * (regions->count + 1) > regions->capacity) {
        size_t capacity = regions->capacity ? 2 * regions->capacity : LEAST_CAPACITY;
        struct rdmacm_region *slots = calloc(capacity, sizeof *slots);
        if (!slots)
            return false;
        for (size_t i = 0; i < regions->capacity; i++)
            if (regions->slots[i].key)
                slots[find(slots, capacity, regions->slots[i].key)] = regions->slots[i];
        free(regions->slots);
        regions->slots = slots;
        regions->capacity = capacity;
    }
    size_t at = find(regions->slots, regions->capacity, region->key);
    if (regions->slots[at].key)
        return false;
    regions->slots[at] = *region;
    regions->count++;
    return true;
}

bool rdmacm_regions_remove(struct rdmacm_regions *regions, uint32_t key, struct rdmacm_region *removed) {
    if (!regions->capacity || !key)
        return false;
    struct rdmacm_region *slots = regions->slots;
    size_t mask = regions->capacity - 1, hole = find(slots, regions->capacity, key);
    if (!slots[hole].key)
        return false;
    *removed = slots[hole];
    /* Close the gap: a later key moves there unless its home is between the gap and its slot. */
    for (size_t at = (hole + 1) & mask; slots[at].key; at = (at + 1) & mask) {
        if (((at - rdmacm_home(slots[at].key, regions->capacity)) & mask) >= ((at - hole) & mask)) {
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole].key = 0;
    regions->count--;
    return true;
}

void rdmacm_regions_free(struct rdmacm_regions *regions) {
    free(regions->slots);
    regions->slots = NULL;
    regions->capacity = regions->count = 0;
}

uint8_t *rdmacm_regions_locate(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint64_t address,
                               uint64_t length, uint32_t access, void **pin) {
    if (!regions || !regions->capacity || !key)
        return NULL;
    const struct rdmacm_region *region = &regions->slots[find(regions->slots, regions->capacity, key)];
    if (region->key != key || region->pd != pd || access & ~region->access || address < region->address)
        return NULL;
    uint64_t offset = address - region->address;
    if (offset > region->length || length > region->length - offset)
        return NULL;
    *pin = region->pin;
    return region->memory + offset;
}

uint8_t *rdmacm_regions_find(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint64_t address,
                             uint64_t length, uint32_t access) {
    void *pin;
    return rdmacm_regions_locate(regions, pd, key, address, length, access, &pin);
}
