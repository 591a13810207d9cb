/* The lock of a port, and the queues of completions. */
#include "rdmacm_port.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Its address stands for the thread. */
static _Thread_local char this_thread;

bool rdmacm_lock_init(struct rdmacm_lock *lock) {
    atomic_init(&lock->owner, 0);
    lock->depth = 0;
    return !pthread_mutex_init(&lock->mutex, NULL);
}

void rdmacm_lock_destroy(struct rdmacm_lock *lock) { pthread_mutex_destroy(&lock->mutex); }

static bool is_mine(const struct rdmacm_lock *lock) {
    return atomic_load_explicit(&lock->owner, memory_order_relaxed) == (uintptr_t)&this_thread;
}

static void taken(struct rdmacm_lock *lock) {
    atomic_store_explicit(&lock->owner, (uintptr_t)&this_thread, memory_order_relaxed);
    lock->depth = 1;
}

bool rdmacm_lock_try(struct rdmacm_lock *lock) {
    if (is_mine(lock)) {
        lock->depth++;
        return true;
    }
    if (pthread_mutex_trylock(&lock->mutex))
        return false;
    taken(lock);
    return true;
}

void rdmacm_lock_take(struct rdmacm_lock *lock) {
    if (!rdmacm_lock_try(lock)) {
        pthread_mutex_lock(&lock->mutex);
        taken(lock);
    }
}

bool rdmacm_lock_take_soon(struct rdmacm_lock *lock) {
    if (rdmacm_lock_try(lock))
        return true;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    if (pthread_mutex_timedlock(&lock->mutex, &until))
        return false;
    taken(lock);
    return true;
}

bool rdmacm_lock_release(struct rdmacm_lock *lock) {
    if (!is_mine(lock))
        return false;
    if (!--lock->depth) {
        atomic_store_explicit(&lock->owner, 0, memory_order_relaxed);
        pthread_mutex_unlock(&lock->mutex);
    }
    return true;
}

/* -- completion queues ----------------------------------------------------------------------------------------------- */

enum { LEAST_ENTRIES = 16 };

struct rdmacm_entry *rdmacm_cq_at(struct rdmacm_cq *cq, size_t index) {
    return &cq->entries[(cq->head + index) & (cq->capacity - 1)];
}

bool rdmacm_cq_push(struct rdmacm_cq *cq, const struct rdmacm_entry *entry) {
    if (cq->count == cq->capacity) {
        size_t capacity = cq->capacity ? 2 * cq->capacity : LEAST_ENTRIES;
        struct rdmacm_entry *entries = malloc(capacity * sizeof *entries);
        if (!entries)
            return false;
        for (size_t i = 0; i < cq->count; i++)
            entries[i] = *rdmacm_cq_at(cq, i);
        free(cq->entries);
        cq->entries = entries;
        cq->capacity = capacity;
        cq->head = 0;
    }
    cq->entries[(cq->head + cq->count) & (cq->capacity - 1)] = *entry;
    cq->count++;
    return true;
}

void rdmacm_cq_pop(struct rdmacm_cq *cq) {
    cq->head = (cq->head + 1) & (cq->capacity - 1);
    cq->count--;
}

void rdmacm_cq_free(struct rdmacm_cq *cq) {
    free(cq->entries);
    cq->entries = NULL;
    cq->capacity = cq->head = cq->count = 0;
}
