/* The queues that queue pairs of all types have. */
#include "rdmacm_core.h"

#include <stdlib.h>
#include <string.h>

enum { LEAST_CAPACITY = 16 };

bool rdmacm_grow(void *place, size_t *capacity, size_t *head, size_t count, size_t more, size_t size) {
    if (more <= *capacity - count)
        return true;
    size_t wanted = *capacity ? *capacity : LEAST_CAPACITY;
    while (wanted - count < more) {
        if (wanted > SIZE_MAX / 2 / size)
            return false;
        wanted *= 2;
    }
    char *grown = malloc(wanted * size), *ring;
    if (!grown)
        return false;
    memcpy(&ring, place, sizeof ring); /* a pointer of any type */
    if (count) {
        size_t first = *capacity - *head < count ? *capacity - *head : count;
        memcpy(grown, ring + *head * size, first * size);
        memcpy(grown + first * size, ring, (count - first) * size);
    }
    free(ring);
    memcpy(place, &grown, sizeof grown);
    *capacity = wanted;
    *head = 0;
    return true;
}

void rdmacm_scatter(const struct rdmacm_memory *memory, uint64_t offset, const uint8_t *data, size_t size) {
    const struct rdmacm_element *element = memory->elements;
    for (; size && offset >= element->length; element++)
        offset -= element->length;
    for (; size; element++, offset = 0) {
        size_t part = element->length - offset < size ? (size_t)(element->length - offset) : size;
        memcpy(element->data + offset, data, part);
        data += part, size -= part;
    }
}

void rdmacm_memory_look_up(struct rdmacm_memory *memory, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey,
                           uint32_t access) {
    for (uint32_t i = 0; i < memory->count; i++) {
        const struct rdmacm_element *element = &memory->elements[i];
        if (element->lkey == lkey && !rdmacm_regions_have(regions, pd, lkey, element->data, element->length, access)) {
            memory->is_inaccessible = true;
            memory->count = 0;
        }
    }
}

/* -- completions ----------------------------------------------------------------------------------------------------- */

/* Have room for those of all that is posted, and of one more. */
static bool reserve_completion(struct rdmacm_queues *queues) {
    size_t head = 0, posted = queues->sends_count + queues->recvs_count + (queues->current_recv.pin != NULL);
    struct rdmacm_completions *completions = &queues->completions;
    return rdmacm_grow(&completions->items, &completions->capacity, &head, completions->count, posted + 1,
                       sizeof *completions->items);
}

