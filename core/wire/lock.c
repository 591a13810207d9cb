/* The lock of a runtime, the mutex of the core, and the queues of completions. */
#include "rdmacm_wire.h"

#include <stdio.h>
#include <stdlib.h>

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

bool rdmacm_lock_release(struct rdmacm_lock *lock) {
    if (!is_mine(lock))
        return false;
    if (!--lock->depth) {
        atomic_store_explicit(&lock->owner, 0, memory_order_relaxed);
        pthread_mutex_unlock(&lock->mutex);
    }
    return true;
}

/* -- the mutex ------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t core_mutex = PTHREAD_MUTEX_INITIALIZER;

#ifdef RDMACM_CHECKS
static _Thread_local bool is_inside;

static void set_inside(bool inside) {
    if (is_inside == inside) {
        fprintf(stderr, "rdmacm: the mutex of the core is %s\n", inside ? "taken twice" : "given back twice");
        abort();
    }
    is_inside = inside;
}

void rdmacm_check_outside(const char *where) {
    if (is_inside) {
        fprintf(stderr, "rdmacm: %s with the mutex of the core\n", where);
        abort();
    }
}
#else
static void set_inside(bool inside) { (void)inside; }
#endif

void rdmacm_enter(void) {
    pthread_mutex_lock(&core_mutex);
    set_inside(true);
}

bool rdmacm_try_enter(void) {
    if (pthread_mutex_trylock(&core_mutex))
        return false;
    set_inside(true);
    return true;
}

void rdmacm_leave(void) {
    set_inside(false);
    pthread_mutex_unlock(&core_mutex);
}

void rdmacm_mutex_init(void) {
    static bool is_done;
    if (!is_done)
        pthread_atfork(rdmacm_enter, rdmacm_leave, rdmacm_leave);
    is_done = true;
}

/* -- completion queues ----------------------------------------------------------------------------------------------- */

static struct rdmacm_entry *entry_at(struct rdmacm_cq *cq, size_t index) {
    return &cq->entries[(cq->head + index) & (cq->capacity - 1)];
}

static void set_count(struct rdmacm_cq *cq, size_t count) { __atomic_store_n(&cq->count, count, __ATOMIC_RELAXED); }

bool rdmacm_cq_push(struct rdmacm_cq *cq, const struct rdmacm_entry *entry) {
    if (!rdmacm_grow(&cq->entries, &cq->capacity, &cq->head, cq->count, 1, sizeof *cq->entries))
        return false;
    *entry_at(cq, cq->count) = *entry;
    set_count(cq, cq->count + 1);
    return true;
}

size_t rdmacm_cq_take(struct rdmacm_cq *cq, struct rdmacm_entry *entries, size_t most) {
    size_t count = 0;
    for (; count < cq->count && count < most; count++)
        entries[count] = *entry_at(cq, count);
    if (count)
        cq->head = (cq->head + count) & (cq->capacity - 1);
    set_count(cq, cq->count - count);
    return count;
}

size_t rdmacm_cq_remove(struct rdmacm_cq *cq, uint32_t qp_num, struct rdmacm_entry *removed, size_t most) {
    size_t kept = 0, count = 0;
    for (size_t i = 0; i < cq->count; i++) {
        const struct rdmacm_entry *entry = entry_at(cq, i);
        if (count < most && entry->qp_num == qp_num)
            removed[count++] = *entry;
        else
            *entry_at(cq, kept++) = *entry;
    }
    set_count(cq, kept);
    return count;
}

void rdmacm_cq_free(struct rdmacm_cq *cq) { free(cq->entries); }
