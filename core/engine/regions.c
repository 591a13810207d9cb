/* The regions of a device, by key. */
#include "rdmacm_core.h"

#include <stdlib.h>

bool rdmacm_regions_add(struct rdmacm_regions *regions, uint32_t key, const struct rdmacm_region *region) {
    struct rdmacm_region *copy = key ? malloc(sizeof *copy) : NULL;
    if (!copy || !rdmacm_table_add(&regions->table, key, copy)) {
        free(copy);
        return false;
    }
    *copy = *region;
    return true;
}

void *rdmacm_regions_remove(struct rdmacm_regions *regions, uint32_t key) {
    struct rdmacm_region *region = rdmacm_table_find(&regions->table, key);
    if (!region || region->windows)
        return NULL;
    void *pin = region->pin;
    rdmacm_table_remove(&regions->table, key);
    free(region);
    return pin;
}

size_t rdmacm_regions_bound(const struct rdmacm_regions *regions, uint32_t key) {
    const struct rdmacm_region *region = rdmacm_table_find(&regions->table, key);
    return region ? region->windows : 0;
}

uint8_t *rdmacm_regions_find(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint64_t address,
                             uint64_t length, uint32_t access, void **pin) {
    const struct rdmacm_region *region = regions ? rdmacm_table_find(&regions->table, key) : NULL;
    if (!region || region->pd != pd || access & ~region->access || address < region->address)
        return NULL;
    uint64_t offset = address - region->address;
    if (offset > region->length || length > region->length - offset)
        return NULL;
    if (pin)
        *pin = region->pin;
    return region->memory + offset;
}

bool rdmacm_regions_have(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, const uint8_t *data,
                         uint64_t length, uint32_t access) {
    const struct rdmacm_region *region = regions ? rdmacm_table_find(&regions->table, key) : NULL;
    if (!region || region->pd != pd || access & ~region->access || (uintptr_t)data < (uintptr_t)region->memory)
        return false;
    uint64_t offset = (uintptr_t)data - (uintptr_t)region->memory;
    return offset <= region->length && length <= region->length - offset;
}

bool rdmacm_regions_permit(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint32_t access) {
    const struct rdmacm_region *region = regions ? rdmacm_table_find(&regions->table, key) : NULL;
    return region && region->pd == pd && !(access & ~region->access);
}