struct rdmacm_completion *rdmacm_complete(struct rdmacm_queues *queues, void *pin, uint32_t byte_len) {
    struct rdmacm_completion *completion = &queues->completions.items[queues->completions.count++];
    *completion = (struct rdmacm_completion){.pin = pin, .byte_len = byte_len};
    return completion;
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

static void flush_send(struct rdmacm_queues *queues, const struct rdmacm_send *send, uint8_t status) {
    struct rdmacm_completion *completion = rdmacm_complete(queues, send->pin, 0);
    completion->opcode = send->opcode;
    completion->status = status;
}

bool rdmacm_post_send(struct rdmacm_queues *queues, const struct rdmacm_send *send) {
    if (!reserve_completion(queues))
        return false;
    if (queues->failed || queues->send_failed) {
        flush_send(queues, send, RDMACM_WC_WR_FLUSH_ERR);
        return true;
    }
    if (send->memory.length > RDMACM_LONGEST_MESSAGE || !RDMACM_RING_RESERVE(queues, sends))
        return false;
    *RDMACM_RING_AT(queues, sends, queues->sends_count++) = *send;
    return true;
}

void rdmacm_end_send(struct rdmacm_queues *queues, uint32_t byte_len) {
    const struct rdmacm_send *send = RDMACM_RING_AT(queues, sends, 0);
    struct rdmacm_completion *completion = rdmacm_complete(queues, send->pin, byte_len);
    completion->opcode = send->opcode;
    completion->unsignaled = send->unsignaled;
    RDMACM_RING_DROP(queues, sends);
}

void rdmacm_flush_sends(struct rdmacm_queues *queues, uint8_t status) {
    for (size_t i = 0; i < queues->sends_count; i++) {
        flush_send(queues, RDMACM_RING_AT(queues, sends, i), status);
        status = RDMACM_WC_WR_FLUSH_ERR;
    }
    queues->sends_count = 0;
}

bool rdmacm_post_recv(struct rdmacm_queues *queues, const struct rdmacm_recv *recv) {
    if (queues->srq || queues->transport == RDMACM_XRC || !reserve_completion(queues))
        return false;
    if (queues->failed) {
        rdmacm_flush_recv(queues, recv->pin, RDMACM_WC_WR_FLUSH_ERR);
        return true;
    }
    if (!RDMACM_RING_RESERVE(queues, recvs))
        return false;
    *RDMACM_RING_AT(queues, recvs, queues->recvs_count++) = *recv;
    return true;
}

bool rdmacm_take_recv(struct rdmacm_queues *queues, struct rdmacm_recv *recv) {
    if (queues->srq) { /* nothing had its room when it was posted */
        bool done = reserve_completion(queues) && rdmacm_srq_take(queues->srq, recv);
        queues->has_reached_limit |= queues->srq->is_limit_reached;
        return done;
    }
    if (!queues->recvs_count)
        return false;
    *recv = *RDMACM_RING_AT(queues, recvs, 0);
    RDMACM_RING_DROP(queues, recvs);
    return true;
}

void rdmacm_look_up_again(struct rdmacm_queues *queues, uint32_t lkey) {
    for (size_t i = 0; i < queues->recvs_count; i++)
        rdmacm_recv_look_up(RDMACM_RING_AT(queues, recvs, i), queues->regions, queues->pd, lkey);
}

void rdmacm_revoke(struct rdmacm_queues *queues, uint32_t lkey) {
    rdmacm_look_up_again(queues, lkey);
    rdmacm_recv_look_up(&queues->current_recv, queues->regions, queues->srq ? queues->srq->pd : queues->pd, lkey);
    for (size_t i = 0; i < queues->sends_count; i++) {
        struct rdmacm_send *send = RDMACM_RING_AT(queues, sends, i);
        bool is_written = rdmacm_request_types[send->opcode].flags & (RDMACM_IS_READ | RDMACM_IS_ATOMIC);
        rdmacm_memory_look_up(&send->memory, queues->regions, queues->pd, lkey,
                              is_written ? RDMACM_ACCESS_LOCAL_WRITE : 0);
    }
}

/* -- the end --------------------------------------------------------------------------------------------------------- */

void rdmacm_flush_recv(struct rdmacm_queues *queues, void *pin, uint8_t status) {
    struct rdmacm_completion *completion = rdmacm_complete(queues, pin, 0);
    completion->is_recv = true;
    completion->status = status;
    completion->srqn = (uint32_t)queues->srqn;
}

void rdmacm_flush_current(struct rdmacm_queues *queues, uint8_t status) {
    if (queues->current_recv.pin)
        rdmacm_flush_recv(queues, queues->current_recv.pin, status);
    queues->current_recv = (struct rdmacm_recv){0};
}

void rdmacm_flush_recvs(struct rdmacm_queues *queues) {
    rdmacm_flush_current(queues, RDMACM_WC_WR_FLUSH_ERR);
    for (size_t i = 0; i < queues->recvs_count; i++)
        rdmacm_flush_recv(queues, RDMACM_RING_AT(queues, recvs, i)->pin, RDMACM_WC_WR_FLUSH_ERR);
    queues->recvs_count = 0;
}

void rdmacm_queues_free(struct rdmacm_queues *queues) {
    free(queues->sends), free(queues->recvs), free(queues->completions.items);
    queues->sends = NULL, queues->recvs = NULL;
    queues->sends_capacity = queues->recvs_capacity = queues->sends_count = queues->recvs_count = 0;
    queues->completions = (struct rdmacm_completions){0};
}
