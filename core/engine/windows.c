/* Memory windows. docs/core.md and rdmacm.soft.device.memory_window have their states and rules. */
#include "rdmacm_core.h"

/* The window that is bound with a key, in a protection domain. */
static struct rdmacm_window *find_bound(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key) {
    struct rdmacm_window *window = regions ? rdmacm_table_find(&regions->windows, key >> 8) : NULL;
    return window && window->region && window->key == key && window->pd == pd ? window : NULL;
}

static void unbind(struct rdmacm_window *window) {
    if (window->region)
        window->region->windows--;
    window->region = NULL;
    window->number = 0;
}

bool rdmacm_window_allocate(struct rdmacm_regions *regions, struct rdmacm_window *window, uint32_t key) {
    if (!rdmacm_table_add(&regions->windows, key >> 8, window))
        return false;
    window->regions = regions;
    window->key = key;
    return true;
}

void rdmacm_window_deallocate(struct rdmacm_window *window) {
    unbind(window);
    if (window->regions)
        rdmacm_table_remove(&window->regions->windows, window->key >> 8);
    window->regions = NULL;
}

/* Whether the window and the region of a bind allow it, for a queue pair of `pd` (InfiniBand Architecture 10.6.7.2, and
 * rdma_rxe). `region` is NULL if it is not registered. */
static bool may_bind(const struct rdmacm_regions *regions, uint64_t pd, const struct rdmacm_bind *bind,
                     const struct rdmacm_region *region) {
    const struct rdmacm_window *window = bind->window;
    if (!window || window->regions != regions || window->pd != pd || bind->key >> 8 != window->key >> 8)
        return false;
    if (window->is_type_2 ? window->region || !bind->length : bind->access & RDMACM_ACCESS_ZERO_BASED)
        return false;
    if (!bind->length)
        return region || !bind->owner;
    if (!region || region->pd != pd || !(region->access & RDMACM_ACCESS_MW_BIND))
        return false;
    if (bind->access & (RDMACM_ACCESS_REMOTE_WRITE | RDMACM_ACCESS_REMOTE_ATOMIC) &&
        !(region->access & RDMACM_ACCESS_LOCAL_WRITE))
        return false;
    return bind->address >= region->address && bind->length <= region->length &&
           bind->address - region->address <= region->length - bind->length;
}

bool rdmacm_window_bind(struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, const struct rdmacm_bind *bind) {
    struct rdmacm_window *window = bind->window;
    struct rdmacm_region *region = bind->owner ? rdmacm_table_find(&regions->table, bind->region_key) : NULL;
    if (region && region->owner != bind->owner) /* another one has the key now */
        region = NULL;
    if (!may_bind(regions, pd, bind, region))
        return false;
    unbind(window);
    window->key = bind->key;
    if (!region || !bind->length) /* the bind takes its region away */
        return true;
    region->windows++;
    window->region = region;
    window->address = bind->address;
    window->length = bind->length;
    window->access = bind->access;
    window->qp = qp;
    window->number = bind->number;
    return true;
}

bool rdmacm_window_invalidate(struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, uint32_t key) {
    struct rdmacm_window *window = find_bound(regions, pd, key);
    if (!window || !window->is_type_2 || window->qp != qp)
        return false;
    unbind(window);
    return true;
}

void rdmacm_windows_free(struct rdmacm_regions *regions, uint64_t qp) {
    for (size_t i = 0; i < regions->windows.capacity; i++) {
        struct rdmacm_window *window = regions->windows.slots[i].item;
        if (window && window->is_type_2 && window->qp == qp)
            unbind(window);
    }
}

void rdmacm_windows_forget(struct rdmacm_regions *regions) {
    for (size_t i = 0; i < regions->windows.capacity; i++) {
        struct rdmacm_window *window = regions->windows.slots[i].item;
        if (!window)
            continue;
        unbind(window);
        window->regions = NULL;
    }
    rdmacm_table_free(&regions->windows);
}

uint8_t *rdmacm_window_find(const struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, uint32_t key,
                            uint64_t address, uint64_t length, uint32_t access, void **pin) {
    const struct rdmacm_window *window = find_bound(regions, pd, key);
    if (!window || access & ~window->access || (window->is_type_2 && window->qp != qp))
        return NULL;
    uint64_t start = window->access & RDMACM_ACCESS_ZERO_BASED ? 0 : window->address, offset = address - start;
    if (address < start || offset > window->length || length > window->length - offset)
        return NULL;
    const struct rdmacm_region *region = window->region;
    if (pin)
        *pin = region->pin;
    return region->memory + (window->address - region->address) + offset;
}
