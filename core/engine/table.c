/* Hash tables with linear probing. */
#include "rdmacm_core.h"

#include <stdlib.h>

enum { LEAST_CAPACITY = 16 };

/* Have room for one more item. */
static bool reserve(struct rdmacm_table *table) {
    if (2 * (table->count + 1) <= table->capacity)
        return true;
    struct rdmacm_table grown = {.capacity = table->capacity ? 2 * table->capacity : LEAST_CAPACITY};
    grown.slots = calloc(grown.capacity, sizeof *grown.slots);
    if (!grown.slots)
        return false;
    for (size_t i = 0; i < table->capacity; i++)
        if (table->slots[i].item)
            *rdmacm_table_slot(&grown, table->slots[i].key) = table->slots[i];
    grown.count = table->count;
    free(table->slots);
    *table = grown;
    return true;
}

bool rdmacm_table_add(struct rdmacm_table *table, uint32_t key, void *item) {
    if (rdmacm_table_find(table, key) || !reserve(table))
        return false;
    *rdmacm_table_slot(table, key) = (struct rdmacm_slot){.item = item, .key = key};
    table->count++;
    return true;
}

void *rdmacm_table_remove(struct rdmacm_table *table, uint32_t key) {
    void *item = rdmacm_table_find(table, key);
    if (!item)
        return NULL;
    struct rdmacm_slot *slots = table->slots;
    size_t mask = table->capacity - 1, hole = (size_t)(rdmacm_table_slot(table, key) - slots);
    /* Close the gap: a later one moves there unless its home is between the gap and its slot. */
    for (size_t at = (hole + 1) & mask; slots[at].item; at = (at + 1) & mask) {
        if (((at - rdmacm_table_home(table, slots[at].key)) & mask) >= ((at - hole) & mask)) {
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole].item = NULL;
    table->count--;
    return item;
}

void rdmacm_table_free(struct rdmacm_table *table) {
    free(table->slots);
    *table = (struct rdmacm_table){0};
}
